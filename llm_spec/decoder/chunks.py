"""A target's own chunks, within a decoder's deadline, timeouts and circuit breaker.

They contain what events cannot express.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

from llm_spec.contract.errors import TransientError
from llm_spec.contract.events import TextDelta, Usage
from llm_spec.contract.provider import Capabilities, ChunkStreaming
from llm_spec.contract.request import ChatRequest
from llm_spec.decoder.breaker import CircuitBreaker
from llm_spec.decoder.budget import CallReservation
from llm_spec.decoder.chunk_timeouts import ChunkTimeouts
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.metering import is_call_unread
from llm_spec.kit.answer_parts import parse_usage
from llm_spec.kit.open_calls import OpenCall
from llm_spec.measure.clock import Deadline
from llm_spec.measure.tokens import MaxTokensCutter, count_piece_tokens, estimate_request_tokens

__all__ = ["CountedChunkStream"]


class CountedChunkStream:
    """Counts one answer's chunks; `usage` is the server's own, or the number of pieces.

    The chunks end when a choice has its tokens, or when no more of a budget can be reserved.
    """

    def __init__(
        self,
        name: str,
        target: ChunkStreaming,
        request: ChatRequest,
        config: SpeculativeConfig,
        breaker: CircuitBreaker,
        *,
        capabilities: Capabilities,
        reservation: CallReservation | None = None,
    ) -> None:
        self._name = name
        self._target = target
        self._request = request
        self._timeouts = ChunkTimeouts(name, config.timeouts, capabilities)
        self._limit = config.limit
        self._breaker = breaker
        self._deadline = Deadline(config.deadline_s)
        self._reported_usage: Usage | None = None
        self._num_pieces = 0
        self._is_unread = True  # nothing was sent, or it was refused
        self._is_complete = False
        self._reservation = reservation
        # the choices that have begun and not ended
        self._open: dict[int, MaxTokensCutter | None] = {}

    @property
    def usage(self) -> Usage:
        if self._is_unread:
            return Usage()
        return self._reported_usage or Usage(
            input_tokens=estimate_request_tokens(self._request), output_tokens=self._num_pieces
        )

    async def iterate_chunks(self, call: OpenCall) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield the chunks; raises TransientError at the deadline, and what the target raises.

        There are no retries. The chunks end with `call`, to which this generator is attached.
        """
        iterating = self._deadline.end_stream_at_deadline(self._iterate_chunks_within_limits())
        with call:
            async with aclosing(iterating) as chunks:
                async for chunk in chunks:
                    is_over = self._count_chunk(chunk)
                    try:
                        yield chunk
                    except GeneratorExit:
                        call.reader = None
                        raise
                    call.reader = call.resume()
                    if is_over:
                        self._is_complete = True
                        yield self._make_cutoff_chunk(chunk)
                        break
        if self._deadline.is_reached and not self._is_complete:
            raise TransientError(f"{self._name} did not finish by the deadline; raise deadline_s")

    async def _iterate_chunks_within_limits(self) -> AsyncGenerator[Mapping[str, Any]]:
        async with AsyncExitStack() as stack:
            if self._limit is not None:
                await stack.enter_async_context(self._limit.hold_place())
            stack.enter_context(self._breaker.guard_attempt())
            opened, chunk = await self._timeouts.wait_for_first_chunk(self._open_to_first_chunk(stack))
            while chunk is not None:
                yield chunk
                chunk = await self._timeouts.wait_at_most(anext(opened, None), self._timeouts.between_chunks_s)
            self._is_complete = True
            self._breaker.record_outcome(None)

    async def _open_to_first_chunk(
        self, stack: AsyncExitStack
    ) -> tuple[AsyncIterator[Mapping[str, Any]], Mapping[str, Any] | None]:
        self._is_unread = False
        try:
            opened = await stack.enter_async_context(self._target.stream_chunks(self._request))
            return opened, await anext(opened, None)
        except Exception as error:
            self._is_unread = is_call_unread(error)
            raise

    def _count_chunk(self, chunk: Mapping[str, Any]) -> bool:
        """Count a chunk; return True if it is the last one."""
        if chunk.get("usage"):
            self._reported_usage = parse_usage(chunk)
        choices: list[Mapping[str, Any]] = chunk.get("choices") or []
        self._num_pieces += sum(map(_count_choice_pieces, choices))
        has_enough = [self._choice_has_reached_max_tokens(choice) for choice in choices]
        return any(has_enough) or not (
            self._reservation is None or self._reservation.reserve_output_up_to(self._num_pieces)
        )

    def _choice_has_reached_max_tokens(self, choice: Mapping[str, Any]) -> bool:
        """Return True if a choice has more than it may."""
        index, limit = choice.get("index", 0), self._request.max_tokens
        if choice.get("finish_reason"):
            self._open.pop(index, None)
            return False
        cap = self._open.setdefault(index, None if limit is None else MaxTokensCutter(limit))
        delta: Mapping[str, Any] = choice.get("delta") or {}
        text = delta.get("content") or choice.get("text")
        if cap is None or not isinstance(text, str):
            return False
        given = TextDelta(text)
        return cap.cut_delta(given) is not given

    def _make_cutoff_chunk(self, chunk: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make a chunk that ends all open choices."""
        rest: dict[str, Any] = {"text": ""} if self._request.raw else {"delta": {}}
        choices = [{"index": index, **rest, "finish_reason": "length"} for index in self._open]
        return {
            **{name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk},
            "choices": choices,
        }


def _count_choice_pieces(choice: Mapping[str, Any]) -> int:
    """Count the pieces of text in a choice, at least one if it contains anything."""
    delta: Mapping[str, Any] = choice.get("delta") or {}
    texts = [choice.get("text"), delta.get("content"), delta.get("reasoning_content")]
    num_pieces = sum(count_piece_tokens(TextDelta(text)) for text in texts if isinstance(text, str))
    return num_pieces or bool(delta)
