"""Files of prompts: every format is read, and what cannot be read is one error with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_spec.cli.bench.prompts import BenchPrompt, get_default_prompts, load_prompts, prompt_from_text, sample_prompts
from llm_spec.contract.errors import InvalidRequestError


def read(tmp_path: Path, text: str) -> list[BenchPrompt]:
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8")
    return load_prompts(str(path))


def say(prompt: BenchPrompt) -> list[list[tuple[str, str]]]:
    return [[(message.role, message.text) for message in turn] for turn in prompt.turns]


def test_a_prompt(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, '{"prompt": "Hello", "category": "open", "id": "p1"}\n')
    assert (prompt.id, prompt.category) == ("p1", "open")
    assert say(prompt) == [[("user", "Hello")]]


def test_messages_are_one_turn(tmp_path: Path) -> None:
    """An answer at their end, as files for fine-tuning have it, is not part of the prompt."""
    messages = [{"role": r, "content": t} for r, t in (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"))]
    (prompt,) = read(tmp_path, json.dumps({"messages": messages}))
    assert say(prompt) == [[("system", "Be brief."), ("user", "Hello")]]
    assert prompt.category is None


def test_a_question_of_spec_bench(tmp_path: Path) -> None:
    question = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."], "reference": ["x"]}
    (prompt,) = read(tmp_path, json.dumps(question))
    assert (prompt.id, prompt.category) == ("81", "writing")
    assert say(prompt) == [[("user", "Write.")], [("user", "Rewrite.")]]


SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "One"}, {"from": "gpt", "value": "1"}]},
    {"id": "empty", "conversations": []},
    {"id": "no human", "conversations": [{"from": "gpt", "value": "1"}]},
    {"id": "b", "conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "Two"}] * 2},
    {"conversations": [{"role": "user", "content": "Three"}]},
]


@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt(tmp_path: Path, indent: int | None) -> None:
    """What the human said is the turns; a record in which no human speaks is left out."""
    prompts = read(tmp_path, json.dumps(SHAREGPT, indent=indent))
    assert [prompt.id for prompt in prompts] == ["a", "b", "3"]
    assert [say(prompt) for prompt in prompts] == [
        [[("user", "One")]],
        [[("user", "Two")], [("user", "Two")]],
        [[("user", "Three")]],
    ]


def test_lines_that_are_blank_and_separators_inside_texts(tmp_path: Path) -> None:
    """A line ends at a line feed alone; a byte-order mark is no text."""
    prompts = read(tmp_path, '\ufeff\n{"prompt": "a\u2028b"}\r\n\n{"prompt": "c"}')
    assert [say(prompt)[0][0][1] for prompt in prompts] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": ', ["line 2", "not valid JSON"]),
        ('{"prompt": "a"}\n\n["a"]', ["line 3", "['a']", "not a JSON object"]),
        ('{"prompt": ""}', ["line 1", "prompt is ''"]),
        ('{"prompt": 5}', ["line 1", "prompt is 5"]),
        ('{"turns": []}', ["line 1", "turns is []"]),
        ('{"turns": ["a", 1]}', ["line 1", "turns is 1"]),
        ('{"turns": "a"}', ["line 1", "turns is 'a'"]),
        ('{"messages": [{"role": "nobody", "content": "a"}]}', ["line 1", "'nobody'"]),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ["line 1", "has only answers"]),
        ('{"question": "a"}', ["line 1", "'prompt', 'messages'", "['question']"]),
        ('{"conversations": [{"from": "human"}]}', ["line 1", "{'from': 'human'}"]),
        ('{"conversations": "a"}', ["line 1", "conversations is 'a'"]),
        ('[\n {"prompt": "a"},\n {"prompt": 5}\n]', ["line 3", "prompt is 5"]),
        ('[\n {"prompt": "a"},\n {"prompt": }\n]', ["line 3", "not valid JSON"]),
        ('[\n {"prompt": "a"}\n {"prompt": "b"}]', ["after the item of line 2"]),
        ('[{"prompt": "a"}', ["after the item of line 1"]),
        ("", ["no prompts"]),
        ("[]", ["no prompts"]),
        (json.dumps(SHAREGPT[1:3]), ["no prompts"]),
    ],
)
def test_bad_data(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(tmp_path, text)
    assert [word for word in ["data.jsonl", *words] if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"data\.jsonl cannot be read"):
        load_prompts(str(path))


def test_some_prompts_are_drawn_by_the_seed() -> None:
    """In their order; all of them where there are no more, and so many turns of each."""
    prompts = [prompt_from_text(f"prompt {number}", number) for number in range(20)]
    drawn = [sample_prompts(prompts, seed=seed, num_prompts=5) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [prompts.index(prompt) for prompt in drawn[0]] == sorted(prompts.index(prompt) for prompt in drawn[0])
    assert sample_prompts(prompts, seed=1, num_prompts=50) == prompts
    conversation = BenchPrompt(id="c", turns=prompts[0].turns * 3)
    assert [len(p.turns) for p in sample_prompts([conversation], seed=1, max_turns=2)] == [2]


@pytest.mark.parametrize("target", ["builtin:target", "vllm:x@http://localhost/v1"])
def test_the_packages_own_prompts(target: str) -> None:
    """Of several categories, each prompt once; chat for chat models, code for the built-in ones."""
    prompts: list[Any] = get_default_prompts(target)
    assert len({prompt.id for prompt in prompts}) == len({prompt.turns for prompt in prompts}) == len(prompts) >= 12
    assert len({prompt.category for prompt in prompts}) >= 3
    assert (prompts[0].turns[0][0].text.startswith("def ")) == (target == "builtin:target")
