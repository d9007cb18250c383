"""SpeculativeDecoder: request in, strategy chosen, verified events out. It is an LlmProvider itself."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, TypeVar, Unpack

from llm_spec._clock import clock, now
from llm_spec.arrivals import time_arrivals
from llm_spec.budget import Budget, Spending
from llm_spec.chat import (
    ChatRequest,
    ChatResponse,
    Fallback,
    Finish,
    Messages,
    Progress,
    RequestOptions,
    Retry,
    Round,
    Started,
    StoppedBy,
    StreamEvent,
    TextDelta,
    Usage,
    Weakened,
)
from llm_spec.chunks import CountedChunks
from llm_spec.config import SpeculativeConfig, Timeouts
from llm_spec.counting import LIMIT_FIELDS, count_input_tokens
from llm_spec.decoder_stats import DecoderStats
from llm_spec.discovery import Discovery
from llm_spec.drafting.model import ProviderDraft
from llm_spec.errors import (
    BudgetError,
    DraftError,
    InvalidRequestError,
    LlmSpecError,
    TargetError,
    TransientError,
    UnsupportedError,
    one_line,
)
from llm_spec.metered import MeteredDraft, MeteredTarget
from llm_spec.money import find_draft_price, find_price
from llm_spec.planner import Planner
from llm_spec.provider import (
    Capabilities,
    ChunkStreaming,
    DraftProvider,
    Feature,
    LlmProvider,
    Rediscoverable,
    complete_from_stream,
    open_for_client,
)
from llm_spec.recording import Recording
from llm_spec.registry import open_draft, open_provider
from llm_spec.resilience import CircuitBreaker, GuardedDraft, asked_again
from llm_spec.result import SpeculativeFinish, SpeculativeResult
from llm_spec.strategies import Choice, Strategy, choose_strategy
from llm_spec.strategies.plain import PLAIN
from llm_spec.telemetry import get_ready, is_logged, log_event
from llm_spec.tokens.sampling import random_seed
from llm_spec.upstream import Upstream

__all__ = ["SpeculativeDecoder"]

_NO_TIMEOUTS: Final = Timeouts()

T = TypeVar("T")
P = TypeVar("P", bound=DraftProvider | LlmProvider | Discovery)


class SpeculativeDecoder:
    """A target that answers with the help of a draft.

    Draft and target are providers (the caller closes them) or strings such as `builtin:draft` (opened here, closed by
    `aclose`); a draft of None means plain decoding. Calls may run concurrently; they share nothing but the providers.

        async with SpeculativeDecoder("builtin:draft", "builtin:target") as decoder:
            result = await decoder.decode("def getregentry():", max_tokens=64)
    """

    def __init__(
        self,
        draft: DraftProvider | LlmProvider | str | None,
        target: LlmProvider | str,
        config: SpeculativeConfig | None = None,
    ) -> None:
        get_ready()
        self.config = config or SpeculativeConfig()
        self._planner = Planner()
        self.stats = DecoderStats()
        self._owned: list[DraftProvider | LlmProvider | Discovery] = []
        self._target = self._own(open_provider(target)) if isinstance(target, str) else target
        self._discovery = self._own(Discovery(self._target))
        self._breaker = CircuitBreaker(self._target.name, self.config.breaker)
        self._bare_draft = self._opened(draft)
        self._draft_breaker = None
        if self._bare_draft is not None:
            self._draft_breaker = CircuitBreaker(self._bare_draft.name, self.config.breaker)
        self._set(self.config)

    def using(self, config: SpeculativeConfig) -> SpeculativeDecoder:
        """The same pair under another configuration.

        It shares the providers, what is known of how they fail, and what was learnt of their speed; closing it closes
        nothing.
        """
        other = copy.copy(self)
        other._owned = []  # noqa: SLF001 - it is one of us
        other._set(config)  # noqa: SLF001 - as above
        return other

    def for_client(self) -> SpeculativeDecoder:
        """The same pair for those who may know of each other's answers: its draft remembers those of nobody else.

        As with `using`, closing it closes nothing.
        """
        other = copy.copy(self)
        other._owned = []  # noqa: SLF001 - it is one of us
        other._bare_draft = None if self._bare_draft is None else open_for_client(self._bare_draft)  # noqa: SLF001
        other._set(self.config)  # noqa: SLF001 - as above
        return other

    def _set(self, config: SpeculativeConfig) -> None:
        self.config = config
        self._draft = self._guarded(self._bare_draft)
        self._spending = Spending(
            target=find_price(self._target.name, config.prices),
            draft=None if self._bare_draft is None else find_draft_price(self._bare_draft, config.prices),
            budget=config.budget,
            for_each=partial(Budget, max_tokens=config.max_request_tokens, max_cost=config.max_request_cost),
        )

    def _opened(self, draft: DraftProvider | LlmProvider | str | None) -> DraftProvider | None:
        if isinstance(draft, str):
            return self._own(open_draft(draft))
        return ProviderDraft(draft) if isinstance(draft, LlmProvider) else draft

    def _guarded(self, draft: DraftProvider | None) -> DraftProvider | None:
        breaker = self._draft_breaker
        if draft is None or breaker is None or self._target.capabilities.token_model is not None:
            return draft  # what runs in this process needs no guard
        return GuardedDraft(draft, breaker, self.config.limit, self.config.draft_timeout_s)

    def _own(self, opened: P) -> P:
        self._owned.append(opened)
        return opened

    @property
    def name(self) -> str:
        """`target+draft`."""
        return self._target.name if self._draft is None else f"{self._target.name}+{self._draft.name}"

    @property
    def is_target_left_alone(self) -> bool:
        """Whether the target failed so often that it is left alone for a while."""
        return self._breaker.is_open

    @property
    def is_draft_left_alone(self) -> bool:
        """The same of the draft."""
        return self._draft_breaker is not None and self._draft_breaker.is_open

    @property
    def capabilities(self) -> Capabilities:
        """The target's, without direct access to its tokens: that would leave the draft out."""
        return replace(
            self._target.capabilities, token_model=None, token_endpoint=None, token_scorer=None, whole_answers=False
        )

    async def decode(self, request: Messages | ChatRequest, **options: Unpack[RequestOptions]) -> SpeculativeResult:
        """Answer at once.

        `request` is a text (one user message), chat messages, OpenAI chat dicts, or a whole ChatRequest; `options`
        are those of ChatRequest.create. Raises InvalidRequestError, UnsupportedError for a strategy that cannot serve
        this pair, and TargetError with the text so far; never for a draft. Cancelling it stops the work behind it.
        """
        asked = _asked(request, options)
        if self._needs_no_pieces:
            return await self._answer_at_once(asked)
        async with aclosing(self._answer(asked, rounds=False, is_whole=True)) as events:
            async for event in events:
                if isinstance(event, SpeculativeFinish) and event.result is not None:
                    return event.result
        raise TargetError(f"{self.name} ended without a result")

    @asynccontextmanager
    async def stream(
        self, request: Messages | ChatRequest, *, rounds: bool = False, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        """Answer piece by piece, verified text alone; the last event is a `SpeculativeFinish` with the result.

        `rounds=True` also gives the events of `Progress`: `Started`, `Round`, `TargetStream`, `LocalTimes`, `Fallback`,
        `Retry`.
        Arguments and errors are those of `decode`.
        """
        async with aclosing(self._answer(_asked(request, options), rounds=rounds)) as events:
            yield events

    def stream_chunks(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[Mapping[str, Any]]]:
        """The target's own chunks (`ChunkStreaming`): neither speculation nor retries, but the same caps and budgets.

        Raises UnsupportedError for a target that has none to give, and BudgetError where no budget is left.
        """
        return self._chunks(request, self._breaker)

    @asynccontextmanager
    async def _chunks(
        self, request: ChatRequest, breaker: CircuitBreaker
    ) -> AsyncGenerator[AsyncIterator[Mapping[str, Any]]]:
        target = self._target
        if not isinstance(target, ChunkStreaming):
            raise UnsupportedError(f"target {target.name} has no chunks to pass on")
        affordable = self._affordable(request)
        num_choices = max(1, int(request.extra.get("n") or 1))
        if affordable is not None:
            affordable //= num_choices
        prepared, allowance = self._prepared(request, affordable), self._spending.begin()
        hold = None
        if allowance is not None:
            most = None if prepared.max_tokens is None else prepared.max_tokens * num_choices
            hold = allowance.open(self._spending.target_price, count_input_tokens(request), max_output=most)
        counted = CountedChunks(target.name, target, prepared, self.config, breaker, hold=hold)
        try:
            async with aclosing(counted.chunks()) as chunks:
                yield chunks
        finally:
            self._spending.settle(allowance, counted.usage, None)

    async def collect_chunks(self, request: ChatRequest) -> list[Mapping[str, Any]]:
        """All of `stream_chunks`, asked again under the rules of retries where the target fails for a while."""
        policy, breaker = self.config.retry, self._breaker.for_request()

        async def collect() -> list[Mapping[str, Any]]:
            async with self._chunks(request, breaker) as chunks:
                return [chunk async for chunk in chunks]

        return await asked_again(
            collect, policy, breaker, max_attempts=policy.max_attempts, told=lambda _error, _wait_s: None
        )

    async def discover(self, feature: Feature) -> None:
        """Try whether the target goes on from a text (`Discoverable`); of its other features none are passed on."""
        if feature == "continue_prefix":
            await self._discovery.wait_for(feature)

    async def complete(self, request: ChatRequest) -> ChatResponse:
        """The answer as any provider gives it; `decode` says more."""
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """Close the providers that were opened here from strings; end what is still being found out of the target."""
        async with AsyncExitStack() as stack:
            while self._owned:
                stack.push_async_callback(self._owned.pop().aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ------------------------------------------------------------------------------------------ inside

    def _affordable(self, request: ChatRequest) -> int | None:
        """How many tokens its answer may have by the budgets; None: there is none, and nothing to count."""
        return self._spending.affordable(count_input_tokens(request)) if self._spending.is_bounded else None

    def _prepared(self, request: ChatRequest, affordable: int | None) -> ChatRequest:
        """The request with this decoder's token caps and seed, where it brings none that binds more."""
        cap, sampling = self.config.max_total_tokens, request.sampling
        if cap is not None:
            request = replace(request, max_tokens=min(cap, request.max_tokens or cap))
        if affordable is not None:  # at 0 nothing is asked
            request = replace(request, max_tokens=max(1, min(affordable, request.max_tokens or affordable)))
        if (cap is not None or affordable is not None) and LIMIT_FIELDS & request.extra.keys():  # they would win
            others = {name: value for name, value in request.extra.items() if name not in LIMIT_FIELDS}
            request = replace(request, extra=others)
        seed = sampling.seed if sampling.seed is not None else self.config.seed
        if seed is None and sampling.temperature and self._target.capabilities.token_model is not None:
            seed = random_seed()  # so that the result can tell it
        return request if seed == sampling.seed else replace(request, sampling=replace(sampling, seed=seed))

    async def _answer(self, asked: ChatRequest, *, rounds: bool, is_whole: bool = False) -> AsyncGenerator[StreamEvent]:
        """The answer's events; `is_whole`: the caller goes by the last one alone."""
        affordable = self._affordable(asked)
        request = self._prepared(asked, affordable)
        recording = Recording(request, self._spending)
        if affordable == 0:
            yield self._finish_empty(recording)
            return
        target = MeteredTarget(self._target, recording.target_meter, self._discovery, self.config.timeouts)
        upstream = Upstream(target, self.config, recording, self._breaker)
        choosing = choose_strategy(
            self._draft, self._target, request, self.config, self._planner, discovery=self._discovery
        )
        began_s = now()
        choice = await upstream.deadline.wait_for(choosing) or Choice(PLAIN, "discovery")  # it ends before it begins
        recording.choosing_s = now() - began_s
        strategy = choice.strategy
        recording.promise = strategy.promise(self._target, self.config)  # what the target can do may change meanwhile
        recording.is_rated = strategy.name == "score"
        self._log_start(strategy, request, upstream)
        if rounds:
            guarantee = recording.promise.guarantee
            yield Started(strategy.name, guarantee, self._target.name, self._draft_of(strategy))
        try:
            async with aclosing(self._verified(strategy, request, upstream, is_whole=is_whole)) as events:
                # a plain answer is compared with nothing, so it does not matter what its consumer takes
                seconds: Callable[[], float] = (lambda: 0.0) if strategy is PLAIN else clock()
                async for event in events:
                    recording.add(event)
                    if type(event) is TextDelta or self._log_and_pass(event, upstream, rounds=rounds):
                        given_s = seconds()
                        yield event
                        recording.consumer_s += seconds() - given_s
        except BudgetError:
            recording.add(Finish("length", None, "budget"))  # what came before stays
        except BaseException as error:
            self._log_break(error, upstream)
            raise
        finally:
            if recording.allowance is not None:  # counting what nobody asks for takes time
                self._spending.settle(recording.allowance, recording.target_meter.usage, recording.draft_usage)
        if recording.is_refused_by_budget:
            yield self._finish_empty(recording)
            return
        finish = self._finish(recording, upstream, asked)
        result = self._conclude(choice, recording, upstream, finish)
        if choice.plain_reason == "discovery":
            await upstream.deadline.wait_for(self._discovery.make_up())
        yield SpeculativeFinish.of(finish, result)

    def _finish_empty(self, recording: Recording) -> SpeculativeFinish:
        """The end of an answer that no budget was left for: nothing was asked."""
        nothing = Finish("length", Usage(), "budget")
        recording.add(nothing)
        return SpeculativeFinish.of(nothing, self._result(nothing, recording, Choice(PLAIN, "budget")))

    def _log_and_pass(self, event: StreamEvent, upstream: Upstream, *, rounds: bool) -> bool:
        """Log an event that tells of progress; gives whether the caller is given the event."""
        if isinstance(event, Progress):
            self._log_progress(event, upstream)
            return rounds
        return not isinstance(event, Finish)

    def _conclude(self, choice: Choice, recording: Recording, upstream: Upstream, finish: Finish) -> SpeculativeResult:
        """The result of an answer that has come to its end, for the caller, the planner and the statistics."""
        if self._target.capabilities.token_model is not None and choice.strategy.name in ("plain", "tokens"):
            recording.teach(self._planner.baseline)
        result = self._result(finish, recording, choice)
        feature = choice.strategy.needs
        if recording.was_refused and feature is not None and isinstance(self._target, Rediscoverable):
            self._target.lose(feature)
        self._planner.learn(result)
        self.stats.add(result)
        self._log_end(result, upstream)
        return result

    @property
    def _can_speculate(self) -> bool:
        return self._draft is not None or self.config.strategy not in ("auto", "plain")

    @property
    def _needs_no_pieces(self) -> bool:
        """Whether a target may be asked for a whole answer: nobody verifies, times, counts or keeps its pieces."""
        config = self.config
        if config.stream_always or self._can_speculate:
            return False
        is_timed = config.deadline_s is not None or config.timeouts != _NO_TIMEOUTS
        return self._target.capabilities.whole_answers and not (is_timed or self._spending.is_bounded)

    async def _answer_at_once(self, asked: ChatRequest) -> SpeculativeResult:
        """The target's own answer in one call, under the same rules."""
        recording = Recording(self._prepared(asked, None))
        upstream = Upstream(self._target, self.config, recording, self._breaker)
        self._log_start(PLAIN, recording.request, upstream)

        def told(error: TransientError, wait_s: float) -> None:
            retry = Retry(one_line(error), wait_s, is_continued=False)
            recording.add(retry)
            self._log_progress(retry, upstream)

        try:
            recording.add_response(await upstream.response(told))
        except BaseException as error:
            self._log_break(error, upstream)
            raise
        choice = Choice(PLAIN, "configured" if self.config.strategy == "plain" else "no_draft")
        return self._conclude(choice, recording, upstream, self._finish(recording, upstream, asked))

    def _result(self, finish: Finish, recording: Recording, choice: Choice) -> SpeculativeResult:
        return recording.result(
            finish,
            choice=choice,
            target=self._target.name,
            draft=self._draft_of(choice.strategy),
            spending=self._spending,
            baseline=self._planner.baseline,
        )

    def _draft_of(self, strategy: Strategy) -> str | None:
        return None if self._draft is None or strategy.name == "plain" else self._draft.name

    def _verified(
        self, strategy: Strategy, request: ChatRequest, upstream: Upstream, *, is_whole: bool
    ) -> AsyncGenerator[StreamEvent]:
        """The answer's events, up to its Finish or the deadline."""
        draft = None if self._draft is None else MeteredDraft(self._draft, upstream.recording.draft_meter)

        def run() -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
            return strategy.run(draft, upstream.target, request, upstream.config_now, self._planner.figures)

        def plain() -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
            return PLAIN.run(None, upstream.target, request, self.config, self._planner.figures)

        if strategy is PLAIN and self._can_speculate:  # what speculation gives will be compared with this
            timed = partial(time_arrivals, run, self._planner.figures, request)
            return upstream.events(timed, None, is_whole=is_whole)
        return upstream.events(run, None if strategy is PLAIN else plain, is_whole=is_whole)

    def _finish(self, recording: Recording, upstream: Upstream, asked: ChatRequest) -> Finish:
        """How the answer ended, in this decoder's words."""
        if upstream.deadline_reached:
            return Finish("length", None, "deadline")
        finish = recording.finish
        if finish is None:
            raise TargetError(
                f"{self._target.name} ended its stream without a finish reason", partial_text=recording.content
            )
        if finish.finish_reason == "length" and finish.stopped_by in (None, "max_tokens"):
            return replace(finish, stopped_by=self._reached(recording, asked.max_tokens))
        return finish

    def _reached(self, recording: Recording, asked: int | None) -> StoppedBy | None:
        """Which limit of tokens an answer came up to; None: one that only the target's server knows."""
        cap, num_tokens = recording.request.max_tokens, recording.num_counted_tokens
        if cap is not None and (num_tokens is None or num_tokens >= cap):
            if cap == asked:
                return "max_tokens"
            return "max_total_tokens" if cap == self.config.max_total_tokens else "budget"
        length = self._target.capabilities.context_length
        is_full = length is not None and recording.target_meter.num_prompt_tokens + (num_tokens or 0) >= length
        return "context_length" if is_full else None

    def _log_start(self, strategy: Strategy, request: ChatRequest, upstream: Upstream) -> None:
        if not is_logged():
            return
        content: dict[str, Any] = (
            {"messages": [m.to_openai() for m in request.messages]} if self.config.log_content else {}
        )
        with upstream.log_context:
            log_event(
                "request_started",
                strategy=strategy.name,
                target=self._target.name,
                draft=None if self._draft is None else self._draft.name,
                num_messages=len(request.messages),
                max_tokens=request.max_tokens,
                **content,
            )

    def _log_progress(self, event: Progress, upstream: Upstream) -> None:
        if isinstance(event, Fallback | Retry):
            kind = event.reason.partition(":")[0]  # other people's errors may quote the prompt; their type cannot
            whole = self.config.log_content or kind == DraftError.__name__
            what = "target_asked_again"
            if isinstance(event, Fallback):
                what = "speculation_refused" if event.is_refusal else "draft_failed"
            with upstream.log_context:
                log_event(what, level=logging.WARNING, reason=event.reason if whole else kind)
        elif isinstance(event, Weakened):
            with upstream.log_context:
                log_event("guarantee_weakened", guarantee=event.guarantee, reason=event.reason)
        elif isinstance(event, Round) and is_logged(logging.DEBUG):
            with upstream.log_context:
                log_event(
                    "round",
                    level=logging.DEBUG,
                    index=event.index,
                    num_draft_tokens=event.num_draft_tokens,
                    num_accepted_tokens=event.num_accepted_tokens,
                    draft_ms=round(event.draft_s * 1e3, 3),
                    verify_ms=round(event.verify_s * 1e3, 3),
                )

    def _log_break(self, error: BaseException, upstream: Upstream) -> None:
        with upstream.log_context:
            if isinstance(error, GeneratorExit | asyncio.CancelledError):
                log_event("request_cancelled")
            elif isinstance(error, LlmSpecError):
                log_event("request_failed", level=logging.ERROR, error=type(error).__name__)

    def _log_end(self, result: SpeculativeResult, upstream: Upstream) -> None:
        if not is_logged():
            return
        content: dict[str, Any] = {"content": result.content} if self.config.log_content else {}
        with upstream.log_context:
            log_event(
                "request_finished",
                strategy=result.strategy,
                plain_reason=result.plain_reason,
                speedup=result.speedup,
                finish_reason=result.finish_reason,
                stopped_by=result.stopped_by,
                total_s=round(result.timings.total_s, 6),
                **result.stats.to_dict(),
                **content,
            )


def _asked(request: Messages | ChatRequest, options: RequestOptions) -> ChatRequest:
    if not isinstance(request, ChatRequest):
        return ChatRequest.create(request, **options)
    if options:
        raise InvalidRequestError(f"{min(options)} is given beside a whole ChatRequest; put it into the request")
    return request
