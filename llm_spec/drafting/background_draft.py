"""One request's draft in the background, restarted when the answer departs from it."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from llm_spec.contract.draft import DraftPiece, DraftProvider, get_draft_capabilities
from llm_spec.contract.errors import format_error_line
from llm_spec.contract.optional import open_draft_for_request
from llm_spec.contract.request import ChatRequest
from llm_spec.drafting.copying import TextIndex
from llm_spec.drafting.draft_call import DraftCall, choose_max_draft_tokens
from llm_spec.measure.clock import get_loop_clock
from llm_spec.measure.tokens import take_last_pieces

__all__ = ["BackgroundDraft"]

_MAX_MATCH: Final = 8  # pieces


class BackgroundDraft:
    """Holds `text`, the draft's guess at what follows the answer.

    `restart` says how far the answer has got. The draft has `ended` if it has written the requested
    number of tokens (`is_cut`: more may follow), if it has written all it has to say
    (`is_complete`), or if it has failed.

    `changed` is called on the event loop whenever `text`, `ended` or `failure` has changed. A draft
    that cannot continue a prefix is called once, and its text is realigned with the answer.
    `first_piece_s` is how long calls of the draft had been open when its first piece came.
    `max_tokens` bounds all drafted tokens (None: no bound), in pieces if a draft gives no ids.
    `timeout_s` bounds the wait for one piece. The owner calls `aclose`.
    """

    def __init__(
        self,
        draft: DraftProvider,
        request: ChatRequest,
        *,
        max_tokens: int | None,
        timeout_s: float,
        changed: Callable[[], None],
    ) -> None:
        self.text = ""
        self.ended = True
        self.is_cut = self.is_complete = False
        self.failure: str | None = None
        self.num_tokens = 0
        self.first_piece_s: float | None = None
        self._clock = get_loop_clock()
        self._num_open_calls = 0
        # when the current calls began, and the total before
        self._open_since_s = self._open_s = 0.0
        self._alarm_s: float | None = None
        self._ring: Callable[[], None] = changed
        self._alarm: asyncio.TimerHandle | None = None
        self._writing_s = 0.0
        self._num_timed = 0
        self._draft = open_draft_for_request(draft)
        self._request = request
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._changed = changed
        self._continues = get_draft_capabilities(draft).continues_prefix
        self._run: _DraftRun | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def token_s(self) -> float:
        """Seconds between two of the draft's tokens; 0 before the first measurement."""
        return self._writing_s / self._num_timed if self._num_timed else 0.0

    def measure_drafting_s(self) -> float:
        """Return the seconds for which calls of the draft have been open so far."""
        return self._open_s + (self._clock() - self._open_since_s if self._num_open_calls else 0.0)

    def set_alarm(self, drafting_s: float, ring: Callable[[], None]) -> None:
        """Have `ring` called once `measure_drafting_s` reaches `drafting_s`.

        This replaces the last alarm.
        """
        self._alarm_s, self._ring = drafting_s, ring
        self._start_alarm()

    def list_piece_times(self, start: int, end: int) -> list[tuple[int, float]]:
        """List the end of each piece in `text[start:end]`, and its drafting time in seconds.

        The first piece of a call begins with the call.
        """
        run = self._run
        if run is None:
            return []
        num_before = len(run.written_text) - len(self.text)
        return [
            (at - num_before, seconds) for at, seconds in run.iterate_piece_times(num_before + start, num_before + end)
        ]

    def find_token_ids(self, start: int, end: int) -> list[int] | None:
        """Return the draft's own ids of `text[start:end]`.

        Returns None if the draft gives no ids, or if some ids also belong to other text.
        """
        run = self._run
        if run is None or start >= end:
            return None
        num_before = len(run.written_text) - len(self.text)
        return run.find_token_ids(num_before + start, num_before + end)

    @property
    def is_exhausted(self) -> bool:
        """True if nothing more may be drafted, or can be."""
        return self.failure is not None or (self._max_tokens is not None and self.num_tokens >= self._max_tokens)

    def restart(self, answer: str, num_tokens: int) -> None:
        """Draft `num_tokens` tokens after `answer`, the text since the request's own prefix."""
        self.text = ""
        if self._run is not None and not self._continues:
            self._run.align_with_answer(self._request.prefix + answer)
            self._publish_text(self._run)
            return
        self._cancel_current_run()
        if self.is_exhausted:
            self.ended = True
            return
        self.ended = self.is_cut = self.is_complete = False
        prefix = self._request.prefix + answer
        run = _DraftRun(prefix if self._continues else "", writes_once=not self._continues)
        request = replace(self._request, prefix=run.prefix, stop=())
        self._run = run
        if not self._continues:
            run.align_with_answer(self._request.prefix + answer)
        max_tokens_left = None if self._max_tokens is None else self._max_tokens - self.num_tokens
        call = DraftCall(self._draft, request, self._limit_call_tokens(num_tokens), max_pieces=max_tokens_left)
        task = asyncio.create_task(self._read_draft_call(run, call))
        run.task, run.call = task, call
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abandon_as_late(self, failure: str) -> None:
        """End a draft that takes too long, for the reason `failure`; its text stays."""
        if self._run is not None and self._run.call is not None:
            self._run.call.end_with_timeout()
        self._run = None
        self.failure, self.ended, self.is_complete = failure, True, False

    def stop(self) -> None:
        """Cancel the draft's work and forget its text; it can be restarted."""
        self._cancel_current_run()
        self.text, self.ended, self.is_cut, self.is_complete = "", True, False, False

    async def aclose(self) -> None:
        """Cancel all of its tasks and wait for them; their errors are ignored."""
        self._cancel_current_run()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --------------------------------------------------------------------------------------- inside

    def _cancel_current_run(self) -> None:
        if self._run is not None and self._run.task is not None:
            self._run.task.cancel()
        self._run = None

    def _limit_call_tokens(self, num_tokens: int) -> int:
        """Return how many tokens one call may draft: a whole answer if it writes once."""
        if not self._continues:
            num_tokens = choose_max_draft_tokens(self._request)
        return num_tokens if self._max_tokens is None else min(num_tokens, self._max_tokens - self.num_tokens)

    async def _read_draft_call(self, run: _DraftRun, call: DraftCall) -> None:
        seconds = get_loop_clock()
        last_s: float | None = None
        began_s = moved_s = seconds()
        patience = asyncio.timeout(self._timeout_s)

        def add_piece(piece: DraftPiece, num_new: int) -> None:
            nonlocal last_s, moved_s
            now = seconds()
            self.num_tokens += num_new
            if self.first_piece_s is None:
                self.first_piece_s = self.measure_drafting_s()
            if last_s is not None and num_new:
                self._writing_s += now - last_s
                self._num_timed += num_new
            last_s = now
            # moving a timer is expensive
            if now - moved_s > 0.01 * self._timeout_s and not patience.expired():
                patience.reschedule(now + self._timeout_s)
                moved_s = now
            run.append_piece(piece, now - began_s)
            self._publish_text(run)

        self._count_open_call(1)
        try:
            async with patience:
                await call.read_pieces(add_piece)
        except Exception as error:  # noqa: BLE001 - whatever a draft does, the target answers
            is_late = patience.expired() and isinstance(error, TimeoutError)
            late = f"late: the draft was silent for {self._timeout_s:.3g} s"
            self._record_run_failure(run, late if is_late else format_error_line(error))
        finally:
            self._count_open_call(-1)
        run.ended, run.is_cut, run.is_complete = True, self._continues and call.has_reached_max_tokens, call.is_complete
        self._publish_text(run)

    def _count_open_call(self, change: int) -> None:
        self._open_s = self.measure_drafting_s()
        self._open_since_s = self._clock()
        self._num_open_calls += change
        self._start_alarm()

    def _start_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm_s is not None and self._num_open_calls:
            wait_s = max(0.0, self._alarm_s - self.measure_drafting_s())
            self._alarm = asyncio.get_running_loop().call_later(wait_s, self._ring_alarm)

    def _ring_alarm(self) -> None:
        self._alarm_s = self._alarm = None
        self._ring()

    def _record_run_failure(self, run: _DraftRun, failure: str) -> None:
        if run is self._run:
            self.failure = failure

    def _publish_text(self, run: _DraftRun) -> None:
        if run is self._run:
            self.text, self.ended = run.get_text_after_answer(), run.ended
            self.is_cut, self.is_complete = run.is_cut, run.is_complete
            self._changed()


