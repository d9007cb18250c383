"""Prompts are read in pieces, so that a cancelled request does not wait for all of a long one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llm_spec.contract.local import PrefixReusingSession, TokenSession
from llm_spec.kept_tokens import PREFILL_CHUNK_TOKENS

__all__ = ["prefill_prompt"]


def prefill_prompt(
    session: TokenSession, token_ids: Sequence[int], cancelled: Callable[[], bool] | None = None
) -> None:
    """Let an empty session read a prompt, piece by piece, until it is read or `cancelled` says so."""
    adopted = session.reuse_prefix(token_ids) if isinstance(session, PrefixReusingSession) else 0
    for start in range(adopted, len(token_ids), PREFILL_CHUNK_TOKENS):
        if cancelled is not None and cancelled():
            return
        session.forward(token_ids[start : start + PREFILL_CHUNK_TOKENS], num_rows=1)
