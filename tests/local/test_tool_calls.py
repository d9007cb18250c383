"""With tools in a request every call is the target's own, complete and once, whatever the draft and the strategy do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.doubles import TEXT, Double, Failure, forget_environment, provider_at, serve
from support.messages_wire import begin, end, frame, text_frames
from support.wire import chunk, text_chunks

from llm_spec import (
    ChatMessage,
    ChatRequest,
    ChatResponse,
    Finish,
    ProviderDraft,
    ReasoningDelta,
    ReferenceDraft,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    TransientError,
    UnsupportedError,
)
from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.provider import Capabilities
from llm_spec.kit.openai_chat import ChunkReader
from llm_spec.testing import ScriptedProvider, run_virtual
from llm_spec.testing.simulated import SimulatedTarget

TOOLS: Final = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fgh"]
NO_WAIT: Final = RetryPolicy(first_wait_s=0.0, max_wait_s=0.0)
CALLS: Final = (
    ToolCall("call_a", "f", '{"city": "Zürich", "days": [1, 2]}'),
    ToolCall("call_b", "g", "{}"),
    ToolCall("call_c", "f", '{"city": "Zürich", "days": [1, 2]}'),  # as the first, but for its id
)
SEE: Final = "Let me see. "
KINDS: Final = ("openai", "openai given", "anthropic", "anthropic given", "aiohttp")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_environment(monkeypatch)


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    async with serve() as double:
        yield double


# ------------------------------------------------------------------------------------------ calls on the wire


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def openai_frames(calls: Sequence[ToolCall], *, text: str = "", size: int = 7, mixed: bool = False) -> list[bytes]:
    """As OpenAI streams calls: id and name with the first piece, then pieces of arguments; `mixed`: by turns."""
    heads = [
        {"index": i, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        for i, call in enumerate(calls)
    ]
    pieces = [
        [{"index": i, "function": {"arguments": piece}} for piece in cut(call.arguments, size)]
        for i, call in enumerate(calls)
    ]
    deltas: list[dict[str, Any]] = [{"content": text}] if text else []
    if mixed:
        deltas.append({"tool_calls": heads})
        while any(pieces):
            deltas.append({"tool_calls": [own.pop(0) for own in pieces if own]})
    else:
        for head, own in zip(heads, pieces, strict=True):
            deltas += [{"tool_calls": [each]} for each in [head, *own]]
    return [*map(chunk, deltas), chunk(finish="tool_calls"), b"data: [DONE]\n\n"]


def anthropic_frames(calls: Sequence[ToolCall], *, text: str = "", size: int = 7, mixed: bool = False) -> list[bytes]:
    """As Anthropic does: one block after another, arguments in pieces, none where they are empty."""
    first = 1 if text else 0
    blocks: list[list[bytes]] = []
    for index, call in enumerate(calls, start=first):
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        pieces = [] if call.arguments == "{}" else cut(call.arguments, size)
        blocks.append(
            [
                frame("content_block_start", index=index, content_block=block),
                *(
                    frame("content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": piece})
                    for piece in ["", *pieces]
                ),
                frame("content_block_stop", index=index),
            ]
        )
    if mixed:
        longest = max(map(len, blocks))
        frames = [block[step] for step in range(longest) for block in blocks if step < len(block)]
    else:
        frames = [data for block in blocks for data in block]
    return [*begin(), *(text_frames(text) if text else []), *frames, *end("tool_use")]


def frames_for(kind: str, calls: Sequence[ToolCall], **options: Any) -> list[bytes]:
    return (anthropic_frames if kind.startswith("anthropic") else openai_frames)(calls, **options)


async def answer_of(decoder: SpeculativeDecoder) -> tuple[SpeculativeResult, ChatResponse]:
    """The same request in both ways: as a result, and as any provider gives it."""
    request = ChatRequest.create("q", tools=TOOLS)
    return await decoder.decode(request), await decoder.complete(request)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["plain", "regenerate", "auto"])
async def test_calls_arrive_complete_and_once(
    double: Double, strategy: Literal["plain", "regenerate", "auto"], kind: str
) -> None:
    """Parallel ones, two of them alike; arguments cut anywhere or interleaved; text before them stays text."""
    async with provider_at(double.url, kind) as target:
        config = SpeculativeConfig(strategy=strategy, retry=NO_WAIT)
        decoder = SpeculativeDecoder(target=target, draft=ReferenceDraft(TEXT), config=config)
        for size, mixed, text in ((1, False, SEE), (7, False, ""), (1000, False, SEE), (3, True, ""), (4, True, SEE)):
            double.reset()
            double.frames = frames_for(kind, CALLS, text=text, size=size, mixed=mixed)
            result, response = await answer_of(decoder)
            assert result.tool_calls == response.message.tool_calls == CALLS
            assert result.content == response.content == text
            assert result.finish_reason == response.finish_reason == "tool_calls"
            assert result.stopped_by == "tool_calls"
            assert len(double.bodies) == 2
            assert all(len(body["tools"]) == len(TOOLS) for body in double.bodies)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_drops_anywhere(double: Double, kind: str) -> None:
    """After something of the answer was shown: an error and one request, never a second call. Before: asked again."""
    frames = frames_for(kind, CALLS[:2], text="Let me see. ", size=16)
    model = "claude-sonnet-4-5" if kind.startswith("anthropic") else None  # one that could go on
    async with provider_at(double.url, kind, model=model, dialect="vllm") as target:
        for num_sent in range(len(frames)):
            double.reset()
            double.frames, double.drops_frames = frames[:num_sent], True
            decoder = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(retry=NO_WAIT))
            shown: list[StreamEvent] = []
            outcome = await read(decoder, shown)
            calls = [event for event in shown if isinstance(event, ToolCallDelta)]
            text = "".join(event.text for event in shown if isinstance(event, TextDelta))
            if outcome is None:  # all of the answer had come, but for the mark that ends the stream
                assert num_sent >= len(frames) - 2
                continue
            assert outcome.partial_text == text
            assert len(double.bodies) == (1 if shown else 3)
            assert len([call for call in calls if call.id is not None]) == len({call.id for call in calls} - {None})
            told = "".join(call.arguments for call in calls)
            assert "".join(call.arguments for call in CALLS[:2]).startswith(told)
            assert text in ("", "Let me see. ")


async def read(decoder: SpeculativeDecoder, shown: list[StreamEvent]) -> TransientError | None:
    try:
        async with decoder.stream(ChatRequest.create("q", tools=TOOLS)) as events:
            async for event in events:
                shown.append(event)  # noqa: PERF401 - it is read when this fails
    except TransientError as error:
        return error
    return None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failure", [Failure(status=429), Failure(status=529), Failure(drop_after=-1)], ids=repr)
async def test_a_call_after_failures_is_one_call(double: Double, failure: Failure, kind: str) -> None:
    """What failed before anything came is asked again, and gives the call once."""
    double.frames = frames_for(kind, CALLS)
    double.reset(failure, failure)
    async with provider_at(double.url, kind) as target:
        result = await SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(retry=NO_WAIT)).decode(
            "q", tools=TOOLS
        )
    assert result.tool_calls == CALLS
    assert len(double.bodies) == 3


@pytest.mark.parametrize("kind", ["openai", "aiohttp"])
@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        # ids and names again, or null, with every piece
        (
            [
                [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}],
                [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ": 1"}}],
                [{"index": 0, "id": None, "function": {"name": None, "arguments": "}"}}],
            ],
            [ToolCall("a", "f", '{"x": 1}')],
        ),
        # the id comes later than the name, arguments are null
        (
            [
                [{"index": 0, "function": {"name": "f", "arguments": None}}],
                [{"index": 0, "id": "a", "function": {"arguments": "{}"}}],
            ],
            [ToolCall("a", "f", "{}")],
        ),
        # indices that begin anywhere and skip, out of order: calls are in the order in which they begin
        (
            [
                [{"index": 4, "id": "b", "function": {"name": "g", "arguments": "{"}}],
                [{"index": 2, "id": "a", "function": {"name": "f", "arguments": "{"}}],
                [{"index": 4, "function": {"arguments": "}"}}, {"index": 2, "function": {"arguments": "}"}}],
            ],
            [ToolCall("b", "g", "{}"), ToolCall("a", "f", "{}")],
        ),
        # several whole calls in one chunk, without indices
        (
            [
                [
                    {"id": "a", "function": {"name": "f", "arguments": "{}"}},
                    {"id": "b", "function": {"name": "g", "arguments": '{"x": 1}'}},
                ]
            ],
            [ToolCall("a", "f", "{}"), ToolCall("b", "g", '{"x": 1}')],
        ),
        # no arguments at all
        ([[{"index": 0, "id": "a", "function": {"name": "f"}}]], [ToolCall("a", "f", "")]),
        (
            [
                [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
                [{"id": "b", "function": {"name": "g", "arguments": '{"x": 1}'}}],
            ],
            [ToolCall("a", "f", "{}"), ToolCall("b", "g", '{"x": 1}')],
        ),
        (
            [
                [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}],
                [{"index": 0, "id": "b", "function": {"name": "g", "arguments": '{"x": 1}'}}],
            ],
            [ToolCall("a", "f", "{}"), ToolCall("b", "g", '{"x": 1}')],
        ),
    ],
    ids=["repeated", "late id", "odd indices", "one chunk", "no arguments", "no indices", "all index 0"],
)
async def test_oddities_of_servers(double: Double, deltas: list[Any], calls: list[ToolCall], kind: str) -> None:
    """Each is understood as the calls that it is."""
    double.frames = [*(chunk({"tool_calls": delta}) for delta in deltas), chunk(finish="tool_calls")]
    async with provider_at(double.url, kind) as target:
        result = await SpeculativeDecoder(target=target, draft=None).decode("q", tools=TOOLS)
    assert list(result.tool_calls) == calls


# ------------------------------------------------------------------------------------------ strategies and drafts


class Calling:
    """A draft that calls tools in every way it can: in its stream's events, and as text that looks like a call."""

    name = "calling"

    @asynccontextmanager
    async def draft(
        self,
        request: ChatRequest,  # noqa: ARG002 - whatever is asked
        max_tokens: int,  # noqa: ARG002 - as above
    ) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async def pieces() -> AsyncIterator[DraftPiece]:
            yield DraftPiece('<tool_call>{"name": "f", "arguments": {}}</tool_call>', finish_reason="tool_calls")

        yield pieces()

    async def aclose(self) -> None:
        """Nothing to release."""


