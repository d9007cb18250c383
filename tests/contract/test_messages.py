"""Chat values: what is accepted at the public doors, and what is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, cast

import pytest

from llm_spec import (
    ChatMessage,
    ChatRequest,
    Finish,
    InvalidRequestError,
    LlmSpecError,
    ReasoningDelta,
    Round,
    Sampling,
    SpeculativeDecoder,
    TargetError,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from llm_spec.contract.response import complete_from_stream
from llm_spec.server.apis.fields import parse_openai_messages
from llm_spec.testing import ScriptedProvider

LOOSE: Any = ChatRequest.create  # for what a type checker would not let through


# ------------------------------------------------------------------------------------------ messages


def test_a_text_alone_is_one_user_message() -> None:
    """The shortest request is a string."""
    assert ChatRequest.create("hello").messages == (ChatMessage("user", "hello"),)


def test_openai_dicts_and_messages_may_be_mixed() -> None:
    """Both forms are accepted side by side."""
    request = ChatRequest.create([ChatMessage("system", "be brief"), {"role": "user", "content": "hello"}])
    assert request.messages == (ChatMessage("system", "be brief"), ChatMessage("user", "hello"))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hello"},
        {"role": "developer", "content": "be brief", "name": "ops"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ],
)
def test_an_openai_message_comes_back_as_it_was(message: dict[str, Any]) -> None:
    """Reading and writing OpenAI's form loses nothing, and the result is JSON."""
    out = ChatMessage.from_openai(message).to_openai()
    assert out == message
    json.dumps(out)


def test_the_text_of_a_message_joins_its_text_parts() -> None:
    """A part that is not text contributes nothing; no content is no text."""
    parts = ({"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"})
    assert ChatMessage("user", parts).text == "ab"
    assert ChatMessage("assistant").text == ""


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"role": "robot", "content": "x"}, ["role", "'robot'", "assistant"]),
        ({"role": None, "content": "x"}, ["role", "missing"]),
        ({"content": "x"}, ["role"]),
        ({"role": "user", "content": 5}, ["content", "int"]),
        ({"role": "user", "content": {"type": "text"}}, ["content", "dict"]),
        ({"role": "user", "content": ["just text"]}, ["content", "str"]),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, ["function"]),
        ({"role": "assistant", "tool_calls": "f"}, []),
        ("hello", ["message"]),
        (5, ["message"]),
    ],
    ids=str,
)
def test_a_bad_message_is_refused_in_one_line(bad: Any, words: list[str]) -> None:
    """What is no chat message is refused by an error that names the field, not by a traceback from inside."""
    with pytest.raises(InvalidRequestError) as caught:
        ChatRequest.create([bad])
    assert_one_line(caught.value, *words)


_CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
POSITIONS: list[tuple[dict[str, Any], str]] = [
    ({"content": "x"}, "messages[1].role is missing; it must be one of system, developer, user, assistant, tool"),
    ({"role": "robot"}, "messages[1].role is 'robot'; it must be one of"),
    ({"role": ["user"]}, "messages[1].role is ['user']; it must be one of"),
    ({"role": "user", "content": 5}, "messages[1].content is of type int; it must be text"),
    ({"role": "user", "content": [{"type": "text"}, "x"]}, "messages[1].content[1] is 'x' of type str; it must be"),
    ({"role": "assistant", "tool_calls": ["f"]}, "messages[1].tool_calls[0] is 'f' of type str; it must be"),
    ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0].function is missing"),
    ({"role": "assistant", "tool_calls": [_CALL, {**_CALL, "function": 1}]}, "messages[1].tool_calls[1].function is 1"),
    (
        {"role": "assistant", "tool_calls": [{**_CALL, "function": {"name": "f"}}]},
        "messages[1].tool_calls[0].function.arguments is missing",
    ),
    (
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f"}}]},
        "messages[1].tool_calls[0].custom.input is missing",
    ),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        "messages[1].tool_calls[0].id is missing",
    ),
]


@pytest.mark.parametrize(("bad", "said"), POSITIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_error_says_which_message_is_wrong(bad: dict[str, Any], said: str) -> None:
    """Its position, the field, and what is wrong with it; the server's chat completions say the same."""
    messages = [{"role": "user", "content": "x"}, bad]
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        ChatRequest.create(messages)
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        parse_openai_messages({"messages": messages})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_completion_tokens", "it is max_tokens here"),
        ("max_output_tokens", "it is max_tokens here"),
        ("max_new_tokens", "it is max_tokens here"),
        ("n_predict", "it is max_tokens here"),
        ("num_predict", "it is max_tokens here"),
        ("max_length", "it is max_tokens here"),
        ("stop_sequences", "it is stop here"),
        ("repeat_penalty", "it is repetition_penalty here"),
        ("functions", "it is tools here"),
        ("stream", "call `stream`"),
        ("model", "the target is the model that answers"),
        ("system", "give a message with the role system"),
        ("reasoning_effort", "send it to a server as extra={'reasoning_effort': …}"),
        ("user", "extra={'user': …}"),
        ("n", "extra={'n': …}"),
        ("temprature", "did you mean 'temperature'?"),
        ("max_token", "did you mean 'max_tokens'?"),
        ("xyzzy", "there are extra, frequency_penalty"),
    ],
)
async def test_an_unknown_option_is_named_with_its_right_name(name: str, said: str) -> None:
    """At each door of the library: a request, and a decoder's answers."""
    options: Any = {name: 1}
    decoder = SpeculativeDecoder(target=ScriptedProvider("x"), draft=None)
    with pytest.raises(InvalidRequestError, match=re.escape(f"unknown request option {name!r}")) as caught:
        ChatRequest.create("hi", **options)
    assert said in str(caught.value)
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        await decoder.decode("hi", **options)
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        async with decoder.stream("hi", **options):
            pass


