"""The files in which several workers share their metrics: prometheus_client maps them into memory.

To write into a mapped page for which the disk has no room ends the process (SIGBUS). So each file has all the room that
it will need before it is mapped; where there is none, the server goes on without metrics. Files belong to a worker's
number and not to its process: one that is started again goes on counting in them.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from prometheus_client import values

from llm_spec.server.config import ServerConfig
from llm_spec.telemetry import log_event

__all__ = ["VARIABLE", "forget_worker", "metrics_folder", "share_metrics"]

VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"  # where prometheus_client looks for the folder
_GAUGES: Final = ("gauge_livesum", "gauge_livemax")
_KINDS: Final = (*_GAUGES, "counter", "histogram")
_OF_ALL_BYTES: Final = 64 * 1024  # what a file holds that belongs to no model, and more
_OF_MODEL_BYTES: Final = 8 * 1024  # 40 series of a model, beside its name in each of them
_SERIES_OF_MODEL: Final = 40


@contextmanager
def metrics_folder(config: ServerConfig) -> Generator[None]:
    """The folder that the workers of `config` share while the context is open; none where one worker is enough."""
    if config.workers == 1:
        yield
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="llm_spec-metrics-")
    except OSError as error:
        _tell_there_are_none(error)
        yield
        return
    with folder:
        try:
            for worker in range(config.workers):
                for path in _paths(folder.name, worker, _KINDS):
                    path.write_bytes(bytes(_num_bytes(config)))
            os.environ[VARIABLE] = folder.name
        except OSError as error:
            for path in Path(folder.name).iterdir():
                path.unlink()  # the disk is full
            _tell_there_are_none(error)
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)


def share_metrics(worker: int) -> None:
    """Let this process count in the files of that worker, if there are any; to be called before it makes metrics."""
    if VARIABLE in os.environ:
        values.ValueClass = values.MultiProcessValue(process_identifier=lambda: worker)  # type: ignore[no-untyped-call] # it has no types


def forget_worker(worker: int) -> None:
    """A worker has died: what it had open is open no more."""
    if VARIABLE in os.environ:
        for path in _paths(os.environ[VARIABLE], worker, _GAUGES):
            with suppress(OSError), path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))


def _paths(folder: str, worker: int, kinds: tuple[str, ...]) -> list[Path]:
    return [Path(folder, f"{kind}_{worker}.db") for kind in kinds]


def _num_bytes(config: ServerConfig) -> int:
    names = sum(len(json.dumps(name)) for name in config.models)
    return _OF_ALL_BYTES + len(config.models) * _OF_MODEL_BYTES + names * _SERIES_OF_MODEL


def _tell_there_are_none(error: OSError) -> None:
    log_event("no_metrics", level=logging.WARNING, why=f"their files cannot be written: {error.strerror}")
