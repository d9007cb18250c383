"""Converts failures between the SDK and a server to this library's errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import httpx2
from openai import APIConnectionError, APIError, APIStatusError, OpenAIError

from llm_spec import LlmSpecError, TargetError, TransientError
from llm_spec.kit.answer_parts import BrokenAnswerError
from llm_spec.kit.http_errors import (
    get_error_words,
    get_status_advice,
    make_status_error,
    mask_secrets,
    read_stream_error_status,
)
from llm_spec.kit.server_addresses import Proxy, ServerAddress

__all__ = ["SDK_ERRORS", "ModelAddress", "convert_sdk_error_to_library"]

# The SDK's own errors, and those that its two transports and its JSON parser let through.
SDK_ERRORS: Final = (OpenAIError, httpx2.HTTPError, aiohttp.ClientError, json.JSONDecodeError, UnicodeDecodeError)

_NO_HEADERS: Final[Mapping[str, str]] = {}
_MAX_QUOTED_CHARS: Final = 300  # characters of a server's own words in an error


@dataclass(frozen=True)
class ModelAddress:
    """The parts of an error about a model: name, address, proxy, and the variable of its key."""

    name: str
    server: ServerAddress
    key_variable: str
    proxy: Proxy | None = None

    def format_error_message(self, what: str) -> str:
        """Return one line with the model's name and address."""
        return self.mask_secrets(" ".join(f"{self.name} at {self.server} {what}".split()))

    def get_advice_for_status(self, status: int, headers: Mapping[str, str] = _NO_HEADERS) -> str:
        """Return what to do about a status, or "" if that is not known."""
        has_credentials = self.server.authorization is not None
        return get_status_advice(status, headers, key_variable=self.key_variable, has_credentials=has_credentials)

    def mask_secrets(self, text: str, *keys: str) -> str:
        """Return a text without keys and without the secrets in the addresses."""
        return mask_secrets(text, *keys, *self.server.secrets, *(self.proxy.address.secrets if self.proxy else ()))


def convert_sdk_error_to_library(
    error: Exception, address: ModelAddress, *, secret: str, text: str = ""
) -> LlmSpecError:
    """Convert one of `SDK_ERRORS` to an error whose message is one line without the `secret`.

    `text` is what had come before.
    """

    def mask_secret(words: str) -> str:
        return address.mask_secrets(words, secret)

    def quote_without_secret(words: str) -> str:
        # masked before they are cut: half a key is a secret, too
        return mask_secret(words)[:_MAX_QUOTED_CHARS]

    def format_line(what: str) -> str:
        return mask_secret(address.format_error_message(what))

    match error:
        case APIStatusError(status_code=status):
            words = quote_without_secret(get_error_words(error.body)) or error.response.reason_phrase
            headers = {name.lower(): value for name, value in error.response.headers.items()}
            failure = make_status_error(
                status,
                headers,
                format_line(f"answered {status}: {words}{address.get_advice_for_status(status, headers)}"),
                reported=error.body,
            )
        case json.JSONDecodeError():
            failure = TargetError(
                format_line(f"sent something that is not valid JSON: {quote_without_secret(error.doc)!r}")
            )
        case UnicodeDecodeError():
            failure = TargetError(
                format_line(
                    "sent something that is not valid JSON: "
                    f"{quote_without_secret(error.object.decode(errors='replace'))!r}"
                )
            )
        case APIConnectionError() | httpx2.HTTPError() | aiohttp.ClientError():
            failure = TransientError(format_line(_describe_broken_connection(error, address.proxy)))
        case APIError():  # an error object in a stream
            failure = _build_reported_error(error.body, address, secret, error.message)
        case _:
            failure = TargetError(format_line(f"cannot be called ({type(error).__name__}: {error})"))
    if isinstance(failure, TargetError):
        failure.partial_text = text
    return failure


def _describe_broken_connection(error: BaseException, proxy: Proxy | None) -> str:
    """Describe how a connection failed.

    The SDK calls a dropped connection a timeout, so the error's causes decide.
    """
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    kinds = tuple(type(link) for link in chain)

    def is_caused_by(*error_types: type[BaseException]) -> bool:
        return any(issubclass(kind, error_types) for kind in kinds)

    # with aiohttp every failure before the answer is called a connection timeout
    is_aiohttp = is_caused_by(aiohttp.ClientError)
    if is_caused_by(httpx2.ConnectError, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) or (
        is_caused_by(httpx2.ConnectTimeout) and not is_aiohttp
    ):
        what = f"cannot be reached; check {proxy or 'the address'}"
    elif proxy is not None and is_caused_by(httpx2.ProxyError):
        what = f"cannot be reached: {proxy} refused"
    elif is_caused_by(TimeoutError, httpx2.ReadTimeout, httpx2.WriteTimeout):
        what = "was silent for too long"
    else:
        what = "broke the connection"
    inner = chain[1:] or chain
    cause = next((link for link in reversed(inner) if str(link)), inner[-1])
    return f"{what} ({type(cause).__name__}{f': {cause}' if str(cause) else ''})"


def convert_broken_answer_to_library(
    error: BrokenAnswerError, address: ModelAddress, *, secret: str, text: str = ""
) -> LlmSpecError:
    """Convert an error in an answer that the SDK let through, as `convert_sdk_error_to_library`."""
    kind = TransientError if error.is_transient else TargetError
    failure: LlmSpecError = kind(mask_secrets(address.format_error_message(str(error)), secret))
    if error.reported is not None:
        failure = _build_reported_error(error.reported, address, secret)
    if isinstance(failure, TargetError):
        failure.partial_text = text
    return failure


def _build_reported_error(reported: object, address: ModelAddress, secret: str, message: str = "") -> LlmSpecError:
    """Build the error that a server reported in an answer whose status was good."""
    status = read_stream_error_status(reported)
    words = address.mask_secrets(get_error_words(reported) or message, secret)[:_MAX_QUOTED_CHARS]
    line = address.format_error_message(f"reported an error: {words}{address.get_advice_for_status(status)}")
    return make_status_error(status, {}, mask_secrets(line, secret), reported=reported)
