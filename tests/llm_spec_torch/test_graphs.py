"""A round on the device never asks for a value, and one recorded for a request serves the next."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# (torch is partly untyped)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from llm_spec_torch import sampling as sampling_module
from llm_spec_torch.sampling import DeviceSampler

from llm_spec.contract.request import Sampling

from .no_sync import SyncError, no_sync
from .samplers import EVERYTHING, VOCAB_SIZE, ids, make, random_logits
from .tape import Tape

# ---------------------------------------------------------------------------------------------- no value is asked for

STEPS = ["greedy", "sampled", "filtered", "penalised", "all"]
REQUESTS = [
    Sampling(),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=1.0, top_k=3, top_p=0.9),
    Sampling(repetition_penalty=1.2),
    EVERYTHING,
]


def record(sampler: DeviceSampler, monkeypatch: pytest.MonkeyPatch, device: str, num_drafted: int = 3) -> None:
    """A whole round as a graph would record it: draft steps, verification, commit."""
    logits = torch.zeros(num_drafted + 1, VOCAB_SIZE, device=device)
    position = torch.zeros((), dtype=torch.int64, device=device)
    with no_sync(monkeypatch):
        drafted_ids = torch.zeros(0, dtype=torch.int64, device=device)
        for step in range(num_drafted):
            token_ids = sampler.choose_tokens(logits[:1, :-2], position[None] + step, drafted_ids)
            drafted_ids = torch.cat([drafted_ids, token_ids])
        verdict = sampler.verify(logits, position, drafted_ids)
        sampler.count_committed_tokens(verdict.token_ids, verdict.num_accepted + 1)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("sampling", REQUESTS, ids=STEPS)
def test_a_round_never_waits_for_the_device(sampling: Sampling, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is asked for, no shape depends on one, nothing is copied to or from the host."""
    for num_drafted in (0, 1, 3):
        record(make(sampling, device=device), monkeypatch, device, num_drafted)


PLANTED: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda probs: probs.max().item(),
    "branch": lambda probs: 1 if probs.max() > 0 else 0,
    "nonzero": torch.nonzero,
    "where": lambda probs: torch.where(probs > 0),
    "mask": lambda probs: probs[probs > 0],
    "masked_select": lambda probs: probs.masked_select(probs > 0),
    "scalar index": lambda probs: probs[torch.argmax(probs[0])],
    "copy from the host": lambda probs: probs + torch.tensor([1.0], device=probs.device),
}


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("wait", PLANTED)
def test_a_planted_wait_is_caught(wait: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails for each of these."""
    sampler = make(REQUESTS[1], device=device)

    def waiting_gumbel(key: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
        probs = noise(key, positions, vocab_size)
        PLANTED[wait](probs)
        return probs

    noise = sampling_module.make_gumbel_tensor
    monkeypatch.setattr(sampling_module, "make_gumbel_tensor", waiting_gumbel)
    with pytest.raises(SyncError):
        record(sampler, monkeypatch, device)


class Round:
    """A round on memory of its own, as it would be recorded."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampler = make(sampling, seed=seed)
        self.draft_logits, self.logits = torch.zeros(3, VOCAB_SIZE), torch.zeros(4, VOCAB_SIZE)
        self.position = torch.zeros((), dtype=torch.int64)
        self.emitted: list[torch.Tensor] = []

    def begin(self, random: int) -> None:
        """Another request and its logits, in the same memory."""
        self.sampler.begin_answer([random % 5, 2])
        self.draft_logits.copy_(random_logits(random, 3))
        self.logits.copy_(torch.cat([self.draft_logits, random_logits(random + 1, 1)]).roll(random % 2, dims=1))
        self.position.fill_(2 + random)

    def run(self) -> None:
        drafted_ids = ids([])
        for row in range(3):
            token_ids = self.sampler.choose_tokens(
                self.draft_logits[row : row + 1], self.position[None] + row, drafted_ids
            )
            drafted_ids = torch.cat([drafted_ids, token_ids])
        verdict = self.sampler.verify(self.logits, self.position, drafted_ids)
        self.sampler.count_committed_tokens(verdict.token_ids, verdict.num_accepted + 1)
        self.emitted = [*verdict]


def others(sampling: Sampling) -> Sampling:
    """Other parameters, the same switches."""
    return replace(
        sampling,
        temperature=sampling.temperature and 1.6,
        top_k=sampling.top_k and 6,
        top_p=sampling.top_p and 0.7,
        min_p=sampling.min_p and 0.02,
        repetition_penalty=sampling.repetition_penalty and 0.6,
        frequency_penalty=sampling.frequency_penalty and -0.4,
        logit_bias={8: 1.0} if sampling.logit_bias else {},
    )


def replays_another_request(sampling: Sampling) -> bool:
    """Whether a round recorded for one request, repeated for others, gives their tokens."""
    recorded, tape = Round(sampling, 1), Tape()
    recorded.begin(0)
    with tape:
        recorded.run()
    other = others(sampling)
    for random in range(1, 12):
        recorded.sampler.load_request(other, random * 2**33 + 5)
        recorded.begin(random)
        tape.replay()
        plain = Round(other, random * 2**33 + 5)
        plain.begin(random)
        plain.run()
        pairs = zip(recorded.emitted, plain.emitted, strict=True)
        if not all(torch.equal(found, expected) for found, expected in pairs):
            return False
    return True


@pytest.mark.parametrize("sampling", REQUESTS, ids=STEPS)
def test_a_recorded_round_serves_another_request(sampling: Sampling) -> None:
    """Parameters, seed, position, logits and counts are read when the round is repeated."""
    assert replays_another_request(sampling)


def test_planted_fault_a_seed_that_is_recorded_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where the noise is that of the request that was recorded."""
    noise = sampling_module.make_gumbel_tensor
    monkeypatch.setattr(
        sampling_module, "make_gumbel_tensor", lambda key, *others: noise(torch.tensor(key.tolist()), *others)
    )
    assert not replays_another_request(REQUESTS[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampling", REQUESTS, ids=STEPS)
def test_a_cuda_graph_serves_another_request(sampling: Sampling) -> None:
    """A CUDA graph of one request's verification gives another's tokens once its parameters are loaded."""
    logits = random_logits(5, 4)
    place, position, drafted_ids = logits.cuda(), torch.tensor(9).cuda(), ids([7, 7, 7]).cuda()
    recorded = make(sampling, seed=3, device="cuda")
    recorded.begin_answer([1, 2])
    for _ in range(2):  # kernels are compiled before they are recorded
        recorded.verify(place, position, drafted_ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = recorded.verify(place, position, drafted_ids)
    for seed in range(20):
        recorded.load_request(sampling, seed)
        place.copy_(random_logits(seed, 4))
        graph.replay()
        plain = make(sampling, seed=seed)
        plain.begin_answer([1, 2])
        expected = plain.verify(random_logits(seed, 4), torch.tensor(9), ids([7, 7, 7]))
        assert verdict.token_ids.tolist() == expected.token_ids.tolist()
        assert int(verdict.num_accepted) == int(expected.num_accepted)
