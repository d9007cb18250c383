"""The exception tree, named for what the caller can do about an error.

    LlmSpecError
    ├── ConfigError              the configuration is wrong: change the named field
    │   ├── UnknownProviderError     no such provider name: choose one of those listed
    │   └── MissingExtraError        packages are not installed: install the named extra
    ├── InvalidRequestError      this request cannot be served: change the named field
    ├── UnsupportedError         the strategy cannot serve this pair or request: choose another
    ├── ModelLoadError           files of a local model are missing or broken: fix the named file
    └── TargetError              the target failed; `partial_text` is the text verified so far
        ├── TransientError           overloaded, unreachable or silent: try again later
        ├── CircuitOpenError         it failed too often and its circuit is open: try again later
        ├── ClosedError              its provider or decoder is closed: make another
        ├── BudgetError              no budget is left: raise it, or wait for running requests
        └── ModelOutputError         a local model computed logits that define no distribution (NaN)

A failing draft raises none of these to the caller. It is logged and counted as a `DraftError`, and
the target goes on alone. `asyncio.CancelledError` is never translated.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CircuitOpenError",
    "ClosedError",
    "ConfigError",
    "DraftError",
    "InvalidRequestError",
    "LlmSpecError",
    "MissingExtraError",
    "ModelLoadError",
    "ModelOutputError",
    "TargetError",
    "TransientError",
    "UnknownProviderError",
    "UnsupportedError",
    "format_error_line",
    "is_permanent_refusal",
    "make_context_length_error",
]


class LlmSpecError(Exception):
    """Base of every error that this library raises on purpose.

    `code`: the server's error code, such as `context_length_exceeded`, or None if it sent none.
    `param`: the field that the server named, or None if it named none.
    `status`: the HTTP status, or None if there was none.
    """

    code: str | None = None
    param: str | None = None
    status: int | None = None


class ConfigError(LlmSpecError, ValueError):
    """A configuration value is out of range; the message names field, value and range."""


class UnknownProviderError(ConfigError):
    """A provider name that no installed package registers."""


class MissingExtraError(ConfigError):
    """Optional packages are not installed; the message has the command that installs them."""


class InvalidRequestError(LlmSpecError, ValueError):
    """A request field has a value that cannot be served; the message names both."""


def make_context_length_error(message: str) -> InvalidRequestError:
    """Return the error for a prompt that is too long.

    Clients recognize its `code` and shorten the prompt.
    """
    error = InvalidRequestError(message)
    error.code = "context_length_exceeded"
    return error


class UnsupportedError(LlmSpecError):
    """The requested strategy cannot serve this pair or this request; the message says why."""


class ModelLoadError(LlmSpecError):
    """A local model cannot be loaded; the message names the file and what is wrong with it."""


class TargetError(LlmSpecError):
    """The target failed while answering.

    `partial_text`: the verified text up to the failure. A caller that streams has already received
    it.
    """

    def __init__(self, message: str, *, partial_text: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.partial_text = partial_text
        self.status = status


class TransientError(TargetError):
    """The target could not answer now; the same request may succeed later.

    `retry_after_s`: the seconds that the server asked to wait, or None if it did not say.
    `status`: the HTTP status, or None if the connection failed.
    """

    def __init__(
        self, message: str, *, partial_text: str = "", retry_after_s: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(message, partial_text=partial_text, status=status)
        self.retry_after_s = retry_after_s


class CircuitOpenError(TargetError):
    """The target failed several times in a row; nothing was sent.

    Its circuit is open for `retry_after_s` seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClosedError(TargetError):
    """A provider or decoder is closed, or was closed while it answered.

    It is not retried, and circuit breakers do not count it.
    """


class BudgetError(TargetError):
    """No budget is left for a call; it was not made.

    `decode` and `stream` end with the text so far instead.
    """


class ModelOutputError(TargetError):
    """A local target computed logits that define no distribution (NaN, or only minus infinity)."""


class DraftError(LlmSpecError):
    """A draft failed. It is only logged and counted, never raised out of a decoder."""


def is_permanent_refusal(error: Exception) -> bool:
    """True if a target refused a call for a reason that will not pass by itself."""
    return not isinstance(error, TransientError | CircuitOpenError | ClosedError | BudgetError | UnsupportedError)


def format_error_line(error: BaseException) -> str:
    """Format an error for people and logs: its type, then its message.

    The type quotes no prompt.
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
