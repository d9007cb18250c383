"""The simplest case that breaks the same promise in the same words."""

from __future__ import annotations

import re
from typing import Final

from promises.checks import Broken, check
from promises.draw import Case, simpler
from promises.run import run_case

__all__ = ["shrink"]

_VALUES: Final = re.compile(r"'[^']*'|\"[^\"]*\"|[0-9.]+")


def shrink(case: Case, broken: Broken, *, most_runs: int = 150) -> Case:
    """Make a case simpler, one thing at a time, as long as the promise is broken in the same way."""
    same, num_runs, is_done = _words(broken), 0, False
    while not is_done:
        is_done = True
        for candidate in simpler(case):
            num_runs += 1
            if num_runs > most_runs:
                return case
            if any(_words(found) == same for found in check(run_case(candidate))):
                case, is_done = candidate, False
                break
    return case


def _words(broken: Broken) -> tuple[str, str]:
    return broken.promise, _VALUES.sub("_", broken.how)[:40]
