"""Every strategy under every fault, by virtual clock: what is shown is the plain answer or a beginning of it.

The draft fails, ends, hangs or goes wrong at its opening and at every piece; the target drops at every chunk of its
first request or of all of them. Nothing comes twice, nothing is lost, nothing is left open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from llm_spec import (
    ChatRequest,
    DraftError,
    Fallback,
    GuaranteeWeakened,
    LlmProvider,
    ReferenceDraft,
    Retry,
    RetryPolicy,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    StreamEvent,
    TargetError,
    TextDelta,
    TransientError,
)
from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.endpoint import SampledToken, TopTokens
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.config import StrategyName
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import ScriptedProvider, run_virtual
from llm_spec.testing.simulated import SimulatedTarget

TEXT: Final = "Every piece stands at one place only, to its very end."
PIECES: Final = split_into_pieces(TEXT)
NUM: Final = len(PIECES)
NO_WAIT: Final = RetryPolicy(first_wait_s=0.0, max_wait_s=0.0)
BROKEN: Final = "the connection broke"
FOREIGN: Final = " (foreign)"  # what the target writes where its context is no beginning of the answer


# ------------------------------------------------------------------------------------------ targets


class Target(SimulatedTarget):
    """Greedy. What it writes after a text that is no beginning of its answer is foreign: seen at once when it is shown.

    `drop(number, index)` says whether the request of that number (streams, probes and scores are counted together)
    breaks before its piece of that index. It is a `TokenScorer` too. `stop` is honoured, as by any server.
    """

    max_top = 5

    def __init__(
        self,
        *,
        by_ids: bool,
        continues: bool = True,
        scores: bool = False,
        drop: Callable[[int, int], bool] | None = None,
    ) -> None:
        super().__init__(TEXT, first_token_s=0.02, token_s=0.01, round_trip_s=0.002, by_ids=by_ids)
        self.capabilities = replace(
            self.capabilities, continue_prefix=continues, token_scorer=self if scores else None, prediction=True
        )
        self.requests: list[ChatRequest | None] = []
        self._drop = drop or (lambda _number, _index: False)

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        number = self._begin(request)
        async with super().stream(request) as events, aclosing(self._heard(number, request, events)) as heard:
            yield heard

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        number = self._begin(request)
        async with super().stream_chat(request) as events, aclosing(self._heard(number, request, events)) as heard:
            yield heard

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        number = self._begin(request)
        asked = replace(request, prefix="".join(self._texts[i] for i in token_ids[1:]))
        async with (
            super().stream_after(token_ids, request) as events,
            aclosing(self._heard(number, asked, events)) as heard,
        ):
            yield heard

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        number = self._begin(None)
        await super().sample_next(prefixes, sampling)
        for forced_id in sampling.logit_bias:
            return [SampledToken(forced_id, self._texts[forced_id], is_end=forced_id == 0)]
        if any(self._drop(number, index) for index in range(len(prefixes))):
            raise TransientError(BROKEN)
        return [self._after(prefix) for prefix in prefixes]

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        number = self._begin(None)
        await asyncio.sleep(0.02)
        if any(self._drop(number, index) for index in range(num_rows)):
            raise TransientError(BROKEN)
        ends = range(len(token_ids) - num_rows + 1, len(token_ids) + 1)
        best = [self._after(token_ids[:end]).token_id for end in ends]
        return [TopTokens(tuple((token_id + n, -9.0 * n) for n in range(top))) for token_id in best]

    def _begin(self, request: ChatRequest | None) -> int:
        self.requests.append(request)
        return len(self.requests) - 1

    def _after(self, prefix: Sequence[int]) -> SampledToken:
        text = "".join(self._texts[i] for i in prefix[1:])
        if not TEXT.startswith(text):
            return SampledToken(self._encode_pieces([FOREIGN])[0], FOREIGN)
        return self._get_answer_token_after(prefix)

    async def _heard(
        self, number: int, request: ChatRequest, events: AsyncIterator[StreamEvent]
    ) -> AsyncGenerator[StreamEvent]:
        is_foreign = not TEXT.startswith(request.prefix)
        index = 0
        async for event in events:
            if self._drop(number, index):
                raise TransientError(BROKEN)
            index += 1
            if is_foreign and isinstance(event, TextDelta):
                event = TextDelta(FOREIGN, token_ids=event.token_ids and tuple(self._encode_pieces([FOREIGN])))  # noqa: PLW2901
            yield event


@dataclass(frozen=True, kw_only=True)
class Way:
    """A strategy with a target that it can use."""

    name: str
    strategy: StrategyName
    guarantee: str = "exact"
    target: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return self.name


WAYS = [
    Way(name="plain", strategy="plain", target={"by_ids": False}),
    Way(name="race by ids", strategy="race", target={"by_ids": True}),
    Way(name="race by text", strategy="race", guarantee="exact-text", target={"by_ids": False}),
    Way(name="probe", strategy="probe", target={"by_ids": True}),
    Way(name="score", strategy="score", target={"by_ids": True, "scores": True}),
    Way(name="predict", strategy="predict", target={"by_ids": False}),
    Way(name="regenerate", strategy="regenerate", target={"by_ids": False}),
]
DRAFTED = [way for way in WAYS if way.strategy != "plain"]
BY_IDS = [way for way in WAYS if way.target["by_ids"]]


# ------------------------------------------------------------------------------------------ drafts


class Draft:
    """Continues the answer piece by piece; at piece `at` of a call (-1: at its opening) `fault` happens."""

    name = "faulty"

    def __init__(self, fault: str | Exception | None = None, at: int = 0, *, piece_s: float = 0.001) -> None:
        self.num_open = self.num_calls = 0
        self._fault = fault
        self._at = at
        self._piece_s = piece_s

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self.num_calls += 1
        self.num_open += 1
        try:
            if self._at == -1:
                await self._happen()
            async with aclosing(self._pieces(request, max_tokens)) as pieces:
                yield pieces
        finally:
            self.num_open -= 1

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _happen(self) -> None:
        if isinstance(self._fault, Exception):
            raise self._fault
        if self._fault == "hangs":
            await asyncio.sleep(1e6)

    async def _pieces(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[DraftPiece]:
        start = len(split_into_pieces(request.prefix))
        for index, piece in enumerate(PIECES[start : start + max_tokens]):
            await asyncio.sleep(self._piece_s)
            if index == self._at:
                await self._happen()
                if self._fault == "ends":
                    return
            yield DraftPiece(" wrong" if self._fault == "goes wrong" and index >= self._at else piece)
        yield DraftPiece("", finish_reason="stop")


DRAFT_FAULTS: dict[str, str | Exception] = {
    "fails": DraftError("no more"),
    "fails for a while": TransientError("429", status=429, retry_after_s=99.0),
    "fails oddly": RuntimeError("a bug"),
    "times out": TimeoutError(),
    "ends": "ends",
    "hangs": "hangs",
    "goes wrong": "goes wrong",
}


# ------------------------------------------------------------------------------------------ what is shown


@dataclass
class Shown:
    """What a caller saw of one request."""

    events: list[StreamEvent] = field(default_factory=list[StreamEvent])
    result: SpeculativeResult | None = None
    error: TargetError | None = None

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    def of(self, kind: type[StreamEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


async def show(decoder: SpeculativeDecoder, **options: Any) -> Shown:
    """Read a request to its end, and check what holds of any: no task is left, and the parts fit one another."""
    shown = Shown()
    before = asyncio.all_tasks()
    try:
        async with decoder.stream(ChatRequest.create("q", temperature=0.0, **options), rounds=True) as events:
            async for event in events:
                shown.events.append(event)
                if isinstance(event, SpeculativeFinish):
                    shown.result = event.result
    except TargetError as error:
        shown.error = error
    assert asyncio.all_tasks() == before
    if shown.error is not None:
        assert shown.error.partial_text == shown.text
    if shown.result is not None:
        assert shown.result.content == shown.text
        assert len(shown.result.retries) == len(shown.of(Retry))
        assert len(shown.result.fallbacks) == len(shown.of(Fallback))
    assert (shown.result is None) != (shown.error is None)
    return shown


def decoder_of(way: Way, draft: Draft | None, target: LlmProvider, **config: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        draft, target, SpeculativeConfig(strategy=way.strategy, **{"draft_timeout_s": 0.5, "retry": NO_WAIT, **config})
    )


def promised(way: Way, shown: Shown) -> None:
    """The label is the strategy's own, or that of an answer which went on by text."""
    result = shown.result
    assert result is not None
    weakened = {event.guarantee for event in shown.of(GuaranteeWeakened)}
    assert weakened <= {"exact-text"}
    assert result.guarantee == ("exact-text" if weakened else way.guarantee)
    assert not (weakened and result.same_text)
    if any(retry.is_continued for retry in shown.of(Retry)):
        assert weakened
        assert result.usage is not None


