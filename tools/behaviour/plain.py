"""Plain data of the library's objects, under the recorder's own keys: the one place that reads their attributes.

After a renaming only this module changes (and the calls of the public API in its neighbours): each function reads one
kind of object. Text for people stands under the key "words" alone, so that it can be left out of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from llm_spec.contract import errors, events, messages, request
from llm_spec.decoder import pricing, result

__all__ = ["data_of", "decoder_stats_of", "error_of", "event_of", "request_of", "result_of", "usage_of", "words_of"]

_DIGITS: Final = 9  # of seconds and of money: sums may be added up in another order


def data_of(value: Any) -> Any:
    """JSON values of plain Python values; floats are rounded, what JSON has no word for is a text."""
    if isinstance(value, float):
        return round(value, _DIGITS) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): data_of(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(data_of, value), key=repr)
    if isinstance(value, list | tuple):
        return [data_of(item) for item in value]
    return value if isinstance(value, bool | int | str | None) else f"a {type(value).__name__}"


def words_of(text: Any) -> Any:
    """Text for people."""
    return None if text is None else {"words": str(text)}


def usage_of(usage: Any) -> Any:
    if not isinstance(usage, events.Usage):
        return data_of(usage)
    read = {
        "in": usage.input_tokens,
        "out": usage.output_tokens,
        "cached in": usage.cached_input_tokens,
        "cache written": usage.cache_write_input_tokens,
        "reasoning": usage.reasoning_tokens,
        "predicted": usage.accepted_prediction_tokens,
        "mispredicted": usage.rejected_prediction_tokens,
        "extra in": usage.extra_input_tokens,
        "cancelled out": usage.cancelled_output_tokens,
        "approved out": usage.approved_output_tokens,
        "free out": usage.free_output_tokens,
    }
    return {key: data_of(number) for key, number in read.items() if number != 0} | {"answer": usage.answer_tokens}


def round_of(done: events.Round) -> Any:
    return data_of(
        {
            "number": done.index,
            "drafted": done.num_draft_tokens,
            "accepted": done.num_accepted_tokens,
            "emitted": done.num_emitted_tokens,
            "next": done.next_token_id,
            "drafting s": done.draft_s,
            "verifying s": done.verify_s,
            "rejected at": done.rejection_index,
        }
    )


def stats_of(stats: result.SpeculativeStats) -> Any:
    return data_of(
        {
            "rounds": stats.num_rounds,
            "speculative": stats.num_spec_steps,
            "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_draft_tokens,
            "emitted": stats.num_emitted_tokens,
            "fallbacks": stats.num_fallbacks,
            "histogram": stats.acceptance_histogram,
            "drafting s": stats.draft_s,
            "verifying s": stats.verify_s,
            "single steps": stats.num_plain_steps,
            "single s": stats.plain_s,
            "wasted": stats.num_wasted_draft_tokens,
            "acceptance": stats.draft_acceptance_rate,
            "mean accepted": stats.mean_acceptance_length,
            "mean lookahead": stats.mean_lookahead,
        }
    )


def cost_of(cost: pricing.Cost) -> Any:
    return data_of(
        {
            "target": cost.target,
            "draft": cost.draft,
            "alone": cost.plain,
            "total": cost.total,
            "wasted": cost.wasted,
            "saving": cost.saving,
        }
    )


def tool_call_of(call: messages.ToolCall) -> Any:
    return [call.id, call.name, call.arguments]


def result_of(given: result.SpeculativeResult | None) -> Any:
    if given is None:
        return None
    return {
        "text": given.content,
        "finish": given.finish_reason,
        "stopped by": given.stopped_by,
        "strategy": given.strategy,
        "guarantee": given.guarantee,
        "same text": given.same_text,
        "target": given.target,
        "draft": given.draft,
        "seed": given.seed,
        "stats": stats_of(given.stats),
        "rounds": [round_of(done) for done in given.rounds],
        "times": data_of(
            [given.timings.total_s, given.timings.first_text_s, given.timings.draft_s, given.timings.verify_s]
        ),
        "other s": data_of(given.timings.other_s),
        "target usage": usage_of(given.usage),
        "draft usage": usage_of(given.draft_usage),
        "fallbacks": [words_of(reason) for reason in given.fallbacks],
        "retries": [words_of(reason) for reason in given.retries],
        "tool calls": [tool_call_of(call) for call in given.tool_calls],
        "reasoning": given.reasoning,
        "reasoning events": [event_of(event) for event in given.reasoning_events],
        "approved": data_of(given.approved_spans),
        "cost": cost_of(given.cost),
        "alone s": data_of(given.plain_s),
        "speedup": data_of(given.speedup),
        "speedup basis": words_of(given.speedup_basis),
        "why not": given.plain_reason,
        "why not, more": words_of(given.plain_detail),
        "lookahead": [[key, data_of(value)] for key, value in given.lookahead.items()],
        "tokens": data_of(given.num_tokens),
    }


def decoder_stats_of(stats: Any) -> Any:
    return data_of(
        {
            "requests": stats.num_requests,
            "strategies": sorted(stats.strategies.items()),
            "why not": sorted(stats.plain_reasons.items()),
            "retries": stats.num_retries,
            "total s": stats.total_s,
            "compared s": stats.compared_s,
            "alone s": stats.plain_s,
            "cost": stats.cost,
            "saving": stats.cost_saving,
            "speedup": stats.speedup,
        }
    ) | {
        "stats": stats_of(stats.rounds),
        "target usage": usage_of(stats.usage),
        "draft usage": usage_of(stats.draft_usage),
    }


def sampling_of(sampling: request.Sampling) -> Any:
    read = {
        "temperature": sampling.temperature,
        "top p": sampling.top_p,
        "top k": sampling.top_k,
        "min p": sampling.min_p,
        "repetition": sampling.repetition_penalty,
        "presence": sampling.presence_penalty,
        "frequency": sampling.frequency_penalty,
        "bias": dict(sampling.logit_bias) or None,
        "seed": sampling.seed,
    }
    return data_of({key: value for key, value in read.items() if value is not None})


def request_of(request: request.ChatRequest) -> Any:
    """What a call of a provider asks for; what is not set is left out."""
    read = {
        "messages": [[message.role, message.text] for message in request.messages],
        "sampling": sampling_of(request.sampling),
        "max": request.max_tokens,
        "stop": request.stop,
        "tools": request.tools,
        "tool choice": request.tool_choice,
        "format": request.response_format,
        "prefix": request.prefix,
        "prediction": request.prediction,
        "raw": request.raw,
        "extra": request.extra,
    }
    return {key: data_of(value) for key, value in read.items() if value not in (None, (), "", False, {})}


# ------------------------------------------------------------------------------------------ events


def _text(event: events.TextDelta) -> Any:
    return [event.text, event.origin, event.token_ids]


def _tool_call(event: events.ToolCallDelta) -> Any:
    return [event.index, event.id, event.name, event.arguments]


def _started(event: events.AnswerStarted) -> Any:
    return [event.strategy, event.guarantee, event.target, event.draft]


def _stream(event: events.TargetStreamReport) -> Any:
    return [event.index, event.begins_at, event.num_tokens, event.started_s, event.ended_s, event.is_used]


def _times(event: events.LocalTimings) -> Any:
    return [event.prompt_s, event.open_draft_s, event.between_s, list(event.lookahead.items())]


def _finish(event: events.Finish) -> Any:
    return [event.finish_reason, usage_of(event.usage), event.stopped_by, usage_of(event.draft_usage)]


# By class, the recorder's own name of the kind and what is read of it.
_EVENTS: Final[Mapping[type, tuple[str, Callable[[Any], Any]]]] = {
    events.TextDelta: ("text", _text),
    events.ReasoningDelta: ("reasoning", lambda event: event.text),
    messages.ReasoningDetail: ("reasoning detail", lambda event: [event.api, event.value]),
    events.ToolCallDelta: ("tool call", _tool_call),
    events.AnswerStarted: ("started", _started),
    events.Round: ("round", round_of),
    events.TargetStreamReport: ("target stream", _stream),
    events.LocalTimings: ("local times", _times),
    events.Fallback: ("fallback", lambda event: [event.cause, words_of(event.reason)]),
    events.Retry: ("retry", lambda event: [event.wait_s, event.is_continued, words_of(event.reason)]),
    events.GuaranteeWeakened: ("weakened", lambda event: [event.guarantee, words_of(event.reason)]),
    events.Finish: ("finish", _finish),
    result.SpeculativeFinish: ("finish with result", lambda event: [*_finish(event), result_of(event.result)]),
}


def event_of(event: Any) -> Any:
    """The kind of an event and what it says."""
    name, read = _EVENTS.get(type(event), (f"a {type(event).__name__}", data_of))
    return [name, data_of(read(event))]


# ------------------------------------------------------------------------------------------ errors

# By class, subclasses first, the recorder's own name.
_ERRORS: Final[Mapping[type, str]] = {
    errors.UnknownProviderError: "unknown provider",
    errors.MissingExtraError: "missing extra",
    errors.ConfigError: "config",
    errors.InvalidRequestError: "invalid request",
    errors.UnsupportedError: "unsupported",
    errors.ModelLoadError: "model load",
    errors.TransientError: "transient",
    errors.CircuitOpenError: "circuit open",
    errors.BudgetError: "budget",
    errors.ModelOutputError: "model output",
    errors.TargetError: "target",
    errors.DraftError: "draft",
    errors.LlmSpecError: "other",
}


def error_of(error: BaseException | None) -> Any:
    """The kind of an error and what it carries, its message apart."""
    if error is None:
        return None
    kind = next((name for cls, name in _ERRORS.items() if isinstance(error, cls)), f"a {type(error).__name__}")
    carried = {
        "partial text": getattr(error, "partial_text", None),
        "status": getattr(error, "status", None),
        "retry after s": getattr(error, "retry_after_s", None),
        "code": getattr(error, "code", None),
        "param": getattr(error, "param", None),
    }
    return {"kind": kind, "words": str(error)} | {k: data_of(v) for k, v in carried.items() if v is not None}
