"""BridgedProvider: a provider as adapters hold it, for synchronous and asynchronous callers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, TypeVar

from llm_spec.chat import Finish, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.errors import ConfigError
from llm_spec.integrations._bridge import EventLoopBridge, Opens
from llm_spec.provider import LlmProvider
from llm_spec.result import SpeculativeFinish

__all__ = ["BridgedProvider", "speculation_figures"]

T = TypeVar("T")


class BridgedProvider:
    """Either the caller's `provider`, or a decoder for `target`, `draft` and `config`, opened here and closed here.

    What is opened here works on an event loop of its own thread. The caller's works on the loop of the first call, or
    on such a thread where that call is synchronous; see `EventLoopBridge`. Raises ConfigError for what does not go
    together, and what `SpeculativeDecoder` raises.
    """

    def __init__(
        self,
        provider: LlmProvider | None = None,
        *,
        target: str | None = None,
        draft: str | None = None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        if (provider is None) == (target is None):
            raise ConfigError("give either provider or target")
        if provider is not None and (draft is not None or config is not None):
            raise ConfigError("draft and config go with target; a provider has its own")
        self._opened = None if target is None else SpeculativeDecoder(draft, target, config)
        given = self._opened if provider is None else provider
        assert given is not None  # noqa: S101 - one of them was given
        self.provider: LlmProvider = given
        self._bridge = EventLoopBridge(given.name, owns_loop=self._opened is not None)

    @property
    def name(self) -> str:
        """The provider's."""
        return self.provider.name

    def stream(self, opens: Opens[StreamEvent]) -> Generator[StreamEvent]:
        """Yield the events of the context that `opens()` gives, which is entered and left on the provider's loop."""
        return self._bridge.stream(opens)

    def astream(self, opens: Opens[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        """As `stream`, for a coroutine."""
        return self._bridge.astream(opens)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` on the provider's loop and wait for it here."""
        return self._bridge.run(work)

    async def arun(self, work: Callable[[], Awaitable[T]]) -> T:
        """As `run`, for a coroutine."""
        return await self._bridge.arun(work)

    def close(self) -> None:
        """Close what was opened here, and end the thread and what it was doing; twice is harmless."""
        self._bridge.close(None if self._opened is None else self._opened.aclose)

    async def aclose(self) -> None:
        """As `close`, for a coroutine."""
        await self._bridge.aclose(None if self._opened is None else self._opened.aclose)


def speculation_figures(finish: Finish) -> dict[str, Any] | None:
    """What adapters tell of a decoder's answer beside it, as JSON values; None where no decoder gave it."""
    if not isinstance(finish, SpeculativeFinish) or finish.result is None:
        return None
    result = finish.result
    return {
        "strategy": result.strategy,
        "guarantee": result.guarantee,
        "same_text": result.same_text,
        "acceptance_rate": result.stats.draft_acceptance_rate,
        "speedup": result.speedup,
    }
