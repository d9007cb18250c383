"""RaceStream: one stream of a race, what it wrote, and what it should write. No I/O in here."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from llm_spec.contract.events import Finish, TextDelta
from llm_spec.measure.pair_stats import StreamTimer
from llm_spec.measure.text_pieces import split_into_pieces

__all__ = ["DraftPieceTimes", "RaceStream", "StreamRoundFigures"]


class StreamRoundFigures(NamedTuple):
    """A round of one runner."""

    num_draft: int
    num_accepted: int
    num_emitted: int
    draft_s: float
    verify_s: float


@dataclass(eq=False, slots=True)
class RaceStream:
    """One stream of the target.

    `prefix` is the answer's text before it, of about `num_prefix_tokens`, and of `min_prefix_tokens` at least;
    `expected` what it should write, as far as the draft says; `end` the length of `expected` at which the next runner
    began (None: there is none), in token ids `expected_ids`, once they are known. `token_ids` are its own; None: not
    known.
    """

    prefix: str
    timer: StreamTimer
    num_prefix_tokens: int = 0
    min_prefix_tokens: int = 0
    expected: str = ""
    end: int | None = None
    text: str = ""
    token_ids: list[int] | None = None
    num_tokens: int = 0
    complete: bool = False
    finish: Finish | None = None
    is_shown: bool = False  # whether anything that it wrote was emitted
    ended_s: float | None = None
    expected_ids: list[int] | None = None
    num_agreed: int = 0  # tokens since the last round that were as the draft had them
    rounds: list[StreamRoundFigures] = field(default_factory=list["StreamRoundFigures"])
    ends: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # after each piece: tokens, characters
    _checked: int = 0  # characters of `text` found equal to `expected`
    _checked_ids: int = 0
    _num_reported_tokens: int = 0  # tokens in `rounds` …
    _last_round_s: float | None = None  # … and when the last of them came

    @property
    def assumed_answer(self) -> str:
        """The answer as it stands if all before this runner arrives."""
        return self.prefix + self.text

    def append_delta(self, delta: TextDelta, num_new: int) -> None:
        """Add what it wrote."""
        self.text += delta.text
        self.num_tokens += num_new
        self.ends.append((self.num_tokens, len(self.text)))
        if self.token_ids is not None and delta.token_ids is not None:
            self.token_ids += delta.token_ids
        else:
            self.token_ids = None

    def measure_tokens_per_piece(self) -> float:
        """How many tokens the server counts for one that was counted here; 1 where it wrote no whole answer.

        Without ids a token is counted as a piece of text, and several that come at once are not always told apart.
        """
        usage = None if self.finish is None else self.finish.usage
        if usage is None or self.token_ids is not None or not self.num_tokens:
            return 1.0
        return max(1, usage.output_tokens - usage.reasoning_tokens) / self.num_tokens

    def set_expected_ids(self, token_ids: list[int]) -> None:
        """What it should write up to `end`, in token ids; what it has written meanwhile was compared as text."""
        written = self.token_ids or []
        self.expected_ids = token_ids
        self._checked_ids = len(written) if written == token_ids[: len(written)] else 0

    def reset_expected_text(self) -> None:
        """Forget what it should write after what it has written."""
        self.expected, self._checked = self.text, len(self.text)

    def compare_with_draft(self, num_new: int) -> int | None:
        """How many more tokens are as expected, `num_new` of them being new; None: it wrote something else."""
        if self.end is not None and self.expected_ids is not None:
            return self._compare_with_draft_ids(self.expected_ids)
        limit = min(len(self.text), len(self.expected) if self.end is None else self.end)
        if self.text[self._checked : limit] != self.expected[self._checked : limit]:
            return None
        num_agreed = num_new if limit > self._checked else 0
        self._checked = max(self._checked, limit)
        return num_agreed

    def _compare_with_draft_ids(self, expected_ids: list[int]) -> int | None:
        if self.token_ids is None:
            return None
        num_shared_characters = min(len(self.text), len(self.expected))
        if self.text[self._checked : num_shared_characters] != self.expected[self._checked : num_shared_characters]:
            return None
        self._checked = max(self._checked, num_shared_characters)
        start, limit = self._checked_ids, min(len(self.token_ids), len(expected_ids))
        if self.token_ids[start:limit] != expected_ids[start:limit]:
            return None
        self._checked_ids = limit
        return limit - start

    def has_reached_next_stream(self, *, greedy: bool) -> bool:
        """Whether it stands, or passed, exactly where the next runner began."""
        if self.end is None:
            return False
        if self.expected_ids is not None:
            return self.token_ids is not None and len(self.token_ids) >= len(self.expected_ids)
        if len(self.text) == self.end:
            return True
        # several tokens in one piece: where nothing is drawn, whitespace after the border shows that a token ended
        return greedy and len(self.text) > self.end and self.text[self.end].isspace()

    def has_overshot_next_stream(self) -> bool:
        """Whether it went beyond the place where the next runner began, without standing there."""
        return self.end is not None and len(self.text) > self.end

    @property
    def num_checked_characters(self) -> int:
        """Characters of the answer up to which it was found to be as the draft had it."""
        return len(self.prefix) + self._checked

    def close_round(self, draft_s: float, *, rejected: bool) -> None:
        """End a round: what was drafted since the last one, in so many seconds, is judged."""
        emitted, self._num_reported_tokens = self.num_tokens - self._num_reported_tokens, self.num_tokens
        accepted, self.num_agreed = min(self.num_agreed, emitted), 0
        began_s = self.timer.opened_s if self._last_round_s is None else self._last_round_s
        if accepted or rejected or emitted:
            self._last_round_s = self.timer.last_s
            verify_s = max(0.0, self._last_round_s - began_s)
            self.rounds.append(StreamRoundFigures(accepted + rejected, accepted, emitted, draft_s, verify_s))

    def num_tokens_after_rounds(self, num_rounds: int) -> int | None:
        """Tokens at the end of that many of `rounds`; None: there are fewer."""
        if num_rounds > len(self.rounds):
            return None
        return self._num_reported_tokens - sum(round_.num_emitted for round_ in self.rounds[num_rounds:])

    def truncate_to_tokens(self, num_tokens: int) -> int:
        """Forget all that it wrote after that many tokens; how many those were."""
        num_cut = self.num_tokens - num_tokens
        if num_cut:
            self.text = self.text[: self._count_characters_of_tokens(num_tokens)]
        self.num_tokens = num_tokens
        self.num_agreed = max(0, min(self.num_agreed, num_tokens - self._num_reported_tokens))
        rounds, self._num_reported_tokens = self.rounds, self.num_tokens_after_rounds(0) or 0
        self.rounds = []
        for round_ in rounds:
            num_left = num_tokens - self._num_reported_tokens
            if num_left < 1:
                break
            num_emitted, num_accepted = min(round_.num_emitted, num_left), min(round_.num_accepted, num_left)
            self.rounds.append(round_._replace(num_emitted=num_emitted, num_accepted=num_accepted))
            self._num_reported_tokens += num_emitted
        return num_cut

    def _count_characters_of_tokens(self, num_tokens: int) -> int:
        """How many characters the first tokens have; of several that came at once they are pieces."""
        num_before = start = 0
        for num_written, end in self.ends:
            if num_written > num_tokens and self.token_ids is None:
                pieces = split_into_pieces(self.text[start:end])[: num_tokens - num_before]
                return start + sum(map(len, pieces))
            if num_written >= num_tokens:
                return end
            num_before, start = num_written, end
        return len(self.text)


class DraftPieceTimes:
    """How long a draft took for its pieces, by the place in the answer where each of them ends."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._seconds: list[float] = []

    def add_piece_time(self, end: int, seconds: float) -> None:
        """The draft has come to a place in the answer."""
        self._ends.append(end)
        self._seconds.append(seconds)

    def drop_after(self, end: int) -> None:
        """What was drafted after a place will not be verified."""
        at = bisect_right(self._ends, end)
        del self._ends[at:], self._seconds[at:]

    def take_draft_s(self, start: int, end: int, *, rejected: bool) -> float:
        """Seconds of the pieces between two places, and of the one after them if that was rejected; of each once."""
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, end) + rejected
        seconds = sum(self._seconds[first:last])
        self._seconds[first:last] = [0.0] * len(self._seconds[first:last])
        return seconds
