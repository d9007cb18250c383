"""Each setting that pydantic-ai has for models: taken, enforced by itself, or named in a warning."""

from __future__ import annotations

import warnings
from typing import Any, get_type_hints

import pytest

pytest.importorskip("pydantic_ai")
pytest.importorskip("openai")

import httpx2
from pydantic_ai import Agent, ModelSettings, Tool, UserError
from pydantic_ai.exceptions import ModelTimeoutError, UnsupportedSettingWarning
from pydantic_ai.models.anthropic import AnthropicModelSettings
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider
from support.scripted_chat import scripted_chat

from llm_spec import ChatRequest, SpeculativeConfig, SpeculativeDecoder
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.entry_points import open_provider
from llm_spec.integrations.pydantic_ai import SpeculativeModel
from llm_spec.testing import ScriptedProvider

DONE = {"content": "done"}
# by name: a value, and what the server gets of it (None: the same field as from the own model)
TAKEN: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "max_tokens": (9, {"max_tokens": 9}),
    "temperature": (0.5, None),
    "top_p": (0.9, None),
    "top_k": (7, {"top_k": 7}),
    "tool_choice": ("none", None),
    "parallel_tool_calls": (False, None),
    "seed": (3, None),
    "presence_penalty": (0.1, None),
    "frequency_penalty": (0.2, None),
    "logit_bias": ({"5": 1}, None),
    "stop_sequences": (["END"], None),
    "thinking": ("low", {"reasoning_effort": "low"}),
    "service_tier": ("flex", None),
    "extra_body": ({"mirostat": 1}, None),
    "openai_reasoning_effort": ("low", None),
    "openai_logprobs": (True, {"logprobs": True}),
    "openai_top_logprobs": (2, None),
    "openai_store": (True, None),
    "openai_user": ("u", None),
    "openai_moderation": ({"model": "m"}, None),
    "openai_text_verbosity": ("low", None),
    "openai_service_tier": ("priority", None),
    "openai_prompt_cache_key": ("k", None),
    "openai_prompt_cache_retention": ("24h", None),
    "openai_prompt_cache_options": ({"mode": "explicit"}, None),
}
TAKEN_ELSEWHERE = {"openai_include_raw_annotations", "openai_prediction", "max_retries", "timeout"}
ENFORCED = {"request_timeout", "first_event_timeout", "framing_announcement"}
NAMED: dict[str, Any] = {
    "extra_headers": {"a": "b"},
    "citations": True,
    "cache": True,
    "openai_prediction": {"type": "content", "content": "abc"},  # where nobody could verify it
    "openai_cache_instructions": True,
    "openai_continuous_usage_stats": True,
    "openai_include_unmapped_response_data": True,
}
# the own chat model passes over those of responses without a word
NAMED |= dict.fromkeys(
    OpenAIResponsesModelSettings.__annotations__.keys() - OpenAIChatModelSettings.__annotations__.keys(), "x"
)


def test_every_setting_has_a_row() -> None:
    """A new one is noticed here."""
    settings = {*get_type_hints(OpenAIResponsesModelSettings)}
    assert settings == {*TAKEN, *TAKEN_ELSEWHERE, *ENFORCED, *NAMED}


@pytest.mark.parametrize("name", TAKEN)
async def test_a_setting_is_sent(name: str) -> None:
    """As the own model sends it, without a warning."""
    value, expected = TAKEN[name]
    settings: Any = {name: value} | ({"openai_logprobs": True} if name == "openai_top_logprobs" else {})
    tools = [Tool(len, name="count", takes_ctx=False)] if "tool" in name else []
    async with scripted_chat(DONE) as chat:
        provider = OpenAIProvider(base_url=chat.url, api_key="x")
        async with OpenAIChatModel("m", provider=provider) as own:
            await Agent(own, tools=tools).run("hi", model_settings=settings)
        async with SpeculativeModel(f"generic:m@{chat.url}") as model:
            await Agent(model, tools=tools).run("hi", model_settings=settings)
            plain = await Agent(model, tools=tools).run("hi")
    sent_by_own, sent, without = chat.bodies
    assert plain.output == "done"
    if expected is None:
        expected = {field: said for field, said in sent_by_own.items() if said != without.get(field)}
        for field in ("stream", "stream_options", "messages"):
            expected.pop(field, None)
    assert expected
    assert {field: sent.get(field) for field in expected} == expected
    assert sent != without


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", NAMED)
async def test_a_setting_that_is_not_used_is_named(name: str, is_streamed: bool) -> None:
    """One warning, pydantic-ai's own; None says nothing."""
    async with scripted_chat(DONE) as chat, SpeculativeModel(f"generic:m@{chat.url}") as model:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            settings: Any = {name: NAMED[name]}
            if is_streamed:
                async with Agent(model, model_settings=settings).run_stream("hi") as run:
                    await run.get_output()
            else:
                await Agent(model, model_settings=settings).run("hi")
        assert [name in str(one.message) for one in seen if one.category is UnsupportedSettingWarning] == [True]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if name not in ("extra_headers", "cache"):  # of which pydantic-ai itself says so
                await Agent(model, model_settings={name: None}).run("hi")  # type: ignore[misc]


