"""FolderTokenizer: what goes in comes out, templates are data, control tokens in answers are text."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import BUILTIN

from llm_spec import ChatRequest, InvalidRequestError, ModelLoadError
from llm_spec.model_folder.tokenizer import FolderTokenizer

TOKENIZER = FolderTokenizer(BUILTIN / "target")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copied = tmp_path / "model"
    shutil.copytree(BUILTIN / "draft", copied, ignore=shutil.ignore_patterns("model.onnx"))
    return copied


@given(st.text())
def test_round_trip(text: str) -> None:
    """Any text, control tokens spelled out among it, is the same after encoding and decoding."""
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_no_token_is_longer_than_the_longest() -> None:
    """By this a prompt that cannot fit is known before it is encoded."""
    texts = [TOKENIZER.decode([token_id]) for token_id in range(TOKENIZER.vocab_size)]
    assert max(map(len, texts)) <= TOKENIZER.max_token_chars < 100


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Or every other answer would stand still."""
    turns, counted, ended = [0], list[int](), threading.Event()

    def encode() -> None:
        text = "word " * 100_000
        counted.append(turns[0])
        TOKENIZER.encode(text)
        counted.append(turns[0])
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not ended.wait(0.001):
        turns[0] += 1
    thread.join()
    assert counted[1] - counted[0] >= 5


def test_the_ids_of_a_prompt_that_is_too_long_are_not_made(folder: Path) -> None:
    """Their number is known before; a list of millions holds up other threads."""
    length = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(
        InvalidRequestError, match=rf"the prompt has \d+ tokens; the model in .* takes {length} at most"
    ):
        FolderTokenizer(folder).encode_chat(ChatRequest.create("a b " * length))
    assert len(FolderTokenizer(folder).encode("a b " * length)) > length  # an answer is cut elsewhere


def test_control_tokens_in_an_answer_are_text() -> None:
    """A model or draft that spells out `<|end|>` does not end the answer."""
    assert not TOKENIZER.eos_token_ids & set(TOKENIZER.encode("a<|end|>b"))
    assert TOKENIZER.decode(TOKENIZER.encode("a<|end|>b")) == "a<|end|>b"


def test_chat_template() -> None:
    """Messages go through the model's own template; a prefix follows the generation prompt."""
    request = ChatRequest.create([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    expected = TOKENIZER._prompts.encode("<|system|>s<|end|><|user|>u<|end|><|assistant|>").ids  # pyright: ignore[reportPrivateUsage]
    assert TOKENIZER.encode_chat(request) == expected
    prefixed = ChatRequest.create("u", prefix="    return")
    assert TOKENIZER.encode_chat(prefixed) == TOKENIZER.encode_chat(ChatRequest.create("u")) + TOKENIZER.encode(
        "    return"
    )


def test_content_parts_are_joined() -> None:
    """OpenAI's text parts are the text they make together."""
    parts = ChatRequest.create(
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    )
    assert TOKENIZER.encode_chat(parts) == TOKENIZER.encode_chat(ChatRequest.create("ab"))


def test_the_pair_shares_a_tokenizer() -> None:
    """Target and draft of the built-in pair have the same fingerprint; another vocabulary has another."""
    assert FolderTokenizer(BUILTIN / "draft").fingerprint == TOKENIZER.fingerprint


def test_another_vocabulary_has_another_fingerprint(folder: Path) -> None:
    """One token more is another tokenizer."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a new token"] = 4095
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert FolderTokenizer(folder).fingerprint != TOKENIZER.fingerprint


def test_a_template_that_refuses(folder: Path) -> None:
    """raise_exception in a template is an error of the request, with the template's words."""
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        FolderTokenizer(folder).encode_chat(ChatRequest.create("u"))


def test_a_template_cannot_leave_its_sandbox(folder: Path) -> None:
    """Templates come from other people's folders: they must not reach Python's internals."""
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        FolderTokenizer(folder).encode_chat(ChatRequest.create("u"))


def test_broken_template(folder: Path) -> None:
    """A template that does not parse is found when the model is loaded."""
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelLoadError, match="chat template"):
        FolderTokenizer(folder)


def test_templates_of_the_older_layout(folder: Path) -> None:
    """tokenizer_config.json may hold the template, or a list of them by name."""
    (folder / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = FolderTokenizer(folder)
    assert tokenizer.encode_chat(ChatRequest.create("u")) == tokenizer.encode("d")


def test_no_template(folder: Path) -> None:
    """A model without a chat template says so when it is given messages."""
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequestError, match="no chat template"):
        FolderTokenizer(folder).encode_chat(ChatRequest.create("u"))


def test_end_of_answer_ids(folder: Path) -> None:
    """generation_config.json's list of end tokens wins over config.json's single one."""
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert FolderTokenizer(folder).eos_token_ids == {7, 9}
