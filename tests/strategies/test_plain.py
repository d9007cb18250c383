"""A whole answer in one call of the target (`stream_always=False`): when it is asked for, and under which rules."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from llm_spec import (
    Budget,
    ChatRequest,
    ChatResponse,
    CircuitOpenError,
    ConcurrencyLimit,
    InvalidRequestError,
    ProviderDraft,
    ReasoningDelta,
    ReferenceDraft,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    StreamEvent,
    TargetError,
    TextDelta,
    Timeouts,
    ToolCall,
    ToolCallDelta,
    TransientError,
    UnsupportedError,
    Usage,
)
from llm_spec.contract.events import Finish
from llm_spec.contract.provider import Capabilities
from llm_spec.testing import ScriptedProvider

TEXT = "one two three"
AT_ONCE: dict[str, Any] = {"stream_always": False, "retry": RetryPolicy(first_wait_s=0.0, max_wait_s=0.0)}


class Target(ScriptedProvider):
    """Counts how it was asked; its first calls may fail."""

    def __init__(
        self, script: str | Sequence[StreamEvent] = TEXT, errors: Sequence[Exception] = (), **options: Any
    ) -> None:
        super().__init__(script, capabilities=Capabilities(whole_answers=True), **options)
        self.num_whole = self.num_streams = self.num_at_once = self.most_at_once = 0
        self._errors = list(errors)

    def stream(self, request: ChatRequest) -> Any:
        self.num_streams += 1
        return super().stream(request)

    async def complete(self, request: ChatRequest) -> ChatResponse:
        self.num_whole += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(0)
            if self._errors:
                raise self._errors.pop(0)
            return await super().complete(request)
        finally:
            self.num_at_once -= 1
            self.num_streams -= 1 if self.num_streams else 0  # its own, of which `complete` is made


def decoder_of(target: Target, draft: Any = None, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(**(AT_ONCE | options)))


async def test_the_same_result_as_of_a_stream() -> None:
    """But for its times."""
    events = [
        ReasoningDelta("hm"),
        TextDelta("one "),
        TextDelta("two"),
        ToolCallDelta(0, "a", "f", "{"),
        ToolCallDelta(0, arguments="}"),
        Finish("tool_calls", Usage(input_tokens=3, output_tokens=5), "tool_calls"),
    ]
    whole, streamed = Target(events), Target(events)
    one = await decoder_of(whole).decode("q", max_tokens=50)
    other = await decoder_of(streamed, stream_always=True).decode("q", max_tokens=50)
    assert (whole.num_whole, streamed.num_whole) == (1, 0)
    assert whole.requests == streamed.requests
    for name in dataclasses.asdict(one).keys() - {"timings"}:
        assert getattr(one, name) == getattr(other, name), name
    assert one.tool_calls == (ToolCall("a", "f", "{}"),)
    assert one.reasoning == "hm"


@pytest.mark.parametrize(
    "options",
    [
        {"stream_always": True},
        {"deadline_s": 10.0},
        {"timeouts": Timeouts(first_chunk_s=10.0)},
        {"timeouts": Timeouts(between_chunks_s=10.0)},
        {"budget": Budget(max_tokens=1000)},
        {"max_request_tokens": 1000},
        {"draft": ProviderDraft(ScriptedProvider(TEXT))},
        {"draft": ReferenceDraft(TEXT), "strategy": "plain"},
    ],
    ids=", ".join,
)
async def test_a_stream_where_something_needs_its_pieces(options: dict[str, Any]) -> None:
    """A deadline gives the text so far, a budget counts it, a planner learns from its speed."""
    target = Target()
    assert (await decoder_of(target, **options).decode("q")).content == TEXT
    assert (target.num_whole, target.num_streams) == (0, 1)


async def test_a_stream_where_a_target_has_nothing_else() -> None:
    """Its `complete` would be a stream without the times."""
    target = Target()
    target.capabilities = Capabilities()
    assert (await decoder_of(target).decode("q")).content == TEXT
    assert (target.num_whole, target.num_streams) == (0, 1)
    assert not SpeculativeDecoder(target=Target(), draft=None).capabilities.whole_answers


async def test_who_wants_a_stream_gets_one() -> None:
    """Only `decode` waits for the end."""
    target = Target()
    async with decoder_of(target).stream("q") as events:
        assert [event.text async for event in events if isinstance(event, TextDelta)] == ["one", " two", " three"]
    assert (target.num_whole, target.num_streams) == (0, 1)


async def test_a_target_that_fails_for_a_while_is_asked_again() -> None:
    """As often as the policy says; the result tells it."""
    target = Target(errors=[TransientError("busy"), TransientError("still busy")])
    result = await decoder_of(target).decode("q")
    assert result.content == TEXT
    assert target.num_whole == 3
    assert [retry.partition(": ")[2] for retry in result.retries] == ["busy", "still busy"]
    assert result.same_text
    target = Target(errors=[TransientError("busy")] * 5)
    with pytest.raises(TransientError, match="busy"):
        await decoder_of(target).decode("q")
    assert target.num_whole == 3


@pytest.mark.parametrize("error", [InvalidRequestError("too long"), TargetError("no"), ValueError("a bug")])
async def test_what_would_be_no_better_is_not_asked_again(error: Exception) -> None:
    """What is not this library's error becomes one."""
    target = Target(errors=[error])
    with pytest.raises(
        InvalidRequestError if isinstance(error, InvalidRequestError) else TargetError, match=str(error)
    ):
        await decoder_of(target).decode("q")
    assert target.num_whole == 1


