"""Reasoning goes back to the model that it came from, with what its API needs; files and marks reach it, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    SQLiteSession,
    ToolOutputFileContent,
    ToolOutputImage,
    ToolOutputText,
    function_tool,
)
from support.agents_runs import HOWS, run_agent

from llm_spec import ChatMessage, Finish, ReasoningDelta, ReasoningDetail, SpeculativeDecoder, TextDelta, ToolCallDelta
from llm_spec.contract.provider import Capabilities
from llm_spec.integrations.openai_agents import SpeculativeModel
from llm_spec.testing import ScriptedProvider

CALL = ToolCallDelta(0, "call_a", "add", '{"a": 1, "b": 2}')
SIGNATURE = ReasoningDetail("messages", {"type": "signature_delta", "signature": "s1"})
REDACTED = ReasoningDetail("messages", {"type": "redacted_thinking", "data": "r"})
PIECES = [
    ReasoningDetail("chat", {"type": "reasoning.text", "index": 0, "text": "th"}),
    ReasoningDetail("chat", {"type": "reasoning.text", "index": 0, "text": "ink", "signature": "s2"}),
]
ENCRYPTED = ReasoningDetail("chat", {"type": "reasoning.encrypted", "index": 1, "data": "x"})
SIGNED = ReasoningDetail("messages", {"type": "thinking", "thinking": "think", "signature": "s1"})
SECOND = ReasoningDetail("messages", {"type": "thinking", "thinking": "more", "signature": "s1"})
WHOLE = ReasoningDetail("chat", {"type": "reasoning.text", "index": 0, "text": "think", "signature": "s2"})
THINK = [ReasoningDelta("th"), ReasoningDelta("ink")]
# What a target shows before its call, and what goes back with it.
CASES: dict[str, tuple[list[Any], str, tuple[ReasoningDetail, ...]]] = {
    "a text": (THINK, "think", ()),
    "a signed block": ([*THINK, SIGNATURE], "think", (SIGNED,)),
    "a block that may not be read": ([REDACTED], "", (REDACTED,)),
    "two blocks": (
        [*THINK, SIGNATURE, REDACTED, ReasoningDelta("more"), SIGNATURE],
        "thinkmore",
        (SIGNED, REDACTED, SECOND),
    ),
    "a block that is not signed": ([REDACTED, *THINK], "think", (REDACTED,)),
    "items of chat": ([*PIECES, *THINK], "think", (WHOLE,)),
    "encrypted items alone": ([ENCRYPTED], "", (ENCRYPTED,)),
}


@function_tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def think_and_call(events: list[Any], *, name: str = "scripted:m", text: str = "") -> ScriptedProvider:
    """A target that reasons, calls a tool, and then answers."""
    texts = [TextDelta(text)] if text else []
    answers: Iterator[Any] = iter([[*events, *texts, CALL, Finish("tool_calls")]])
    return ScriptedProvider(lambda _: next(answers, [TextDelta("done"), Finish("stop")]), name=name)


def find_calling_message(provider: ScriptedProvider) -> ChatMessage:
    [message] = [message for message in provider.requests[-1].messages if message.tool_calls]
    return message


def look_at(message: ChatMessage) -> tuple[str, tuple[ReasoningDetail, ...]]:
    return message.reasoning, message.reasoning_details


@HOWS
@pytest.mark.parametrize("text", ["", "Now."])
@pytest.mark.parametrize("name", CASES)
async def test_reasoning_goes_back_with_its_call(name: str, text: str, is_streamed: bool) -> None:
    """In the loop of a tool; in a later run of a session; and in the history as JSON."""
    events, *expected = CASES[name]
    provider = think_and_call(events, text=text)
    agent = Agent(name="a", model=SpeculativeModel(provider), tools=[add])
    session = SQLiteSession("s")
    result = await run_agent(agent, "1 and 2?", is_streamed, session=session)
    assert result.final_output == "done"
    message = find_calling_message(provider)
    assert look_at(message) == tuple(expected)
    assert message.content == (text or None)
    await run_agent(agent, "And?", is_streamed, session=session)
    assert look_at(find_calling_message(provider)) == tuple(expected)
    history = json.loads(json.dumps(result.to_input_list()))
    await run_agent(agent, [*history, {"role": "user", "content": "And?"}], is_streamed)
    assert look_at(find_calling_message(provider)) == tuple(expected)
    session.close()
    assert not any("llm_spec" in json.dumps(message.to_openai()) for message in provider.requests[-1].messages)


@HOWS
async def test_the_item_is_as_of_the_sdks_models(is_streamed: bool) -> None:
    """Summary, content, signature and blocks of thinking are where its LiteLLM model has them."""
    provider = think_and_call([*THINK, SIGNATURE])
    result = await run_agent(Agent(name="a", model=SpeculativeModel(provider), tools=[add]), "Go", is_streamed)
    item = result.raw_responses[0].output[0].model_dump()
    assert [part["text"] for part in item["summary"]] == ["think"]
    assert [part["text"] for part in item["content"]] == ["think"]
    assert item["encrypted_content"] == "s1"
    assert item["provider_data"]["model"] == "m"
    assert item["provider_data"]["thinking_blocks"] == [dict(SIGNED.value)]


@HOWS
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("a:m", "a:m", ("think", (SIGNED,))),
        ("a:m", "b:m", ("", ())),
        ("a:deepseek-r", "b:deepseek-r", ("think", ())),  # the SDK's own rule: of the family, no signature
    ],
)
async def test_reasoning_of_another_model(first: str, second: str, expected: Any, is_streamed: bool) -> None:
    """A signature goes to the model that it came from alone."""
    tools = [add]
    made = think_and_call([*THINK, SIGNATURE], name=first)
    result = await run_agent(Agent(name="a", model=SpeculativeModel(made), tools=tools), "Go", is_streamed)
    other = ScriptedProvider("Yes.", name=second)
    await run_agent(Agent(name="b", model=SpeculativeModel(other), tools=tools), result.to_input_list(), is_streamed)
    assert look_at(find_calling_message(other)) == expected


@HOWS
@pytest.mark.parametrize("wants", [False, True])
async def test_the_hook_decides(wants: bool, is_streamed: bool) -> None:
    """`should_replay_reasoning_content` sees the item as it was, and the model."""
    seen: list[Any] = []

    def should_replay(context: Any) -> bool:
        item = context.reasoning.item
        seen.append((context.model, context.reasoning.origin_model, item["summary"][0]["text"]))
        return wants

    provider = think_and_call(THINK)
    model = SpeculativeModel(provider, should_replay_reasoning_content=should_replay)
    await run_agent(Agent(name="a", model=model, tools=[add]), "Go", is_streamed)
    assert find_calling_message(provider).reasoning == ("think" if wants else "")
    assert seen == [("m", "m", "think")]


async def test_a_draft_changes_no_name() -> None:
    """What a target said with one draft goes back to it with another, or none."""
    target = think_and_call([*THINK, SIGNATURE])
    async with SpeculativeDecoder(target=target, draft="lookup") as decoder:
        model = SpeculativeModel(decoder)
        assert model.model == "m"
        result = await run_agent(Agent(name="a", model=model, tools=[add]), "Go", False)
    await run_agent(Agent(name="a", model=SpeculativeModel(target), tools=[add]), result.to_input_list(), False)
    assert look_at(find_calling_message(target)) == ("think", (SIGNED,))


async def test_later_texts_of_the_system_keep_their_role_and_place() -> None:
    """The core decides where they go, target by target."""
    provider = ScriptedProvider("Hi")
    items: list[Any] = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "system", "content": "3"},
        {"role": "user", "content": "4"},
        {"role": "developer", "content": [{"type": "input_text", "text": "5"}]},
    ]
    await run_agent(Agent(name="a", model=SpeculativeModel(provider), instructions="0"), items, False)
    assert [(message.role, message.text) for message in provider.requests[0].messages] == [
        ("system", "0"),
        ("user", "1"),
        ("assistant", "2"),
        ("system", "3"),
        ("user", "4"),
        ("developer", "5"),
    ]


# ------------------------------------------------------------------------------------------------ files

IMAGE = "data:image/png;base64,aGk="
PDF = "data:application/pdf;base64,aGk="
IMAGE_PART = {"type": "image_url", "image_url": {"url": IMAGE, "detail": "auto"}}
FILE_PART = {"type": "file", "file": {"file_data": PDF, "filename": "a.pdf"}}


@function_tool
def fetch_text() -> Any:
    """Texts alone."""
    return [ToolOutputText(text="one"), ToolOutputText(text="two")]


@function_tool
def fetch_both() -> Any:
    """A text, an image and a document."""
    return [
        ToolOutputText(text="one"),
        ToolOutputImage(image_url=IMAGE, detail="auto"),
        ToolOutputFileContent(file_data=PDF, filename="a.pdf"),
    ]


@function_tool
def fetch_image() -> Any:
    """An image alone."""
    return ToolOutputImage(image_url=IMAGE, detail="auto")


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


TITLE = text_part("Files of the result of call call_a:")


@HOWS
@pytest.mark.parametrize(
    ("tool", "result", "user"),
    [
        (fetch_text, [text_part("one"), text_part("two")], None),
        (fetch_both, [text_part("one")], [TITLE, IMAGE_PART, FILE_PART]),
        (fetch_image, "The result follows in files.", [TITLE, IMAGE_PART]),
    ],
    ids=["texts", "a text and files", "an image"],
)
@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_files_in_results_of_tools(api: Any, tool: Any, result: Any, user: Any, is_streamed: bool) -> None:
    """Chat completions take texts alone from tools: files follow. Anthropic's messages take them in the result."""
    answers: Iterator[Any] = iter([[ToolCallDelta(0, "call_a", tool.name, "{}"), Finish("tool_calls")]])
    provider = ScriptedProvider(
        lambda _: next(answers, [TextDelta("done"), Finish("stop")]), capabilities=Capabilities(api=api)
    )
    await run_agent(Agent(name="a", model=SpeculativeModel(provider), tools=[tool]), "Go", is_streamed)
    _, _, *behind = [message.to_openai() for message in provider.requests[-1].messages]
    if api == "messages" and user is not None:
        parts = [*(result if isinstance(result, list) else []), *user[1:]]
        assert behind == [{"role": "tool", "tool_call_id": "call_a", "content": parts}]
        return
    users = [] if user is None else [{"role": "user", "content": user}]
    assert behind == [{"role": "tool", "tool_call_id": "call_a", "content": result}, *users]


@HOWS
@pytest.mark.parametrize(
    ("api", "mark"),
    [
        ("chat", {"prompt_cache_breakpoint": {"mode": "explicit"}}),
        ("messages", {"cache_control": {"type": "ephemeral"}}),
    ],
)
async def test_files_and_marks_of_the_user(api: Any, mark: dict[str, Any], is_streamed: bool) -> None:
    """Images and documents go along; where a prompt is cached up to is said in the target's word."""
    breakpoint_ = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [
        {"type": "input_text", "text": "Look", **breakpoint_},
        {"type": "input_image", "image_url": IMAGE, "detail": "auto"},
        {"type": "input_file", "file_data": PDF, "filename": "a.pdf"},
    ]
    provider = ScriptedProvider("Hi", capabilities=Capabilities(api=api))
    given: Any = [{"role": "user", "content": parts}]
    await run_agent(Agent(name="a", model=SpeculativeModel(provider)), given, is_streamed)
    [message] = provider.requests[0].messages
    assert message.to_openai()["content"] == [{**text_part("Look"), **mark}, IMAGE_PART, FILE_PART]
