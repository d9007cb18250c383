"""A target's own chunks, for what events cannot say, within a decoder's deadline, timeouts and circuit breaker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from llm_spec._clock import now
from llm_spec.chat import ChatRequest, Usage
from llm_spec.config import SpeculativeConfig
from llm_spec.drafting.pieces import num_prompt_pieces
from llm_spec.errors import TransientError
from llm_spec.openai_chat import read_usage
from llm_spec.provider import ChunkStreaming
from llm_spec.resilience import CircuitBreaker, within

__all__ = ["CountedChunks"]

T = TypeVar("T")


class CountedChunks:
    """One answer's chunks, counted as they pass: `usage` is the server's own, or as many pieces as came."""

    def __init__(
        self,
        name: str,
        target: ChunkStreaming,
        request: ChatRequest,
        config: SpeculativeConfig,
        breaker: CircuitBreaker,
    ) -> None:
        self._name = name
        self._target = target
        self._request = request
        self._timeouts = config.timeouts
        self._breaker = breaker
        self._deadline = None if config.deadline_s is None else now() + config.deadline_s
        self._told: Usage | None = None
        self._num_pieces = 0

    @property
    def usage(self) -> Usage:
        """What the answer took so far."""
        return self._told or Usage(input_tokens=num_prompt_pieces(self._request), output_tokens=self._num_pieces)

    async def chunks(self) -> AsyncGenerator[Mapping[str, Any]]:
        """The chunks; raises TransientError at the deadline, and what the target raises. Nothing is asked again."""
        async with AsyncExitStack() as stack:
            with self._breaker.attempt():
                opening = stack.enter_async_context(self._target.stream_chunks(self._request))
                opened = await self._within(opening, self._timeouts.first_chunk_s)
                chunk = await self._within(anext(opened, None), self._timeouts.first_chunk_s)
            try:
                while chunk is not None:
                    self._count(chunk)
                    yield chunk
                    chunk = await self._within(anext(opened, None), self._timeouts.between_chunks_s)
            except TransientError as error:
                self._breaker.see(error)
                raise
            self._breaker.see(None)

    def _count(self, chunk: Mapping[str, Any]) -> None:
        self._told = read_usage(chunk) or self._told
        choices: list[Mapping[str, Any]] = chunk.get("choices") or []
        self._num_pieces += sum(1 for choice in choices if choice.get("text") or choice.get("delta"))

    async def _within(self, awaitable: Awaitable[T], silence_s: float | None) -> T:
        left_s = None if self._deadline is None else self._deadline - now()
        seconds = min((s for s in (left_s, silence_s) if s is not None), default=None)
        return await within(awaitable, seconds, f"{self._name} was silent for too long, or not done by the deadline")
