"""What a token draft proposes, checked: nothing that it says may fail a request.

A drafted token that was drawn (it has `probs`) and can be verified is verified, whatever becomes of its draft. To drop
it for what was drawn, or for what followed from that, favours the tokens that are not dropped: rejection sampling then
gives another distribution than the target's. A rule by the distribution itself, known before the draw, is harmless.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast, overload

import numpy as np
from numpy.typing import NDArray

from llm_spec.contract.errors import DraftError
from llm_spec.contract.model import DraftToken

__all__ = ["ReadOnlyTokenIds", "check_confidence", "check_draft_token", "get_confidence_before_sampling"]

_SUM_TOLERANCE: Final = 1e-3  # by which probabilities may miss 0, 1 or their sum


class ReadOnlyTokenIds(Sequence[int]):
    """A view of a list that grows, for those who may read it."""

    __slots__ = ("_token_ids",)

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._token_ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._token_ids)


def check_draft_token(token: DraftToken, vocab_size: int) -> DraftToken:
    """The token, with an id that is an int and the probs, if any, that hold it; its confidence is left as it is.

    Raises DraftError for an id outside the vocabulary and for probs that are not a distribution over it. The error
    names types and numbers, never a text that the draft gave.
    """
    if not isinstance(token, DraftToken):  # pyright: ignore[reportUnnecessaryIsInstance] - other people's code gives it
        raise DraftError(f"the draft proposed a value of type {type(token).__name__}; it must be a DraftToken")
    token_id = token.token_id
    if type(token_id) is not int:
        if not hasattr(token_id, "__index__"):
            raise DraftError(f"a drafted token's id is of type {type(token_id).__name__}; it must be a whole number")
        token = token._replace(token_id=(token_id := token_id.__index__()))
    if not 0 <= token_id < vocab_size:
        raise DraftError(f"token id {token_id} is outside the vocabulary of {vocab_size}")
    if token.probs is not None:
        _check_draft_probs(token.probs, token_id, vocab_size)
    return token


def _check_draft_probs(drafted_probs: object, token_id: int, vocab_size: int) -> None:
    if not isinstance(drafted_probs, np.ndarray):
        raise DraftError(
            f"probs of token id {token_id} are of type {type(drafted_probs).__name__}; it must be a numpy array"
        )
    probs = cast("NDArray[np.float64]", drafted_probs)
    if probs.shape != (vocab_size,) or not (
        abs(probs.sum() - 1) < _SUM_TOLERANCE and probs.min() >= 0 < probs[token_id]
    ):
        raise DraftError(f"probs of token id {token_id} are not {vocab_size} probabilities")


def check_confidence(confidence: float | None) -> None:
    """Raise DraftError for a confidence that is neither None nor in 0..1, in words as `check_draft_token`'s."""
    if confidence is None:
        return
    if not hasattr(confidence, "__float__"):
        raise DraftError(
            f"a drafted token's confidence is of type {type(confidence).__name__}; it must be a number from 0 to 1"
        )
    if not -_SUM_TOLERANCE <= confidence <= 1 + _SUM_TOLERANCE:  # also NaN
        raise DraftError(f"a drafted token's confidence is {float(confidence)}; it must be from 0 to 1")


def get_confidence_before_sampling(token: DraftToken) -> float | None:
    """How sure a draft was before it drew (None: it cannot say): what may decide whether its token is proposed.

    The token is one that `check_draft_token` gave. Raises as `check_confidence`.
    """
    if token.probs is not None:
        return float(token.probs.max())
    check_confidence(token.confidence)
    return token.confidence
