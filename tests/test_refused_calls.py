"""A call that was refused has read nothing, whichever call it was: it is not charged. One that had begun is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import pytest

from llm_spec import (
    Budget,
    ChatRequest,
    CircuitOpenError,
    ConcurrencyLimit,
    InvalidRequestError,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    TargetError,
    TextDelta,
    TransientError,
    Usage,
)
from llm_spec.contract.errors import UnsupportedError
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.budget import AnswerReservation
from llm_spec.decoder.config import RetryPolicy
from llm_spec.decoder.feature_discovery import FeatureDiscovery
from llm_spec.decoder.metered import MeteredDraft, MeteredTarget
from llm_spec.decoder.metering import TokenMeter
from llm_spec.testing import run_virtual

REQUEST: Final = ChatRequest.create("two words")
REFUSALS: Final = [
    *(TransientError("refused", status=status) for status in (408, 429, 500, 503, 529)),
    *(TargetError("refused", status=status) for status in (401, 404, 501)),
    InvalidRequestError("refused"),
    UnsupportedError("refused"),
    TransientError("broke the connection"),
    CircuitOpenError("its circuit is open"),
]
BAD_ANSWER: Final = TargetError("sent what is no JSON")


@dataclass(frozen=True, kw_only=True)
class CapabilitiesOfAll(Capabilities):
    """Those of a target that is a draft as well."""

    is_free: bool = False


class Failing:
    """A target, its endpoints and a draft: each call fails as it is opened, or (late) as its first event is read.

    With `words`, so many come before.
    """

    name = "failing:model"

    def __init__(self, error: Exception, *, is_late: bool = False, num_words: int = 0) -> None:
        self._error = error
        self._is_late = is_late or num_words > 0
        self._num_words = num_words
        self.num_calls = 0

    @property
    def capabilities(self) -> Any:
        endpoint = cast("Any", self)
        return CapabilitiesOfAll(token_endpoint=endpoint, token_scorer=endpoint)

    @asynccontextmanager
    async def stream(self, *_: object) -> AsyncGenerator[AsyncIterator[Any]]:
        self.num_calls += 1
        if not self._is_late:
            raise self._error
        async with aclosing(self._fail()) as events:
            yield events

    async def _fail(self) -> AsyncGenerator[Any]:
        for _ in range(self._num_words):
            yield TextDelta("word ")
        raise self._error

    @asynccontextmanager
    async def stream_chunks(self, *_: object) -> AsyncGenerator[AsyncIterator[Any]]:
        async with self.stream() as events:
            yield ({"choices": [{"index": 0, "delta": {"content": event.text}}]} async for event in events)

    async def refuse(self, *_: object, **__: object) -> Any:
        raise self._error

    async def complete(self, request: ChatRequest) -> Any:
        await self.refuse(request)

    async def aclose(self) -> None: ...

    stream_chat = stream_after = draft = stream
    sample_next = score = refuse


async def read_all(opened: Any) -> None:
    async with opened as items:
        async for _ in items:
            pass


def meter_target(failing: Failing, meter: TokenMeter) -> MeteredTarget:
    target = cast("Any", failing)
    return MeteredTarget(target, meter, FeatureDiscovery(target))


def get_endpoint(failing: Failing, meter: TokenMeter) -> Any:
    return meter_target(failing, meter).capabilities.token_endpoint


def get_scorer(failing: Failing, meter: TokenMeter) -> Any:
    return meter_target(failing, meter).capabilities.token_scorer


Call = Callable[[Failing, TokenMeter], Awaitable[None]]
CALLS: Final[dict[str, Call]] = {
    "stream": lambda failing, meter: read_all(meter_target(failing, meter).stream(REQUEST)),
    "endpoint's stream": lambda failing, meter: read_all(get_endpoint(failing, meter).stream_chat(REQUEST)),
    "stream after ids": lambda failing, meter: read_all(get_endpoint(failing, meter).stream_after([1, 2], REQUEST)),
    "rows": lambda failing, meter: get_endpoint(failing, meter).sample_next([[1], [1]], Sampling()),
    "scores": lambda failing, meter: get_scorer(failing, meter).score([1, 2], num_rows=1, top=1),
    "draft": lambda failing, meter: read_all(MeteredDraft(cast("Any", failing), meter).draft(REQUEST, 4)),
}
NUM_WRITTEN: Final = {"rows": 2, "scores": 1}  # what a server that read them has written, too


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("error", REFUSALS, ids=repr)
@pytest.mark.parametrize("name", CALLS)
async def test_a_refused_call_counts_nothing(name: str, error: Exception, is_late: bool) -> None:
    """`race` opens streams, `probe` rows, `score` scores, `judge` and `predict` streams, and all of them drafts."""
    budget = Budget(max_tokens=1000)
    meter = TokenMeter(REQUEST, AnswerReservation([budget]))
    with pytest.raises(type(error)):
        await CALLS[name](Failing(error, is_late=is_late), meter)
    assert meter.usage == Usage()
    assert meter.num_calls == 0
    assert budget.reserved_tokens == 0


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_was_answered_badly_was_read(name: str) -> None:
    """Its input is charged: what a server has sent shows that it read it."""
    meter = TokenMeter(REQUEST)
    with pytest.raises(TargetError):
        await CALLS[name](Failing(BAD_ANSWER), meter)
    assert meter.usage == Usage(input_tokens=2, output_tokens=NUM_WRITTEN.get(name, 0))


RELAYS: Final = {"streamed": False, "whole": True}


@pytest.mark.parametrize("is_whole", RELAYS.values(), ids=list(RELAYS))
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_refused_chunks_count_nothing(error: Exception, is_late: bool, is_whole: bool) -> None:
    """Several choices and log-probabilities are passed on as the target sends them; each attempt counts by itself."""
    failing = Failing(error, is_late=is_late)
    assert relay(failing, error, is_whole=is_whole) == 0
    is_retried = is_whole and isinstance(error, TransientError)
    assert failing.num_calls == (3 if is_retried else 1)


@pytest.mark.parametrize("is_whole", RELAYS.values(), ids=list(RELAYS))
@pytest.mark.parametrize(
    ("error", "num_words", "num_spent"),
    [
        (BAD_ANSWER, 0, 2),
        (BAD_ANSWER, 3, 5),
        (TargetError("refused", status=401), 3, 5),
    ],
)
def test_chunks_that_had_begun_are_counted(error: Exception, num_words: int, num_spent: int, is_whole: bool) -> None:
    """Two tokens of input and one for each word."""
    assert relay(Failing(error, num_words=num_words), error, is_whole=is_whole) == num_spent


@pytest.mark.parametrize(("is_whole", "num_spent"), [(False, 5), (True, 15)])
def test_each_attempt_that_had_begun_is_counted(is_whole: bool, num_spent: int) -> None:
    """One that broke after three words, or three of them."""
    error = TransientError("broke the connection")
    assert relay(Failing(error, num_words=3), error, is_whole=is_whole) == num_spent


def relay(failing: Failing, error: Exception, *, is_whole: bool) -> int:
    """What a budget has spent on chunks that end with this error; nothing is held of it any more."""
    budget = Budget(max_tokens=1000)
    retry = RetryPolicy(max_attempts=3, first_wait_s=0.0, max_wait_s=0.0)

    async def run() -> None:
        decoder = SpeculativeDecoder(
            target=cast("Any", failing), draft=None, config=SpeculativeConfig(budget=budget, retry=retry)
        )
        with pytest.raises(type(error)):
            await (decoder.collect_chunks(REQUEST) if is_whole else read_all(decoder.stream_chunks(REQUEST)))

    run_virtual(run())
    assert budget.reserved_tokens == 0
    return budget.spent_tokens


def test_what_waited_for_a_place_was_not_sent() -> None:
    """Nothing is charged for chunks that nobody had asked for when they were left."""
    budget, failing = Budget(max_tokens=1000), Failing(BAD_ANSWER)

    async def run() -> None:
        limit = ConcurrencyLimit(1)
        decoder = SpeculativeDecoder(
            target=cast("Any", failing), draft=None, config=SpeculativeConfig(budget=budget, limit=limit)
        )
        async with limit.hold_place():
            waiting = asyncio.create_task(read_all(decoder.stream_chunks(REQUEST)))
            await asyncio.sleep(1.0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    run_virtual(run())
    assert (failing.num_calls, budget.spent_tokens, budget.reserved_tokens) == (0, 0, 0)
