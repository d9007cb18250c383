"""Requests of `tests/promises`, drawn and run as there: every strategy but on no wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from promises.draw import Case, draw_case
from promises.run import Outcome, Shown, run_case

from behaviour.fixed import SteadyLoop, WorkClock, fixed_bytes
from behaviour.plain import data_of, decoder_stats_of, error_of, event_of, request_of, result_of, usage_of, words_of
from llm_spec import SpeculativeDecoder

__all__ = ["STRATEGIES", "draw_seeds", "record_virtual"]

STRATEGIES: Final = ("tokens", "race", "probe", "score", "predict", "judge", "regenerate", "plain", "auto")
_MOST_DRAWN: Final = 100_000
_TARGET_S: Final = 0.02  # of a forward pass
_DRAFT_S: Final = 0.003


def draw_seeds(num_requests: int) -> dict[str, list[int]]:
    """By strategy, the seeds of cases that have so many requests together."""
    seeds: dict[str, list[int]] = {strategy: [] for strategy in STRATEGIES}
    left = dict.fromkeys(STRATEGIES, num_requests)
    for seed in range(_MOST_DRAWN):
        case = draw_case(seed)
        if left[case.strategy] > 0:
            seeds[case.strategy].append(seed)
            left[case.strategy] -= len(case.asks)
        if max(left.values()) <= 0:
            break
    return seeds


def record_virtual(seed: int) -> dict[str, Any]:
    """Everything that came of a case."""
    case, calls, clock = draw_case(seed), list[Any](), WorkClock()
    with fixed_bytes(f"case {seed}"):
        if not case.is_local:
            return _outcome(run_case(case, partial(_make, calls)), calls)
        with clock.replacing():
            return _outcome(run_case(case, partial(_make_local, clock), SteadyLoop), calls)


# ------------------------------------------------------------------------------------------ the calls of a target


def _make(calls: list[Any], draft: Any, target: Any, config: Any) -> SpeculativeDecoder:
    for name, (word, read) in _STREAMS.items():
        setattr(target, name, _noting_stream(calls, word, read, getattr(target, name)))
    for name, (word, read) in _CALLS.items():
        setattr(target, name, _noting_call(calls, word, read, getattr(target, name)))
    return SpeculativeDecoder(target=target, draft=draft, config=config)


def _make_local(clock: WorkClock, draft: Any, target: Any, config: Any) -> SpeculativeDecoder:
    for provider, forward_s in ((target, _TARGET_S), (draft, _DRAFT_S)):
        model = getattr(provider, "model", None)
        if model is not None:
            model.forward_s, model.sleep = forward_s, clock.advance
    return SpeculativeDecoder(target=target, draft=draft, config=config)


Read = Callable[..., Any]
# By method of a provider: the recorder's own name of the call, and what is read of its arguments.
_STREAMS: Final[Mapping[str, tuple[str, Read]]] = {
    "stream": ("chat", request_of),
    "stream_chat": ("chat with ids", request_of),
    "stream_after": ("after ids", lambda ids, request: [list(ids), request_of(request)]),
}
_CALLS: Final[Mapping[str, tuple[str, Read]]] = {
    "encode": ("encode", lambda text: text),
    "decode": ("decode", list),
    "encode_chat": ("encode chat", request_of),
    "sample_next": ("sample", lambda prefixes, _: [list(ids) for ids in prefixes]),
    "score": ("score", lambda ids, *, num_rows, top: [list(ids), num_rows, top]),
    "discover": ("discover", str),
}


def _noting_stream(calls: list[Any], word: str, read: Read, stream: Any) -> Any:
    @asynccontextmanager
    async def noted(*args: Any) -> Any:
        calls.append([data_of(asyncio.get_running_loop().time()), word, read(*args)])
        async with stream(*args) as events:
            yield events

    return noted


def _noting_call(calls: list[Any], word: str, read: Read, call: Any) -> Any:
    async def noted(*args: Any, **options: Any) -> Any:
        calls.append([data_of(asyncio.get_running_loop().time()), word, read(*args, **options)])
        return await call(*args, **options)

    return noted


# ------------------------------------------------------------------------------------------ plain data


def _outcome(outcome: Outcome, calls: list[Any]) -> dict[str, Any]:
    case = outcome.case
    return {
        "drawn": _drawn(case),
        "num drawn": len(case.asks),
        "requests": [_shown(shown) for shown in outcome.shown],
        "calls": calls,
        "target": _ledger(outcome.ledger),
        "drafting targets": [_ledger(ledger) for ledger in outcome.others],
        "draft": {
            "calls": sorted(outcome.draft.num_calls.items()),
            "words": sorted(outcome.draft.num_words.items()),
            "requested": sorted(outcome.draft.most_requested.items()),
            "read": sorted(outcome.draft.most_read.items()),
        },
        "models": [{"widths": model.widths, "closed": model.num_closed} for model in outcome.models],
        "budget": None if outcome.budget is None else data_of([outcome.budget.spent_tokens, outcome.budget.spent_cost]),
        "stats": decoder_stats_of(outcome.stats),
        "places lost": outcome.places_lost,
        "tasks left": len(outcome.tasks_left),
        "complaints": [words_of(complaint) for complaint in outcome.complaints],
        "crash": words_of(outcome.crash or None),
    }


def _drawn(case: Case) -> str:
    """What the case is made of: where this differs, the drawing has changed and not what came of it."""
    return str(case)


def _shown(shown: Shown) -> dict[str, Any]:
    return {
        "asked": request_of(shown.request),
        "events": [[data_of(at_s), *event_of(event)] for at_s, event in shown.events],
        "result": result_of(shown.result) if shown.ask.whole else None,
        "error": error_of(shown.error),
        "began s": data_of(shown.started_s),
        "ended s": data_of(shown.ended_s),
        "has left": shown.has_left,
        "was cancelled": shown.is_cancelled,
        "hung": shown.has_hung,
        "open afterwards": list(shown.open_after),
        "spent": shown.spent,
    }


def _ledger(ledger: Any) -> dict[str, Any]:
    return {
        "calls": sorted([*key, num] for key, num in ledger.num_calls.items()),
        "most open": [sorted(ledger.most_open.items()), ledger.most_requests],
        "generated": sorted(ledger.generated.items()),
        "faults": sorted(ledger.faults.items()),
        "bills": [
            [tag, [[bill.num_input, bill.num_output, usage_of(bill.counted), bill.is_void] for bill in bills]]
            for tag, bills in sorted(ledger.bills.items())
        ],
        "breaches": list(ledger.breaches),
    }
