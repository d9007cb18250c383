"""The examples of the page about agents and of `examples/` run as they stand, with tools, and leave nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .scripted_server import Call, Reply, ScriptedServer

PAGE = Path(__file__).parents[3] / "docs" / "start" / "agent.md"
EXAMPLES = sorted(
    path.name
    for path in (Path(__file__).parents[3] / "examples").glob("*.py")
    if "llm_spec.integrations" in path.read_text("utf-8")
)
BLOCKS = [
    pytest.param(language, code, id=heading)
    for heading, language, code in re.findall(
        r"^## ([^\n]+)\n\n<!-- not run: [^\n]+ -->\n```(\w+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S
    )
]
ADDRESS = "http://127.0.0.1:8000/v1"


def run(command: list[str], tmp_path: Path) -> str:
    """What it prints."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": programs, "LLM_USER_PATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ended: Any = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert not {"Traceback", "Unclosed"} & set(ended.stderr.split()), ended.stderr
    return ended.stdout


def test_each_adapter_has_a_block() -> None:
    assert len(BLOCKS) == 5


@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_block(language: str, code: str, tmp_path: Path) -> None:
    """The tool is run, its result goes back, and the answer is printed."""
    with ScriptedServer([Reply(calls=[Call()]), Reply("Take an umbrella.")]) as server:
        assert ADDRESS in code
        code = code.replace(ADDRESS, server.url)
        program = [sys.executable, "-c"] if language == "python" else ["sh", "-ec"]
        printed = run([*program, code], tmp_path)
    assert "Take an umbrella." in printed
    assert server.bodies[-1]["messages"][-1]["content"] == "It rains in Rome."


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    """It ends well; the answers after a tool's call are the same with a draft and without, and both are timed."""
    path = Path(__file__).parents[3] / "examples" / name
    printed = run([sys.executable, str(path)], tmp_path)
    assert "drafted tokens accepted; the same answers: True" in printed
    assert re.search(r"with a draft \d+\.\d\d s, without \d+\.\d\d s: \d+\.\d\dx as fast", printed)
