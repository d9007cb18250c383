"""What of a cache another prompt may begin with, and which of several caches it gets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llm_spec.local.caches import PREFILL_CHUNK_TOKENS as CHUNK
from llm_spec.local.caches import KeptTokens, choose_idle_cache

PROMPT = list(range(3 * CHUNK))


def keep(*passes: Sequence[int], exact: bool = True) -> KeptTokens:
    kept = KeptTokens()
    for token_ids in passes:
        kept.record_tokens(token_ids, exact=exact)
    return kept


def test_exact_sessions_begin_with_whole_chunks() -> None:
    """Read one after another from the start, each in one pass; others with whatever there is."""
    kept = keep(PROMPT[:CHUNK], PROMPT[CHUNK : 2 * CHUNK], PROMPT[2 * CHUNK : 2 * CHUNK + 9])
    for token_ids, exact, expected in [
        (PROMPT, True, 2 * CHUNK),
        (PROMPT, False, 2 * CHUNK + 9),
        (PROMPT[: CHUNK + 5], True, CHUNK),
        ([*PROMPT[: CHUNK + 5], -1], False, CHUNK + 5),
        ([*PROMPT[:5], -1], True, 0),
        ([-1, *PROMPT], False, 0),
        ([], False, 0),
    ]:
        assert kept.count_reusable_tokens(token_ids, exact=exact) == expected


def test_a_chunk_after_other_passes_counts_as_they_do() -> None:
    """It began elsewhere."""
    kept = keep(PROMPT[:CHUNK], PROMPT[CHUNK : CHUNK + 1], PROMPT[CHUNK + 1 : 2 * CHUNK + 1])
    assert kept.count_reusable_tokens(PROMPT, exact=True) == CHUNK


def test_what_a_draft_has_read_is_nothing_that_an_exact_session_begins_with() -> None:
    """Its passes may have other bits."""
    kept = keep(PROMPT[:CHUNK], PROMPT[CHUNK : 2 * CHUNK], exact=False)
    assert kept.count_reusable_tokens(PROMPT, exact=True) == 0
    assert kept.count_reusable_tokens(PROMPT, exact=False) == 2 * CHUNK


@pytest.mark.parametrize(("length", "expected"), [(2 * CHUNK, 2 * CHUNK), (2 * CHUNK - 1, CHUNK), (0, 0)])
def test_a_chunk_that_is_cut_is_none(length: int, expected: int) -> None:
    kept = keep(PROMPT[:CHUNK], PROMPT[CHUNK : 2 * CHUNK])
    kept.truncate(length)
    kept.record_tokens(PROMPT[length : 2 * CHUNK], exact=True)
    assert kept.count_reusable_tokens(PROMPT, exact=True) == expected
    assert kept.count_reusable_tokens(PROMPT, exact=False) == 2 * CHUNK


def test_the_cache_that_shares_most_is_taken() -> None:
    idle = [keep(PROMPT[:9]), keep(PROMPT[:CHUNK]), keep(PROMPT[:20])]
    assert choose_idle_cache(idle, PROMPT, exact=False, may_add=True) == (1, CHUNK)
    assert choose_idle_cache(idle, PROMPT[:15], exact=False, may_add=True) == (2, 15)  # as much, and less is lost
    assert choose_idle_cache(idle[::2], PROMPT, exact=False, may_add=True) == (1, 20)
    assert choose_idle_cache(idle, PROMPT, exact=True, may_add=True) == (1, CHUNK)


def test_a_conversation_keeps_its_cache_where_another_begins_alike() -> None:
    """As with one system prompt: each first turn would cut the other's cache to that, which then is read again."""
    long, other = [*PROMPT[:CHUNK], *[-1] * 7 * CHUNK], [*PROMPT[:CHUNK], *[-2] * CHUNK]
    kept = keep(*[long[start : start + CHUNK] for start in range(0, len(long), CHUNK)])
    for exact in (True, False):
        assert choose_idle_cache([kept], other, exact=exact, may_add=True) == (None, 0)
        assert choose_idle_cache([kept, keep()], other, exact=exact, may_add=False) == (1, 0)
        assert choose_idle_cache([kept], other, exact=exact, may_add=False) == (0, CHUNK)
        assert choose_idle_cache([kept], long, exact=exact, may_add=True) == (0, 8 * CHUNK)
        assert choose_idle_cache([kept], long[: 4 * CHUNK], exact=exact, may_add=True) == (0, 4 * CHUNK)


def test_conversations_keep_their_caches_where_there_is_room() -> None:
    """Those that nothing could begin with are taken first, the last one of them; then the longest idle."""
    one, other = keep(PROMPT[:CHUNK]), keep([-2] * CHUNK)
    short, empty = keep([5, 6, 7]), keep()
    for idle, exact, may_add, expected in [
        ([one, short, other], True, True, 1),
        ([one, short, other], False, True, None),
        ([one, short, empty, other], False, False, 2),
        ([short, empty, one], True, True, 1),
        ([one, other], True, True, None),
        ([one, other], True, False, 0),
        ([], True, False, None),
    ]:
        choice = choose_idle_cache(idle, [-1] * CHUNK, exact=exact, may_add=may_add)
        assert choice == (expected, 0)
