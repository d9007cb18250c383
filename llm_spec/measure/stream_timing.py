"""When the pieces of the target's own answer arrive, whatever their consumer does meanwhile.

They are read in a task of its own, so neither a slow consumer nor the wait between two attempts counts as the server's
time. Where a consumer falls far behind, reading waits for it, and only what came before that is timed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Final

from llm_spec.contract.events import Finish, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.contract.request import ChatRequest
from llm_spec.measure.baseline import count_prompt_characters
from llm_spec.measure.clock import get_loop_clock
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.tokens import count_answer_tokens_in_event, split_into_pieces

__all__ = ["record_plain_answer_times"]

_MAX_QUEUED_EVENTS: Final = 1024  # events of an answer that may wait for a slow consumer


class _AnswerPieceTimes:
    """When the pieces of one answer came."""

    def __init__(self) -> None:
        self._clock = get_loop_clock()
        self._opened_s = self._clock()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_pieces = 0
        self._num_timed = self._num_in_first_piece = 0  # of them; those that came first, at once
        self._is_timing = True
        self._has_reasoning = False
        self._texts: list[str] = []
        self._num_other_tokens = 0  # pieces of what is not text

    def add_event_time(self, event: StreamEvent) -> None:
        if not isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
            return
        num_new_tokens = count_answer_tokens_in_event(event)
        if isinstance(event, TextDelta):
            self._texts.append(event.text)
        else:
            self._num_other_tokens += num_new_tokens
        self._num_pieces += num_new_tokens
        self._has_reasoning |= isinstance(event, ReasoningDelta)
        if not self._is_timing:
            return
        self._last_s = self._clock()
        self._num_timed += num_new_tokens
        if self._first_s is None:
            self._first_s, self._num_in_first_piece = self._last_s, num_new_tokens

    def stop_timing(self) -> None:
        """What comes from now on comes when its consumer lets it."""
        self._is_timing = False

    def add_answer_times_to(self, pair_stats: PairStats, request: ChatRequest, finish: Finish) -> None:
        """The answer is whole; its tokens are those that the server counted, else the pieces of its whole text.

        Where only its beginning was timed, so much of them.
        """
        if self._first_s is None or not self._num_pieces:
            return
        num_text_pieces, usage = len(split_into_pieces("".join(self._texts))), finish.usage
        num_tokens = num_text_pieces + self._num_other_tokens
        pair_stats.baseline.is_counted = usage is not None
        if usage is not None:
            is_hidden = usage.reasoning_tokens and not self._has_reasoning  # written before the first piece
            num_tokens = usage.output_tokens - (usage.reasoning_tokens if is_hidden else 0)
        if not self._num_other_tokens:
            pair_stats.baseline.add_tokens_per_piece(num_text_pieces, num_tokens)
        share = num_tokens / self._num_pieces
        num_first, num_rest = (
            max(1, round(share * self._num_in_first_piece)),
            round(share * (self._num_timed - self._num_in_first_piece)),
        )
        first_s, rest_s = self._first_s - self._opened_s, self._last_s - self._first_s
        if num_rest:  # several that come at once come with the last of them
            first_s = max(0.0, first_s - (num_first - 1) * rest_s / num_rest)
        pair_stats.add_plain_answer(count_prompt_characters(request), 1 + num_rest, first_s, rest_s)


@asynccontextmanager
async def record_plain_answer_times(
    run: Callable[[], AbstractAsyncContextManager[AsyncIterator[StreamEvent]]],
    pair_stats: PairStats,
    request: ChatRequest,
) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    """The events of `run`, an answer of the target alone, read as they come; `pair_stats` learns a whole answer."""
    queue: asyncio.Queue[StreamEvent | BaseException | None] = asyncio.Queue(_MAX_QUEUED_EVENTS)

    async def read_stream() -> None:
        stream_times = _AnswerPieceTimes()
        try:
            async with run() as events:
                async for event in events:
                    stream_times.add_event_time(event)
                    if isinstance(event, Finish):
                        stream_times.add_answer_times_to(pair_stats, request, event)
                    if queue.full():
                        stream_times.stop_timing()
                    await queue.put(event)
            await queue.put(None)
        except (Exception, asyncio.CancelledError) as error:
            if reader.cancelling():
                raise  # nobody reads on
            await queue.put(error)  # raised again where the answer is read

    reader = asyncio.create_task(read_stream())
    try:
        async with aclosing(_iterate_queue_until_none(queue)) as events:
            yield events
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _iterate_queue_until_none(
    queue: asyncio.Queue[StreamEvent | BaseException | None],
) -> AsyncGenerator[StreamEvent]:
    while (event := await queue.get()) is not None:
        if isinstance(event, BaseException):
            raise event
        yield event
