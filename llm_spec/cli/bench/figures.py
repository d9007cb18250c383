"""Figures from pairs of times: ratios, their median and its confidence interval. No I/O.

The interval of a median uses order statistics (the sign test inverted): from the k-th smallest to
the k-th largest ratio, with k such that they hold the true median in at least 95 % of all samples.
It assumes nothing about the noise and draws no random numbers. The percentile bootstrap of a
median, the usual choice, also ends at order statistics, but they are too close. With 6 to 60 ratios
of normal, heavy-tailed or spiky noise it held the true median in 91 to 95 % of simulated samples;
this interval held it in 96 to 98 %. Ratios of sums have no interval: if single answers take much
longer than the others, a studentized bootstrap over pairs held them in only 87 %.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal, TypeAlias

from llm_spec.cli.bench.contenders import ContenderSpec
from llm_spec.cli.bench.prompts import BenchPrompt
from llm_spec.cli.bench.records import AnswerRecord, PromptBlockRecord
from llm_spec.decoder.entry_points import strip_credentials
from llm_spec.decoder.result import PlainReason
from llm_spec.measure.tokens import split_into_pieces

__all__ = [
    "CONFIDENCE",
    "MIN_UNITS",
    "NUM_FIRST",
    "BenchSummarizer",
    "CategoryRatio",
    "ContenderSummary",
    "LatencyFigures",
    "PromptRatio",
    "RatioEstimate",
    "SpeculationFigures",
    "SpeedupRatioFigures",
    "TextComparisonFigures",
    "TextDifference",
    "TimeFigures",
    "TokenFigures",
    "Verdict",
    "compare_answer_texts",
    "compute_median_ratio",
    "estimate_median_ratio",
    "find_first_difference",
    "find_median_interval_rank",
    "percentile",
]

CONFIDENCE: Final = 0.95
MIN_UNITS: Final = 6  # with fewer, even the smallest and the largest do not hold the median in 95 %


@dataclass(frozen=True, kw_only=True)
class RatioEstimate:
    """A median of ratios plain / contender and its 95 % interval.

    Above 1 the contender is faster. `low` and `high` are None if there are fewer than `MIN_UNITS`
    ratios.
    """

    ratio: float
    low: float | None
    high: float | None
    num_units: int

    @property
    def excludes_one(self) -> bool:
        """True if the interval excludes "as fast as plain"."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def estimate_median_ratio(ratios: Sequence[float]) -> RatioEstimate | None:
    """Return the median and its interval, or None without ratios."""
    if not ratios:
        return None
    ordered, rank = sorted(ratios), find_median_interval_rank(len(ratios))
    low, high = (None, None) if rank is None else (ordered[rank - 1], ordered[-rank])
    return RatioEstimate(ratio=compute_median_ratio(ratios), low=low, high=high, num_units=len(ordered))


def compute_median_ratio(ratios: Sequence[float]) -> float:
    """Return the median; of two middle values, their geometric mean.

    So the inverse ratios have the inverse median.
    """
    return math.exp(statistics.median(map(math.log, ratios)))


def find_median_interval_rank(num_values: int) -> int | None:
    """Return the rank k of the median's 95 % interval, or None if there are too few values.

    The interval goes from the k-th smallest to the k-th largest value. It misses the median if
    fewer than k values lie on one side of it, and each value lies there with probability 1/2.
    """
    num_outside, rank = 0, 0
    while True:
        num_outside += 2 * math.comb(num_values, rank)
        if num_outside / 2**num_values > 1 - CONFIDENCE:
            return rank or None
        rank += 1


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return a percentile, interpolated, or None without values."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


_EXCERPT: Final = 24  # characters before and after the difference


@dataclass(frozen=True, kw_only=True)
class TextDifference:
    """The first difference between an answer and plain's.

    - `character`, `word`: the first that differ, counted from 1.
    - `before`: the end of the text that both share.
    - `plain`, `other`: how each text continues; empty if it ends there.
    """

    id: str
    run: int
    turn: int
    character: int
    word: int
    before: str
    plain: str
    other: str


