"""A few hundred random and mutated requests; `benchmarks/server_fuzz.py` sends 50,000, and tells of pauses too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from support.serving import HANGS_S

FUZZ: Final = Path(__file__).parents[2] / "benchmarks" / "server_fuzz.py"


def test_no_request_ends_a_worker_or_is_a_500() -> None:
    """And none takes more than 300 MB, while other streams go on."""
    done = subprocess.run(
        [sys.executable, str(FUZZ), "--requests", "200", "--quiet-s", "0.1", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=4 * HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 requests in" in done.stdout