# ------------------------------------------------------------------------------------------ the draft


@pytest.mark.parametrize("way", DRAFTED, ids=str)
@pytest.mark.parametrize("fault", DRAFT_FAULTS)
def test_a_draft_that_is_killed_anywhere_changes_nothing(fault: str, way: Way) -> None:
    """At its opening and at every piece of every call: the plain answer, and at most one word about it."""

    async def check() -> None:
        for at in range(-1, NUM + 1):
            target, draft = Target(**way.target), Draft(DRAFT_FAULTS[fault], at)
            shown = await show(decoder_of(way, draft, target))
            assert shown.text == TEXT, at
            assert shown.error is None
            assert not shown.of(Retry)
            assert len(shown.of(Fallback)) <= 1
            promised(way, shown)
            assert (target.num_open, draft.num_open) == (0, 0)
            if fault.startswith("fails"):
                assert draft.num_calls >= 1
                if at == -1:
                    assert len(shown.of(Fallback)) == draft.num_calls == 1

    run_virtual(check())


@pytest.mark.parametrize("way", DRAFTED, ids=str)
def test_a_draft_that_hangs_does_not_hold_the_answer(way: Way) -> None:
    """The target's own time, and at most the draft's patience more."""

    async def took(draft: Draft | None, strategy: Way) -> float:
        started = asyncio.get_running_loop().time()
        assert (await show(decoder_of(strategy, draft, Target(**way.target)))).text == TEXT
        return asyncio.get_running_loop().time() - started

    async def check() -> None:
        plain_s = await took(None, WAYS[0])
        for at in range(-1, NUM, 4):
            assert await took(Draft("hangs", at), way) <= 3 * plain_s + 0.5 + 0.05

    run_virtual(check())


