"""Readers that turn a response's bytes into this library's events."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

import aiohttp

from llm_spec import ChatResponse, StreamEvent, TextDelta, TransientError
from llm_spec.contract.response import ChatResponseBuilder
from llm_spec.kit.openai_chat import ChunkReader
from llm_spec.kit.openai_chunks import ChunkNormalizer
from llm_spec_http.client import HttpClient
from llm_spec_http.convert import RepeatedPrefixStripper
from llm_spec_http.sse import SseReader

__all__ = ["read_http_answer_chunks", "read_http_answer_events", "read_whole_http_answer"]

_DONE: Final = "[DONE]"
_BLANKS: Final = BOM_UTF8 + b" \t\r\n"
_MAX_WHOLE_BYTES: Final = 64 * 1024 * 1024  # of an answer that is not streamed
_DRAIN_TIMEOUT_S: Final = 0.05  # to read the end of a body after its last event


async def read_http_answer_events(
    client: HttpClient, response: aiohttp.ClientResponse, reader: ChunkReader, *, repeated: str = ""
) -> AsyncGenerator[StreamEvent]:
    """Yield the events of an answer, streamed or whole.

    `repeated` is the prefix that the answer may repeat at its beginning; it is removed.

    Raises TransientError if the answer breaks off, or ends without a finish reason and `[DONE]`. An
    error that the server reports in the answer is raised as TargetError or InvalidRequestError.
    Raises TargetError if the answer cannot be read.
    """
    event_data, stripper = _EventDataReader(response), RepeatedPrefixStripper(repeated)
    texts: list[str] = []
    with client.translate_failures(texts):
        while block := await event_data.read_data_block():
            for data in block:
                events = reader.read_chunk(client.parse_chunk(data))
                for event in stripper.strip_events(events) if repeated else events:
                    if type(event) is TextDelta:
                        texts.append(event.text)
                    yield event
    finish = reader.make_finish(is_done=event_data.is_done)
    if finish is None:
        raise TransientError(client.format_error_message(reader.failure_message), partial_text="".join(texts))
    for event in stripper.strip_events(reader.flush()):
        yield event
    if held := stripper.flush():
        yield TextDelta(held)
    yield finish


async def read_http_answer_chunks(
    client: HttpClient, response: aiohttp.ClientResponse, normalizer: ChunkNormalizer
) -> AsyncGenerator[Mapping[str, Any]]:
    """Yield the normalised JSON objects of an answer; raises as `read_http_answer_events`."""
    event_data = _EventDataReader(response)
    with client.translate_failures():
        while block := await event_data.read_data_block():
            for data in block:
                yield normalizer.normalize(client.parse_chunk(data))
        if (rest := normalizer.finish(is_done=event_data.is_done)) is not None:
            yield rest


async def read_whole_http_answer(events: AsyncIterator[StreamEvent]) -> ChatResponse:
    """Collect an answer's events into one response; raises TransientError if it has no finish."""
    builder = ChatResponseBuilder()
    async for event in events:
        if (response := builder.add_event(event)) is not None:
            return response
    raise TransientError("the answer ended without a finish")


class _EventDataReader:
    """The data of a stream's events, up to `[DONE]` or the end of the stream.

    `is_done` is True after `[DONE]`.

    If a body is not a stream but one JSON value, that value is its only data. Servers send one when
    they do not stream, and when they refuse a request with status 200. The first byte shows which
    of the two it is: not every server sets the content type.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._reader = SseReader()
        self._is_begun = self._is_ended = False
        self.is_done = False

    async def read_data_block(self) -> list[str]:
        """Return the data of the next events that arrived together; [] at the end."""
        while not self._is_ended:
            block = await self._content.readany()
            if not self._is_begun and (start := block.lstrip(_BLANKS)):
                self._is_begun = True
                if start.startswith((b"{", b"[")):
                    self._is_ended = True
                    return [await self._read_rest_as_text(block)]
            self._is_ended = not block
            data = self._reader.feed_data(block) if block else self._reader.finish_data()
            if _DONE in data:
                self._is_ended = self.is_done = True
                del data[data.index(_DONE) :]
            if data:
                return data
        await self._read_rest_of_body()
        return []

    async def _read_rest_as_text(self, start: bytes) -> str:
        """Read a whole body; raises ValueError if it is too long."""
        pieces, num_bytes = [start], len(start)
        while piece := await self._content.readany():
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > _MAX_WHOLE_BYTES:
                raise ValueError("it sent too many bytes")
        return b"".join(pieces).lstrip(_BLANKS).decode(errors="replace")

    async def _read_rest_of_body(self) -> None:
        """Read the bytes after the last event, so that the connection can be reused."""
        if not self._content.at_eof():
            with suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                    while await self._content.readany():
                        pass
