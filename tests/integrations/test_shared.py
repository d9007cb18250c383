"""What all adapters stand on: a stream that any task may close, and who closes a provider."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from llm_spec import ChatRequest, Finish, SpeculativeDecoder, SpeculativeFinish, TargetError, TextDelta
from llm_spec.contract.errors import UnknownProviderError
from llm_spec.integrations._shared import (
    BridgedSource,
    ProviderSource,
    StreamClosedError,
    TaskReadEventStream,
    build_request_options,
    describe_finish_as_json,
)
from llm_spec.testing import ScriptedProvider

REQUEST = ChatRequest.create("Go")
WORDS = "one two three four five"


async def test_it_gives_the_providers_events() -> None:
    """All events come, in their order, and the end ends."""
    provider = ScriptedProvider(WORDS)
    async with TaskReadEventStream(provider.stream(REQUEST)) as stream:
        events = [event async for event in stream]
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == WORDS
    assert isinstance(events[-1], Finish)
    assert (provider.num_open, provider.num_closed) == (0, 1)


async def test_it_reads_one_event_ahead_and_no_more() -> None:
    """A reader that stops holds the upstream back: what comes after the next event is not asked for."""
    provider = ScriptedProvider(WORDS, fail_at={2: TargetError("broken")})
    async with TaskReadEventStream(provider.stream(REQUEST)) as stream:
        await anext(stream)
        for _ in range(20):
            await asyncio.sleep(0)
        assert provider.num_open == 1
        await anext(stream)
        for _ in range(20):
            await asyncio.sleep(0)
        assert provider.num_open == 0


async def test_another_task_may_close_it_while_a_reader_waits() -> None:
    """The reader is released with StreamClosedError, and the upstream has ended when `aclose` returns."""
    provider = ScriptedProvider(WORDS, delay_first_s=3600.0)
    async with TaskReadEventStream(provider.stream(REQUEST)) as stream:
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        closer = asyncio.create_task(stream.aclose())
        with pytest.raises(StreamClosedError):
            await reader
        await closer
        assert provider.num_open == 0
        with pytest.raises(StreamClosedError):
            await anext(stream)
        await stream.aclose()


async def test_it_may_be_entered_and_left_by_different_tasks() -> None:
    """A provider's stream belongs to one task; whoever opens, reads and closes need not be one."""
    stream = TaskReadEventStream(SpeculativeDecoder(target=ScriptedProvider(WORDS), draft=None).stream(REQUEST))
    await asyncio.create_task(stream.__aenter__())
    assert await asyncio.create_task(_next(stream)) == TextDelta("one")
    await asyncio.create_task(stream.aclose())


async def _next(stream: TaskReadEventStream) -> object:
    return await anext(stream)


async def test_an_error_comes_where_it_happened() -> None:
    """`wait_for_first_event` raises what comes before the first event, reading what comes later."""
    for at in (0, 2):
        provider = ScriptedProvider(WORDS, fail_at={at: TargetError("broken")})
        async with TaskReadEventStream(provider.stream(REQUEST)) as stream:
            if at == 0:
                with pytest.raises(TargetError, match="broken"):
                    await stream.wait_for_first_event()
            with pytest.raises(TargetError, match="broken"):
                _ = [event async for event in stream]
        assert provider.num_open == 0


async def test_half_an_answer_is_none() -> None:
    """A stream that ends without a Finish is an error, not an answer."""
    async with ProviderSource(ScriptedProvider([TextDelta("half")])).stream(REQUEST) as stream:
        with pytest.raises(TargetError, match="without a finish reason"):
            _ = [event async for event in stream]


async def test_a_source_closes_what_it_made_and_nothing_else() -> None:
    """What was given stays open; what was made of strings is closed, and made anew on demand."""
    given = ScriptedProvider(WORDS)
    source = ProviderSource(given)
    assert source.provider is given
    await source.aclose()
    assert given.num_acloses == 0
    source = ProviderSource(given, "lookup")
    made = source.provider
    assert made is source.provider
    await source.aclose()
    assert made is not source.provider
    await source.aclose()
    with pytest.raises(UnknownProviderError):
        ProviderSource("nowhere:at-all")


async def test_figures_are_json() -> None:
    """A decoder's answer has figures, a plain provider's only says why it ended."""
    assert describe_finish_as_json(Finish("stop")) == {"finish_reason": "stop", "stopped_by": None}
    async with SpeculativeDecoder(target=ScriptedProvider(WORDS), draft=None).stream(REQUEST) as events:
        ends = [event async for event in events if isinstance(event, SpeculativeFinish)]
    told = describe_finish_as_json(ends[0])
    assert (told["strategy"], told["acceptance_rate"]) == ("plain", None)
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize(("draft", "owns_loop"), [(None, True), ("lookup", True), (ScriptedProvider(WORDS), False)])
async def test_a_bridged_source_of_strings_has_a_loop_of_its_own(draft: Any, owns_loop: bool) -> None:
    """Where a caller's provider takes part, the loop of the first call is home; closing closes what was opened."""
    bridged = BridgedSource("rules:any", draft)
    made = bridged.source.provider
    assert (await bridged.arun(running_loop) is asyncio.get_running_loop()) is not owns_loop
    await bridged.aclose()
    assert made is not bridged.source.provider


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_options_are_told_from_what_goes_to_servers() -> None:
    """What ChatRequest does not know goes into `extra`; None is left out; token ids may be texts, as in JSON."""
    given = {"top_k": 3, "seed": None, "logit_bias": {"5": 1}, "guided": True, "extra_body": {"mirostat": 1}}
    assert build_request_options(given) == {"top_k": 3, "logit_bias": {5: 1}, "extra": {"mirostat": 1, "guided": True}}
    assert build_request_options({"extra": {"a": 1}, "b": 2}) == {"extra": {"a": 1, "b": 2}}
    assert build_request_options({}) == {}
    assert build_request_options({"logprobs": True}) == {"top_logprobs": 0}
    assert build_request_options({"logprobs": True, "top_logprobs": 3}) == {"top_logprobs": 3}
    assert build_request_options({"logprobs": False, "top_logprobs": 3}) == {}
    assert build_request_options({"top_logprobs": 3}) == {"top_logprobs": 3}