@pytest.mark.parametrize("max_tokens", [1, 5, NUM - 1, NUM, NUM + 1])
@pytest.mark.parametrize("way", DRAFTED, ids=str)
def test_caps_hold_whatever_the_draft_does(way: Way, max_tokens: int) -> None:
    """As many tokens as asked for, no more and no fewer, and the same end as plain's."""

    async def check() -> None:
        plain = await show(decoder_of(WAYS[0], None, Target(**way.target)), max_tokens=max_tokens)
        assert plain.text == "".join(PIECES[:max_tokens])
        assert plain.result is not None
        for fault in ("fails", "hangs", "goes wrong", "ends"):
            for at in (-1, 0, 3, 6):
                draft = Draft(DRAFT_FAULTS[fault], at)
                shown = await show(decoder_of(way, draft, Target(**way.target)), max_tokens=max_tokens)
                assert shown.text == plain.text
                assert shown.result is not None
                assert shown.result.finish_reason == plain.result.finish_reason

    run_virtual(check())


def test_a_draft_that_hangs_again_and_again_is_left_alone() -> None:
    """Silence counts like any other breakdown: `predict` does not wait for it for ever."""

    async def check() -> None:
        draft = Draft("hangs", -1)
        decoder = decoder_of(WAYS[5], draft, Target(by_ids=False))
        for _ in range(9):
            assert (await show(decoder)).text == TEXT
        assert draft.num_calls == 5

    run_virtual(check())


# ------------------------------------------------------------------------------------------ the target


def first_drops(at: int) -> Callable[[int, int], bool]:
    return lambda number, index: number == 0 and index == at


def all_drop(at: int) -> Callable[[int, int], bool]:
    return lambda _, index: index == at


def one_drops(request: int, at: int) -> Callable[[int, int], bool]:
    return lambda number, index: number == request and index == at


@pytest.mark.parametrize(
    ("way", "continues"),
    [(way, continues) for way in WAYS for continues in (True, False) if continues or way.name != "race by text"],
    ids=str,
)
@pytest.mark.parametrize("max_attempts", [1, 3])
@pytest.mark.parametrize("drop", [first_drops, all_drop])
def test_a_target_that_drops_anywhere(
    *, drop: Callable[[int], Callable[[int, int], bool]], max_attempts: int, continues: bool, way: Way
) -> None:
    """At every chunk: a beginning of the plain answer and an error, or all of it; never more requests than allowed."""
    whole: list[int] = []

    async def check() -> None:
        for at in range(NUM + 1):
            target = Target(**way.target, continues=continues, drop=drop(at))
            draft = None if way.strategy == "plain" else Draft()
            config = {"retry": replace(NO_WAIT, max_attempts=max_attempts)}
            shown = await show(decoder_of(way, draft, target, **config))
            assert target.num_open == 0
            assert TEXT.startswith(shown.text), (at, shown.text)
            assert len(shown.of(Retry)) < max_attempts
            is_alone = way.strategy in ("plain", "predict", "regenerate")  # one request at a time
            if shown.result is not None:
                whole.append(at)
                assert shown.text == TEXT, at
                promised(way, shown)
            else:
                assert isinstance(shown.error, TransientError)
                assert BROKEN in str(shown.error)
            if is_alone and shown.error is None:
                assert len(target.requests) == len(shown.of(Retry)) + 1
            elif is_alone:
                assert len(target.requests) == (max_attempts if continues or not shown.text else 1)
            if is_alone and drop is first_drops:
                is_saved = max_attempts > 1 and (continues or at == 0)
                assert shown.text == (TEXT if is_saved else "".join(PIECES[:at])), at
                assert (shown.error is None) == is_saved

    run_virtual(check())
    if drop is first_drops and continues and max_attempts == 3:
        assert whole == list(range(NUM + 1))


