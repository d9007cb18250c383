"""What litellm's own OpenAI and Anthropic providers do, ours do: turns put back, options, errors, prices, callbacks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("litellm")

import litellm
from litellm.constants import DEFAULT_CHAT_COMPLETION_PARAM_VALUES
from litellm.exceptions import MidStreamFallbackError
from pydantic import BaseModel

from llm_spec import (
    AnswerDetail,
    Finish,
    InvalidRequestError,
    LlmSpecError,
    ReasoningDelta,
    ReasoningDetail,
    SpeculativeDecoder,
    TargetError,
    TextDelta,
    ToolCallDelta,
    TransientError,
    Usage,
)
from llm_spec.integrations.litellm import register
from llm_spec.testing import ScriptedProvider

# it warns of its own models; as errors those would become errors of its calls
pytestmark = pytest.mark.filterwarnings("ignore")

DOORS = ("completion", "acompletion", "completion streamed", "acompletion streamed")
SIGNED = {"type": "thinking", "thinking": "think", "signature": "s1"}
HIDDEN = {"type": "redacted_thinking", "data": "x"}
ITEM = {"type": "reasoning.text", "index": 0, "text": "think"}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Nothing registered outlives its test."""
    litellm.suppress_debug_info = True
    yield
    litellm.success_callback = []
    for item in list(litellm.custom_provider_map):
        item["custom_handler"].close()


async def ask(door: str, *, messages: Any = "Hi", **options: Any) -> Any:
    """The answer by one of the doors; a stream's chunks are put together as litellm does."""
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    call = {"model": "llm_spec/m", "messages": messages, **options}
    if door == "completion":
        return litellm.completion(**call)
    if door == "acompletion":
        return await litellm.acompletion(**call)
    call["stream"] = True
    if door == "completion streamed":
        return litellm.stream_chunk_builder(list(litellm.completion(**call)))
    return litellm.stream_chunk_builder([chunk async for chunk in await litellm.acompletion(**call)])


# ------------------------------------------------------------------------------ answers, and their way back

ANSWERS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]] = {
    # events; what the message has; what goes back of it beside its role
    "text": ([TextDelta("so"), Finish("stop")], {"content": "so"}, {"content": "so"}),
    "reasoning": (
        [ReasoningDelta("th"), ReasoningDelta("ink"), TextDelta("so"), Finish("stop")],
        {"reasoning_content": "think"},
        {"content": "so", "reasoning_content": "think"},
    ),
    "reasoning details": (
        [
            ReasoningDelta("think"),
            ReasoningDetail("chat", {**ITEM, "text": "th"}),
            ReasoningDetail("chat", {**ITEM, "text": "ink"}),
            TextDelta("so"),
            Finish("stop"),
        ],
        {"reasoning_content": "think"},
        {"content": "so", "reasoning_content": "think", "reasoning_details": [ITEM]},
    ),
    "thinking": (
        [
            ReasoningDelta("think"),
            ReasoningDetail("messages", {"type": "signature_delta", "signature": "s1"}),
            ReasoningDetail("messages", HIDDEN),
            TextDelta("so"),
            Finish("stop"),
        ],
        {"reasoning_content": "think", "thinking_blocks": [SIGNED, HIDDEN]},
        {"content": "so", "reasoning_content": "think"},
    ),
    "a refusal": (
        [
            AnswerDetail("chat", {"refusal": "I can"}),
            AnswerDetail("chat", {"refusal": "not"}),
            Finish("content_filter"),
        ],
        {"refusal": "I cannot"},
        {"refusal": "I cannot"},
    ),
    "a call that was cut off": (
        [ToolCallDelta(0, "a", "get", '{"path": '), ToolCallDelta(0, None, None, '"/home'), Finish("length")],
        {},
        {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "get", "arguments": '{"path": "/home'}}]},
    ),
    "a name in every piece": (
        [ToolCallDelta(0, "a", "get", '{"p"'), ToolCallDelta(0, "a", "get", ": 1}"), Finish("tool_calls")],
        {},
        {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "get", "arguments": '{"p": 1}'}}]},
    ),
    "a custom call": (
        [
            ToolCallDelta(0, "a", "sh", "ls", "custom"),
            ToolCallDelta(0, None, None, " -l", "custom"),
            Finish("tool_calls"),
        ],
        {},
        {"tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "sh", "input": "ls -l"}}]},
    ),
    "annotations": (
        [TextDelta("so"), AnswerDetail("chat", {"annotations": [{"type": "url_citation"}]}), Finish("stop")],
        {"annotations": [{"type": "url_citation"}]},
        {"content": "so", "annotations": [{"type": "url_citation"}]},
    ),
}


