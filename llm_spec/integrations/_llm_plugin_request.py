"""Converts a prompt of `llm` to a ChatRequest. Pure, except that it reads attachments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import llm
from llm.parts import AttachmentPart, Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from pydantic import Field, field_validator

from llm_spec.contract.messages import ChatMessage, ReasoningDetail, Role, ToolCall
from llm_spec.contract.request import ChatRequest, RequestOptions

__all__ = ["SpeculativeOptions", "build_reasoning_metadata", "convert_prompt_to_request"]

_METADATA_NAME = "llm-spec"  # in a part's `provider_metadata`


class SpeculativeOptions(llm.Options):
    """The options of `-o name value`."""

    temperature: float | None = Field(default=None, ge=0, le=100, description="0 always takes the likeliest token")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Sample from the likeliest tokens whose probabilities sum to this"
    )
    top_k: int | None = Field(default=None, ge=1, description="Sample from this many of the likeliest tokens")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Lowest probability of a token, relative to the likeliest"
    )
    max_tokens: int | None = Field(default=None, ge=1, description="Most tokens in the answer")
    seed: int | None = Field(default=None, ge=0, description="The same seed gives the same text")
    stop: str | None = Field(default=None, min_length=1, description="Text before which the answer ends")
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Penalty for tokens that have occurred"
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Penalty for tokens by how often they have occurred"
    )
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=100, description="Above 1: penalty for tokens of the prompt, too"
    )
    logit_bias: dict[int, float] | None = Field(default=None, description='Bias by token id, as JSON: {"1712": -100}')
    top_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="Log the log-probabilities of each token and of this many likely ones"
    )
    json_object: bool | None = Field(default=None, description="The answer is a JSON object")
    tool_choice: str | None = Field(default=None, description="auto, none, required, or the name of the tool to call")
    parallel_tool_calls: bool | None = Field(default=None, description="False: at most one call per answer")
    reasoning_effort: str | None = Field(default=None, description="How long to think: none, low, medium, high, …")
    strategy: str | None = Field(
        default=None, description="How the target verifies: auto, plain, tokens, race, probe, …"
    )

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _parse_logit_bias(cls, value: object) -> object:
        """Parse a text as JSON: the command line has only texts."""
        return json.loads(value) if isinstance(value, str) else value


_NO_REQUEST_OPTIONS = ("json_object", "strategy", "tool_choice", "parallel_tool_calls", "reasoning_effort")
_TOOL_CHOICES = ("auto", "none", "required")


def convert_prompt_to_request(prompt: llm.Prompt, *, max_tokens: int | None = None) -> ChatRequest:
    """Convert a prompt of `llm` and the conversation before it.

    `max_tokens` applies if the prompt's options set none.
    """
    chosen = cast("SpeculativeOptions", prompt.options)
    options: dict[str, Any] = chosen.model_dump(exclude_none=True, exclude=set(_NO_REQUEST_OPTIONS))
    options.setdefault("max_tokens", max_tokens)
    if prompt.schema:
        schema = {"name": "output", "schema": prompt.schema}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif chosen.json_object:
        options["response_format"] = {"type": "json_object"}
    options["tools"] = [_convert_llm_tool(tool) for tool in prompt.tools if isinstance(tool, llm.Tool)]
    if chosen.tool_choice is not None:
        is_name = chosen.tool_choice not in _TOOL_CHOICES
        named = {"type": "function", "function": {"name": chosen.tool_choice}}
        options["tool_choice"] = named if is_name else chosen.tool_choice
    extra = {"parallel_tool_calls": chosen.parallel_tool_calls, "reasoning_effort": chosen.reasoning_effort}
    options["extra"] = {name: value for name, value in extra.items() if value is not None}
    return ChatRequest.create(_convert_llm_messages(prompt.messages), **cast("RequestOptions", options))


def _convert_llm_tool(tool: llm.Tool) -> Mapping[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _convert_llm_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Convert all messages. A system prompt that every turn repeats is kept once."""
    out: list[ChatMessage] = []
    system: ChatMessage | None = None
    for message in messages:
        for mapped in _convert_llm_message(message):
            if mapped.role == "system" and mapped == system:
                continue
            system = mapped if mapped.role == "system" else system
            out.append(mapped)
    return out


def _convert_llm_message(message: Message) -> Iterator[ChatMessage]:
    for part in message.parts:
        if isinstance(part, ToolResultPart):
            yield ChatMessage("tool", part.output, tool_call_id=part.tool_call_id)
    text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
    calls = tuple(
        ToolCall(part.tool_call_id or "", part.name, json.dumps(part.arguments))
        for part in message.parts
        if isinstance(part, ToolCallPart) and not part.server_executed
    )
    attached = [part.attachment for part in message.parts if isinstance(part, AttachmentPart) and part.attachment]
    if attached:
        content: list[Mapping[str, Any]] = [{"type": "text", "text": text}] if text else []
        content += [{"type": "image_url", "image_url": {"url": _get_llm_image_url(image)}} for image in attached]
        yield ChatMessage(cast("Role", message.role), tuple(content))
    elif text or calls:
        thoughts = [part for part in message.parts if isinstance(part, ReasoningPart)]
        yield ChatMessage(
            cast("Role", message.role),
            text or None,
            tool_calls=calls,
            reasoning="".join(part.text for part in thoughts),
            reasoning_details=tuple(detail for part in thoughts for detail in _read_reasoning_metadata(part)),
        )


def build_reasoning_metadata(details: Iterable[ReasoningDetail]) -> dict[str, Any]:
    """Build the JSON that a part of reasoning keeps for the next turn. `llm` logs it."""
    return {_METADATA_NAME: [{"api": detail.api, "value": dict(detail.value)} for detail in details]}


def _read_reasoning_metadata(part: ReasoningPart) -> Iterator[ReasoningDetail]:
    for detail in (part.provider_metadata or {}).get(_METADATA_NAME) or ():
        yield ReasoningDetail(detail["api"], detail["value"])


def _get_llm_image_url(image: llm.Attachment) -> str:
    untyped: Any = image
    return image.url or f"data:{untyped.resolve_type()};base64,{untyped.base64_content()}"
