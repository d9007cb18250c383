"""HttpClient: requests to one model's server, and its failures in this library's words."""

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

# seconds; the second is the longest silence between two pieces of an answer, which may take as long as it goes on
_STREAM_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=120.0)
WHOLE_ANSWER_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=600.0)
_MAX_QUOTED_CHARS: Final = 300  # characters of a server's own words in an error
_MAX_ERROR_BYTES: Final = 64 * 1024  # bytes that are read of a refusal …
_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024  # … and of an answer that comes whole


class MissingEndpointError(TargetError):
    """The server does not know this call: 404, 405 or 501."""


class HttpClient:
    """Posts JSON to a server. `name` and `address` are what errors tell; no key, user or password is in them.

    A user and a password in the address are sent in place of the key (Basic). A `session` that is given stays the
    caller's, with its own proxies, and belongs to one event loop; otherwise each loop that sends requests has one of
    its own, which is closed with the loop or by `aclose`, and the environment's proxy is used (`find_proxy`).
    `reuses_connections`: whether a connection may be used again.
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
        self._root = self._address.url.removesuffix("/v1")  # where servers have the calls that OpenAI does not
        self._key_variable = key_variable
        self._urls: dict[str, URL] = {}
        self._headers = {"Content-Type": "application/json"}
        authorization = self._address.authorization or (f"Bearer {api_key}" if api_key else None)
        if authorization:
            self._headers["Authorization"] = authorization
        self._proxy = None if session is not None else find_proxy(self._address.url)  # a session has its own
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
        """Send a request; the response, once its status is good. The caller closes it (`async with`).

        A path that begins with a slash counts from the server's root, any other from the address that ends in /v1.
        Raises InvalidRequestError for what the server calls invalid (400, 413, 422), MissingEndpointError for a call
        that it does not know, ConfigError for a session of another event loop, ClosedError once this is closed,
        TargetError for everything else that goes wrong.
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
                allow_redirects=False,  # a key goes where it was meant to go
                **self._proxy_options,
            )
        except aiohttp.ClientError as error:
            raise self.build_connection_error(error) from self._get_cause_without_secrets(error)
        except ValueError as error:  # a header that cannot be one
            raise TargetError(self.format_error_message(f"cannot be sent this request ({error})")) from None
        except RuntimeError as error:
            if self._calls.is_closed:
                raise self._calls.make_ended_error() from None
            raise (self._given_loop.explain_loop_error(error) or error) from error
        if response.status != 200:
            async with response:
                await self._raise_for_status(response)
        return response

    async def post_json(self, path: str, body: Body, timeouts: aiohttp.ClientTimeout | None = None) -> Any:
        """Send a request and read the JSON that answers it; raises as `post`."""
        async with await self.post(path, body, timeouts) as response:
            try:
                return self.parse_json((await _read_body_up_to(response, _MAX_ANSWER_BYTES)).decode(errors="replace"))
            except (aiohttp.ClientError, ValueError) as error:
                raise self.build_connection_error(error) from self._get_cause_without_secrets(error)

    async def aclose(self) -> None:
        """End what is under way, and close the sessions that were opened here."""
        await self._calls.aclose()
        await self._loop_sessions.aclose()

    def check_open(self) -> None:
        """Raise ClosedError once this is closed."""
        self._calls.check_open()

    def parse_json(self, data: str) -> Any:
        """JSON; raises TargetError for anything else."""
        try:
            return loads(data)
        except ValueError as error:
            raise self._build_json_error(data) from error

    def parse_chunk(self, data: str) -> dict[str, Any]:
        """A JSON object of an answer; raises what the server reports in it, and as `parse_json`."""
        try:
            chunk: Any = loads(data)  # not by `parse_json`: that is one call less for each piece of an answer
        except ValueError as error:
            raise self._build_json_error(data) from error
        if chunk.__class__ is dict and chunk.get("choices") and "error" not in chunk:  # nearly always
            return chunk
        return self._check_answer_object(chunk)

    def _build_json_error(self, data: str) -> TargetError:
        return TargetError(self.format_error_message(f"sent what is no JSON: {self._quote_without_key(data)!r}"))

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
        """What a server said went wrong in its answer, as an error."""
        line = self.format_error_message(f"reported an error: {self._quote_without_key(get_error_words(reported))}")
        return make_status_error(read_stream_error_status(reported), {}, line, reported=reported)

    @contextmanager
    def translate_failures(self, texts: Sequence[str] = ()) -> Generator[None]:
        """What goes wrong while an answer is read as errors of this library; `texts` are what has come of it."""
        try:
            yield
        except LlmSpecError as error:  # first: an InvalidRequestError is a ValueError too, but no broken connection
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
        except RuntimeError:  # of aiohttp, where the session was closed meanwhile
            if self._calls.is_closed:
                raise self._calls.make_ended_error("".join(texts)) from None
            raise

    def _build_broken_answer_error(self, error: BrokenAnswerError) -> LlmSpecError:
        if error.reported is not None:
            return self._build_reported_error(error.reported)
        return (TransientError if error.is_transient else TargetError)(self.format_error_message(str(error)))

    def build_connection_error(self, error: Exception, text: str = "") -> TargetError:
        """A failed connection as an error; `text` is what had come before."""
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
        """One line that names the model and where it is, without what is secret if the server repeats it."""
        line = " ".join(f"{self._name} at {self._address} {what}".split())
        return mask_secrets(line, *self._secrets)

    # ------------------------------------------------------------------------------------------ inside

    def _use_proxy(self, proxy: Proxy | None) -> dict[str, Any]:
        """What each request says of the proxy; a proxy's password goes to it alone."""
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
                options["proxy_headers"] = header  # of the request for a tunnel
            else:
                self._headers |= header
        return options

    def _build_proxy_refusal(self, status: int, words: str) -> TargetError:
        """The proxy opens no tunnel to the server; the status is not the server's."""
        advice = get_status_advice(status, {}, key_variable=None) if status == 407 else ""
        line = self.format_error_message(f"cannot be reached: {self._proxy} answered {status}: {words}{advice}")
        return TransientError(line) if status >= 500 else TargetError(line)

    def _get_cause_without_secrets(self, error: Exception) -> Exception | None:
        """What a traceback may show beside the error."""
        return error if mask_secrets(str(error), *self._secrets) == str(error) else None

    def _quote_without_key(self, words: str) -> str:
        return mask_secrets(words, *self._secrets)[:_MAX_QUOTED_CHARS]  # in this order: half a key is a secret too

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
    """A response's body; raises ValueError for one that is longer than `max_bytes` bytes."""
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
    """A JSON object as it is, anything else as an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
