"""HttpProvider against a real server on loopback: every oddity of the wire, and whoever goes away closes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from aiohttp import web
from llm_spec_http import DIALECTS, HttpProvider
from support.wire import Wire, chunk, served, text_chunks

from llm_spec import (
    AnswerDetail,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ConfigError,
    Finish,
    InvalidRequestError,
    LlmSpecError,
    ReasoningDelta,
    SpeculativeConfig,
    SpeculativeDecoder,
    StreamEvent,
    TargetError,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TransientError,
    Usage,
    open_provider,
)
from llm_spec.contract.provider import ChunkStreaming
from llm_spec.contract.response import complete_from_stream

pytestmark = pytest.mark.virtual_clock

Json: TypeAlias = dict[str, Any]

KEY = "sk-very-secret"
DONE = b"data: [DONE]\n\n"
QUESTION = ChatRequest.create("question")
WHOLE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]}


def provider_of(wire: Wire, dialect: str = "generic") -> HttpProvider:
    return HttpProvider("tiny", base_url=wire.url, dialect=DIALECTS[dialect], api_key=KEY)


async def answered(provider: HttpProvider, request: ChatRequest = QUESTION) -> ChatResponse:
    """What its stream says."""
    return await complete_from_stream(provider, request)


async def events_of(wire: Wire, request: ChatRequest = QUESTION, dialect: str = "generic") -> list[StreamEvent]:
    provider = provider_of(wire, dialect)
    try:
        async with provider.stream(request) as events:
            return [event async for event in events]
    finally:
        await provider.aclose()


async def chunks_of(wire: Wire) -> list[Mapping[str, Any]]:
    """The server's own."""
    provider = provider_of(wire)
    try:
        async with provider.stream_chunks(QUESTION) as chunks:
            return [chunk async for chunk in chunks]
    finally:
        await provider.aclose()


def in_band(error: object) -> bytes:
    """An error object behind a good status."""
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


async def test_text_and_usage(wire: Wire) -> None:
    """Text comes piece by piece; usage is read from its own chunk behind the finish."""
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    counts = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    wire.frames = [
        chunk({"role": "assistant", "content": ""}),
        *text_chunks("héllo", " world")[:-1],
        counts,
        b"data: [DONE]\n\n",
    ]
    assert await events_of(wire) == [
        TextDelta("héllo"),
        TextDelta(" world"),
        Finish("stop", Usage(input_tokens=7, output_tokens=2, cached_input_tokens=4)),
    ]


@pytest.mark.parametrize("end_s", [0.0, 0.003])
async def test_a_connection_is_used_again(wire: Wire, end_s: float) -> None:
    """Also where the end of the body comes some time behind the end of the stream, as most servers send it."""
    wire.frames, wire.end_s = text_chunks("x"), end_s
    provider = provider_of(wire)
    for _ in range(5):
        assert (await answered(provider)).content == "x"
        await asyncio.sleep(0.01)
    await provider.aclose()
    assert len(set(wire.peers)) == 1


async def test_a_body_without_an_end_holds_up_nobody(wire: Wire) -> None:
    """The answer is whole with the stream's own end; the connection is given up."""
    wire.frames, wire.end_s = text_chunks("x"), 60.0
    provider = provider_of(wire)
    async with asyncio.timeout(5):
        for _ in range(2):
            assert (await answered(provider)).content == "x"
    await provider.aclose()
    assert len(set(wire.peers)) == 2


async def test_all_of_one_chunk(wire: Wire) -> None:
    """Thought, text and call of one delta come in this order; a refusal is no text, and no good end."""
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    wire.frames = [
        chunk({"tool_calls": [call], "content": "text", "reasoning_content": "thought", "refusal": None}),
        *text_chunks("more"),
    ]
    thought, text, called, wants_more, finish = await events_of(wire)
    assert (thought, text, wants_more) == (ReasoningDelta("thought"), TextDelta("text"), TextDelta("more"))
    assert called == ToolCallDelta(0, "a", "f", "{}")
    assert finish == Finish("stop")
    wire.frames = [chunk({"refusal": "I will not."}), *text_chunks()]
    refusal = AnswerDetail("chat", {"refusal": "I will not."})
    assert await events_of(wire) == [refusal, Finish("content_filter", None, "content_filter")]


