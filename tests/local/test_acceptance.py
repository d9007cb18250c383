"""Coupled and rejection sampling emit the target's own distribution, and the tests that say so catch every known fault.

The losslessness test draws joint sequences of two tokens, vocabulary 8, from a target whose law depends on the token
before, through the real rules at lookahead 1 to 3, and compares their counts with the exact law by chi-square at
significance 1e-6. With power .999, 8,200 samples find a total variation of .05, 51,000 of .02 and 205,000 of .01.
The usual run draws 51,000, the slow one 205,000. Both rules run on numpy arrays, and coupled sampling on torch tensors
too, with the sampler of `llm_spec_torch`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# (pytest.approx and scipy are partly untyped)

import importlib
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_spec.contract.errors import ConfigError, ModelOutputError
from llm_spec.contract.request import Sampling
from llm_spec.contract.token_model import DraftToken
from llm_spec.local.acceptance import (
    CoupledAcceptance,
    LossyTypicalAcceptance,
    RejectionAcceptance,
    VerifyResult,
    compute_residual_probs,
    make_acceptance_rule,
)
from llm_spec.local.noise import make_gumbel_noise
from llm_spec.local.sampling import Sampler, is_greedy

from .numpy_core import NumpyCore
from .pairs import (
    DRAFT,
    SAMPLING,
    TARGET,
    VOCAB_SIZE,
    Floats,
    RuleName,
    TokenCore,
    first_row_everywhere,
    is_target_law,
    softmax,
)

NUM_SAMPLES = 8_200  # finds the faults


def torch_core() -> TokenCore:
    pytest.importorskip("torch")
    return importlib.import_module(".torch_core", __package__).TorchCore()


NUMPY = NumpyCore()
MAKE_CORE: dict[str, Callable[[], TokenCore]] = {"numpy": lambda: NUMPY, "torch": torch_core}
RULES: list[tuple[str, RuleName]] = [("numpy", "coupled"), ("numpy", "rejection"), ("torch", "coupled")]


@pytest.fixture(params=MAKE_CORE)
def core(request: pytest.FixtureRequest) -> TokenCore:
    """The token core, on each kind of array."""
    return MAKE_CORE[request.param]()


# ---------------------------------------------------------------------------------------------- losslessness


@pytest.mark.slow
@pytest.mark.parametrize(("array", "name"), RULES)
def test_joint_law_is_the_targets(array: str, name: RuleName) -> None:
    """Drafting with a model leaves the target's joint distribution as it is."""
    assert is_target_law(MAKE_CORE[array]().count_pairs(name, 102_000))


@pytest.mark.parametrize(("array", "name"), RULES)
def test_joint_law_with_given_tokens_is_the_targets(array: str, name: RuleName) -> None:
    """Tokens that were given, not drawn, leave the target's joint distribution as it is."""
    assert is_target_law(MAKE_CORE[array]().count_pairs(name, NUM_SAMPLES, draft="given"))


def test_dropping_a_drafted_token_is_harmless_when_coupled(core: TokenCore) -> None:
    """Coupled mode is safe with any stopping rule, even one that throws drafted tokens away."""
    assert is_target_law(core.count_pairs("coupled", NUM_SAMPLES, keep_above=0.2))


# ---------------------------------------------------------------------------------- faults that the test must catch

REJECTION_FAULTS = [
    "one stream of noise",  # vLLM #54282
    "residual with the draft's noise",
    "accept above one half",
    "bonus from the row before",
    "correction from the target",
]


