"""Joint sequences of two tokens, vocabulary 8, whose exact law is known; and what a core that draws them must offer."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# (scipy is partly untyped)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from llm_spec.contract.request import Sampling
from llm_spec.local.acceptance import AcceptanceRule
from llm_spec.local.sampling import Sampler

Floats = NDArray[np.float64]
Rows = Callable[[NDArray[np.int64]], Floats]  # tokens [..., num_rows] -> logits after them [..., num_rows, vocab_size]
RuleName = Literal["coupled", "rejection"]
# drafted tokens: drawn from the draft, or its argmax, given without a distribution or (the fault) with the soft one
DraftName = Literal["drawn", "given", "given as if drawn"]

VOCAB_SIZE = 8
PROMPT_ID = 0
_RANDOM = np.random.default_rng(5)
TARGET = _RANDOM.normal(scale=0.8, size=(VOCAB_SIZE, VOCAB_SIZE))  # row: logits after that token
DRAFT = TARGET + _RANDOM.normal(scale=0.7, size=TARGET.shape)
TARGET[:, 5] = -math.inf  # a token that only the draft can say
DRAFT[:, 6] = -math.inf  # and one that only the target can say
SAMPLING = Sampling(temperature=1.0)


class TokenCore(Protocol):
    """The token core on one kind of array."""

    def make(self, name: RuleName, sampler: Sampler) -> AcceptanceRule:
        """A rule with this sampler's parameters."""
        ...

    def plant(self, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put in a known fault until the test ends."""
        ...

    def count_pairs(
        self,
        name: RuleName,
        num_samples: int,
        *,
        draft: DraftName = "drawn",
        rows: Rows = ...,
        keep_above: float = 0.0,
    ) -> NDArray[np.int64]:
        """How often each pair came out of rounds of lookahead 1 to 3: [vocab_size, vocab_size].

        A drafted token less likely than `keep_above` is thrown away, and the draft ends there.
        """
        ...


def target_rows(last_ids: NDArray[np.int64]) -> Floats:
    """The target's logits after each of these tokens."""
    return TARGET[last_ids]


def first_row_everywhere(last_ids: NDArray[np.int64]) -> Floats:
    """The fault: the first row of logits is used for every position."""
    return TARGET[np.broadcast_to(last_ids[..., :1], last_ids.shape)]


def softmax(logits: NDArray[Any]) -> Floats:
    mass: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    mass /= mass.sum(axis=-1, keepdims=True)
    return mass


def is_target_law(counts: NDArray[np.int64], significance: float = 1e-6) -> bool:
    """Chi-square against the exact joint distribution; a pair that cannot be must not have come."""
    expected = pair_probs()
    if counts[expected == 0.0].any():
        return False
    possible = expected > 0.0
    return bool(stats.chisquare(counts[possible], expected[possible] * counts.sum()).pvalue > significance)


def is_parity_of_target_law(counts: NDArray[np.int64], significance: float) -> bool:
    """The same of which tokens are odd alone, [2, 2]: it finds what depends on that with a third less samples."""

    def by_parity(table: NDArray[Any]) -> list[float]:
        return [table[first::2, second::2].sum() for first in (0, 1) for second in (0, 1)]

    expected = np.array(by_parity(pair_probs())) * counts.sum()
    return bool(stats.chisquare(by_parity(counts), expected).pvalue > significance)


def pair_probs() -> Floats:
    """The target's probability of each pair: [vocab_size, vocab_size]."""
    probs = softmax(TARGET)
    return probs[PROMPT_ID][:, None] * probs
