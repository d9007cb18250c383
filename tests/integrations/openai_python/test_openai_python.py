"""openai-python's own tests of chat completions and models, as its source distribution has them, pass at the server."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from two_servers import two_servers

TESTS = ("tests/api_resources/chat/test_completions.py", "tests/api_resources/test_models.py")
CHOSEN = "create or (test_models and (list or retrieve))"  # nothing is stored here, so nothing can be deleted


def test_sdk_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that send a chat completion, in every way and with every field, and all that read models."""
    folder, report = _sources("openai"), tmp_path / "report.xml"
    with two_servers(tmp_path) as url:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *TESTS, "-k", CHOSEN, "-o", "addopts=", "-p", "no:cacheprovider"]
            + [f"--junitxml={report}"],
            cwd=folder,
            env={**os.environ, "TEST_API_BASE_URL": f"{url}/v1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert report.exists(), ended.stdout + ended.stderr
    suite = next(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314 - pytest wrote it
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    with capsys.disabled():
        print(f"\nopenai-python {version('openai')}: {counts}")  # noqa: T201 - the counts are the result
    assert ended.returncode == 0, ended.stdout
    assert counts["tests"] >= 75
    assert counts == {"tests": counts["tests"], "failures": 0, "errors": 0, "skipped": 0}


def _sources(name: str) -> Path:
    """Where the source distribution of the installed version lies; it is kept beside the environment's packages."""
    archive = f"{name}-{version(name)}"
    folder = Path(sys.prefix) / "sources"
    if not (folder / archive).exists():
        wanted = [f"{name}=={version(name)}", "--no-binary", name, "--no-deps", "--quiet", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *wanted], check=True)
        with tarfile.open(folder / f"{archive}.tar.gz") as packed:
            packed.extractall(folder, filter="data")
    return folder / archive