@dataclass(frozen=True, kw_only=True)
class TextComparisonFigures:
    """How many answers were compared with plain's, how many equal it, and the differences."""

    num_compared: int
    num_same: int
    differences: tuple[TextDifference, ...]


def compare_answer_texts(
    pairs: Sequence[tuple[AnswerRecord, AnswerRecord]], ids: Sequence[str]
) -> TextComparisonFigures:
    """Compare plain's answers with others to the same requests; `ids` are the prompts' ids."""
    found: list[TextDifference] = []
    for plain, other in pairs:
        difference = find_first_difference(plain, other, ids[plain.key.prompt])
        if difference is not None:
            found.append(difference)
    return TextComparisonFigures(num_compared=len(pairs), num_same=len(pairs) - len(found), differences=tuple(found))


def find_first_difference(plain: AnswerRecord, other: AnswerRecord, prompt_id: str) -> TextDifference | None:
    """Return the first difference of two answers, reasoning included, or None if they are equal."""
    ours, theirs = plain.reasoning + plain.text, other.reasoning + other.text
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    return TextDifference(
        id=prompt_id,
        run=plain.key.run,
        turn=plain.key.turn,
        character=at + 1,
        word=max(1, len(split_into_pieces(ours[: at + 1]))),
        before=ours[max(0, at - _EXCERPT) : at],
        plain=ours[at : at + _EXCERPT],
        other=theirs[at : at + _EXCERPT],
    )


Verdict: TypeAlias = Literal["reference", "faster", "slower", "no difference", "too few to tell", "failed"]
NUM_FIRST: Final = 10


@dataclass(frozen=True, kw_only=True)
class PromptRatio:
    """Plain's time for a prompt / the contender's: the median of its runs.

    `prompt` is the prompt's index.
    """

    prompt: int
    id: str
    category: str | None
    ratio: float


@dataclass(frozen=True, kw_only=True)
class CategoryRatio:
    """The median ratio of the prompts of one category."""

    category: str
    estimate: RatioEstimate


@dataclass(frozen=True, kw_only=True)
class SpeedupRatioFigures:
    """Times of plain / times of the contender, for the prompts that both have answered.

    - `median`: over units. A unit is a prompt, or a group of prompts that are answered at the same
      time; a group's ratio is one of throughput.
    - `totals`: the ratio of the summed times.
    - `first_ten`: the ratio for a decoder's first ten requests.
    - `clock_speedup`: the median over the answers for which the library reports a speedup;
      `reported_speedup` is the median of those reports.
    """

    median: RatioEstimate | None
    prompts: tuple[PromptRatio, ...]
    categories: tuple[CategoryRatio, ...]
    totals: float | None
    first_ten: float | None
    reported_speedup: float | None
    clock_speedup: float | None

    @property
    def worst_prompt(self) -> PromptRatio | None:
        """The prompt with the smallest ratio."""
        return min(self.prompts, key=lambda prompt: prompt.ratio, default=None)

    @property
    def best_prompt(self) -> PromptRatio | None:
        """The prompt with the largest ratio."""
        return max(self.prompts, key=lambda prompt: prompt.ratio, default=None)


@dataclass(frozen=True, kw_only=True)
class LatencyFigures:
    """Median and 90th percentile of one time, in seconds; None if no answer has it."""

    median_s: float | None
    p90_s: float | None

    @classmethod
    def from_times_s(cls, values: Iterable[float | None]) -> LatencyFigures:
        """Compute the figures of the values that are not None."""
        known = [value for value in values if value is not None]
        return cls(median_s=percentile(known, 50), p90_s=percentile(known, 90))


