"""The chat model is what LangChain expects of one, and its text what the decoder gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, ValidationError

from llm_spec import (
    ClosedError,
    Finish,
    Fixed,
    InvalidRequestError,
    ReasoningDelta,
    SpeculativeConfig,
    SpeculativeDecoder,
    TextDelta,
    TransientError,
    Usage,
)
from llm_spec.integrations.langchain import SpeculativeChatModel
from llm_spec.testing import RuleBasedProvider, ScriptedProvider
from llm_spec.testing.server import MODEL, ScriptedModelServer

CODE = "def test_spawnl(self):"
# drafts whatever it costs, on whatever machine
ALWAYS = SpeculativeConfig(strategy="tokens", lookahead=Fixed(4), baseline_every=0)
WORDS = " ".join(f"word{number}" for number in range(200))


class Pet(BaseModel):
    """A pet."""

    name: str
    age: int


@tool
def add_numbers(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def find_weather(place: str) -> str:
    """Tell the weather somewhere."""
    return f"It rains in {place}"


class Tokens(BaseCallbackHandler):
    """Keeps the tokens that it gets."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str | list[str | dict[str, Any]], **_: Any) -> None:
        self.tokens.append(str(token))


def over(provider: Any = None, **fields: Any) -> SpeculativeChatModel:
    return SpeculativeChatModel(target=provider or RuleBasedProvider(), **fields)


async def closed(provider: ScriptedProvider) -> bool:
    """Whether its streams get closed; LangChain leaves the generators inside its own to the event loop."""
    for _ in range(100):
        if not provider.num_open:
            return True
        await asyncio.sleep(0.01)
    return False


# --------------------------------------------------------------------------------------------- answers


async def test_the_text_is_the_decoders() -> None:
    """The built-in pair, invoked and streamed, blocking and not, gives what the decoder gives, sampled with a seed."""
    async with SpeculativeDecoder(target="builtin:target", draft="builtin:draft") as decoder:
        expected = await decoder.decode(CODE, max_tokens=40, temperature=0.8, seed=5)
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 5}
    async with SpeculativeChatModel(target="builtin:target", draft="builtin:draft", config=ALWAYS, **fields) as model:
        answers = [model.invoke(CODE), await model.ainvoke(CODE)]
        streamed = [chunk.text for chunk in model.stream(CODE)]
        astreamed = [chunk.text async for chunk in model.astream(CODE)]
    texts = [str(answer.text) for answer in answers] + ["".join(streamed), "".join(astreamed)]
    assert texts == [expected.content] * 4
    assert len(streamed) > 5
    for answer in answers:
        assert answer.response_metadata["finish_reason"] == expected.finish_reason
        assert answer.response_metadata["model_name"] == "target"
        assert answer.response_metadata["model_provider"] == "builtin"
        figures = answer.response_metadata["llm_spec"]
        assert (figures["strategy"], figures["guarantee"], figures["same_text"]) == (
            "tokens",
            "exact",
            True,
        )
        assert 0 < figures["acceptance_rate"] <= 1


async def test_one_chunk_has_the_usage_and_it_is_the_last() -> None:
    usage = Usage(input_tokens=9, output_tokens=4, cached_input_tokens=2, reasoning_tokens=1)
    model = over(ScriptedProvider([ReasoningDelta("hm"), TextDelta("a"), TextDelta("b"), Finish("stop", usage, "eos")]))
    chunks = [chunk async for chunk in model.astream("Hi")]
    assert [chunk.chunk_position for chunk in chunks] == [None, None, None, "last"]
    assert [chunk for chunk in chunks if chunk.usage_metadata] == chunks[-1:]
    whole = sum(chunks[1:], start=chunks[0])
    assert isinstance(whole, AIMessageChunk)
    assert whole.usage_metadata == {
        "input_tokens": 9,
        "output_tokens": 4,
        "total_tokens": 13,
        "input_token_details": {"cache_read": 2},
        "output_token_details": {"reasoning": 1},
    }
    assert [block["type"] for block in whole.content_blocks] == ["reasoning", "text"]
    assert whole.response_metadata == {
        "model_name": "script",
        "model_provider": "scripted",
        "finish_reason": "stop",
        "llm_spec": {"finish_reason": "stop", "stopped_by": "eos"},
    }


def test_callbacks_are_told_each_token_once() -> None:
    streamed, invoked, silent = Tokens(), Tokens(), Tokens()
    list(over().stream("one two", config={"callbacks": [streamed]}))
    over(streaming=True).invoke("one two", config={"callbacks": [invoked]})
    over().invoke("one two", config={"callbacks": [silent]})
    assert "".join(streamed.tokens) == "".join(invoked.tokens) == "You said: one two"
    assert silent.tokens == []


