"""What a target can do is found out beside the requests: in their time, and never at their cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from llm_spec import (
    ClosedError,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    TransientError,
)
from llm_spec.contract.endpoint import Feature, SampledToken, TopTokens
from llm_spec.decoder.config import StrategyName
from llm_spec.decoder.feature_discovery import FeatureDiscovery
from llm_spec.testing import run_virtual
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

TEXT = " ".join(f"word{i}" for i in range(40))


class Shy(SimulatedTarget):
    """It takes token ids, which it takes `trial_s` to find out; `failure` is what comes of it instead."""

    def __init__(self, trial_s: float, failure: Exception | None = None, text: str = TEXT) -> None:
        super().__init__(text, first_token_s=0.4, token_s=0.02, by_ids=True)
        self.features: list[Feature] = []
        self.num_trying = 0
        self.began_s = 0.0  # the last trial
        self.failure = failure
        self._trial_s = trial_s
        self._can = self.capabilities
        self.capabilities = replace(self._can, token_endpoint=None, continue_prefix=False)

    async def discover(self, feature: Feature) -> None:
        if self.capabilities is self._can:
            return
        self.features.append(feature)
        self.began_s = asyncio.get_running_loop().time()
        self.num_trying += 1
        try:
            await asyncio.sleep(self._trial_s)
            if self.failure is not None:
                raise self.failure
            self.capabilities = self._can
        finally:
            self.num_trying -= 1


def decoder_of(target: Shy, text: str = TEXT, **config: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(target=target, draft=SimulatedDraft(text, 1.0, 1), config=SpeculativeConfig(**config))


async def seconds(decoder: SpeculativeDecoder) -> tuple[SpeculativeResult, float]:
    clock = asyncio.get_running_loop().time
    started = clock()
    result = await decoder.decode("q", temperature=0.0)
    return result, clock() - started


async def streamed_seconds(decoder: SpeculativeDecoder) -> tuple[SpeculativeResult, float]:
    clock = asyncio.get_running_loop().time
    started = clock()
    result: SpeculativeResult | None = None
    async with decoder.stream("q", temperature=0.0) as events:
        async for event in events:
            if isinstance(event, SpeculativeFinish):
                result = event.result
    assert result is not None
    return result, clock() - started


# ------------------------------------------------------------------------------------------ requests


def test_auto_does_not_wait_for_it() -> None:
    """Answers are plain and take as long as ever, until it is known; it is tried once, by the first that needs it."""

    async def check() -> None:
        target = Shy(trial_s=60.0)
        decoder = decoder_of(target)
        _, plain_s = await seconds(decoder)
        assert target.features == []
        for _ in range(20):
            result, took_s = await seconds(decoder)
            assert (result.strategy, result.plain_reason, result.content) == ("plain", "discovery", TEXT)
            assert took_s == pytest.approx(plain_s)
        assert target.features == ["token_endpoint"]
        await asyncio.sleep(60.0)
        assert {(await seconds(decoder))[0].strategy for _ in range(8)} >= {"race"}
        assert target.features == ["token_endpoint"]
        await decoder.aclose()

    run_virtual(check())


@pytest.mark.parametrize("strategy", ["race", "probe", "score"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_first_answer_of_a_strategy_by_name_is_plain(strategy: StrategyName, *, is_whole: bool) -> None:
    """It takes as long as plain while the target is tried beside it; the next one speculates."""

    async def check() -> None:
        target = ScoringTarget(trial_s=1.0)
        async with decoder_of(target, strategy=strategy, baseline_every=0) as decoder:
            reasons: list[tuple[str, str | None]] = []
            for _ in range(2):
                result, took_s = await (seconds if is_whole else streamed_seconds)(decoder)
                assert result.content == TEXT
                reasons.append((result.strategy, result.plain_reason))
                assert took_s == pytest.approx(0.4 + 39 * 0.02) or len(reasons) == 2
                await asyncio.sleep(1.0)
        assert reasons[0] == ("plain", "discovery")
        assert reasons[1][0] == strategy
        assert reasons[1][1] != "discovery"
        assert target.features == ["token_scorer" if strategy == "score" else "token_endpoint"]

    run_virtual(check())


@pytest.mark.parametrize("strategy", ["race", "probe", "score", "auto"])
def test_a_program_may_wait_for_it(strategy: str) -> None:
    """Then the first answer speculates; `auto` measures the target first."""

    async def check() -> None:
        target, clock = ScoringTarget(trial_s=1.0), asyncio.get_running_loop().time
        async with decoder_of(target, strategy=strategy, baseline_every=0) as decoder:
            began_s = clock()
            await decoder.discover()
            assert clock() - began_s == pytest.approx(1.0)
            await decoder.discover()
            assert target.features == ["token_scorer" if strategy == "score" else "token_endpoint"]
            results = [(await seconds(decoder))[0] for _ in range(1 if strategy != "auto" else 2)]
            assert results[-1].strategy == ("race" if strategy == "auto" else strategy)

    run_virtual(check())


@pytest.mark.parametrize("strategy", ["race", "auto", "plain", "regenerate", "judge"])
def test_a_target_that_lacks_what_a_program_waits_for_is_no_error(strategy: str) -> None:
    """Nor is one that cannot be tried, or a strategy that needs nothing."""

    async def check() -> None:
        for target in (IdsTarget(trial_s=0.1, has_endpoint=False), SimulatedTarget(TEXT)):
            async with SpeculativeDecoder(
                target=target, draft=None, config=SpeculativeConfig(strategy=strategy)
            ) as decoder:
                await decoder.discover()

    run_virtual(check())


def test_a_race_goes_on_to_text_where_a_program_waits() -> None:
    """What the strategy needs is tried, the best first, until the target has one of it."""

    async def check() -> None:
        target = TextTarget(trial_s=0.1, has_endpoint=False)
        async with decoder_of(target, strategy="race", baseline_every=0) as decoder:
            await decoder.discover()
            assert target.features == ["token_endpoint", "continue_prefix"]
            result, _ = await seconds(decoder)
            assert (result.content, result.strategy, result.guarantee) == (TEXT, "race", "exact-text")

    run_virtual(check())


@pytest.mark.parametrize("strategy", ["race", "auto"])
def test_a_program_that_waits_hears_what_failed(strategy: str) -> None:
    """And that the decoder was closed meanwhile."""

    async def check() -> None:
        failing = decoder_of(Shy(trial_s=0.1, failure=TransientError("busy")), strategy=strategy)
        with pytest.raises(TransientError, match="busy"):
            await failing.discover()
        closed = decoder_of(Shy(trial_s=10.0), strategy=strategy)
        waiting = asyncio.create_task(closed.discover())
        await asyncio.sleep(1.0)
        await closed.aclose()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await closed.discover()

    run_virtual(check())


def test_it_goes_on_when_an_answers_deadline_comes() -> None:
    """It is tried once, and serves later requests."""

    async def check() -> None:
        target = Shy(trial_s=8.0)
        hasty = decoder_of(target, strategy="race", baseline_every=0, deadline_s=1.0)
        results = await asyncio.gather(*(seconds(hasty) for _ in range(5)))
        for result, took_s in results:
            assert result.content
            assert TEXT.startswith(result.content)
            assert (result.stopped_by, took_s) == ("deadline", pytest.approx(1.0))
        patient = hasty.with_config(replace(hasty.config, deadline_s=None))
        result, took_s = await seconds(patient)
        assert (result.strategy, result.plain_reason, result.content) == ("plain", "discovery", TEXT)
        assert took_s == pytest.approx(0.4 + 39 * 0.02)
        await asyncio.sleep(8.0)
        results = [await seconds(patient) for _ in range(2)]
        assert {result.content for result, _ in results} == {TEXT}
        assert results[-1][0].plain_reason is None
        assert target.features == ["token_endpoint"]

    run_virtual(check())


class IdsTarget(Shy):
    """It says what it may turn out to have; `has_endpoint`: whether it does."""

    def __init__(
        self, trial_s: float, failure: Exception | None = None, text: str = TEXT, *, has_endpoint: bool = True
    ) -> None:
        super().__init__(trial_s, failure, text)
        discoverable: frozenset[Feature] = frozenset({"token_endpoint"})
        self.capabilities = replace(self.capabilities, discoverable=discoverable)
        endpoint = self._can.token_endpoint if has_endpoint else None
        self._can = replace(self._can, token_endpoint=endpoint, discoverable=discoverable)


class ScoringTarget(IdsTarget):
    """It scores tokens, too, which takes part of its trial to find out."""

    max_top = 2

    def __init__(self, trial_s: float) -> None:
        super().__init__(trial_s)
        discoverable: frozenset[Feature] = frozenset({"token_endpoint", "token_scorer"})
        self.capabilities = replace(self.capabilities, discoverable=discoverable)
        self._can = replace(self._can, token_scorer=self, discoverable=discoverable)

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:  # noqa: ARG002 - two
        prefixes = [token_ids[: len(token_ids) - num_rows + row + 1] for row in range(num_rows)]
        tokens = await super().sample_next(prefixes, Sampling())
        return [TopTokens(((token.token_id, 0.0), (10**6, -9.0))) for token in tokens]

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        for token_id in sampling.logit_bias or ():  # it is made to write this one
            return [SampledToken(token_id, "", is_end=token_id == 0)]
        return await super().sample_next(prefixes, sampling)


class TextTarget(IdsTarget):
    """It goes on from a text, which is believed until it was tried."""

    def __init__(self, trial_s: float, **options: Any) -> None:
        super().__init__(trial_s, **options)
        both: frozenset[Feature] = frozenset({"token_endpoint", "continue_prefix"})
        self.capabilities = replace(self.capabilities, continue_prefix=True, discoverable=both)
        self._can = replace(self._can, continue_prefix=True, discoverable=both)

    async def discover(self, feature: Feature) -> None:
        self.features.append(feature)
        await asyncio.sleep(self._trial_s)


@pytest.mark.parametrize(
    ("target", "reasons"),
    [
        (IdsTarget(trial_s=60.0), ["discovery", "discovery"]),
        (IdsTarget(trial_s=0.1, has_endpoint=False), ["discovery", "target"]),
        (IdsTarget(trial_s=0.1, failure=TransientError("busy")), ["discovery", "discovery"]),
    ],
    ids=["is not over", "finds nothing", "fails"],
)
def test_a_plain_answer_says_why(target: IdsTarget, reasons: list[str]) -> None:
    """It takes as long as plain, and has the same text."""

    async def check() -> None:
        async with decoder_of(target, strategy="probe", baseline_every=0) as decoder:
            for reason in reasons:
                result, took_s = await seconds(decoder)
                assert (result.content, result.plain_reason) == (TEXT, reason)
                assert took_s == pytest.approx(0.4 + 39 * 0.02)

    run_virtual(check())


def test_a_server_without_it_is_served_plainly_by_name_too() -> None:
    """It may have had it before, and may have it again: the reason is reported, and no request fails."""

    async def check() -> None:
        decoder = decoder_of(IdsTarget(trial_s=0.1, has_endpoint=False), strategy="probe", baseline_every=0)
        await decoder.discover()
        for _ in range(3):
            result, _ = await seconds(decoder)
            assert (result.content, result.plain_reason) == (TEXT, "target")
            assert "token ids" in str(result.plain_detail)

    run_virtual(check())


def test_an_answer_beside_it_is_no_slower() -> None:
    """Of an answer that is plain after all: nothing waits."""

    async def check() -> None:
        decoder = decoder_of(Shy(trial_s=8.0), strategy="race")
        _, (result, took_s) = await asyncio.gather(*(seconds(decoder) for _ in range(2)))
        assert (result.strategy, result.plain_reason) == ("plain", "discovery")
        assert result.plain_s == pytest.approx(took_s)
        assert result.speedup == pytest.approx(1.0)

    run_virtual(check())


def test_a_request_that_is_cancelled_leaves_it_to_the_others() -> None:
    """Each of which waits as long as it likes."""

    async def check() -> None:
        target = Shy(trial_s=8.0)
        decoder = decoder_of(target, strategy="race", baseline_every=0)
        first, second = (asyncio.create_task(seconds(decoder)) for _ in range(2))
        await asyncio.sleep(1.0)
        first.cancel()
        result, _ = await second
        assert first.cancelled()
        assert (result.content, result.plain_reason) == (TEXT, "discovery")
        await decoder.discover()
        assert (await seconds(decoder))[0].strategy == "race"
        assert target.features == ["token_endpoint"]

    run_virtual(check())


def test_a_trial_that_fails_is_no_answers_failure() -> None:
    """It is plain, by `auto` and with a strategy by name."""

    async def check() -> None:
        target = Shy(trial_s=0.1, failure=RuntimeError("it cannot be tried"))
        decoder = decoder_of(target)
        for _ in range(3):
            result, _ = await seconds(decoder)
            assert (result.strategy, result.content) == ("plain", TEXT)
        named = decoder.with_config(SpeculativeConfig(strategy="race", baseline_every=0))
        result, _ = await seconds(named)
        assert (result.strategy, result.plain_reason, result.content) == ("plain", "discovery", TEXT)

    run_virtual(check())


# ------------------------------------------------------------------------------------------ closing


def test_each_who_waits_has_an_error_of_its_own() -> None:
    """Requests put their text so far into the error that they end with."""
    failure = TransientError("busy", status=503, retry_after_s=2.0)

    async def check() -> None:
        discovery = FeatureDiscovery(Shy(1.0, failure))
        waiting = [discovery.wait_until_tried("token_endpoint") for _ in range(3)]
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert len({id(error) for error in errors}) == 3
        for error in errors:
            assert isinstance(error, TransientError)
            assert (str(error), error.status, error.retry_after_s) == ("busy", 503, 2.0)

    run_virtual(check())


def test_closing_the_decoder_ends_it() -> None:
    """Not that of a variant, which shares it; what waited for it goes on without."""

    async def check() -> None:
        target = Shy(trial_s=60.0)
        decoder = decoder_of(target)
        before = asyncio.all_tasks()
        for _ in range(2):
            await seconds(decoder)
        assert target.num_trying == 1
        await decoder.with_config(SpeculativeConfig()).aclose()
        assert target.num_trying == 1
        await decoder.aclose()
        assert (target.num_trying, asyncio.all_tasks()) == (0, before)

    run_virtual(check())


def test_every_event_loop_has_its_own() -> None:
    """One that ended in the middle of a trial leaves nothing to the next."""
    target = Shy(trial_s=30.0)
    discovery = FeatureDiscovery(target)

    async def begin() -> bool:
        return await discovery.has_tried_or_start_trial("token_endpoint")

    assert not run_virtual(begin())
    with asyncio.Runner() as other:
        assert not other.run(begin())
        assert target.features == ["token_endpoint"] * 2
        assert not run_virtual(begin())  # beside it, and it goes on
        assert target.num_trying == 1
        other.run(discovery.aclose())
        assert target.num_trying == 0
    run_virtual(discovery.wait_until_tried("token_endpoint"))
    assert run_virtual(begin())


def test_programs_with_a_loop_for_each_answer_find_out_too() -> None:
    """What the end of a loop cuts off is begun with the next answer, which waits for the rest of it behind its text."""
    target = Shy(trial_s=3.0)
    decoder = decoder_of(target)
    answers = [run_virtual(seconds(decoder)) for _ in range(5)]
    assert [result.plain_reason for result, _ in answers] == ["baseline", "discovery", "discovery", None, None]
    assert target.features == ["token_endpoint"] * 2
    assert [took_s for _, took_s in answers[:3]] == pytest.approx([answers[0][1], answers[0][1], 3.0])
    assert answers[2][0].timings.total_s == pytest.approx(answers[0][1])


def test_a_trial_that_does_not_end_is_not_waited_for_again_and_again() -> None:
    """Ten seconds in all; a loop that goes on waits for none."""
    decoder = decoder_of(Shy(trial_s=60.0))
    plain_s = run_virtual(seconds(decoder))[1]
    taken = [run_virtual(seconds(decoder))[1] for _ in range(5)]
    assert taken == pytest.approx([plain_s, 10.0 + plain_s, plain_s, plain_s, plain_s])


def test_what_needs_no_trial_is_known() -> None:
    """A target that cannot be tried, and a strategy that needs nothing."""

    async def check() -> None:
        shy = Shy(trial_s=1.0)
        assert await FeatureDiscovery(SimulatedTarget(TEXT)).has_tried_or_start_trial("token_endpoint")
        await FeatureDiscovery(SimulatedTarget(TEXT)).wait_until_tried("token_endpoint")
        assert await FeatureDiscovery(shy).has_tried_or_start_trial(None)
        await FeatureDiscovery(shy).wait_until_tried(None)
        assert shy.features == []

    run_virtual(check())
