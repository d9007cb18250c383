"""What an answer is once it has ended: calls that are whole, reasoning that goes back, refusals, usage, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelPermissionDeniedError,
    ModelRateLimitError,
    ModelRefusalError,
    ModelTimeoutError,
    OutputParserException,
)
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import LLMResult
from langchain_core.tools import tool
from pydantic import BaseModel

from llm_spec import (
    AnswerDetail,
    Finish,
    InvalidRequestError,
    ReasoningDelta,
    ReasoningDetail,
    TargetError,
    TextDelta,
    ToolCallDelta,
    TransientError,
    Usage,
)
from llm_spec.contract.errors import make_context_length_error
from llm_spec.integrations.langchain import SpeculativeChatModel
from llm_spec.testing import ScriptedProvider

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")  # `loads`

Ask = Callable[[Any, Any], BaseMessage]


def invoke(model: Any, asked: Any) -> BaseMessage:
    return model.invoke(asked)  # type: ignore[no-any-return]


def ainvoke(model: Any, asked: Any) -> BaseMessage:
    return asyncio.run(model.ainvoke(asked))


def stream(model: Any, asked: Any) -> BaseMessage:
    first, *others = model.stream(asked)
    return sum(others, start=first)  # type: ignore[no-any-return]


def invoke_streaming(model: Any, asked: Any) -> BaseMessage:
    """As `invoke` where something listens to tokens: LangChain puts the answer together itself."""
    model.streaming = True
    return model.invoke(asked)  # type: ignore[no-any-return]


WAYS = [invoke, ainvoke, stream]
WHOLE_WAYS = [invoke, ainvoke, invoke_streaming]


def over(*events: Any, **fields: Any) -> SpeculativeChatModel:
    return SpeculativeChatModel(target=ScriptedProvider(list(events)), **fields)


def call_in_pieces(*pieces: str, finish: Any = "tool_calls", name: str = "delete") -> list[Any]:
    deltas = [ToolCallDelta(0, "c1", name, pieces[0]), *(ToolCallDelta(0, None, None, text) for text in pieces[1:])]
    return [*deltas, Finish(finish)]


class City(BaseModel):
    """A city."""

    name: str
    population: int = 0


# ------------------------------------------------------------------------------------------------- calls

BROKEN = {
    "cut": ('{"path": "/home', "/ann", "length"),
    "cut before its arguments": ("", "", "length"),
    "no JSON": ('{"path": ', "ann", "tool_calls"),
    "a list": ("[1", "]", "tool_calls"),
    "a number": ("1", "2", "tool_calls"),
    "a half escape": ('{"path": "a\\', "", "length"),
    "cut, though it ends as others do": ('{"path": "/home', "/ann", "tool_calls"),
}
WHOLE = {"": {}, "{}": {}, '{"path": "a\nb"}': {"path": "a\nb"}, ' {"path": "/ann"} ': {"path": "/ann"}}


@pytest.mark.parametrize("ask", WHOLE_WAYS)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_call_is_none_that_is_run(kind: str, ask: Ask) -> None:
    """It is where LangChain keeps broken ones, and goes back from there as it was written."""
    first, second, finish = BROKEN[kind]
    provider = ScriptedProvider(call_in_pieces(first, second, finish=finish))
    model = SpeculativeChatModel(target=provider)
    answer = ask(model, "Hi")
    assert isinstance(answer, AIMessage)
    assert answer.tool_calls == []
    (broken,) = answer.invalid_tool_calls
    assert (broken["name"], broken["args"], broken["id"]) == ("delete", first + second, "c1")
    assert broken["error"]
    for sent in (answer, loads(dumps(answer), allowed_objects="messages")):
        model.invoke(["Hi", sent])
        (call,) = provider.requests[-1].messages[1].tool_calls
        assert (call.id, call.name, call.arguments) == ("c1", "delete", first + second)


@pytest.mark.parametrize("kind", BROKEN)
def test_pieces_put_together_go_back_as_they_were_written(kind: str) -> None:
    """While it streams a call is read as far as it goes, as ChatOpenAI has it."""
    first, second, finish = BROKEN[kind]
    provider = ScriptedProvider(call_in_pieces(first, second, finish=finish))
    model = SpeculativeChatModel(target=provider)
    model.invoke(["Hi", stream(model, "Hi")])
    (call,) = provider.requests[-1].messages[1].tool_calls
    assert (call.id, call.name, call.arguments) == ("c1", "delete", first + second)


@pytest.mark.parametrize("ask", [*WHOLE_WAYS, stream])
@pytest.mark.parametrize("arguments", WHOLE)
def test_a_whole_call_stays_one(arguments: str, ask: Ask) -> None:
    answer = ask(over(*call_in_pieces(arguments)), "Hi")
    assert isinstance(answer, AIMessage)
    assert [call["args"] for call in answer.tool_calls] == [WHOLE[arguments]]
    assert answer.invalid_tool_calls == []


@pytest.mark.parametrize("ask", WHOLE_WAYS)
def test_a_broken_call_beside_a_whole_one(ask: Ask) -> None:
    """Though both have the same name and id."""
    events = [
        ToolCallDelta(0, "c", "delete", '{"path": "/a"}'),
        ToolCallDelta(1, "c", "delete", '{"path": "/b'),
        Finish("length"),
    ]
    answer = ask(over(*events), "Hi")
    assert isinstance(answer, AIMessage)
    assert [call["args"] for call in answer.tool_calls] == [{"path": "/a"}]
    assert [call["args"] for call in answer.invalid_tool_calls] == ['{"path": "/b']


@pytest.mark.parametrize("mode", ["invoke", "ainvoke", "messages"])
@pytest.mark.parametrize("kind", BROKEN)
def test_an_agent_does_not_run_a_broken_call(kind: str, mode: str) -> None:
    first, second, finish = BROKEN[kind]
    ran: list[str] = []

    @tool
    def delete(path: str = "/") -> str:
        """Delete a path."""
        ran.append(path)
        return "deleted"

    agent = create_agent(over(*call_in_pieces(first, second, finish=finish)), [delete])
    asked: Any = {"messages": [HumanMessage("Hi")]}
    if mode == "messages":
        list(agent.stream(asked, stream_mode="messages"))
    else:
        asyncio.run(agent.ainvoke(asked)) if mode == "ainvoke" else agent.invoke(asked)
    assert ran == []


@pytest.mark.parametrize("ask", WHOLE_WAYS)
@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_half_an_object_is_no_structured_output(method: Any, ask: Ask) -> None:
    half = '{"name": "San Fran'
    events = call_in_pieces(half, name="City", finish="length") if method == "function_calling" else []
    model = over(*(events or [TextDelta(half), Finish("length")]), streaming=ask is invoke_streaming)
    chain: Any = model.with_structured_output(City, method=method, include_raw=True)
    found: Any = asyncio.run(chain.ainvoke("Hi")) if ask is ainvoke else chain.invoke("Hi")
    assert found["parsed"] is None
    for schema in (City, City.model_json_schema()) if method != "function_calling" else ():
        with pytest.raises(OutputParserException, match="not valid JSON"):
            model.with_structured_output(schema, method=method).invoke("Hi")


@pytest.mark.parametrize("ask", WAYS)
def test_a_name_in_every_piece_is_one_name(ask: Ask) -> None:
    pieces = [ToolCallDelta(0, "c1", "get", text) for text in ('{"city"', ': "Ro', 'me"}')]
    answer = ask(over(*pieces, Finish("tool_calls")), "Hi")
    assert isinstance(answer, AIMessage)
    assert [(call["name"], call["id"], call["args"]) for call in answer.tool_calls] == [("get", "c1", {"city": "Rome"})]


# --------------------------------------------------------------------------------------------- reasoning

REASONING = {
    "text": ([ReasoningDelta("th"), ReasoningDelta("ink")], "think", []),
    "signed thinking": (
        [ReasoningDelta("thi"), ReasoningDelta("nk"), ReasoningDetail("messages", {"signature": "s1"})],
        "think",
        [("messages", {"type": "thinking", "thinking": "think", "signature": "s1"})],
    ),
    "thinking that may not be read": (
        [ReasoningDetail("messages", {"type": "redacted_thinking", "data": "x"})],
        "",
        [("messages", {"type": "redacted_thinking", "data": "x"})],
    ),
    "details": (
        [
            ReasoningDelta("ab"),
            ReasoningDetail("chat", {"type": "reasoning.text", "index": 0, "text": "a"}),
            ReasoningDetail("chat", {"type": "reasoning.text", "index": 0, "text": "b", "signature": "s"}),
            ReasoningDetail("chat", {"type": "reasoning.encrypted", "index": 1, "data": "x"}),
        ],
        "ab",
        [
            ("chat", {"type": "reasoning.text", "index": 0, "text": "ab", "signature": "s"}),
            ("chat", {"type": "reasoning.encrypted", "index": 1, "data": "x"}),
        ],
    ),
}


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("ask", [*WAYS, invoke_streaming])
@pytest.mark.parametrize("kind", REASONING)
def test_reasoning_goes_back_with_its_calls(kind: str, ask: Ask, is_saved: bool) -> None:
    """Also from a message that was saved and read again."""
    events, text, details = REASONING[kind]
    provider = ScriptedProvider([*events, *call_in_pieces('{"path": "/a"}')])
    model = SpeculativeChatModel(target=provider)
    answer = ask(model, "Hi")
    if is_saved:
        answer = loads(dumps(answer), allowed_objects="messages")
    model.invoke(["Hi", answer, ToolMessage("done", tool_call_id="c1")])
    sent = provider.requests[-1].messages[1]
    assert [call.name for call in sent.tool_calls] == ["delete"]
    assert sent.reasoning == text
    assert [(detail.api, detail.value) for detail in sent.reasoning_details] == details


@pytest.mark.parametrize(
    ("block", "text", "details"),
    [
        ({"type": "thinking", "thinking": "t", "signature": "s"}, "t", [{"thinking": "t", "signature": "s"}]),
        ({"type": "thinking", "thinking": "t"}, "t", []),
        ({"type": "reasoning", "reasoning": "t", "extras": {"signature": "s"}}, "t", [{"signature": "s"}]),
        ({"type": "reasoning", "reasoning": "t"}, "t", []),
        ({"type": "redacted_thinking", "data": "x"}, "", [{"data": "x"}]),
    ],
)
def test_blocks_of_other_chat_models_go_back(block: Any, text: str, details: list[dict[str, str]]) -> None:
    provider = ScriptedProvider("So.")
    answer = AIMessage([block, {"type": "text", "text": "Well."}])
    SpeculativeChatModel(target=provider).invoke(["Hi", answer, "And?"])
    sent = provider.requests[0].messages[1]
    assert (sent.content, sent.reasoning) == ("Well.", text)
    assert len(sent.reasoning_details) == len(details)
    for found, wanted in zip(sent.reasoning_details, details, strict=True):
        assert (found.api, wanted.items() <= found.value.items()) == ("messages", True)


# ---------------------------------------------------------------------------------------------- refusals


def refusal(*texts: str) -> list[Any]:
    return [*(AnswerDetail("chat", {"refusal": text}) for text in texts), Finish("content_filter")]


@pytest.mark.parametrize("ask", [*WAYS, invoke_streaming])
def test_a_refusal_is_no_text(ask: Ask) -> None:
    answer = ask(over(*refusal("I ", "will not")), "Hi")
    assert (answer.text, answer.additional_kwargs["refusal"]) == ("", "I will not")


REFUSED = Finish("content_filter", Usage(input_tokens=100, output_tokens=7))


async def consume(stream: Any) -> None:
    async for _ in stream:
        pass


STRUCTURED_WAYS: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda chain: chain.invoke("Hi"),
    "ainvoke": lambda chain: asyncio.run(chain.ainvoke("Hi")),
    "stream": lambda chain: list(chain.stream("Hi")),
    "astream": lambda chain: asyncio.run(consume(chain.astream("Hi"))),
}


@pytest.mark.parametrize("way", STRUCTURED_WAYS)
@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
@pytest.mark.parametrize(
    ("events", "text", "told"),
    [
        ([*refusal("I will not")[:-1], REFUSED], "", "I will not"),
        ([*refusal("I ", "will", " not")[:-1], REFUSED], "", "I will not"),
        ([*refusal("I ", "will not")[:-1], Finish("stop", REFUSED.usage)], "", "I will not"),
        ([TextDelta("{"), *refusal("I ", "will not")[:-1], REFUSED], "{", "I will not"),
        ([TextDelta("{"), REFUSED], "{", "the answer was stopped by a content filter"),
    ],
)
def test_structured_output_says_that_it_was_refused(events: Any, text: str, told: str, method: Any, way: str) -> None:
    """In all of the model's words, with the whole message and its usage."""
    chain = over(*events).with_structured_output(City, method=method)
    with pytest.raises(ModelRefusalError) as caught:
        STRUCTURED_WAYS[way](chain)
    raw = caught.value.raw_message
    assert isinstance(raw, AIMessage)
    assert (str(caught.value), raw.text, type(raw)) == (told, text, AIMessage)
    assert (raw.usage_metadata or {}).get("total_tokens") == 107


