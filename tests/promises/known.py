"""Promises that are known not to be kept yet: each with its reason, and as narrow as it can be described.

A fault is taken out of this list together with its repair, or with what makes it impossible.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from promises.checks import Broken
from promises.draw import Ask, Case

__all__ = ["KNOWN", "Known", "known_reason"]

_BY_IDS: Final = ("probe", "score")


@dataclass(frozen=True)
class Known:
    """A fault: why it is there, which promise it breaks, a pattern of how, and in which cases."""

    reason: str
    promise: str
    how: str
    when: Callable[[Case, Ask, str], bool]  # the case, the request (a usual one for all), the strategy

    def is_met(self, case: Case, broken: Broken) -> bool:
        ask = case.asks[int(broken.tag[1:])] if broken.tag else Ask()
        found = re.search(f"{self.promise}: .*{self.how}", str(broken), re.DOTALL)
        return found is not None and self.when(case, ask, broken.strategy)


def known_reason(case: Case, broken: Broken) -> str | None:
    """Why a promise is known not to be kept; None: it is not."""
    return next((known.reason for known in KNOWN if known.is_met(case, broken)), None)


KNOWN: Final = (
    Known(
        "what the target takes alone is counted in events, where several tokens come in one",
        "time",
        "says that plain takes",
        lambda case, _ask, _strategy: case.frame > 1,
    ),
    Known(
        "what is drafted without token ids is counted in words, of each of which a target may make several tokens",
        "bounds",
        "tokens were drafted; max_draft_tokens is",
        lambda _case, _ask, strategy: strategy in ("race", "predict", *_BY_IDS, "auto"),
    ),
    Known(
        "race goes on after its deadline while the consumer pauses",
        "bounds",
        "the target generates .* after the deadline",
        lambda _case, ask, strategy: strategy == "race" and ask.pause_s > 0,
    ),
    Known(
        "a refusal of race's first stream by ids is raised, although the target would answer by text",
        "answers",
        "(where the target alone would have answered|raises UnsupportedError)",
        lambda case, _ask, strategy: (
            strategy in ("race", "auto") and any(a.fault is not None and a.fault.scope == "ids" for a in case.asks)
        ),
    ),
    Known(
        "between_chunks_s bounds a round of probe or score, which is a new call, or two, after one of the draft",
        "answers",
        "where the target alone would have answered: promises:target was silent",
        lambda case, _ask, strategy: strategy in _BY_IDS and case.between_chunks_s is not None,
    ),
    Known(
        "a sampling target need not repeat the whitespace at a seam, which is taken for a failure",
        "answers",
        "does not go on where its answer was broken off",
        lambda _case, ask, _strategy: bool(ask.temperature),
    ),
    Known(
        "a deadline ends rounds of probe and score before they are told apart from what is wasted",
        "usage",
        "output tokens are not wasted ones; the answer has",
        lambda case, _ask, strategy: strategy in _BY_IDS and case.deadline_s is not None,
    ),
    Known(
        "judge raises what finding out raises whether the target continues a text, although it could try again",
        "answers",
        "cannot be asked now",
        lambda case, _ask, strategy: strategy == "judge" and case.num_failing_trials > 0,
    ),
    Known(
        "judge raises what a verdict's call raises, although the target would answer alone",
        "answers",
        "where the target alone would have answered",
        lambda _case, ask, strategy: strategy == "judge" and ask.fault is not None and ask.fault.scope == "verdict",
    ),
)
