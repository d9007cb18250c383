"""Sampling on the device chooses what the numpy sampler chooses, under every option."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# (torch is partly untyped)

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_spec_torch.sampling import SamplingSwitches

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.request import Sampling
from llm_spec.local.sampling import Sampler

from .samplers import EVERYTHING, VOCAB_SIZE, ids, make, random_logits

PROMPT_IDS = [1, 2, 2, 9]
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, VOCAB_SIZE + 2),
    top_p=st.none() | st.sampled_from([0.01, 0.3, 0.5, 0.75, 0.9, 0.999, 1.0]),
    min_p=st.none() | st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.none() | st.sampled_from([0.5, 1.0, 1.3]),
    presence_penalty=st.none() | st.sampled_from([-1.0, 0.5]),
    frequency_penalty=st.none() | st.sampled_from([-0.5, 0.25]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)


# ----------------------------------------------------------------------------------- as the numpy sampler does


@settings(max_examples=150, deadline=None)
@given(SAMPLINGS, TOKENS, TOKENS, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_choices_are_those_of_numpy(
    sampling: Sampling, answer_ids: list[int], drafted_ids: list[int], seed: int, random: int
) -> None:
    """Every filter and penalty at every row of a round, drafted tokens counted where they stand before it."""
    logits = random_logits(random, len(drafted_ids) + 1)
    numpy = Sampler(sampling, vocab_size=VOCAB_SIZE, num_prompt_tokens=len(PROMPT_IDS), seed=seed)
    context = PROMPT_IDS + answer_ids
    expected = [numpy.choose_token(row.numpy(), context + drafted_ids[:i]) for i, row in enumerate(logits)]
    sampler = make(sampling, seed=seed)
    sampler.begin_answer(PROMPT_IDS)
    sampler.count_committed_tokens(ids([*answer_ids, 5, 5]), torch.tensor(len(answer_ids)))
    positions = len(context) + torch.arange(len(logits))
    assert sampler.choose_tokens(logits, positions, ids(drafted_ids)).tolist() == expected
    assert [*sampler.choose_tokens(logits[-1:], positions[-1:], ids(drafted_ids))] == expected[-1:]
    verdict = sampler.verify(logits, positions[0], ids(drafted_ids))
    assert verdict.token_ids.tolist() == expected
    pairs = zip(drafted_ids, expected, strict=False)
    assert int(verdict.num_accepted) == next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafted_ids))
    assert bool(sampler.valid)


def test_planted_fault_penalties_that_do_not_see_the_draft_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where drafted tokens are not counted (vLLM #42744), or each row counts all of them."""
    logits, drafted_ids = torch.zeros(4, VOCAB_SIZE), [5, 6, 5]
    logits[:, 5:8] = torch.tensor([3.0, 2.9, 2.8])
    sampling = Sampling(presence_penalty=0.5)
    numpy = Sampler(sampling, vocab_size=VOCAB_SIZE, num_prompt_tokens=1, seed=0)
    expected = [numpy.choose_token(row.numpy(), [0, *drafted_ids[:index]]) for index, row in enumerate(logits)]

    def found() -> list[int]:
        return make(sampling).choose_tokens(logits, torch.arange(1, 5), ids(drafted_ids)).tolist()

    assert found() == expected
    monkeypatch.setattr(torch.Tensor, "tril_", lambda follows, _: follows * 0)
    assert found() != expected
    monkeypatch.setattr(torch.Tensor, "tril_", lambda follows, _: follows)
    assert found() != expected


def test_rows_without_the_tokens_before_them_are_refused() -> None:
    """Penalties need to know what stands before each row."""
    with pytest.raises(ValueError, match="before_ids has 1 tokens; 3 rows need 2 or more"):
        make(Sampling(presence_penalty=0.5)).choose_tokens(torch.zeros(3, VOCAB_SIZE), torch.arange(3), ids([1]))


@pytest.mark.parametrize("vocab_size", [4097, 32_000])
def test_large_vocabularies(vocab_size: int) -> None:
    """Distributions and choices agree where rounding has room to differ."""
    for seed in range(3):
        logits = np.random.default_rng(seed).normal(scale=3.0, size=(2, vocab_size)).astype(np.float32)
        for sampling in (EVERYTHING, Sampling(temperature=1.0), Sampling(temperature=1.3, top_p=0.95), Sampling()):
            numpy = Sampler(sampling, vocab_size=vocab_size, num_prompt_tokens=2, seed=seed)
            sampler = make(sampling, seed=seed, vocab_size=vocab_size)
            sampler.begin_answer([1, 3])
            found = sampler.choose_tokens(torch.from_numpy(logits), torch.tensor([2, 3]), ids([5]))
            assert found.tolist() == [numpy.choose_token(logits[0], [1, 3]), numpy.choose_token(logits[1], [1, 3, 5])]


# ------------------------------------------------------------------------------------------- rows and state