async def test_settings_of_other_vendors_say_nothing() -> None:
    """They may be there for another model behind a fallback."""
    settings: Any = {"google_safety_settings": [], "anthropic_effort": "low", "bedrock_guardrail_config": {}}
    async with scripted_chat(DONE) as chat, SpeculativeModel(f"generic:m@{chat.url}") as model:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await Agent(model).run("hi", model_settings=settings)
            await Agent(model).run("hi")
    assert chat.bodies[0] == chat.bodies[1]


PREDICTIONS: list[Any] = [
    {"type": "content", "content": "one two"},
    {"type": "content", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
]


@pytest.mark.parametrize("prediction", PREDICTIONS)
async def test_a_prediction_is_the_requests_own(prediction: Any) -> None:
    provider = ScriptedProvider("one two", capabilities=Capabilities(prediction=True))
    await Agent(SpeculativeModel(provider)).run("hi", model_settings={"openai_prediction": prediction})  # type: ignore[misc]
    assert provider.requests[0].prediction == "one two"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("extra_body", "text"),
        ("openai_prediction", {"content": [{"type": "image"}]}),
        ("openai_prediction", {}),
        ("max_retries", -1),
        ("timeout", 0),
    ],
)
async def test_a_value_that_cannot_be_is_refused(name: str, value: Any) -> None:
    async with SpeculativeModel("vllm:m@http://127.0.0.1:9/v1") as model:
        with pytest.raises(UserError, match=name):
            await Agent(model).run("hi", model_settings={name: value})  # type: ignore[misc]


async def test_attempts_are_the_settings() -> None:
    """`max_retries` counts those after the first; the decoder's own policy holds without it."""
    refusal = {"status": 500, "body": {"error": {"message": "failed"}}}
    async with scripted_chat(refusal) as chat:
        config = SpeculativeConfig()
        async with SpeculativeModel(f"generic:m@{chat.url}", config=config) as model:
            for max_retries in (0, 1):
                chat.bodies.clear()
                with pytest.raises(Exception, match="failed"):
                    await Agent(model).run("hi", model_settings={"max_retries": max_retries})
                assert len(chat.bodies) == 1 + max_retries


@pytest.mark.virtual_clock
@pytest.mark.parametrize("silence", [5, 5.0, httpx2.Timeout(100.0, read=5.0)], ids=["int", "float", "httpx"])
async def test_a_timeout_is_how_long_there_may_be_silence(silence: Any) -> None:
    provider = ScriptedProvider("never", delay_first_s=3600.0)
    model = SpeculativeModel(SpeculativeDecoder(target=provider, draft=None))
    with pytest.raises(ModelTimeoutError, match="5"):
        await Agent(model).run("hi", model_settings={"timeout": silence, "max_retries": 0})
    assert provider.num_open == 0


async def test_a_provider_alone_names_what_only_a_decoder_does() -> None:
    """Nothing there sends a request again or gives up waiting."""
    model = SpeculativeModel(ScriptedProvider("Hi"))
    for name, value in (("max_retries", 2), ("timeout", 5)):
        with pytest.warns(UnsupportedSettingWarning, match=name):
            await Agent(model).run("hi", model_settings={name: value})  # type: ignore[misc]


ANTHROPIC_NAMED = {
    "anthropic_cache",
    "anthropic_cache_diagnostics",
    "anthropic_cache_instructions",
    "anthropic_cache_messages",
    "anthropic_cache_tool_definitions",
    "anthropic_code_execution_tool_version",
    "anthropic_eager_input_streaming",
    "anthropic_task_budget",
    "anthropic_web_tools_allowed_callers",
}
ANTHROPIC_SENT: dict[str, tuple[Any, dict[str, Any]]] = {
    "anthropic_betas": (["b"], {"betas": ["b"]}),
    "anthropic_container": ("c", {"container": "c"}),
    "anthropic_context_management": ({"edits": []}, {"context_management": {"edits": []}}),
    "anthropic_effort": ("low", {"output_config": {"effort": "low"}}),
    "anthropic_metadata": ({"user_id": "u"}, {"metadata": {"user_id": "u"}}),
    "anthropic_service_tier": ("auto", {"service_tier": "auto"}),
    "anthropic_speed": ("fast", {"speed": "fast"}),
    "anthropic_thinking": ({"type": "disabled"}, {"thinking": {"type": "disabled"}}),
}


def test_every_setting_of_anthropics_has_a_row() -> None:
    own = AnthropicModelSettings.__annotations__.keys() - ModelSettings.__annotations__.keys()
    assert own == {*ANTHROPIC_NAMED, *ANTHROPIC_SENT}


@pytest.mark.parametrize("name", sorted({*ANTHROPIC_NAMED, *ANTHROPIC_SENT}))
async def test_settings_for_a_target_of_anthropic(name: str) -> None:
    """Sent in the words of its API, or named."""
    provider = ScriptedProvider("Hi")
    provider.name = "anthropic:claude-haiku-5-5"
    value, fields = ANTHROPIC_SENT.get(name, (True, {}))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        await Agent(SpeculativeModel(provider)).run("hi", model_settings={name: value})  # type: ignore[misc]
    assert provider.requests[0].extra == fields
    assert [name in str(warning.message) for warning in seen] == [True] * (name in ANTHROPIC_NAMED)


