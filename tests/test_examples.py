"""Every example runs, says what it claims, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
CLAIMS = {
    "quickstart.py": "the same text: True",
    "streaming.py": "accepted",
    "one_seed_one_text.py": "nine runs, one text",
    "never_worse.py": "draft server is down",
    "edit_with_given_text.py": "drafted tokens accepted",
    "own_provider.py": "(100%)",
    "local_checkpoint.py": "four answers, one text",
    "json_answer.py": "valid, and one text each",
    "race_a_server.py": "the same text, exact",
    "serve_and_ask.py": "of which the draft wrote",
}


def test_all_are_run() -> None:
    """No example is left out here but those of adapters, which tests/integrations runs beside their frameworks."""
    examples = {path.name for path in EXAMPLES.glob("*.py") if "llm_spec.integrations" not in path.read_text("utf-8")}
    assert examples == CLAIMS.keys()


@pytest.mark.parametrize("name", CLAIMS)
def test_example(name: str) -> None:
    """It ends well, without a warning, and prints what it claims."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert not {"Traceback", "Warning"} & set(ended.stderr.split()), ended.stderr  # a failed draft may be logged
    assert CLAIMS[name] in ended.stdout


def test_readme_example() -> None:
    """The README's ten lines run as they stand."""
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    code = readme.split("```python\n")[1].split("```")[0]
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "tokens (exact)" in ended.stdout
    assert len(readme.splitlines()) <= 150
