"""What comes over the wire: every oddity of the stream, one a test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from support.openai_wire import KEY, QUESTION, events_of, provider_of
from support.wire import Wire, chunk, text_chunks

from llm_spec import (
    AnswerDetail,
    Finish,
    InvalidRequestError,
    ReasoningDelta,
    TargetError,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    TransientError,
    Usage,
)
from llm_spec.testing import check_provider_conformance
from llm_spec.testing.server import ScriptedModelServer

DONE = b"data: [DONE]\n\n"


async def chunks_of(wire: Wire) -> list[Mapping[str, Any]]:
    """The server's own."""
    provider = provider_of(wire)
    try:
        async with provider.stream_chunks(QUESTION) as chunks:
            return [chunk async for chunk in chunks]
    finally:
        await provider.aclose()


def frame(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def test_text_and_usage(wire: Wire) -> None:
    """Text comes piece by piece, empty deltas are none; every count is read from the chunk behind the finish."""
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 1,
            "accepted_prediction_tokens": 2,
            "rejected_prediction_tokens": 3,
        },
    }
    wire.frames = [
        frame({"choices": [], "prompt_filter_results": []}),  # Azure's first
        chunk({"role": "assistant", "content": "", "refusal": None}, usage=None),
        chunk({"content": "héllo"}, obfuscation="x"),
        chunk({}),
        chunk({"content": None}),
        chunk({"content": " wörld\n"}),
        chunk(finish="stop"),
        frame({"choices": [], "usage": usage}),
        DONE,
    ]
    assert await events_of(wire) == [
        TextDelta("héllo"),
        TextDelta(" wörld\n"),
        Finish(
            "stop",
            Usage(
                input_tokens=7,
                output_tokens=9,
                cached_input_tokens=4,
                reasoning_tokens=1,
                accepted_prediction_tokens=2,
                rejected_prediction_tokens=3,
                cancelled_output_tokens=3,
            ),
        ),
    ]


async def test_frames_cut_anywhere(wire: Wire) -> None:
    """Bytes that arrive cut inside a character or a line end, with comments between, are the same answer."""
    whole = b": ping\r\n\r\n" + b"".join(text_chunks("hé", "llo")).replace(b"\n", b"\r\n")
    whole = whole.replace(b"\\u00e9", "é".encode())
    wire.frames = [whole[i : i + 3] for i in range(0, len(whole), 3)]
    assert await events_of(wire) == [TextDelta("hé"), TextDelta("llo"), Finish("stop")]


async def test_reasoning(wire: Wire) -> None:
    """Fields that the SDK has no name for come through as well."""
    wire.frames = [chunk({"reasoning_content": "hm"}), *text_chunks("x")]
    assert await events_of(wire) == [ReasoningDelta("hm"), TextDelta("x"), Finish("stop")]


async def test_content_in_parts(wire: Wire) -> None:
    """As Mistral's thinking models send it: parts of thought are reasoning, parts of text are text."""
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    wire.frames = [chunk({"content": [thought, {"type": "text", "text": "An"}]}), *text_chunks(" answer")]
    assert await events_of(wire) == [ReasoningDelta("hm"), TextDelta("An"), TextDelta(" answer"), Finish("stop")]


async def test_parallel_tool_calls(wire: Wire) -> None:
    """Ids and names come with a call's first piece only, arguments cut anywhere; calls may take turns."""
    pieces = [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"x"'}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]
    wire.frames = [*(chunk({"tool_calls": [piece]}) for piece in pieces), chunk(finish="tool_calls"), DONE]
    assert await events_of(wire) == [
        ToolCallDelta(0, "a", "f", ""),
        ToolCallDelta(0, None, None, '{"x"'),
        ToolCallDelta(1, "b", "g", "{}"),
        ToolCallDelta(0, None, None, ": 1}"),
        Finish("tool_calls", None, "tool_calls"),
    ]
    wire.frames = [chunk({"tool_calls": pieces}), chunk(finish="tool_calls"), DONE]
    provider = provider_of(wire)
    answer = await provider.complete(QUESTION)
    await provider.aclose()
    assert answer.message.tool_calls == (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "{}"))


async def test_calls_without_ids(wire: Wire) -> None:
    """Gateways leave ids and indices out; the calls stay apart, and each has an id that is made up."""
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    wire.frames = [chunk({"tool_calls": calls}), chunk(finish="tool_calls")]
    first, second, _ = await events_of(wire)
    assert isinstance(first, ToolCallDelta)
    assert isinstance(second, ToolCallDelta)
    assert (first.name, second.name, first.arguments, second.arguments) == ("f", "g", "{}", "{}")
    assert len({first.id, second.id} - {None, ""}) == 2


