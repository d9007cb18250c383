"""Token ids to text that may be shown: whole characters only, never a stop string nor the beginning of one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_spec.contract.events import Origin, TextDelta
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.token_model import Tokenizer
from llm_spec.local.detokenizing import IncrementalDecoder, StopMatcher, merge_neighbouring_deltas
from llm_spec.testing import ByteTokenizer, CharTokenizer

UNDECODED = "\N{REPLACEMENT CHARACTER}"


class PieceTokenizer:
    """A vocabulary of byte strings, so that a character may begin in one token and end in another."""

    fingerprint = "pieces"
    eos_token_ids = frozenset[int]()

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in token_ids).decode(errors="replace")

    def encode_chat(self, request: ChatRequest) -> list[int]:
        raise NotImplementedError


class SpaceStrippingTokenizer(PieceTokenizer):
    """Like SentencePiece: a word brings the space before it, and a decoding drops the very first space."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids).removeprefix(" ")


def pieces_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


def bytes_in_tokens(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(borders)]


# --------------------------------------------------------------------------------- incremental decoding


@given(st.text())
def test_pieces_of_a_byte_tokenizer_join_to_the_text(text: str) -> None:
    """Byte by byte, the pieces joined are the text."""
    tokenizer = ByteTokenizer()
    assert "".join(pieces_of(tokenizer, tokenizer.encode(text))) == text


@given(st.binary(max_size=60))
def test_pieces_of_any_bytes_join_to_the_decoding_of_the_whole(data: bytes) -> None:
    """Invalid bytes come out as in one decoding of the whole."""
    assert "".join(pieces_of(ByteTokenizer(), list(data))) == data.decode(errors="replace")


@given(
    st.lists(st.sampled_from(["a", "é", "€", "😀", UNDECODED, b"\x80", b"\xf0\x9f", b"\xc3", b"\xff"]), max_size=20),
    st.lists(st.integers(0, 100), max_size=20),
)
def test_pieces_join_wherever_tokens_cut_characters(parts: list[str | bytes], cuts: list[int]) -> None:
    """Tokens of several bytes that cut characters anywhere still join to the decoding of the whole."""
    data = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    pieces = bytes_in_tokens(data, cuts)
    assert "".join(pieces_of(PieceTokenizer(pieces), range(len(pieces)))) == data.decode(errors="replace")


@pytest.mark.parametrize("text", [f"{UNDECODED * 2}😀", f"{UNDECODED * 5}é", UNDECODED * 9])
def test_replacement_characters_in_the_text_are_text(text: str) -> None:
    """A model that writes U+FFFD itself loses no character after it."""
    assert "".join(pieces_of(ByteTokenizer(), list(text.encode()))) == text


def test_a_run_of_invalid_bytes_does_not_break_the_character_after_it() -> None:
    """However many undecodable bytes came before, a character that follows is whole."""
    data = b"\x80" * 6 + "😀".encode()
    assert "".join(pieces_of(ByteTokenizer(), list(data))) == data.decode(errors="replace")


@given(st.text(st.characters(exclude_characters=UNDECODED, exclude_categories=["Cs"])), st.lists(st.integers(0, 100)))
def test_no_piece_holds_half_a_character(text: str, cuts: list[int]) -> None:
    """Of valid text, no piece shows a replacement character and each is a stretch of whole characters."""
    pieces = bytes_in_tokens(text.encode(), cuts)
    shown = pieces_of(PieceTokenizer(pieces), range(len(pieces)))
    assert UNDECODED not in "".join(shown)
    assert "".join(shown) == text


