"""Servers for one test run, each started by the first test that needs it. They run when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peers.servers import INSTALL, MODELS, serve_llama, serve_vllm, write_gguf

_PREFIX = "peers: "  # of every reason for a skip, and of what a test reports


@pytest.fixture(scope="session")
def peers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for converted models and the servers' output."""
    return tmp_path_factory.mktemp("peers")


@pytest.fixture(scope="session")
def vllm_target(peers_folder: Path) -> Iterator[str]:
    """The address of a vLLM with the model `target`."""
    with serve_vllm(MODELS / "target", "target", peers_folder) as url:
        yield url


@pytest.fixture(scope="session")
def llama_target(peers_folder: Path) -> Iterator[str]:
    """The address of a llama-server with the model `target`."""
    with serve_llama(write_gguf(MODELS / "target", peers_folder), "target", peers_folder) as url:
        yield url


@pytest.fixture(scope="session")
def llama_draft(peers_folder: Path) -> Iterator[str]:
    """The address of a llama-server with the model `draft`."""
    with serve_llama(write_gguf(MODELS / "draft", peers_folder), "draft", peers_folder) as url:
        yield url


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Say a number at the end of the test run."""
    return lambda what, value: request.node.user_properties.append((f"peers: {what}", value))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip these tests unless the command line names them: `pytest -m peers`, `pytest tests/peers`."""
    if any("peers" in argument for argument in config.invocation_params.args):
        return
    skip = pytest.mark.skip(reason=f"{_PREFIX}real servers are not asked for; run {INSTALL} once, then pytest -m peers")
    for item in items:
        if item.get_closest_marker("peers"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud what was skipped and why, also with -q, and what the tests counted."""
    reports = terminalreporter.stats
    reasons = (str(report.longrepr[2]) for report in reports.get("skipped", []))
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons if _PREFIX in reason)
    lines = [f"{reason} ({count} tests skipped)" for reason, count in counts.items()]
    told = (line for report in reports.get("passed", []) for line in report.user_properties)
    lines += [f"{what}: {value}" for what, value in told if what.startswith(_PREFIX)]
    for line in lines:
        terminalreporter.write_line(line)
