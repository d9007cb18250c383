"""Answers that are more than text (tool calls, reasoning), for strategies that know nothing but text.

A strategy speaks raw text by token ids: what the model wrote, marks of calls and all. One layer outside of it makes the
message's events of the tokens that it confirms:

    chat's own stream --ids--> strategy --confirmed ids--> MessageAnswer --events-->
          |                                                    ^     ^
          +---------- what chat made of its tokens ------------+     +--- the server's message parser

While the confirmed tokens are those of chat's own stream, the events are chat's own, and cost nothing. From where the
strategy is ahead of that stream they come from the parser, which reads all of the answer at once: as often as may be
without being busy for more than a small part of the time. What it gives has to go on from what was emitted. Where it
fails or does not, it is not believed any more, and the answer goes on from the chat endpoint, if it can.

Where the server constrains decoding (strict tools, a response format), a stream goes on with that constraint, which
starts anew with each request. So none begins where it may have begun before (docs/decisions/0008).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn

from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.contract.endpoint import (
    ConstrainedStreaming,
    DecodingConstraint,
    MessageParser,
    ParsedMessage,
    SampledToken,
    TokenEndpoint,
)
from llm_spec.contract.errors import LlmSpecError, TargetError, TransientError, UnsupportedError, format_error_line
from llm_spec.contract.events import (
    AnswerDetail,
    ChatResponse,
    Fallback,
    Finish,
    FinishReason,
    ReasoningDelta,
    StreamEvent,
    TextDelta,
    ToolCallDelta,
)
from llm_spec.contract.messages import ChatMessage, ReasoningDetail, ToolCall
from llm_spec.contract.optional import WrappedDraft, open_draft_for_request
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest, Sampling
from llm_spec.contract.response import append_tool_call_delta, complete_from_stream
from llm_spec.contract.tools import find_constrained_part, find_message_parts
from llm_spec.local.detokenizing import MAX_CHARACTER_TOKENS, REPLACEMENT_CHARACTER, find_longest_partial_mark
from llm_spec.measure.clock import get_loop_clock
from llm_spec.strategies.base import (
    ConstraintBegunError,
    ReadyStrategy,
    Refusal,
    StrategyContext,
    count_call_if_target_is_metered,
)
from llm_spec.strategies.registry import Prepare

__all__ = ["prepare_with_message_parser"]

_READ_AHEAD: Final = 256  # events of a strategy that may wait
_PAUSE_PER_PARSE: Final = 8.0  # of a parser's own time that passes before it is called again
_CONTROL_TOKEN: Final = re.compile(r"[<\[]\S*[>\]]")  # may end an answer: then it has no text
_UNKNOWN_TEXT: Final = "?"
_MESSAGE_EVENTS: Final = (TextDelta, ReasoningDelta, ReasoningDetail, AnswerDetail, ToolCallDelta)


def prepare_with_message_parser(prepare: Prepare, context: StrategyContext) -> ReadyStrategy | Refusal:
    """A strategy for a request whose answer may be more than text; refused where the target has no parser for it."""
    can = context.target.capabilities
    parser, endpoint = can.message_parser, can.token_endpoint
    parts = find_message_parts(context.request, separates_reasoning=can.separates_reasoning)
    if not parts or (parser is None and ("tool_calls" in parts or "form_after_reasoning" in parts)):
        return prepare(context)  # it refuses these by itself
    what = " and ".join(sorted(parts)).replace("_", " ")
    unreadable = Refusal(f"target {context.target.name} has no way to tell {what} from token ids")
    if parser is None or endpoint is None:
        return unreadable
    if context.request.stop:
        return Refusal("the request sets stop, and its answer is more than text")
    prepared = prepare(_ChatRun(context, endpoint, parser).context)
    if isinstance(prepared, Refusal):
        return prepared
    if not parts <= parser.parts:
        return unreadable
    return replace(prepared, run=partial(_open_answer, prepare, context, endpoint, parser))


@asynccontextmanager
async def _open_answer(
    prepare: Prepare, context: StrategyContext, endpoint: TokenEndpoint, parser: MessageParser
) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    run = _ChatRun(context, endpoint, parser)
    prepared = prepare(run.context)
    if isinstance(prepared, Refusal):
        raise UnsupportedError(prepared.reason)
    answer = _MessageAnswer(context, parser, run, prepared)
    try:
        async with aclosing(answer.stream_events()) as events:
            yield events
    finally:
        await answer.aclose()


# ------------------------------------------------------------------------------------------ the strategy's side


class _ChatRun:
    """One run of a strategy: the context it gets, and what chat made of the tokens of its own stream.

    `events`: each with the number of chat's tokens so far when it was made. `finish`: chat's, once its answer is whole.
    """

    def __init__(self, context: StrategyContext, endpoint: TokenEndpoint, parser: MessageParser) -> None:
        self.request, self.target = context.request, context.target
        self.parser = parser
        self.constrained = parser if isinstance(parser, ConstrainedStreaming) else None
        self.prompt_ids: asyncio.Future[list[int]] | None = None
        self.constraint: asyncio.Future[DecodingConstraint | None] | None = None
        self.token_ids: list[int] = []
        self.events: list[tuple[int, StreamEvent]] = []
        self.ends: list[int] = [0]  # numbers of tokens after which chat has given what it made of them
        self.finish: Finish | None = None
        self.end_ids: set[int] = set()  # tokens that ended a stream
        self.endpoint = raw_endpoint = _RawEndpoint(endpoint, self)
        target = _RawTarget(context.target, raw_endpoint)
        draft = None if context.draft is None else _RawPromptDraft(context.draft, raw_endpoint)
        self.context = replace(
            context,
            target=target,
            draft=draft,
            writes_raw_text=True,
            keeps_constraints=self.constrained is not None,
        )

    async def get_prompt_ids(self) -> list[int]:
        """The prompt, as the strategy has encoded it, or had it encoded."""
        return await self.endpoint.encode_chat(self.request)

    def end_chat(self, made: Sequence[StreamEvent], finish: Finish) -> None:
        """Chat's answer is whole."""
        self.add_piece((), made)
        self.finish = finish

    def forget_chat(self) -> None:
        """Chat begins anew; nothing that it wrote was confirmed."""
        self.token_ids.clear()
        self.events.clear()
        self.ends = [0]
        self.finish = None

    def add_piece(self, token_ids: Sequence[int], made: Sequence[StreamEvent]) -> None:
        """Chat wrote more tokens, and made events of them."""
        self.token_ids += token_ids
        self.events += [(len(self.token_ids), event) for event in made]
        self.ends.append(len(self.token_ids))


