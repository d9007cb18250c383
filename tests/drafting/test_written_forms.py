"""The forms in which a model writes earlier texts again: by hand, newest first, few, and none that the prompt has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm_spec import ChatRequest
from llm_spec.drafting.forms import (
    escape_for_json_string,
    iterate_diff_marked_texts,
    iterate_json_escaped_texts,
    iterate_unescaped_tool_texts,
    uses_tools,
)


def make_request(*results: str, arguments: str = "{}", user: str = "go", system: str = "a\nb") -> ChatRequest:
    """A conversation in which a tool gave results, one call after the other."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    for number, result in enumerate(results):
        function = {"name": "read", "arguments": arguments}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
    return ChatRequest.create(messages)


def test_results_and_user_texts_are_escaped_the_newest_first() -> None:
    """Line breaks, tabs, quotes and backslashes; other characters stay as they are."""
    request = make_request('x = "é"\n\ty', "a\\b", user="one\ntwo")
    assert list(iterate_json_escaped_texts(request)) == ["a\\\\b", 'x = \\"é\\"\\n\\ty', "one\\ntwo"]


def test_what_escaping_leaves_alone_is_no_form() -> None:
    """The prompt has it already, and what the system said nobody writes again."""
    assert list(iterate_json_escaped_texts(make_request("plain words, é"))) == []
    assert list(iterate_unescaped_tool_texts(make_request("plain words", arguments='{"path": "a.py"}'))) == []
    assert list(iterate_diff_marked_texts(make_request("one line"))) == []


def test_what_calls_and_json_results_hold_is_unescaped() -> None:
    """Strings at any depth; those without escapes are left out, and what is not JSON has none."""
    request = make_request(
        json.dumps({"files": [{"text": "c\nd", "name": "n"}]}), arguments='{"content": "a\\n\\"b\\"", "path": "p"}'
    )
    assert list(iterate_unescaped_tool_texts(request)) == ["c\nd", 'a\n"b"']
    assert list(iterate_unescaped_tool_texts(make_request("{not JSON\n", arguments='{"broken": "a\\n'))) == []
    assert list(iterate_unescaped_tool_texts(make_request("[" * 100_000))) == []


@pytest.mark.parametrize("sign", ["\t", "→", "| ", ":"])
def test_line_numbers_are_left_out(sign: str) -> None:
    """In whatever way a tool writes them; numbers that are the text's own stay."""
    request = make_request(f"     9{sign}def f():\n    10{sign}    return 1")
    assert list(iterate_json_escaped_texts(request)) == ["def f():\\n    return 1"]
    assert list(iterate_unescaped_tool_texts(request)) == ["def f():\n    return 1"]
    assert list(iterate_diff_marked_texts(request)) == ["def f():\n     return 1"]
    assert list(iterate_json_escaped_texts(make_request("1: one\ntwo\nthree\nfour"))) == ["1: one\\ntwo\\nthree\\nfour"]


def test_diffs_repeat_lines_behind_a_space() -> None:
    """As answers and, escaped, in calls."""
    [form] = iterate_diff_marked_texts(make_request("a\n\tb\n"))
    assert form == "a\n \tb\n "
    assert escape_for_json_string(form) == "a\\n \\tb\\n "


def test_forms_are_bounded() -> None:
    """Whatever a tool returned: the end of what is too long, and older texts only as far as there is room."""
    huge = "line\n" * 2_000_000
    for forms in (iterate_json_escaped_texts, iterate_diff_marked_texts):
        [form] = forms(make_request("old\n", huge), 100)
        assert len(form) == 120
        assert len(list(forms(make_request("old\n", "new\n"), 4))) == 1
    assert list(iterate_unescaped_tool_texts(make_request(huge))) == []
    small = make_request("[]", huge, arguments='{"a": "b\\nc"}')
    assert list(iterate_unescaped_tool_texts(small)) == ["b\nc", "b\nc"]  # what is too long hides nothing


def test_requests_without_tools_have_no_forms() -> None:
    """Tools or results of some make the difference."""
    assert not uses_tools(ChatRequest.create("a\nb"))
    assert uses_tools(make_request("r"))
    assert uses_tools(ChatRequest.create("a\nb", tools=[{"type": "function", "function": {"name": "f"}}]))