def test_fields_and_keywords_are_options_of_the_request() -> None:
    """A call's keywords win over the model's fields; content parts and calls arrive in OpenAI's form."""
    provider = ScriptedProvider("So.")
    model = over(provider, temperature=0.5, max_tokens=7, stop=["x"], seed=3, extra={"priority": 1})
    image = {"type": "image_url", "image_url": {"url": "https://127.0.0.1/a.png"}}
    reasoning = {"type": "reasoning", "reasoning": "hm"}
    call = {"name": "find_weather", "args": {"place": "Bern"}, "id": "c1", "type": "tool_call"}
    model.invoke(
        [
            SystemMessage("Be brief."),
            HumanMessage([{"type": "text", "text": "What is this?"}, image]),
            AIMessage([reasoning, {"type": "text", "text": "Wait."}, call], tool_calls=[call]),
            ToolMessage("Rain.", tool_call_id="c1"),
        ],
        stop=["y"],
        top_k=2,
        max_tokens=9,
    )
    (request,) = provider.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 2, 3)
    assert (request.max_tokens, request.stop, request.extra) == (9, ("y",), {"priority": 1})
    assert [message.to_openai() for message in request.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]},
        {
            "role": "assistant",
            "content": "Wait.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "find_weather", "arguments": '{"place": "Bern"}'}}
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "Rain.", "tool_call_id": "c1"},
    ]


# ------------------------------------------------------------------------------------ tools and structure


def choose(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (None, None),
        ("auto", "auto"),
        ("any", "required"),
        (True, "required"),
        (False, "none"),
        ("find_weather", choose("find_weather")),
        (
            {"type": "function", "function": {"name": "add_numbers"}},
            {"type": "function", "function": {"name": "add_numbers"}},
        ),
    ],
)
def test_tool_choice_in_openais_words(choice: Any, sent: Any) -> None:
    provider = ScriptedProvider("So.")
    over(provider).bind_tools([add_numbers, find_weather], tool_choice=choice).invoke("Hi")
    (request,) = provider.requests
    assert [described["function"]["name"] for described in request.tools] == ["add_numbers", "find_weather"]
    assert request.tool_choice == sent


def test_a_tool_choice_that_is_no_tool_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'other'; the tools are add_numbers"):
        over().bind_tools([add_numbers], tool_choice="other")


async def test_tool_calls_stream_in_pieces() -> None:
    model = over().bind_tools([add_numbers])
    chunks = [chunk async for chunk in model.astream("Add the numbers 3 and 4.")]
    pieces = [piece for chunk in chunks if isinstance(chunk, AIMessageChunk) for piece in chunk.tool_call_chunks]
    assert len(pieces) > 3
    assert {piece["index"] for piece in pieces} == {0}
    assert [piece["name"] for piece in pieces if piece["name"]] == ["add_numbers"]
    answer = await model.ainvoke("Add the numbers 3 and 4.")
    assert answer.tool_calls == [{"name": "add_numbers", "args": {"a": 3, "b": 4}, "id": "call_0", "type": "tool_call"}]
    assert answer.response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_agent_calls_a_tool_and_answers(is_async: bool) -> None:
    agent = create_agent(over(), tools=[find_weather, add_numbers])
    asked: Any = {"messages": [HumanMessage("How is the weather in 'Bern'?")]}
    state = await agent.ainvoke(asked) if is_async else await asyncio.to_thread(agent.invoke, asked)
    assert state["messages"][-1].text == "The tool said: It rains in Bern"


@pytest.mark.parametrize("wanted", [Pet, ToolStrategy(Pet), ProviderStrategy(Pet)])
def test_an_agent_gives_a_structured_response(wanted: Any) -> None:
    agent = create_agent(over(), tools=[], response_format=wanted)
    asked: Any = {"messages": [HumanMessage("The dog 'Rex' is 3 years old.")]}
    assert agent.invoke(asked)["structured_response"] == Pet(name="Rex", age=3)


