"""The contract of drafts: where guesses at the answer come from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from llm_spec.chat import ChatRequest, FinishReason, Usage

__all__ = [
    "DraftPiece",
    "DraftProvider",
    "PerClientDraft",
    "PerRequestDraft",
    "is_free",
]


class DraftPiece(NamedTuple):
    """The next piece of a draft. `token_ids` where the draft knows them; the last piece has a `finish_reason`.

    `is_free`: no model wrote it, though others of the same draft may be a model's.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    is_free: bool = False


@runtime_checkable
class DraftProvider(Protocol):
    """Where guesses at the answer come from. It may be wrong, slow or broken: the answer never depends on it.

    One that answers from the start whatever `request.prefix` says has an attribute `continues_prefix = False`: what it
    wrote is then realigned with the answer instead of asking it again. One that asks no model has an attribute
    `is_free = True`: what it drafts costs nothing.
    """

    @property
    def name(self) -> str: ...

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        """Guess how the answer goes on after `request.prefix`, at most `max_tokens` tokens, in pieces as they come.

        Leaving the context ends the work behind it.
        """
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class PerRequestDraft(Protocol):
    """A draft that keeps what it knows of a conversation from one call to the next; optional beside `DraftProvider`."""

    def for_request(self) -> DraftProvider:
        """The draft for all calls of one request, one call at a time.

        It forgets with the request; closing it closes nothing. `draft` itself keeps nothing.
        """
        ...


@runtime_checkable
class PerClientDraft(Protocol):
    """A draft that learns from the answers it drafted for; optional beside `DraftProvider`."""

    def for_client(self) -> DraftProvider:
        """The same draft for those who may know of each other's answers: it begins with none, and keeps its own.

        Closing it closes nothing.
        """
        ...


def is_free(draft: object) -> bool:
    """Whether a draft asks no model, as it says itself."""
    return bool(getattr(draft, "is_free", False))
