"""Going on alone: the rest of an answer, plain, from what has been confirmed."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile
from typing import Final

from llm_spec.contract.endpoint import Discoverable, SampledToken, TokenEndpoint
from llm_spec.contract.errors import LlmSpecError, TargetError
from llm_spec.contract.events import Finish, Guarantee, GuaranteeWeakened, StreamEvent, TextDelta
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest

__all__ = [
    "CannotContinueError",
    "can_target_continue_text",
    "continue_by_text",
    "sample_one_token_by_stream",
    "skip_repeated_text",
    "stream_remainder_plain",
]

_NO_TOKEN_ID: Final = -1  # of an end whose token is not told


class CannotContinueError(TargetError):
    """The target begins anew where it should go on from a text."""


async def can_target_continue_text(target: LlmProvider) -> bool:
    """Whether a target goes on from a text; a server is believed only once it has been tried.

    Raises TransientError where it cannot be tried now.
    """
    if isinstance(target, Discoverable):
        await target.discover("continue_prefix")
    return target.capabilities.continue_prefix


async def stream_remainder_plain(
    target: LlmProvider,
    endpoint: TokenEndpoint,
    request: ChatRequest,
    *,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    text: str,
) -> AsyncGenerator[StreamEvent]:
    """What follows `text`, whose tokens are `answer_ids`: by token ids, else by text.

    Raises TargetError when the target can do neither, or its text does not fit to what was confirmed.
    """
    left = None if request.max_tokens is None else request.max_tokens - len(answer_ids)
    request = replace(request, max_tokens=left, stop=())
    if not answer_ids:
        async with target.stream(request) as events:
            async for event in events:
                yield event
        return
    started = False
    try:
        async with endpoint.stream_after([*prompt_ids, *answer_ids], request) as events:
            async for event in events:
                started = True
                yield event
        return
    except LlmSpecError as error:
        if started or not await can_target_continue_text(target):
            if isinstance(error, TargetError):
                raise
            raise TargetError(str(error), partial_text=text) from error
    async with aclosing(continue_by_text(target, request, text)) as events:
        async for event in events:
            yield event


async def sample_one_token_by_stream(
    endpoint: TokenEndpoint, token_ids: Sequence[int], request: ChatRequest
) -> SampledToken:
    """The token after `token_ids` by a stream of a single one, its text left out.

    Raises TargetError when the target does not tell its id: to ask for another one then would prefer those it tells.
    """
    ids: list[int] | None = []
    is_end = False
    async with endpoint.stream_after(token_ids, request) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                ids = None if ids is None or event.token_ids is None else [*ids, *event.token_ids]
            elif isinstance(event, Finish):
                is_end = event.finish_reason == "stop"
    if is_end:
        return SampledToken(ids[-1] if ids else _NO_TOKEN_ID, "", is_end=True)
    if ids is None or len(ids) != 1:
        raise TargetError("the target does not tell which token it wrote")
    return SampledToken(ids[0], "")


async def continue_by_text(
    target: LlmProvider, request: ChatRequest, text: str, *, guarantee: Guarantee = "exact-text"
) -> AsyncGenerator[StreamEvent]:
    """What follows `text`, the beginning of the request's answer, after a `GuaranteeWeakened` with its `guarantee`.

    Whitespace at the end of the text is not sent, nor shown twice. Raises CannotContinueError for a target that begins
    anew, and TargetError when it does not repeat that whitespace.
    """
    if not await can_target_continue_text(target):
        raise CannotContinueError(f"{target.name} does not continue a text", partial_text=text)
    sent = text.rstrip()
    repeated_text = text[len(sent) :]
    request = replace(_vary_seed_by_position(request, len(text)), prefix=request.prefix + sent)
    async with target.stream(request) as events:
        yield GuaranteeWeakened(guarantee, "the answer goes on from its text, which the target tokenizes again")
        async for event in events:
            if not isinstance(event, TextDelta) or not repeated_text:
                yield event
                continue
            shared = min(len(repeated_text), len(event.text))
            if event.text[:shared] != repeated_text[:shared]:
                raise TargetError(f"{target.name} does not go on where its answer was broken off", partial_text=text)
            repeated_text = repeated_text[shared:]
            if event.text[shared:]:
                yield replace(event, text=event.text[shared:])


async def skip_repeated_text(events: AsyncIterator[StreamEvent], repeated_text: str) -> AsyncGenerator[StreamEvent]:
    """Events without the beginning of their text that repeats `repeated_text`, as far as it does."""
    async for event in events:
        if not repeated_text or not isinstance(event, TextDelta):
            yield event
            continue
        num_shared = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(event.text, repeated_text, strict=False))
        )
        repeated_text = repeated_text[num_shared:] if num_shared == len(event.text) else ""
        if num_shared < len(event.text):
            yield replace(event, text=event.text[num_shared:])


def _vary_seed_by_position(request: ChatRequest, num_characters: int) -> ChatRequest:
    """With another seed for each place.

    Servers begin their noise anew with every request, and the noise that drew the text so far is not independent of it.
    """
    sampling = request.sampling
    if sampling.seed is None or sampling.temperature == 0:
        return request
    seed = random.Random(f"{sampling.seed} {num_characters}").getrandbits(31)  # noqa: S311 - a seed, no secret
    return replace(request, sampling=replace(sampling, seed=seed))
