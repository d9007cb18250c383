"""Drafts that break their contract or take their time: the target's own answer, in a time that is bounded, and paid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import pytest

from llm_spec import (
    ChatRequest,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    TextDelta,
    Timeouts,
    Usage,
)
from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.provider import Capabilities, LlmProvider
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedTarget

WORDS: Final = " ".join(f"word{n}" for n in range(60))
STRATEGIES: Final = ["race", "probe", "judge", "predict", "regenerate"]
PATIENCE_S: Final = 30.0


class Draft:
    """Writes what a function yields for a request."""

    name = "odd"

    def __init__(self, write: Callable[[ChatRequest], AsyncGenerator[Any]]) -> None:
        self.num_open = 0
        self._write = write

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:  # noqa: ARG002 - it ignores it
        self.num_open += 1
        try:
            async with aclosing(self._write(request)) as pieces:
                yield pieces
        finally:
            self.num_open -= 1

    async def aclose(self) -> None:
        """Nothing to release."""


def target_of(strategy: str) -> LlmProvider:
    if strategy == "probe":
        return SimulatedTarget(WORDS, token_s=0.01, first_token_s=0.02, by_ids=True)
    can = Capabilities(continue_prefix=True, prediction=True)
    return ScriptedProvider(WORDS, capabilities=can, delay_piece_s=0.01)


def decode(strategy: Any, draft: Any, **config: Any) -> SpeculativeResult:
    settings = SpeculativeConfig(strategy=strategy, draft_timeout_s=PATIENCE_S, **config)
    decoder = SpeculativeDecoder(target=target_of(strategy), draft=draft, config=settings)
    return run_virtual(decoder.decode("go", temperature=0))


async def cancelling(request: ChatRequest) -> AsyncGenerator[DraftPiece]:
    yield DraftPiece(WORDS[len(request.prefix) :][:5])
    inner = asyncio.ensure_future(asyncio.sleep(10))
    await asyncio.sleep(0)
    inner.cancel()
    await inner


async def trickling(request: ChatRequest) -> AsyncGenerator[DraftPiece]:
    for word in WORDS[len(request.prefix) :].split(" "):
        await asyncio.sleep(25.0)
        yield DraftPiece(word + " ")


async def silent(request: ChatRequest) -> AsyncGenerator[DraftPiece]:
    await asyncio.sleep(1e6)
    yield DraftPiece(request.prefix)


async def deaf(request: ChatRequest) -> AsyncGenerator[DraftPiece]:  # noqa: ARG001 - as above
    yield DraftPiece("wo")
    for _ in range(2):
        try:
            await asyncio.sleep(100.0)
        except asyncio.CancelledError:
            continue


async def textless(request: ChatRequest) -> AsyncGenerator[Any]:  # noqa: ARG001 - as above
    yield DraftPiece("wo")
    yield DraftPiece(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [cancelling, textless])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_draft_that_fails_in_an_odd_way(strategy: str, write: Any) -> None:
    """As any other that fails: told once, and the target's answer is there in the target's time."""
    draft = Draft(write)
    result = decode(strategy, draft)
    assert result.content == WORDS
    assert result.plain_reason == (None if strategy == "regenerate" else "draft_failed")
    assert len([reason for reason in result.fallbacks if reason.startswith("DraftError: ")]) == 1
    assert result.timings.total_s < 3.0
    assert draft.num_open == 0


@pytest.mark.parametrize("write", [trickling, deaf])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_wait_for_a_draft_is_bounded(strategy: str, write: Any) -> None:
    """All of it, not the wait for each piece, where the target waits; elsewhere it is not felt at all.

    One that does not end when it is cancelled is waited for behind the answer, so that nothing is left open.
    """
    waits = {"judge": PATIENCE_S, "predict": PATIENCE_S, "regenerate": PATIENCE_S}
    draft, closing_s = Draft(write), 100.0 if write is deaf else 0.0
    result = decode(strategy, draft)
    assert result.content == WORDS
    if strategy != "regenerate":  # whose end waits
        assert result.timings.first_text_s is not None
        assert result.timings.first_text_s <= waits.get(strategy, 0.0) + 1.0  # a verdict takes time, too
    assert result.timings.total_s <= waits.get(strategy, 0.0) + 3.0 + closing_s
    assert draft.num_open == 0


@pytest.mark.parametrize("write", [trickling, silent])
@pytest.mark.parametrize("strategy", ["judge", "predict", "regenerate"])
def test_a_draft_that_is_always_late_is_left_alone(strategy: Any, write: Any) -> None:
    """Also one that is never silent for long: each of its answers cost a target all of its patience."""
    config = SpeculativeConfig(strategy=strategy, draft_timeout_s=PATIENCE_S, baseline_every=0)
    decoder = SpeculativeDecoder(target=target_of(strategy), draft=Draft(write), config=config)

    async def check() -> None:
        for _ in range(5):
            assert not decoder.is_draft_circuit_open
            result = await decoder.decode("go", temperature=0)
            assert (result.content, result.fallbacks[0].partition(":")[0]) == (WORDS, "late")
        assert decoder.is_draft_circuit_open
        assert (await decoder.decode("go", temperature=0)).timings.total_s < 3.0

    run_virtual(check())


def test_a_draft_that_writes_long_is_not_left_alone() -> None:
    """Where nobody waits for all of it, a draft may take its time, and be left when the answer has ended."""
    config = SpeculativeConfig(strategy="race", draft_timeout_s=0.3, baseline_every=0)

    async def slowly(request: ChatRequest) -> AsyncGenerator[DraftPiece]:
        for word in WORDS[len(request.prefix) :].split(" "):
            await asyncio.sleep(0.2)
            yield DraftPiece(word + " ")

    decoder = SpeculativeDecoder(target=target_of("race"), draft=Draft(slowly), config=config)

    async def check() -> None:
        for _ in range(6):
            assert (await decoder.decode("go", temperature=0)).content == WORDS
        assert not decoder.is_draft_circuit_open

    run_virtual(check())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_silent_draft_is_not_a_silent_target(strategy: str) -> None:
    """What a target may take is counted from when it is asked, and not while others are waited for."""

    async def late(request: ChatRequest) -> AsyncGenerator[DraftPiece]:
        await asyncio.sleep(5.0)
        yield DraftPiece(WORDS[len(request.prefix) :])

    timeouts = Timeouts(first_chunk_s=1.0, between_chunks_s=0.5)
    result = decode(strategy, Draft(late), timeouts=timeouts)
    assert result.content == WORDS
    assert not result.retries


def test_what_a_late_draft_wrote_is_used() -> None:
    """One word of it, by the time that its patience ends, goes along as the prediction."""
    target = target_of("predict")
    config = SpeculativeConfig(strategy="predict", draft_timeout_s=PATIENCE_S)
    result = run_virtual(
        SpeculativeDecoder(target=target, draft=Draft(trickling), config=config).decode("go", temperature=0)
    )
    assert isinstance(target, ScriptedProvider)
    assert target.requests[0].prediction == "word0 "
    assert result.fallbacks == ("late: the draft took longer than 30 s",)
    assert result.draft_usage == Usage(input_tokens=1, output_tokens=1)


class Counting(ScriptedProvider):
    """Counts what it writes, in all its calls."""

    num_written = 0

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[Any]]:
        async with super().stream(request) as events, aclosing(self._counted(events)) as counted:
            yield counted

    async def _counted(self, events: AsyncIterator[Any]) -> AsyncGenerator[Any]:
        async for event in events:
            self.num_written += isinstance(event, TextDelta)
            yield event


@pytest.mark.parametrize("strategy", ["race", "probe"])
def test_calls_that_were_left_are_counted(strategy: str) -> None:
    """A draft that is wrong now and then is begun anew: what the left calls wrote, and read, is in its usage."""

    def write(request: ChatRequest) -> str:
        rest = WORDS[len(request.prefix) :]
        return request.prefix + rest[:40] + " WRONG" + rest[46:]

    can = Capabilities(continue_prefix=True)
    draft = Counting(write, capabilities=can, delay_piece_s=0.005)
    result = decode(strategy, ProviderDraft(draft))
    assert result.content == WORDS
    assert len(draft.requests) > 1
    assert result.draft_usage is not None
    assert result.draft_usage.output_tokens == draft.num_written
    assert result.draft_usage.input_tokens >= len(draft.requests)
