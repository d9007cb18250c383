"""The files in which several workers share their metrics; prometheus_client maps them into memory.

Writing to a mapped page ends the process (SIGBUS) if the disk has no room for the page. So each
file gets its full size before it is mapped. If the disk is too full, the server runs without
metrics. A file belongs to a worker's number, not to its process, so a restarted worker continues to
count in it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_spec.decoder.telemetry import log_event

if TYPE_CHECKING:
    from llm_spec.server.config import ServerConfig

__all__ = ["FOLDER_VARIABLE", "clear_worker_gauges", "create_metrics_folder"]

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"  # where prometheus_client looks for the folder
_GAUGES: Final = ("gauge_livesum", "gauge_livemax")
_KINDS: Final = (*_GAUGES, "counter", "histogram")
_SHARED_SERIES_BYTES: Final = 64 * 1024  # enough for the series that belong to no model
_MODEL_SERIES_BYTES: Final = 10 * 1024  # 50 series of a model, without its name in each
_NUM_MODEL_SERIES: Final = 50


@contextmanager
def create_metrics_folder(config: ServerConfig) -> Generator[str | None]:
    """Create the folder that a config's workers share while the context is open.

    Yields None if there is one worker, or if the folder cannot be created.
    """
    if config.workers == 1:
        yield None
        return
    import tempfile  # here: a lone worker needs none

    try:
        folder = tempfile.TemporaryDirectory(prefix="llm_spec-metrics-")
    except OSError as error:
        _log_metrics_unavailable(error)
        yield None
        return
    with folder:
        try:
            for worker in range(config.workers):
                for path in _list_metrics_files(folder.name, worker, _KINDS):
                    path.write_bytes(bytes(_estimate_metrics_file_size(config)))
            os.environ[FOLDER_VARIABLE] = folder.name
        except OSError as error:
            for path in Path(folder.name).iterdir():
                path.unlink()  # the disk is full
            _log_metrics_unavailable(error)
        try:
            yield folder.name
        finally:
            os.environ.pop(FOLDER_VARIABLE, None)


def clear_worker_gauges(worker: int) -> None:
    """Clear the gauges of a worker that has died: its requests are not open any more."""
    if FOLDER_VARIABLE in os.environ:
        for path in _list_metrics_files(os.environ[FOLDER_VARIABLE], worker, _GAUGES):
            with suppress(OSError), path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))


def _list_metrics_files(folder: str, worker: int, kinds: tuple[str, ...]) -> list[Path]:
    return [Path(folder, f"{kind}_{worker}.db") for kind in kinds]


def _estimate_metrics_file_size(config: ServerConfig) -> int:
    names = sum(len(json.dumps(name)) for name in config.models)
    return _SHARED_SERIES_BYTES + len(config.models) * _MODEL_SERIES_BYTES + names * _NUM_MODEL_SERIES


def _log_metrics_unavailable(error: OSError) -> None:
    log_event("no_metrics", level=logging.WARNING, why=f"their files cannot be written: {error.strerror}")
