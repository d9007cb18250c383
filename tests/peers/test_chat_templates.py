"""Agents' conversations in the chat templates of real models: those that llama.cpp is tested with."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers.servers import find_installed
from support.conversations import AGENTS, SPECIAL_TOKENS, check_agents_turns, make_conversation

from llm_spec import ChatRequest, InvalidRequestError
from llm_spec.model_folder.chat_template import ChatTemplate

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


def _refuses_everything(template: ChatTemplate) -> bool:
    try:
        template.render(ChatRequest(messages=make_conversation("user")), SPECIAL_TOKENS)
    except InvalidRequestError:
        return True
    return False
