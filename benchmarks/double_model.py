"""A model that costs nothing to ask: its next word is a hash of all text before it. Pure: no clock, no I/O.

One token is a word of a made-up language, or a byte of anything else. Going on from a beginning of an answer gives the
rest of that answer, also from inside a word, and from any other ids something else: one wrong token in a prefix changes
everything behind it.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

NUM_WORDS: Final = 512  # a power of two: any odd step goes through all of them
NUM_CANDIDATES: Final = 24  # tokens that can follow; servers report 20 at most
LEAST_LOGPROB: Final = -30.0  # of all others

_SPECIAL_TOKENS: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
END_ID: Final = 256
ASSISTANT_ID: Final = 259
_FIRST_WORD_ID: Final = 260
_FIRST_OPENING_ID: Final = _FIRST_WORD_ID + NUM_WORDS  # the same words as an answer begins: capital, without a space


def _make_words() -> list[str]:
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    num = len(syllables)
    return [syllables[i % num] + syllables[(7 * i + i // num) % num] for i in range(NUM_WORDS)]


_WORDS: Final = _make_words()
_TOKEN_TEXTS: Final = (*_SPECIAL_TOKENS, *(f" {word}" for word in _WORDS), *(word.capitalize() for word in _WORDS))
_IDS: Final = {text: END_ID + index for index, text in enumerate(_TOKEN_TEXTS)}
VOCAB_SIZE: Final = END_ID + len(_TOKEN_TEXTS)
_SPLIT: Final = re.compile(r"<\|[a-z]+\|>| ?[A-Za-z]+|.", re.DOTALL)
_TOKEN_BYTES: Final = (*(bytes((n,)) for n in range(END_ID)), *(text.encode() for text in _TOKEN_TEXTS))
_WORD_BEGINNINGS: Final = frozenset(
    word[:length] for word in _TOKEN_BYTES[_FIRST_WORD_ID:] for length in range(1, len(word))
)
_LONGEST_WORD: Final = 8  # bytes, and more
_LAST_WORD: Final = re.compile(rb"(?: [a-z]*|(?:^|(?<=>))[A-Z][a-z]*)\Z")


class InvalidPromptError(ValueError):
    """Ids or messages that this model cannot read."""


def encode(text: str) -> list[int]:
    """Ids of a text: words that the model knows are one token each, everything else is bytes."""
    token_ids: list[int] = []
    for piece in _SPLIT.findall(text):
        known = _IDS.get(piece)
        token_ids += piece.encode() if known is None else (known,)
    return token_ids


def decode(token_ids: Sequence[int]) -> str:
    """The text of ids; bytes that are no text become U+FFFD."""
    return _join_bytes(token_ids).decode(errors="replace")


def _join_bytes(token_ids: Sequence[int]) -> bytes:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < VOCAB_SIZE):
        raise InvalidPromptError(f"a token id is outside of the vocabulary of {VOCAB_SIZE}")
    return b"".join(map(_TOKEN_BYTES.__getitem__, token_ids))


def encode_chat(messages: Sequence[Mapping[str, Any]], *, continues: bool = False) -> list[int]:
    """The prompt of a chat. Each text is stripped, as chat templates do. `continues`: the last message goes on."""
    token_ids: list[int] = []
    for message in messages:
        marker = _IDS.get(f"<|{message.get('role')}|>")
        if marker is None or marker == END_ID:
            raise InvalidPromptError(f"message role is {message.get('role')!r}; it must be system, user or assistant")
        token_ids += (marker, *encode(_read_text(message.get("content")).strip()), END_ID)
    if not continues:
        return [*token_ids, ASSISTANT_ID]
    if not messages or messages[-1]["role"] != "assistant":
        raise InvalidPromptError("continue_final_message is set; the last message must be the assistant's")
    return token_ids[:-1]


def _read_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or ())


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a next token is drawn, in vLLM's words; temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])


class Candidate(NamedTuple):
    """A token that can come next."""

    token_id: int
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the target is. An answer ends after `answer_tokens` tokens."""

    seed: int = 0
    answer_tokens: int = 400

    def read(self, token_ids: Sequence[int]) -> Context:
        """Read a prompt."""
        return Context(self, token_ids)


