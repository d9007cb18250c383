"""What a target can do is found out beside the requests: in their time, and never at their cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from llm_spec import (
    ChatRequest,
    DraftPiece,
    Round,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    StreamEvent,
    TextDelta,
    TransientError,
)
from llm_spec.config import StrategyName
from llm_spec.contract.endpoint import Feature, SampledToken, TokenEndpoint, TopTokens
from llm_spec.discovery import FeatureDiscovery
from llm_spec.simulation import SimulatedDraft, SimulatedTarget
from llm_spec.testing import run_virtual

TEXT = " ".join(f"word{i}" for i in range(40))
LONG_TEXT = " ".join(f"word{i}" for i in range(800))


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
    return SpeculativeDecoder(SimulatedDraft(text, 1.0, 1), target, SpeculativeConfig(**config))


async def seconds(decoder: SpeculativeDecoder) -> tuple[SpeculativeResult, float]:
    clock = asyncio.get_running_loop().time
    started = clock()
    result = await decoder.decode("q", temperature=0.0)
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


@pytest.mark.parametrize("strategy", ["race", "probe"])
@pytest.mark.parametrize("halts", [True, False])
def test_what_it_holds_an_answer_up_counts_as_lost_time(strategy: str, *, halts: bool) -> None:
    """So that no other trial begins in the same answer, nor in the next ones."""

    async def check() -> None:
        target = HaltingTarget(trial_s=0.4)
        target.halts = halts
        decoder = decoder_of(target, strategy=strategy, baseline_every=0)
        await seconds(decoder)
        assert target.features == ["token_endpoint"]
        rows = decoder._planner.pair_stats.rows
        lost_s = 0.02 * (rows._plain_s + 256 * 0.02) - rows.estimate_allowed_loss_s(0.0, 0.02, None)
        assert lost_s == pytest.approx(4 * 0.08 if halts else 0.0, abs=0.081)
        await decoder.aclose()

    run_virtual(check())


def test_a_strategy_by_name_begins_beside_it() -> None:
    """No answer waits for it; it is tried once, goes on when an answer's deadline comes, and serves later requests."""

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
        assert (result.strategy, result.plain_reason, result.content) == ("race", "discovery", TEXT)
        assert took_s == pytest.approx(0.4 + 39 * 0.02)
        await asyncio.sleep(8.0)
        results = [await seconds(patient) for _ in range(2)]
        assert {result.content for result, _ in results} == {TEXT}
        assert results[-1][0].plain_reason is None
        assert target.features == ["token_endpoint"]

    run_virtual(check())


