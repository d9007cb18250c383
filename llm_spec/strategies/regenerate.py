"""`regenerate`: the target answers for itself, and the draft is only compared with it.

Never faster than plain. It measures what a draft is worth for a target before anything is paid for: the answer is
replayed as rounds of `_LOOKAHEAD` pieces of text, the draft realigned after each difference. Pieces stand for tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import islice
from typing import Final

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.events import Fallback, Finish, Round, StreamEvent, TextDelta
from llm_spec.drafting.full_draft import FullDraft
from llm_spec.drafting.ngrams import SequenceFollower
from llm_spec.measure.tokens import iterate_pieces_yielding_to_loop, split_into_pieces
from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext, TextGuarantee
from llm_spec.strategies.plain import stream_plain

__all__ = ["prepare_or_refuse", "replay_draft_rounds"]

_LOOKAHEAD: Final = 8
_ROUNDS_PER_LOOP_TURN: Final = 32  # replayed between two turns of the event loop


def prepare_or_refuse(context: StrategyContext) -> ReadyStrategy | Refusal:
    """Any target, any draft."""
    if context.draft is None:
        return Refusal("there is no draft")
    return ReadyStrategy(TextGuarantee("exact", same_text=True), partial(_open_compared_answer, context, context.draft))


@asynccontextmanager
async def _open_compared_answer(
    context: StrategyContext, draft: DraftProvider
) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    limits = context.limits
    full_draft = FullDraft(draft, context.request, max_tokens=limits.max_draft_tokens, timeout_s=limits.draft_timeout_s)
    async with (
        full_draft.read_in_background(),
        stream_plain(context.target, context.request, limits) as events,
        aclosing(_report_failure_before_error(events, full_draft)) as reported_events,
        aclosing(_stream_and_compare_with_draft(reported_events, full_draft, context)) as out,
    ):
        yield out


def _compute_draft_patience_s(context: StrategyContext) -> float:
    """How long (s) a finished answer may still wait for its draft: never into the deadline."""
    timeout_s = context.limits.draft_timeout_s
    left_s = None if context.deadline is None else context.deadline.remaining_s
    return timeout_s if left_s is None else min(timeout_s, 0.9 * max(0.0, left_s))


async def _stream_and_compare_with_draft(
    events: AsyncIterator[StreamEvent], full_draft: FullDraft, context: StrategyContext
) -> AsyncGenerator[StreamEvent]:
    answer, limits = "", context.limits
    async for event in events:
        match event:
            case TextDelta():
                answer += event.text
                yield event
            case Round():
                pass  # the target's own plain steps: here the rounds are the comparison's
            case Finish():
                timeout_s = _compute_draft_patience_s(context)
                await full_draft.wait_for_end(
                    timeout_s, f"late: the draft took {timeout_s:.3g} s longer than the answer"
                )
                if full_draft.failure is not None:
                    yield Fallback(full_draft.failure)
                follower, answer_pieces = await _index_draft_pieces(full_draft.text), split_into_pieces(answer)
                reports = replay_draft_rounds(follower, answer_pieces, limits.max_draft_tokens)
                for report in islice(reports, limits.max_iterations):
                    yield report
                    if report.index % _ROUNDS_PER_LOOP_TURN == 0:
                        await asyncio.sleep(0)
                yield event
            case _:
                yield event


async def _report_failure_before_error(
    events: AsyncIterator[StreamEvent], full_draft: FullDraft
) -> AsyncGenerator[StreamEvent]:
    """The target's events; if they end with an error, the draft's failure is reported before it."""
    try:
        async for event in events:
            yield event
    except Exception:
        if full_draft.failure is not None:
            yield Fallback(full_draft.failure)
        raise


async def _index_draft_pieces(draft: str) -> SequenceFollower[str]:
    """The draft, ready to be realigned, with turns of the event loop where it is long."""
    follower = SequenceFollower[str]()
    async for piece in iterate_pieces_yielding_to_loop(draft):
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
