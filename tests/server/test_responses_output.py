"""Answers of responses: whole, streamed and as the official SDK puts a stream together, all the same; and sent back."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

import openai
import pytest
from support.serving import Asking, Frame, ask, serving
from support.wire import Wire, chunk, served, text_chunks

from llm_spec import AnswerDetail, ChatRequest, Finish, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.server import ModelConfig
from llm_spec.server.apis.fields import ParsedRequest
from llm_spec.server.apis.responses_encoder import ResponsesStreamEncoder, build_responses_api_response
from llm_spec.server.problems import HttpProblem
from llm_spec.testing import ScriptedProvider

PATH: Final = "/v1/responses"
TOOLS: Final[list[Any]] = [
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}},
    {"type": "function", "name": "ns__g", "parameters": {"type": "object", "properties": {}}},
    {"type": "namespace", "name": "ns", "description": "n", "tools": [{"type": "function", "name": "g"}]},
    {"type": "namespace", "name": "mcp__demo", "description": "n", "tools": [{"type": "function", "name": "close"}]},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "functions", "description": "n", "tools": [{"type": "custom", "name": "exec"}]},
]


def piece(index: int, arguments: str = "", name: str | None = None) -> dict[str, Any]:
    """A delta with a piece of a call; the first names it."""
    begun = {} if name is None else {"id": f"c{index}", "type": "function"}
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, **begun, "function": function}]}


def say(text: str) -> dict[str, Any]:
    return {"content": text}


def think(text: str) -> dict[str, Any]:
    return {"reasoning_content": text}


def call(number: int, arguments: str = "{}", name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": name, "arguments": arguments, **fields}


def custom(number: int, text: str, name: str = "patch", **fields: Any) -> dict[str, Any]:
    return {"type": "custom_tool_call", "call_id": f"c{number}", "name": name, "input": text, **fields}


PATCH: Final = '*** Begin "Patch"\n+ünï ✓ \\ 😀\n'
PATCH_JSON: Final = json.dumps({"input": PATCH})
ANSWERS: Final[dict[str, tuple[list[dict[str, Any]], list[Any]]]] = {
    "text": ([say("a"), say("b")], ["ab"]),
    "nothing": ([], [""]),
    "reasoning, text": ([think("w"), think("hy"), say("a")], [("why",), "a"]),
    "reasoning alone": ([think("why")], [("why",)]),
    "text, call": ([say("a"), piece(0, "{", "f"), piece(0, "}")], ["a", call(0)]),
    "two calls": ([piece(0, "{}", "f"), piece(1, '{"x"', "f"), piece(1, ":1}")], [call(0), call(1, '{"x":1}')]),
    "calls at the same time": (
        [piece(0, '{"a"', "f"), piece(1, '{"x"', "f"), piece(0, ":1}"), piece(1, ":1}")],
        [call(0, '{"a":1}'), call(1, '{"x":1}')],
    ),
    "text between the pieces of a call": (
        [piece(0, '{"a":', "f"), say("\n"), piece(0, "1}"), say("b")],
        [call(0, '{"a":1}'), "\nb"],
    ),
    "reasoning between the pieces of a call": (
        [piece(0, '{"a":', "f"), think("hm"), piece(0, "1}")],
        [call(0, '{"a":1}'), ("hm",)],
    ),
    "an empty text between the pieces of a call": ([piece(0, "{", "f"), say(""), piece(0, "}")], [call(0)]),
    "text behind a call": ([say("a"), piece(0, "{}", "f"), say("b"), say("c")], ["a", call(0), "bc"]),
    "text between calls": (
        [piece(0, "{}", "f"), say("and also"), piece(1, "{}", "f")],
        [call(0), "and also", call(1)],
    ),
    "text behind calls": ([piece(0, "{}", "f"), piece(1, "{}", "f"), say("b")], [call(0), "b", call(1)]),
    "reasoning behind text": ([think("a"), say("b"), think("c"), say("d")], [("a",), "b", ("c",), "d"]),
    "a call in a namespace": ([piece(0, "{}", "mcp__demo__close")], [call(0, name="close", namespace="mcp__demo")]),
    "a call whose name looks like one in a namespace": ([piece(0, "{}", "ns__g")], [call(0, name="ns__g")]),
    "a call of what is not there": ([piece(0, "{}", "mcp__demo__open")], [call(0, name="mcp__demo__open")]),
    "a custom call": (
        [piece(0, PATCH_JSON[:3], "patch"), *(piece(0, mark) for mark in PATCH_JSON[3:])],
        [custom(0, PATCH)],
    ),
    "a custom call in a namespace": (
        [piece(0, '{"input": "x"}', "functions__exec")],
        [custom(0, "x", "exec", namespace="functions")],
    ),
    "a custom call with text inside": (
        [piece(0, '{"input": "a', "patch"), say("\n"), piece(0, 'b"}')],
        [custom(0, "ab"), "\n"],
    ),
    "a custom call without JSON": ([piece(0, "*** Beg", "patch"), piece(0, "in")], [custom(0, "*** Begin")]),
    "a custom call that is cut": ([piece(0, '{"input": "half \\u00', "patch")], [custom(0, "half \\u00")]),
    "a custom call without input": ([piece(0, "", "patch")], [custom(0, "")]),
    "custom and function": (
        [piece(0, '{"input": "a"}', "patch"), piece(1, "{}", "f")],
        [custom(0, "a"), call(1)],
    ),
}  # fmt: skip


def show(item: dict[str, Any]) -> Any:
    """A text, reasoning as a tuple of its texts, or a call without its own id."""
    match item["type"]:
        case "message":
            return "".join(part["text"] for part in item["content"])
        case "reasoning":
            return tuple(part["text"] for part in item["content"])
        case _:
            return {name: value for name, value in item.items() if name not in ("id", "status") and value is not None}


@asynccontextmanager
async def answering(deltas: list[dict[str, Any]]) -> AsyncGenerator[tuple[Asking, Wire]]:
    """A server whose target answers with these deltas."""
    wire = Wire()
    finish = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
    async with served("/chat/completions", wire.answer) as url:
        wire.frames = [chunk({"role": "assistant"}), *map(chunk, deltas), *text_chunks(finish=finish)]
        async with serving(ModelConfig(target=f"generic:m@{url}")) as server:
            yield server, wire


def forget_ids(value: Any, answer_id: str) -> Any:
    return json.loads(json.dumps(value).replace(answer_id, "ID"))


@pytest.mark.parametrize("case", ANSWERS)
async def test_whole_and_streamed_answers_are_the_same(case: str) -> None:
    """Items, their ids and their order; and the deltas of each item add up to what ends it."""
    deltas, wanted = ANSWERS[case]
    async with answering(deltas) as (server, _):
        whole = (await server.post(PATH, ask(PATH, tools=TOOLS))).json
        frames = (await server.post(PATH, ask(PATH, tools=TOOLS, stream=True))).frames
    assert [show(item) for item in whole["output"]] == wanted
    last = frames[-1].data["response"]
    assert (last["status"], whole["status"]) == ("completed", "completed")
    answers = [forget_ids(body["output"], body["id"].removeprefix("resp_")) for body in (whole, last)]
    assert answers[0] == answers[1]
    check_events(frames, last["output"])


def check_events(frames: list[Frame], output: list[Any]) -> None:
    """Each item is added in its turn, written, and done once; a text is done before the next begins."""
    texts = dict.fromkeys(range(len(output)), "")
    added: list[int] = []
    done: dict[int, Any] = {}
    for frame in frames:
        event: Any = frame.data
        index: Any = event.get("output_index")
        assert index not in done
        match event["type"].split("."):
            case [*_, "output_item", "added"]:
                added.append(index)
            case [*_, "output_item", "done"]:
                done[index] = event["item"]
            case [*_, "output_text" | "reasoning_text" | "function_call_arguments" | "custom_tool_call_input", "delta"]:
                assert index in added
                assert event["item_id"] == output[index]["id"]
                texts[index] += event["delta"]
            case [*_, "output_text" | "reasoning_text" | "function_call_arguments" | "custom_tool_call_input", "done"]:
                said = [event[name] for name in ("text", "arguments", "input") if name in event]
                assert said == [texts[index]]
    assert added == list(range(len(output)))
    assert [done[index] for index in added] == output
    assert [frame.data["sequence_number"] for frame in frames] == list(range(len(frames)))


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", ANSWERS)
async def test_the_sdk_reads_the_answer_and_sends_it_back(case: str, *, is_streamed: bool) -> None:
    """Its own tool loop: all items and a result for each call. The target sees one message, and its results."""
    deltas, wanted = ANSWERS[case]
    async with (
        answering(deltas) as (server, wire),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        if is_streamed:
            async with client.responses.stream(model="fast", input="hi", tools=TOOLS) as stream:
                answer: Any = await stream.get_final_response()
        else:
            answer = await client.responses.create(model="fast", input="hi", tools=TOOLS)
        items: Any = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        assert [show(item) for item in items] == wanted
        calls = [item for item in items if item["type"].endswith("call")]
        results = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": f"of {item['call_id']}"}
            for item in calls
        ]
        wire.frames = text_chunks("ok")
        user = {"role": "user", "content": "hi"}
        sent_back: Any = [user, *items, *results, user]
        again: Any = await client.responses.create(model="fast", input=sent_back, tools=TOOLS)
        assert again.output_text == "ok"
    check_messages(wire.bodies[-1]["messages"], deltas, num_calls=len(calls))


def check_messages(messages: list[Any], deltas: list[Any], *, num_calls: int) -> None:
    """One message of the assistant with all that it said, and results directly behind it."""
    if len(messages) == 1:
        assert all("reasoning_content" in delta for delta in deltas)  # which led to nothing, and is not sent
        return
    user, said, *results, _ = messages
    assert (user["role"], said["role"]) == ("user", "assistant")
    assert [result["tool_call_id"] for result in results] == [f"c{index}" for index in range(num_calls)]
    assert [made["id"] for made in said.get("tool_calls", ())] == [f"c{index}" for index in range(num_calls)]
    texts = "".join(delta.get("content", "") for delta in deltas)
    assert (said["content"] or "").replace("\n\n", "") == texts.replace("\n\n", "")
    for index, made in enumerate(said.get("tool_calls", ())):
        written = [d["tool_calls"][0] for d in deltas if "tool_calls" in d and d["tool_calls"][0]["index"] == index]
        assert made["function"]["name"] == written[0]["function"]["name"]
        if made["function"]["name"] in ("f", "ns__g", "mcp__demo__close"):
            assert made["function"]["arguments"] == "".join(one["function"]["arguments"] for one in written)


async def test_reasoning_of_a_tool_loop_comes_back() -> None:
    """The model reads again what it thought before its call."""
    async with (
        answering([think("I need it"), piece(0, "{}", "f")]) as (server, wire),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer: Any = await client.responses.create(model="fast", input="hi", tools=TOOLS)
        items: Any = [item.model_dump(exclude_none=True) for item in answer.output]
        result: Any = {"type": "function_call_output", "call_id": "c0", "output": "x"}
        await client.responses.create(model="fast", input=[*items, result], tools=TOOLS)
    assert wire.bodies[-1]["messages"][0]["reasoning_content"] == "I need it"


async def test_a_text_comes_while_a_call_is_open() -> None:
    """Nothing is held back: the text's events stand before those of the call's rest."""
    async with answering([piece(0, '{"a":', "f"), say("b"), piece(0, "1}")]) as (server, _):
        frames = (await server.post(PATH, ask(PATH, tools=TOOLS, stream=True))).frames
    deltas = [(frame.data["output_index"], frame.data["delta"]) for frame in frames if "delta" in frame.data]
    assert deltas == [(0, '{"a":'), (1, "b"), (0, "1}")]


async def test_a_custom_input_comes_while_it_is_written() -> None:
    async with answering([piece(0, '{"input": "a', "patch"), piece(0, "b"), piece(0, 'c"}')]) as (server, _):
        frames = (await server.post(PATH, ask(PATH, tools=TOOLS, stream=True))).frames
    deltas = [frame.data["delta"] for frame in frames if frame.event == "response.custom_tool_call_input.delta"]
    assert deltas == ["a", "b", "c"]


# ---------------------------------------------------------------------------------------------- details


CITED: Final = {"type": "url_citation", "url_citation": {"url": "https://a.example/b", "title": "t"}}
CITATION: Final = {"type": "url_citation", "url": "https://a.example/b", "title": "t"}
DRAWN: Final = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
DETAILS: Final[dict[str, tuple[list[StreamEvent], list[Any]]]] = {
    "behind the text": ([TextDelta("a"), AnswerDetail("chat", {"annotations": [CITED]})], [("a", [CITATION])]),
    "before the text": ([AnswerDetail("chat", {"annotations": [CITED]}), TextDelta("a")], [("a", [CITATION])]),
    "without a text": ([AnswerDetail("chat", {"annotations": [CITED]})], [("", [CITATION])]),
    "in another form": ([TextDelta("a"), AnswerDetail("chat", {"annotations": [CITATION]})], [("a", [CITATION])]),
    "an image": ([TextDelta("a"), AnswerDetail("chat", {"images": [DRAWN]})], [("a", []), "QUJD"]),
    "an image alone": ([AnswerDetail("chat", {"images": [DRAWN]})], ["QUJD"]),
    "an image elsewhere": ([AnswerDetail("chat", {"images": [{"image_url": {"url": "https://a"}}]})], [("", [])]),
    "other types": ([AnswerDetail("chat", {"annotations": "x", "images": [1, {"image_url": 5}]})], [("", [])]),
    "an image and a call": (
        [AnswerDetail("chat", {"images": [DRAWN]}), ToolCallDelta(0, "c0", "f", "{}")],
        ["c0", "QUJD"],
    ),
}


@pytest.mark.parametrize("case", DETAILS)
async def test_what_an_answer_cites_and_shows_is_in_it(case: str) -> None:
    """As OpenAI's annotations and images, whole and streamed."""
    events, wanted = DETAILS[case]
    parsed = ParsedRequest(model="m", request=ChatRequest.create("hi"))
    result = await SpeculativeDecoder(target=ScriptedProvider([*events, Finish("stop")]), draft=None).decode(
        parsed.request
    )
    whole = build_responses_api_response(result, parsed, answer_id="x", model="m")
    assert [show_details(item) for item in whole["output"]] == wanted
    encoder = ResponsesStreamEncoder(parsed, answer_id="x", model="m")
    frames = b"".join([*map(encoder.encode_event, events), encoder.encode_end(result)]).split(b"\n\n")
    told = [json.loads(frame.partition(b"data: ")[2]) for frame in frames if frame]
    assert told[-1]["response"]["output"] == whole["output"]
    added = [event["annotation"] for event in told if event["type"] == "response.output_text.annotation.added"]
    assert added == [found for item in wanted if isinstance(item, tuple) for found in item[1]]


