"""What a target may say in an answer, and what clients are told: whole, streamed and relayed, through every API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.upstream import DONE, DOORS, Said, ask_door, call, choice, event, upstream

from llm_spec.server import KeyConfig

pytestmark = pytest.mark.virtual_clock

CALLED = choice(finish="tool_calls")
HALF_DELTA = {"role": "assistant", "content": "half"}
HALF = choice(HALF_DELTA)
WHOLE = {
    "id": "c",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "whole"}, "finish_reason": "stop"}],
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
OSLO = (("f", {"city": "Oslo"}),)
TWO = (("f", {"a": 1}), ("g", {"b": 2}))


def repr_shortly(value: object) -> str:
    return repr(value)[:20]


async def check_all_doors(frames: list[bytes], expected: Said, *, content_type: str = "text/event-stream") -> None:
    """Every door says so; an error inside a stream that had begun has no status of its own."""
    async with upstream() as said:
        for door in DOORS:
            said.say(*frames, content_type=content_type)
            got = await ask_door(said, door)
            if expected.status is not None and "streamed" in door:
                assert got in (expected, Said(status=0)), door
            else:
                assert got == expected, door


def pieces(*calls: dict[str, Any]) -> list[bytes]:
    return [choice({"tool_calls": [one]}) for one in calls]


TURNS = pieces(
    call(0, "x", "f", '{"a":'), call(1, "y", "g", ""), call(0, None, None, "1}"), call(1, None, None, '{"b":2}')
)


@pytest.mark.parametrize(
    ("frames", "calls"),
    [
        (pieces(call(0, "a", "f", ""), call(0, "b", None, '{"city":'), call(0, "b", None, '"Oslo"}')), OSLO),
        (pieces(call(0, "a", "f", ""), call(0, "b", None, '{"city":'), call(0, "c", None, '"Oslo"}')), OSLO),
        (pieces(call(0, "a", "f", ""), call(1, None, None, '{"city":'), call(2, None, None, '"Oslo"}')), OSLO),
        (pieces(call(0, "a", "f", ""), call(1, "b", None, '{"city":'), call(2, "c", None, '"Oslo"}')), OSLO),
        (pieces(call(0, "a", "f", '{"city":'), call(0, None, "f", '"Oslo"}')), OSLO),
        (pieces(call(0, "a", "f", '{"city":'), call(0, "a", "f", '"Oslo"}'), call(0, "a", "f", "")), OSLO),
        (pieces(call(0, "a", "f", ""), call(0, "b", "f", '{"city":"Oslo"}')), OSLO),
        (pieces(call(0, "a", None, ""), call(0, None, "f", ""), call(0, None, None, '{"city":"Oslo"}')), OSLO),
        (pieces(call(0, "a", None, '{"city":'), call(0, None, "f", '"Oslo"}')), OSLO),
        (pieces(call("0", 17, "f", {"city": "Oslo"})), OSLO),
        (pieces(call(3, "a", "f", '{"city":"Oslo"}')), OSLO),
        (pieces(call(0, "a", "f", None)), (("f", {}),)),
        (pieces(call(0, "a", "f", {})), (("f", {}),)),
        (pieces(call(0, None, "f", '{"a":1}'), call(0, None, "g", '{"b":2}')), TWO),
        (pieces(call(0, "", "f", '{"a":1}'), call(0, "", "g", '{"b":2}')), TWO),
        (pieces(call(None, None, "f", '{"a":1}'), call(None, None, "g", '{"b":2}')), TWO),
        (pieces(call(0, "x", "f", '{"a":1}'), call(0, "x", "g", '{"b":2}')), TWO),
        (pieces(call(0, "x", "f", '{"a":1}'), call(1, "x", "g", '{"b":2}')), TWO),
        (TURNS, TWO),
        (pieces(call(0, "x", "f", '{"a":1}'), call(1, "y", "g", ""), call([1], None, None, '{"b":2}')), TWO),
        (pieces(call(0, "x", "f", '{"a":1}'), call(1, "y", "g", ""), call(None, None, None, '{"b":2}')), TWO),
        (pieces(call(0, None, "f", None), call(0, "a", None, '{"city":"Oslo"}')), OSLO),
        (pieces(call(0, None, "f", None), call(1, None, "g", '{"b":2}')), (("f", {}), ("g", {"b": 2}))),
        (pieces(call(0, "x", "f", '{"a":"}'), call(0, "z", None, '"}')), (("f", {"a": "}"}),)),
        (pieces(call(0, "", "f", '{"a":1}'), call(0, "", "f", '{"b":2}')), (("f", {"a": 1}), ("f", {"b": 2}))),
        ([choice({"tool_calls": [call(None, None, "f", {"a": 1}), call(None, None, "g", {"b": 2})]})], TWO),
        ([choice({"tool_calls": call(0, "a", "f", '{"city":"Oslo"}')})], OSLO),
    ],
)  # fmt: skip
async def test_calls(frames: list[bytes], calls: tuple[tuple[str, Any], ...]) -> None:
    """However a call comes in pieces, it is one, with its name and an id; several stay apart."""
    await check_all_doors([*frames, CALLED, DONE], Said("", calls, "tool_calls"))


@pytest.mark.parametrize(
    "frames",
    [
        pieces(call(0, "a", None, '{"a":1}')),
        pieces(call(0, "a", None, "")),
        pieces(call(0, "a", "f", '{"a":1}'), call(1, "b", None, '{"b":2}')),
        pieces(call(0, "a", "f", '{"a":1}'), call(1, "b", None, "")),
        pieces(call(0, "a", "f", '{"a":1}'), {"index": 1, "id": "b", "type": "function"}),
        pieces(call(0, "a", 5, "{}")),
        *(pieces(call(0, "a", "f", value)) for value in (5, 0, True, False, 1.5, [], [{"a": 1}])),
        [choice({"tool_calls": {"a": 1}})],
        [choice({"tool_calls": 5})],
        [choice({"tool_calls": ["f"]})],
        [choice({"tool_calls": [{"index": 0, "id": "a", "function": "f"}]})],
    ],
)
async def test_calls_without_a_name(frames: list[bytes]) -> None:
    """Nobody can make a call of them, and none is handed on as one."""
    await check_all_doors([*frames, CALLED, DONE], Said(status=502))


@pytest.mark.parametrize("kind", ["generic", "vllm", "openai"])
@pytest.mark.parametrize(
    "message",
    [
        {"content": "so", "tool_calls": [call(None, "a", "f", "{}"), call(None, "b", None, "{}")]},
        {"content": "so", "tool_calls": [call(None, "a", "f", "{}"), {"id": "b"}]},
        {"content": "so", "tool_calls": [call(None, "a", "f", "{}"), {}]},
        {"content": "so", "tool_calls": [call(None, "a", "f", "{}"), 5]},
        {"content": "so", "tool_calls": [call(None, "a", "f", 5)]},
        {"content": [{"type": "text", "text": "so"}, 5]},
        None,
        5,
    ],
)
async def test_a_whole_answer_that_is_none(message: object, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is lost, or a message that is not there, is not an answer that says less."""
    body = json.dumps({**WHOLE, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    monkeypatch.setenv("OPENAI_API_KEY", "none-is-needed")
    async with upstream(kind) as said:
        for door in DOORS:
            said.say(body.encode(), content_type="application/json")
            assert (await ask_door(said, door)).status in (502, 0), door


@pytest.mark.parametrize(
    ("word", "end"),
    [
        *((word, "stop") for word in ("stop", "STOP", "end_turn", "eos", "eos_token", "stop_sequence", "COMPLETE", "")),
        *((word, "length") for word in ("model_length", "MAX_TOKENS", "max_tokens", "length_capped", "token_limit")),
        *((word, "length") for word in ("model_context_window_exceeded", "a word nobody knows", 2, ["stop"], True)),
        *((word, "content_filter") for word in ("SAFETY", "recitation", "BLOCKLIST", "sensitive", "guardrail")),
        *((word, None) for word in ("abort", "insufficient_system_resource", "error", "network_error", "cancelled")),
        *((word, None) for word in ("ERROR", "timeout", "internal_error", "MALFORMED_FUNCTION_CALL")),
    ],
)  # fmt: skip
async def test_finish_reasons(word: object, end: str | None) -> None:
    """No answer that broke off, or of which nobody knows that it is whole, is told as a complete one."""
    expected = Said(status=502) if end is None else Said("half", (), end)
    await check_all_doors([HALF, choice(finish=word), DONE], expected)


@pytest.mark.parametrize(
    ("frame", "status", "words"),
    [
        (event({"text": "**NETWORK ERROR**", "error_code": 50002}), 502, "NETWORK ERROR"),
        (event({"text": "too many", "error_code": 42901}), 429, "too many"),
        (event({"object": "error", "message": "it died", "type": "InternalServerError", "code": 500}), 502, "died"),
        (event({"object": "error", "message": "no such", "type": "BadRequestError", "code": 400}), 400, "no such"),
        (event({"object": "error", "message": "no such", "type": "BadRequestError"}), 400, "no such"),
        (event({"message": "busy", "code": 429}), 429, "busy"),
        (event({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}), 503, "busy"),
        (b'event: error\ndata: {"message": "boom", "code": 503}\n\n', 503, "boom"),
        (b"event: error\ndata: boom\n\n", 502, "boom"),
        (b'error: {"code": 429, "message": "boom"}\n\n', 429, "boom"),
        (event({"detail": "Internal error"}), 502, "Internal error"),
        (event({"detail": [{"msg": "wrong field"}]}), 502, "wrong field"),
        (event({"error": "boom"}), 502, "boom"),
        (event({"error": {"message": "boom", "code": 429.0}}), 429, "boom"),
        (event({"error": {"message": "boom", "type": "invalid_request_error"}}), 400, "boom"),
        (event({"choices": None, "base_resp": {"status_code": 1002, "status_msg": "boom"}}), 502, "boom"),
        (choice(finish="error", error={"code": 429, "message": "boom"}), 429, "boom"),
        (choice(finish="error", error={"message": "boom"}), 502, "boom"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_first", [True, False])
async def test_errors_in_an_answer(frame: bytes, status: int, words: str, *, is_first: bool) -> None:
    """In whichever form: an error with the server's words and its status, whatever has come, and not an end."""
    async with upstream() as said:
        for door in DOORS:
            said.say(*([] if is_first else [HALF]), frame, DONE)
            got = await ask_door(said, door)
            assert got.status == (0 if "streamed" in door and not is_first else status), door
        said.say(frame, DONE)
        assert said.server is not None
        assert words in (await said.server.chat()).error["message"]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([HALF, event({"type": "ping"}), choice(finish="stop"), DONE], Said("half", (), "stop")),
        ([HALF, event({"type": "ping"}), DONE], Said(status=502)),
        ([HALF, DONE], Said("half", (), "stop")),
        ([HALF], Said(status=502)),
        ([*pieces(call(0, "a", "f", "{}")), DONE], Said("", (("f", {}),), "tool_calls")),
        ([*pieces(call(0, None, "f", None)), DONE], Said("", (("f", {}),), "tool_calls")),
        ([choice({"content": "half \ud83d"}), DONE], Said("half \ufffd", (), "stop")),
        ([choice(finish="stop"), DONE], Said("", (), "stop")),
        ([*pieces(call(0, "a", "f", "{}")), choice(finish="stop"), DONE], Said("", (("f", {}),), "tool_calls")),
        ([DONE], Said(status=502)),
    ],
)
async def test_ends(frames: list[bytes], expected: Said) -> None:
    """`[DONE]` ends an answer well that no other object has come between."""
    await check_all_doors(frames, expected)


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream", "text/plain"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (json.dumps(WHOLE, indent=1), Said("whole", (), "stop")),
        ("\n\ufeff" + json.dumps(WHOLE), Said("whole", (), "stop")),
        (json.dumps({"error": {"code": 429, "message": "busy"}}), Said(status=429)),
        (json.dumps({"error": {"code": 400, "message": "no images"}}), Said(status=400)),
        (json.dumps({"object": "error", "message": "no", "code": 400}), Said(status=400)),
        ("[1, 2]", Said(status=502)),
        ('{"cut', Said(status=502)),
        ("<html>", Said(status=502)),
        ("", Said(status=502)),
    ],
)
async def test_json_in_place_of_a_stream(body: str, expected: Said, content_type: str) -> None:
    """A whole answer is one, and an error has its status, whatever the content type says."""
    await check_all_doors([body.encode()], expected, content_type=content_type)


async def test_a_whole_answer_in_an_event() -> None:
    """And one that comes again behind its own pieces says nothing new."""
    await check_all_doors([event(WHOLE), DONE], Said("whole", (), "stop"))
    await check_all_doors([HALF, event(WHOLE), DONE], Said("half", (), "stop"))


async def test_a_stream_in_place_of_json() -> None:
    """A server that streams always is read all the same, by who asked for a whole answer."""
    async with upstream("vllm") as said:
        said.say(HALF, choice({"content": "!"}), choice(finish="stop"), DONE)
        assert await ask_door(said, "chat") == Said("half!", (), "stop")
        assert "stream" not in said.bodies[-1]
        said.say(HALF, choice(finish="abort"), DONE)
        assert await ask_door(said, "chat") == Said(status=502)
        said.say(json.dumps({**WHOLE, "choices": [{**WHOLE["choices"][0], "finish_reason": "abort"}]}).encode())  # type: ignore[dict-item]
        assert await ask_door(said, "chat") == Said(status=502)


# Which fields an answer needs, and which it does not; the first part is what another type does to an answer
HARMLESS: list[tuple[str, Any]] = [
    *(("id", value) for value in (None, 5, {}, [])),
    *(("created", value) for value in (None, "x", -1, 1e400, float("nan"), [])),
    *(("model", value) for value in (None, 5, {})),
    *(("object", value) for value in (None, 5, "")),
    *(("usage", value) for value in (None, 5, "x", [], {}, {"prompt_tokens": float("nan")}, {"prompt_tokens": "3"})),
    *(("system_fingerprint", value) for value in (float("inf"), {"a": "\ud800"})),
]
HARMLESS_OF_CHOICE: list[tuple[str, Any]] = [
    *(("index", value) for value in (None, "0", 0.0, "x", -1, 1e308, float("nan"), [], {}, False, 2**70)),
    *(("logprobs", value) for value in (None, {}, [], "", 0, 5, "x", [5], {"content": 5}, {"content": [5]})),
    *(("stop_reason", value) for value in (5, [], {}, float("nan"))),
]
HARMLESS_OF_DELTA: list[tuple[str, Any]] = [
    *(("role", value) for value in (None, 5, [], "x")),
    *(("reasoning_content", value) for value in (None, 5, {}, [1])),
    *(("reasoning_details", value) for value in (5, "x", [5])),
    *(("annotations", value) for value in (None, 5, "x")),
    *(("tool_calls", value) for value in (None, [])),
    *(("refusal", value) for value in (None, "", False)),
    *(("unknown", value) for value in (5, float("nan"), {"a": [1e400]})),
]
HARMFUL: list[tuple[str, Any]] = [*(("choices", value) for value in (None, 5, "x", {}, [5], [None], ["x"]))]
HARMFUL_OF_CHOICE: list[tuple[str, Any]] = [*(("delta", value) for value in (5, "x", [], ["x"], True, ""))]
HARMFUL_OF_DELTA: list[tuple[str, Any]] = [
    *(("content", value) for value in (5, {}, True, 1.5, {"text": "x"})),
    *(("content", [value]) for value in (None, 5, "x", [], {}, {"text": "x"}, {"type": "text", "text": 1})),
    *(("content", [{"type": value, "text": "x"}]) for value in (None, 5, "other", [])),
    *(("refusal", value) for value in (5, {"a": 1})),
    *(("tool_calls", value) for value in (5, "x", [5], [[]])),
]


def build_chunk(level: str, name: str, value: object) -> bytes:
    delta: dict[str, Any] = {"content": " more"}
    one: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
    chunk: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "choices": [one]}
    {"chunk": chunk, "choice": one, "delta": delta}[level][name] = value
    return event(chunk)


