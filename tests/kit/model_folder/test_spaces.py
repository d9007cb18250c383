"""Where a tokenizer puts a space before every text: prompts, prefixes, answers and formats are one text."""

from __future__ import annotations

import re
from typing import Any

import pytest
from llm_spec_onnx import OnnxProvider
from support.space_tokenizers import KINDS, make_tokenizer, write_model_with_tokenizer

from llm_spec import ChatRequest, PromptLookup, ReferenceDraft, SpeculativeDecoder
from llm_spec.kit.model_folder.tokenizer import FolderTokenizer

TEXTS = ["It is", " It", "  two  spaces ", " ", "", "\n\ta\n", "naïve 日本 😀", "</s> <s>x", "a"]
PREFIXES = ["It is", "the", " the", "\n- ", "{", '{"a": ', "It is</s> the", "<s>", "日本 ", ""]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def provider(kind: str, tmp_path_factory: pytest.TempPathFactory) -> OnnxProvider:
    folder = tmp_path_factory.mktemp(kind) / "model"
    return OnnxProvider(write_model_with_tokenizer(folder, make_tokenizer(kind)))


@pytest.fixture(scope="module")
def tokenizer(provider: OnnxProvider) -> FolderTokenizer:
    model = provider.capabilities.token_model
    assert model is not None
    assert isinstance(model.tokenizer, FolderTokenizer)
    return model.tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_a_stretch_of_an_answer_comes_back_as_it_was(tokenizer: FolderTokenizer, text: str) -> None:
    """Nothing is added by `encode`, and nothing stripped by `decode`."""
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


@pytest.mark.parametrize("raw", [False, True], ids=["chat", "raw"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prompt_and_prefix_are_encoded_as_one_text(
    kind: str, tokenizer: FolderTokenizer, prefix: str, raw: bool
) -> None:
    """As by transformers' `continue_final_message`, but that a control token in the prefix is text."""
    token_ids = tokenizer.encode_chat(ChatRequest.create("Once upon", prefix=prefix, raw=raw))
    prompt = "Once upon" if raw else "<|user|>\nOnce upon</s>\n<|assistant|>\n"
    whole = make_tokenizer(kind)
    joined = prompt + re.split("</?s>", prefix)[0]
    expected = whole.encode(joined, add_special_tokens=raw).ids
    assert token_ids[: len(expected)] == expected
    rest = token_ids[len(expected) :]
    assert b"".join(map(tokenizer.token_bytes, rest)) == (prompt + prefix)[len(joined) :].encode()
    assert not {0, 1, 2} & set(rest)


@pytest.mark.parametrize(
    "draft", [None, PromptLookup(), ReferenceDraft(" the the")], ids=lambda draft: type(draft).__name__
)
@pytest.mark.parametrize("options", [{"raw": True}, {"prefix": "It is"}, {"raw": True, "prefix": " It"}, {}], ids=str)
async def test_an_answer_continues_its_text(
    provider: OnnxProvider, tokenizer: FolderTokenizer, options: dict[str, Any], draft: Any
) -> None:
    """A word keeps the space before it, be it the answer's first."""
    word = tokenizer.encode(" the")
    result = await SpeculativeDecoder(target=provider, draft=draft).decode(
        "the end", max_tokens=len(word) * 2, logit_bias=dict.fromkeys(word[:1], 100.0), **options
    )
    assert result.content.startswith(" ")
    begun = tokenizer.encode_chat(ChatRequest.create("the end", **options))
    again = tokenizer.decode([*begun, *tokenizer.encode(result.content)])
    assert again.endswith(options.get("prefix", "") + result.content)


@pytest.mark.parametrize("prefix", ["", " ti", " wil", " "])
async def test_a_format_may_begin_with_a_space(provider: OnnxProvider, prefix: str) -> None:
    """The answer, with its prefix, is what the format says to the letter."""
    pattern = " (timeout|wil)"
    result = await SpeculativeDecoder(target=provider, draft=None).decode(
        "the end", response_format={"type": "regex", "pattern": pattern}, prefix=prefix, max_tokens=20
    )
    assert re.fullmatch(pattern, prefix + result.content)


@pytest.mark.parametrize("prefix", ["{", '{"a"', '{"a": ', '{"a":'])
async def test_a_format_may_have_begun(provider: OnnxProvider, prefix: str) -> None:
    """A prefix is a part of the answer that a schema is kept in."""
    properties = {"a": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    result = await SpeculativeDecoder(target=provider, draft=PromptLookup()).decode(
        "hi", response_format={"type": "json_object", "schema": schema}, prefix=prefix, max_tokens=150
    )
    assert re.fullmatch(r'\{\s*"a"\s*:\s*(true|false)\s*\}', prefix + result.content)
