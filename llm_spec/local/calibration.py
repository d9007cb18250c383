"""How likely drafted tokens are right: what a draft says of them, held against what became of earlier ones.

A token's confidence is what its draft believes. Drafts believe too much or too little, each in its own way. So tokens
are counted by ranges of confidence, in the answer and, with less weight, in a decoder's earlier ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from llm_spec.measure.estimates import AcceptanceEstimate

__all__ = ["NUM_CONFIDENCE_RANGES", "CalibrationMemory", "ConfidenceCalibration", "ConfidenceRecord"]

_BORDERS: Final = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99)  # between ranges; finer where drafts are mostly sure
_RANGES: Final = [f"above_{border:g}" for border in (0.0, *_BORDERS)]
NUM_CONFIDENCE_RANGES: Final = len(_RANGES)
_PRIOR_WEIGHT: Final = 2.0  # tokens
_RANGE_WEIGHT: Final = 4.0  # tokens
_CONFIDENCE_WEIGHT: Final = 4.0  # tokens of earlier answers that weigh as much as what the draft says
_MAX_RECORD_WEIGHT: Final = 12.0  # tokens
_RECORD_HALF_LIFE: Final = 24.0  # tokens of a range, over answers
_START_SHARE: Final = 0.75  # of what confidence says, how often a token is right that follows a wrong one, …
_START_WEIGHT: Final = 3.0  # … counted as so many tokens, …
_START_HALF_LIFE: Final = 16.0  # … of which the older weigh less


class ConfidenceRecord(NamedTuple):
    """Of a range of confidence in earlier answers: the judged tokens, and the right ones; older ones weigh less."""

    num_judged: float = 0.0
    num_right: float = 0.0

    def limit_weight(self) -> ConfidenceRecord:
        """The same share of right tokens, of as many as may weigh in another answer."""
        if self.num_judged <= _MAX_RECORD_WEIGHT:
            return self
        return ConfidenceRecord(_MAX_RECORD_WEIGHT, _MAX_RECORD_WEIGHT * self.num_right / self.num_judged)


class ConfidenceCalibration:
    """One answer's drafted tokens so far.

    `half_life`: judged tokens after which a token's weight has halved. `prior`: the acceptance that is believed before
    there is evidence. `records`: of each range, from earlier answers; empty: there were none.
    """

    def __init__(self, *, half_life: float, prior: float, records: Sequence[ConfidenceRecord] = ()) -> None:
        self._all = AcceptanceEstimate(half_life=half_life, prior=prior, prior_weight=_PRIOR_WEIGHT)
        self._by_range = [
            AcceptanceEstimate(half_life=half_life, prior=prior, prior_weight=_RANGE_WEIGHT) for _ in _RANGES
        ]
        self._recorded = [record.limit_weight() for record in records or [ConfidenceRecord()] * NUM_CONFIDENCE_RANGES]
        self._is_draft_right = False  # by the last token of it that was judged
        self._num_right_starts = self._num_expected_starts = 0.0  # first tokens after a wrong one
        self._confidences: list[float | None] = []  # of the draft that was estimated last, …
        self._survivals = [1.0]  # … and what they came to

    @property
    def rate(self) -> float:
        """How often a token is right, whatever its confidence."""
        return self._all.rate

    def estimate_survivals(self, confidences: Sequence[float | None]) -> Sequence[float]:
        """[n]: the probability that the first n tokens of a draft are right.

        It is called after each token of a draft, so what the tokens before it came to is kept.
        """
        num_known = len(self._confidences)
        if self._confidences != confidences[:num_known]:
            self._forget_draft()
            num_known = 0
        for confidence in confidences[num_known:]:
            self._survivals.append(self._survivals[-1] * self._estimate_token_rate(confidence))
            self._confidences.append(confidence)
        return self._survivals

    def add_draft(self, confidences: Sequence[float | None], num_right: int, *, is_wrong: bool) -> None:
        """So many of the first tokens were right, and whether the next was wrong; later ones were not judged."""
        self._forget_draft()
        self._add_start(confidences, num_right)
        self._is_draft_right = not is_wrong
        self._all.update(num_right, rejected=is_wrong)
        for index, confidence in enumerate(confidences[: num_right + is_wrong]):
            if confidence is not None:
                range_estimate = self._by_range[bisect_right(_BORDERS, confidence)]
                range_estimate.update(int(index < num_right), rejected=index >= num_right)

    def decay(self, num_tokens: int) -> None:
        """Let what is known of the acceptance age by so many tokens."""
        self._forget_draft()
        self._all.decay(num_tokens)

    def describe(self) -> Mapping[str, float]:
        """Of each range that had any, tokens that were judged, and the right ones; older ones weigh less."""
        out: dict[str, float] = {}
        for name, estimate in zip(_RANGES, self._by_range, strict=True):
            if num_judged := estimate.accepted + estimate.rejected:
                out |= {f"num_judged_{name}": num_judged, f"num_right_{name}": estimate.accepted}
        return out

    def _forget_draft(self) -> None:
        self._confidences = []
        self._survivals = [1.0]

    def _estimate_token_rate(self, confidence: float | None) -> float:
        """How likely the next token is right, if all before it are."""
        if confidence is None:
            return self.rate
        if not self._confidences and not self._is_draft_right:
            return self._estimate_start_rate(confidence)
        return self._estimate_rate(confidence, (self.rate + 3.0 * confidence) / 4.0)

    def _estimate_rate(self, confidence: float, prior: float) -> float:
        """How often tokens of about this confidence are right; `prior` without evidence of this answer or others."""
        index = bisect_right(_BORDERS, confidence)
        num_judged, num_right = self._recorded[index]
        prior = (num_right + _CONFIDENCE_WEIGHT * prior) / (num_judged + _CONFIDENCE_WEIGHT)
        return self._by_range[index].estimate_rate_with_prior(prior)

    def _estimate_start_rate(self, confidence: float) -> float:
        """How likely a token is right that follows a wrong one: less than it says, as text has left its source."""
        right = self._num_right_starts + _START_WEIGHT * _START_SHARE
        share = min(right / (self._num_expected_starts + _START_WEIGHT), 1.0)
        return share * self._estimate_rate(confidence, confidence)

    def _add_start(self, confidences: Sequence[float | None], num_right: int) -> None:
        confidence = confidences[0] if confidences else None
        if confidence is not None and not self._is_draft_right:
            keep = 0.5 ** (1.0 / _START_HALF_LIFE)
            self._num_right_starts = keep * self._num_right_starts + (num_right > 0)
            expected = self._estimate_rate(confidence, confidence)
            self._num_expected_starts = keep * self._num_expected_starts + expected


class CalibrationMemory:
    """What earlier answers of a target with a draft have shown, for the next one to begin with."""

    def __init__(self) -> None:
        self._records = [ConfidenceRecord()] * NUM_CONFIDENCE_RANGES

    @property
    def records(self) -> tuple[ConfidenceRecord, ...]:
        """Of each range of confidence; empty before there was an answer."""
        return tuple(self._records) if any(record.num_judged for record in self._records) else ()

    def observe(self, state: Mapping[str, float]) -> None:
        """Take in what `ConfidenceCalibration.describe` said at the end of an answer."""
        for index, name in enumerate(_RANGES):
            num_judged = state.get(f"num_judged_{name}", 0.0)
            num_right = state.get(f"num_right_{name}", 0.0)
            keep = 0.5 ** (num_judged / _RECORD_HALF_LIFE)
            before = self._records[index]
            self._records[index] = ConfidenceRecord(
                keep * before.num_judged + num_judged, keep * before.num_right + num_right
            )
