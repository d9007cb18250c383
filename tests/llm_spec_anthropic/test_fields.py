"""Fields of OpenAI's APIs before Anthropic's: compared with the parameters that its own SDK has."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import pytest
from llm_spec_anthropic import AnthropicProvider
from llm_spec_anthropic.convert import build_request_body
from llm_spec_anthropic.fields import KNOWN_FIELDS, translate_openai_fields
from support.messages_wire import MessagesWire, answer_frames
from support.serving import ask, serving

from llm_spec import ChatRequest, InvalidRequestError
from llm_spec.contract.fields import FIELDS, PASSED_FIELDS
from llm_spec.decoder.entry_points import NamedProvider
from llm_spec.server import ModelConfig

NEW, OLD = "claude-haiku-5-5", "claude-haiku-4-5"
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}]
SINGLE: Final = {"disable_parallel_tool_use": True}
OFF: Final = {"thinking": {"type": "disabled"}}
EFFORT: Final = {"output_config": {"effort": "low"}}
USER: Final = {"metadata": {"user_id": "u1"}}


def is_openais(name: str) -> bool:
    return not {"chat", "completions", "responses"}.isdisjoint(FIELDS[name].apis.split())


THINKING: Final = {"thinking": {"type": "adaptive"}, "speed": "fast"}
SAME: Final = None  # as in a program

# What a request says, what reaches Anthropic of it in a program, and for a client of OpenAI's API; what is left out
CASES: Final[list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None, str]]] = [
    (NEW, {"user": "u1"}, USER, SAME, ""),
    (NEW, {"user": 7}, {}, SAME, "user"),
    (NEW, {"user": "u2", **USER}, USER, SAME, ""),
    (NEW, {"metadata": {"team": "a"}}, {"metadata": {"team": "a"}}, {}, "metadata"),
    (NEW, {"metadata": {"team": "a", "user_id": "u1"}}, {"metadata": {"team": "a", "user_id": "u1"}}, USER, "metadata"),
    (NEW, {"store": True, "verbosity": "low"}, {}, SAME, "store verbosity"),
    (NEW, {"prompt_cache_key": "k", "safety_identifier": "s"}, {}, SAME, "prompt_cache_key safety_identifier"),
    (NEW, {"store": None, "verbosity": "medium", "modalities": ["text"], "n": 1}, {}, SAME, ""),
    (NEW, {"reasoning_effort": "low"}, EFFORT, SAME, ""),
    (NEW, {"reasoning_effort": "minimal"}, EFFORT, SAME, ""),
    (NEW, {"reasoning": {"effort": "low", "summary": "auto"}}, EFFORT, SAME, ""),
    (NEW, {"reasoning": {"summary": "auto"}}, {}, SAME, "reasoning"),
    (NEW, {"reasoning_effort": "none"}, OFF, SAME, ""),
    (NEW, {"reasoning_effort": "utmost"}, {}, SAME, "reasoning_effort"),
    ("claude-opus-4-5", {"reasoning_effort": "low"}, EFFORT, SAME, ""),
    ("claude-sonnet-4-6", {"reasoning_effort": "low"}, EFFORT, SAME, ""),
    (OLD, {"reasoning_effort": "low"}, {}, SAME, "reasoning_effort"),
    ("some-name", {"reasoning_effort": "low"}, {}, SAME, "reasoning_effort"),
    (NEW, {"reasoning_effort": "high", **EFFORT}, EFFORT, SAME, ""),
    (NEW, {"service_tier": "default"}, {"service_tier": "default"}, {"service_tier": "standard_only"}, ""),
    (NEW, {"service_tier": "priority"}, {"service_tier": "priority"}, {"service_tier": "auto"}, ""),
    (NEW, {"service_tier": "flex"}, {"service_tier": "flex"}, {}, "service_tier"),
    (NEW, {"mirostat": 1}, {"mirostat": 1}, {}, "mirostat"),  # some servers speak this API, too
    (NEW, {"of_a_server": 1}, {"of_a_server": 1}, SAME, ""),
    (NEW, THINKING, THINKING, SAME, ""),
]


@pytest.mark.parametrize(("model", "extra", "in_program", "for_client", "left_out"), CASES)
def test_fields_of_openai_are_translated_or_left_out(
    model: str,
    extra: dict[str, Any],
    in_program: dict[str, Any],
    for_client: dict[str, Any] | None,
    left_out: str,
) -> None:
    """Anthropic's own words stay as they are, whoever says them."""
    request = ChatRequest.create("q", extra=extra)
    base = build_request_body(ChatRequest.create("q"), model)
    assert build_request_body(request, model) == base | in_program
    translated, names = translate_openai_fields(request, model, is_openai_client=True)
    expected = in_program if for_client is None else for_client
    assert (translated.extra, list(names)) == (expected, left_out.split())
    assert build_request_body(translated, model) == base | expected


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (None, {"type": "auto", **SINGLE}),
        ("auto", {"type": "auto", **SINGLE}),
        ("required", {"type": "any", **SINGLE}),
        ("none", {"type": "none"}),
        ({"type": "function", "function": {"name": "f"}}, {"type": "tool", "name": "f", **SINGLE}),
        ({"type": "any"}, {"type": "any", **SINGLE}),
    ],
)
@pytest.mark.parametrize("value", [False, True])
def test_one_call_at_most(choice: Any, sent: dict[str, Any], *, value: bool) -> None:
    """`parallel_tool_calls` is a part of the choice there; true is its default."""
    request = ChatRequest.create("q", tools=TOOLS, tool_choice=choice, extra={"parallel_tool_calls": value})
    body = build_request_body(request, NEW)
    plain = build_request_body(ChatRequest.create("q", tools=TOOLS, tool_choice=choice), NEW)
    assert body == (plain if value else plain | {"tool_choice": sent})
    without_tools = ChatRequest.create("q", extra={"parallel_tool_calls": value})
    assert "tool_choice" not in build_request_body(without_tools, NEW)


