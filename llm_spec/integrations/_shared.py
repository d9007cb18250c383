"""What every adapter needs: a provider given or named, a stream that any task may close, and a result's figures."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from types import TracebackType
from typing import Any, Self

from llm_spec.chat import ChatRequest, Finish, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.errors import TargetError
from llm_spec.provider import DraftProvider, LlmProvider
from llm_spec.result import SpeculativeFinish

__all__ = ["OwnedStream", "Source", "StreamClosedError", "figures"]


class Source:
    """A provider as it was given, or a decoder made here of a target, a draft and a config.

    What was made here `aclose` closes; asked for again, it is made anew. What was given is the giver's to close.
    """

    def __init__(
        self,
        target: LlmProvider | str,
        draft: DraftProvider | LlmProvider | str | None = None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        self._target, self._draft, self._config = target, draft, config
        self._made: SpeculativeDecoder | None = None
        _ = self.provider  # what is wrong with a string is told at once

    @property
    def provider(self) -> LlmProvider:
        """The provider to ask."""
        if not isinstance(self._target, str) and self._draft is None and self._config is None:
            return self._target
        if self._made is None:
            self._made = SpeculativeDecoder(self._draft, self._target, self._config)
        return self._made

    async def aclose(self) -> None:
        """Close what was made here."""
        made, self._made = self._made, None
        if made is not None:
            await made.aclose()


class StreamClosedError(Exception):
    """The stream was closed while, or before, its next event was waited for."""


class OwnedStream:
    """One answer of a provider, read by a task of its own, at most one event ahead.

    Frameworks may open a stream in one task, read it in another and close it in a third, also while an event is being
    waited for; a provider's stream belongs to one task. Whoever enters it leaves it: then nothing behind it goes on.
    """

    def __init__(self, provider: LlmProvider, request: ChatRequest) -> None:
        self._provider = provider
        self._request = request
        self._events: deque[StreamEvent] = deque()
        self._arrived, self._taken = asyncio.Event(), asyncio.Event()
        self._is_closed = self._has_finished = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._read())
        self._task.add_done_callback(lambda _: self._arrived.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def begun(self) -> None:
        """Wait for the first event; raises what the provider raises before it."""
        task = self._task
        while task is not None and not self._events:
            if task.done():
                if not self._is_closed:
                    task.result()
                return
            self._arrived.clear()
            await self._arrived.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        """The next event; raises what the provider raises, StreamClosedError once the stream is closed.

        A stream that ends without a Finish raises TargetError: half an answer must not pass for a whole one.
        """
        await self.begun()
        if self._is_closed:
            raise StreamClosedError
        if not self._events:
            if not self._has_finished:
                raise TargetError(f"{self._provider.name} ended its stream without a finish reason")
            raise StopAsyncIteration
        self._taken.set()
        event = self._events.popleft()
        self._has_finished |= isinstance(event, Finish)
        return event

    async def aclose(self) -> None:
        """End the work behind the stream and wait until it has ended. Safe from any task, and twice."""
        self._is_closed = True
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # it has been raised, or nobody is left to whom it matters

    async def _read(self) -> None:
        async with self._provider.stream(self._request) as events:
            async for event in events:
                self._events.append(event)
                self._taken.clear()
                self._arrived.set()
                await self._taken.wait()


def figures(finish: Finish) -> dict[str, Any]:
    """What a decoder's answer was like, as JSON values in this library's names; a plain provider's has no figures."""
    result = finish.result if isinstance(finish, SpeculativeFinish) else None
    if result is None:
        return {"finish_reason": finish.finish_reason, "stopped_by": finish.stopped_by}
    stats = result.stats
    return {
        "finish_reason": result.finish_reason,
        "stopped_by": result.stopped_by,
        "strategy": result.strategy,
        "guarantee": result.guarantee,
        "same_text": result.same_text,
        "target": result.target,
        "draft": result.draft,
        "seed": result.seed,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_usage": None if result.draft_usage is None else dataclasses.asdict(result.draft_usage),
        "cost": result.cost.total,
        "speedup": result.speedup,
        "speedup_basis": result.speedup_basis,
        "total_s": result.timings.total_s,
        "fallbacks": list(result.fallbacks),
        "retries": list(result.retries),
    }
