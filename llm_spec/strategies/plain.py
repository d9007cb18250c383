"""`plain`: the target alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final

from llm_spec.chat import ChatRequest, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import Feature
from llm_spec.generation import GenerationLimits
from llm_spec.local import stream_token_model
from llm_spec.metered import meter_external_call
from llm_spec.pair_stats import PairStats
from llm_spec.strategies.base import TextGuarantee

__all__ = ["PLAIN", "PlainStrategy"]


class PlainStrategy:
    """No speculation; any target."""

    name = "plain"
    needed_feature: Feature | None = None

    def find_refusal(self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest) -> None:  # noqa: ARG002 - every target can
        return None

    def text_guarantee(self, target: LlmProvider, config: SpeculativeConfig) -> TextGuarantee:  # noqa: ARG002 - it is the target's own
        return TextGuarantee("exact", same_text=True)

    def run(
        self,
        draft: DraftProvider | None,  # noqa: ARG002 - nothing is drafted
        target: LlmProvider,
        request: ChatRequest,
        config: SpeculativeConfig,
        pair_stats: PairStats,  # noqa: ARG002 - what is seen of a plain answer is learnt at its end
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        model = target.capabilities.token_model
        if model is None:
            return target.stream(request)
        limits = GenerationLimits(max_iterations=config.max_iterations)
        opened = stream_token_model(model, request, limits=limits)
        return meter_external_call(target, opened, request)


PLAIN: Final = PlainStrategy()
