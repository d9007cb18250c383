"""The tokens that a cache keeps after its answer, and the reading of prompts into caches.

With the kept tokens, the next turn of a conversation reads only its new part, and a restarted draft
reads only what the target has written meanwhile. Exact sessions keep only what gives the same bits
as reading it again: whole chunks of a prompt, read from the same position in one pass. Tokens read
in rounds were computed beside other rows and may differ in the last bit, which does not matter for
a draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llm_spec.contract.token_model import PrefixReusingSession, TokenSession

__all__ = [
    "PREFILL_CHUNK_TOKENS",
    "IdleCacheChoice",
    "KeptTokens",
    "choose_idle_cache",
    "prefill_prompt",
]

# The tokens of a prompt that are read in one pass. Chunks begin at multiples of it, with and
# without speculation, so that caches agree.
PREFILL_CHUNK_TOKENS: Final = 256


@dataclass(eq=False, slots=True, kw_only=True)
class KeptTokens:
    """The tokens of one cache, in order.

    `num_in_chunks` is the number of first tokens that an exact session read in chunks.
    """

    token_ids: list[int] = field(default_factory=list[int])
    num_in_chunks: int = 0

    def record_tokens(self, token_ids: Sequence[int], *, exact: bool) -> None:
        """Record tokens that were read in one pass; `exact`: by an exact session."""
        if exact and self.num_in_chunks == len(self.token_ids) and len(token_ids) == PREFILL_CHUNK_TOKENS:
            self.num_in_chunks += PREFILL_CHUNK_TOKENS
        self.token_ids.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Forget all but the first tokens."""
        del self.token_ids[length:]
        self.num_in_chunks = min(self.num_in_chunks, length // PREFILL_CHUNK_TOKENS * PREFILL_CHUNK_TOKENS)

    def count_reusable_tokens(self, token_ids: Sequence[int], *, exact: bool) -> int:
        """Return how many leading tokens of a prompt can be reused from this cache."""
        limit = min(len(token_ids), self.count_usable_tokens(exact=exact))
        shared = next((i for i in range(limit) if self.token_ids[i] != token_ids[i]), limit)
        return shared // PREFILL_CHUNK_TOKENS * PREFILL_CHUNK_TOKENS if exact else shared

    def count_usable_tokens(self, *, exact: bool) -> int:
        """Return how many of its tokens another prompt could reuse."""
        return self.num_in_chunks if exact else len(self.token_ids)


class IdleCacheChoice(NamedTuple):
    """An idle cache and how many of its tokens are reused; `place` is None for a new cache."""

    place: int | None
    num_reused: int


def choose_idle_cache(
    idle: Sequence[KeptTokens], token_ids: Sequence[int], *, exact: bool, may_add: bool
) -> IdleCacheChoice:
    """Choose a cache for a prompt; `idle` begins with the cache that has been idle longest.

    It takes the cache that shares most with the prompt, unless more of it would be lost than
    reused: conversations often begin alike and then differ. Otherwise it takes a cache that is of
    no use to any prompt, then a new one (`may_add`), then the one that has been idle longest.
    """
    shared = [kept.count_reusable_tokens(token_ids, exact=exact) for kept in idle]
    usable = [kept.count_usable_tokens(exact=exact) for kept in idle]
    best = max(range(len(idle)), key=lambda place: (shared[place], -usable[place]), default=None)
    if best is not None and shared[best] and usable[best] - shared[best] <= shared[best]:
        return IdleCacheChoice(best, shared[best])
    useless = [place for place, num_usable in enumerate(usable) if not num_usable]
    if useless:
        return IdleCacheChoice(useless[-1], 0)  # its memory was used most recently
    return IdleCacheChoice(None, 0) if may_add or not idle else IdleCacheChoice(0, shared[0])


_FIRST_TOKENS: Final = 16  # the first piece, if sizes are free; it shows what reading costs
# later pieces are at least this large: smaller ones would take longer in total
_MIN_TOKENS: Final = 32
_PIECE_S: Final = 0.05  # seconds; a piece grows as long as it takes less than half of this


def prefill_prompt(
    session: TokenSession,
    token_ids: Sequence[int],
    cancelled: Callable[[], bool] | None = None,
    *,
    exact: bool = True,
) -> None:
    """Let an empty session read a prompt in pieces, until it is read or `cancelled()` is true.

    An exact session reads pieces of PREFILL_CHUNK_TOKENS. Drafts read small pieces if reading is
    slow.
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
