"""pydantic-ai's messages, tools and settings to a ChatRequest. Pure.

What `Model.prepare_messages` translates for every model (realtime speech, changes of instructions or tools) never
arrives here from an agent; a caller who drives a model by hand has to call it first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    BinaryContent,
    CachePoint,
    ImageUrl,
    InstructionPart,
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    RetryPromptPart,
    SystemPromptPart,
    TextContent,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models._tool_choice import resolve_tool_choice  # what all of pydantic-ai's own models decide by
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from llm_spec.chat import ChatMessage, ChatRequest, RequestOptions, ToolCall
from llm_spec.integrations._shared import convert_logprob_options

__all__ = ["convert_messages_to_request"]

_SCHEMA_NAME: Final = "final_result"  # where the output type has none
_OPTIONS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop_sequences": "stop",
    "openai_logprobs": "logprobs",
    "openai_top_logprobs": "top_logprobs",
}


def convert_messages_to_request(
    messages: Sequence[ModelMessage],
    settings: ModelSettings,
    parameters: ModelRequestParameters,
    *,
    has_json_mode: bool = False,
) -> ChatRequest:
    """The request that prepared settings and parameters mean; raises UserError for parts that chat has no place for.

    `has_json_mode`: an answer that is only prompted to be JSON can be held to be some JSON.
    """
    chosen: Mapping[str, Any] = settings
    options: dict[str, Any] = {
        ours: chosen[theirs] for theirs, ours in _OPTIONS.items() if chosen.get(theirs) is not None
    }
    options["logit_bias"] = {int(token): bias for token, bias in (settings.get("logit_bias") or {}).items()}
    options["tools"], options["tool_choice"] = _convert_pydantic_ai_tools(settings, parameters)
    options["response_format"] = _build_response_format(parameters, has_json_mode)
    options["extra"] = _build_extra_fields(settings, parameters, uses_tools=bool(options["tools"]))
    typed = cast("RequestOptions", convert_logprob_options(options))  # keys as in _OPTIONS and above
    return ChatRequest.create(list(_insert_instructions(messages, parameters)), **typed)


def _build_extra_fields(
    settings: ModelSettings, parameters: ModelRequestParameters, *, uses_tools: bool
) -> dict[str, Any]:
    body = settings.get("extra_body")
    extra: dict[str, Any] = dict(body) if isinstance(body, Mapping) else {}
    if uses_tools and "parallel_tool_calls" in settings:
        extra["parallel_tool_calls"] = settings["parallel_tool_calls"]
    if parameters.thinking is True:
        extra["enable_thinking"] = True
    elif parameters.thinking is not None:
        extra["reasoning_effort"] = parameters.thinking or "none"
    return extra


# ------------------------------------------------------------------------------------------- tools and output


def _convert_pydantic_ai_tools(
    settings: ModelSettings, parameters: ModelRequestParameters
) -> tuple[list[dict[str, Any]], Any]:
    resolved = resolve_tool_choice(settings, parameters)
    offered_tools = parameters.declared_tool_defs
    choice: Any = resolved
    if isinstance(resolved, tuple):
        choice, names = resolved
        if choice == "required" and len(names) == 1:
            choice = {"type": "function", "function": {"name": next(iter(names))}}
        else:  # chat completions can force one tool or any, not some
            offered_tools = {name: tool for name, tool in offered_tools.items() if name in names}
    return [_convert_pydantic_ai_tool(tool) for tool in offered_tools.values()], choice if offered_tools else None


def _convert_pydantic_ai_tool(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters_json_schema,
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _build_response_format(parameters: ModelRequestParameters, has_json_mode: bool) -> dict[str, Any] | None:
    output_object = parameters.output_object
    if parameters.output_mode == "prompted" and has_json_mode:
        return {"type": "json_object"}
    if parameters.output_mode != "native" or output_object is None:
        return None
    schema: dict[str, Any] = {"name": output_object.name or _SCHEMA_NAME, "schema": output_object.json_schema}
    if output_object.description:
        schema["description"] = output_object.description
    if output_object.strict is not None:
        schema["strict"] = output_object.strict
    return {"type": "json_schema", "json_schema": schema}


# ---------------------------------------------------------------------------------------------------- messages


def _insert_instructions(messages: Sequence[ModelMessage], parameters: ModelRequestParameters) -> Iterator[ChatMessage]:
    """All messages; the run's instructions follow the system prompts at the beginning of the conversation."""
    mapped = [out for message in messages for out in _convert_pydantic_ai_message(message)]
    first = next((at for at, message in enumerate(mapped) if message.role != "system"), len(mapped))
    yield from mapped[:first]
    for instruction in _get_instruction_parts(messages, parameters):
        yield ChatMessage("system", instruction.content)
    yield from mapped[first:]


