"""A streamed answer: the SDK's JSON values to this library's events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

from llm_spec import StreamEvent, TargetError, TextDelta, TransientError
from llm_spec.provider_kit import ChunkReader, has_finish_reason
from llm_spec_openai.client import DoneTrackingStream, OpenAIChatClient
from llm_spec_openai.failures import SDK_ERRORS

__all__ = ["read_sdk_answer_chunks", "read_sdk_answer_events"]


async def read_sdk_answer_events(
    client: OpenAIChatClient, stream: DoneTrackingStream, *, has_logprobs: bool = False
) -> AsyncGenerator[StreamEvent]:
    """The events of a stream; with `has_logprobs` text comes with its log-probabilities.

    Raises TransientError for a stream that breaks, or ends without a finish reason and `[DONE]`, TargetError or
    InvalidRequestError for an error that the server reports in it.
    """
    reader = ChunkReader(has_logprobs=has_logprobs)
    text: list[str] = []
    try:
        async for value in stream:
            for event in reader.read_chunk(_check_chunk_object(client, value, text)):
                if isinstance(event, TextDelta):
                    text.append(event.text)
                yield event
    except SDK_ERRORS as error:
        raise client.convert_sdk_error(
            error, "".join(text)
        ) from None  # an SDK's error holds the request, and with it the key
    finish = reader.make_finish(is_done=stream.is_done)
    if finish is None:
        raise TransientError(client.format_error_message(reader.failure_message), partial_text="".join(text))
    yield finish


async def read_sdk_answer_chunks(
    client: OpenAIChatClient, stream: DoneTrackingStream
) -> AsyncGenerator[Mapping[str, Any]]:
    """The JSON objects of a stream as they are; raises as `read_sdk_answer_events`."""
    has_begun = is_ended = False
    try:
        async for value in stream:
            chunk = _check_chunk_object(client, value, ())
            has_begun, is_ended = True, is_ended or has_finish_reason(chunk)
            yield chunk
    except SDK_ERRORS as error:
        raise client.convert_sdk_error(error) from None
    if not (is_ended or (has_begun and stream.is_done)):
        raise TransientError(client.format_error_message("ended its answer without a finish reason"))


def _check_chunk_object(client: OpenAIChatClient, value: object, text: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TargetError(
            client.format_error_message("sent something that is not a JSON object"), partial_text="".join(text)
        )
    return cast("dict[str, Any]", value)
