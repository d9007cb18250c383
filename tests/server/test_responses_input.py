"""The items of a conversation as messages of chat completions."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.serving import ask, remote, serving

from llm_spec import InvalidRequestError
from llm_spec.server.apis.responses_parser import parse_responses_request
from llm_spec.testing.server import ScriptedModelServer

PATH: Final = "/v1/responses"
PNG: Final = "data:image/png;base64,QUJD"
IMAGE: Final = {"type": "input_image", "image_url": PNG}
FILE: Final = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGVsbG8="}
TOOLS: Final[list[Any]] = [
    {"type": "function", "name": "f"},
    {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]},
    {"type": "custom", "name": "patch"},
]
HI: Final = {"role": "user", "content": "hi"}


def call(number: int, name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": name, "arguments": "{}", **fields}


def result(number: int, output: Any = "x") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": output}


def say(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def think(*texts: str, summary: str | None = None) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text} for text in texts]
    told = [] if summary is None else [{"type": "summary_text", "text": summary}]
    return {"type": "reasoning", "id": "rs", "summary": told, "content": parts, "encrypted_content": "opaque"}


def read(*items: Any) -> list[tuple[Any, ...]]:
    """Messages behind the first: their role, text, ids of calls or of the call, and reasoning."""
    parsed = parse_responses_request({"model": "m", "input": [HI, *items], "tools": TOOLS}, is_local=False)
    rows: list[tuple[Any, ...]] = []
    for message in parsed.request.messages[1:]:
        ids = message.tool_call_id or "".join(call.id for call in message.tool_calls)
        rows.append((message.role, message.content, ids, message.reasoning))
    return rows


def answer(text: str | None, ids: str = "", reasoning: str = "") -> tuple[Any, ...]:
    return ("assistant", text, ids, reasoning)


def tool(number: int, text: str = "x") -> tuple[Any, ...]:
    return ("tool", text, f"c{number}", "")


CONVERSATIONS: Final[dict[str, tuple[list[Any], list[Any]]]] = {
    "text, call": ([say("a"), call(0), result(0)], [answer("a", "c0"), tool(0)]),
    "call, text": ([call(0), say("a"), result(0)], [answer("a", "c0"), tool(0)]),
    "call, text, call": (
        [call(0), say("a"), call(1), result(0), result(1)],
        [answer("a", "c0c1"), tool(0), tool(1)],
    ),
    "text, call, text, call": (
        [say("a"), call(0), say("b"), call(1), result(1), result(0)],
        [answer("a\n\nb", "c0c1"), tool(1), tool(0)],
    ),
    "texts": ([say("a"), say("b")], [answer("a\n\nb")]),
    "white space": ([say("\n"), call(0), result(0)], [answer("\n", "c0"), tool(0)]),
    "call result, call result": (
        [call(0), result(0), call(1), result(1)],
        [answer(None, "c0"), tool(0), answer(None, "c1"), tool(1)],
    ),
    "a user between call and result": (
        [call(0), {"role": "user", "content": "hurry"}, result(0)],
        [answer(None, "c0"), tool(0), ("user", "hurry", "", "")],
    ),
    "an id that comes again": (
        [call(0), result(0, "old"), say("so"), HI, call(0), result(0, "new")],
        [answer(None, "c0"), tool(0, "old"), answer("so"), ("user", "hi", "", ""), answer(None, "c0"), tool(0, "new")],
    ),
    "a result without a call": ([result(7)], [tool(7)]),
    "reasoning, call": ([think("why"), call(0), result(0)], [answer(None, "c0", "why"), tool(0)]),
    "reasoning, text": ([think("w", "hy"), say("a")], [answer("a", "", "why")]),
    "reasoning, text, reasoning, call": (
        [think("a"), say("t"), think("b"), call(0), result(0)],
        [answer("t", "c0", "a\n\nb"), tool(0)],
    ),
    "call, reasoning, call": (
        [call(0), think("why"), call(1), result(0), result(1)],
        [answer(None, "c0c1", "why"), tool(0), tool(1)],
    ),
    "reasoning of two turns": (
        [think("a"), call(0), result(0), think("b"), call(1), result(1)],
        [answer(None, "c0", "a"), tool(0), answer(None, "c1", "b"), tool(1)],
    ),
    "a summary alone": ([think(summary="short"), call(0), result(0)], [answer(None, "c0", "short"), tool(0)]),
    "a summary beside the text": ([think("why", summary="short"), say("a")], [answer("a", "", "why")]),
    "encrypted alone": ([think(), say("a")], [answer("a")]),
    "reasoning that led to nothing": ([think("why"), HI], [("user", "hi", "", "")]),
    "calls of tools that OpenAI ran": ([{"type": "web_search_call", "id": "ws"}, say("a")], [answer("a")]),
    "a result in parts": (
        [call(0), result(0, [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])],
        [answer(None, "c0"), tool(0, "ab")],
    ),
    "no parts": ([call(0), result(0, [])], [answer(None, "c0"), tool(0, "")]),
    "a summary from elsewhere": ([{"type": "compaction", "encrypted_content": "opaque"}, HI], [("user", "hi", "", "")]),
}


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_what_belongs_to_one_answer_is_one_message(case: str) -> None:
    items, wanted = CONVERSATIONS[case]
    assert read(*items) == wanted


CALLS: Final[dict[str, tuple[Any, tuple[str, str]]]] = {
    "function": (call(0), ("f", "{}")),
    "of a namespace": (call(0, "g", namespace="ns"), ("ns__g", "{}")),
    "of a namespace that has gone": (call(0, "h", namespace="other"), ("other__h", "{}")),
    "custom": (
        {"type": "custom_tool_call", "call_id": "c0", "name": "patch", "input": 'a "ü"\n'},
        ("patch", '{"input": "a \\"ü\\"\\n"}'),
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_an_earlier_call_has_the_name_that_the_model_knows(case: str) -> None:
    item, wanted = CALLS[case]
    parsed = parse_responses_request({"model": "m", "input": [item], "tools": TOOLS}, is_local=False)
    (found,) = parsed.request.messages[0].tool_calls
    assert (found.name, found.arguments) == wanted
    assert found.kind == "function"


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
@pytest.mark.parametrize(
    ("part", "converted"),
    [
        (IMAGE, {"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}}),
        (FILE, {"type": "file", "file": {"filename": "a.txt", "file_data": FILE["file_data"]}}),
    ],
    ids=["image", "file"],
)
@pytest.mark.parametrize("sees_images", [True, False])
async def test_what_a_tool_shows_reaches_the_target(kind: str, part: Any, converted: Any, *, sees_images: bool) -> None:
    """Behind the results, or by name in the text."""
    shown = {"type": kind, "call_id": "c0", "output": [{"type": "input_text", "text": "shot"}, part]}
    body = ask(PATH, model="far", tools=TOOLS, input=[HI, call(0), call(1), shown, result(1), HI])
    async with (
        ScriptedModelServer("ok") as upstream,
        serving({"far": remote(upstream.url, images=sees_images)}) as server,
    ):
        reply = await server.post(PATH, body)
    (sent,) = [body["messages"] for body in upstream.requests if "messages" in body]
    assert (reply.status, reply.headers["x-llm-spec-changed"]) == (200, "tool-images")
    roles = [message["role"] for message in sent]
    assert roles == ["user", "assistant", "tool", "tool", "user"]  # the image is joined with what the user says
    assert sent[2]["content"].startswith("shot\n[")
    if sees_images:
        assert sent[4]["content"][1] == converted
    else:
        assert sent[2]["content"].endswith("not shown, as this model takes text alone]")
        assert sent[4]["content"] == "hi"


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f1"}]}, "file_id is set"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f1"}]}, "file_id is set"),
        ({"role": "user", "content": [{"type": "input_file", "file_url": "https://a.example/b"}]}, "file_url is set"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "a part of type 'input_file'"),
        (result(0, [{"type": "input_video"}]), "a part of type 'input_video'"),
        ({"type": "function_call_output", "call_id": "c0"}, "it has no output"),
        ({"type": "function_call_output", "output": "x"}, "it has no call_id"),
        ({"type": "function_call", "call_id": "c0", "arguments": "{}"}, "name is None"),
        (call(0, namespace=["ns"]), "namespace is"),
        ({**call(0), "arguments": {}}, "arguments is of type dict; it must be a text"),
        ({"type": "custom_tool_call", "call_id": "c0", "name": "patch"}, "it has no input"),
        ({"type": "item_reference", "id": "x"}, "an item of type 'item_reference' is not supported here"),
        ({"type": "computer_call", "id": "x"}, "an item of type 'computer_call' is not supported here"),
    ],
)
def test_an_item_that_is_wrong_is_refused_by_its_place(item: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"input\[1\] is wrong: {said}"):
        read(item)


async def test_instructions_and_developers_are_one_first_text() -> None:
    """Codex says its instructions by two messages of the developer, and its user's in two."""
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "D1"}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "D2"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "U1"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "U2"}]},
    ]
    async with ScriptedModelServer("ok") as upstream, serving({"far": remote(upstream.url)}) as server:
        reply = await server.post(PATH, ask(PATH, model="far", instructions="I", input=items))
    (sent,) = [body["messages"] for body in upstream.requests if "messages" in body]
    assert [(message["role"], message["content"]) for message in sent] == [
        ("system", "I\n\nD1\n\nD2"),
        ("user", "U1\n\nU2"),
    ]
    assert reply.headers["x-llm-spec-changed"] == "system-texts"


async def test_what_is_left_out_is_named_beside_fields() -> None:
    """Tools, earlier items and fields, in one header."""
    async with ScriptedModelServer("ok") as upstream, serving({"far": remote(upstream.url)}) as server:
        items = [HI, {"type": "web_search_call", "id": "ws"}]
        fields = {"tools": [{"type": "web_search"}], "client_metadata": {"a": "b"}, "input": items}
        reply = await server.post(PATH, ask(PATH, model="far", **fields))
    assert reply.headers["x-llm-spec-left-out"] == "web_search, web_search_call, client_metadata"