@pytest.mark.parametrize("way", DRAFTED, ids=str)
@pytest.mark.parametrize("number", range(1, 7))
def test_a_later_request_that_drops(number: int, way: Way) -> None:
    """Of a race, of a round or of the plain rest: by a good draft and by one that goes wrong."""

    async def check() -> None:
        for at in range(number % 3, NUM, 3):
            for draft in (Draft(), Draft("goes wrong", 4), Draft(DRAFT_FAULTS["fails"], 4)):
                target = Target(**way.target, drop=one_drops(number, at))
                shown = await show(decoder_of(way, draft, target))
                assert shown.text == TEXT, at
                promised(way, shown)
                assert (target.num_open, draft.num_open) == (0, 0)

    run_virtual(check())


@pytest.mark.parametrize("way", DRAFTED, ids=str)
def test_going_on_alone_is_told_once(way: Way) -> None:
    """Although both the draft and a request of the target failed."""

    async def check() -> None:
        for number in range(6):
            for at in range(-1, NUM, 2):
                target = Target(**way.target, drop=one_drops(number, 0))
                shown = await show(decoder_of(way, Draft(DRAFT_FAULTS["fails"], at), target))
                assert len(shown.of(Fallback)) <= 1, (number, at)

    run_virtual(check())


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("max_tokens", [1, 6, NUM - 1, NUM])
def test_caps_hold_where_the_target_drops(max_tokens: int, way: Way) -> None:
    """An answer that goes on has as many tokens left as it has not shown."""

    async def check() -> None:
        for at in range(min(max_tokens, NUM)):
            target = Target(**way.target, drop=first_drops(at))
            draft = None if way.strategy == "plain" else Draft()
            shown = await show(decoder_of(way, draft, target), max_tokens=max_tokens)
            assert shown.error is None, at
            assert shown.text == "".join(PIECES[:max_tokens]), at
            assert shown.result is not None
            assert shown.result.stopped_by in ("max_tokens", "eos")

    run_virtual(check())


class InFrames(Target):
    """Three tokens a frame, with their ids where they were asked for: what a busy server sends."""

    async def _heard(
        self, number: int, request: ChatRequest, events: AsyncIterator[StreamEvent]
    ) -> AsyncGenerator[StreamEvent]:
        held: list[TextDelta] = []
        async with aclosing(super()._heard(number, request, events)) as heard:
            async for event in heard:
                if isinstance(event, TextDelta):
                    held.append(event)
                if held and (len(held) == 3 or not isinstance(event, TextDelta)):
                    ids = None if held[0].token_ids is None else tuple(i for d in held for i in d.token_ids or ())
                    yield TextDelta("".join(delta.text for delta in held), token_ids=ids)
                    held = []
                if not isinstance(event, TextDelta):
                    yield event


def test_a_cap_counts_tokens_not_frames_where_ids_are_known() -> None:
    """A race by ids knows how many tokens each frame had; the rest of a broken answer has no more than are left."""

    async def check() -> None:
        for at in range(3, 9):
            target = InFrames(by_ids=True, drop=first_drops(at))
            config = {"max_concurrent_streams": 1}
            shown = await show(decoder_of(WAYS[1], Draft(), target, **config), max_tokens=10)
            assert shown.text == "".join(PIECES[:10]), at

    run_virtual(check())


# ------------------------------------------------------------------------------------------ stop strings


@pytest.mark.parametrize("stop", [" one place", "place only,", "very", "Every"])
@pytest.mark.parametrize("way", [way for way in WAYS if way.strategy in ("race", "probe", "score")], ids=str)
def test_stop_strings_hold_where_the_target_drops(way: Way, stop: str) -> None:
    """Those that we match ourselves: up to the first of them, wherever the answer broke, and none of it is shown."""
    expected = TEXT[: TEXT.index(stop)]

    async def check() -> None:
        for at in range(NUM):
            target = Stopping(**way.target, drop=first_drops(at))
            shown = await show(decoder_of(way, Draft(), target), stop=[stop])
            assert shown.error is None, at
            assert shown.text == expected, at
            assert shown.result is not None
            assert shown.result.finish_reason == "stop"

    run_virtual(check())


