"""AnthropicMessagesClient: streams of Anthropic's messages through its SDK.

The SDK returns events as JSON, not as its own objects (`cast_to=object`). So bodies are sent
exactly as they were built, unknown fields and events do no harm, and no object of the SDK can leak.
The SDK's errors become this library's. They are raised outside of the `except` block: the text and
request of the SDK's error may hold the key, and a traceback would show them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, cast
from urllib.parse import parse_qsl

import httpx2
from anthropic import (
    AnthropicError,
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AsyncAnthropic,
    AsyncStream,
    DefaultAioHttpClient,
    DefaultAsyncHttpxClient,
    RequestOptions,
    Timeout,
)

from llm_spec import ConfigError, InvalidRequestError, LlmSpecError, TargetError, TransientError
from llm_spec.kit.answer_parts import BrokenAnswerError
from llm_spec.kit.event_loops import PerLoopResource, SingleLoopGuard
from llm_spec.kit.http_errors import (
    get_error_words,
    get_status_advice,
    make_status_error,
    mask_secrets,
    read_stream_error_status,
)
from llm_spec.kit.open_calls import OpenCalls
from llm_spec.kit.server_addresses import ServerAddress, find_proxy, parse_server_address, strip_credentials
from llm_spec.kit.session_headers import get_session_headers

__all__ = ["AnthropicMessagesClient", "SdkStream"]

_CONNECT_S: Final = 10.0
_IDLE_S: Final = 120.0  # the longest silence between two pieces of an answer
# How long a finished response may take to end, so that its connection can be used again
_DRAIN_TIMEOUT_S: Final = 0.25
_MAX_QUOTED_CHARS: Final = 300  # characters of a server's own words in an error
_MAX_TYPE_CHARS: Final = 60  # characters of the type of a server's error
_OVERLOADED: Final = 529  # Anthropic's own status; https://platform.claude.com/docs/en/api/errors
_ANTHROPIC_URL: Final = "https://api.anthropic.com"
_SDK_ERRORS: Final = (AnthropicError, httpx2.HTTPError, httpx2.StreamError, OSError, ValueError)

_STREAM_END: Final = object()

SdkStream = AsyncStream[object]


class AnthropicMessagesClient:
    """Opens streams. Errors contain `name` and the address, never the key.

    A given `client` stays the caller's and belongs to one event loop. It keeps its timeouts, but
    does not retry. Without one, each loop that sends requests has connections of its own, which are
    closed with the loop or by `aclose`.
    """

    def __init__(self, name: str, client: AsyncAnthropic | None, *, base_url: str | None, api_key: str | None) -> None:
        if client is not None and (base_url is not None or api_key is not None):
            raise ConfigError("client is given, which has an address and a key; leave out base_url and api_key")
        self._name = name
        address = None if client else base_url or os.environ.get("ANTHROPIC_BASE_URL")
        if address == "":  # the SDK would take an empty variable for an address
            address = _ANTHROPIC_URL
        server = None if not address else parse_server_address(address)
        sdk = client.with_options(max_retries=0) if client else _create_sdk_client(server, api_key)
        self._server = server or parse_server_address(str(sdk.base_url).rstrip("/"))
        # the SDK would send these as a part of the address
        if self._server.authorization or self._server.query:
            sdk = sdk.with_options(
                base_url=self._server.url if client else _remove_version(self._server.url),
                default_headers={"Authorization": self._server.authorization} if self._server.authorization else None,
                default_query=dict(parse_qsl(self._server.query, keep_blank_values=True)),
            )
        self._sdk = sdk
        # a given client has its own proxy
        self._proxy = find_proxy(self._server.url) if client is None else None
        # for the first loop; it has no connections yet
        self._spare_client = self._sdk if client is None else None
        self._loop_clients = PerLoopResource(self._create_loop_client) if client is None else None
        self._calls = OpenCalls(name)
        self._given_loop = SingleLoopGuard(
            f"the client given to {name}", "give each loop a provider with a client of its own"
        )
        proxy_secrets = self._proxy.address.secrets if self._proxy else ()
        self._secrets = (self._sdk.api_key, self._sdk.auth_token, *self._server.secrets, *proxy_secrets)

    async def open_answer_stream(
        self, stack: AsyncExitStack, body: Mapping[str, Any], *, betas: Sequence[str] = ()
    ) -> SdkStream:
        """Send a request and return its stream once the status is good. The stack closes it.

        Raises ClosedError once this client is closed.
        """
        with self._calls.open_call():
            stream = await stack.enter_async_context(await self._send(body, betas))
        return self._calls.add_response(stream)

    async def _send(self, body: Mapping[str, Any], betas: Sequence[str]) -> SdkStream:
        client = await self._get_loop_client()
        try:
            return await client.post(
                "/v1/messages",
                body=body,
                options=_build_header_options(betas),
                cast_to=object,
                stream=True,
                stream_cls=SdkStream,
            )
        except (TypeError, RuntimeError, *_SDK_ERRORS) as error:
            failed = self._given_loop.explain_loop_error(error) or self._convert_sdk_error(error, sending=True)
        raise failed

    async def count_request_tokens(self, body: Mapping[str, Any], *, betas: Sequence[str] = ()) -> int:
        """Return the number of tokens in a request, as the server counts them."""
        with self._calls.open_call():
            return await self._send_count_request(body, betas)

    async def _send_count_request(self, body: Mapping[str, Any], betas: Sequence[str]) -> int:
        client = await self._get_loop_client()
        try:
            path = "/v1/messages/count_tokens"
            counted: object = await client.post(path, body=body, options=_build_header_options(betas), cast_to=object)
            return int(cast("Mapping[str, Any]", counted)["input_tokens"])
        except (KeyError, TypeError, RuntimeError, *_SDK_ERRORS) as error:
            failed = self._given_loop.explain_loop_error(error) or self._convert_sdk_error(error)
        raise failed

    async def read_stream_objects(self, stream: SdkStream) -> AsyncGenerator[dict[str, Any]]:
        """Yield the JSON objects of a stream, up to `message_stop` or its end."""
        failed: LlmSpecError | None = None
        try:
            while (event := await anext(stream, _STREAM_END)) is not _STREAM_END:
                if not isinstance(event, dict):
                    raise ValueError(f"{str(event)[:_MAX_QUOTED_CHARS]!r} is not a JSON object")
                event_object = cast("dict[str, Any]", event)
                yield event_object
                if event_object.get("type") == "message_stop":
                    break
        except _SDK_ERRORS as error:
            failed = self._convert_sdk_error(error)
        if failed is not None:
            raise failed
        with suppress(TimeoutError, *_SDK_ERRORS):
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                await anext(stream, None)

    def convert_broken_answer_error(self, error: BrokenAnswerError) -> LlmSpecError:
        """Convert an error in an answer to one of this library."""
        if self._calls.is_closed:
            return self._calls.make_ended_error()
        if error.reported is not None:
            return self._build_reported_error(error.reported)
        return (TransientError if error.is_transient else TargetError)(self.format_error_message(str(error)))

    async def aclose(self) -> None:
        """End the running calls, and close the clients that were made here."""
        await self._calls.aclose()
        spare_client, self._spare_client = self._spare_client, None
        if spare_client is not None:
            await spare_client.close()
        if self._loop_clients is not None:
            await self._loop_clients.aclose()

    def format_error_message(self, what: str) -> str:
        """Return one line with the model's name and address. Keys in it are masked."""
        line = " ".join(f"{self._name} at {self._server} {what}".split())
        return mask_secrets(line, *self._secrets)

    # --------------------------------------------------------------------------------------- inside

    async def _get_loop_client(self) -> AsyncAnthropic:
        """Return the running loop's client."""
        if self._loop_clients is not None:
            return await self._loop_clients.get()
        self._given_loop.check_running_loop()
        return self._sdk

    def _create_loop_client(self) -> AsyncAnthropic:
        first, self._spare_client = self._spare_client, None
        return first or self._sdk.with_options(http_client=_create_http_client(self._server.url))

    def _convert_sdk_error(self, error: Exception, *, sending: bool = False) -> LlmSpecError:
        """Convert an error of the SDK to one of this library."""
        if self._calls.is_closed:
            return self._calls.make_ended_error()
        if isinstance(error, APIStatusError):
            return self._convert_status_error(error)
        seen = error.__cause__ if isinstance(error, APIConnectionError) and error.__cause__ else error
        words = f"({type(seen).__name__}: {seen})"
        broken: str | None = None
        if isinstance(seen, httpx2.ConnectError):
            broken = f"cannot be reached; check {self._proxy or 'the address'}"
        elif isinstance(seen, httpx2.ProxyError) and self._proxy is not None:
            broken = f"cannot be reached: {self._proxy} refused"
        elif isinstance(error, APITimeoutError | httpx2.TimeoutException | TimeoutError):
            broken = "was silent for too long"
        elif isinstance(error, APIConnectionError | httpx2.HTTPError | httpx2.StreamError | OSError):
            broken = "broke the connection"
        if broken is not None:
            return TransientError(self.format_error_message(f"{broken} {words}"))
        if sending and isinstance(error, TypeError | ValueError):
            return InvalidRequestError(self.format_error_message(f"cannot be sent this request {words}"))
        what = "sent something that is not valid JSON" if isinstance(error, ValueError) else "failed"
        return TargetError(self.format_error_message(f"{what} {words}"))

    def _convert_status_error(self, error: APIStatusError) -> LlmSpecError:
        """Convert an error status, or an error inside a stream whose status was a success."""
        body: object = error.body
        reported: object = _as_object_or_empty(body).get("error")
        if error.response.is_success:
            return self._build_reported_error(reported or body)
        words = self._quote_without_key(str(error.api_message or error.body or error.response.reason_phrase))
        headers = {name.lower(): value for name, value in error.response.headers.items()}
        advice = get_status_advice(
            error.status_code,
            headers,
            key_variable="ANTHROPIC_API_KEY",
            has_credentials=self._server.authorization is not None,
        )
        line = self.format_error_message(f"answered {error.status_code}: {words}{advice}")
        return make_status_error(error.status_code, headers, line, reported=reported)

    def _build_reported_error(self, reported: object) -> LlmSpecError:
        """Build the error that a server reported in its answer."""
        kind = _as_object_or_empty(reported).get("type")
        words = self._quote_without_key(get_error_words(reported))
        if isinstance(kind, str):
            words = f"{self._quote_without_key(kind)[:_MAX_TYPE_CHARS]}: {words}"
        status = _OVERLOADED if kind == "overloaded_error" else read_stream_error_status(reported)
        line = self.format_error_message(f"reported an error: {words}")
        return make_status_error(status, {}, line, reported=reported)

    def _quote_without_key(self, words: str) -> str:
        # masked before they are cut: half a key is a secret, too
        return mask_secrets(words, *self._secrets)[:_MAX_QUOTED_CHARS]


