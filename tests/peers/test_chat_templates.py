"""Agents' conversations in the chat templates of real models: those that llama.cpp is tested with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from peers.servers import find_installed
from support.conversations import AGENTS, SPECIAL_TOKENS, RendersPrompts, check_agents_turns, make_conversation

from llm_spec import ChatMessage, ChatRequest, InvalidRequestError
from llm_spec.contract.system_texts import join_neighbouring_user_messages, place_system_texts
from llm_spec.kit.model_folder.chat_template import ChatTemplate, _compile_template

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("agent", AGENTS)
def test_each_text_is_said_once_and_no_turn_changes_what_was_before(agent: str) -> None:
    """Over ten turns, with tools where the form of calls is known."""
    folder = find_installed("llama", "templates")
    found: dict[str, str] = {}
    paths = sorted(folder.glob("*.jinja"))
    assert len(paths) >= 60
    num_refusing = 0
    for path in paths:
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate(Path(path.name), source, source)
        if _refuses_everything(template):  # one wants a variable that nobody gives it
            num_refusing += 1
            continue
        for uses_tools in (False, True) if template.message_format is not None else (False,):
            try:
                check_agents_turns(template, agent, uses_tools=uses_tools)
            except (AssertionError, InvalidRequestError) as error:
                found[f"{path.stem}, {'tools' if uses_tools else 'text'}"] = str(error)[:300]
    assert found == {}
    assert num_refusing <= 1


@pytest.mark.parametrize("agent", ["claude code", "codex"])
def test_a_server_is_told_what_each_of_its_templates_takes(agent: str) -> None:
    """Its template is not known here; those are left out that do not even keep a plain conversation's system text."""
    found: dict[str, str] = {}
    left_out: set[str] = set()
    for path in sorted(find_installed("llama", "templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        template = _ServerTemplate(source, path)
        has_form = ChatTemplate(path, source, source).message_format is not None
        for uses_tools in (False, True) if has_form else (False,):
            if _find_failure(template, "plain", uses_tools=uses_tools):
                left_out.add(path.stem)
            elif failure := _find_failure(template, agent, uses_tools=uses_tools):
                found[f"{path.stem}, {'tools' if uses_tools else 'text'}"] = failure
    assert found == {}
    assert len(left_out) <= 3, left_out


class _ServerTemplate:
    """A template as a server renders it, of messages as they are sent there."""

    def __init__(self, source: str, path: Path) -> None:
        self._template = _compile_template(source, path)

    def render(self, request: ChatRequest, special_tokens: Mapping[str, str], /) -> str:
        placed = join_neighbouring_user_messages(place_system_texts(request.messages))
        tools = {"tools": list(request.tools)} if request.tools else {}
        messages = list(map(_parse_arguments, placed))
        return self._template.render(messages=messages, add_generation_prompt=True, **special_tokens, **tools)


def _parse_arguments(message: ChatMessage) -> dict[str, Any]:
    """A message with its calls' arguments as objects, as servers hand them to templates."""
    fields = {**message.to_openai(), "content": message.content or ""}
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return fields


def _find_failure(template: RendersPrompts, agent: str, *, uses_tools: bool) -> str:
    try:
        check_agents_turns(template, agent, uses_tools=uses_tools)
    except (AssertionError, TemplateError, TypeError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _refuses_everything(template: ChatTemplate) -> bool:
    try:
        template.render(ChatRequest(messages=make_conversation("user")), SPECIAL_TOKENS)
    except InvalidRequestError:
        return True
    return False
