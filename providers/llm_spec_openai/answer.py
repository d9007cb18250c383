"""A streamed answer: the SDK's JSON values to this library's events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

from openai import AsyncStream

from llm_spec import Finish, StreamEvent, TargetError, TextDelta, TransientError, Usage
from llm_spec.chat import FinishReason
from llm_spec.openai_chat import (
    STOPPED_BY,
    CallNumbers,
    chunk_events,
    chunk_finish,
    ends_a_choice,
    first_choice,
    read_usage,
)
from llm_spec_openai.client import ChatClient
from llm_spec_openai.failures import FAILURES

__all__ = ["read_answer", "read_chunks"]


async def read_answer(client: ChatClient, stream: AsyncStream[object]) -> AsyncGenerator[StreamEvent]:
    """The events of a stream. What the model says to refuse is text, and the answer ends with `content_filter`.

    Raises TransientError for a stream that breaks or ends without a finish reason, TargetError or InvalidRequestError
    for an error that the server reports in it.
    """
    numbers = CallNumbers()
    finish: FinishReason | None = None
    usage: Usage | None = None
    text, refused = "", False
    try:
        async for value in stream:
            chunk = _object(client, value, text)
            if refusal := _refusal(chunk):
                refused = True
                text += refusal
                yield TextDelta(refusal)
            for event in map(numbers.numbered, chunk_events(chunk)):
                if isinstance(event, TextDelta):
                    text += event.text
                yield event
            finish = chunk_finish(chunk) or finish
            usage = read_usage(chunk) or usage
    except FAILURES as error:
        raise client.failure(error, text) from None  # an SDK's error holds the request, and with it the key
    if finish is None:
        raise TransientError(client.told("ended its answer without a finish reason"), partial_text=text)
    if refused and finish == "stop":  # OpenAI's word for a refusal; for the caller it is no answer
        finish = "content_filter"
    yield Finish(finish, usage, STOPPED_BY.get(finish))


async def read_chunks(client: ChatClient, stream: AsyncStream[object]) -> AsyncGenerator[Mapping[str, Any]]:
    """The JSON objects of a stream as they are; raises as `read_answer`."""
    is_ended = False
    try:
        async for value in stream:
            chunk = _object(client, value, "")
            is_ended = is_ended or ends_a_choice(chunk)
            yield chunk
    except FAILURES as error:
        raise client.failure(error) from None
    if not is_ended:
        raise TransientError(client.told("ended its answer without a finish reason"))


def _object(client: ChatClient, value: object, text: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TargetError(client.told("sent what is no JSON object"), partial_text=text)
    return cast("dict[str, Any]", value)


def _refusal(chunk: Mapping[str, Any]) -> str:
    delta = cast("Mapping[str, Any]", first_choice(chunk).get("delta") or {})
    refusal = delta.get("refusal")
    return refusal if isinstance(refusal, str) else ""
