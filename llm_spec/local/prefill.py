"""Prompts are read in pieces, so that a cancelled request does not wait for all of a long one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from llm_spec.contract.model import PrefixReusingSession, TokenSession
from llm_spec.local.kept_tokens import PREFILL_CHUNK_TOKENS

__all__ = ["prefill_prompt"]

_FIRST_TOKENS: Final = 16  # of the first piece where the sizes are free, by which it shows what reading costs, …
_MIN_TOKENS: Final = 32  # … and of those after it, fewer of which would take longer in all; …
_PIECE_S: Final = 0.05  # … they grow as long as one takes less than half of this


def prefill_prompt(
    session: TokenSession,
    token_ids: Sequence[int],
    cancelled: Callable[[], bool] | None = None,
    *,
    exact: bool = True,
) -> None:
    """Let an empty session read a prompt, piece by piece, until it is read or `cancelled` says so.

    The pieces of an exact session are of PREFILL_CHUNK_TOKENS. Others', of drafts, are small where reading is slow.
    """
    start = session.reuse_prefix(token_ids) if isinstance(session, PrefixReusingSession) else 0
    size = PREFILL_CHUNK_TOKENS if exact else _FIRST_TOKENS
    while start < len(token_ids):
        if cancelled is not None and cancelled():
            return
        began_s = time.perf_counter()
        session.forward(token_ids[start : start + size], num_rows=1)
        start += size
        size = max(size, _MIN_TOKENS)
        if time.perf_counter() - began_s < _PIECE_S / 2:
            size = min(2 * size, PREFILL_CHUNK_TOKENS)
