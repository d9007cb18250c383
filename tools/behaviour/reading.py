"""One request of a decoder, read to its end or left, as plain data."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, Final

from behaviour.fixed import SteadyLoop
from behaviour.plain import data_of, error_of, event_of, request_of
from llm_spec import ChatRequest, SpeculativeDecoder

__all__ = ["read_request", "run_steadily"]

_GRACE_S: Final = 0.0005  # real seconds for what was sent to arrive


async def read_request(
    decoder: SpeculativeDecoder, request: ChatRequest, *, leave_after: int | None = None
) -> dict[str, Any]:
    """Events with their times, and how it ended; `leave_after` so many events."""
    clock, events, error = asyncio.get_running_loop().time, list[Any](), None
    try:
        async with decoder.stream(request, rounds=True) as stream:
            async for event in stream:
                events.append([data_of(clock()), *event_of(event)])
                if len(events) == leave_after:
                    break
    except Exception as raised:  # noqa: BLE001 - whatever it is, it is recorded
        error = raised
    return {
        "asked": request_of(request),
        "events": events,
        "result": None,
        "error": error_of(error),
        "ended s": data_of(clock()),
        "has left": len(events) == leave_after,
    }


def run_steadily(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run it by virtual clock; both ends of its connections are in this loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with asyncio.Runner(loop_factory=lambda: SteadyLoop(socket_grace_s=_GRACE_S)) as runner:
            return runner.run(work())
