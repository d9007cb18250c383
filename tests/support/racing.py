"""Drafts to race with, decoders that know that their target has room, and answers with the times of their text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llm_spec import (
    ChatRequest,
    Finish,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    StreamEvent,
    TextDelta,
    Usage,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.provider import LlmProvider
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.simulated import SimulatedDraft
from support.draft_checks import ItemDraft

__all__ = ["CODE", "DRAFTS", "SLOW", "WORDS", "Reading", "racing", "read", "request_of"]

WORDS = " ".join(f"word{i}" for i in range(150))
SLOW: dict[str, Any] = {"first_token_s": 0.4, "token_s": 0.02}


DRAFTS: dict[str, Callable[[str], DraftProvider]] = {
    "agrees": lambda answer: SimulatedDraft(answer, 1.0, 0),
    "often": lambda answer: SimulatedDraft(answer, 0.9, 1, token_s=0.003),
    "never": lambda answer: SimulatedDraft(answer, 0.0, 2),
    "ends early": lambda answer: SimulatedDraft(answer[: len(answer) // 3], 1.0, 3),
    "runs long": lambda answer: SimulatedDraft(answer + " and on and on" * 30, 1.0, 4),
    "differs at the first character": lambda answer: ItemDraft("§" + answer),
    "nothing": lambda _: ItemDraft(),
    "fails at once": lambda _: ItemDraft(RuntimeError("no draft")),
    "fails midway": lambda answer: ItemDraft(*split_into_pieces(answer)[:40], RuntimeError("the draft broke")),
    "falls silent": lambda answer: ItemDraft(*split_into_pieces(answer)[:8], 1e6),
    "writes once": lambda answer: ItemDraft(*split_into_pieces("Well. " + answer), continues_prefix=False),
    "given text": lambda answer: ReferenceDraft(answer.replace("is", "was")),
}


# ------------------------------------------------------------------------------------------ reading


@dataclass
class Reading:
    """An answer, and for each of its characters when it came."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    events: list[StreamEvent] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def finish(self) -> Finish:
        last = self.events[-1]
        assert isinstance(last, Finish)
        return last

    @property
    def usage(self) -> Usage:
        assert self.finish.usage is not None
        return self.finish.usage

    @property
    def num_won(self) -> int:
        """Characters that came from streams that took over."""
        return sum(len(e.text) for e in self.events if isinstance(e, TextDelta) and e.origin == "accepted")


async def read(decoder: SpeculativeDecoder, request: ChatRequest, into: Reading | None = None) -> Reading:
    clock = asyncio.get_running_loop().time
    start, reading = clock(), into or Reading()
    async with decoder.stream(request, rounds=True) as events:
        async for event in events:
            reading.events.append(event)
            if isinstance(event, TextDelta):
                reading.text += event.text
                reading.times += [clock() - start] * len(event.text)
    reading.total_s = clock() - start
    assert len(asyncio.all_tasks()) == 1, "tasks are left"
    return reading


def racing(draft: DraftProvider, target: LlmProvider, **options: Any) -> SpeculativeDecoder:
    """A decoder that knows that its target has room for many streams."""
    config = SpeculativeConfig(**({"strategy": "race", "baseline_every": 0} | options))
    decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
    decoder._planner.pair_stats.streams.num_extra = 64
    return decoder


def request_of(**options: Any) -> ChatRequest:
    options.setdefault("temperature", 0.0)
    return ChatRequest.create("Tell me.", **options)


CODE = "".join(f"def area{i}(radius, *rest):\n    return [math.pi * radius ** 2, {{}}]\n\n" for i in range(12))
