"""HttpClient: requests to one model's server, and its failures in this library's words."""

from __future__ import annotations

from typing import Any, Final, NoReturn, cast

import aiohttp
from yarl import URL

from llm_spec import LlmSpecError, TargetError, TransientError
from llm_spec.event_loops import LoopOwned, PerLoop
from llm_spec.failures import error_for_status, masked, status_in_stream
from llm_spec.json_text import dumps, loads
from llm_spec_http.dialects.base import Body

__all__ = ["HttpClient", "MissingError"]

# seconds; the second is the longest silence between two pieces of an answer, which may take as long as it goes on
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=120.0)
_WRITING_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=600.0)
_QUOTED: Final = 300  # characters of a server's own words in an error
_MAX_REFUSAL: Final = 64 * 1024  # bytes that are read of a refusal …
_MAX_ANSWER: Final = 64 * 1024 * 1024  # … and of an answer that comes whole


class MissingError(TargetError):
    """The server does not know this call: 404, 405 or 501."""


class HttpClient:
    """Posts JSON to a server. `name` and `address` are what errors tell; the key is in none of them.

    A `session` that is given stays the caller's, and belongs to one event loop; otherwise each loop that sends requests
    has one of its own, which is closed with the loop or by `aclose`. `keeps_alive`: whether a connection may be used
    again.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        api_key: str | None,
        key_variable: str | None,
        keeps_alive: bool,
        session: aiohttp.ClientSession | None,
    ) -> None:
        self._name = name
        self._address = address.rstrip("/")
        self._root = self._address.removesuffix("/v1")  # where servers have the calls that OpenAI does not
        self._api_key = api_key
        self._key_variable = key_variable
        self._urls: dict[str, URL] = {}
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        if not keeps_alive:
            self._headers["Connection"] = "close"
        self._given_session = session
        self._given_loop = LoopOwned(f"the session given to {name}", "leave it out, and each loop gets one of its own")
        self._own_sessions = PerLoop(_new_session)

    async def open(self, path: str, body: Body, limits: aiohttp.ClientTimeout | None = None) -> aiohttp.ClientResponse:
        """Send a request; the response, once its status is good. The caller closes it (`async with`).

        A path that begins with a slash counts from the server's root, any other from the address that ends in /v1.
        Raises InvalidRequestError for what the server calls invalid (400, 413, 422), MissingError for a call that it
        does not know, ConfigError for a session of another event loop, TargetError for everything else that goes wrong.
        """
        session = await self._session()
        try:
            response = await session.post(
                self._url(path),
                data=dumps(body),
                headers=self._headers,
                timeout=limits or _TIMEOUT,
                allow_redirects=False,  # a key goes where it was meant to go
            )
        except (aiohttp.ClientError, ValueError) as error:
            raise self.broken(error) from error
        except RuntimeError as error:
            raise (self._given_loop.mismatch(error) or error) from error
        if response.status != 200:
            async with response:
                await self._refuse(response)
        return response

    async def call(self, path: str, body: Body, limits: aiohttp.ClientTimeout | None = None) -> Any:
        """Send a request and read the JSON that answers it; raises as `open`."""
        async with await self.open(path, body, limits) as response:
            try:
                return self.parsed((await _read(response, _MAX_ANSWER)).decode(errors="replace"))
            except (aiohttp.ClientError, ValueError) as error:
                raise self.broken(error) from error

    async def aclose(self) -> None:
        """Close the sessions that were opened here."""
        await self._own_sessions.aclose()

    async def ask(self, path: str, body: Body) -> dict[str, Any]:
        """As `call`, for an answer that is written meanwhile; raises also what the server reports in it."""
        return self._checked(await self.call(path, body, _WRITING_TIMEOUT))

    def parsed(self, data: str) -> Any:
        """JSON; raises TargetError for anything else."""
        try:
            return loads(data)
        except ValueError as error:
            raise TargetError(self.told(f"sent what is no JSON: {self._quoted(data)!r}")) from error

    def chunk(self, data: str) -> dict[str, Any]:
        """A JSON object of a stream; raises what the server reports in it, and as `parsed`."""
        return self._checked(self.parsed(data))

    def _checked(self, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise TargetError(self.told(f"sent no JSON object: {self._quoted(str(answer))}"))
        fields = cast("dict[str, Any]", answer)
        if fields.get("error"):
            raise self._reported(fields)
        return fields

    def _reported(self, answer: Any) -> LlmSpecError:
        """What a server said went wrong in the middle of its answer, as an error."""
        line = self.told(f"reported an error: {self._quoted(_error_text(answer))}")
        reported = _object(answer).get("error")
        return error_for_status(status_in_stream(reported), {}, line, reported=reported)

    def broken(self, error: Exception, text: str = "") -> TargetError:
        """A failed connection as an error; `text` is what had come before."""
        what = "was silent for too long" if isinstance(error, TimeoutError) else "broke the connection"
        if isinstance(error, aiohttp.ClientConnectorError):
            what = "cannot be reached; check the address"
        return TransientError(self.told(f"{what} ({type(error).__name__}: {error})"), partial_text=text)

    def told(self, what: str) -> str:
        """One line that names the model and where it is, without the key if the server repeats it."""
        line = " ".join(f"{self._name} at {self._address} {what}".split())
        return masked(line, self._api_key)

    # ------------------------------------------------------------------------------------------ inside

    def _quoted(self, words: str) -> str:
        return masked(words, self._api_key)[:_QUOTED]  # in this order: half a key is a secret too

    def _url(self, path: str) -> URL:
        if path not in self._urls:
            self._urls[path] = URL(f"{self._root}{path}" if path.startswith("/") else f"{self._address}/{path}")
        return self._urls[path]

    async def _session(self) -> aiohttp.ClientSession:
        if self._given_session is None:
            return await self._own_sessions.get()
        self._given_loop.check()
        return self._given_session

    async def _refuse(self, response: aiohttp.ClientResponse) -> NoReturn:
        answer: Any = None
        try:
            answer = loads(await _read(response, _MAX_REFUSAL))
            words = self._quoted(_error_text(answer))
        except (ValueError, aiohttp.ClientError):
            words = response.reason or ""
        advice = {
            401: f"; check the key ({self._key_variable or 'api_key'})",
            403: f"; check the key ({self._key_variable or 'api_key'})",
            404: "; check the model's name and the address",
        }.get(response.status, "")
        line = self.told(f"answered {response.status}: {words}{advice}")
        if response.status in (404, 405, 501):
            raise MissingError(line)
        headers = {k.lower(): v for k, v in response.headers.items()}
        reported = _object(answer).get("error") or answer
        raise error_for_status(response.status, headers, line, reported=reported)


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """A response's body; raises ValueError for one that is longer than `most` bytes."""
    pieces: list[bytes] = []
    while piece := await response.content.readany():
        pieces.append(piece)
        most -= len(piece)
        if most < 0:
            raise ValueError("it sent too many bytes")
    return b"".join(pieces)


def _new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())


def _error_text(answer: Any) -> str:
    """A server's own words, whichever of the usual forms they come in."""
    fields = _object(answer)
    error = fields.get("error") or fields.get("message") or fields.get("detail") or answer
    return str(_object(error).get("message") or error)


def _object(value: Any) -> dict[str, Any]:
    """A JSON object as it is, anything else as an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
