"""OnnxModel: any Hugging Face export with a key-value cache, and one clear error for anything else."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import llm_spec_onnx.model as model_module
import numpy as np
import onnx
import pytest
from llama_onnx import CacheKind, WeightsDtype
from llm_spec_onnx.model import OnnxModel
from llm_spec_onnx.sessions import LoadedOnnxModel
from onnx import TensorProto, helper
from support.tiny_models import BUILTIN, MakeFolder

from llm_spec import ConfigError
from llm_spec.contract.errors import ModelLoadError
from llm_spec.contract.token_model import PrefixReusingSession, TokenSession
from llm_spec.local.caches import PREFILL_CHUNK_TOKENS, prefill_prompt
from llm_spec.testing import check_token_model_conformance


def read_in_steps(session: TokenSession, token_ids: list[int], steps: list[int]) -> np.ndarray:
    rows: list[np.ndarray] = []
    for step in steps:
        rows.append(np.array(session.forward(token_ids[:step], num_rows=step)))
        token_ids = token_ids[step:]
    return np.concatenate(rows)


def test_prompts_of_many_lengths_keep_no_memory(make_folder: MakeFolder) -> None:
    """The rest of a prompt may have any width; only passes as wide as rounds stay bound to their buffers."""
    model = OnnxModel(make_folder())
    session = model.open()
    for width in range(1, 100):
        session.truncate(0)
        session.forward([1] * width, num_rows=1)
    assert len(session._buffers.calls) < 40  # type: ignore[attr-defined]


def test_a_cache_that_could_not_grow_is_what_it_was(make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that ran out is one request's fault: the next one that has these buffers reads what it should."""
    model, token_ids = OnnxModel(make_folder()), [5] * 20
    with closing(model.open()) as session:
        expected = session.forward(token_ids, num_rows=1).copy()
        with monkeypatch.context() as patched:
            patched.setattr(LoadedOnnxModel, "make_empty_cache", exhausted)
            with pytest.raises(MemoryError):
                session.forward([7] * 600, num_rows=1)
    with closing(model.open()) as session:
        assert np.array_equal(session.forward(token_ids, num_rows=1), expected)