@pytest.mark.parametrize("fault", REJECTION_FAULTS)
def test_planted_fault_in_rejection_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square test fails for rejection sampling with this fault."""
    NUMPY.plant(fault, monkeypatch)
    assert not is_target_law(NUMPY.count_pairs("rejection", NUM_SAMPLES))


def test_planted_fault_dropped_token_is_caught() -> None:
    """The chi-square test fails where a drawn token is thrown away because its own probability is low."""
    assert not is_target_law(NUMPY.count_pairs("rejection", NUM_SAMPLES, keep_above=0.2))


@pytest.mark.parametrize(("array", "name"), RULES)
def test_planted_fault_one_row_for_every_position_is_caught(array: str, name: RuleName) -> None:
    """The chi-square test fails where the first row of logits is used for every position."""
    assert not is_target_law(MAKE_CORE[array]().count_pairs(name, NUM_SAMPLES, rows=first_row_everywhere))


def test_planted_fault_greedy_draft_with_soft_law_is_caught() -> None:
    """The chi-square test fails where a greedy draft is scored with its soft probabilities (transformers #32867)."""
    assert not is_target_law(NUMPY.count_pairs("rejection", NUM_SAMPLES, draft="given as if drawn"))


def test_planted_fault_shared_position_noise_is_caught(core: TokenCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square test fails where all positions of a sample have the same noise."""
    core.plant("one position's noise", monkeypatch)
    assert not is_target_law(core.count_pairs("coupled", NUM_SAMPLES))


def says_impossible_token() -> bool:
    """Whether token 0, of zero mass, comes out: drawn as bonus, drawn as correction, or accepted."""
    logits = np.array([[-math.inf, 0.0, 1.0]] * 2)
    rule = NUMPY.make("rejection", Sampler(SAMPLING, vocab_size=3, num_prompt_tokens=1, seed=0))
    surely_0, surely_1 = DraftToken(0), DraftToken(1, None, np.array([0.0, 1.0, 0.0]))
    bonus, correction = rule.verify_proposal(logits[:1], [1], []), rule.verify_proposal(logits, [1], [surely_0])
    after = rule.verify_proposal(logits, [1], [surely_1])
    return 0 in {bonus.next_token_id, correction.next_token_id, after.next_token_id} or correction.num_accepted > 0


def test_impossible_token_is_never_said_even_if_the_uniform_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform of 0 neither accepts nor draws a token of zero probability; the planted fault does."""
    NUMPY.plant("uniforms of zero", monkeypatch)
    assert not says_impossible_token()
    NUMPY.plant("first token reached", monkeypatch)
    assert says_impossible_token()


# --------------------------------------------------------------------------------------------------- algebra


def probs_rows(draw: st.DrawFn) -> Floats:
    """Equal, disjoint, one-hot, masked and ordinary laws over 8 tokens."""
    weights = draw(st.lists(st.sampled_from([0.0, 0.0, 1e-12, 0.1, 1.0, 5.0]), min_size=8, max_size=8).filter(any))
    return np.array(weights) / sum(weights)


PAIRS = st.composite(probs_rows)()


@settings(max_examples=300, deadline=None)
@given(p_draft=PAIRS, p_target=PAIRS)
def test_accepted_and_residual_add_up_to_the_target(p_draft: Floats, p_target: Floats) -> None:
    """p_draft * min(1, p_target / p_draft) + P(rejected) * residual is p_target."""
    accepted = np.minimum(p_draft, p_target)
    left = compute_residual_probs(p_target, DraftToken(0, None, p_draft))
    rejected = 1.0 - accepted.sum()
    np.testing.assert_allclose(accepted + rejected * left / left.sum(), p_target, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(PAIRS, st.integers(0, 7))
def test_given_token_and_residual_add_up_to_the_target(p_target: Floats, token_id: int) -> None:
    """The same with a token that was given: all of p_draft is on it."""
    accepted = np.zeros(8)
    accepted[token_id] = p_target[token_id]
    left = compute_residual_probs(p_target, DraftToken(token_id))
    np.testing.assert_allclose(accepted + (1.0 - accepted.sum()) * left / left.sum(), p_target, atol=1e-9)


def test_equal_laws_always_accept() -> None:
    """A draft with the target's own distribution is never rejected."""
    rule = NUMPY.make("rejection", Sampler(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=3))
    for row in range(200):
        logits = TARGET[[row % 5, 1]]
        assert rule.verify_proposal(logits, [0], [rule.choose_draft_token(logits[0], [0])]).num_accepted == 1


# ------------------------------------------------------------------------------------- one seed, one text

OPTIONS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    Sampling(temperature=1.0, logit_bias={3: 2.0, 4: -100.0}),
    Sampling(repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={2: 1.0}),
]


def write(sampling: Sampling, seed: int, lookahead: int, draft_logits: Floats, *, core: TokenCore = NUMPY) -> list[int]:
    """40 tokens by coupled rounds of this lookahead (0: plain), a prompt of two among them."""
    rule = core.make("coupled", Sampler(sampling, vocab_size=VOCAB_SIZE, num_prompt_tokens=2, seed=seed))
    text = [1, 2]
    while len(text) < 40:
        proposal: list[DraftToken] = []
        for _ in range(lookahead):
            context = text + [token.token_id for token in proposal]
            proposal.append(rule.choose_draft_token(draft_logits[context[-1]], context))
        ids = [token.token_id for token in proposal]
        verdict = rule.verify_proposal(TARGET[[text[-1], *ids]].astype(np.float32), text, proposal)
        text += [*ids[: verdict.num_accepted], verdict.next_token_id]
    return text[:40]


@pytest.mark.parametrize("sampling", OPTIONS, ids=str)
def test_coupled_writes_one_text_per_seed(sampling: Sampling) -> None:
    """Whatever the draft and the lookahead, the text is the plain one of that seed."""
    random = np.random.default_rng(11)
    for seed in range(6):
        uses_raw_logits = write(sampling, seed, 0, DRAFT)
        for lookahead in (1, 2, 5, 8):
            useless = random.normal(scale=3.0, size=TARGET.shape)
            assert write(sampling, seed, lookahead, useless) == uses_raw_logits
            assert write(sampling, seed, lookahead, DRAFT) == uses_raw_logits


@pytest.mark.parametrize("sampling", OPTIONS, ids=str)
def test_torch_writes_the_text_of_numpy(sampling: Sampling) -> None:
    """One seed, one text, whatever the kind of array, the draft and the lookahead."""
    core, random = torch_core(), np.random.default_rng(12)
    for seed in range(2):
        uses_raw_logits = write(sampling, seed, 0, DRAFT)
        useless = random.normal(scale=3.0, size=TARGET.shape)
        for lookahead, draft_logits in ((0, DRAFT), (2, DRAFT), (5, DRAFT), (3, useless)):
            assert write(sampling, seed, lookahead, draft_logits, core=core) == uses_raw_logits


def test_seeds_write_different_texts() -> None:
    """Another seed is another text, unless greedy."""
    assert len({tuple(write(OPTIONS[1], seed, 2, DRAFT)) for seed in range(5)}) == 5
    assert len({tuple(write(OPTIONS[0], seed, 2, DRAFT)) for seed in range(5)}) == 1


def test_rejection_drafts_a_position_with_new_noise_each_round() -> None:
    """A position drafted again after a verification does not meet the noise that it met before."""
    rule = NUMPY.make("rejection", Sampler(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=3))
    found: set[int] = set()
    for _ in range(30):
        found.add(rule.choose_draft_token(DRAFT[0], [0, 0]).token_id)
        rule.verify_proposal(TARGET[:1], [0], [])
    assert len(found) > 3


# ------------------------------------------------------------------------------------------- rows and verdicts


@pytest.mark.parametrize("name", ["coupled", "rejection", "lossy_typical"])
def test_greedy_accepts_the_targets_argmax(name: str) -> None:
    """Greedy rules accept the target's best tokens, correct the first other one and add the bonus."""
    rule = make_acceptance_rule(name, Sampler(Sampling(), vocab_size=3, num_prompt_tokens=1, seed=0))  # type: ignore[arg-type] # one of its names
    logits = np.array([[0.0, 5.0, 1.0], [9.0, 5.0, 1.0], [0.0, 0.0, 1.0]], dtype=np.float32)
    assert rule.verify_proposal(logits, [0], [DraftToken(1), DraftToken(0)]) == VerifyResult(2, 2)
    assert rule.verify_proposal(logits, [0], [DraftToken(1), DraftToken(2)]) == VerifyResult(1, 0)
    assert rule.verify_proposal(logits, [0], [DraftToken(0), DraftToken(0)]) == VerifyResult(0, 1)
    assert rule.verify_proposal(logits[:1], [0], []) == VerifyResult(0, 1)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(repetition_penalty=1.1)])
