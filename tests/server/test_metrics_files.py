"""Metrics of several workers have all their room before they are written; without room there are none."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.serving import RULES

from llm_spec.server import ServerConfig
from llm_spec.server.metrics import ServerMetrics
from llm_spec.server.metrics_files import FOLDER_VARIABLE, clear_worker_gauges, create_metrics_folder
from llm_spec.server.problems import HttpProblem

NAMES = [f"{'ünï' * 30}-{number}" for number in range(20)]

# As many series as a server can have, in the files of worker 1
COUNTING = """
import asyncio, json, sys
from llm_spec.server.apis import APIS
from llm_spec.server.metrics import ServerMetrics, _ModelMetrics, use_worker_metrics_files
from typing import get_args
from llm_spec.decoder.config import BuiltinStrategyName

use_worker_metrics_files(1)

async def main():
    metrics = ServerMetrics(num_workers=2)
    for status in range(400, 600):
        metrics.errors.labels(str(status)).inc()
    for name in json.load(sys.stdin):
        _ModelMetrics(metrics, name)
        for api in APIS.values():
            metrics.requests.labels(api.name, name).inc()
        for strategy in get_args(BuiltinStrategyName):
            metrics.strategies.labels(name, strategy).inc()
        metrics.acceptance.list_counters(name)
        for role in ("target", "draft"):
            metrics._breaker_open.labels(name, role).set(1)
    metrics.set_open_requests(7)
    print(metrics.render_prometheus_text([], []).decode())

asyncio.run(main())
"""


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_no_file_grows() -> None:
    """A file that grows could meet with a full disk, which ends the process."""
    with create_metrics_folder(ServerConfig(models=dict.fromkeys(NAMES, RULES), workers=2)):
        folder = Path(os.environ[FOLDER_VARIABLE])
        before = sizes(folder)
        assert len(before) == 8
        done = subprocess.run(
            [sys.executable, "-c", COUNTING], input=json.dumps(NAMES), capture_output=True, text=True, check=True
        )
        assert "llm_spec_open_requests 7.0" in done.stdout
        assert sizes(folder) == before
        clear_worker_gauges(1)
        assert sizes(folder) == before
        assert not any((folder / "gauge_livesum_1.db").read_bytes())
        assert any((folder / "counter_1.db").read_bytes())
    assert FOLDER_VARIABLE not in os.environ


@pytest.mark.parametrize("where", ["llm_spec.server.metrics_files.Path.write_bytes", "tempfile.TemporaryDirectory"])
async def test_without_room_there_are_none(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The server serves; only the metrics say what is wrong."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(where, fail)
    with create_metrics_folder(ServerConfig(models={"fast": RULES}, workers=2)):
        assert FOLDER_VARIABLE not in os.environ
        metrics = ServerMetrics(num_workers=2)
        metrics.errors.labels("400").inc()
        with pytest.raises(HttpProblem, match="disk was full") as caught:
            metrics.render_prometheus_text([], [])
    assert caught.value.status == 503


def test_one_worker_needs_no_folder() -> None:
    with create_metrics_folder(ServerConfig(models={"fast": RULES})):
        assert FOLDER_VARIABLE not in os.environ
