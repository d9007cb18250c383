"""Counts the tokens of a request before it is answered."""

from __future__ import annotations

import asyncio

from llm_spec.contract.errors import InvalidRequestError, LlmSpecError
from llm_spec.contract.provider import InputTokenCounter, LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.measure.tokens import estimate_request_tokens

__all__ = ["count_request_tokens"]


async def count_request_tokens(target: LlmProvider, request: ChatRequest) -> int:
    """Return the number of tokens of a request's input.

    The target's server or tokenizer counts them; if it cannot, they are estimated, rather too many.
    Raises InvalidRequestError if the server calls the request invalid.
    """
    estimate = estimate_request_tokens(request)
    try:
        counted = await _count_request_tokens_exactly(target, request, estimate)
    except InvalidRequestError:
        raise
    except LlmSpecError:  # the server has no such call, or cannot be reached
        counted = None
    return estimate if counted is None else counted


async def _count_request_tokens_exactly(target: LlmProvider, request: ChatRequest, estimate: int) -> int | None:
    if isinstance(target, InputTokenCounter):
        return await target.count_input_tokens(request)
    model, endpoint = target.capabilities.token_model, target.capabilities.token_endpoint
    # A prompt that cannot fit need not be encoded
    if model is not None and estimate <= 2 * model.context_length:
        return len(await asyncio.to_thread(model.tokenizer.encode_chat, request))
    return None if endpoint is None else len(await endpoint.encode_chat(request))