def exhausted(*_: object) -> None:
    raise MemoryError


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two of them, on which two threads are faster."""
    monkeypatch.setattr("llm_spec_onnx.model.count_usable_cores", lambda: 2)
    monkeypatch.setattr("llm_spec_onnx.model._MIN_GAIN", np.inf)


def count_threads(model: OnnxModel) -> int:
    """Of the next pass of a target."""
    options = model._target_threads.choose_graph().session.get_session_options()
    return int(options.intra_op_num_threads)


@pytest.mark.usefixtures("two_cores")
def test_an_answer_alone_has_several_threads(make_folder: MakeFolder) -> None:
    """Two answers have one each; a draft has one. All of them read the same bits, also where that changes midway."""
    folder = make_folder()
    model = OnnxModel(folder, threads=0)
    token_ids = [int(t) for t in np.random.default_rng(3).integers(0, model.vocab_size, 30)]
    expected = read_in_steps(OnnxModel(folder, threads=1).open(), token_ids, [20, 4, 6])
    draft = model.open(exact=False)
    first = model.open()
    assert count_threads(model) == 2
    rows = [read_in_steps(first, token_ids[:20], [20])]
    second = model.open()
    assert count_threads(model) == 1
    rows.append(read_in_steps(first, token_ids[20:24], [4]))
    second.close()
    second.close()
    assert count_threads(model) == 2
    rows.append(read_in_steps(first, token_ids[24:], [6]))
    assert np.array_equal(np.concatenate(rows), expected)
    first.close()
    draft.close()
    check_token_model_conformance(model)


@pytest.mark.usefixtures("two_cores")
def test_a_cache_that_grows_has_one_thread(make_folder: MakeFolder) -> None:
    """Several would read a long context in another order; who asks for them has no promise of the same text."""
    folder = make_folder("concat")
    model = OnnxModel(folder, threads=0)
    assert (count_threads(model), model.same_text) == (1, True)
    assert not OnnxModel(folder, threads=2).same_text
    assert OnnxModel(folder, threads=1).same_text


@pytest.mark.usefixtures("two_cores")
def test_several_threads_are_not_used_where_their_bits_differ(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, other = model_module._load_onnx_model, OnnxModel(make_folder(seed=5), threads=1)._graph
    monkeypatch.setattr(
        model_module, "_load_onnx_model", lambda *given: right(*given) if given[-1] == 1 else replace(other)
    )
    model = OnnxModel(make_folder(), threads=0)
    assert model._target_threads.parallel is None


@pytest.mark.parametrize("cache", ["shared", "concat"])
def test_conforms(make_folder: MakeFolder, cache: CacheKind) -> None:
    """Both kinds of cache keep every promise of a token model, rows independent of the width among them."""
    model = OnnxModel(make_folder(cache))
    assert model.same_text
    check_token_model_conformance(model)


def test_conforms_with_own_attention_and_a_cache_that_grows(make_folder: MakeFolder) -> None:
    """Exports with GroupQueryAttention that do not say that past and present may be one buffer."""
    folder = make_folder("shared", "q4")
    export = onnx.load(folder / "model.onnx")
    del export.metadata_props[:]
    onnx.save(export, folder / "model.onnx")
    model = OnnxModel(folder)
    assert (model._shared, model.same_text) == (False, True)
    check_token_model_conformance(model)


def test_builtin_conforms(builtin_target: OnnxModel) -> None:
    """The model that counts keeps them too."""
    assert builtin_target.same_text
    check_token_model_conformance(builtin_target)


def test_both_caches_compute_the_same_model(make_folder: MakeFolder) -> None:
    """A graph with onnxruntime's own attention and one in plain operators agree up to rounding."""
    token_ids = list(range(100, 140))
    rows = [
        read_in_steps(OnnxModel(make_folder(cache)).open(), token_ids, [20, 1, 5, 14]) for cache in ("shared", "concat")
    ]
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-4)


@pytest.mark.parametrize(("weights_dtype", "tolerance"), [("fp16", 0.05), ("int8", 0.05), ("q8", 0.05), ("q4", 0.3)])
def test_compressed_weights(make_folder: MakeFolder, weights_dtype: WeightsDtype, tolerance: float) -> None:
    """Weights stored in fewer bits give nearly the logits of the full ones."""
    token_ids = list(range(100, 110))
    exact, compressed = (
        OnnxModel(make_folder(weights_dtype=dtype)).open().forward(token_ids, num_rows=10).copy()
        for dtype in ("fp32", weights_dtype)
    )
    assert np.abs(exact - compressed).max() < tolerance * np.abs(exact).max()


def test_grows_beyond_its_first_buffer(make_folder: MakeFolder) -> None:
    """A conversation longer than the buffer moves to a larger one and keeps what was read."""
    model = OnnxModel(make_folder("shared"))
    token_ids = [int(t) for t in np.random.default_rng(0).integers(0, 4096, 700)]
    whole, stepwise = model.open(), model.open()
    expected = whole.forward(token_ids, num_rows=1).copy()
    for start in range(0, 650, 50):
        stepwise.forward(token_ids[start : start + 50], num_rows=1)
    np.testing.assert_allclose(stepwise.forward(token_ids[650:], num_rows=1), expected, atol=1e-4)


