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
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from llm_spec.contract.events import Finish, Origin, Round, StoppedBy, StreamEvent, TextDelta, Usage
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.text_pieces import count_piece_tokens, count_words, iterate_piece_ends, split_into_pieces
from llm_spec.strategies.race.stream import DraftPieceTimes, RaceStream

__all__ = ["StreamChain", "find_stream_boundary"]

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
