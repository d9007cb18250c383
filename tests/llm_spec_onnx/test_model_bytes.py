"""Matrices of few bits compute in 8-bit integers unless the export says otherwise; linked weights are found."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from llm_spec_onnx.model import OnnxModel
from llm_spec_onnx.model_bytes import read_model_bytes
from onnx import helper
from support.tiny_models import MakeFolder

from llm_spec.contract.errors import ModelLoadError


def set_levels(path: Path, levels: list[int | None]) -> onnx.ModelProto:
    """Give the model's MatMulNBits these levels in turn, and save it; None: no attribute."""
    model = onnx.load(path)
    nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    for number, node in enumerate(nodes):
        kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
        level = levels[number % len(levels)]
        del node.attribute[:]
        node.attribute.extend(kept + ([] if level is None else [helper.make_attribute("accuracy_level", level)]))
    onnx.save(model, path)
    return model


def read_levels(model: onnx.ModelProto) -> list[int | None]:
    return [
        next((attribute.i for attribute in node.attribute if attribute.name == "accuracy_level"), None)
        for node in model.graph.node
        if node.op_type == "MatMulNBits"
    ]


@pytest.mark.parametrize("weights", ["q4", "q8"])
def test_an_unset_accuracy_becomes_that_of_integers(make_folder: MakeFolder, weights: str) -> None:
    """And nothing else of the model changes."""
    path = make_folder("concat", weights) / "model.onnx"
    set_levels(path, [None, 0])
    rewritten, folder = read_model_bytes(path)
    assert folder == path.parent
    assert rewritten is not None
    model = onnx.load_from_string(rewritten)
    assert set(read_levels(model)) == {4}
    onnx.checker.check_model(model)
    expected = set_levels(path, [4])
    assert model == expected


def test_an_export_that_says_how_it_computes_is_left_alone(make_folder: MakeFolder) -> None:
    path = make_folder("concat", "q4") / "model.onnx"
    set_levels(path, [1, None])
    rewritten, folder = read_model_bytes(path)
    assert folder == path.parent
    assert rewritten is not None
    assert set(read_levels(onnx.load_from_string(rewritten))) == {1, 4}
    set_levels(path, [1])
    assert read_model_bytes(path) == (None, path.parent)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_other_models_are_not_rewritten(make_folder: MakeFolder, weights: str) -> None:
    path = make_folder("concat", weights) / "model.onnx"
    assert read_model_bytes(path) == (None, path.parent)


@pytest.mark.parametrize("content", [b"", b"\xff" * 12, b"\x0b", b"\x3a\x05ab", b"\x3a", b"\x09123"])
def test_what_is_no_protobuf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"empty file|beginning of a|cut short"):
        read_model_bytes(path)


def save_apart(path: Path, location: str) -> None:
    """With the weights in another file."""
    onnx.save(onnx.load(path), path, save_as_external_data=True, location=location, size_threshold=99)


def test_weights_behind_links_are_found(make_folder: MakeFolder, tmp_path: Path) -> None:
    """As in the hub's cache: each file is a link, all to one folder, in which they have other names."""
    source, stored = make_folder("concat", "fp32"), tmp_path / "stored"
    expected = OnnxModel(source).open().forward([1, 2, 3], num_rows=3)
    save_apart(source / "model.onnx", "model.onnx_data")
    shutil.move(source, stored)
    source.mkdir()
    for path in list(stored.iterdir()):
        kept = path.rename(stored / f"{path.name}-hashed")
        (source / path.name).symlink_to(kept)
    assert np.array_equal(OnnxModel(source).open().forward([1, 2, 3], num_rows=3), expected)


def test_no_file_elsewhere_is_read_for_a_model(make_folder: MakeFolder, tmp_path: Path) -> None:
    """A name with a path in it stays for onnxruntime to refuse, be there links or not."""
    source = make_folder("concat", "fp32")
    save_apart(source / "model.onnx", "model.onnx_data")
    (tmp_path / "secret").mkdir()
    shutil.move(source / "model.onnx_data", tmp_path / "secret" / "file")
    (tmp_path / "link").symlink_to(tmp_path / "secret" / "file")
    model = onnx.load(source / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../link" if entry.key == "location" else entry.value
    onnx.save(model, source / "model.onnx")
    assert read_model_bytes(source / "model.onnx") == (None, source)
    with pytest.raises(ModelLoadError, match="is not a model that onnxruntime"):
        OnnxModel(source)