@pytest.mark.parametrize("name", ["coupled", "rejection", "lossy_typical"])
def test_rows_after_the_first_rejection_are_not_looked_at(name: str, sampling: Sampling) -> None:
    """NaN in a row that does not count harms nothing; in one that counts it names its position."""
    rule = make_acceptance_rule(name, Sampler(sampling, vocab_size=3, num_prompt_tokens=1, seed=0))  # type: ignore[arg-type] # one of its names
    logits = np.array([[-math.inf, 5.0, 5.0], [math.nan] * 3, [math.nan] * 3])
    assert rule.verify_proposal(logits, [0], [DraftToken(0), DraftToken(0)]).num_accepted == 0
    with pytest.raises(ModelOutputError, match="at position 2 hold NaN"):
        rule.verify_proposal(np.array([[-50.0, 50.0, -50.0], *logits[1:]]), [0], [DraftToken(1), DraftToken(0)])


PROBABLE: list[tuple[str, RuleName, Sampling]] = [
    (array, name, sampling)
    for array, name in RULES
    for sampling in OPTIONS
    if name == "rejection" or is_greedy(sampling)
]


@pytest.mark.parametrize(("array", "name", "sampling"), PROBABLE, ids=str)
def test_confidence_is_the_drafts_probability(array: str, name: RuleName, sampling: Sampling) -> None:
    """The confidence is the draft's own probability of its token after all filters (greedy: at temperature 1)."""
    sampler = Sampler(sampling, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=4)
    token = MAKE_CORE[array]().make(name, sampler).choose_draft_token(DRAFT[2], [0, 2])
    if sampler.greedy:
        expected = softmax(np.asarray(sampler.adjust_and_constrain_logits(DRAFT[2], [0, 2]), dtype=np.float64))
    else:
        expected = sampler.compute_probs(DRAFT[2], [0, 2])
    assert token.confidence == pytest.approx(expected[token.token_id])


