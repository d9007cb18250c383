"""Streams of messages as Anthropic's own SDK puts them together: what a whole answer says, block by block."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from anthropic import AsyncAnthropic
from support.messages_wire import begin, frame, serve, text_frames
from support.serving import Asking, ask, serving
from support.wire import Wire, chunk, served

from llm_spec.decoder.entry_points import NamedProvider
from llm_spec.server import ModelConfig

PATH: Final = "/v1/messages"
USAGE: Final = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\n'
TOOLS: Final[Any] = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]
LONG: Final = "x" * 3000


def piece(arguments: str, *, index: int = 0, name: str | None = None) -> dict[str, Any]:
    started = {} if name is None else {"id": f"c{index}", "type": "function"}
    function = {"arguments": arguments, **({} if name is None else {"name": name})}
    return {"tool_calls": [{"index": index, **started, "function": function}]}


def text(words: str) -> tuple[str, str]:
    return ("text", words)


def call(name: str, value: Any) -> tuple[str, str, Any]:
    return ("tool_use", name, value)


F, TOLD, HMM = piece('{"a":', name="f"), {"content": "so"}, {"reasoning_content": "hm"}
BLANK: Final = {"content": "\n"}
REST: Final = piece("1}")
G: Final = [piece('{"b":', index=1, name="g"), piece("2}", index=1)]
LONG_F: Final = [piece('{"a":"' + LONG[:2000], name="f"), TOLD, HMM, piece(LONG[2000:] + '"}')]
AB: Final = [call("f", {"a": 1}), call("g", {"b": 2})]

CASES: Final[dict[str, tuple[list[dict[str, Any]], list[Any]]]] = {
    "text between pieces": ([F, TOLD, REST], [text("so"), call("f", {"a": 1})]),
    "a blank text between pieces": ([F, BLANK, REST], [text("\n"), call("f", {"a": 1})]),
    "an empty text between pieces": ([F, {"content": ""}, REST], [call("f", {"a": 1})]),
    "reasoning between pieces": ([F, HMM, REST], [("thinking", "hm"), call("f", {"a": 1})]),
    "both between pieces": ([F, HMM, TOLD, REST], [("thinking", "hm"), text("so"), call("f", {"a": 1})]),
    "text before and between": ([TOLD, F, TOLD, REST], [text("soso"), call("f", {"a": 1})]),
    "text after a call": ([F, REST, TOLD], [text("so"), call("f", {"a": 1})]),
    "text between calls": ([F, REST, TOLD, *G], [text("so"), *AB]),
    "text between mingled calls": ([F, G[0], TOLD, REST, G[1]], [text("so"), *AB]),
    "nothing between": ([HMM, TOLD, F, REST, *G], [("thinking", "hm"), text("so"), *AB]),
    "a call without arguments": ([piece("", name="f"), TOLD], [text("so"), call("f", {})]),
}


async def ask_both(server: Asking, **fields: Any) -> list[Any]:
    """A whole answer, and a streamed one as the SDK accumulates it."""
    client = AsyncAnthropic(base_url=server.url, api_key="sk-any", max_retries=0)
    messages: Any = [{"role": "user", "content": "q"}]
    whole = await client.messages.create(model="fast", max_tokens=100, messages=messages, **fields)
    async with client.messages.stream(model="fast", max_tokens=100, messages=messages, **fields) as stream:
        streamed = await stream.get_final_message()
    await client.close()
    return [whole, streamed]


def show(message: Any) -> list[tuple[Any, ...]]:
    shown = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("name", "input")}
    return [(block.type, *(getattr(block, name) for name in shown[block.type])) for block in message.content]


@pytest.mark.parametrize("case", CASES)
async def test_a_call_is_one_block_whatever_comes_between_its_pieces(case: str) -> None:
    """In the order of the whole answer."""
    deltas, blocks = CASES[case]
    wire = Wire()
    wire.frames = [*map(chunk, deltas), chunk({}, "tool_calls"), USAGE, b"data: [DONE]\n\n"]
    async with (
        served("/chat/completions", wire.answer) as url,
        serving(ModelConfig(target=f"generic:m@{url}")) as server,
    ):
        whole, streamed = await ask_both(server, tools=TOOLS)
    assert show(whole) == blocks
    assert show(streamed) == blocks
    assert whole.stop_reason == streamed.stop_reason == "tool_use"


async def test_a_long_call_is_sent_as_it_comes() -> None:
    """It may take minutes; what is said beside it waits, and follows it."""
    wire = Wire()
    wire.frames = [*map(chunk, [*LONG_F, *G]), chunk({}, "tool_calls"), USAGE, b"data: [DONE]\n\n"]
    async with (
        served("/chat/completions", wire.answer) as url,
        serving(ModelConfig(target=f"generic:m@{url}")) as server,
    ):
        whole, streamed = await ask_both(server, tools=TOOLS)
        reply = await server.post(PATH, ask(PATH, tools=TOOLS, stream=True))
    calls = [call("f", {"a": LONG}), call("g", {"b": 2})]
    assert show(whole) == [("thinking", "hm"), text("so"), *calls]
    assert show(streamed) == [calls[0], text("so"), ("thinking", "hm"), calls[1]]
    deltas = [f.data["delta"].get("partial_json", "") for f in reply.frames if f.event == "content_block_delta"]
    assert [len(delta) for delta in deltas if delta][:2] == [2006, 1002]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_of_the_sdk(*, stream: bool) -> None:
    """What an answer held goes back as it came: text, reasoning, call, and what the tool showed."""
    wire = Wire()
    wire.frames = [*map(chunk, [HMM, TOLD, F, REST]), chunk({}, "tool_calls"), USAGE, b"data: [DONE]\n\n"]
    image = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    async with (
        served("/chat/completions", wire.answer) as url,
        serving(ModelConfig(target=f"generic:m@{url}")) as server,
    ):
        client = AsyncAnthropic(base_url=server.url, api_key="sk-any", max_retries=0)
        conversation: list[Any] = [{"role": "user", "content": "q"}]
        for _ in range(3):
            asked: Any = {"model": "fast", "max_tokens": 100, "messages": conversation, "tools": TOOLS}
            if stream:
                async with client.messages.stream(**asked) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**asked)
            shown = [{"type": "text", "text": "see"}, {"type": "image", "source": image}]
            result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": shown}  # type: ignore[union-attr]
            conversation += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        await client.close()
    sent_call = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": "so", "tool_calls": [sent_call], "reasoning_content": "hm"}
    second, third = (body["messages"] for body in wire.bodies[1:])
    assert [message["role"] for message in second] == ["user", "assistant", "tool", "user"]
    assert second[1] == turn
    assert second[3]["content"][-1]["image_url"]["url"] == "data:image/png;base64,aGVsbG8="
    assert third[: len(second)] == second
    assert third[4] == turn


def stop_frames(stop_sequence: Any) -> list[bytes]:
    delta = {"stop_reason": "stop_sequence", "stop_sequence": stop_sequence}
    ended = frame("message_delta", delta=delta, usage={"output_tokens": 5})
    return [*begin(), *text_frames("one "), ended, frame("message_stop")]


@pytest.mark.parametrize(
    ("told", "stops", "shown"),
    [
        ("BB", ["AA", "BB"], "BB"),
        ("BB", ["BB"], "BB"),
        (None, ["AA", "BB"], None),  # nobody knows
        (None, ["BB"], "BB"),
        (7, ["AA", "BB"], None),
    ],
)
async def test_the_stop_sequence_that_claude_tells(told: Any, stops: list[str], shown: str | None) -> None:
    """Whole and streamed."""
    async with serve() as wire:
        wire.frames = stop_frames(told)
        claude = NamedProvider(type="anthropic", base_url=wire.url, api_key="sk-ant-any")
        async with serving(ModelConfig(target="claude:claude-sonnet-4-5"), providers={"claude": claude}) as server:
            for message in await ask_both(server, stop_sequences=stops):
                assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", shown)


@pytest.mark.parametrize("stops", [["morning"], ["morning", "ZZZ"], ["ZZZ", "morning"]])
@pytest.mark.parametrize("target", ["rules:any", "builtin:target"])
async def test_the_stop_sequence_of_a_model_in_this_process(target: str, stops: list[str]) -> None:
    """Whole and streamed, the one of several."""
    question = "Good morning" if target == "rules:any" else "def parse_args(self, argv):"
    stops = [stop if target == "rules:any" else stop.replace("morning", "return") for stop in stops]
    async with serving(ModelConfig(target=target)) as server:
        body = ask(PATH, question, stop_sequences=stops, max_tokens=60)
        whole = (await server.post(PATH, body)).json
        streamed = (await server.post(PATH, body | {"stream": True})).frames[-2].data["delta"]
    expected = {"stop_reason": "stop_sequence", "stop_sequence": next(stop for stop in stops if stop != "ZZZ")}
    assert {name: whole[name] for name in expected} == {name: streamed[name] for name in expected} == expected


async def test_an_answer_that_no_stop_sequence_ended_names_none() -> None:
    async with serving() as server:
        body = ask(PATH, stop_sequences=["ZZZ"])
        whole = (await server.post(PATH, body)).json
        streamed = (await server.post(PATH, body | {"stream": True})).frames[-2].data["delta"]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    assert json.dumps(streamed) == json.dumps({"stop_reason": "end_turn", "stop_sequence": None})
