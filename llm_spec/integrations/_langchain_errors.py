"""This library's errors as those, too, that LangChain's users and its middleware catch."""

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
    """5xx: the server failed, and may not the next time."""


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
    """The class that is this error's own and LangChain's; None where LangChain has no word for it."""
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
    """What a target raises within is of LangChain's class as well, otherwise the same error."""
    try:
        yield
    except LlmSpecError as error:
        if (kind := _find_langchain_class(error)) is not None:
            error.__class__ = kind
        raise


# ------------------------------------------------------------------------------------------------ refusals


def check_refusal(messages: Iterator[BaseMessage]) -> Iterator[BaseMessage]:
    """The same messages; raises where a model refused, so that no parser takes that for an answer.

    Of pieces, none comes after the first of a refusal: the error is raised at the end, and has all of it.
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
    """As `check_refusal`."""
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
    """Whether a message, or a piece of one, says that the model refused or that a filter stopped it."""
    is_filtered = message.response_metadata.get("finish_reason") == "content_filter"
    return is_filtered or bool(message.additional_kwargs.get("refusal"))


def _make_refusal_error(pieces: Sequence[BaseMessage]) -> ModelRefusalError:
    """The error of a whole message, or of one in pieces."""
    chunks = [piece for piece in pieces if isinstance(piece, AIMessageChunk)]
    message = message_chunk_to_message(add_ai_message_chunks(*chunks)) if chunks else pieces[0]
    refusal = message.additional_kwargs.get("refusal") or "the answer was stopped by a content filter"
    return _find_refusal_class()(str(refusal), raw_message=message)


def _find_refusal_class() -> type[ModelRefusalError]:
    """ChatOpenAI's own, for programs that came from there, where that package is installed."""
    try:
        found: object = import_module("langchain_openai.chat_models.base").OpenAIRefusalError
    except (ImportError, AttributeError):
        return ModelRefusalError
    return found if isinstance(found, type) and issubclass(found, ModelRefusalError) else ModelRefusalError
