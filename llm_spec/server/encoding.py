"""What the wires of all endpoints share: how an answer's events become bytes, and its figures headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from llm_spec.chat import FinishReason, StreamEvent, ToolCallDelta
from llm_spec.json_text import dumps_ascii
from llm_spec.result import SpeculativeResult
from llm_spec.server.bodies import Json
from llm_spec.server.problems import Problem, shown_name, without_places

__all__ = ["CallOrder", "Encoder", "figures", "finish_reason_of", "header_figures", "sse", "usage_counts"]


class Encoder(Protocol):
    """One streamed answer in the words of one API: each call gives the bytes to send."""

    @property
    def keep_alive(self) -> bytes:
        """Something that clients pass over."""
        ...

    def begin(self) -> bytes: ...

    def event(self, event: StreamEvent) -> bytes: ...

    def end(self, result: SpeculativeResult) -> bytes: ...

    def failure(self, problem: Problem) -> bytes:
        """The answer breaks off; nothing follows."""
        ...


COMMENT: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"


def sse(value: object, event: str | None = None) -> bytes:
    """A server-sent event."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + dumps_ascii(value) + b"\n\n"


def usage_counts(result: SpeculativeResult) -> Mapping[str, int]:
    """Tokens as clients are told: input, output, cached, reasoning, and what became of the drafted ones."""
    usage, stats = result.usage, result.stats
    if usage is None:
        return {}
    # a provider that takes predictions counts them itself, and `predict` makes a round of them
    accepted = usage.accepted_prediction_tokens or stats.num_accepted_draft_tokens
    rejected = usage.rejected_prediction_tokens or stats.num_wasted_draft_tokens
    return {
        "input": usage.input_tokens,
        "output": usage.output_tokens,
        "cached": usage.cached_input_tokens,
        "cache_write": usage.cache_write_input_tokens,
        "reasoning": usage.reasoning_tokens,
        "accepted": accepted,
        "rejected": rejected,
    }


class CallOrder:
    """Puts the pieces of calls that a target writes at the same time one call after another.

    The first call's pieces pass; those of later ones are held back until `rest`, since nobody says when a call ends.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._held: dict[int, ToolCallDelta] = {}

    def push(self, delta: ToolCallDelta) -> list[ToolCallDelta]:
        """The pieces that may be told now."""
        if self._first is None:
            self._first = delta.index
        if delta.index == self._first:
            return [delta]
        held = self._held.get(delta.index)
        if held is not None:
            delta = replace(
                held,
                id=held.id or delta.id,
                name=held.name or delta.name,
                arguments=held.arguments + delta.arguments,
            )
        self._held[delta.index] = delta
        return []

    def rest(self) -> list[ToolCallDelta]:
        """What is held back, each call whole."""
        held = [delta for _, delta in sorted(self._held.items())]
        self._held.clear()
        return held


def finish_reason_of(result: SpeculativeResult) -> FinishReason:
    """Why an answer ended; some servers say `stop` also behind a tool call, at which clients stop looking for it."""
    return "tool_calls" if result.tool_calls and result.finish_reason == "stop" else result.finish_reason


def figures(result: SpeculativeResult) -> Json:
    """The run's figures for a client, who is not told where the servers behind are."""
    told = result.figures()
    for name in ("target", "draft"):
        told[name] = told[name] and shown_name(told[name])
    for name in ("fallbacks", "retries"):
        told[name] = [without_places(reason) for reason in told[name]]
    for name in ("plain_detail", "plain_text"):
        told[name] = told[name] and without_places(told[name])
    return told


def header_figures(result: SpeculativeResult, overhead_s: float) -> dict[str, str]:
    """The figures that go into the headers of an answer given at once."""
    rate, speedup = result.stats.draft_acceptance_rate, result.speedup
    told: dict[str, Any] = {
        "strategy": result.strategy,
        "guarantee": result.guarantee,
        "acceptance-rate": None if rate is None else f"{rate:.4f}",
        "speedup": None if speedup is None else f"{speedup:.3f}",
        "plain-reason": result.plain_reason,
        "overhead-ms": f"{overhead_s * 1e3:.3f}",
    }
    return {f"x-llm-spec-{name}": value for name, value in told.items() if value is not None}
