"""Converts the SDK's JSON values of a streamed answer to this library's events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

from llm_spec import StreamEvent, TargetError, TextDelta
from llm_spec.kit.answer_parts import BrokenAnswerError
from llm_spec.kit.http_errors import find_reported_error
from llm_spec.kit.openai_chat import ChunkReader
from llm_spec.kit.openai_chunks import ChunkNormalizer
from llm_spec_openai.client import DoneTrackingStream, OpenAIChatClient
from llm_spec_openai.failures import SDK_ERRORS

__all__ = ["read_sdk_answer_chunks", "read_sdk_answer_events"]


async def read_sdk_answer_events(
    client: OpenAIChatClient, stream: DoneTrackingStream, reader: ChunkReader
) -> AsyncGenerator[StreamEvent]:
    """Yield the events of a stream.

    Raises TransientError if the stream breaks, or ends without a finish reason and `[DONE]`. An
    error that the server reports in it is raised as by `make_status_error`, such as TargetError or
    InvalidRequestError. TargetError is raised for what cannot be read.
    """
    text: list[str] = []
    try:
        async for value in stream:
            for event in reader.read_chunk(_check_chunk_object(client, value, text)):
                if isinstance(event, TextDelta):
                    text.append(event.text)
                yield event
    except SDK_ERRORS as error:
        # from None, as an SDK's error holds the request, and with it the key
        raise client.convert_sdk_error(error, "".join(text)) from None
    except BrokenAnswerError as error:
        raise client.build_broken_answer_error(error, "".join(text)) from None
    finish = reader.make_finish(is_done=stream.is_done)
    if finish is None:
        raise client.build_broken_answer_error(
            BrokenAnswerError(reader.failure_message, is_transient=True), "".join(text)
        )
    for event in reader.flush():
        yield event
    yield finish


async def read_sdk_answer_chunks(
    client: OpenAIChatClient, stream: DoneTrackingStream, normalizer: ChunkNormalizer
) -> AsyncGenerator[Mapping[str, Any]]:
    """Yield the normalized JSON objects of a stream. Raises as `read_sdk_answer_events`."""
    try:
        async for value in stream:
            yield normalizer.normalize(_check_chunk_object(client, value, ()))
        if (rest := normalizer.finish(is_done=stream.is_done)) is not None:
            yield rest
    except SDK_ERRORS as error:
        raise client.convert_sdk_error(error) from None
    except BrokenAnswerError as error:
        raise client.build_broken_answer_error(error) from None


def _check_chunk_object(client: OpenAIChatClient, value: object, text: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TargetError(
            client.format_error_message("sent something that is not a JSON object"), partial_text="".join(text)
        )
    chunk = cast("dict[str, Any]", value)
    reported = None if chunk.get("choices") else find_reported_error(chunk)
    if reported is not None:
        raise BrokenAnswerError("reported an error", reported=reported)
    return chunk
