"""A target that draws each token by the one before it, a draft of its likely tokens, and the law of their texts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

from scipy.stats import chi2

from llm_spec import ChatRequest, ChatResponse, Finish, Sampling, SpeculativeConfig, StreamEvent, TextDelta
from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.contract.endpoint import SampledToken
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.strategies.base import ReadyStrategy, StrategyContext
from llm_spec.strategies.rows.probe import prepare_or_refuse
from support.probing import Patient

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
