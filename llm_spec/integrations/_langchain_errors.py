"""This library's errors, made LangChain's errors as well, which its users and middleware catch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Final

from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelPermissionDeniedError,
    ModelRateLimitError,
    ModelRefusalError,
    ModelTimeoutError,
)
from langchain_core.messages import AIMessageChunk, BaseMessage, message_chunk_to_message
from langchain_core.messages.ai import add_ai_message_chunks

from llm_spec.contract.errors import InvalidRequestError, LlmSpecError, TargetError, TransientError

__all__ = ["acheck_refusal", "check_refusal", "raise_as_langchain_errors"]


class LangChainInvalidRequestError(InvalidRequestError, ModelInvalidRequestError):
    """A request that cannot be served."""


class LangChainContextOverflowError(InvalidRequestError, ContextOverflowError):
    """A prompt that is too long for the model."""


class LangChainRefusedRequestError(TargetError, ModelInvalidRequestError):
    """A request that the target refused."""


class LangChainAuthenticationError(TargetError, ModelAuthenticationError):
    """401: a key that is missing or wrong."""


class LangChainPermissionDeniedError(TargetError, ModelPermissionDeniedError):
    """403: a key that may not do this."""


class LangChainNotFoundError(TargetError, ModelNotFoundError):
    """404: no such model, or no such address."""


class LangChainTargetApiError(TargetError, ModelAPIError):
    """5xx: the server failed."""


class LangChainTransientApiError(TransientError, ModelAPIError):
    """5xx: the server failed; a retry may succeed."""


class LangChainRateLimitError(TransientError, ModelRateLimitError):
    """429: too many requests."""


class LangChainTimeoutError(TransientError, ModelTimeoutError):
    """The target was silent for too long."""


class LangChainConnectionError(TransientError, ModelConnectionError):
    """The target cannot be reached, or the connection broke."""


_TARGET_ERRORS: Final[dict[int, type[LlmSpecError]]] = {
    401: LangChainAuthenticationError,
    403: LangChainPermissionDeniedError,
    404: LangChainNotFoundError,
}
_TRANSIENT_ERRORS: Final[dict[int | None, type[LlmSpecError]]] = {
    None: LangChainConnectionError,
    429: LangChainRateLimitError,
}


def _find_langchain_class(error: LlmSpecError) -> type[LlmSpecError] | None:
    """Return the class that is both this error's and LangChain's, or None if LangChain has none."""
    status = error.status
    if isinstance(error, InvalidRequestError):
        is_too_long = error.code == "context_length_exceeded"
        return LangChainContextOverflowError if is_too_long else LangChainInvalidRequestError
    if isinstance(error, TransientError):
        is_late = status in (408, 504) or isinstance(error.__cause__, TimeoutError)
        return LangChainTimeoutError if is_late else _TRANSIENT_ERRORS.get(status, LangChainTransientApiError)
    if not isinstance(error, TargetError) or status is None or status < 400:
        return None
    return _TARGET_ERRORS.get(status, LangChainRefusedRequestError if status < 500 else LangChainTargetApiError)


@contextmanager
def raise_as_langchain_errors() -> Iterator[None]:
    """Give errors that a target raises inside LangChain's matching class as well."""
    try:
        yield
    except LlmSpecError as error:
        if (kind := _find_langchain_class(error)) is not None:
            error.__class__ = kind
        raise


# ----------------------------------------------------------------------------------------- refusals


def check_refusal(messages: Iterator[BaseMessage]) -> Iterator[BaseMessage]:
    """Yield the messages, and raise ModelRefusalError if the model refused.

    So no parser takes a refusal for an answer. Nothing is yielded from the first piece of a refusal
    on: the error is raised at the end and holds the whole message.
    """
    pieces: list[BaseMessage] = []
    is_refused = False
    for message in messages:
        pieces.append(message)
        is_refused = is_refused or _is_refusal(message)
        if not is_refused:
            yield message
    if is_refused:
        raise _make_refusal_error(pieces)


async def acheck_refusal(messages: AsyncIterator[BaseMessage]) -> AsyncIterator[BaseMessage]:
    """Do the same as `check_refusal`, for an asynchronous iterator."""
    pieces: list[BaseMessage] = []
    is_refused = False
    async for message in messages:
        pieces.append(message)
        is_refused = is_refused or _is_refusal(message)
        if not is_refused:
            yield message
    if is_refused:
        raise _make_refusal_error(pieces)


def _is_refusal(message: BaseMessage) -> bool:
    """Return True if a message, or a piece of one, is a refusal or was stopped by a filter."""
    is_filtered = message.response_metadata.get("finish_reason") == "content_filter"
    return is_filtered or bool(message.additional_kwargs.get("refusal"))


def _make_refusal_error(pieces: Sequence[BaseMessage]) -> ModelRefusalError:
    """Build the error for a whole message, or for the pieces of one."""
    chunks = [piece for piece in pieces if isinstance(piece, AIMessageChunk)]
    message = message_chunk_to_message(add_ai_message_chunks(*chunks)) if chunks else pieces[0]
    refusal = message.additional_kwargs.get("refusal") or "the answer was stopped by a content filter"
    return _find_refusal_class()(str(refusal), raw_message=message)


def _find_refusal_class() -> type[ModelRefusalError]:
    """Return ChatOpenAI's own class if its package is installed: programs may catch that one."""
    try:
        found: object = import_module("langchain_openai.chat_models.base").OpenAIRefusalError
    except (ImportError, AttributeError):
        return ModelRefusalError
    return found if isinstance(found, type) and issubclass(found, ModelRefusalError) else ModelRefusalError
