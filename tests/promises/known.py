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
        "a sampling target need not repeat the whitespace at a seam, which is taken for a failure",
        "answers",
        "does not go on where its answer was broken off",
        lambda _case, ask, _strategy: bool(ask.temperature),
    ),
)
