"""DraftFeed: one request's draft in the background, begun anew wherever the answer departs from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from llm_spec._clock import clock
from llm_spec.chat import ChatRequest, Usage
from llm_spec.drafting.ngrams import Follower
from llm_spec.drafting.pieces import split_pieces
from llm_spec.errors import one_line
from llm_spec.provider import DraftPiece, DraftProvider

__all__ = ["DraftFeed"]

_WHOLE_ANSWER: Final = 4096  # tokens, where the request sets no limit


class DraftFeed:
    """What a draft says comes next. `restart` says where the answer stands; `text` is the guess at what follows that.

    It has `ended`, by itself or (`is_cut`) because it had written as much as was asked for.

    `news` is called, on the event loop, whenever `text`, `ended` or `failure` has changed. A draft that cannot continue
    a prefix is asked once, and its text realigned with the answer. `max_tokens` bounds all that is drafted (None: no
    bound), in pieces where a draft tells no ids; `timeout_s` the wait for one piece. Whoever made it calls `aclose`.
    """

    def __init__(
        self,
        draft: DraftProvider,
        request: ChatRequest,
        *,
        max_tokens: int | None,
        timeout_s: float,
        news: Callable[[], None],
    ) -> None:
        self.text = ""
        self.ended = True
        self.is_cut = False
        self.failure: str | None = None
        self.usage: Usage | None = None
        self.num_tokens = 0
        self._writing_s = 0.0
        self._num_timed = 0
        self._draft = draft
        self._request = request
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._news = news
        self._continues = bool(getattr(draft, "continues_prefix", True))
        self._run: _Run | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def token_s(self) -> float:
        """Seconds between two of the draft's tokens; 0 before it was measured."""
        return self._writing_s / self._num_timed if self._num_timed else 0.0

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be drafted, or can be."""
        return self.failure is not None or (self._max_tokens is not None and self.num_tokens >= self._max_tokens)

    def restart(self, answer: str, num_tokens: int) -> None:
        """Guess `num_tokens` tokens of what follows `answer`, the text since the request's own prefix."""
        self.text = ""
        if self.is_spent:
            self.ended = True
            return
        if self._run is not None and not self._continues:
            self._run.realign(self._request.prefix + answer)
            self._show(self._run)
            return
        self._cancel()
        self.ended = self.is_cut = False
        prefix = self._request.prefix + answer
        run = _Run(prefix if self._continues else "")
        request = replace(self._request, prefix=run.prefix, stop=())
        self._run = run
        if not self._continues:
            run.realign(self._request.prefix + answer)
        task = asyncio.create_task(self._collect(run, request, self._allowed(num_tokens)))
        run.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """End all that runs for it; what that raises is nobody's concern."""
        self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------ inside

    def _cancel(self) -> None:
        if self._run is not None and self._run.task is not None:
            self._run.task.cancel()
        self._run = None

    def _allowed(self, num_tokens: int) -> int:
        """How many tokens one call may draft; a draft that writes once writes the whole answer."""
        if not self._continues:
            num_tokens = self._request.max_tokens or _WHOLE_ANSWER
        return num_tokens if self._max_tokens is None else min(num_tokens, self._max_tokens - self.num_tokens)

    async def _collect(self, run: _Run, request: ChatRequest, num_tokens: int) -> None:
        seconds = clock()
        spent = self.num_tokens
        try:
            async with (
                asyncio.timeout(self._timeout_s) as patience,
                self._draft.draft(request, num_tokens) as pieces,
            ):
                last_s, moved_s = None, seconds()
                async for piece in pieces:
                    now = seconds()
                    num_new = self._take(run, piece)
                    if last_s is not None and num_new:
                        self._writing_s += now - last_s
                        self._num_timed += num_new
                    last_s = now
                    if self.is_spent:
                        break
                    if now - moved_s > 0.01 * self._timeout_s:  # moving a timer is dear
                        patience.reschedule(now + self._timeout_s)
                        moved_s = now
        except TimeoutError:
            self._fail(run, f"late: the draft was silent for {self._timeout_s:.3g} s")
        except Exception as error:  # noqa: BLE001 - whatever a draft does, the target answers
            self._fail(run, one_line(error))
        run.ended, run.is_cut = True, self._continues and self.num_tokens - spent >= num_tokens
        self._show(run)

    def _take(self, run: _Run, piece: DraftPiece) -> int:
        num_new = len(split_pieces(piece.text)) if piece.token_ids is None else len(piece.token_ids)
        self.num_tokens += num_new
        if piece.usage is not None:
            self.usage = piece.usage if self.usage is None else self.usage + piece.usage
        run.written += piece.text
        self._show(run)
        return num_new

    def _fail(self, run: _Run, failure: str) -> None:
        if run is self._run:
            self.failure = failure

    def _show(self, run: _Run) -> None:
        if run is self._run:
            self.text, self.ended, self.is_cut = run.guess(), run.ended, run.is_cut
            self._news()


class _Run:
    """One call of the draft and where the answer stands in what it wrote."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.rstrip()  # chat templates strip what is behind it
        self.written = ""
        self.ended = self.is_cut = False
        self.task: asyncio.Task[None] | None = None
        self._seam = prefix[len(self.prefix) :]
        self._answer: str | None = None  # where it was last realigned, of a draft that writes once
        self._start: int | None = 0

    def guess(self) -> str:
        """What it wrote about the text that follows the answer."""
        if self._answer is not None and self._start is None:
            self.realign(self._answer)
        if self._start is None:
            return ""
        text = self.written[self._start :]
        if not self._seam:
            return text
        if text.startswith(self._seam):
            return text[len(self._seam) :]
        return "" if self._seam.startswith(text) else text.lstrip()

    def realign(self, answer: str) -> None:
        """Go on behind the longest match of the answer's end."""
        self._answer = answer
        if self.written.startswith(answer) or answer.startswith(self.written):
            self._start = len(answer)
            return
        follower = Follower(split_pieces(self.written))
        at = follower.position(split_pieces(answer))
        self._start = None if at is None else sum(map(len, follower.items[:at]))
