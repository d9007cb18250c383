"""HttpMessageParser: lets a server parse token ids as its chat endpoint does.

The parser is tested on that endpoint's own answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final, cast

from llm_spec import (
    ChatRequest,
    ChatResponse,
    Finish,
    LlmSpecError,
    StreamEvent,
    TargetError,
    TextDelta,
    ToolCall,
    TransientError,
)
from llm_spec.contract.endpoint import DecodingConstraint, Feature, MessagePart, ParsedMessage
from llm_spec.contract.events import FinishReason
from llm_spec.contract.response import ChatResponseBuilder
from llm_spec.contract.tools import find_constrained_part
from llm_spec.kit.openai_chat import ChunkReader
from llm_spec.measure.clock import now
from llm_spec_http.client import HttpClient
from llm_spec_http.convert import build_request_body
from llm_spec_http.dialects.base import Body, MessageApiDialect, ServerDialect
from llm_spec_http.tokens import HttpTokenEndpoint

__all__ = ["HttpMessageParser"]

_MAX_LATE: Final = 0.1  # how much a trial may delay an answer's end, as a share of its time
_MIN_TRIAL_S: Final = 0.1  # that a trial may always take
_DECODER: Final = json.JSONDecoder()
_CUTS: Final = (0.3, 0.6, 0.9)  # shares of an answer's tokens after which the parser is tried


class HttpMessageParser:
    """A `MessageParser`.

    `parts` are the tested parts of messages, shared by all that use the server. `on_lost` is called
    with a feature if the server no longer supports it.
    """

    def __init__(
        self,
        client: HttpClient,
        model: str,
        dialect: ServerDialect,
        api: MessageApiDialect,
        *,
        tokens: HttpTokenEndpoint,
        on_lost: Callable[[Feature], None],
    ) -> None:
        self.parts: frozenset[MessagePart] = frozenset()
        self._client = client
        self._model = model
        self._dialect = dialect
        self._api = api
        self._tokens = tokens
        self._on_lost = on_lost

    async def parse(
        self,
        request: ChatRequest,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        *,
        by_token: bool = False,
    ) -> ParsedMessage:
        message, is_trusted = await self._parse(request, prompt_ids, token_ids, finish_reason, by_token=by_token)
        if not is_trusted:
            self.reject()
        return message

    async def _parse(
        self,
        request: ChatRequest,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        *,
        by_token: bool,
    ) -> tuple[ParsedMessage, bool]:
        """Return the message, and True if reading all tokens at once can still be trusted."""
        if not token_ids:
            return ParsedMessage(finish_reason=finish_reason), True
        body, is_trusted = self._build_body(request), True
        try:
            if by_token:
                message = await self._parse_one_by_one(body, prompt_ids, token_ids, finish_reason)
            else:
                message, is_trusted = await self._parse_at_once(body, prompt_ids, token_ids, finish_reason)
        except TransientError:
            raise
        except LlmSpecError:
            self.reject()
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.reject()
            what = f"answered in an unexpected form ({type(error).__name__}: {error})"
            raise TargetError(self._client.format_error_message(what)) from error
        # For a cut answer vLLM's stream parser may report "tool_calls"; its chat endpoint does not.
        message = message if finish_reason == "stop" else message._replace(finish_reason=finish_reason)
        return message, is_trusted

    async def _parse_at_once(
        self, body: Body, prompt_ids: Sequence[int], token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> tuple[ParsedMessage, bool]:
        """Parse all tokens at once as a stream would, which loses text in some of vLLM's parsers.

        So a whole answer is also parsed without streaming. If the two differ, it is parsed token by
        token.
        """
        message = _read_message([await self._api.parse(self._post_json, body, prompt_ids, token_ids, finish_reason)])
        if _has_broken_call(message, is_whole=finish_reason == "stop"):
            return await self._parse_one_by_one(body, prompt_ids, token_ids, finish_reason), True
        # The last call of a cut answer is incomplete.
        if finish_reason is None or (finish_reason != "stop" and message.tool_calls):
            return message, True
        if await self._is_read_whole(message, body, prompt_ids, token_ids, finish_reason):
            return message, True
        by_tokens = await self._parse_one_by_one(body, prompt_ids, token_ids, finish_reason)
        return by_tokens, _strip_ids(by_tokens)._replace(finish_reason=message.finish_reason) == _strip_ids(message)

    async def _is_read_whole(
        self,
        message: ParsedMessage,
        body: Body,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: FinishReason,
    ) -> bool:
        """Return True if parsing without streaming finds nothing more.

        That parser may leave out text before a call.
        """
        try:
            choice = await self._api.parse_whole(self._post_json, body, prompt_ids, token_ids, finish_reason)
        except TransientError:
            return False
        whole = _read_message([choice])
        return (
            whole.content in message.content
            and whole.reasoning in message.reasoning
            and _load_calls(whole) == _load_calls(message)
        )

    async def _parse_one_by_one(
        self, body: Body, prompt_ids: Sequence[int], token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> ParsedMessage:
        """Parse token by token, as chat does.

        vLLM's parsers may read a broken call differently if it comes at once.
        """
        choices: list[Mapping[str, Any]] = []
        for end in range(1, len(token_ids) + 1):
            reason = finish_reason if end == len(token_ids) else None
            read = token_ids[:end]
            choices.append(await self._api.parse(self._post_json, body, prompt_ids, read, reason, num_read=end - 1))
        message = _read_message(choices)
        # The calls ended before the last token, so the parser may report "stop" for it.
        if finish_reason == "stop" and message.tool_calls:
            message = message._replace(finish_reason="tool_calls")
        return message

    def reject(self) -> None:
        self._on_lost("message_parser")

    async def find_constraint(self, request: ChatRequest) -> DecodingConstraint | None:
        _, constraint = await self._render(request)
        return constraint

    def stream_constrained_after(
        self,
        constraint: DecodingConstraint,
        prompt_ids: Sequence[int],
        written_ids: Sequence[int],
        request: ChatRequest,
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        path, body = self._api.build_constrained_stream(
            constraint, prompt_ids, written_ids, max_tokens=request.max_tokens, seed=request.sampling.seed
        )
        return self._tokens.open_stream(path, body, request, feature="message_parser")

    async def try_on_answer(
        self,
        request: ChatRequest,
        events: AsyncIterator[StreamEvent],
        on_tried: Callable[[frozenset[MessagePart] | None], None],
    ) -> AsyncGenerator[StreamEvent]:
        """Yield chat's own events without token ids; at the end, try the parser on all of it.

        `on_tried` is called with the parts beside text that both read alike, or with None if they
        differ.
        """
        began_s, builder, answer = now(), ChatResponseBuilder(), _ChatAnswer()
        async for event in events:
            token_ids = event.token_ids if isinstance(event, TextDelta) else None
            shown = replace(event, token_ids=None) if isinstance(event, TextDelta) else event
            response = builder.add_event(shown)
            if response is None:
                answer.add(shown, token_ids)
            elif answer.has_all_ids:
                try:
                    async with asyncio.timeout(max(_MIN_TRIAL_S, _MAX_LATE * (now() - began_s))):
                        on_tried(await self._try_on_message(request, answer, response))
                except (TimeoutError, TransientError):
                    pass  # the next answer may show it
                except LlmSpecError:
                    on_tried(None)
            if not isinstance(shown, TextDelta) or shown.text:
                yield shown

    # --------------------------------------------------------------------------------------- inside

    async def _try_on_message(
        self, request: ChatRequest, answer: _ChatAnswer, response: ChatResponse
    ) -> frozenset[MessagePart] | None:
        """Return an answer's parts beside text, or None if the parser does not read it as chat did.

        If the answer is constrained to a form, that may cause a difference, which then shows
        nothing.
        """
        own = _make_message(response)._replace(finish_reason=response.finish_reason)
        constrained_part = find_constrained_part(request)
        has_form = constrained_part == "answer" and bool(own.content or own.tool_calls)
        names: dict[MessagePart, bool] = {
            "tool_calls": bool(own.tool_calls),
            "reasoning": bool(own.reasoning),
            "form_after_reasoning": bool(own.reasoning) and has_form,
        }
        parts: frozenset[MessagePart] = frozenset(name for name, is_there in names.items() if is_there)
        if not parts:
            return parts
        prompt_ids, constraint = await self._render(request)
        if constraint is not None and constrained_part is None:
            return None
        is_same = prompt_ids == await self._tokens.encode_chat(request) and await self._reads_as_chat(
            request, prompt_ids, answer, own
        )
        return parts if is_same else None if constrained_part is None else frozenset()

    async def _reads_as_chat(
        self, request: ChatRequest, prompt_ids: Sequence[int], answer: _ChatAnswer, own: ParsedMessage
    ) -> bool:
        """Return True if the parser reads an answer and its beginnings as chat did."""
        is_cut = own.finish_reason == "length"
        # An answer that is not cut has an end token, which is no text.
        written = answer.token_ids if is_cut else answer.token_ids[:-1]
        whole: tuple[int, ParsedMessage, FinishReason | None] = (len(written), own, "length" if is_cut else "stop")
        for num_tokens, message, reason in [whole, *((*cut, None) for cut in answer.list_beginnings())]:
            for by_token in (False, True):
                parsed, is_trusted = await self._parse(
                    request, prompt_ids, written[:num_tokens], reason, by_token=by_token
                )
                if not is_trusted:
                    return False
                if _strip_ids(parsed) == _strip_ids(message):
                    break
            else:
                return False
        return True

    async def _render(self, request: ChatRequest) -> tuple[list[int], DecodingConstraint | None]:
        try:
            return await self._api.render(self._post_json, self._build_body(request))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise TargetError(
                self._client.format_error_message(f"rendered the prompt in an unexpected form ({error})")
            ) from error

    def _build_body(self, request: ChatRequest) -> Body:
        return build_request_body(request, self._model, self._dialect, stream=False)

    async def _post_json(self, path: str, body: Body) -> Any:
        return await self._client.post_json(path, {"model": self._model, **body})


class _ChatAnswer:
    """An answer from chat, with what chat made of its first tokens at a few places."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._events: list[tuple[int, StreamEvent]] = []  # with the number of tokens up to each
        self._undated: list[StreamEvent] = []  # whose token ids come next

    @property
    def has_all_ids(self) -> bool:
        return bool(self.token_ids) and not self._undated

    def add(self, event: StreamEvent, token_ids: Sequence[int] | None) -> None:
        self._undated.append(event)
        if token_ids is not None:
            self.token_ids += token_ids
            self._events += [(len(self.token_ids), event) for event in self._undated]
            self._undated.clear()

    def list_beginnings(self) -> list[tuple[int, ParsedMessage]]:
        """Return numbers of tokens, each with the message that chat had made of them."""
        ends = [end for end, _ in self._events]
        chosen = {ends[int(cut * len(ends))] for cut in _CUTS} - {0, len(self.token_ids)}
        return [(end, self._join(end)) for end in sorted(chosen)]

    def _join(self, num_tokens: int) -> ParsedMessage:
        builder = ChatResponseBuilder()
        for end, event in self._events:
            if end <= num_tokens:
                builder.add_event(event)
        return _make_message(cast("ChatResponse", builder.add_event(Finish("stop"))))


