"""Parses the bodies of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from aiohttp import web

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.messages import ChatMessage
from llm_spec.testing.server.vocabulary import ASSISTANT

__all__ = [
    "Json",
    "compute_max_answer_tokens",
    "parse_max_tokens",
    "read_chat_messages",
    "read_json_body",
    "read_stop_strings",
    "render_messages",
    "wants_token_ids",
    "wants_usage",
]

Json: TypeAlias = dict[str, Any]


async def read_json_body(request: web.Request) -> Json:
    try:
        body = await request.json()
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return cast("Json", body)


def read_chat_messages(body: Json) -> list[ChatMessage]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages must be a list of at least one message")
    return [ChatMessage.from_openai(message) for message in cast("list[Mapping[str, Any]]", messages)]


def render_messages(body: Json, *, continued: bool) -> str:
    """Return the messages as one text.

    `continued`: the last message stays open, and no mark of an answer follows.
    """
    text = "".join(f"<|{message.role}|>{message.text}<|end|>" for message in read_chat_messages(body))
    if continued:
        return text.removesuffix("<|end|>")
    return text + (ASSISTANT if body.get("add_generation_prompt", True) else "")


def parse_max_tokens(body: Json, default: int | None) -> int | None:
    value = body.get("max_completion_tokens", body.get("max_tokens", default))
    check_number(InvalidRequestError, "max_tokens", value, 1, integer=True)
    return cast("int | None", value)


def compute_max_answer_tokens(context_length: int, num_prompt_tokens: int, max_tokens: int | None) -> int:
    """Return the most tokens of the answer.

    Raises InvalidRequestError, with vLLM's texts, if they do not fit.
    """
    limit = f"This model's maximum context length is {context_length} tokens"
    room = context_length - num_prompt_tokens
    if room < 1:
        raise InvalidRequestError(
            f"{limit}. However, your request has {num_prompt_tokens} input tokens. "
            "Please reduce the length of the input messages."
        )
    if max_tokens is not None and max_tokens > room:
        raise InvalidRequestError(
            f"'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. {limit} and your request has "
            f"{num_prompt_tokens} input tokens ({max_tokens} > {context_length} - {num_prompt_tokens})."
        )
    return room if max_tokens is None else max_tokens


def read_stop_strings(body: Json) -> list[str]:
    stop: str | list[str] = body.get("stop") or []
    return [stop] if isinstance(stop, str) else stop


def wants_token_ids(body: Json) -> bool:
    return body.get("return_token_ids") is True


def wants_usage(body: Json) -> bool:
    options: Json = body.get("stream_options") or {}
    return bool(options.get("include_usage"))
