"""A server of `llm-spec serve` on 127.0.0.1, and a client that sees every byte of its answers."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import aiohttp

from llm_spec import Fixed, SpeculativeConfig, SpeculativeDecoder
from llm_spec.server import ModelConfig, Server, ServerConfig

__all__ = [
    "ENDPOINTS",
    "HANGS_S",
    "OPENAI",
    "PAIR",
    "RULES",
    "Asking",
    "Frame",
    "Post",
    "Reply",
    "ask",
    "check_error",
    "frames_of",
    "raw",
    "remote",
    "serving",
    "serving_in_thread",
    "until",
]

HANGS_S: Final = 60.0  # what takes longer hangs, however busy the machine is
RULES: Final = ModelConfig(target="rules:any")
PAIR: Final = ModelConfig(  # drafts whatever it costs, on whatever machine
    target="builtin:target",
    draft="builtin:draft",
    speculative=SpeculativeConfig(max_total_tokens=24, lookahead=Fixed(4), baseline_every=0),
)
OPENAI: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
ENDPOINTS: Final = (*OPENAI, "/v1/messages")


def ask(path: str, text: str = "Good morning", /, **fields: Any) -> dict[str, Any]:
    """The smallest body that an endpoint answers, and more fields."""
    body: dict[str, Any] = {"model": "fast"}
    match path.removeprefix("/v1"):
        case "/completions":
            body["prompt"] = text
        case "/responses":
            body["input"] = text
        case "/messages":
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 100}
        case _:
            body["messages"] = [{"role": "user", "content": text}]
    return body | fields


def remote(url: str, **fields: Any) -> ModelConfig:
    """A model on a server of vLLM's kind."""
    return ModelConfig(target=f"vllm:tiny@{url}", **fields)


async def discover_features(model: ModelConfig) -> None:
    """Try what the model's server can do, for all of this process: answers before that is known are plain."""
    async with SpeculativeDecoder(target=model.target, draft="lookup", config=model.speculative) as decoder:
        await decoder.discover()


@dataclass(frozen=True)
class Frame:
    """A server-sent event; `comment` is set for a line that clients pass over."""

    data: Any = None
    event: str | None = None
    comment: str | None = None


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which must be one."""
        return self.json["error"]

    @property
    def frames(self) -> list[Frame]:
        return frames_of(self.data)

    @property
    def chunks(self) -> list[Any]:
        """The JSON objects of a stream, without `[DONE]`."""
        return [frame.data for frame in self.frames if isinstance(frame.data, dict)]

    @property
    def text(self) -> str:
        """The text of a chat's stream."""
        deltas = [choice["delta"] for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(delta.get("content") or "" for delta in deltas)


def frames_of(data: bytes) -> list[Frame]:
    """A stream's frames; every one must be whole."""
    *blocks, rest = data.decode().split("\n\n")
    assert rest == "", f"the stream ends inside a frame: {rest!r}"
    return [_frame(block) for block in blocks]


def _frame(block: str) -> Frame:
    event, value, comment = None, None, None
    for line in block.split("\n"):
        name, _, text = line.partition(": ")
        if name == "":
            comment = text
        elif name == "event":
            event = text
        else:
            assert name == "data", f"no line of a stream: {line!r}"
            value = text if text == "[DONE]" else json.loads(text)
    return Frame(value, event, comment)


Post: TypeAlias = Callable[[str, bytes], Reply]


@dataclass(frozen=True)
class Asking:
    """A client of one server."""

    url: str
    session: aiohttp.ClientSession
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        """Post a body: bytes as they are, anything else as JSON. Header names have `_` for `-`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send("POST", path, io.BytesIO(data), **headers)

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.send("GET", path, None, **headers)

    async def chat(self, text: str = "Good morning", /, **fields: Any) -> Reply:
        return await self.post("/v1/chat/completions", ask("/v1/chat/completions", text, **fields))

    async def send(self, method: str, path: str, data: Any, **headers: str) -> Reply:
        told = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        async with self.session.request(method, f"{self.url}{path}", data=data, headers=told) as response:
            return Reply(response.status, response.headers, await response.read())

    @asynccontextmanager
    async def open(self, path: str, body: Any, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response whose body is still to come; leaving closes the connection."""
        told = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        data = io.BytesIO(json.dumps(body).encode())
        response = await self.session.post(f"{self.url}{path}", data=data, headers=told)
        try:
            yield response
        finally:
            response.close()


@asynccontextmanager
async def serving(models: Mapping[str, ModelConfig] | ModelConfig = RULES, **settings: Any) -> AsyncGenerator[Asking]:
    """A client of a server of these models; one alone is called `fast`."""
    named = {"fast": models} if isinstance(models, ModelConfig) else models
    async with (
        Server(ServerConfig(models=named, **{"port": 0, "shutdown_s": 0.2, **settings})) as server,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANGS_S)) as session,
    ):
        yield Asking(server.url, session)


@contextmanager
def serving_in_thread(models: Mapping[str, ModelConfig], **settings: Any) -> Iterator[str]:
    """The address of a server of these models on an event loop of its own thread."""
    ready, ended, urls = threading.Event(), asyncio.Event(), list[str]()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with serving(models, **settings) as asking:
            urls.append(asking.url)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(HANGS_S)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(HANGS_S)
        loop.close()


async def raw(url: str, data: bytes, *, timeout_s: float = HANGS_S) -> bytes:
    """What a server says to these bytes until it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    finally:
        writer.close()


def check_error(path: str, reply: Reply) -> None:
    """An error has the form of the API that was asked."""
    if path.endswith("/messages"):
        assert reply.json["type"] == "error"
        assert set(reply.error) - {"details"} == {"type", "message"}
    else:
        assert set(reply.json) == {"error"}
        assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["message"]
    assert reply.error["type"]
    assert reply.headers["x-request-id"]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens soon, in another task or process."""
    async with asyncio.timeout(HANGS_S):
        while not condition():  # noqa: ASYNC110 - others, and other processes, know of no event
            await asyncio.sleep(0.005)
