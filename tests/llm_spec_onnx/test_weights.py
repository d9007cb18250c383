"""Which weights are read, of a folder and of a repository of the hub laid out as those of onnx-community are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from llm_spec_onnx import OnnxProvider
from llm_spec_onnx.model import OnnxModel
from llm_spec_onnx.weights import find_weights_file
from support.hub import HubDouble, use_hub
from support.tiny_models import MakeFolder

from llm_spec import ChatRequest, ConfigError
from llm_spec.contract.errors import ModelLoadError
from llm_spec.decoder.entry_points import open_provider
from llm_spec.kit.model_folder.hub import fetch_from_hub, show_fetches_on

NAME = "onnx-community/Tiny-Instruct"
TEXTS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


class Display:
    def __init__(self) -> None:
        self.lines = list[str]()

    def change_line(self, line: str) -> None:
        pass

    def print_line(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def repository(make_folder: MakeFolder, tmp_path: Path) -> dict[str, bytes | Path]:
    """Float32 weights in a file of their own, 4-bit ones in the model's, as published; the tokenizer beside config."""
    source, folder = make_folder("concat", "q4"), tmp_path / "onnx"
    folder.mkdir()
    shutil.copyfile(source / "model.onnx", folder / "model_q4.onnx")
    whole = onnx.load(make_folder("concat", "fp32") / "model.onnx")
    onnx.save(whole, folder / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=99)
    files: dict[str, bytes | Path] = {name: source / name for name in TEXTS if (source / name).is_file()}
    files |= {f"onnx/{path.name}": path for path in folder.iterdir()}
    return files | {"onnx/model_int8.onnx": b"8 bits", "onnx/model_fp16.onnx": b"16 bits", "README.md": b"A model"}


@pytest.fixture
def hub(repository: dict[str, bytes | Path], tmp_path: Path) -> Iterator[HubDouble]:
    others = {"org/texts": dict.fromkeys(TEXTS, b"{}"), "org/no-tokenizer": dict(repository)}
    del others["org/no-tokenizer"]["tokenizer.json"]
    with HubDouble({NAME: repository} | others) as hub, use_hub(hub, tmp_path / "cache"):
        yield hub


def list_fetched_weights(hub: HubDouble) -> set[str]:
    return {path for path in hub.sent if path.startswith("onnx/")}


def test_the_weights_that_did_best_are_fetched(hub: HubDouble) -> None:
    """And the program is told which they are, why, and what else there is."""
    display = Display()
    with show_fetches_on(display):
        model = OnnxModel(NAME)
    assert list_fetched_weights(hub) == {"onnx/model_q4.onnx"}
    (line,) = display.lines
    assert line.startswith(f"{NAME}: model_q4.onnx, 0 MB. Measured with SmolLM2-135M-Instruct, q4 is ")
    assert line.endswith(" % of places. Others: ?weights=fp16|fp32|int8")
    assert (model.name, model.same_text) == (f"onnx:{NAME}", True)


async def test_a_repository_answers_as_its_folder_does(hub: HubDouble, tmp_path: Path) -> None:
    """By the spec that a user writes; its weights are in two files, which the cache has behind links."""
    request = ChatRequest.create("def read(path):", max_tokens=12)
    answers = list[str]()
    for spec in (f"onnx:{NAME}?weights=fp32", f"onnx:{tmp_path / 'concat-fp32-0'}"):
        provider = open_provider(spec)
        answers.append((await provider.complete(request)).content)
        await provider.aclose()
    assert list_fetched_weights(hub) == {"onnx/model.onnx", "onnx/model.onnx_data"}
    assert answers[0] == answers[1] != ""


def test_chosen_weights_are_not_explained(hub: HubDouble) -> None:
    display = Display()
    with show_fetches_on(display):
        OnnxModel(NAME, weights="fp32")
    assert display.lines == [f"{NAME}: model.onnx, 1 MB"]
    assert list_fetched_weights(hub) == {"onnx/model.onnx", "onnx/model.onnx_data"}


