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

_DEFAULT_ANSWER_TOKENS: Final = 4096  # tokens, where the request sets no limit …
_MAX_ANSWER_TOKENS: Final = 16_384  # … and where it sets one that limits nothing, as a large budget does
_PIECES_PER_LOOP_TURN: Final = 64  # read between two turns of the event loop, from a draft that has them all ready
_TOKEN_PIECES: Final = 2  # in a token at most: `):` is two pieces of text, and often one token


class DraftCall:
    """One call of a draft for at most `max_tokens` tokens; what it writes beyond them is not used, and it is left.

    Tokens are counted by their ids. Of text without ids each item is a token or more. It is counted in pieces, of which
    a token may have two: it is cut at twice as many, and at `max_pieces` in any case.
    """

    def __init__(
        self, draft: DraftProvider, request: ChatRequest, max_tokens: int, *, max_pieces: int | None = None
    ) -> None:
        self.num_tokens = 0  # written so far, with those beyond the limit
        self._num_delivered_tokens = 0  # pieces that the draft gave
        self._draft = draft
        self._request = request
        self._max_tokens = max_tokens
        self._max_pieces = _TOKEN_PIECES * max_tokens
        if max_pieces is not None:
            self._max_pieces = min(self._max_pieces, max_pieces)
        self._has_ended = self._is_over = False
        self._patience: asyncio.Timeout | None = None  # while its draft is being read
        self._task: asyncio.Task[object] | None = None
        self._finish_reason: FinishReason | None = None

    @property
    def has_reached_max_tokens(self) -> bool:
        """Whether it wrote as much as was requested."""
        return self._is_over or self.num_tokens >= self._max_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the draft came to an end of its own."""
        return self._has_ended and not self.has_reached_max_tokens and self._finish_reason != "length"

    async def read_pieces(self, on_piece: Callable[[DraftPiece, int], None]) -> None:
        """Read it to its end or limit; `on_piece` gets each piece, within the limit, and how many tokens were written.

        Raises whatever the draft raises. CancelledError without a cancelled request becomes DraftError.
        """
        task = self._task = asyncio.current_task()
        num_cancelling = 0 if task is None else task.cancelling()
        try:
            async with self._draft.draft(self._request, self._max_tokens) as pieces:
                await self._read_until_limit(pieces, on_piece)
        except asyncio.CancelledError as error:
            if task is None or task.cancelling() > num_cancelling:
                raise
            raise DraftError("the draft was cancelled, and nobody cancelled the request") from error

    def end_with_timeout(self) -> None:
        """Too slow: end `read_pieces`. The draft sees TimeoutError, so that its circuit breaker counts a failure."""
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
        """What may be used of a piece, and how many tokens it is."""
        self._finish_reason = piece.finish_reason or self._finish_reason
        self._num_delivered_tokens += piece.finish_reason is None
        has_room = self._num_delivered_tokens <= self._max_tokens
        limit = self._max_tokens if piece.token_ids else self._max_pieces
        num_left = max(0, limit - self.num_tokens) if has_room else 0
        num_new = count_piece_tokens(piece) or len(
            split_into_pieces(piece.text)
        )  # ids may be none although there is text
        self.num_tokens += num_new
        self._is_over = num_new > num_left or not has_room
        if self._is_over:
            piece = DraftPiece("".join(split_into_pieces(piece.text)[:num_left]))
        return piece, num_new


def choose_max_draft_tokens(request: ChatRequest, default: int = _DEFAULT_ANSWER_TOKENS) -> int:
    """How many tokens to request of a draft of a whole answer."""
    return min(request.max_tokens or default, _MAX_ANSWER_TOKENS)