class _DraftRun:
    """One call of the draft, and the answer's position in its text."""

    def __init__(self, prefix: str, *, writes_once: bool) -> None:
        self.prefix = prefix.rstrip()  # chat templates strip trailing space
        self.written_text = ""
        self.ended = self.is_cut = self.is_complete = False
        self.task: asyncio.Task[None] | None = None
        self.call: DraftCall | None = None
        self._seam = prefix[len(self.prefix) :]
        self._start: int | None = 0  # in the written text; None: not found yet
        self._answer = ""  # its last alignment, if the draft writes once
        self._index = TextIndex() if writes_once else None
        self._ends: list[int] = []  # where its pieces end in the written text
        self._times_s: list[float] = []  # when they came, in seconds since the call
        self._token_ids: list[tuple[int, ...] | None] = []  # their ids, if the draft gives them

    def append_piece(self, piece: DraftPiece, time_s: float) -> None:
        self.written_text += piece.text
        self._ends.append(len(self.written_text))
        self._times_s.append(time_s)
        self._token_ids.append(piece.token_ids)
        if self._index is not None:
            num_changed = len(piece.text) + 1  # the piece before may have grown
            self._index.update_last_text_partly(self.written_text, num_changed)

    def find_token_ids(self, start: int, end: int) -> list[int] | None:
        """Return the draft's own ids of a stretch of the written text.

        Returns None if the draft gives no ids, or if they do not match the stretch exactly. Ids
        without text belong to the text that follows, as the beginning of a character.
        """
        first, stop = self._count_pieces_until(start), self._count_pieces_until(end)
        if first == stop or (start and self._ends[first - 1] != start) or self._ends[stop - 1] != end:
            return None
        pieces = self._token_ids[first:stop]
        known = [ids for ids in pieces if ids is not None]
        return [token_id for ids in known for token_id in ids] if len(known) == len(pieces) else None

    def _count_pieces_until(self, end: int) -> int:
        """Count the pieces that end at `end` or before, without empty ones that follow."""
        if not end:
            return 0
        index = bisect_left(self._ends, end)
        return index + (index < len(self._ends) and self._ends[index] == end)

    def iterate_piece_times(self, start: int, end: int) -> Iterator[tuple[int, float]]:
        """Yield where the pieces in a stretch end, and how many seconds each took."""
        for index in range(self._count_pieces_until(start), self._count_pieces_until(end)):
            yield self._ends[index], self._times_s[index] - (self._times_s[index - 1] if index else 0.0)

    def get_text_after_answer(self) -> str:
        """Return the written text that follows the answer."""
        if self._start is None:
            self._start = self._find_answer_end()
            if self._start is None:
                return ""
        text = self.written_text[self._start :]
        if not self._seam:
            return text
        if text.startswith(self._seam):
            return text[len(self._seam) :]
        return "" if self._seam.startswith(text) else text.lstrip()

    def align_with_answer(self, answer: str) -> None:
        """Continue after the longest match of the answer's end."""
        self._answer, self._start = answer, None

    def _find_answer_end(self) -> int | None:
        """Return where the answer ends in the written text, or None if it does not, or not yet."""
        if self.written_text.startswith(self._answer):
            return len(self._answer)
        if self._index is None or self._answer.startswith(self.written_text):
            return None  # the answer is ahead of it
        return self._index.find_match_end(take_last_pieces(self._answer, _MAX_MATCH), _MAX_MATCH)
