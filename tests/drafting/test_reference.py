"""Given texts as drafts, by token and by piece of text."""

from __future__ import annotations

from support.draft_checks import PROMPT, TARGET, choose, pieces_of, proposed

from llm_spec import (
    ChatRequest,
    ReferenceDraft,
)

# ------------------------------------------------------------------------------------------ given text


def test_a_given_text_goes_straight_on() -> None:
    """From its beginning, and from where the answer stands."""
    assert proposed(ReferenceDraft("naïve text"), "") == "naïve t"
    assert proposed(ReferenceDraft("naïve text"), "naïve") == " text"
    assert proposed(ReferenceDraft("naïve text"), "naïve text") == ""


def test_a_given_text_goes_on_behind_a_difference() -> None:
    """After the answer has left it, behind the longest match."""
    assert proposed(ReferenceDraft("the cat sat on the mat"), "the dog sat on", 4) == " the"


async def test_a_given_text_drafts_text_too() -> None:
    """In pieces, continuing a prefix, at most as many as asked for."""
    request = ChatRequest.create("x", prefix="one two")
    pieces = await pieces_of(ReferenceDraft("one two three four five"), request, 2)
    assert "".join(piece.text for piece in pieces) == " three four"


def test_one_draft_serves_several_requests() -> None:
    """What was proposed to one request does not move another's place."""
    given_text = ReferenceDraft("abcdef")
    first = given_text.open_token_draft(TARGET, choose, PROMPT)
    second = given_text.open_token_draft(TARGET, choose, PROMPT)
    assert next(first.propose([*PROMPT, *b"abc"])).token_id == ord("d")
    assert next(second.propose([*PROMPT])).token_id == ord("a")
    assert next(first.propose([*PROMPT, *b"abcd"])).token_id == ord("e")
