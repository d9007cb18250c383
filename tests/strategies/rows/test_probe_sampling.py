"""Probing with sampling: the target's own law, and the tests that say so catch planted faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from scipy.stats import chi2
from support.markov import LAW, LikelyDraft, make_markov_target, sampled_text, triples_p_value
from support.probing import WORDS, TextDraft, probed
from support.targets import Target, bytewise

from llm_spec import ChatRequest, Fixed, Sampling, StreamEvent, TextDelta
from llm_spec.testing.clock import run_virtual

# ------------------------------------------------------------------------------------------ sampling


@pytest.mark.slow
@pytest.mark.parametrize(("lookahead", "streams", "num_windows"), [(1, 1, 5_000), (4, 1, 25_000), (3, 3, 20_000)])
def test_sampled_text_has_the_targets_law(lookahead: int, streams: int, num_windows: int) -> None:
    """Windows of three tokens, 50,000 of them: chi-square tests against the exact law, whatever the draft likes."""
    options = {"lookahead": Fixed(lookahead), "max_concurrent_streams": streams}

    async def texts() -> list[str]:
        request = ChatRequest.create("tell", temperature=1.0, max_tokens=600)
        target, patterns = make_markov_target(7 + lookahead), ("aabbbc", "b", "abc", "cb", "a")
        drafts = [LikelyDraft(patterns[n % 5]) for n in range(num_windows // 200)]
        return [await sampled_text(target, request, draft, **options) for draft in drafts]

    drawn = run_virtual(texts())
    assert sum(len(text) // 3 for text in drawn) == num_windows
    assert triples_p_value(drawn) > 1e-3


def test_short_answers_have_the_targets_law() -> None:
    """Whole answers of three tokens, each a request of its own."""

    async def texts() -> list[str]:
        request = ChatRequest.create("tell", temperature=1.0, max_tokens=3)
        target = make_markov_target(5)
        options = {"lookahead": Fixed(2), "max_concurrent_streams": 2}
        return [await sampled_text(target, request, LikelyDraft("ab"), **options) for _ in range(3000)]

    counts = Counter(run_virtual(texts()))
    probs, statistic = LAW, 0.0
    for a, b, c in product(range(3), repeat=3):
        expected = 3000 * probs[0][a] * probs[a][b] * probs[b][c]
        statistic += (counts["abc"[a] + "abc"[b] + "abc"[c]] - expected) ** 2 / expected
    assert chi2.sf(statistic, 26) > 1e-3


END_RATE = 0.15


async def without_end(_: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
    """The token that ends the answer is not reported."""
    async for event in events:
        if not isinstance(event, TextDelta) or event.text:
            yield event


@pytest.mark.parametrize("tells", [True, False])
def test_sampled_answers_are_as_long_as_the_targets(*, tells: bool) -> None:
    """A stream's end counts only at positions that the stream owns, whether or not the stream reports its token.

    Here rows begin at the stream's first position. If the ends of both counted, answers would end twice as often.
    """

    async def check() -> None:
        target = Target(
            table=lambda _: {b"a": 1 - END_RATE, b"": END_RATE},
            by_ids=True,
            continue_prefix=False,
            call_s=0.025,
            row_s=0.045,
            spoil=None if tells else without_end,
            seed=77,
        )
        request = ChatRequest.create("tell", temperature=1.0, max_tokens=400)
        draft = LikelyDraft("a")
        texts = [await sampled_text(target, request, draft, max_concurrent_streams=4) for _ in range(1500)]
        expected = 1 / END_RATE - 1
        error = (expected / END_RATE / len(texts)) ** 0.5  # of the mean of a geometric distribution
        assert sum(map(len, texts)) / len(texts) == pytest.approx(expected, abs=4 * error)

    run_virtual(check())


def test_a_sampled_batch_carries_no_seed() -> None:
    """Without a seed of the caller's none is sent, and nothing else of the sampling is lost."""
    target = make_markov_target(call_s=0.01)
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=2, min_p=0.01, logit_bias={1: 2.0}, repetition_penalty=1.1)
    request = replace(ChatRequest.create("tell", max_tokens=40), sampling=sampling)
    run_virtual(sampled_text(target, request, LikelyDraft(), lookahead=Fixed(4)))
    assert {repr(call.sampling) for call in target.sample_calls} == {repr(sampling)}
    assert max(len(call.prefixes) for call in target.sample_calls) > 1


class RecordingDraft(LikelyDraft):
    """Keeps the sampling that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.samplings: list[Sampling] = []

    def draft(self, request: ChatRequest, max_tokens: int) -> Any:
        self.samplings.append(request.sampling)
        return super().draft(request, max_tokens)


@pytest.mark.parametrize(("temperature", "drafted"), [(0.8, 0.0), (0.0, 0.0), (None, None)])
def test_a_draft_is_asked_for_its_likeliest_tokens(temperature: float | None, drafted: float | None) -> None:
    """The target's samples equal them more often than its samples; the target's own temperature is left alone."""
    target, draft = make_markov_target(call_s=0.01), RecordingDraft()
    request = ChatRequest.create("tell", temperature=temperature, top_p=0.9, max_tokens=40)
    run_virtual(sampled_text(target, request, draft))
    assert {(s.temperature, s.top_p) for s in draft.samplings} == {(drafted, 0.9)}
    assert {(s.temperature, s.top_p) for call in target.sample_calls if (s := call.sampling)} == {(temperature, 0.9)}


def test_at_temperature_0_a_seed_is_dropped() -> None:
    """Nothing is drawn: the rounds stay batches, without it."""
    target = Target(bytewise(WORDS))
    request = ChatRequest.create("tell", temperature=0.0, seed=5)
    assert probed(TextDraft(WORDS), target, request, lookahead=Fixed(4)).content == WORDS
    assert {call.sampling and call.sampling.seed for call in target.sample_calls} == {None}
    assert max(len(call.prefixes) for call in target.sample_calls) > 1


def test_a_seeded_request_is_answered_plain() -> None:
    """One seed would give every prefix of a batch the same noise: the target's own seeded text instead."""
    target = Target(bytewise(WORDS))
    request = ChatRequest.create("tell", temperature=0.8, seed=5)
    result = probed(TextDraft(WORDS), target, request, lookahead=Fixed(4))
    assert (result.content, result.strategy, target.sample_calls) == (WORDS, "plain", [])
    assert [sent.sampling.seed for sent in target.requests] == [5]
