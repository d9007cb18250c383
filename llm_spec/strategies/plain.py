"""`plain`: the target alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial

from llm_spec.chat import ChatRequest, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.contract.chat import LlmProvider
from llm_spec.metered import meter_external_call
from llm_spec.strategies.base import Ready, StrategyContext, TextGuarantee

__all__ = ["prepare", "stream_plain"]


def prepare(context: StrategyContext) -> Ready:
    """No speculation; any target."""
    run = partial(stream_plain, context.target, context.request, context.config)
    return Ready(TextGuarantee("exact", same_text=True), run)


def stream_plain(
    target: LlmProvider, request: ChatRequest, config: SpeculativeConfig
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    """The target's own answer."""
    model = target.capabilities.token_model
    if model is None:
        return target.stream(request)
    from llm_spec.generation import GenerationLimits  # numpy comes along, which servers' answers do without
    from llm_spec.local import stream_token_model

    limits = GenerationLimits(max_iterations=config.max_iterations)
    opened = stream_token_model(model, request, limits=limits)
    return meter_external_call(target, opened, request)
