"""Records of each answer and of each group of answers: flat values that all reports read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llm_spec.contract.events import Round, TextDelta
from llm_spec.decoder.result import PlainReason, SpeculativeResult
from llm_spec.measure.tokens import count_piece_tokens

__all__ = ["AnswerKey", "AnswerRecord", "PromptBlockRecord", "make_answer_record"]


@dataclass(frozen=True, kw_only=True)
class AnswerKey:
    """Identifies an answer.

    `prompt` is the prompt's index, `place` the contender's in the order for this prompt.
    """

    run: int
    block: int
    prompt: int
    turn: int
    contender: str
    place: int


@dataclass(frozen=True, kw_only=True)
class AnswerRecord:
    """One answer. Times are seconds by the clock around the public call, or None if nothing came.

    - `between_s`: mean time between tokens after the first.
    - `longest_pause_s`: longest wait between two pieces of the answer.
    - `drafted_at`, `accepted_at`: `[n]` is the number of rounds that drafted, or accepted, a token
      at position n.
    - `cost`: of target and draft, and `draft_cost` the draft's part, in the currency of the prices,
      or None if not known.
    - `error`: why there is no answer.
    """

    key: AnswerKey
    total_s: float
    first_s: float | None = None
    between_s: float | None = None
    longest_pause_s: float | None = None
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    strategy: str | None = None
    plain_reason: PlainReason | None = None
    plain_detail: str | None = None
    reported_speedup: float | None = None
    input_tokens: int | None = None
    cached_input_tokens: int | None = None
    output_tokens: int | None = None
    answer_tokens: int = 0
    draft_input_tokens: int = 0
    draft_output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    cost: float | None = None
    draft_cost: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class PromptBlockRecord:
    """Prompts that a contender answered at the same time, and the time until the last answer."""

    run: int
    block: int
    turn: int
    contender: str
    total_s: float


def make_answer_record(
    key: AnswerKey, result: SpeculativeResult, pieces_s: Sequence[float], total_s: float
) -> AnswerRecord:
    """Make a record of an answer; `pieces_s` are seconds from the call to each piece."""
    num_tokens = result.num_tokens
    if num_tokens is None:
        num_tokens = count_piece_tokens(TextDelta(result.content))
    usage, draft, drafted_at, accepted_at = (
        result.usage,
        result.draft_usage,
        *_count_drafted_and_accepted_at(result.rounds),
    )
    return AnswerRecord(
        key=key,
        total_s=total_s,
        first_s=pieces_s[0] if pieces_s else None,
        between_s=(pieces_s[-1] - pieces_s[0]) / (num_tokens - 1) if pieces_s and num_tokens > 1 else None,
        longest_pause_s=max((after - before for before, after in pairwise(pieces_s)), default=None),
        text=result.content,
        reasoning=result.reasoning,
        finish_reason=result.finish_reason,
        strategy=result.strategy,
        plain_reason=result.plain_reason,
        plain_detail=result.plain_detail,
        reported_speedup=result.speedup,
        input_tokens=None if usage is None else usage.input_tokens,
        cached_input_tokens=None if usage is None else usage.cached_input_tokens,
        output_tokens=None if usage is None else usage.output_tokens,
        answer_tokens=num_tokens,
        draft_input_tokens=0 if draft is None else draft.input_tokens,
        draft_output_tokens=0 if draft is None else draft.output_tokens - draft.free_output_tokens,
        drafted_tokens=result.stats.num_draft_tokens,
        accepted_tokens=result.stats.num_accepted_draft_tokens,
        drafted_at=drafted_at,
        accepted_at=accepted_at,
        cost=result.cost.target if result.draft is None else result.cost.total,
        draft_cost=0.0 if result.draft is None else result.cost.draft,
    )


def _count_drafted_and_accepted_at(rounds: Sequence[Round]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Count the rounds that drafted, and accepted, a token at each position of a draft."""
    width = max((r.num_draft_tokens for r in rounds), default=0)
    drafted, accepted = [0] * width, [0] * width
    for r in rounds:
        for position in range(r.num_draft_tokens):
            drafted[position] += 1
            accepted[position] += position < r.num_accepted_tokens
    return tuple(drafted), tuple(accepted)