@pytest.mark.parametrize("num_before", [400, 700])
def test_the_next_turn_reads_only_what_is_new(make_folder: MakeFolder, num_before: int) -> None:
    """Whole chunks of a prompt are taken over with their bits, also from a buffer that has grown; by drafts, all."""
    folder = make_folder("shared")
    model, other = OnnxModel(folder), OnnxModel(folder)
    token_ids = [int(t) for t in np.random.default_rng(1).integers(0, 4096, 1000)]
    turn = [*token_ids[:390], *token_ids[700:750]]

    def read_turn(model: OnnxModel, num_reused: int, *, exact: bool) -> np.ndarray:
        with closing(model.open(exact=exact)) as session:
            assert isinstance(session, PrefixReusingSession)
            assert session.reuse_prefix(turn) == num_reused
            for start in range(num_reused, len(turn), PREFILL_CHUNK_TOKENS):
                session.forward(turn[start : start + PREFILL_CHUNK_TOKENS], num_rows=1)
            return session.forward(token_ids[750:754], num_rows=4).copy()

    with closing(model.open()) as session:
        prefill_prompt(session, token_ids[:num_before])
        session.forward(token_ids[num_before : num_before + 3], num_rows=1)
    again = read_turn(model, PREFILL_CHUNK_TOKENS, exact=True)
    assert np.array_equal(again, read_turn(other, 0, exact=True))
    np.testing.assert_allclose(read_turn(other, len(turn), exact=False), again, atol=1e-4)


@pytest.mark.parametrize("exact", [True, False])
def test_another_prompt_takes_the_buffers_that_are_there(make_folder: MakeFolder, exact: bool) -> None:
    """Their passes are bound, which takes longer than a round; more are made for answers at once alone."""
    model = OnnxModel(make_folder("shared"))
    used: list[object] = []
    for token_id in (5, 6, 7):
        with closing(model.open(exact=exact)) as session:
            assert isinstance(session, PrefixReusingSession)
            assert session.reuse_prefix([token_id] * 40) == 0
            session.forward([token_id] * 40, num_rows=1)
            used.append(session._buffers)  # type: ignore[attr-defined]
    assert used[0] is used[1] is used[2]


def test_unpadded_plain_steps_are_for_the_asking(make_folder: MakeFolder) -> None:
    """`exact=False` gives up the same-text promise and says so."""
    assert not OnnxModel(make_folder(), exact=False).same_text


def test_rows_that_depend_on_the_width_are_found_out() -> None:
    """The check at load sees single rows that were not padded."""
    model = OnnxModel(BUILTIN / "target", exact=False)
    assert not any(model._has_agreeing_rows(width) for width in (2, 8, 32))  # pyright: ignore[reportPrivateUsage]


class TestBrokenFolders:
    """Each broken folder is one error line that names the file."""

    def test_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"nowhere does not exist"):
            OnnxModel(tmp_path / "nowhere")

    def test_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"has no model\.onnx or onnx/model\.onnx"):
            OnnxModel(tmp_path)

    def test_no_tokenizer(self, make_folder: MakeFolder) -> None:
        folder = make_folder()
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
            OnnxModel(folder)

    @pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json", "model.onnx"])
    def test_cut_off_file(self, make_folder: MakeFolder, name: str) -> None:
        folder = make_folder()
        path = folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ModelLoadError, match=name):
            OnnxModel(folder)

    def test_tokenizer_of_another_model(self, make_folder: MakeFolder) -> None:
        folder = make_folder()
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"]["far"] = 5000
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(ModelLoadError, match="belong to different models"):
            OnnxModel(folder)

    def test_export_without_cache(self, make_folder: MakeFolder) -> None:
        folder = make_folder()
        ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, (1, "length"))
        out = helper.make_tensor_value_info("logits", TensorProto.INT64, (1, "length"))
        graph = helper.make_graph([helper.make_node("Identity", ["input_ids"], ["logits"])], "g", [ids], [out])
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
        )
        with pytest.raises(ModelLoadError, match="not exported as a decoder with a key-value cache"):
            OnnxModel(folder)

    def test_threads(self, make_folder: MakeFolder) -> None:
        with pytest.raises(ConfigError, match="threads is -1"):
            OnnxModel(make_folder(), threads=-1)