def show_details(item: Any) -> Any:
    if item["type"] != "message":
        return item.get("result") or item["call_id"]
    (part,) = item["content"]
    return part["text"], part["annotations"]


# ---------------------------------------------------------------------------------------------- compaction


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_is_compacted_to_a_summary(*, is_streamed: bool) -> None:
    """The item holds it; sent back, the model reads it."""
    user = {"role": "user", "content": "hi"}
    async with answering([think("hm"), say("all "), say("of it")]) as (server, wire):
        fields = {"input": [user, {"type": "compaction_trigger"}], "tools": TOOLS, "stream": is_streamed}
        reply = await server.post(PATH, ask(PATH, **fields))
        assert wire.bodies[-1]["messages"][-1]["content"].startswith("hi\n\nSummarize this conversation")
        assert wire.bodies[-1]["tool_choice"] == "none"
        output = reply.frames[-1].data["response"]["output"] if is_streamed else reply.json["output"]
        assert [item["type"] for item in output] == ["reasoning", "compaction"]
        if is_streamed:
            done = [frame.data["item"] for frame in reply.frames if frame.event == "response.output_item.done"]
            assert done == output
        await server.post(PATH, ask(PATH, input=[output[1], user]))
    text = wire.bodies[-1]["messages"][0]["content"]
    assert text == "Summary of the conversation before:\n\nall of it\n\nhi"


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (HttpProblem(429, "slow", code="rate_limit_exceeded"), "rate_limit_exceeded"),
        (HttpProblem(429, "slow", code="target_failed"), "rate_limit_exceeded"),
        (HttpProblem(429, "spent", code="insufficient_quota"), "insufficient_quota"),
        (HttpProblem(400, "long", code="context_length_exceeded"), "context_length_exceeded"),
        (HttpProblem(400, "bad"), "invalid_prompt"),
        (HttpProblem(400, "bad", code="unsupported"), "invalid_prompt"),
        (HttpProblem(503, "busy", code="server_is_overloaded"), "server_is_overloaded"),
        (HttpProblem(502, "broke", code="target_failed"), "server_error"),
        (HttpProblem(500, "failed", code="internal"), "server_error"),
    ],
)
def test_a_failed_response_has_a_code_that_clients_know(problem: HttpProblem, code: str) -> None:
    encoder = ResponsesStreamEncoder(
        ParsedRequest(model="m", request=ChatRequest.create("hi")), answer_id="x", model="m"
    )
    encoder.encode_event(TextDelta("a"))
    told = json.loads(encoder.encode_error(problem).partition(b"data: ")[2])
    assert told["response"]["error"] == {"code": code, "message": problem.message}


