"""Reads files of a model folder, with one clear error for each missing or broken file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from llm_spec.contract.errors import ModelLoadError

__all__ = ["find_file", "read_json", "read_text_file"]


def find_file(folder: Path, *names: str) -> Path:
    """Return the first of `names` that is in the folder; raises ModelLoadError if none is."""
    if not folder.is_dir():
        raise ModelLoadError(f"model folder {folder} does not exist; give a folder with {names[0]} in it")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ModelLoadError(f"model folder {folder} has no {' or '.join(names)}")


def read_text_file(path: Path) -> str:
    """Read a text file; raises ModelLoadError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object. Returns {} if the file is optional and absent.

    Raises ModelLoadError for anything else.
    """
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(read_text_file(path))
    except json.JSONDecodeError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return cast("dict[str, Any]", value)