async def test_what_is_asked(wire: Wire) -> None:
    """The body holds what the caller said and nothing that was left open; the key goes into a header."""
    wire.frames = text_chunks("x")
    tool = {"type": "function", "function": {"name": "f"}}
    request = ChatRequest.create(
        [{"role": "user", "content": "q"}],
        temperature=0.0,
        max_tokens=5,
        stop="END",
        seed=3,
        logit_bias={5: -1.0},
        tools=[tool],
        extra={"priority": 1},
    )
    await events_of(wire, request)
    assert wire.bodies == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "q"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "seed": 3,
            "logit_bias": {"5": -1.0},
            "max_tokens": 5,
            "stop": ["END"],
            "tools": [tool],
            "priority": 1,
        }
    ]
    assert wire.headers[0]["Authorization"] == f"Bearer {KEY}"


async def test_parallel_tool_calls(wire: Wire) -> None:
    """Ids, names and arguments of several calls come out complete and once."""
    first = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}
    second = {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    wire.frames = [chunk({"tool_calls": [call]}) for call in (first, second, rest)] + [chunk(finish="tool_calls")]
    provider = provider_of(wire)
    answer = await answered(provider)
    await provider.aclose()
    assert answer.message.tool_calls == (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "{}"))
    assert (answer.finish_reason, answer.stopped_by) == ("tool_calls", "tool_calls")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning(wire: Wire, field: str) -> None:
    """Both names that servers use for it."""
    wire.frames = [chunk({field: "hm"}), *text_chunks("x")]
    assert (await events_of(wire))[0] == ReasoningDelta("hm")


def thinking(*texts: str) -> Json:
    return {"type": "thinking", "thinking": [{"type": "text", "text": text} for text in texts], "closed": True}


@pytest.mark.parametrize("dialect", ["mistral", "generic"])
async def test_content_in_parts(wire: Wire, dialect: str) -> None:
    """Mistral's thinking models: parts of thought, of both kinds at once, of text, and then text alone."""
    text, reference = {"type": "text", "text": "An"}, {"type": "reference", "reference_ids": [1]}
    wire.frames = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": [thinking("Let me ")]}),
        chunk({"content": [thinking("see", "."), text]}),
        chunk({"content": [{"type": "text", "text": " answer"}, reference]}),
        *text_chunks("."),
    ]
    thoughts = [ReasoningDelta(thought) for thought in ("Let me ", "see.")]
    texts = [TextDelta(text) for text in ("An", " answer", ".")]
    assert await events_of(wire, dialect=dialect) == [*thoughts, *texts, Finish("stop")]


async def test_a_whole_content_in_parts(wire: Wire) -> None:
    """The same in an answer that comes at once."""
    wire.whole = whole_of({"content": [thinking("Hm", "."), {"type": "text", "text": "The answer"}]})
    provider = provider_of(wire, "vllm")
    response = await provider.complete(QUESTION)
    await provider.aclose()
    assert (response.content, response.reasoning) == ("The answer", "Hm.")


@pytest.mark.parametrize(
    "content",
    [
        [],
        [{"type": "text"}],
        [{"type": "text", "text": None}],
        [{"type": "thinking", "thinking": [1]}],
        [{"type": "reference", "reference_ids": [1]}],
    ],
)
async def test_parts_that_say_nothing(wire: Wire, content: list[Any]) -> None:
    """They give no event and break nothing."""
    wire.frames = [chunk({"content": content}), *text_chunks("x")]
    assert await events_of(wire) == [TextDelta("x"), Finish("stop")]


async def test_halves_of_a_character_in_parts(wire: Wire) -> None:
    """They are joined with what comes before and after, in its order."""
    parts = [{"type": "text", "text": "\ude00 b \ud83d"}, {"type": "text", "text": "\ude00"}]
    wire.frames = [
        chunk({"content": "a \ud83d"}),
        chunk({"content": parts}),
        chunk({"content": [{"type": "text", "text": "\ud83d"}]}),
        chunk(finish="stop"),
    ]
    events = await events_of(wire)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "a 😀 b 😀\ufffd"


