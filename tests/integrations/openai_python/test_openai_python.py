"""openai-python's own tests of chat completions, completions and models pass at the server."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from support.sdk_tests import run_sdk_tests
from support.two_servers import two_servers

pytest.importorskip("inline_snapshot", reason="the SDK's tests need it")

CHAT_AND_MODELS = ["tests/api_resources/chat/test_completions.py", "tests/api_resources/test_models.py"]


@pytest.mark.parametrize(
    ("files", "chosen", "at_least"),
    [
        # nothing is stored here, so nothing can be deleted
        (CHAT_AND_MODELS, "create or (test_models and (list or retrieve))", 75),
        (["tests/api_resources/test_completions.py"], "create", 40),
    ],
    ids=["chat-and-models", "completions"],
)
def test_sdk_tests(
    files: list[str], chosen: str, at_least: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every way to send a request, and every field of it."""
    with two_servers(tmp_path) as url:
        counts = run_sdk_tests("openai", files, chosen=chosen, url=f"{url}/v1", report=tmp_path / "report.xml")
    with capsys.disabled():
        print(f"\nopenai-python {version('openai')}: {counts}")  # noqa: T201 - the counts are the result
    assert counts["tests"] >= at_least
    assert counts == {"tests": counts["tests"], "failures": 0, "errors": 0, "skipped": 0}
