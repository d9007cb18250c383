"""HttpMessageParser: a server that reads token ids as its chat endpoint does, tried on that endpoint's own answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
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
    TransientError,
)
from llm_spec.contract.endpoint import Feature, MessagePart, ParsedMessage
from llm_spec.provider_kit import ChatResponseBuilder, ChunkReader, FinishReason, now
from llm_spec_http.client import HttpClient
from llm_spec_http.convert import build_request_body
from llm_spec_http.dialects.base import Body, MessageApiDialect, ServerDialect
from llm_spec_http.tokens import HttpTokenEndpoint

__all__ = ["HttpMessageParser"]

_MAX_LATE: Final = 0.1  # of an answer's time: by how much a trial may delay its end …
_MIN_TRIAL_S: Final = 0.1  # … for which it has at least so long
_CUTS: Final = (0.3, 0.6, 0.9)  # of an answer's tokens, after which the message so far is tried


class HttpMessageParser:
    """A `MessageParser`. `parts` is what was found, and shared by all that use the server; `on_lost` as elsewhere."""

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
    ) -> ParsedMessage:
        if not token_ids:
            return ParsedMessage(finish_reason=finish_reason)
        body = self._build_body(request)
        try:
            choice = await self._api.parse(self._post_json, body, prompt_ids, token_ids, finish_reason)
            return _read_message(choice)
        except TransientError:
            raise
        except LlmSpecError:
            self.reject()
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.reject()
            what = f"answered in another form ({type(error).__name__}: {error})"
            raise TargetError(self._client.format_error_message(what)) from error

    def reject(self) -> None:
        self._on_lost("message_parser")

    async def try_on_answer(
        self,
        request: ChatRequest,
        events: AsyncIterator[StreamEvent],
        on_tried: Callable[[frozenset[MessagePart] | None], None],
    ) -> AsyncGenerator[StreamEvent]:
        """Chat's own stream, with its token ids, without them; at its end the parser is tried on all of it.

        `on_tried` is told what the answer had beside text, and both read alike; None: they do not agree.
        """
        began_s, builder, token_ids = now(), ChatResponseBuilder(), list[int]()
        has_all_ids = True
        async for told in events:
            event = told
            if isinstance(told, TextDelta):
                has_all_ids = has_all_ids and told.token_ids is not None
                token_ids += told.token_ids or ()
                if not told.text:
                    continue
                event = replace(told, token_ids=None)
            response = builder.add_event(event)
            if response is not None and has_all_ids and token_ids:
                try:
                    async with asyncio.timeout(max(_MIN_TRIAL_S, _MAX_LATE * (now() - began_s))):
                        on_tried(await self._try_on_message(request, token_ids, response))
                except (TimeoutError, TransientError):
                    pass  # the next answer may tell
                except LlmSpecError:
                    on_tried(None)
            yield event

    # ------------------------------------------------------------------------------------------ inside

    async def _try_on_message(
        self, request: ChatRequest, token_ids: list[int], response: ChatResponse
    ) -> frozenset[MessagePart] | None:
        """What an answer has beside text that the parser reads as chat did, or None: it does not."""
        message, own = (
            response.message,
            ParsedMessage(
                response.message.text, response.reasoning, response.message.tool_calls, response.finish_reason
            ),
        )
        names: dict[MessagePart, bool] = {"tool_calls": bool(message.tool_calls), "reasoning": bool(response.reasoning)}
        parts = frozenset(name for name, is_there in names.items() if is_there)
        if not parts:
            return parts
        try:
            prompt_ids, is_constrained = await self._api.render(self._post_json, self._build_body(request))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise TargetError(self._client.format_error_message(f"renders in another form ({error})")) from error
        if is_constrained or prompt_ids != await self._tokens.encode_chat(request):
            return None
        is_cut = response.finish_reason == "length"
        written = token_ids if is_cut else token_ids[:-1]  # without the token that ends it
        reason: FinishReason = "length" if is_cut else "stop"
        whole = await self.parse(request, prompt_ids, written, reason)
        so_far = [await self.parse(request, prompt_ids, written[: int(cut * len(written))], None) for cut in _CUTS]
        agrees = _strip_ids(whole) == _strip_ids(own) and all(_begins_with(whole, part) for part in so_far)
        return parts if agrees else None

    def _build_body(self, request: ChatRequest) -> Body:
        return build_request_body(request, self._model, self._dialect, stream=False)

    async def _post_json(self, path: str, body: Body) -> Any:
        return await self._client.post_json(path, {"model": self._model, **body})


def _read_message(choice: Mapping[str, Any]) -> ParsedMessage:
    reader, builder = ChunkReader(), ChatResponseBuilder()
    for event in reader.read_chunk({"choices": [choice]}):
        builder.add_event(event)
    finish = reader.make_finish()
    response = cast("ChatResponse", builder.add_event(finish or Finish("stop")))
    return ParsedMessage(
        response.message.text,
        response.reasoning,
        response.message.tool_calls,
        None if finish is None else finish.finish_reason,
    )


def _strip_ids(message: ParsedMessage) -> ParsedMessage:
    """A message without the ids of its calls, which are made up."""
    return message._replace(tool_calls=tuple(replace(call, id="") for call in message.tool_calls))


def _begins_with(whole: ParsedMessage, part: ParsedMessage) -> bool:
    """Whether a message may become the whole one when more of it comes."""
    if not (whole.content.startswith(part.content) and whole.reasoning.startswith(part.reasoning)):
        return False
    if len(part.tool_calls) > len(whole.tool_calls):
        return False
    return all(
        own.name == call.name and call.arguments.startswith(own.arguments)
        for own, call in zip(part.tool_calls, whole.tool_calls, strict=False)
    )
