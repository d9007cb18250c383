"""What a target writes: the next token is a pure function of the context, and there is one answer to each topic."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final, Literal, NamedTuple

__all__ = ["BOS", "EOS", "Context", "Language", "cut_at_stop", "to_text"]

EOS: Final = 0
BOS: Final = 1

# Characters of one to four bytes, runs of whitespace, signs; a token is at most `_TOKEN_BYTES` of them, so that words
# and characters beyond ASCII are split over tokens.
_WORDS: Final = (" ab", " be", " cab", " end", " stop", " dance", " élan", " 12", " be.", " ab,", "\nthe", " of the")
_UNITS: Final = (
    *_WORDS,
    *("a", "é", "日", "本", " 😀", "😀", " ", "  ", "   ", "\n", "\n\n", ".", ",", "stop", " STOP", "3", "\n ab"),
)
# What is written where a context is no beginning of the answer: seen at once when it is shown.
_FOREIGN_UNITS: Final = (" xy", "x", "ü", " Xü", "X.", " zz", "語", " ")
_TOKEN_BYTES: Final = 4
_PIECE: Final = re.compile(r" ?[^\W_]+|\n+|[^\S\n]+|.", re.DOTALL)
_LONGEST_FOREIGN: Final = 60  # bytes more than the answer, where a foreign context ends


class Context(NamedTuple):
    """A prompt's topic and the answer's token ids so far."""

    topic: str
    ids: tuple[int, ...]


class Language:
    """A vocabulary and the answers of a model, drawn from a seed.

    `by`: "text", the next token depends on the text so far, however it was cut into tokens; "ids", it depends on the
    token ids, so the same text in other tokens is another context.
    """

    def __init__(self, seed: int, *, by: Literal["text", "ids"] = "text", longest: int = 30) -> None:
        self._seed = seed
        self._by = by
        self._longest = longest
        self._bytes: list[bytes] = [b"", b""]
        self._is_control: list[bool] = [True, True]
        self._ids: dict[bytes, int] = {}
        self._controls: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._answers: dict[str, tuple[str, bytes, list[int], dict[int, int]]] = {}

    # ------------------------------------------------------------------------------------------ tokens

    def id_of(self, data: bytes) -> int:
        """The id of a token of the answer."""
        if data not in self._ids:
            self._ids[data] = self._add(data, is_control=False)
        return self._ids[data]

    def control_id(self, name: str) -> int:
        """The id of a token that has no text: a word of the prompt."""
        if name not in self._controls:
            self._controls[name] = self._add(b"", is_control=True)
            self._names[self._controls[name]] = name
        return self._controls[name]

    def _add(self, data: bytes, *, is_control: bool) -> int:
        self._bytes.append(data)
        self._is_control.append(is_control)
        return len(self._bytes) - 1

    def control_name(self, token_id: int) -> str:
        """The word of the prompt that a control token stands for."""
        return self._names.get(token_id, "")

    def is_control(self, token_id: int) -> bool:
        return self._is_control[token_id]

    def knows(self, token_id: object) -> bool:
        return type(token_id) is int and 0 <= token_id < len(self._bytes)

    def data(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes[i] for i in token_ids)

    def encode(self, text: str) -> list[int]:
        return [self.id_of(data) for piece in _PIECE.findall(text) for data in _chunks(piece)]

    # ------------------------------------------------------------------------------------------ answers

    def answer(self, topic: str) -> str:
        """The whole answer to a topic."""
        return self._known(topic)[0]

    def answer_ids(self, topic: str) -> list[int]:
        """The same in the target's own tokens."""
        return self._known(topic)[2]

    def _known(self, topic: str) -> tuple[str, bytes, list[int], dict[int, int]]:
        if topic not in self._answers:
            rng = random.Random(f"{self._seed} {topic}")  # noqa: S311 - reproducible answers, no secret
            units: list[str] = []
            wordy = rng.choice((0.0, 0.6, 0.9))  # where words are few, an answer has few places to go on from
            size = rng.randint(1, self._longest)
            while len(units) < size:
                if len(units) > 6 and rng.random() < 0.2:
                    start = rng.randrange(len(units) - 4)
                    units += units[start : start + rng.randint(3, 6)]
                else:
                    units.append(rng.choice(_WORDS if rng.random() < wordy else _UNITS))
            text = "".join(units)
            tokens = [data for piece in _PIECE.findall(text) for data in _own_chunks(piece, rng)]
            starts, ids, at = dict[int, int](), list[int](), 0
            for data in tokens:
                starts[at] = len(ids)
                ids.append(self.id_of(data))
                at += len(data)
            self._answers[topic] = (text, text.encode(), ids, starts)
        return self._answers[topic]

    # ------------------------------------------------------------------------------------------ next tokens

    def candidates(self, context: Context) -> list[tuple[int, float]]:
        """Tokens that may come next and their logits, the likeliest first; EOS is one of them."""
        own = self._next(context)
        digest = self._hash("others", context)
        partial = _missing(self.data(context.ids))
        others = [_UNITS[(digest >> shift) % len(_UNITS)] for shift in (0, 8, 16)]
        found = {own: 4.0}
        for rank, unit in enumerate(others):
            data = partial if partial else unit.encode()[:_TOKEN_BYTES]
            found.setdefault(self.id_of(data), 2.5 - 0.5 * rank)
        if not partial:
            found.setdefault(EOS, 0.5)
        return sorted(found.items(), key=lambda item: -item[1])

    def logits(self, context: Context, bias: Mapping[int, float]) -> list[tuple[int, float]]:
        """The same under a logit bias, which may bring in any token."""
        if not bias:
            return self.candidates(context)
        found = dict(self.candidates(context))
        for token_id, value in bias.items():
            if self.knows(token_id):
                found[token_id] = found.get(token_id, -9.0) + value
        return sorted(found.items(), key=lambda item: -item[1])

    def _next(self, context: Context) -> int:
        _, answer, ids, starts = self._known(context.topic)
        data = self.data(context.ids)
        if self._by == "ids":
            length = len(context.ids)
            if tuple(ids[:length]) == context.ids:
                return ids[length] if length < len(ids) else EOS
            return self._foreign(context, data)
        if not answer.startswith(data):
            return self._foreign(context, data)
        if len(data) == len(answer):
            return EOS
        at = len(data)
        if at in starts:
            return ids[starts[at]]
        start = max(s for s in starts if s < at)
        return self.id_of(self._bytes[ids[starts[start]]][at - start :])

    def _foreign(self, context: Context, data: bytes) -> int:
        missing = _missing(data)
        if missing:
            return self.id_of(missing)
        digest = self._hash("foreign", context)
        if digest % 11 == 0 or len(data) > _LONGEST_FOREIGN + len(self._known(context.topic)[1]):
            return EOS
        return self.id_of(_FOREIGN_UNITS[(digest >> 8) % len(_FOREIGN_UNITS)].encode()[:_TOKEN_BYTES])

    def _hash(self, purpose: str, context: Context) -> int:
        seen = self.data(context.ids) if self._by == "text" else repr(context.ids).encode()
        key = f"{self._seed} {purpose} {context.topic} ".encode() + seen
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")

    def greedy(self, context: Context, bias: Mapping[int, float]) -> int:
        return self.logits(context, bias)[0][0] if bias else self._next(context)

    def sample(
        self,
        context: Context,
        rng: random.Random,
        temperature: float,
        top_k: int | None,
        bias: Mapping[int, float],
    ) -> int:
        rows = self.logits(context, bias)[:top_k]
        weights = [math.exp((logit - rows[0][1]) / temperature) for _, logit in rows]
        return rng.choices([token_id for token_id, _ in rows], weights)[0]


