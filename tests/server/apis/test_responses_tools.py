"""Tools of responses as functions of chat completions, and who is meant when one is called."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from llm_spec import InvalidRequestError
from llm_spec.server.apis.fields import ClientTool
from llm_spec.server.apis.responses_parser import parse_responses_request
from llm_spec.server.apis.responses_tools import ResponsesTools

SCHEMA: Final = {"type": "object", "properties": {"x": {"type": "integer"}}}
HOSTED: Final = (
    "web_search",
    "web_search_preview",
    "tool_search",
    "image_generation",
    "file_search",
    "code_interpreter",
    "mcp",
    "local_shell",
    "shell",
    "apply_patch",
    "computer_use_preview",
    "what_comes_next",
)


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA, **fields}


def custom(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "name": name, **fields}


def namespace(name: str, *tools: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": list(tools), **fields}


def read(*tools: Any, **fields: Any) -> ResponsesTools:
    return ResponsesTools.read({"tools": list(tools), **fields})


F, N, C, H = function("f"), namespace("ns", function("g")), custom("c"), {"type": "web_search"}
LONG: Final = "n" * 62
NAMES: Final[dict[str, tuple[list[Any], list[str]]]] = {
    "plain": ([function("f")], ["f"]),
    "namespace": ([namespace("mcp__demo", function("a"), function("b"))], ["mcp__demo__a", "mcp__demo__b"]),
    "custom": ([custom("apply_patch")], ["apply_patch"]),
    "custom in a namespace": ([namespace("functions", custom("exec"))], ["functions__exec"]),
    "too long": ([namespace(LONG, function("a"))], [r"n{53}_[0-9a-f]{10}"]),
    "too long alike": ([namespace(LONG, function("a"), function("b"))], [r"n{53}_[0-9a-f]{10}"] * 2),
    "a name with other letters": ([function("a.b c")], [r"a_b_c_[0-9a-f]{10}"]),
    "namespace beside its joined name": ([namespace("a", function("b")), function("a__b")], [r"a__b_.{10}", "a__b"]),
    "two ways to join": ([namespace("a__b", F), namespace("a", function("b__f"))], ["a__b__f", r"a__b__f_.{10}"]),
    "function and custom": ([custom("f"), function("f")], [r"f_.{10}", "f"]),
    "given twice": ([function("f", description="old"), function("f", description="new")], ["f"]),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMES)
def test_each_tool_has_a_name_that_chat_takes_and_leads_back(case: str) -> None:
    tools, patterns = NAMES[case]
    found = read(*tools)
    names = [tool["function"]["name"] for tool in found.functions]
    assert len(names) == len(set(names)) == len(patterns)
    for name, pattern in zip(names, patterns, strict=True):
        assert re.fullmatch(pattern, name)
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name)
        assert found.get_target_name(found.client_tools[name]) == name
    assert names == [tool["function"]["name"] for tool in read(*tools).functions]  # the same in every request


def test_the_last_of_two_definitions_holds() -> None:
    (tool,) = read(function("f", description="old"), function("f", description="new")).functions
    assert tool["function"]["description"] == "new"


def test_a_name_does_not_depend_on_the_other_tools() -> None:
    """A conversation goes on with another list of tools; the names of earlier calls stay."""
    long = namespace(LONG, function("a"))
    assert read(long).functions[0] == read(function("g"), long).functions[1]
    assert read(long).functions[0]["function"]["name"] == read().get_target_name(ClientTool("a", LONG))


def test_a_namespace_says_once_what_it_is_for() -> None:
    first, second = read(namespace("ns", function("a", description="A"), function("b"), description="many")).functions
    assert first["function"]["description"] == "A\n\nAll tools of ns: many"
    assert "description" not in second["function"]


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    """The model is told of the text's form."""
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    (tool,) = read(custom("patch", description="Patches.", format=form)).functions
    told = tool["function"]
    assert told["name"] == "patch"
    assert list(told["parameters"]["properties"]) == told["parameters"]["required"] == ["input"]
    assert told["description"].startswith("Patches.\n\n`input` is free text.")
    assert told["description"].endswith('It must match this grammar (lark):\nstart: "a"')
    (bare,) = read(custom("patch")).functions
    assert bare["function"]["description"].startswith("`input` is free text.")


