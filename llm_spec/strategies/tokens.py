"""`tokens`: a local target reads its draft's token ids, lookahead + 1 positions in one forward pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial

from llm_spec.contract.draft import get_draft_capabilities
from llm_spec.contract.errors import format_error_line
from llm_spec.contract.events import Guarantee, StreamEvent
from llm_spec.contract.token_model import PassTimingModel, TokenDrafter, TokenModel
from llm_spec.local.answer import stream_token_model
from llm_spec.local.concurrent_answers import count_open_answers
from llm_spec.local.loop import GenerationLimits
from llm_spec.strategies.base import (
    ReadyStrategy,
    Refusal,
    StrategyContext,
    TextGuarantee,
    count_call_if_target_is_metered,
)

__all__ = ["prepare_or_refuse"]


def prepare_or_refuse(context: StrategyContext) -> ReadyStrategy | Refusal:
    """A target in this process, and a draft that proposes ids of its tokens.

    Exact by `coupled` and `rejection` acceptance; with `coupled` also the same text, where the model can show it.
    """
    model, draft, limits = context.target.capabilities.token_model, context.draft, context.limits
    if model is None:
        return Refusal(f"target {context.target.name} does not run in this process")
    if draft is None:
        return Refusal("there is no draft")
    if not isinstance(draft, TokenDrafter):
        return Refusal(f"draft {draft.name} gives text, not token ids")
    try:
        refusal = draft.token_draft_refusal(model)
    except Exception as error:  # noqa: BLE001 - whatever a draft does, the target answers
        refusal = f"draft {draft.name} failed: {format_error_line(error)}"
    if refusal is not None:
        return Refusal(refusal)
    if model.max_width < 2:
        return Refusal(f"target {model.name} verifies no token faster than it writes one")
    same_text = limits.acceptance == "coupled" and model.same_text
    guarantee: Guarantee = "lossy" if limits.acceptance.startswith("lossy") else "exact"
    return ReadyStrategy(TextGuarantee(guarantee, same_text), partial(_open_local_answer, context, model, draft))


def _open_local_answer(
    context: StrategyContext, model: TokenModel, drafter: TokenDrafter
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    limits = context.limits
    measured = model.pass_costs if isinstance(model, PassTimingModel) else None
    num_plain_steps = context.pair_stats.baseline.count_plain_steps_wanted(count_open_answers() + 1)
    opened = stream_token_model(
        model,
        context.request,
        drafter=drafter,
        acceptance=limits.acceptance,
        lookahead=context.lookahead_costs.apply(limits.lookahead, measured),
        limits=GenerationLimits(
            max_iterations=limits.max_iterations,
            max_draft_tokens=limits.max_draft_tokens,
            draft_timeout_s=limits.draft_timeout_s,
            plain_every=limits.baseline_every,
            min_plain_steps=num_plain_steps if limits.baseline_every else 0,
        ),
    )
    counts_drafts = not get_draft_capabilities(drafter).is_free
    return count_call_if_target_is_metered(context.target, opened, context.request, counts_drafts=counts_drafts)
