"""The table by which weights are chosen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from compare_onnx_weights import main
from support.tiny_models import write_tiny_model


def test_each_kind_is_compared_with_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder laid out as a repository of the hub."""
    write_tiny_model(tmp_path / "fp32", "concat", "fp32", 0)
    write_tiny_model(tmp_path / "q4", "concat", "q4", 0)
    folder = tmp_path / "fp32"
    (folder / "onnx").mkdir()
    (folder / "model.onnx").rename(folder / "onnx" / "model.onnx")
    shutil.copyfile(tmp_path / "q4" / "model.onnx", folder / "onnx" / "model_q4.onnx")
    main([str(folder)])
    _, _, first, second = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (first, second)]
    assert [row[0] for row in rows] == ["`fp32`", "`q4`"]
    assert (rows[0][-2], rows[0][-1], rows[1][-1]) == ("100.0 %", "yes", "yes")
    assert rows[1][-2] != "100.0 %"
