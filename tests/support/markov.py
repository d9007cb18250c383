"""A law by which each token depends on the one before it, a draft of its likely tokens, and a test of texts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

from scipy.stats import chi2

from llm_spec import ChatRequest, TextDelta
from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.strategies.rows.probe import prepare_or_refuse
from support.probing import Patient
from support.strategy_runs import run_strategy
from support.targets import Target

LAW = ((0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.35, 0.25, 0.4))  # by the last token, the prompt's being 0


def draw_by_last(written: Sequence[bytes]) -> dict[bytes, float]:
    """The law of the token after those; no answer ends by itself."""
    return dict(zip((b"a", b"b", b"c"), LAW["abc".index(written[-1].decode()) if written else 0], strict=True))


def make_markov_target(seed: int = 0, **options: Any) -> Target:
    return Target(
        table=draw_by_last, by_ids=True, continue_prefix=False, encode_size=1, encode_chat_s=0.0, seed=seed, **options
    )


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


async def sampled_text(target: Target, request: ChatRequest, draft: DraftProvider, **options: Any) -> str:
    events = await run_strategy(prepare_or_refuse, draft, target, request, Patient(), **options)
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def triples_p_value(texts: Sequence[str]) -> float:
    """Chi-square of all windows of three tokens, given the token before each, against the exact law."""
    probs = LAW
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