class _RawTarget:
    """A target whose answers are raw text, by token ids alone."""

    def __init__(self, target: LlmProvider, endpoint: _RawEndpoint) -> None:
        self.name = target.name
        self._endpoint = endpoint
        self.capabilities = replace(
            target.capabilities,
            token_endpoint=endpoint,
            continue_prefix=False,  # chat would continue the raw text as if it were a message's content
            message_parser=None,
            whole_answers=False,
            discoverable=frozenset(),
        )

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return self._endpoint.stream_chat(request)

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """The target is its owner's."""


class _RawEndpoint:
    """A target's token endpoint; what its chat makes of its tokens is kept apart, and its text is the tokens' own."""

    def __init__(self, endpoint: TokenEndpoint, run: _ChatRun) -> None:
        self._endpoint = endpoint
        self._run = run

    @property
    def context_length(self) -> int | None:
        return self._endpoint.context_length

    async def encode(self, text: str) -> list[int]:
        return await self._endpoint.encode(text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self._endpoint.decode(token_ids)

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        if self._run.prompt_ids is None:
            self._run.prompt_ids = asyncio.ensure_future(self._endpoint.encode_chat(request))
            self._run.prompt_ids.add_done_callback(_take_exception)
        return await asyncio.shield(self._run.prompt_ids)

    async def decode_prompt(self) -> str:
        """The prompt as text, with the marks of its template."""
        return await self._endpoint.decode(await self.encode_chat(self._run.request))

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        return await self._endpoint.sample_next(prefixes, sampling)

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self._run.forget_chat()
        async with (
            self._endpoint.stream_chat(request) as events,
            aclosing(_write_raw_text(self._endpoint, events, self._run, is_chat=True)) as raw_events,
        ):
            yield raw_events

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with (
            await self._open_stream_after(token_ids, request) as events,
            aclosing(_write_raw_text(self._endpoint, events, self._run, is_chat=False)) as raw_events,
        ):
            yield raw_events

    async def _open_stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """A stream that is constrained as chat's is; raises ConstraintBegunError where it cannot begin there."""
        constrained, constraint = self._run.constrained, await self._find_constraint()
        if constrained is None or constraint is None:  # tools are in the prompt already
            return self._endpoint.stream_after(
                token_ids, replace(request, tools=(), tool_choice=None, response_format=None)
            )
        prompt_ids = await self._run.get_prompt_ids()
        written_ids = token_ids[len(prompt_ids) :]
        if await self._may_be_constrained_after(constraint, prompt_ids, written_ids):
            raise ConstraintBegunError("the server constrains what follows by what it has written itself")
        opened = constrained.stream_constrained_after(constraint, prompt_ids, written_ids, request)
        return count_call_if_target_is_metered(self._run.target, opened, request)

    async def _find_constraint(self) -> DecodingConstraint | None:
        """What the server says of the request; no call is made where nothing in the request may constrain an answer."""
        run = self._run
        if run.constrained is None or find_constrained_part(run.request) is None:
            return None
        if run.constraint is None:
            run.constraint = asyncio.ensure_future(run.constrained.find_constraint(run.request))
            run.constraint.add_done_callback(_take_exception)
        return await asyncio.shield(run.constraint)

    async def _may_be_constrained_after(
        self, constraint: DecodingConstraint, prompt_ids: Sequence[int], written_ids: Sequence[int]
    ) -> bool:
        """Whether a constraint may have begun with what was written: then its state is not that of its beginning."""
        text = await self._endpoint.decode(written_ids)
        if constraint.triggers:
            return _may_have_begun(constraint.triggers, text)
        if not constraint.is_reasoning_free:
            return True
        message = await self._run.parser.parse(self._run.request, prompt_ids, written_ids, None)
        is_reasoning = bool(message.reasoning) and text.endswith(message.reasoning)  # no mark of its end comes after
        return not is_reasoning or bool(message.content or message.tool_calls)


def _may_have_begun(triggers: Sequence[str], text: str) -> bool:
    """Whether a trigger is in a text, or may begin at its end, be it with a part of a character."""
    is_in_text = any(trigger in text for trigger in triggers)
    return is_in_text or text.endswith(REPLACEMENT_CHARACTER) or find_longest_partial_mark(text, triggers) > 0


async def _write_raw_text(
    endpoint: TokenEndpoint, events: AsyncIterator[StreamEvent], run: _ChatRun, *, is_chat: bool
) -> AsyncGenerator[StreamEvent]:
    """The tokens of a stream with their own text, whatever the server made of them; `run` gets that of chat's."""
    raw_text = _RawText(endpoint)
    made: list[StreamEvent] = []  # of the tokens whose ids come next
    async for event in events:
        if isinstance(event, Finish):
            if is_chat:
                run.end_chat(made, event)
            for delta in await raw_text.end(event, run.end_ids):
                yield delta
            yield event
        elif not isinstance(event, _MESSAGE_EVENTS):
            yield event
        elif not isinstance(event, TextDelta) or event.token_ids is None:
            made.append(event)
        else:
            if event.text:
                made.append(replace(event, token_ids=None))
            if is_chat:
                run.add_piece(event.token_ids, made)
            written = await raw_text.add_tokens(event.token_ids, may_be_end=not made)
            made.clear()
            if written is not None:
                yield written


class _RawText:
    """The text of one stream's tokens. The one that ends it has none: what may be it waits for what follows."""

    def __init__(self, endpoint: TokenEndpoint) -> None:
        self._endpoint = endpoint
        self._held_ids: list[int] = []

    async def add_tokens(self, token_ids: Sequence[int], *, may_be_end: bool) -> TextDelta | None:
        """More tokens, of which the server has made nothing if one `may_be_end`."""
        held = self._held_ids
        held += token_ids
        text = await _decode_tokens(self._endpoint, held)
        is_cut = text.endswith(REPLACEMENT_CHARACTER) and len(held) <= 2 * MAX_CHARACTER_TOKENS
        if not held or is_cut or (may_be_end and _CONTROL_TOKEN.fullmatch(text) is not None):
            return None
        delta = TextDelta(text, "plain", tuple(held))
        held.clear()
        return delta

    async def end(self, finish: Finish, end_ids: set[int]) -> list[TextDelta]:
        """What is left; the token that ended the answer is added to `end_ids`."""
        written, ending = self._held_ids, list[int]()
        if finish.finish_reason in ("stop", "tool_calls"):
            written, ending = written[:-1], written[-1:]
            end_ids.update(ending)
        text = await _decode_tokens(self._endpoint, written)
        pieces = [(text, written), ("", ending)]
        return [TextDelta(text, "plain", tuple(token_ids)) for text, token_ids in pieces if token_ids]


async def _decode_tokens(endpoint: TokenEndpoint, token_ids: Sequence[int]) -> str:
    """The text of tokens, put together from single ones, which are remembered, as far as those are whole.

    Only drafts go by it: where the server cannot tell it, any text will do, and no answer fails for it.
    """
    try:
        texts = [await endpoint.decode([token_id]) for token_id in token_ids]
        is_cut = len(texts) > 1 and any(REPLACEMENT_CHARACTER in text for text in texts)
        return await endpoint.decode(token_ids) if is_cut else "".join(texts)
    except LlmSpecError:
        return _UNKNOWN_TEXT


def _take_exception(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # perhaps nobody waits for it any more


class _RawPromptDraft(WrappedDraft):
    """A draft that is shown the prompt as the target reads it, with the calls in it as the model writes them."""

    def __init__(self, draft: DraftProvider, endpoint: _RawEndpoint) -> None:
        super().__init__(draft)
        self._endpoint = endpoint
        self._prompt: str | None = None

    def for_request(self) -> _RawPromptDraft:
        return _RawPromptDraft(open_draft_for_request(self._draft), self._endpoint)

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self._prompt = self._prompt or await self._endpoint.decode_prompt()
        prompt = self._prompt
        raw = replace(
            request,
            messages=(ChatMessage("user", prompt),),
            raw=True,
            tools=(),
            tool_choice=None,
            response_format=None,
            session_id=None,
        )
        async with self._draft.draft(raw, max_tokens) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """The draft is its owner's."""


# ------------------------------------------------------------------------------------------ the caller's side


class _Emitted:
    """The message as it was emitted so far."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: dict[int, ToolCall] = {}

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)

    def add_event(self, event: StreamEvent) -> None:
        match event:
            case TextDelta():
                self.content += event.text
            case ReasoningDelta():
                self.reasoning += event.text
            case ToolCallDelta():
                self.calls[event.index] = append_tool_call_delta(self.calls.get(event.index), event)
            case _:
                pass

    def make_message(self) -> ParsedMessage:
        calls = tuple(self.calls[index] for index in sorted(self.calls))
        return ParsedMessage(self.content, self.reasoning, calls)

    def list_missing_events(self, message: ParsedMessage) -> list[StreamEvent] | None:
        """What is left to emit of a message; None: it does not begin with what was emitted."""
        calls = message.tool_calls
        if not (message.content.startswith(self.content) and message.reasoning.startswith(self.reasoning)):
            return None
        if any(index >= len(calls) for index in self.calls):
            return None
        events: list[StreamEvent] = []
        if more := message.reasoning[len(self.reasoning) :]:
            events.append(ReasoningDelta(more))
        if more := message.content[len(self.content) :]:
            events.append(TextDelta(more, "accepted"))
        for index, call in enumerate(calls):
            own = self.calls.get(index)
            if own is None:
                events.append(ToolCallDelta(index, call.id, call.name, call.arguments))
            elif own.name != call.name or not call.arguments.startswith(own.arguments):
                return None
            elif more := call.arguments[len(own.arguments) :]:
                events.append(ToolCallDelta(index, None, None, more))
        return events


class _MessageAnswer:
    """One answer: the events of the tokens that a strategy confirms."""

    def __init__(self, context: StrategyContext, parser: MessageParser, run: _ChatRun, prepared: ReadyStrategy) -> None:
        self._context = context
        self._parser = parser
        self._run = run
        self._clock = get_loop_clock()
        self._emitted = _Emitted()
        self._token_ids: list[int] = []  # that are confirmed
        self._num_parsed = 0
        self._num_chat_events = 0  # that were emitted
        self._is_chat_behind = False  # or wrote something else: from there on the parser tells
        self._num_chat_tokens = 0  # confirmed ones that are chat's own, up to there
        self._next_parse_s = 0.0
        self._finish: Finish | None = None
        self._error: Exception | None = None  # with which the strategy ended
        self._has_ended = False
        self._arrivals: asyncio.Queue[StreamEvent | Exception | None] = asyncio.Queue(_READ_AHEAD)
        self._reading = asyncio.create_task(self._read_strategy(prepared))

    async def stream_events(self) -> AsyncGenerator[StreamEvent]:
        """The answer."""
        try:
            while not self._has_ended:
                others = self._take_in(await self._take_arrivals())
                for event in (*others, *self._take_chat_events()):
                    yield event
                if self._is_parse_due():
                    for event in await self._parse():
                        yield event
                if self._error is not None:
                    raise self._error
        except _ParserError as error:
            yield Fallback(str(error), "target")
            await self.aclose()
            async with aclosing(self._answer_by_chat(error)) as rest:
                async for event in rest:
                    yield event
            return
        if self._finish is not None:
            yield self._finish if not self._is_chats_answer() else self._take_chats_reason(self._finish)

    async def aclose(self) -> None:
        """End the strategy, and wait until it is closed."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        futures: list[asyncio.Future[Any] | None] = [self._run.prompt_ids, self._run.constraint]
        calls = [future for future in futures if future is not None]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    # ------------------------------------------------------------------------------------------ inside

    async def _read_strategy(self, prepared: ReadyStrategy) -> None:
        try:
            async with prepared.run() as events:
                async for event in events:
                    await self._arrivals.put(event)
                    if isinstance(event, Finish):
                        return
            await self._arrivals.put(None)
        except Exception as error:  # noqa: BLE001 - raised where it is taken
            await self._arrivals.put(error)

    async def _take_arrivals(self) -> list[StreamEvent | Exception | None]:
        """What the strategy gave; nothing where it is time to parse."""
        wait_s = max(0.0, self._next_parse_s - self._clock()) if self._is_unparsed() else None
        arrivals: list[StreamEvent | Exception | None] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                arrivals.append(await self._arrivals.get())
        while not self._arrivals.empty():
            arrivals.append(self._arrivals.get_nowait())
        return arrivals

    def _take_in(self, arrivals: Sequence[StreamEvent | Exception | None]) -> list[StreamEvent]:
        """Note which tokens are confirmed, and how the answer ends; what else the strategy reports is passed on."""
        others: list[StreamEvent] = []
        for arrival in arrivals:
            if isinstance(arrival, Exception):
                self._error, self._has_ended = arrival, True
            elif arrival is None or isinstance(arrival, Finish):
                self._finish, self._has_ended = arrival, True
            elif isinstance(arrival, TextDelta):
                self._confirm_tokens(arrival)
            else:
                others.append(arrival)
        return others

    def _confirm_tokens(self, delta: TextDelta) -> None:
        if delta.token_ids is None:
            raise TargetError(f"{self._context.target.name} does not tell the token ids of its answer")
        start = len(self._token_ids)
        if not self._is_chat_behind:  # what chat made of a piece it tells with all of the piece's tokens
            self._num_chat_tokens = max(end for end in self._run.ends if end <= start)
        # a stream that others wait for may have come to its end before it is confirmed
        self._token_ids += [token_id for token_id in delta.token_ids if token_id not in self._run.end_ids]
        end = len(self._token_ids)
        self._is_chat_behind = self._is_chat_behind or self._run.token_ids[start:end] != self._token_ids[start:]

    def _take_chat_events(self) -> list[StreamEvent]:
        """What chat made of the tokens that are confirmed."""
        run = self._run
        if self._is_chat_behind:
            return []
        is_whole = self._is_chats_answer()
        events: list[StreamEvent] = []
        while self._num_chat_events < len(run.events):
            at, event = run.events[self._num_chat_events]
            if at > len(self._token_ids) and not is_whole:
                break
            self._num_chat_events += 1
            self._emitted.add_event(event)
            events.append(event)
        return events

    def _is_chats_answer(self) -> bool:
        """Whether the answer has ended, and is all that chat wrote; the token that ended it is not confirmed."""
        run = self._run
        is_all = run.finish is not None and len(self._token_ids) >= len(run.token_ids) - 1
        return self._finish is not None and is_all and not self._is_chat_behind

    def _is_unparsed(self) -> bool:
        return self._is_chat_behind and self._num_parsed < len(self._token_ids)

    def _take_chats_reason(self, finish: Finish) -> Finish:
        """An end that another stream may have come to as well, which knows nothing of calls."""
        own = self._run.finish
        if own is None or finish.finish_reason != "stop":
            return finish
        return replace(finish, finish_reason=own.finish_reason, stopped_by=own.stopped_by)

    def _is_parse_due(self) -> bool:
        if self._has_ended:
            return self._error is None and not self._is_chats_answer()
        return self._is_unparsed() and self._clock() >= self._next_parse_s

    async def _parse(self) -> list[StreamEvent]:
        """What is new in the message of all confirmed tokens."""
        began_s, num_tokens, finish = self._clock(), len(self._token_ids), self._finish
        reason = None if finish is None else finish.finish_reason
        try:
            await self._compare_with_chat()
            message, missing = await self._read_tokens(self._token_ids, reason, self._emitted)
        except LlmSpecError as error:
            raise _ParserError(format_error_line(error)) from error
        self._num_parsed = num_tokens
        ended_s = self._clock()
        self._next_parse_s = ended_s + _PAUSE_PER_PARSE * (ended_s - began_s)
        if missing is None:
            self._reject_parser()
        for event in missing:
            self._emitted.add_event(event)
        if finish is not None and message.finish_reason is not None:
            stopped_by = "tool_calls" if message.finish_reason == "tool_calls" else finish.stopped_by
            self._finish = replace(finish, finish_reason=message.finish_reason, stopped_by=stopped_by)
        return missing

    async def _compare_with_chat(self) -> None:
        """Before the parser is heard for the first time: whether it reads chat's own tokens of this answer as chat."""
        num_tokens, self._num_chat_tokens = self._num_chat_tokens, 0
        if num_tokens:
            written = self._token_ids[:num_tokens]
            by_chat = _Emitted()
            for at, event in self._run.events:
                if at <= num_tokens:
                    by_chat.add_event(event)
            _, missing = await self._read_tokens(written, None, by_chat)
            if missing != []:
                self._reject_parser()

    async def _read_tokens(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, emitted: _Emitted
    ) -> tuple[ParsedMessage, list[StreamEvent] | None]:
        """The message of tokens, and what of it was not emitted; None: it does not go on from that."""
        request, prompt_ids = self._context.request, await self._run.get_prompt_ids()
        message = await self._parser.parse(request, prompt_ids, token_ids, finish_reason)
        missing = emitted.list_missing_events(message)
        if missing is None:
            message = await self._parser.parse(request, prompt_ids, token_ids, finish_reason, by_token=True)
            missing = emitted.list_missing_events(message)
        return message, missing

    def _reject_parser(self) -> NoReturn:
        self._parser.reject()
        raise _ParserError("the server's message parser does not agree with its chat endpoint")

    async def _answer_by_chat(self, failure: _ParserError) -> AsyncGenerator[StreamEvent]:
        """The rest of the answer, which the chat endpoint writes anew.

        Greedily it is the same answer; where nothing was emitted, any answer will do.
        """
        target, request, emitted = self._context.target, self._context.request, self._emitted
        if not emitted.is_empty and request.sampling.temperature != 0:
            raise TransientError(f"{target.name} does not read its own answer any more: {failure}")
        again = _Emitted()
        async with target.stream(request) as events:
            async for event in events:
                if not isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
                    yield event
                    continue
                again.add_event(event)
                for more in emitted.list_missing_events(again.make_message()) or ():
                    emitted.add_event(more)
                    yield replace(more, origin="plain") if isinstance(more, TextDelta) else more
        if emitted.list_missing_events(again.make_message()) != []:
            raise TargetError(f"{target.name} wrote another answer where it was to go on with one")


class _ParserError(Exception):
    """The message parser is of no use any more."""