class Stopping(Target):
    """Minds `stop`, as a server does: what may be the beginning of one is held back, of what this request writes."""

    async def _heard(
        self, number: int, request: ChatRequest, events: AsyncIterator[StreamEvent]
    ) -> AsyncGenerator[StreamEvent]:
        from llm_spec.contract.events import Finish
        from llm_spec.local.detokenizing import StopMatcher

        matcher = StopMatcher(request.stop)
        async with aclosing(super()._heard(number, request, events)) as heard:
            async for event in heard:
                if not isinstance(event, TextDelta) or not request.stop:
                    for held in matcher.flush():
                        yield held
                    yield event
                    continue
                for delta in matcher.push(event.text):
                    yield delta
                if matcher.matched is not None:
                    yield Finish("stop", None, "stop_string")
                    return


@pytest.mark.parametrize("stop", [" one place", "place only,", "very", "Every"])
@pytest.mark.parametrize("strategy", ["plain", "predict", "regenerate"])
def test_stop_strings_of_the_server_hold_where_it_drops(strategy: str, stop: str) -> None:
    """What the server held back as the beginning of one is written anew."""
    way = next(way for way in WAYS if way.strategy == strategy)
    expected = TEXT[: TEXT.index(stop)]

    async def check() -> None:
        for at in range(NUM):
            draft = None if strategy == "plain" else Draft()
            target = Stopping(**way.target, drop=first_drops(at))
            shown = await show(decoder_of(way, draft, target), stop=[stop])
            assert shown.text == expected, at

    run_virtual(check())


# ------------------------------------------------------------------------------------------ leaving


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_cancelling_at_every_turn_leaves_nothing(way: Way) -> None:
    """Cancelled at many times of an answer: what was shown is a beginning, and all is closed at once."""

    async def check() -> None:
        for step in range(60):
            target, draft = Target(**way.target), Draft("goes wrong", 5)
            shown: list[str] = []
            decoder = decoder_of(way, None if way.strategy == "plain" else draft, target)
            before = asyncio.all_tasks()

            async def read(decoder: SpeculativeDecoder, shown: list[str]) -> None:
                async with decoder.stream("q", temperature=0.0) as events:
                    async for event in events:
                        if isinstance(event, TextDelta):
                            shown.append(event.text)  # noqa: PERF401 - it is read when this is cancelled

            task = asyncio.create_task(read(decoder, shown))
            await asyncio.sleep(step * 0.004)
            task.cancel()
            await asyncio.wait([task])
            assert asyncio.all_tasks() == before
            assert (target.num_open, draft.num_open) == (0, 0)
            assert TEXT.startswith("".join(shown))

    run_virtual(check())


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_deadline_at_every_turn_gives_a_beginning(way: Way) -> None:
    """With a target that drops at the same time, too."""

    async def check() -> None:
        for step in range(1, 50):
            target, draft = Target(**way.target, drop=one_drops(step % 3, step % 7)), Draft()
            decoder = decoder_of(way, None if way.strategy == "plain" else draft, target, deadline_s=step * 0.005)
            shown = await show(decoder)
            assert TEXT.startswith(shown.text)
            assert shown.result is not None
            assert (shown.result.stopped_by == "deadline") == (shown.text != TEXT) or shown.text == TEXT
            assert (target.num_open, draft.num_open) == (0, 0)

    run_virtual(check())


def test_an_answer_that_takes_no_time() -> None:
    """It is an answer like any other."""

    async def check() -> None:
        target = ScriptedProvider(TEXT, capabilities=Capabilities(prediction=True))
        decoder = SpeculativeDecoder(ReferenceDraft(TEXT), target)
        for _ in range(3):
            assert (await show(decoder)).text == TEXT

    run_virtual(check())


def test_nested_decoders_fail_once() -> None:
    """A decoder as target: the inner one owns the retries of its target, the outer one those of the inner."""

    async def check() -> None:
        target = ScriptedProvider(
            TEXT, fail_at={0: TransientError("down", status=500)}, capabilities=Capabilities(continue_prefix=True)
        )
        inner = SpeculativeDecoder(None, target, SpeculativeConfig(retry=replace(NO_WAIT, max_attempts=1)))
        outer = SpeculativeDecoder(None, inner, SpeculativeConfig(retry=replace(NO_WAIT, max_attempts=2)))
        with pytest.raises(TransientError, match="down"):
            await outer.decode("q")
        assert (len(target.requests), target.num_open) == (2, 0)

    run_virtual(check())
