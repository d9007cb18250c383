"""The stateless part of OpenAI's responses on the wire."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from support.serving import Reply, ask, remote, serving

from llm_spec.testing.server import ScriptedModelServer, ServerFaults

PATH: Final = "/v1/responses"
ADD: Final[dict[str, Any]] = {
    "type": "function",
    "name": "add_numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


async def respond(said: str = "Good morning", /, **fields: Any) -> Reply:
    async with serving() as server:
        return await server.post(PATH, ask(PATH, said) | fields)


async def test_a_whole_response_has_one_message() -> None:
    """Status, output and usage are where OpenAI's clients look for them."""
    body = (await respond()).json
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "You said: Good morning", "annotations": [], "logprobs": []}
    ]
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]


async def test_events_come_in_order_and_are_numbered() -> None:
    """Every semantic event comes at its place, named twice, with numbers without a gap."""
    reply = await respond(stream=True)
    frames = reply.frames
    assert all(frame.event == frame.data["type"] for frame in frames)
    assert [frame.data["sequence_number"] for frame in frames] == list(range(len(frames)))
    names = [frame.event for frame in frames]
    head = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    tail = [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert names[:4] == head
    assert names[-4:] == tail
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert b"[DONE]" not in reply.data


async def test_a_streamed_response_ends_with_the_whole_one() -> None:
    """The deltas add up to the text that the closing events repeat."""
    frames = (await respond(stream=True)).frames
    text = "".join(frame.data["delta"] for frame in frames if frame.event == "response.output_text.delta")
    assert text == "You said: Good morning"
    done = next(frame.data for frame in frames if frame.event == "response.output_text.done")
    assert done["text"] == text
    last = frames[-1].data["response"]
    assert last["output"][0]["content"][0]["text"] == text
    assert last["status"] == "completed"
    assert last["usage"]["output_tokens"] == 5


async def test_a_calls_events_belong_together() -> None:
    """A function call is an item of its own; its arguments come in deltas and once whole."""
    frames = (await respond("Add the numbers 3 and 4.", tools=[ADD], stream=True)).frames
    added = next(frame.data["item"] for frame in frames if frame.event == "response.output_item.added")
    assert (added["type"], added["name"], added["status"]) == ("function_call", "add_numbers", "in_progress")
    pieces = [f.data["delta"] for f in frames if f.event == "response.function_call_arguments.delta"]
    done = next(f.data for f in frames if f.event == "response.function_call_arguments.done")
    assert len(pieces) > 1
    assert "".join(pieces) == done["arguments"]
    (item,) = frames[-1].data["response"]["output"]
    assert item["type"] == "function_call"
    assert item["call_id"] == added["call_id"]
    assert json.loads(item["arguments"]) == {"a": 3, "b": 4}


async def test_a_conversation_comes_as_items() -> None:
    """Messages, calls and their outputs of earlier turns are read."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add_numbers", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ]
    body = (await respond(input=items, instructions="Be kind.")).json
    assert body["output"][0]["content"][0]["text"] == "The tool said: 7"
    assert body["instructions"] == "Be kind."


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt", "background"])
async def test_what_needs_a_memory_is_refused(name: str) -> None:
    """This server keeps no responses, and says so instead of answering something else."""
    reply = await respond(**{name: "resp_1"})
    assert reply.status == 400
    assert reply.error["param"] == name
    assert "keeps no responses" in reply.error["message"]


async def test_a_cut_response_is_incomplete() -> None:
    """`max_output_tokens` cuts, and the status says so."""
    body = (await respond(max_output_tokens=2)).json
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (await respond(max_output_tokens=2, stream=True)).frames[-1].event == "response.incomplete"


async def test_json_comes_by_the_texts_format() -> None:
    """`text.format` asks for JSON by a schema."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    body = (
        await respond("A dog named 'Rex'", text={"format": {"type": "json_schema", "name": "pet", "schema": schema}})
    ).json
    assert json.loads(body["output"][0]["content"][0]["text"]) == {"name": "Rex"}


async def test_a_stream_that_breaks_says_that_it_failed() -> None:
    """An error in the middle ends the stream with response.failed, which tells no address."""
    async with (
        ScriptedModelServer("one two three", faults=ServerFaults(malformed_after=2)) as upstream,
        serving(remote(upstream.url)) as server,
    ):
        reply = await server.post(PATH, ask(PATH, stream=True))
        address = upstream.url.split("/")[2]
    last = reply.frames[-1]
    assert last.event == "response.failed"
    assert last.data["response"]["status"] == "failed"
    assert last.data["response"]["error"]["message"]
    assert address not in reply.data.decode()


async def test_what_tells_an_upstream_whose_cache_to_use_arrives() -> None:
    """`prompt_cache_key` and `safety_identifier` mean the same in chat completions; `store` does not."""
    async with (
        ScriptedModelServer("one two") as upstream,
        serving({"far": remote(upstream.url)}) as server,
    ):
        labels = {"prompt_cache_key": "mine", "safety_identifier": "me"}
        reply = await server.post(PATH, ask(PATH, model="far") | labels | {"store": True})
    assert reply.status == 200
    (body,) = [body for body in upstream.requests if "messages" in body]
    assert {name: body.get(name) for name in labels} == labels
    assert "store" not in body