@pytest.mark.parametrize(
    ("finish", "stopped_by"), [("stop", None), ("length", "max_tokens"), ("content_filter", "content_filter")]
)
async def test_finish_reasons(wire: Wire, finish: str, stopped_by: str | None) -> None:
    """A server's reason is passed on, and what it says of the end."""
    wire.frames = text_chunks("x", finish=finish)
    last = (await events_of(wire))[-1]
    assert isinstance(last, Finish)
    assert (last.finish_reason, last.stopped_by) == (finish, stopped_by)


async def test_missing_done(wire: Wire) -> None:
    """A server that forgets `[DONE]`, and the last newline, has still finished."""
    wire.frames = [*text_chunks("x")[:-2], chunk(finish="stop").rstrip()]
    assert await events_of(wire) == [TextDelta("x"), Finish("stop")]


async def test_no_finish_reason(wire: Wire) -> None:
    """An answer that just ends has broken off: an error that may pass and carries the text so far."""
    wire.frames = [chunk({"content": "half"})]
    with pytest.raises(TransientError, match="without a finish reason") as caught:
        await events_of(wire)
    assert caught.value.partial_text == "half"
    with pytest.raises(TransientError, match="without a finish reason"):
        await chunks_of(wire)


CALL = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("deltas", "finish"),
    [
        ([{"content": "whole"}], "stop"),
        ([{"content": "whole"}, {"tool_calls": [CALL]}], "tool_calls"),
        ([{"refusal": "no"}], "content_filter"),
    ],
)
async def test_done_without_a_finish_reason(wire: Wire, deltas: list[Json], finish: str) -> None:
    """`[DONE]` behind an answer ends it well, also where the server (Snowflake's) never says why it ended."""
    wire.frames = [*(chunk(delta) for delta in deltas), DONE]
    last = (await events_of(wire))[-1]
    assert isinstance(last, Finish)
    assert last.finish_reason == finish
    assert len(await chunks_of(wire)) == len(deltas)


async def test_done_alone(wire: Wire) -> None:
    """`[DONE]` behind nothing is no answer."""
    wire.frames = [chunk({"role": "assistant", "content": ""}), DONE]
    with pytest.raises(TransientError, match="without a finish reason"):
        await events_of(wire)
    wire.frames = [DONE]
    with pytest.raises(TransientError, match="without a finish reason"):
        await chunks_of(wire)


@pytest.mark.parametrize("reason", ["error", "network_error"])
async def test_a_finish_reason_that_is_an_error(wire: Wire, reason: str) -> None:
    """OpenRouter and Mistral end like this what their model's server broke off."""
    wire.frames = text_chunks("half", finish=reason)
    with pytest.raises(TransientError, match="broke off its answer") as caught:
        await events_of(wire)
    assert caught.value.partial_text == "half"


async def test_an_empty_finish_reason_is_none(wire: Wire) -> None:
    """Some servers send it with every piece; the answer is not over with it."""
    wire.frames = [chunk({"content": "half"}, finish="")]
    with pytest.raises(TransientError, match="without a finish reason"):
        await events_of(wire)


async def test_error_in_band(wire: Wire) -> None:
    """An error object after a 200 is an error in the server's words."""
    wire.frames = [chunk({"content": "half"}), b'data: {"error": {"message": "out of memory"}}\n\n']
    with pytest.raises(TargetError, match="out of memory") as caught:
        await events_of(wire)
    assert caught.value.partial_text == "half"


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        (429, TransientError, 429),
        (503, TransientError, 503),
        ("rate_limit_exceeded", TransientError, 429),
        ("server_error", TransientError, 500),
        ("invalid_api_key", TargetError, 401),
        ("unheard of", TransientError, 500),
    ],
)
async def test_codes_of_errors_in_band(wire: Wire, code: int | str, kind: type[TargetError], status: int) -> None:
    """The error has the status that its code stands for, and is of the kind that this status would have been."""
    wire.frames = [chunk({"content": "half"}), in_band({"message": "no", "code": code})]
    with pytest.raises(TargetError, match="reported an error: no") as caught:
        await events_of(wire)
    assert (type(caught.value), caught.value.status, caught.value.partial_text) == (kind, status, "half")


