"""Chat requests answered by a model in this process: text as it is verified, round by round.

`generate_events` is synchronous; `stream_token_model` carries it to an event loop: what a local provider streams.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from llm_spec.contract.draft import get_draft_capabilities
from llm_spec.contract.errors import InvalidRequestError, make_context_length_error
from llm_spec.contract.events import (
    Fallback,
    Finish,
    FinishReason,
    GuaranteeWeakened,
    LocalTimings,
    StoppedBy,
    StreamEvent,
    Usage,
)
from llm_spec.contract.fields import find_local_field_refusal
from llm_spec.contract.optional import open_token_draft
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.token_model import (
    BoundedTokenizer,
    DeviceRoundModel,
    DeviceRoundRunner,
    MessageFormatTokenizer,
    RequestAdmittingModel,
    TokenDrafter,
    TokenModel,
)
from llm_spec.contract.tools import ToolUse, parse_tool_use
from llm_spec.local.acceptance import make_acceptance_rule
from llm_spec.local.acceptance_name import AcceptanceName
from llm_spec.local.concurrent_answers import count_concurrent_answers
from llm_spec.local.emit import AnswerEmitter, open_message_parser
from llm_spec.local.grammar import build_answer_constraint
from llm_spec.local.lookahead import CostAware, LookaheadPolicy
from llm_spec.local.loop import Generation, GenerationLimits
from llm_spec.local.messages.parser import MessageParser
from llm_spec.local.sampling import Sampler
from llm_spec.local.seed import draw_random_seed
from llm_spec.local.threads import iterate_in_thread

__all__ = ["generate_events", "stream_token_model"]

_FINISH_REASONS: Final[dict[StoppedBy, FinishReason]] = {
    "eos": "stop",
    "stop_string": "stop",
    "tool_calls": "tool_calls",
}

_WIDTHS_DIFFER: Final = "at this length the model's logits depend on how many tokens are read at once"


def generate_events(
    target: TokenModel,
    request: ChatRequest,
    cancelled: threading.Event | None = None,
    *,
    drafter: TokenDrafter | None = None,
    acceptance: AcceptanceName = "coupled",
    lookahead: LookaheadPolicy | None = None,
    limits: GenerationLimits | None = None,
    exact: bool = True,
) -> Iterator[list[StreamEvent]]:
    """Answer a chat request with a local model: the events of one round at a time, text first, then its `Round`.

    The last item holds `LocalTimings` and a `Finish`. Stop strings and incomplete characters are held back.
    `request.max_tokens` takes the place of that in `limits`; a request that samples without a seed gets a random one.
    `exact`: as in `TokenModel.open`; a draft, which another model verifies, needs no exact rows.
    Raises InvalidRequestError for what a local model cannot serve, MissingExtraError for a `response_format` without
    the extra `grammar`, and what the target raises.
    """
    _check_request_is_supported(target, request)
    tool_use = parse_tool_use(request)
    prompt_ids = target.tokenizer.encode_chat(request)
    parser = open_message_parser(target.tokenizer, tool_use, prompt_ids, request.prefix)
    sampler = _make_sampler(target, request, tool_use, len(prompt_ids), parser)
    generation = _make_generation(
        target,
        request,
        prompt_ids,
        sampler,
        drafter=drafter,
        acceptance=acceptance,
        lookahead=lookahead or CostAware(),
        limits=replace(limits or GenerationLimits(), max_tokens=request.max_tokens),
        exact=exact,
        cancelled=cancelled,
    )
    text = AnswerEmitter(target.tokenizer, request.stop, parser, has_logprobs=request.top_logprobs is not None)
    reason: str | None = None

    is_same_text = drafter is not None and acceptance == "coupled" and target.same_text

    def pop_weakened_event() -> list[GuaranteeWeakened]:
        """Once, before text of which the model does not promise any more that it is also written without a draft."""
        nonlocal is_same_text
        was_same_text, is_same_text = is_same_text, is_same_text and target.same_text
        return [GuaranteeWeakened("exact", _WIDTHS_DIFFER)] if was_same_text and not is_same_text else []

    def pop_fallback_event() -> list[Fallback]:
        """The draft's failure, once."""
        nonlocal reason
        is_new, reason = generation.fallback_reason != reason, generation.fallback_reason
        return [Fallback(reason)] if is_new and reason is not None else []

    with count_concurrent_answers() as average_concurrency, generation:
        for tokens in generation:
            report, events = text.emit_round(tokens)
            yield [*pop_weakened_event(), *events, report, *pop_fallback_event()]
            if text.stopped_by is not None:
                break
        learned = {} if drafter is None else dict(generation.lookahead.describe())
        generation.close_draft()  # here, so that a failure can still be reported
        last_events = text.flush(is_cut_off=(text.stopped_by or generation.stopped_by) not in _FINISH_REASONS)
        finish = _make_finish(generation, text, len(prompt_ids), drafter)
        times = LocalTimings(
            generation.prompt_s, generation.open_draft_s, learned, generation.between_s, average_concurrency()
        )
        yield [*last_events, *pop_fallback_event(), times, finish]


