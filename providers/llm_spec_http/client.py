"""HttpClient: sends requests to one model's server and raises llm_spec's errors."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, cast

import aiohttp
from yarl import URL

from llm_spec import ConfigError, LlmSpecError, TargetError, TransientError
from llm_spec.kit.answer_parts import BrokenAnswerError
from llm_spec.kit.event_loops import PerLoopResource, SingleLoopGuard
from llm_spec.kit.http_errors import (
    find_reported_error,
    get_error_words,
    get_status_advice,
    make_status_error,
    mask_secrets,
    read_stream_error_status,
)
from llm_spec.kit.json import dumps, loads
from llm_spec.kit.open_calls import OpenCalls
from llm_spec.kit.server_addresses import Proxy, find_proxy, parse_server_address
from llm_spec.kit.session_headers import get_session_headers
from llm_spec_http.dialects.base import Body

__all__ = ["WHOLE_ANSWER_TIMEOUT", "HttpClient", "MissingEndpointError"]

# Seconds. `sock_read` limits the silence between two pieces of an answer; nothing limits its sum.
_STREAM_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=120.0)
WHOLE_ANSWER_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=600.0)
_MAX_QUOTED_CHARS: Final = 300  # characters of a server's own words in an error
_MAX_ERROR_BYTES: Final = 64 * 1024  # read of an error response
_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024  # read of an answer that is not streamed


class MissingEndpointError(TargetError):
    """The server does not have this endpoint: 404, 405 or 501."""


class HttpClient:
    """Posts JSON to a server.

    Errors contain `name` and `address`, but no key, user or password.

    If the address has a user and a password, they are sent instead of the key (HTTP Basic). A given
    `session` stays the caller's, keeps its own proxies, and belongs to one event loop. Otherwise
    each event loop gets a session of its own, which is closed with the loop or by `aclose`, and
    uses the environment's proxy (`find_proxy`). If `reuses_connections` is false, each request
    opens a new connection.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        api_key: str | None,
        key_variable: str | None,
        reuses_connections: bool,
        session: aiohttp.ClientSession | None,
    ) -> None:
        self._name = name
        self._address = parse_server_address(address)
        # Servers have the endpoints that OpenAI lacks at the root.
        self._root = self._address.url.removesuffix("/v1")
        self._key_variable = key_variable
        self._urls: dict[str, URL] = {}
        self._headers = {"Content-Type": "application/json"}
        authorization = self._address.authorization or (f"Bearer {api_key}" if api_key else None)
        if authorization:
            self._headers["Authorization"] = authorization
        # A given session has its own proxy settings.
        self._proxy = None if session is not None else find_proxy(self._address.url)
        self._proxy_options = self._use_proxy(self._proxy)
        self._secrets = (api_key, *self._address.secrets, *(self._proxy.address.secrets if self._proxy else ()))
        if not reuses_connections:
            self._headers["Connection"] = "close"
        self._given_session = session
        self._given_loop = SingleLoopGuard(
            f"the session given to {name}", "leave it out, and each loop gets one of its own"
        )
        self._loop_sessions = PerLoopResource(_create_http_session)
        self._calls = OpenCalls(name)

    async def post(
        self, path: str, body: Body, timeouts: aiohttp.ClientTimeout | None = None
    ) -> aiohttp.ClientResponse:
        """Send a request and return the response if its status is 200.

        The caller closes the response (`async with`). A path with a leading slash is relative to
        the server's root, any other path to the address that ends in /v1.

        Raises InvalidRequestError if the server calls the request invalid (400, 413, 422),
        MissingEndpointError if it does not have the endpoint, ConfigError if the session belongs to
        another event loop, ClosedError if the client is closed, and TargetError for every other
        failure.
        """
        with self._calls.open_call():
            return self._calls.add_response(await self._send(path, body, timeouts))

    async def _send(self, path: str, body: Body, timeouts: aiohttp.ClientTimeout | None) -> aiohttp.ClientResponse:
        session, more_headers = await self._get_loop_session(), get_session_headers()
        try:
            response = await session.post(
                self._get_url(path),
                data=dumps(body),
                headers={**self._headers, **more_headers} if more_headers else self._headers,
                timeout=timeouts or _STREAM_TIMEOUT,
                allow_redirects=False,  # a redirect would send the key to another server
                **self._proxy_options,
            )
        except aiohttp.ClientError as error:
            raise self.build_connection_error(error) from self._get_cause_without_secrets(error)
        except ValueError as error:  # for example a header with a line break
            raise TargetError(self.format_error_message(f"was not sent the request ({error})")) from None
        except RuntimeError as error:
            if self._calls.is_closed:
                raise self._calls.make_ended_error() from None
            raise (self._given_loop.explain_loop_error(error) or error) from error
        if response.status != 200:
            async with response:
                await self._raise_for_status(response)
        return response

    async def post_json(self, path: str, body: Body, timeouts: aiohttp.ClientTimeout | None = None) -> Any:
        """Send a request and return the JSON of the answer; raises as `post`."""
        async with await self.post(path, body, timeouts) as response:
            try:
                return self.parse_json((await _read_body_up_to(response, _MAX_ANSWER_BYTES)).decode(errors="replace"))
            except (aiohttp.ClientError, ValueError) as error:
                raise self.build_connection_error(error) from self._get_cause_without_secrets(error)

    async def aclose(self) -> None:
        """End the open calls, and close the sessions that this client opened."""
        await self._calls.aclose()
        await self._loop_sessions.aclose()

    def check_open(self) -> None:
        """Raise ClosedError if this client is closed."""
        self._calls.check_open()

    def parse_json(self, data: str) -> Any:
        """Parse JSON; raises TargetError if it is not valid."""
        try:
            return loads(data)
        except ValueError as error:
            raise self._build_json_error(data) from error

    def parse_chunk(self, data: str) -> dict[str, Any]:
        """Parse a JSON object of an answer.

        Raises as `parse_json`, or the error that the server reports in the object.
        """
        try:
            # Not `parse_json`: this runs for each piece of an answer, and saves a call.
            chunk: Any = loads(data)
        except ValueError as error:
            raise self._build_json_error(data) from error
        # The shortest way for the usual chunk.
        if chunk.__class__ is dict and chunk.get("choices") and "error" not in chunk:
            return chunk
        return self._check_answer_object(chunk)

    def _build_json_error(self, data: str) -> TargetError:
        return TargetError(
            self.format_error_message(f"sent something that is not valid JSON: {self._quote_without_key(data)!r}")
        )

    def _check_answer_object(self, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise TargetError(
                self.format_error_message(
                    f"sent something that is not a JSON object: {self._quote_without_key(str(answer))}"
                )
            )
        fields = cast("dict[str, Any]", answer)
        reported = find_reported_error(fields)
        if reported is not None:
            raise self._build_reported_error(reported)
        return fields

    def _build_reported_error(self, reported: object) -> LlmSpecError:
        """Build the error for a failure that the server reported inside its answer."""
        line = self.format_error_message(f"reported an error: {self._quote_without_key(get_error_words(reported))}")
        return make_status_error(read_stream_error_status(reported), {}, line, reported=reported)

    @contextmanager
    def translate_failures(self, texts: Sequence[str] = ()) -> Generator[None]:
        """Raise failures of reading an answer as llm_spec's errors; `texts` is the text so far."""
        try:
            yield
        # First, because an InvalidRequestError is also a ValueError, but not a broken connection.
        except LlmSpecError as error:
            if isinstance(error, TargetError):
                error.partial_text = "".join(texts)
            raise
        except BrokenAnswerError as error:
            failure = self._build_broken_answer_error(error)
            if isinstance(failure, TargetError):
                failure.partial_text = "".join(texts)
            raise failure from None
        except (aiohttp.ClientError, ValueError) as error:
            raise self.build_connection_error(error, "".join(texts)) from self._get_cause_without_secrets(error)
        except RuntimeError:  # aiohttp's, if the session was closed meanwhile
            if self._calls.is_closed:
                raise self._calls.make_ended_error("".join(texts)) from None
            raise

    def _build_broken_answer_error(self, error: BrokenAnswerError) -> LlmSpecError:
        if error.reported is not None:
            return self._build_reported_error(error.reported)
        return (TransientError if error.is_transient else TargetError)(self.format_error_message(str(error)))

    def build_connection_error(self, error: Exception, text: str = "") -> TargetError:
        """Build the error for a failed connection; `text` is the text that arrived before it."""
        if self._calls.is_closed:
            return self._calls.make_ended_error(text)
        what = "was silent for too long" if isinstance(error, TimeoutError) else "broke the connection"
        if isinstance(error, aiohttp.ClientHttpProxyError):
            return self._build_proxy_refusal(error.status, error.message)
        if isinstance(error, aiohttp.ClientConnectorError):
            is_proxy = self._proxy is not None and error.host == URL(self._proxy.address.url).raw_host
            what = f"cannot be reached; check {self._proxy if is_proxy else 'the address'}"
        return TransientError(self.format_error_message(f"{what} ({type(error).__name__}: {error})"), partial_text=text)

    def format_error_message(self, what: str) -> str:
        """Return one line that names the model and its address, with secrets masked."""
        line = " ".join(f"{self._name} at {self._address} {what}".split())
        return mask_secrets(line, *self._secrets)

    # --------------------------------------------------------------------------------------- inside

    def _use_proxy(self, proxy: Proxy | None) -> dict[str, Any]:
        """Return the proxy options of a request; a proxy's password is sent to the proxy alone."""
        if proxy is None:
            return {}
        if proxy.is_socks:
            raise ConfigError(
                f"{self._name} cannot use {proxy}, which speaks SOCKS; name an HTTP proxy, or the host in NO_PROXY"
            )
        options: dict[str, Any] = {"proxy": URL(proxy.address.url)}
        if proxy.address.authorization:
            header = {"Proxy-Authorization": proxy.address.authorization}
            if self._address.url.startswith("https://"):
                options["proxy_headers"] = header  # only in the request for a tunnel
            else:
                self._headers |= header
        return options

    def _build_proxy_refusal(self, status: int, words: str) -> TargetError:
        """Build the error for a proxy that refuses a tunnel; the status is the proxy's own."""
        advice = get_status_advice(status, {}, key_variable=None) if status == 407 else ""
        line = self.format_error_message(f"cannot be reached: {self._proxy} answered {status}: {words}{advice}")
        return TransientError(line) if status >= 500 else TargetError(line)

    def _get_cause_without_secrets(self, error: Exception) -> Exception | None:
        """Return the error to show as the cause in a traceback, or None if it contains a secret."""
        return error if mask_secrets(str(error), *self._secrets) == str(error) else None

    def _quote_without_key(self, words: str) -> str:
        # Masked before it is cut: half a key is a secret too.
        return mask_secrets(words, *self._secrets)[:_MAX_QUOTED_CHARS]

    def _get_url(self, path: str) -> URL:
        if path not in self._urls:
            url = f"{self._root}{path}" if path.startswith("/") else f"{self._address.url}/{path}"
            self._urls[path] = URL(self._address.add_query(url))
        return self._urls[path]

    async def _get_loop_session(self) -> aiohttp.ClientSession:
        if self._given_session is None:
            return await self._loop_sessions.get()
        self._given_loop.check_running_loop()
        return self._given_session

    async def _raise_for_status(self, response: aiohttp.ClientResponse) -> NoReturn:
        answer: Any = None
        try:
            answer = loads(await _read_body_up_to(response, _MAX_ERROR_BYTES))
            words = self._quote_without_key(get_error_words(answer))
        except (ValueError, aiohttp.ClientError):
            words = response.reason or ""
        headers = {k.lower(): v for k, v in response.headers.items()}
        advice = get_status_advice(
            response.status,
            headers,
            key_variable=self._key_variable or "api_key",
            has_credentials=self._address.authorization is not None,
        )
        line = self.format_error_message(f"answered {response.status}: {words}{advice}")
        reported = _as_object_or_empty(answer).get("error") or answer
        error = make_status_error(response.status, headers, line, reported=reported)
        if response.status in (404, 405, 501):
            missing = MissingEndpointError(line, status=response.status)
            missing.code, missing.param = error.code, error.param
            raise missing
        raise error


async def _read_body_up_to(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return a response's body; raises ValueError if it is longer than `max_bytes` bytes."""
    pieces: list[bytes] = []
    while piece := await response.content.readany():
        pieces.append(piece)
        max_bytes -= len(piece)
        if max_bytes < 0:
            raise ValueError("it sent too many bytes")
    return b"".join(pieces)


def _create_http_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())


def _as_object_or_empty(value: Any) -> dict[str, Any]:
    """Return a JSON object as it is, anything else as an empty object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
