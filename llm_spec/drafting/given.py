"""A given text as draft: the file being edited, yesterday's answer, a cached reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager

from llm_spec.chat import ChatRequest
from llm_spec.drafting.ngrams import Follower
from llm_spec.drafting.pieces import draft_pieces, split_pieces
from llm_spec.provider import DraftPiece, DraftToken, TokenChooser, TokenDraft, TokenModel

__all__ = ["GivenText"]


class GivenText:
    """Draft a text that the caller expects the answer to follow, in whole or in parts.

    After a difference it goes on behind the longest match of the answer's last tokens (at most 8) with the text.
    """

    name = "given-text"
    is_free = True

    def __init__(self, text: str) -> None:
        self._text = text

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        follower = Follower(split_pieces(self._text))
        start = follower.position(split_pieces(request.prefix))
        texts = [] if start is None else follower.items[start : start + max_tokens]
        async with aclosing(draft_pieces(texts)) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Nothing to release."""

    def token_draft_refusal(self, target: TokenModel) -> None:  # noqa: ARG002 - encoded with any target's tokenizer
        return None

    def open_token_draft(self, target: TokenModel, choose: TokenChooser, prompt_ids: Sequence[int]) -> TokenDraft:  # noqa: ARG002 - nothing is sampled
        return _GivenDraft(Follower(target.tokenizer.encode(self._text)), len(prompt_ids))


class _GivenDraft:
    def __init__(self, follower: Follower[int], num_prompt_tokens: int) -> None:
        self._follower = follower
        self._num_prompt_tokens = num_prompt_tokens

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        start = self._follower.position(context_ids[self._num_prompt_tokens :])
        if start is not None:
            yield from map(DraftToken, self._follower.items[start:])

    def close(self) -> None:
        """Nothing to release."""