def test_what_only_servers_understand_goes_to_them() -> None:
    provider = ScriptedProvider("So.")
    over(provider, extra={"priority": 1}).bind_tools([add_numbers], parallel_tool_calls=False).invoke("Hi")
    assert provider.requests[0].extra == {"priority": 1, "parallel_tool_calls": False}


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("schema", [Pet, Pet.model_json_schema()])
def test_structured_output(method: Any, schema: Any) -> None:
    found = over().with_structured_output(schema, method=method).invoke("The dog 'Rex' is 3 years old.")
    assert found == (Pet(name="Rex", age=3) if schema is Pet else {"name": "Rex", "age": 3})


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_output_with_what_it_came_from(method: Any) -> None:
    text = "The dog 'Rex' is 3 years old." if method != "json_mode" else "Nothing that fits."
    found: Any = over().with_structured_output(Pet, method=method, include_raw=True).invoke(text)
    assert isinstance(found["raw"], AIMessage)
    if method == "json_mode":
        assert found["parsed"] is None
        assert "name" in str(found["parsing_error"])
    else:
        assert (found["parsed"], found["parsing_error"]) == (Pet(name="Rex", age=3), None)


def test_json_schema_and_strict_are_sent() -> None:
    provider = ScriptedProvider('{"name": "Rex", "age": 3}')
    over(provider).with_structured_output(Pet, method="json_schema", strict=True).invoke("Hi")
    sent: Any = provider.requests[0].response_format
    assert (sent["type"], sent["json_schema"]["name"], sent["json_schema"]["strict"]) == ("json_schema", "Pet", True)
    assert sent["json_schema"]["schema"]["required"] == ["name", "age"]


def test_a_method_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="method is 'magic'"):
        over().with_structured_output(Pet, method="magic")  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(InvalidRequestError, match="schema is None"):
        over().with_structured_output()


# ----------------------------------------------------------------------------------- threads, loops, ends


async def test_blocking_calls_work_where_a_loop_runs() -> None:
    model = over()
    assert model.invoke("Hi").text == "You said: Hi"
    assert (await model.ainvoke("Hi")).text == "You said: Hi"  # carried to the loop of the first call
    await model.aclose()


async def test_a_provider_that_is_used_by_coroutines_first_refuses_to_block_their_loop() -> None:
    model = over()
    assert (await model.ainvoke("Hi")).text == "You said: Hi"
    with pytest.raises(RuntimeError, match="await the async method"):
        model.invoke("Hi")
    assert (await asyncio.to_thread(model.invoke, "Hi")).text == "You said: Hi"


def test_a_model_of_strings_outlives_event_loops() -> None:
    with SpeculativeChatModel(target="rules:any") as model:
        texts = [asyncio.run(model.ainvoke("Hi")).text for _ in range(2)]
    assert texts == ["You said: Hi"] * 2


async def test_a_servers_connections_stay_on_one_loop() -> None:
    """Threads, this loop and others ask one server through one model, whose connections outlive each of them."""
    async with (
        ScriptedModelServer("So it goes.") as server,
        SpeculativeChatModel(target=f"generic:{MODEL}@{server.url}") as model,
    ):
        answers = [await asyncio.to_thread(model.invoke, "Hi"), await model.ainvoke("Hi")]
        answers += [await asyncio.to_thread(asyncio.run, model.ainvoke("Hi")) for _ in range(2)]
        answers += [await asyncio.to_thread(model.invoke, "Hi")]
    assert [answer.text for answer in answers] == ["So it goes."] * 5


def test_eight_threads_at_once() -> None:
    with SpeculativeChatModel(target="rules:any") as model, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(model.invoke, [f"Number {n}." for n in range(32)]))
    assert [answer.text for answer in answers] == [f"You said: Number {n}." for n in range(32)]


async def test_leaving_a_stream_early_closes_the_providers() -> None:
    provider = ScriptedProvider(WORDS)
    async for _ in over(provider).astream("Hi"):
        break
    assert await closed(provider)
    assert provider.num_closed == 1


def test_leaving_a_blocking_stream_early_closes_the_providers() -> None:
    provider = ScriptedProvider(WORDS)
    for _ in over(provider).stream("Hi"):
        break
    assert (provider.num_open, provider.num_closed) == (0, 1)