@pytest.mark.parametrize(
    ("finish", "stopped_by"),
    [("stop", None), ("length", "max_tokens"), ("content_filter", "content_filter"), ("tool_calls", "tool_calls")],
)
async def test_finish_reasons(wire: Wire, finish: str, stopped_by: str | None) -> None:
    """A server's reason is passed on, and what it says of the end."""
    wire.frames = text_chunks("x", finish=finish)
    last = (await events_of(wire))[-1]
    assert isinstance(last, Finish)
    assert (last.finish_reason, last.stopped_by) == (finish, stopped_by)


async def test_refusal(wire: Wire) -> None:
    """The words of a refusal are told apart from text, and the end says that they are no answer."""
    wire.frames = [
        chunk({"role": "assistant", "content": None, "refusal": ""}),
        chunk({"refusal": "I'm sorry,"}),
        chunk({"refusal": " no."}),
        chunk(finish="stop"),
        DONE,
    ]
    assert await events_of(wire) == [
        AnswerDetail("chat", {"refusal": "I'm sorry,"}),
        AnswerDetail("chat", {"refusal": " no."}),
        Finish("content_filter", None, "content_filter"),
    ]


async def test_missing_done(wire: Wire) -> None:
    """A server that forgets `[DONE]` has still finished."""
    wire.frames = text_chunks("x")[:-1]
    assert await events_of(wire) == [TextDelta("x"), Finish("stop")]


async def test_no_finish_reason(wire: Wire) -> None:
    """The SDK takes any end for a good one; without a finish reason it is a failure, with the text so far."""
    wire.frames = [chunk({"content": "half"})]
    with pytest.raises(TransientError, match="without a finish reason") as caught:
        await events_of(wire)
    assert caught.value.partial_text == "half"
    with pytest.raises(TransientError, match="without a finish reason"):
        await chunks_of(wire)


async def test_done_without_a_finish_reason(wire: Wire, transport: str) -> None:
    """`[DONE]` behind an answer ends it well, also where the server never says why it ended; behind nothing not."""
    wire.frames = [chunk({"content": "whole"}), DONE]
    assert await events_of(wire) == [TextDelta("whole"), Finish("stop")], transport
    assert len(await chunks_of(wire)) == 1
    wire.frames = [DONE]
    with pytest.raises(TransientError, match="without a finish reason"):
        await events_of(wire)
    with pytest.raises(TransientError, match="without a finish reason"):
        await chunks_of(wire)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "try later", "type": "server_error", "code": None}, TransientError),
        ({"message": "try later", "type": "tokens", "code": "rate_limit_exceeded"}, TransientError),
        ({"message": "try later", "code": 503}, TransientError),
        ("try later", TransientError),
        ({"message": "try later", "code": "invalid_api_key"}, TargetError),
    ],
)
async def test_error_in_band(wire: Wire, error: Any, kind: type[TargetError]) -> None:
    """An error object after a 200 is an error in the server's words, of the kind that its code or type tells."""
    wire.frames = [chunk({"content": "half"}), frame({"error": error})]
    with pytest.raises(TargetError, match="reported an error: try later") as caught:
        await events_of(wire)
    assert type(caught.value) is kind
    assert caught.value.partial_text == "half"


async def test_invalid_in_band(wire: Wire) -> None:
    """What the server calls invalid is that, whenever it notices."""
    error = {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}
    await _refused(wire, error)


async def test_a_status_in_band(wire: Wire) -> None:
    """Gateways such as OpenRouter send a status as the code: a 400 is the request's fault."""
    await _refused(wire, {"message": "too long", "code": 400})


async def _refused(wire: Wire, error: Any) -> None:
    wire.frames = [chunk({"content": "half"}), frame({"error": error})]
    with pytest.raises(InvalidRequestError, match="too long"):
        await events_of(wire)
    with pytest.raises(InvalidRequestError, match="too long"):
        await chunks_of(wire)


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: [1]\n\n", b"data: \xff\n\n"])
async def test_malformed_frame(wire: Wire, data: bytes) -> None:
    """An answer that is not a JSON object is an error, not a crash."""
    wire.frames = [chunk({"content": "half"}), data]
    with pytest.raises(TargetError, match="JSON") as caught:
        await events_of(wire)
    assert caught.value.partial_text == "half"


async def test_conformance() -> None:
    """It keeps what `LlmProvider` promises, against a server that streams."""
    async with ScriptedModelServer("One two three, four five six. Seven!") as server:
        await check_provider_conformance(
            lambda: provider_of(server), num_open=lambda _: server.num_open_streams, secret=KEY
        )