@pytest.mark.parametrize("form", ["object", "dumped"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", ANSWERS)
async def test_an_answer_goes_back_as_it_came(kind: str, door: str, form: str) -> None:
    """Its fields are litellm's; the next turn has what the model said, and nothing that is ours."""
    events, has, back = ANSWERS[kind]
    provider = ScriptedProvider(events)
    register(target=provider)
    answer = await ask(door)
    message = answer.choices[0].message
    dumped = message.model_dump()
    assert {name: dumped.get(name) for name in has} == has
    assert dumped["provider_specific_fields"]["llm_spec"]["finish_reason"] == events[-1].finish_reason
    await ask("acompletion", messages=[{"role": "user", "content": "Hi"}, message if form == "object" else dumped])
    sent = provider.requests[-1].messages[1]
    told = {name: value for name, value in sent.to_openai().items() if value or name == "role"}
    assert told == {"role": "assistant", **back}
    assert "llm_spec" not in json.dumps(sent.to_openai())
    blocks = [dict(detail.value) for detail in sent.reasoning_details if detail.api == "messages"]
    assert blocks == has.get("thinking_blocks", [])


async def test_thinking_of_other_providers_goes_back() -> None:
    """Signed blocks alone, in the API's own fields, wherever litellm keeps them."""
    blocks = [{**SIGNED, "index": 0, "cache_control": None}, {"type": "thinking", "thinking": "unsigned"}, HIDDEN]
    provider = ScriptedProvider("So.")
    register(target=provider)
    for place in ({"thinking_blocks": blocks}, {"provider_specific_fields": {"thinking_blocks": blocks}}):
        await ask("acompletion", messages=[{"role": "assistant", "content": "b", **place}])
        details = provider.requests[-1].messages[0].reasoning_details
        assert [dict(detail.value) for detail in details] == [SIGNED, HIDDEN]


def test_a_name_comes_once_in_a_stream() -> None:
    """Whoever joins the names of all pieces gets one name."""
    register(target=ScriptedProvider(ANSWERS["a name in every piece"][0]))
    chunks = litellm.completion(model="llm_spec/m", messages=[{"role": "user", "content": "Hi"}], stream=True)
    names = [call.function.name for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [name for name in names if name] == ["get"]


@pytest.mark.parametrize("door", DOORS)
async def test_a_refusal_ends_as_openais_does(door: str) -> None:
    register(target=ScriptedProvider(ANSWERS["a refusal"][0]))
    choice = (await ask(door)).choices[0]
    assert (choice.finish_reason, choice.message.content or "") == ("stop", "")


async def test_contents_and_later_system_texts_pass_on() -> None:
    """Roles keep their places; marks, images and files stay in their parts."""
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,ZG90"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,ZG90"}},
    ]
    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "b"},
        {"role": "developer", "content": "two"},
        {"role": "user", "content": "c"},
    ]
    provider = ScriptedProvider("So.")
    register(target=provider)
    await ask("acompletion", messages=messages)
    assert [message.to_openai() for message in provider.requests[0].messages] == messages


# ---------------------------------------------------------------------------------------------- options


class City(BaseModel):
    city: str
    area: int | None = None


HANDLED_BY_LITELLM = {
    "additional_drop_params": "names of parameters to drop",
    "allowed_openai_params": "names of parameters to pass on",
    "api_version": "Azure's",
    "custom_llm_provider": "whose model it is",
    "drop_params": "whether to drop what is not supported",
    "include_server_side_tool_invocations": "Gemini's",
    "max_retries": "test_retries_are_those_of_the_call",
    "messages": "the request itself",
    "metadata": "labels for litellm's own log",
    "model": "whose model it is",
    "stream": "every test here",
    "stream_options": "litellm gives usage by itself",
}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
TAKEN: dict[str, tuple[Any, str, Any]] = {
    # value; what a request has: a path, and its value
    "frequency_penalty": (0.5, "sampling.frequency_penalty", 0.5),
    "logit_bias": ({"5": 1}, "sampling.logit_bias", {5: 1}),
    "logprobs": (True, "top_logprobs", 0),
    "top_logprobs": (2, "extra", {"top_logprobs": 2}),
    "max_completion_tokens": (9, "max_tokens", 9),
    "max_tokens": (9, "max_tokens", 9),
    "prediction": ({"type": "content", "content": "guess"}, "prediction", "guess"),
    "presence_penalty": (0.5, "sampling.presence_penalty", 0.5),
    "response_format": ({"type": "json_object"}, "response_format", {"type": "json_object"}),
    "seed": (3, "sampling.seed", 3),
    "stop": (["x"], "stop", ("x",)),
    "temperature": (0.5, "sampling.temperature", 0.5),
    "tool_choice": ("none", "tool_choice", "none"),
    "tools": ([TOOL], "tools", (TOOL,)),
    "top_p": (0.5, "sampling.top_p", 0.5),
    "extra_body": ({"priority": 1}, "extra", {"priority": 1}),
}
SENT_ON = {
    "audio": {"voice": "a", "format": "wav"},
    "context_management": [{"type": "compaction"}],
    "modalities": ["text", "audio"],
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": False,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "user": "u",
    "verbosity": "low",
    "web_search_options": {"search_context_size": "low"},
}
TAKEN |= {name: (value, "extra", {name: value}) for name, value in SENT_ON.items()}
REFUSED = {
    "extra_headers": {"x-a": "b"},
    "function_call": "auto",
    "functions": [{"name": "f", "parameters": {}}],
    "n": 2,
    "api_base": "http://127.0.0.1:9",
}


