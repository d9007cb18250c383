"""A streamed answer: a response's bytes to this library's events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any, Final

import aiohttp

from llm_spec import ChatResponse, LlmSpecError, StreamEvent, TargetError, TextDelta, TransientError
from llm_spec.provider_kit import ChatResponseBuilder, ChunkReader, ReadTokenIds, has_finish_reason
from llm_spec_http.client import HttpClient
from llm_spec_http.convert import RepeatedPrefixStripper
from llm_spec_http.sse import SseReader

__all__ = ["read_http_answer_chunks", "read_http_answer_events", "read_whole_http_answer"]

_DONE: Final = "[DONE]"
_DRAIN_TIMEOUT_S: Final = 0.05  # how long the end of a body may take that has nothing more to say


async def read_http_answer_events(
    client: HttpClient,
    response: aiohttp.ClientResponse,
    *,
    repeated: str = "",
    read_token_ids: ReadTokenIds | None = None,
    has_logprobs: bool = False,
) -> AsyncGenerator[StreamEvent]:
    """The events of a stream; `repeated` is text that the server may repeat at its beginning.

    With `read_token_ids` text comes with its token ids, with `has_logprobs` with its log-probabilities. Raises
    TransientError for a stream that breaks, or ends without a finish reason and `[DONE]`, TargetError or
    InvalidRequestError for an error that the server reports in it.
    """
    event_data, stripper = _EventDataReader(response), RepeatedPrefixStripper(repeated)
    reader = ChunkReader(read_token_ids, has_logprobs=has_logprobs)
    texts: list[str] = []
    try:
        while block := await event_data.read_data_block():
            for data in block:
                events = reader.read_chunk(client.parse_chunk(data))
                for event in stripper.strip_events(events) if repeated else events:
                    if type(event) is TextDelta:
                        texts.append(event.text)
                    yield event
    except LlmSpecError as error:  # first: an InvalidRequestError is a ValueError too, but no broken connection
        if isinstance(error, TargetError):
            error.partial_text = "".join(texts)
        raise
    except (aiohttp.ClientError, ValueError) as error:
        raise client.build_connection_error(error, "".join(texts)) from error
    finish = reader.make_finish(is_done=event_data.is_done)
    if finish is None:
        raise TransientError(client.format_error_message(reader.failure_message), partial_text="".join(texts))
    if held := stripper.flush():
        yield TextDelta(held)
    yield finish


async def read_http_answer_chunks(
    client: HttpClient, response: aiohttp.ClientResponse
) -> AsyncGenerator[Mapping[str, Any]]:
    """The JSON objects of a stream as they are; raises as `read_http_answer_events`."""
    event_data, has_begun, is_ended = _EventDataReader(response), False, False
    try:
        while block := await event_data.read_data_block():
            for data in block:
                chunk = client.parse_chunk(data)
                has_begun, is_ended = True, is_ended or has_finish_reason(chunk)
                yield chunk
    except LlmSpecError:
        raise
    except (aiohttp.ClientError, ValueError) as error:
        raise client.build_connection_error(error) from error
    if not (is_ended or (has_begun and event_data.is_done)):
        raise TransientError(client.format_error_message("ended its answer without a finish reason"))


def read_whole_http_answer(
    client: HttpClient, answer: Mapping[str, Any], *, repeated: str = "", has_logprobs: bool = False
) -> ChatResponse:
    """An answer that came at once; raises TransientError for one without a finish reason."""
    choices: list[Mapping[str, Any]] = answer.get("choices") or []
    reader, stripper = ChunkReader(has_logprobs=has_logprobs), RepeatedPrefixStripper(repeated)
    events = reader.read_chunk(
        {**answer, "choices": [{**choice, "delta": choice.get("message")} for choice in choices]}
    )
    builder, finish = ChatResponseBuilder(), reader.make_finish()
    for event in stripper.strip_events(events):
        builder.add_event(event)
    if held := stripper.flush():
        builder.add_event(TextDelta(held))
    response = None if finish is None else builder.add_event(finish)
    if response is None:
        raise TransientError(client.format_error_message(reader.failure_message), partial_text=builder.text)
    return response


class _EventDataReader:
    """The data of a stream's events, up to `[DONE]` (then `is_done`) or its end."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._reader = SseReader()
        self._is_ended = False
        self.is_done = False

    async def read_data_block(self) -> list[str]:
        """What came together; empty at the end."""
        while not self._is_ended:
            block = await self._content.readany()
            self._is_ended = not block
            data = self._reader.feed_data(block) if block else [event.data for event in self._reader.finish()]
            if _DONE in data:
                self._is_ended = self.is_done = True
                del data[data.index(_DONE) :]
            if data:
                return data
        await self._read_rest_of_body()
        return []

    async def _read_rest_of_body(self) -> None:
        """Read the end of the body, which servers send after the last event. Only then can the connection be reused."""
        if not self._content.at_eof():
            with suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                    while await self._content.readany():
                        pass
