"""Reasoning as the next turn gives it back: whole details of pieces, and where they are sent."""

from __future__ import annotations

from typing import Any

import pytest
from llm_spec_http.convert import build_request_body
from llm_spec_http.dialects import DIALECTS
from llm_spec_openai.convert import build_request_body as build_openai_body

from llm_spec import ChatMessage, ChatRequest, Finish, ReasoningDelta, ReasoningDetail, TextDelta
from llm_spec.contract.reasoning_details import merge_reasoning_details
from llm_spec.contract.response import ChatResponseBuilder

PIECES = [
    ReasoningDetail("chat", {"type": "reasoning.text", "index": 0, "text": "a", "signature": None}),
    ReasoningDelta("a"),
    ReasoningDetail("chat", {"type": "reasoning.text", "index": 0, "text": "b", "signature": "s"}),
    ReasoningDelta("b"),
    ReasoningDetail("chat", {"type": "reasoning.encrypted", "index": 1, "data": "x"}),
]
ITEMS = [
    {"type": "reasoning.text", "index": 0, "text": "ab", "signature": "s"},
    {"type": "reasoning.encrypted", "index": 1, "data": "x"},
]


def test_pieces_become_whole_items() -> None:
    """Neighbours of one type and index are one; what is null says nothing."""
    assert [detail.value for detail in merge_reasoning_details(PIECES)] == ITEMS


def test_a_response_has_the_details_in_its_message() -> None:
    """So that the message alone is enough for the next turn."""
    builder = ChatResponseBuilder()
    for event in [*PIECES, TextDelta("so")]:
        builder.add_event(event)
    response = builder.add_event(Finish("stop"))
    assert response is not None
    assert (response.reasoning, response.message.reasoning) == ("ab", "ab")
    assert response.message.to_openai() == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "ab",
        "reasoning_details": ITEMS,
    }


@pytest.mark.parametrize(("name", "is_sent"), [("generic", True), ("openrouter", True), ("mistral", False)])
def test_who_is_sent_the_details(name: str, is_sent: bool) -> None:
    """Servers that refuse fields that they do not know are not sent any."""
    (message,) = build_request_body(make_request(), "m", DIALECTS[name])["messages"]
    assert message.get("reasoning_details") == (ITEMS if is_sent else None)


def test_openai_is_sent_no_reasoning() -> None:
    """It refuses both fields."""
    body: dict[str, Any] = build_openai_body(make_request(), "m", is_openai=True, takes_predictions=False)
    assert body["messages"] == [{"role": "assistant", "content": "so"}]


def make_request() -> ChatRequest:
    answer = ChatMessage("assistant", "so", reasoning="ab", reasoning_details=merge_reasoning_details(PIECES))
    return ChatRequest.create([answer])
