"""What a server's refusal means: from an HTTP status and its headers to an error of this library. Pure.

Honoured are `x-should-retry` and `retry-after-ms`, which OpenAI and Anthropic send, and `Retry-After` in seconds or as
a date (RFC 9110, section 10.2.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from llm_spec.errors import InvalidRequestError, LlmSpecError, TargetError, TransientError

__all__ = ["error_for_status", "read_retry_after"]

_INVALID: Final = frozenset({400, 413, 422})
_TRANSIENT: Final = frozenset({408, 409, 425, 429})


def error_for_status(status: int, headers: Mapping[str, str], message: str) -> LlmSpecError:
    """The error for a response that is none: InvalidRequestError, TransientError (ask again later) or TargetError.

    `headers` are looked up in lower case; `message` is the whole text of the error.
    """
    if status in _INVALID:
        return InvalidRequestError(message)
    is_transient = status in _TRANSIENT or status >= 500
    wish = headers.get("x-should-retry")
    if wish in ("true", "false"):
        is_transient = wish == "true"
    if not is_transient:
        return TargetError(message, status=status)
    return TransientError(message, retry_after_s=read_retry_after(headers), status=status)


def read_retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds to wait before asking again, if the server says so in a form that can be read; never negative."""
    told = headers.get("retry-after", "")
    for text, unit_s in ((headers.get("retry-after-ms", ""), 1e-3), (told, 1.0)):
        try:
            seconds = float(text) * unit_s
        except ValueError:
            continue
        return max(0.0, seconds) if math.isfinite(seconds) else None
    try:
        at = parsedate_to_datetime(told)
    except (TypeError, ValueError):
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, (at - (now or datetime.now(UTC))).total_seconds())
