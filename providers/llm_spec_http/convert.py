"""Builds request bodies in a dialect of OpenAI's chat completions. No I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from llm_spec import ChatMessage, ChatRequest, InvalidRequestError, Sampling, StreamEvent, TextDelta
from llm_spec.kit.openai_logprobs import build_logprob_fields
from llm_spec_http.dialects.base import Body, ServerDialect

__all__ = [
    "RepeatedPrefixStripper",
    "build_request_body",
    "build_sampling_fields",
]


_STREAM_FIELDS: Final = {"stream": True, "stream_options": {"include_usage": True}}


def build_request_body(request: ChatRequest, model: str, dialect: ServerDialect, *, stream: bool = True) -> Body:
    """Build a request's JSON without the fields that are not set.

    `extra` comes last, so its fields replace others of the same name.
    """
    body: Body = {"model": model, **_build_prompt_fields(request, dialect), **(_STREAM_FIELDS if stream else {})}
    body |= build_sampling_fields(request.sampling, dialect)
    if request.max_tokens:
        body["max_tokens"] = request.max_tokens
    if request.stop:
        body["stop"] = list(request.stop)
    if request.tools:
        body["tools"] = [dict(tool) for tool in request.tools]
    if request.tool_choice:
        body["tool_choice"] = request.tool_choice
    if request.response_format:
        body["response_format"] = request.response_format
    body |= build_logprob_fields(request)
    if request.prefix and request.raw:
        body["prompt"] += request.prefix
    elif request.prefix:
        _add_continuation_fields(body, request.prefix, dialect)
    if request.prediction is not None and dialect.prediction:
        body["prediction"] = {"type": "content", "content": request.prediction}
    return body | dict(request.extra) if request.extra else body


def _build_prompt_fields(request: ChatRequest, dialect: ServerDialect) -> Body:
    if request.raw:
        return {"prompt": request.messages[0].text}
    return {"messages": [_build_message(message, dialect) for message in request.messages]}


def _build_message(message: ChatMessage, dialect: ServerDialect) -> Body:
    """Build a message with the dialect's roles and names; fields that the client added stay."""
    body = message.to_openai()
    if message.role == "developer" and dialect.renders_templates:
        body["role"] = "system"
    if message.reasoning and message.native is None:
        del body["reasoning_content"]
        body |= dict.fromkeys(dialect.reasoning_fields, message.reasoning)
    if "reasoning_content" not in dialect.reasoning_fields and message.native is None:
        body.pop("reasoning_details", None)  # such a server refuses unknown fields
    return body


def build_sampling_fields(sampling: Sampling, dialect: ServerDialect) -> Body:
    """Return the sampling fields that are set, with the dialect's names."""
    fields = {name: value for name, value in vars(sampling).items() if value is not None}
    del fields["logit_bias"]
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    for name, dialect_name in dialect.sampling_names.items():
        if name in fields:
            fields[dialect_name] = fields.pop(name)
    return fields


def _add_continuation_fields(body: Body, prefix: str, dialect: ServerDialect) -> None:
    if dialect.continuation is None:
        raise InvalidRequestError(f"prefix is set; {dialect.name} cannot continue an assistant's text")
    if prefix != prefix.rstrip():
        raise InvalidRequestError(
            f"prefix ends in whitespace ({prefix[-8:]!r}), which chat templates strip; end it before the whitespace"
        )
    dialect.continuation(body, prefix)


class RepeatedPrefixStripper:
    """Removes a repeated prefix from the beginning of an answer, however its pieces are cut.

    Text is held back while it may still be the beginning of the prefix.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._held_text = ""

    def strip_events(self, events: list[StreamEvent]) -> list[StreamEvent]:
        """Return the next events, with only the text that may be shown."""
        if not self._prefix:
            return events
        shown = [replace(e, text=self.push(e.text)) if isinstance(e, TextDelta) else e for e in events]
        return [e for e in shown if not isinstance(e, TextDelta) or e.text or e.token_ids]

    def push(self, text: str) -> str:
        """Add text and return what may be shown."""
        if not self._prefix:
            return text
        self._held_text += text
        if len(self._held_text) < len(self._prefix) and self._prefix.startswith(self._held_text):
            return ""
        return self.flush()

    def flush(self) -> str:
        """Return the text that is held back, without the prefix if it is there in full."""
        shown, self._held_text = self._held_text.removeprefix(self._prefix), ""
        self._prefix = ""
        return shown
