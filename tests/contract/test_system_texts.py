"""Where texts of system and developer end up in a conversation for another API or a chat template."""

from __future__ import annotations

import pytest

from llm_spec.contract.messages import ChatMessage, ToolCall
from llm_spec.contract.system_texts import (
    join_neighbouring_user_messages,
    mark_system_text,
    place_later_system_texts,
    place_system_texts,
)

CALL = ToolCall("c1", "f", "{}")
OTHER_CALL = ToolCall("c2", "f", "{}")


def m(role: str, text: str = "") -> ChatMessage:
    if role == "calls":
        return ChatMessage("assistant", None, tool_calls=(CALL, OTHER_CALL))
    return ChatMessage(role, text or role, tool_call_id="c1" if role == "tool" else None)  # type: ignore[arg-type]


def show(messages: tuple[ChatMessage, ...]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


@pytest.mark.parametrize(
    ("messages", "placed"),
    [
        ([m("user")], [("user", "user")]),
        ([m("system", "a"), m("user")], [("system", "a"), ("user", "user")]),
        ([m("developer", "a"), m("user")], [("system", "a"), ("user", "user")]),
        (
            [m("developer", "a"), m("developer", "b"), m("user", "c"), m("user", "d")],
            [("system", "a\n\nb"), ("user", "c"), ("user", "d")],
        ),
        (  # as Claude Code begins
            [m("system", "a"), m("user"), m("system", "b")],
            [("system", "a\n\nb"), ("user", "user")],
        ),
        (
            [m("user", "x"), m("system", "a"), m("assistant"), m("user", "y"), m("developer", "b")],
            [("system", "a"), ("user", "x"), ("assistant", "assistant"), ("user", "y"), ("later", "b")],
        ),
        (  # the results of a turn's calls stay together
            [m("user"), m("calls"), m("tool", "1"), m("system", "b"), m("tool", "2"), m("user", "z")],
            [("user", "user"), ("assistant", ""), ("tool", "1"), ("tool", "2"), ("later", "b"), ("user", "z")],
        ),
        ([m("calls"), m("tool", "1"), m("system", "b")], [("assistant", ""), ("tool", "1"), ("later", "b")]),
    ],
)
@pytest.mark.parametrize("later_role", ["user", "system"])
def test_texts_of_the_system_are_placed(messages, placed, later_role):
    """One at the beginning; later ones in their place, with the role that the target takes there."""
    given = tuple(messages)
    result = place_system_texts(given, later_role=later_role)
    later = {"user": lambda text: ("user", mark_system_text(text)), "system": lambda text: ("system", text)}
    assert show(result) == [later[later_role](text) if role == "later" else (role, text) for role, text in placed]
    assert place_system_texts(result, later_role=later_role) is result


def test_messages_that_need_no_change_are_the_same_object():
    """So a caller sees at once that nothing was changed."""
    given = (m("system"), m("user"), m("calls"), m("tool"), m("assistant"), m("user"))
    assert place_system_texts(given) is given
    assert place_later_system_texts(given, role="user") is given


def test_several_first_texts_stay_where_a_target_takes_them():
    given = (m("system", "a"), m("user"), m("system", "b"), m("assistant"), m("system", "c"))
    placed = place_later_system_texts(given, role="user")
    assert placed[:4] == given[:4]
    assert show(placed)[4:] == [("user", mark_system_text("c"))]


@pytest.mark.parametrize("turns", range(1, 5))
def test_a_turn_more_leaves_what_was_before_it(turns):
    """A server's prefix cache holds: no message up to the last answer changes with the next turn."""

    def converse(num_turns: int) -> tuple[ChatMessage, ...]:
        begin = [m("system", "a"), m("user", "0"), m("system", "b")]
        return (*begin, *(x for i in range(num_turns) for x in (m("assistant"), m("system", f"s{i}"), m("user"))))

    before = join_neighbouring_user_messages(place_system_texts(converse(turns)))
    after = join_neighbouring_user_messages(place_system_texts(converse(turns + 1)))
    assert after[: len(before)] == before


def test_neighbouring_messages_of_the_user_are_joined():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    given = [m("user", "a"), m("user", "b"), m("assistant"), ChatMessage("user", (image,)), m("user", "c")]
    joined = join_neighbouring_user_messages(given)
    assert show(joined[:2]) == [("user", "a\n\nb"), ("assistant", "assistant")]
    assert joined[2].content == (image, {"type": "text", "text": "c"})
