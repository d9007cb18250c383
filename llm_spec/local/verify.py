"""The target's half of a round: it verifies the drafted tokens in one forward pass.

`HostVerifier` reads a session's logits and applies an acceptance rule in this process.
`DeviceVerifier` leaves sampling and acceptance to the model's device, and includes a draft on that
device in the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from llm_spec.contract.errors import ModelOutputError
from llm_spec.contract.token_model import DeviceRoundRunner, DraftToken, PassSharingSession, TokenModel, TokenSession
from llm_spec.local.acceptance import AcceptanceRule
from llm_spec.local.caches import prefill_prompt
from llm_spec.local.chosen_logprobs import ChosenLogprob, compute_chosen_logprobs
from llm_spec.local.lookahead import LookaheadController

__all__ = ["DeviceVerifier", "HostVerifier", "VerifiedProposal", "Verifier"]


class VerifiedProposal(NamedTuple):
    """`num_accepted` leading tokens of `proposal` stand; `next_token_id` follows them.

    `next_token_id` is the correction or the bonus. `draft_s` and `verify_s` are the times of
    drafting and verifying, measured on the device that did it. If a pass is shared with other
    requests, only this request's part counts. `logprobs` are those of the accepted tokens and the
    next one, if they were requested.
    """

    proposal: Sequence[DraftToken]
    num_accepted: int
    next_token_id: int
    draft_s: float
    verify_s: float
    logprobs: Sequence[ChosenLogprob] = ()

    @property
    def drafting_time_share(self) -> float:
        """The part of this time that went into drafting, in 0..1."""
        return self.draft_s / (self.draft_s + self.verify_s) if self.draft_s else 0.0


class Verifier(Protocol):
    """One request's target, with its prompt read; used by one thread at a time.

    It raises what the target raises.
    """

    @property
    def has_own_draft(self) -> bool:
        """True if it drafts when it is given no proposal."""
        ...

    @property
    def open_draft_s(self) -> float:
        """Seconds that opening its own draft took; 0 without one."""
        ...

    def prepare_round(self, position: int) -> None:
        """Prepare a round from `position` on, before its time is measured."""
        ...

    def verify_proposal(
        self,
        context_ids: Sequence[int],
        proposal: Sequence[DraftToken],
        lookahead: LookaheadController,
        draft_room: int,
        room_ahead: int,
    ) -> VerifiedProposal:
        """Judge a proposal that follows `context_ids`, and forget its rejected part.

        If the proposal is empty, a verifier that `has_own_draft` drafts up to `draft_room` tokens,
        as many as the lookahead wants. It may begin the next round ahead while the answer has
        `room_ahead` for drafted tokens.
        """
        ...

    def close(self) -> None:
        """Release the caches."""
        ...


class HostVerifier:
    """Verifies with a session's logits and an acceptance rule, in this process; see `Verifier`.

    `top_logprobs` is how many tokens' log-probabilities are read from each row. With None, no row
    is read.
    """

    has_own_draft = False
    open_draft_s = 0.0

    def __init__(self, name: str, session: TokenSession, rule: AcceptanceRule, top_logprobs: int | None = None) -> None:
        self._name = name
        self._session = session
        self._rule = rule
        self._top_logprobs = top_logprobs
        self._sharing_session = session if isinstance(session, PassSharingSession) else None

    @classmethod
    def open(
        cls,
        target: TokenModel,
        prompt_ids: Sequence[int],
        rule: AcceptanceRule,
        cancelled: Callable[[], bool],
        top_logprobs: int | None = None,
        *,
        exact: bool = True,
    ) -> HostVerifier:
        """Open a session and read the prompt except its last token, which the first round reads."""
        session = target.open(exact=exact)
        try:
            prefill_prompt(session, prompt_ids[:-1], cancelled, exact=exact)
        except BaseException:
            session.close()
            raise
        return cls(target.name, session, rule, top_logprobs)

    def prepare_round(self, position: int) -> None:
        self._rule.prepare_noise(position)

    def verify_proposal(
        self,
        context_ids: Sequence[int],
        proposal: Sequence[DraftToken],
        lookahead: LookaheadController,  # noqa: ARG002 - for verifiers that draft
        draft_room: int,  # noqa: ARG002 - the same
        room_ahead: int,  # noqa: ARG002 - the same
    ) -> VerifiedProposal:
        started = time.perf_counter()
        token_ids = [context_ids[-1], *(token.token_id for token in proposal)]
        # [len(proposal) + 1, vocab_size]
        logits = self._session.forward(token_ids, num_rows=len(token_ids))
        shared_s = self._measure_shared_s(time.perf_counter() - started)
        try:
            num_accepted, next_token_id = self._rule.verify_proposal(logits, context_ids, proposal)
        except ModelOutputError as error:
            raise ModelOutputError(f"{self._name}: {error}") from error
        logprobs: Sequence[ChosenLogprob] = ()
        if self._top_logprobs is not None:  # now, while the rows are valid
            chosen_ids = (*token_ids[1 : num_accepted + 1], next_token_id)
            logprobs = compute_chosen_logprobs(logits, chosen_ids, self._top_logprobs)
        self._session.truncate(len(context_ids) + num_accepted)
        verify_s = time.perf_counter() - started - shared_s
        return VerifiedProposal(proposal, num_accepted, next_token_id, 0.0, verify_s, logprobs)

    def close(self) -> None:
        self._session.close()

    def _measure_shared_s(self, forward_s: float) -> float:
        """Return the seconds of a forward pass that were spent on other requests."""
        cost_s = None if self._sharing_session is None else self._sharing_session.forward_cost_s
        return 0.0 if cost_s is None else forward_s - cost_s


class DeviceVerifier:
    """Verifies on the target's device; see `Verifier`."""

    def __init__(self, runner: DeviceRoundRunner) -> None:
        self._runner = runner
        self.has_own_draft = runner.has_device_draft
        self.open_draft_s = runner.open_draft_s

    def prepare_round(self, position: int) -> None:
        """Do nothing: the device makes its own noise."""

    def verify_proposal(
        self,
        context_ids: Sequence[int],  # noqa: ARG002 - the device holds them
        proposal: Sequence[DraftToken],
        lookahead: LookaheadController,
        draft_room: int,
        room_ahead: int,
    ) -> VerifiedProposal:
        if proposal or not self.has_own_draft:
            done = self._runner.verify([token.token_id for token in proposal])
        else:
            done = self._runner.draft_and_verify(_choose_num_draft_tokens(lookahead, draft_room), room_ahead)
            proposal = [DraftToken(token_id) for token_id in done.drafted_ids]
        return VerifiedProposal(proposal, done.num_accepted, done.next_token_id, done.draft_s, done.verify_s)

    def close(self) -> None:
        self._runner.close()


def _choose_num_draft_tokens(lookahead: LookaheadController, draft_room: int) -> int:
    """Return how many tokens to draft at once: the lookahead policy decides without confidences."""
    max_drafted = min(lookahead.limit(), draft_room)
    count = min(1, max_drafted)
    while count < max_drafted and lookahead.wants_more([None] * count):
        count += 1
    return count
