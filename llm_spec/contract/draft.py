"""The contract of drafts, which guess how an answer continues."""

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
    """The next piece of a draft; the last piece has a `finish_reason`.

    `token_ids`: ids in the draft's own vocabulary, or None if it does not know them. Ids without
    text (such as the first half of a character) belong to the text that follows. If the target has
    the same vocabulary, its tokenizer is not called.
    `is_free`: no model wrote this piece, though a model may have written others of the same draft.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    is_free: bool = False


@runtime_checkable
class DraftProvider(Protocol):
    """Guesses how an answer continues.

    A draft may be wrong, slow or broken: the answer never depends on it. These three members are
    enough. A draft that differs from the defaults of `DraftCapabilities` also has an attribute
    `capabilities`.
    """

    @property
    def name(self) -> str: ...

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        """Guess what follows `request.prefix`, in pieces as they come.

        The pieces have at most `max_tokens` tokens together. Leaving the context ends the draft's
        work.
        """
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class DraftCapabilities:
    """Abilities of a draft beyond `DraftProvider`.

    A draft that wraps another one passes on the other's capabilities unchanged.

    `continues_prefix`: the draft continues `request.prefix`. If False, it answers from the start.
    It is then not called again: its text is realigned with the answer.
    `is_free`: it calls no model, and its tokens cost nothing.
    `drafts`: the drafts that it combines, if any.
    `token_model`: the model in this process that it drafts with. The target may run it on its own
    device.
    `companion`: a drafter that goes before `token_model` in each round, and drafts only if it is
    sure.
    """

    continues_prefix: bool = True
    is_free: bool = False
    drafts: Sequence[DraftProvider] = ()
    token_model: TokenModel | None = None
    companion: TokenDrafter | None = None


@runtime_checkable
class PerRequestDraft(Protocol):
    """A draft that remembers a conversation from one call to the next.

    Optional beside `DraftProvider`.
    """

    def for_request(self) -> DraftProvider:
        """Return the draft for all calls of one request, one call at a time.

        It forgets when the request ends; closing it closes nothing. `draft` itself remembers
        nothing.
        """
        ...


@runtime_checkable
class PerClientDraft(Protocol):
    """A draft that learns from the answers it drafted for; optional beside `DraftProvider`."""

    def copy_for_new_client(self) -> DraftProvider:
        """Return the same draft for clients that may know of each other's answers.

        The copy starts without learned answers and keeps its own. Closing it closes nothing.
        """
        ...


def get_draft_capabilities(draft: DraftProvider | TokenDrafter) -> DraftCapabilities:
    """Return the draft's attribute `capabilities`, or the defaults if it has none."""
    declared = getattr(draft, "capabilities", None)
    return declared if isinstance(declared, DraftCapabilities) else DraftCapabilities()
