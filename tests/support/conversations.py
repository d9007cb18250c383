"""Conversations as agents have them, a marker in each text, and what a chat template has to make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from llm_spec import ChatMessage, ChatRequest, ToolCall

__all__ = ["AGENTS", "TOOLS", "RendersPrompts", "check_agents_turns", "make_conversation"]

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = ({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},)
# What an agent begins with, and a turn of it, without tools and with them.
AGENTS = {
    "claude code": ("system user system", "assistant user system", "calls tool assistant user system"),
    "codex": ("developer developer user user", "assistant developer user", "calls tool assistant developer user"),
    "plain": ("system user", "assistant user", "calls tool assistant user"),
    "late": ("user user", "assistant system system user", "calls tool system assistant user user"),
}


class RendersPrompts(Protocol):
    """A chat template, in this process or at a server."""

    def render(self, request: ChatRequest, special_tokens: Mapping[str, str], /) -> str: ...


def make_conversation(roles: str) -> tuple[ChatMessage, ...]:
    """Messages of these roles; `calls` is an answer that only calls a tool, and `tool` its result."""
    messages: list[ChatMessage] = []
    for index, role in enumerate(roles.split()):
        text = f"mark{index:03}x"
        if role == "calls":
            messages.append(ChatMessage("assistant", None, tool_calls=(ToolCall(f"callid{index:03}", "f", "{}"),)))
        elif role == "tool":
            messages.append(ChatMessage("tool", text, tool_call_id=f"callid{index - 1:03}"))
        else:
            messages.append(ChatMessage(role, text))  # type: ignore[arg-type]
    return tuple(messages)


def check_agents_turns(template: RendersPrompts, agent: str, *, uses_tools: bool, num_turns: int = 10) -> None:
    """Each text once, in order, and each prompt the beginning of the next one up to the last answer.

    Where a template puts the first text of the system is its own affair: some put it before the last one of the user.
    """
    begin, turn, turn_with_tools = AGENTS[agent]
    conversation = make_conversation(" ".join([begin, *[turn_with_tools if uses_tools else turn] * num_turns]))
    ends = [index for index, message in enumerate(conversation) if message.role == "assistant"]
    before: str | None = None
    answered = ""
    for messages in (*(conversation[:end] for end in ends), conversation):
        tools = TOOLS if uses_tools else ()
        prompt = template.render(ChatRequest(messages=messages, tools=tools), SPECIAL_TOKENS)
        texts = [message.text for message in messages if message.text]
        assert {text: prompt.count(text) for text in texts} == dict.fromkeys(texts, 1)
        first = _list_first_system_texts(messages)
        assert _is_ascending(prompt, first)
        assert _is_ascending(prompt, [text for text in texts if text not in first])
        if before is not None and answered:
            end = before.index(answered) + len(answered)
            assert prompt[:end] == before[:end]
        answers = [message.text for message in messages if message.role == "assistant" and message.text]
        before, answered = prompt, answers[-1] if answers else ""


def _list_first_system_texts(messages: Sequence[ChatMessage]) -> list[str]:
    num_before = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return [message.text for message in messages[:num_before] if message.role in ("system", "developer")]


def _is_ascending(prompt: str, texts: Sequence[str]) -> bool:
    places = [prompt.index(text) for text in texts]
    return places == sorted(places)
