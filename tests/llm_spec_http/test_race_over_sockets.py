"""Racing against a real server on loopback: the same text, what it costs there, and nothing left open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_spec_http import DIALECTS, HttpProvider
from support.wire import served

from llm_spec import (
    ChatRequest,
    ReferenceDraft,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    TargetError,
    TextDelta,
    UnsupportedError,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import Feature
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import run_virtual
from llm_spec.testing.server import ScriptedModelServer, ServerFaults, ServerLatency, make_disagreeing_draft
from llm_spec.testing.simulated import SimulatedDraft

pytestmark = pytest.mark.virtual_clock

WORDS = " ".join(f"word{i}" for i in range(120))
VARIED = (
    "Plan for   the reader.\r\n\r\n```python title here\ndef f(x):\n    return x  # naïve\n```\n\n"
    "日本語 の 文章 も 😀 👩‍👩‍👧 text with runs\t\tof \n \n whitespace  \n\n\nand the end of it all \n"
) * 2
LATENCY = ServerLatency(first_token_s=0.02, token_s=0.002)
QUICK = ServerLatency(first_token_s=0.01, token_s=0.0005)
QUESTION = "Tell me."
ONCE = RetryPolicy(max_attempts=1)


class Believed(HttpProvider):
    """Takes it that its server goes on from a text: one that knows a short text only cannot show it."""

    async def discover(self, feature: Feature) -> None:
        if feature != "continue_prefix":
            await super().discover(feature)


@asynccontextmanager
async def opened(
    server: ScriptedModelServer, dialect: str = "vllm", kind: type[HttpProvider] = HttpProvider
) -> AsyncGenerator[HttpProvider]:
    provider = kind("scripted", base_url=server.url, dialect=DIALECTS[dialect])
    try:
        yield provider
    finally:
        await provider.aclose()


def racing(draft: DraftProvider, target: HttpProvider, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy="race", **options))


def knowing(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """A decoder that knows that its target has room for many streams."""
    decoder._planner.pair_stats.streams.num_extra = 64
    return decoder


def agreeing(answer: str = WORDS) -> DraftProvider:
    return SimulatedDraft(answer, 1.0, 0)


async def raced(
    server: ScriptedModelServer,
    draft: DraftProvider,
    *,
    dialect: str = "vllm",
    kind: type[HttpProvider] = HttpProvider,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> SpeculativeResult:
    """One raced answer by a new provider; whatever was open is closed soon after."""
    options.setdefault("temperature", 0.0)
    async with opened(server, dialect, kind) as target:
        async with racing(draft, target, **(config or {})) as decoder:
            await decoder.discover()
            result = await decoder.decode(QUESTION, **options)
        await assert_all_closed(server)
    return result


async def plain(server: ScriptedModelServer, dialect: str = "vllm", **options: Any) -> SpeculativeResult:
    options.setdefault("temperature", 0.0)
    async with opened(server, dialect) as target:
        return await SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(strategy="plain")).decode(
            QUESTION, **options
        )


async def assert_all_closed(server: ScriptedModelServer) -> None:
    """At the server's side, within 50 ms."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 0.05
    while server.num_open_streams and loop.time() < end:  # noqa: ASYNC110 - the server is to be watched, not changed
        await asyncio.sleep(0.002)
    assert server.num_open_streams == 0


def children_of(server: ScriptedModelServer) -> list[dict[str, Any]]:
    """The bodies of the later streams of an answer that was raced by ids (discovery asks for 2 tokens at most)."""
    return [
        body for body in server.requests if "prompt" in body and body.get("stream") and body.get("max_tokens", 9) > 2
    ]


# ------------------------------------------------------------------------------------------ the same text

MODES: dict[str, tuple[str, str | None]] = {
    "by ids": ("vllm", "fields"),
    "by text": ("sglang", "fields"),
    "by text, repeated": ("mistral", "repeats"),
}


