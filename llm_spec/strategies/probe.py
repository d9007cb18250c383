"""`probe`: the target samples one token after each of several prefixes, in one request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Final

from llm_spec.chat import ChatRequest, Sampling, StreamEvent
from llm_spec.config import SpeculativeConfig
from llm_spec.errors import UnsupportedError
from llm_spec.figures import PairFigures
from llm_spec.provider import DraftProvider, Feature, LlmProvider, NextToken, TokenEndpoint
from llm_spec.strategies.base import Promise, refuse_request
from llm_spec.strategies.rounds import Verify, answer_in_rounds

__all__ = ["PROBE", "ProbeStrategy"]


class ProbeStrategy:
    """Any draft; a target that takes batches of token-id prompts. Sample and compare: exact whatever the draft is."""

    name = "probe"
    needs: Feature | None = "token_endpoint"

    def supports(self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest) -> str | None:
        if draft is None:
            return "there is no draft"
        if target.capabilities.token_endpoint is None:
            return f"target {target.name} does not take token ids"
        return refuse_request(request)

    def promise(self, target: LlmProvider, config: SpeculativeConfig) -> Promise:  # noqa: ARG002 - always the same
        return Promise("exact", same_text=False)

    @asynccontextmanager
    async def run(
        self,
        draft: DraftProvider | None,
        target: LlmProvider,
        request: ChatRequest,
        config: SpeculativeConfig,
        figures: PairFigures,
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        endpoint = target.capabilities.token_endpoint
        if draft is None or endpoint is None:
            raise UnsupportedError(f"strategy 'probe' cannot be used: {self.supports(draft, target, request)}")
        answer = answer_in_rounds(
            draft=draft,
            target=target,
            endpoint=endpoint,
            request=request,
            config=config,
            figures=figures,
            verify=_verifier(endpoint, request.sampling),
            max_under_way=config.max_concurrent_streams,
        )
        async with aclosing(answer) as events:
            yield events


def _verifier(endpoint: TokenEndpoint, sampling: Sampling) -> Verify:
    unseeded = replace(sampling, seed=None)  # one seed for a whole batch would draw the same noise for each prefix

    async def verify(context_ids: list[int], drafted_ids: list[int]) -> list[NextToken]:
        prefixes = [context_ids + drafted_ids[:end] for end in range(len(drafted_ids) + 1)]
        return await endpoint.sample_next(prefixes, unseeded)

    return verify


PROBE: Final = ProbeStrategy()