class IdStreamingTarget(Shy):
    """Its streams have token ids from the start, and its answers are long enough for rows to pay."""

    def __init__(
        self, trial_s: float, failure: Exception | None = None, text: str = TEXT, *, has_endpoint: bool = True
    ) -> None:
        super().__init__(trial_s, failure, text)
        discoverable: frozenset[Feature] = frozenset({"token_endpoint"})
        self.capabilities = replace(self.capabilities, discoverable=discoverable)
        endpoint = self._can.token_endpoint if has_endpoint else None
        self._can = replace(self._can, token_endpoint=endpoint, discoverable=discoverable)

    def stream_with_token_ids(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return self.stream_chat(request)


class HaltingTarget(IdStreamingTarget):
    """It has no room: where it `halts`, it writes a token each 0.1 s during the trial."""

    halts = True

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with super().stream_chat(request) as events, aclosing(self._hold(events)) as held:
            yield held

    async def _hold(self, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        async for event in events:
            if self.halts and self.num_trying:
                await asyncio.sleep(0.1)
            yield event


class EarlyEncodingTarget(IdStreamingTarget):
    """Its tokenizer can be asked during the trial; `early_failure` is what comes of that instead."""

    def __init__(self, early_failure: Exception | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.early_s: list[float] = []  # when it was asked
        self._early_failure = early_failure

    async def encode_early(self, text: str) -> list[int]:
        self.early_s.append(asyncio.get_running_loop().time())
        if self._early_failure is not None:
            raise self._early_failure
        return await self.encode(text)


class EarlyStreamingTarget(EarlyEncodingTarget):
    """It has room, which it takes `room_s` of the trial to see: streams may begin from then on."""

    def __init__(self, room_s: float, **options: Any) -> None:
        super().__init__(**options)
        self.capabilities = replace(self.capabilities, shares_prompt_cache=True)
        self._can = replace(self._can, shares_prompt_cache=True)
        self._room_s = room_s
        self.streams_begun_s: list[float] = []

    async def wait_for_early_endpoint(self) -> TokenEndpoint | None:
        await asyncio.sleep(self._room_s)
        return self

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.streams_begun_s.append(asyncio.get_running_loop().time())
        async with super().stream_after(token_ids, request) as events:
            yield events


class RestartTimedDraft(SimulatedDraft):
    """It notes when its calls begin."""

    def __init__(self, answer: str, agreement: float, seed: int) -> None:
        super().__init__(answer, agreement, seed)
        self.began_s: list[float] = []

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self.began_s.append(asyncio.get_running_loop().time())
        async with super().draft(request, max_tokens) as pieces:
            yield pieces


class ScoringTarget(IdStreamingTarget):
    """It scores tokens, too, which takes part of its trial to find out."""

    max_top = 2

    def __init__(self, trial_s: float, text: str) -> None:
        super().__init__(trial_s, text=text)
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


@pytest.mark.parametrize(
    "target",
    [IdStreamingTarget(trial_s=1.0, text=LONG_TEXT), ScoringTarget(trial_s=1.0, text=LONG_TEXT)],
    ids=["probe", "score"],
)
def test_an_answer_begins_beside_it_and_speculation_joins(target: IdStreamingTarget) -> None:
    """The first token is as early as plain's; rows begin within the answer, once it is known that they can."""

    async def check() -> None:
        strategy: StrategyName = "score" if isinstance(target, ScoringTarget) else "probe"
        decoder = decoder_of(target, LONG_TEXT, strategy=strategy, baseline_every=0)
        first_s, rounds = await first_token_and_rounds(decoder)
        assert first_s == pytest.approx(0.4)
        assert rounds
        assert target.began_s >= 0.4 + 4 * 0.02  # the stream has shown its own pace by then
        assert rounds[0] > target.began_s + 1.0
        assert target.features == ["token_scorer" if strategy == "score" else "token_endpoint"]
        await decoder.aclose()

    run_virtual(check())


@pytest.mark.parametrize("is_early", [True, False])
def test_a_draft_is_judged_beside_the_trial(*, is_early: bool) -> None:
    """Where the tokenizer can be asked, a draft that was wrong begins anew before the trial has ended."""

    async def check() -> None:
        target = (EarlyEncodingTarget if is_early else IdStreamingTarget)(trial_s=1.0, text=LONG_TEXT)
        draft = RestartTimedDraft(LONG_TEXT, 0.5, 1)
        config = SpeculativeConfig(strategy="probe", baseline_every=0)
        async with SpeculativeDecoder(draft, target, config) as decoder:
            result, _ = await seconds(decoder)
        assert result.content == LONG_TEXT
        began_s, ended_s = target.began_s, target.began_s + 1.0
        assert [at_s for at_s in draft.began_s if at_s < began_s] == [0.0]
        assert any(began_s <= at_s < ended_s for at_s in draft.began_s) == is_early

    run_virtual(check())


@pytest.mark.parametrize("outcome", ["found", "missing", "failed"])
def test_streams_begin_beside_the_trial_where_there_is_room(outcome: str) -> None:
    """What they write comes when the trial has ended well; else the first stream goes on alone, and nothing is lost."""

    async def check() -> None:
        failure = TransientError("busy") if outcome == "failed" else None
        options = {"trial_s": 1.0, "text": LONG_TEXT, "failure": failure, "has_endpoint": outcome == "found"}
        took_s: list[float] = []
        for room_s in (0.6, 5.0):
            target = EarlyStreamingTarget(room_s, **options)
            async with decoder_of(target, LONG_TEXT, strategy="race", baseline_every=0) as decoder:
                result, answer_s = await seconds(decoder)
            assert result.content == LONG_TEXT
            took_s.append(answer_s)
            num_early = sum(at_s < target.began_s + 0.9 for at_s in target.streams_begun_s)
            assert bool(num_early) == (room_s == 0.6)
            assert (len(target.streams_begun_s) > num_early) == (outcome == "found")
        if outcome == "found":
            assert took_s[0] < took_s[1]
        if outcome == "failed":
            assert took_s == [pytest.approx(0.4 + 799 * 0.02)] * 2

    run_virtual(check())


class ForgetfulTarget(EarlyStreamingTarget):
    """It takes no token ids after all and begins anew where it should go on from a text: that takes 3 s to see."""

    def __init__(self, room_s: float) -> None:
        super().__init__(room_s, trial_s=1.0, text=LONG_TEXT, has_endpoint=False)
        both: frozenset[Feature] = frozenset({"token_endpoint", "continue_prefix"})
        self.capabilities = self._can = replace(self._can, continue_prefix=True, discoverable=both)
        self.num_by_text = 0

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with super().stream_after(token_ids, request) as events:
            await asyncio.sleep(3.0)  # so that it has not failed when the trial has
            yield events

    async def discover(self, feature: Feature) -> None:
        self.features.append(feature)
        self.began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0 if feature == "token_endpoint" else 3.0)
        if feature == "continue_prefix":
            self.capabilities = replace(self.capabilities, continue_prefix=False)

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.num_by_text += bool(request.prefix)
        async with super().stream(replace(request, prefix="")) as events:
            yield events


def test_no_stream_begins_by_text_before_that_was_tried() -> None:
    """Also where streams by token ids have begun while those were tried, in vain."""

    async def check() -> None:
        target = ForgetfulTarget(room_s=0.3)
        async with decoder_of(target, LONG_TEXT, strategy="race", baseline_every=0) as decoder:
            result, _ = await seconds(decoder)
        assert result.content == LONG_TEXT
        assert target.streams_begun_s
        assert target.num_by_text == 0
        assert "continue_prefix" in target.features

    run_virtual(check())


class WrongTarget(EarlyStreamingTarget):
    """It ignores the token ids that it is given, which its trial finds out."""

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with super().stream_after(token_ids[:1], request) as events:
            yield events


def test_what_an_early_stream_writes_is_held() -> None:
    """Until the trial has ended: here it ends badly, and after the first stream has come to where others began."""

    async def check() -> None:
        target = WrongTarget(room_s=0.1, trial_s=5.0, text=LONG_TEXT, has_endpoint=False)
        async with decoder_of(target, LONG_TEXT, strategy="race", baseline_every=0) as decoder:
            result, _ = await seconds(decoder)
        assert target.streams_begun_s
        assert result.content == LONG_TEXT

    run_virtual(check())


class RefusingTarget(EarlyStreamingTarget):
    """Streams are refused at once; from then on it takes no token ids any more where it `loses` them."""

    loses = False

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with super().stream_after(token_ids, request) as events:
            if self.loses:
                self.capabilities = replace(self._can, token_endpoint=None)
            if self.loses or asyncio.get_running_loop().time() < self.began_s + self._trial_s:
                await asyncio.sleep(0.01)
                raise TransientError("overloaded")
            yield events


@pytest.mark.parametrize(("room_s", "loses"), [(0.1, False), (9.0, True)])
def test_streams_that_fail_are_not_opened_again_and_again(room_s: float, *, loses: bool) -> None:
    """Neither beside the trial nor where the calls were lost after it; after it they may come again."""

    async def check() -> None:
        target = RefusingTarget(room_s, trial_s=5.0, text=LONG_TEXT)
        target.loses = loses
        async with decoder_of(target, LONG_TEXT, strategy="race", baseline_every=0) as decoder:
            result, _ = await seconds(decoder)
        assert result.content == LONG_TEXT
        num_early = sum(at_s < 5.0 for at_s in target.streams_begun_s)  # the trial ends half a second later
        assert (num_early, len(target.streams_begun_s) > num_early) == (not loses, True)
        assert len(target.streams_begun_s) < 12
        assert len(target.features) < 12

    run_virtual(check())


@pytest.mark.parametrize("has_endpoint", [True, False])
def test_a_tokenizer_that_fails_beside_the_trial_is_asked_after_it(*, has_endpoint: bool) -> None:
    """What it could not encode in time is encoded then, if there is an endpoint; nothing is lost."""

    async def check() -> None:
        target = EarlyEncodingTarget(TransientError("busy"), trial_s=1.0, text=LONG_TEXT, has_endpoint=has_endpoint)
        async with decoder_of(target, LONG_TEXT, strategy="probe", baseline_every=0) as decoder:
            result, _ = await seconds(decoder)
        assert 1 <= len(target.early_s) <= 4  # those under way when the first one failed
        assert result.content == LONG_TEXT
        assert bool(result.rounds) == has_endpoint

    run_virtual(check())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (IdStreamingTarget(trial_s=60.0), "discovery"),
        (EarlyEncodingTarget(trial_s=60.0), "discovery"),
        (IdStreamingTarget(trial_s=0.1, has_endpoint=False), "target"),
        (IdStreamingTarget(trial_s=0.1, failure=TransientError("busy")), "draft_failed"),
    ],
    ids=["is not over", "is not over, encoded early", "finds nothing", "fails"],
)
def test_an_answer_that_does_not_wait_for_it_says_why_it_is_plain(target: IdStreamingTarget, reason: str) -> None:
    """It takes as long as plain, has the same text, and the reason is reported once."""

    async def check() -> None:
        decoder = decoder_of(target, strategy="probe", baseline_every=0)
        result, took_s = await seconds(decoder)
        assert (result.content, result.plain_reason) == (TEXT, reason)
        assert took_s == pytest.approx(0.4 + 39 * 0.02)
        await decoder.aclose()

    run_virtual(check())