@dataclass(frozen=True, kw_only=True)
class TimeFigures:
    """Times of all answers.

    They are the time to the first token, the mean time between tokens, the longest pause and the
    whole time of an answer.
    """

    first: LatencyFigures
    between: LatencyFigures
    pause: LatencyFigures
    whole: LatencyFigures
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class SpeculationFigures:
    """How much was speculated.

    - `request_share`: the share of requests with speculation.
    - `accepted_share`: the share of the answers' tokens that were drafted and accepted.
    - `drafted_at`, `accepted_at`: `[n]` is the number of rounds that drafted, or accepted, a token
      at position n.
    """

    request_share: float
    accepted_share: float
    acceptance_rate: float | None
    plain_reasons: Mapping[PlainReason, int]
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TokenFigures:
    """Tokens of all answers, and what the target and the draft read and wrote for them.

    `cost` is the cost of target and draft, and `draft_cost` the draft's part, in the currency of
    the prices. Both are None if a price or a count is not known.
    """

    input: int
    cached_input: int
    output: int
    answers: int
    draft_input: int
    draft_output: int
    drafted: int
    accepted: int
    cost: float | None
    draft_cost: float | None


@dataclass(frozen=True, kw_only=True)
class ContenderSummary:
    """All figures of one contender.

    `failure` says why it was left out. Its answers before that count.
    """

    name: str
    kind: str
    target: str
    draft: str | None
    strategy: str
    verdict: Verdict
    failure: str | None
    num_answers: int
    errors: tuple[str, ...]
    ratios: SpeedupRatioFigures
    times: TimeFigures
    speculation: SpeculationFigures
    texts: TextComparisonFigures
    tokens: TokenFigures


_Turns: TypeAlias = "dict[tuple[int, int], list[AnswerRecord]]"  # by run and prompt


