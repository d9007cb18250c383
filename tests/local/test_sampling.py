"""Laws equal a naive reference, bad logits are refused, and a sampler draws from the law by position alone."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# (pytest.approx and scipy are partly untyped)

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llm_spec.contract.errors import InvalidRequestError, ModelOutputError
from llm_spec.contract.request import Sampling
from llm_spec.local.noise import make_gumbel_noise
from llm_spec.local.sampling import Sampler, TokenConstraint, compute_sampling_logprobs, is_greedy, needs_no_penalties

VOCAB_SIZE = 12


def naive_law(
    logits: Sequence[float], sampling: Sampling, context_ids: Sequence[int], num_prompt_tokens: int
) -> list[float]:
    """The distribution, one token after the other, in Python: probabilities that sum to 1."""
    scores = [float(value) for value in logits]
    answer_ids = context_ids[num_prompt_tokens:]
    for token_id in range(len(scores)):
        scores[token_id] += sampling.logit_bias.get(token_id, 0.0)
        if token_id in context_ids and sampling.repetition_penalty:
            penalty = sampling.repetition_penalty
            scores[token_id] = scores[token_id] / penalty if scores[token_id] > 0 else scores[token_id] * penalty
        count = answer_ids.count(token_id)
        scores[token_id] -= (sampling.presence_penalty or 0.0) * (count > 0)
        scores[token_id] -= (sampling.frequency_penalty or 0.0) * count
        scores[token_id] /= sampling.temperature or 1.0
    order = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    order = order[: sampling.top_k]
    if sampling.top_p is not None and sampling.top_p < 1.0:
        weights = [math.exp(scores[token_id] - scores[order[0]]) for token_id in order]
        mass = np.cumsum(weights)
        order = order[: next(n for n in range(1, len(order) + 1) if mass[n - 1] >= sampling.top_p * mass[-1])]
    if sampling.min_p:
        order = [t for t in order if scores[t] >= scores[order[0]] + math.log(sampling.min_p)]
    weights = [math.exp(scores[t] - scores[order[0]]) if t in order else 0.0 for t in range(len(scores))]
    return [weight / sum(weights) for weight in weights]


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.sampled_from([0.01, 0.3, 0.5, 0.75, 0.9, 0.999, 1.0]),
    min_p=st.none() | st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.none() | st.sampled_from([0.5, 1.0, 1.3]),
    presence_penalty=st.none() | st.sampled_from([-1.0, 0.5]),
    frequency_penalty=st.none() | st.sampled_from([-0.5, 0.25]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
)
# few different values, so that ties at a border are common; -inf is a masked token
LOGITS = st.lists(
    st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.5, 2.0, 4.0]), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE
).filter(lambda values: max(values) > -math.inf)
CONTEXTS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=3, max_size=9)


@settings(max_examples=400, deadline=None)
@given(LOGITS, SAMPLINGS, CONTEXTS)
def test_law_equals_the_naive_reference(logits: list[float], sampling: Sampling, context_ids: list[int]) -> None:
    """Bias, penalties, temperature, top-k, top-p and min-p, in that order, keep exactly the reference's tokens."""
    found = make_sampler(sampling, num_prompt_tokens=3).compute_probs(np.array(logits, dtype=np.float32), context_ids)
    np.testing.assert_allclose(found, naive_law(logits, sampling, context_ids, 3), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_top_k_keeps_exactly_k_of_tied_tokens(top_k: int) -> None:
    """Among tokens that tie at the border the lower ids stay."""
    probs = compute_sampling_logprobs(
        np.array([0.0, 1.0, 0.0, 1.0, 1.0]), Sampling(temperature=1.0, top_k=top_k), [], 0
    )
    assert np.flatnonzero(np.isfinite(probs)).tolist() == [1, 3, 4][:top_k]


@pytest.mark.parametrize(
    ("sampling", "greedy"), [(Sampling(), True), (Sampling(temperature=0.0), True), (Sampling(temperature=0.1), False)]
)
def test_greedy_is_temperature_zero_or_none(sampling: Sampling, greedy: bool) -> None:
    """A local model without a temperature is greedy."""
    assert is_greedy(sampling) is greedy


def test_greedy_applies_bias_and_penalties_and_ignores_filters() -> None:
    """Greedy takes the best token after bias and penalties."""
    logits = np.array([1.0, 3.0, 2.9, 0.0])
    assert make_sampler(Sampling(top_k=1), vocab_size=4).choose_token(logits, [0]) == 1
    assert make_sampler(Sampling(repetition_penalty=1.5), vocab_size=4).choose_token(logits, [1]) == 2
    assert make_sampler(Sampling(presence_penalty=1.0), vocab_size=4).choose_token(logits, [0, 1]) == 2
    assert make_sampler(Sampling(logit_bias={3: 10.0}), vocab_size=4).choose_token(logits, [0]) == 3


def test_plain_means_no_bias_and_no_penalty() -> None:
    """Neutral values are as good as none."""
    assert needs_no_penalties(Sampling(temperature=1.0, top_k=3, repetition_penalty=1.0, presence_penalty=0.0))
    for adjust in (
        Sampling(repetition_penalty=1.1), Sampling(presence_penalty=0.1), Sampling(frequency_penalty=-0.1),
        Sampling(logit_bias={0: 1.0}),
    ):  # fmt: skip # one table
        assert not needs_no_penalties(adjust)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2)])
