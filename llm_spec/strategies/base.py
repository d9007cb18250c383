"""What a strategy is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from llm_spec.chat import ChatRequest, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.provider import DraftProvider, LlmProvider
from llm_spec.result import Guarantee

__all__ = ["Promise", "Strategy"]


class Promise(NamedTuple):
    """What a strategy guarantees of its text. `same_text`: it equals, byte for byte, what the target alone writes."""

    guarantee: Guarantee
    same_text: bool


class Strategy(Protocol):
    """A way for a target to verify a draft. Stateless: everything of a request lives in `run`."""

    @property
    def name(self) -> str: ...

    def supports(self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest) -> str | None:
        """Why this pair cannot serve this request in this way; None: it can."""
        ...

    def promise(self, target: LlmProvider, config: SpeculativeConfig) -> Promise:
        """What holds for the text that `run` gives."""
        ...

    def run(
        self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest, config: SpeculativeConfig
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Answer: verified text alone, a `Round` after each round, at most one `Fallback`, a `Finish` at the end.

        A failing draft never raises out of it; a failing target does. Leaving the context ends all work behind it.
        """
        ...
