"""Token ids to text that may be shown: whole characters, and no part of a stop string.

Each object holds the state of one answer and does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from llm_spec.contract.events import Origin, ReasoningDelta, StreamEvent, TextDelta, TokenLogprob
from llm_spec.contract.token_model import Tokenizer

__all__ = [
    "MAX_CHARACTER_TOKENS",
    "REPLACEMENT_CHARACTER",
    "HeldText",
    "IncrementalDecoder",
    "StopMatcher",
    "find_longest_partial_mark",
    "join_optional_logprobs",
    "list_possible_undecodable_lengths",
    "merge_neighbouring_deltas",
]

REPLACEMENT_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_TOKENS: Final = 4  # a character has at most 4 bytes, so at most 4 tokens
_MAX_HELD_TOKENS: Final = 8  # with more undecoded tokens than this, the first ones never decode


def list_possible_undecodable_lengths(num_held: int) -> range:
    """List how many of the first `num_held` tokens may be undecodable, the largest number first.

    The last tokens may begin a character, and a few tokens may all belong to one: the range is then
    empty. A prefix splits no character if its decoding is a prefix of the decoding of all tokens.
    """
    return range(num_held - MAX_CHARACTER_TOKENS + 1, 0, -1) if num_held > _MAX_HELD_TOKENS else range(0)


class IncrementalDecoder:
    """Decodes ids one by one, and holds back the bytes of an incomplete UTF-8 character.

    Each piece is the difference between two decodings that begin at the same earlier token. So
    tokenizers whose text for an id depends on its neighbour (leading spaces) give the same text as
    one decoding of the whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown_end: list[int] = []  # the tokens of the last piece: context for the next
        self._shown_text = ""  # the decoding of these tokens alone
        self._held: list[int] = []

    @property
    def num_held_tokens(self) -> int:
        """The number of last tokens whose text is held back."""
        return len(self._held)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is complete now."""
        self._held.append(token_id)
        text = self._tokenizer.decode(self._shown_end + self._held)
        if not text.endswith(REPLACEMENT_CHARACTER):
            return self._release_tokens(text, len(self._held))
        return self._release_undecodable(text)

    def flush(self) -> str:
        """Return what is still held back, undecodable bytes as U+FFFD."""
        return self._release_tokens(self._tokenizer.decode(self._shown_end + self._held), len(self._held))

    def _release_tokens(self, text: str, num_tokens: int) -> str:
        """Release the first held tokens.

        `text` is their decoding together with the tokens before them.
        """
        new_text = text[len(self._shown_text) :]
        # a token without text (a control token) is no context by itself
        self._shown_end = self._held[:num_tokens] if new_text else self._shown_end + self._held[:num_tokens]
        self._shown_text = self._tokenizer.decode(self._shown_end) if new_text else text
        del self._held[:num_tokens]
        return new_text

    def _release_undecodable(self, text: str) -> str:
        """Release the first tokens that no later byte can change, and split no character."""
        for num_tokens in list_possible_undecodable_lengths(len(self._held)):
            part = self._tokenizer.decode(self._shown_end + self._held[:num_tokens])
            if text.startswith(part):
                return self._release_tokens(part, num_tokens)
        return ""


class StopMatcher:
    """Lets text through up to the first stop string; holds back a possible beginning of one.

    After `matched` is set nothing more comes out. If several stop strings occur, the one that is
    complete first wins, and of those the longest. So the outcome does not depend on how the text
    was cut.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = HeldText()
        self.matched: str | None = None

    def push(
        self,
        text: str,
        origin: Origin = "plain",
        token_ids: tuple[int, ...] | None = None,
        logprobs: tuple[TokenLogprob, ...] | None = None,
    ) -> list[TextDelta]:
        """Add text; return the pieces that may be shown now."""
        if self.matched is not None or not text:
            return []
        if not self._stop:
            return [TextDelta(text, origin, token_ids, logprobs)]
        self._held.hold_delta(TextDelta(text, origin, token_ids, logprobs))
        held_text = self._held.text
        found = min(((at + len(s), at, s) for s in self._stop if (at := held_text.find(s)) >= 0), default=None)
        if found is not None:
            _, start, self.matched = found
            return self._held.release_characters(start)
        return self._held.release_characters(len(held_text) - find_longest_partial_mark(held_text, self._stop))

    def filter_event(self, event: StreamEvent) -> Sequence[StreamEvent]:
        """Return the text that may be shown now if the event is text, else the event itself."""
        if not isinstance(event, TextDelta):
            return [event]
        return self.push(event.text, event.origin, event.token_ids, event.logprobs)

    def flush(self) -> list[TextDelta]:
        """Return what is still held back: the answer ended without completing a stop string."""
        return [] if self.matched is not None else self._held.release_characters(len(self._held.text))


class HeldText:
    """Text that is held back, in pieces that keep their origins, ids and log-probabilities."""

    def __init__(self) -> None:
        self._deltas: list[TextDelta] = []
        self.text = ""

    def hold_delta(self, delta: TextDelta) -> None:
        self._deltas.append(delta)
        self.text += delta.text

    def release_characters(self, num_characters: int) -> list[TextDelta]:
        """Release the first characters.

        If a piece is cut, its first part has the ids and log-probabilities.
        """
        return self._take_deltas_of_characters(num_characters, is_shown=True)

    def drop_characters(self, num_characters: int) -> str:
        """Remove and return the first characters.

        If a piece is cut, its rest keeps the log-probabilities.
        """
        return "".join(delta.text for delta in self._take_deltas_of_characters(num_characters, is_shown=False))

    def _take_deltas_of_characters(self, num_characters: int, *, is_shown: bool) -> list[TextDelta]:
        self.text = self.text[max(0, num_characters) :]
        out: list[TextDelta] = []
        while self._deltas and num_characters > 0:
            delta = self._deltas.pop(0)
            out.append(replace(delta, text=delta.text[:num_characters]))
            if len(delta.text) > num_characters:
                ids = None if delta.token_ids is None else ()
                logprobs = () if is_shown and delta.logprobs is not None else delta.logprobs
                self._deltas.insert(0, TextDelta(delta.text[num_characters:], delta.origin, ids, logprobs))
            num_characters -= len(delta.text)
        return out


def find_longest_partial_mark(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of a mark."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def join_optional_logprobs(
    first: tuple[TokenLogprob, ...] | None, second: tuple[TokenLogprob, ...] | None
) -> tuple[TokenLogprob, ...] | None:
    """Join the log-probabilities of two neighbouring pieces; returns None if neither has any."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def merge_neighbouring_deltas(events: Sequence[StreamEvent]) -> list[StreamEvent]:
    """Join neighbours: text of one origin, and reasoning."""
    out: list[StreamEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and event.origin == last.origin:
            out[-1] = TextDelta(
                last.text + event.text, event.origin, None, join_optional_logprobs(last.logprobs, event.logprobs)
            )
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + event.text)
        else:
            out.append(event)
    return out