class BenchSummarizer:
    """Computes the figures of contenders from all records, compared with those of `plain`."""

    def __init__(
        self,
        prompts: Sequence[BenchPrompt],
        answers: Sequence[AnswerRecord],
        blocks: Sequence[PromptBlockRecord],
        plain: str,
    ) -> None:
        self._prompts = prompts
        self._plain = plain
        self._answers: dict[str, list[AnswerRecord]] = defaultdict(list)
        for answer in answers:
            self._answers[answer.key.contender].append(answer)
        self._blocks: dict[str, list[PromptBlockRecord]] = defaultdict(list)
        for block in blocks:
            self._blocks[block.contender].append(block)

    def summarize(self, spec: ContenderSpec, failure: str | None = None) -> ContenderSummary:
        """Return the figures of one contender, from the records so far."""
        answers = self._answers[spec.name]
        good = [answer for answer in answers if answer.error is None]
        errors = tuple(dict.fromkeys(answer.error for answer in answers if answer.error is not None))
        ratios = self._compare_times_with_plain(spec.name)
        return ContenderSummary(
            name=spec.name,
            kind=spec.kind,
            target=strip_credentials(spec.target),
            draft=None if spec.draft is None else strip_credentials(spec.draft),
            strategy=spec.strategy,
            verdict=_decide_speedup_verdict(spec, ratios.median, failure),
            failure=failure,
            num_answers=len(good),
            errors=errors,
            ratios=ratios,
            times=_summarize_times(good, self._blocks[spec.name]),
            speculation=_summarize_speculation(good),
            texts=compare_answer_texts(
                self._pair_with_plain_answers(spec.name), [prompt.id for prompt in self._prompts]
            ),
            tokens=_summarize_tokens(good),
        )

    # ----------------------------------------------------------------------------- pairs with plain

    def _compare_times_with_plain(self, name: str) -> SpeedupRatioFigures:
        pairs = self._pair_with_plain_answers(name)
        by_prompt = self._find_prompt_ratios(name)
        reporting = [(plain, other) for plain, other in pairs if other.reported_speedup is not None]
        return SpeedupRatioFigures(
            median=estimate_median_ratio(self._find_block_ratios(name)),
            prompts=by_prompt,
            categories=self._find_category_ratios(by_prompt),
            totals=_divide_total_times(pairs),
            first_ten=self._compare_first_requests(name),
            reported_speedup=_compute_median_or_none(
                [other.reported_speedup for _, other in reporting if other.reported_speedup]
            ),
            clock_speedup=_compute_median_or_none([plain.total_s / other.total_s for plain, other in reporting]),
        )

    def _pair_with_plain_answers(self, name: str) -> list[tuple[AnswerRecord, AnswerRecord]]:
        """Return pairs of plain's and the contender's answers, in the order of the prompts."""
        plain = {_get_request_key(answer): answer for answer in self._answers[self._plain] if answer.error is None}
        others = {_get_request_key(answer): answer for answer in self._answers[name] if answer.error is None}
        return [(plain[request], others[request]) for request in sorted(plain.keys() & others.keys())]

    def _find_prompt_ratios(self, name: str) -> tuple[PromptRatio, ...]:
        """Return a ratio for each prompt that both have answered completely.

        The time of a run is the sum of the conversation's turns.
        """
        plain, other = _group_turns(self._answers[self._plain]), _group_turns(self._answers[name])
        ratios: dict[int, list[float]] = defaultdict(list)
        for run, prompt in sorted(plain.keys() & other.keys()):
            ours, theirs = plain[run, prompt], other[run, prompt]
            if len(ours) == len(theirs) and all(answer.error is None for answer in (*ours, *theirs)):
                ratios[prompt].append(sum(a.total_s for a in ours) / sum(a.total_s for a in theirs))
        return tuple(
            PromptRatio(
                prompt=prompt,
                id=self._prompts[prompt].id,
                category=self._prompts[prompt].category,
                ratio=compute_median_ratio(ratios[prompt]),
            )
            for prompt in sorted(ratios)
        )

    def _find_block_ratios(self, name: str) -> list[float]:
        """Return a ratio for each group of prompts: of the times until all were answered."""
        plain, other = self._sum_block_times(self._plain), self._sum_block_times(name)
        ratios: dict[int, list[float]] = defaultdict(list)
        for run, block in sorted(plain.keys() & other.keys()):
            ratios[block].append(plain[run, block] / other[run, block])
        return [compute_median_ratio(values) for values in ratios.values()]

    def _sum_block_times(self, name: str) -> dict[tuple[int, int], float]:
        """Return the times of groups by run and group.

        Groups with a failed or missing answer are left out.
        """
        sums: dict[tuple[int, int], float] = defaultdict(float)
        num_turns: Counter[tuple[int, int]] = Counter()
        for block in self._blocks[name]:
            sums[block.run, block.block] += block.total_s
            num_turns[block.run, block.block] += 1
        num_plain_turns = Counter((block.run, block.block) for block in self._blocks[self._plain])
        failed = {(a.key.run, a.key.block) for a in self._answers[name] if a.error is not None}
        return {
            unit: total
            for unit, total in sums.items()
            if unit not in failed and num_turns[unit] == num_plain_turns[unit]
        }

    def _find_category_ratios(self, by_prompt: Sequence[PromptRatio]) -> tuple[CategoryRatio, ...]:
        ratios: dict[str, list[float]] = defaultdict(list)
        for prompt in by_prompt:
            if prompt.category is not None:
                ratios[prompt.category].append(prompt.ratio)
        estimates = {category: estimate_median_ratio(values) for category, values in ratios.items()}
        return tuple(CategoryRatio(category=c, estimate=estimate) for c, estimate in estimates.items() if estimate)

    def _compare_first_requests(self, name: str) -> float | None:
        """Return the ratio for the first requests of each run, as the median of the runs."""
        by_run: dict[int, list[tuple[AnswerRecord, AnswerRecord]]] = defaultdict(list)
        for pair in self._pair_with_plain_answers(name):
            by_run[pair[0].key.run].append(pair)
        ratios = [_divide_total_times(pairs[:NUM_FIRST]) for pairs in by_run.values()]
        return _compute_median_or_none([ratio for ratio in ratios if ratio is not None])