@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([0.0, math.nan, 1.0], "the model's logits at position 2 hold NaN"),
        ([0.0, math.inf, 1.0], "the model's logits at position 2 hold +inf"),
        ([-math.inf] * 3, "the model's logits at position 2 are all -inf"),
    ],
)
def test_logits_that_are_no_law_are_refused(sampling: Sampling, logits: list[float], message: str) -> None:
    """NaN, +inf and nothing but -inf raise ModelOutputError naming the position."""
    with pytest.raises(ModelOutputError) as caught:
        make_sampler(sampling, vocab_size=3).choose_token(np.array(logits, dtype=np.float32), [0, 1])
    assert str(caught.value) == message


def test_bias_outside_the_vocabulary_is_refused() -> None:
    """A logit bias for a token that the model does not have names that token."""
    with pytest.raises(InvalidRequestError, match="token 12; the model has tokens 0 to 11"):
        make_sampler(Sampling(logit_bias={12: 1.0}))


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 17_000])
def test_token_is_the_argmax_of_law_and_noise(vocab_size: int) -> None:
    """The token at a position is the argmax of log-probabilities plus Gumbel noise of (seed, position, token)."""
    logits = np.random.default_rng(2).normal(size=vocab_size)
    sampler = make_sampler(Sampling(temperature=0.5), vocab_size=vocab_size, seed=77)
    for position in range(50):
        scores = logits / 0.5 + make_gumbel_noise(77, np.array([position]), vocab_size)[0]
        assert sampler.choose_token(logits, [0] * position) == int(np.argmax(scores))
        second, first = np.sort(scores)[-2:]
        token_id, margin = sampler.sample_token_with_margin(logits / 0.5, position)
        assert token_id == int(np.argmax(scores))
        assert margin == pytest.approx(first - second)


@pytest.mark.parametrize(("vocab_size", "positions"), [(4096, 64), (20_000, 80)])
def test_noise_cache_is_bounded_and_forgetting_changes_nothing(vocab_size: int, positions: int) -> None:
    """Far positions push old ones out, and what is computed again is the same."""
    logprobs = np.zeros(vocab_size)
    sampler = make_sampler(Sampling(temperature=1.0), vocab_size=vocab_size)
    first = sampler.sample_token_with_margin(logprobs, 0)
    for position in range(0, 2000, 3):
        sampler.prepare_noise(position)
    assert len(sampler._scorers) * sampler._block_length <= positions  # pyright: ignore[reportPrivateUsage] # the promise
    assert sampler.sample_token_with_margin(logprobs, 0) == first


