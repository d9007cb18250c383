"""`predict`: the draft goes along with the request as a predicted output, and the provider verifies it.

One request. The provider says afterwards how much of the prediction it took (`usage.accepted_prediction_tokens`); where
it bills for predictions, rejected tokens cost as much as written ones. See OpenAI's guide to predicted outputs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.events import Fallback, Finish, Round, StreamEvent
from llm_spec.contract.request import ChatRequest
from llm_spec.drafting.full_draft import FullDraft
from llm_spec.measure.clock import now
from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext, TextGuarantee, find_prediction_refusal
from llm_spec.strategies.plain import stream_plain

__all__ = ["prepare_or_refuse"]


def prepare_or_refuse(context: StrategyContext) -> ReadyStrategy | Refusal:
    """A target that takes predictions; the request's own `prediction`, or else any draft.

    The draft is read to its end before the target is asked, so what it takes is added to the answer's time.
    """
    if context.draft is None and not context.request.prediction:
        return Refusal("there is no draft, and the request has no prediction")
    if not context.target.capabilities.prediction:
        return Refusal(f"target {context.target.name} takes no predicted outputs")
    refusal = find_prediction_refusal(context.request)
    if refusal is not None:
        return Refusal(refusal)
    return ReadyStrategy(TextGuarantee("exact", same_text=False), partial(_open_predicted_answer, context))


@asynccontextmanager
async def _open_predicted_answer(context: StrategyContext) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    async with aclosing(_stream_predicted_answer(context)) as events:
        yield events


async def _stream_predicted_answer(context: StrategyContext) -> AsyncGenerator[StreamEvent]:
    request, limits = context.request, context.limits
    if context.draft is None or request.prediction:
        async with aclosing(_stream_with_prediction(context, request, draft_s=0.0)) as events:
            async for event in events:
                yield event
        return
    started_s, timeout_s = now(), limits.draft_timeout_s
    guess = FullDraft(context.draft, request, max_tokens=limits.max_draft_tokens, timeout_s=timeout_s)
    async with guess.read_in_background():
        await guess.wait_for_end(timeout_s, f"late: the draft took longer than {timeout_s:.3g} s")
        if guess.failure is not None:
            yield Fallback(guess.failure)
        request = replace(request, prediction=guess.text or None)
        async with aclosing(_stream_with_prediction(context, request, draft_s=now() - started_s)) as events:
            async for event in events:
                yield event


async def _stream_with_prediction(
    context: StrategyContext, request: ChatRequest, *, draft_s: float
) -> AsyncGenerator[StreamEvent]:
    """The target's answer to a request with its prediction, if there is one; without it where the target refuses it."""
    started_s, has_begun = now(), False
    try:
        async with stream_plain(context.target, request, context.limits) as events:
            async for event in events:
                has_begun = True
                if isinstance(event, Finish):
                    report = _make_round_of_prediction(event, draft_s, now() - started_s)
                    if report is not None:
                        yield report
                yield event
        return
    except InvalidRequestError as error:
        if has_begun or not request.prediction:
            raise
        refusal = error
    yield Fallback.from_error(refusal)
    async with stream_plain(context.target, replace(request, prediction=None), context.limits) as events:
        async for event in events:
            yield event


def _make_round_of_prediction(finish: Finish, draft_s: float, verify_s: float) -> Round | None:
    """The answer as one round, where the provider tells what became of the prediction."""
    usage = finish.usage
    if usage is None or not usage.accepted_prediction_tokens + usage.rejected_prediction_tokens:
        return None
    return Round(
        index=0,
        num_draft_tokens=usage.accepted_prediction_tokens + usage.rejected_prediction_tokens,
        num_accepted_tokens=usage.accepted_prediction_tokens,
        num_emitted_tokens=usage.output_tokens - usage.rejected_prediction_tokens,
        draft_s=draft_s,
        verify_s=verify_s,
    )
