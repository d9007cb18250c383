"""`plain`: the target alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial

from llm_spec.contract.events import StreamEvent
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.strategies.base import ReadyStrategy, StrategyContext, TextGuarantee, count_call_if_target_is_metered
from llm_spec.strategies.limits import Limits

__all__ = ["prepare_or_refuse", "stream_plain"]


def prepare_or_refuse(context: StrategyContext) -> ReadyStrategy:
    """No speculation; any target."""
    run = partial(stream_plain, context.target, context.request, context.limits)
    return ReadyStrategy(TextGuarantee("exact", same_text=True), run)


def stream_plain(
    target: LlmProvider, request: ChatRequest, limits: Limits
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    """The target's own answer."""
    model = target.capabilities.token_model
    if model is None:
        return target.stream(request)
    from llm_spec.local.answer import stream_token_model
    from llm_spec.local.loop import GenerationLimits  # numpy comes along, which servers' answers do without

    opened = stream_token_model(model, request, limits=GenerationLimits(max_iterations=limits.max_iterations))
    return count_call_if_target_is_metered(target, opened, request)