def _make_sampler(
    target: TokenModel, request: ChatRequest, tool_use: ToolUse, num_prompt_tokens: int, parser: MessageParser | None
) -> Sampler:
    """What draws the answer's tokens: by the request's sampling, among those that its format and tools allow."""
    seed = request.sampling.seed if request.sampling.seed is not None else draw_random_seed()
    is_reasoning = parser is not None and parser.is_reasoning
    constraint = build_answer_constraint(target, request, tool_use, is_reasoning=is_reasoning)
    return Sampler(
        request.sampling,
        vocab_size=target.vocab_size,
        num_prompt_tokens=num_prompt_tokens,
        seed=seed,
        constraint=constraint,
    )


def _make_generation(
    target: TokenModel,
    request: ChatRequest,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    *,
    drafter: TokenDrafter | None,
    acceptance: AcceptanceName,
    lookahead: LookaheadPolicy,
    limits: GenerationLimits,
    exact: bool,
    cancelled: threading.Event | None,
) -> Generation:
    """The loop of rounds for an answer; nothing is read or drafted before it is entered."""
    rule = make_acceptance_rule(acceptance, sampler)
    first_draft, model = _split_drafter_at_model(target, drafter)
    open_draft = partial(
        open_token_draft, target=target, choose=rule.choose_draft_token, prompt_ids=tuple(prompt_ids), request=request
    )
    can_use_device_rounds = acceptance == "coupled" and request.top_logprobs is None
    return Generation(
        target,
        prompt_ids,
        rule,
        lookahead.start(),
        limits=limits,
        open_draft=None if drafter is None else partial(open_draft, drafter),
        open_rounds=partial(_open_device_rounds, target, prompt_ids, sampler, model) if can_use_device_rounds else None,
        open_companion_draft=None if first_draft is None else partial(open_draft, first_draft),
        top_logprobs=request.top_logprobs,
        exact=exact,
        cancelled=cancelled,
    )


def _make_finish(
    generation: Generation, text: AnswerEmitter, num_prompt_tokens: int, drafter: TokenDrafter | None
) -> Finish:
    """Why the answer ended, and its tokens; those of a draft that costs nothing are free."""
    stopped_by = text.stopped_by or generation.stopped_by or "max_tokens"
    if text.has_tool_calls and stopped_by == "eos":
        stopped_by = "tool_calls"
    usage = Usage(
        input_tokens=num_prompt_tokens, output_tokens=text.num_tokens, reasoning_tokens=text.num_reasoning_tokens
    )
    finish_reason = _FINISH_REASONS.get(stopped_by, "length")
    if drafter is None:
        return Finish(finish_reason, usage, stopped_by, None, text.stop_string)
    num_drafted, is_free = generation.stats.num_draft_tokens, get_draft_capabilities(drafter).is_free
    drafted = Usage(output_tokens=num_drafted, free_output_tokens=num_drafted if is_free else 0)
    return Finish(finish_reason, usage, stopped_by, drafted, text.stop_string)


