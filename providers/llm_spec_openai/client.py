"""Creates clients of OpenAI's SDK. OpenAIChatClient streams chat completions through one."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Final
from urllib.parse import parse_qsl

import httpx2
from openai import (
    AsyncAzureOpenAI,
    AsyncOpenAI,
    AsyncStream,
    DefaultAioHttpClient,
    DefaultAsyncHttpxClient,
    OpenAIError,
)
from openai._streaming import ServerSentEvent  # it has no public name

from llm_spec import ConfigError, LlmSpecError
from llm_spec.contract.provider import VENDOR_FIRST_CHUNK_S
from llm_spec.kit.answer_parts import BrokenAnswerError
from llm_spec.kit.event_loops import PerLoopResource, SingleLoopGuard
from llm_spec.kit.open_calls import OpenCalls
from llm_spec.kit.server_addresses import find_proxy, parse_server_address, strip_credentials
from llm_spec.kit.session_headers import get_session_headers
from llm_spec_openai.convert import Body
from llm_spec_openai.failures import (
    SDK_ERRORS,
    ModelAddress,
    convert_broken_answer_to_library,
    convert_sdk_error_to_library,
)

__all__ = ["BETWEEN_CHUNKS_S", "DoneTrackingStream", "OpenAIChatClient", "create_azure_client", "create_openai_client"]

BETWEEN_CHUNKS_S: Final = 120.0  # the longest silence between two pieces of an answer
_TIMEOUT: Final = httpx2.Timeout(
    connect=10.0,
    read=VENDOR_FIRST_CHUNK_S,  # a model that reasons sends nothing before its first piece
    write=120.0,
    pool=None,
)
_OPENAI_URL: Final = "https://api.openai.com/v1"
_OPENAI_HOSTS: Final = (".openai.com", ".openai.azure.com")


class DoneTrackingStream(AsyncStream[object]):
    """The SDK's stream, which ends silently at `[DONE]`. `is_done` is True if that came.

    If the body is one JSON value instead of a stream, that value is the only event. The data of an
    event `error` is an error. The SDK would pass over both.
    """

    is_done = False

    async def _iter_events(self) -> AsyncIterator[ServerSentEvent]:
        if self.response.headers.get("content-type", "").partition(";")[0].strip() == "application/json":
            yield ServerSentEvent(data=(await self.response.aread()).decode(errors="replace"))
            return
        async for event in super()._iter_events():
            self.is_done = self.is_done or event.data.startswith("[DONE]")
            yield _name_error(event) if event.event == "error" else event


def _name_error(event: ServerSentEvent) -> ServerSentEvent:
    """Put the data of an event named `error` into an object under `error`."""
    try:
        error: object = json.loads(event.data)
    except ValueError:
        error = event.data
    has_name = isinstance(error, dict) and "error" in error
    return event if has_name else ServerSentEvent(data=json.dumps({"error": error or "no reason"}))


class OpenAIChatClient:
    """One model behind an SDK client. Errors call it `name`.

    A given client (`is_given`) stays the caller's and belongs to one event loop. Otherwise each
    loop that sends requests has connections of its own, which are closed with the loop or by
    `aclose`. The SDK's own retries are off: a failure that may pass is a TransientError, and the
    caller decides about a retry.
    """

    def __init__(self, name: str, client: AsyncOpenAI, *, is_given: bool) -> None:
        is_azure = isinstance(client, AsyncAzureOpenAI)
        server = parse_server_address(str(client.base_url))
        self._client = client.with_options(max_retries=0)
        # the SDK would send these as a part of the address
        if server.authorization or server.query:
            self._client = self._client.with_options(
                base_url=server.url,
                default_headers={"Authorization": server.authorization} if server.authorization else None,
                default_query=dict(parse_qsl(server.query, keep_blank_values=True)),
            )
        # for the first loop; it has no connections yet
        self._spare_client = None if is_given else self._client
        self._loop_clients = None if is_given else PerLoopResource(self._create_loop_client)
        self._calls = OpenCalls(name)
        self._given_loop = SingleLoopGuard(
            f"the client given to {name}", "give each loop a provider with a client of its own"
        )
        self._address = ModelAddress(
            name,
            server,
            key_variable="AZURE_OPENAI_API_KEY" if is_azure else "OPENAI_API_KEY",
            proxy=None if is_given else find_proxy(server.url),
        )
        self.is_openai = is_azure or f".{client.base_url.host}".endswith(_OPENAI_HOSTS)

    async def open_answer_stream(self, stack: AsyncExitStack, body: Body) -> DoneTrackingStream:
        """Send a request and return its stream of JSON values once the status is good.

        The stack closes the stream. Raises ClosedError once this client is closed.
        """
        with self._calls.open_call():
            stream = await stack.enter_async_context(await self._send(body))
        return self._calls.add_response(stream)

    async def _send(self, body: Body) -> DoneTrackingStream:
        client = await self._get_loop_client()
        try:
            # `chat.completions.create` would make a pydantic model of every piece, which costs more
            # than the rest
            return await client.post(
                "/chat/completions",
                body=body,
                options={"headers": get_session_headers()},
                cast_to=object,
                stream=True,
                stream_cls=DoneTrackingStream,
            )
        except (RuntimeError, *SDK_ERRORS) as error:
            explain_loop_error = self._given_loop.explain_loop_error(error)
            if explain_loop_error is None and not isinstance(error, SDK_ERRORS):
                raise
            # from None, as an SDK's error holds the request, and with it the key
            raise explain_loop_error or self.convert_sdk_error(error) from None

    async def aclose(self) -> None:
        """End the running calls, and close the clients that were made here."""
        await self._calls.aclose()
        spare_client, self._spare_client = self._spare_client, None
        if spare_client is not None:
            await spare_client.close()
        if self._loop_clients is not None:
            await self._loop_clients.aclose()

    def convert_sdk_error(self, error: Exception, text: str = "") -> LlmSpecError:
        """Convert one of `SDK_ERRORS` to this library's. `text` is what had come before."""
        if self._calls.is_closed:
            return self._calls.make_ended_error(text)
        return convert_sdk_error_to_library(error, self._address, secret=self._client.api_key, text=text)

    def build_broken_answer_error(self, error: BrokenAnswerError, text: str = "") -> LlmSpecError:
        """Build the error for an answer that broke off or cannot be read.

        `text` is what had come before.
        """
        if self._calls.is_closed:
            return self._calls.make_ended_error(text)
        return convert_broken_answer_to_library(error, self._address, secret=self._client.api_key, text=text)

    def format_error_message(self, what: str) -> str:
        """Return one line with the model's name and address."""
        return self._address.format_error_message(what)

    async def _get_loop_client(self) -> AsyncOpenAI:
        """Return the running loop's client."""
        if self._loop_clients is not None:
            return await self._loop_clients.get()
        self._given_loop.check_running_loop()
        return self._client

    def _create_loop_client(self) -> AsyncOpenAI:
        first, self._spare_client = self._spare_client, None
        return first or self._client.with_options(http_client=_create_http_client(str(self._client.base_url)))