async def test_what_the_server_calls_invalid_in_band(wire: Wire) -> None:
    """A 400 inside a stream is the request's fault: sent once, no broken connection, and the circuit stays closed."""
    wire.frames = [chunk({"content": ""}), in_band({"message": "context is too long", "code": 400})]
    provider = provider_of(wire)
    decoder = SpeculativeDecoder(target=provider, draft=None)
    for _ in range(6):  # more often than a circuit bears
        with pytest.raises(InvalidRequestError, match="reported an error: context is too long"):
            await decoder.decode("q")
    await provider.aclose()
    with pytest.raises(InvalidRequestError, match="reported an error"):
        await chunks_of(wire)
    assert len(wire.bodies) == 7


@pytest.mark.parametrize("frame", [b"data: {\n\n", b"data: [1]\n\n", b"data: \xff\n\n"])
async def test_malformed_frame(wire: Wire, frame: bytes) -> None:
    """An answer that is not a JSON object is an error, not a crash."""
    wire.frames = [chunk({"content": "half"}), frame]
    with pytest.raises(TargetError, match="JSON") as caught:
        await events_of(wire)
    assert caught.value.partial_text == "half"


async def test_dropped_connection(wire: Wire) -> None:
    """A connection that breaks in the middle is an error with the text so far."""
    wire.frames, wire.drop = [chunk({"content": "half"})], True
    with pytest.raises(TargetError, match="broke the connection") as caught:
        await events_of(wire)
    assert caught.value.partial_text == "half"


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (400, InvalidRequestError, "context is too long"),
        (401, TargetError, "check the key"),
        (404, TargetError, "check the model's name"),
        (422, InvalidRequestError, "answered 422"),
        (500, TargetError, "answered 500"),
        (307, TargetError, "answered 307"),
    ],
)
async def test_refusals(wire: Wire, status: int, kind: type[Exception], words: str) -> None:
    """Each is one line naming provider, model and what to do; a key that the server repeats is not in it."""
    wire.status, wire.error = status, {"error": {"message": f"context is too long\nfor {KEY}"}}
    wire.error_headers = {"Location": f"{wire.url}/elsewhere"}
    with pytest.raises(kind, match=words) as caught:
        await events_of(wire)
    assert "generic:tiny" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("status", [400, 404, 429, 500, 501])
async def test_a_refusal_keeps_the_servers_code(wire: Wire, status: int) -> None:
    """By it programs know a model that is not there from an address that is not."""
    wire.status, wire.error = status, {"error": {"message": "no", "code": "model_not_found", "param": "model"}}
    with pytest.raises(LlmSpecError) as caught:
        await events_of(wire)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_nobody_there() -> None:
    """A wrong address is an error that says so."""
    provider = HttpProvider("tiny", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(TargetError, match="cannot be reached; check the address"):
        await provider.complete(QUESTION)
    await provider.aclose()


@pytest.mark.parametrize("how", ["cancelled", "left", "deadline"])
async def test_going_away_closes_the_connection(wire: Wire, how: str) -> None:
    """Whoever stops listening stops the server's work, soon."""
    wire.frames, wire.pause_s = text_chunks(*["x"] * 1000), 0.01
    provider = provider_of(wire)

    async def listen() -> None:
        config = SpeculativeConfig(deadline_s=0.2 if how == "deadline" else None)
        async with SpeculativeDecoder(target=provider, draft=None, config=config).stream("q") as events:
            async for _ in events:
                if how == "left":
                    return

    listening = asyncio.create_task(listen())
    while not wire.num_open:  # noqa: ASYNC110 - the server is another party, it sets no event here
        await asyncio.sleep(0.01)
    if how == "cancelled":
        listening.cancel()
    await asyncio.wait([listening])
    started = time.monotonic()
    while wire.num_open and time.monotonic() - started < 2:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.005)
    assert wire.num_open == 0
    await provider.aclose()


