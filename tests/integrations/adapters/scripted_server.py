"""A server on 127.0.0.1 that answers chat completions and Anthropic's messages by a script, and keeps what it is asked.

It runs on a thread of its own, so that blocking calls and other event loops can ask it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, Self, TypeAlias

from aiohttp import web

__all__ = ["MODEL", "RESPONSE_ID", "Call", "Reply", "ScriptedServer"]

Json: TypeAlias = dict[str, Any]
MODEL: Final = "gpt-4o-mini-2024-07-18"  # which has a price
RESPONSE_ID: Final = "chatcmpl-upstream"
USAGE: Final[Json] = {
    "prompt_tokens": 110,
    "completion_tokens": 70,
    "total_tokens": 180,
    "prompt_tokens_details": {"cached_tokens": 30, "cache_write_tokens": 50},
    "completion_tokens_details": {"reasoning_tokens": 20},
}
LOGPROBS: Final = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}]
_RETRY_SOON: Final = {"Retry-After": "0.005", "Retry-After-Ms": "5"}
_HOLD_S: Final = 30.0  # no answer takes so long
_PIECE: Final = 6


@dataclass(frozen=True)
class Call:
    """A call of a tool, as the model writes it."""

    name: str = "get_weather"
    arguments: str = '{"city": "Rome"}'
    id: str = "call_1"


@dataclass(frozen=True)
class Reply:
    """What the server answers to one request. `holds`: it begins and does not end; `repeats_names`: in each delta."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_details: Sequence[Json] = ()
    signature: str | None = None  # of Anthropic's thinking
    refusal: str | None = None
    calls: Sequence[Call] = ()
    finish: str | None = None
    logprobs: bool = False
    repeats_names: bool = False
    holds: bool = False
    status: int = 200
    error: Json = field(default_factory=lambda: {"message": "failed", "type": "error", "code": None})

    @property
    def finish_reason(self) -> str:
        return self.finish or ("tool_calls" if self.calls else "stop")


@dataclass(eq=False)
class ScriptedServer:
    """Answers `replies` in their order, the last again and again; `bodies` and `headers` are those of the requests."""

    replies: Sequence[Reply]
    bodies: list[Json] = field(default_factory=list[Json])
    headers: list[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])
    url: str = ""
    num_left: int = 0  # requests that their client ended
    begun: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    _runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        asyncio.run_coroutine_threadsafe(self._start(), _loop()).result()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), _loop()).result()

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/chat/completions", self._answer_chat)
        app.router.add_post("/v1/messages", self._answer_messages)
        app.router.add_get("/files/{name}", self._send_file)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    async def _list_models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _send_file(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"a file", content_type="text/plain", headers={"x-name": request.match_info["name"]})

    async def _take_reply(self, request: web.Request) -> Reply:
        reply = self.replies[min(len(self.bodies), len(self.replies) - 1)]
        self.bodies.append(await request.json())
        if any(not call.name for call in reply.calls):  # the tool that was offered
            name = (self.bodies[-1].get("tools") or [{"function": {"name": "none"}}])[0]["function"]["name"]
            reply = replace(reply, calls=[replace(call, name=call.name or name) for call in reply.calls])
        self.headers.append(dict(request.headers))
        return reply

    async def _answer_chat(self, request: web.Request) -> web.StreamResponse:
        reply = await self._take_reply(request)
        if reply.status != 200:
            return web.json_response({"error": reply.error}, status=reply.status, headers=_RETRY_SOON)
        if not self.bodies[-1].get("stream"):
            if reply.holds:
                await self._hold()
            return web.json_response(_build_completion(reply))
        return await self._stream(request, reply, _iter_chat_chunks(reply, self.bodies[-1]))

    async def _answer_messages(self, request: web.Request) -> web.StreamResponse:
        reply = await self._take_reply(request)
        if not self.bodies[-1].get("stream"):
            return web.json_response(_build_message(reply))
        return await self._stream(request, reply, _iter_message_events(reply))

    async def _stream(self, request: web.Request, reply: Reply, frames: Iterator[bytes]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if reply.holds:
            await response.write(next(frames) + next(frames))
            await self._hold()
        for frame in frames:
            await response.write(frame)
        return response

    async def _hold(self) -> None:
        self.begun.set()
        try:
            await asyncio.sleep(_HOLD_S)
        except asyncio.CancelledError:
            self.num_left += 1
            self.left.set()
            raise


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="scripted servers", daemon=True).start()
    return loop


