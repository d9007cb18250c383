"""What each kind of target is told of a conversation in another API's form."""

from __future__ import annotations

import pytest

from llm_spec.contract.messages import ApiName, ChatMessage
from llm_spec.contract.request import ChatRequest
from llm_spec.server.apis.fields import ParsedRequest
from llm_spec.server.apis.system_placement import build_changes_header, place_system_texts_of_request

MESSAGES = (
    ChatMessage("developer", "a"),
    ChatMessage("developer", "b"),
    ChatMessage("user", "c"),
    ChatMessage("user", "d"),
    ChatMessage("assistant", "e"),
    ChatMessage("system", "f"),
)
MARKED = ("user", "<system>\nf\n</system>")


@pytest.mark.parametrize(
    ("target_api", "placed"),
    [
        ("chat", [("system", "a\n\nb"), ("user", "c\n\nd"), ("assistant", "e"), MARKED]),
        (None, [("system", "a\n\nb"), ("user", "c"), ("user", "d"), ("assistant", "e"), ("system", "f")]),
        (
            "messages",
            [("developer", "a"), ("developer", "b"), ("user", "c"), ("user", "d"), ("assistant", "e"), MARKED],
        ),
    ],
)
def test_each_target_is_told_what_it_takes(target_api: ApiName | None, placed: list[tuple[str, str]]) -> None:
    """Neighbouring messages of the user are joined for servers of chat alone, whose templates are not known."""
    parsed = place_system_texts_of_request(ParsedRequest(model="m", request=ChatRequest(messages=MESSAGES)), target_api)
    assert [(message.role, message.text) for message in parsed.request.messages] == placed
    assert build_changes_header([parsed]) == {"x-llm-spec-changed": "system-texts"}


@pytest.mark.parametrize("target_api", ["chat", "messages", None])
def test_what_needs_no_change_is_not_told(target_api: ApiName | None) -> None:
    messages = (ChatMessage("system", "a"), ChatMessage("user", "b"))
    parsed = place_system_texts_of_request(ParsedRequest(model="m", request=ChatRequest(messages=messages)), target_api)
    assert parsed.request.messages == messages
    assert build_changes_header([parsed]) == {}
