"""What does it take to sample a token from logits? With the noise of all tokens, and of those that may be sampled.

    python benchmarks/sampling.py [--vocabularies 4096 49152 151936] [--positions 64]

`llm-spec bench` times answers, not a step of them. Logits are normal, of a standard deviation of 3, in float32. Each
row is a request's `Sampling`; times are medians in microseconds, of one thread, and after something else has used the
cache. `filters` are the log-probabilities of a request, `all` and `likely` the two scorers of
`llm_spec/local/token_scores.py`, each with its share of preparing the noise; `likely` is used for large vocabularies.
The tokens are the same, and those of the request's sampler, or it exits with 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from llm_spec import Sampling
from llm_spec.local.sampling import Sampler
from llm_spec.local.token_scores import DenseScorer, SparseScorer, TokenScorer

SAMPLINGS: Final = (
    Sampling(temperature=0.7),
    Sampling(temperature=1.0),
    Sampling(temperature=1.5),
    Sampling(temperature=0.7, top_p=0.95),
    Sampling(temperature=0.7, top_k=20, top_p=0.8),
)
Row = TypeVar("Row")
Result = TypeVar("Result")
NUM_POSITIONS_AT_ONCE: Final = 16
EVICT: Final = np.zeros(2**20)  # 8 MB, more than most second-level caches


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096, 49_152, 151_936])
    parser.add_argument("--positions", type=int, default=64)
    arguments = parser.parse_args()
    print(f"{'vocabulary':>10}  {'':34}{'filters':>8}{'all':>8}{'likely':>8}{'ratio':>7}")
    is_same = True
    for vocab_size in arguments.vocabularies:
        rng = np.random.default_rng(0)
        logits: list[NDArray[np.float32]] = [
            np.float32(3.0) * rng.standard_normal(vocab_size, np.float32) for _ in range(arguments.positions)
        ]
        for sampling in SAMPLINGS:
            dense, dense_ids = time_scorer(DenseScorer, sampling, logits)
            sparse, sparse_ids = time_scorer(SparseScorer, sampling, logits)
            sampler = make_sampler(sampling, vocab_size)
            filters, _ = time_each(lambda row, _: sampler.compute_logprobs(row, []), logits)  # noqa: B023 - used at once
            chosen_ids = [sampler.choose_token(row, [0] * position) for position, row in enumerate(logits)]
            is_same = is_same and dense_ids == sparse_ids == chosen_ids
            figures = f"{filters:8.0f}{dense:8.0f}{sparse:8.0f}{dense / sparse:6.1f}x"
            print(f"{vocab_size:>10}  {tell(sampling):34}{figures}")
    if not is_same:
        print("the two scorers sampled different tokens")
    return 0 if is_same else 1


def time_scorer(
    make_scorer: Callable[[int, range, int], TokenScorer], sampling: Sampling, logits: Sequence[NDArray[np.float32]]
) -> tuple[float, list[int]]:
    """Microseconds a token without the filters, noise included, and the tokens."""
    vocab_size = logits[0].shape[0]
    sampler = make_sampler(sampling, vocab_size)
    logprobs = [sampler.compute_logprobs(row, []) for row in logits]
    started = time.perf_counter()
    scorers = [
        make_scorer(sampler.seed, range(start, start + NUM_POSITIONS_AT_ONCE), vocab_size)
        for start in range(0, len(logits), NUM_POSITIONS_AT_ONCE)
    ]
    prepared_us = (time.perf_counter() - started) / len(logits) * 1e6

    def sample(row: NDArray[np.float64], position: int) -> int:
        token_ids, scores = scorers[position // NUM_POSITIONS_AT_ONCE].score_likely_tokens(row, position, 1)
        return int(token_ids[scores.argmax()])

    microseconds, token_ids = time_each(sample, logprobs)
    return prepared_us + microseconds, token_ids


def time_each(call: Callable[[Row, int], Result], rows: Sequence[Row]) -> tuple[float, list[Result]]:
    """Median microseconds of a call, and what the calls gave."""
    seconds: list[float] = []
    results: list[Result] = []
    for position, row in enumerate(rows):
        EVICT.sum()
        started = time.perf_counter()
        results.append(call(row, position))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e6, results


def make_sampler(sampling: Sampling, vocab_size: int) -> Sampler:
    return Sampler(sampling, vocab_size=vocab_size, num_prompt_tokens=0, seed=1)


def tell(sampling: Sampling) -> str:
    parts = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)


if __name__ == "__main__":
    sys.exit(main())