def calls_as_events(calls: Sequence[ToolCall] = CALLS, text: str = "") -> list[StreamEvent]:
    out: list[StreamEvent] = [TextDelta(text)] if text else []
    for index, call in enumerate(calls):
        out.append(ToolCallDelta(index, call.id, call.name))
        out += [ToolCallDelta(index, arguments=piece) for piece in cut(call.arguments, 5)]
    return [*out, Finish("tool_calls", None, "tool_calls")]


ABLE = Capabilities(tools=True, continue_prefix=True, prediction=True)


def calling_drafts() -> list[Any]:
    return [Calling(), ProviderDraft(ScriptedProvider(calls_as_events(text="maybe"))), ReferenceDraft('{"name": "f"}')]


@pytest.mark.parametrize("strategy", ["race", "probe", "score", "predict"])
def test_no_strategy_speculates_across_a_call(strategy: Any) -> None:
    """Asked for by name, those that would put answers together refuse a request with tools; nothing is sent."""

    async def check() -> None:
        target = ScriptedProvider(calls_as_events(), capabilities=ABLE)
        decoder = SpeculativeDecoder(target=target, draft=Calling(), config=SpeculativeConfig(strategy=strategy))
        with pytest.raises(UnsupportedError):
            await decoder.decode("q", tools=TOOLS)
        assert target.requests == []

    run_virtual(check())


