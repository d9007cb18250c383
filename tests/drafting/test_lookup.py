"""Prompt lookup: what followed the same words before, by token and by piece of text."""

from __future__ import annotations

from typing import Any

import pytest
from support.draft_checks import pieces_of, proposed

from llm_spec import (
    ChatRequest,
    ConfigError,
    PromptLookup,
)
from llm_spec.testing import ByteTokenizer

# --------------------------------------------------------------------------------------- prompt lookup


def test_lookup_copies_what_followed_the_same_words() -> None:
    """In the prompt, behind the longest match with the answer's end."""
    prompt = ByteTokenizer().encode_chat(ChatRequest.create("one two three four"))
    assert proposed(PromptLookup(), "two th", 4, prompt) == "ree "


def test_lookup_copies_from_the_answer_too() -> None:
    """The conversation so far includes the answer."""
    assert proposed(PromptLookup(), "lorem ipsum dolor; lorem ip", 6) == "sum do"


def test_lookup_goes_on_with_a_repetition() -> None:
    """Where what is copied reaches the answer's end, it is followed by its own beginning."""
    assert proposed(PromptLookup(), "=-=-=-", 8) == "=-=-=-=-"


def test_lookup_without_a_match_proposes_nothing() -> None:
    """Fewer matching items than `min_ngram` are no match."""
    assert proposed(PromptLookup(min_ngram=3), "zq") == ""


async def test_lookup_drafts_text_too() -> None:
    """Pieces of the messages, continuing the prefix, never more than asked for, with an end."""
    request = ChatRequest.create("the quick brown fox jumps", prefix="see the quick")
    pieces = await pieces_of(PromptLookup(min_ngram=1), request, 2)
    assert "".join(piece.text for piece in pieces) == " brown fox"
    assert pieces[-1].finish_reason is not None


@pytest.mark.parametrize(
    "options", [{"min_ngram": 0}, {"max_ngram": 1}, {"min_ngram": 5, "max_ngram": 4}, {"max_ngram": 2.5}]
)
def test_lookup_refuses_bad_lengths(options: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(ConfigError, match="_ngram is"):
        PromptLookup(**{"min_ngram": 2, **options})
