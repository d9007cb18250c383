"""A streamed answer: the SDK's JSON values to this library's events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

from llm_spec import StreamEvent, TargetError, TextDelta, TransientError
from llm_spec.openai_chat import ChunkReader, ends_a_choice
from llm_spec_openai.client import ChatClient, ChatStream
from llm_spec_openai.failures import FAILURES

__all__ = ["read_answer", "read_chunks"]


async def read_answer(client: ChatClient, stream: ChatStream) -> AsyncGenerator[StreamEvent]:
    """The events of a stream.

    Raises TransientError for a stream that breaks, or ends without a finish reason and `[DONE]`, TargetError or
    InvalidRequestError for an error that the server reports in it.
    """
    reader = ChunkReader()
    text: list[str] = []
    try:
        async for value in stream:
            for event in reader.read(_object(client, value, text)):
                if isinstance(event, TextDelta):
                    text.append(event.text)
                yield event
    except FAILURES as error:
        raise client.failure(error, "".join(text)) from None  # an SDK's error holds the request, and with it the key
    finish = reader.finish(is_done=stream.is_done)
    if finish is None:
        raise TransientError(client.told(reader.failure), partial_text="".join(text))
    yield finish


async def read_chunks(client: ChatClient, stream: ChatStream) -> AsyncGenerator[Mapping[str, Any]]:
    """The JSON objects of a stream as they are; raises as `read_answer`."""
    has_begun = is_ended = False
    try:
        async for value in stream:
            chunk = _object(client, value, ())
            has_begun, is_ended = True, is_ended or ends_a_choice(chunk)
            yield chunk
    except FAILURES as error:
        raise client.failure(error) from None
    if not (is_ended or (has_begun and stream.is_done)):
        raise TransientError(client.told("ended its answer without a finish reason"))


def _object(client: ChatClient, value: object, text: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TargetError(client.told("sent what is no JSON object"), partial_text="".join(text))
    return cast("dict[str, Any]", value)
