"""One answer of a local token model, round by round: propose, verify, commit.

A round, in DESIGN.md's words: the draft proposes up to `lookahead` tokens; the target reads its last confirmed token
and those, in one forward pass; the acceptance rule says how many of them stand and which token comes next; the caches
forget the rest. With no draft every round is a plain step of the same code, which is why the two give the same text.

Everything here is synchronous and belongs to one request and one thread; `worker.py` carries it to an event loop.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from llm_spec.chat import (
    ChatRequest,
    Fallback,
    Finish,
    Origin,
    Round,
    StoppedBy,
    StreamEvent,
    TextDelta,
    Usage,
)
from llm_spec.errors import DraftError, InvalidRequestError
from llm_spec.provider import DraftToken, TokenDraft, TokenDrafter, Tokenizer, TokenModel, read_prompt
from llm_spec.result import SpeculativeStats
from llm_spec.text import IncrementalDecoder, StopMatcher, merge_deltas
from llm_spec.tokens.lookahead import CostAware, LookaheadController, LookaheadPolicy, RoundReport
from llm_spec.tokens.rules import AcceptanceName, AcceptanceRule, Verdict, make_rule
from llm_spec.tokens.sampling import Sampler
from llm_spec.tokens.statistics import ExponentialMovingAverage
from llm_spec.worker import iterate_in_thread

__all__ = ["Generation", "GenerationLimits", "TokenRound", "generate_events", "stream_token_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """Caps of one answer; None: no cap. `draft_timeout_s` is for one proposal."""

    max_tokens: int | None = None
    max_iterations: int | None = None
    max_draft_tokens: int | None = None
    draft_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class TokenRound:
    """What one round brought: its emitted tokens (EOS included), each with its origin."""

    report: Round
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    stopped_by: StoppedBy | None


class Generation:
    """Answer `prompt_ids` with `target`: iterate over rounds, or call `propose`, `verify` and `commit` yourself.

    `open_draft` is called once the target has read the prompt; None means plain decoding. Any failure of the draft
    (an exception, an id outside the vocabulary, too much time) turns the rest into plain decoding, told by `fallback`.
    Setting `cancelled` ends the iteration within one forward. Use as a context manager: it opens and closes the caches.
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
        cancelled: threading.Event | None = None,
    ) -> None:
        _check_prompt(target, prompt_ids)
        self.target = target
        self.context_ids = list(prompt_ids)  # prompt and confirmed answer
        self.num_prompt_tokens = len(prompt_ids)
        self.rule = rule
        self.lookahead = lookahead
        self.limits = limits or GenerationLimits()
        self.cancelled = cancelled or threading.Event()
        self.stats = SpeculativeStats()
        self.acceptance = ExponentialMovingAverage(half_life=8)
        self.fallback: str | None = None
        self.stopped_by: StoppedBy | None = None
        self._open_draft = open_draft
        self._draft: TokenDraft | None = None
        self._draft_s = self._verify_s = 0.0

    def __enter__(self) -> Self:
        self._session = self.target.open()
        try:
            read_prompt(self._session, self.context_ids[:-1], self.cancelled.is_set)  # a round reads the last token
            self._start_draft()
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
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.context_ids) - self.num_prompt_tokens

    def close(self) -> None:
        """Release both caches; calling it twice is harmless."""
        self._drop_draft()
        self._session.close()

    def step(self) -> TokenRound:
        """One whole round; at least one token, or `stopped_by` is set."""
        proposal = self.propose()
        return self.commit(proposal, self.verify(proposal))

    def propose(self) -> list[DraftToken]:
        """Ask the draft for guesses at the next tokens; empty when there is no draft or speculation would not pay."""
        started = time.perf_counter()
        proposal: list[DraftToken] = []
        if self._draft is not None:
            try:
                self._pull(self._draft, proposal, most=min(self.lookahead.limit(), self._room()))
            except Exception as error:  # noqa: BLE001 - whatever a draft does, the target answers
                proposal.clear()
                self._give_up(f"{type(error).__name__}: {error}")
        self._draft_s = time.perf_counter() - started
        return proposal

    def verify(self, proposal: Sequence[DraftToken]) -> Verdict:
        """Let the target read its last token and the proposal in one forward pass, and judge."""
        started = time.perf_counter()
        token_ids = [self.context_ids[-1], *(token.token_id for token in proposal)]
        logits = self._session.forward(token_ids, num_rows=len(token_ids))
        verdict = self.rule.verify(logits, self.context_ids, proposal)
        self._session.truncate(len(self.context_ids) + verdict.num_accepted)
        self._verify_s = time.perf_counter() - started
        return verdict

    def commit(self, proposal: Sequence[DraftToken], verdict: Verdict) -> TokenRound:
        """Append what the target confirmed and its own next token, up to the end of the answer."""
        num_accepted = verdict.num_accepted
        token_ids = [*(token.token_id for token in proposal[:num_accepted]), verdict.next_token_id]
        last: Origin = "plain" if not proposal else "bonus" if num_accepted == len(proposal) else "correction"
        origins: list[Origin] = ["accepted"] * num_accepted
        origins.append(last)
        end = next((i for i, t in enumerate(token_ids) if t in self.target.tokenizer.eos_token_ids), None)
        if end is not None:
            del token_ids[end + 1 :], origins[end + 1 :]
            self.stopped_by = "eos"
        self.context_ids.extend(token_ids)
        report = Round(
            index=self.stats.num_rounds,
            num_draft_tokens=len(proposal),
            num_accepted_tokens=num_accepted,
            num_emitted_tokens=len(token_ids),
            next_token_id=verdict.next_token_id,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
        )
        self._learn(report, proposal)
        self.stopped_by = self.stopped_by or self._cap_reached()
        return TokenRound(report, tuple(token_ids), tuple(origins), self.stopped_by)

    # ------------------------------------------------------------------------------------------ inside

    def _start_draft(self) -> None:
        if self._open_draft is None or self.cancelled.is_set():
            return
        try:
            self._draft = self._open_draft()
        except Exception as error:  # noqa: BLE001 - whatever a draft does, the target answers
            self._give_up(f"{type(error).__name__}: {error}")

    def _pull(self, draft: TokenDraft, proposal: list[DraftToken], *, most: int) -> None:
        if most < 1:
            return
        give_up_at = time.perf_counter() + self.limits.draft_timeout_s
        confidences: list[float | None] = []
        with contextlib.closing(_as_generator(draft.propose(self.context_ids))) as guesses:
            for token in guesses:
                if not 0 <= token.token_id < self.target.vocab_size:
                    raise DraftError(f"token id {token.token_id} is outside the vocabulary of {self.target.vocab_size}")
                proposal.append(token)
                confidences.append(token.confidence)
                if time.perf_counter() > give_up_at:
                    raise DraftError(f"a proposal took longer than {self.limits.draft_timeout_s} s")
                is_end = token.token_id in self.target.tokenizer.eos_token_ids
                if is_end or len(proposal) == most or self.cancelled.is_set() or not self.lookahead.more(confidences):
                    return

    def _room(self) -> int:
        """Most tokens that may be drafted now: a round emits one more than it drafts, and all must fit."""
        room = [
            self.target.max_width - 1,
            self.target.context_length - len(self.context_ids) - 1,
        ]
        if self.limits.max_tokens is not None:
            room.append(self.limits.max_tokens - self.num_output_tokens - 1)
        if self.limits.max_draft_tokens is not None:
            room.append(self.limits.max_draft_tokens - self.stats.num_draft_tokens)
        return min(room)

    def _learn(self, report: Round, proposal: Sequence[DraftToken]) -> None:
        self.stats += SpeculativeStats.of_round(report)
        if report.num_draft_tokens:
            self.acceptance.update(report.num_accepted_tokens / report.num_draft_tokens)
        if self._draft is not None:
            self.lookahead.update(
                RoundReport(
                    num_draft_tokens=report.num_draft_tokens,
                    num_accepted_tokens=report.num_accepted_tokens,
                    draft_s=report.draft_s,
                    verify_s=report.verify_s,
                    confidences=tuple(token.confidence for token in proposal),
                )
            )

    def _cap_reached(self) -> StoppedBy | None:
        limits = self.limits
        if limits.max_tokens is not None and self.num_output_tokens >= limits.max_tokens:
            return "max_tokens"
        if limits.max_iterations is not None and self.stats.num_rounds >= limits.max_iterations:
            return "max_iterations"
        return "context_length" if len(self.context_ids) >= self.target.context_length else None

    def _give_up(self, reason: str) -> None:
        self.fallback = reason
        self._open_draft = None
        self._drop_draft()

    def _drop_draft(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            with contextlib.suppress(Exception):  # the answer does not depend on how a draft ends
                draft.close()


def generate_events(
    target: TokenModel,
    request: ChatRequest,
    cancelled: threading.Event | None = None,
    *,
    drafter: TokenDrafter | None = None,
    acceptance: AcceptanceName = "coupled",
    lookahead: LookaheadPolicy | None = None,
    limits: GenerationLimits | None = None,
) -> Iterator[StreamEvent]:
    """Answer a chat request with a local model: text as it is verified, a `Round` after each round, then `Finish`.

    Stop strings and incomplete characters are held back. `request.max_tokens` is the only cap taken from the request;
    a request that samples without a seed gets a random one. Raises InvalidRequestError for what a local model cannot
    serve, and what the target raises.
    """
    _check_servable(target, request)
    prompt_ids = target.tokenizer.encode_chat(request)
    seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(64)
    sampler = Sampler(request.sampling, vocab_size=target.vocab_size, num_prompt_tokens=len(prompt_ids), seed=seed)
    rule = make_rule(acceptance, sampler)
    limits = replace(limits or GenerationLimits(), max_tokens=request.max_tokens)
    generation = Generation(
        target,
        prompt_ids,
        rule,
        (lookahead or CostAware()).start(),
        limits=limits,
        open_draft=None if drafter is None else partial(drafter.open_token_draft, target, rule.choose, prompt_ids),
        cancelled=cancelled,
    )
    text = _TextEmitter(target.tokenizer, request.stop)
    with generation:
        if generation.fallback is not None:
            yield Fallback(generation.fallback)
        told = generation.fallback
        for tokens in generation:
            report, deltas = text.show(tokens)
            yield from deltas
            yield report
            if generation.fallback != told:
                told = generation.fallback
                yield Fallback(str(told))
            if text.stopped:
                break
        yield from text.flush()
        stopped_by: StoppedBy = "stop_string" if text.stopped else generation.stopped_by or "max_tokens"
        yield Finish(
            "stop" if stopped_by in ("eos", "stop_string") else "length",
            Usage(input_tokens=len(prompt_ids), output_tokens=text.num_tokens),
            stopped_by,
            None if drafter is None else Usage(output_tokens=generation.stats.num_draft_tokens),
        )


def stream_token_model(
    target: TokenModel,
    request: ChatRequest,
    *,
    drafter: TokenDrafter | None = None,
    acceptance: AcceptanceName = "coupled",
    lookahead: LookaheadPolicy | None = None,
    limits: GenerationLimits | None = None,
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    """`generate_events` in a worker thread: what a local provider's `stream` returns."""
    return iterate_in_thread(
        partial(
            generate_events,
            target,
            request,
            drafter=drafter,
            acceptance=acceptance,
            lookahead=lookahead,
            limits=limits,
        )
    )


class _TextEmitter:
    """The text of one answer: ids in, deltas out that may be shown."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._eos_token_ids = tokenizer.eos_token_ids
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(stop)
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer."""
        return self._matcher.matched is not None

    def show(self, tokens: TokenRound) -> tuple[Round, list[TextDelta]]:
        """What may be shown of this round, and its report with what a stop string cut off taken out."""
        deltas: list[TextDelta] = []
        num_emitted = 0
        for token_id, origin in zip(tokens.token_ids, tokens.origins, strict=True):
            num_emitted += 1
            if token_id not in self._eos_token_ids:
                deltas += self._matcher.push(self._decoder.push(token_id), origin)
            if self.stopped:
                break
        self.num_tokens += num_emitted
        return replace(tokens.report, num_emitted_tokens=num_emitted), merge_deltas(deltas)

    def flush(self) -> list[TextDelta]:
        """What was held back and belongs to the answer after all."""
        return merge_deltas([*self._matcher.push(self._decoder.flush()), *self._matcher.flush()])


def _check_prompt(target: TokenModel, prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise InvalidRequestError("the prompt has no tokens; give at least one")
    if len(prompt_ids) >= target.context_length:
        raise InvalidRequestError(
            f"the prompt has {len(prompt_ids)} tokens; {target.name} takes fewer than {target.context_length} "
            "(its context length)"
        )


def _check_servable(target: TokenModel, request: ChatRequest) -> None:
    """Refuse what a local model would have to leave out, rather than leave it out silently."""
    asked = {"tools": request.tools, "response_format": request.response_format, "extra": request.extra}
    for name, value in asked.items():
        if value:
            raise InvalidRequestError(f"{name} is set; {target.name} is a local model and cannot serve it")
    for message in request.messages:
        if isinstance(message.content, tuple) and any(part.get("type") != "text" for part in message.content):
            raise InvalidRequestError(f"a message has a part that is not text; {target.name} reads text alone")


def _as_generator(guesses: Iterator[DraftToken]) -> Generator[DraftToken]:
    """A closable view, so that a draft's own clean-up runs when the round has enough."""
    yield from guesses
