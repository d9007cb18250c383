"""Tools on models in this process: calls that a grammar holds, read from the text, the same with every draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llm_spec_onnx import OnnxProvider
from support.tool_models import FORMATS_BY_NAME, TOOLS, write_model_without_tools, write_tool_model

from llm_spec import (
    ChatRequest,
    DraftProvider,
    Fixed,
    InvalidRequestError,
    PromptLookup,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
)
from llm_spec.contract.formats import FORMATS
from llm_spec.testing import RandomDraft


def ask(text: str = "Weather in Rome?", **options: Any) -> ChatRequest:
    fields: Any = {"tools": TOOLS, "max_tokens": 200, **options}
    return ChatRequest.create(text, **fields)


@pytest.fixture(scope="module", params=FORMATS, ids=lambda row: row.name)
def provider(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnnxProvider:
    return OnnxProvider(write_tool_model(tmp_path_factory.mktemp("models") / request.param.name, request.param))


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> OnnxProvider:
    return OnnxProvider(write_tool_model(tmp_path_factory.mktemp("models") / "hermes", FORMATS_BY_NAME["hermes"]))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ],
    ids=["required", "named"],
)
async def test_calls_that_are_demanded_come_and_are_the_same_with_every_draft(
    provider: OnnxProvider, choice: Any, names: set[str], temperature: float
) -> None:
    """Each format; arguments keep to the schema, although the model has never seen a tool."""
    request = ask(tool_choice=choice, temperature=temperature, seed=5, extra={"parallel_tool_calls": False})
    plain = await provider.complete(request)
    [call] = plain.message.tool_calls
    assert plain.finish_reason == "tool_calls"
    assert call.name in names
    arguments = json.loads(call.arguments)
    if call.name == "get_weather":
        assert arguments.keys() == {"city", "days"}
        assert isinstance(arguments["days"], int)
        row = FORMATS_BY_NAME[Path(provider.name.partition(":")[2]).name]
        assert row.body == "named_fields" or 1 <= arguments["days"] <= 7  # there, only names and types are held
    drafts: list[DraftProvider] = [PromptLookup(), ProviderDraft(provider), RandomDraft()]
    for draft in drafts:
        decoder = SpeculativeDecoder(target=provider, draft=draft, config=SpeculativeConfig(lookahead=Fixed(4)))
        result = await decoder.decode(request)
        assert result.strategy == "tokens"
        assert (result.content, result.tool_calls) == (plain.message.text, plain.message.tool_calls)
        assert (result.finish_reason, result.stopped_by) == (plain.finish_reason, plain.stopped_by)


async def test_several_calls_may_come_where_nothing_forbids_them(provider: OnnxProvider) -> None:
    """Over several seeds, answers of one call and of more."""
    answers = [
        await provider.complete(ask(tool_choice="required", temperature=1.3, seed=seed, max_tokens=400))
        for seed in range(3)
    ]
    finished = [answer for answer in answers if answer.finish_reason == "tool_calls"]
    assert finished
    for answer in finished:
        assert answer.message.tool_calls
        assert answer.message.text == ""
        assert len({call.id for call in answer.message.tool_calls}) == len(answer.message.tool_calls)


async def test_strict_tools_hold_calls_and_leave_the_text_free(hermes: OnnxProvider) -> None:
    """An answer that opens a call must end it by the schema; without `strict` this model breaks it off."""
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS[:1]]
    options: dict[str, Any] = {"seed": 1, "temperature": 0.8, "extra": {"parallel_tool_calls": False}}
    assert (await hermes.complete(ask(tools=strict, **options))).message.text
    begun = await hermes.complete(ask(tools=strict, prefix="Yes.\n<tool_call>", **options))
    assert begun.message.text == ""
    assert json.loads(begun.message.tool_calls[0].arguments).keys() == {"city", "days"}
    assert not (await hermes.complete(ask(tools=TOOLS[:1], prefix="Yes.\n<tool_call>", **options))).message.tool_calls


async def test_a_call_and_a_response_format(hermes: OnnxProvider) -> None:
    """The answer is a call, or keeps to the format."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = await hermes.complete(ask(response_format=response_format, temperature=0.9, seed=2))
    assert answer.message.tool_calls or "ok" in json.loads(answer.message.text)
    with pytest.raises(InvalidRequestError, match="response_format is a regex, and tools are set"):
        await hermes.complete(ask(response_format={"type": "regex", "pattern": "a+"}))


