"""Coupled and rejection sampling emit the target's own law, and the tests that say so catch every known fault.

The losslessness test draws joint sequences of two tokens, vocabulary 8, from a target whose law depends on the token
before, through the real rules at lookahead 1 to 3, and compares their counts with the exact law by chi-square at
significance 1e-6. With power .999, 8,200 samples find a total variation of .05, 51,000 of .02 and 205,000 of .01.
The usual run draws 51,000, the slow one 205,000.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# (pytest.approx, scipy and array libraries are partly untyped)

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from llm_spec.chat import Sampling
from llm_spec.errors import ConfigError, ModelOutputError
from llm_spec.provider import DraftToken
from llm_spec.tokens import rules
from llm_spec.tokens.noise import Purpose
from llm_spec.tokens.rules import AcceptanceRule, Coupled, LossyTypical, Rejection, Verdict, make_rule, residual
from llm_spec.tokens.sampling import Sampler

Floats = NDArray[np.float64]
Propose = Callable[[AcceptanceRule, Floats, list[int]], DraftToken]
Rows = Callable[[list[int]], Floats]

VOCAB_SIZE = 8
PROMPT_ID = 0
NUM_SAMPLES = 8_200  # finds the faults
_RANDOM = np.random.default_rng(5)
TARGET = _RANDOM.normal(scale=0.8, size=(VOCAB_SIZE, VOCAB_SIZE))  # row: logits after that token
DRAFT = TARGET + _RANDOM.normal(scale=0.7, size=TARGET.shape)
TARGET[:, 5] = -math.inf  # a token that only the draft can say
DRAFT[:, 6] = -math.inf  # and one that only the target can say
SAMPLING = Sampling(temperature=1.0)


def softmax(logits: Floats) -> Floats:
    mass: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    mass /= mass.sum(axis=-1, keepdims=True)
    return mass


# ------------------------------------------------------------------------------- the harness: a round, many samples


def drafted(rule: AcceptanceRule, logits: Floats, context_ids: list[int]) -> DraftToken:
    return rule.choose(logits, context_ids)


def given_greedy(rule: AcceptanceRule, logits: Floats, context_ids: list[int]) -> DraftToken:  # noqa: ARG001 # a Propose
    return DraftToken(int(logits.argmax()))


def target_rows(last_ids: list[int]) -> Floats:
    """The target's logits after each of these tokens."""
    return TARGET[last_ids]


def two_tokens(
    rule: AcceptanceRule, context_ids: list[int], lookahead: int, *, propose: Propose, rows: Rows, keep_above: float
) -> tuple[int, int]:
    """The first two tokens that rounds of this lookahead emit after a context."""
    emitted: list[int] = []
    while len(emitted) < 2:
        base = context_ids + emitted
        proposal: list[DraftToken] = []
        for _ in range(lookahead):
            context = base + [token.token_id for token in proposal]
            token = propose(rule, DRAFT[context[-1]], context)
            if token.confidence is not None and token.confidence < keep_above:
                break
            proposal.append(token)
        ids = [token.token_id for token in proposal]
        verdict = rule.verify(rows([base[-1], *ids]), base, proposal)
        emitted += [*ids[: verdict.num_accepted], verdict.next_token_id]
    return emitted[0], emitted[1]


