"""Converting a checkpoint: what is written, and how far it agrees with the weights that it was made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from convert_pair import convert, main, measure_agreement
from llama_onnx import WeightsDtype, create_random_weights
from llm_spec_onnx.model import OnnxModel
from safetensors.numpy import save_file
from support.tiny_models import BUILTIN, TINY

PROMPTS = ("def area(radius):", "import json", "for i in range(3):")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Hugging Face folder with a tiny random Llama and the built-in tokenizer."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(BUILTIN / "draft", folder, ignore=shutil.ignore_patterns("model.onnx"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "vocab_size": TINY.vocab_size,
        "hidden_size": TINY.hidden_size,
        "intermediate_size": TINY.intermediate_size,
        "num_hidden_layers": TINY.num_layers,
        "num_attention_heads": TINY.num_heads,
        "num_key_value_heads": TINY.num_kv_heads,
        "head_dim": TINY.head_dim,
        "max_position_embeddings": TINY.max_positions,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(create_random_weights(TINY, 0), folder / "model.safetensors")
    return folder


def test_the_result_says_how_far_it_agrees(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the screen and beside the model, by the prompts that are given."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    main([str(checkpoint), str(tmp_path / "out"), "--prompts", str(tmp_path / "prompts.txt")])
    conversion = json.loads((tmp_path / "out" / "conversion.json").read_text())
    told = conversion["agreement_with_fp32"]
    assert conversion["weights"] == "q8"
    assert told["num_prompts"] == len(PROMPTS)
    assert told["share"] == told["num_same_tokens"] / told["num_tokens"] > 0.5
    line = f"{100 * told['share']:.1f} % of {told['num_tokens']} greedy tokens are those of float32, "
    assert line + f"{told['num_same_answers']} of 3 answers in whole" in capsys.readouterr().out
    assert OnnxModel(tmp_path / "out").vocab_size == TINY.vocab_size


@pytest.mark.parametrize("weights_dtype", ["fp32", "fp16", "q8", "int8", "q4"])
def test_what_is_compared_is_the_model_that_was_written(
    checkpoint: Path, tmp_path: Path, weights_dtype: WeightsDtype
) -> None:
    """The same weights agree in all, compressed ones in most, and others hardly ever."""
    found = convert(checkpoint, tmp_path / "out", cache="shared", weights_dtype=weights_dtype, prompts=PROMPTS)
    assert found is not None
    assert found.share == 1.0 if weights_dtype == "fp32" else found.share > 0.5
    save_file(create_random_weights(TINY, 1), checkpoint / "model.safetensors")
    convert(checkpoint, tmp_path / "other", cache="shared", weights_dtype="fp32", prompts=PROMPTS)
    assert measure_agreement(tmp_path / "other", tmp_path / "out", PROMPTS).share < 0.2


def test_a_table_compares_all_kinds_of_weights(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind once, float32 first and in full agreement with itself; smaller weights take less room."""
    main([str(checkpoint), "--compare"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == ["fp32", "int8", "fp16", "q8", "q4"]
    assert rows[0][-1] == "100.0 % (10 of 10)"
    assert all(float(cell) > 0 for row in rows for cell in row[2:4])


def test_without_a_folder_there_is_nothing_to_write(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says what to give."""
    with pytest.raises(SystemExit):
        main([str(checkpoint)])
    assert "give a folder to write, or --compare" in capsys.readouterr().err
