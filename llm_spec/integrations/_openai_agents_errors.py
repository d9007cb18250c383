"""This library's errors as those, too, of OpenAI's client, which users of the Agents SDK catch. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import httpx2  # what OpenAI's client has requests and responses of
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

_URL: Final = "http://llm-spec.invalid"  # the errors have a request; which address was asked is not in them
_JOINED: Final[dict[tuple[type[LlmSpecError], type[APIError]], type[LlmSpecError]]] = {}  # made once each
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
    """What a target raises within is of the class, too, that OpenAI's client raises; otherwise it is the same error."""
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
    """The status of HTTP; a request that cannot be served has that of a server that says so."""
    if isinstance(error, InvalidRequestError) and error.status is None:
        return 400
    return error.status if error.status is not None and error.status >= 400 else None


def _find_openai_class(error: LlmSpecError, status: int | None) -> type[APIError] | None:
    """None: OpenAI's client has no word for it."""
    if isinstance(error, TransientError) and status is None and isinstance(error.__cause__, TimeoutError):
        return APITimeoutError
    if isinstance(error, InvalidRequestError | TargetError) and status is not None:
        return _CLASS_BY_STATUS.get(status, InternalServerError if status >= 500 else APIStatusError)
    if isinstance(error, TransientError | CircuitOpenError):
        return APIConnectionError
    return APIError if type(error) is TargetError else None


def _join_classes(kind: type[LlmSpecError], openai_kind: type[APIError]) -> type[LlmSpecError]:
    """A class that is both, under the name of ours."""
    if (kind, openai_kind) not in _JOINED:
        namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": _reduce_error}
        joined = type(kind.__name__, (kind, openai_kind), namespace)
        _JOINED[kind, openai_kind] = cast("type[LlmSpecError]", joined)
    return _JOINED[kind, openai_kind]


def _reduce_error(error: LlmSpecError) -> tuple[Any, ...]:
    """How to copy and pickle it: the class is found in no module, so it is joined anew."""
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
