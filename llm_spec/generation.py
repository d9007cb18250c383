"""One answer of a local token model, round by round: propose, verify, commit.

A round, in DESIGN.md's words: the draft proposes up to `lookahead` tokens; the target reads its last confirmed token
and those, in one forward pass; the acceptance rule says how many of them stand and which token comes next; the caches
forget the rest. With no draft every round is a plain step of the same code, which is why the two give the same text.

Everything here is synchronous and belongs to one request and one thread; `worker.py` carries it to an event loop.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from llm_spec._iterators import closing_view
from llm_spec.chat import Origin, Round, StoppedBy
from llm_spec.contract.local import (
    DeviceRoundResult,
    DeviceRoundRunner,
    DraftToken,
    TokenDraft,
    TokenModel,
    TokenSession,
)
from llm_spec.drafting.token_checks import ReadOnlyTokenIds, check_confidence, check_draft_token
from llm_spec.errors import DraftError, InvalidRequestError, ModelOutputError, format_error_line
from llm_spec.prefill import prefill_prompt
from llm_spec.result import SpeculativeStats
from llm_spec.tokens.acceptance import AcceptanceRule, VerifyResult
from llm_spec.tokens.lookahead import LookaheadController, RoundFeedback
from llm_spec.tokens.statistics import ExponentialMovingAverage

__all__ = ["Generation", "GenerationLimits", "TokenRound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """Caps of one answer; None: no cap. `draft_timeout_s` is for one proposal.

    `plain_every`: after so many rounds with a draft one is a plain step, so that the target's own speed is known; every
    second round until there were `min_plain_steps`. 0: none but those that the lookahead policy takes.
    """

    max_tokens: int | None = None
    max_iterations: int | None = None
    max_draft_tokens: int | None = None
    draft_timeout_s: float = 30.0
    plain_every: int = 0
    min_plain_steps: int = 0


class TokenRound(NamedTuple):
    """What one round brought: its emitted tokens (EOS included), each with its origin."""

    report: Round
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    stopped_by: StoppedBy | None


@dataclass(slots=True)
class _RoundSeconds:
    """What the round under way has taken so far.

    `draft_s` and `verify_s` cover all of it, on this process's clock. `draft_cost_s` and `verify_cost_s` are what the
    lookahead steers by: drafting and verifying alone, by the device's clock where it has one.
    """

    draft_s: float = 0.0
    verify_s: float = 0.0
    draft_cost_s: float = 0.0
    verify_cost_s: float = 0.0


class Generation:
    """Answer `prompt_ids` with `target`: iterate over rounds, or call `propose`, `verify` and `commit` yourself.

    `open_draft` is called once the target has read the prompt; None means plain decoding. Any failure of the draft
    (an exception, an id outside the vocabulary, too much time) ends its drafting: what it had proposed until then is
    verified, the rest is plain decoding, and `fallback` says why. KeyboardInterrupt and SystemExit pass through.
    Setting `cancelled` ends the iteration within one forward. `open_rounds` gives rounds on a device, or None; they
    sample and accept there, without `rule`. Where they draft as well, `open_companion_draft` takes the place of
    `open_draft`: what it does not propose, they draft. Use as a context manager: it opens and closes the caches.
    `prompt_s`: seconds for opening the target's session and reading the prompt; `open_draft_s`: for opening the draft.
    Raises InvalidRequestError for a prompt that does not fit, and what the target raises.
    """

    def __init__(
        self,
        target: TokenModel,
        prompt_ids: Sequence[int],
        rule: AcceptanceRule,
        lookahead: LookaheadController,
        *,
        limits: GenerationLimits | None = None,
        open_draft: Callable[[], TokenDraft] | None = None,
        open_rounds: Callable[[Callable[[], bool]], DeviceRoundRunner | None] | None = None,
        open_companion_draft: Callable[[], TokenDraft] | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        _check_prompt(target, prompt_ids)
        self.target = target
        self.context_ids = list(prompt_ids)  # prompt and confirmed answer
        self._read_only_ids = ReadOnlyTokenIds(self.context_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.rule = rule
        self.lookahead = lookahead
        self.limits = limits or GenerationLimits()
        self.cancelled = cancelled or threading.Event()
        self.rounds: list[Round] = []
        self.acceptance = ExponentialMovingAverage(half_life=8)
        self.fallback: str | None = None
        self.stopped_by: StoppedBy | None = None
        self._open_draft = open_draft
        self._draft: TokenDraft | None = None
        self._open_rounds = open_rounds
        self._open_companion_draft = open_companion_draft
        self._rounds: DeviceRoundRunner | None = None
        self._session: TokenSession | None = None
        self._num_draft_tokens = self._num_plain_steps = self._num_rounds_since_plain = 0
        self.prompt_s = self.open_draft_s = self.between_s = 0.0
        self._ended_at: float | None = None  # the last step
        self._seconds = _RoundSeconds()

    def __enter__(self) -> Self:
        started = time.perf_counter()
        try:
            self._rounds = None if self._open_rounds is None else self._open_rounds(self.cancelled.is_set)
            if self._rounds is None:
                self._session = self.target.open()
                prefill_prompt(
                    self._session, self.context_ids[:-1], self.cancelled.is_set
                )  # a round reads the last token
            self.open_draft_s = 0.0 if self._rounds is None else self._rounds.open_draft_s
            self.prompt_s = time.perf_counter() - started - self.open_draft_s
            if self._rounds is not None and self._rounds.has_device_draft:
                self._open_draft = self._open_companion_draft
            self._open_draft_once()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[TokenRound]:
        while self.stopped_by is None and not self.cancelled.is_set():
            yield self.step()

    @property
    def stats(self) -> SpeculativeStats:
        """All rounds so far, or since `rounds` was cleared."""
        return SpeculativeStats.of_rounds(self.rounds)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.context_ids) - self.num_prompt_tokens

    def close(self) -> None:
        """Release both caches; calling it twice is harmless."""
        self.close_draft()
        for held in (self._session, self._rounds):
            if held is not None:
                held.close()
        self._session = self._rounds = None

    def close_draft(self) -> None:
        """Close the draft, after which the target goes on alone; calling it twice is harmless."""
        draft, self._draft = self._draft, None
        if draft is not None:
            with self._drop_failed_draft(" (raised by the draft's close)"):
                draft.close()

    def step(self) -> TokenRound:
        """One whole round; at least one token, or `stopped_by` is set."""
        if self._ended_at is not None:
            self.between_s += time.perf_counter() - self._ended_at
        proposal = self.propose()
        if not proposal and self._rounds is not None and self._rounds.has_device_draft:
            done = self._run_device_round(self._rounds)
        else:
            done = self.commit(proposal, self.verify(proposal))
        self._ended_at = time.perf_counter()
        return done

    def propose(self) -> list[DraftToken]:
        """Ask the draft for guesses at the next tokens; empty when there is no draft or speculation would not pay.

        Where it fails on the way, the tokens that it gave before.
        """
        started = time.perf_counter()
        if self._rounds is None:
            self.rule.prepare_noise(len(self.context_ids))
        prepared = time.perf_counter()
        proposal: list[DraftToken] = []
        if self._draft is not None:
            with self._drop_failed_draft():
                self._draft_tokens(
                    self._draft, proposal, max_drafted=min(self.lookahead.limit(), self._max_draft_room())
                )
        drafted_s = time.perf_counter() - prepared
        # what is prepared is needed with and without a draft, so it is the verification's, but not its cost
        self._seconds = _RoundSeconds(draft_s=drafted_s, verify_s=prepared - started, draft_cost_s=drafted_s)
        return proposal

    def verify(self, proposal: Sequence[DraftToken]) -> VerifyResult:
        """Let the target read its last token and the proposal in one forward pass, and judge."""
        started = time.perf_counter()
        drafted_ids = [token.token_id for token in proposal]
        if self._rounds is not None:
            return self._record_device_times(self._rounds.verify(drafted_ids), time.perf_counter() - started)
        if self._session is None:
            raise RuntimeError("a Generation is a context manager; enter it before asking for tokens")
        token_ids = [self.context_ids[-1], *drafted_ids]
        logits = self._session.forward(token_ids, num_rows=len(token_ids))
        try:
            verify_result = self.rule.verify(logits, self.context_ids, proposal)
        except ModelOutputError as error:
            raise ModelOutputError(f"{self.target.name}: {error}") from error
        self._session.truncate(len(self.context_ids) + verify_result.num_accepted)
        verified_s = time.perf_counter() - started
        self._seconds.verify_s += verified_s
        self._seconds.verify_cost_s = verified_s
        return verify_result

    def commit(self, proposal: Sequence[DraftToken], verify_result: VerifyResult) -> TokenRound:
        """Append what the target confirmed and its own next token, up to the end of the answer."""
        started = time.perf_counter()
        num_accepted = verify_result.num_accepted
        token_ids = [*(token.token_id for token in proposal[:num_accepted]), verify_result.next_token_id]
        last: Origin = "plain" if not proposal else "bonus" if num_accepted == len(proposal) else "correction"
        origins: list[Origin] = ["accepted"] * num_accepted
        origins.append(last)
        end = next((i for i, t in enumerate(token_ids) if t in self.target.tokenizer.eos_token_ids), None)
        if end is not None:
            del token_ids[end + 1 :], origins[end + 1 :]
            self.stopped_by = "eos"
        self.context_ids.extend(token_ids)
        num_accepted = min(num_accepted, len(token_ids))  # those behind the end are wasted
        seconds, self._seconds = self._seconds, _RoundSeconds()
        self._update_lookahead(proposal, num_accepted, seconds)
        index = len(self.rounds)
        self.stopped_by = self.stopped_by or self._find_reached_cap(num_rounds=index + 1)
        report = Round(
            index=index,
            num_draft_tokens=len(proposal),
            num_accepted_tokens=num_accepted,
            num_emitted_tokens=len(token_ids),
            next_token_id=verify_result.next_token_id,
            draft_s=seconds.draft_s,
            verify_s=seconds.verify_s + time.perf_counter() - started,
        )
        self.rounds.append(report)
        return TokenRound(report, tuple(token_ids), tuple(origins), self.stopped_by)

    # ------------------------------------------------------------------------------------------ inside

    def _run_device_round(self, rounds: DeviceRoundRunner) -> TokenRound:
        started = time.perf_counter()
        room = self._max_answer_room()
        max_drafted = min(self.lookahead.limit(), self._max_draft_room())
        max_tokens_left = min(1, max_drafted)
        while max_tokens_left < max_drafted and self.lookahead.wants_more([None] * max_tokens_left):
            max_tokens_left += 1
        # with a draft on this side as well, the next round is not begun before it has been asked
        done = rounds.draft_and_verify(max_tokens_left, room if self._draft is None else 0)
        verify_result = self._record_device_times(done, time.perf_counter() - started)
        return self.commit([DraftToken(token_id) for token_id in done.drafted_ids], verify_result)

    def _record_device_times(self, done: DeviceRoundResult, elapsed_s: float) -> VerifyResult:
        """Share the time that this process waited for a round as the device's own clock says."""
        worked_s = done.draft_s + done.verify_s
        drafted_s = elapsed_s * done.draft_s / worked_s if worked_s else 0.0
        self._seconds.draft_s += drafted_s
        self._seconds.verify_s += elapsed_s - drafted_s
        self._seconds.draft_cost_s += done.draft_s
        self._seconds.verify_cost_s = done.verify_s
        return VerifyResult(done.num_accepted, done.next_token_id)

    def _open_draft_once(self) -> None:
        if self._open_draft is None or self.cancelled.is_set():
            return
        started = time.perf_counter()
        with self._drop_failed_draft():
            self._draft = self._open_draft()
        self.open_draft_s += time.perf_counter() - started

    def _draft_tokens(self, draft: TokenDraft, proposal: list[DraftToken], *, max_drafted: int) -> None:
        if max_drafted < 1:
            return
        give_up_at = time.perf_counter() + self.limits.draft_timeout_s
        confidences: list[float | None] = []
        with contextlib.closing(closing_view(draft.propose(self._read_only_ids))) as guesses:
            for guess in guesses:
                token = check_draft_token(guess, self.target.vocab_size)
                proposal.append(token)  # from here on it is verified, whatever becomes of its draft
                try:
                    check_confidence(token.confidence)
                except DraftError:
                    proposal[-1] = token._replace(confidence=None)
                    raise
                confidences.append(token.confidence)
                is_end = token.token_id in self.target.tokenizer.eos_token_ids
                if (
                    is_end
                    or len(proposal) == max_drafted
                    or self.cancelled.is_set()
                    or time.perf_counter() > give_up_at
                ):
                    break
                if not self.lookahead.wants_more(confidences):
                    break
        if time.perf_counter() > give_up_at:
            raise DraftError(f"a proposal took longer than {self.limits.draft_timeout_s} s")

    def _max_draft_room(self) -> int:
        """Most tokens that may be drafted now: a round emits one more than it drafts, and all must fit."""
        return 0 if self._is_plain_due() else min(self.target.max_width - 1, self._max_answer_room())

    def _is_plain_due(self) -> bool:
        """Whether this round is a plain step, so that the target's own speed is known."""
        is_known = self._num_plain_steps >= self.limits.min_plain_steps
        return self._num_rounds_since_plain >= (self.limits.plain_every if is_known else 1) > 0

    def _max_answer_room(self) -> int:
        """The same without the bound on one pass."""
        room = [self.target.context_length - len(self.context_ids) - 1]
        if self.limits.max_tokens is not None:
            room.append(self.limits.max_tokens - self.num_output_tokens - 1)
        if self.limits.max_draft_tokens is not None:
            room.append(self.limits.max_draft_tokens - self._num_draft_tokens)
        return min(room)

    def _update_lookahead(self, proposal: Sequence[DraftToken], num_accepted: int, seconds: _RoundSeconds) -> None:
        self._num_draft_tokens += len(proposal)
        self._num_plain_steps += not proposal
        self._num_rounds_since_plain = self._num_rounds_since_plain + 1 if proposal else 0
        if proposal:
            self.acceptance.update(num_accepted / len(proposal))
        if self._draft is not None or (self._rounds is not None and self._rounds.has_device_draft):
            self.lookahead.update(
                RoundFeedback(
                    num_draft_tokens=len(proposal),
                    num_accepted_tokens=num_accepted,
                    draft_s=seconds.draft_cost_s,
                    verify_s=seconds.verify_cost_s,
                    confidences=tuple(token.confidence for token in proposal),
                )
            )

    def _find_reached_cap(self, *, num_rounds: int) -> StoppedBy | None:
        limits = self.limits
        if limits.max_tokens is not None and self.num_output_tokens >= limits.max_tokens:
            return "max_tokens"
        if limits.max_iterations is not None and num_rounds >= limits.max_iterations:
            return "max_iterations"
        return "context_length" if len(self.context_ids) >= self.target.context_length else None

    @contextlib.contextmanager
    def _drop_failed_draft(self, where: str = "") -> Generator[None]:
        """Whatever the draft raises ends the draft, not the answer; the first reason is kept.

        Also CancelledError: no task of the caller's is cancelled in here.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - as above
            if self.fallback is None:
                cause = "" if isinstance(error, Exception) else " (raised by the draft; nobody cancelled it)"
                self.fallback = format_error_line(error) + (where or cause)
            self._open_draft = None
            self.close_draft()


def _check_prompt(target: TokenModel, prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise InvalidRequestError("the prompt has no tokens; give at least one")
    if len(prompt_ids) >= target.context_length:
        raise InvalidRequestError(
            f"the prompt has {len(prompt_ids)} tokens; {target.name} takes fewer than {target.context_length} "
            "(its context length)"
        )
