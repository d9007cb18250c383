"""Code in a process of its own: Triton decides on import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_python"]


def run_python(code: str, *arguments: str, **environment: str) -> None:
    """Run code that may import the modules of `llm_spec_torch`'s tests; what it raises is this test's error."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here / "llm_spec_torch"), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