@pytest.mark.parametrize(
    ("dialect", "marks"),
    [
        ("vllm", {"continue_final_message": True, "add_generation_prompt": False}),
        ("sglang", {"continue_final_message": True}),
    ],
)
async def test_continuation_by_fields(wire: Wire, dialect: str, marks: dict[str, bool]) -> None:
    """The assistant's text goes last, with the marks that the server wants in the body."""
    wire.frames = text_chunks(" three")
    request = ChatRequest.create("count", prefix="one two")
    assert (await events_of(wire, request, dialect))[0] == TextDelta(" three")
    assert wire.bodies[0]["messages"][-1] == {"role": "assistant", "content": "one two"}
    assert marks.items() <= wire.bodies[0].items()


@pytest.mark.parametrize(
    ("dialect", "mark"), [("mistral", "prefix"), ("deepseek", "prefix"), ("qwen", "partial"), ("kimi", "partial")]
)
async def test_continuation_by_message(wire: Wire, dialect: str, mark: str) -> None:
    """The assistant's text goes last, marked as the vendor says."""
    wire.frames = text_chunks(" three")
    await events_of(wire, ChatRequest.create("count", prefix="one two"), dialect)
    assert wire.bodies[0]["messages"][-1] == {"role": "assistant", "content": "one two", mark: True}


@pytest.mark.parametrize("texts", [["one two", " three"], ["one", " two three"], ["one two three"], [*"one two three"]])
async def test_a_repeated_prefix_is_taken_off_once(wire: Wire, texts: list[str]) -> None:
    """llama-server's answer contains the prefix, in pieces of its own choice."""
    wire.frames = text_chunks(*texts)
    events = await events_of(wire, ChatRequest.create("count", prefix="one two"), "llamacpp")
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == " three"


@pytest.mark.parametrize("text", ["on the other hand", "one", " three"])
async def test_a_prefix_that_is_not_repeated_takes_nothing_off(wire: Wire, text: str) -> None:
    """What only begins like the prefix is all answer."""
    wire.frames = text_chunks(*text)
    events = await events_of(wire, ChatRequest.create("count", prefix="one two"), "llamacpp")
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == text


async def test_prefixes_that_cannot_be(wire: Wire) -> None:
    """A server that cannot continue says so, and a seam with whitespace at its end is refused."""
    with pytest.raises(InvalidRequestError, match="cannot continue"):
        await events_of(wire, ChatRequest.create("count", prefix="one"), "ollama")
    with pytest.raises(InvalidRequestError, match="whitespace"):
        await events_of(wire, ChatRequest.create("count", prefix="one "), "vllm")
    assert wire.bodies == []


async def test_prediction(wire: Wire) -> None:
    """A prediction goes along where the server takes one; elsewhere it is only a hint, and left out."""
    wire.frames = text_chunks("x")
    request = ChatRequest.create("q", prediction="guess")
    await events_of(wire, request, "mistral")
    await events_of(wire, request, "vllm")
    assert wire.bodies[0]["prediction"] == {"type": "content", "content": "guess"}
    assert "prediction" not in wire.bodies[1]