@pytest.mark.parametrize("bad", [None, 5, {"role": "user", "content": "x"}], ids=str)
def test_messages_that_are_no_list_are_refused(bad: Any) -> None:
    """One dict (or nothing) instead of a list is a bad request, told in one line."""
    with pytest.raises(InvalidRequestError) as caught:
        LOOSE(bad)
    assert_one_line(caught.value, "message")


@pytest.mark.parametrize("empty", [[], ()])
def test_empty_messages_are_refused(empty: Any) -> None:
    """There must be something to answer."""
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        ChatRequest.create(empty)


# ----------------------------------------------------------------------------------- request options


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", 0),
        ("top_k", 2.5),
        ("min_p", -1),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    """The error names the field, the value and the range, in one line, and is a ValueError."""
    with pytest.raises(InvalidRequestError) as caught:
        LOOSE("hello", **{field: value})
    assert isinstance(caught.value, ValueError)
    assert_one_line(caught.value, field, repr(value), "must be")


@pytest.mark.parametrize("bias", [{-1: 1.0}, {1: 101.0}, {1: float("nan")}, {"a": 1.0}], ids=str)
def test_a_bad_logit_bias_is_refused(bias: Any) -> None:
    """Token ids are whole numbers from 0, biases between -100 and 100."""
    with pytest.raises(InvalidRequestError) as caught:
        LOOSE("hello", logit_bias=bias)
    assert_one_line(caught.value, "logit_bias")


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [5], 5], ids=repr)
def test_a_bad_stop_string_is_refused(stop: Any) -> None:
    """Stop strings are texts with at least one character ("" alone may also mean: none)."""
    if stop == "":
        assert ChatRequest.create("hello", stop="").stop == ()
        return
    with pytest.raises(InvalidRequestError) as caught:
        LOOSE("hello", stop=stop)
    assert_one_line(caught.value, "stop")


def test_an_unknown_option_is_refused() -> None:
    """A misspelt option is not left out silently."""
    with pytest.raises(InvalidRequestError, match="'max_token'"):
        LOOSE("hello", max_token=5)


def test_options_go_where_they_belong() -> None:
    """Sampling options and the others are told apart; one stop string may stand alone."""
    request = ChatRequest.create("hello", temperature=0.7, top_k=3, seed=5, max_tokens=9, stop="x", prefix="He")
    assert request.sampling == Sampling(temperature=0.7, top_k=3, seed=5)
    assert (request.max_tokens, request.stop, request.prefix) == (9, ("x",), "He")
    assert ChatRequest.create("hello", stop=None, tools=[]).stop == ()


def test_values_are_frozen() -> None:
    """A request that is being served cannot change under the server's hands."""
    request = ChatRequest.create("hello")
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.max_tokens = 5  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue] - the point of it


def test_usage_adds_up() -> None:
    """Addition adds field by field."""
    total = Usage(input_tokens=1, output_tokens=2) + Usage(input_tokens=3, cached_input_tokens=4)
    assert total == Usage(input_tokens=4, output_tokens=2, cached_input_tokens=4)


@pytest.mark.parametrize(("num_accepted", "index"), [(0, 0), (2, 2), (3, None)])
def test_a_round_tells_where_it_was_rejected(num_accepted: int, index: int | None) -> None:
    """The rejection index is that of the first token that was not confirmed, None when all were."""
    report = Round(index=0, num_draft_tokens=3, num_accepted_tokens=num_accepted, num_emitted_tokens=num_accepted + 1)
    assert report.rejection_index == index


def test_a_plain_step_has_no_rejection() -> None:
    """Where nothing was drafted nothing was rejected."""
    assert Round(index=0, num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=1).rejection_index is None


# --------------------------------------------------------------------------------- complete from stream


async def test_a_whole_answer_is_the_stream_put_together() -> None:
    """Text, reasoning and the pieces of tool calls add up, in the order of the calls' indices."""
    provider = ScriptedProvider(
        [
            ReasoningDelta("hm"),
            TextDelta("Hel"),
            TextDelta("lo"),
            ToolCallDelta(1, "b", "g", ""),
            ToolCallDelta(0, "a", "f", '{"x"'),
            ToolCallDelta(0, arguments=":1}"),
            Finish("tool_calls", Usage(output_tokens=3), "tool_calls"),
        ]
    )
    response = await complete_from_stream(provider, ChatRequest.create("hello"))
    assert (response.content, response.reasoning) == ("Hello", "hm")
    assert response.message.tool_calls == (ToolCall("a", "f", '{"x":1}'), ToolCall("b", "g", ""))
    assert (response.finish_reason, response.stopped_by) == ("tool_calls", "tool_calls")
    assert response.usage == Usage(output_tokens=3)


async def test_a_stream_without_an_end_is_an_error() -> None:
    """A provider that stops without a finish reason has failed; what it had said is kept."""
    with pytest.raises(TargetError, match="finish reason") as caught:
        await complete_from_stream(ScriptedProvider([TextDelta("Hel")]), ChatRequest.create("hello"))
    assert caught.value.partial_text == "Hel"


def assert_one_line(error: Exception, *words: str) -> None:
    text = str(error)
    assert text
    assert "\n" not in text
    assert isinstance(error, LlmSpecError)
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"


def test_every_error_is_one_of_ours() -> None:
    """The errors of a bad request can be caught as LlmSpecError, as ValueError and by their own name."""
    makers = [cast("Callable[[], object]", lambda: ChatMessage("x")), lambda: ChatRequest(messages=())]  # type: ignore[arg-type]
    for make in makers:
        with pytest.raises(InvalidRequestError) as caught:
            make()
        assert isinstance(caught.value, LlmSpecError)
        assert isinstance(caught.value, ValueError)
