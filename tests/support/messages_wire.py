"""A real server on 127.0.0.1 that speaks Anthropic's messages: with the bytes a test gives it, or as a small model."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from support.wire import Wire, served

__all__ = ["PROSE", "MessagesWire", "answer_frames", "begin", "end", "frame", "text_frames"]

PROSE = " ".join(f"word{i}" for i in range(80))


def frame(event: str, **fields: Any) -> bytes:
    """One event as the API sends it; the event's name is also its type."""
    return f"event: {event}\ndata: {json.dumps({'type': event, **fields})}\n\n".encode()


def begin(**usage: Any) -> list[bytes]:
    """The first events of an answer."""
    counts = {"input_tokens": 10, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "claude-sonnet-4-5"}
    usage = counts | usage
    return [
        frame("message_start", message=message | {"stop_reason": None, "stop_sequence": None, "usage": usage}),
        frame("ping"),
    ]


def end(reason: str | None = "end_turn", **usage: Any) -> list[bytes]:
    """The last events of an answer."""
    delta = {"stop_reason": reason, "stop_sequence": None}
    return [frame("message_delta", delta=delta, usage={"output_tokens": 5} | usage), frame("message_stop")]


def text_frames(*texts: str, index: int = 0) -> list[bytes]:
    """A block of text."""
    deltas = [{"type": "text_delta", "text": text} for text in texts]
    return [
        frame("content_block_start", index=index, content_block={"type": "text", "text": ""}),
        *(frame("content_block_delta", index=index, delta=delta) for delta in deltas),
        frame("content_block_stop", index=index),
    ]


def answer_frames(*texts: str, reason: str = "end_turn") -> list[bytes]:
    return [*begin(), *text_frames(*texts), *end(reason)]


def play_model(body: Mapping[str, Any]) -> list[bytes]:
    """What a model that knows one text answers: it goes on from a prefix, and minds limits and stop sequences."""
    last = body["messages"][-1]
    prefix = last["content"] if last["role"] == "assistant" else ""
    pieces = re.findall(r"\s*\S+", PROSE.removeprefix(prefix))
    shown, reason = pieces[: body["max_tokens"]], "max_tokens" if len(pieces) > body["max_tokens"] else "end_turn"
    text = "".join(shown)
    places = [text.find(stop) for stop in body.get("stop_sequences", ()) if stop in text]
    if places:
        shown, reason = [text[: min(places)]], "stop_sequence"
    return [*begin(), *text_frames(*shown), *end(reason, output_tokens=len(shown))]


class MessagesWire(Wire):
    """`Wire` as Anthropic's server: it counts tokens, and a small model answers where the test gives no frames."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = None

    def write_answer(self, body: Mapping[str, Any]) -> list[bytes]:
        return play_model(body)

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path.endswith("/count_tokens"):
            return web.json_response({"input_tokens": 2095})
        return await self._write(request, body)


@asynccontextmanager
async def serve() -> AsyncIterator[MessagesWire]:
    """Run a server for one test."""
    wire = MessagesWire()
    async with served("/v1/messages{_:(/count_tokens)?}", wire.answer, shutdown_s=0.1) as root:
        wire.url = root
        yield wire
