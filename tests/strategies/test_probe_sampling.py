"""Probing with sampling: the target's own law, and the tests that say so catch planted faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from scipy.stats import chi2
from support.probe_targets import WORDS, Patient, TextDraft, TokenTarget, bytewise, probed

from llm_spec import ChatRequest, ChatResponse, Finish, Fixed, Sampling, SpeculativeConfig, StreamEvent, TextDelta
from llm_spec.chat_response import complete_from_stream
from llm_spec.contract.chat import Capabilities
from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.contract.endpoint import SampledToken
from llm_spec.simulation import run_virtual
from llm_spec.strategies.base import ReadyStrategy, StrategyContext
from llm_spec.strategies.probe import prepare_or_refuse

# ------------------------------------------------------------------------------------------ sampling


class MarkovTarget:
    """Samples one of three tokens by a law that depends on the last one; a seed makes a call a function of it.

    As servers do: one seed gives every row of a batch the same noise.
    """

    LAW = ((0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.35, 0.25, 0.4))  # by the last token, the prompt's being 0

    def __init__(self, seed: int = 0, *, call_s: float = 0.0) -> None:
        self.name = "markov:target"
        self.capabilities = Capabilities(token_endpoint=self)
        self.context_length: int | None = None
        self.num_open = self.max_open = 0
        self.samplings: list[Sampling] = []
        self.lengths: list[tuple[int, ...]] = []  # of the prefixes of each call
        self._random = random.Random(seed)  # noqa: S311 - a reproducible test
        self._call_s = call_s

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with self.stream_after([0], request) as events:
            yield events

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        pass

    async def encode(self, text: str) -> list[int]:
        return [ord(sign) - ord("a") for sign in text]

    async def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("abc"[token_id] for token_id in token_ids)

    async def encode_chat(self, request: ChatRequest) -> list[int]:  # noqa: ARG002 - one prompt
        return [0]

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        self.samplings.append(sampling)
        self.lengths.append(tuple(map(len, prefixes)))
        noise = None if sampling.seed is None else random.Random(sampling.seed).random()  # noqa: S311 - as above
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            await asyncio.sleep(self._call_s)
        finally:
            self.num_open -= 1
        return [self._sampled(prefix[-1], noise) for prefix in prefixes]

    def stream_chat(self, request: ChatRequest) -> Any:
        return self.stream(request)

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        noises = random.Random(request.sampling.seed)  # noqa: S311 - as above

        async def events() -> AsyncGenerator[StreamEvent]:
            last = token_ids[-1]
            for _ in range(request.max_tokens or 0):
                await asyncio.sleep(self._call_s)
                token = self._sampled(last, noises.random() if request.sampling.seed is not None else None)
                last = token.token_id
                yield TextDelta(token.text, token_ids=(last,))
            yield Finish("length", None, "max_tokens")

        async with _closing(events()) as opened:
            yield opened

    def _sampled(self, last: int, noise: float | None) -> SampledToken:
        noise = self._random.random() if noise is None else noise
        probs = self.LAW[last]
        token_id = 0 if noise < probs[0] else 1 if noise < probs[0] + probs[1] else 2
        return SampledToken(token_id, "abc"[token_id])


@asynccontextmanager
async def _closing(events: AsyncGenerator[StreamEvent]) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    try:
        yield events
    finally:
        await events.aclose()


class LikelyDraft:
    """Always guesses tokens in a pattern of its own, chosen by `pattern`."""

    name = "likely"

    def __init__(self, pattern: str = "aabbbc") -> None:
        self._pattern = pattern

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        start = len(request.prefix)
        text = "".join(self._pattern[(start + n) % len(self._pattern)] for n in range(min(max_tokens, 24)))

        async def pieces() -> AsyncGenerator[DraftPiece]:
            await asyncio.sleep(0)
            yield DraftPiece(text, finish_reason="stop")

        opened = pieces()
        try:
            yield opened
        finally:
            await opened.aclose()

    async def aclose(self) -> None:
        pass


async def sampled_text(target: MarkovTarget, request: ChatRequest, draft: DraftProvider, **options: Any) -> str:
    config = SpeculativeConfig(strategy="probe", **options)
    context = StrategyContext(draft=draft, target=target, request=request, limits=config, pair_stats=Patient())
    ready = prepare_or_refuse(context)
    assert isinstance(ready, ReadyStrategy)
    async with ready.run() as events:
        return "".join([event.text async for event in events if isinstance(event, TextDelta)])


def triples_p_value(texts: Sequence[str]) -> float:
    """Chi-square of all windows of three tokens, given the token before each, against the exact law."""
    probs = MarkovTarget.LAW
    statistic, freedom = 0.0, 0
    for before in range(3):
        counts: Counter[tuple[int, ...]] = Counter()
        for text in texts:
            ids = [0, *(ord(sign) - ord("a") for sign in text)]
            counts.update(tuple(ids[at + 1 : at + 4]) for at in range(0, len(ids) - 3, 3) if ids[at] == before)
        for ids in product(range(3), repeat=3):
            expected = counts.total() * probs[before][ids[0]] * probs[ids[0]][ids[1]] * probs[ids[1]][ids[2]]
            statistic += (counts[ids] - expected) ** 2 / expected
        freedom += 26
    return float(chi2.sf(statistic, freedom))


@pytest.mark.slow
@pytest.mark.parametrize(("lookahead", "streams", "num_windows"), [(1, 1, 5_000), (4, 1, 25_000), (3, 3, 20_000)])
def test_sampled_text_has_the_targets_law(lookahead: int, streams: int, num_windows: int) -> None:
    """Windows of three tokens, 50,000 of them: chi-square tests against the exact law, whatever the draft likes."""
    options = {"lookahead": Fixed(lookahead), "max_concurrent_streams": streams}

    async def texts() -> list[str]:
        request = ChatRequest.create("tell", temperature=1.0, max_tokens=600)
        target, patterns = MarkovTarget(7 + lookahead), ("aabbbc", "b", "abc", "cb", "a")
        drafts = [LikelyDraft(patterns[n % 5]) for n in range(num_windows // 200)]
        return [await sampled_text(target, request, draft, **options) for draft in drafts]

    drawn = run_virtual(texts())
    assert sum(len(text) // 3 for text in drawn) == num_windows
    assert triples_p_value(drawn) > 1e-3


def test_short_answers_have_the_targets_law() -> None:
    """Whole answers of three tokens, each a request of its own."""

    async def texts() -> list[str]:
        request = ChatRequest.create("tell", temperature=1.0, max_tokens=3)
        target = MarkovTarget(5)
        options = {"lookahead": Fixed(2), "max_concurrent_streams": 2}
        return [await sampled_text(target, request, LikelyDraft("ab"), **options) for _ in range(3000)]

    counts = Counter(run_virtual(texts()))
    probs, statistic = MarkovTarget.LAW, 0.0
    for a, b, c in product(range(3), repeat=3):
        expected = 3000 * probs[0][a] * probs[a][b] * probs[b][c]
        statistic += (counts["abc"[a] + "abc"[b] + "abc"[c]] - expected) ** 2 / expected
    assert chi2.sf(statistic, 26) > 1e-3


class EndingTarget(MarkovTarget):
    """Writes "a" until it ends, at each place with one probability; the end has an id only where it `tells`."""

    END_RATE = 0.15
    tells = True

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:  # noqa: ARG002
        await asyncio.sleep(0.045)
        return [self._draw() for _ in prefixes]

    @asynccontextmanager
    async def stream_after(
        self,
        token_ids: Sequence[int],  # noqa: ARG002
        request: ChatRequest,  # noqa: ARG002
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async def events() -> AsyncGenerator[StreamEvent]:
            while True:
                await asyncio.sleep(0.025)
                token = self._draw()
                if not token.is_end or self.tells:
                    yield TextDelta(token.text, token_ids=(token.token_id,))
                if token.is_end:
                    yield Finish("stop", None, "eos")
                    return

        async with _closing(events()) as opened:
            yield opened

    def _draw(self) -> SampledToken:
        is_end = self._random.random() < self.END_RATE
        return SampledToken(9, "", is_end=True) if is_end else SampledToken(0, "a")


@pytest.mark.parametrize("tells", [True, False])
def test_sampled_answers_are_as_long_as_the_targets(*, tells: bool) -> None:
    """A stream's end counts only at positions that the stream owns, whether or not the stream reports its token.

    Here rows begin at the stream's first position. If the ends of both counted, answers would end twice as often.
    """

    async def check() -> None:
        target = EndingTarget(77)
        target.tells = tells
        request = ChatRequest.create("tell", temperature=1.0, max_tokens=400)
        draft = LikelyDraft("a")
        texts = [await sampled_text(target, request, draft, max_concurrent_streams=4) for _ in range(1500)]
        expected = 1 / EndingTarget.END_RATE - 1
        error = (expected / EndingTarget.END_RATE / len(texts)) ** 0.5  # of the mean of a geometric distribution
        assert sum(map(len, texts)) / len(texts) == pytest.approx(expected, abs=4 * error)

    run_virtual(check())


def test_a_sampled_batch_carries_no_seed() -> None:
    """Without a seed of the caller's none is sent, and nothing else of the sampling is lost."""
    target = MarkovTarget(call_s=0.01)
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=2, min_p=0.01, logit_bias={1: 2.0}, repetition_penalty=1.1)
    request = replace(ChatRequest.create("tell", max_tokens=40), sampling=sampling)
    run_virtual(sampled_text(target, request, LikelyDraft(), lookahead=Fixed(4)))
    assert set(map(repr, target.samplings)) == {repr(sampling)}
    assert max(map(len, target.lengths)) > 1


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
    target, draft = MarkovTarget(call_s=0.01), RecordingDraft()
    request = ChatRequest.create("tell", temperature=temperature, top_p=0.9, max_tokens=40)
    run_virtual(sampled_text(target, request, draft))
    assert {(s.temperature, s.top_p) for s in draft.samplings} == {(drafted, 0.9)}
    assert {(s.temperature, s.top_p) for s in target.samplings} == {(temperature, 0.9)}


def test_at_temperature_0_a_seed_is_dropped() -> None:
    """Nothing is drawn: the rounds stay batches, without it."""
    target = TokenTarget(bytewise(WORDS))
    request = ChatRequest.create("tell", temperature=0.0, seed=5)
    assert probed(TextDraft(WORDS), target, request, lookahead=Fixed(4)).content == WORDS
    assert {call.sampling.seed for call in target.calls} == {None}
    assert max(len(call.prefixes) for call in target.calls) > 1


def test_a_seeded_request_is_answered_plain() -> None:
    """One seed would give every prefix of a batch the same noise: the target's own seeded text instead."""
    target = TokenTarget(bytewise(WORDS))
    request = ChatRequest.create("tell", temperature=0.8, seed=5)
    result = probed(TextDraft(WORDS), target, request, lookahead=Fixed(4))
    assert (result.content, result.strategy, target.calls) == (WORDS, "plain", [])
    assert [sent.sampling.seed for sent in target.requests] == [5]