@pytest.mark.parametrize("strategy", ["auto", "plain", "regenerate"])
@pytest.mark.parametrize("index", range(3))
def test_a_draft_that_calls_never_causes_a_call(index: int, strategy: Any) -> None:
    """The target's text stays text, and its calls stay its own; with tools in the request and without."""

    async def check() -> None:
        for script, calls in ((TEXT, ()), (calls_as_events(text="so: "), CALLS)):
            target = ScriptedProvider(script, capabilities=ABLE, delay_piece_s=0.01)
            decoder = SpeculativeDecoder(
                target=target, draft=calling_drafts()[index], config=SpeculativeConfig(strategy=strategy)
            )
            for tools in (TOOLS, []):
                result = await decoder.decode("q", tools=tools)
                assert (result.content, result.tool_calls) == (TEXT if isinstance(script, str) else "so: ", calls)

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [True, False])
@pytest.mark.parametrize("strategy", ["race", "probe", "predict", "regenerate"])
def test_a_draft_that_calls_never_causes_a_call_by_any_strategy(strategy: Any, by_ids: bool) -> None:
    """Without tools in the request, where the others are allowed."""
    if strategy == "probe" and not by_ids:
        strategy = "race"

    async def check() -> None:
        for draft in calling_drafts():
            target = SimulatedTarget(TEXT, token_s=0.01, first_token_s=0.05, by_ids=by_ids)
            target.capabilities = Capabilities(
                continue_prefix=True, prediction=True, token_endpoint=target if by_ids else None
            )
            decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy=strategy))
            result = await decoder.decode("q", temperature=0.0)
            assert (result.content, result.tool_calls) == (TEXT, ())
            assert result.finish_reason == "stop"

    run_virtual(check())


