"""A server of chat completions that answers with the replies a test gives it, whole or in pieces, as it is asked."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from support.wire import served

__all__ = ["ScriptedChat", "build_call", "scripted_chat"]

_USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
_ENVELOPE = {"id": "chatcmpl-1", "created": 1_700_000_000, "model": "m"}
_PIECE = 5  # characters


def build_call(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    """A call as it is in a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ScriptedChat:
    """Each request gets the next reply; the last comes again and again.

    A reply is a message, beside which it may have `finish`, `usage`, `status`, `headers`, and `deltas` for who asks for
    a stream. With `error` a stream ends in that.
    """

    def __init__(self, replies: tuple[Mapping[str, Any], ...]) -> None:
        self._replies = replies
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        self.bodies.append(await request.json())
        message = dict(self._replies[min(len(self.bodies), len(self._replies)) - 1])
        if (status := message.pop("status", None)) is not None:
            return web.json_response(message["body"], status=status, headers=message.get("headers"))
        finish = message.pop("finish", None) or ("tool_calls" if message.get("tool_calls") else "stop")
        usage, deltas = message.pop("usage", _USAGE), message.pop("deltas", None)
        error = message.pop("error", None)
        if not self.bodies[-1].get("stream"):
            message = {"role": "assistant", "content": None, **message}
            choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
            return web.json_response({**_ENVELOPE, "object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta in deltas or split_message(message):
            await response.write(build_frame([{"index": 0, "delta": delta, "finish_reason": None}]))
        if error is not None:
            await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
            return response
        await response.write(build_frame([{"index": 0, "delta": {}, "finish_reason": finish}]))
        await response.write(build_frame([], usage=usage))
        await response.write(b"data: [DONE]\n\n")
        return response


def build_frame(choices: list[dict[str, Any]], **fields: Any) -> bytes:
    chunk = {**_ENVELOPE, "object": "chat.completion.chunk", "choices": choices, **fields}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def split_message(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The deltas that say a message: texts and arguments in pieces, other fields as they are."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    for name in ("reasoning", "reasoning_content", "content", "refusal"):
        text = message.get(name) or ""
        deltas += ({name: text[at : at + _PIECE]} for at in range(0, len(text), _PIECE))
    deltas += ({name: message[name]} for name in ("reasoning_details", "annotations") if name in message)
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        begin = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        deltas.append({"tool_calls": [begin]})
        for at in range(0, len(function["arguments"]), _PIECE):
            piece = {"index": index, "function": {"arguments": function["arguments"][at : at + _PIECE]}}
            deltas.append({"tool_calls": [piece]})
    return deltas


@asynccontextmanager
async def scripted_chat(*replies: Mapping[str, Any]) -> AsyncGenerator[ScriptedChat]:
    """The server, at `url`."""
    chat = ScriptedChat(replies)
    async with served("/v1/chat/completions", chat.answer) as root:
        chat.url = f"{root}/v1"
        yield chat
