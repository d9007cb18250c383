"""Anthropic's messages on the wire."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.serving import Reply, ask, remote, serving

from llm_spec.testing.server import ScriptedModelServer, ServerFaults

PATH: Final = "/v1/messages"
ADD: Final[dict[str, Any]] = {
    "name": "add_numbers",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


async def message(text: str = "Good morning", **fields: Any) -> Reply:
    async with serving() as server:
        return await server.post(PATH, ask(PATH, text, **fields))


async def test_a_whole_message_has_every_field() -> None:
    """A client of Anthropic's API finds what it reads."""
    body = (await message()).json
    assert body["id"].startswith("msg_")
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "fast")
    assert body["content"] == [{"type": "text", "text": "You said: Good morning"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == 5


async def test_events_come_in_order() -> None:
    """A stream begins and ends its message and its block, each event under its own name."""
    reply = await message(stream=True)
    frames = reply.frames
    assert all(frame.event == frame.data["type"] for frame in frames)
    names = [frame.event for frame in frames]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(f.data["delta"]["text"] for f in frames if f.event == "content_block_delta")
    assert text == "You said: Good morning"
    assert frames[-2].data["delta"]["stop_reason"] == "end_turn"
    assert frames[-2].data["usage"]["output_tokens"] == 5
    assert reply.data.endswith(b'data: {"type":"message_stop"}\n\n')


async def test_a_call_is_a_block_of_its_own() -> None:
    """A tool's input comes whole as an object, streamed as pieces of JSON."""
    whole = (await message("Add the numbers 3 and 4.", tools=[ADD])).json
    (block,) = whole["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "add_numbers", {"a": 3, "b": 4})
    assert whole["stop_reason"] == "tool_use"
    frames = (await message("Add the numbers 3 and 4.", tools=[ADD], stream=True)).frames
    start = next(f.data["content_block"] for f in frames if f.event == "content_block_start")
    assert start == {"type": "tool_use", "id": start["id"], "name": "add_numbers", "input": {}}
    deltas = [f.data["delta"] for f in frames if f.event == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert "".join(delta["partial_json"] for delta in deltas) == '{"a": 3, "b": 4}'


async def test_a_tools_result_is_read() -> None:
    """A conversation goes on behind a call."""
    messages = [
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add_numbers", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "7"}]},
    ]
    body = (await message(messages=messages, tools=[ADD])).json
    assert body["content"][0]["text"] == "The tool said: 7"


async def test_system_comes_as_text_or_blocks() -> None:
    """`system` reaches the target as a message of the system, in either form."""
    for system in ("Be kind.", [{"type": "text", "text": "Be kind."}]):
        async with ScriptedModelServer("Fine.") as upstream, serving(remote(upstream.url)) as server:
            await server.post(PATH, ask(PATH, system=system))
            assert upstream.requests[-1]["messages"][0] == {"role": "system", "content": "Be kind."}


async def test_a_stop_sequence_is_told() -> None:
    """An answer that a stop string ended says which."""
    body = (await message(stop_sequences=["morning"])).json
    assert body["content"][0]["text"] == "You said: Good "
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "morning")


async def test_a_cut_message_says_so() -> None:
    """`max_tokens` cuts, and the reason is that API's."""
    assert (await message(max_tokens=2)).json["stop_reason"] == "max_tokens"


async def test_the_limit_is_wanted() -> None:
    """A message without `max_tokens` is refused, as by Anthropic."""
    reply = await message(max_tokens=None)
    assert reply.status == 400
    assert reply.json["type"] == "error"
    assert "max_tokens" in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/messages", ask(PATH, model="other"), 404, "not_found_error"),
        ("/messages", ask(PATH, model="other"), 404, "not_found_error"),
        ("/v1/messages", b"{", 400, "invalid_request_error"),
    ],
)
async def test_errors_have_that_apis_form(path: str, body: Any, status: int, kind: str) -> None:
    """An error is an object of type `error`, with Anthropic's name for its kind."""
    async with serving() as server:
        reply = await server.post(path, body)
    assert reply.status == status
    assert reply.json["type"] == "error"
    assert reply.error["type"] == kind


async def test_a_stream_that_breaks_says_so() -> None:
    """An error in the middle ends the stream with an event `error`, which tells no address."""
    async with (
        ScriptedModelServer("one two three", faults=ServerFaults(malformed_after=2)) as upstream,
        serving(remote(upstream.url)) as server,
    ):
        reply = await server.post(PATH, ask(PATH, stream=True))
        address = upstream.url.split("/")[2]
    last = reply.frames[-1]
    assert (last.event, last.data["type"]) == ("error", "error")
    assert set(last.data["error"]) == {"type", "message", "details"}
    assert address not in reply.data.decode()


async def test_a_last_message_of_the_assistant_is_continued() -> None:
    """What the assistant has begun is passed on as the answer's beginning."""
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one two"}]
    async with (
        ScriptedModelServer("one two three four", continues_prefix="fields") as upstream,
        serving(remote(upstream.url)) as server,
    ):
        reply = await server.post(PATH, ask(PATH, messages=messages))
    assert reply.json["content"][0]["text"] == " three four"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_thread_is_refused_in_the_sdks_words(thread: dict[str, str], *, stream: bool) -> None:
    """The SDK's threads hear that the whole conversation is wanted; half of it is not answered."""
    reply = await message(thread=thread, stream=stream)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["details"]["error_code"] == "thread_unsupported_request"
    assert (await message(thread=None)).status == 200