@asynccontextmanager
async def stream_token_model(
    target: TokenModel,
    request: ChatRequest,
    *,
    drafter: TokenDrafter | None = None,
    acceptance: AcceptanceName = "coupled",
    lookahead: LookaheadPolicy | None = None,
    limits: GenerationLimits | None = None,
    exact: bool = True,
) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    """`generate_events` in a worker thread: what a local provider's `stream` returns.

    Where the target has room for so many requests only, it waits for a place before it takes a thread.
    """
    make = partial(
        generate_events,
        target,
        request,
        drafter=drafter,
        acceptance=acceptance,
        lookahead=lookahead,
        limits=limits,
        exact=exact,
    )
    async with AsyncExitStack() as stack:
        is_bounded = True
        if isinstance(target, RequestAdmittingModel):
            await stack.enter_async_context(target.admit_request())
            is_bounded = False  # but by the model
        yield await stack.enter_async_context(iterate_in_thread(make, is_bounded=is_bounded))


def _open_device_rounds(
    target: TokenModel,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    draft: TokenModel | None,
    cancelled: Callable[[], bool],
) -> DeviceRoundRunner | None:
    """Rounds on the target's device, if it offers them and no constraint has to mask every token."""
    if not isinstance(target, DeviceRoundModel) or sampler.constraint is not None:
        return None
    return target.open_rounds(prompt_ids, sampler.sampling, sampler.seed, draft, cancelled)


def _split_drafter_at_model(
    target: TokenModel, drafter: TokenDrafter | None
) -> tuple[TokenDrafter | None, TokenModel | None]:
    """Splits a drafter into the part that drafts first and the model, which may draft on the target's device."""
    try:
        if drafter is None or drafter.token_draft_refusal(target) is not None:
            return None, None
    except Exception:  # noqa: BLE001 - whatever a draft does, the target answers; to open it says what is wrong
        return None, None
    can = get_draft_capabilities(drafter)
    return can.companion, can.token_model


def _check_request_is_supported(target: TokenModel, request: ChatRequest) -> None:
    """Refuse what a local model would have to leave out, rather than leave it out silently."""
    _check_prompt_can_fit(target, request)
    refusals = [find_local_field_refusal(name, request.extra[name], target.name) for name in sorted(request.extra)]
    if refusal := next(filter(None, refusals), None):
        raise InvalidRequestError(refusal)
    if request.tools and not isinstance(target.tokenizer, MessageFormatTokenizer):
        raise InvalidRequestError(f"tools are set; {target.name} has no form for tool calls")
    for index, message in enumerate(request.messages):
        for number, part in enumerate(message.content if isinstance(message.content, tuple) else ()):
            if part.get("type") != "text":
                where = f"messages[{index}].content[{number}]"
                raise InvalidRequestError(f"{where} is of type {part.get('type')!r}; {target.name} reads text alone")


def _check_prompt_can_fit(target: TokenModel, request: ChatRequest) -> None:
    """Refuse what cannot fit, however it is encoded: a message has at least a token, which is only so long."""
    most = target.context_length
    num_messages = len(request.messages)
    if num_messages >= most:
        raise make_context_length_error(f"there are {num_messages} messages; {target.name} has room for {most} tokens")
    if not isinstance(target.tokenizer, BoundedTokenizer):
        return
    num_chars = len(request.prefix) + sum(len(message.text) for message in request.messages)
    if num_chars > most * target.tokenizer.max_token_chars:
        message = f"the prompt has {num_chars} characters; {target.name} has room for {most} tokens"
        raise make_context_length_error(message)
