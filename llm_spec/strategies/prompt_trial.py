"""PromptTrial: the end of a prompt is read beside a stream, before all of it is. No clock, no task, no I/O.

A call beside the stream reads the prompt again where the server shares no cache between them, and a server without room
to spare writes nothing meanwhile. So a call reads a few tokens first; how late the stream is afterwards tells what more
of them would cost. Where that is too much, the next trial is one that can be afforded, and is at least twice as long.
They are the last ones: many prompts begin alike, and with tokens that a server has in a cache it shows nothing.
"""

from __future__ import annotations

from typing import Final

from llm_spec.row_stats import ReadingStats

__all__ = ["PromptTrial"]

_FIRST_TOKENS: Final = 8  # of the first trial
_LATE_TOLERANCE: Final = 0.5  # steps that a stream may be late by chance


class PromptTrial:
    """The trials of one answer. Times are seconds of the clock by which its stream is timed."""

    def __init__(self, reading: ReadingStats) -> None:
        self.is_running = False
        self._reading = reading
        self._is_answered = False
        self._num_tokens = 0  # that are being read
        self._num_streamed = 0  # tokens of the stream since …
        self._began_s = 0.0  # … its last one before

    def may_read(self, num_tokens: int, allowance_s: float) -> bool:
        """Whether a call may read a prompt of so many tokens, where so much time may be lost."""
        late_s = self._reading.estimate_late_s(num_tokens)
        return num_tokens <= 2 * _FIRST_TOKENS if late_s is None else late_s <= allowance_s

    def begin(self, num_tokens: int, allowance_s: float, stream_last_s: float) -> int | None:
        """How many of a prompt's tokens are to be read now; None: none.

        `stream_last_s`: when the stream wrote its last token.
        """
        if self.is_running or self.may_read(num_tokens, allowance_s):
            return None
        known = self._reading
        if known.num_tokens and allowance_s <= 0.0:
            return None
        if known.num_tokens:
            num_tokens = min(num_tokens, int(known.num_tokens * allowance_s / known.late_s))
            if num_tokens < 2 * known.num_tokens:
                return None
        else:
            num_tokens = min(num_tokens, _FIRST_TOKENS)
        self.is_running, self._is_answered = True, False
        self._num_tokens, self._num_streamed, self._began_s = num_tokens, 0, stream_last_s
        return num_tokens

    def note_answer(self) -> None:
        """They were read: the stream's next token shows how late it is."""
        self._is_answered = True

    def stop(self) -> None:
        """The stream has ended, and shows nothing more."""
        self.is_running = False

    def add_streamed(self, num_tokens: int, arrived_s: float, step_s: float) -> float:
        """Tokens of the stream came, which has a token each step; gives how late it is where a trial ends with them."""
        if not self.is_running or not num_tokens:
            return 0.0
        self._num_streamed += num_tokens
        if not self._is_answered:
            return 0.0
        self.is_running = False
        late_s = arrived_s - self._began_s - (self._num_streamed + _LATE_TOLERANCE) * step_s
        self._reading.add_reading(self._num_tokens, max(0.0, late_s))
        return max(0.0, late_s)
