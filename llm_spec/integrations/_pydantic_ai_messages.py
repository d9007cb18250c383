"""Converts pydantic-ai's messages to those of a ChatRequest.

An agent calls `Model.prepare_messages` first, which translates some parts for every model (realtime
speech, changes of instructions or tools). A caller without an agent has to call it, too. System
texts keep their role and place: the target's provider decides how it sends later ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from pydantic_ai._thinking_part import render_replayed_thinking  # as pydantic-ai's own models do
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    InstructionPart,
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    RetryPromptPart,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.profiles import ModelProfile

from llm_spec.contract.messages import ChatMessage, ToolCall
from llm_spec.integrations._pydantic_ai_files import FormatTextFile, convert_user_content_to_openai
from llm_spec.integrations._pydantic_ai_reasoning import can_only_be_text, collect_reasoning

__all__ = ["MessageConverter"]


@dataclass(frozen=True, kw_only=True)
class MessageConverter:
    """Converts messages for a target of the provider `system`.

    `is_accepted` returns True if that provider takes back what is signed or encrypted in a part of
    an answer.
    """

    system: str
    profile: ModelProfile
    is_accepted: Callable[[ModelResponse, ThinkingPart], bool]
    format_text_file: FormatTextFile

    async def convert(self, messages: Sequence[ModelMessage], parameters: ModelRequestParameters) -> list[ChatMessage]:
        """Convert all messages. The run's instructions follow the first system prompts.

        Raises UserError for parts that chat has no place for.
        """
        mapped = [out for message in messages async for out in self._convert_message(message)]
        first = next((at for at, message in enumerate(mapped) if message.role != "system"), len(mapped))
        instructions = _get_instruction_parts(messages, parameters)
        mapped[first:first] = [ChatMessage("system", instruction.content) for instruction in instructions]
        return mapped

    async def _convert_message(self, message: ModelMessage) -> AsyncIterator[ChatMessage]:
        if isinstance(message, ModelResponse):
            for answer in self._convert_response(message):
                yield answer
            return
        files: list[UserContent] = []
        for part in message.parts:
            if isinstance(part, ToolReturnPart):
                text, found = part.model_response_str_and_user_content()
                files += found
                yield ChatMessage("tool", text, tool_call_id=part.tool_call_id)
            else:
                yield await self._convert_request_part(part)
        if files:  # a tool message has only text
            yield await self._build_user_message(files)

    async def _convert_request_part(self, part: ModelRequestPart) -> ChatMessage:
        match part:
            case SystemPromptPart():
                return ChatMessage("system", part.content)
            case UserPromptPart():
                return await self._build_user_message(part.content)
            case RetryPromptPart() if part.tool_name is None:
                return ChatMessage("user", part.model_response())
            case RetryPromptPart():
                return ChatMessage("tool", part.model_response(), tool_call_id=part.tool_call_id)
            case _:
                kind = type(part).__name__
                raise UserError(f"{kind} has no place in a chat; pass messages through `Model.prepare_messages` first")

    async def _build_user_message(self, content: str | Sequence[UserContent]) -> ChatMessage:
        if isinstance(content, str):
            return ChatMessage("user", content)
        parts = await convert_user_content_to_openai(content, self.profile, self.system, self.format_text_file)
        return ChatMessage("user", parts)

    def _convert_response(self, response: ModelResponse) -> Iterator[ChatMessage]:
        """Convert an answer. Calls of providers' own tools, and files, are not sent back."""
        texts: list[str] = []
        carried: list[str] = []  # reasoning that some models would imitate in their own turn
        calls: list[ToolCall] = []
        for part in response.parts:
            if isinstance(part, TextPart):
                texts.append(part.content)
            elif isinstance(part, ThinkingPart):
                if can_only_be_text(response, part, self.is_accepted, self.profile):
                    text, is_carried = render_replayed_thinking(part.content, self.profile)
                    (carried if is_carried else texts).append(text)
            elif isinstance(part, ToolCallPart):
                calls.append(ToolCall(part.tool_call_id, part.tool_name, part.args_as_json_str()))
        if carried:
            yield ChatMessage("user", "\n\n".join(carried))
        text = "\n\n".join(texts)
        if not text and not calls:
            return
        reasoning, details = collect_reasoning(response, self.is_accepted, self.profile)
        yield ChatMessage(
            "assistant", text or None, tool_calls=tuple(calls), reasoning=reasoning, reasoning_details=details
        )


def _get_instruction_parts(
    messages: Sequence[ModelMessage], parameters: ModelRequestParameters
) -> list[InstructionPart]:
    if parameters.instruction_parts is not None:
        return parameters.instruction_parts
    given = (m.instructions for m in reversed(messages) if isinstance(m, ModelRequest) and m.instructions)
    return [InstructionPart(content=text) for text in given][:1]
