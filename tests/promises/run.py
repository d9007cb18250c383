"""One case, run by virtual clock; and what its target would have answered alone."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import warnings
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from llm_spec import (
    Budget,
    ChatRequest,
    ConcurrencyLimit,
    Price,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    StreamEvent,
    TextDelta,
    Timeouts,
    TransientError,
)
from llm_spec.decoder.result import DecoderStats
from llm_spec.local.lookahead import CostAware, Fixed
from llm_spec.testing import LocalProvider, TableModel, VirtualClockEventLoop
from promises.drafts import DraftLedger, make_draft
from promises.draw import Ask, Case
from promises.language import EOS, Context, Language, cut_at_stop, to_text
from promises.local_drafts import make_local_draft
from promises.target import Pace, Target, UsageLedger, asking

__all__ = ["HANG_S", "PRICES", "Answer", "Outcome", "Shown", "answer_alone", "request_of", "run_case"]

MakeDecoder: TypeAlias = Callable[..., SpeculativeDecoder]

PRICES: Final = {
    "promises:target": Price(input=2.0, output=8.0, cached_input=0.5),
    "promises:draft": Price(input=0.5, output=1.0),
    "table:model": Price(input=1.0, output=3.0),
    "table:draft": Price(input=0.25, output=0.5),
}
HANG_S: Final = 3000.0  # by virtual clock: nothing that ends takes that long
_PATIENCE_S: Final = 5.0  # real seconds that a loop waits for nothing


@dataclass(frozen=True)
class Answer:
    """What the target writes alone: its tokens' bytes, the text that is shown of them, and how long that takes.

    `ends[n]` is the text of the first n tokens. `is_ended` by itself or a stop string, not by a cap.
    """

    text: str
    num_tokens: int
    is_ended: bool
    by_stop: bool
    ends: tuple[bytes, ...]
    seconds: float


@dataclass
class Shown:
    """What the consumer of one request saw."""

    ask: Ask
    tag: str
    request: ChatRequest
    events: list[tuple[float, StreamEvent]] = field(default_factory=list[tuple[float, StreamEvent]])
    pauses: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    spent: list[int] = field(default_factory=list[int])
    result: SpeculativeResult | None = None
    error: BaseException | None = None
    started_s: float = 0.0
    ended_s: float = 0.0
    has_left: bool = False
    cancel_sent_s: float | None = None
    is_cancelled: bool = False
    has_hung: bool = False
    open_after: tuple[int, int] = (0, 0)  # calls of the target and of the draft when the request had ended

    @property
    def text(self) -> str:
        if self.ask.whole:
            return "" if self.result is None else self.result.content
        return "".join(event.text for _, event in self.events if isinstance(event, TextDelta))


@dataclass
class Outcome:
    """Everything that came of a case."""

    case: Case
    language: Language
    shown: list[Shown]
    ledger: UsageLedger
    draft: DraftLedger
    make: MakeDecoder
    others: list[UsageLedger] = field(default_factory=list[UsageLedger])  # of providers that draft
    models: list[TableModel] = field(default_factory=list[TableModel])
    budget: Budget | None = None
    stats: DecoderStats = field(default_factory=DecoderStats)
    places_lost: int = 0
    tasks_left: list[str] = field(default_factory=list[str])
    complaints: list[str] = field(default_factory=list[str])
    plain: dict[str, Answer] = field(default_factory=dict[str, Answer])
    crash: str = ""


# ------------------------------------------------------------------------------------------ requests and answers


def request_of(case: Case, number: int, ask: Ask, language: Language) -> ChatRequest:
    """The request of a number: its mark, its topic, and what is quoted of the answer."""
    topic = f"topic{ask.topic}"
    if case.is_local:
        options: dict[str, Any] = {"messages": f"#{number} {topic} {_local_text(case)[: ask.quote]}"}
    else:
        answer = language.answer(topic)
        options = {"messages": f"#{number} {topic} {answer[: ask.quote]}", "prefix": answer[: ask.prefix].rstrip()}
    odd: dict[str, Any] = {
        "": {},
        "presence_penalty": {"presence_penalty": 0.5},
        "frequency_penalty": {"frequency_penalty": 0.5},
        "extra": {"extra": {"repetition_penalty": 1.2}},
        "tools": {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]},
    }[ask.odd]
    return ChatRequest.create(
        **options,
        **odd,
        max_tokens=ask.max_tokens,
        stop=ask.stop,
        temperature=ask.temperature,
        top_k=ask.top_k,
        seed=ask.seed,
    )


def answer_alone(case: Case, request: ChatRequest, language: Language, max_tokens: int | None) -> Answer:
    """The greedy answer of a remote target, token by token."""
    topic = request.messages[0].text.split(" ", 2)[1]
    ids = tuple(language.encode(request.prefix))
    begun, out, ends = len(ids), b"", [b""]
    is_ended = by_stop = False
    cut = None
    while max_tokens is None or len(ends) <= max_tokens:
        token_id = language.greedy(Context(topic, ids), {})
        if token_id == EOS:
            is_ended = True
            break
        ids = (*ids, token_id)
        out = language.data(ids[begun:])
        ends.append(out)
        cut = cut_at_stop(to_text(out), request.stop)
        if cut is not None:
            is_ended = by_stop = True
            break
    num_tokens = len(ends) - 1
    num_drawn = num_tokens + (is_ended and not by_stop)
    seconds = case.round_trip_s + case.first_token_s + max(0, num_drawn - 1) * case.token_s
    return Answer(to_text(out)[:cut], num_tokens, is_ended, by_stop, tuple(ends), seconds)


def _local_text(case: Case) -> str:
    """What the local target writes: short, and without a stretch that its order cannot tell from another."""
    return Language(case.seed, longest=case.longest).answer("local")


def _greedy_alone(case: Case, request: ChatRequest) -> Answer:
    model = _local_model(case)
    prompt = model.tokenizer.encode_chat(request)
    ids, ends, out = list(prompt), [b""], ""
    is_ended = by_stop = False
    cut = None
    while request.max_tokens is None or len(ends) <= request.max_tokens:
        if len(ids) >= model.context_length:
            break
        token_id = int(model.logits(ids).argmax())
        if token_id in model.tokenizer.eos_token_ids:
            is_ended = True
            break
        ids.append(token_id)
        data = bytes(i for i in ids[len(prompt) :] if i < 256)
        ends.append(data)
        out = data.decode(errors="replace")
        cut = cut_at_stop(to_text(data), request.stop)
        if cut is not None:
            is_ended, by_stop, out = True, True, to_text(data)
            break
    return Answer(out[:cut], len(ends) - 1, is_ended, by_stop, tuple(ends), 0.0)


# ------------------------------------------------------------------------------------------ running


def run_case(
    case: Case, make: MakeDecoder = SpeculativeDecoder, loop: type[VirtualClockEventLoop] = VirtualClockEventLoop
) -> Outcome:
    """Run a case in an event loop of its own. `make` makes the decoder: one with faults shows what the checks see."""
    state = random.getstate()
    random.seed(case.seed)
    hook, complaints = sys.unraisablehook, list[str]()
    sys.unraisablehook = lambda args: complaints.append(f"unraisable: {args.exc_value!r} in {args.object!r}")
    language = Language(case.seed, by=case.by, longest=case.longest)
    outcome = Outcome(case, language, [], UsageLedger(), DraftLedger(), make)
    handler = _Handler(complaints)
    logger = logging.getLogger("llm_spec")
    logger.addHandler(handler)
    was_propagated, logger.propagate = logger.propagate, False
    logging.getLogger("asyncio").addHandler(handler)
    gc.disable()  # so that what the case made, and nothing else, is looked through at its end
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            _run(_play(outcome), outcome, complaints, loop)
            gc.collect(1)
        complaints += [f"warning: {warning.message}" for warning in warned]
    finally:
        gc.enable()
        logger.removeHandler(handler)
        logger.propagate = was_propagated
        logging.getLogger("asyncio").removeHandler(handler)
        sys.unraisablehook = hook
        random.setstate(state)
    outcome.complaints = complaints
    return outcome


def _run(
    play: Coroutine[Any, Any, None], outcome: Outcome, complaints: list[str], kind: type[VirtualClockEventLoop]
) -> None:
    def make_loop() -> asyncio.AbstractEventLoop:
        loop = kind(patience_s=_PATIENCE_S)
        loop.set_exception_handler(lambda _, context: complaints.append(f"loop: {context}"))
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        try:
            runner.run(play)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            outcome.crash = f"{type(error).__name__}: {error}"


class _Handler(logging.Handler):
    """What must never be logged."""

    def __init__(self, complaints: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._complaints = complaints

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "asyncio" or "closing_failed" in record.getMessage():
            self._complaints.append(f"log: {record.getMessage()}")


async def _play(outcome: Outcome) -> None:
    case, language = outcome.case, outcome.language
    requests = [request_of(case, number, ask, language) for number, ask in enumerate(case.asks)]
    outcome.shown = [
        Shown(ask, f"#{number}", request) for number, (ask, request) in enumerate(zip(case.asks, requests, strict=True))
    ]
    decoder = _decoder(outcome)
    limit = decoder.config.limit
    if case.is_local:
        for shown in outcome.shown:
            outcome.plain[shown.tag] = await _local_answer(case, shown, decoder.config)
    else:
        for shown in outcome.shown:
            caps = [n for n in (shown.ask.max_tokens, case.max_total_tokens) if n is not None]
            outcome.plain[shown.tag] = answer_alone(case, shown.request, language, min(caps, default=None))
    if case.waits_for_discovery:
        with suppress(TransientError):  # the answers will say so
            await decoder.discover()
    before = asyncio.all_tasks()
    if case.together:
        await asyncio.gather(*(_ask(decoder, shown, outcome) for shown in outcome.shown))
    else:
        for shown in outcome.shown:
            await _ask(decoder, shown, outcome)
    outcome.stats = decoder.stats
    await decoder.aclose()
    outcome.tasks_left = sorted(task.get_name() for task in asyncio.all_tasks() - before)
    if limit is not None and case.limit is not None:
        outcome.places_lost = case.limit - await _free_places(limit, case.limit)


def _decoder(outcome: Outcome) -> SpeculativeDecoder:
    case, language = outcome.case, outcome.language
    config = SpeculativeConfig(
        strategy=case.strategy,
        lookahead=CostAware() if case.lookahead is None else Fixed(case.lookahead),
        acceptance=case.acceptance,
        baseline_every=case.baseline_every,
        max_draft_tokens=case.max_draft_tokens,
        max_total_tokens=case.max_total_tokens,
        max_iterations=case.max_iterations,
        max_concurrent_streams=case.max_concurrent_streams,
        max_extra_cost=case.max_extra_cost,
        deadline_s=case.deadline_s,
        draft_timeout_s=case.draft_timeout_s,
        retry=RetryPolicy(max_attempts=case.max_attempts, first_wait_s=0.1, max_wait_s=0.2),
        timeouts=Timeouts(first_chunk_s=case.first_chunk_s, between_chunks_s=case.between_chunks_s),
        limit=None if case.limit is None else ConcurrencyLimit(case.limit),
        budget=None if case.budget is None else Budget(max_tokens=case.budget),
        max_request_tokens=case.max_request_tokens,
        stream_always=case.stream_always,
        prices=PRICES,
    )
    outcome.budget = config.budget
    if case.is_local:
        return _local_decoder(outcome, config)
    target = Target(
        language,
        kind=case.kind,  # type: ignore[arg-type] - it is not local
        seed=case.seed,
        pace=Pace(round_trip_s=case.round_trip_s, first_token_s=case.first_token_s, token_s=case.token_s),
        frame=case.frame,
        says_why=case.says_why,
        counts=case.counts,
        counts_eos=case.counts_eos,
        takes_prediction=case.takes_prediction,
        judgement=case.judgement,
        discover_s=case.discover_s,
        continues=case.continues,
        num_failing_trials=case.num_failing_trials,
        odd=case.odd,
        failing=case.failing,
        close_s=case.close_s,
        thinks=case.thinks,
        whole_answers=case.whole_answers,
        faults={shown.tag: shown.ask.fault for shown in outcome.shown if shown.ask.fault is not None},
        prefixes={shown.tag: shown.request.prefix for shown in outcome.shown},
    )
    outcome.ledger = target.ledger
    topics = [f"topic{ask.topic}" for ask in case.asks]
    draft, others = make_draft(
        language,
        outcome.draft,
        case.draft,  # type: ignore[arg-type] - it is not local
        topics,
        broken=case.broken,
        seed=case.seed,
        rate=case.rate,
        at=case.at,
        first_s=case.draft_first_s,
        piece_s=case.draft_piece_s,
    )
    outcome.others = [other.ledger for other in others]
    return outcome.make(target=target, draft=draft, config=config)


async def _ask(decoder: SpeculativeDecoder, shown: Shown, outcome: Outcome) -> None:
    """One request, by a task of its own, which is cancelled where the case says so."""
    loop = asyncio.get_running_loop()
    if outcome.case.together:
        await asyncio.sleep(shown.ask.start_s)
    task = asyncio.create_task(_consume(decoder, shown, outcome), name=f"consumer of {shown.tag}")
    if shown.ask.cancel_at_s is not None:
        await asyncio.wait([task], timeout=shown.ask.cancel_at_s)
        if not task.done():
            shown.cancel_sent_s = loop.time()
            task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        shown.is_cancelled = True
    elif task.exception() is not None:
        shown.error = task.exception()


async def _consume(decoder: SpeculativeDecoder, shown: Shown, outcome: Outcome) -> None:
    loop, ask = asyncio.get_running_loop(), shown.ask
    asking.set(shown.tag)
    shown.started_s = loop.time()
    patience = asyncio.timeout(HANG_S)
    try:
        async with patience:
            if ask.whole:
                shown.result = await decoder.decode(shown.request)
                return
            async with decoder.stream(shown.request, rounds=True) as events:
                if ask.leave_after == 0:
                    shown.has_left = True
                    return
                async for event in events:
                    shown.events.append((loop.time(), event))
                    shown.spent.append(outcome.budget.spent_tokens if outcome.budget is not None else 0)
                    if isinstance(event, SpeculativeFinish):
                        shown.result = event.result
                    if len(shown.events) == ask.leave_after:
                        shown.has_left = True
                        return
                    if ask.pause_s:
                        await asyncio.sleep(ask.pause_s)
                        shown.pauses.append((loop.time() - ask.pause_s, loop.time()))
    except TimeoutError:
        if not patience.expired():
            raise
        shown.has_hung = True
    finally:
        shown.ended_s = loop.time()
        num_target = outcome.ledger.open[shown.tag]
        num_draft = outcome.draft.open[shown.tag] + sum(ledger.open[shown.tag] for ledger in outcome.others)
        shown.open_after = (num_target, num_draft)


async def _free_places(limit: ConcurrencyLimit, most: int) -> int:
    num = 0
    async with AsyncExitStack() as places:
        with suppress(TimeoutError):
            while num < most:
                async with asyncio.timeout(1.0):
                    await places.enter_async_context(limit.hold_place())
                num += 1
    return num


# ------------------------------------------------------------------------------------------ local models


def _local_model(case: Case) -> TableModel:
    return TableModel(_local_text(case), seed=case.seed, order=6, context_length=200, max_width=8)


def _local_decoder(outcome: Outcome, config: SpeculativeConfig) -> SpeculativeDecoder:
    case, model = outcome.case, _local_model(outcome.case)
    draft, drafting = make_local_draft(
        case.draft,  # type: ignore[arg-type] - it is local
        _local_text(case),
        seed=case.seed,
        rate=case.rate,
        odd=case.broken,
        at=case.at,
    )
    outcome.models = [model] if drafting is None else [model, drafting]
    return outcome.make(target=LocalProvider(model), draft=draft, config=config)


async def _local_answer(case: Case, shown: Shown, config: SpeculativeConfig) -> Answer:
    """Greedily by the logits alone; sampled, what the decoder gives without a draft: one seed, one text."""
    request = shown.request
    if request.sampling.temperature and request.sampling.seed is None:
        return Answer("", 0, is_ended=False, by_stop=False, ends=(b"",), seconds=0.0)
    caps = [n for n in (request.max_tokens, config.max_total_tokens) if n is not None]
    alone = ChatRequest.create(
        request.messages[0].text,
        max_tokens=min(caps, default=None),
        stop=request.stop,
        temperature=request.sampling.temperature,
        top_k=request.sampling.top_k,
        seed=request.sampling.seed,
    )
    if not request.sampling.temperature:
        return _greedy_alone(case, alone)
    plain = await SpeculativeDecoder(target=LocalProvider(_local_model(case)), draft=None).decode(alone)
    num_tokens = plain.usage.output_tokens if plain.usage is not None else 0
    by_stop = plain.stopped_by == "stop_string"
    return Answer(plain.content, num_tokens, plain.finish_reason == "stop", by_stop, (plain.content.encode(),), 0.0)
