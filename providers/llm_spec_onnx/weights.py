"""Chooses a model's weights: exports have several kinds, such as `model_q4.onnx` and `model.onnx`.

The best kind is chosen by speed and by the share of float32's greedy tokens. Kinds that promise one
text with and without speculation (`OnnxModel.same_text`) come before those that do not. 8-bit
weights do not promise it, because such exports give the activations of a whole pass one scale.
`q4f16` is as good as `q4` here and smaller, but comes second: activations of other models may be
too large for float16 (https://github.com/microsoft/onnxruntime/issues/26732).

Measured with SmolLM2-135M-Instruct by onnxruntime 1.32 on one thread of a busy EPYC with VNNI, with
`python tools/export_onnx_kinds.py …` and `python tools/compare_onnx_weights.py …`:

| weights | MB | 1 tokens, ms | 4 tokens, ms | 8 tokens, ms | agreement | same text |
| --- | --- | --- | --- | --- | --- | --- |
| `fp32` | 652 | 27.8 | 30.7 | 39.8 | 100.0 % | yes |
| `q4` | 199 | 12.4 | 14.9 | 20.2 | 75.1 % | yes |
| `q4f16` | 133 | 12.0 | 15.6 | 21.7 | 75.6 % | yes |
| `quantized` | 164 | 11.4 | 12.4 | 14.9 | 65.7 % | no |
| `uint8` | 164 | 17.4 | 18.8 | 21.8 | 65.0 % | no |
| `fp16` | 326 | 28.3 | 32.1 | 42.5 | 99.8 % | no |
| `bnb4` | 190 | 70.0 | 68.8 | 75.6 | 77.5 % | yes |
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from llm_spec.contract.errors import ModelLoadError
from llm_spec.kit.model_folder.hub import (
    fetch_from_hub,
    is_hub_name,
    list_folder_files,
    list_hub_files,
    tell_about_fetch,
)

__all__ = ["find_weights_file", "list_kinds"]

_FILE: Final = re.compile(r"(?:onnx/)?model(?:_(?P<kind>\w+))?\.onnx")
_FLOAT32: Final = "fp32"  # model.onnx, which has no kind in its name
# The best first: the speed relative to float32, and the percentage of places with float32's token
_MEASURED: Final[Mapping[str, tuple[float, int]]] = {
    "q4": (2.2, 75),
    "q4f16": (2.3, 76),
    _FLOAT32: (1.0, 100),
    "quantized": (2.4, 66),
    "int8": (2.4, 66),  # the same under another name
    "uint8": (1.6, 65),
    "fp16": (1.0, 100),
    "bnb4": (0.4, 78),
}
_OUTSIDE_PARTS: Final = r"(_data(_\d+)?|\.data)?"  # endings of separate weight files
# of exports for onnxruntime-genai; it describes their caches
_GENAI_CONFIG: Final = "genai_config.json"


def find_weights_file(model: str | Path, kind: str | None) -> tuple[Path, Path]:
    """Return a model's folder and its file with weights of `kind`, or of the best kind.

    `model` is a folder, or a name of the Hugging Face hub, which is fetched if needed. Raises
    ModelLoadError if the model has no weights of that kind.
    """
    folder, name = Path(model).expanduser(), str(model)
    if folder.is_dir():
        return folder, folder / _choose_file(f"model folder {folder}", list_folder_files(folder), kind)
    if not is_hub_name(name):
        raise ModelLoadError(
            f"model folder {folder} does not exist; give a folder with model.onnx in it, or org/name of the hub"
        )
    chosen = list[str]()

    def choose_parts(folder: Path) -> list[str]:
        files = _list_files(name, folder, kind)
        kinds = list_kinds(files)
        if not kinds:
            raise ModelLoadError(_describe_missing_export(name))
        chosen.append(_choose_file(name, files, kind))
        parts = [file for file in files if re.fullmatch(re.escape(chosen[0]) + _OUTSIDE_PARTS, file)]
        tell_about_fetch(_describe_choice(name, chosen[0], sum(files[part] for part in parts), kinds, kind))
        return parts

    folder = fetch_from_hub(name, choose_parts, text_files=[_GENAI_CONFIG])
    return folder, folder / chosen[0]


def list_kinds(files: Iterable[str]) -> dict[str, str]:
    """Return the kinds of weights among a folder's files, each with its file.

    A file beside config.json comes before one in `onnx`.
    """
    kinds = dict[str, str]()
    for file in sorted(files, reverse=True):
        match = _FILE.fullmatch(file)
        if match is not None:
            kinds[match["kind"] or _FLOAT32] = file
    return kinds


def _list_files(name: str, folder: Path, kind: str | None) -> Mapping[str, int]:
    """Return a repository's files; without a network, the fetched ones if they include weights."""
    try:
        return list_hub_files(name, folder)
    except Exception:  # the hub's errors and those of the network below it have no common base
        files = list_folder_files(folder)
        kinds = list_kinds(files)
        if not kinds or kind not in {None, *kinds}:
            raise
        return files


def _choose_file(where: str, files: Iterable[str], kind: str | None) -> str:
    kinds = list_kinds(files)
    if not kinds:
        raise ModelLoadError(f"{where} has no model.onnx or onnx/model.onnx")
    if kind is not None and kind not in kinds:
        raise ModelLoadError(f"{where} has no weights {kind!r}; it has {', '.join(sorted(kinds))}")
    return kinds[kind or next((best for best in _MEASURED if best in kinds), min(kinds))]


def _describe_missing_export(name: str) -> str:
    _, _, model = name.partition("/")
    return (
        f"{name} has no ONNX export (model.onnx or onnx/model.onnx); onnx-community/{model} or "
        f"onnx-community/{model}-ONNX may be one, and torch:{name} reads the weights themselves"
    )


def _describe_choice(name: str, path: str, size: int, kinds: Collection[str], kind: str | None) -> str:
    """Describe the chosen weights.

    If the user did not choose and there are others, the text also says why, and how to choose
    another.
    """
    line = f"{name}: {path.rpartition('/')[2]}, {size / 1e6:.0f} MB"
    best = next((best for best in _MEASURED if best in kinds), None)
    others = sorted(set(kinds) - {best})
    if kind is not None or best is None or not others:
        return line
    speed, share = _MEASURED[best]
    why = f"{best} is {speed:.1f}x as fast as fp32, and writes the same token at {share} % of places"
    return f"{line}. Measured with SmolLM2-135M-Instruct, {why}. Others: ?weights={'|'.join(others)}"
