"""Recording: the events of one request on their way to a SpeculativeResult."""

from __future__ import annotations

import asyncio

from llm_spec.chat import (
    ChatRequest,
    Fallback,
    Finish,
    ReasoningDelta,
    Round,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)
from llm_spec.provider import add_call
from llm_spec.result import SpeculativeResult, SpeculativeStats, Timings
from llm_spec.strategies import Promise

__all__ = ["Recording"]


class Recording:
    """One request's events, added as they come; the event loop's clock starts when it is made."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.finish: Finish | None = None
        self._clock = asyncio.get_running_loop().time
        self._started = self._clock()
        self._first_text_s: float | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCall] = {}
        self._rounds: list[Round] = []
        self._fallbacks: list[str] = []

    @property
    def content(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def add(self, event: StreamEvent) -> None:
        """Take in one event."""
        match event:
            case TextDelta():
                if self._first_text_s is None:
                    self._first_text_s = self._clock() - self._started
                self._texts.append(event.text)
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case ToolCallDelta():
                self._calls[event.index] = add_call(self._calls.get(event.index), event)
            case Round():
                self._rounds.append(event)
            case Fallback():
                self._fallbacks.append(event.reason)
            case Finish():
                self.finish = event

    def result(
        self, finish: Finish, *, strategy: str, promise: Promise, target: str, draft: str | None
    ) -> SpeculativeResult:
        """The whole, now that it has ended."""
        stats = SpeculativeStats.of_rounds(self._rounds, num_fallbacks=len(self._fallbacks))
        return SpeculativeResult(
            content=self.content,
            finish_reason=finish.finish_reason,
            stopped_by=finish.stopped_by,
            strategy=strategy,
            guarantee=promise.guarantee,
            same_text=promise.same_text,
            target=target,
            draft=draft,
            seed=self.request.sampling.seed,
            stats=stats,
            rounds=tuple(self._rounds),
            timings=Timings(
                total_s=self._clock() - self._started,
                first_text_s=self._first_text_s,
                draft_s=stats.draft_s,
                verify_s=stats.verify_s,
            ),
            usage=finish.usage,
            draft_usage=finish.draft_usage,
            fallbacks=tuple(self._fallbacks),
            tool_calls=tuple(call for _, call in sorted(self._calls.items())),
            reasoning="".join(self._reasoning),
        )