async def test_the_key_is_the_vendors_variable(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings open providers of every dialect, with the key from the environment and not in a repr."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    provider = open_provider(f"vllm:org/tiny:7b@{wire.url}")
    wire.whole = WHOLE
    assert (await provider.complete(QUESTION)).content == "x"
    await provider.aclose()
    assert provider.name == "vllm:org/tiny:7b"
    assert wire.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(provider)


def test_strings_that_say_too_little() -> None:
    """A model is needed, and an address where there is none by default."""
    with pytest.raises(ConfigError, match="needs a model"):
        open_provider("vllm")
    with pytest.raises(ConfigError, match="address"):
        open_provider("generic:tiny")


async def test_as_draft_of_a_local_target(wire: Wire) -> None:
    """`regenerate` measures what a served model is worth as a draft; a broken one changes nothing."""
    config = SpeculativeConfig(strategy="regenerate", baseline_every=0)
    target = open_provider("builtin:target")
    wire.frames = text_chunks("    return", " f()")
    provider = provider_of(wire)
    decoder = SpeculativeDecoder(target=target, draft=provider, config=config)
    good = await decoder.decode("def f():", max_tokens=12)
    wire.status, wire.error = 500, {}
    broken = await decoder.decode("def f():", max_tokens=12)
    await provider.aclose()
    assert good.stats.num_accepted_draft_tokens > 0
    assert good.content == broken.content
    assert len(broken.fallbacks) == 1


async def test_a_raw_prompt_goes_to_completions() -> None:
    """Without messages, to the path for it, with a prefix behind it; the answer's text comes as any other."""
    wire = Wire()
    frame = json.dumps({"choices": [{"index": 0, "text": " world", "finish_reason": "stop"}]})
    wire.frames = [f"data: {frame}\n\n".encode(), b"data: [DONE]\n\n"]
    async with served("/v1/completions", wire.answer) as root:
        provider = HttpProvider("tiny", base_url=f"{root}/v1", dialect=DIALECTS["vllm"])
        request = ChatRequest.create("hello", raw=True, prefix=", big")
        assert (await answered(provider, request)).content == " world"
        wire.whole = {"choices": [{"index": 0, "text": " world", "finish_reason": "length"}]}
        assert (await provider.complete(request)).content == " world"
        await provider.aclose()
    for body in wire.bodies:
        assert body["prompt"] == "hello, big"
        assert "messages" not in body


async def test_chunks_are_passed_on_as_they_are(wire: Wire) -> None:
    """What events cannot say (further choices, log-probabilities) is in the chunks; errors are raised as for events."""
    second = {"choices": [{"index": 1, "delta": {"content": "b"}, "logprobs": {"content": []}, "finish_reason": None}]}
    last = [chunk(finish="stop"), b"data: [DONE]\n\n"]
    wire.frames = [chunk({"content": "a"}), b"data: " + json.dumps(second).encode() + b"\n\n", *last]
    provider = provider_of(wire)
    assert isinstance(provider, ChunkStreaming)
    async with provider.stream_chunks(replace(QUESTION, extra={"n": 2})) as chunks:
        read = [c async for c in chunks]
    assert read[1] == second
    assert len(read) == 3
    wire.frames = [b'data: {"error": {"message": "broken"}}\n\n']
    with pytest.raises(TargetError, match="broken"):
        async with provider.stream_chunks(QUESTION) as chunks:
            [c async for c in chunks]
    await provider.aclose()


async def test_log_probabilities_are_asked_for_and_read(wire: Wire) -> None:
    """Streamed and whole; unasked-for ones are passed over."""
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -0.5}]}
    told = {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [entry]}}]}
    wire.frames = [b"data: " + json.dumps(told).encode() + b"\n\n", chunk(finish="stop"), b"data: [DONE]\n\n"]
    choice = {"index": 0, "message": {"content": "a"}, "logprobs": {"content": [entry]}, "finish_reason": "stop"}
    wire.whole = {"choices": [choice]}
    provider = provider_of(wire)
    request = replace(QUESTION, top_logprobs=1)
    streamed, whole = await answered(provider, request), await provider.complete(request)
    expected = (TokenLogprob("a", -0.5, b"a", (TokenLogprob("a", -0.5),)),)
    assert (streamed.logprobs, whole.logprobs) == (expected, expected)
    assert [(body["logprobs"], body["top_logprobs"]) for body in wire.bodies] == [(True, 1)] * 2
    assert (await answered(provider)).logprobs is None
    assert "logprobs" not in wire.bodies[-1]
    await provider.aclose()


# ------------------------------------------------------------------------------------------ whole answers


def whole_of(message: dict[str, Any], finish: str | None = "stop", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}], **fields}


async def test_a_whole_answer_is_asked_for_without_a_stream(wire: Wire) -> None:
    """Text, thought, calls (which have no index then), usage and how it ended are those of a stream."""
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    message = {"content": "text", "reasoning_content": "thought", "tool_calls": calls, "refusal": None}
    wire.whole = whole_of(message, "tool_calls", usage={"prompt_tokens": 7, "completion_tokens": 2})
    provider = provider_of(wire, "vllm")
    answer = await provider.complete(QUESTION)
    await provider.aclose()
    assert answer == ChatResponse(
        message=ChatMessage(
            "assistant", "text", tool_calls=(ToolCall("f", "f", "{}"), ToolCall("g", "g", "{}")), reasoning="thought"
        ),
        finish_reason="tool_calls",
        usage=Usage(input_tokens=7, output_tokens=2),
        reasoning="thought",
        stopped_by="tool_calls",
    )
    assert wire.bodies == [{"model": "tiny", "messages": [{"role": "user", "content": "question"}]}]


