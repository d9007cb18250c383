"""What goes wrong between the SDK and a server, in this library's errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import aiohttp
import httpx2
from openai import APIConnectionError, APIError, APIStatusError, OpenAIError

from llm_spec import LlmSpecError, TargetError, TransientError
from llm_spec.failures import error_for_status, masked, status_in_stream

__all__ = ["FAILURES", "Address", "failure_of"]

# The SDK's own errors, and what its two transports and its reading of JSON let through.
FAILURES: Final = (OpenAIError, httpx2.HTTPError, aiohttp.ClientError, json.JSONDecodeError, UnicodeDecodeError)

_QUOTED: Final = 300  # characters of a server's own words in an error


@dataclass(frozen=True)
class Address:
    """What errors tell of a model: its name, where it is, and the environment variable of its key."""

    name: str
    url: str
    key_variable: str

    def told(self, what: str) -> str:
        """One line that names the model and where it is."""
        return " ".join(f"{self.name} at {self.url} {what}".split())

    def advice(self, status: int) -> str:
        """What to do about a status, where that is known."""
        key = f"; check the key ({self.key_variable})"
        return {401: key, 403: key, 404: "; check the model's name and the address"}.get(status, "")


def failure_of(error: Exception, address: Address, *, secret: str, text: str = "") -> LlmSpecError:
    """An error for one of `FAILURES`, its message one line without the `secret`; `text` is what had come before."""

    def hidden(words: str) -> str:
        return masked(words, secret)

    def quoted(words: str) -> str:
        return hidden(words)[:_QUOTED]  # in this order: half a key is a secret too

    def line(what: str) -> str:
        return hidden(address.told(what))

    match error:
        case APIStatusError(status_code=status):
            words = quoted(_words(error.body)) or error.response.reason_phrase
            headers = {name.lower(): value for name, value in error.response.headers.items()}
            failure = error_for_status(
                status, headers, line(f"answered {status}: {words}{address.advice(status)}"), reported=error.body
            )
        case json.JSONDecodeError():
            failure = TargetError(line(f"sent what is no JSON: {quoted(error.doc)!r}"))
        case UnicodeDecodeError():
            failure = TargetError(line(f"sent what is no JSON: {quoted(error.object.decode(errors='replace'))!r}"))
        case APIConnectionError() | httpx2.HTTPError() | aiohttp.ClientError():
            failure = TransientError(line(_broken(error)))
        case APIError():  # an error object in a stream
            status = status_in_stream(error.body)
            reported = f"reported an error: {quoted(_words(error.body) or error.message)}{address.advice(status)}"
            failure = error_for_status(status, {}, line(reported), reported=error.body)
        case _:
            failure = TargetError(line(f"cannot be asked ({type(error).__name__}: {error})"))
    if isinstance(failure, TargetError):
        failure.partial_text = text
    return failure


def _broken(error: BaseException) -> str:
    """How a connection failed. The SDK calls a dropped one a timeout, so it is told by what lies behind."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    kinds = tuple(type(link) for link in chain)

    def has(*wanted: type[BaseException]) -> bool:
        return any(issubclass(kind, wanted) for kind in kinds)

    is_aiohttp = has(aiohttp.ClientError)  # which has every failure before the answer called a timeout of connecting
    if has(httpx2.ConnectError, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) or (
        has(httpx2.ConnectTimeout) and not is_aiohttp
    ):
        what = "cannot be reached; check the address"
    elif has(TimeoutError, httpx2.ReadTimeout, httpx2.WriteTimeout):
        what = "was silent for too long"
    else:
        what = "broke the connection"
    inner = chain[1:] or chain
    cause = next((link for link in reversed(inner) if str(link)), inner[-1])
    return f"{what} ({type(cause).__name__}{f': {cause}' if str(cause) else ''})"


def _words(body: object) -> str:
    """A server's own words, in whichever of the usual forms they come."""
    if not isinstance(body, Mapping):
        return "" if body is None else str(body)
    fields = cast("Mapping[str, object]", body)
    return str(fields.get("message") or fields.get("detail") or fields)
