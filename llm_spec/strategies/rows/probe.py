"""`probe`: the target samples one token after each of several prefixes, in one request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import SampledToken, TokenEndpoint
from llm_spec.contract.events import StreamEvent
from llm_spec.contract.request import Sampling
from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext, TextGuarantee, find_multi_call_refusal
from llm_spec.strategies.rows.rounds import VerifyRound, answer_in_rounds

__all__ = ["prepare_or_refuse"]


def prepare_or_refuse(context: StrategyContext) -> ReadyStrategy | Refusal:
    """Any draft; a target that takes batches of token-id prompts. Sample and compare: exact whatever the draft is."""
    draft, endpoint = context.draft, context.target.capabilities.token_endpoint
    if draft is None:
        return Refusal("there is no draft")
    if endpoint is None:
        return Refusal(f"target {context.target.name} does not take token ids")
    refusal = find_multi_call_refusal(context.request)
    if refusal is not None:
        return Refusal(refusal)
    return ReadyStrategy(TextGuarantee("exact", same_text=False), partial(_open_probe_rounds, context, draft, endpoint))


def _open_probe_rounds(
    context: StrategyContext, draft: DraftProvider, endpoint: TokenEndpoint
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    answer = answer_in_rounds(
        context,
        draft=draft,
        endpoint=endpoint,
        verify=_make_verify_by_sampling(endpoint, context.request.sampling),
        max_calls=context.limits.max_concurrent_streams,
    )
    return aclosing(answer)


def _make_verify_by_sampling(endpoint: TokenEndpoint, sampling: Sampling) -> VerifyRound:
    unseeded = replace(sampling, seed=None)  # one seed for a whole batch would draw the same noise for each prefix

    async def verify_by_sampling(context_ids: list[int], drafted_ids: list[int]) -> list[SampledToken]:
        prefixes = [context_ids + drafted_ids[:end] for end in range(len(drafted_ids) + 1)]
        return await endpoint.sample_next(prefixes, unseeded)

    return verify_by_sampling