def test_every_parameter_of_litellm_has_a_row() -> None:
    """A new one of litellm's list fails here until it is decided."""
    known = {*TAKEN, *REFUSED, *HANDLED_BY_LITELLM}
    assert set(DEFAULT_CHAT_COMPLETION_PARAM_VALUES) - known == set()


@pytest.mark.parametrize("door", DOORS[:2])
@pytest.mark.parametrize("name", sorted(TAKEN.keys() - {"top_logprobs"}))  # it goes with logprobs: test_logprobs.py
async def test_a_parameter_reaches_the_request(name: str, door: str) -> None:
    value, path, expected = TAKEN[name]
    provider = ScriptedProvider("So.")
    register(target=provider)
    await ask(door, **{name: value})
    found: Any = provider.requests[0]
    for part in path.split("."):
        found = getattr(found, part)
    assert found == expected


async def test_a_class_as_response_format_is_strict() -> None:
    """As litellm makes it for every provider: all fields required, no others."""
    provider = ScriptedProvider('{"city": "Rome"}')
    register(target=provider)
    await ask("acompletion", response_format=City)
    shape: Any = provider.requests[0].response_format
    schema = shape["json_schema"]["schema"]
    assert shape["json_schema"]["strict"] is True
    assert (schema["additionalProperties"], schema["required"]) == (False, ["city", "area"])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", REFUSED)
async def test_a_parameter_that_cannot_be_served_is_refused_by_name(name: str, door: str) -> None:
    provider = ScriptedProvider("So.")
    register(target=provider)
    with pytest.raises(litellm.BadRequestError, match=name):
        await ask(door, **{name: REFUSED[name]})
    assert not provider.requests


def test_litellm_is_told_what_is_taken() -> None:
    """Its own functions say so, and of other providers what they said before."""
    before = litellm.get_supported_openai_params("gpt-4o-mini", "openai")
    register(target=ScriptedProvider("So."))
    listed = litellm.get_supported_openai_params("m", "llm_spec")
    assert {"reasoning_effort", "user", "verbosity"} <= set(listed)
    assert not {"n", "functions", "extra_headers"} & set(listed)
    assert litellm.get_supported_openai_params("gpt-4o-mini", "openai") == before


# --------------------------------------------------------------------------------- errors, retries, prices

STATUSES = [
    (400, "BadRequestError"),
    (401, "AuthenticationError"),
    (403, "APIError"),
    (404, "NotFoundError"),
    (408, "Timeout"),
    (409, "APIError"),
    (413, "APIError"),
    (422, "BadRequestError"),
    (429, "RateLimitError"),
    (500, "InternalServerError"),
    (502, "BadGatewayError"),
    (503, "ServiceUnavailableError"),
    (504, "Timeout"),
]


def make_error(status: int) -> LlmSpecError:
    kind: Any = InvalidRequestError if status in (400, 413, 422) else TargetError
    error: LlmSpecError = TransientError("no") if status in (408, 409, 429) or status >= 500 else kind("no")
    error.status = status
    return error


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("status", "kind"), STATUSES)
async def test_a_status_is_litellms_error(status: int, kind: str, door: str) -> None:
    """The class and status of litellm's OpenAI provider; an async stream wraps those worth another model."""
    register(target=ScriptedProvider("So.", fail_at={0: make_error(status)}))
    wrappers = (MidStreamFallbackError,) if door == "acompletion streamed" else ()
    with pytest.raises((getattr(litellm, kind), *wrappers)) as caught:
        await ask(door)
    original: Any = getattr(caught.value, "original_exception", None) or caught.value
    assert (type(original).__name__, original.status_code) == (kind, status)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("door", ["acompletion", "acompletion streamed"])
