"""Answers of GGUF files: one seed gives one text with any draft; grammars, tools, stop strings, company."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from llm_spec_gguf import GgufModel, GgufProvider
from support.gguf_models import WriteModel, sentencepiece_vocabulary
from support.logprob_checks import EVERY_REQUEST, build_logprob_request, check_logprobs

from llm_spec import (
    ChatRequest,
    DraftProvider,
    Fixed,
    PromptLookup,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SuffixDraft,
)
from llm_spec.testing import RandomDraft, check_provider_conformance

CODE = "class Reader:\n    def __init__(self):\n        self.close()\n\n    def close(self):\n        self.read()\n"
LONG = CODE * 12  # more tokens than attention reads in one step
TOOL = {
    "type": "function",
    "function": {
        "name": "rate",
        "parameters": {
            "type": "object",
            "properties": {"stars": {"enum": [1, 2, 3]}},
            "required": ["stars"],
            "additionalProperties": False,
        },
    },
}
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    '{# <tool_call> {"name": <function-name>, "arguments": <args-json-object>} </tool_call> #}'
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
)


def list_drafts(draft: GgufProvider) -> list[DraftProvider]:
    return [PromptLookup(), SuffixDraft(), ProviderDraft(draft), RandomDraft()]


async def test_provider_conforms(pair: dict[str, Path]) -> None:
    """What every provider promises."""
    await check_provider_conformance(lambda: GgufProvider(pair["draft"], threads=1, exact=False))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prompt", [CODE, LONG], ids=["short", "long"])
@pytest.mark.parametrize("threads", [1, 2])
async def test_one_seed_gives_one_text(
    pair: dict[str, Path], gguf_draft: GgufProvider, prompt: str, temperature: float, threads: int
) -> None:
    """With any draft and without, wherever the model promises it."""
    target = GgufProvider(pair["target"], threads=threads, max_width=16)
    model = target.capabilities.token_model
    assert model is not None
    if not model.same_text:
        pytest.skip("no width agrees with another on this machine")
    request = ChatRequest.create(prompt, temperature=temperature, seed=3, max_tokens=40)
    plain = await target.complete(request)
    for drafter in list_drafts(gguf_draft):
        decoder = SpeculativeDecoder(target=target, draft=drafter, config=SpeculativeConfig(lookahead=Fixed(6)))
        result = await decoder.decode(request)
        assert result.strategy == "tokens"
        assert result.stats.num_draft_tokens > 0
        assert result.content == plain.message.text
    await target.aclose()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_answers_keep_to_a_grammar(target: GgufProvider, gguf_draft: GgufProvider, temperature: float) -> None:
    """A pattern with characters of several bytes; a draft changes nothing."""
    pattern = r"(self\.[a-z_]{1,9}é\n ){2,4}"
    request = ChatRequest.create(
        CODE, temperature=temperature, seed=5, response_format={"type": "regex", "pattern": pattern}
    )
    plain = await target.complete(request)
    assert re.fullmatch(pattern, plain.message.text)
    for drafter in list_drafts(gguf_draft):
        result = await SpeculativeDecoder(target=target, draft=drafter).decode(request)
        assert result.content == plain.message.text


async def test_grammars_read_sentencepiece(write_model: WriteModel) -> None:
    """Spaces are marks there, and bytes have names."""
    provider = GgufProvider(write_model(vocabulary=sentencepiece_vocabulary()), threads=1)
    request = ChatRequest.create(
        "he", temperature=1.0, seed=1, response_format={"type": "regex", "pattern": "hello é, [a-z]{3} he"}
    )
    assert re.fullmatch("hello é, [a-z]{3} he", (await provider.complete(request)).message.text)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_tools_that_are_demanded_are_called(write_model: WriteModel, temperature: float) -> None:
    """By the template in the file; its marks are control tokens."""
    provider = GgufProvider(write_model({"tokenizer.chat_template": TOOL_TEMPLATE}), threads=1, max_width=16)
    assert provider.capabilities.tools
    request = ChatRequest.create(
        "rate it",
        tools=(TOOL,),
        tool_choice="required",
        temperature=temperature,
        seed=2,
        max_tokens=300,
        extra={"parallel_tool_calls": False},
    )
    plain = await provider.complete(request)
    [call] = plain.message.tool_calls
    assert call.name == "rate"
    assert json.loads(call.arguments)["stars"] in {1, 2, 3}
    result = await SpeculativeDecoder(target=provider, draft=RandomDraft()).decode(request)
    assert result.tool_calls == plain.message.tool_calls


@EVERY_REQUEST
async def test_logprobs(  # noqa: PLR0917 - fixtures and the combination
    target: GgufProvider, gguf_draft: GgufProvider, draft: str, temperature: str, form: str, prompt: str
) -> None:
    """Of accepted tokens as of others, with stop strings, caps, grammars and penalties."""
    model = target.capabilities.token_model
    assert isinstance(model, GgufModel)
    request = build_logprob_request(temperature, form, prompt)
    drafter = {"lookup": PromptLookup(), "model": ProviderDraft(gguf_draft), "random": RandomDraft(3)}[draft]
    plain = await SpeculativeDecoder(target=target, draft=None).decode(request)
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(4))
    check_logprobs(await SpeculativeDecoder(target=target, draft=drafter, config=config).decode(request), plain, model)


async def test_answers_at_once_are_those_of_one_after_another(target: GgufProvider) -> None:
    """Each has a cache of its own."""
    requests = [
        ChatRequest.create(f"{CODE}# {number}", temperature=0.7, seed=number, max_tokens=24) for number in range(5)
    ]
    decoder = SpeculativeDecoder(target=target, draft=PromptLookup())
    in_turn = [(await decoder.decode(request)).content for request in requests]
    at_once = await asyncio.gather(*(decoder.decode(request) for request in requests))
    assert [result.content for result in at_once] == in_turn


async def test_a_stop_string_ends_the_answer(target: GgufProvider) -> None:
    """Before it, with nothing of it."""
    request = ChatRequest.create(CODE, max_tokens=40)
    whole = (await target.complete(request)).message.text
    stop = whole[10:14]
    result = await SpeculativeDecoder(target=target, draft=PromptLookup()).decode(
        ChatRequest.create(CODE, max_tokens=40, stop=[stop])
    )
    assert result.content == whole[: whole.index(stop)]
