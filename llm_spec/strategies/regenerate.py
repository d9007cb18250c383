"""`regenerate`: the target answers for itself, and the draft is only compared with it.

Never faster than plain. It measures what a draft is worth for a target before anything is paid for: the answer is
replayed as rounds of `_LOOKAHEAD` pieces of text, the draft realigned after each difference. Pieces stand for tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import islice
from typing import Final

from llm_spec._clock import now
from llm_spec.chat import ChatRequest, Fallback, Finish, Round, StreamEvent, TextDelta
from llm_spec.config import SpeculativeConfig
from llm_spec.drafting.ngrams import Follower
from llm_spec.drafting.pieces import pieces_in_turns, split_pieces
from llm_spec.drafting.whole import WholeDraft
from llm_spec.errors import UnsupportedError
from llm_spec.figures import PairFigures
from llm_spec.provider import DraftProvider, Feature, LlmProvider
from llm_spec.strategies.base import Promise
from llm_spec.strategies.plain import PLAIN

__all__ = ["REGENERATE", "RegenerateStrategy", "replay_rounds"]

_LOOKAHEAD: Final = 8
_TURN_ROUNDS: Final = 32  # replayed between two turns of the event loop


class RegenerateStrategy:
    """Any target, any draft."""

    name = "regenerate"
    needs: Feature | None = None

    def supports(self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest) -> str | None:  # noqa: ARG002 - every target can
        return "there is no draft" if draft is None else None

    def promise(self, target: LlmProvider, config: SpeculativeConfig) -> Promise:  # noqa: ARG002 - it is the target's own
        return Promise("exact", same_text=True)

    @asynccontextmanager
    async def run(
        self,
        draft: DraftProvider | None,
        target: LlmProvider,
        request: ChatRequest,
        config: SpeculativeConfig,
        figures: PairFigures,
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        if draft is None:
            raise UnsupportedError("strategy 'regenerate' cannot be used: there is no draft")
        guess, patience = WholeDraft(draft, request, config), _patience(config)
        async with (
            guess.reading(),
            PLAIN.run(None, target, request, config, figures) as events,
            aclosing(_compared(events, guess, patience, config)) as out,
        ):
            yield out


def _patience(config: SpeculativeConfig) -> Callable[[], float]:
    """How long (s) a finished answer may still wait for its draft, which is asked now: never into the deadline."""
    started = now()

    def patience() -> float:
        if config.deadline_s is None:
            return config.draft_timeout_s
        return min(config.draft_timeout_s, 0.9 * max(0.0, started + config.deadline_s - now()))

    return patience


async def _compared(
    events: AsyncIterator[StreamEvent], guess: WholeDraft, patience: Callable[[], float], config: SpeculativeConfig
) -> AsyncGenerator[StreamEvent]:
    answer = ""
    async for event in events:
        match event:
            case TextDelta():
                answer += event.text
                yield event
            case Round():
                pass  # the target's own plain steps: here the rounds are the comparison's
            case Finish():
                timeout_s = patience()
                await guess.wait(timeout_s, f"late: the draft took {timeout_s:.3g} s longer than the answer")
                if guess.failure is not None:
                    yield Fallback(guess.failure)
                follower, answered = await _read(guess.text), split_pieces(answer)
                reports = replay_rounds(follower, answered, config.max_draft_tokens)
                for report in islice(reports, config.max_iterations):
                    yield report
                    if report.index % _TURN_ROUNDS == 0:
                        await asyncio.sleep(0)
                yield event
            case _:
                yield event


async def _read(draft: str) -> Follower[str]:
    """The draft, ready to be realigned, with turns of the event loop where it is long."""
    follower = Follower[str]()
    async for piece in pieces_in_turns(draft):
        follower.extend((piece,))
    return follower


def replay_rounds(
    follower: Follower[str], answered: Sequence[str], max_draft_tokens: int | None = None
) -> Iterator[Round]:
    """The rounds that a draft would have made of an answer, both in pieces, and the draft realigned.

    When `max_draft_tokens` are spent the target goes on alone.
    """
    start, done, index, num_drafted = follower.advance(()), 0, 0, 0
    while done < len(answered):
        room = _LOOKAHEAD if max_draft_tokens is None else min(_LOOKAHEAD, max_draft_tokens - num_drafted)
        proposal = [] if start is None else follower.items[start : start + room]
        num_drafted += len(proposal)
        agree = sum(1 for _ in _agreeing(proposal, answered[done : done + _LOOKAHEAD]))
        emitted = min(agree + 1, len(answered) - done)
        yield Round(
            index=index,
            num_draft_tokens=len(proposal),
            num_accepted_tokens=agree,
            num_emitted_tokens=emitted,
        )
        start = follower.advance(answered[done : done + emitted])
        done += emitted
        index += 1


def _agreeing(proposal: Sequence[str], answered: Sequence[str]) -> Iterator[str]:
    for drafted, true in zip(proposal, answered, strict=False):
        if drafted != true:
            return
        yield true


REGENERATE: Final = RegenerateStrategy()
