"""Prompts are read in pieces, so that a cancelled request does not wait for all of a long one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from llm_spec.contract.local import PrefixReusingSession, TokenSession

__all__ = ["prefill_prompt"]

# The same pieces with and without speculation, so that the caches agree.
_PREFILL_CHUNK_TOKENS: Final = 256


def prefill_prompt(
    session: TokenSession, token_ids: Sequence[int], cancelled: Callable[[], bool] | None = None
) -> None:
    """Let an empty session read a prompt, piece by piece, until it is read or `cancelled` says so."""
    adopted = session.reuse_prefix(token_ids) if isinstance(session, PrefixReusingSession) else 0
    for start in range(adopted, len(token_ids), _PREFILL_CHUNK_TOKENS):
        if cancelled is not None and cancelled():
            return
        session.forward(token_ids[start : start + _PREFILL_CHUNK_TOKENS], num_rows=1)