def _decide_speedup_verdict(spec: ContenderSpec, estimate: RatioEstimate | None, failure: str | None) -> Verdict:
    if spec.kind == "plain":
        return "failed" if failure is not None else "reference"
    if estimate is None:
        return "failed"
    if estimate.num_units < MIN_UNITS:
        return "failed" if failure is not None else "too few to tell"
    if not estimate.excludes_one:
        return "no difference"
    return "faster" if estimate.ratio > 1 else "slower"


def _get_request_key(answer: AnswerRecord) -> tuple[int, int, int, int]:
    return answer.key.run, answer.key.block, answer.key.turn, answer.key.prompt


def _group_turns(answers: Iterable[AnswerRecord]) -> _Turns:
    groups: _Turns = defaultdict(list)
    for answer in answers:
        groups[answer.key.run, answer.key.prompt].append(answer)
    return groups


def _divide_total_times(pairs: Sequence[tuple[AnswerRecord, AnswerRecord]]) -> float | None:
    return sum(plain.total_s for plain, _ in pairs) / sum(other.total_s for _, other in pairs) if pairs else None


def _compute_median_or_none(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _summarize_times(answers: Sequence[AnswerRecord], blocks: Sequence[PromptBlockRecord]) -> TimeFigures:
    taken_s = sum(block.total_s for block in blocks)
    return TimeFigures(
        first=LatencyFigures.from_times_s(answer.first_s for answer in answers),
        between=LatencyFigures.from_times_s(answer.between_s for answer in answers),
        pause=LatencyFigures.from_times_s(answer.longest_pause_s for answer in answers),
        whole=LatencyFigures.from_times_s(answer.total_s for answer in answers),
        tokens_per_s=sum(answer.answer_tokens for answer in answers) / taken_s if taken_s else None,
    )


def _summarize_speculation(answers: Sequence[AnswerRecord]) -> SpeculationFigures:
    given: list[PlainReason] = [answer.plain_reason for answer in answers if answer.plain_reason is not None]
    reasons = Counter(given)
    num_tokens = sum(answer.answer_tokens for answer in answers)
    drafted, accepted = (sum(getattr(a, name) for a in answers) for name in ("drafted_tokens", "accepted_tokens"))
    return SpeculationFigures(
        request_share=1 - sum(reasons.values()) / max(1, len(answers)) if answers else 0.0,
        accepted_share=accepted / num_tokens if num_tokens else 0.0,
        acceptance_rate=accepted / drafted if drafted else None,
        plain_reasons=dict(reasons.most_common()),
        drafted_at=_add_position_counts(answer.drafted_at for answer in answers),
        accepted_at=_add_position_counts(answer.accepted_at for answer in answers),
    )


def _add_position_counts(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))


def _summarize_tokens(answers: Sequence[AnswerRecord]) -> TokenFigures:
    def sum_known_counts(read: Callable[[AnswerRecord], int | None]) -> int:
        return sum(read(answer) or 0 for answer in answers)

    return TokenFigures(
        input=sum_known_counts(lambda a: a.input_tokens),
        cached_input=sum_known_counts(lambda a: a.cached_input_tokens),
        output=sum_known_counts(lambda a: a.output_tokens),
        answers=sum_known_counts(lambda a: a.answer_tokens),
        draft_input=sum_known_counts(lambda a: a.draft_input_tokens),
        draft_output=sum_known_counts(lambda a: a.draft_output_tokens),
        drafted=sum_known_counts(lambda a: a.drafted_tokens),
        accepted=sum_known_counts(lambda a: a.accepted_tokens),
        cost=_sum_costs_if_all_known([answer.cost for answer in answers]),
        draft_cost=_sum_costs_if_all_known([answer.draft_cost for answer in answers]),
    )


def _sum_costs_if_all_known(costs: Sequence[float | None]) -> float | None:
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known and len(known) == len(costs) else None
