"""TargetSpeedBaseline: how long the target takes alone, measured.

A server is timed by answers of its own (`stream_timing.py`), a model in this process by its plain steps: rounds without
a draft. Two figures come of that. The planner decides by an estimate (`estimate_answer_s`, `estimate_plain_steps_s`).
People are told a range (`find_answer_range_s`, `find_plain_steps_range_s`), and only where the evidence carries one:
what was measured is recent, enough and steady, so that neither side of the comparison has hiccups that the other lacks.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Final, TypeAlias

from llm_spec.contract.events import Round
from llm_spec.contract.request import ChatRequest
from llm_spec.measure.estimates import ForwardCostLine, RobustTokenCostAverage

__all__ = ["MIN_BASELINE_TOKENS", "SecondsRange", "TargetSpeedBaseline", "count_prompt_characters"]

SecondsRange: TypeAlias = tuple[float, float]  # the least and the most

MIN_BASELINE_TOKENS: Final = 4  # of a stream after its first piece, undisturbed, to give the target's speed
_ANSWER_HALF_LIFE: Final = 4.0  # half-lives: of answers …
_STEP_HALF_LIFE: Final = 128.0  # … and of plain steps
_WANTED_STEPS: Final = 8  # the first few are slow: buffers are new and caches cold
_MIN_STEPS: Final = 5  # of which so many tell something: an answer may end before it has taken all
_RECENT: Final = 16  # plain steps, rounds with a draft, and answers, from which a range comes
_MAX_DEVIATION: Final = 0.25  # of the time of recent rounds: by so much they may miss what such rounds take, …
_MAX_SPREAD: Final = 1.6  # … and so far apart may steps or answers be, without saying that something disturbed them
# Margins below and above what was measured. Steps between drafts are slower than steps that follow one another: by 8 %
# in the median of 20 processes. The margins are such that nine ranges in ten hold the ratio of paired answers.
_STEP_MARGINS: Final = (0.3, 0.1)
_ANSWER_MARGINS: Final = (0.15, 0.15)
_MEASURED_SHARE: Final = 0.5  # of an answer's tokens, to be measured in one that says how long it takes
_MAX_HICCUP: Final = 1.25  # times a step's usual time, as much as one counts where nothing else is written
_CHARACTERS: Final = 100  # of a prompt; the first token's time is a line over its length …
_POSITIONS: Final = 100  # … and a plain step's over the tokens before it


class TargetSpeedBaseline:
    """The target's own speed, in seconds. One per decoder, on one event loop."""

    def __init__(self) -> None:
        self.is_counted = True  # whether the target counts its tokens; if not, those of answers are pieces of text
        self._answers, self._answers_alone = _AnswerTimes(), _AnswerTimes()  # all, and those without a draft beside
        self._piece_tokens = RobustTokenCostAverage(half_life=_ANSWER_HALF_LIFE)
        self._plain_steps: dict[int, _PlainSteps] = {}  # by how many answers were written at the same time

    def forget_answers_beside_draft(self) -> None:
        """The draft makes the target slower, so that answers beside it were not of the target alone."""
        self._answers = deepcopy(self._answers_alone)

    @property
    def num_answers(self) -> int:
        """Answers that were measured."""
        return self._answers.number

    @property
    def num_steps(self) -> int:
        """Plain steps that were measured."""
        return sum(steps.number for steps in self._plain_steps.values())

    def count_plain_steps_wanted(self, num_concurrent: float = 1.0) -> int:
        """Plain steps still to be taken, to tell something of an answer beside so many others, itself included."""
        steps = self._plain_steps.get(_round_concurrency(num_concurrent))
        return _WANTED_STEPS if steps is None else max(0, _WANTED_STEPS - steps.number)

    @property
    def tokens_per_piece(self) -> float:
        """Tokens of a piece of the target's text (`drafting/text_pieces.py`); 1 before it was measured."""
        return self._piece_tokens.value or 1.0

    @property
    def is_measured(self) -> bool:
        """Whether a whole answer of the target's own was measured, first token and others."""
        return self._answers.token_s.value is not None

    def add_answer(
        self,
        num_characters: int,
        num_tokens: int,
        first_s: float,
        rest_s: float,
        *,
        num_measured: int | None = None,
        is_beside_draft: bool = False,
    ) -> None:
        """Add an answer of the target alone.

        is_beside_draft: a draft was running at the same time, but was not known to slow the target down.
        first_s: from the request, of `num_characters`, to the first piece. rest_s: from there to the last piece.
        num_measured: tokens by which rest_s is known; None: its own.
        """
        for answers in (self._answers,) if is_beside_draft else (self._answers, self._answers_alone):
            answers.add(num_characters, num_tokens, first_s, rest_s, num_measured=num_measured or num_tokens)

    def add_plain_steps(self, num_prompt_tokens: int, rounds: Sequence[Round], *, num_concurrent: float = 1.0) -> None:
        """Add the plain steps among an answer's rounds; so many answers were written at the same time."""
        level, position = _round_concurrency(num_concurrent), num_prompt_tokens
        steps = self._plain_steps.setdefault(level, _PlainSteps(is_alone=level == 1))
        for report in rounds:
            if not report.num_draft_tokens:  # what a draft took that had nothing to say is not the target's
                steps.number += 1
                steps.cost_s.update(1 + position // _POSITIONS, report.verify_s)
                steps.recent_s.append(report.verify_s)
            else:
                steps.recent_drafted.append((report.num_draft_tokens, report.draft_s + report.verify_s))
            position += report.num_emitted_tokens

    def add_tokens_per_piece(self, num_pieces: int, num_tokens: int) -> None:
        """So many pieces of text had so many tokens."""
        if num_pieces:
            self._piece_tokens.update(num_pieces, num_tokens)

    def estimate_answer_s(self, num_characters: int, num_tokens: int) -> float | None:
        """How long the target's own stream takes for so many tokens; None: not measured yet."""
        return self._answers.estimate_s(num_characters, num_tokens)

    def estimate_plain_steps_s(
        self, num_prompt_tokens: int, num_tokens: int, *, num_concurrent: float = 1.0
    ) -> float | None:
        """How long so many plain steps take after a prompt, beside so many others; None: not measured yet."""
        steps = self._plain_steps.get(_round_concurrency(num_concurrent))
        if steps is None or steps.number < _MIN_STEPS:
            return None
        cost_s = steps.cost_s
        middle = (num_prompt_tokens + num_tokens / 2.0) / _POSITIONS
        return num_tokens * (cost_s.base_s + cost_s.per_token_s * middle)

    def find_answer_range_s(self, num_characters: int, num_tokens: int) -> SecondsRange | None:
        """Between what the same takes at least and at most; None: what was measured does not tell."""
        estimate_s = self.estimate_answer_s(num_characters, num_tokens)
        recent_s = self._answers.list_recent_s(num_tokens)
        if estimate_s is None or not recent_s:
            return None
        return _widen_range_around(estimate_s, recent_s, _ANSWER_MARGINS)

    def find_plain_steps_range_s(
        self, num_prompt_tokens: int, num_tokens: int, *, num_concurrent: float = 1.0
    ) -> SecondsRange | None:
        """Between what the same steps take at least and at most; None: what was measured does not tell."""
        estimate_s = self.estimate_plain_steps_s(num_prompt_tokens, num_tokens, num_concurrent=num_concurrent)
        if estimate_s is None:
            return None
        steps = self._plain_steps[_round_concurrency(num_concurrent)]
        if steps.measure_deviation() > _MAX_DEVIATION:
            return None
        return _widen_range_around(estimate_s, [num_tokens * seconds for seconds in steps.recent_s], _STEP_MARGINS)


class _AnswerTimes:
    """What answers took: the first token, and each of the others."""

    def __init__(self) -> None:
        self.number = 0
        # without evidence for a slope there is none
        self.first_s = ForwardCostLine(half_life=_ANSWER_HALF_LIFE, prior_ratio=1.0)
        self.token_s = RobustTokenCostAverage(half_life=_ANSWER_HALF_LIFE)
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_RECENT)  # num_measured, first_s, token_s

    def add(self, num_characters: int, num_tokens: int, first_s: float, rest_s: float, *, num_measured: int) -> None:
        self.number += 1
        if num_tokens > 1:
            self._recent.append((num_measured, first_s, rest_s / (num_tokens - 1)))
        self.first_s.update(1 + num_characters // _CHARACTERS, first_s)
        if num_tokens > 1:
            self.token_s.update(num_tokens - 1, rest_s)

    def estimate_s(self, num_characters: int, num_tokens: int) -> float | None:
        token_s = self.token_s.value
        if not self.number or (num_tokens > 1 and token_s is None):
            return None
        first_s = self.first_s.base_s + self.first_s.per_token_s * (num_characters // _CHARACTERS)
        return first_s + max(0, num_tokens - 1) * (token_s or 0.0)

    def list_recent_s(self, num_tokens: int) -> list[float]:
        """What so many tokens would take as those of each recent answer of which enough was measured."""
        return [
            first_s + (num_tokens - 1) * token_s
            for num_measured, first_s, token_s in self._recent
            if num_measured >= _MEASURED_SHARE * num_tokens
        ]


class _PlainSteps:
    """Plain steps at one level of concurrency: how many, and what each takes.

    `recent_s`, `recent_drafted`: the last ones, and the last rounds with a draft (drafted tokens, seconds).

    `is_alone`: beside no other answer. A hiccup of this machine counts then, but one among the few steps of an answer
    must not tell the whole figure. Steps beside others wait for those every now and then, and the mean is what counts.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.number = 0
        self.cost_s = ForwardCostLine(
            half_life=_STEP_HALF_LIFE, prior_ratio=1.0, max_outlier=_MAX_HICCUP if is_alone else math.inf
        )
        self.recent_s: deque[float] = deque(maxlen=_RECENT)
        self.recent_drafted: deque[tuple[int, float]] = deque(maxlen=_RECENT)

    def measure_deviation(self) -> float:
        """By how much of their time recent rounds miss the line on which undisturbed ones lie: a hiccup shows there.

        It begins at the median of plain steps, and its slope is the median of those from there to each other round.
        """
        base_s = statistics.median(self.recent_s)
        drafted = self.recent_drafted
        slope_s = statistics.median([(seconds - base_s) / num_drafted for num_drafted, seconds in drafted] or [0.0])
        missed_s = sum(abs(seconds - base_s) for seconds in self.recent_s)
        missed_s += sum(abs(seconds - base_s - slope_s * num_drafted) for num_drafted, seconds in drafted)
        total_s = sum(self.recent_s) + sum(seconds for _, seconds in drafted)
        return missed_s / total_s if total_s else math.inf


def _widen_range_around(
    estimate_s: float, measured_s: Iterable[float], margins: tuple[float, float]
) -> SecondsRange | None:
    """From the least to the most that was measured, and margins; None: these are far apart, or do not have it."""
    ordered = sorted(measured_s)
    num_outside = len(ordered) // 5  # at either end: one of many does not make the range
    least_s, most_s = ordered[num_outside], ordered[-1 - num_outside]
    if most_s > _MAX_SPREAD * least_s:
        return None
    least_s, most_s = least_s / (1.0 + margins[0]), most_s * (1.0 + margins[1])
    return (least_s, most_s) if least_s <= estimate_s <= most_s else None


def _round_concurrency(num_concurrent: float) -> int:
    return max(1, round(num_concurrent))


def count_prompt_characters(request: ChatRequest) -> int:
    """Characters of a request's text: how long its prompt is, roughly, at no cost."""
    return sum(len(message.text) for message in request.messages) + len(request.prefix)
