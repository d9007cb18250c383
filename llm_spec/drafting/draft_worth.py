"""Whether a draft that takes time is worth it, from turn to turn and from answer to answer.

A draft has an account in plain steps of the target. Its turns add to it what they win and take from it what they lose,
reading the prompt included. Each round adds a little, so that a draft that was left out is tried again, soon if it has
won more than the account holds. So what all of its trials lose is bounded: by what the account holds at first, a small
part of the rounds, what was won before, and what one turn overdraws.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Final

from llm_spec.contract.token_model import DraftToken
from llm_spec.local.propose import get_confidence_before_sampling
from llm_spec.measure.estimates import AcceptanceEstimate, RobustTokenCostAverage

__all__ = ["DraftWorth"]

_FIRST_CREDIT: Final = 2.0  # plain steps that it may lose before it has won any
_MAX_CREDIT: Final = 4.0  # the same, whatever it has won: the rest, …
_MAX_SAVINGS: Final = 64.0  # … up to so many steps, …
_SAVINGS_SHARE: Final = 0.1  # … pays for trials, a part of a step in each round, where it is left out by bad luck
_TRIAL_CREDIT: Final = 1.0  # plain steps that a trial needs, beside what reading takes
_TRIAL_SHARE: Final = 0.03  # of a plain step that each round adds; half of that each time that it is left out, …
_LEAST_TRIAL_SHARE: Final = 0.004  # … but at least so much
_MAX_SURPRISE: Final = 4.0  # plain steps that a turn is charged at most, unless twice as much was expected: a hiccup
_KEEP: Final = 0.9  # of what a turn wins, from one to the next
_PRIOR_ACCEPTANCE: Final = 0.5
_PRIOR_WEIGHT: Final = 4.0  # tokens
_ACCEPTANCE_HALF_LIFE: Final = 48.0  # judged tokens
_TOKEN_COST_HALF_LIFE: Final = 16.0  # tokens
_READING_COST_HALF_LIFE: Final = 4.0  # answers
_PRIOR_READING_COST: Final = 0.02  # plain steps for each token of a prompt that is read at once


class DraftWorth:
    """One draft's account: of an answer that is being written, or as the last one left it.

    Before its first turn of an answer the draft has to read the prompt. It does so when its credit has room for that,
    or, without debts, as many turns as it could have had would have won what reading takes: as the answer's length is
    not known, it is taken to be half over at any time. It is left out once its credit is used up and it has not won of
    late, until there is room for another trial and for reading what it has missed.
    """

    def __init__(self) -> None:
        self.step_s: float | None = None  # a plain step of the target, as the last answer had it
        self._acceptance = AcceptanceEstimate(
            half_life=_ACCEPTANCE_HALF_LIFE, prior=_PRIOR_ACCEPTANCE, prior_weight=_PRIOR_WEIGHT
        )
        self._first_token_s = RobustTokenCostAverage(half_life=_TOKEN_COST_HALF_LIFE)  # of a turn, and …
        self._token_s = RobustTokenCostAverage(half_life=_TOKEN_COST_HALF_LIFE)  # … of each after it
        self._reading_steps = RobustTokenCostAverage(half_life=_READING_COST_HALF_LIFE)  # of a token
        self._gain = 0.0  # plain steps that a turn has won, of late
        self._credit = _FIRST_CREDIT
        self._savings = 0.0
        self._trial_share = _TRIAL_SHARE
        self._is_left_out = False
        self.begin_answer()

    def begin_answer(self) -> None:
        """Nothing is read yet."""
        self._num_waiting = 0  # turns that it could have had, but for reading
        self._num_read = 0  # tokens of the context, at its last turn
        self._begin_turn(0)

    def take_turn(self, num_context: int) -> bool:
        """Whether it may draft in this round, in which those before it do not; the context has so many tokens."""
        has_to_read = self._is_left_out or not self._num_read
        num_to_read = num_context - self._num_read if has_to_read else 0
        reading_steps = num_to_read * self._reading_cost
        needed = reading_steps + (_TRIAL_CREDIT if self._is_left_out else 0.0)
        self._add_credit(self._trial_share, most=max(needed, _FIRST_CREDIT))
        if self._is_left_out and self._credit > -_MAX_CREDIT:  # reading a long prompt for nothing is no bad luck
            spent = min(self._savings, _SAVINGS_SHARE)
            self._savings -= spent
            self._credit += spent
        expected = max(self._gain, 0.0) * self._num_waiting if self._credit >= 0.0 else 0.0
        if has_to_read and needed > self._credit + expected:
            self._num_waiting += 1
            return False
        self._is_left_out, self._num_read = False, num_context
        self._begin_turn(num_to_read)
        return True

    def draft_while_it_pays(self, guesses: Iterator[DraftToken], step_s: float | None) -> Iterator[DraftToken]:
        """Its tokens, until the next is likely to take more time than it saves of a step; one, if that is not known."""
        survival = 1.0
        started_s = perf_counter()
        try:
            for token in guesses:
                self._add_token(perf_counter() - started_s)
                yield token
                token_s, rate = self._estimate_later_token_s(), self._acceptance.rate
                confidence = get_confidence_before_sampling(token)
                survival *= rate if confidence is None else (rate + confidence) / 2.0
                if step_s is None or (token_s is not None and survival * rate * step_s < token_s):
                    return
                started_s = perf_counter()
        except Exception:
            self.turn_s += perf_counter() - started_s
            raise
        self.turn_s += perf_counter() - started_s

    def judge_tokens(self, num_right: int, *, is_wrong: bool) -> None:
        """Of the tokens that it drafted so many were right, and whether the next was wrong."""
        self._acceptance.update(num_right, rejected=is_wrong)

    def end_turn(self, won_s: float, step_s: float) -> None:
        """A round has ended in which it may have had a turn, and won so much time by it."""
        if self.turn_s and step_s:
            self._settle_turn(won_s, step_s)
        self._begin_turn(0)

    # ------------------------------------------------------------------------------------------ inside

    def _settle_turn(self, won_s: float, step_s: float) -> None:
        """Charge what the turn took, and decide whether the draft is left out."""
        reading_s = self._learn_reading_cost(step_s)
        most = max(_MAX_SURPRISE, 2.0 * self._estimate_turn_steps(step_s))
        won = max((won_s - self.turn_s) / step_s, -most)
        self._savings = min(_MAX_SAVINGS, self._savings + max(0.0, min(won, self._credit + won - _MAX_CREDIT)))
        self._add_credit(won)
        gain = max((won_s - (self.turn_s - reading_s)) / step_s, -most)
        self._gain = _KEEP * self._gain + (1.0 - _KEEP) * gain
        if self._credit >= _FIRST_CREDIT:
            self._trial_share = _TRIAL_SHARE
        elif self._credit <= 0.0 and self._gain <= 0.0:
            self._is_left_out = True
            self._trial_share = max(self._trial_share / 2.0, _LEAST_TRIAL_SHARE)

    @property
    def _reading_cost(self) -> float:
        """Plain steps for each token."""
        return _PRIOR_READING_COST if self._reading_steps.value is None else self._reading_steps.value

    def _begin_turn(self, num_to_read: int) -> None:
        self.turn_s = 0.0  # that this round has taken so far
        self._num_tokens = 0  # drafted
        self._first_s = 0.0  # of it, until there was a token
        self._num_to_read = num_to_read  # tokens before the first that is drafted

    def _add_token(self, seconds: float) -> None:
        if self._num_tokens:
            self._token_s.update(1, seconds)
        else:
            self._first_s = seconds
            if not self._num_to_read:
                self._first_token_s.update(1, seconds)
        self._num_tokens += 1
        self.turn_s += seconds

    def _learn_reading_cost(self, step_s: float) -> float:
        """Seconds of the turn in which the draft read, not wrote."""
        if not self._num_to_read:
            return 0.0
        usual_s = self._estimate_first_token_s()
        reading_s = max(self._first_s - (usual_s or 0.0), 0.0)
        if self._num_tokens and usual_s is not None:
            self._reading_steps.update(self._num_to_read, reading_s / step_s)
        return reading_s

    def _estimate_first_token_s(self) -> float | None:
        """Of a turn that has nothing to read; None: no token was timed that shows it."""
        first_s = self._first_token_s.value
        return self._token_s.value if first_s is None else first_s

    def _estimate_later_token_s(self) -> float | None:
        """Of each token after it."""
        later_s = self._token_s.value
        return self._first_token_s.value if later_s is None else later_s

    def _estimate_turn_steps(self, step_s: float) -> float:
        first_s = self._estimate_first_token_s() or 0.0
        later_s = self._estimate_later_token_s() or 0.0
        drafting_s = first_s + (self._num_tokens - 1) * later_s if self._num_tokens else 0.0
        return self._num_to_read * self._reading_cost + drafting_s / step_s

    def _add_credit(self, num_steps: float, *, most: float = _MAX_CREDIT) -> None:
        self._credit = min(self._credit + num_steps, max(most, self._credit))