def test_auto_is_plain_with_tools_however_well_it_knows_the_pair() -> None:
    """It has raced before and would again; a request with tools has one stream."""

    async def check() -> None:
        long = " ".join(f"word{i}" for i in range(400))
        target = SimulatedTarget(long, token_s=0.02, first_token_s=0.1, by_ids=True)
        decoder = SpeculativeDecoder(target=target, draft=ReferenceDraft(long))
        used = [(await decoder.decode("q", temperature=0.0)).strategy for _ in range(12)]
        assert {"race", "probe"} & set(used[-4:])
        for _ in range(3):
            target.num_calls = target.max_open = 0
            result = await decoder.decode("q", temperature=0.0, tools=TOOLS)
            assert (result.strategy, result.content, result.rounds) == ("plain", long, ())
            assert (target.num_calls, target.max_open) == (1, 1)

    run_virtual(check())


def test_the_draft_of_a_request_with_tools_gets_none() -> None:
    """It could only call them in vain."""

    async def check() -> None:
        draft = ScriptedProvider("maybe")
        target = ScriptedProvider(calls_as_events(), capabilities=ABLE)
        decoder = SpeculativeDecoder(
            target=target, draft=ProviderDraft(draft), config=SpeculativeConfig(strategy="regenerate")
        )
        await decoder.decode("q", tools=TOOLS, tool_choice="required")
        assert [(request.tools, request.tool_choice) for request in draft.requests] == [((), None)]
        assert [len(request.tools) for request in target.requests] == [len(TOOLS)]

    run_virtual(check())


class CallsUnasked(SimulatedTarget):
    """A target that calls a tool after a while although none was offered; its later streams would, too."""

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with super().stream(request) as events:

            async def changed() -> AsyncIterator[StreamEvent]:
                async for event in events:
                    if isinstance(event, TextDelta) and event.text == " word7":
                        for call in calls_as_events(CALLS[:1])[:-1]:
                            yield call
                        yield Finish("tool_calls", None, "tool_calls")
                        return
                    yield event

            yield changed()


