"""The log-probabilities of an answer's tokens, from a model's logits.

They are taken before penalties, temperature, filters and grammars, as vLLM reports them by default
(`raw_logprobs`). They therefore depend only on the preceding tokens, not on how a token was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llm_spec.local.sampling import FloatArray

__all__ = ["ChosenLogprob", "compute_chosen_logprobs"]


class ChosenLogprob(NamedTuple):
    """A token's natural log-probability, and the likeliest tokens in its place, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def compute_chosen_logprobs(logits: FloatArray, chosen_ids: Sequence[int], num_top: int) -> tuple[ChosenLogprob, ...]:
    """Compute the log-probability of `chosen_ids[i]` from row i of `logits`, in float64.

    `logits` is [num_rows, vocab_size]; further rows are not read. The best logit of each row must
    be finite. Of tokens that are equally likely, those of lower ids come first.
    """
    return tuple(
        _compute_row_logprobs(row, token_id, num_top) for row, token_id in zip(logits, chosen_ids, strict=False)
    )


def _compute_row_logprobs(row: FloatArray, token_id: int, num_top: int) -> ChosenLogprob:
    relative = row.astype(np.float64)
    relative -= relative.max()  # so that no exponential overflows
    log_total = math.log(np.exp(relative).sum())
    top = tuple((i, float(relative[i]) - log_total) for i in _find_top_ids(relative, num_top))
    return ChosenLogprob(token_id, float(relative[token_id]) - log_total, top)


def _find_top_ids(scores: FloatArray, count: int) -> list[int]:
    """Return the ids of the `count` largest scores, largest first."""
    if not count:
        return []
    border = np.partition(scores, -count)[-count] if count < scores.shape[0] else scores.min()
    ids = np.flatnonzero(scores >= border)  # more than `count` if some are tied
    best: list[int] = ids[np.argsort(-scores[ids], kind="stable")][:count].tolist()
    return best
