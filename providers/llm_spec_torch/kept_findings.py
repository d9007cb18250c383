"""Keeps the widths found for a model in the user's cache folder, for later loads.

A finding is stored with everything that it may depend on: the model's sizes and dtypes, the CPU,
the versions. It is tested again when it is used (`AgreeingWidthSearch.are_widths_still_agreeing`):
a wrong one costs time, never exactness. A broken or foreign file counts as no finding. A folder
that cannot be written is not an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import transformers

import llm_spec

__all__ = ["CACHE_VARIABLE", "AgreeingWidthsCacheFile", "describe_cpu_for_kernels", "describe_model_for_kernels"]

CACHE_VARIABLE: Final = "LLM_SPEC_CACHE_DIR"
_KERNEL_VARIABLES: Final = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_")
# Of /proc/cpuinfo.
_CPU_LINES: Final = ("model name", "flags", "CPU implementer", "CPU part", "Features")


class AgreeingWidthsCacheFile:
    """One file for each set of facts; nothing is kept if `LLM_SPEC_CACHE_DIR` is empty."""

    def __init__(self, facts: Mapping[str, Any], max_width: int) -> None:
        self._facts: Any = json.loads(json.dumps({**facts, "max_width": max_width}, skipkeys=True, default=str))
        self._max_width = max_width
        folder = _find_cache_folder()
        digest = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()[:24]
        self._path = None if folder is None else folder / f"torch-widths-{digest}.json"

    def read_widths(self) -> list[int]:
        """Return the stored widths, ascending; [] if there are none."""
        if self._path is None:
            return []
        try:
            kept: Any = json.loads(self._path.read_text(encoding="utf-8"))
            facts, widths = kept["facts"], [int(width) for width in kept["widths"]]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return []
        is_possible = all(0 < width <= self._max_width for width in widths) and widths == sorted(set(widths))
        return widths if facts == self._facts and is_possible else []

    def write_widths(self, widths: list[int]) -> None:
        """Store widths atomically."""
        if self._path is None or not widths:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
                written = Path(folder) / self._path.name
                written.write_text(json.dumps({"facts": self._facts, "widths": widths}, indent=1), encoding="utf-8")
                written.replace(self._path)


def describe_model_for_kernels(config: Any, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about a model that kernels depend on."""
    architecture = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    return {"architecture": architecture, "dtype": str(dtype), "attention": options.get("attention", "sdpa")}


def describe_cpu_for_kernels() -> dict[str, Any]:
    """Return the facts about this machine that kernels depend on."""
    build: Any = torch.__config__
    return {
        "processor": _describe_processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "environment": {name: text for name, text in os.environ.items() if name.startswith(_KERNEL_VARIABLES)},
        "versions": [llm_spec.__version__, torch.__version__, transformers.__version__, build.show()],
    }


def _describe_processor() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except (OSError, ValueError):
        return {"processor": f"{platform.machine()} {platform.processor()}"}
    parts = [line.partition(":") for line in lines]
    return {name.strip(): text.strip() for name, _, text in parts if name.strip() in _CPU_LINES}


def _find_cache_folder() -> Path | None:
    named = os.environ.get(CACHE_VARIABLE)
    try:
        if named is not None:
            return Path(named).expanduser() if named else None
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm-spec"
    except RuntimeError:  # the user has no home folder
        return None
