"""A chat-completions server that says what a test gives it, and what each door of this server makes of that."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from aiohttp import web

from llm_spec.server import ModelConfig
from support.serving import Asking, Reply, ask, serving
from support.wire import served

__all__ = ["DONE", "DOORS", "Said", "Upstream", "ask_door", "call", "choice", "event", "upstream"]

Json: TypeAlias = dict[str, Any]
CHAT: Final = "/v1/chat/completions"
# name: path, and more fields; a relayed answer is one with log-probabilities
DOORS: Final[Mapping[str, tuple[str, Json]]] = {
    f"{name}{' streamed' if stream else ''}": (path, {**fields, "stream": stream})
    for name, path, fields in (
        ("chat", CHAT, {}),
        ("relay", CHAT, {"logprobs": True}),
        ("responses", "/v1/responses", {}),
        ("messages", "/v1/messages", {}),
    )
    for stream in (False, True)
}
DONE: Final = b"data: [DONE]\n\n"
_ENDS: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "max_output_tokens": "length",
}


@dataclass(frozen=True)
class Said:
    """What a client is told: text, calls (name, arguments) and how it ended, or an error with its status.

    The status of an error inside a stream is 0.
    """

    text: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    end: str | None = None
    status: int | None = None


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def choice(delta: object = None, finish: object = None, **fields: Any) -> bytes:
    """A chunk with one choice."""
    one = {"index": 0, "delta": {} if delta is None else delta, "finish_reason": finish, **fields}
    return event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [one]})


def call(index: object, call_id: object, name: object, arguments: object) -> Json:
    """A piece of a call; what is None is left out."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    fields = {key: value for key, value in (("index", index), ("id", call_id)) if value is not None}
    return {**fields, "type": "function", "function": function}


class Upstream:
    """A server before it: `say` is what the upstream answers next, as bytes, with this content type."""

    def __init__(self) -> None:
        self.frames: Sequence[bytes] = ()
        self.content_type = "text/event-stream"
        self.status = 200
        self.bodies: list[Json] = []
        self.server: Asking | None = None

    def say(self, *frames: bytes, content_type: str = "text/event-stream") -> None:
        self.frames, self.content_type = frames, content_type
        self.bodies.clear()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        response = web.StreamResponse(status=self.status, headers={"Content-Type": self.content_type})
        await response.prepare(request)
        for frame in self.frames:
            await response.write(frame)
        return response


@asynccontextmanager
async def upstream(dialect: str = "generic", **settings: Any) -> AsyncGenerator[Upstream]:
    """An upstream, and a server before it whose model is `fast`."""
    said = Upstream()
    async with (
        served("/{path:.*}", said.answer, shutdown_s=0.05) as root,
        serving({"fast": ModelConfig(target=f"{dialect}:m@{root}/v1")}, **settings) as server,
    ):
        said.server = server
        yield said


async def ask_door(said: Upstream, door: str, **fields: Any) -> Said:
    """What one of `DOORS` says."""
    path, more = DOORS[door]
    assert said.server is not None
    reply = await said.server.post(path, ask(path, **more, **fields))
    assert b"NaN" not in reply.data
    assert b"Infinity" not in reply.data
    if reply.status != 200:
        assert reply.error["message"]
        return Said(status=reply.status)
    if not more["stream"]:
        return _READERS[path](reply.json)
    failed = [f for f in reply.chunks if f.get("error") or f.get("type") in ("error", "response.failed")]
    return Said(status=0) if failed else _read_stream(path, reply)


def _read_stream(path: str, reply: Reply) -> Said:
    if path == "/v1/responses":
        (ended,) = [c for c in reply.chunks if c["type"] in ("response.completed", "response.incomplete")]
        return _read_response(ended["response"])
    return _read_messages_stream(reply.chunks) if path == "/v1/messages" else _read_chat_stream(reply.chunks)


def _read_chat(body: Json) -> Said:
    (found,) = body["choices"]
    message = found["message"]
    calls = tuple(
        (c["function"]["name"], json.loads(c["function"]["arguments"] or "{}")) for c in message.get("tool_calls", ())
    )
    assert all(c["id"] for c in message.get("tool_calls", ()))
    return Said((message["content"] or "") + (message["refusal"] or ""), calls, found["finish_reason"])


def _read_chat_stream(chunks: Sequence[Json]) -> Said:
    text, calls, end = "", dict[int, list[str]](), None
    for found in (found for chunk in chunks for found in chunk["choices"]):
        text += (found["delta"].get("content") or "") + (found["delta"].get("refusal") or "")
        end = found["finish_reason"] or end
        for piece in found["delta"].get("tool_calls", ()):
            if piece["index"] not in calls:
                assert piece["id"]
                calls[piece["index"]] = [piece["function"]["name"], ""]
            calls[piece["index"]][1] += piece["function"]["arguments"]
    return Said(text, tuple((name, json.loads(arguments or "{}")) for name, arguments in calls.values()), end)


def _read_message(body: Json) -> Said:
    blocks = body["content"]
    calls = tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use")
    return Said("".join(block.get("text", "") for block in blocks), calls, _ENDS[body["stop_reason"]])


def _read_messages_stream(events: Sequence[Json]) -> Said:
    blocks: list[Json] = []
    end = None
    for one in events:
        match one["type"]:
            case "content_block_start":
                blocks.append({**one["content_block"], "json": ""})
            case "content_block_delta" if one["delta"]["type"] == "text_delta":
                blocks[one["index"]]["text"] += one["delta"]["text"]
            case "content_block_delta" if one["delta"]["type"] == "input_json_delta":
                blocks[one["index"]]["json"] += one["delta"]["partial_json"]
            case "message_delta":
                end = _ENDS[one["delta"]["stop_reason"]]
            case _:
                pass
    calls = tuple((b["name"], json.loads(b["json"] or "{}")) for b in blocks if b["type"] == "tool_use")
    return Said("".join(block.get("text", "") for block in blocks), calls, end)


def _read_response(body: Json) -> Said:
    parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
    text = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
    called = [item for item in body["output"] if item["type"] == "function_call"]
    calls = tuple((item["name"], json.loads(item["arguments"] or "{}")) for item in called)
    reason = (body["incomplete_details"] or {}).get("reason")
    return Said(text, calls, _ENDS.get(reason, reason) if reason else "tool_calls" if calls else "stop")


_READERS: Final = {CHAT: _read_chat, "/v1/messages": _read_message, "/v1/responses": _read_response}
