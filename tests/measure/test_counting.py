"""How many tokens something has where nobody counted them, and cutting what is more than was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from llm_spec import ChatRequest, SpeculativeConfig, SpeculativeDecoder, TextDelta
from llm_spec.contract.events import Finish, ReasoningDelta, StreamEvent, ToolCallDelta
from llm_spec.contract.provider import Capabilities
from llm_spec.measure.tokens import MaxTokensCutter, count_answer_tokens_in_event, estimate_request_tokens
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual

IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}


def parts(*others: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "one two three"}, *others]}]


@pytest.mark.parametrize(
    ("messages", "options", "low", "high"),
    [
        ("one two three", {}, 3, 3),
        ("的" * 1000, {}, 750, 750),
        ("x" * 10_000, {}, 2500, 2500),
        ("(((" * 1000, {}, 3000, 3000),
        (parts(IMAGE), {}, 500, 3000),
        (parts(IMAGE, IMAGE), {}, 1000, 6000),
        (parts({"type": "file", "file": {"file_data": "A" * 4000}}), {}, 1000, 1100),
        ("hi", {"tools": [{"type": "function", "function": {"name": "f", "description": "word " * 200}}]}, 250, 300),
        ("hi", {"response_format": {"type": "json_schema", "json_schema": {"a": "x" * 400}}}, 100, 150),
        ("hi", {"extra": {"documents": ["x" * 400]}}, 100, 150),
    ],
)
def test_all_that_is_sent_counts(messages: Any, options: dict[str, Any], low: int, high: int) -> None:
    """Text by its bytes at least, tools and schemas too; an image as a large one, not by its bytes."""
    assert low <= estimate_request_tokens(ChatRequest.create(messages, **options)) <= high


def test_tool_calls_of_a_conversation_count() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "x" * 400}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert estimate_request_tokens(ChatRequest.create(messages)) >= 100


@pytest.mark.parametrize(
    ("event", "number"),
    [
        (TextDelta("one two"), 2),
        (TextDelta("one "), 1),  # the space is the beginning of the next token
        (TextDelta(" "), 1),
        (TextDelta("one", token_ids=(1, 2, 3)), 3),
        (ReasoningDelta("one two"), 2),
        (ToolCallDelta(0, arguments=""), 1),
        (Finish("stop"), 0),
    ],
)
def test_what_came_counts(event: StreamEvent, number: int) -> None:
    assert count_answer_tokens_in_event(event) == number


# ------------------------------------------------------------------------------------------ the cap


def capped(texts: Sequence[str], max_tokens: int) -> str:
    """All that a cap lets through of some texts, up to where it cuts them."""
    cap, kept = MaxTokensCutter(max_tokens), ""
    for text in texts:
        delta = cap.cut_delta(TextDelta(text))
        kept += "" if delta is None else delta.text
        if delta is None or delta.text != text:
            break
    return kept


@pytest.mark.parametrize(
    "texts",
    [
        ["one two three four five"],
        ["one", " two", " three", " four", " five"],
        ["o", "n", "e", " ", "t", "w", "o", " three", " fo", "ur", " five"],
        ["one ", "two ", "three ", "four ", "five "],
    ],
)
def test_text_is_cut_behind_its_words(texts: list[str]) -> None:
    """However it is divided: what has as many words as it may is whole, what has more is cut."""
    text = "".join(texts)
    assert capped(texts, 5) == capped(texts, 500) == text
    assert capped(texts, 3).strip() == "one two three"


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [("=" * 128, 1), (" " * 128, 1), ("नमस्ते दुनिया", 2), ("https://example.org/a/b?c=d#e", 1), ("don't\n\n\nstop", 2)],
)
def test_what_may_be_so_few_tokens_is_not_cut(text: str, num_tokens: int) -> None:
    """A long run of signs may be one token, and a word of any script."""
    assert capped([text], num_tokens) == text


def test_text_without_spaces_is_cut_too() -> None:
    assert len(capped(["的" * 10_000], 10)) < 200


def test_tokens_with_ids_are_counted() -> None:
    """One at a time, so that their ids stay those of their text."""
    cap = MaxTokensCutter(2)
    deltas = [TextDelta("a b c", token_ids=(number,)) for number in range(3)]
    assert [cap.cut_delta(delta) for delta in deltas] == [deltas[0], deltas[1], None]


@pytest.mark.parametrize("config", [{}, {"max_total_tokens": 5}])
def test_a_target_that_ignores_max_tokens_is_cut(config: dict[str, Any]) -> None:
    """Its answer ends where it should have, and says so; the target is left."""
    words = [TextDelta(f"{' ' if i else ''}word{i}") for i in range(400)]
    target = ScriptedProvider([*words, Finish("stop")], delay_piece_s=0.01)
    options: dict[str, Any] = {} if config else {"max_tokens": 5}

    async def check() -> None:
        decoder = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(**config))
        result = await decoder.decode("go", **options)
        assert result.content == "word0 word1 word2 word3 word4"
        assert (result.finish_reason, result.stopped_by) == ("length", "max_total_tokens" if config else "max_tokens")
        assert asyncio.get_running_loop().time() < 1.0

    run_virtual(check())


def test_a_whole_answer_is_cut_as_a_stream_is() -> None:
    words = [TextDelta(f"{' ' if i else ''}word{i}") for i in range(400)]
    target = ScriptedProvider([*words, Finish("stop")], capabilities=Capabilities(whole_answers=True))
    pair = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(stream_always=False))
    result = run_virtual(pair.decode("go", max_tokens=2))
    assert (result.content, result.finish_reason, result.stopped_by) == ("word0 word1", "length", "max_tokens")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text", ["one two  three four five ", " a b c d e f g h", "x" * 500 + " y z", "é ü\u3000ö ä ß", "a\nb\tc " * 9]
)
def test_a_cap_cuts_at_the_same_place_however_the_text_comes(text: str, size: int) -> None:
    """Words are counted late, and all at once, where the limit is far; what is kept is the same."""
    for max_tokens in range(1, 12):
        cap, kept = MaxTokensCutter(max_tokens), ""
        for start in range(0, len(text), size):
            delta = TextDelta(text[start : start + size])
            shown = cap.cut_delta(delta)
            kept += "" if shown is None else shown.text
            if shown is not delta:
                break
        words = text.encode()[: max_tokens * 32 + 128].decode(errors="ignore").split()
        assert kept.split() == words[:max_tokens]