# ------------------------------------------------------------------------------------------ usage, errors

USAGE = Usage(input_tokens=100, output_tokens=7, cached_input_tokens=40, cache_write_input_tokens=50)


class Outputs(BaseCallbackHandler):
    """Keeps what LangChain tells at the end."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self.outputs.append(response.llm_output)


@pytest.mark.parametrize("ask", [*WAYS, invoke_streaming])
def test_usage_has_tokens_written_to_a_cache(ask: Ask) -> None:
    answer = ask(over(TextDelta("So."), Finish("stop", USAGE)), "Hi")
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"] == {"cache_read": 40, "cache_creation": 50}


def test_token_usage_is_where_chat_openai_has_it() -> None:
    told = Outputs()
    model = over(TextDelta("So."), Finish("stop", USAGE))
    answer = model.invoke("Hi", config={"callbacks": [told]})
    assert answer.response_metadata["token_usage"]["total_tokens"] == 107
    assert told.outputs[0]["token_usage"]["prompt_tokens_details"]["cache_write_tokens"] == 50
    both = model.generate([[HumanMessage("a")], [HumanMessage("b")]]).llm_output
    assert both is not None
    assert both["model_name"] == "script"
    assert both["token_usage"]["total_tokens"] == 214
    assert both["token_usage"]["prompt_tokens_details"]["cached_tokens"] == 80


ERRORS: list[tuple[Exception, type[Exception]]] = [
    (TargetError("no", status=401), ModelAuthenticationError),
    (TargetError("no", status=403), ModelPermissionDeniedError),
    (TargetError("no", status=404), ModelNotFoundError),
    (TargetError("no", status=409), ModelInvalidRequestError),
    (TargetError("no", status=501), ModelAPIError),
    (TransientError("no", status=429), ModelRateLimitError),
    (TransientError("no", status=503), ModelAPIError),
    (TransientError("no", status=408), ModelTimeoutError),
    (TransientError("no"), ModelConnectionError),
    (InvalidRequestError("no"), ModelInvalidRequestError),
    (make_context_length_error("no"), ContextOverflowError),
]


@pytest.mark.parametrize("ask", [*WAYS, invoke_streaming])
@pytest.mark.parametrize("row", ERRORS, ids=lambda row: f"{type(row[0]).__name__}-{row[1].__name__}")
def test_errors_are_langchains_as_well(row: tuple[Exception, type[Exception]], ask: Ask) -> None:
    """The same error otherwise: what catches this library's still does."""
    error, expected = row
    kind = type(error)
    model = SpeculativeChatModel(target=ScriptedProvider("So.", fail_at={0: error}))
    with pytest.raises(expected, match="no") as caught:
        ask(model, "Hi")
    assert isinstance(caught.value, kind)
    error.__class__ = kind  # for the row's other ways


def test_silence_is_a_timeout() -> None:
    model = SpeculativeChatModel(target=ScriptedProvider("So.", delay_first_s=30.0), max_retries=0)
    with pytest.raises(ModelTimeoutError, match=r"silent for 0\.05 s"):
        model.invoke("Hi", timeout=0.05)


@pytest.mark.parametrize("ask", WAYS)
def test_stream_usage_of_false_tells_none_in_a_stream(ask: Ask) -> None:
    answer = ask(over(TextDelta("So."), Finish("stop", USAGE)).bind(stream_usage=False), "Hi")
    assert isinstance(answer, AIMessage)
    assert (answer.usage_metadata is None) == isinstance(answer, AIMessageChunk)