def _as_object_or_empty(value: object) -> Mapping[str, Any]:
    """Return a JSON object, or an empty one for anything else."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _build_header_options(betas: Sequence[str]) -> RequestOptions:
    headers = {**get_session_headers(), **({"anthropic-beta": ",".join(betas)} if betas else {})}
    return {"headers": headers} if headers else {}


def _create_sdk_client(server: ServerAddress | None, api_key: str | None) -> AsyncAnthropic:
    """Create a client. Without a `server`, the SDK chooses the address."""
    client = AsyncAnthropic(
        api_key=api_key,
        base_url=None if server is None else _remove_version(server.url),
        max_retries=0,
        http_client=_create_http_client(_ANTHROPIC_URL if server is None else server.url),
    )
    has_key = client.api_key or client.auth_token or client.credentials or (server and server.authorization)
    if not has_key and not {"authorization", "x-api-key"} & {name.lower() for name in client.default_headers}:
        raise ConfigError(
            "anthropic needs a key; set ANTHROPIC_API_KEY or give api_key (any, for a server without keys)"
        )
    return client


def _remove_version(url: str) -> str:
    """Return an address without `/v1`, which the SDK adds itself."""
    return url.removesuffix("/v1")


def _create_http_client(url: str) -> httpx2.AsyncClient:
    """Create a client on aiohttp, if installed, that sends no key to a redirect's address."""
    timeout, proxy = Timeout(_IDLE_S, connect=_CONNECT_S), find_proxy(url)
    try:
        if proxy is None or not proxy.is_socks:  # aiohttp does not speak SOCKS
            with suppress(RuntimeError):
                return DefaultAioHttpClient(timeout=timeout, follow_redirects=False)
        return DefaultAsyncHttpxClient(timeout=timeout, follow_redirects=False)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"anthropic cannot use the environment's proxies: {strip_credentials(str(error))}") from None
