"""Drafts of every kind: right, wrong, slow, endless, failing, and such as break their contract."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, cast

from llm_spec import (
    CascadeDraft,
    ChatRequest,
    DraftError,
    DraftProvider,
    LlmProvider,
    PromptLookup,
    ReferenceDraft,
    SuffixDraft,
    TransientError,
    Usage,
)
from llm_spec.contract.draft import DraftCapabilities, DraftPiece
from llm_spec.contract.events import FinishReason
from promises.language import Language
from promises.target import FOREVER_S, Kind, Pace, Target, tag_of, topic_of

__all__ = ["BROKEN", "DRAFTS", "DraftKind", "DraftLedger", "make_draft", "spoil_words"]

DraftKind: TypeAlias = Literal[
    "none",
    "right",
    "wrong",  # each piece with some probability
    "own ids",  # right, with token ids of another vocabulary
    "from the start",  # it cannot continue
    "lookup",
    "suffix",
    "given",
    "joined",
    "provider",
    "provider from the start",
    "trickling",
    "endless",
    "silent",
    "failing",
    "busy",
    "short",  # it ends after some pieces
    "broken",
]
DRAFTS: Final[tuple[DraftKind, ...]] = (
    *("none", "right", "wrong", "own ids", "from the start", "lookup", "suffix", "given", "joined", "provider"),
    *("provider from the start", "trickling", "endless", "silent", "failing", "busy", "short", "broken"),
)
# What a draft that breaks its contract does.
BROKEN: Final = (
    *("raises CancelledError", "raises TimeoutError", "raises RuntimeError"),
    *("is no context", "raises at once", "raises at entering", "raises at leaving"),
    *("gives None", "gives a tuple", "text is None", "text is a number", "half a surrogate", "only empty pieces"),
    *("usage is a dict", "usage is negative", "usage is a text", "usage has texts", "finish reason is a number"),
    *("never ends, with no pause",),
)
_MOST_PIECES: Final = 3000  # of one call: nobody needs more
_WORD: Final = re.compile(r" ?\w+|\s+|.", re.DOTALL)


@dataclass
class DraftLedger:
    """How much the draft may write, what it wrote, and what is open, by the tag of the request."""

    open: Counter[str] = field(default_factory=Counter[str])
    num_calls: Counter[str] = field(default_factory=Counter[str])
    num_words: Counter[str] = field(default_factory=Counter[str])
    num_failed: Counter[str] = field(default_factory=Counter[str])  # calls that raised an error of their own
    most_requested: Counter[str] = field(default_factory=Counter[str])  # `max_tokens` of its calls
    most_read: Counter[str] = field(default_factory=Counter[str])  # pieces read of one call beyond its `max_tokens`


class RandomDraft:
    """A draft by words; see `DraftKind`. `at`: the piece at which it happens."""

    def __init__(
        self,
        language: Language,
        ledger: DraftLedger,
        *,
        kind: DraftKind,
        broken: str = "",
        seed: int = 0,
        rate: float = 0.0,
        at: int = 0,
        first_s: float = 0.0,
        piece_s: float = 0.0,
    ) -> None:
        self.name = "promises:draft"
        self.capabilities = DraftCapabilities(continues_prefix=kind != "from the start")
        self._language = language
        self._ledger = ledger
        self._kind = kind
        self._broken = broken if kind == "broken" else ""
        self._seed = seed
        self._rate = rate
        self._at = at
        self._first_s = first_s
        self._piece_s = piece_s

    def draft(self, request: ChatRequest, max_tokens: int) -> Any:
        if self._broken == "raises at once":
            raise RuntimeError("a bug")
        if self._broken == "is no context":
            return None
        return self._open(request, max_tokens)

    async def aclose(self) -> None:
        """Nothing to release."""

    @asynccontextmanager
    async def _open(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        tag, ledger = tag_of(request.messages[0].text), self._ledger
        ledger.num_calls[tag] += 1
        ledger.most_requested[tag] = max(ledger.most_requested[tag], max_tokens)
        ledger.open[tag] += 1
        try:
            if self._broken == "raises at entering":
                raise RuntimeError("a bug")
            async with aclosing(self._counted(tag, request, max_tokens)) as pieces:
                yield pieces
            if self._broken == "raises at leaving":
                raise RuntimeError("a bug")
        finally:
            ledger.open[tag] -= 1

    async def _counted(self, tag: str, request: ChatRequest, max_tokens: int) -> AsyncGenerator[DraftPiece]:
        number = 0
        async with aclosing(self._pieces(request, max_tokens)) as pieces:
            try:
                async for piece in pieces:
                    number += 1
                    self._ledger.num_words[tag] += isinstance(piece, DraftPiece) and bool(piece.text)
                    self._ledger.most_read[tag] = max(self._ledger.most_read[tag], number - max_tokens)
                    yield piece
            except (Exception, _OwnCancelledError):
                self._ledger.num_failed[tag] += 1
                raise

    async def _pieces(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[DraftPiece]:
        rng = random.Random(f"draft {self._seed} {request.prefix}")  # noqa: S311 - a reproducible draft, no secret
        words = self._words(request, rng)
        if self._kind == "endless" or self._broken.startswith("never ends"):
            words += [" more"] * _MOST_PIECES
        else:
            words = words[:max_tokens]
        for index, word in enumerate(words):
            await asyncio.sleep(self._piece_s if index else self._first_s)
            if index == self._at:
                if await self._happen():
                    return
                yield self._odd(word)
                continue
            yield DraftPiece(word, (7, 9) if self._kind == "own ids" else None)
        await self._happen_at_the_end(len(words))
        yield DraftPiece("", finish_reason="stop", usage=Usage(input_tokens=5, output_tokens=len(words)))

    def _words(self, request: ChatRequest, rng: random.Random) -> list[str]:
        answer = self._language.answer(topic_of(request.messages[0].text))
        prefix = request.prefix if self.capabilities.continues_prefix else ""
        if not answer.startswith(prefix):
            return [" lost", " here"]
        words: list[str] = _WORD.findall(answer[len(prefix) :])
        return [" wrong" if rng.random() < self._rate else word for word in words]

    async def _happen(self) -> bool:
        """What happens at a piece; true: the draft ends there, without a word."""
        if self._kind == "silent":
            await asyncio.sleep(FOREVER_S)
        if self._kind == "failing":
            raise DraftError("no more")
        if self._kind == "busy":
            raise TransientError("answered 429", status=429, retry_after_s=9.0)
        if self._broken in _ERRORS:
            raise _ERRORS[self._broken]
        return self._kind == "short"

    async def _happen_at_the_end(self, length: int) -> None:
        if length <= self._at and not self._broken:
            await self._happen()

    def _odd(self, word: str) -> Any:
        return _ODD_PIECES[self._broken](word) if self._broken in _ODD_PIECES else DraftPiece(word)


class _OwnCancelledError(asyncio.CancelledError):
    """Nobody has cancelled the request."""


# Errors that are not a draft's own.
_ERRORS: Final[Mapping[str, type[BaseException]]] = {
    "raises CancelledError": _OwnCancelledError,
    "raises TimeoutError": TimeoutError,
    "raises RuntimeError": RuntimeError,
}
# Pieces that break the contract.
_ODD_PIECES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "gives None": lambda _: None,
    "gives a tuple": lambda word: (word,),
    "text is None": lambda _: DraftPiece(cast("str", None)),
    "text is a number": lambda _: DraftPiece(cast("str", 5)),
    "half a surrogate": lambda _: DraftPiece(" \ud83d"),
    "only empty pieces": lambda _: DraftPiece(""),
    "usage is a dict": lambda word: DraftPiece(word, usage=cast("Usage", {"output_tokens": 3})),
    "usage is negative": lambda word: DraftPiece(word, usage=Usage(input_tokens=-500, output_tokens=-5000)),
    "usage is a text": lambda word: DraftPiece(word, usage=cast("Usage", "many")),
    "usage has texts": lambda word: DraftPiece(word, usage=Usage(input_tokens=cast("int", "3"))),
    "finish reason is a number": lambda word: DraftPiece(word, finish_reason=cast("FinishReason", 5)),
}


def make_draft(
    language: Language, ledger: DraftLedger, kind: DraftKind, topics: Sequence[str], **options: Any
) -> tuple[DraftProvider | LlmProvider | None, list[Target]]:
    """The draft of a case, and the targets that are part of it."""
    if kind in ("provider", "provider from the start"):
        pace = Pace(round_trip_s=0.0, first_token_s=options["first_s"], token_s=options["piece_s"])
        able: Kind = "text" if kind == "provider" else "chat"
        target = Target(language, kind=able, seed=options["seed"], name="promises:draft", pace=pace)
        return target, [target]
    match kind:
        case "none":
            draft = None
        case "lookup":
            draft = PromptLookup()
        case "suffix":
            draft = SuffixDraft()
        case "given":
            draft = ReferenceDraft(spoil_words(language.answer(topics[0]), options["seed"], options["rate"]))
        case "joined":
            draft = CascadeDraft(PromptLookup(), RandomDraft(language, ledger, kind="right", **options))
        case _:
            draft = RandomDraft(language, ledger, kind=kind, **options)
    return draft, []


def spoil_words(text: str, seed: int, rate: float) -> str:
    """Make some words wrong."""
    rng = random.Random(f"given {seed}")  # noqa: S311 - a reproducible draft, no secret
    return "".join(" wrong" if rng.random() < rate else word for word in _WORD.findall(text))
