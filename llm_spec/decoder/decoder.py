"""SpeculativeDecoder, which chooses a strategy for each request and yields verified events."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, TypeVar, Unpack

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import Feature, FeatureLossAware
from llm_spec.contract.errors import (
    BudgetError,
    ClosedError,
    TargetError,
    TransientError,
    UnsupportedError,
    format_error_line,
)
from llm_spec.contract.events import (
    AnswerStarted,
    ChatResponse,
    Finish,
    Progress,
    Retry,
    StoppedBy,
    StreamEvent,
    TextDelta,
    Usage,
)
from llm_spec.contract.fields import LIMIT_FIELDS
from llm_spec.contract.optional import copy_draft_for_new_client
from llm_spec.contract.provider import Capabilities, ChunkStreaming, LlmProvider
from llm_spec.contract.request import ChatRequest, Messages, RequestOptions, create_request_unless_given
from llm_spec.contract.response import complete_from_stream
from llm_spec.decoder.answer_stream import AnswerStream
from llm_spec.decoder.attempts import TargetCall
from llm_spec.decoder.breaker import CircuitBreaker, GuardedDraft, retry_transient
from llm_spec.decoder.budget import Budget, CostTracker
from llm_spec.decoder.choice import StrategyChoice, StrategyPlanner, choose_strategy, discover_needed_features
from llm_spec.decoder.chunks import CountedChunkStream
from llm_spec.decoder.config import SpeculativeConfig, Timeouts
from llm_spec.decoder.entry_points import open_draft, open_provider
from llm_spec.decoder.feature_discovery import FeatureDiscovery
from llm_spec.decoder.metered import MeteredDraft, MeteredTarget
from llm_spec.decoder.pricing import find_draft_price, find_model_price, find_tier_prices
from llm_spec.decoder.record import AnswerRecorder
from llm_spec.decoder.request_log import log_progress, log_request_end, log_request_failure, log_request_start
from llm_spec.decoder.result import DecoderStats, SpeculativeFinish, SpeculativeResult
from llm_spec.decoder.session import derive_session_id, make_session_key
from llm_spec.drafting.provider_draft import ProviderDraft
from llm_spec.kit.open_calls import OpenCall, OpenCalls
from llm_spec.kit.session_headers import bind_session_headers, stream_with_session_headers
from llm_spec.local.seed import draw_random_seed
from llm_spec.measure.clock import now
from llm_spec.measure.stream_timing import record_plain_answer_times
from llm_spec.measure.tokens import estimate_request_tokens
from llm_spec.strategies.base import ReadyStrategy, StrategyContext
from llm_spec.strategies.plain import prepare_or_refuse as prepare_plain
from llm_spec.strategies.registry import AUTO, PLAIN, StrategyEntry, load_configured_strategies

__all__ = ["SpeculativeDecoder"]

_NO_TIMEOUTS: Final = Timeouts()
_TRIAL: Final = ChatRequest.create("discover")  # trials carry the session id of this request

T = TypeVar("T")
P = TypeVar("P", bound=DraftProvider | LlmProvider | FeatureDiscovery)


class SpeculativeDecoder:
    """A target that answers with the help of a draft.

    Target and draft are providers, which the caller closes, or strings such as `builtin:target`,
    which `aclose` closes. With a draft of None there is no speculation. Calls may run concurrently;
    they share only the providers. Use `SyncDecoder` in code without `await`.

        async with SpeculativeDecoder(target="builtin:target", draft="builtin:draft") as decoder:
            result = await decoder.decode("def getregentry():", max_tokens=64)
    """

    def __init__(
        self,
        *,
        target: LlmProvider | str,
        draft: DraftProvider | LlmProvider | str | None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        self.config = config or SpeculativeConfig()
        self._session_key = make_session_key()
        self._planner = StrategyPlanner()
        self.stats = DecoderStats()
        self._owned: list[DraftProvider | LlmProvider | FeatureDiscovery] = []
        self._target = self._register_to_close(open_provider(target)) if isinstance(target, str) else target
        can = self._target.capabilities  # these two never change
        self._is_target_local, self._target_has_whole_answers = can.token_model is not None, can.whole_answers
        self._discovery = self._register_to_close(FeatureDiscovery(self._target))
        self._breaker = CircuitBreaker(self._target.name, self.config.breaker)
        self._unguarded_draft = self._open_draft_provider(draft)
        self._draft_breaker = None
        if self._unguarded_draft is not None:
            self._draft_breaker = CircuitBreaker(self._unguarded_draft.name, self.config.breaker)
        self._apply_config(self.config)
        self._calls = OpenCalls(f"decoder {self.name}")

    def with_config(self, config: SpeculativeConfig) -> SpeculativeDecoder:
        """Return a decoder for the same pair with another configuration.

        It shares the providers, their failures, and the measurements of their speed. Closing it
        ends only its own answers.
        """
        other = self._copy_owning_nothing()
        other._apply_config(config)  # noqa: SLF001 - it is one of us
        return other

    def copy_for_new_client(self) -> SpeculativeDecoder:
        """Return a decoder for the same pair, for callers who may see each other's answers.

        Its draft remembers only the texts of these callers, and failures of their target or draft
        open the circuit for them only. As with `with_config`, closing it ends only its own answers.
        """
        other = self._copy_owning_nothing()
        other._session_key = make_session_key()  # noqa: SLF001 - it is one of us
        draft = self._unguarded_draft
        other._unguarded_draft = None if draft is None else copy_draft_for_new_client(draft)  # noqa: SLF001
        other._breaker = self._breaker.copy_for_new_client()  # noqa: SLF001 - as above
        other._draft_breaker = None if self._draft_breaker is None else self._draft_breaker.copy_for_new_client()  # noqa: SLF001
        other._apply_config(self.config)  # noqa: SLF001 - as above
        return other

    def _copy_owning_nothing(self) -> SpeculativeDecoder:
        other = copy.copy(self)
        other._owned = []  # noqa: SLF001 - it is one of us
        other._calls = self._calls.make_child(f"decoder {self.name}")  # noqa: SLF001 - as above
        return other

    def _apply_config(self, config: SpeculativeConfig) -> None:
        self.config = config
        is_timed = config.deadline_s is not None or config.timeouts != _NO_TIMEOUTS
        self._may_complete_at_once = self._target_has_whole_answers and not (config.stream_always or is_timed)
        if self._unguarded_draft is not None:
            load_configured_strategies(config.strategy, is_local=self._is_target_local)
        self._draft = self._guard_draft(self._unguarded_draft)
        self._cost_tracker = CostTracker(
            target=find_model_price(self._target.name, config.prices),
            tiers=find_tier_prices(self._target.name, config.prices),
            draft=None if self._unguarded_draft is None else find_draft_price(self._unguarded_draft, config.prices),
            budget=config.budget,
            make_request_budget=partial(Budget, max_tokens=config.max_request_tokens, max_cost=config.max_request_cost),
        )

    def _open_draft_provider(self, draft: DraftProvider | LlmProvider | str | None) -> DraftProvider | None:
        if isinstance(draft, str):
            return self._register_to_close(open_draft(draft))
        return ProviderDraft(draft) if isinstance(draft, LlmProvider) else draft

    def _guard_draft(self, draft: DraftProvider | None) -> DraftProvider | None:
        breaker = self._draft_breaker
        if draft is None or breaker is None or self._is_target_local:
            return draft  # a draft in this process needs no guard
        return GuardedDraft(draft, breaker, self.config.limit, self.config.draft_timeout_s)

    def _register_to_close(self, opened: P) -> P:
        self._owned.append(opened)
        return opened

    @property
    def name(self) -> str:
        """`target+draft`."""
        return self._target.name if self._draft is None else f"{self._target.name}+{self._draft.name}"

    @property
    def target(self) -> LlmProvider:
        """The target as it was given or opened. Calls to it bypass the decoder."""
        return self._target

    @property
    def is_target_local(self) -> bool:
        """True if the target is a model in this process."""
        return self._is_target_local

    @property
    def is_target_circuit_open(self) -> bool:
        """True if the target failed so often that it is not called for some time."""
        return self._breaker.is_open

    @property
    def is_draft_circuit_open(self) -> bool:
        """True if the draft failed so often that it is not called for some time."""
        return self._draft_breaker is not None and self._draft_breaker.is_open

    @property
    def capabilities(self) -> Capabilities:
        """The target's, without direct access to its tokens, which would bypass the draft."""
        return replace(
            self._target.capabilities,
            token_model=None,
            token_endpoint=None,
            token_scorer=None,
            message_parser=None,
            whole_answers=False,
        )

    async def decode(self, request: Messages | ChatRequest, **options: Unpack[RequestOptions]) -> SpeculativeResult:
        """Return the whole answer.

        `request` is a text (one user message), chat messages, OpenAI chat dicts, or a ChatRequest;
        `options` are those of ChatRequest.create. Raises InvalidRequestError, UnsupportedError for
        a strategy that cannot serve this pair, and TargetError with the text so far. A failing
        draft never raises. Cancelling the call stops all of its work.
        """
        original_request = create_request_unless_given(request, options)
        if self._can_complete_at_once(original_request):
            headers = self._build_session_headers(original_request)
            if not headers:
                return await self._complete_at_once(original_request)
            with bind_session_headers(headers):
                return await self._complete_at_once(original_request)
        async with aclosing(
            self._stream_answer_with_session_headers(original_request, rounds=False, is_whole=True)
        ) as events:
            async for event in events:
                if isinstance(event, SpeculativeFinish) and event.result is not None:
                    return event.result
        raise TargetError(f"{self.name} ended without a result")

    def stream(
        self, request: Messages | ChatRequest, *, rounds: bool = False, **options: Unpack[RequestOptions]
    ) -> AnswerStream:
        """Return the answer piece by piece. The last event, `SpeculativeFinish`, has the result.

        All text is verified. Read it with `async for`; `AnswerStream` explains when it is closed,
        and has the result, too. `rounds=True` also gives the events of `Progress`: `AnswerStarted`,
        `Round`, `TargetStreamReport`, `LocalTimings`, `Fallback`, `Retry`. Arguments and errors are
        those of `decode`.
        """
        original_request = create_request_unless_given(request, options)
        return AnswerStream(partial(self._stream_answer_with_session_headers, original_request, rounds=rounds))

    def stream_chunks(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[Mapping[str, Any]]]:
        """Return the target's own chunks (`ChunkStreaming`), without speculation or retries.

        Caps and budgets apply as in `decode`. Raises UnsupportedError if the target has no chunks
        to pass on, and BudgetError if no budget is left.
        """
        return self._stream_metered_chunks(request, self._breaker)

    @asynccontextmanager
    async def _stream_metered_chunks(
        self, request: ChatRequest, breaker: CircuitBreaker
    ) -> AsyncGenerator[AsyncIterator[Mapping[str, Any]]]:
        target = self._target
        if not isinstance(target, ChunkStreaming):
            raise UnsupportedError(f"target {target.name} does not stream chunks; use `stream`")
        max_affordable_tokens = self._count_affordable_answer_tokens(request)
        num_choices = max(1, int(request.extra.get("n") or 1))
        if max_affordable_tokens is not None:
            max_affordable_tokens //= num_choices
        prepared = self._apply_token_caps_and_seed(request, max_affordable_tokens)
        allowance = self._cost_tracker.open_answer_reservation()
        reservation = None
        if allowance is not None:
            most = None if prepared.max_tokens is None else prepared.max_tokens * num_choices
            reservation = allowance.open_call_reservation(
                self._cost_tracker.target_price, estimate_request_tokens(request), max_output=most
            )
        counted = CountedChunkStream(
            target.name,
            target,
            prepared,
            self.config,
            breaker,
            capabilities=target.capabilities,
            reservation=reservation,
        )
        call = self._calls.open_call()
        counted_chunks = call.attach(counted.iterate_chunks(call))
        try:
            async with aclosing(self._iterate_with_session_headers(counted_chunks, request)) as chunks:
                yield chunks
        finally:
            self._cost_tracker.settle_answer(allowance, counted.usage, None)

    async def collect_chunks(self, request: ChatRequest) -> list[Mapping[str, Any]]:
        """Return all of `stream_chunks`; transient failures of the target are retried."""
        policy, breaker = self.config.retry, self._breaker.for_request()

        async def collect_chunks_once() -> list[Mapping[str, Any]]:
            async with self._stream_metered_chunks(request, breaker) as chunks:
                return [chunk async for chunk in chunks]

        return await retry_transient(
            collect_chunks_once,
            policy,
            breaker,
            max_attempts=policy.max_attempts,
            on_retry=lambda _error, _wait_s: None,
        )

    async def discover(self, feature: Feature | None = None) -> None:
        """Find out what the target can do; answers before that is known are plain.

        Without a feature, this covers everything that the configured strategy needs of a server, or
        for `auto` everything that it compares. If the server lacks it, no error is raised;
        `plain_reason` says so. With a feature, as for `Discoverable`, this tests whether the target
        can continue a text; a decoder exposes none of its other features. Raises TransientError if
        the server cannot answer now, and ClosedError if the decoder is closed meanwhile.
        """
        self._calls.check_open()
        # trials compare answers with each other, so a load balancer must keep their calls together
        with bind_session_headers(self._build_session_headers(_TRIAL)):
            if feature is None:
                has_tried = await discover_needed_features(self.config.strategy, self._target, self._discovery)
            else:
                has_tried = feature != "continue_prefix" or await self._discovery.wait_until_tried(feature)
        if not has_tried:
            raise ClosedError(f"{self._target.name} could not be tried, because its decoder was closed")

    async def complete(self, request: ChatRequest) -> ChatResponse:
        """Return the answer in the form of any provider; `decode` returns more."""
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """End all answers with ClosedError, and close the providers that were opened from strings.

        Providers that were passed in stay open. A closed decoder answers no more requests.
        """
        async with AsyncExitStack() as stack:
            while self._owned:
                stack.push_async_callback(self._owned.pop().aclose)
            stack.push_async_callback(self._calls.aclose)  # the last one is called first

    def __repr__(self) -> str:
        draft = None if self._unguarded_draft is None else self._unguarded_draft.name
        config = "" if self.config == SpeculativeConfig() else f", config={self.config!r}"
        text = f"SpeculativeDecoder(target={self._target.name!r}, draft={draft!r}{config})"
        return f"<closed {text}>" if self._calls.is_closed else text

    async def __aenter__(self) -> Self:
        self._calls.check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --------------------------------------------------------------------------------------- inside

    def _count_affordable_answer_tokens(self, request: ChatRequest) -> int | None:
        """Return how many tokens the budgets leave for an answer, or None if there is no budget."""
        tracker = self._cost_tracker
        return tracker.max_affordable_tokens(estimate_request_tokens(request)) if tracker.is_bounded else None

    def _apply_token_caps_and_seed(self, request: ChatRequest, max_affordable: int | None) -> ChatRequest:
        """Return the request with the decoder's caps and seed, unless its own are tighter."""
        cap, sampling = self.config.max_total_tokens, request.sampling
        if cap is not None or max_affordable is not None:
            caps = [most for most in (cap, max_affordable, request.max_tokens) if most is not None]
            # limits in `extra` would override this one; at 0 no call is made
            extra = {name: value for name, value in request.extra.items() if name not in LIMIT_FIELDS}
            request = replace(request, max_tokens=max(1, min(caps)), extra=extra)
        seed = sampling.seed if sampling.seed is not None else self.config.seed
        if seed is None and sampling.temperature and self._is_target_local:
            seed = draw_random_seed()  # so that the result can report it
        return request if seed == sampling.seed else replace(request, sampling=replace(sampling, seed=seed))

    def _build_session_headers(self, request: ChatRequest) -> Mapping[str, str]:
        """Return the headers that all calls for a request carry in addition to their own."""
        name = self.config.session_header
        if name is None:
            return {}
        return {name: request.session_id or derive_session_id(request, self._session_key)}

    def _iterate_with_session_headers(self, items: AsyncGenerator[T], request: ChatRequest) -> AsyncGenerator[T]:
        headers = self._build_session_headers(request)
        return stream_with_session_headers(items, headers) if headers else items

    def _stream_answer_with_session_headers(
        self, original_request: ChatRequest, *, rounds: bool, is_whole: bool = False
    ) -> AsyncGenerator[StreamEvent]:
        """Return the answer's events; with `is_whole` the caller reads only the last one."""
        call = self._calls.open_call()
        events = call.attach(self._stream_answer_by_strategy(original_request, call, rounds=rounds, is_whole=is_whole))
        return self._iterate_with_session_headers(events, original_request)

    async def _stream_answer_by_strategy(
        self, original_request: ChatRequest, call: OpenCall, *, rounds: bool, is_whole: bool
    ) -> AsyncGenerator[StreamEvent]:
        with call:
            max_affordable_tokens = self._count_affordable_answer_tokens(original_request)
            request = self._apply_token_caps_and_seed(original_request, max_affordable_tokens)
            recorder = AnswerRecorder(request, self._cost_tracker)
            if max_affordable_tokens == 0:
                yield self._make_no_budget_finish(recorder)
                return
            target_call, context = self._open_target_call_and_context(recorder)
            strategy_choice = await self._choose_strategy(target_call, context)
            strategy, plain = strategy_choice.strategy, prepare_plain(context)
            recorder.text_guarantee = (strategy_choice.ready or plain).text_guarantee
            recorder.is_read_from_scores = strategy.is_read_from_scores
            log_request_start(strategy, target_call)
            if rounds:
                call.reader = None
                yield self._describe_start(strategy, recorder)
                call.reader = call.resume()
            try:
                answer = self._stream_verified_answer(strategy_choice.ready, plain, target_call, is_whole=is_whole)
                # a plain answer is compared with nothing, so its consumer's time does not matter
                async with aclosing(
                    answer if strategy is PLAIN else recorder.iterate_and_time_consumer(answer)
                ) as events:
                    async for event in events:
                        recorder.add_event(event)
                        if type(event) is TextDelta or self._log_event_and_check_is_shown(
                            event, target_call, rounds=rounds
                        ):
                            try:
                                yield event
                            except GeneratorExit:
                                call.reader = None
                                raise
                            call.reader = call.resume()
            except BudgetError:
                recorder.add_event(Finish("length", None, "budget"))  # the text before it stays
            except BaseException as error:
                call.partial_text = recorder.content
                log_request_failure(call.explain(error), target_call)
                raise
            finally:
                if recorder.allowance is not None:  # counting takes time
                    self._cost_tracker.settle_answer(
                        recorder.allowance, recorder.target_meter.usage, recorder.draft_usage, tier=recorder.billed_tier
                    )
            if recorder.is_refused_by_budget:
                yield self._make_no_budget_finish(recorder)
                return
            finish = self._build_decoder_finish(recorder, target_call, original_request)
            result = self._build_and_record_result(strategy_choice, recorder, target_call, finish)
            await self._finish_trials(strategy_choice, target_call)
            call.reader = None
            yield SpeculativeFinish.from_finish(finish, result)

    async def _finish_trials(self, choice: StrategyChoice, target_call: TargetCall) -> None:
        """Finish interrupted trials if the answer was plain because of them."""
        if choice.plain_reason == "discovery":
            await target_call.deadline.wait_for(self._discovery.finish_interrupted_trials())

    def _describe_start(self, strategy: StrategyEntry, recorder: AnswerRecorder) -> AnswerStarted:
        draft_name = None if strategy is PLAIN else recorder.draft_name
        return AnswerStarted(strategy.name, recorder.text_guarantee.guarantee, self._target.name, draft_name)

    def _open_target_call_and_context(self, recorder: AnswerRecorder) -> tuple[TargetCall, StrategyContext]:
        """Open a request's target and draft with counted calls. Its deadline begins now."""
        target = MeteredTarget(self._target, recorder.target_meter, self._discovery, self.config.timeouts)
        target_call = TargetCall(target, self.config, recorder, self._breaker)
        draft = self._choose_draft(recorder.request)
        recorder.draft_name = None if draft is None else draft.name
        context = StrategyContext(
            target=target,
            draft=None if draft is None else MeteredDraft(draft, recorder.draft_meter),
            request=recorder.request,
            limits=self.config,
            pair_stats=self._planner.pair_stats,
            lookahead_costs=self._planner.lookahead_costs,
            deadline=target_call.deadline,
        )
        return target_call, context

    async def _choose_strategy(self, target_call: TargetCall, context: StrategyContext) -> StrategyChoice:
        """Choose a strategy; it is plain if the deadline comes during discovery."""
        choosing = choose_strategy(context, self.config.strategy, self._planner, discovery=self._discovery)
        began_s = now()
        chosen = await target_call.deadline.wait_for(choosing)
        target_call.recorder.choosing_strategy_s = now() - began_s
        return chosen or StrategyChoice(PLAIN, plain_reason="discovery")

    def _make_no_budget_finish(self, recorder: AnswerRecorder) -> SpeculativeFinish:
        nothing = Finish("length", Usage(), "budget")
        recorder.add_event(nothing)
        return SpeculativeFinish.from_finish(
            nothing, self._build_result(nothing, recorder, StrategyChoice(PLAIN, plain_reason="budget"))
        )

    def _log_event_and_check_is_shown(self, event: StreamEvent, target_call: TargetCall, *, rounds: bool) -> bool:
        """Log a progress event; returns True if the caller gets the event."""
        if isinstance(event, Progress):
            log_progress(event, target_call)
            return rounds
        return not isinstance(event, Finish)

    def _build_and_record_result(
        self, strategy_choice: StrategyChoice, recorder: AnswerRecorder, target_call: TargetCall, finish: Finish
    ) -> SpeculativeResult:
        """Build the result of an ended answer, and add it to the planner and the statistics."""
        strategy = strategy_choice.strategy
        if self._is_target_local and (strategy is PLAIN or strategy.is_local):
            recorder.add_plain_steps_to_baseline(self._planner.baseline)
        result = self._build_result(finish, recorder, strategy_choice)
        if (
            recorder.was_speculation_refused
            and strategy.discoverable_features
            and isinstance(self._target, FeatureLossAware)
        ):
            self._target.mark_feature_lost(strategy.discoverable_features[0])
        self._planner.record_result(result)
        self.stats.add(result)
        log_request_end(result, target_call)
        return result

    def _choose_draft(self, request: ChatRequest) -> DraftProvider | None:
        """Return the draft; the request's prediction comes first, unless the target takes it."""
        if not request.prediction or self._target.capabilities.prediction:
            return self._draft
        from llm_spec.drafting.cascade import CascadeDraft  # late, since these bring numpy
        from llm_spec.drafting.reference import ReferenceDraft

        prediction = ReferenceDraft(request.prediction, name="prediction")
        return prediction if self._draft is None else CascadeDraft(prediction, self._draft)

    def _can_speculate(self, draft: DraftProvider | str | None) -> bool:
        return draft is not None or self.config.strategy not in (AUTO, PLAIN.name)

    def _can_complete_at_once(self, request: ChatRequest) -> bool:
        """Return True if nothing verifies, times, counts or keeps the pieces of an answer."""
        if not self._may_complete_at_once or self._cost_tracker.is_bounded:
            return False
        return not self._can_speculate(self._choose_draft(request))

    async def _complete_at_once(self, original_request: ChatRequest) -> SpeculativeResult:
        recorder = AnswerRecorder(self._apply_token_caps_and_seed(original_request, None))
        target_call = TargetCall(self._target, self.config, recorder, self._breaker)
        log_request_start(PLAIN, target_call)

        def record_retry(error: TransientError, wait_s: float) -> None:
            retry = Retry(format_error_line(error), wait_s, is_continued=False)
            recorder.add_event(retry)
            log_progress(retry, target_call)

        with self._calls.open_call() as call:
            try:
                recorder.add_response(await target_call.complete(record_retry))
            except BaseException as error:
                log_request_failure(call.explain(error), target_call)
                raise
        strategy_choice = StrategyChoice(
            PLAIN, plain_reason="configured" if self.config.strategy == PLAIN.name else "no_draft"
        )
        return self._build_and_record_result(
            strategy_choice, recorder, target_call, self._build_decoder_finish(recorder, target_call, original_request)
        )

    def _build_result(
        self, finish: Finish, recorder: AnswerRecorder, strategy_choice: StrategyChoice
    ) -> SpeculativeResult:
        return recorder.build_result(
            finish,
            strategy_choice=strategy_choice,
            target=self._target.name,
            draft=None if strategy_choice.strategy is PLAIN else recorder.draft_name,
            cost_tracker=self._cost_tracker,
            pair_stats=self._planner.pair_stats,
        )

    def _stream_verified_answer(
        self, speculation: ReadyStrategy | None, plain: ReadyStrategy, target_call: TargetCall, *, is_whole: bool
    ) -> AsyncGenerator[StreamEvent]:
        if speculation is not None:
            return target_call.stream_answer_events(speculation.run, plain.run, is_whole=is_whole)
        run = plain.run
        if self._can_speculate(target_call.recorder.draft_name):  # later answers compare with it
            run = partial(record_plain_answer_times, run, self._planner.pair_stats, target_call.recorder.request)
        return target_call.stream_answer_events(run, None, is_whole=is_whole)

    def _build_decoder_finish(
        self, recorder: AnswerRecorder, target_call: TargetCall, original_request: ChatRequest
    ) -> Finish:
        """Return the end of the answer, with the decoder's own limits as its reason."""
        if target_call.is_deadline_reached:
            return Finish("length", None, "deadline")
        finish = recorder.finish
        if finish is None:
            raise TargetError(
                f"{self._target.name} ended its stream without a finish reason", partial_text=recorder.content
            )
        if finish.finish_reason == "length" and finish.stopped_by in (None, "max_tokens"):
            return replace(finish, stopped_by=self._find_reached_token_limit(recorder, original_request.max_tokens))
        return finish

    def _find_reached_token_limit(self, recorder: AnswerRecorder, requested: int | None) -> StoppedBy | None:
        """Return the token limit that ended an answer, or None if only the server knows it."""
        cap, num_tokens = recorder.request.max_tokens, recorder.num_counted_tokens
        if cap is not None and (num_tokens is None or num_tokens >= cap):
            if cap == requested:
                return "max_tokens"
            return "max_total_tokens" if cap == self.config.max_total_tokens else "budget"
        length = self._target.capabilities.context_length
        is_full = length is not None and recorder.target_meter.num_prompt_tokens + (num_tokens or 0) >= length
        return "context_length" if is_full else None
