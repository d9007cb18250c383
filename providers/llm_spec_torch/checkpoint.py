"""Finds, checks and loads a Hugging Face checkpoint, with one clear error for anything wrong."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import mmap
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from llm_spec.contract.errors import ModelLoadError
from llm_spec.kit.model_folder.files import read_json
from llm_spec.kit.model_folder.hub import fetch_from_hub, is_hub_name

__all__ = [
    "find_checkpoint_folder",
    "load_transformers_module",
    "map_embedding",
    "resolve_device",
    "resolve_dtype",
    "return_freed_memory_to_system",
]

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FILE_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_EMBEDDING_NAME: Final = "embed_tokens.weight"
_NUM_COMPARED_ROWS: Final = 64
_INDEX_NAME: Final = "model.safetensors.index.json"


def find_checkpoint_folder(model: str | Path) -> Path:
    """Return the folder of a checkpoint: a local path, or a name on the Hugging Face hub.

    A checkpoint of the hub is downloaded once.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_name(str(model)):
        raise ModelLoadError(f"model folder {folder} does not exist; give a folder with config.json in it")

    def choose_weights(folder: Path) -> list[str]:
        return [path.relative_to(folder).as_posix() for path in _list_weight_files(folder)]

    return fetch_from_hub(str(model), choose_weights, text_files=[_INDEX_NAME])


def resolve_device(device: str | None) -> torch.device:
    """Return the requested device; the default is CUDA if there is any.

    Raises ModelLoadError if the device does not exist.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ModelLoadError(f"device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:<number>'") from error
    if chosen.type not in {"cpu", "cuda"}:
        raise ModelLoadError(f"device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:<number>'")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(f"device is {device!r}; this machine has {torch.cuda.device_count()} CUDA devices")
    if str(chosen) == "cuda":  # worker threads have a current device of their own
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def resolve_dtype(dtype: str | None, device: torch.device, config: dict[str, Any]) -> torch.dtype:
    """Return the requested dtype; the default is the checkpoint's on CUDA and float32 on a CPU.

    On CUDA it is bfloat16 if the checkpoint names none. Raises ModelLoadError if the device cannot
    compute in the dtype.
    """
    if dtype is None:
        own = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        dtype = "float32" if device.type != "cuda" else own if own in _DTYPES else "bfloat16"
    if dtype not in _DTYPES:
        raise ModelLoadError(f"dtype is {dtype!r}; it must be one of {', '.join(_DTYPES)}")
    if dtype == "float16" and device.type == "cpu":
        raise ModelLoadError("dtype is 'float16'; a CPU computes in 'float32' or 'bfloat16'")
    if dtype == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        raise ModelLoadError(
            f"dtype is 'bfloat16'; {torch.cuda.get_device_name(device)} has no bfloat16 arithmetic, give 'float16'"
        )
    return _DTYPES[dtype]


def load_transformers_module(
    folder: Path, dtype: torch.dtype, device: torch.device, num_layers: int | None = None
) -> Any:
    """Load the checkpoint, or its first layers, as transformers' `…ForCausalLM` on the device.

    It is ready for inference. Raises ModelLoadError for anything that is wrong with the checkpoint.
    """
    _check_weight_files(folder)
    transformers: Any = importlib.import_module("transformers")
    try:
        with _silence_transformers(transformers):
            module, report = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and refused below
            )
            _remove_all_but_first_layers(module, num_layers)
            module = module.eval().requires_grad_(requires_grad=False).to(device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelLoadError(f"{folder} does not fit into the memory of {device} in {dtype}") from error
    except ModelLoadError:
        raise
    except Exception as error:  # transformers' errors have no common base class
        message = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ModelLoadError(
            f"{folder} is not a model that transformers {transformers.__version__} can load: {message[0]}"
        ) from error
    missing = sorted({*report["missing_keys"], *(str(key[0]) for key in report["mismatched_keys"])})
    if missing:
        raise ModelLoadError(f"{folder} lacks weights, or they are of other shapes: {', '.join(missing[:3])}")
    return module


def map_embedding(folder: Path, loaded: Tensor) -> Tensor | None:
    """Map the embedding table from the checkpoint's file, so that only used rows are in memory.

    The table has the file's dtype. `loaded` is the table on a CPU, in the dtype of the computation;
    some rows of both are compared. Returns None if the file has no such table. The file may be
    deleted while it is mapped, but not cut short.
    """
    if loaded.device.type != "cpu":
        return None
    for path in _list_weight_files(folder):
        for name, (dtype, shape, start) in _read_tensor_places(path).items():
            is_table = name.endswith(_EMBEDDING_NAME) and dtype in _FILE_DTYPES and shape == loaded.shape
            if is_table and start % _FILE_DTYPES[dtype].itemsize == 0:
                table = _map_tensor(path, start, loaded.numel(), _FILE_DTYPES[dtype]).view(shape)
                rows = torch.linspace(0, len(table) - 1, _NUM_COMPARED_ROWS).long()
                if table[rows].to(loaded.dtype).equal(loaded[rows]):
                    return table
    return None


def _map_tensor(path: Path, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """Map `count` numbers of a file from a byte on. Writing to them changes a copy."""
    begin = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = start - begin + count * dtype.itemsize
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=begin)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start - begin)


def return_freed_memory_to_system() -> None:
    """Give memory back that glibc keeps for the threads of transformers that loaded the weights."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _remove_all_but_first_layers(module: Any, num_layers: int | None) -> None:
    """Keep only the first `num_layers` layers; raises ModelLoadError if there are fewer."""
    config: Any = module.config.get_text_config()
    if num_layers is None:
        return
    if num_layers > config.num_hidden_layers:
        raise ModelLoadError(f"layers is {num_layers}; the checkpoint has {config.num_hidden_layers}")
    config.num_hidden_layers = num_layers
    body: Any = getattr(module.model, "language_model", module.model)
    body.layers = body.layers[:num_layers]


def _check_weight_files(folder: Path) -> None:
    """Raise ModelLoadError if a weight file is missing or shorter than its header says.

    A file is too short if its download was cut off.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ModelLoadError(f"model folder {folder} has no config.json")
    read_json(config)
    for path in _list_weight_files(folder):
        if not path.is_file():
            raise ModelLoadError(
                f"model folder {folder} has no {path.name}; weights are read from safetensors files only"
            )
        _read_tensor_places(path)


def _list_weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that the folder declares."""
    index = folder / _INDEX_NAME
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted({str(name) for name in read_json(index).get("weight_map", {}).values()})
    return [folder / name for name in names]


def _read_tensor_places(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return dtype, shape and position in the file of each tensor, by name.

    Raises ModelLoadError if the file is shorter than its header says.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise ModelLoadError(f"{path} is cut short: {size} bytes; download it again")
            header: dict[str, Any] = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        places = {
            name: (str(entry["dtype"]), tuple(entry["shape"]), 8 + length + int(entry["data_offsets"][0]))
            for name, entry in entries.items()
        }
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file; download it again") from error
    if size < end:
        raise ModelLoadError(f"{path} is cut short: {size} of {end} bytes; download it again")
    return places


@contextlib.contextmanager
def _silence_transformers(transformers: Any) -> Generator[None]:
    """Turn off transformers' progress bars and advice; errors are still raised."""
    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