def server_for(mode: str, answer: str, **options: Any) -> ScriptedModelServer:
    return ScriptedModelServer(answer, continues_prefix=MODES[mode][1], **{"latency": LATENCY, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_streams", [2, 12])
async def test_the_answer_is_plains(num_streams: int, mode: str) -> None:
    """With drafts good and bad, one token a frame and three, by ids and by text."""
    dialect = MODES[mode][0]
    for agreement, tokens_per_frame in ((0.9, 1), (1.0, 3), (0.0, 1)):
        async with server_for(mode, VARIED, tokens_per_frame=tokens_per_frame, latency=QUICK) as server:
            expected = await plain(server, dialect)
            draft = ReferenceDraft(make_disagreeing_draft(VARIED, agreement, 3))
            result = await raced(server, draft, dialect=dialect, config={"max_concurrent_streams": num_streams})
        assert result.content == expected.content == VARIED
        assert result.finish_reason == expected.finish_reason
        assert result.guarantee == ("exact" if mode == "by ids" else "exact-text")


@settings(deadline=None, max_examples=25)
@given(
    parts=st.lists(
        st.sampled_from(
            ["the", " cat", " sat", ".", "\n", "\n\n", "   ", "\r\n", "```py title\n", " 日本語", " 😀", " e\u0301"]
        ),
        max_size=40,
    ),
    num_repeats=st.integers(1, 4),
    agreement=st.sampled_from([0.5, 0.9, 1.0]),
    num_streams=st.sampled_from([2, 4, 12]),
    tokens_per_frame=st.sampled_from([1, 3]),
    mode=st.sampled_from(list(MODES)),
    stop=st.sampled_from([None, "cat sat", "."]),
    max_tokens=st.none() | st.integers(1, 150),
)
def test_any_race_gives_plain_text(
    *,
    parts: list[str],
    num_repeats: int,
    agreement: float,
    num_streams: int,
    tokens_per_frame: int,
    mode: str,
    stop: str | None,
    max_tokens: int | None,
) -> None:
    """Text and finish are those of the server alone, stop strings, caps and all."""
    answer = "".join(parts) * num_repeats
    if mode != "by ids":
        max_tokens = None  # see the tests of caps by text in test_race.py

    async def check() -> None:
        async with server_for(mode, answer, tokens_per_frame=tokens_per_frame, latency=QUICK) as server:
            expected = await plain(server, MODES[mode][0], stop=stop, max_tokens=max_tokens)
            draft = ReferenceDraft(make_disagreeing_draft(answer, agreement, 3))
            result = await raced(
                server,
                draft,
                dialect=MODES[mode][0],
                kind=Believed,
                config={"max_concurrent_streams": num_streams},
                stop=stop,
                max_tokens=max_tokens,
            )
        assert result.content == expected.content
        assert result.finish_reason == expected.finish_reason

    run_virtual(check())


@pytest.mark.parametrize("mode", MODES)
async def test_streams_do_take_over(mode: str) -> None:
    """A draft that agrees is worth its while: the later streams write most of the answer."""
    async with server_for(mode, WORDS) as server, opened(server, MODES[mode][0]) as target:
        won = ""
        for feature in ("token_endpoint", "continue_prefix"):
            await target.discover(feature)
        async with knowing(racing(agreeing(), target)).stream(QUESTION, temperature=0.0) as events:
            async for event in events:
                if isinstance(event, TextDelta) and event.origin == "accepted":
                    won += event.text
    assert len(won) > len(WORDS) / 2


@pytest.mark.parametrize("mode", MODES)
async def test_stop_strings_are_matched_here(mode: str) -> None:
    """No stream is sent them, for one stream's text may hold the beginning of one and another's the end."""
    async with server_for(mode, WORDS) as server:
        result = await raced(server, agreeing(), dialect=MODES[mode][0], stop=" word70")
        assert not any("stop" in body for body in server.requests)
    assert result.content == WORDS[: WORDS.index(" word70")]
    assert (result.finish_reason, result.stopped_by) == ("stop", "stop_string")


@pytest.mark.parametrize(
    "max_tokens",
    [
        1,
        2,
        17,
        18,
        19,
        25,
        26,
        33,
        34,
        35,
        36,
        119,
        120,
        121,
        122,
    ],
)
async def test_caps_by_ids(max_tokens: int) -> None:
    """The cap is the answer's, whichever stream reaches it; plain's finish too where the answer ends just there."""
    async with server_for("by ids", WORDS) as server:
        expected = await plain(server, max_tokens=max_tokens)
        result = await raced(server, agreeing(), max_tokens=max_tokens)
    assert result.content == expected.content
    assert (result.finish_reason, result.stopped_by) == (expected.finish_reason, expected.stopped_by)


@pytest.mark.parametrize("mode", MODES)
async def test_a_request_with_a_prefix(mode: str) -> None:
    """The answer goes on behind it, whether or not the server repeats it."""
    prefix = WORDS[: WORDS.index(" word30")]
    async with server_for(mode, WORDS) as server:
        result = await raced(server, agreeing(), dialect=MODES[mode][0], prefix=prefix)
    assert prefix + result.content == WORDS


# ------------------------------------------------------------------------------------------ seeds and costs


@pytest.mark.parametrize(("temperature", "seed"), [(0.7, 5), (0.7, None), (None, 5)])
async def test_each_stream_has_a_seed_of_its_own(temperature: float | None, seed: int | None) -> None:
    """In the bodies that the server got: the first stream's is the request's, and no two are the same."""
    async with server_for("by ids", WORDS) as server:
        await raced(server, agreeing(), temperature=temperature, seed=seed)
        chats = [body for body in server.requests if "messages" in body]
        root = next(body for body in chats if body["messages"][-1]["content"] == QUESTION)
        seeds = [body["seed"] for body in children_of(server)]
    assert root.get("seed") == seed
    assert len({seed, *seeds}) == len(seeds) + 1 >= 3


async def test_greedy_streams_are_sent_no_seed() -> None:
    """Nothing is drawn, so nothing is said."""
    async with server_for("by ids", WORDS) as server:
        await raced(server, agreeing())
        assert len(children_of(server)) >= 2
        assert not any("seed" in body for body in server.requests)


@pytest.mark.parametrize("agreement", [0.9, 1.0])
async def test_usage_is_what_the_server_counted(agreement: float) -> None:
    """Prompt tokens of the later streams, and tokens written that are not in the answer, up to those under way."""
    async with server_for("by ids", WORDS) as server, opened(server) as target:
        await target.discover("token_endpoint")
        num_before, num_calls = server.num_generated_tokens, len(server.requests)
        result = await racing(ReferenceDraft(make_disagreeing_draft(WORDS, agreement, 3)), target).decode(
            QUESTION, temperature=0.0
        )
        await assert_all_closed(server)
        num_generated = server.num_generated_tokens - num_before
        bodies = server.requests[num_calls:]
    assert result.usage is not None
    usage = result.usage
    read = [len(body["prompt"]) for body in bodies if "prompt" in body]
    # a stream that is closed before its request is sent counts too
    assert 0 < sum(read) <= usage.extra_input_tokens <= sum(read) + max(read) + len(split_into_pieces(WORDS))
    # those on their way when a stream was closed, a few a stream; the end of the answer counts as one
    assert abs(num_generated - usage.output_tokens) <= 4 * len(bodies)
    num_answer = len(split_into_pieces(WORDS))
    assert abs(num_generated - num_answer - usage.cancelled_output_tokens) <= 4 * len(bodies)


class Counting(ScriptedModelServer):
    """Also tells how many streams were ever open at once."""

    max_open_streams = 0

    @asynccontextmanager
    async def _hold_stream_place(self) -> AsyncGenerator[None]:
        async with super()._hold_stream_place():
            self.max_open_streams = max(self.max_open_streams, self.num_open_streams)
            yield


@pytest.mark.parametrize("num_streams", [1, 2, 4])
@pytest.mark.parametrize("agreement", [0.8, 1.0])
async def test_no_more_streams_than_allowed(agreement: float, num_streams: int) -> None:
    """At the server's side, also while some are being closed and others begin."""
    async with Counting(WORDS, latency=LATENCY) as server, opened(server) as target:
        await target.discover("token_endpoint")
        server.max_open_streams = 0
        decoder = racing(
            ReferenceDraft(make_disagreeing_draft(WORDS, agreement, 3)), target, max_concurrent_streams=num_streams
        )
        for _ in range(2):
            await decoder.decode(QUESTION, temperature=0.0)
            await assert_all_closed(server)
    assert server.max_open_streams <= num_streams


async def test_no_extra_cost_means_one_request() -> None:
    """`max_extra_cost=0`."""
    async with server_for("by ids", WORDS) as server:
        result = await raced(server, agreeing(), config={"max_extra_cost": 0.0})
        assert children_of(server) == []
    assert result.content == WORDS
    assert result.usage is not None
    assert (result.usage.extra_input_tokens, result.usage.cancelled_output_tokens) == (0, 0)


# ------------------------------------------------------------------------------------------ closing


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["cancel", "leave", "deadline"])
async def test_whoever_goes_away_closes_every_stream(way: str, mode: str) -> None:
    """Before the first byte, while a prompt is encoded, mid-stream, with several streams open: within 50 ms."""
    latency = ServerLatency(first_token_s=0.02, token_s=0.001, round_trip_s=0.005)
    async with server_for(mode, WORDS, latency=latency) as server, opened(server, MODES[mode][0]) as target:
        await target.discover("token_endpoint")
        await target.discover("continue_prefix")
        seen: set[int] = set()
        for step in range(8):
            after_s = 0.001 + 0.008 * step
            if way == "deadline":
                decoder = racing(agreeing(), target, deadline_s=after_s)
                result = await decoder.decode(QUESTION, temperature=0.0)
                assert WORDS.startswith(result.content)
            elif way == "leave":
                await leave_after(racing(agreeing(), target), after_s)
            else:
                task = asyncio.create_task(racing(agreeing(), target).decode(QUESTION, temperature=0.0))
                await asyncio.sleep(after_s)
                seen.add(server.num_open_streams)
                task.cancel()
                await asyncio.wait([task])
            await assert_all_closed(server)
            assert not [task for task in asyncio.all_tasks() if "llm_spec" in repr(task.get_coro())]
    if way == "cancel":
        assert max(seen) > 1


async def leave_after(decoder: SpeculativeDecoder, after_s: float) -> None:
    """Leave the context of a stream at its first event behind a time."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with decoder.stream(ChatRequest.create(QUESTION, temperature=0.0)) as events:
        async for _ in events:
            if loop.time() - start >= after_s:
                break


# ------------------------------------------------------------------------------------------ faults


class Spoiled(ScriptedModelServer):
    """A server with faults for the later streams of a race only: completions by ids, or chats that continue."""

    later = ServerFaults()
    num_later = 0

    async def _read_body_and_faults(self, request: web.Request) -> tuple[dict[str, Any], ServerFaults]:
        body, faults = await super()._read_body_and_faults(request)
        is_later = (
            body.get("stream")
            and body.get("max_tokens", 9) > 3  # discovery asks for fewer
            and ("prompt" in body or body["messages"][-1]["role"] == "assistant")
        )
        self.num_later += bool(is_later)
        if is_later and self.later.status is not None:
            self.faults = self.later
            try:
                await super()._read_body_and_faults(request)
            finally:
                self.faults = ServerFaults()
        return body, self.later if is_later else faults


FAULTS = [
    ServerFaults(status=429, retry_after_s=1),
    ServerFaults(status=500),
    ServerFaults(status=400),
    ServerFaults(drop_after=0),
    ServerFaults(malformed_after=0),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("faults", FAULTS, ids=repr)
async def test_later_streams_that_fail_disturb_nothing(faults: ServerFaults, mode: str) -> None:
    """The answer is plain's, and after a few failures no more streams are begun."""
    latency = ServerLatency(first_token_s=0.02, token_s=0.004)
    async with Spoiled(WORDS, latency=latency, continues_prefix=MODES[mode][1]) as server:  # type: ignore[arg-type]
        server.later = faults
        result = await raced(server, agreeing(), dialect=MODES[mode][0])
        assert result.content == WORDS
        assert len(result.fallbacks) <= 1
        assert 1 <= server.num_later < 12


@pytest.mark.parametrize("fault", ["drop_after", "malformed_after"])
async def test_later_streams_that_fail_midway_before_they_take_over(fault: str) -> None:
    """What they had written is thrown away."""
    async with Spoiled(WORDS, latency=ServerLatency(first_token_s=0.001, token_s=0.004)) as server:
        server.later = ServerFaults(**{fault: 3})  # type: ignore[arg-type]
        result = await raced(server, agreeing())
    assert result.content == WORDS


async def show(decoder: SpeculativeDecoder, shown: list[str]) -> None:
    async with decoder.stream(QUESTION, temperature=0.0) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                shown.append(event.text)  # noqa: PERF401 - it is read when this fails


@pytest.mark.parametrize("fault", ["drop_after", "malformed_after"])
async def test_a_first_stream_that_fails(fault: str) -> None:
    """TargetError, as of plain, with the text that was shown."""
    async with ScriptedModelServer(WORDS, latency=LATENCY) as server, opened(server) as target:
        await target.discover("token_endpoint")
        server.faults = ServerFaults(**{fault: 20})  # type: ignore[arg-type]
        shown: list[str] = []
        with pytest.raises(TargetError) as caught:
            await show(racing(ReferenceDraft(""), target, retry=ONCE), shown)
        await assert_all_closed(server)
    assert "".join(shown) == caught.value.partial_text == "".join(split_into_pieces(WORDS)[:20])


@pytest.mark.parametrize("mode", ["by ids", "by text"])
async def test_the_partial_text_is_the_whole_answer_so_far(mode: str) -> None:
    """Also where the stream that failed began in the middle of it; one that failed sooner fails nothing."""
    async with Spoiled(WORDS, latency=LATENCY, continues_prefix="fields") as server:
        server.later = ServerFaults(drop_after=26)
        async with opened(server, MODES[mode][0]) as target:
            for feature in ("token_endpoint", "continue_prefix"):
                await target.discover(feature)
            shown, partial_text = list[str](), WORDS
            try:
                await show(knowing(racing(agreeing(), target, retry=ONCE)), shown)
            except TargetError as error:
                partial_text = error.partial_text
            await assert_all_closed(server)
    assert "".join(shown) == partial_text
    assert WORDS.startswith(partial_text)
    assert server.num_later >= 1


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
async def test_a_server_without_a_call_is_raced_by_text(path: str) -> None:
    """Where it continues a text; the answer says that it was so."""
    faults = ServerFaults(missing=frozenset([path]))
    async with ScriptedModelServer(WORDS, latency=LATENCY, faults=faults, continues_prefix="fields") as server:
        result = await raced(server, agreeing())
    assert (result.content, result.strategy, result.guarantee) == (WORDS, "race", "exact-text")


async def test_a_server_that_can_neither_is_refused_by_name_and_plain_by_auto() -> None:
    """A clear error names what is missing."""
    async with ScriptedModelServer(WORDS) as server, opened(server, "generic") as target:
        with pytest.raises(UnsupportedError, match="neither continue token ids nor an assistant's text"):
            await racing(agreeing(), target).decode(QUESTION, temperature=0.0)
        result = await SpeculativeDecoder(target=target, draft=agreeing()).decode(QUESTION, temperature=0.0)
    assert (result.content, result.strategy) == (WORDS, "plain")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.06])
