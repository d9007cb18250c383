"""`race`: the target runs against itself, from several places of a draft at once. `chain.py` tells how that works."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Final

from llm_spec._clock import clock
from llm_spec.chat import (
    ChatRequest,
    Fallback,
    Finish,
    ReasoningDelta,
    ReasoningDetail,
    Round,
    StreamEvent,
    TargetStream,
    TextDelta,
    ToolCallDelta,
    Usage,
    Weakened,
)
from llm_spec.config import SpeculativeConfig
from llm_spec.drafting.feed import DraftFeed
from llm_spec.drafting.pieces import num_prompt_pieces, split_pieces
from llm_spec.errors import TargetError, UnsupportedError, is_refusal, one_line
from llm_spec.figures import PairFigures
from llm_spec.provider import DraftProvider, Feature, LlmProvider, TokenEndpoint
from llm_spec.strategies.base import Promise, refuse_request
from llm_spec.strategies.chain import Chain, Runner, find_boundary
from llm_spec.text import StopMatcher

__all__ = ["RACE", "RaceStrategy"]

_MIN_SEGMENT: Final = 2
_MAX_SEGMENT: Final = 64
_MAX_REACH: Final = 1024
_COVERAGE: Final = 2.0  # the runners together reach so many times as far as the draft is expected to agree
_MIN_SURVIVAL: Final = 0.02  # a runner that is less likely to be of use is not worth its tokens
_MAX_FAILURES: Final = 3
_CHARACTERS: Final = 4  # of a token, roughly
_READ_AHEAD: Final = 512  # events of all streams that may wait, beside as many that are being passed on
_MAX_REST: Final = 64  # tokens without a draft, after several that were wrong at once


class RaceStrategy:
    """Any target that continues a text, by token ids where it takes them. No slower than plain where it has room.

    By text, tokens are counted as the pieces of what streams write: for `max_tokens`, and in `usage`.
    """

    name = "race"
    needs: Feature | None = "token_endpoint"

    def supports(self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest) -> str | None:
        if draft is None:
            return "there is no draft"
        can = target.capabilities
        if can.token_model is not None:
            return f"target {target.name} runs in this process and has no room for several streams"
        if can.token_endpoint is None and not can.continue_prefix:
            return f"target {target.name} can neither continue token ids nor an assistant's text"
        return refuse_request(request)

    def promise(self, target: LlmProvider, config: SpeculativeConfig) -> Promise:  # noqa: ARG002 - the target decides
        by_ids = target.capabilities.token_endpoint is not None
        return Promise("exact" if by_ids else "exact-text", same_text=False)

    @asynccontextmanager
    async def run(
        self,
        draft: DraftProvider | None,
        target: LlmProvider,
        request: ChatRequest,
        config: SpeculativeConfig,
        figures: PairFigures,
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        if draft is None:
            raise UnsupportedError("strategy 'race' cannot be used: there is no draft")
        race = _Race(draft, target, request, config, figures)
        try:
            async with aclosing(race.events()) as events:
                yield events
        finally:
            await race.aclose()


class _Race:
    """One request."""

    def __init__(
        self,
        draft: DraftProvider,
        target: LlmProvider,
        request: ChatRequest,
        config: SpeculativeConfig,
        figures: PairFigures,
    ) -> None:
        self._target = target
        self._endpoint = target.capabilities.token_endpoint
        self._request = request
        self._config = config
        self._figures = figures
        self._clock = clock()
        self._news: asyncio.Queue[tuple[Runner, StreamEvent | Exception, float] | None] = asyncio.Queue(_READ_AHEAD)
        self._feed = DraftFeed(
            draft,
            request,
            max_tokens=config.max_draft_tokens,
            timeout_s=config.draft_timeout_s,
            news=self._hear,
        )
        self._random = random.Random(request.sampling.seed)  # noqa: S311 - seeds of streams, no secret
        self._root = self._runner("")
        self._chain = Chain(
            self._root,
            figures,
            greedy=request.sampling.temperature == 0,
            max_tokens=request.max_tokens if self._endpoint is None else None,  # by ids every stream is told its own
            max_rounds=config.max_iterations,
            close=_cancel,
        )
        self._tasks: set[asyncio.Task[None]] = set()  # of streams that are open, or being closed
        self._opened: list[Runner] = []
        self._num_prompt_tokens = num_prompt_pieces(request)
        self._num_extra_input_tokens = 0
        self._num_failures = 0
        self._is_near_end = False  # of what may be written: nothing more is begun
        self._error: Exception | None = None
        self._fallback: str | None = None
        self._is_refused = False
        self._told_fallback = False
        self._num_fed = 0  # characters of the draft's text that the chain knows …
        self._num_heard = 0  # … and that it was woken up for
        self._rest = 0  # tokens to wait before the draft begins anew …
        self._resting: Runner | None = None  # … while this one is the last …
        self._resume_at = 0  # … until it has written so many
        self._num_arrivals = 0
        self._num_shown = 0  # characters of the answer …
        self._num_reported = 0  # … and tokens of its rounds

    async def events(self) -> AsyncGenerator[StreamEvent]:
        """The answer."""
        chain, matcher = self._chain, StopMatcher(self._request.stop)
        if self._endpoint is None:
            yield Weakened("exact-text", "the target goes on from text, which it tokenizes again")
        self._open(self._root, None)
        self._feed.restart("", self._reach())
        finish: Finish | None = None
        while finish is None:
            news = await self._news.get()
            self._expect()
            self._take(news)
            while not self._news.empty() and chain.finish is None and self._error is None:
                self._take(self._news.get_nowait())
            self._plan()
            if self._fallback is not None and not self._told_fallback:
                self._told_fallback = True
                chain.out.append(Fallback(self._fallback, is_refusal=self._is_refused))
            for event in chain.out:
                for shown in self._pass(event, matcher):
                    yield shown
            chain.out.clear()
            if self._error is not None:
                raise self._error
            finish = self._find_end(matcher)
        for held in matcher.flush():
            yield held
        chain.drop_all()
        for stream in self._streams():
            yield stream
        yield finish

    def _pass(self, event: StreamEvent, matcher: StopMatcher) -> Iterator[StreamEvent]:
        for shown in matcher.passed(event):
            self._num_shown += len(shown.text) if isinstance(shown, TextDelta) else 0
            yield self._report(shown, matcher) if isinstance(shown, Round) else shown

    def _report(self, round_: Round, matcher: StopMatcher) -> Round:
        """A round without what lies behind a stop string."""
        num_emitted = round_.num_emitted_tokens
        if matcher.matched is not None:
            num_shown = self._chain.num_tokens_until(self._num_shown) - self._num_reported
            num_emitted = max(0, min(num_emitted, num_shown))
        self._num_reported += num_emitted
        num_accepted = min(round_.num_accepted_tokens, num_emitted)
        return replace(round_, num_accepted_tokens=num_accepted, num_emitted_tokens=num_emitted)

    def _find_end(self, matcher: StopMatcher) -> Finish | None:
        """How the answer has ended, with the tokens that are its own; None: not yet."""
        chain = self._chain
        if matcher.matched is not None:
            return Finish("stop", Usage(output_tokens=chain.num_tokens_until(self._num_shown)), "stop_string")
        return None if chain.finish is None else replace(chain.finish, usage=chain.own_usage())

    async def aclose(self) -> None:
        """End every stream and the draft, and wait until they are closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, self._feed.aclose(), return_exceptions=True)

    # ----------------------------------------------------------------------------------------- streams

    def _runner(self, prefix: str) -> Runner:
        runner = Runner(prefix, self._figures.open_stream())
        runner.token_ids = None if self._endpoint is None else []
        return runner

    def _open(self, runner: Runner, parent: Runner | None) -> None:
        self._opened.append(runner)
        runner.task = asyncio.create_task(self._read(runner, parent))
        self._tasks.add(runner.task)
        runner.task.add_done_callback(self._free)

    def _free(self, task: asyncio.Task[None]) -> None:
        """A stream is closed: there may be room for another one."""
        self._tasks.discard(task)
        self._wake()

    def _wake(self) -> None:
        """Have a look at the streams and the draft; where events are waiting, that is done with the next of them."""
        if not self._news.full():
            self._news.put_nowait(None)

    async def _read(self, runner: Runner, parent: Runner | None) -> None:
        try:
            async with self._connected(runner, parent) as events:
                async for event in events:
                    if self._news.full():
                        runner.watch.stop()
                    await self._news.put((runner, event, self._clock()))
                    if isinstance(event, Finish):
                        return
            raise TargetError(f"{self._target.name} ended its stream without a finish reason")
        except Exception as error:  # noqa: BLE001 - judged where it is taken
            await self._news.put((runner, error, self._clock()))
        finally:
            runner.ended_s = self._clock()

    @asynccontextmanager
    async def _connected(self, runner: Runner, parent: Runner | None) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        encoding: asyncio.Task[None] | None = None
        request = replace(self._request, stop=())
        try:
            if self._endpoint is None:
                if parent is not None:
                    request = replace(request, prefix=request.prefix + runner.prefix)
                    request = self._reseeded(self._limited(request, runner.min_prefix_tokens))
                    self._num_extra_input_tokens += self._num_prompt_tokens + runner.num_prefix_tokens
                opened = self._target.stream(request)
            elif parent is None:
                encoding = asyncio.create_task(self._encode_prompt(runner, self._endpoint))
                opened = self._endpoint.stream_chat(request)
            else:
                opened = await self._opened_by_ids(runner, parent, self._endpoint, request)
            async with opened as events:
                yield events
        finally:
            if encoding is not None:
                encoding.cancel()
                await asyncio.wait([encoding])

    async def _encode_prompt(self, runner: Runner, endpoint: TokenEndpoint) -> None:
        try:
            runner.prefix_ids = await endpoint.encode_chat(self._request)
            self._num_prompt_tokens = len(runner.prefix_ids)
        except Exception as error:  # noqa: BLE001 - only speculation needs it
            self._give_up(error)
        runner.encoded.set()

    async def _opened_by_ids(
        self, runner: Runner, parent: Runner, endpoint: TokenEndpoint, request: ChatRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        text, written_ids = parent.text, list(parent.token_ids or ())
        added_ids = await endpoint.encode(parent.expected[len(text) :])
        await parent.encoded.wait()
        if parent.prefix_ids is None:
            raise TargetError("the prompt could not be encoded")
        parent.expect_ids(written_ids + added_ids)
        runner.prefix_ids = parent.prefix_ids + written_ids + added_ids
        runner.num_prefix_tokens = len(runner.prefix_ids) - self._num_prompt_tokens
        runner.encoded.set()
        request = self._limited(request, runner.num_prefix_tokens)
        self._num_extra_input_tokens += len(runner.prefix_ids)
        return endpoint.stream_after(runner.prefix_ids, self._reseeded(request))

    def _limited(self, request: ChatRequest, num_before: int) -> ChatRequest:
        """With as many tokens as are left behind so many."""
        if request.max_tokens is not None:
            left = request.max_tokens - num_before
            if left < 1:
                self._is_near_end = True
                raise UnsupportedError("the answer ends before it would begin")
            request = replace(request, max_tokens=left)
        return request

    def _reseeded(self, request: ChatRequest) -> ChatRequest:
        """With a seed of its own: two streams with one seed would draw the same noise at different places."""
        if request.sampling.temperature == 0:
            return request
        return replace(request, sampling=replace(request.sampling, seed=self._random.getrandbits(31)))

    # -------------------------------------------------------------------------------------------- news

    def _take(self, news: tuple[Runner, StreamEvent | Exception, float] | None) -> None:
        """Something was written, by a runner or (None) by the draft."""
        if news is None:  # only a reason to look
            return
        runner, event, arrived_s = news
        match event:
            case TextDelta():
                self._chain.feed(runner, event, arrived_s)
            case Finish():
                self._chain.end(runner, event)
            case Exception():
                self._fail(runner, event)
            case ReasoningDelta() | ReasoningDetail() | ToolCallDelta() if runner is self._chain.runners[0]:
                self._give_up(UnsupportedError("the target does more than write text"))
                self._chain.out.append(event)
            case ReasoningDelta() | ReasoningDetail() | ToolCallDelta():
                self._fail(runner, UnsupportedError("a later stream does more than write text"))
            case _:
                pass

    def _hear(self) -> None:
        """The draft wrote something: it waits for the target's next word, unless it is enough for another runner."""
        feed = self._feed
        if feed.ended or feed.failure is not None or len(feed.text) >= self._num_heard + _CHARACTERS * self._segment():
            self._num_heard = len(feed.text)
            self._wake()

    def _expect(self) -> None:
        if self._feed.failure is not None and self._fallback is None:
            self._fallback = self._feed.failure
        if not self._chain.departed:
            text, start = self._feed.text, self._num_fed
            self._num_fed = len(text)
            if len(text) > start:
                times = [(at - start, seconds) for at, seconds in self._feed.piece_times(start, len(text))]
                self._chain.expect(text[start:], times)

    def _fail(self, runner: Runner, error: Exception) -> None:
        if runner is self._chain.runners[0]:
            self._error = error
        elif runner in self._chain.runners:
            self._chain.drop(runner)
            self._num_failures += not self._is_near_end
            if self._num_failures >= _MAX_FAILURES:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Leave the rest to the first runner."""
        if self._fallback is None:
            self._fallback, self._is_refused = one_line(error), is_refusal(error)
        self._num_failures = _MAX_FAILURES
        self._chain.drop_all()

    # ---------------------------------------------------------------------------------------- planning

    def _plan(self) -> None:
        """Begin what is worth beginning now: a new draft, new runners."""
        if self._num_failures >= _MAX_FAILURES or self._chain.tail.finish is not None:
            return
        self._redraft()
        while self._launch():
            pass

    def _redraft(self) -> None:
        """Ask the draft for more, or anew where it went wrong; after it was of no use, later and later."""
        chain, feed, tail = self._chain, self._feed, self._chain.tail
        if feed.is_spent or not (chain.departed or feed.ended):
            return
        if not chain.departed and feed.is_cut:
            if len(tail.expected) - len(tail.text) < _CHARACTERS * self._reach():
                self._num_fed = self._num_heard = 0
                feed.restart(tail.prefix + tail.expected, self._reach())
            return
        if not chain.departed and len(tail.text) < len(tail.expected):
            return
        if self._resting is not tail:
            self._rest = 0 if chain.num_arrivals > self._num_arrivals else min(max(1, 2 * self._rest), _MAX_REST)
            self._resting, self._num_arrivals = tail, chain.num_arrivals
            self._resume_at = tail.num_tokens + self._rest
        if tail.num_tokens >= self._resume_at:
            self._resting = None
            self._num_fed = self._num_heard = 0
            chain.expect_anew()
            feed.restart(tail.hypothesis, self._reach())

    def _launch(self) -> bool:
        """Begin one more runner, where the draft reaches far enough and it is likely enough to be of use."""
        chain, figures = self._chain, self._figures
        tail = chain.tail
        if chain.departed or self._is_near_end or len(self._tasks) >= self._config.max_concurrent_streams:
            return False
        # what the last runner will have written when a new one writes its first token
        lead = figures.first_token_tokens
        if tail.watch.first_s is None:
            lead = (self._clock() - tail.watch.opened_s) / figures.target_token_s
        num_pieces = math.ceil(lead) + self._segment()
        if figures.acceptance.rate**num_pieces < _MIN_SURVIVAL:
            return False
        end = find_boundary(tail.expected, len(tail.text), num_pieces)
        if end is None or not self._can_afford(end):
            return False
        child = self._runner(tail.prefix + tail.expected[:end])
        chain.append(child, end)
        self._open(child, tail)
        return True

    def _segment(self) -> int:
        """Tokens between two runners: together they should reach beyond where the draft is likely to go wrong."""
        reach = _COVERAGE / max(1.0 - self._figures.acceptance.rate, 1e-3)
        return min(max(math.ceil(reach / self._config.max_concurrent_streams), _MIN_SEGMENT), _MAX_SEGMENT)

    def _reach(self) -> int:
        """Tokens that are worth drafting at once: as far as all runners together can reach."""
        lead = math.ceil(self._figures.first_token_tokens)
        return min(lead + (self._config.max_concurrent_streams + 1) * self._segment(), _MAX_REACH)

    def _can_afford(self, end: int) -> bool:
        """Whether one more runner stays within `max_extra_cost`."""
        bound, chain = self._config.max_extra_cost, self._chain
        if bound is None:
            return True
        num_input = self._num_prompt_tokens + len(split_pieces(chain.tail.prefix + chain.tail.expected[:end]))
        extra = self._num_extra_input_tokens + num_input + chain.num_cancelled_tokens
        return extra <= bound * (self._num_prompt_tokens + chain.num_answer_tokens)

    def _streams(self) -> Iterator[TargetStream]:
        """What became of every stream; the last of them end now."""
        first_s, now_s = self._root.watch.opened_s, self._clock()
        for index, runner in enumerate(self._opened):
            yield TargetStream(
                index=index,
                begins_at=runner.num_prefix_tokens,
                num_tokens=runner.num_tokens,
                started_s=runner.watch.opened_s - first_s,
                ended_s=(now_s if runner.ended_s is None else runner.ended_s) - first_s,
                is_used=runner.is_shown,
            )


def _cancel(runner: Runner) -> None:
    if runner.task is not None:
        runner.task.cancel()


RACE: Final = RaceStrategy()
