"""GgufTokenizer: llama.cpp's own ids and bytes, the same as those of the folder that a file was made of."""

from __future__ import annotations

import pytest
from llm_spec_gguf import GgufModel, GgufProvider
from support.gguf_models import PAIR, WriteModel, sentencepiece_vocabulary

from llm_spec import ChatMessage, ChatRequest, InvalidRequestError
from llm_spec.contract.token_model import TokenModel
from llm_spec.kit.model_folder.tokenizer import FolderTokenizer

TEXTS = (
    "",
    "def test_close(self):\n    self.assertEqual(1, 2)\n",
    "  two  spaces,\ta tab\nand a new line\n",
    "naïve café, 日本語 😀",
    "<|end|> <|user|> </s>",
    " leading",
    " ",
    "don't stop .",
)


def model_of(provider: GgufProvider) -> TokenModel:
    model = provider.capabilities.token_model
    assert model is not None
    return model


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_folder(target: GgufProvider, text: str) -> None:
    """And they give the text back."""
    tokenizer, folder = model_of(target).tokenizer, FolderTokenizer(PAIR / "target")
    assert tokenizer.encode(text) == folder.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_are_made_of_the_bytes_that_the_folder_says(target: GgufProvider) -> None:
    """Of every token; and of an id that is none, nothing."""
    model = model_of(target)
    assert isinstance(model, GgufModel)
    folder = FolderTokenizer(PAIR / "target")
    ids = range(model.vocab_size)
    assert [model.tokenizer.token_bytes(i) for i in ids] == [folder.token_bytes(i) for i in ids]
    assert model.tokenizer.token_bytes(-1) == model.tokenizer.token_bytes(10**6) == b""
    assert model.tokenizer.eos_token_ids >= folder.eos_token_ids


def test_prompts_are_those_of_the_folder(target: GgufProvider) -> None:
    """By the template in the file, whose control tokens are control tokens; and raw ones."""
    tokenizer, folder = model_of(target).tokenizer, FolderTokenizer(PAIR / "target")
    for request in (
        ChatRequest.create([ChatMessage("system", "Be kind."), ChatMessage("user", "Hi <|end|> there")]),
        ChatRequest.create("import os", prefix="import sys"),
        ChatRequest.create("import os", raw=True),
    ):
        assert tokenizer.encode_chat(request) == folder.encode_chat(request)


@pytest.mark.parametrize("text", ["hello", " hello", "he", "  he", "", " ", "\nhe", "é 日", "a\n he"])
def test_no_space_is_put_before_a_stretch_of_an_answer(write_model: WriteModel, text: str) -> None:
    """As vocabularies of SentencePiece do with a text: what goes in comes out."""
    tokenizer = GgufModel(write_model(vocabulary=sentencepiece_vocabulary()), threads=1, exact=False).tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizers_of_one_vocabulary_have_one_fingerprint(target: GgufProvider, gguf_draft: GgufProvider) -> None:
    """So one drafts for the other by ids."""
    assert model_of(target).tokenizer.fingerprint == model_of(gguf_draft).tokenizer.fingerprint


def test_half_a_surrogate_pair_is_no_text(tiny: GgufModel) -> None:
    """But no reason to end the process either."""
    assert tiny.tokenizer.decode(tiny.tokenizer.encode("a\ud800b")) == "a?b"


def test_a_long_text_of_one_word_is_read(tiny: GgufModel) -> None:
    """The splitting of texts recurses in some of llama.cpp's patterns."""
    for character in ("a", " ", "1", "\n", "é"):
        text = character * 50_000
        assert tiny.tokenizer.decode(tiny.tokenizer.encode(text)) == text


def test_without_a_template_only_raw_prompts_are_taken(write_model: WriteModel) -> None:
    """And the error says what is missing."""
    path = write_model({"tokenizer.chat_template": None})
    tokenizer = GgufModel(path, threads=1, exact=False).tokenizer
    assert tokenizer.encode_chat(ChatRequest.create("he", raw=True)) == tokenizer.encode("he")
    with pytest.raises(InvalidRequestError, match=r"the model in .*tiny\.gguf has no chat template"):
        tokenizer.encode_chat(ChatRequest.create("he"))


def test_a_prompt_that_is_too_long_is_refused(write_model: WriteModel) -> None:
    """With how long it is."""
    tokenizer = GgufModel(write_model(), threads=1, exact=False, max_context=256).tokenizer
    with pytest.raises(InvalidRequestError, match=r"the prompt has 3\d\d tokens; .* takes 256 at most"):
        tokenizer.encode_chat(ChatRequest.create("x" * 300))


def test_tokens_are_listed_for_grammars(target: GgufProvider) -> None:
    """With those that are no text apart."""
    model = model_of(target)
    assert isinstance(model, GgufModel)
    tokenizer = model.tokenizer
    assert [tokenizer.token_bytes(i) for i in range(model.vocab_size)] == tokenizer.list_tokens()
    assert tokenizer.list_control_token_ids() == list(range(8))