async def test_cancelling_closes_the_providers_stream() -> None:
    provider = ScriptedProvider(WORDS, delay_first_s=60)
    task = asyncio.create_task(over(provider).ainvoke("Hi"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.num_open == 0


def call_invoke(model: SpeculativeChatModel) -> object:
    return model.invoke("Hi")


def call_stream(model: SpeculativeChatModel) -> object:
    return list(model.stream("Hi"))


def call_ainvoke(model: SpeculativeChatModel) -> object:
    return asyncio.run(model.ainvoke("Hi"))


@pytest.mark.parametrize("call", [call_invoke, call_stream, call_ainvoke])
def test_errors_are_this_librarys(call: Callable[[SpeculativeChatModel], object]) -> None:
    error = TransientError("too many", partial_text="So", status=429)
    with pytest.raises(TransientError, match="too many") as caught:
        call(over(ScriptedProvider("So it goes.", fail_at={1: error})))
    assert (caught.value.status, caught.value.partial_text) == (429, "So")


@pytest.mark.parametrize("kind", ["provider", "decoder", "config"])
def test_retries_and_timeout_are_fields(kind: str) -> None:
    """LangChain's own names for them, whatever the target is; they come before what a config says."""
    provider = ScriptedProvider("So it goes.", fail_at={0: TransientError("gone", retry_after_s=0.0)})
    given: dict[str, Any] = {"target": provider}
    if kind == "decoder":
        given = {
            "target": SpeculativeDecoder(target=provider, draft=None, config=SpeculativeConfig(max_total_tokens=2))
        }
    if kind == "config":
        given["config"] = SpeculativeConfig(max_total_tokens=2)
    for max_retries in (0, 2):
        with (
            pytest.raises(TransientError, match="gone"),
            SpeculativeChatModel(**given, max_retries=max_retries) as model,
        ):
            model.invoke("Hi")
    assert len(provider.requests) == 1 + 3
    assert {request.max_tokens for request in provider.requests} == {None if kind == "provider" else 2}
    slow = ScriptedProvider("So it goes.", delay_first_s=30.0)
    with (
        pytest.raises(TransientError, match=r"silent for 0\.05 s"),
        SpeculativeChatModel(target=slow, timeout=0.05, max_retries=0) as model,
    ):
        model.invoke("Hi")
    with pytest.raises(ValidationError, match="max_retries"):
        SpeculativeChatModel(target=slow, max_retries=-1)


def test_an_option_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValidationError, match="temprature"):
        over(temprature=0.5)
    with pytest.raises(InvalidRequestError, match="temprature"):
        over().invoke("Hi", temprature=0.5)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "target\n  Field required"),
        ({"target": "not this"}, "provider is 'not this'; write it as provider:model"),
        ({"target": "nowhere:at-all"}, "provider 'nowhere' .* is not known; installed are: "),
        ({"target": "lookup"}, "'lookup' is a draft, not a model that can answer; use it as draft"),
        ({"target": RuleBasedProvider(), "draft": "nowhere:at-all"}, "provider 'nowhere' .* is not known"),
    ],
)
def test_a_wrong_pair_is_refused_in_plain_words(fields: dict[str, Any], told: str) -> None:
    """What ConfigError says is what pydantic's error says."""
    with pytest.raises(ValidationError, match=told):
        SpeculativeChatModel(**fields)


def test_a_given_target_may_have_a_draft_and_a_config() -> None:
    """They make a decoder around it; the target stays the caller's."""
    provider = ScriptedProvider("So.")
    with over(provider, draft="lookup", config=SpeculativeConfig(strategy="plain")) as model:
        answer = model.invoke("Hi")
    assert answer.response_metadata["llm_spec"]["strategy"] == "plain"
    assert provider.num_acloses == 0


def test_closing_ends_the_thread_and_closes_what_was_opened() -> None:
    """What is given stays the caller's; closing twice is harmless, calling afterwards is refused."""
    before = set(threading.enumerate())
    provider = ScriptedProvider("So.")
    model = over(provider)
    model.invoke("Hi")
    (thread,) = (found for found in set(threading.enumerate()) - before if found.name == "llm_spec scripted:script")
    model.close()
    model.close()
    assert not thread.is_alive()
    assert provider.num_acloses == 0
    with pytest.raises(ClosedError, match="scripted:script is closed"):
        model.invoke("Hi")


def test_secrets_are_in_no_description() -> None:
    with SpeculativeChatModel(
        target="generic:small@http://anna:hunter2@127.0.0.1:9/v1", extra={"token": "hunter2"}, temperature=0.5
    ) as model:
        told = [repr(model), str(model), str(dumpd(model)), str(model.model_dump()), model.model_dump_json()]
        told += [str(model._identifying_params), str(model._get_ls_params()), model._get_llm_string()]
    assert [text for text in told if "hunter2" in text] == []
    assert repr(model) == "SpeculativeChatModel(model_name='generic:small', temperature=0.5)"


def test_secrets_are_in_no_refusal() -> None:
    with pytest.raises(ValidationError) as caught:
        SpeculativeChatModel(target="generic:small@http://anna:hunter2@127.0.0.1:9/v1", top_k="many")
    assert "hunter2" not in str(caught.value)
