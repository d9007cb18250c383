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
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import Feature
from llm_spec.drafting.full_draft import FullDraft
from llm_spec.drafting.ngrams import SequenceFollower
from llm_spec.drafting.text_pieces import iterate_pieces_yielding, split_pieces
from llm_spec.errors import UnsupportedError
from llm_spec.pair_stats import PairStats
from llm_spec.strategies.base import TextGuarantee
from llm_spec.strategies.plain import PLAIN

__all__ = ["REGENERATE", "RegenerateStrategy", "replay_draft_rounds"]

_LOOKAHEAD: Final = 8
_ROUNDS_PER_LOOP_TURN: Final = 32  # replayed between two turns of the event loop


class RegenerateStrategy:
    """Any target, any draft."""

    name = "regenerate"
    needed_feature: Feature | None = None

    def find_refusal(self, draft: DraftProvider | None, target: LlmProvider, request: ChatRequest) -> str | None:  # noqa: ARG002 - every target can
        return "there is no draft" if draft is None else None

    def text_guarantee(self, target: LlmProvider, config: SpeculativeConfig) -> TextGuarantee:  # noqa: ARG002 - it is the target's own
        return TextGuarantee("exact", same_text=True)

    @asynccontextmanager
    async def run(
        self,
        draft: DraftProvider | None,
        target: LlmProvider,
        request: ChatRequest,
        config: SpeculativeConfig,
        pair_stats: PairStats,
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        if draft is None:
            raise UnsupportedError("strategy 'regenerate' cannot be used: there is no draft")
        full_draft, compute_patience = FullDraft(draft, request, config), _make_draft_patience(config)
        async with (
            full_draft.read_in_background(),
            PLAIN.run(None, target, request, config, pair_stats) as events,
            aclosing(_compare_with_draft(events, full_draft, compute_patience, config)) as out,
        ):
            yield out


def _make_draft_patience(config: SpeculativeConfig) -> Callable[[], float]:
    """How long (s) a finished answer may still wait for its draft, which is asked now: never into the deadline."""
    started = now()

    def compute_patience() -> float:
        if config.deadline_s is None:
            return config.draft_timeout_s
        return min(config.draft_timeout_s, 0.9 * max(0.0, started + config.deadline_s - now()))

    return compute_patience


async def _compare_with_draft(
    events: AsyncIterator[StreamEvent],
    full_draft: FullDraft,
    compute_patience: Callable[[], float],
    config: SpeculativeConfig,
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
                timeout_s = compute_patience()
                await full_draft.wait(timeout_s, f"late: the draft took {timeout_s:.3g} s longer than the answer")
                if full_draft.failure is not None:
                    yield Fallback(full_draft.failure)
                follower, answer_pieces = await _index_draft_pieces(full_draft.text), split_pieces(answer)
                reports = replay_draft_rounds(follower, answer_pieces, config.max_draft_tokens)
                for report in islice(reports, config.max_iterations):
                    yield report
                    if report.index % _ROUNDS_PER_LOOP_TURN == 0:
                        await asyncio.sleep(0)
                yield event
            case _:
                yield event


async def _index_draft_pieces(draft: str) -> SequenceFollower[str]:
    """The draft, ready to be realigned, with turns of the event loop where it is long."""
    follower = SequenceFollower[str]()
    async for piece in iterate_pieces_yielding(draft):
        follower.extend((piece,))
    return follower


def replay_draft_rounds(
    follower: SequenceFollower[str], answer_pieces: Sequence[str], max_draft_tokens: int | None = None
) -> Iterator[Round]:
    """The rounds that a draft would have made of an answer, both in pieces, and the draft realigned.

    When `max_draft_tokens` are spent the target goes on alone.
    """
    start, done, index, num_drafted = follower.advance(()), 0, 0, 0
    while done < len(answer_pieces):
        room = _LOOKAHEAD if max_draft_tokens is None else min(_LOOKAHEAD, max_draft_tokens - num_drafted)
        proposal = [] if start is None else follower.items[start : start + room]
        num_drafted += len(proposal)
        agree = sum(1 for _ in _iterate_matching_prefix(proposal, answer_pieces[done : done + _LOOKAHEAD]))
        emitted = min(agree + 1, len(answer_pieces) - done)
        yield Round(
            index=index,
            num_draft_tokens=len(proposal),
            num_accepted_tokens=agree,
            num_emitted_tokens=emitted,
        )
        start = follower.advance(answer_pieces[done : done + emitted])
        done += emitted
        index += 1


def _iterate_matching_prefix(proposal: Sequence[str], answer_pieces: Sequence[str]) -> Iterator[str]:
    for drafted, true in zip(proposal, answer_pieces, strict=False):
        if drafted != true:
            return
        yield true


REGENERATE: Final = RegenerateStrategy()
