"""Calibrates a draft's confidences: compares them with how often earlier tokens were right.

Drafts are over- or underconfident, each in its own way. So tokens are counted by ranges of
confidence, in this answer and, with less weight, in a decoder's earlier answers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from llm_spec.measure.estimates import AcceptanceEstimate

__all__ = ["NUM_CONFIDENCE_RANGES", "CalibrationMemory", "ConfidenceCalibration", "ConfidenceRecord"]

# borders between ranges; finer where drafts are mostly sure
_BORDERS: Final = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99)
_RANGES: Final = [f"above_{border:g}" for border in (0.0, *_BORDERS)]
NUM_CONFIDENCE_RANGES: Final = len(_RANGES)
_PRIOR_WEIGHT: Final = 2.0  # tokens
_RANGE_WEIGHT: Final = 4.0  # tokens
# how many tokens of earlier answers weigh as much as the confidence
_CONFIDENCE_WEIGHT: Final = 4.0
_MAX_RECORD_WEIGHT: Final = 12.0  # tokens
_RECORD_HALF_LIFE: Final = 24.0  # tokens of a range, across answers
# prior: how often a token after a wrong one is right, relative to its confidence
_START_SHARE: Final = 0.75
_START_WEIGHT: Final = 3.0  # tokens that the prior counts as
_START_HALF_LIFE: Final = 16.0  # older tokens weigh less


class ConfidenceRecord(NamedTuple):
    """The judged and the right tokens of one range of confidence, in earlier answers.

    Older tokens weigh less.
    """

    num_judged: float = 0.0
    num_right: float = 0.0

    def limit_weight(self) -> ConfidenceRecord:
        """Return the record with its weight limited to what may count in another answer."""
        if self.num_judged <= _MAX_RECORD_WEIGHT:
            return self
        return ConfidenceRecord(_MAX_RECORD_WEIGHT, _MAX_RECORD_WEIGHT * self.num_right / self.num_judged)


class ConfidenceCalibration:
    """The judged drafted tokens of one answer.

    `half_life` is the number of judged tokens after which a token's weight has halved. `prior` is
    the acceptance assumed before there is evidence. `records` has one entry per range from earlier
    answers, and is empty if there were none.
    """

    def __init__(self, *, half_life: float, prior: float, records: Sequence[ConfidenceRecord] = ()) -> None:
        self._all = AcceptanceEstimate(half_life=half_life, prior=prior, prior_weight=_PRIOR_WEIGHT)
        self._by_range = [
            AcceptanceEstimate(half_life=half_life, prior=prior, prior_weight=_RANGE_WEIGHT) for _ in _RANGES
        ]
        self._recorded = [record.limit_weight() for record in records or [ConfidenceRecord()] * NUM_CONFIDENCE_RANGES]
        self._is_draft_right = False  # whether the last judged token was right
        self._num_right_starts = self._num_expected_starts = 0.0  # first tokens after a wrong one
        self._confidences: list[float | None] = []  # of the draft that was estimated last
        self._survivals = [1.0]  # and the survival after each of them

    @property
    def rate(self) -> float:
        """The share of tokens that are right, whatever their confidence."""
        return self._all.rate

    def estimate_survivals(self, confidences: Sequence[float | None]) -> Sequence[float]:
        """Return at index n the probability that the first n tokens of a draft are right.

        It is called after each token of a draft, so the results for earlier tokens are kept.
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
        """Record that the first `num_right` tokens were right, and whether the next was wrong.

        Later tokens were not judged.
        """
        self._forget_draft()
        self._add_start(confidences, num_right)
        self._is_draft_right = not is_wrong
        self._all.update(num_right, rejected=is_wrong)
        for index, confidence in enumerate(confidences[: num_right + is_wrong]):
            if confidence is not None:
                range_estimate = self._by_range[bisect_right(_BORDERS, confidence)]
                range_estimate.update(int(index < num_right), rejected=index >= num_right)

    def decay(self, num_tokens: int) -> None:
        """Let the estimate of the acceptance age by `num_tokens` tokens."""
        self._forget_draft()
        self._all.decay(num_tokens)

    def describe(self) -> Mapping[str, float]:
        """Return the judged and the right tokens of each range, weighted by age."""
        out: dict[str, float] = {}
        for name, estimate in zip(_RANGES, self._by_range, strict=True):
            if num_judged := estimate.accepted + estimate.rejected:
                out |= {f"num_judged_{name}": num_judged, f"num_right_{name}": estimate.accepted}
        return out

    def _forget_draft(self) -> None:
        self._confidences = []
        self._survivals = [1.0]

    def _estimate_token_rate(self, confidence: float | None) -> float:
        """Estimate how likely the next token is right, if all before it are."""
        if confidence is None:
            return self.rate
        if not self._confidences and not self._is_draft_right:
            return self._estimate_start_rate(confidence)
        return self._estimate_rate(confidence, (self.rate + 3.0 * confidence) / 4.0)

    def _estimate_rate(self, confidence: float, prior: float) -> float:
        """Estimate how often tokens of about this confidence are right.

        Returns `prior` if neither this answer nor others give evidence.
        """
        index = bisect_right(_BORDERS, confidence)
        num_judged, num_right = self._recorded[index]
        prior = (num_right + _CONFIDENCE_WEIGHT * prior) / (num_judged + _CONFIDENCE_WEIGHT)
        return self._by_range[index].estimate_rate_with_prior(prior)

    def _estimate_start_rate(self, confidence: float) -> float:
        """Estimate how likely a token after a wrong one is right.

        This is less than its confidence says, because the text has left its source.
        """
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
    """The records of earlier answers of a target with a draft, for the next one to begin with."""

    def __init__(self) -> None:
        self._records = [ConfidenceRecord()] * NUM_CONFIDENCE_RANGES

    @property
    def records(self) -> tuple[ConfidenceRecord, ...]:
        """The record of each range of confidence; empty before the first answer."""
        return tuple(self._records) if any(record.num_judged for record in self._records) else ()

    def observe(self, state: Mapping[str, float]) -> None:
        """Add what `ConfidenceCalibration.describe` returned at the end of an answer."""
        for index, name in enumerate(_RANGES):
            num_judged = state.get(f"num_judged_{name}", 0.0)
            num_right = state.get(f"num_right_{name}", 0.0)
            keep = 0.5 ** (num_judged / _RECORD_HALF_LIFE)
            before = self._records[index]
            self._records[index] = ConfidenceRecord(
                keep * before.num_judged + num_judged, keep * before.num_right + num_right
            )
