"""Answers that break off at any piece and go on: caps and stop strings hold as if they had come in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from llm_spec import (
    ChatRequest,
    Finish,
    RetryPolicy,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    StreamEvent,
    TextDelta,
    TransientError,
)
from llm_spec.contract.endpoint import SampledToken, TopTokens
from llm_spec.decoder.config import StrategyName
from llm_spec.local.detokenizing import StopMatcher
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import run_virtual
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

TEXT: Final = "Every piece stands at one place only, to its very end."
PIECES: Final = split_into_pieces(TEXT)
STOPS: Final = (" one place", "place only,", "very", "Every")


class Target(SimulatedTarget):
    """Greedy; its first call breaks before its piece `break_at`. It is a `TokenScorer` too.

    It honours `stop`, and sends `num_together` tokens at a time, as a busy server does.
    """

    max_top = 5

    def __init__(self, break_at: int, *, by_ids: bool = False, scores: bool = False, num_together: int = 1) -> None:
        super().__init__(TEXT, first_token_s=0.02, token_s=0.01, round_trip_s=0.002, by_ids=by_ids)
        self.capabilities = replace(
            self.capabilities, continue_prefix=True, token_scorer=self if scores else None, prediction=True
        )
        self._break_at: int | None = break_at
        self._num_together = num_together

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with super().stream(request) as events, aclosing(self._send(request, events)) as sent:
            yield sent

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with super().stream_chat(request) as events, aclosing(self._send(request, events)) as sent:
            yield sent

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        self._break(range(len(prefixes)))
        return await super().sample_next(prefixes, sampling)

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        self._break(range(num_rows))
        await asyncio.sleep(0.02)
        ends = range(len(token_ids) - num_rows + 1, len(token_ids) + 1)
        best = [self._get_answer_token_after(token_ids[:end]).token_id for end in ends]
        return [TopTokens(tuple((token_id + n, -9.0 * n) for n in range(top))) for token_id in best]

    def _break(self, pieces: range) -> None:
        break_at, self._break_at = self._break_at, None
        if break_at in pieces:
            raise TransientError("the connection broke")

    async def _send(self, request: ChatRequest, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        break_at, self._break_at = self._break_at, None
        matcher, held, index = StopMatcher(request.stop), list[TextDelta](), 0
        async for event in events:
            if index == break_at:
                raise TransientError("the connection broke")
            index += 1
            if isinstance(event, TextDelta) and request.stop:
                for delta in matcher.push(event.text):
                    yield delta
                if matcher.matched is not None:
                    yield Finish("stop", None, "stop_string")
                    return
                continue
            if isinstance(event, TextDelta):
                held.append(event)
            if held and (len(held) == self._num_together or not isinstance(event, TextDelta)):
                ids = None if held[0].token_ids is None else tuple(i for d in held for i in d.token_ids or ())
                yield TextDelta("".join(delta.text for delta in held), token_ids=ids)
                held = []
            if not isinstance(event, TextDelta):
                for delta in matcher.flush():
                    yield delta
                yield event


@dataclass(frozen=True, kw_only=True)
class Way:
    """A strategy with a target that it can use."""

    name: str
    strategy: StrategyName
    target: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return self.name


WAYS = [
    Way(name="plain", strategy="plain"),
    Way(name="race by ids", strategy="race", target={"by_ids": True}),
    Way(name="race by text", strategy="race"),
    Way(name="probe", strategy="probe", target={"by_ids": True}),
    Way(name="score", strategy="score", target={"by_ids": True, "scores": True}),
    Way(name="predict", strategy="predict"),
    Way(name="regenerate", strategy="regenerate"),
]


def stream(way: Way, break_at: int, *, num_together: int = 1, streams: int = 4, **options: Any) -> SpeculativeResult:
    """The result of an answer whose consumer is shown each piece; nothing is left open."""
    draft = None if way.strategy == "plain" else SimulatedDraft(TEXT, 1.0, 1, token_s=0.001)
    target = Target(break_at, num_together=num_together, **way.target)
    retry = RetryPolicy(first_wait_s=0.0, max_wait_s=0.0)
    config = SpeculativeConfig(strategy=way.strategy, retry=retry, max_concurrent_streams=streams)
    decoder = SpeculativeDecoder(target=target, draft=draft, config=config)

    async def read() -> SpeculativeResult:
        async with decoder.stream(ChatRequest.create("q", temperature=0.0, **options)) as events:
            *_, last = [event async for event in events]
        assert (target.num_open, len(asyncio.all_tasks())) == (0, 1)
        assert isinstance(last, SpeculativeFinish)
        assert last.result is not None
        return last.result

    return run_virtual(read())


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("max_tokens", [1, 6, len(PIECES) - 1, len(PIECES)])
def test_caps_hold_where_the_target_drops(max_tokens: int, way: Way) -> None:
    """An answer that goes on has as many tokens left as it has not shown."""
    for break_at in range(min(max_tokens, len(PIECES))):
        result = stream(way, break_at, max_tokens=max_tokens)
        assert result.content == "".join(PIECES[:max_tokens]), break_at
        assert result.stopped_by in ("max_tokens", "eos")


def test_a_cap_counts_tokens_not_frames_where_ids_are_known() -> None:
    """A race by ids knows how many tokens each frame had; the rest of a broken answer has no more than are left."""
    for break_at in range(3, 9):
        result = stream(WAYS[1], break_at, num_together=3, streams=1, max_tokens=10)
        assert result.content == "".join(PIECES[:10]), break_at


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_stop_strings_hold_where_the_target_drops(way: Way, stop: str) -> None:
    """Up to the first of them; what a server held back as the beginning of one is sent anew."""
    for break_at in range(len(PIECES)):
        result = stream(way, break_at, stop=[stop])
        assert result.content == TEXT[: TEXT.index(stop)], break_at
        assert result.finish_reason == "stop"
