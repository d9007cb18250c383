"""`plain`: the target alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Final, Self

from llm_spec.chat import ChatRequest, ChatResponse, Finish, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.config import SpeculativeConfig
from llm_spec.figures import PairFigures
from llm_spec.generation import GenerationLimits
from llm_spec.local import stream_token_model
from llm_spec.provider import DraftProvider, Feature, LlmProvider
from llm_spec.strategies.base import Promise

__all__ = ["PLAIN", "AnswerAtOnce", "PlainStrategy"]


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


class AnswerAtOnce:
    """A run of the target's whole answer, asked for as such: a context over its events."""

    def __init__(self, target: LlmProvider, request: ChatRequest) -> None:
        self._target = target
        self._request = request
        self._events: Iterator[StreamEvent] = iter(())

    async def __aenter__(self) -> Self:
        self._events = _events_of(await self._target.complete(self._request))
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        for event in self._events:
            return event
        raise StopAsyncIteration


def _events_of(response: ChatResponse) -> Iterator[StreamEvent]:
    if response.reasoning:
        yield ReasoningDelta(response.reasoning)
    if response.content:
        yield TextDelta(response.content)
    for index, call in enumerate(response.message.tool_calls):
        yield ToolCallDelta(index, call.id, call.name, call.arguments)
    yield Finish(response.finish_reason, response.usage, response.stopped_by)


PLAIN: Final = PlainStrategy()