@pytest.mark.parametrize("top_k", [None, 1, 60, 400])
@pytest.mark.parametrize("top_p", [None, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
def test_filters_of_a_large_vocabulary_equal_a_sort(top_k: int | None, top_p: float | None, scale: float) -> None:
    """The short ways to the largest values keep exactly what sorting all of them keeps; ties and -inf included."""
    rng = np.random.default_rng(4)
    for ties in (False, True):
        logits = rng.normal(size=5000) * scale
        logits = np.round(logits) if ties else logits
        logits[rng.integers(0, 5000, 300)] = -np.inf
        found = compute_sampling_logprobs(logits, Sampling(temperature=1.0, top_k=top_k, top_p=top_p), [], 0)
        order = np.lexsort((np.arange(5000), -logits))[:top_k]
        if top_p is not None:
            mass = np.exp(logits[order] - logits[order[0]]).cumsum()
            order = order[: 1 + int(np.count_nonzero(mass < top_p * mass[-1]))]
        expected = np.full(5000, -np.inf)
        expected[order] = logits[order]
        assert np.array_equal(found, expected)


def test_tiny_temperature_does_not_overflow() -> None:
    """The smallest temperature is greedy in effect, without a warning."""
    logits = np.array([1.0, 50.0, -50.0], dtype=np.float32)
    assert make_sampler(Sampling(temperature=5e-324), vocab_size=3).choose_token(logits, []) == 1


def test_draft_logits_of_another_width_are_fitted() -> None:
    """A draft's padding columns are cut, and missing ones are filled with tokens it cannot say."""
    sampler = make_sampler(Sampling())
    assert sampler.fit_vocabulary(np.zeros(VOCAB_SIZE + 3)).shape == (VOCAB_SIZE,)
    assert sampler.fit_vocabulary(np.zeros(VOCAB_SIZE - 2))[-2:].tolist() == [-math.inf, -math.inf]


class EvenAfterOdd:
    """A constraint: even ids after an odd one and at the beginning, else odd ids."""

    def mask(self, answer_ids: Sequence[int]) -> NDArray[np.bool_]:
        wanted = 1 - answer_ids[-1] % 2 if answer_ids else 0
        return np.arange(VOCAB_SIZE) % 2 == wanted


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=8),
        Sampling(temperature=0.7, top_k=3, top_p=0.8, min_p=0.05),
        Sampling(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
        Sampling(temperature=1.0, logit_bias={0: 100.0, 1: 100.0}),
    ],
)
def test_a_constraint_comes_before_every_filter(sampling: Sampling) -> None:
    """The distribution is that of the allowed tokens alone: filters count none but these, no bias revives another."""
    rng = np.random.default_rng(8)
    sampler = make_sampler(sampling, constraint=EvenAfterOdd())
    for context_ids in ([5], [5, 4], [5, 4, 3], [4, 2, 3, 2]):
        logits = rng.normal(size=VOCAB_SIZE)
        allowed = EvenAfterOdd().mask(context_ids[1:])
        expected = naive_law(np.where(allowed, logits, -1e6).tolist(), sampling, context_ids, 1)
        probs = sampler.compute_probs(logits, context_ids)
        assert probs == pytest.approx(expected, abs=1e-9)
        assert not probs[~allowed].any()
        greedy = make_sampler(replace(sampling, temperature=0.0), constraint=EvenAfterOdd())
        assert allowed[greedy.choose_token(logits, context_ids)]
        assert allowed[sampler.choose_token(logits, context_ids)]


def test_constrained_rows_depend_on_the_context() -> None:
    """Rows are then not `uses_raw_logits`, whatever the sampling; a row whose allowed logits are all -inf is no law."""
    assert make_sampler(Sampling()).uses_raw_logits
    sampler = make_sampler(Sampling(), constraint=EvenAfterOdd())
    assert not sampler.uses_raw_logits
    with pytest.raises(ModelOutputError, match="all -inf"):
        sampler.choose_token(np.where(np.arange(VOCAB_SIZE) % 2 == 1, 0.0, -np.inf), [5])


def make_sampler(
    sampling: Sampling,
    *,
    vocab_size: int = VOCAB_SIZE,
    num_prompt_tokens: int = 1,
    seed: int = 0,
    constraint: TokenConstraint | None = None,
) -> Sampler:
    return Sampler(
        sampling, vocab_size=vocab_size, num_prompt_tokens=num_prompt_tokens, seed=seed, constraint=constraint
    )
