"""EncodedDraft: a draft's text in a target's own token ids, and where the answer stands in it."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from llm_spec.contract.endpoint import TokenEndpoint
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.measure.shared_vocabulary import SharedVocabularyStats

__all__ = ["EncodedDraft"]

_MAX_ENCODINGS: Final = 4  # at a time, in order: each may cost a round trip
# What a tokenizer may still join with the text that comes: the last run of letters, of signs or of whitespace.
_OPEN_WORD: Final = re.compile(r"(?: ?\w+| ?[^\w\s]+|\s+)\Z")
_ENCODING_WINDOW: Final = 64  # characters at a text's end in which it is looked for first


class LateTokenCounts(NamedTuple):
    """Tokens of a draft that came after the target's own: how many were the same, and how many not."""

    num_agreed: int
    num_different: int


class _PendingEncoding(NamedTuple):
    """A stretch of text that is being encoded, and how long the draft took for it.

    `own_ids`: the draft's; None: it tells none, or not just of this stretch.
    """

    task: asyncio.Task[list[int]]
    seconds: float
    own_ids: list[int] | None


class EncodedDraft:
    """What a `BackgroundDraft` says, encoded as it comes; `ids` are those that follow the confirmed answer.

    `seconds` are those that the draft took for each of them: what is encoded at once is divided evenly.
    A draft whose own ids are found to be the target's is not encoded.
    `is_wrong` is set once the target's own token is not the draft's. `changed` is called when `ids` or `failure`
    change.
    """

    def __init__(
        self,
        background_draft: BackgroundDraft,
        endpoint: TokenEndpoint,
        shared_vocabulary: SharedVocabularyStats,
        changed: Callable[[], None],
    ) -> None:
        self.ids: list[int] = []
        self.seconds: list[float] = []
        self.is_wrong = False
        self.failure: Exception | None = None
        self._background_draft = background_draft
        self._endpoint = endpoint
        self._shared_vocabulary = shared_vocabulary
        self._news = changed
        self._base_text = ""  # the answer where the draft was last restarted
        self._open_text = ""  # the end of what it wrote in the call before: what follows may belong to it
        self._open_text_s = 0.0  # that the draft took for it
        self._num_encoded_characters = 0  # characters of `_text`
        self._early_ids: list[int] = []  # confirmed tokens that the draft has yet to come to
        self._encodings: deque[_PendingEncoding] = deque()  # in the order of the text
        self._closing: set[asyncio.Task[list[int]]] = set()
        self._num_agreed = self._num_different = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing more will come: the draft has ended, and what it wrote is encoded.

        Of one that was cut short, the last word may be not: it may go on.
        """
        if not self._background_draft.ended or self._encodings:
            return False
        end, _ = self._find_next_stretch()
        return end == self._num_encoded_characters

    @property
    def _text(self) -> str:
        """What the draft says, from where its last call began, with what is open of the one before."""
        return self._open_text + self._background_draft.text

    def stop(self) -> None:
        """Forget everything, and end what the draft is doing."""
        self._forget_guess()
        self._background_draft.stop()
        self._num_encoded_characters = 0

    def restart(self, answer: str, num_tokens: int) -> None:
        """Forget everything; guess what follows `answer`."""
        self._forget_guess()
        self._restart_background_draft(answer, num_tokens)

    def _forget_guess(self) -> None:
        self._cancel_encodings()
        self.ids.clear()
        self.seconds.clear()
        self._early_ids.clear()
        self.is_wrong = False
        self._open_text, self._open_text_s = "", 0.0

    def extend_guess(self, num_tokens: int) -> None:
        """Guess what follows all that was guessed; for a draft that was cut short."""
        text = self._text
        self._open_text_s = self._measure_drafting_s(self._num_encoded_characters, len(text))
        self._open_text = text[self._num_encoded_characters :]
        self._restart_background_draft(self._base_text + self._background_draft.text, num_tokens)

    def encode_new_text(self) -> None:
        """Take in what the draft has written."""
        if len(self._encodings) >= _MAX_ENCODINGS or self.is_wrong:
            return
        start = self._num_encoded_characters
        end, believed_ids = self._find_next_stretch()
        if believed_ids:
            self._num_encoded_characters = end
            self._append_encoded_ids(believed_ids, self._measure_drafting_s(start, end))
            self._news()
            return
        if end > start:
            self._num_encoded_characters = end
            task = asyncio.ensure_future(self._endpoint.encode(self._text[start:end]))
            task.add_done_callback(self._collect_finished_encodings)
            seconds, own_ids = self._measure_drafting_s(start, end), self._find_own_ids(start, end)
            self._encodings.append(_PendingEncoding(task, seconds, own_ids))

    def take_late_token_counts(self) -> LateTokenCounts:
        """The tokens that were late for the target's own, since this was last called."""
        judged = LateTokenCounts(self._num_agreed, self._num_different)
        self._num_agreed = self._num_different = 0
        return judged

    def confirm_token(self, token_id: int) -> None:
        """The target's own next token."""
        if not self.ids:
            self._early_ids.append(token_id)
            return
        del self.seconds[0]
        is_right = self.ids.pop(0) == token_id
        self._shared_vocabulary.add_confirmed_token(is_right=is_right)
        if not is_right:
            self.is_wrong = True

    async def aclose(self) -> None:
        """End what is under way."""
        self._cancel_encodings()
        await asyncio.gather(*self._closing, return_exceptions=True)

    # ------------------------------------------------------------------------------------------ inside

    def _find_next_stretch(self) -> tuple[int, list[int] | None]:
        """Where in `_text` that ends which can be taken in now, and its ids, if the draft's own are believed.

        It is all of the text where nothing can follow, or where its ids are believed.
        """
        draft, start, text = self._background_draft, self._num_encoded_characters, self._text
        if self._shared_vocabulary.is_believed and not self._encodings:
            believed_ids = self._find_own_ids(start, len(text))
            if believed_ids:
                return len(text), believed_ids
        end = start + _find_last_word_start(text[start:])
        is_whole = not draft.is_cut or draft.is_exhausted
        is_endless_word = end == 0  # the draft wrote nothing else, and would never come to an end of it
        return len(text) if draft.ended and (is_whole or is_endless_word) else end, None

    def _find_own_ids(self, start: int, end: int) -> list[int] | None:
        """Those of `_text[start:end]`, which nothing of an earlier call belongs to."""
        num_before = len(self._open_text)
        return (
            self._background_draft.find_token_ids(start - num_before, end - num_before) if start >= num_before else None
        )

    def _measure_drafting_s(self, start: int, end: int) -> float:
        """How long the draft took for a stretch of `_text`."""
        num_before = len(self._open_text)
        times = self._background_draft.list_piece_times(max(0, start - num_before), end - num_before)
        return sum(seconds for _, seconds in times) + (self._open_text_s if start == 0 else 0.0)

    def _restart_background_draft(self, answer: str, num_tokens: int) -> None:
        self._base_text, self._num_encoded_characters = answer, 0
        self._background_draft.restart(answer, num_tokens)

    def _cancel_encodings(self) -> None:
        for encoding in self._encodings:
            encoding.task.cancel()
            self._closing.add(encoding.task)
            encoding.task.add_done_callback(self._closing.discard)
        self._encodings.clear()

    def _collect_finished_encodings(self, _: asyncio.Task[list[int]]) -> None:
        """Take in what is encoded, up to the first stretch that is not yet."""
        while self._encodings and self._encodings[0].task.done():
            task, seconds, own_ids = self._encodings.popleft()
            error = task.exception()
            if isinstance(error, Exception):  # only speculation needs it
                self.failure = error
            else:
                if own_ids is not None:
                    token_ids = task.result()
                    self._shared_vocabulary.add_comparison(len(token_ids), has_same=own_ids == token_ids)
                if not self.is_wrong:
                    self._append_encoded_ids(task.result(), seconds)
            self._news()

    def _append_encoded_ids(self, token_ids: list[int], seconds: float) -> None:
        shared = min(len(self._early_ids), len(token_ids))
        pairs = zip(self._early_ids, token_ids, strict=False)
        num_agreed = next((at for at, (own, drafted) in enumerate(pairs) if own != drafted), shared)
        self._num_agreed += num_agreed
        if num_agreed:
            self._shared_vocabulary.add_confirmed_token(is_right=True)
        if num_agreed < shared:
            self._shared_vocabulary.add_confirmed_token(is_right=False)
            self._num_different += 1
            self.is_wrong = True
            return
        del self._early_ids[:shared]
        self.ids += token_ids[shared:]
        self.seconds += [seconds / max(1, len(token_ids))] * (len(token_ids) - shared)


def _find_last_word_start(text: str) -> int:
    """Where the run begins that the text ends with."""
    size = _ENCODING_WINDOW
    while True:
        start = max(0, len(text) - size)
        found = _OPEN_WORD.search(text, start)
        if found is None or found.start() > start or start == 0:
            return len(text) if found is None else found.start()
        size *= 2  # the run may be longer
