"""Several choices and log-probabilities: the target's own chunks, passed on or put together."""

from __future__ import annotations

from typing import Final

import pytest
from support.serving import RULES, ask, check_error, remote, serving

from llm_spec.server import ModelConfig
from llm_spec.server.apis.relay import ChunkMerger, rewrite_chunk_for_client
from llm_spec.testing.server import ScriptedModelServer, ServerFaults

pytestmark = pytest.mark.virtual_clock

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "You said: Good morning"
USAGE: Final = {"include_usage": True}


async def test_several_choices_are_put_together() -> None:
    """`n` choices of one answer come whole, in their order, and are counted together."""
    async with serving(RULES) as server:
        reply = await server.chat(n=3)
    body = reply.json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert all(choice["message"]["content"] == TEXT for choice in body["choices"])
    assert all(choice["finish_reason"] == "stop" for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 15
    assert (body["object"], body["model"]) == ("chat.completion", "fast")
    assert body["id"].startswith("chatcmpl-")


async def test_log_probabilities_are_put_together() -> None:
    """Those of all pieces are one list beside the message."""
    async with serving(RULES) as server:
        (choice,) = (await server.chat(logprobs=True, top_logprobs=2)).json["choices"]
    told = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in told) == TEXT
    assert all(one["top_logprobs"] for one in told)


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_chunks_are_passed_on_under_this_servers_names(wants_usage: bool) -> None:
    """A stream has one id of this server and its model's name; usage comes only when asked for, last before [DONE]."""
    async with serving(RULES) as server:
        reply = await server.chat(n=2, stream=True, **({"stream_options": USAGE} if wants_usage else {}))
    chunks = reply.chunks
    assert reply.data.endswith(b"data: [DONE]\n\n")
    assert {chunk["model"] for chunk in chunks} == {"fast"}
    (answer_id,) = {chunk["id"] for chunk in chunks}
    assert answer_id.startswith("chatcmpl-")
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [TEXT, TEXT]
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [wants_usage]
    assert bool(chunks[-1]["choices"]) is not wants_usage


async def test_a_passed_on_answer_is_plain() -> None:
    """Nothing is speculated where the target's own chunks are wanted, and the headers say so."""
    async with serving(RULES) as server:
        for stream in (False, True):
            reply = await server.chat(n=2, stream=stream)
            assert reply.headers["x-llm-spec-strategy"] == "plain"
            assert reply.headers["x-llm-spec-guarantee"] == "exact"


async def test_completions_are_passed_on_as_completions() -> None:
    """A raw prompt's choices have `text`, and its own form of log-probabilities."""
    path = "/v1/completions"
    async with serving(RULES) as server:
        whole = (await server.post(path, ask(path, n=2, logprobs=1))).json
        streamed = await server.post(path, ask(path, n=2, logprobs=1, stream=True))
    assert whole["object"] == "text_completion"
    assert whole["id"].startswith("cmpl-")
    assert [choice["text"] for choice in whole["choices"]] == [TEXT, TEXT]
    assert "".join(whole["choices"][1]["logprobs"]["tokens"]) == TEXT
    assert {chunk["object"] for chunk in streamed.chunks} == {"text_completion"}


async def test_a_remote_target_is_asked_for_them() -> None:
    """`n`, `logprobs` and `top_logprobs` go to the target as they are."""
    async with ScriptedModelServer("one two") as upstream, serving(remote(upstream.url)) as server:
        reply = await server.chat(n=2, logprobs=True, top_logprobs=3)
        asked = upstream.requests[-1]
    assert (asked["n"], asked["logprobs"], asked["top_logprobs"]) == (2, True, 3)
    assert reply.json["choices"][0]["message"]["content"] == "one two"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_local_target_refuses_several_choices(stream: bool) -> None:
    """A model in this process gives one, and the error names the field."""
    async with serving(ModelConfig(target="builtin:target", draft="lookup")) as server:
        reply = await server.chat(stream=stream, n=2)
    assert reply.status == 400
    check_error(CHAT, reply)
    assert reply.error["param"] == "n"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_target_that_fails_at_once_has_its_status(stream: bool) -> None:
    """An error before the first chunk is no stream."""
    async with ScriptedModelServer("one", faults=ServerFaults(status=429, retry_after_s=3.0)) as upstream:
        async with serving(remote(upstream.url)) as server:
            reply = await server.chat(n=2, stream=stream)
        address = upstream.url.split("/")[2]
    assert reply.status == 429
    assert reply.headers["Retry-After"] == "3"
    check_error(CHAT, reply)
    assert address not in reply.data.decode()


async def test_a_target_that_fails_in_the_middle_ends_the_stream() -> None:
    """What breaks behind the first chunk is an error object, then [DONE]."""
    async with ScriptedModelServer("one two three four", faults=ServerFaults(malformed_after=2)) as upstream:
        async with serving(remote(upstream.url)) as server:
            reply = await server.chat(n=2, stream=True)
        address = upstream.url.split("/")[2]
    *_, error, done = reply.frames
    assert done.data == "[DONE]"
    assert set(error.data["error"]) == {"message", "type", "param", "code"}
    assert address not in reply.data.decode()


@pytest.mark.parametrize("wanted", [False, True])
def test_a_usage_beside_choices_is_told_where_it_is_wanted(wanted: bool) -> None:
    """Some servers count in every chunk: the text is passed on, its count only to who asked for it."""
    chunk = {"id": "theirs", "choices": [{"index": 0, "delta": {"content": "x"}}], "usage": {"prompt_tokens": 1}}
    told = rewrite_chunk_for_client(chunk, answer_id="ours", model="fast", include_usage=wanted)
    assert told is not None
    assert told["choices"] == chunk["choices"]
    assert ("usage" in told) is wanted
    assert (told["id"], told["model"]) == ("ours", "fast")


def test_calls_are_put_together() -> None:
    """Pieces of several calls add up by their index."""
    merger = ChunkMerger()
    for calls in (
        [{"index": 0, "id": "a", "function": {"name": "add", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"a"'}}, {"index": 1, "id": "b", "function": {"name": "sub"}}],
        [{"index": 0, "function": {"arguments": ": 1}"}}, {"index": 1, "function": {"arguments": "{}"}}],
    ):
        merger.add_chunk({"choices": [{"index": 0, "delta": {"tool_calls": calls}}]})
    merger.add_chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    (choice,) = merger.build_response_body(answer_id="x", model="m", kind="chat.completion")["choices"]
    told = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"]["tool_calls"]
    ]
    assert told == [("a", "add", '{"a": 1}'), ("b", "sub", "{}")]
    assert choice["finish_reason"] == "tool_calls"


async def test_a_whole_answer_that_breaks_off_is_asked_for_again() -> None:
    """Its client has been given nothing; one that is streamed breaks off there, too."""
    faults = ServerFaults(num_requests=1, drop_after=2)
    async with ScriptedModelServer(TEXT, faults=faults) as upstream, serving(remote(upstream.url)) as server:
        whole = await server.chat(n=2)
        assert [choice["message"]["content"] for choice in whole.json["choices"]] == [TEXT]  # it knows no `n`
        assert len(upstream.requests) == 2
    async with ScriptedModelServer(TEXT, faults=faults) as upstream, serving(remote(upstream.url)) as server:
        assert (await server.chat(n=2, stream=True)).chunks[-1]["error"]
        assert len(upstream.requests) == 1
