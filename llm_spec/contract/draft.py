"""The contract of drafts: where guesses at the answer come from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from llm_spec.contract.events import FinishReason, Usage
from llm_spec.contract.request import ChatRequest

if TYPE_CHECKING:
    from llm_spec.contract.token_model import TokenDrafter, TokenModel

__all__ = [
    "DraftCapabilities",
    "DraftPiece",
    "DraftProvider",
    "PerClientDraft",
    "PerRequestDraft",
    "get_draft_capabilities",
]


class DraftPiece(NamedTuple):
    """The next piece of a draft; the last one has a `finish_reason`.

    `token_ids`: those of the draft's own vocabulary, where it knows them. Those without a text, as the first half of a
    character, belong to the text that follows. Where they are the target's ids too, its tokenizer is not called.

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

    These three members are enough. A draft that differs from what `DraftCapabilities` says by default has an attribute
    `capabilities` besides.
    """

    @property
    def name(self) -> str: ...

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        """Guess how the answer goes on after `request.prefix`, at most `max_tokens` tokens, in pieces as they come.

        Leaving the context ends the draft's work.
        """
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class DraftCapabilities:
    """What a draft does beyond `DraftProvider`. A draft that wraps another one passes it on whole.

    `continues_prefix`: it continues `request.prefix`. False: it answers from the start, and what it wrote is realigned
    with the answer instead of asking it again.
    `is_free`: it asks no model, and what it drafts costs nothing.
    `drafts`: the drafts that it joins, if it joins any.
    `token_model`: the model in this process by which it drafts. The target may run it on its own device.
    `companion`: what drafts before `token_model` in each round, and only where it is sure.
    """

    continues_prefix: bool = True
    is_free: bool = False
    drafts: Sequence[DraftProvider] = ()
    token_model: TokenModel | None = None
    companion: TokenDrafter | None = None


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

    def copy_for_new_client(self) -> DraftProvider:
        """The same draft for those who may know of each other's answers: it begins with none, and keeps its own.

        Closing it closes nothing.
        """
        ...


def get_draft_capabilities(draft: DraftProvider | TokenDrafter) -> DraftCapabilities:
    """The attribute `capabilities` of a draft, or the defaults for a draft without one."""
    declared = getattr(draft, "capabilities", None)
    return declared if isinstance(declared, DraftCapabilities) else DraftCapabilities()
