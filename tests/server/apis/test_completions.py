"""Plain completions on the wire."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.serving import ask, remote, serving

from llm_spec.testing.server import ScriptedModelServer

PATH: Final = "/v1/completions"


async def test_a_whole_completion_has_every_field() -> None:
    """A client that reads any field of a completion finds it."""
    async with serving() as server:
        body = (await server.post(PATH, ask(PATH))).json
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "fast")
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": "You said: Good morning", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == 5


async def test_a_stream_of_it_ends_once() -> None:
    """The text adds up, the last choice says why it ended, usage comes only when asked for, then [DONE]."""
    async with serving() as server:
        silent = await server.post(PATH, ask(PATH, stream=True))
        told = await server.post(PATH, ask(PATH, stream=True, stream_options={"include_usage": True}))
    for reply in (silent, told):
        choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
        assert "".join(choice["text"] for choice in choices) == "You said: Good morning"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert reply.data.endswith(b"data: [DONE]\n\n")
    assert not any(chunk.get("usage") for chunk in silent.chunks)
    assert told.chunks[-1]["choices"] == []
    assert told.chunks[-1]["usage"]["completion_tokens"] == 5


async def test_several_prompts_get_a_choice_each() -> None:
    """A list of prompts is answered in its order, and the usage counts all of them."""
    async with serving() as server:
        body = (await server.post(PATH, ask(PATH, prompt=["one", "two"]))).json
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "You said: one"), (1, "You said: two")]
    assert body["usage"]["completion_tokens"] == 8


async def test_several_prompts_are_not_streamed() -> None:
    """A stream of several prompts is refused clearly."""
    async with serving() as server:
        reply = await server.post(PATH, ask(PATH, prompt=["one", "two"], stream=True))
    assert (reply.status, reply.error["param"]) == (400, "prompt")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_echoed_where_that_is_asked_for(stream: bool) -> None:
    """`echo` puts the prompt in front of the text."""
    async with serving() as server:
        reply = await server.post(PATH, ask(PATH, "Hi", echo=True, stream=stream))
    bodies: list[Any] = reply.chunks if stream else [reply.json]
    assert "".join(choice["text"] for body in bodies for choice in body["choices"]) == "HiYou said: Hi"


async def test_the_default_limit_is_openais() -> None:
    """Without `max_tokens` a completion has at most 16 tokens."""
    async with serving() as server:
        body = (await server.post(PATH, ask(PATH, " ".join("abcdefghijklmnopqrstuvwxyz")))).json
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_prompt_is_continued_without_a_template() -> None:
    """The upstream gets the prompt as it is, at its own completions."""
    async with ScriptedModelServer("one two three") as upstream, serving(remote(upstream.url)) as server:
        reply = await server.post(PATH, ask(PATH, "one two"))
        assert upstream.paths[-1] == "/v1/completions"
        assert upstream.requests[-1]["prompt"] == "one two"
    assert reply.json["choices"][0]["text"] == " three"