def _chunks(piece: str) -> list[bytes]:
    """The tokens of a piece of text."""
    data = piece.encode()
    size = _TOKEN_BYTES if data.isascii() else 2
    return [data[i : i + size] for i in range(0, len(data), size)]


def _own_chunks(piece: str, rng: random.Random) -> list[bytes]:
    """Those that the model chooses itself: now and then one is cut in two."""
    out: list[bytes] = []
    for data in _chunks(piece):
        cut = rng.randrange(len(data)) if rng.random() < 0.1 else 0
        out += [data[:cut], data[cut:]] if cut else [data]
    return out


def _missing(data: bytes) -> bytes:
    """What completes the character that the bytes end within; nothing if they end with one."""
    for back in range(1, min(4, len(data) + 1)):
        lead = data[-back]
        if lead < 0x80:
            return b""
        if lead >= 0xC0:
            length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return _completion(data[-back:], length) if length > back else b""
    return b""


def _completion(begun: bytes, length: int) -> bytes:
    for unit in (*_UNITS, *_FOREIGN_UNITS):
        for character in unit:
            whole = character.encode()
            if len(whole) == length and whole.startswith(begun):
                return whole[len(begun) :]
    return b"\x98" * (length - len(begun))


def to_text(data: bytes) -> str:
    """Bytes as text, without a character that is not complete."""
    return data.decode(errors="ignore")


def cut_at_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where a text ends for stop strings: the one that is complete first wins, the longest of those."""
    found = min(((at + len(s), at) for s in stop if (at := text.find(s)) >= 0), default=None)
    return None if found is None else found[1]