async def test_a_server_that_loses_a_call_midway(after_s: float, path: str) -> None:
    """The plain answer, nothing twice and nothing lost; the next one is raced by text or plain."""
    async with (
        ScriptedModelServer(WORDS, latency=LATENCY, continues_prefix="fields") as server,
        opened(server) as target,
    ):
        await target.discover("token_endpoint")
        decoder = racing(ReferenceDraft(make_disagreeing_draft(WORDS, 0.9, 1)), target)
        task = asyncio.create_task(decoder.decode(QUESTION, temperature=0.0))
        await asyncio.sleep(after_s)
        server.faults = ServerFaults(missing=frozenset([path]))
        assert (await task).content == WORDS
        await assert_all_closed(server)
        again = await decoder.decode(QUESTION, temperature=0.0)
        assert again.content == WORDS
        await assert_all_closed(server)


# ------------------------------------------------------------------------------------------ what is no text


async def frames_with(extra: dict[str, Any], request: web.Request, at: int) -> web.StreamResponse:
    """A chat that writes WORDS with something else in between, by text and slowly."""
    body = await request.json()
    prefix = body["messages"][-1]["content"] if body["messages"][-1]["role"] == "assistant" else ""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await asyncio.sleep(0.08 if prefix else 0.01)
    for index, piece in enumerate(split_into_pieces(WORDS[len(prefix) :])):
        deltas = [{"content": piece}] if prefix or index != at else [extra, {"content": piece}]
        for delta in deltas:
            chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await asyncio.sleep(0.001)
    await response.write(b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')
    return response


TOOL_CALL = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize("extra", [{"reasoning_content": "hm"}, TOOL_CALL], ids=["reasoning", "tool call"])
@pytest.mark.parametrize("at", [0, 10])
async def test_what_is_no_text_is_passed_through(at: int, extra: dict[str, Any]) -> None:
    """It ends the race, and the answer is the first stream's."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await frames_with(extra, request, at)

    async with served("/v1/chat/completions", handle, shutdown_s=0.05) as root:
        target = Believed("m", base_url=f"{root}/v1", dialect=DIALECTS["sglang"])
        result = await racing(agreeing(), target).decode(QUESTION, temperature=0.0)
        await target.aclose()
    assert result.content == WORDS
    assert (result.reasoning, [call.name for call in result.tool_calls]) == (
        ("hm", []) if "reasoning_content" in extra else ("", ["f"])
    )
    assert len(result.fallbacks) == 1