def test_without_the_hub_the_cached_weights_are_read(hub: HubDouble, tmp_path: Path) -> None:
    """Those of a kind that was chosen once, too, where no other is there."""
    OnnxProvider(NAME, weights="fp32")
    sent = dict(hub.sent)
    with use_hub(hub, tmp_path / "cache") as patched:
        patched.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        OnnxProvider(NAME)
    assert hub.sent == sent


@pytest.mark.parametrize("weights", [None, "q4"])
def test_without_the_hub_other_weights_are_not_there(hub: HubDouble, tmp_path: Path, weights: str | None) -> None:
    """Rather than that the repository does not have them."""
    if weights:
        OnnxModel(NAME, weights="fp32")
    else:
        fetch_from_hub(NAME, lambda _: ["README.md"])
    with use_hub(hub, tmp_path / "cache") as patched:
        patched.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(
            ModelLoadError, match=r"onnx-community/.* is not cached in whole, and HF_HUB_OFFLINE is set"
        ):
            OnnxModel(NAME, weights=weights)


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        (NAME, "q8", r"onnx-community/Tiny-Instruct has no weights 'q8'; it has fp16, fp32, int8, q4"),
        (
            "org/texts",
            None,
            r"org/texts has no ONNX export .* onnx-community/texts or .* torch:org/texts reads the",
        ),
        ("org/no-tokenizer", None, r"org/no-tokenizer of the Hugging Face hub has no tokenizer\.json"),
        ("org/nothing", None, r"org/nothing of the Hugging Face hub does not exist there, or is private"),
        (NAME, "int8", r"model_int8\.onnx is not a model that onnxruntime"),
        ("/no/such/folder", None, r"model folder /no/such/folder does not exist; give a folder with model\.onnx in it"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_is_not_there_is_one_clear_error(model: str, weights: str | None, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        OnnxModel(model, weights=weights)


@pytest.mark.parametrize("size", [0, 1, 5000, -1])
def test_weights_that_are_cut_short(make_folder: MakeFolder, size: int) -> None:
    path = make_folder("concat", "q4") / "model.onnx"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"model\.onnx is not a model that onnxruntime"):
        OnnxModel(path.parent)


def make_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "weights", "chosen"),
    [
        (["model.onnx"], None, "model.onnx"),
        (["onnx/model.onnx", "onnx/model_fp16.onnx"], None, "onnx/model.onnx"),
        (["onnx/model.onnx", "onnx/model_q4f16.onnx"], None, "onnx/model_q4f16.onnx"),
        (["onnx/model.onnx", "onnx/model_q4f16.onnx", "onnx/model_q4.onnx"], None, "onnx/model_q4.onnx"),
        (["onnx/model_q4.onnx", "model.onnx"], "fp32", "model.onnx"),
        (["onnx/model.onnx", "model.onnx"], None, "model.onnx"),
        (["onnx/model_new.onnx", "onnx/model_other.onnx"], None, "onnx/model_new.onnx"),
        (["onnx/model_new.onnx", "onnx/model_other.onnx"], "other", "onnx/model_other.onnx"),
    ],
)
def test_one_rule_for_folders_and_repositories(
    tmp_path: Path, names: list[str], weights: str | None, chosen: str
) -> None:
    folder = make_files(tmp_path, *names)
    assert find_weights_file(folder, weights) == (folder, folder / chosen)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no model\.onnx or onnx/model\.onnx"):
        find_weights_file(make_files(tmp_path, "encoder.onnx"), None)


def test_a_server_is_not_a_model() -> None:
    with pytest.raises(ConfigError, match=r"onnx takes a folder or a Hugging Face name"):
        open_provider("onnx:")


def test_weights_in_a_file_of_their_own(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Also where the model's file is rewritten when it is loaded: 4-bit matrices that do not say how to compute."""
    source = make_folder("concat", "q4")
    model = onnx.load(source / "model.onnx")
    for node in model.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
    folder = tmp_path / "apart"
    shutil.copytree(source, folder)
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=99)
    rows = [OnnxModel(path).open().forward([1, 2, 3, 4], num_rows=4) for path in (source, folder)]
    assert np.array_equal(rows[0], rows[1])
