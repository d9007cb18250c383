"""A given text as draft: the file being edited, yesterday's answer, a cached reply."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import islice
from typing import Final

from llm_spec.contract.draft import DraftCapabilities, DraftPiece
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.token_model import BoundedTokenizer, DraftToken, TokenDraft, TokenModel, TokenSampler
from llm_spec.drafting.copying import CopyDraft, TextIndex
from llm_spec.drafting.ngrams import SequenceFollower, estimate_copy_confidence
from llm_spec.measure.tokens import iterate_pieces_yielding_to_loop, take_last_pieces

__all__ = ["ReferenceDraft"]

_MAX_MATCH: Final = 8  # pieces


class ReferenceDraft:
    """Draft a text that the caller expects the answer to follow, in whole or in parts.

    After a difference it continues after the longest match of the answer's last tokens (at most 8)
    in the text; of several matches, after the nearest. `name` is its name in results.
    """

    capabilities = DraftCapabilities(is_free=True)

    def __init__(self, text: str, *, name: str = "given-text") -> None:
        self.name = name
        self._text = text

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        return self.for_request().draft(request, max_tokens)

    def for_request(self) -> CopyDraft:
        index, text = TextIndex(), self._text

        async def copy_pieces(request: ChatRequest, max_tokens: int) -> Sequence[str]:
            start: int | None = len(request.prefix)
            if not text.startswith(request.prefix):
                await index.update_last_text(text)
                start = index.find_match_end(take_last_pieces(request.prefix, _MAX_MATCH), _MAX_MATCH)
            if start is None:
                return ()
            return [piece async for piece in iterate_pieces_yielding_to_loop(text, start, max_tokens)]

        return CopyDraft(self.name, copy_pieces)

    async def aclose(self) -> None:
        """Do nothing: it holds no resources."""

    def token_draft_refusal(self, target: TokenModel) -> None:  # noqa: ARG002 - any vocabulary
        return None

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:  # noqa: ARG002 - nothing is sampled
        text, tokenizer = self._text, target.tokenizer
        if isinstance(tokenizer, BoundedTokenizer):
            text = text[: tokenizer.max_token_chars * target.context_length]  # no answer is longer
        return _ReferenceTokenDraft(SequenceFollower(target.tokenizer.encode(text)), len(prompt_ids))


class _ReferenceTokenDraft:
    def __init__(self, follower: SequenceFollower[int], num_prompt_tokens: int) -> None:
        self._follower = follower
        self._num_read = num_prompt_tokens

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        start = self._follower.advance(context_ids[self._num_read :])
        self._num_read = len(context_ids)
        if start is not None:
            for offset, token_id in enumerate(islice(self._follower.items, start, None)):
                yield DraftToken(token_id, estimate_copy_confidence(self._follower.num_matching + offset))

    def close(self) -> None:
        """Do nothing: it holds no resources."""