def test_a_server_without_it_is_served_plainly_by_name_too() -> None:
    """It may have had it before, and may have it again: the reason is reported, and no request fails."""

    async def check() -> None:
        decoder = decoder_of(IdStreamingTarget(trial_s=0.1, has_endpoint=False), strategy="probe", baseline_every=0)
        for _ in range(3):
            result, _ = await seconds(decoder)
            assert (result.content, result.plain_reason) == (TEXT, "target")
            assert "token ids" in str(result.plain_detail)

    run_virtual(check())


async def first_token_and_rounds(decoder: SpeculativeDecoder) -> tuple[float, list[float]]:
    """When the first text came, and when rounds were reported, in seconds of the answer."""
    clock = asyncio.get_running_loop().time
    started_s, first_s, rounds = clock(), None, list[float]()
    async with decoder.stream("q", rounds=True, temperature=0.0) as events:
        async for event in events:
            if isinstance(event, TextDelta) and first_s is None:
                first_s = clock() - started_s
            if isinstance(event, Round):
                rounds.append(clock() - started_s)
    assert first_s is not None
    return first_s, rounds


def test_an_answer_beside_it_is_no_slower() -> None:
    """Of an answer that is plain after all: nothing waits."""

    async def check() -> None:
        decoder = decoder_of(Shy(trial_s=8.0), strategy="race")
        _, (result, took_s) = await asyncio.gather(*(seconds(decoder) for _ in range(2)))
        assert (result.strategy, result.plain_reason) == ("plain", "baseline")
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
        result, took_s = await second
        assert first.cancelled()
        assert result.strategy == "race"
        assert took_s < 9.0
        assert target.features == ["token_endpoint"]

    run_virtual(check())


def test_a_trial_that_fails_is_no_answers_failure() -> None:
    """By `auto` it is plain; a strategy that was chosen by name goes on plainly, and says why."""

    async def check() -> None:
        target = Shy(trial_s=0.1, failure=RuntimeError("it cannot be tried"))
        decoder = decoder_of(target)
        for _ in range(3):
            result, _ = await seconds(decoder)
            assert (result.strategy, result.content) == ("plain", TEXT)
        named = decoder.with_config(SpeculativeConfig(strategy="race", baseline_every=0))
        result, _ = await seconds(named)
        assert (result.strategy, result.content) == ("race", TEXT)
        assert "it cannot be tried" in str(result.fallbacks)

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
