"""A streamed answer: a response's bytes to this library's events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import aiohttp

from llm_spec import Finish, StreamEvent, TargetError, TextDelta, TransientError, Usage
from llm_spec.chat import FinishReason
from llm_spec.openai_chat import (
    STOPPED_BY,
    CallNumbers,
    ReadTokenIds,
    chunk_events,
    chunk_finish,
    ends_a_choice,
    read_usage,
)
from llm_spec_http.client import HttpClient
from llm_spec_http.convert import PrefixStripper
from llm_spec_http.sse import ServerEvent, SseReader

__all__ = ["read_answer", "read_chunks"]


async def read_answer(
    client: HttpClient,
    response: aiohttp.ClientResponse,
    *,
    repeated: str = "",
    read_token_ids: ReadTokenIds | None = None,
) -> AsyncGenerator[StreamEvent]:
    """The events of a stream; `repeated` is text that the server may repeat at its beginning.

    With `read_token_ids` text comes with its token ids. Raises TransientError for a stream that breaks or ends without
    a finish reason, TargetError or InvalidRequestError for an error that the server reports in it.
    """
    stripper, numbers = PrefixStripper(repeated), CallNumbers()
    finish: FinishReason | None = None
    usage: Usage | None = None
    text = ""
    try:
        async with aclosing(_chunks(client, response)) as chunks:
            async for chunk in chunks:
                for event in map(numbers.numbered, chunk_events(chunk, read_token_ids)):
                    if isinstance(event, TextDelta):
                        shown = stripper.push(event.text)
                        text += shown
                        if not shown and not event.token_ids:
                            continue
                        if shown != event.text:
                            event = replace(event, text=shown)  # noqa: PLW2901
                    yield event
                finish = chunk_finish(chunk) or finish
                usage = read_usage(chunk) or usage
    except (aiohttp.ClientError, ValueError) as error:
        raise client.broken(error, text) from error
    except TargetError as error:
        error.partial_text = text
        raise
    if finish is None:
        raise TransientError(client.told("ended its answer without a finish reason"), partial_text=text)
    if held := stripper.flush():
        yield TextDelta(held)
    yield Finish(finish, usage, STOPPED_BY.get(finish))


async def read_chunks(client: HttpClient, response: aiohttp.ClientResponse) -> AsyncGenerator[Mapping[str, Any]]:
    """The JSON objects of a stream as they are; raises as `read_answer`."""
    is_ended = False
    try:
        async with aclosing(_chunks(client, response)) as chunks:
            async for chunk in chunks:
                is_ended = is_ended or ends_a_choice(chunk)
                yield chunk
    except (aiohttp.ClientError, ValueError) as error:
        raise client.broken(error) from error
    if not is_ended:
        raise TransientError(client.told("ended its answer without a finish reason"))


async def _chunks(client: HttpClient, response: aiohttp.ClientResponse) -> AsyncGenerator[Mapping[str, Any]]:
    """The JSON objects of the stream, up to `[DONE]` or its end."""
    reader = SseReader()
    async for block in response.content.iter_any():
        for event in reader.feed(block):
            if event.data == "[DONE]":
                return
            yield _checked(client, event)
    for event in reader.finish():
        if event.data != "[DONE]":
            yield _checked(client, event)


def _checked(client: HttpClient, event: ServerEvent) -> Mapping[str, Any]:
    chunk = client.parsed(event.data)
    if chunk.get("error"):
        raise client.reported(chunk)
    return chunk
