"""Log events: one per round and per request, with its id, and no message text unless asked for."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from llm_spec import Fixed, ReferenceDraft, SpeculativeConfig, SpeculativeDecoder, TargetError
from llm_spec.testing import LocalProvider, RandomDraft, ScriptedProvider, TableModel

ANSWER = "the secret answer"
QUESTION = "a private question"


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    yield
    structlog.reset_defaults()


def decoder_of(draft: Any = None, **config: Any) -> SpeculativeDecoder:
    target = LocalProvider(TableModel(ANSWER, order=16))
    return SpeculativeDecoder(
        target=target, draft=draft or ReferenceDraft(ANSWER), config=SpeculativeConfig(lookahead=Fixed(4), **config)
    )


async def logged(decoder: SpeculativeDecoder) -> list[dict[str, Any]]:
    with capture_logs([merge_contextvars]) as entries:
        await decoder.decode(QUESTION)
    return [dict(entry) for entry in entries]


async def test_events_per_round_and_request() -> None:
    """A start, each round, an end; rounds agree with the result."""
    decoder = decoder_of()
    with capture_logs([merge_contextvars]) as entries:
        result = await decoder.decode(QUESTION)
    events = [entry["event"] for entry in entries]
    assert events == ["request_started", *["round"] * result.stats.num_rounds, "request_finished"]
    rounds = [entry for entry in entries if entry["event"] == "round"]
    assert [r["num_draft_tokens"] for r in rounds] == [r.num_draft_tokens for r in result.rounds]
    assert entries[-1]["stopped_by"] == "eos"


async def test_the_end_tells_what_the_lookahead_learned() -> None:
    """The state of its policy, as the result has it; nothing where nothing is drafted."""
    decoder = decoder_of()
    with capture_logs([merge_contextvars]) as entries:
        result = await decoder.decode(QUESTION)
    assert entries[-1]["plain_reason"] is None
    assert entries[-1]["lookahead"] == result.lookahead == {"lookahead": 4}
    (*_, end) = await logged(decoder_of(strategy="plain"))
    assert (end["event"], end["plain_reason"], end["lookahead"]) == ("request_finished", "configured", {})


async def test_one_request_has_one_id() -> None:
    """Every event of a request carries the same id; another request has another."""
    first, second = await logged(decoder_of()), await logged(decoder_of())
    assert len({entry["llm_request_id"] for entry in first}) == 1
    assert {entry["llm_request_id"] for entry in first} != {entry["llm_request_id"] for entry in second}


async def test_concurrent_requests_keep_their_ids() -> None:
    """Events of requests that run side by side do not mix: each id has one start, one end, and all rounds."""
    decoder = decoder_of()
    with capture_logs([merge_contextvars]) as entries:
        results = await asyncio.gather(*(decoder.decode(QUESTION) for _ in range(8)))
    by_id: dict[str, list[str]] = {}
    for entry in entries:
        by_id.setdefault(entry["llm_request_id"], []).append(entry["event"])
    assert len(by_id) == 8
    for events in by_id.values():
        assert (events[0], events[-1]) == ("request_started", "request_finished")
        assert len(events) == results[0].stats.num_rounds + 2


async def test_the_callers_context_is_left_as_it_was() -> None:
    """The id is bound for the request's own events alone, also between a stream's events; the caller's come along."""
    bound = {"request_id": "the caller's", "user": "u1", "event": "signup", "level": "gold"}
    structlog.contextvars.bind_contextvars(**bound)
    with capture_logs([merge_contextvars]) as entries:
        async with decoder_of().stream(QUESTION) as events:
            async for _ in events:
                assert structlog.contextvars.get_contextvars() == bound
    assert structlog.contextvars.get_contextvars() == bound
    assert {entry["user"] for entry in entries} == {"u1"}
    assert {entry["request_id"] for entry in entries} == {"the caller's"}
    assert "the caller's" not in {entry["llm_request_id"] for entry in entries}
    assert "signup" not in {entry["event"] for entry in entries}