@pytest.mark.parametrize("name", sorted(filter(is_openais, FIELDS)))
def test_no_field_of_openai_reaches_anthropic_as_it_is(name: str) -> None:
    """Whatever its value: it is translated, left out, or refused by name."""
    for value in ("x", True, 3, ["x"], {"x": 1}):
        request = ChatRequest.create("q", extra={name: value})
        with suppress(InvalidRequestError):
            translated, left_out = translate_openai_fields(request, NEW, is_openai_client=True)
            assert translated.extra.keys() <= KNOWN_FIELDS
            assert name in left_out or name in KNOWN_FIELDS or name in ("parallel_tool_calls", "user")


@pytest.mark.parametrize("name", ["functions", "guided_json", "n", "logprobs", "n_predict", "max_completion_tokens"])
def test_what_would_be_another_answer_is_refused(name: str) -> None:
    """Left out, its client would take the answer for what it had wanted."""
    with pytest.raises(InvalidRequestError, match=f"{name} is set; Anthropic's API has no such field"):
        translate_openai_fields(ChatRequest.create("q", extra={name: 5}), NEW, is_openai_client=True)


def test_the_table_of_fields_knows_what_the_sdk_knows() -> None:
    """A field that a new SDK has is to be decided about."""
    assert {name for name in KNOWN_FIELDS if name not in FIELDS} == set()
    passed = {name for name in PASSED_FIELDS if FIELDS[name].apis == "messages"}
    # what it had before, and what older models still read
    assert passed - KNOWN_FIELDS == {"output_format", "top_k"}


async def test_a_server_tells_its_clients_what_it_left_out(wire: MessagesWire) -> None:
    """Of chat and responses alike; a client of Anthropic's API has its fields passed on as they are."""
    wire.frames = answer_frames("ok")
    claude = NamedProvider(type="anthropic", base_url=wire.url, api_key="sk-ant-any")
    fields = {"prompt_cache_key": "k", "parallel_tool_calls": False, "mirostat": 1, "metadata": {"team": "a"}}
    config = ModelConfig(target=f"claude:{NEW}", extra_fields=("dry_base",))
    async with serving(config, providers={"claude": claude}) as server:
        for path, left_out in (
            ("/v1/chat/completions", "metadata, mirostat, prompt_cache_key"),
            ("/v1/responses", "mirostat, prompt_cache_key"),
        ):
            tool = TOOLS[0] if "chat" in path else {"type": "function", "name": "f", "parameters": {"properties": {}}}
            reply = await server.post(path, ask(path, tools=[tool], dry_base=2.0, **fields))
            assert (reply.status, reply.headers["x-llm-spec-left-out"]) == (200, left_out)
            sent = wire.bodies[-1]
            assert sent["tool_choice"] == {"type": "auto", **SINGLE}
            assert sent["tools"] == [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]
            assert sent["dry_base"] == 2.0
            assert sent.keys() - {"dry_base"} <= KNOWN_FIELDS
        reply = await server.post("/v1/messages", ask("/v1/messages", metadata={"team": "a"}, mirostat=1))
        assert (reply.status, "x-llm-spec-left-out" in reply.headers) == (200, False)
        assert wire.bodies[-1].items() >= {"metadata": {"team": "a"}, "mirostat": 1}.items()
        refused = await server.post(
            "/v1/chat/completions", ask("/v1/chat/completions", functions=[{"name": "f", "parameters": {}}])
        )
        assert (refused.status, refused.error["param"]) == (400, "functions")


async def test_tokens_are_counted_of_the_same_request(wire: MessagesWire) -> None:
    """What a count is sent is what an answer would be."""
    provider = AnthropicProvider(NEW, base_url=wire.url, api_key="sk-any")
    await provider.count_input_tokens(ChatRequest.create("q", extra={"user": "u", "reasoning_effort": "low"}))
    await provider.aclose()
    assert wire.bodies[-1] == {"model": NEW, "messages": [{"role": "user", "content": "q"}], **EFFORT}
