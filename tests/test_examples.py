"""Every example runs, says what it claims, and leaves nothing behind."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from make_pair import find_pair

EXAMPLES = Path(__file__).parent.parent / "examples"
CLAIMS = {
    "quickstart.py": "the same text: True",
    "streaming.py": "accepted",
    "one_seed_one_text.py": "nine runs, one text",
    "never_worse.py": "draft server is down",
    "edit_with_given_text.py": "drafted tokens accepted",
    "own_provider.py": "(100%)",
    "own_strategy.py": "first_sentence (exact): 3 of 4 drafted words confirmed",
    "local_checkpoint.py": "four answers, one text",
    "json_answer.py": "valid, and one text each",
    "local_tools.py": "the same call and answer: True",
    "race_a_server.py": "the same text; alone",
    "serve_and_ask.py": "of which the draft wrote",
}


def test_all_are_run() -> None:
    """No example is left out here but those of adapters, which tests/integrations runs beside their frameworks."""
    examples = {path.name for path in EXAMPLES.glob("*.py") if "llm_spec.integrations" not in path.read_text("utf-8")}
    assert examples == CLAIMS.keys()


# Loading real weights takes a third of the time of all of them; the usual run loads such checkpoints in llm_spec_torch/
CASES = [pytest.param(name, marks=pytest.mark.slow if name == "local_checkpoint.py" else ()) for name in CLAIMS]


@pytest.mark.parametrize("name", CASES)
def test_example(name: str) -> None:
    """It ends well, without a warning, and prints what it claims."""
    if name == "local_checkpoint.py":
        find_pair()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # two that wait for each other are slower beside other work
    command = [sys.executable, "-W", "error", EXAMPLES / name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert not {"Traceback", "Warning"} & set(ended.stderr.split()), ended.stderr  # a failed draft may be logged
    assert CLAIMS[name] in ended.stdout


MISSING = {
    "langchain_agent.py": ("langchain_core", "langchain,onnx,grammar"),
    "litellm_call.py": ("litellm", "litellm,onnx,grammar"),
    "local_checkpoint.py": ("torch", "torch"),
    "openai_agents_run.py": ("agents", "openai-agents,onnx,grammar"),
    "pydantic_ai_agent.py": ("pydantic_ai", "pydantic-ai,onnx,grammar"),
    "serve_and_ask.py": ("openai", "onnx,openai,server"),
}
WITHOUT = "import runpy, sys; sys.modules[sys.argv[1]] = None; runpy.run_path(sys.argv[2], run_name='__main__')"


@pytest.mark.parametrize("name", MISSING)
def test_missing_extras_are_named(name: str) -> None:
    """Where a package is not installed, one line says what installs it; so does the docstring."""
    module, extras = MISSING[name]
    command = f"pip install '.[{extras}]'"
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT, module, EXAMPLES / name], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert ended.stderr.endswith(f"; run: {command}\n")
    assert f"Needs: {command}" in (EXAMPLES / name).read_text("utf-8")


def test_needs_are_named() -> None:
    """Every example's docstring says what it needs."""
    for path in EXAMPLES.glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
        assert docstring is not None
        assert re.search(r"\n\nNeeds(: pip install '\.\[| nothing but llm-spec)", docstring), path