THINKING: list[tuple[str, Any, dict[str, Any]]] = [
    ("openai:o3", False, {"reasoning_effort": "low"}),
    ("openai:o3", True, {"reasoning_effort": "medium"}),
    ("openai:o3", "max", {"reasoning_effort": "high"}),
    ("openai:gpt-5", "minimal", {"reasoning_effort": "minimal"}),
    ("openai:gpt-5.2", False, {"reasoning_effort": "none"}),
    ("openai:gpt-4.1", "low", {}),  # it does not reason
    ("vllm:m", True, {"reasoning_effort": "medium"}),
    ("vllm:m", False, {"reasoning_effort": "none"}),
    ("anthropic:claude-sonnet-4-5", "low", {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
    ("anthropic:claude-opus-5", "low", {"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}),
    ("anthropic:claude-opus-5", True, {"thinking": {"type": "adaptive"}}),
    ("anthropic:claude-sonnet-4-5", False, {}),
]


@pytest.mark.parametrize(("name", "thinking", "fields"), THINKING)
async def test_a_wish_to_think_is_in_the_targets_words(name: str, thinking: Any, fields: dict[str, Any]) -> None:
    """A vendor's own setting, and `extra_body`, have the last word."""
    provider = ScriptedProvider("Hi")
    provider.name = name
    agent = Agent(SpeculativeModel(provider))
    await agent.run("hi", model_settings={"thinking": thinking})
    assert provider.requests[0].extra == fields
    settings: Any = {"thinking": thinking, "openai_reasoning_effort": "high", "extra_body": {"seed": 1}}
    await agent.run("hi", model_settings=settings)
    assert provider.requests[1].extra == {**fields, "reasoning_effort": "high", "seed": 1}


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize(
    ("thinking", "fields"),
    [
        (True, {"enable_thinking": True}),
        (False, {"reasoning_effort": "none"}),
        ("low", {"reasoning_effort": "low"}),
    ],
)
async def test_a_wish_to_think_is_a_templates_variable_in_this_process(
    thinking: Any, fields: dict[str, Any], is_decoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a decoder is around the model."""
    extras: list[Any] = []
    create = ChatRequest.create

    def record(*args: Any, **options: Any) -> ChatRequest:
        extras.append(options["extra"])
        return create(*args, **options)

    monkeypatch.setattr(ChatRequest, "create", record)
    target = open_provider("builtin:target")
    try:
        model = SpeculativeModel(SpeculativeDecoder(target=target, draft=None) if is_decoder else target)
        await Agent(model).run("hi", model_settings={"thinking": thinking, "max_tokens": 4})
    finally:
        await target.aclose()
    assert extras == [fields]


@pytest.mark.parametrize("strict", [None, True, False])
async def test_schemas_are_strict_only_where_that_is_requested(strict: bool | None) -> None:
    """At targets that hold to strict tools by themselves, or know them of some models alone."""

    def get(city: str = "Rome") -> str:
        return city

    def find(city: str) -> str:  # its schema is strict as it is
        return city

    provider = ScriptedProvider("Hi")
    provider.name = "anthropic:claude-haiku-5-5"
    await Agent(SpeculativeModel(provider), tools=[Tool(get, strict=strict), Tool(find, strict=strict)]).run("hi")
    function, other = (tool["function"] for tool in provider.requests[0].tools)
    assert function.get("strict") == other.get("strict") == (True if strict else None)
    assert function["parameters"].get("required") == (["city"] if strict else None)
    assert strict or function["parameters"]["properties"]["city"]["default"] == "Rome"


SAMPLING: Any = {
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1},
    "openai_logprobs": True,
    "openai_top_logprobs": 2,
}
EFFORTS = [(name, effort) for name in ("o3", "gpt-5", "gpt-5.2", "gpt-4.1") for effort in (None, "none", "high")]
FIELDS = (*SAMPLING, "reasoning_effort", "logprobs", "top_logprobs")


@pytest.mark.parametrize(("name", "effort"), EFFORTS)
@pytest.mark.parametrize("thinking", [None, "low", False])
async def test_sampling_of_models_that_reason(
    name: str, effort: Any, thinking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What such a model would refuse is left out with a warning, as by the own model, and is sent else."""
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    settings: Any = SAMPLING | ({} if effort is None else {"openai_reasoning_effort": effort})
    settings |= {} if thinking is None else {"thinking": thinking}
    sent: list[Any] = []
    async with scripted_chat(DONE) as chat:
        provider = OpenAIProvider(base_url=chat.url, api_key="x")
        for model in (OpenAIChatModel(name, provider=provider), SpeculativeModel(f"openai:{name}@{chat.url}")):
            async with model:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    await Agent(model).run("hi", model_settings=settings)
            fields = {field: chat.bodies[-1].get(field) for field in FIELDS}
            sent.append((fields, sum("temperature" in str(warning.message) for warning in seen)))
    assert sent[1] == sent[0]
