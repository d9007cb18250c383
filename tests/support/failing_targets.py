"""A target that fails as it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from llm_spec import ChatRequest, RetryPolicy, SpeculativeConfig, SpeculativeDecoder, StreamEvent, TransientError
from llm_spec.contract.provider import Capabilities
from llm_spec.testing import ScriptedProvider

__all__ = ["CONTINUES", "NO_WAIT", "OVERLOADED", "WORDS", "Failing", "plainly"]

WORDS = " ".join(f"word{i}" for i in range(40))
OVERLOADED = TransientError("overloaded", status=529)
NO_WAIT = RetryPolicy(first_wait_s=0.0)


class Failing(ScriptedProvider):
    """Of its requests, the first ones fail: each as the number and error say, before the event of that number."""

    def __init__(self, *failures: tuple[int, Exception], script: Any = WORDS, **options: Any) -> None:
        super().__init__(script, **options)
        self.times: list[float] = []
        self._failures = failures

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        number = len(self.requests)
        self.times.append(asyncio.get_running_loop().time())
        self._fail_at = dict([self._failures[number]] if number < len(self._failures) else [])
        async with super().stream(request) as events:
            yield events


def plainly(target: Any, **config: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(**config))


CONTINUES = Capabilities(continue_prefix=True)
