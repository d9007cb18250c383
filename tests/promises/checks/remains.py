"""Nothing is left open: calls, drafts, sessions, tasks, places; and nobody complains to the loop or the log."""

from __future__ import annotations

from collections.abc import Iterator

from promises.run import Outcome, Shown

__all__ = ["find_open_calls", "find_remains"]


def find_open_calls(outcome: Outcome, shown: Shown) -> Iterator[str]:  # noqa: ARG001 - as the other checks
    """What a request has open when it has ended, in whatever way."""
    num_target, num_draft = shown.open_after
    if num_target:
        yield f"{num_target} calls to the target are open after its end"
    if num_draft:
        yield f"{num_draft} drafts are open after its end"


def find_remains(outcome: Outcome) -> Iterator[str]:
    """What is left when all have ended."""
    if outcome.tasks_left:
        yield f"tasks are left: {outcome.tasks_left}"
    if outcome.complaints:
        yield f"complaints: {outcome.complaints[:3]}"
    if outcome.places_lost:
        yield f"{outcome.places_lost} places of the limit are lost"
    for model in outcome.models:
        if model.num_open:
            yield f"{model.num_open} sessions of {model.name} are open"
    for ledger in (outcome.ledger, *outcome.others):
        if +ledger.open:
            yield f"calls are open: {dict(+ledger.open)}"