# ------------------------------------------------------------------------------------------ chat completions


def _build_call(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _build_completion(reply: Reply) -> Json:
    message: Json = {"role": "assistant", "content": reply.content, "refusal": reply.refusal}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.reasoning_details:
        message["reasoning_details"] = list(reply.reasoning_details)
    if reply.calls:
        message["tool_calls"] = [_build_call(call) for call in reply.calls]
    logprobs = {"content": LOGPROBS, "refusal": None} if reply.logprobs else None
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": logprobs}
    return {**_HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}


_HEAD: Final[Json] = {"id": RESPONSE_ID, "created": 1_700_000_000, "model": MODEL, "system_fingerprint": "fp"}


def _iter_chat_chunks(reply: Reply, body: Json) -> Iterator[bytes]:
    logprobs = {"content": LOGPROBS, "refusal": None} if reply.logprobs else None
    for number, delta in enumerate(_iter_deltas(reply)):
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs if number == 1 else None}
        yield _chunk([choice])
    yield _chunk([{"index": 0, "delta": {}, "finish_reason": reply.finish_reason, "logprobs": None}])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _chunk([], usage=USAGE)
    yield b"data: [DONE]\n\n"


def _chunk(choices: list[Json], **fields: Any) -> bytes:
    chunk = {**_HEAD, "object": "chat.completion.chunk", "choices": choices, **fields}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _iter_deltas(reply: Reply) -> Iterator[Json]:
    yield {"role": "assistant", "content": ""}
    for piece in _cut(reply.reasoning):
        yield {"reasoning_content": piece}
    for detail in reply.reasoning_details:
        yield {"reasoning_details": [detail]}
    for piece in _cut(reply.content):
        yield {"content": piece}
    for piece in _cut(reply.refusal):
        yield {"refusal": piece}
    for index, call in enumerate(reply.calls):
        yield {"tool_calls": [{"index": index, **_build_call(Call(call.name, "", call.id))}]}
        repeated = {"name": call.name} if reply.repeats_names else {}
        for piece in _cut(call.arguments):
            yield {"tool_calls": [{"index": index, "function": {**repeated, "arguments": piece}}]}
    if reply.holds:
        yield {"content": "Hi"}


def _cut(text: str | None) -> list[str]:
    return [(text or "")[at : at + _PIECE] for at in range(0, len(text or ""), _PIECE)]


# ------------------------------------------------------------------------------------------ Anthropic's messages

_MESSAGE_USAGE: Final[Json] = {
    "input_tokens": 30,
    "cache_read_input_tokens": 30,
    "cache_creation_input_tokens": 50,
    "output_tokens": 70,
}


def _build_message(reply: Reply) -> Json:
    return {**_build_message_head(), "content": _build_blocks(reply), "stop_reason": _get_stop_reason(reply)}


def _build_message_head() -> Json:
    usage = {"usage": _MESSAGE_USAGE, "stop_reason": None, "stop_sequence": None}
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "content": [], **usage}


def _get_stop_reason(reply: Reply) -> str:
    return "tool_use" if reply.calls else "end_turn"


def _build_blocks(reply: Reply) -> list[Json]:
    blocks: list[Json] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.signature})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append({**block, "input": json.loads(call.arguments)})
    return blocks


def _iter_message_events(reply: Reply) -> Iterator[bytes]:
    yield _event("message_start", message=_build_message_head())
    for index, block in enumerate(_build_blocks(reply)):
        match block["type"]:
            case "thinking":
                start, deltas = (
                    {"type": "thinking", "thinking": "", "signature": ""},
                    [
                        {"type": "thinking_delta", "thinking": block["thinking"]},
                        {"type": "signature_delta", "signature": block["signature"]},
                    ],
                )
            case "text":
                start, deltas = {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
            case _:
                start = block | {"input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        yield _event("content_block_start", index=index, content_block=start)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": _get_stop_reason(reply), "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage={"output_tokens": 70})
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
