"""The environment of a measurement: machine, versions, date."""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from llm_spec.local.threads import count_usable_cores

__all__ = ["BenchEnvironment", "read_system_load"]

_PACKAGES: Final = ("llm-spec", "aiohttp", "openai", "anthropic", "numpy", "onnxruntime", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class BenchEnvironment:
    """The machine and the packages.

    `cores` counts the cores that this process may use. `accelerator` is the GPU that torch uses, if
    any.
    """

    date: str
    python: str
    system: str
    processor: str
    cores: int
    accelerator: str | None
    packages: dict[str, str]

    @classmethod
    def read_current(cls) -> BenchEnvironment:
        """Read the current values; packages that are not installed are left out."""
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            python=platform.python_version(),
            system=platform.platform(terse=True),
            processor=_read_cpu_name(),
            cores=count_usable_cores(),
            accelerator=_find_gpu_name(),
            packages=_read_package_versions(),
        )


def read_system_load() -> float | None:
    """Return the mean number of running or waiting processes over the last minute.

    Returns None if the system does not report it.
    """
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _read_cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _find_gpu_name() -> str | None:
    """Return the name of the GPU if torch is already imported and has one."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None


def _read_package_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
