"""FullDraft: a draft that writes to its end in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.contract.errors import format_error_line
from llm_spec.contract.request import ChatRequest
from llm_spec.drafting.draft_call import DraftCall, choose_max_draft_tokens

__all__ = ["FullDraft"]

_DRAFT_TOKENS: Final = 1024  # for requests without a limit


class FullDraft:
    """The text that a draft has written so far; `failure` is its error, or None.

    It may write `max_tokens` tokens, and be silent for `timeout_s` seconds.
    """

    def __init__(self, draft: DraftProvider, request: ChatRequest, *, max_tokens: int | None, timeout_s: float) -> None:
        self._max_tokens = choose_max_draft_tokens(request, _DRAFT_TOKENS)
        if max_tokens is not None:
            self._max_tokens = min(self._max_tokens, max_tokens)
        self._patience_s = timeout_s
        request = replace(request, top_logprobs=None)  # log-probabilities are only for the answer
        self._call = DraftCall(draft, request, self._max_tokens, max_pieces=max_tokens)
        self._task: asyncio.Task[None] | None = None
        self._is_abandoned = False
        self.text = ""
        self.failure: str | None = None

    @asynccontextmanager
    async def read_in_background(self) -> AsyncGenerator[None]:
        """Let the draft write while the context is open, and close it then."""
        self._task = asyncio.create_task(self._read_draft_call())
        try:
            yield
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def wait_for_end(self, timeout_s: float, late_message: str) -> None:
        """Wait for the draft's end.

        If it takes longer than `timeout_s`, it fails with `late_message`, and its later text is not
        used.
        """
        if self._task is None:
            return
        _, unfinished = await asyncio.wait([self._task], timeout=timeout_s)
        if unfinished:
            self._is_abandoned, self.failure = True, late_message
            if timeout_s < self._patience_s:  # it was not given the time that it may take
                self._task.cancel()
            else:
                self._call.end_with_timeout()

    async def _read_draft_call(self) -> None:
        if self._max_tokens < 1:
            return
        try:
            await self._call.read_pieces(self._add_text_unless_abandoned)
        except Exception as error:  # noqa: BLE001 - whatever a draft does, the target answers
            self._record_failure_unless_abandoned(format_error_line(error))

    # the call counts tokens
    def _add_text_unless_abandoned(self, piece: DraftPiece, _: int) -> None:
        if not self._is_abandoned:
            self.text += piece.text

    def _record_failure_unless_abandoned(self, failure: str) -> None:
        if not self._is_abandoned:
            self.failure = failure
