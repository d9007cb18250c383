"""Models, drafts and rules of which a generation is made, with or without times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from llm_spec import ChatRequest, Fixed, Sampling, StreamEvent
from llm_spec.contract.token_model import (
    DeviceRoundResult,
    DraftToken,
    TokenDraft,
    TokenDrafter,
    TokenModel,
    TokenSampler,
)
from llm_spec.local.acceptance import make_acceptance_rule
from llm_spec.local.acceptance_name import AcceptanceName
from llm_spec.local.answer import generate_events
from llm_spec.local.lookahead import LookaheadController, LookaheadPolicy
from llm_spec.local.loop import Generation, GenerationLimits
from llm_spec.local.sampling import Sampler
from llm_spec.testing import TableModel

__all__ = [
    "DRAFT_TOKEN_S",
    "EOS_S",
    "LEARN_S",
    "OPEN_DRAFT_S",
    "OPEN_S",
    "PREPARE_S",
    "ROW_S",
    "DevicePart",
    "ScriptedDraft",
    "Seconds",
    "SlowRule",
    "device_generation_of",
    "events_of",
    "generation_of",
]


class ScriptedDraft:
    """A token draft that proposes what a function of the context says; counts what is opened and closed."""

    name = "scripted-tokens"

    def __init__(self, propose: Callable[[Sequence[int]], Iterator[DraftToken]]) -> None:
        self._propose = propose
        self.num_opened = self.num_closed = 0

    def token_draft_refusal(self, target: TokenModel) -> str | None:  # noqa: ARG002 - ids are scripted
        return None

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:  # noqa: ARG002
        self.num_opened += 1
        return self

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        return self._propose(context_ids)

    def close(self) -> None:
        self.num_closed += 1


def events_of(
    target: TokenModel,
    request: ChatRequest,
    drafter: TokenDrafter | None = None,
    *,
    lookahead: LookaheadPolicy | None = None,
    acceptance: AcceptanceName = "coupled",
    limits: GenerationLimits | None = None,
) -> list[StreamEvent]:
    batches = generate_events(
        target, request, drafter=drafter, lookahead=lookahead, acceptance=acceptance, limits=limits
    )
    return list(itertools.chain.from_iterable(batches))


# ---------------------------------------------------------------------------------------- hand-made rounds


def generation_of(
    target: TableModel, drafter: TokenDrafter | None = None, *, lookahead: int = 4, **limits: Any
) -> Generation:
    prompt_ids = target.tokenizer.encode_chat(ChatRequest.create("tell"))
    sampler = Sampler(Sampling(temperature=0), vocab_size=target.vocab_size, num_prompt_tokens=len(prompt_ids), seed=0)
    rule = make_acceptance_rule("coupled", sampler)
    open_draft = (
        None if drafter is None else partial(drafter.open_token_draft, target, rule.choose_draft_token, prompt_ids)
    )
    policy = Fixed(lookahead).start()
    return Generation(target, prompt_ids, rule, policy, limits=GenerationLimits(**limits), open_draft=open_draft)


# ---------------------------------------------------------------------------------------------- times

# Seconds of a clock that stands still but for these; powers of two, so that sums are exact.
OPEN_S, ROW_S, OPEN_DRAFT_S, DRAFT_TOKEN_S, PREPARE_S, EOS_S, LEARN_S = (2.0**n for n in (4, 1, 3, -1, -2, -5, -6))


class Seconds:
    """A clock for `time.perf_counter` that `spend` moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def spend(self, seconds: float) -> None:
        self.now += seconds


class SlowRule:
    """A rule that takes its time to prepare."""

    lossy = False

    def __init__(self, seconds: Seconds, target: TableModel) -> None:
        self._seconds = seconds
        self._rule = make_acceptance_rule(
            "coupled", Sampler(Sampling(), vocab_size=target.vocab_size, num_prompt_tokens=5, seed=0)
        )
        self.choose_draft_token, self.verify_proposal = self._rule.choose_draft_token, self._rule.verify_proposal

    def prepare_noise(self, position: int) -> None:  # noqa: ARG002 - greedy
        self._seconds.spend(PREPARE_S)


class DevicePart:
    """Rounds on a device, all alike; each takes 2 s of this process's time."""

    has_device_draft = True
    open_draft_s = 6.0

    def __init__(self, result: DeviceRoundResult, seconds: Seconds | None = None) -> None:
        self._result = result
        self._seconds = seconds or Seconds()
        self.rooms: list[int] = []
        self.lookaheads: list[int] = []

    def open(self) -> DevicePart:
        self._seconds.spend(10.0)
        return self

    def draft_and_verify(self, lookahead: int, room: int) -> DeviceRoundResult:
        self.lookaheads.append(lookahead)
        self._seconds.spend(2.0)
        self.rooms.append(room)
        return self._result

    def verify(self, drafted_ids: Sequence[int]) -> DeviceRoundResult:  # noqa: ARG002 - always the same
        raise AssertionError("nothing was drafted here")

    def close(self) -> None:
        """Nothing to release."""


def device_generation_of(target: TableModel, lookahead: LookaheadController, runner: DevicePart) -> Generation:
    prompt_ids = target.tokenizer.encode_chat(ChatRequest.create("tell"))
    rule = SlowRule(Seconds(), target)

    def open_rounds(cancelled: Callable[[], bool]) -> DevicePart:  # noqa: ARG001 - at once
        return runner.open()

    return Generation(target, prompt_ids, rule, lookahead, open_rounds=open_rounds)
