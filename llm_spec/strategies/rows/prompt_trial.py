"""PromptTrial: a few tokens of a prompt are read beside a stream, before all of it is. No clock, no task, no I/O.

A call beside the stream reads the prompt again where the server shares no cache between them, and a server without room
to spare writes nothing meanwhile. So a call reads a few tokens first; how late the stream is afterwards tells what more
of them would cost. Where that is too much, the next trial is one that can be afforded, and is at least twice as long.
Trials are from anywhere in the prompt, since a server shows nothing with a beginning that it has in a cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from llm_spec.measure.row_stats import LatenessStats
from llm_spec.strategies.rows.lateness_trial import LatenessTrial

__all__ = ["PromptTrial", "choose_prompt_stretch"]

_FIRST_TOKENS: Final = 4  # of the first trial, of which each takes a step at most
_SHARE: Final = 0.5  # of what may be lost, that a later one, and a whole prompt, are expected to cost


class PromptTrial:
    """The trials of one answer. Times are seconds of the clock by which its stream is timed.

    `is_cache_shared`: the server reads again no more than the end of a prompt that it has read, so none is needed.
    """

    def __init__(self, reading: LatenessStats, *, is_cache_shared: bool) -> None:
        self._reading = reading
        self._is_cache_shared = is_cache_shared
        self._running: LatenessTrial | None = None

    @property
    def is_running(self) -> bool:
        """Whether tokens are being read, or the stream has not shown yet what that cost."""
        return self._running is not None

    def may_read(self, num_tokens: int, allowance_s: float, step_s: float) -> bool:
        """Whether a call may read a prompt of so many tokens, where so much time may be lost.

        `step_s`: seconds between two tokens of the stream.
        """
        if self._is_cache_shared:
            return True
        late_s = self._reading.estimate_late_s(num_tokens, step_s)
        return num_tokens <= 2 * _FIRST_TOKENS if late_s is None else late_s <= _SHARE * allowance_s

    def begin(self, num_tokens: int, allowance_s: float, stream_last_s: float, step_s: float) -> int | None:
        """How many of a prompt's tokens are to be read now; None: none.

        `stream_last_s`: when the stream wrote its last token; `step_s`: see `may_read`.
        """
        if self.is_running or self.may_read(num_tokens, allowance_s, step_s) or allowance_s <= 0.0:
            return None
        known, token_late_s = self._reading, self._reading.estimate_late_s(1, step_s)
        if token_late_s is None:
            if _FIRST_TOKENS * step_s > allowance_s:
                return None
            num_tokens = min(num_tokens, _FIRST_TOKENS)
        else:
            num_tokens = min(num_tokens, int(_SHARE * allowance_s / token_late_s))
            if num_tokens < 2 * known.amount:
                return None
        self._running = LatenessTrial(known, num_tokens, stream_last_s)
        return num_tokens

    def note_answer(self) -> None:
        """They were read: the stream's next token shows how late it is."""
        if self._running is not None:
            self._running.is_answered = True

    def stop(self) -> None:
        """The stream has ended, and shows nothing more."""
        self._running = None

    def add_streamed(self, num_tokens: int, arrived_s: float, step_s: float) -> float:
        """Tokens of the stream came, which has a token each step; gives how late it is where a trial ends with them."""
        late_s = None if self._running is None else self._running.add_streamed(num_tokens, arrived_s, step_s)
        if late_s is None:
            return 0.0
        self._running = None
        return late_s


def choose_prompt_stretch(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """So many of a prompt's tokens, from anywhere but its beginning, where it has more of them."""
    last = max(0, len(token_ids) - num_tokens)
    start = random.randint(min(1, last), last)  # noqa: S311 - a place, no secret
    return list(token_ids[start : start + num_tokens])