class Context:
    """All ids so far, and what follows them."""

    def __init__(self, model: Model, token_ids: Sequence[int]) -> None:
        self._answer_tokens = model.answer_tokens
        self._fragment = b""  # what the text ends with, where that may be the beginning of a word
        self._hash = hashlib.blake2b(str(model.seed).encode(), digest_size=8)
        self._add(_join_bytes(token_ids))
        self.num_answered: int | None = None  # tokens since the answer began; None: there is no chat
        if ASSISTANT_ID in token_ids:
            num = list(reversed(token_ids)).index(ASSISTANT_ID)
            answer = token_ids[len(token_ids) - num :]
            is_whole = min(answer, default=END_ID) >= END_ID
            self.num_answered = num if is_whole else len(encode(decode(answer))) - len(self._fragment)

    def push(self, token_id: int) -> None:
        """Add a token."""
        num_before = len(self._fragment)
        self._add(_TOKEN_BYTES[token_id])
        if token_id == ASSISTANT_ID:
            self.num_answered = 0
        elif self.num_answered is not None and not self._fragment:
            self.num_answered += 1 if not num_before or token_id < END_ID else num_before + 1

    def _add(self, data: bytes) -> None:
        data = self._fragment + data
        last_word = _LAST_WORD.search(data[-_LONGEST_WORD:])
        begins_word = last_word is not None and last_word[0] in _WORD_BEGINNINGS
        self._fragment = last_word[0] if last_word is not None and begins_word else b""
        self._hash.update(data[: len(data) - len(self._fragment)])

    @property
    def is_at_end(self) -> bool:
        """Whether the answer ends here."""
        return self.num_answered is not None and self.num_answered >= self._answer_tokens

    def rank(self, index: int) -> int:
        """The likeliest token (0), the second likeliest (1) …"""
        if self.is_at_end:
            index -= 1
        if index < 0:
            return END_ID
        digest = self._hash.digest()
        start, step = int.from_bytes(digest[:2], "big"), int.from_bytes(digest[2:4], "big") | 1
        opens = self._fragment[:1].isupper() or (not self._fragment and self.num_answered == 0)
        first_id = _FIRST_OPENING_ID if opens else _FIRST_WORD_ID
        if not self._fragment:
            return first_id + (start + index * step) % NUM_WORDS
        words = (_TOKEN_BYTES[first_id + (start + n * step) % NUM_WORDS] for n in range(NUM_WORDS))
        fitting = [word for word in words if word.startswith(self._fragment)]
        return fitting[index % len(fitting)][len(self._fragment)]

    def list_candidates(self) -> list[Candidate]:
        """What can follow, likeliest first; how likely the first is depends on the ids, too."""
        ratio = 0.0001 if self.is_at_end else 0.2 + 0.5 * self._hash.digest()[4] / 255
        total = math.log((1 - ratio**NUM_CANDIDATES) / (1 - ratio))
        return [Candidate(self.rank(n), n * math.log(ratio) - total) for n in range(NUM_CANDIDATES)]

    def sample(self, sampling: Sampling, rng: random.Random) -> int:
        """The next token; each draw takes one number of `rng`."""
        if sampling.temperature == 0 and not sampling.logit_bias:
            return self.rank(0)
        candidates = _add_bias(self.list_candidates(), sampling.logit_bias)
        return candidates[0].token_id if sampling.temperature == 0 else _draw(candidates, sampling, rng.random())


def _add_bias(candidates: Sequence[Candidate], logit_bias: Mapping[int, float]) -> Sequence[Candidate]:
    if not logit_bias:
        return candidates
    logprobs = dict.fromkeys(logit_bias, LEAST_LOGPROB) | dict(candidates)
    biased = [Candidate(token_id, logprob + logit_bias.get(token_id, 0.0)) for token_id, logprob in logprobs.items()]
    return sorted(biased, key=lambda candidate: -candidate.logprob)


def _draw(candidates: Sequence[Candidate], sampling: Sampling, uniform: float) -> int:
    """Temperature, then min-p, top-k and top-p, then one draw."""
    best = candidates[0].logprob
    weights = [math.exp((c.logprob - best) / sampling.temperature) for c in candidates]
    weights = [w for w in weights if w >= sampling.min_p][: sampling.top_k if sampling.top_k > 0 else None]
    total, kept = sum(weights), list[float]()
    for weight in weights:
        if kept and sum(kept) >= sampling.top_p * total:
            break
        kept.append(weight)
    return _pick(candidates, kept, uniform)


def _pick(candidates: Sequence[Candidate], weights: Sequence[float], uniform: float) -> int:
    """The candidate in whose share of the weights the number falls."""
    left = uniform * sum(weights)
    for candidate, weight in zip(candidates, weights, strict=False):
        left -= weight
        if left < 0:
            return candidate.token_id
    return candidates[len(weights) - 1].token_id


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A draft of `model`: right at each position with probability `agreement`, and wrong for good once it was wrong.

    Where it is wrong depends on the prompt, the position and `seed` alone. Restarted on the right text, it is right
    again, up to the next such position.
    """

    model: Model
    agreement: float
    seed: int = 0

    def write(self, token_ids: Sequence[int]) -> Iterator[int]:
        """The tokens after a prompt, the end among them."""
        context, is_wrong = self.model.read(token_ids), False
        prompt_ids = token_ids[: len(token_ids) - (context.num_answered or 0)]
        prompt = hashlib.blake2b(array("I", (self.seed, *prompt_ids)).tobytes())
        position = context.num_answered or 0
        while True:
            is_wrong = is_wrong or _draw_number(prompt, position) >= self.agreement
            token_id = context.rank(1 if is_wrong and not context.is_at_end else 0)
            yield token_id
            context.push(token_id)
            position += 1


def _draw_number(prompt: hashlib.blake2b, position: int) -> float:
    """From 0 to 1."""
    draw = prompt.copy()
    draw.update(array("I", (position,)).tobytes())
    return int.from_bytes(draw.digest()[:8], "big") / 2**64
