"""Optional members of drafts and providers, used if they exist."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from llm_spec.contract.draft import (
    DraftCapabilities,
    DraftProvider,
    PerClientDraft,
    PerRequestDraft,
    get_draft_capabilities,
)
from llm_spec.contract.errors import DraftError
from llm_spec.contract.events import StreamEvent
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.token_model import RequestAwareDrafter, TokenDraft, TokenDrafter, TokenModel, TokenSampler

__all__ = [
    "RequestOptionalDrafter",
    "TokenIdStreaming",
    "WrappedDraft",
    "copy_draft_for_new_client",
    "find_token_draft_refusal",
    "open_draft_for_request",
    "open_token_draft",
    "stream_with_token_ids_if_possible",
]


@runtime_checkable
class TokenIdStreaming(Protocol):
    """A provider that can ask its server for the token ids of an answer.

    Optional beside `LlmProvider`. It works before it is known what the server can do. The pieces of
    a draft carry the ids.
    """

    def stream_with_token_ids(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Stream like the provider's own `stream`, with `token_ids` if the server sends them.

        If the server refuses the field for them, the request is sent again without it.
        """
        ...


class RequestOptionalDrafter(ABC):
    """A `RequestAwareDrafter` that can also draft without the request."""

    @abstractmethod
    def open_token_draft_for_request(
        self, request: ChatRequest | None, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]
    ) -> TokenDraft:
        """Begin drafting as in `RequestAwareDrafter`; `request` is None if it is unknown."""

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:
        return self.open_token_draft_for_request(None, target, choose, prompt_ids)


class WrappedDraft:
    """The name and capabilities of a draft that another draft wraps."""

    def __init__(self, draft: DraftProvider) -> None:
        self._draft = draft

    @property
    def name(self) -> str:
        return self._draft.name

    @property
    def capabilities(self) -> DraftCapabilities:
        """The capabilities of the draft itself."""
        return get_draft_capabilities(self._draft)


def open_draft_for_request(draft: DraftProvider) -> DraftProvider:
    """Return the draft for one request: one that remembers its calls, or the draft itself."""
    return draft.for_request() if isinstance(draft, PerRequestDraft) else draft


def copy_draft_for_new_client(draft: DraftProvider) -> DraftProvider:
    """Return a copy with a memory of its own, or the draft itself if it has no memory."""
    return draft.copy_for_new_client() if isinstance(draft, PerClientDraft) else draft


def find_token_draft_refusal(draft: DraftProvider, target: TokenModel) -> str | None:
    """Return why a draft cannot propose token ids to a target, or None if it can."""
    if not isinstance(draft, TokenDrafter):
        return f"draft {draft.name} gives text, not token ids"
    return draft.token_draft_refusal(target)


def open_token_draft(
    draft: DraftProvider | TokenDrafter,
    target: TokenModel,
    choose: TokenSampler,
    prompt_ids: Sequence[int],
    request: ChatRequest | None,
) -> TokenDraft:
    """Begin drafting token ids for one request; raise DraftError if the draft gives only text.

    A draft that reads requests gets `request`, if it is not None.
    """
    if not isinstance(draft, TokenDrafter):
        raise DraftError(f"draft {draft.name} gives text, not token ids")
    if request is not None and isinstance(draft, RequestAwareDrafter):
        return draft.open_token_draft_for_request(request, target, choose, prompt_ids)
    return draft.open_token_draft(target, choose, prompt_ids)


def stream_with_token_ids_if_possible(
    provider: LlmProvider, request: ChatRequest
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    """Open a provider's stream, with token ids if it can ask for them."""
    return (provider.stream_with_token_ids if isinstance(provider, TokenIdStreaming) else provider.stream)(request)
