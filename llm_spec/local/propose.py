"""The draft's half of a round: proposals from a draft that may fail, stall or return nonsense.

A drafted token that was sampled (it has `probs`) and can be verified is verified, even if the draft
fails. Dropping it because of its value, or of what followed from that, would favour other tokens:
rejection sampling would no longer give the target's distribution. Stopping because of the
distribution itself, known before sampling, is harmless.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast, overload

import numpy as np
from numpy.typing import NDArray

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import DraftError, format_error_line
from llm_spec.contract.token_model import DraftToken, SelfPacedTokenDraft, TokenDraft, TokenModel
from llm_spec.local.lookahead import LookaheadController
from llm_spec.local.threads import as_closable_generator

__all__ = [
    "Proposer",
    "ReadOnlyTokenIds",
    "check_confidence",
    "check_draft_token",
    "get_confidence_before_sampling",
]

_SUM_TOLERANCE: Final = 1e-3  # tolerance for probabilities outside 0..1 and for their sum


class ReadOnlyTokenIds(Sequence[int]):
    """A read-only view of a list that grows."""

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
    """Check a drafted token and return it, with an id of type int.

    Raises DraftError for an id outside the vocabulary, and for probs that are not a distribution
    over it. The confidence is not checked. The error names types and numbers, never a text of the
    draft.
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
            f"probs of token id {token_id} are of type {type(drafted_probs).__name__}; they must be a numpy array"
        )
    probs = cast("NDArray[np.float64]", drafted_probs)
    if probs.shape != (vocab_size,) or not (
        abs(probs.sum() - 1) < _SUM_TOLERANCE and probs.min() >= 0 < probs[token_id]
    ):
        raise DraftError(
            f"probs of token id {token_id} are not {vocab_size} probabilities with sum 1, above 0 for the token"
        )


def check_confidence(confidence: float | None) -> None:
    """Raise DraftError unless the confidence is None or in 0..1; the error quotes no text."""
    if confidence is None:
        return
    if not hasattr(confidence, "__float__"):
        raise DraftError(
            f"a drafted token's confidence is of type {type(confidence).__name__}; it must be a number from 0 to 1"
        )
    if not -_SUM_TOLERANCE <= confidence <= 1 + _SUM_TOLERANCE:  # also rejects NaN
        raise DraftError(f"a drafted token's confidence is {float(confidence)}; it must be from 0 to 1")


def get_confidence_before_sampling(token: DraftToken) -> float | None:
    """Return how sure a draft was before it sampled, or None if it cannot say.

    This may decide whether its token is proposed. The token must have passed `check_draft_token`.
    Raises as `check_confidence` does.
    """
    if token.probs is not None:
        return float(token.probs.max())
    check_confidence(token.confidence)
    return token.confidence


class Proposer:
    """One request's draft, or none; used by one thread at a time.

    Any failure of the draft ends drafting, never the answer: an exception, an id outside the
    vocabulary, or a proposal that takes longer than `timeout_s`. `fallback` then holds the reason.
    KeyboardInterrupt and SystemExit pass through. `context_ids` are prompt and answer, a list that
    grows. Once `cancelled` is set, drafting ends within one token.
    """

    def __init__(
        self, target: TokenModel, context_ids: Sequence[int], *, timeout_s: float, cancelled: threading.Event
    ) -> None:
        self._target = target
        self._context_ids = ReadOnlyTokenIds(context_ids)
        self._timeout_s = timeout_s
        self._cancelled = cancelled
        self._draft: TokenDraft | None = None
        self._self_paced: SelfPacedTokenDraft | None = None  # `_draft`, if it paces itself
        self.self_paced_s = 0.0  # the draft's own time for the last proposal
        self.fallback: str | None = None

    @property
    def has_open_draft(self) -> bool:
        """True if there is a draft to ask."""
        return self._draft is not None

    def open_draft_if_possible(self, open_draft: Callable[[], TokenDraft]) -> None:
        """Open the draft; if that fails, there is none."""
        with _DropDraftOnFailure(self):
            self._draft = draft = open_draft()
            self._self_paced = draft if isinstance(draft, SelfPacedTokenDraft) else None

    def propose(self, lookahead: LookaheadController, draft_room: int) -> list[DraftToken]:
        """Draft up to `draft_room` tokens, as many as the lookahead policy chooses.

        Returns an empty list if there is no draft. If the draft fails on the way, its earlier
        tokens are kept: a sampled token must be verified, or the answer would not have the target's
        distribution.
        """
        proposal: list[DraftToken] = []
        self.self_paced_s = 0.0
        if self._draft is not None:
            with _DropDraftOnFailure(self):
                self._collect_proposal(self._draft, proposal, lookahead, min(lookahead.limit(), draft_room))
                if self._self_paced is not None:
                    seconds = self._self_paced.self_paced_s
                    check_number(DraftError, "the draft's self_paced_s", seconds, 0.0)
                    self.self_paced_s = seconds
        return proposal

    def end_round(self, token_ids: Sequence[int], verify_s: float) -> None:
        """Report the round to the draft, if it is a `SelfPacedTokenDraft`."""
        if self._self_paced is not None:
            with _DropDraftOnFailure(self):
                self._self_paced.end_round(token_ids, verify_s)

    def close(self) -> None:
        """Close the draft; the target then continues alone. A second call does nothing."""
        draft, self._draft, self._self_paced = self._draft, None, None
        if draft is not None:
            with _DropDraftOnFailure(self, " (raised by the draft's close)"):
                draft.close()

    def _collect_proposal(
        self, draft: TokenDraft, proposal: list[DraftToken], lookahead: LookaheadController, max_drafted: int
    ) -> None:
        """Append checked tokens to `proposal` until a limit is reached."""
        if max_drafted < 1:
            return
        give_up_at = time.perf_counter() + self._timeout_s
        confidences: list[float | None] = []
        vocab_size, eos_token_ids = self._target.vocab_size, self._target.tokenizer.eos_token_ids
        with contextlib.closing(as_closable_generator(draft.propose(self._context_ids))) as guesses:
            for guess in guesses:
                token = check_draft_token(guess, vocab_size)
                proposal.append(token)  # from here on it is verified, even if the draft fails
                try:
                    check_confidence(token.confidence)
                except DraftError:
                    proposal[-1] = token._replace(confidence=None)
                    raise
                confidences.append(token.confidence)
                if (
                    token.token_id in eos_token_ids
                    or len(proposal) == max_drafted
                    or self._cancelled.is_set()
                    or time.perf_counter() > give_up_at
                    or not lookahead.wants_more(confidences)
                ):
                    break
        if time.perf_counter() > give_up_at:
            raise DraftError(f"a proposal took longer than {self._timeout_s} s")

    def drop_draft(self, error: BaseException, where: str = "") -> None:
        """Close the failed draft; the first reason is kept."""
        if self.fallback is None:
            cause = "" if isinstance(error, Exception) else " (raised by the draft; the request was not cancelled)"
            self.fallback = format_error_line(error) + (where or cause)
        self.close()


class _DropDraftOnFailure:
    """Turns any error of the draft into the end of drafting, not of the answer.

    This includes CancelledError: none of the caller's tasks is cancelled in here.
    """

    def __init__(self, proposer: Proposer, where: str = "") -> None:
        self._proposer = proposer
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is None or isinstance(error, KeyboardInterrupt | SystemExit):
            return False
        self._proposer.drop_draft(error, self._where)
        return True
