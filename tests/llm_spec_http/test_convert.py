"""Messages in the roles and names of each kind of server."""

from __future__ import annotations

from typing import Any

import pytest
from llm_spec_http.convert import build_request_body
from llm_spec_http.dialects import DIALECTS
from llm_spec_openai.convert import build_request_body as build_openai_body

from llm_spec import ChatMessage, ChatRequest, ToolCall
from llm_spec.contract.messages import NativeMessage
from llm_spec.contract.request import Messages

CALL = ToolCall("c1", "f", "{}")
REASONED = ChatMessage("assistant", None, tool_calls=(CALL,), reasoning="hmm")
BOTH = {"reasoning_content": "hmm", "reasoning": "hmm"}
REASONING: dict[str, dict[str, str]] = {
    "cerebras": {"reasoning": "hmm"},
    "mistral": {},
    "ollama": BOTH,
    "vllm": BOTH,
}
SYSTEM_ONLY = set(DIALECTS) - {"generic", "openrouter"}


def send(dialect: str, messages: Messages) -> list[dict[str, Any]]:
    request = ChatRequest.create(messages)
    if dialect in ("openai", "openai elsewhere"):
        return build_openai_body(request, "m", is_openai=dialect == "openai", takes_predictions=False)["messages"]
    return build_request_body(request, "m", DIALECTS[dialect])["messages"]


@pytest.mark.parametrize("dialect", [*DIALECTS, "openai", "openai elsewhere"])
def test_reasoning_goes_back_by_the_names_that_a_server_reads(dialect: str) -> None:
    """None where it refuses any: a conversation would end there."""
    expected = {} if dialect == "openai" else REASONING.get(dialect, {"reasoning_content": "hmm"})
    (message,) = send(dialect, [REASONED])
    assert {name: value for name, value in message.items() if "reasoning" in name} == expected
    assert message["tool_calls"][0]["id"] == "c1"
    (silent,) = send(dialect, [ChatMessage("assistant", "text")])
    assert silent == {"role": "assistant", "content": "text"}


@pytest.mark.parametrize("dialect", [*DIALECTS, "openai", "openai elsewhere"])
def test_what_a_chat_client_wrote_itself_stays_as_it_is(dialect: str) -> None:
    """It knows whom it speaks with."""
    written = {"role": "assistant", "content": "text", "reasoning_content": "hmm"}
    assert send(dialect, [written]) == [written]


@pytest.mark.parametrize("dialect", [*DIALECTS, "openai", "openai elsewhere"])
def test_developers_are_the_system_where_templates_are_rendered(dialect: str) -> None:
    """Hardly any template knows them: some refuse them, more drop what they say."""
    role = "system" if dialect in SYSTEM_ONLY else "developer"
    native = NativeMessage("chat", {"role": "developer", "content": "b", "cache_control": {}})
    given = [{"role": "developer", "content": "a"}, ChatMessage("developer", "b", native=native)]
    messages = send(dialect, [*given, {"role": "user", "content": "q"}])
    assert [message["role"] for message in messages] == [role, role, "user"]
    assert messages[1] == {"role": role, "content": "b", "cache_control": {}}
    assert native.value["role"] == "developer"