@pytest.mark.parametrize("draft_s", [0.0, 0.001, 0.1])
def test_a_call_that_nobody_offered_comes_once_out_of_a_race(draft_s: float) -> None:
    """Several streams of the target write it; the caller gets one."""

    class Writing(ReferenceDraft):
        @asynccontextmanager
        async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
            await asyncio.sleep(draft_s)
            async with super().draft(request, max_tokens) as pieces:
                yield pieces

    async def check() -> None:
        for num_streams in (1, 2, 4, 12):
            target = CallsUnasked(TEXT, token_s=0.01, first_token_s=0.02)
            config = SpeculativeConfig(strategy="race", max_concurrent_streams=num_streams)
            result = await SpeculativeDecoder(target=target, draft=Writing(TEXT), config=config).decode(
                "q", temperature=0.0
            )
            assert result.tool_calls == CALLS[:1]
            assert result.content == TEXT[: TEXT.index(" word7")]
            assert result.finish_reason == "tool_calls"
            assert target.num_open == 0

    run_virtual(check())


# ------------------------------------------------------------------------------------------ any calls


@settings(max_examples=40, deadline=None)
@given(
    arguments=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=8), max_size=2), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    fail_at=st.none() | st.integers(0, 12),
    nested=st.booleans(),
)
def test_any_calls_survive(
    arguments: list[dict[str, str]], cuts: list[int], fail_at: int | None, *, nested: bool
) -> None:
    """Interleaved in any way, through decoders in decoders; broken off anywhere, they are an error and nothing more."""
    calls = [ToolCall(f"id{i}", "fgh"[i % 3], json.dumps(each)) for i, each in enumerate(arguments)]
    pieces = [
        [ToolCallDelta(i, arguments=p) for p in cut(c.arguments, cuts[i % len(cuts)])] for i, c in enumerate(calls)
    ]
    events: list[StreamEvent] = [ToolCallDelta(i, call.id, call.name) for i, call in enumerate(calls)]
    while any(pieces):
        events += [own.pop(0) for own in pieces if own]
    events.append(Finish("tool_calls"))
    failures = {} if fail_at is None else {fail_at: TransientError("it broke")}
    target = ScriptedProvider(events, capabilities=ABLE, fail_at=failures)

    async def check() -> None:
        decoder = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(retry=NO_WAIT))
        once = SpeculativeConfig(retry=RetryPolicy(max_attempts=1))
        outer = SpeculativeDecoder(target=decoder, draft=Calling(), config=once) if nested else decoder
        if fail_at is None or fail_at >= len(events):
            answer = await outer.complete(ChatRequest.create("q", tools=TOOLS))
            assert answer.message == ChatMessage("assistant", None, tool_calls=tuple(calls))
            assert len(target.requests) == 1
            return
        with pytest.raises(TransientError):
            await outer.complete(ChatRequest.create("q", tools=TOOLS))
        assert len(target.requests) == (1 if fail_at else 3)

    run_virtual(check())


def test_frames_of_text_are_no_calls() -> None:
    """The doubles' own words: a text has no call, and a call no text."""
    assert b"tool_calls" not in b"".join(text_chunks("x"))
    assert b'"content"' not in b"".join(openai_frames(CALLS))


def test_a_chunks_token_ids_come_after_all_that_the_server_made_of_them() -> None:
    """Whoever matches tokens with events knows at the ids that their events are whole."""
    reader = ChunkReader(lambda choice: tuple(choice["token_ids"]))
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    called = {"delta": {"content": "so", "tool_calls": [call]}, "token_ids": [1, 2]}
    assert reader.read_chunk({"choices": [called]}) == [
        TextDelta("so"),
        ToolCallDelta(0, "c", "f", "{}"),
        TextDelta("", "plain", (1, 2)),
    ]
    thought = {"delta": {"reasoning": "hm"}, "token_ids": [3]}
    assert reader.read_chunk({"choices": [thought]}) == [ReasoningDelta("hm"), TextDelta("", "plain", (3,))]
    written = {"delta": {"content": "yes"}, "token_ids": [4]}
    assert reader.read_chunk({"choices": [written]}) == [TextDelta("yes", "plain", (4,))]