async def test_reasoning_comes_first_and_is_not_held(tmp_path: Path) -> None:
    """A prompt that opens the reasoning: it is free, and what follows it is a call."""
    folder = write_tool_model(tmp_path / "model", FORMATS_BY_NAME["hermes"], reasoning="<think>")
    provider = OnnxProvider(folder)
    request = ask(tool_choice="required", max_tokens=60, logit_bias={})
    answer = await provider.complete(request)
    assert answer.reasoning or answer.message.tool_calls
    assert answer.usage is not None
    assert answer.usage.reasoning_tokens > 0
    decoder = SpeculativeDecoder(target=provider, draft=PromptLookup())
    result = await decoder.decode(request)
    assert (result.reasoning, result.tool_calls) == (answer.reasoning, answer.message.tool_calls)


@pytest.mark.parametrize("reasoning", ["<think>", "<think>\n", "<think>\n\n</think>\n"])
async def test_an_answer_begins_in_the_reasoning_that_its_prompt_has_opened(tmp_path: Path, reasoning: str) -> None:
    """Until its mark comes everything is reasoning; where the prompt has closed it, nothing is."""
    provider = OnnxProvider(write_tool_model(tmp_path / "model", FORMATS_BY_NAME["hermes"], reasoning=reasoning))
    answer = await provider.complete(ask(tools=(), max_tokens=16))
    is_open = "</think>" not in reasoning
    assert (bool(answer.reasoning), bool(answer.message.text)) == (is_open, not is_open)


async def test_ids_of_calls_belong_to_the_conversation(provider: OnnxProvider) -> None:
    """The same request gives the same ids, another one others: agents with and without a draft write one transcript."""
    request = ask(tool_choice="required", extra={"parallel_tool_calls": False})
    [first] = (await provider.complete(request)).message.tool_calls
    [again] = (await provider.complete(request)).message.tool_calls
    [other] = (
        await provider.complete(ask("And now?", tool_choice="required", extra={"parallel_tool_calls": False}))
    ).message.tool_calls
    assert first.id == again.id != other.id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\].function.name is None; it must be a text"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\] is of type 'web_search'; .* takes only functions"),
        ({"tools": [{"name": "x"}]}, r"tools\[0\].function is missing; it must be an object with name and parameters"),
        (
            {"tools": [{"type": "function", "function": "x"}]},
            r"tools\[0\].function is of type str; it must be an object",
        ),
        ({"tools": ["get_weather"]}, r"tools\[0\] is 'get_weather' of type str; it must be an object"),
        (
            {"tools": [{"function": {"name": "f", "parameters": []}}]},
            r"tools\[0\].function.parameters is not an object",
        ),
        (
            {"tool_choice": {"function": {"name": "rm"}}},
            "tool_choice names 'rm', which is not one of the request's tools",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice is 'sometimes'; it must be auto, none, required"),
        ({"tools": (), "tool_choice": "required"}, "tool_choice is 'required', and the request has no tools"),
        (
            {
                "tools": [
                    {"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "x"}}}}}
                ],
                "tool_choice": "required",
            },
            "tools cannot be used",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"a": float("nan")}}}], "tool_choice": "required"},
            "parameters of tool 'f' is not valid JSON",
        ),
    ],
)
async def test_tools_that_cannot_be_served_are_one_clear_error(
    hermes: OnnxProvider, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await hermes.complete(ask(**options))


async def test_a_result_of_a_call_that_nobody_made_is_an_error(hermes: OnnxProvider) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "call_9", "content": "1"}]
    with pytest.raises(InvalidRequestError, match=r"messages\[1\].tool_call_id is 'call_9'; no message before it"):
        await hermes.complete(ChatRequest.create(messages, tools=TOOLS))


async def test_a_template_without_a_place_for_tools_is_an_error(tmp_path: Path) -> None:
    provider = OnnxProvider(write_model_without_tools(tmp_path / "model"))
    assert not provider.capabilities.tools
    with pytest.raises(InvalidRequestError, match="has no place for them"):
        await provider.complete(ask())
    assert (await provider.complete(ask(tool_choice="none", max_tokens=2))).message.text