def _get_instruction_parts(
    messages: Sequence[ModelMessage], parameters: ModelRequestParameters
) -> list[InstructionPart]:
    if parameters.instruction_parts is not None:
        return parameters.instruction_parts
    given = (m.instructions for m in reversed(messages) if isinstance(m, ModelRequest) and m.instructions)
    return [InstructionPart(content=text) for text in given][:1]


def _convert_pydantic_ai_message(message: ModelMessage) -> Iterator[ChatMessage]:
    if isinstance(message, ModelResponse):
        yield from _convert_response_to_assistant_message(message)
        return
    files: list[UserContent] = []
    for part in message.parts:
        if isinstance(part, ToolReturnPart):
            text, found = part.model_response_str_and_user_content()
            files += found
            yield ChatMessage("tool", text, tool_call_id=part.tool_call_id)
        else:
            yield _convert_pydantic_ai_request_part(part)
    if files:  # a tool message is text alone
        yield ChatMessage("user", tuple(_convert_user_content_to_openai(files)))


def _convert_pydantic_ai_request_part(part: ModelRequestPart) -> ChatMessage:
    if isinstance(part, SystemPromptPart):
        return ChatMessage("system", part.content)
    if isinstance(part, UserPromptPart):
        return ChatMessage(
            "user",
            part.content if isinstance(part.content, str) else tuple(_convert_user_content_to_openai(part.content)),
        )
    if isinstance(part, RetryPromptPart):
        if part.tool_name is None:
            return ChatMessage("user", part.model_response())
        return ChatMessage("tool", part.model_response(), tool_call_id=part.tool_call_id)
    raise UserError(
        f"{type(part).__name__} has no place in a chat; pass messages through `Model.prepare_messages` first"
    )


def _convert_user_content_to_openai(items: Sequence[UserContent]) -> Iterator[Mapping[str, Any]]:
    for item in items:
        match item:
            case str():
                yield {"type": "text", "text": item}
            case TextContent():
                yield {"type": "text", "text": item.content}
            case ImageUrl():
                yield _convert_image_to_openai(item.url, item.vendor_metadata)
            case BinaryContent() if item.is_image:
                yield _convert_image_to_openai(item.data_uri, item.vendor_metadata)
            case CachePoint():
                pass
            case _:
                raise UserError(f"{type(item).__name__} cannot be sent as chat content; texts and images can")


def _convert_image_to_openai(url: str, metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    detail = {"detail": metadata["detail"]} if metadata and "detail" in metadata else {}
    return {"type": "image_url", "image_url": {"url": url, **detail}}


def _convert_response_to_assistant_message(response: ModelResponse) -> Iterator[ChatMessage]:
    """The assistant's message; its reasoning is not sent back, nor what other providers' own tools did."""
    texts = [part.content for part in response.parts if isinstance(part, TextPart)]
    calls = tuple(
        ToolCall(part.tool_call_id, part.tool_name, part.args_as_json_str())
        for part in response.parts
        if isinstance(part, ToolCallPart)
    )
    text = "\n\n".join(texts)
    if text or calls:
        yield ChatMessage("assistant", text or None, tool_calls=calls)
