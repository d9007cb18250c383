"""Every field of ModelSettings is taken, or refused by its name; none is ignored."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import Agent, ModelRetrySettings, ModelSettings, UserError
from openai.types.shared import Reasoning
from support.agents_runs import HOWS, run_agent

from llm_spec import ChatRequest
from llm_spec.integrations.openai_agents import SpeculativeModel
from llm_spec.testing import ScriptedProvider

TOOL_ALONE = "said with tools alone: test_like_own_model.py has them"
OF_THE_RUNNER = "the runner's, or about usage, which is always counted"

# name: (a value, what the request has of it)
TAKEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.5, {"temperature": 0.5}),
    "top_p": (0.9, {"top_p": 0.9}),
    "frequency_penalty": (0.1, {"frequency_penalty": 0.1}),
    "presence_penalty": (0.2, {"presence_penalty": 0.2}),
    "max_tokens": (7, {"max_tokens": 7}),
    "top_logprobs": (2, {"top_logprobs": 2}),
    "truncation": ("disabled", {}),  # what is done in any case
    "reasoning": (Reasoning(effort="low", summary="auto"), {"reasoning_effort": "low"}),
    "verbosity": ("low", {"verbosity": "low"}),
    "metadata": ({"a": "b"}, {"metadata": {"a": "b"}}),
    "store": (False, {"store": False}),
    "prompt_cache_retention": ("24h", {"prompt_cache_retention": "24h"}),
    "prompt_cache_options": ({"mode": "explicit"}, {"prompt_cache_options": {"mode": "explicit"}}),
    "response_include": (["message.output_text.logprobs", "reasoning.encrypted_content"], {"top_logprobs": 0}),
    "extra_body": ({"mirostat": 1}, {"mirostat": 1}),
    "extra_args": ({"seed": 3, "guided": True}, {"seed": 3, "guided": True}),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "truncation": ("auto", r"truncation is 'auto'"),
    "reasoning": (Reasoning(effort="low", mode="x"), r"reasoning\.mode"),
    "response_include": (["file_search_call.results"], r"response_include is 'file_search_call.results'"),
    "extra_query": ({"q": "sk-1"}, r"extra_query is set.*address"),
    "extra_headers": ({"X-Key": "sk-1"}, r"extra_headers is set.*provider"),
    "context_management": ([{"type": "compaction"}], r"context_management .*Responses API"),
    "extra_body": (["x"], r"extra_body is of type list"),
}
REFUSED_ARGS = ["extra_headers", "extra_query", "messages", "model", "stream", "stream_options", "timeout"]
ELSEWHERE = {
    "tool_choice": TOOL_ALONE,
    "parallel_tool_calls": TOOL_ALONE,
    "retry": OF_THE_RUNNER,
    "timeout": OF_THE_RUNNER,
    "include_usage": OF_THE_RUNNER,
    "preserve_raw_usage": OF_THE_RUNNER,
}


def test_every_field_has_a_row() -> None:
    """A new field of the SDK's is noticed here, and at run time it is refused."""
    assert {
        field.name for field in dataclasses.fields(ModelSettings)
    } == TAKEN.keys() | REFUSED.keys() | ELSEWHERE.keys()


async def ask(settings: ModelSettings, is_streamed: bool) -> list[ChatRequest]:
    provider = ScriptedProvider("Hi")
    agent = Agent(name="a", model=SpeculativeModel(provider), model_settings=settings)
    try:
        await run_agent(agent, "hi", is_streamed)
    except UserError:
        assert not provider.requests
        raise
    return provider.requests


@HOWS
@pytest.mark.parametrize("name", TAKEN)
async def test_what_is_taken(name: str, is_streamed: bool) -> None:
    """The request says it."""
    value, expected = TAKEN[name]
    [request] = await ask(ModelSettings(**{name: value}), is_streamed)
    said = {**vars(request.sampling), **vars(request), **request.extra}
    assert {field: said.get(field) for field in expected} == expected
    assert request.extra.keys() <= expected.keys()


@HOWS
@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(name: str, is_streamed: bool) -> None:
    """By its name, before the target is asked. What may be a key is not repeated."""
    value, words = REFUSED[name]
    with pytest.raises(UserError, match=words) as caught:
        await ask(ModelSettings(**{name: value}), is_streamed)
    assert "sk-1" not in str(caught.value)


@HOWS
@pytest.mark.parametrize("name", REFUSED_ARGS)
async def test_what_extra_args_may_not_have(name: str, is_streamed: bool) -> None:
    """What OpenAI's client does not send in the body."""
    with pytest.raises(UserError, match=f"extra_args.*{name}"):
        await ask(ModelSettings(extra_args={name: {"a": "b"}}), is_streamed)


async def test_a_field_that_nobody_knows_is_refused() -> None:
    """Such as a later SDK, or a class of the user's, has."""

    @dataclasses.dataclass
    class LaterSettings(ModelSettings):
        shiny: bool | None = None

    settings = LaterSettings()
    settings.shiny = True
    with pytest.raises(UserError, match="shiny"):
        await ask(settings, False)
    settings.shiny = None
    assert await ask(settings, False)


@HOWS
async def test_the_runners_own(is_streamed: bool) -> None:
    """They change no request."""
    settings = ModelSettings(
        retry=ModelRetrySettings(max_retries=1), timeout=60.0, include_usage=True, preserve_raw_usage=True
    )
    [request] = await ask(settings, is_streamed)
    assert request == (await ask(ModelSettings(), is_streamed))[0]


@HOWS
@pytest.mark.parametrize("name", ["previous_response_id", "conversation_id"])
async def test_what_only_openais_servers_keep(name: str, is_streamed: bool) -> None:
    """A conversation that lives on a server is refused by name."""
    provider = ScriptedProvider("Hi")
    agent = Agent(name="a", model=SpeculativeModel(provider))
    with pytest.raises(UserError, match=name):
        await run_agent(agent, "hi", is_streamed, **{name: "x"})
    assert not provider.requests


@HOWS
async def test_a_prompt_of_openais_is_refused(is_streamed: bool) -> None:
    """So is a prompt."""
    provider = ScriptedProvider("Hi")
    agent = Agent(name="a", model=SpeculativeModel(provider), prompt={"id": "pmpt_1"})
    with pytest.raises(UserError, match="prompt"):
        await run_agent(agent, "hi", is_streamed)
    assert not provider.requests