def count_pairs(
    make: Callable[[Sampler], AcceptanceRule],
    num_samples: int,
    *,
    propose: Propose = drafted,
    rows: Rows = target_rows,
    keep_above: float = 0.0,
) -> NDArray[np.int64]:
    """How often each pair came: [vocab_size, vocab_size]. A rule serves 100 samples, each at positions of its own."""
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE), dtype=np.int64)
    for seed in range(-(-num_samples // 100)):
        rule = make(Sampler(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=seed))
        for slot in range(min(100, num_samples - 100 * seed)):
            context = [PROMPT_ID] * (1 + 8 * slot)
            lookahead = 1 + slot % 3
            pair = two_tokens(rule, context, lookahead, propose=propose, rows=rows, keep_above=keep_above)
            counts[pair] += 1
    return counts


def is_target_law(counts: NDArray[np.int64]) -> bool:
    """Chi-square against the exact joint law, significance 1e-6; a pair that cannot be must not have come."""
    law = softmax(TARGET)
    expected = (law[PROMPT_ID][:, None] * law).ravel()
    observed = counts.ravel()
    if observed[expected == 0.0].any():
        return False
    possible = expected > 0.0
    return bool(stats.chisquare(observed[possible], expected[possible] * observed.sum()).pvalue > 1e-6)


# ---------------------------------------------------------------------------------------------- losslessness


@pytest.mark.parametrize("num_samples", [51_000, pytest.param(205_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [Coupled, Rejection])
def test_joint_law_is_the_targets(make: Callable[[Sampler], AcceptanceRule], num_samples: int) -> None:
    """Drafting with a model leaves the target's joint law as it is."""
    assert is_target_law(count_pairs(make, num_samples))


@pytest.mark.parametrize("make", [Coupled, Rejection])
def test_joint_law_with_given_tokens_is_the_targets(make: Callable[[Sampler], AcceptanceRule]) -> None:
    """Tokens that were given, not drawn, leave the target's joint law as it is."""
    assert is_target_law(count_pairs(make, NUM_SAMPLES, propose=given_greedy))


def test_dropping_a_drafted_token_is_harmless_when_coupled() -> None:
    """Coupled mode is safe with any stopping rule, even one that throws drafted tokens away."""
    assert is_target_law(count_pairs(Coupled, NUM_SAMPLES, keep_above=0.2))


# ---------------------------------------------------------------------------------- faults that the test must catch


class SharedNoise(Rejection):
    """One stream for draft, accept, residual and bonus (vLLM #54282)."""

    def _uniform(self, position: int, purpose: Purpose) -> float:  # noqa: ARG002 # the fault
        return super()._uniform(position, Purpose.DRAFT)


class SharedResidualNoise(Rejection):
    """The residual is drawn with the draft's noise; the acceptance has its own."""

    def _uniform(self, position: int, purpose: Purpose) -> float:
        return super()._uniform(position, Purpose.DRAFT if purpose is Purpose.RESIDUAL else purpose)


class RatioAboveHalf(Rejection):
    """Accepts when p_target / p_draft exceeds one half."""

    def _uniform(self, position: int, purpose: Purpose) -> float:
        return 0.5 if purpose is Purpose.ACCEPT else super()._uniform(position, purpose)


class NoBonus(Rejection):
    """Draws the bonus from the row of the last drafted token."""

    def verify(self, logits: Floats, context_ids: Sequence[int], proposal: Sequence[DraftToken]) -> Verdict:  # type: ignore[override] # float64 is all that the tests use
        rows = logits.copy()
        rows[-1] = rows[max(len(proposal) - 1, 0)]
        return super().verify(rows, context_ids, proposal)


class SameNoiseEverywhere(Sampler):
    """The noise of every position is that of the prompt's end."""

    def noise(self, position: int) -> Floats:
        return super().noise(position - position % 8)


@pytest.mark.parametrize("make", [SharedNoise, SharedResidualNoise, RatioAboveHalf, NoBonus])
def test_planted_fault_in_rejection_is_caught(make: Callable[[Sampler], AcceptanceRule]) -> None:
    """The chi-square test fails for a rule with this fault."""
    assert not is_target_law(count_pairs(make, NUM_SAMPLES))


def test_planted_fault_residual_from_the_target_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square test fails where the correction is drawn from p_target and not from the residual."""
    monkeypatch.setattr(rules, "residual", lambda p_target, token: p_target)  # noqa: ARG005 # its signature
    assert not is_target_law(count_pairs(Rejection, NUM_SAMPLES))


def test_planted_fault_dropped_token_is_caught() -> None:
    """The chi-square test fails where a drawn token is thrown away because its own probability is low."""
    assert not is_target_law(count_pairs(Rejection, NUM_SAMPLES, keep_above=0.2))


@pytest.mark.parametrize("make", [Coupled, Rejection])
def test_planted_fault_one_row_for_every_position_is_caught(make: Callable[[Sampler], AcceptanceRule]) -> None:
    """The chi-square test fails where the first row of logits is used for every position."""
    assert not is_target_law(count_pairs(make, NUM_SAMPLES, rows=lambda ids: TARGET[[ids[0]] * len(ids)]))


def test_planted_fault_greedy_draft_with_soft_law_is_caught() -> None:
    """The chi-square test fails where a greedy draft is scored with its soft probabilities (transformers #32867)."""

    def propose(rule: AcceptanceRule, logits: Floats, context_ids: list[int]) -> DraftToken:  # noqa: ARG001 # a Propose
        return DraftToken(int(logits.argmax()), None, softmax(logits))

    assert not is_target_law(count_pairs(Rejection, NUM_SAMPLES, propose=propose))


def test_planted_fault_shared_position_noise_is_caught() -> None:
    """The chi-square test fails where all positions of a sample have the same noise."""

    def make(sampler: Sampler) -> AcceptanceRule:
        return Coupled(SameNoiseEverywhere(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=sampler.seed))

    assert not is_target_law(count_pairs(make, NUM_SAMPLES))


class LeftSide(Rejection):
    """Inverse transform that takes the first token whose cumulated mass reaches the uniform, be it zero."""

    def _draw(self, law: Floats, position: int, purpose: Purpose) -> int:
        cumulated = law.cumsum()
        return int(cumulated.searchsorted(self._uniform(position, purpose) * cumulated[-1], side="left"))


def says_impossible_token(make: Callable[[Sampler], AcceptanceRule]) -> bool:
    """Whether token 0, of zero mass, comes out: drawn as bonus, drawn as correction, or accepted."""
    logits = np.array([[-math.inf, 0.0, 1.0]] * 2)
    rule = make(Sampler(SAMPLING, vocab_size=3, num_prompt_tokens=1, seed=0))
    surely_0, surely_1 = DraftToken(0), DraftToken(1, None, np.array([0.0, 1.0, 0.0]))
    bonus, correction = rule.verify(logits[:1], [1], []), rule.verify(logits, [1], [surely_0])
    after = rule.verify(logits, [1], [surely_1])
    return 0 in {bonus.next_token_id, correction.next_token_id, after.next_token_id} or correction.num_accepted > 0


def test_impossible_token_is_never_said_even_if_the_uniform_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform of 0 neither accepts nor draws a token of zero probability; the planted fault does."""
    monkeypatch.setattr(rules, "uniform_number", lambda *_: 0.0)
    assert not says_impossible_token(Rejection)
    assert says_impossible_token(LeftSide)


# --------------------------------------------------------------------------------------------------- algebra


def laws(draw: st.DrawFn) -> Floats:
    """Equal, disjoint, one-hot, masked and ordinary laws over 8 tokens."""
    weights = draw(st.lists(st.sampled_from([0.0, 0.0, 1e-12, 0.1, 1.0, 5.0]), min_size=8, max_size=8).filter(any))
    return np.array(weights) / sum(weights)


PAIRS = st.composite(laws)()


@settings(max_examples=300, deadline=None)
@given(PAIRS, PAIRS)
def test_accepted_and_residual_add_up_to_the_target(p_draft: Floats, p_target: Floats) -> None:
    """p_draft * min(1, p_target / p_draft) + P(rejected) * residual is p_target."""
    accepted = np.minimum(p_draft, p_target)
    left = residual(p_target, DraftToken(0, None, p_draft))
    rejected = 1.0 - accepted.sum()
    np.testing.assert_allclose(accepted + rejected * left / left.sum(), p_target, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(PAIRS, st.integers(0, 7))
def test_given_token_and_residual_add_up_to_the_target(p_target: Floats, token_id: int) -> None:
    """The same with a token that was given: all of p_draft is on it."""
    accepted = np.zeros(8)
    accepted[token_id] = p_target[token_id]
    left = residual(p_target, DraftToken(token_id))
    np.testing.assert_allclose(accepted + (1.0 - accepted.sum()) * left / left.sum(), p_target, atol=1e-9)


def test_equal_laws_always_accept() -> None:
    """A draft with the target's own law is never rejected."""
    rule = Rejection(Sampler(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=3))
    for row in range(200):
        logits = TARGET[[row % 5, 1]]
        assert rule.verify(logits, [0], [rule.choose(logits[0], [0])]).num_accepted == 1


# ------------------------------------------------------------------------------------- one seed, one text

OPTIONS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    Sampling(temperature=1.0, logit_bias={3: 2.0, 4: -100.0}),
    Sampling(repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={2: 1.0}),
]


def write(sampling: Sampling, seed: int, lookahead: int, draft_logits: Floats, num_tokens: int = 40) -> list[int]:
    """A text by coupled rounds of this lookahead (0: plain), from a prompt of two tokens."""
    rule = Coupled(Sampler(sampling, vocab_size=VOCAB_SIZE, num_prompt_tokens=2, seed=seed))
    text = [1, 2]
    while len(text) < num_tokens:
        proposal: list[DraftToken] = []
        for _ in range(lookahead):
            context = text + [token.token_id for token in proposal]
            proposal.append(rule.choose(draft_logits[context[-1]], context))
        ids = [token.token_id for token in proposal]
        verdict = rule.verify(TARGET[[text[-1], *ids]].astype(np.float32), text, proposal)
        text += [*ids[: verdict.num_accepted], verdict.next_token_id]
    return text[:num_tokens]


@pytest.mark.parametrize("sampling", OPTIONS, ids=str)
def test_coupled_writes_one_text_per_seed(sampling: Sampling) -> None:
    """Whatever the draft and the lookahead, the text is the plain one of that seed."""
    random = np.random.default_rng(11)
    for seed in range(6):
        plain = write(sampling, seed, 0, DRAFT)
        for lookahead in (1, 2, 5, 8):
            useless = random.normal(scale=3.0, size=TARGET.shape)
            assert write(sampling, seed, lookahead, useless) == plain
            assert write(sampling, seed, lookahead, DRAFT) == plain


def test_seeds_write_different_texts() -> None:
    """Another seed is another text, unless greedy."""
    assert len({tuple(write(OPTIONS[1], seed, 2, DRAFT)) for seed in range(5)}) == 5
    assert len({tuple(write(OPTIONS[0], seed, 2, DRAFT)) for seed in range(5)}) == 1


def test_rejection_drafts_a_position_with_new_noise_each_round() -> None:
    """A position drafted again after a verification does not meet the noise that it met before."""
    rule = Rejection(Sampler(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=3))
    found: set[int] = set()
    for _ in range(30):
        found.add(rule.choose(DRAFT[0], [0, 0]).token_id)
        rule.verify(TARGET[:1], [0], [])
    assert len(found) > 3


# ------------------------------------------------------------------------------------------- rows and verdicts


@pytest.mark.parametrize("name", ["coupled", "rejection", "lossy_typical"])
def test_greedy_accepts_the_targets_argmax(name: str) -> None:
    """Greedy rules accept the target's best tokens, correct the first other one and add the bonus."""
    rule = make_rule(name, Sampler(Sampling(), vocab_size=3, num_prompt_tokens=1, seed=0))  # type: ignore[arg-type] # one of its names
    logits = np.array([[0.0, 5.0, 1.0], [9.0, 5.0, 1.0], [0.0, 0.0, 1.0]], dtype=np.float32)
    assert rule.verify(logits, [0], [DraftToken(1), DraftToken(0)]) == Verdict(2, 2)
    assert rule.verify(logits, [0], [DraftToken(1), DraftToken(2)]) == Verdict(1, 0)
    assert rule.verify(logits, [0], [DraftToken(0), DraftToken(0)]) == Verdict(0, 1)
    assert rule.verify(logits[:1], [0], []) == Verdict(0, 1)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(repetition_penalty=1.1)])
@pytest.mark.parametrize("name", ["coupled", "rejection", "lossy_typical"])
def test_rows_after_the_first_rejection_are_not_looked_at(name: str, sampling: Sampling) -> None:
    """NaN in a row that does not count harms nothing; in one that counts it names its position."""
    rule = make_rule(name, Sampler(sampling, vocab_size=3, num_prompt_tokens=1, seed=0))  # type: ignore[arg-type] # one of its names
    logits = np.array([[-math.inf, 5.0, 5.0], [math.nan] * 3, [math.nan] * 3])
    assert rule.verify(logits, [0], [DraftToken(0), DraftToken(0)]).num_accepted == 0
    with pytest.raises(ModelOutputError, match="at position 2 hold NaN"):
        rule.verify(np.array([[-50.0, 50.0, -50.0], *logits[1:]]), [0], [DraftToken(1), DraftToken(0)])


@pytest.mark.parametrize("make", [Coupled, Rejection, LossyTypical])
@pytest.mark.parametrize("sampling", OPTIONS, ids=str)
def test_confidence_is_the_drafts_probability(make: Callable[[Sampler], AcceptanceRule], sampling: Sampling) -> None:
    """The confidence is the draft's own probability of its token after all filters (greedy: at temperature 1)."""
    sampler = Sampler(sampling, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=4)
    token = make(sampler).choose(DRAFT[2], [0, 2])
    if sampler.greedy:
        expected = softmax(np.asarray(sampler.adjusted(DRAFT[2], [0, 2]), dtype=np.float64))
    else:
        expected = sampler.law(DRAFT[2], [0, 2])
    assert token.confidence == pytest.approx(expected[token.token_id])


@pytest.mark.parametrize("make", [Coupled, Rejection])
@pytest.mark.parametrize("width", [VOCAB_SIZE - 3, VOCAB_SIZE + 3])
def test_draft_of_another_width_drafts_tokens_of_the_target(
    make: Callable[[Sampler], AcceptanceRule], width: int
) -> None:
    """A draft whose vocabulary is padded otherwise proposes only tokens that both have."""
    rule = make(Sampler(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=4))
    for position in range(1, 40):
        token = rule.choose(np.linspace(0.0, 3.0, width), [0] * position)
        assert token.token_id < min(width, VOCAB_SIZE)
        assert token.law is None or token.law.shape == (VOCAB_SIZE,)
        rule.verify(TARGET[:2], [0] * position, [token])


def test_lossy_typical_accepts_what_is_typical() -> None:
    """A token passes above min(epsilon, delta * exp(-entropy)) of the target's law, and the rule says it is lossy."""
    rule = LossyTypical(Sampler(SAMPLING, vocab_size=4, num_prompt_tokens=1, seed=0))
    law = np.array([0.5, 0.4, 0.095, 0.005])  # entropy .946, threshold .0349
    logits = np.log(np.array([law, law]))
    accepted = [rule.verify(logits, [0], [DraftToken(token_id)]).num_accepted for token_id in range(4)]
    assert accepted == [1, 1, 1, 0]
    assert rule.lossy
    assert not Coupled.lossy
    assert not Rejection.lossy


def test_unknown_rule_is_refused() -> None:
    """A rule's name that does not exist is a configuration error that lists those that do."""
    with pytest.raises(ConfigError, match="must be one of coupled, rejection, lossy_typical"):
        make_rule("typical", Sampler(SAMPLING, vocab_size=4, num_prompt_tokens=1, seed=0))  # type: ignore[arg-type] # the point