def test_logits_of_another_width_are_fitted() -> None:
    """Missing columns are tokens that cannot be said, and columns beyond the vocabulary are cut."""
    sampler = make(Sampling(temperature=1.0))
    positions, nothing = torch.arange(200), ids([0] * 199)
    assert int(sampler.choose_tokens(torch.zeros(200, VOCAB_SIZE - 4), positions, nothing).max()) < VOCAB_SIZE - 4
    wide = torch.zeros(200, VOCAB_SIZE + 4)
    narrow = sampler.choose_tokens(wide[:, :VOCAB_SIZE], positions, nothing)
    assert torch.equal(sampler.choose_tokens(wide, positions, nothing), narrow)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(), Sampling(temperature=1.0, top_k=23)])
def test_a_masked_token_is_never_chosen(sampling: Sampling) -> None:
    """Logits of -inf stay out."""
    sampler, logits = make(sampling), torch.zeros(500, VOCAB_SIZE)
    logits[:, ::2] = -math.inf
    assert (sampler.choose_tokens(logits, torch.arange(500), ids([0] * 499)) % 2 == 1).all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), replace(EVERYTHING, min_p=None)])
@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
def test_logits_that_are_no_law_are_found(sampling: Sampling, row: list[float]) -> None:
    """`valid` turns false for NaN, +inf and nothing but -inf, stays so, and `begin` makes it true again."""
    sampler = make(replace(sampling, logit_bias={}), vocab_size=3)
    good, bad = torch.tensor([[0.0, 50.0, 0.0]]), torch.tensor([row])
    sampler.begin_answer([0])
    sampler.choose_tokens(bad, torch.tensor([1]), ids([]))
    assert not sampler.valid
    sampler.choose_tokens(good, torch.tensor([1]), ids([]))
    assert not sampler.valid
    sampler.begin_answer([0])
    assert sampler.valid
    sampler.verify(torch.cat([good, bad]), torch.tensor(1), ids([0]))
    assert sampler.valid, "a row after the first rejection does not count"
    sampler.verify(torch.cat([good, bad]), torch.tensor(1), ids([1]))
    assert not sampler.valid


def test_parameters_are_loaded_in_place() -> None:
    """Another request with the same switches changes no tensor's place, and draws as it would in a new sampler."""
    sampler = make(EVERYTHING, seed=1)
    tensors = {name: value.data_ptr() for name, value in vars(sampler).items() if isinstance(value, torch.Tensor)}
    sampler.begin_answer([1, 2])
    sampler.count_committed_tokens(ids([3, 4, 3]), torch.tensor(3))
    other = Sampling(temperature=1.7, top_p=0.6, presence_penalty=-1.0, logit_bias={8: 1.0})
    sampler.load_request(other, 2**63 + 1)
    sampler.begin_answer(PROMPT_IDS)
    fresh = make(other, seed=2**63 + 1)
    fresh.begin_answer(PROMPT_IDS)
    logits, positions = random_logits(1, 40), torch.arange(40)
    before_ids = ids([*range(20), *range(19)])
    assert torch.equal(
        sampler.choose_tokens(logits, positions, before_ids), fresh.choose_tokens(logits, positions, before_ids)
    )
    found = {name: value.data_ptr() for name, value in vars(sampler).items() if isinstance(value, torch.Tensor)}
    assert found == tensors


def test_other_switches_and_tokens_are_refused() -> None:
    """A recorded round lacks operations that it was recorded without; a bias names a token of the vocabulary."""
    sampler = make(Sampling(temperature=1.0))
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=3), Sampling(temperature=1.0, logit_bias={1: 1.0})):
        with pytest.raises(ValueError, match="sampling needs SamplingSwitches"):
            sampler.load_request(sampling, 0)
    with pytest.raises(InvalidRequestError, match="token 24; the model has tokens 0 to 23"):
        make(Sampling(logit_bias={24: 1.0}))


@pytest.mark.parametrize(
    ("sampling", "switches"),
    [
        (Sampling(top_k=3, top_p=0.5), SamplingSwitches(greedy=True, filtered=False, penalised=False)),
        (
            Sampling(temperature=1.0, top_k=24, top_p=1.0),
            SamplingSwitches(greedy=False, filtered=False, penalised=False),
        ),
        (Sampling(temperature=1.0, min_p=0.1), SamplingSwitches(greedy=False, filtered=False, penalised=False)),
        (Sampling(temperature=1.0, top_p=0.9), SamplingSwitches(greedy=False, filtered=True, penalised=False)),
        (Sampling(logit_bias={1: 1.0}), SamplingSwitches(greedy=True, filtered=False, penalised=True)),
        (EVERYTHING, SamplingSwitches(greedy=False, filtered=True, penalised=True)),
    ],
)
def test_switches_are_as_few_as_can_be(sampling: Sampling, switches: SamplingSwitches) -> None:
    """What changes nothing records nothing."""
    assert SamplingSwitches.from_sampling(sampling, VOCAB_SIZE) == switches
