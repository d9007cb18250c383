"""DraftCall: one call of a draft, read within its limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.contract.errors import DraftError
from llm_spec.contract.events import FinishReason
from llm_spec.contract.request import ChatRequest
from llm_spec.measure.tokens import count_piece_tokens, split_into_pieces

__all__ = ["DraftCall", "choose_max_draft_tokens"]

_DEFAULT_ANSWER_TOKENS: Final = 4096  # for requests without a limit
_MAX_ANSWER_TOKENS: Final = 16_384  # for requests with a limit that is too high to matter
# read between two turns of the event loop, from a draft that has them all ready
_PIECES_PER_LOOP_TURN: Final = 64
# pieces of text in one token at most: `):` is two pieces, and often one token
_TOKEN_PIECES: Final = 2


class DraftCall:
    """One call of a draft for at most `max_tokens` tokens; it drops any further output.

    Tokens are counted by their ids. Text without ids is counted in pieces, at least one for each
    item. A token may have two pieces, so such text is cut at `2 * max_tokens` pieces, and at
    `max_pieces` in any case.
    """

    def __init__(
        self, draft: DraftProvider, request: ChatRequest, max_tokens: int, *, max_pieces: int | None = None
    ) -> None:
        self.num_tokens = 0  # written so far, including those beyond the limit
        self._num_delivered_tokens = 0  # pieces from the draft
        self._draft = draft
        self._request = request
        self._max_tokens = max_tokens
        self._max_pieces = _TOKEN_PIECES * max_tokens
        if max_pieces is not None:
            self._max_pieces = min(self._max_pieces, max_pieces)
        self._has_ended = self._is_over = False
        self._patience: asyncio.Timeout | None = None  # set while the draft is being read
        self._task: asyncio.Task[object] | None = None
        self._finish_reason: FinishReason | None = None

    @property
    def has_reached_max_tokens(self) -> bool:
        """True if it wrote as many tokens as requested."""
        return self._is_over or self.num_tokens >= self._max_tokens

    @property
    def is_complete(self) -> bool:
        """True if the draft ended by itself."""
        return self._has_ended and not self.has_reached_max_tokens and self._finish_reason != "length"

    async def read_pieces(self, on_piece: Callable[[DraftPiece, int], None]) -> None:
        """Read the call to its end or limit.

        `on_piece` gets each piece within the limit, and how many tokens the draft wrote for it.
        Raises whatever the draft raises. CancelledError becomes DraftError unless the request was
        cancelled.
        """
        task = self._task = asyncio.current_task()
        num_cancelling = 0 if task is None else task.cancelling()
        try:
            async with self._draft.draft(self._request, self._max_tokens) as pieces:
                await self._read_until_limit(pieces, on_piece)
        except asyncio.CancelledError as error:
            if task is None or task.cancelling() > num_cancelling:
                raise
            raise DraftError("the draft was cancelled, but the request was not") from error

    def end_with_timeout(self) -> None:
        """End `read_pieces` because the draft is too slow.

        The draft sees TimeoutError, so that its circuit breaker counts a failure.
        """
        patience, self._patience = self._patience, None
        if patience is not None:
            patience.reschedule(0.0)
        elif self._task is not None:
            self._task.cancel()

    async def _read_until_limit(
        self, pieces: AsyncIterator[DraftPiece], on_piece: Callable[[DraftPiece, int], None]
    ) -> None:
        patience = asyncio.timeout(None)
        async with patience:
            self._patience = patience
            try:
                async for piece in pieces:
                    on_piece(*self._cut_and_count_piece(piece))
                    if self._is_over:
                        return
                    if self._num_delivered_tokens % _PIECES_PER_LOOP_TURN == 0:
                        await asyncio.sleep(0)
                self._has_ended = True
            finally:
                self._patience = None

    def _cut_and_count_piece(self, piece: DraftPiece) -> tuple[DraftPiece, int]:
        """Return the usable part of a piece, and how many tokens the piece has."""
        self._finish_reason = piece.finish_reason or self._finish_reason
        self._num_delivered_tokens += piece.finish_reason is None
        has_room = self._num_delivered_tokens <= self._max_tokens
        limit = self._max_tokens if piece.token_ids else self._max_pieces
        num_left = max(0, limit - self.num_tokens) if has_room else 0
        num_new = count_piece_tokens(piece) or len(
            split_into_pieces(piece.text)
        )  # ids may be missing although there is text
        self.num_tokens += num_new
        self._is_over = num_new > num_left or not has_room
        if self._is_over:
            piece = DraftPiece("".join(split_into_pieces(piece.text)[:num_left]))
        return piece, num_new


def choose_max_draft_tokens(request: ChatRequest, default: int = _DEFAULT_ANSWER_TOKENS) -> int:
    """Return how many tokens to request for a draft of a whole answer."""
    return min(request.max_tokens or default, _MAX_ANSWER_TOKENS)
