"""What a draft says follows the confirmed tokens, and how long it takes."""

from __future__ import annotations

import pytest

from llm_spec.measure.row_stats import RowCallStats
from llm_spec.strategies.rows.drafted_tokens import DraftedTokens


class Draft:
    """One that writes a token each 3 ms, 10 ms after it was begun, by a clock of its own."""

    def __init__(self) -> None:
        self.stats = RowCallStats()
        self.drafted = DraftedTokens(self.stats, 0.0)
        self.now_s = 0.0

    def begin(self) -> None:
        self.drafted.record_restart(self.now_s)
        self.now_s += 0.007

    def write(self, *token_ids: int) -> None:
        for token_id in token_ids:
            self.now_s += 0.003
            ids, seconds = [*self.drafted.ids, token_id], [*self.drafted.seconds, 0.003]
            self.drafted.update(ids, seconds, self.now_s, is_idle=False, is_exhausted=False)


def test_right_tokens_leave_the_others() -> None:
    draft = Draft()
    draft.begin()
    draft.write(1, 2, 3)
    assert [draft.drafted.confirm_token(token_id) for token_id in (1, 2)] == [1, 2]
    assert (draft.drafted.ids, draft.drafted.seconds) == ([3], [0.003])


def test_a_wrong_token_ends_all_that_was_guessed_after_it() -> None:
    draft = Draft()
    draft.begin()
    draft.write(1, 2, 3)
    assert draft.drafted.confirm_token(9) == 1
    assert (draft.drafted.ids, draft.drafted.seconds) == ([], [])
    assert draft.drafted.confirm_token(2) is None


def test_times_of_starts_and_tokens_are_kept_apart() -> None:
    """The very first start is no measure: what it waits for is the endpoint, not the draft."""
    draft = Draft()
    draft.begin()
    draft.write(1, 2, 3)
    assert draft.stats.draft_start_s.value is None
    assert draft.stats.draft_token_s == pytest.approx(0.003)
    draft.drafted.confirm_token(9)
    draft.now_s += 5.0  # nobody asks it
    draft.begin()
    draft.write(4, 5)
    assert draft.stats.draft_start_s.value == pytest.approx(0.010)
    assert draft.stats.draft_token_s == pytest.approx(0.003)
