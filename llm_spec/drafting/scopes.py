"""A draft's memory, kept to one request or to one client."""

from __future__ import annotations

from llm_spec.contract.draft import DraftProvider, PerClientDraft, PerRequestDraft

__all__ = ["open_for_client", "open_for_request"]


def open_for_request(draft: DraftProvider) -> DraftProvider:
    """The draft for one request: one that remembers its calls where there is such, else the draft itself."""
    return draft.for_request() if isinstance(draft, PerRequestDraft) else draft


def open_for_client(draft: DraftProvider) -> DraftProvider:
    """The draft with a memory of its own where it has one, else the draft itself."""
    return draft.for_client() if isinstance(draft, PerClientDraft) else draft