@pytest.mark.parametrize(
    ("message", "finish", "content", "finish_reason"),
    [
        ({"content": "x"}, "length", "x", "length"),
        ({"content": None}, "stop", "", "stop"),
        ({"content": "x", "refusal": ""}, "end_of_turn", "x", "stop"),
        ({"content": None, "refusal": "I will not."}, "stop", "", "content_filter"),
    ],
)
async def test_whole_answers_of_all_kinds(
    wire: Wire, message: dict[str, Any], finish: str, content: str, finish_reason: str
) -> None:
    """As the same pieces of a stream would be read."""
    wire.whole = whole_of(message, finish)
    provider = provider_of(wire, "vllm")
    answer = await provider.complete(QUESTION)
    await provider.aclose()
    assert (answer.content, answer.finish_reason) == (content, finish_reason)


async def test_a_whole_answer_that_repeats_the_prefix(wire: Wire) -> None:
    """It is taken off, once; one that does not repeat it stays as it is."""
    request = ChatRequest.create("q", prefix="The answer")
    dialect = replace(DIALECTS["llamacpp"], stops_when_reader_leaves=True)
    provider = HttpProvider("tiny", base_url=wire.url, dialect=dialect)
    for content, rest in (("The answer is 4", " is 4"), (" is The answer", " is The answer"), ("The ans", "The ans")):
        wire.whole = whole_of({"content": content})
        assert (await provider.complete(request)).content == rest
    await provider.aclose()


@pytest.mark.parametrize(
    ("whole", "told"),
    [
        (whole_of({"content": "x"}, None), "without a finish reason"),
        ({"choices": []}, "without a finish reason"),
        ({"error": {"message": "out of memory", "code": 500}}, "out of memory"),
        ([1, 2], "not a JSON object"),
    ],
)
async def test_a_whole_answer_that_is_none(wire: Wire, whole: Any, told: str) -> None:
    """One error that says so, without the key."""
    wire.whole = whole
    provider = provider_of(wire, "vllm")
    with pytest.raises(TargetError, match=told) as caught:
        await provider.complete(QUESTION)
    await provider.aclose()
    assert KEY not in str(caught.value)


async def test_a_whole_answer_that_breaks_off(wire: Wire) -> None:
    """A connection that is lost may be better the next time."""
    wire.whole, wire.drop = WHOLE, True
    provider = provider_of(wire, "vllm")
    with pytest.raises(TransientError, match="broke the connection"):
        await provider.complete(QUESTION)
    await provider.aclose()


async def test_leaving_a_whole_answer_closes_its_connection(wire: Wire) -> None:
    """Within 50 ms the server hears that nobody waits any more."""
    wire.whole, wire.pause_s = WHOLE, 30.0
    provider = provider_of(wire, "vllm")
    task = asyncio.create_task(provider.complete(QUESTION))
    await wire.was_asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(0.05):
        await wire.was_left.wait()
    await provider.aclose()


async def test_a_server_that_would_write_on_is_asked_for_a_stream(wire: Wire) -> None:
    """llama-server writes a whole answer to its end, whoever has gone."""
    wire.frames = text_chunks("x")
    provider = provider_of(wire, "llamacpp")
    assert (await provider.complete(QUESTION)).content == "x"
    await provider.aclose()
    assert wire.bodies[0]["stream"] is True
    assert not provider.capabilities.whole_answers


async def test_of_a_long_refusal_only_the_beginning_is_read() -> None:
    """A server that goes on refusing for ever ends the request, not this process."""
    num_read = 0

    async def refuse(request: web.Request) -> web.StreamResponse:
        nonlocal num_read
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"e" * 65536)
                num_read += 1
        return response

    async with served("/{any:.*}", refuse) as root:
        provider = HttpProvider("tiny", base_url=root, api_key=KEY)
        with pytest.raises(TransientError, match="answered 500: Internal Server Error"):
            await answered(provider)
        await provider.aclose()
    assert num_read < 200  # what sockets hold