@pytest.mark.parametrize("draft", [ReferenceDraft(ANSWER), RandomDraft()], ids=["right", "wrong"])
async def test_no_message_text_is_logged(draft: Any) -> None:
    """Neither question nor answer is in any event."""
    text = repr(await logged(decoder_of(draft)))
    assert "private" not in text
    assert "secret" not in text


async def test_message_text_is_logged_when_asked_for() -> None:
    """`log_content` puts question and answer in."""
    text = repr(await logged(decoder_of(log_content=True)))
    assert QUESTION in text
    assert ANSWER in text


async def test_a_failing_target_is_logged_without_its_words() -> None:
    """The failure is an error event with the request's id; what the target said in it may hold message text."""
    target = ScriptedProvider(ANSWER, fail_at={1: RuntimeError(f"cannot answer {QUESTION}")})
    with capture_logs([merge_contextvars]) as entries, pytest.raises(TargetError):
        await SpeculativeDecoder(target=target, draft=None).decode(QUESTION)
    assert entries[-1]["event"] == "request_failed"
    assert entries[-1]["log_level"] == "error"
    assert len({entry["llm_request_id"] for entry in entries}) == 1
    assert "private" not in repr(entries)
    assert "secret" not in repr(entries)


async def test_a_failing_draft_is_a_warning_of_its_request() -> None:
    """It is logged once, as a warning, with the request's id and the reason."""
    draft = ScriptedProvider("x", fail_at={0: ConnectionError("draft is down")})
    config = SpeculativeConfig(strategy="regenerate")
    with capture_logs([merge_contextvars]) as entries:
        await SpeculativeDecoder(target=ScriptedProvider(ANSWER), draft=draft, config=config).decode(QUESTION)
    warnings = [entry for entry in entries if entry["log_level"] == "warning"]
    assert [entry["event"] for entry in warnings] == ["draft_failed"]
    assert warnings[0]["reason"] == "ConnectionError"
    assert len({entry["llm_request_id"] for entry in entries}) == 1


async def test_a_request_that_is_left_is_logged_as_such() -> None:
    """A started request always has an end in the log."""
    with capture_logs([merge_contextvars]) as entries:
        async with decoder_of().stream(QUESTION) as events:
            await anext(events)
    seen = [entry["event"] for entry in entries if entry["event"] != "round"]
    assert seen == ["request_started", "request_cancelled"]


async def test_unconfigured_it_goes_to_the_standard_library(caplog: pytest.LogCaptureFixture) -> None:
    """Without a structlog configuration the events are records of the logger `llm_spec`, with the id."""
    with caplog.at_level(logging.DEBUG, "llm_spec"):
        result = await decoder_of().decode(QUESTION)
    messages = [record.getMessage() for record in caplog.records if record.name == "llm_spec"]
    assert len(messages) == result.stats.num_rounds + 2
    assert messages[0].startswith("request_started")
    assert all("llm_request_id=" in message for message in messages)
    assert "private" not in caplog.text


async def test_unconfigured_it_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """A library prints nothing by itself."""
    await decoder_of().decode(QUESTION)
    assert capfd.readouterr() == ("", "")


def test_without_structlog_the_standard_log_has_the_ids(tmp_path: Path) -> None:
    """structlog stays unloaded where nobody else has loaded it; the events of a request have its id all the same."""
    program = tmp_path / "program.py"
    program.write_text("""if True:
        import asyncio, logging, sys
        from llm_spec import SpeculativeDecoder
        from llm_spec.testing import ScriptedProvider

        logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s", stream=sys.stdout)
        logging.getLogger("asyncio").setLevel(logging.WARNING)
        for _ in range(2):
            asyncio.run(SpeculativeDecoder(target=ScriptedProvider("an answer"), draft=None).decode("a question"))
        print("structlog" in sys.modules)
        """)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=60)
    *lines, is_loaded = done.stdout.splitlines()
    assert is_loaded == "False"
    ids = [
        re.findall(r"llm_request_id='([0-9a-f]{12})'", line) for line in lines if line.startswith("llm_spec request_")
    ]
    assert [len(found) for found in ids] == [1, 1, 1, 1]  # a start and an end, twice
    assert ids[0] == ids[1] != ids[2] == ids[3]