@pytest.mark.parametrize(
    ("level", "fields", "is_harmless"),
    [
        ("chunk", HARMLESS, True),
        ("choice", HARMLESS_OF_CHOICE, True),
        ("delta", HARMLESS_OF_DELTA, True),
        ("chunk", HARMFUL, False),
        ("choice", HARMFUL_OF_CHOICE, False),
        ("delta", HARMFUL_OF_DELTA, False),
    ],
)
async def test_fields_of_other_types(level: str, fields: list[tuple[str, Any]], *, is_harmless: bool) -> None:
    """What an answer does not need may be anything; what it needs is right, or the answer ends with an error."""
    async with upstream() as said:
        for name, value in fields:
            for door in DOORS:
                said.say(HALF, build_chunk(level, name, value), choice(finish="stop"), DONE)
                got = await ask_door(said, door)
                if is_harmless:
                    assert got == Said("half more", (), "stop"), (door, name, value)
                else:
                    assert got.status in (502, 0), (door, name, value)


@pytest.mark.parametrize("door", ["chat", "chat streamed", "relay", "relay streamed"])
@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": float("nan"), "completion_tokens": 5},
        {"prompt_tokens": 3, "completion_tokens": float("inf")},
        {"prompt_tokens": -1_000_000, "completion_tokens": -1_000_000},
        {"prompt_tokens": "3", "completion_tokens": 5},
        {"prompt_tokens": 3, "completion_tokens": True},
        {"prompt_tokens": 3, "completion_tokens": [5]},
        {"prompt_tokens": 10**400, "completion_tokens": 5},
        {"prompt_tokens": 2**53 + 1, "completion_tokens": 5},
        {"prompt_tokens": 3},
        {"prompt_tokens": 0, "completion_tokens": 0},
        [3],
        5,
    ],
)
async def test_counts_that_are_none(usage: object, door: str) -> None:
    """They are no counts: the answer is there, its client is not told them, and the server counts itself."""
    key = {"authorization": "Bearer secret-of-alice"}
    async with upstream(keys={"alice": KeyConfig(key="secret-of-alice", max_tokens=1000)}) as said:
        assert said.server is not None
        path, fields = DOORS[door]
        bodies = {"model": "fast", "messages": [{"role": "user", "content": "hi"}], **fields}
        left: list[int] = []
        for counts in (USAGE, usage, USAGE):
            said.say(HALF, choice(finish="stop"), event({"choices": [], "usage": counts}), DONE)
            reply = await said.server.post(path, {**bodies, "stream_options": {"include_usage": True}}, **key)
            assert reply.status == 200
            left.append(said.bodies[-1]["max_tokens"])
            told = reply.json.get("usage") if not fields["stream"] else reply.chunks[-1].get("usage")
            assert told is None or all(type(told[name]) is int and told[name] >= 0 for name in USAGE)
        assert left[0] - left[1] == 5
        assert 0 < left[1] - left[2] <= 20


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 40}}, 40),
        ({"prompt_cache_hit_tokens": 40, "prompt_cache_miss_tokens": 10}, 40),
        ({"cached_tokens": 40}, 40),
        ({"cache_read_input_tokens": 40}, 40),
        ({"prompt_tokens_details": {"cached_tokens": 0}, "prompt_cache_hit_tokens": 40}, 40),
        ({"prompt_tokens_details": None, "cached_tokens": 40}, 40),
        ({"prompt_tokens_details": {"cached_tokens": 51}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": -1}}, 0),
        ({"prompt_tokens_details": 5}, 0),
    ],
)
async def test_cached_tokens(usage: dict[str, Any], cached: int) -> None:
    """In whichever name; more than the prompt has is no count."""
    counts = {"prompt_tokens": 50, "completion_tokens": 2, "total_tokens": 52, **usage}
    async with upstream() as said:
        assert said.server is not None
        said.say(HALF, choice(finish="stop"), event({"choices": [], "usage": counts}), DONE)
        chat = (await said.server.chat()).json["usage"]
        assert (chat["prompt_tokens"], chat["prompt_tokens_details"]["cached_tokens"]) == (50, cached)
        ask = {"model": "fast", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        message = (await said.server.post("/v1/messages", ask)).json["usage"]
        assert (message["input_tokens"], message["cache_read_input_tokens"]) == (50 - cached, cached)


@pytest.mark.parametrize(
    ("texts", "joined"),
    [
        (["hi \ud83d", "\ude00 there"], "hi 😀 there"),
        (["hi \ud83d", " there"], "hi \ufffd there"),
        (["hi \ude00", "\ud83d"], "hi \ufffd\ufffd"),
        (["\ud83d", "\ude00"], "😀"),
        (["a \ud83d\ude00 b"], "a 😀 b"),
    ],
)
async def test_halves_of_characters(texts: list[str], joined: str) -> None:
    """Two of them in two pieces are a character, one alone is U+FFFD; none goes out, in no field."""
    await check_all_doors(
        [*(choice({"content": text}) for text in texts), choice(finish="stop"), DONE], Said(joined, (), "stop")
    )
    for arguments in (texts, [json.dumps(text)[1:-1] for text in texts]):
        first, *rest = ('{"a":"', *arguments, '"}')
        calls = [call(0, "a", "f", first), *(call(0, None, None, text) for text in rest)]
        await check_all_doors([*pieces(*calls), CALLED, DONE], Said("", (("f", {"a": joined}),), "tool_calls"))


@pytest.mark.parametrize("door", ["relay", "relay streamed"])
async def test_log_probabilities_are_json(door: str) -> None:
    """NaN and Infinity are none in JSON, and half a character is none in UTF-8."""
    entry = {"token": "\ud800", "logprob": float("-inf"), "bytes": None, "top_logprobs": []}
    logprobs = {"content": [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": [entry]}]}
    async with upstream() as said:
        said.say(choice({"content": "a"}, logprobs=logprobs, extra=float("nan")), choice(finish="stop"), DONE)
        assert said.server is not None
        path, fields = DOORS[door]
        reply = await said.server.post(
            path, {"model": "fast", "messages": [{"role": "user", "content": "x"}], **fields}
        )
        found = reply.json["choices"][0] if door == "relay" else reply.chunks[0]["choices"][0]
        (shown,) = found["logprobs"]["content"]
        assert shown["top_logprobs"] == [{**entry, "token": "\ufffd", "logprob": -9999.0}]
        assert "extra" not in found or found["extra"] is None
        reply.data.decode().encode()


TOKEN: dict[str, Any] = {"token": "half", "logprob": -0.5, "bytes": [104], "top_logprobs": []}
FIRST: dict[str, Any] = {"content": [TOKEN], "refusal": None}


@pytest.mark.parametrize(
    "logprobs",
    [
        *(5, "x", [5], {"content": 5}),
        *({"content": [value]} for value in (5, None, {}, [])),
        *({"content": [{**TOKEN, "token": value}]} for value in (5, None, [])),
        *({"content": [{**TOKEN, "logprob": value}]} for value in ("x", None, True, {})),
        *({"content": [{**TOKEN, "top_logprobs": value}]} for value in (5, [5], [{**TOKEN, "token": 5}])),
    ],
)
async def test_log_probabilities_that_are_none(logprobs: object) -> None:
    """The text is whole, so it comes; a list that lacks some of the tokens does not."""
    async with upstream() as said:
        assert said.server is not None
        said.say(
            choice(HALF_DELTA, logprobs=FIRST), choice({"content": "!"}, logprobs=logprobs), choice(finish="stop"), DONE
        )
        (whole,) = (await said.server.chat(logprobs=True)).json["choices"]
        assert (whole["message"]["content"], whole["logprobs"]) == ("half!", None)
        chunks = [c["choices"][0] for c in (await said.server.chat(logprobs=True, stream=True)).chunks]
        assert [c["logprobs"] for c in chunks[:2]] == [FIRST, None]


@pytest.mark.parametrize("value", [None, {}, [], "", 0])
async def test_a_piece_without_log_probabilities(value: object) -> None:
    """It takes away none of the others."""
    async with upstream() as said:
        assert said.server is not None
        said.say(choice(HALF_DELTA, logprobs=FIRST), choice({"content": ""}, "stop", logprobs=value), DONE)
        (whole,) = (await said.server.chat(logprobs=True)).json["choices"]
        assert whole["logprobs"] == FIRST


@pytest.mark.parametrize("value", [5, "x", [5], True, {"a": {"b": [5]}}, float("nan"), 10**400], ids=repr_shortly)
@pytest.mark.parametrize(
    "name", ["prompt_tokens_details", "completion_tokens_details", "total_tokens", "cached_tokens"]
)
@pytest.mark.parametrize("door", ["relay", "relay streamed"])
async def test_details_of_a_relayed_usage(door: str, name: str, value: object) -> None:
    """What is no count is not passed on; the others are."""
    async with upstream() as said:
        assert said.server is not None
        said.say(HALF, choice(finish="stop"), event({"choices": [], "usage": {**USAGE, name: value}}), DONE)
        path, fields = DOORS[door]
        body = {"model": "fast", "messages": [{"role": "user", "content": "hi"}], **fields}
        reply = await said.server.post(path, {**body, "stream_options": {"include_usage": True}})
        told = reply.json["usage"] if door == "relay" else reply.chunks[-1]["usage"]
        assert {field: told[field] for field in USAGE} == USAGE
        if name != "total_tokens":
            assert told.get(name, {}) in ({}, {"a": {}}) or (name, value) == ("cached_tokens", 5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "frames",
    [
        [choice({"content": "a"}), choice({"content": "b"}, index=1), choice(finish="stop", index=7)],
        [choice({"content": "a"}), choice({"content": "b"}, index=1), choice({"content": "c"}, index=None)],
        [choice({"content": "a"}), choice({"content": "b"}, index="x")],
        [choice({"content": "b"}, "stop", index=1)],
    ],
)
async def test_choices_of_which_nobody_knows_which_they_are(frames: list[bytes], stream: bool) -> None:
    """Where several were requested, a piece of none of them is an error, and so is an answer that leaves one out."""
    async with upstream() as said:
        assert said.server is not None
        said.say(*frames, DONE)
        reply = await said.server.chat(n=2, stream=stream)
        assert reply.status == 502 or reply.chunks[-1].get("error")


@pytest.mark.parametrize("created", [10**400, -(10**400), -1, 1.5, True, None, "x"], ids=repr_shortly)
async def test_the_time_of_a_relayed_chunk(created: object) -> None:
    """Clients read it as a number of 64 bits."""
    async with upstream() as said:
        assert said.server is not None
        one = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}
        said.say(event({"id": "c", "created": created, "choices": [one]}), DONE)
        (told,) = (await said.server.chat(logprobs=True, stream=True)).chunks
        assert type(told["created"]) is int
        assert 0 < told["created"] < 2**53
