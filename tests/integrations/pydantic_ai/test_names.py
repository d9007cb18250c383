"""What a response says of its model, its address and its price."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent
from support.scripted_chat import scripted_chat

from llm_spec import ProviderDraft, SpeculativeConfig, SpeculativeDecoder, Usage
from llm_spec.integrations.pydantic_ai import SpeculativeModel
from llm_spec.testing import ScriptedProvider

PRICED = [
    ("openai:gpt-5", "openai", "gpt-5"),
    ("anthropic:claude-sonnet-4-5", "anthropic", "claude-sonnet-4-5"),
    ("deepseek:deepseek-chat", "deepseek", "deepseek-chat"),
    ("openrouter:openai/gpt-5", "openrouter", "openai/gpt-5"),
    ("kimi:kimi-k2-thinking", "moonshotai", "kimi-k2-thinking"),
]
USAGE = Usage(input_tokens=1000, output_tokens=100, cached_input_tokens=400, cache_write_input_tokens=100)


@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("name", "provider_name", "model_name"), PRICED)
async def test_a_response_has_a_price(
    name: str, provider_name: str, model_name: str, is_streamed: bool, has_draft: bool
) -> None:
    """It names provider and model as pydantic-ai does, whatever drafts for it, and price tables find them."""
    target = ScriptedProvider("one two three", usage=USAGE)
    target.name = name
    draft = ProviderDraft(ScriptedProvider("one two three")) if has_draft else None
    async with SpeculativeModel(SpeculativeDecoder(target=target, draft=draft)) as model:
        agent = Agent(model)
        if is_streamed:
            async with agent.run_stream("hi") as run:
                await run.get_output()
            response = run.response
        else:
            response = (await agent.run("hi")).response
    assert (model.system, model.model_name) == (provider_name, model_name)
    assert (response.provider_name, response.model_name) == (provider_name, model_name)
    assert response.cost().total_price > 0
    assert response.usage.cost == response.cost().total_price


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("generic:m", ("generic", "m")),
        ("generic:a:b/c+d@e", ("generic", "a:b/c+d@e")),
        ("scripted", ("llm-spec", "scripted")),
        ("scripted+other:m", ("llm-spec", "scripted+other:m")),
    ],
)
async def test_names_of_other_targets(target: str, names: tuple[str, str]) -> None:
    """All that has no name of a provider is this library's."""
    provider = ScriptedProvider("hi")
    provider.name = target
    for given in (provider, SpeculativeDecoder(target=provider, draft=ProviderDraft(ScriptedProvider("hi")))):
        model = SpeculativeModel(given)
        assert (model.system, model.model_name) == names


@pytest.mark.parametrize("credentials", ["user:secret@", "user:sec@ret@"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_an_address_has_no_credentials(is_streamed: bool, credentials: str) -> None:
    """It is there where it was given; neither a password nor what is behind a question mark is."""
    async with scripted_chat({"content": "done"}) as chat:
        spec = "generic:m@" + chat.url.replace("//", f"//{credentials}")
        async with SpeculativeModel(spec) as model:
            agent = Agent(model)
            if is_streamed:
                async with agent.run_stream("hi") as run:
                    await run.get_output()
                response = run.response
            else:
                response = (await agent.run("hi")).response
    assert response.provider_url == model.base_url == chat.url
    other = SpeculativeModel("generic:m@http://127.0.0.1:9/v1?key=secret")
    assert other.base_url == "http://127.0.0.1:9/v1"
    assert SpeculativeModel(ScriptedProvider("hi")).base_url is None
    await other.aclose()


async def test_what_a_rejected_draft_cost_is_priced_by_its_own_name() -> None:
    """Attempts name provider and model as responses do."""
    target = ScriptedProvider("one two three four", usage=USAGE)
    target.name = "openai:gpt-5"
    draft = ScriptedProvider("one two wrong", usage=Usage(input_tokens=3, output_tokens=7))
    draft.name = "openai:gpt-4.1-nano"
    decoder = SpeculativeDecoder(
        target=target, draft=ProviderDraft(draft), config=SpeculativeConfig(strategy="regenerate")
    )
    response = (await Agent(SpeculativeModel(decoder)).run("Count")).response
    [attempt] = response.failed_attempts or []
    assert (attempt.provider_name, attempt.model_name) == ("openai", "gpt-4.1-nano")
    assert attempt.usage is not None
