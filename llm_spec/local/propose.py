"""The draft's half of a round: guesses at the next tokens, from a draft that may fail, stall or give nonsense."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import DraftError, format_error_line
from llm_spec.contract.model import DraftToken, SelfPacedTokenDraft, TokenDraft, TokenModel
from llm_spec.local.iterators import as_closable_generator
from llm_spec.local.lookahead import LookaheadController
from llm_spec.local.token_checks import ReadOnlyTokenIds, check_confidence, check_draft_token

__all__ = ["Proposer"]


class Proposer:
    """One request's draft, or none; used by one thread at a time.

    Any failure of the draft (an exception, an id outside the vocabulary, a proposal that takes longer than `timeout_s`)
    ends drafting, never the answer. `fallback` then says why. KeyboardInterrupt and SystemExit pass through.
    `context_ids` are prompt and answer, a list that grows. Drafting ends within one token once `cancelled` is set.
    """

    def __init__(
        self, target: TokenModel, context_ids: Sequence[int], *, timeout_s: float, cancelled: threading.Event
    ) -> None:
        self._target = target
        self._context_ids = ReadOnlyTokenIds(context_ids)
        self._timeout_s = timeout_s
        self._cancelled = cancelled
        self._draft: TokenDraft | None = None
        self._self_paced: SelfPacedTokenDraft | None = None  # the draft, if it is one
        self.self_paced_s = 0.0  # of the last proposal: what the draft itself weighs
        self.fallback: str | None = None

    @property
    def has_open_draft(self) -> bool:
        """Whether there is a draft to ask."""
        return self._draft is not None

    def open_draft_if_possible(self, open_draft: Callable[[], TokenDraft]) -> None:
        """Open the draft; if that fails, there is none."""
        with _DropDraftOnFailure(self):
            self._draft = draft = open_draft()
            self._self_paced = draft if isinstance(draft, SelfPacedTokenDraft) else None

    def propose(self, lookahead: LookaheadController, draft_room: int) -> list[DraftToken]:
        """Draft up to `draft_room` tokens, as many as the lookahead policy chooses; empty if there is no draft.

        If the draft fails on the way, its earlier tokens are kept: a sampled token must be verified, or the answer
        would not have the target's distribution.
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
        """Close the draft, after which the target goes on alone; calling it twice is harmless."""
        draft, self._draft, self._self_paced = self._draft, None, None
        if draft is not None:
            with _DropDraftOnFailure(self, " (raised by the draft's close)"):
                draft.close()

    def _collect_proposal(
        self, draft: TokenDraft, proposal: list[DraftToken], lookahead: LookaheadController, max_drafted: int
    ) -> None:
        """Append checked tokens to `proposal` until one of its ends is reached."""
        if max_drafted < 1:
            return
        give_up_at = time.perf_counter() + self._timeout_s
        confidences: list[float | None] = []
        vocab_size, eos_token_ids = self._target.vocab_size, self._target.tokenizer.eos_token_ids
        with contextlib.closing(as_closable_generator(draft.propose(self._context_ids))) as guesses:
            for guess in guesses:
                token = check_draft_token(guess, vocab_size)
                proposal.append(token)  # from here on it is verified, whatever becomes of its draft
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
        """Close the draft, which has failed; the first reason is kept."""
        if self.fallback is None:
            cause = "" if isinstance(error, Exception) else " (raised by the draft; nobody cancelled it)"
            self.fallback = format_error_line(error) + (where or cause)
        self.close()


class _DropDraftOnFailure:
    """Whatever the draft raises ends the draft, not the answer.

    Also CancelledError: no task of the caller's is cancelled in here.
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