async def test_a_target_that_keeps_failing_is_left_alone() -> None:
    """The circuit breaker counts whole answers as streams, and one that comes closes it."""
    target = Target(errors=[TransientError("down")] * 4)
    decoder = decoder_of(target, retry=RetryPolicy(max_attempts=1))
    for _ in range(4):
        with pytest.raises(TransientError):
            await decoder.decode("q")
    assert (await decoder.decode("q")).content == TEXT
    down = Target(errors=[TransientError("down")] * 9)
    decoder = decoder_of(down, retry=RetryPolicy(max_attempts=1))
    for _ in range(5):
        with pytest.raises(TransientError):
            await decoder.decode("q")
    with pytest.raises(CircuitOpenError):
        await decoder.decode("q")
    assert down.num_whole == 5


async def test_a_limit_holds() -> None:
    """Places are taken and given back, also by answers that fail or are left."""
    target = Target(errors=[TargetError("no")], delay_first_s=0.001)
    decoder = decoder_of(target, limit=ConcurrencyLimit(2))
    tasks = [asyncio.create_task(decoder.decode("q")) for _ in range(8)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end).__name__ for end in ended if isinstance(end, BaseException)] == ["TargetError", "CancelledError"]
    assert target.most_at_once == 2
    assert (await decoder.decode("q")).content == TEXT


async def test_caps_are_those_of_a_stream() -> None:
    """The decoder's cap goes into the request, and the result says which it was."""
    target = Target()
    result = await decoder_of(target, max_total_tokens=2).decode("q", max_tokens=9)
    assert (result.content, result.finish_reason, result.stopped_by) == ("one two", "length", "max_total_tokens")


async def test_a_strategy_that_cannot_be_used_is_refused() -> None:
    """It is not answered in another way unasked."""
    target = Target()
    with pytest.raises(UnsupportedError):
        await decoder_of(target, strategy="race").decode("q")
    assert target.num_whole == 0


async def test_a_local_model_answers_as_ever() -> None:
    """It has no call to save."""
    pytest.importorskip("onnxruntime")
    async with (
        SpeculativeDecoder(target="builtin:draft", draft=None, config=SpeculativeConfig(stream_always=False)) as one,
        SpeculativeDecoder(target="builtin:draft", draft=None) as other,
    ):
        at_once = await one.decode("def area(", max_tokens=8)
        assert at_once.content == (await other.decode("def area(", max_tokens=8)).content
        assert at_once.rounds
