"""One server on 127.0.0.1 for all three providers: chat completions, Anthropic's messages, and their failures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from llm_spec_anthropic import AnthropicProvider
from llm_spec_http import DIALECTS, HttpProvider
from llm_spec_openai import OpenAIProvider
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from llm_spec import LlmProvider
from support.messages_wire import begin, end, text_frames
from support.wire import served, text_chunks

__all__ = [
    "KEY",
    "PIECES",
    "PROVIDERS",
    "TEXT",
    "Double",
    "Failure",
    "by_every_provider",
    "forget_environment",
    "provider_at",
    "serve",
]

PIECES: Final = tuple(f"{' ' if i else ''}word{i}" for i in range(12))
TEXT: Final = "".join(PIECES)
KEY: Final = "sk-any"
# Those with "given" in their name have a client of the SDK that would ask six times by itself, on its other transport.
PROVIDERS: Final = ("openai", "openai given", "anthropic", "anthropic given", "aiohttp")
_HANGING: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What happens to a request: a status instead of an answer, no answer, or one that breaks off.

    `drop_after`, `stall_after`: so many pieces of text come; at 0 only the headers, at -1 not even those.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    drop_after: int | None = None
    stall_after: int | None = None


class Double:
    """The server. Its first requests meet `failures`, one each; whoever comes later is answered `pieces` or `frames`.

    `bodies` and `times` are those of all requests, `num_open` of them are being answered; at `closed_at` the last one
    ended, by the loop's clock.
    """

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.pieces: Sequence[str] = PIECES
        self.frames: Sequence[bytes] | None = None
        self.drops_frames = False
        self.pause_s = 0.0  # before each piece
        self.continues = True  # the assistant's text that a request ends with
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.num_open = 0
        self.closed_at = 0.0
        self.url = ""
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def reset(self, *failures: Failure) -> None:
        """Forget what was asked, and fail from now on as said."""
        self.failures = list(failures)
        self.bodies, self.times = [], []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.times.append(asyncio.get_running_loop().time())
        failure = self.failures.pop(0) if self.failures else Failure()
        self.num_open += 1
        self._is_idle.clear()
        try:
            if failure.status is not None:
                error = {"type": "error", "error": {"type": "overloaded_error", "message": "not now"}}
                return web.json_response(error, status=failure.status, headers=failure.headers)
            if failure.drop_after == -1:
                return self._drop(request, web.StreamResponse())
            if failure.stall_after == -1:
                await asyncio.sleep(_HANGING)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            return await self._write(request, response, body, failure)
        finally:
            self.num_open -= 1
            self.closed_at = asyncio.get_running_loop().time()
            if not self.num_open:
                self._is_idle.set()

    async def _write(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any], failure: Failure
    ) -> web.StreamResponse:
        is_messages = request.path.endswith("/messages")
        if self.frames is not None:
            for data in self.frames:
                await response.write(data)
            return self._drop(request, response) if self.drops_frames else response
        rest = self._rest(body)
        frames = text_frames(*rest) if is_messages else text_chunks(*rest)
        num_before = 1 if is_messages else 0  # a block begins before its text
        for data in begin() if is_messages else []:
            await response.write(data)
        frames += end() if is_messages else []
        for index, data in enumerate(frames):
            if index - num_before == failure.drop_after or (failure.drop_after == 0 == index):
                await asyncio.sleep(0.002)  # so that what was sent is read before the reset overtakes it
                return self._drop(request, response)
            if index - num_before == failure.stall_after:
                await asyncio.sleep(_HANGING)
            await asyncio.sleep(self.pause_s)
            await response.write(data)
        return response

    def _rest(self, body: dict[str, Any]) -> list[str]:
        """What follows the assistant's text that the request ends with, if any; it must be a beginning of the text."""
        last = body["messages"][-1]
        prefix = last["content"] if self.continues and last["role"] == "assistant" else ""
        text = "".join(self.pieces)
        assert text.startswith(prefix)
        done = 0
        rest: list[str] = []
        for piece in self.pieces:
            cut = piece[max(0, min(len(piece), len(prefix) - done)) :]
            done += len(piece)
            rest += [cut] if cut else []
        return rest

    def _drop(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return response

    async def until_idle(self) -> None:
        """Wait, two seconds at most, until nothing is being answered."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), 2.0)


@asynccontextmanager
async def serve(double: Double | None = None) -> AsyncGenerator[Double]:
    """Run a server for one test, by default a new one."""
    double = double or Double()
    async with served("/{path:.*}", double.answer, shutdown_s=0.05) as root:
        double.url = f"{root}/v1"
        yield double


@asynccontextmanager
async def provider_at(
    url: str, kind: str, *, model: str | None = None, dialect: str = "generic", timeout_s: float = 60.0
) -> AsyncGenerator[LlmProvider]:
    """One of `PROVIDERS` for a server; closed at the end. `timeout_s`: the patience of a client that is given."""
    root = url.removesuffix("/v1")
    timeout = httpx2.Timeout(10.0, read=timeout_s)
    if kind == "openai given":
        async with AsyncOpenAI(
            base_url=url,
            api_key=KEY,
            max_retries=5,
            http_client=DefaultAsyncHttpxClient(timeout=timeout),
            timeout=timeout,
        ) as openai:
            yield OpenAIProvider(model or "gpt-4.1", client=openai)
        return
    if kind == "anthropic given":
        async with AsyncAnthropic(base_url=root, api_key=KEY, max_retries=5, timeout=timeout) as anthropic:
            yield AnthropicProvider(model or "claude-haiku-5-5", client=anthropic)
        return
    provider: LlmProvider
    if kind == "openai":
        provider = OpenAIProvider(model or "gpt-4.1", base_url=url, api_key=KEY)
    elif kind == "anthropic":
        provider = AnthropicProvider(model or "claude-haiku-5-5", base_url=root, api_key=KEY)
    else:
        provider = HttpProvider(model or "any", base_url=url, dialect=DIALECTS[dialect])
    try:
        yield provider
    finally:
        await provider.aclose()


async def by_every_provider(check: Callable[[Double, str], Awaitable[None]], kinds: Sequence[str] = PROVIDERS) -> None:
    """Check all of `PROVIDERS` side by side, each with a server of its own: their waits take the time of one."""

    async def by(kind: str) -> None:
        async with serve() as double:
            await check(double, kind)

    for kind, failure in zip(kinds, await asyncio.gather(*map(by, kinds), return_exceptions=True), strict=True):
        if failure is not None:
            failure.add_note(f"by {kind}")
            raise failure


def forget_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDKs take keys and addresses from the environment; of these tests' machine they get none."""
    for name in list(os.environ):
        if "OPENAI" in name or "ANTHROPIC" in name:
            monkeypatch.delenv(name)
