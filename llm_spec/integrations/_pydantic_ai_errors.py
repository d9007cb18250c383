"""Converts this library's errors to pydantic-ai's, by HTTP status if there is one. Pure."""

from __future__ import annotations

from typing import Any, Final

from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelNotFoundError,
    ModelOverloadedError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelServerError,
    ModelTimeoutError,
    ModelUnavailableError,
)

from llm_spec.contract.errors import (
    BudgetError,
    CircuitOpenError,
    InvalidRequestError,
    LlmSpecError,
    TransientError,
    UnsupportedError,
)

__all__ = ["convert_error_to_pydantic_ai"]

# `Any`: the type of a category is private to pydantic-ai
_CATEGORIES: Final[dict[int, Any]] = {
    400: ModelRequestRejectedError,
    401: ModelAuthenticationError,
    402: ModelQuotaExceededError,
    403: ModelAuthenticationError,
    404: ModelNotFoundError,
    413: ModelRequestRejectedError,
    422: ModelRequestRejectedError,
    429: ModelRateLimitError,
    503: ModelUnavailableError,
    529: ModelOverloadedError,
}
_CATEGORIES_BY_CODE: Final[dict[str, Any]] = {
    "billing_hard_limit_reached": ModelQuotaExceededError,
    "context_length_exceeded": ModelContextWindowExceededError,
    "insufficient_quota": ModelQuotaExceededError,
    "invalid_api_key": ModelAuthenticationError,
    "model_not_found": ModelNotFoundError,
    "overloaded_error": ModelOverloadedError,
}


def convert_error_to_pydantic_ai(name: str, error: LlmSpecError, *, in_stream: bool = False) -> ModelAPIError:
    """Return the error that pydantic-ai's own models raise for this failure of the model `name`.

    With a status it is a ModelHTTPError and an error of a category, so that either can be caught.
    Without a status it is only an error of a category.
    """
    retry_after_s = error.retry_after_s if isinstance(error, TransientError | CircuitOpenError) else None
    if error.status is None or error.status < 400:
        kind = _find_category_without_status(error)
        return kind(name, str(error), retry_after=retry_after_s, in_stream=in_stream, provider_error_code=error.code)
    words = {"message": str(error), "code": error.code, "param": error.param}
    return ModelHTTPError.for_category(
        _find_category(error.status, error.code),
        status_code=error.status,
        model_name=name,
        body={field: value for field, value in words.items() if value is not None},
        provider_error_code=error.code,
        retry_after=retry_after_s,
        in_stream=in_stream,
    )


def _find_category(status: int, code: str | None) -> Any:
    category = _CATEGORIES_BY_CODE.get(code or "") or _CATEGORIES.get(status)
    return ModelServerError if category is None and status >= 500 else category


def _find_category_without_status(error: LlmSpecError) -> type[ModelAPIError]:
    by_code: type[ModelAPIError] | None = _CATEGORIES_BY_CODE.get(error.code or "")
    if by_code is not None:
        return by_code
    match error:
        case InvalidRequestError() | UnsupportedError():
            return ModelRequestRejectedError
        case TransientError():
            return ModelTimeoutError if isinstance(error.__cause__, TimeoutError) else ModelConnectionError
        case CircuitOpenError():
            return ModelUnavailableError
        case BudgetError():
            return ModelQuotaExceededError
        case _:
            return ModelAPIError
