"""Who writes a position of sampled text: streams and rows overlap, and the law stays the target's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from scipy.stats import chi2
from support.markov import LAW, LikelyDraft, make_markov_target, sampled_text, triples_p_value

from llm_spec import ChatRequest
from llm_spec.strategies.rows import rounds as server_rounds
from llm_spec.strategies.rows.schedule import ConfirmedToken, RowScheduler
from llm_spec.testing.clock import run_virtual

STEP_S = 0.025
CALL_S = 0.045  # of rows: nearly two steps of the stream


def draw(
    num_answers: int,
    num_tokens: int,
    patterns: Sequence[str] = ("aabbbc", "b", "abc", "cb", "a"),
    *,
    num_places: int = 4,
) -> list[str]:
    async def texts() -> list[str]:
        request = ChatRequest.create("tell", temperature=1.0, max_tokens=num_tokens)
        target = make_markov_target(11, call_s=STEP_S, row_s=CALL_S)
        drafts = [LikelyDraft(patterns[n % len(patterns)]) for n in range(num_answers)]
        return [await sampled_text(target, request, draft, max_concurrent_streams=num_places) for draft in drafts]

    return run_virtual(texts())


def answers_p_value(texts: Sequence[str]) -> float:
    """Chi-square of whole answers of three tokens against the exact law."""
    counts, probs, statistic = Counter(texts), LAW, 0.0
    for a, b, c in product(range(3), repeat=3):
        expected = len(texts) * probs[0][a] * probs[a][b] * probs[b][c]
        statistic += (counts["abc"[a] + "abc"[b] + "abc"[c]] - expected) ** 2 / expected
    return float(chi2.sf(statistic, 26))


class FasterWins(RowScheduler):
    """The planted fault: nobody owns a position; rows that agree with the draft are taken, else the stream's token."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "is_greedy": True})

    def take_confirmed(self, now_s: float) -> ConfirmedToken | None:
        at = len(self.ids)
        call = next((call for call in self.calls if call.start <= at < call.end), None)
        if call is not None and call.tokens is not None and self.stream_at is not None:
            assumed_id = [*call.assumed_ids, None][at - call.base]
            if call.tokens[at - call.start].token_id != assumed_id:
                return None
        return super().take_confirmed(now_s)


class AsksAgain(RowScheduler):
    """The planted fault: a call whose first token is not the draft's is dropped, and the stream goes on."""

    def take_confirmed(self, now_s: float) -> ConfirmedToken | None:
        call = next((call for call in self.calls if call.tokens is not None and call.num_rows > 1), None)
        if call is not None and call.tokens is not None and call.tokens[0].token_id != call.assumed_ids[call.first]:
            self.calls.remove(call)
            self._dropped_calls.append(call)
        return super().take_confirmed(now_s)


SIZES = [(20, 300), (600, 6), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((60, 300), (1500, 6)))]


@pytest.mark.parametrize(("num_answers", "num_tokens"), SIZES)
def test_text_of_streams_and_rows_that_overlap_has_the_targets_law(num_answers: int, num_tokens: int) -> None:
    """Windows of three tokens are as likely as in the target, in long answers and in those that hardly begin."""
    assert triples_p_value(draw(num_answers, num_tokens)) > 1e-3


def test_with_one_place_streams_and_rows_by_turns_have_the_targets_law() -> None:
    """A stream ends where rows begin, and begins where they end."""
    assert triples_p_value(draw(200, 60, num_places=1)) > 1e-3


def test_a_call_that_is_asked_again_where_the_draft_was_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the draft likes becomes likelier."""
    monkeypatch.setattr(server_rounds, "RowScheduler", AsksAgain)
    assert triples_p_value(draw(200, 60, num_places=1)) < 1e-6


def test_the_law_holds_where_the_fault_would_show() -> None:
    """The very answers that the next test spoils."""
    assert answers_p_value(draw(1200, 3, ["bbb"])) > 1e-3


def test_to_take_whichever_is_first_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the draft likes becomes likelier, since rows are first where they agree with it."""
    monkeypatch.setattr(server_rounds, "RowScheduler", FasterWins)
    assert answers_p_value(draw(1200, 3, ["bbb"])) < 1e-6