@pytest.mark.parametrize(("max_retries", "num_requests"), [(None, 3), (0, 1), (1, 2)])
async def test_retries_are_those_of_the_call(max_retries: int | None, num_requests: int, door: str) -> None:
    """The framework's number comes before the config's; the pair is not opened again for it."""
    provider = ScriptedProvider("So.", fail_at={0: make_error(503)})
    register(target=SpeculativeDecoder(target=provider, draft=None))
    with pytest.raises((litellm.ServiceUnavailableError, MidStreamFallbackError)):
        await ask(door, max_retries=max_retries)
    assert len(provider.requests) == num_requests


async def test_an_empty_answer_is_text() -> None:
    """Callers strip it."""
    register(target=ScriptedProvider(""))
    assert (await ask("acompletion")).choices[0].message.content == ""


async def test_the_address_of_an_image_is_in_an_object() -> None:
    """As the API has it; litellm takes the address alone."""
    provider = ScriptedProvider("So.")
    register(target=provider)
    part = {"type": "image_url", "image_url": "http://127.0.0.1/a.png"}
    await ask("completion", messages=[{"role": "user", "content": [part]}])
    (message,) = provider.requests[0].messages
    assert message.to_openai()["content"] == [part | {"image_url": {"url": "http://127.0.0.1/a.png"}}]


class NamedProvider(ScriptedProvider):
    """A provider with the name of a vendor's model."""

    name = "openai:gpt-4o-mini"


@pytest.mark.parametrize("door", DOORS)
async def test_cost_is_that_of_the_target(door: str) -> None:
    """litellm's own prices, with what was read from a cache."""
    usage = Usage(input_tokens=1000, output_tokens=100, cached_input_tokens=400)
    with register(model="m", target=NamedProvider([TextDelta("a"), Finish("stop", usage)], name="openai:gpt-4o-mini")):
        answer = await ask(door, stream_options={"include_usage": True} if "streamed" in door else None)
        price = litellm.model_cost["gpt-4o-mini"]
        rates = [price[f"{name}_cost_per_token"] for name in ("input", "output")]
        expected = 600 * rates[0] + 400 * price["cache_read_input_token_cost"] + 100 * rates[1]
        assert litellm.completion_cost(answer) == pytest.approx(expected)
    assert "llm_spec/m" not in litellm.model_cost


@pytest.mark.parametrize("target", ["generic:m", "openai:gpt-4o-mini@http://127.0.0.1:9/v1", "m"])
def test_a_target_without_a_known_price_has_none(target: str) -> None:
    """Another server with a vendor's model name is not the vendor."""
    register(model="m", target=ScriptedProvider("So.", name=target))
    assert "llm_spec/m" not in litellm.model_cost


@pytest.mark.parametrize("door", DOORS)
async def test_tokens_of_caches_are_counted(door: str) -> None:
    usage = Usage(input_tokens=100, output_tokens=7, cached_input_tokens=40, cache_write_input_tokens=50)
    register(target=ScriptedProvider([TextDelta("a"), Finish("stop", usage)]))
    found = (await ask(door, stream_options={"include_usage": True} if "streamed" in door else None)).usage
    details = found.prompt_tokens_details
    assert (found.prompt_tokens, details.cached_tokens, details.cache_creation_tokens) == (100, 40, 50)
    assert (found.cache_creation_input_tokens, found.cache_read_input_tokens) == (50, 40)


@pytest.mark.parametrize("door", ["completion", "completion streamed"])
async def test_callbacks_see_how_an_answer_came_about(door: str) -> None:
    """By blocking doors; `async` ones give the same objects to `CustomLogger`."""
    seen: list[Any] = []

    def record(keywords: Any, response: Any, _start: Any, _end: Any) -> None:
        whole = keywords.get("complete_streaming_response") if "streamed" in door else response
        seen.extend([] if whole is None else [whole])

    litellm.success_callback = [record]
    register(target=SpeculativeDecoder(target=ScriptedProvider("So."), draft=None))
    await ask(door)
    for _ in range(200):  # litellm calls them from a thread of its own
        if seen:
            break
        await asyncio.sleep(0.05)
    report = seen[-1].choices[0].message.provider_specific_fields["llm_spec"]
    assert {"acceptance_rate", "guarantee", "plain_reason"} <= report.keys()