@pytest.mark.parametrize("kind", HOSTED)
def test_tools_that_nobody_here_can_run_are_left_out_by_name(kind: str) -> None:
    body = {"model": "m", "input": "hi", "tools": [{"type": kind}, function("f")]}
    parsed = parse_responses_request(body, is_local=False)
    assert [tool["function"]["name"] for tool in parsed.request.tools] == ["f"]
    assert parsed.left_out == (kind,)


@pytest.mark.parametrize("kind", HOSTED)
def test_who_asks_for_such_a_tool_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"tool_choice is '{kind}'"):
        read({"type": kind}, function("f")).convert_tool_choice({"tool_choice": {"type": kind}})


def test_tools_of_items_are_tools() -> None:
    """Wherever they stand in the input; one of them may be given again."""
    executing = namespace("functions", custom("exec"))
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [executing, {"type": "web_search"}]},
        {"role": "user", "content": "hi"},
        {"type": "additional_tools", "role": "developer", "tools": [function("f"), executing]},
    ]
    parsed = parse_responses_request({"model": "m", "input": items}, is_local=False)
    assert [tool["function"]["name"] for tool in parsed.request.tools] == ["functions__exec", "f"]
    assert parsed.left_out == ("web_search",)
    assert [message.text for message in parsed.request.messages] == ["hi"]


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


CHOICES: Final[dict[str, tuple[list[Any], Any, Any]]] = {
    "auto": ([F], "auto", "auto"),
    "required": ([F, H], "required", "required"),
    "a function": ([F], {"type": "function", "name": "f"}, chosen("f")),
    "one in a namespace": ([N], {"type": "function", "name": "g", "namespace": "ns"}, chosen("ns__g")),
    "a custom tool": ([C], {"type": "custom", "name": "c"}, chosen("c")),
    "auto of none that is left": ([H], "auto", None),
    "no tools": ([], "auto", None),
    "some": (
        [F, C, H],
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}, H],
        },
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [chosen("f"), chosen("c")]}},
    ),
    "some that are left out": ([F, H], {"type": "allowed_tools", "mode": "auto", "tools": [H]}, "none"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_choice_of_tools_is_translated(case: str) -> None:
    tools, choice, wanted = CHOICES[case]
    assert read(*tools).convert_tool_choice({"tool_choice": choice}) == wanted


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([H], "required", "this server runs none of these tools: web_search"),
        ([F, H], {"type": "allowed_tools", "mode": "required", "tools": [H]}, "runs none of these tools: web_search"),
        ([F], {"type": "function", "name": "g"}, "tool_choice names 'g', which is not among the tools"),
        ([N], {"type": "function", "name": "g"}, "tool_choice names 'g', which is not among the tools"),
        ([N], {"type": "function", "name": "x", "namespace": "ns"}, "names 'ns__x', which is not"),
        ([F], {"type": "custom", "name": "f"}, "names 'f', which is not"),
        ([F], {"type": "function", "name": "f", "namespace": []}, r"namespace is \[\]; it must be a text"),
        ([F], {"type": "function"}, "name is None"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(tools: list[Any], choice: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read(*tools).convert_tool_choice({"tool_choice": choice})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "function"}]}, r"tools\[0\] is wrong: name is None"),
        ({"tools": [F, {}]}, r"tools\[1\] is wrong: type is None"),
        ({"tools": [{"type": "fucntion", "name": "f"}]}, r"tools\[0\] is wrong: type is 'fucntion'"),
        ({"tools": [namespace("ns", F, {"type": "web_search"})]}, r"tools\[0\] is wrong: tools\[1\] is wrong"),
        ({"tools": [namespace("ns", namespace("inner"))]}, r"tools\[0\] is wrong: tools\[0\] is wrong: type is"),
        ({"tools": [{"type": "namespace", "tools": []}]}, r"tools\[0\] is wrong: name is None"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "custom"}]}]}, r"input\[0\].tools\[0\] is wrong"),
    ],
)  # fmt: skip
def test_a_tool_that_is_wrong_is_refused_by_its_place(fields: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        ResponsesTools.read(fields)
