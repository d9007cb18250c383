"""Encodes answers for all endpoints: server-sent events, token counts and headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

from llm_spec.contract.events import FinishReason, StreamEvent, ToolCallDelta
from llm_spec.decoder.result import SpeculativeResult
from llm_spec.kit.json import dumps_ascii
from llm_spec.server.apis.fields import Json
from llm_spec.server.problems import HttpProblem, get_public_name, redact_server_details

__all__ = [
    "AnswerStreamEncoder",
    "ToolCallSequencer",
    "build_result_headers",
    "build_tier_fields",
    "describe_result_for_client",
    "format_sse",
    "get_client_token_counts",
    "get_finish_reason",
]


class AnswerStreamEncoder(Protocol):
    """Encodes one streamed answer for one API; each call returns the bytes to send."""

    @property
    def keep_alive_bytes(self) -> bytes:
        """Bytes that clients ignore."""
        ...

    def encode_start(self) -> bytes: ...

    def encode_event(self, event: StreamEvent) -> bytes: ...

    def encode_end(self, result: SpeculativeResult) -> bytes: ...

    def encode_error(self, problem: HttpProblem) -> bytes:
        """Encode an error that ends the answer; nothing follows."""
        ...


SSE_COMMENT: Final = b": keep-alive\n\n"
SSE_DONE: Final = b"data: [DONE]\n\n"


def format_sse(value: object, event: str | None = None) -> bytes:
    """Format a server-sent event."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + dumps_ascii(value) + b"\n\n"


def get_client_token_counts(result: SpeculativeResult) -> Mapping[str, int]:
    """Return the token counts that clients get, or nothing if the target reported no usage.

    Keys: input, output, cached, cache_write, reasoning, accepted, rejected. The counts are those of
    the prompt and the answer, as if the target had been called once: clients compute tokens a
    second from them, and compare them with `max_tokens`. Budgets and metrics also count what else
    was read and written.
    """
    usage, stats = result.usage, result.stats
    if usage is None:
        return {}
    num_input = usage.input_tokens - usage.extra_input_tokens
    num_cached = max(0, min(num_input, usage.cached_input_tokens - usage.extra_input_tokens))
    # if the request had no prediction, these counts are those of the draft
    accepted = usage.accepted_prediction_tokens or stats.num_accepted_draft_tokens
    rejected = usage.rejected_prediction_tokens or stats.num_wasted_draft_tokens
    return {
        "input": num_input,
        "output": usage.answer_tokens,
        "cached": num_cached,
        "cache_write": min(usage.cache_write_input_tokens, num_input - num_cached),
        "reasoning": usage.reasoning_tokens,
        "accepted": accepted,
        "rejected": rejected,
    }


class ToolCallSequencer:
    """Orders the pieces of calls that a target writes at the same time, one call after another.

    The first call's pieces pass. Later calls are held back until `flush`, since nothing marks the
    end of a call.
    """

    def __init__(self) -> None:
        self._first_index: int | None = None
        self._held_deltas: dict[int, ToolCallDelta] = {}

    def push(self, delta: ToolCallDelta) -> list[ToolCallDelta]:
        """Add a piece; return the pieces that may be sent now."""
        if self._first_index is None:
            self._first_index = delta.index
        if delta.index == self._first_index:
            return [delta]
        held = self._held_deltas.get(delta.index)
        if held is not None:
            delta = replace(
                held,
                id=held.id or delta.id,
                name=held.name or delta.name,
                arguments=held.arguments + delta.arguments,
            )
        self._held_deltas[delta.index] = delta
        return []

    def flush(self) -> list[ToolCallDelta]:
        """Return the calls that are held back, each as a whole."""
        held = [delta for _, delta in sorted(self._held_deltas.items())]
        self._held_deltas.clear()
        return held


def get_finish_reason(result: SpeculativeResult) -> FinishReason:
    """Return why an answer ended.

    Some servers say `stop` after a tool call too; clients would overlook the call.
    """
    return "tool_calls" if result.tool_calls and result.finish_reason == "stop" else result.finish_reason


def build_tier_fields(result: SpeculativeResult) -> Json:
    """Return the service tier in OpenAI's words, or nothing if the target does not tell it."""
    tier = result.service_tier
    return {} if tier is None else {"service_tier": "default" if tier == "standard" else tier}


def describe_result_for_client(result: SpeculativeResult) -> Json:
    """Return an answer's figures for a client, without the addresses of upstream servers."""
    fields = result.to_report()
    for name in ("target", "draft"):
        fields[name] = fields[name] and get_public_name(fields[name])
    for name in ("fallbacks", "retries"):
        fields[name] = [redact_server_details(reason) for reason in fields[name]]
    for name in ("plain_detail", "plain_text"):
        fields[name] = fields[name] and redact_server_details(fields[name])
    return fields


def build_result_headers(result: SpeculativeResult, overhead_s: float) -> dict[str, str]:
    """Build the headers with the figures of a whole answer."""
    rate, speedup = result.stats.draft_acceptance_rate, result.speedup
    headers: dict[str, str] = {
        "x-llm-spec-strategy": result.strategy,
        "x-llm-spec-guarantee": result.guarantee,
        "x-llm-spec-overhead-ms": f"{overhead_s * 1e3:.3f}",
    }
    if rate is not None:
        headers["x-llm-spec-acceptance-rate"] = f"{rate:.4f}"
    if speedup is not None:
        headers["x-llm-spec-speedup"] = f"{speedup:.3f}"
    if result.speedup_range is not None:
        headers["x-llm-spec-speedup-range"] = "-".join(f"{bound:.3f}" for bound in result.speedup_range)
    if result.plain_reason is not None:
        headers["x-llm-spec-plain-reason"] = result.plain_reason
    return headers
