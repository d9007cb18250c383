"""The runners of a race: several streams of one target, each begun where the one before it is expected to arrive.

    confirmed text   | what the draft says comes next                              |
    runner 0 ------->|------> runner 1 begins here ---->|------> runner 2 ... ---->|

Runner 0 writes the answer. A runner that arrives, exactly, where the next one began has done its work: the next goes on
from there, and what it has written meanwhile is won. A runner that writes something else than was expected ends all
behind it, and goes on itself: nothing is lost but what those had cost. So every character was written by the target
after exactly the text before it, and a runner is never behind the one that it takes over from: it takes over only if
its first token had come by then. Whether it takes over depends on the text up to where it began and on when it began
to write, never on what it wrote or how far it got (taking the longer one would bias a sampled answer).

The same rule holds for every two neighbours, also where the first of them is not confirmed yet. No I/O in here.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from llm_spec.contract.events import Finish, Origin, Round, StoppedBy, StreamEvent, TextDelta, Usage
from llm_spec.measure.pair_stats import PairStats, StreamTimer
from llm_spec.measure.tokens import count_piece_tokens, count_words, iterate_piece_ends, split_into_pieces

__all__ = [
    "DraftPieceTimes",
    "RaceStream",
    "StreamChain",
    "StreamRoundFigures",
    "find_stream_boundary",
]


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


# Where a stream may begin: before a single space between two words, or before a newline that follows a word. Tokens
# begin there in every common tokenizer, templates strip nothing, and no character or run of whitespace is cut.
_SAFE_BOUNDARY: Final = re.compile(r"(?<=\S)(?= \S)|(?<=\w)(?=\n)")
_OPEN_FENCE: Final = re.compile(r"(?:^|\n)[ \t]*(?:```|~~~)[^\n]*$")


class StreamChain:
    """The runners, first to last. `close` is called for each that is no longer needed; `out` is what may be shown.

    `finish` is the answer's end, once it has been reached.
    """

    def __init__(
        self,
        root: RaceStream,
        pair_stats: PairStats,
        *,
        greedy: bool,
        max_tokens: int | None,
        max_rounds: int | None,
        close: Callable[[RaceStream], None],
    ) -> None:
        self.streams = [root]
        self.output_events: list[StreamEvent] = []
        self.finish: Finish | None = None
        self.num_takeovers = 0
        self.num_agreed = 0  # tokens that were as the draft had them, …
        self.run_length = 0  # … and those since one was not
        self.num_cancelled_tokens = 0
        self.is_cut = False  # by a limit, where the target would have gone on
        self.is_draft_wrong = False  # the last runner wrote something else than the draft: the draft is to begin anew
        self._pair_stats = pair_stats
        self._greedy = greedy
        self._close = close
        self._max_tokens = max_tokens
        self._max_rounds = max_rounds
        self._num_done_tokens = 0  # of runners that are behind us
        self._num_shown = 0  # characters of the first runner's text
        self._num_shown_ids = 0
        self._num_rounds = 0
        self._num_completed_streams = 0
        self._ends: list[tuple[int, int]] = []  # of runners that are behind us, in the answer
        self._drafted = DraftPieceTimes()

    @property
    def last_stream(self) -> RaceStream:
        """The last runner: it has nobody to arrive at."""
        return self.streams[-1]

    def add_delta(
        self, stream: RaceStream, delta: TextDelta, arrived_s: float | None = None, *, is_disturbed: bool = False
    ) -> None:
        """A runner wrote something, now or at `arrived_s`: a slow consumer does not make a stream look slow.

        `is_disturbed`: others were open beside it.
        """
        num_new = count_piece_tokens(delta)
        stream.timer.add_tokens(num_new, arrived_s, is_disturbed=is_disturbed)
        if stream not in self.streams or stream.complete:
            self.num_cancelled_tokens += num_new  # it was on its way when the stream was closed
            return
        stream.append_delta(delta, num_new)
        # what ends an answer comes without a text: it is no place to arrive at, whatever the draft says after it
        self._follow_or_leave_draft(stream, num_new, may_arrive=bool(delta.text))
        self._emit_confirmed_text()

    def record_stream_end(
        self, stream: RaceStream, finish: Finish, arrived_s: float | None = None, *, is_disturbed: bool = False
    ) -> None:
        """A runner came to the end of its answer."""
        stream.timer.add_tokens(0, arrived_s, is_disturbed=is_disturbed)
        if stream not in self.streams or stream.complete:
            return
        stream.finish = finish
        self._drop_streams_after(stream)
        self._emit_confirmed_text()

    def drop_stream(self, stream: RaceStream) -> None:
        """A runner failed; never the first one."""
        if stream in self.streams:
            self._drop_streams_after(self.streams[self.streams.index(stream) - 1])

    def drop_all_but_first_stream(self) -> None:
        """Leave the first runner alone."""
        self._drop_streams_after(self.streams[0])

    def extend_expected_text(self, text: str, piece_times: Sequence[tuple[int, float]] = ()) -> None:
        """The draft says more of what follows the last runner's text.

        `piece_times`: where in it a piece ends, and how long the draft took for that (seconds).
        """
        tail = self.last_stream
        for end, seconds in piece_times:
            self._drafted.add_piece_time(len(tail.prefix) + len(tail.expected) + end, seconds)
        tail.expected += text
        if not self._matches_draft(self.last_stream, 0):
            self._handle_departure_from_draft(self.last_stream)

    def reset_expected_text(self) -> None:
        """Forget what the draft said; what it says from now on follows the last runner's text."""
        self.last_stream.reset_expected_text()
        self.is_draft_wrong = False

    def append_stream(self, child: RaceStream, end: int) -> None:
        """A new runner, begun `end` characters into what is expected of the last one."""
        parent = self.last_stream
        between = parent.expected[len(parent.text) : end]
        child.num_prefix_tokens = parent.num_prefix_tokens + parent.num_tokens + len(split_into_pieces(between))
        child.min_prefix_tokens = parent.min_prefix_tokens + parent.num_tokens + count_words(between)
        child.expected = parent.expected[end:]
        parent.end, parent.expected = end, parent.expected[:end]
        self.streams.append(child)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that are confirmed."""
        return self._num_done_tokens + self.streams[0].num_tokens

    def count_tokens_until_character(self, num_characters: int) -> int:
        """Tokens of the answer's first characters, with all that came at once with the last of them."""
        root = self.streams[0]
        ends = [*self._ends, *self._iterate_piece_ends(root)]
        return next((num_tokens for num_tokens, end in ends if end >= num_characters), self.num_answer_tokens)

    def count_answer_usage(self) -> Usage | None:
        """The tokens of an answer that is whole; None: the target that wrote the last of them did not count them."""
        counted = None if self.finish is None else self.finish.usage
        if counted is not None:
            return Usage(output_tokens=self._num_done_tokens + counted.output_tokens)
        is_known = self.is_cut or self.streams[0].token_ids is not None
        return Usage(output_tokens=self.num_answer_tokens) if is_known else None

    # ------------------------------------------------------------------------------------------ inside

    def _drop_streams_after(self, stream: RaceStream) -> None:
        """End all runners behind this one; what was expected of them is now expected of it."""
        at = self.streams.index(stream) + 1
        for dropped in self.streams[at:]:
            self.num_cancelled_tokens += dropped.num_tokens
            stream.expected += dropped.expected
            self._close(dropped)
        del self.streams[at:]
        stream.end = stream.expected_ids = None

    def _skip_next_stream(self, stream: RaceStream) -> None:
        """Do without the next runner: this one goes on to where the one after it began."""
        at = self.streams.index(stream) + 1
        skipped = self.streams[at]
        is_by_ids = stream.expected_ids is not None
        if skipped.end is None or skipped.complete or is_by_ids != (skipped.expected_ids is not None):
            self._drop_streams_after(stream)
            return
        stream.end = len(stream.expected) + skipped.end
        stream.expected += skipped.expected
        if stream.expected_ids is not None and skipped.expected_ids is not None:
            stream.expected_ids = stream.expected_ids + skipped.expected_ids
        self.num_cancelled_tokens += skipped.num_tokens
        self._close(skipped)
        del self.streams[at]

    def _follow_or_leave_draft(self, stream: RaceStream, num_new: int, *, may_arrive: bool) -> None:
        if not self._matches_draft(stream, num_new):
            self._handle_departure_from_draft(stream)
        elif not may_arrive:
            return
        elif stream.end is not None and stream.has_reached_next_stream(greedy=self._greedy):
            self._hand_over_to_next_stream(stream)
        elif stream.has_overshot_next_stream():
            self._skip_next_stream(stream)  # the border fell inside a piece

    def _matches_draft(self, stream: RaceStream, num_new: int) -> bool:
        num_agreed = stream.compare_with_draft(num_new)
        if num_agreed:
            stream.num_agreed += num_agreed
            self.num_agreed += num_agreed
            self._pair_stats.runs.add_right_tokens(self.run_length, num_agreed)
            self.run_length += num_agreed
        return num_agreed is not None

    def _handle_departure_from_draft(self, stream: RaceStream) -> None:
        """It wrote something else than the draft."""
        self._pair_stats.runs.add_wrong_token(self.run_length)
        self.run_length = 0
        self._end_draft_round(stream, rejected=True)
        self._drafted.drop_after(stream.num_checked_characters)
        self._drop_streams_after(stream)
        stream.reset_expected_text()
        self.is_draft_wrong = True

    def _end_draft_round(self, stream: RaceStream, *, rejected: bool) -> None:
        draft_s = self._drafted.take_draft_s(len(stream.prefix), stream.num_checked_characters, rejected=rejected)
        stream.close_round(draft_s, rejected=rejected)

    def _hand_over_to_next_stream(self, stream: RaceStream) -> None:
        child = self.streams[self.streams.index(stream) + 1]
        if child.timer.first_s is None:
            self._skip_next_stream(stream)  # too late: the older one is ahead of it
            return
        num_beyond = len(split_into_pieces(stream.text[len(stream.expected) :]))
        if stream.expected_ids is not None and stream.token_ids is not None:
            num_beyond = len(stream.token_ids) - len(stream.expected_ids)
        stream.num_tokens -= num_beyond
        self.num_cancelled_tokens += num_beyond
        self._end_draft_round(stream, rejected=False)
        stream.text = stream.expected
        stream.complete = True
        self.num_takeovers += 1
        self._close(stream)

    def _emit_confirmed_text(self) -> None:
        """Everything that is confirmed and has not been shown yet."""
        while True:
            root = self.streams[0]
            self._end_answer_at_limits(root)
            if len(root.text) > self._num_shown:
                ids = None if root.token_ids is None else tuple(root.token_ids[self._num_shown_ids : root.num_tokens])
                origin: Origin = "accepted" if self._num_completed_streams else "plain"
                self.output_events.append(TextDelta(root.text[self._num_shown :], origin, ids))
                root.is_shown = True
                self._num_shown, self._num_shown_ids = len(root.text), root.num_tokens
            if root.finish is not None:
                self._end_draft_round(root, rejected=False)
            self._emit_rounds(root)
            if not root.complete:
                break
            del self.streams[0]
            self._ends += self._iterate_piece_ends(root)
            self._num_done_tokens += root.num_tokens
            self._num_shown = self._num_shown_ids = 0
            self._num_completed_streams += 1
        self.finish = root.finish

    def _iterate_piece_ends(self, stream: RaceStream) -> Iterator[tuple[int, int]]:
        """Behind each piece of a confirmed runner: tokens and characters of the answer."""
        for num_tokens, end in stream.ends:
            if num_tokens < stream.num_tokens and end < len(stream.text):
                yield self._num_done_tokens + num_tokens, len(stream.prefix) + end
        yield self._num_done_tokens + stream.num_tokens, len(stream.prefix) + len(stream.text)

    def _end_answer_at_limits(self, root: RaceStream) -> None:
        """End the answer where the request, or the decoder's limit of rounds, wants it to end."""
        limits: list[tuple[int, StoppedBy]] = []
        if self._max_tokens is not None:
            limits.append((self._max_tokens - self._num_done_tokens, "max_tokens"))
        if self._max_rounds is not None:
            room = root.num_tokens_after_rounds(self._max_rounds - self._num_rounds)
            if room is not None:
                limits.append((room, "max_iterations"))
        if not limits:
            return
        num_tokens, stopped_by = min(limits)
        if root.num_tokens < num_tokens or (root.num_tokens == num_tokens and root.finish is not None):
            return
        self.num_cancelled_tokens += root.truncate_to_tokens(num_tokens)
        root.complete, self.is_cut = False, True
        root.finish = Finish("length", None, stopped_by)
        self._drop_streams_after(root)

    def _emit_rounds(self, root: RaceStream) -> None:
        for round_ in root.rounds:
            self.output_events.append(
                Round(
                    index=self._num_rounds,
                    num_draft_tokens=round_.num_draft,
                    num_accepted_tokens=round_.num_accepted,
                    num_emitted_tokens=round_.num_emitted,
                    draft_s=round_.draft_s,
                    verify_s=round_.verify_s,
                )
            )
            self._num_rounds += 1
        root.rounds.clear()


def find_stream_boundary(text: str, start: int, num_pieces: int) -> int | None:
    """Where a stream may begin, at least `num_pieces` pieces behind `start`; None: nowhere yet."""
    ends = islice(iterate_piece_ends(text, start), num_pieces - 1, None)
    first = next(ends, None)
    if first is None:
        return None
    return next(
        (m.start() for m in _SAFE_BOUNDARY.finditer(text, first) if not _OPEN_FENCE.search(text[: m.start()])), None
    )