async def test_the_code_of_an_error_in_a_stream_arrives() -> None:
    """Such as a limit that the target's server reaches in the middle."""
    error = {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}
    async with answering([]) as (server, wire):
        wire.frames = [chunk({"content": "a"}), b"data: " + json.dumps({"error": error}).encode() + b"\n\n"]
        last = (await server.post(PATH, ask(PATH, stream=True))).frames[-1]
    assert last.event == "response.failed"
    assert last.data["response"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [PATH, "/responses"])
async def test_who_tries_a_websocket_is_told_at_once(path: str) -> None:
    """Codex falls back to HTTP upon 426 alone; another GET is not allowed as before."""
    async with serving() as server:
        upgraded = await server.send(
            "GET",
            path,
            None,
            Connection="Upgrade",
            Upgrade="websocket",
            Sec_WebSocket_Version="13",
            Sec_WebSocket_Key="x",
        )
        plain = await server.get(path)
        head = await server.send("HEAD", path, None)
        answered = await server.post(path, ask(path))
    assert (upgraded.status, upgraded.error["code"]) == (426, "upgrade_required")
    assert upgraded.headers["Upgrade"] == "HTTP/1.1"
    assert (plain.status, plain.headers["Allow"], head.status, answered.status) == (405, "POST", 405, 200)
