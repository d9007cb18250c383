"""HttpProvider: a chat model behind an OpenAI-compatible server, on aiohttp directly.

Always streamed, so that a reader that goes away closes the connection, and with it the server's work.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Final, NoReturn, cast

import aiohttp

from llm_spec import (
    Capabilities,
    ChatRequest,
    ChatResponse,
    ConfigError,
    Finish,
    InvalidRequestError,
    StreamEvent,
    TargetError,
    TextDelta,
    Usage,
    complete_from_stream,
)
from llm_spec.chat import FinishReason
from llm_spec_http.convert import STOPPED_BY, PrefixStripper, chunk_events, chunk_finish, read_usage, request_body
from llm_spec_http.dialects import DIALECTS, Dialect
from llm_spec_http.dialects.base import Body
from llm_spec_http.sse import SseReader

__all__ = ["HttpProvider"]

_GENERIC: Final = DIALECTS["generic"]
_CONNECT_S: Final = 10.0
_IDLE_S: Final = 120.0  # the longest silence between two pieces of an answer
_QUOTED: Final = 300  # characters of a server's own words in an error


class HttpProvider:
    """A model at `base_url` (the address that ends in /v1), or at its dialect's own.

    `api_key` is by default taken from the environment variable that the vendor documents; it is in no repr, log or
    error. A `session` that is given stays the caller's; otherwise one is opened with the first request and closed by
    `aclose`, both on the event loop that uses the provider. Requests raise InvalidRequestError for what the server
    calls invalid (400, 413, 422), TargetError for everything else that goes wrong.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        dialect: Dialect = _GENERIC,
        api_key: str | None = None,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        address = base_url or dialect.base_url
        if address is None:
            raise ConfigError(f"{dialect.name} has no address of its own; write {dialect.name}:{model}@http://host/v1")
        self.name = f"{dialect.name}:{model}"
        self.capabilities = Capabilities(
            tools=True, response_format=True, continue_prefix=dialect.continuation is not None
        )
        self._model = model
        self._dialect = dialect
        self._address = address.rstrip("/")
        self._api_key = api_key or (os.environ.get(dialect.key_variable) if dialect.key_variable else None)
        self._given_session = session
        self._own_session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        body = request_body(request, self._model, self._dialect)
        async with AsyncExitStack() as stack:
            response = await self._open(stack, body)
            yield await stack.enter_async_context(aclosing(self._events(response, request)))

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        session, self._own_session = self._own_session, None
        if session is not None:
            await session.close()

    # ------------------------------------------------------------------------------------------ inside

    async def _open(self, stack: AsyncExitStack, body: Body) -> aiohttp.ClientResponse:
        """Send the request; the response, once its status is good. It is closed by the stack."""
        sending = self._session().post(
            f"{self._address}/chat/completions",
            json=body,
            headers=self._headers(),
            timeout=_timeout(),
            allow_redirects=False,  # a key goes where it was meant to go
        )
        try:
            response = await stack.enter_async_context(sending)
        except (aiohttp.ClientError, ValueError) as error:
            raise self._broken(error, "") from error
        if response.status != 200:
            await self._refuse(response)
        return response

    def _session(self) -> aiohttp.ClientSession:
        if self._given_session is not None:
            return self._given_session
        if self._own_session is None or self._own_session.closed:
            self._own_session = aiohttp.ClientSession()
        return self._own_session

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}

    async def _events(self, response: aiohttp.ClientResponse, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        stripper = PrefixStripper(request.prefix if self._dialect.repeats_prefix else "")
        finish: FinishReason | None = None
        usage: Usage | None = None
        text = ""
        try:
            async with aclosing(self._chunks(response)) as chunks:
                async for chunk in chunks:
                    if chunk.get("error"):
                        raise TargetError(self._told(f"reported an error: {_error_text(chunk)}"))
                    for event in chunk_events(chunk):
                        if isinstance(event, TextDelta):
                            event = replace(event, text=stripper.push(event.text))  # noqa: PLW2901
                            text += event.text
                            if not event.text:
                                continue
                        yield event
                    finish = chunk_finish(chunk) or finish
                    usage = read_usage(chunk) or usage
        except (aiohttp.ClientError, ValueError) as error:
            raise self._broken(error, text) from error
        except TargetError as error:
            error.partial_text = text
            raise
        if finish is None:
            raise TargetError(self._told("ended its answer without a finish reason"), partial_text=text)
        if held := stripper.flush():
            yield TextDelta(held)
        yield Finish(finish, usage, STOPPED_BY.get(finish))

    async def _chunks(self, response: aiohttp.ClientResponse) -> AsyncGenerator[Mapping[str, Any]]:
        """The JSON objects of the stream, up to `[DONE]` or its end."""
        reader = SseReader()
        async for block in response.content.iter_any():
            for event in reader.feed(block):
                if event.data == "[DONE]":
                    return
                yield self._parsed(event.data)
        for event in reader.finish():
            if event.data != "[DONE]":
                yield self._parsed(event.data)

    def _parsed(self, data: str) -> Mapping[str, Any]:
        try:
            chunk = json.loads(data)
        except json.JSONDecodeError as error:
            raise TargetError(self._told(f"sent what is no JSON: {data[:_QUOTED]!r}")) from error
        if not isinstance(chunk, dict):
            raise TargetError(self._told(f"sent no JSON object: {data[:_QUOTED]!r}"))
        return cast("dict[str, Any]", chunk)

    async def _refuse(self, response: aiohttp.ClientResponse) -> NoReturn:
        try:
            words = _error_text(json.loads(await response.text()))
        except (ValueError, aiohttp.ClientError):
            words = response.reason or ""
        if response.status in (400, 413, 422):
            raise InvalidRequestError(self._told(f"refused the request ({response.status}): {words}"))
        advice = {
            401: f"; check the key ({self._dialect.key_variable or 'api_key'})",
            403: f"; check the key ({self._dialect.key_variable or 'api_key'})",
            404: "; check the model's name and the address",
        }.get(response.status, "")
        raise TargetError(self._told(f"answered {response.status}: {words}{advice}"))

    def _broken(self, error: Exception, text: str) -> TargetError:
        what = "was silent for too long" if isinstance(error, TimeoutError) else "broke the connection"
        if isinstance(error, aiohttp.ClientConnectorError):
            what = "cannot be reached; check the address"
        return TargetError(self._told(f"{what} ({type(error).__name__}: {error})"), partial_text=text)

    def _told(self, what: str) -> str:
        """One line that names the model and where it is, without the key if the server repeats it."""
        line = " ".join(f"{self.name} at {self._address} {what}".split())
        return line.replace(self._api_key, "***") if self._api_key else line


def _timeout() -> aiohttp.ClientTimeout:
    """No total: answers may take as long as they go on."""
    return aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_IDLE_S)


def _error_text(answer: Any) -> str:
    """A server's own words, whichever of the usual forms they come in."""
    fields = _object(answer)
    error = fields.get("error") or fields.get("message") or fields.get("detail") or answer
    return str(_object(error).get("message") or error)[:_QUOTED]


def _object(value: Any) -> dict[str, Any]:
    """A JSON object as it is, anything else as an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
