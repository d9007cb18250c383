"""A type checker reads a user's program: what is right passes mypy's strict mode, and what is wrong is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("mypy")

RIGHT: Final = """
import asyncio

from llm_spec import SpeculativeConfig, SpeculativeDecoder, SpeculativeFinish, SyncDecoder, TextDelta


async def stream_answer(prompt: str) -> str:
    config = SpeculativeConfig(strategy="tokens", seed=7)
    async with SpeculativeDecoder(target="builtin:target", draft="lookup", config=config) as decoder:
        stream = decoder.stream(prompt, max_tokens=64)
        async for event in stream:
            if isinstance(event, TextDelta):
                print(event.text, end="", flush=True)
        speedup: float | None = stream.result.speedup
        async with decoder.stream(prompt, rounds=True) as events:
            async for event in events:
                if isinstance(event, SpeculativeFinish):
                    break
        result = await decoder.decode(prompt, temperature=0.0)
        return f"{speedup}: {result.content}"


def answer(prompt: str) -> str:
    with SyncDecoder(target="builtin:target", draft="lookup") as decoder:
        text = "".join(event.text for event in decoder.stream(prompt) if isinstance(event, TextDelta))
        with decoder.stream(prompt) as events:
            for event in events:
                if isinstance(event, SpeculativeFinish):
                    text += events.result.summary()
        return text + decoder.decode([{"role": "user", "content": prompt}]).content


print(asyncio.run(stream_answer("def f():")), answer("def f():"))
"""
WRONG: Final = """
from llm_spec import SpeculativeDecoder, SyncDecoder

SpeculativeDecoder("builtin:target", "lookup")  # call-arg, misc
decoder = SyncDecoder(target="builtin:target", draft="lookup")
decoder.decode("Hi", max_token=64)  # call-arg
decoder.decode("Hi").contents  # attr-defined
for event in SpeculativeDecoder(target="builtin:target", draft=None).stream("Hi"):  # attr-defined
    pass
"""


def test_programs_with_both_decoders(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=cache", "right.py", "wrong.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    errors = [line.split(":", 2) for line in checked.stdout.splitlines() if ": error: " in line]
    assert {name for name, *_ in errors} == {"wrong.py"}, checked.stdout + checked.stderr
    expected = {number for number, line in enumerate(WRONG.splitlines(), 1) if "  # " in line}
    assert {int(number) for _, number, _ in errors} == expected, checked.stdout
