"""`plain`: the target alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Final

from llm_spec.chat import ChatRequest, ChatResponse, Finish, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.config import SpeculativeConfig
from llm_spec.figures import PairFigures
from llm_spec.generation import GenerationLimits
from llm_spec.local import stream_token_model
from llm_spec.provider import DraftProvider, Feature, LlmProvider
from llm_spec.strategies.base import Promise

__all__ = ["PLAIN", "PlainStrategy", "answer_at_once"]


class PlainStrategy:
    """No speculation; any target."""

    name = "plain"
    needs: Feature | None = None

    def supports(self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest) -> None:  # noqa: ARG002 - every target can
        return None

    def promise(self, target: LlmProvider, config: SpeculativeConfig) -> Promise:  # noqa: ARG002 - it is the target's own
        return Promise("exact", same_text=True)

    def run(
        self,
        draft: DraftProvider | None,  # noqa: ARG002 - nothing is drafted
        target: LlmProvider,
        request: ChatRequest,
        config: SpeculativeConfig,
        figures: PairFigures,  # noqa: ARG002 - what is seen of a plain answer is learnt at its end
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        model = target.capabilities.token_model
        if model is None:
            return target.stream(request)
        limits = GenerationLimits(max_iterations=config.max_iterations)
        return stream_token_model(model, request, limits=limits)


@asynccontextmanager
async def answer_at_once(target: LlmProvider, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    """The target's whole answer, asked for as such."""
    async with aclosing(_events_of(await target.complete(request))) as events:
        yield events


async def _events_of(response: ChatResponse) -> AsyncGenerator[StreamEvent]:
    if response.reasoning:
        yield ReasoningDelta(response.reasoning)
    if response.content:
        yield TextDelta(response.content)
    for index, call in enumerate(response.message.tool_calls):
        yield ToolCallDelta(index, call.id, call.name, call.arguments)
    yield Finish(response.finish_reason, response.usage, response.stopped_by)


PLAIN: Final = PlainStrategy()
