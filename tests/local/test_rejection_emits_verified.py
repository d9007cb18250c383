"""Whatever becomes of a draft, rejection sampling emits the target's own distribution: what was drawn is verified.

Whole generations, pairs of tokens and the chi-square test of `test_acceptance`, with drafts that end in every way that
may depend on what they drew. The planted faults are those rules that shipped here once: a first token dropped for its
own probability, and a proposal dropped because the draft failed behind it.

The draft's end depends on which tokens are odd, so that is also compared by itself. With these numbers of samples each
fault is found with power .999; a right rule fails once in a million times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_spec import CascadeDraft, Fixed, ProviderDraft
from llm_spec.contract.draft import DraftCapabilities
from llm_spec.contract.token_model import DraftToken, TokenDraft, TokenDrafter, TokenModel, TokenSampler
from llm_spec.drafting import cascade, draft_worth
from llm_spec.local.acceptance import RejectionAcceptance
from llm_spec.local.lookahead import LookaheadController
from llm_spec.local.loop import Generation, GenerationLimits
from llm_spec.local.propose import Proposer
from llm_spec.local.sampling import Sampler
from llm_spec.testing import CharTokenizer, LocalProvider, RandomDraft, TableModel

from .pairs import (
    DRAFT,
    PROMPT_ID,
    SAMPLING,
    TARGET,
    VOCAB_SIZE,
    Floats,
    is_parity_of_target_law,
    is_target_law,
)

TIMEOUT_S = 1.0


class Table(TableModel):
    """A model whose logits depend on the last token alone, and which never ends."""

    def __init__(self, rows: Floats) -> None:
        tokenizer = CharTokenizer("abcdef")
        tokenizer.eos_token_ids = frozenset()
        super().__init__(tokenizer=tokenizer, vocab_size=VOCAB_SIZE)
        self._table = rows

    def logits(self, context_ids: Sequence[int]) -> NDArray[np.float64]:
        return self._table[context_ids[-1]]


class Clock:
    """For `time.perf_counter`."""

    def __init__(self) -> None:
        self.now = 0.0


class EndingDraft:
    """Drafts with a model, and ends in some way right after it has drawn an odd token."""

    def __init__(self, ending: str, clock: Clock) -> None:
        self.name = ending
        self._clock = clock
        self._inner = ProviderDraft(LocalProvider(Table(DRAFT)))

    def token_draft_refusal(self, target: TokenModel) -> str | None:
        return self._inner.token_draft_refusal(target)

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:
        return _EndingTokens(self.name, self._clock, self._inner.open_token_draft(target, choose, prompt_ids))


class _EndingTokens:
    def __init__(self, ending: str, clock: Clock, inner: TokenDraft) -> None:
        self._ending = ending
        self._clock = clock
        self._inner = inner
        self.close = inner.close

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        ending = self._ending
        is_odd = False
        try:
            for token in self._inner.propose(context_ids):
                is_odd = token.token_id % 2 == 1
                yield token._replace(confidence=math.nan) if is_odd and ending == "gives no number" else token
                if is_odd and ending == "fails":
                    raise RuntimeError("broken")
                if is_odd and ending == "is late":
                    self._clock.now += 2 * TIMEOUT_S
                if is_odd and ending == "stops":
                    return
        finally:
            if is_odd and ending == "fails to stop":
                raise RuntimeError("broken")


ENDINGS = ["is unsure", "fails", "fails to stop", "is late", "gives no number", "stops"]
NUM_SAMPLES = {"is unsure": 800, "gives no number": 1_500, "stops": 1_500}
CASES = [(ending, NUM_SAMPLES.get(ending, 2_600)) for ending in ENDINGS]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that generations measure by."""
    clock = Clock()
    for module in ("loop", "propose", "verify"):
        monkeypatch.setattr(f"llm_spec.local.{module}.time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(draft_worth, "perf_counter", lambda: clock.now)
    return clock


class LastDraft(RandomDraft):
    """Tokens that are as random, of a draft that comes after models."""

    capabilities = DraftCapabilities()


def count_pairs(clock: Clock, ending: str, num_samples: int) -> NDArray[np.int64]:
    """How often each pair of first tokens came out of generations at lookahead 1 to 3: [vocab_size, vocab_size]."""
    target = Table(TARGET)
    drafter: TokenDrafter = EndingDraft(ending, clock)
    if ending == "is unsure":
        drafter = CascadeDraft(ProviderDraft(LocalProvider(Table(DRAFT))), LastDraft(), min_confidence=0.3)
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE), dtype=np.int64)
    for seed in range(num_samples):
        rule = RejectionAcceptance(Sampler(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=seed))
        generation = Generation(
            target,
            [PROMPT_ID],
            rule,
            Fixed(1 + seed % 3).start(),
            limits=GenerationLimits(draft_timeout_s=TIMEOUT_S),
            open_draft=partial(drafter.open_token_draft, target, rule.choose_draft_token, [PROMPT_ID]),
        )
        with generation:
            for _ in generation:
                if generation.num_output_tokens >= 2:
                    break
        counts[generation.context_ids[1], generation.context_ids[2]] += 1
    return counts


def keeps_law(counts: NDArray[np.int64]) -> bool:
    return is_target_law(counts, 5e-7) and is_parity_of_target_law(counts, 5e-7)


@pytest.mark.parametrize(("ending", "num_samples"), CASES)
def test_joint_law_is_the_targets_however_drafts_end(clock: Clock, ending: str, num_samples: int) -> None:
    """Also where it depends on the drawn tokens whether more are drafted, and whether the draft goes on at all."""
    assert keeps_law(count_pairs(clock, ending, num_samples))


def drop_for_own_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined drafts judge a first token by how likely it was itself."""
    monkeypatch.setattr(cascade, "get_confidence_before_sampling", lambda token: token.confidence)


def drop_with_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's failure takes along what it had proposed."""
    propose = Proposer.propose

    def propose_all_or_nothing(self: Proposer, lookahead: LookaheadController, draft_room: int) -> list[DraftToken]:
        was_open = self.has_open_draft
        proposal = propose(self, lookahead, draft_room)
        return [] if was_open and not self.has_open_draft else proposal

    monkeypatch.setattr(Proposer, "propose", propose_all_or_nothing)


@pytest.mark.parametrize(("ending", "num_samples"), [case for case in CASES if case[0] != "stops"])
def test_planted_fault_dropped_tokens_are_caught(
    clock: Clock, ending: str, num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chi-square test fails where drawn tokens are dropped for what was drawn, or for what came of it."""
    plant = drop_for_own_probability if ending == "is unsure" else drop_with_the_draft
    plant(monkeypatch)
    assert not keeps_law(count_pairs(clock, ending, num_samples))
