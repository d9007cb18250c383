"""What a server's refusal means: from an HTTP status and its headers to an error of this library. Pure.

Honoured are `x-should-retry` and `retry-after-ms`, which OpenAI and Anthropic send, and `Retry-After` in seconds or as
a date (RFC 9110, section 10.2.3).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, cast

from llm_spec.errors import InvalidRequestError, LlmSpecError, TargetError, TransientError

__all__ = ["make_status_error", "mask_secrets", "read_retry_after_s", "read_stream_error_status"]

_INVALID_STATUSES: Final = frozenset({400, 413, 422})
_TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429})
_STATUS_BY_ERROR_TYPE: Final[
    Mapping[str, int]
] = {  # of the codes and types of errors in a stream, whose own status was good
    "authentication_error": 401,
    "content_filter": 400,
    "content_policy_violation": 400,
    "context_length_exceeded": 400,
    "exceed_context_size_error": 400,
    "insufficient_quota": 429,
    "invalid_api_key": 401,
    "invalid_prompt": 400,
    "invalid_request_error": 400,
    "model_not_found": 404,
    "not_found_error": 404,
    "overloaded_error": 503,
    "permission_error": 403,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "server_error": 500,
}
_UNKNOWN_STATUS: Final = 500
_CANONICAL_CODES: Final[Mapping[str, str]] = {
    "exceed_context_size_error": "context_length_exceeded"
}  # llama.cpp's type
_CODE_PATTERN: Final = re.compile(r"[A-Za-z_][\w.-]{0,63}")  # a number is only the status again
_PARAM_PATTERN: Final = re.compile(r"[A-Za-z_][\w.\[\]-]{0,127}")
_MIN_SECRET_LENGTH: Final = 8


def mask_secrets(text: str, *secrets: str | None) -> str:
    """A text without these keys. A key of fewer than 8 characters stays: it could be part of any word."""
    for secret in secrets:
        if secret is not None and len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, "***")
    return text


def make_status_error(
    status: int, headers: Mapping[str, str], message: str, *, reported: object = None
) -> LlmSpecError:
    """The error for a response that is none: InvalidRequestError, TransientError (ask again later) or TargetError.

    `headers` are looked up in lower case; `message` is the whole text of the error. `reported` is the server's error
    object, if it sent one: it has the `code` and `param`.
    """
    error = _choose_status_error(status, headers, message)
    error.status = status
    if isinstance(reported, Mapping):
        error.code, error.param = _read_code_and_param(cast("Mapping[str, object]", reported))
    return error


def _read_code_and_param(reported: Mapping[str, object]) -> tuple[str | None, str | None]:
    """The code and the parameter that an error object names: words alone, as other texts may quote anything."""
    details = reported.get("details")  # where Anthropic has its codes
    named = cast("Mapping[str, object]", details).get("error_code") if isinstance(details, Mapping) else None
    kind = str(reported.get("type"))
    for code in (_CANONICAL_CODES.get(kind), named, reported.get("code")):
        if isinstance(code, str) and _CODE_PATTERN.fullmatch(code):
            break
    else:
        code = None
    param = reported.get("param")
    return code, param if isinstance(param, str) and _PARAM_PATTERN.fullmatch(param) else None


def _choose_status_error(status: int, headers: Mapping[str, str], message: str) -> LlmSpecError:
    if status in _INVALID_STATUSES:
        return InvalidRequestError(message)
    is_transient = status in _TRANSIENT_STATUSES or status >= 500
    wish = headers.get("x-should-retry")
    if wish in ("true", "false"):
        is_transient = wish == "true"
    if not is_transient:
        return TargetError(message, status=status)
    return TransientError(message, retry_after_s=read_retry_after_s(headers), status=status)


def read_stream_error_status(error: object) -> int:
    """The HTTP status that an error object inside a stream would have had; 500 where it does not say.

    Gateways such as OpenRouter send the status itself as `code`, OpenAI sends words as `code` and `type`.
    """
    if not isinstance(error, Mapping):
        return _UNKNOWN_STATUS
    fields = cast("Mapping[str, object]", error)
    for value in (fields.get("code"), fields.get("type")):
        word = str(value)
        status = int(word) if word.isdecimal() and word.isascii() else _STATUS_BY_ERROR_TYPE.get(word)
        if status is not None and 400 <= status <= 599:
            return status
    return _UNKNOWN_STATUS


def read_retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds to wait before asking again, if the server says so in a form that can be read; never negative."""
    retry_after = headers.get("retry-after", "")
    for text, unit_s in ((headers.get("retry-after-ms", ""), 1e-3), (retry_after, 1.0)):
        try:
            seconds = float(text) * unit_s
        except ValueError:
            continue
        return max(0.0, seconds) if math.isfinite(seconds) else None
    try:
        at = parsedate_to_datetime(retry_after)
    except (TypeError, ValueError):
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, (at - (now or datetime.now(UTC))).total_seconds())
