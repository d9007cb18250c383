"""anthropic's own tests of messages pass at the server."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from support.sdk_tests import run_sdk_tests
from support.two_servers import two_servers

pytest.importorskip("http_snapshot", reason="the SDK's tests need it")


def test_sdk_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every way to send a message, and every field of it."""
    files = ["tests/api_resources/test_messages.py"]
    with two_servers(tmp_path) as url:
        counts = run_sdk_tests("anthropic", files, chosen="create", url=url, report=tmp_path / "report.xml")
    with capsys.disabled():
        print(f"\nanthropic {version('anthropic')}: {counts}")  # noqa: T201 - the counts are the result
    assert counts["tests"] >= 40
    assert counts == {"tests": counts["tests"], "failures": 0, "errors": 0, "skipped": 0}