def create_openai_client(base_url: str | None, api_key: str | None) -> AsyncOpenAI:
    """Create a client of OpenAI, or of a compatible server. Raises ConfigError without a key."""
    # the SDK would take an empty variable for an address
    base_url = base_url or os.environ.get("OPENAI_BASE_URL") or _OPENAI_URL
    server = parse_server_address(base_url)
    key = api_key or os.environ.get("OPENAI_API_KEY") or (server.authorization and "none")
    if not key:
        raise ConfigError("openai needs a key; set OPENAI_API_KEY or give api_key")
    return AsyncOpenAI(
        api_key=key, base_url=base_url, max_retries=0, timeout=_TIMEOUT, http_client=_create_http_client(server.url)
    )


def create_azure_client(endpoint: str | None, api_key: str | None, api_version: str | None) -> AsyncAzureOpenAI:
    """Create a client of Azure.

    Raises ConfigError for a value that is neither given nor in the SDK's environment variables.
    """
    address = endpoint or os.environ.get("AZURE_OPENAI_ENDPOINT")
    if not address:
        raise ConfigError(
            "azure needs an address: azure:deployment@https://NAME.openai.azure.com, or set AZURE_OPENAI_ENDPOINT"
        )
    server = parse_server_address(address)
    query = dict(parse_qsl(server.query, keep_blank_values=True))
    api_version = api_version or query.get("api-version")
    if not (api_version or os.environ.get("OPENAI_API_VERSION")):
        raise ConfigError("azure needs an API version; set OPENAI_API_VERSION or give api_version")
    try:
        return AsyncAzureOpenAI(
            azure_endpoint=address.partition("?")[0],
            api_key=api_key,
            api_version=api_version,
            max_retries=0,
            timeout=_TIMEOUT,
            default_query=query,
            http_client=_create_http_client(server.url),
        )
    except OpenAIError:
        raise ConfigError("azure needs a key; set AZURE_OPENAI_API_KEY or give api_key") from None


def _create_http_client(url: str) -> httpx2.AsyncClient:
    """Create the SDK's client on aiohttp, which costs half the CPU.

    If aiohttp is missing or cannot use the proxy, create its default client.
    """
    proxy = find_proxy(url)
    try:
        if proxy is None or not proxy.is_socks:  # aiohttp does not speak SOCKS
            with suppress(RuntimeError):
                # without redirects, so that a key goes only where it was meant to go
                return DefaultAioHttpClient(timeout=_TIMEOUT, follow_redirects=False)
        return DefaultAsyncHttpxClient(timeout=_TIMEOUT, follow_redirects=False)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"openai cannot use the environment's proxies: {strip_credentials(str(error))}") from None
