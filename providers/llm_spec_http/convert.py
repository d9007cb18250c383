"""Between this library's values and OpenAI's chat completions: requests to bodies, chunks to events. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from llm_spec import (
    ChatRequest,
    InvalidRequestError,
    ReasoningDelta,
    Sampling,
    StreamEvent,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from llm_spec.chat import FinishReason, StoppedBy
from llm_spec_http.dialects.base import Body, Dialect, TokenApi

__all__ = [
    "STOPPED_BY",
    "PrefixStripper",
    "chunk_events",
    "chunk_finish",
    "first_choice",
    "read_usage",
    "request_body",
    "sampling_fields",
]

_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
STOPPED_BY: Final[Mapping[FinishReason, StoppedBy]] = {
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}


def request_body(request: ChatRequest, model: str, dialect: Dialect) -> Body:
    """The JSON of a streaming request; what the caller left open is left out, `extra` comes last and wins."""
    optional: Body = {
        "max_tokens": request.max_tokens,
        "stop": list(request.stop),
        "tools": [dict(tool) for tool in request.tools],
        "tool_choice": request.tool_choice,
        "response_format": request.response_format,
    }
    body: Body = {
        "model": model,
        "messages": [message.to_openai() for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling_fields(request.sampling, dialect),
        **{name: value for name, value in optional.items() if value},
    }
    if request.prefix:
        _continue(body, request.prefix, dialect)
    if request.prediction is not None and dialect.prediction:
        body["prediction"] = {"type": "content", "content": request.prediction}
    return body | dict(request.extra)


def sampling_fields(sampling: Sampling, dialect: Dialect) -> Body:
    """How to sample, in the dialect's names; what the caller left open is left out."""
    fields = {name: value for name, value in dataclasses.asdict(sampling).items() if value not in (None, {})}
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    return {dialect.sampling_names.get(name, name): value for name, value in fields.items()}


def _continue(body: Body, prefix: str, dialect: Dialect) -> None:
    if dialect.continuation is None:
        raise InvalidRequestError(f"prefix is set; {dialect.name} cannot continue an assistant's text")
    if prefix != prefix.rstrip():
        raise InvalidRequestError(
            f"prefix ends in whitespace ({prefix[-8:]!r}), which chat templates strip; end it before the whitespace"
        )
    dialect.continuation(body, prefix)


def chunk_events(chunk: Mapping[str, Any], token_api: TokenApi | None = None) -> Iterator[StreamEvent]:
    """The events of one chunk, without its finish; choices but the first are passed over.

    Of chat or of a plain completion. With a `token_api` text comes with its token ids, otherwise empty text gives none.
    """
    choice = first_choice(chunk)
    delta = cast("Mapping[str, Any]", choice.get("delta") or {})
    token_ids = None if token_api is None else token_api.token_ids(choice)
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        yield ReasoningDelta(reasoning)
    content = choice.get("text") or delta.get("content") or ""
    if isinstance(content, str) and (content or token_ids):
        yield TextDelta(content, token_ids=token_ids)
    for position, call in enumerate(cast("list[Mapping[str, Any]]", delta.get("tool_calls") or [])):
        function = cast("Mapping[str, Any]", call.get("function") or {})
        index = call.get("index")
        yield ToolCallDelta(
            position if index is None else int(index),
            call.get("id") or None,
            function.get("name") or None,
            function.get("arguments") or "",
        )


def chunk_finish(chunk: Mapping[str, Any]) -> FinishReason | None:
    """Why the answer ended, in the chunk that says so."""
    reason = first_choice(chunk).get("finish_reason")
    return None if reason is None else _FINISH_REASONS.get(str(reason), "stop")


def read_usage(chunk: Mapping[str, Any]) -> Usage | None:
    """The token counts of a chunk that has them."""
    usage = chunk.get("usage")
    if not isinstance(usage, Mapping):
        return None
    counts = cast("Mapping[str, Any]", usage)
    prompt = cast("Mapping[str, Any]", counts.get("prompt_tokens_details") or {})
    answer = cast("Mapping[str, Any]", counts.get("completion_tokens_details") or {})
    return Usage(
        input_tokens=counts.get("prompt_tokens") or 0,
        output_tokens=counts.get("completion_tokens") or 0,
        cached_input_tokens=prompt.get("cached_tokens") or 0,
        reasoning_tokens=answer.get("reasoning_tokens") or 0,
        accepted_prediction_tokens=answer.get("accepted_prediction_tokens") or 0,
        rejected_prediction_tokens=answer.get("rejected_prediction_tokens") or 0,
    )


def first_choice(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    """The choice that this library reads; empty in a chunk without one."""
    for choice in cast("list[Mapping[str, Any]]", chunk.get("choices") or []):
        if not choice.get("index"):
            return choice
    return {}


class PrefixStripper:
    """Takes a repeated prefix off the beginning of an answer, once, wherever its pieces are cut.

    What has come is held back while it may still turn out to be the prefix.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; return what may be shown."""
        if not self._prefix:
            return text
        self._held += text
        if len(self._held) < len(self._prefix) and self._prefix.startswith(self._held):
            return ""
        return self.flush()

    def flush(self) -> str:
        """Return what is held back: it was no repeated prefix, or more than that."""
        shown, self._held = self._held.removeprefix(self._prefix), ""
        self._prefix = ""
        return shown
