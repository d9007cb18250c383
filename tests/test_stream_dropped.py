"""A stream that its reader drops as the last thing a program does ends silently."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
from llm_spec import SpeculativeDecoder
from llm_spec.testing import LocalProvider, ScriptedProvider, TableModel

words = "one two three four five six " * 40
target = {target}

async def main():
    async with SpeculativeDecoder(target=target, draft={draft!r}) as decoder:
        async def iterate():
            async with decoder.stream("Hi") as events:
                async for event in events:
                    yield event
        async for event in iterate():
            break

asyncio.run(main())
"""
WITHOUT_CONTEXTS = """
import asyncio, sys
from llm_spec import SpeculativeDecoder
from llm_spec.testing import LocalProvider, ScriptedProvider, TableModel

words = "one two three four five six " * 40
decoder = SpeculativeDecoder(target={target}, draft={draft!r})
streams = []

async def main():
    {last}

asyncio.run(main())
"""
LAST = {
    "break": "async for event in decoder.stream('Hi'): break",
    "exit": "async for event in decoder.stream('Hi'): sys.exit()",
    "held": "streams.append(decoder.stream('Hi')); await anext(streams[0])",
    "circle": "stream = decoder.stream('Hi'); stream.itself = stream; await anext(stream)",
}
TARGETS = {"local": "LocalProvider(TableModel(words))", "remote": "ScriptedProvider(words, delay_piece_s=0.01)"}


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_dropped_stream_is_silent(target: str, draft: str | None) -> None:
    """The decoder's end waits for it."""
    program = PROGRAM.format(target=TARGETS[target], draft=draft)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_stream_that_is_left_open_is_silent(target: str, draft: str | None, last: str) -> None:
    """Also where nothing closes the decoder: the end of the event loop closes the stream, in order."""
    program = WITHOUT_CONTEXTS.format(target=TARGETS[target], draft=draft, last=LAST[last])
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
