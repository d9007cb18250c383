"""A target that does not do what speculation asks of it is asked plainly, and speculation is left for a while."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.targets import Fault, Target

from llm_spec import (
    CircuitOpenError,
    Fallback,
    InvalidRequestError,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    StreamEvent,
    TargetError,
    TextDelta,
    TransientError,
    UnsupportedError,
)
from llm_spec.contract.endpoint import Feature
from llm_spec.contract.provider import Capabilities
from llm_spec.testing import run_virtual
from llm_spec.testing.simulated import SimulatedDraft

TEXT = " ".join(f"word{i}" for i in range(30))
ONCE = RetryPolicy(max_attempts=1, first_wait_s=0.0)
ERRORS = [
    InvalidRequestError("extra fields not permitted"),
    TargetError("answered 403"),
    UnsupportedError("not any more"),
    RuntimeError("a bug"),
]


class Choosy(Target):
    """Refuses calls by token ids with `error`, streams from their `num_good`th piece on; chats with `plain_error`.

    `lost` are the features that it was told to have lost, which it has lost then.
    """

    def __init__(
        self, error: Exception | None = None, *, num_good: int = 0, plain_error: Exception | None = None
    ) -> None:
        super().__init__(TEXT, first_token_s=0.1, token_s=0.02, by_ids=True)
        self.lost: list[Feature] = []
        self.refuse(error, num_good)
        if plain_error is not None:
            self.faults.append(Fault("stream", how=plain_error))

    def refuse(self, error: Exception | None, num_good: int = 0) -> None:
        """From now on."""
        places = {"stream_chat": num_good, "stream_after": num_good, "sample_next": 0}
        self.faults = [] if error is None else [Fault(method, at=at, how=error) for method, at in places.items()]

    @property
    def num_chats(self) -> int:
        return len(self.get_calls("stream"))

    async def discover(self, feature: Feature) -> None:
        """All of it is known."""

    def mark_feature_lost(self, feature: Feature) -> None:
        self.lost.append(feature)
        self.capabilities = Capabilities()


def decoder_of(target: Choosy, strategy: Any = "race", **config: Any) -> SpeculativeDecoder:
    options = {"baseline_every": 0, "retry": ONCE, **config}
    return SpeculativeDecoder(
        target=target, draft=SimulatedDraft(TEXT, 0.95, 1), config=SpeculativeConfig(strategy=strategy, **options)
    )


def decode(target: Choosy, strategy: Any = "race", **config: Any) -> SpeculativeResult:
    return run_virtual(decoder_of(target, strategy, **config).decode("q", temperature=0.0))


# ------------------------------------------------------------------------------------------ one answer


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("strategy", ["race", "probe"])
def test_what_is_refused_is_answered_plainly(strategy: str, error: Exception) -> None:
    """By one more request, although only one attempt is allowed; the result says why nothing was speculated."""
    target = Choosy(error)
    result = decode(target, strategy)
    assert (result.content, result.guarantee, result.strategy) == (TEXT, "exact", strategy)
    assert result.plain_reason == ("target" if isinstance(error, UnsupportedError) else "refused")
    assert result.fallbacks == (f"{type(error).__name__}: {error}",)
    assert (target.num_chats, target.num_open) == (1, 0)


@pytest.mark.parametrize("error", ERRORS[:2], ids=repr)
@pytest.mark.parametrize("strategy", ["race", "probe"])
def test_what_plain_is_refused_as_well_is_plains_error(strategy: str, error: Exception) -> None:
    """The error is that of the plain request, and no capability is lost for it."""
    target = Choosy(error, plain_error=InvalidRequestError("the prompt is too long"))
    with pytest.raises(InvalidRequestError, match="the prompt is too long"):
        decode(target, strategy)
    assert (target.num_chats, target.lost, target.num_open) == (1, [], 0)


def test_what_is_refused_behind_text_is_an_error() -> None:
    """Never a second answer behind the first."""
    target = Choosy(TargetError("answered 403"), num_good=5)
    target.capabilities = Capabilities(token_endpoint=target)
    shown: list[str] = []

    async def read() -> None:
        async with decoder_of(target, max_concurrent_streams=1).stream("q", temperature=0.0) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    shown.append(event.text)  # noqa: PERF401 - it is read when this fails

    with pytest.raises(TargetError, match="answered 403") as caught:
        run_virtual(read())
    assert "".join(shown) == caught.value.partial_text == " ".join(TEXT.split()[:5])
    assert target.num_chats == 0


def test_what_fails_for_a_while_is_no_refusal() -> None:
    """It is retried as the policy says, and no capability is lost for it."""
    target = Choosy(TransientError("busy", status=503))
    with pytest.raises(TransientError, match="busy"):
        decode(target)
    result = decode(target, retry=RetryPolicy(max_attempts=2, first_wait_s=0.0))
    assert (result.content, result.plain_reason, result.fallbacks) == (TEXT, "retried", ())
    assert target.lost == []


def test_a_circuit_that_is_open_is_not_asked_twice() -> None:
    """Not by an attempt, and not plainly."""
    target = Choosy(TargetError("answered 403"), plain_error=TransientError("down"))
    decoder = decoder_of(target)

    async def run() -> None:
        for _ in range(5):
            with pytest.raises(TransientError, match="down"):
                await decoder.decode("q", temperature=0.0)
        with pytest.raises(CircuitOpenError):
            await decoder.decode("q", temperature=0.0)

    run_virtual(run())
    assert target.num_chats == 5


def test_a_refusal_is_told_as_one() -> None:
    """By the events, before any text."""

    async def run() -> list[StreamEvent]:
        async with decoder_of(Choosy(ERRORS[0])).stream("q", rounds=True, temperature=0.0) as events:
            return [event async for event in events]

    events = run_virtual(run())
    assert isinstance(events[1], Fallback)
    assert events[1].cause == "refused"
    assert isinstance(events[2], TextDelta)
    assert isinstance(events[-1], SpeculativeFinish)


# ------------------------------------------------------------------------------------------ the next ones


@pytest.mark.parametrize("strategy", ["race", "probe"])
def test_a_target_hears_what_it_has_lost(strategy: str) -> None:
    """Once; then there is no such attempt."""
    target = Choosy(ERRORS[0])
    decoder = decoder_of(target, strategy)
    run_virtual(decoder.decode("q", temperature=0.0))
    assert target.lost == ["token_endpoint"]
    with pytest.raises(UnsupportedError):
        run_virtual(decoder.decode("q", temperature=0.0))


@pytest.mark.parametrize("error", [ERRORS[0], TransientError("crashed", status=500)], ids=repr)
@pytest.mark.parametrize("forgets", [True, False])
def test_auto_leaves_what_does_not_work_any_more(*, forgets: bool, error: Exception) -> None:
    """All requests are answered; what fails before it has said anything is worth nothing to the planner."""
    target = Choosy()
    if not forgets:
        target.mark_feature_lost = lambda _: None  # type: ignore[method-assign]
    decoder = decoder_of(target, "auto", retry=RetryPolicy(first_wait_s=0.0))

    async def answered(number: int) -> Counter[str]:
        results = [await decoder.decode("q", temperature=0.0) for _ in range(number)]
        assert {result.content for result in results} == {TEXT}
        return Counter(result.strategy for result in results)

    async def run() -> None:
        before = await answered(16)
        assert before["plain"] <= 2
        target.refuse(error)
        after = await answered(80)
        assert after["plain"] >= 45

    run_virtual(run())


def test_what_works_again_is_taken_up_again() -> None:
    """What the planner holds against a strategy passes."""
    target = Choosy()
    target.mark_feature_lost = lambda _: None  # type: ignore[method-assign]
    decoder = decoder_of(target, "auto")

    async def strategies(number: int) -> Counter[str]:
        return Counter([(await decoder.decode("q", temperature=0.0)).strategy for _ in range(number)])

    async def run() -> None:
        await strategies(16)
        target.refuse(ERRORS[0])
        await strategies(60)
        target.refuse(None)
        await strategies(200)
        assert (await strategies(50))["plain"] <= 5

    run_virtual(run())