def test_a_character_comes_with_its_last_token() -> None:
    """Nothing of a character is shown before its last byte, and all of it then."""
    assert pieces_of(ByteTokenizer(), list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


def test_flush_shows_an_unfinished_character_as_undecodable() -> None:
    """An answer that ends inside a character ends with U+FFFD."""
    assert pieces_of(ByteTokenizer(), list("a😀".encode())[:-1]) == ["a", "", "", "", UNDECODED]


def test_flush_after_whole_characters_is_empty() -> None:
    """Nothing is shown twice."""
    assert pieces_of(CharTokenizer("ab"), [0, 1, 0]) == ["a", "b", "a", ""]


def test_invalid_bytes_are_not_held_forever() -> None:
    """A model that writes nothing but invalid bytes still shows something within a few tokens."""
    decoder = IncrementalDecoder(ByteTokenizer())
    assert any(decoder.push(0x80) for _ in range(12))


@given(st.lists(st.integers(0, 3)))
def test_leading_spaces_come_out_as_in_one_decoding(token_ids: list[int]) -> None:
    """Where a decoding drops its first space, the spaces between pieces are kept."""
    tokenizer = SpaceStrippingTokenizer([b" the", b" cat", b"s", b" "])
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(st.lists(st.integers(0, 3)))
def test_control_tokens_between_words_change_no_text(token_ids: list[int]) -> None:
    """A token without text (control tokens are left out) does not cost the next word its space."""
    tokenizer = SpaceStrippingTokenizer([b" the", b" cat", b"s", b""])
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


# ----------------------------------------------------------------------------------------- stop strings


def matched_text(stop: Sequence[str], pieces: Sequence[str]) -> str:
    matcher = StopMatcher(stop)
    deltas = [delta for piece in pieces for delta in matcher.push(piece)]
    return "".join(delta.text for delta in [*deltas, *matcher.flush()])


def in_pieces(text: str, cuts: Sequence[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(borders)]


TEXTS = st.text("ab", max_size=30)
CUTS = st.lists(st.integers(0, 100), max_size=30)


@given(TEXTS, st.text("ab", min_size=1, max_size=4), CUTS)
def test_text_ends_where_the_stop_string_begins(text: str, stop: str, cuts: list[int]) -> None:
    """However the text is cut into pieces, what comes out is all of it up to the stop string."""
    assert matched_text([stop], in_pieces(text, cuts)) == text.split(stop, maxsplit=1)[0]


@given(TEXTS, st.text("ab", min_size=1, max_size=4), CUTS)
def test_what_is_shown_is_never_taken_back(text: str, stop: str, cuts: list[int]) -> None:
    """At every moment the text shown is a beginning of what the whole answer shows."""
    matcher, shown = StopMatcher([stop]), ""
    for piece in in_pieces(text, cuts):
        shown += "".join(delta.text for delta in matcher.push(piece))
        assert text.split(stop, maxsplit=1)[0].startswith(shown)


@given(TEXTS, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), CUTS)
def test_of_several_stop_strings_none_is_ever_shown(text: str, stop: list[str], cuts: list[int]) -> None:
    """No stop string is in the output, the output is a beginning of the text, and without a match it is all of it."""
    shown = matched_text(stop, in_pieces(text, cuts))
    assert not any(s in shown for s in stop)
    assert text.startswith(shown)
    if not any(s in text for s in stop):
        assert shown == text


@given(TEXTS, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), CUTS)
def test_of_several_stop_strings_the_one_that_is_complete_first_wins(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    """The output ends where the first complete stop string begins, however the text is cut into tokens."""
    matches = ((at + len(s), at) for s in stop if (at := text.find(s)) >= 0)
    begins = min(matches, default=(len(text), len(text)))[1]
    assert matched_text(stop, in_pieces(text, cuts)) == text[:begins]


def test_a_stop_string_inside_another() -> None:
    """`bc` is complete before `abcd` is: the outcome must not depend on token borders."""
    assert matched_text(["abcd", "bc"], ["xabcd"]) == matched_text(["abcd", "bc"], list("xabcd")) == "xa"


def test_a_stop_string_within_one_piece() -> None:
    """What stands before it in the piece comes out, what stands after it does not."""
    matcher = StopMatcher(["STOP"])
    assert matcher.push("one STOP two") == [TextDelta("one ")]
    assert matcher.matched == "STOP"


def test_a_stop_string_across_pieces_is_held_back_until_it_is_decided() -> None:
    """The beginning of a stop string is not shown until it has turned out to be none."""
    matcher = StopMatcher(["STOP"])
    assert matcher.push("one ST") == [TextDelta("one ")]
    assert matcher.push("O") == []
    assert "".join(delta.text for delta in matcher.push("RE")) == "STORE"
    assert matcher.matched is None


def test_overlapping_candidates() -> None:
    """`aab` is found in `aaab`, where the first candidate fails and the second does not."""
    assert matched_text(["aab"], list("aaab")) == matched_text(["aab"], ["aaab"]) == "a"


def test_flush_shows_a_beginning_that_came_to_nothing() -> None:
    """An answer that ends with the beginning of a stop string ends with just that."""
    matcher = StopMatcher(["STOP"])
    assert matcher.push("one STO") == [TextDelta("one ")]
    assert matcher.flush() == [TextDelta("STO")]
    assert matcher.flush() == []


def test_nothing_comes_out_after_a_match() -> None:
    """Neither a push nor the flush shows anything after a stop string."""
    matcher = StopMatcher(["x"])
    assert matcher.push("ax") == [TextDelta("a")]
    assert matcher.push("more") == []
    assert matcher.flush() == []


def test_without_stop_strings_everything_passes_at_once() -> None:
    """Text is held back for stop strings alone."""
    matcher = StopMatcher([])
    assert matcher.push("text", "bonus") == [TextDelta("text", "bonus")]
    assert matcher.flush() == []


@given(st.lists(st.tuples(st.text("ab", max_size=4), st.sampled_from(["plain", "accepted", "correction", "bonus"]))))
def test_origins_survive_being_held_back(pieces: list[tuple[str, Origin]]) -> None:
    """Each character comes out with the origin that it went in with."""
    matcher = StopMatcher(["aab", "bbb"])
    out = [delta for text, origin in pieces for delta in matcher.push(text, origin)] + matcher.flush()
    went_in = [(character, origin) for text, origin in pieces for character in text]
    came_out = [(character, delta.origin) for delta in out for character in delta.text]
    assert came_out == went_in[: len(came_out)]


def test_neighbours_of_one_origin_are_joined() -> None:
    """Merging joins what belongs together and keeps order and origins."""
    deltas = [
        TextDelta("a", "accepted"),
        TextDelta("b", "accepted"),
        TextDelta("c", "bonus"),
        TextDelta("d", "accepted"),
    ]
    assert merge_neighbouring_deltas(deltas) == [
        TextDelta("ab", "accepted"),
        TextDelta("c", "bonus"),
        TextDelta("d", "accepted"),
    ]
