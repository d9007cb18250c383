"""FolderTokenizer: what goes in comes out, templates are data, control tokens in answers are text."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import BUILTIN

from llm_spec import ChatRequest, InvalidRequestError
from llm_spec.contract.errors import ModelLoadError
from llm_spec.kit.model_folder.tokenizer import FolderTokenizer

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
    ) as caught:
        FolderTokenizer(folder).encode_chat(ChatRequest.create("a b " * length))
    assert caught.value.code == "context_length_exceeded"
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


@pytest.mark.parametrize(
    ("generation_config", "config", "eos_token", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {}, None, {7, 9}),
        ({"eos_token_id": 9}, {"eos_token_id": 3}, None, {3, 9}),
        ({"eos_token_id": 9}, {"eos_token_id": [3, 4]}, "<|end|>", {3, 4, 7, 9}),
        ({}, {"eos_token_id": 3}, "<|end|>", {3, 7}),
        ({"eos_token_id": None}, {}, {"content": "<|end|>"}, {7}),
        ({}, {}, "no such token", set()),
        ({}, {}, None, set()),
    ],
)
def test_end_of_answer_ids(
    folder: Path, generation_config: Any, config: Any, eos_token: Any, expected: set[int]
) -> None:
    """An answer ends at whatever one of the files says that it ends at: the end of a turn is often in one alone."""
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    kept = json.loads((folder / "config.json").read_text())
    kept.pop("eos_token_id", None)
    (folder / "config.json").write_text(json.dumps(kept | config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    assert FolderTokenizer(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    "sections",
    [
        {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}},
        {"truncation": {"direction": "Left", "max_length": 2, "strategy": "LongestFirst", "stride": 0}},
        *(
            {
                "padding": {
                    "strategy": strategy,
                    "direction": direction,
                    "pad_to_multiple_of": multiple,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "x",
                }
            }
            for strategy, direction, multiple in [
                ({"Fixed": 64}, "Right", None),
                ({"Fixed": 64}, "Left", None),
                ("BatchLongest", "Right", 64),
            ]
        ),
    ],
    ids=str,
)
def test_what_training_did_to_batches_is_left_undone(folder: Path, sections: dict[str, Any]) -> None:
    """Prompts, prefixes and answers are neither cut nor padded, and the vocabulary is still the same one."""
    request = ChatRequest.create("a longer text than that", prefix="and a prefix")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | sections))
    changed = FolderTokenizer(folder)
    assert changed.encode_chat(request) == TOKENIZER.encode_chat(request)
    assert changed.encode("an answer of some words") == TOKENIZER.encode("an answer of some words")
    assert changed.fingerprint == TOKENIZER.fingerprint
    told = json.loads(changed.to_tokenizer_json())
    assert (told["truncation"], told["padding"]) == (None, None)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"tokenizer_config.json": {"unk_token": "<u>", "sep_token": {"content": "<s>"}, "cls_token": None}},
            "<u><s>-",
        ),
        ({"special_tokens_map.json": {"unk_token": "<u>", "cls_token": {"content": "<c>"}}}, "<u>-<c>"),
        (  # the newer layout has all of it in one file
            {
                "special_tokens_map.json": {"unk_token": "<old>"},
                "tokenizer_config.json": {"added_tokens_decoder": {}, "unk_token": "<u>"},
            },
            "<u>--",
        ),
    ],
)
def test_a_template_may_name_every_special_token(folder: Path, files: dict[str, Any], expected: str) -> None:
    """Those that the files name; others are not there, as with transformers."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    names = ("unk_token", "sep_token", "cls_token")
    template = "".join(f"{{% if {name} is defined %}}{{{{ {name} }}}}{{% else %}}-{{% endif %}}" for name in names)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = FolderTokenizer(folder)
    assert tokenizer.encode_chat(ChatRequest.create("u")) == tokenizer._prompts.encode(expected).ids  # pyright: ignore[reportPrivateUsage]


def add_token(folder: Path, text: str, token_id: int, *, special: bool) -> None:
    parts = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    parts["added_tokens"].append({"id": token_id, "content": text, "special": special} | flags)
    (folder / "tokenizer.json").write_text(json.dumps(parts))


@pytest.mark.parametrize("special", [False, True])
def test_tokens_without_rows_are_in_no_answer(folder: Path, special: bool) -> None:
    """A prompt has them, so that it can be refused; in an answer, a draft or a grammar their texts are only text."""
    num_rows = TOKENIZER.vocab_size
    add_token(folder, "<image>", num_rows, special=special)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, num_rows]}))
    tokenizer = FolderTokenizer(folder)
    tokenizer.leave_out_ids_without_rows(num_rows)
    assert num_rows in tokenizer.encode_chat(ChatRequest.create("see <image>"))
    assert tokenizer.encode("see <image>") == TOKENIZER.encode("see <image>")
    assert tokenizer.vocab_size == num_rows
    assert num_rows not in tokenizer.eos_token_ids
    assert "<image>" not in tokenizer.to_tokenizer_json()