@pytest.mark.parametrize("sampling", [sampling for sampling in OPTIONS if not is_greedy(sampling)], ids=str)
def test_coupled_confidence_tells_how_far_a_token_is_above_the_others(sampling: Sampling) -> None:
    """By its score, noise included: 1 where no other may be sampled."""
    sampler = Sampler(sampling, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=4)
    logits = np.asarray(DRAFT[2], dtype=np.float64)
    token = CoupledAcceptance(sampler).choose_draft_token(logits, [0, 2])
    second, first = np.sort(
        sampler.compute_logprobs(logits, [0, 2]) + make_gumbel_noise(4, np.array([2]), VOCAB_SIZE)[0]
    )[-2:]
    assert token.confidence == pytest.approx(1 - 0.7 * math.exp(-(first - second) / 2))
    lone = np.where(np.arange(VOCAB_SIZE) == token.token_id, 0.0, -np.inf)
    assert CoupledAcceptance(sampler).choose_draft_token(lone, [0, 2]) == DraftToken(token.token_id, 1.0)


@pytest.mark.parametrize(("array", "name"), RULES)
@pytest.mark.parametrize("width", [VOCAB_SIZE - 3, VOCAB_SIZE + 3])
def test_draft_of_another_width_drafts_tokens_of_the_target(array: str, name: RuleName, width: int) -> None:
    """A draft whose vocabulary is padded otherwise proposes only tokens that both have."""
    rule = MAKE_CORE[array]().make(name, Sampler(SAMPLING, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=4))
    for position in range(1, 40):
        token = rule.choose_draft_token(np.linspace(0.0, 3.0, width), [0] * position)
        assert token.token_id < min(width, VOCAB_SIZE)
        assert token.probs is None or token.probs.shape == (VOCAB_SIZE,)
        rule.verify_proposal(TARGET[:2], [0] * position, [token])


def test_lossy_typical_accepts_what_is_typical() -> None:
    """A token passes above min(epsilon, delta * exp(-entropy)) of the target's law, and the rule says it is lossy.

    Its drafts are drawn like coupled ones.
    """
    sampler = Sampler(SAMPLING, vocab_size=4, num_prompt_tokens=1, seed=0)
    rule = LossyTypicalAcceptance(sampler)
    probs = np.array([0.5, 0.4, 0.095, 0.005])  # entropy .946, threshold .0349
    logits = np.log(np.array([probs, probs]))
    accepted = [rule.verify_proposal(logits, [0], [DraftToken(token_id)]).num_accepted for token_id in range(4)]
    assert accepted == [1, 1, 1, 0]
    assert rule.choose_draft_token(logits[0], [0]) == CoupledAcceptance(sampler).choose_draft_token(logits[0], [0])
    assert rule.lossy
    assert not CoupledAcceptance.lossy
    assert not RejectionAcceptance.lossy


def test_unknown_rule_is_refused() -> None:
    """A rule's name that does not exist is a configuration error that lists those that do."""
    with pytest.raises(ConfigError, match="must be one of coupled, rejection, lossy_typical"):
        make_acceptance_rule("typical", Sampler(SAMPLING, vocab_size=4, num_prompt_tokens=1, seed=0))  # type: ignore[arg-type] # the point
