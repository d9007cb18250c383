"""What a cache holds when its answer has ended, and how a prompt is read into one, piece by piece.

With what is kept the next turn of a conversation reads only what is new, and a draft that is restarted only what the
target has written meanwhile. Kept is what gives the same bits as reading it again: for exact sessions whole chunks of a
prompt, read from the same position in one pass. What was read in rounds stood beside other rows, and may differ in the
last bit; to a draft that does not matter.
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

# Of a prompt, read in one pass; chunks begin at multiples of it, with and without speculation, so that caches agree.
PREFILL_CHUNK_TOKENS: Final = 256


@dataclass(eq=False, slots=True, kw_only=True)
class KeptTokens:
    """The tokens of one cache, in order; `num_in_chunks`: how many of the first an exact session read in chunks."""

    token_ids: list[int] = field(default_factory=list[int])
    num_in_chunks: int = 0

    def record_tokens(self, token_ids: Sequence[int], *, exact: bool) -> None:
        """Note tokens that have been read in one pass; `exact`: by a session whose bits others may go on with."""
        if exact and self.num_in_chunks == len(self.token_ids) and len(token_ids) == PREFILL_CHUNK_TOKENS:
            self.num_in_chunks += PREFILL_CHUNK_TOKENS
        self.token_ids.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Forget all but the first tokens."""
        del self.token_ids[length:]
        self.num_in_chunks = min(self.num_in_chunks, length // PREFILL_CHUNK_TOKENS * PREFILL_CHUNK_TOKENS)

    def count_reusable_tokens(self, token_ids: Sequence[int], *, exact: bool) -> int:
        """How many leading tokens of a prompt it holds already, in such a way that they may be used."""
        limit = min(len(token_ids), self.count_usable_tokens(exact=exact))
        shared = next((i for i in range(limit) if self.token_ids[i] != token_ids[i]), limit)
        return shared // PREFILL_CHUNK_TOKENS * PREFILL_CHUNK_TOKENS if exact else shared

    def count_usable_tokens(self, *, exact: bool) -> int:
        """How many of its tokens some prompt could begin with."""
        return self.num_in_chunks if exact else len(self.token_ids)


class IdleCacheChoice(NamedTuple):
    """The place of the idle cache to take (None: a new one), and how many of its tokens stay; the others are lost."""

    place: int | None
    num_reused: int


def choose_idle_cache(
    idle: Sequence[KeptTokens], token_ids: Sequence[int], *, exact: bool, may_add: bool
) -> IdleCacheChoice:
    """The cache for a prompt, among those that are idle, the longest idle one first; `may_add`: there may be one more.

    That which shares most with the prompt, unless more of it would be lost than is reused: conversations often begin
    alike, and go on. Else one that is of no use to any; else a new one; else the longest idle.
    """
    shared = [kept.count_reusable_tokens(token_ids, exact=exact) for kept in idle]
    usable = [kept.count_usable_tokens(exact=exact) for kept in idle]
    best = max(range(len(idle)), key=lambda place: (shared[place], -usable[place]), default=None)
    if best is not None and shared[best] and usable[best] - shared[best] <= shared[best]:
        return IdleCacheChoice(best, shared[best])
    useless = [place for place, num_usable in enumerate(usable) if not num_usable]
    if useless:
        return IdleCacheChoice(useless[-1], 0)  # its memory was used last
    return IdleCacheChoice(None, 0) if may_add or not idle else IdleCacheChoice(0, shared[0])


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