def _has_broken_call(message: ParsedMessage, *, is_whole: bool) -> bool:
    """Return True if a call's arguments are not one JSON value.

    If the message is not whole, the last arguments may be the beginning of one.
    """
    calls = message.tool_calls
    return any(_is_broken(call, is_whole=is_whole or call is not calls[-1]) for call in calls)


def _is_broken(call: ToolCall, *, is_whole: bool) -> bool:
    arguments = call.arguments.strip()
    try:
        _, end = _DECODER.raw_decode(arguments)
    except (ValueError, RecursionError):
        return is_whole
    return end < len(arguments)


def _read_message(choices: Sequence[Mapping[str, Any]]) -> ParsedMessage:
    reader, builder = ChunkReader(), ChatResponseBuilder()
    for choice in choices:
        for event in reader.read_chunk({"choices": [choice]}):
            builder.add_event(event)
    finish = reader.make_finish()
    message = _make_message(cast("ChatResponse", builder.add_event(finish or Finish("stop"))))
    return message._replace(finish_reason=None if finish is None else finish.finish_reason)


def _make_message(response: ChatResponse) -> ParsedMessage:
    return ParsedMessage(response.message.text, response.reasoning, response.message.tool_calls)


def _load_calls(message: ParsedMessage) -> list[tuple[str, Any]]:
    """Return names and parsed arguments: some of vLLM's parsers change the JSON's layout."""
    calls: list[tuple[str, Any]] = []
    for call in message.tool_calls:
        try:
            calls.append((call.name, json.loads(call.arguments)))
        except (ValueError, RecursionError):
            calls.append((call.name, call.arguments))
    return calls


def _strip_ids(message: ParsedMessage) -> ParsedMessage:
    """Return a message without the ids of its calls, which are random."""
    return message._replace(tool_calls=tuple(replace(call, id="") for call in message.tool_calls))
