"""Answers of servers with one value exchanged; `benchmarks/upstream_fuzz.py` tries 100,000 of them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from support.serving import HANGS_S
from upstream_answers import LONG, MISSING, ROUTES, Base, Case, make_case
from upstream_messages_oracle import expect_messages
from upstream_oracle import Expectation, RequestSize, expect

FUZZ: Final = Path(__file__).parents[2] / "benchmarks" / "upstream_fuzz.py"
BASES: Final = {base.name: base for route in ROUTES for base in route.bases}
SIZE: Final = RequestSize(text=20, request=200)

PLANTED: Final = {
    # as somebody might write it to be robust: chunks that cannot be read are passed over
    "an answer in place of an error": """
from llm_spec.kit.openai_chat import ChunkReader

read_chunk = ChunkReader.read_chunk

def read_or_skip(self, chunk):
    try:
        return read_chunk(self, chunk)
    except Exception:
        return []

ChunkReader.read_chunk = read_or_skip
""",
    # what is told of tokens is passed over
    "tokens are charged in place of": """
from llm_spec.kit import openai_chat

openai_chat.parse_usage = lambda chunk: None
""",
}


def fuzz(*options: str, timeout_s: float = 4 * HANGS_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FUZZ), *options], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_every_answer_is_read_as_the_oracle_says() -> None:
    """The answer, an error, and the tokens that the budget loses."""
    done = fuzz("--answers", "500", "--seed", "3", "--slots", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "500 answers in" in done.stdout


@pytest.mark.slow
def test_every_one_of_many_answers_is_read_as_the_oracle_says() -> None:
    done = fuzz("--answers", "20000", "--seed", "4", timeout_s=30 * HANGS_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("found", PLANTED)
def test_a_planted_fault_is_found(found: str, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLANTED[found])
    done = fuzz("--answers", "250", "--seed", "3", "--slots", "6", "--plugin", str(plugin))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f" {found} " in done.stdout, done.stdout


# ------------------------------------------------------------------------------------------ the oracle itself


def read_base(base: Base, *, is_streamed: bool) -> Expectation:
    answer: Any = list(base.events) if is_streamed else base.whole
    if base.dialect == "messages":
        names = [event["type"] for event in base.events]
        return expect_messages(answer, names=names, is_streamed=is_streamed, status=200, size=SIZE)
    return ask_oracle(answer, is_streamed=is_streamed, num_choices=len(base.whole["choices"]))


def ask_oracle(answer: Any, *, is_streamed: bool = False, has_done: bool = True, num_choices: int = 1) -> Expectation:
    return expect(answer, is_streamed=is_streamed, has_done=has_done, status=200, num_choices=num_choices, size=SIZE)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", [name for name, base in BASES.items() if base.finish != "error"])
def test_the_oracle_reads_what_is_not_exchanged(name: str, is_streamed: bool) -> None:
    base: Base = BASES[name]
    expected = read_base(base, is_streamed=is_streamed)
    assert expected.verdict == "answer", expected.why
    choice = expected.choices[0]
    assert (choice.texts[0], choice.reasoning) == (base.text, base.reasoning)
    assert tuple((call.name, call.arguments[0]) for call in choice.calls) == base.calls
    words = {"tool_calls": "calls", "content_filter": "filter", "refusal": "filter"}
    assert words.get(base.finish, base.finish) in choice.finishes


def answer_with(**fields: Any) -> dict[str, Any]:
    """A short answer; a field with MISSING is left out."""
    message = {"role": "assistant", "content": "Yes."}
    answer = {"id": "1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": None}
    for name, value in fields.items():
        place: dict[str, Any] = message if name in ("content", "tool_calls", "refusal", "role") else answer
        place = answer["choices"][0] if name in ("index", "message", "finish_reason") else place  # type: ignore[index,assignment]
        place[name] = value
        if value is MISSING:
            del place[name]
    return answer


@pytest.mark.parametrize("value", [MISSING, None, True, 0, -1, math.nan, 10**400, "text", [], {"a": 1}])
@pytest.mark.parametrize("name", ["id", "role", "index", "created", "usage"])
def test_fields_that_nobody_needs_are_harmless(name: str, value: Any) -> None:
    if name == "index" and value is MISSING:
        value = None
    assert ask_oracle(answer_with(**{name: value})).verdict == "answer"


@pytest.mark.parametrize("value", [True, 1.5, math.nan, {"a": 1}, [1], [{"type": "text", "text": 1}]])
@pytest.mark.parametrize("name", ["content", "message", "choices", "tool_calls", "refusal"])
def test_what_cannot_be_read_is_an_error(name: str, value: Any) -> None:
    verdict = ask_oracle(answer_with(**{name: value})).verdict
    assert verdict == ("either" if name == "message" and isinstance(value, dict) else "error")


@pytest.mark.parametrize("word", ["abort", "error", "insufficient_system_resource", "", 0, [], None, MISSING])
def test_an_answer_that_failed_or_has_no_finish_reason_is_an_error(word: Any) -> None:
    assert ask_oracle(answer_with(finish_reason=word)).verdict == "error"


@pytest.mark.parametrize("word", ["text", LONG, True, 1.5, math.nan, [1], {"a": 1}])
def test_an_unknown_finish_reason_is_not_the_end_of_a_whole_answer(word: Any) -> None:
    expected = ask_oracle(answer_with(finish_reason=word))
    assert (expected.verdict, expected.choices[0].finishes) == ("incomplete", {"length"})


@pytest.mark.parametrize("count", [True, -1, 1.5, math.nan, math.inf, 10**400, 2**53 + 1, "7", None, [], {}])
def test_a_count_that_is_none_is_estimated(count: Any) -> None:
    expected = ask_oracle(answer_with(usage={"prompt_tokens": 7, "completion_tokens": count}))
    assert expected.verdict == "answer"
    assert expected.prompt.low <= 7 <= expected.prompt.high
    assert 0 < expected.completion.low < expected.completion.high < 200


def test_a_case_is_always_the_same() -> None:
    cases: list[Case] = [make_case(5, number) for number in range(200)]
    assert [case.encode() for case in cases] == [make_case(5, number).encode() for number in range(200)]
    assert len({case.encode() for case in cases}) > 150
