"""Answers that break off at any piece and go on: caps and stop strings hold as if they had come in one stream."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from support.targets import Fault, Target

from llm_spec import (
    ChatRequest,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    TransientError,
)
from llm_spec.decoder.config import StrategyName
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import run_virtual
from llm_spec.testing.simulated import SimulatedDraft

TEXT: Final = "Every piece stands at one place only, to its very end."
PIECES: Final = split_into_pieces(TEXT)
STOPS: Final = (" one place", "place only,", "very", "Every")


def make_target(break_at: int, *, num_together: int, by_ids: bool = False, **options: Any) -> Target:
    """Its first call breaks off before its piece `break_at`; it sends `num_together` tokens at a time."""
    broken = TransientError("the connection broke")
    return Target(
        TEXT,
        by_ids=by_ids,
        prediction=True,
        honours_stop=True,
        first_token_s=0.02,
        token_s=0.01,
        round_trip_s=0.002,
        tokens_per_event=num_together,
        faults=[Fault("stream_chat" if by_ids else "stream", count=1, at=break_at, how=broken)],
        **options,
    )


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
    target = make_target(break_at, num_together=num_together, **way.target)
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
    for break_at in range(1, 4):
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
