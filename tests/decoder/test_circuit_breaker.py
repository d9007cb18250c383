"""The circuit breaker: what opens and closes it, and one trial at a time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.failing_targets import CONTINUES, NO_WAIT, OVERLOADED, WORDS, Failing, plainly

from llm_spec import (
    BreakerPolicy,
    ChatRequest,
    CircuitOpenError,
    InvalidRequestError,
    ProviderDraft,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    TargetError,
    TransientError,
)
from llm_spec.decoder.breaker import CircuitBreaker, GuardedDraft
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual

pytestmark = pytest.mark.virtual_clock


# ------------------------------------------------------------------------------------------ the circuit breaker


def attempt(breaker: CircuitBreaker, error: BaseException | None = None) -> None:
    """One that begins as the error says, and without an error ends well."""
    with breaker.guard_attempt():
        if error is not None:
            raise error
    breaker.record_outcome(None)


def test_the_circuit_opens_lets_one_try_and_closes() -> None:
    """Closed, open, half open, closed."""

    async def check() -> None:
        breaker = CircuitBreaker("a server", BreakerPolicy(max_failures=3, open_s=10.0))
        for _ in range(3):
            with pytest.raises(TransientError):
                attempt(breaker, OVERLOADED)
        with pytest.raises(CircuitOpenError, match=r"a server failed 3 times .* 10\.0 s more"):
            attempt(breaker)
        await asyncio.sleep(10.0)
        with breaker.guard_attempt(), pytest.raises(CircuitOpenError, match="one trial"):
            attempt(breaker)
        attempt(breaker)
        for _ in range(3):
            with pytest.raises(TransientError):
                attempt(breaker, OVERLOADED)
        await asyncio.sleep(10.0)
        with pytest.raises(TransientError):
            attempt(breaker, OVERLOADED)  # the trial fails …
        with pytest.raises(CircuitOpenError):
            attempt(breaker)  # … and the circuit is open again

    run_virtual(check())


@pytest.mark.parametrize(
    "error",
    [
        TransientError("too many", status=429),
        TransientError("conflict", status=409),
        TargetError("not found"),
        InvalidRequestError("bad"),
        asyncio.CancelledError(),
    ],
    ids=repr,
)
def test_refusals_and_cancellation_do_not_count(error: BaseException) -> None:
    async def check() -> None:
        breaker = CircuitBreaker("a server", BreakerPolicy(max_failures=2))
        for _ in range(9):
            with pytest.raises(type(error)):
                attempt(breaker, error)
        attempt(breaker)

    run_virtual(check())


def test_a_cancelled_trial_decides_nothing() -> None:
    """The next one may try."""

    async def check() -> None:
        breaker = CircuitBreaker("a server", BreakerPolicy(max_failures=1, open_s=1.0))
        with pytest.raises(TransientError):
            attempt(breaker, OVERLOADED)
        await asyncio.sleep(1.0)
        with pytest.raises(asyncio.CancelledError):
            attempt(breaker, asyncio.CancelledError())
        attempt(breaker)

    run_virtual(check())


def test_one_trial_at_a_time() -> None:
    """Attempts that began before the circuit opened, and end meanwhile, let nobody else through."""

    async def check() -> None:
        breaker = CircuitBreaker("a server", BreakerPolicy(max_failures=1, open_s=1.0))
        earlier = breaker.guard_attempt()
        earlier.__enter__()
        with pytest.raises(TransientError):
            attempt(breaker, OVERLOADED)
        await asyncio.sleep(1.0)
        with breaker.guard_attempt():
            earlier.__exit__(None, None, None)
            with pytest.raises(CircuitOpenError, match="one trial"):
                attempt(breaker)
        attempt(breaker)
        assert not breaker.is_open

    run_virtual(check())


@pytest.mark.parametrize("ending", ["well", "cancelled", "deadline", "broken"])
def test_a_trial_lasts_until_its_stream_has_ended(ending: str) -> None:
    """A target that begins well is still on trial: others are refused; how it ends decides what becomes of them."""
    failures = [(0, OVERLOADED)] * 5 + [(20, OVERLOADED)] * (ending == "broken")
    target = Failing(*failures, delay_piece_s=1.0)

    async def check() -> None:
        decoder = plainly(target, retry=RetryPolicy(max_attempts=1))
        for _ in range(5):
            with pytest.raises(TransientError):
                await decoder.decode("q")
        await asyncio.sleep(30.0)
        in_time = decoder.with_config(replace(decoder.config, deadline_s=20.0 if ending == "deadline" else None))
        trial = asyncio.create_task(in_time.decode("q"))
        for _ in range(19):  # of the 40 pieces
            await asyncio.sleep(1.0)
            with pytest.raises(CircuitOpenError, match="one trial"):
                await decoder.decode("q")
        assert target.num_open == 1
        if ending == "cancelled":
            trial.cancel()
        await asyncio.wait([trial])
        assert len(target.requests) == 6
        if ending == "broken":
            with pytest.raises(CircuitOpenError, match=r"30\.0 s more"):
                await decoder.decode("q")
        else:
            assert decoder.is_target_circuit_open is (ending != "well")  # the others decide nothing
            assert (await decoder.decode("q")).content == WORDS

    run_virtual(check())


@pytest.mark.parametrize("ending", ["well", "broken", "silent", "left"])
def test_a_drafts_trial_lasts_until_it_is_left(ending: str) -> None:
    """Its first piece does not close the circuit; one that was left after it has shown that it is alive."""
    draft = ScriptedProvider(WORDS, delay_piece_s=9.0 if ending == "silent" else 0.01)
    draft.capabilities = CONTINUES
    if ending == "broken":
        draft = Failing((5, OVERLOADED), delay_piece_s=0.01)

    async def check() -> None:
        breaker = CircuitBreaker("a draft", BreakerPolicy(max_failures=1, open_s=1.0))
        guarded = GuardedDraft(ProviderDraft(draft), breaker, None, 2.0)
        with pytest.raises(TransientError):
            attempt(breaker, OVERLOADED)
        await asyncio.sleep(1.0)
        try:
            async with asyncio.timeout(2.0), guarded.draft(ChatRequest.create("q"), 40) as pieces:
                async for _ in pieces:
                    assert breaker.is_open
                    with pytest.raises(CircuitOpenError):
                        attempt(breaker)
                    if ending == "left":
                        break
        except (TimeoutError, TransientError):
            assert ending in {"silent", "broken"}
        assert breaker.is_open == (ending in {"silent", "broken"})

    run_virtual(check())


def test_a_broken_target_is_left_alone() -> None:
    """After five failed requests, of two attempts each, nothing is sent, until half a minute later."""
    target = Failing(*[(0, OVERLOADED)] * 10)

    async def check() -> None:
        decoder = plainly(target, retry=replace(NO_WAIT, max_attempts=2))
        for _ in range(5):
            with pytest.raises(TransientError):
                await decoder.decode("q")
        for _ in range(3):
            with pytest.raises(CircuitOpenError):
                await decoder.decode("q")
        assert len(target.requests) == 9  # the fifth was the last to be let through, once
        await asyncio.sleep(30.0)
        with pytest.raises(TransientError):
            await decoder.decode("q")
        assert len(target.requests) == 10
        await asyncio.sleep(30.0)
        assert (await decoder.decode("q")).content == WORDS

    run_virtual(check())


def test_a_broken_draft_is_left_alone() -> None:
    """It is not asked again for the same answer, and after five answers not at all; the answers are the target's."""
    target = ScriptedProvider(WORDS, capabilities=CONTINUES, delay_piece_s=0.01)
    draft = Failing(*[(0, OVERLOADED)] * 99)

    async def check() -> None:
        decoder = SpeculativeDecoder(
            target=target, draft=draft, config=SpeculativeConfig(strategy="race", baseline_every=0)
        )
        for number in range(1, 9):
            result = await decoder.decode("q", temperature=0.0)
            assert result.content == WORDS
            assert len(result.fallbacks) == 1
            assert len(draft.requests) == min(number, 5)

    run_virtual(check())
