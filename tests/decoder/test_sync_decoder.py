"""SyncDecoder: a decoder for code without `await`, whatever threads, loops and processes are around it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import pytest

from llm_spec import (
    ChatRequest,
    ClosedError,
    InvalidRequestError,
    PromptLookup,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SyncDecoder,
    TargetError,
    TextDelta,
)
from llm_spec.decoder.answer_stream import AnswerStream, SyncAnswerStream
from llm_spec.testing import LocalProvider, ScriptedProvider, TableModel

WORDS: Final = " ".join(f"word{i}" for i in range(40))
LONG_S: Final = 30.0  # far more than anything here takes


def find_thread(decoder: SyncDecoder) -> threading.Thread:
    (thread,) = [t for t in threading.enumerate() if t.name == f"llm_spec decoder {decoder.name}"]
    return thread


def read_text(decoder: SyncDecoder) -> str:
    return "".join(event.text for event in decoder.stream("Say it.") if isinstance(event, TextDelta))


# ------------------------------------------------------------------------------------------ the same as with await


@pytest.mark.parametrize("name", ["__init__", "decode", "stream", "discover"])
def test_both_decoders_take_the_same_arguments(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (SyncDecoder, SpeculativeDecoder))
    assert ours.parameters == theirs.parameters


def test_both_streams_have_the_same_members() -> None:
    def list_members(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert list_members(SyncAnswerStream) == {name.replace("aclose", "close") for name in list_members(AnswerStream)}


@pytest.mark.parametrize("strategy", ["plain", "tokens"])
def test_an_answer_is_the_decoder_s(strategy: str) -> None:
    config = SpeculativeConfig(strategy=strategy)
    with SyncDecoder(target=LocalProvider(TableModel(WORDS)), draft=PromptLookup(), config=config) as decoder:
        result = decoder.decode("Say it.", max_tokens=30)
        assert (result.strategy, result.content) == (strategy, WORDS[: len(result.content)])
        stream = decoder.stream("Say it.", max_tokens=30, rounds=True)
        *events, last = stream
        assert isinstance(last, SpeculativeFinish)
        assert stream.result is last.result
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == result.content
        assert decoder.stats.num_requests == 2
        assert decoder.config is config
        decoder.discover()


def test_errors_are_the_decoder_s() -> None:
    target = ScriptedProvider(WORDS, fail_at={3: TargetError("it broke")})
    with SyncDecoder(target=target, draft=None) as decoder:
        with pytest.raises(TargetError, match="it broke") as raised:
            decoder.decode("Say it.")
        assert WORDS.startswith(raised.value.partial_text)
        assert raised.value.partial_text
        for ask in (decoder.decode, decoder.stream):
            with pytest.raises(InvalidRequestError, match="max_token"):
                ask("Say it.", max_token=3)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]


# ------------------------------------------------------------------------------------------ reading and leaving


def test_a_loop_that_is_left_ends_the_answer_before_the_next_statement() -> None:
    target = ScriptedProvider(WORDS, delay_piece_s=0.01)
    with SyncDecoder(target=target, draft=None) as decoder:
        for _ in decoder.stream("Say it."):
            assert target.num_open == 1
            break
        assert (target.num_open, target.num_closed) == (0, 1)
        with decoder.stream("Say it.") as events:
            next(events)
            assert target.num_open == 1
        assert (target.num_open, target.num_closed) == (0, 2)
        with suppress(LookupError), decoder.stream("Say it.") as events:
            for _ in events:
                raise LookupError
        assert (target.num_open, target.num_closed) == (0, 3)


def test_a_stream_that_is_never_read_opens_nothing() -> None:
    target = ScriptedProvider(WORDS)
    with SyncDecoder(target=target, draft=None) as decoder:
        decoder.stream("Say it.").close()
        with decoder.stream("Say it."):
            pass
    assert target.requests == []


def test_a_second_loop_says_that_the_stream_has_ended() -> None:
    with SyncDecoder(target=ScriptedProvider(WORDS), draft=None) as decoder:
        stream = decoder.stream("Say it.")
        with pytest.raises(RuntimeError, match="no result before its last event"):
            _ = stream.result
        assert list(stream)
        with pytest.raises(RuntimeError, match="call `stream` again"):
            list(stream)
        assert next(stream, None) is None


# ------------------------------------------------------------------------------------------ threads and loops


def test_threads_share_a_decoder() -> None:
    target = ScriptedProvider(WORDS, delay_piece_s=0.001)
    with SyncDecoder(target=target, draft=None) as decoder, ThreadPoolExecutor(8) as pool:
        texts = [*pool.map(lambda _: decoder.decode("Say it.").content, range(8))]
        texts += pool.map(lambda _: read_text(decoder), range(8))
        assert decoder.stats.num_requests == 16
    assert texts == [WORDS] * 16
    assert (target.num_open, target.num_acloses) == (0, 0)  # what was given stays the giver's


async def test_it_works_where_an_event_loop_runs() -> None:
    """As in a notebook, or in a function that a coroutine calls."""
    with SyncDecoder(target=ScriptedProvider(WORDS), draft=None) as decoder:
        assert decoder.decode("Say it.").content == WORDS
        assert read_text(decoder) == WORDS


def test_a_call_from_its_own_thread_is_refused() -> None:
    """It would wait for itself."""
    told: list[BaseException] = []

    def answer(_: object) -> str:
        try:
            decoder.decode("And you?")
        except RuntimeError as error:
            told.append(error)
        return WORDS

    with SyncDecoder(target=ScriptedProvider(answer), draft=None) as decoder:
        assert decoder.decode("Say it.").content == WORDS
    assert "await the async method" in str(told)


def test_a_forgotten_decoder_takes_its_thread_along() -> None:
    decoder = SyncDecoder(target=ScriptedProvider(WORDS), draft=None)
    decoder.decode("Say it.")
    thread = find_thread(decoder)
    del decoder
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------------ closing

ASKS: Final[dict[str, Callable[[SyncDecoder], Any]]] = {
    "decode": lambda decoder: decoder.decode("Say it."),
    "stream": lambda decoder: list(decoder.stream("Say it.")),
    "discover": lambda decoder: decoder.discover(),
    "with": lambda decoder: decoder.__enter__(),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_closed_decoder_says_so(ask: str) -> None:
    with SyncDecoder(target=ScriptedProvider(WORDS), draft=None) as decoder:
        decoder.decode("Say it.")
        thread = find_thread(decoder)
    assert not thread.is_alive()
    decoder.close()
    assert repr(decoder) == "<closed SyncDecoder(target='scripted:script', draft=None)>"
    with pytest.raises(ClosedError) as raised:
        ASKS[ask](decoder)
    assert str(raised.value) == "decoder scripted:script is closed; make another"


@pytest.mark.parametrize("ask", ["decode", "stream"])
def test_closing_ends_what_another_thread_waits_for(ask: str) -> None:
    target = ScriptedProvider(WORDS, delay_first_s=0.0, delay_piece_s=LONG_S)
    decoder = SyncDecoder(target=target, draft=None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ASKS[ask], decoder)
        while not target.num_open:
            time.sleep(0.001)
        decoder.close()
        with pytest.raises(ClosedError, match="was closed while it answered; make another"):
            waiting.result(LONG_S)
    assert target.num_open == 0


def test_closing_closes_what_was_opened_from_strings() -> None:
    with SyncDecoder(target="generic:m@http://127.0.0.1:9/v1", draft=None) as decoder:
        target = decoder._decoder.target
    with pytest.raises(ClosedError):
        asyncio.run(target.complete(ChatRequest.create("Say it.")))


# ------------------------------------------------------------------------------------------ processes

PROGRAM: Final = """
import os, sys
from llm_spec import SyncDecoder
from llm_spec.testing import ScriptedProvider
target = ScriptedProvider("one two three " * 400, delay_piece_s=0.01)
decoder = SyncDecoder(target=target, draft=None)
"""
IS_FORKABLE = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def run_program(program: str) -> str:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM + program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


@pytest.mark.parametrize("last", ["", "stream = decoder.stream('Hi'); next(stream)", "next(decoder.stream('Hi'))"])
def test_a_program_may_end_without_closing(last: str) -> None:
    """Also amid an answer. Nothing is printed, and nothing holds the end up."""
    assert run_program(f"print(decoder.decode('Hi', max_tokens=3).content)\n{last}") == "one two three\n"


@IS_FORKABLE
def test_a_child_that_is_forked_goes_on_using_it() -> None:
    printed = run_program("""
def ask(who):
    os.write(1, f"{who} {decoder.decode('Hi', max_tokens=3).content}\\n".encode())

ask("parent")
pid = os.fork()
if not pid:
    ask("child")
    sys.exit()
assert os.waitpid(pid, 0)[1] == 0
ask("parent")
decoder.close()
""")
    assert printed.splitlines() == ["parent one two three", "child one two three", "parent one two three"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("ask", ["decoder.decode('Hi')", "list(decoder.stream('Hi'))"])
def test_ctrl_c_ends_the_answer(ask: str) -> None:
    """And then the decoder answers again."""
    program = f"""
print("waits", flush=True)
try:
    {ask}
except KeyboardInterrupt:
    print("interrupted", target.num_open)
print(decoder.decode("Hi", max_tokens=3).content)
"""
    command = [sys.executable, "-X", "dev", "-c", PROGRAM + program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "waits\n"
            time.sleep(0.3)  # the answer takes 12 s
            os.kill(started.pid, signal.SIGINT)
            printed, errors = started.communicate(timeout=LONG_S)
        finally:
            started.kill()
    assert (printed, errors) == ("interrupted 0\none two three\n", "")
