"""One answer of a local token model, round by round: propose, verify, accept, commit.

Speculative decoding after Leviathan et al. (arXiv 2211.17192). In a round the draft proposes up to `lookahead` tokens.
The target reads its last confirmed token and the proposal in one forward pass. The acceptance rule says how many of
the drafted tokens stand, and which token of the target's own follows them. Without a draft every proposal is empty and
every round is a plain step of the same loop. So coupled sampling (arXiv 2408.07978), the default rule, gives the same
text with and without speculation.

`decode_rounds` is the loop. `Generation` opens and closes what the loop needs, and holds the answer so far. `Proposer`
and `Verifier` are the two halves of a round. Everything here is synchronous and belongs to one request and one thread;
`threads.py` carries it to an event loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from llm_spec.contract.errors import InvalidRequestError, make_context_length_error
from llm_spec.contract.events import Origin, Round, StoppedBy
from llm_spec.contract.stats import SpeculativeStats
from llm_spec.contract.token_model import DeviceRoundRunner, DraftToken, TokenDraft, TokenModel
from llm_spec.local.acceptance import AcceptanceRule
from llm_spec.local.chosen_logprobs import ChosenLogprob
from llm_spec.local.lookahead import LookaheadController, RoundFeedback
from llm_spec.local.propose import Proposer
from llm_spec.local.verify import DeviceVerifier, HostVerifier, VerifiedProposal, Verifier

__all__ = [
    "Generation",
    "GenerationLimits",
    "TokenRound",
    "count_right_tokens",
    "count_worth_verifying",
    "decode_rounds",
]


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
    """What one round brought: its emitted tokens (EOS included), each with its origin.

    `logprobs`: of each emitted token if they were requested; otherwise empty.
    """

    report: Round
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    stopped_by: StoppedBy | None
    logprobs: tuple[ChosenLogprob, ...] = ()


def decode_rounds(answer: Generation, proposer: Proposer, verifier: Verifier) -> Iterator[TokenRound]:
    """Propose, verify, accept and commit until the answer ends or is cancelled; every round emits at least one token.

    `draft_s` and `verify_s` of a round add up to the time that it took in this process. The lookahead steers by what
    drafting and verifying alone cost, by the device's clock where it has one; but for what a draft itself weighs.
    """
    watch = _Stopwatch()
    while answer.stopped_by is None and not answer.cancelled.is_set():
        answer.between_s += watch.measure_lap_s()
        lookahead, draft_room = answer.lookahead, answer.count_draftable_next_round()
        verifier.prepare_round(len(answer.context_ids))
        prepare_s = watch.measure_lap_s()

        proposed = proposer.propose(lookahead, draft_room)
        proposal: Sequence[DraftToken] = proposed[: count_worth_verifying(proposed, lookahead)]
        draft_s = watch.measure_lap_s()
        priced_draft_s = max(draft_s - proposer.self_paced_s, 0.0)

        room_ahead = (
            0 if proposer.has_open_draft else answer.count_draftable_tokens()
        )  # a draft on the host proposes before the round begins
        if proposed and not proposal:
            draft_room = 0  # a plain step: the verifier drafts nothing of its own either
        verified = verifier.verify_proposal(answer.context_ids, proposal, lookahead, draft_room, room_ahead)
        proposal = verified.proposal
        verify_s = watch.measure_lap_s()

        token_ids, origins = label_emitted_tokens(verified, answer.eos_token_ids)
        num_accepted = origins.count("accepted")

        answer.commit(token_ids, num_drafted=len(proposal))
        proposer.end_round(token_ids, verified.verify_s)
        if proposer.has_open_draft or verifier.has_own_draft:
            considered = proposed or proposal
            lookahead.update(
                RoundFeedback(
                    num_draft_tokens=len(proposal),
                    num_accepted_tokens=num_accepted,
                    draft_s=priced_draft_s + verified.draft_s,
                    verify_s=verified.verify_s,
                    confidences=tuple(token.confidence for token in considered),
                    num_right=count_right_tokens(considered, token_ids),
                )
            )
        device_draft_s = verify_s * verified.drafting_time_share
        report = Round(
            index=len(answer.rounds),
            num_draft_tokens=len(proposal),
            num_accepted_tokens=num_accepted,
            num_emitted_tokens=len(token_ids),
            next_token_id=verified.next_token_id,
            draft_s=draft_s + device_draft_s,
            verify_s=prepare_s + verify_s - device_draft_s + watch.measure_lap_s(),
        )
        answer.rounds.append(report)
        logprobs = tuple(verified.logprobs[: len(token_ids)])
        yield TokenRound(report, token_ids, origins, answer.stopped_by, logprobs)


def count_worth_verifying(proposed: Sequence[DraftToken], lookahead: LookaheadController) -> int:
    """How many of the proposed tokens to verify: all, where one was drawn, as what is emitted would depend on it."""
    if not proposed or any(token.probs is not None for token in proposed):
        return len(proposed)
    return lookahead.choose_num_verified([token.confidence for token in proposed])


def count_right_tokens(proposed: Sequence[DraftToken], token_ids: Sequence[int]) -> int:
    """How many of the first proposed tokens are those that were emitted."""
    pairs = zip(proposed, token_ids, strict=False)
    return next(
        (index for index, (token, token_id) in enumerate(pairs) if token.token_id != token_id),
        min(len(proposed), len(token_ids)),
    )


def label_emitted_tokens(
    verified: VerifiedProposal, eos_token_ids: Collection[int]
) -> tuple[tuple[int, ...], tuple[Origin, ...]]:
    """The tokens that a round emits, up to the first end of the text, and the origin of each."""
    if not verified.proposal:
        return (verified.next_token_id,), ("plain",)
    num_accepted = verified.num_accepted
    token_ids = [*(token.token_id for token in verified.proposal[:num_accepted]), verified.next_token_id]
    num_emitted = next((i for i, token_id in enumerate(token_ids, 1) if token_id in eos_token_ids), len(token_ids))
    is_bonus = num_accepted == len(verified.proposal)
    own: Origin = "bonus" if is_bonus else "correction"
    origins: list[Origin] = ["accepted"] * num_accepted
    origins.append(own)
    return tuple(token_ids[:num_emitted]), tuple(origins[:num_emitted])


class Generation:
    """Answer `prompt_ids` with `target`: enter it as a context manager, then iterate over its rounds.

    Entering opens the caches and reads the prompt; leaving closes them. Setting `cancelled` ends the iteration within
    one forward pass.

    `open_draft` is called once the target has read the prompt; None means plain decoding. Any failure of the draft (an
    exception, an id outside the vocabulary, too much time) ends its drafting: what it had proposed until then is
    verified, the rest is plain decoding, and `fallback` says why. KeyboardInterrupt and SystemExit pass through.

    `open_rounds` gives rounds on a device, or None. They sample and accept there, without `rule`. Where they draft as
    well, `open_companion_draft` takes the place of `open_draft`: what it does not propose, they draft.

    `top_logprobs`: so many of the likeliest tokens are given for each token; None: no log-probabilities. Rounds on a
    device keep their logits and tell none. `exact`: as in `TokenModel.open`.

    `prompt_s`: seconds for opening the target's session and reading the prompt. `open_draft_s`: for opening the draft.
    `between_s`: between rounds, when the consumer had the last one. Raises InvalidRequestError for a prompt that does
    not fit, and what the target raises.
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
        top_logprobs: int | None = None,
        exact: bool = True,
        cancelled: threading.Event | None = None,
    ) -> None:
        _check_prompt_fits(target, prompt_ids)
        self.target = target
        self.eos_token_ids = target.tokenizer.eos_token_ids
        self.context_ids = list(prompt_ids)  # prompt and confirmed answer
        self.num_prompt_tokens = len(prompt_ids)
        self.lookahead = lookahead
        self.limits = limits or GenerationLimits()
        self.cancelled = cancelled or threading.Event()
        self.rounds: list[Round] = []
        self.stopped_by: StoppedBy | None = None
        self.prompt_s = self.open_draft_s = self.between_s = 0.0
        self._rule = rule
        self._open_draft = open_draft
        self._open_device_rounds = open_rounds
        self._open_companion_draft = open_companion_draft
        self._top_logprobs = top_logprobs
        self._exact = exact
        self._verifier: Verifier | None = None
        self._proposer = Proposer(
            target, self.context_ids, timeout_s=self.limits.draft_timeout_s, cancelled=self.cancelled
        )
        self._num_draft_tokens = self._num_plain_steps = self._num_rounds_since_plain = 0

    # ------------------------------------------------------------------------------- opening and closing

    def __enter__(self) -> Self:
        started = time.perf_counter()
        try:
            self._verifier = verifier = self._open_verifier()
            self.prompt_s = time.perf_counter() - started - verifier.open_draft_s
            self.open_draft_s = verifier.open_draft_s
            open_draft = self._open_companion_draft if verifier.has_own_draft else self._open_draft
            if open_draft is not None and not self.cancelled.is_set():
                started = time.perf_counter()
                self._proposer.open_draft_if_possible(open_draft)
                self.open_draft_s += time.perf_counter() - started
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[TokenRound]:
        if self._verifier is None:
            raise RuntimeError("a Generation is a context manager; enter it before asking for tokens")
        return decode_rounds(self, self._proposer, self._verifier)

    def close(self) -> None:
        """Release both caches; calling it twice is harmless."""
        self.close_draft()
        verifier, self._verifier = self._verifier, None
        if verifier is not None:
            verifier.close()

    def close_draft(self) -> None:
        """Close the draft, after which the target goes on alone; calling it twice is harmless."""
        self._proposer.close()

    def _open_verifier(self) -> Verifier:
        runner = None if self._open_device_rounds is None else self._open_device_rounds(self.cancelled.is_set)
        if runner is not None:
            return DeviceVerifier(runner)
        return HostVerifier.open(
            self.target,
            self.context_ids,
            self._rule,
            self.cancelled.is_set,
            self._top_logprobs,
            exact=self._exact,
        )

    # --------------------------------------------------------------------------------- the answer so far

    @property
    def fallback_reason(self) -> str | None:
        """Why the draft was dropped; None if it was not."""
        return self._proposer.fallback

    @property
    def stats(self) -> SpeculativeStats:
        """All rounds so far, or since `rounds` was cleared."""
        return SpeculativeStats.from_rounds(self.rounds)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.context_ids) - self.num_prompt_tokens

    def count_draftable_tokens(self) -> int:
        """Most tokens that may still be drafted: a round emits one more than it drafts, and all must fit."""
        room = [self.target.context_length - len(self.context_ids) - 1]
        if self.limits.max_tokens is not None:
            room.append(self.limits.max_tokens - self.num_output_tokens - 1)
        if self.limits.max_draft_tokens is not None:
            room.append(self.limits.max_draft_tokens - self._num_draft_tokens)
        return min(room)

    def count_draftable_next_round(self) -> int:
        """Most tokens that may be drafted in the next round; 0 where a plain step is due."""
        is_speed_known = self._num_plain_steps >= self.limits.min_plain_steps
        if self._num_rounds_since_plain >= (self.limits.plain_every if is_speed_known else 1) > 0:
            return 0
        return min(self.target.max_width - 1, self.count_draftable_tokens())

    def commit(self, token_ids: Sequence[int], *, num_drafted: int) -> None:
        """Append what a round emits, count it, and set `stopped_by` where it ends the answer."""
        self.context_ids.extend(token_ids)
        self._num_draft_tokens += num_drafted
        self._num_plain_steps += not num_drafted
        self._num_rounds_since_plain = self._num_rounds_since_plain + 1 if num_drafted else 0
        self.stopped_by = "eos" if token_ids[-1] in self.eos_token_ids else self._find_reached_answer_limit()

    def _find_reached_answer_limit(self) -> StoppedBy | None:
        limits = self.limits
        if limits.max_tokens is not None and self.num_output_tokens >= limits.max_tokens:
            return "max_tokens"
        if limits.max_iterations is not None and len(self.rounds) + 1 >= limits.max_iterations:
            return "max_iterations"
        return "context_length" if len(self.context_ids) >= self.target.context_length else None


class _Stopwatch:
    """Consecutive laps, in seconds: no time is lost between them."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def measure_lap_s(self) -> float:
        """Seconds since the last lap ended."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def _check_prompt_fits(target: TokenModel, prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise InvalidRequestError("the prompt has no tokens; give at least one")
    if len(prompt_ids) >= target.context_length:
        raise make_context_length_error(
            f"the prompt has {len(prompt_ids)} tokens; {target.name} takes fewer than {target.context_length} "
            "(its context length)"
        )
    highest = max(prompt_ids)
    if highest >= target.vocab_size:  # of a token that was added to a tokenizer alone
        raise InvalidRequestError(
            f"the prompt has token {highest}; {target.name} has weights for tokens 0 to {target.vocab_size - 1}"
        )
