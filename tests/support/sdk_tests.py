"""The tests of an SDK, as its source distribution has them, run against a server."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias
from xml.etree import ElementTree as ET

__all__ = ["Counts", "run_sdk_tests"]

Counts: TypeAlias = dict[str, int]


def run_sdk_tests(name: str, files: list[str], *, chosen: str, url: str, report: Path) -> Counts:
    """The counts of pytest's report; raises AssertionError with what it printed where a test failed."""
    command = [sys.executable, "-m", "pytest", *files, "-k", chosen, "-o", "addopts=", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, f"--junitxml={report}"],
        cwd=_sources(name),
        env={**os.environ, "TEST_API_BASE_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    suite = next(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314 - pytest wrote it
    return {count: int(suite.get(count, 0)) for count in ("tests", "failures", "errors", "skipped")}


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
