"""Pieces of text, their number and the last of them; and what is a piece of a draft."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_spec import ChatRequest, DraftError, Usage
from llm_spec.contract.draft import DraftPiece
from llm_spec.measure import tokens as text_pieces
from llm_spec.measure.tokens import (
    check_draft_piece,
    count_pieces,
    count_prompt_pieces,
    split_into_pieces,
    take_last_pieces,
)


@given(st.text())
def test_pieces_joined_are_the_text(text: str) -> None:
    """Cutting loses nothing, and no piece is empty."""
    pieces = split_into_pieces(text)
    assert "".join(pieces) == text
    assert all(pieces)


def test_pieces_are_about_what_tokens_are() -> None:
    """A word with its space, a newline, a sign."""
    assert split_into_pieces("Hello, big world!\n  x=1") == [
        "Hello",
        ",",
        " big",
        " world",
        "!",
        "\n",
        "  ",
        "x",
        "=",
        "1",
    ]


@settings(max_examples=300)
@given(st.text("ab \n.", max_size=40), st.integers(1, 5), st.integers(0, 200))
def test_the_last_pieces_are_those_of_the_whole_text(end: str, num_pieces: int, num_before: int) -> None:
    """Wherever the part of the text begins that is cut into pieces."""
    for before in ("word " * num_before, " " * num_before, "a" * num_before, "\n, " * num_before):
        text = before + end
        assert take_last_pieces(text, num_pieces) == split_into_pieces(text)[-num_pieces:]


def test_a_short_text_is_counted() -> None:
    """Exactly, and message by message."""
    assert count_pieces("one two, three\n") == 5
    messages = [{"role": "user", "content": text} for text in ("one ", "two", "")]
    assert count_prompt_pieces(ChatRequest.create(messages, prefix="not this")) == 3


@pytest.mark.parametrize("num_words", [5_000, 50_000])
def test_a_long_text_is_estimated(num_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a part of it that does not grow with it, within some per cent, also where one half is unlike the other."""
    rng = random.Random(1)  # noqa: S311 - a repeatable text
    prose = " ".join("x" * rng.randint(1, 9) for _ in range(num_words))
    text = prose + "".join(f"f({n}, [{n}]);\n" for n in range(num_words // 4))
    request = ChatRequest.create([{"role": "user", "content": part} for part in (prose, text[len(prose) :])])
    num_pieces = len(split_into_pieces(text))
    num_cut = 0

    def counting(part: str) -> list[str]:
        nonlocal num_cut
        num_cut += len(part)
        return split_into_pieces(part)

    monkeypatch.setattr(text_pieces, "split_into_pieces", counting)
    assert count_pieces(text) == count_prompt_pieces(request) == pytest.approx(num_pieces, rel=0.05)
    assert num_cut <= 2 * 16_384


@pytest.mark.parametrize(
    ("item", "match"),
    [
        (None, "type NoneType; it must give DraftPiece"),
        (b"text", "type bytes; it must give DraftPiece"),
        (("text", None, None, None), "type tuple; it must give DraftPiece"),
        (DraftPiece(None), "text of a drafted piece is of type NoneType"),  # type: ignore[arg-type]
        (DraftPiece(b"text"), "text of a drafted piece is of type bytes"),  # type: ignore[arg-type]
        (DraftPiece("text", 5), "token_ids"),  # type: ignore[arg-type]
        (DraftPiece("text", ("5",)), "token_ids"),  # type: ignore[arg-type]
        (DraftPiece("text", (1.5,)), "token_ids"),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_a_piece_is_refused(item: Any, match: str) -> None:
    """The error says what it should be."""
    with pytest.raises(DraftError, match=match):
        check_draft_piece(item)


@pytest.mark.parametrize(
    "usage",
    [
        {"tokens": 5},
        5,
        "many",
        Usage(output_tokens=-5000),
        Usage(input_tokens=-1, output_tokens=3),
        Usage(output_tokens=2.5),  # type: ignore[arg-type]
        Usage(output_tokens=float("nan")),  # type: ignore[arg-type]
        Usage(input_tokens=None),  # type: ignore[arg-type]
        Usage(input_tokens=True),
    ],
)
def test_a_usage_that_cannot_be_added_up_is_as_good_as_none(usage: Any) -> None:
    piece = DraftPiece("text", (1, 2), "stop", usage)
    assert check_draft_piece(piece) == DraftPiece("text", (1, 2), "stop")
    told = piece._replace(usage=Usage(output_tokens=2))
    assert check_draft_piece(told) is told
