"""This library's errors, made errors of OpenAI's client as well. Pure.

Users of the Agents SDK catch those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import httpx2  # OpenAI's client uses its requests and responses
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    UnprocessableEntityError,
)

from llm_spec.contract.errors import CircuitOpenError, InvalidRequestError, LlmSpecError, TargetError, TransientError

__all__ = ["raise_as_openai_errors"]

# The errors need a request. It does not reveal the target's address
_URL: Final = "http://llm-spec.invalid"
# Joined classes, each made once
_JOINED: Final[dict[tuple[type[LlmSpecError], type[APIError]], type[LlmSpecError]]] = {}
_ADDED_FIELDS: Final = frozenset({"message", "type", "request", "body", "response", "status_code", "request_id"})
_CLASS_BY_STATUS: Final[dict[int, type[APIStatusError]]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


@contextmanager
def raise_as_openai_errors() -> Iterator[None]:
    """Give errors that a target raises inside the class that OpenAI's client raises as well."""
    try:
        yield
    except LlmSpecError as error:
        _make_openai_error(error)
        raise


def _make_openai_error(error: LlmSpecError) -> LlmSpecError:
    status = _get_status(error)
    kind = _find_openai_class(error, status)
    if kind is None or isinstance(error, APIError):
        return error
    added: Any = error
    added.message, added.type = str(error), None
    added.request = httpx2.Request("POST", _URL)
    added.body = {"message": str(error), "code": error.code, "param": error.param}
    if status is not None:
        headers = {} if (wait_s := getattr(error, "retry_after_s", None)) is None else {"retry-after": str(wait_s)}
        added.response = httpx2.Response(status, headers=headers, request=added.request)
        added.status_code, added.request_id = status, None
    added.__class__ = _join_classes(type(error), kind)
    return error


def _get_status(error: LlmSpecError) -> int | None:
    """Return the HTTP status, or None. A request that cannot be served has 400."""
    if isinstance(error, InvalidRequestError) and error.status is None:
        return 400
    return error.status if error.status is not None and error.status >= 400 else None


def _find_openai_class(error: LlmSpecError, status: int | None) -> type[APIError] | None:
    """Return the matching class of OpenAI's client, or None if there is none."""
    if isinstance(error, TransientError) and status is None and isinstance(error.__cause__, TimeoutError):
        return APITimeoutError
    if isinstance(error, InvalidRequestError | TargetError) and status is not None:
        return _CLASS_BY_STATUS.get(status, InternalServerError if status >= 500 else APIStatusError)
    if isinstance(error, TransientError | CircuitOpenError):
        return APIConnectionError
    return APIError if type(error) is TargetError else None


def _join_classes(kind: type[LlmSpecError], openai_kind: type[APIError]) -> type[LlmSpecError]:
    """Return a class that is both, with the name of `kind`."""
    if (kind, openai_kind) not in _JOINED:
        namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": _reduce_error}
        joined = type(kind.__name__, (kind, openai_kind), namespace)
        _JOINED[kind, openai_kind] = cast("type[LlmSpecError]", joined)
    return _JOINED[kind, openai_kind]


def _reduce_error(error: LlmSpecError) -> tuple[Any, ...]:
    """Support copying and pickling. The class is in no module, so it is joined again."""
    fields = {name: value for name, value in vars(error).items() if name not in _ADDED_FIELDS}
    return _rebuild_error, (type(error).__mro__[1], error.args, fields, isinstance(error, APITimeoutError))


def _rebuild_error(
    kind: type[LlmSpecError], args: tuple[Any, ...], fields: dict[str, Any], is_timeout: bool
) -> LlmSpecError:
    error = kind(*args)
    vars(error).update(fields)
    if is_timeout:
        error.__cause__ = TimeoutError()
    return _make_openai_error(error)
