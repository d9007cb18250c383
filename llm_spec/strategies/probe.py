"""`probe`: the target samples one token after each of several prefixes, in one request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Final

from llm_spec.chat import ChatRequest, Sampling, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import Feature, SampledToken, TokenEndpoint
from llm_spec.errors import UnsupportedError
from llm_spec.pair_stats import PairStats
from llm_spec.strategies.base import TextGuarantee, find_multi_call_refusal
from llm_spec.strategies.server_rounds import VerifyRound, answer_in_rounds

__all__ = ["PROBE", "ProbeStrategy"]


class ProbeStrategy:
    """Any draft; a target that takes batches of token-id prompts. Sample and compare: exact whatever the draft is."""

    name = "probe"
    needed_feature: Feature | None = "token_endpoint"

    def find_refusal(self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest) -> str | None:
        if draft is None:
            return "there is no draft"
        if target.capabilities.token_endpoint is None:
            return f"target {target.name} does not take token ids"
        return find_multi_call_refusal(request)

    def text_guarantee(self, target: LlmProvider, config: SpeculativeConfig) -> TextGuarantee:  # noqa: ARG002 - always the same
        return TextGuarantee("exact", same_text=False)

    @asynccontextmanager
    async def run(
        self,
        draft: DraftProvider | None,
        target: LlmProvider,
        request: ChatRequest,
        config: SpeculativeConfig,
        pair_stats: PairStats,
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        endpoint = target.capabilities.token_endpoint
        if draft is None or endpoint is None:
            raise UnsupportedError(f"strategy 'probe' cannot be used: {self.find_refusal(draft, target, request)}")
        answer = answer_in_rounds(
            draft=draft,
            target=target,
            endpoint=endpoint,
            request=request,
            config=config,
            pair_stats=pair_stats,
            verify=_make_verify(endpoint, request.sampling),
            max_pending_rounds=config.max_concurrent_streams,
        )
        async with aclosing(answer) as events:
            yield events


def _make_verify(endpoint: TokenEndpoint, sampling: Sampling) -> VerifyRound:
    unseeded = replace(sampling, seed=None)  # one seed for a whole batch would draw the same noise for each prefix

    async def verify(context_ids: list[int], drafted_ids: list[int]) -> list[SampledToken]:
        prefixes = [context_ids + drafted_ids[:end] for end in range(len(drafted_ids) + 1)]
        return await endpoint.sample_next(prefixes, unseeded)

    return verify


PROBE: Final = ProbeStrategy()
