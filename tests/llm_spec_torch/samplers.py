"""Samplers on a device and what to feed them, for the tests of sampling."""

from __future__ import annotations

import math

import numpy as np
import torch
from llm_spec_torch.sampling import DeviceSampler, SamplingSwitches

from llm_spec.contract.request import Sampling

VOCAB_SIZE = 24
EVERYTHING = Sampling(
    temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
    frequency_penalty=0.2, logit_bias={3: 2.0, 4: -100.0},
)  # fmt: skip # one table


def make(sampling: Sampling, *, seed: int = 0, vocab_size: int = VOCAB_SIZE, device: str = "cpu") -> DeviceSampler:
    sampler = DeviceSampler(SamplingSwitches.from_sampling(sampling, vocab_size), vocab_size=vocab_size, device=device)
    sampler.load_request(sampling, seed)
    return sampler


def ids(token_ids: list[int]) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64)


def random_logits(random: int, num_rows: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """[num_rows, vocab_size] of few different values, so that ties at a border are common, and masked tokens."""
    values = np.random.default_rng(random).choice([-math.inf, -3.0, -1.0, 0.0, 0.5, 2.0, 4.0], (num_rows, vocab_size))
    values[:, 7] = 1.0
    return torch.from_numpy(values.astype(np.float32))
