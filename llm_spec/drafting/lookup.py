"""Prompt lookup: text that repeats earlier words often continues as it did then.

It helps with code, quotes, edits and lists.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import cycle
from typing import Final

from llm_spec.contract.checks import check_number
from llm_spec.contract.draft import DraftCapabilities, DraftPiece
from llm_spec.contract.entry import ProviderEntry
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.optional import RequestOptionalDrafter
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.token_model import DraftToken, TokenDraft, TokenModel, TokenSampler
from llm_spec.drafting.copying import ConversationIndex, CopyDraft
from llm_spec.drafting.forms import DraftSource, ReformattedTextDrafter
from llm_spec.drafting.ngrams import NgramIndex, estimate_copy_confidence

__all__ = ["PROMPT_LOOKUP", "PromptLookup"]


class PromptLookup(RequestOptionalDrafter):
    """Draft by copying what followed the latest occurrence of the conversation's end.

    It uses the longest end that matches, of `min_ngram` to `max_ngram` items. A `DraftProvider` and
    `TokenDrafter` that costs almost nothing. In requests with tools it also copies texts that the
    prompt has in another form, such as files in a call's arguments.
    """

    name = "lookup"
    capabilities = DraftCapabilities(is_free=True)

    def __init__(self, *, max_ngram: int = 8, min_ngram: int = 1) -> None:
        check_number(ConfigError, "min_ngram", min_ngram, 1, integer=True)
        check_number(ConfigError, "max_ngram", max_ngram, min_ngram, integer=True)
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        return self.for_request().draft(request, max_tokens)

    def for_request(self) -> CopyDraft:
        index = ConversationIndex()

        async def copy_pieces(request: ChatRequest, max_tokens: int) -> Sequence[str]:
            await index.index_request(request)
            found = index.find_longest_match(index.pieces, self._max_ngram, self._min_ngram)
            start = len(index.pieces) if found is None else found.positions[-1]
            return index.pieces[start : start + max_tokens]

        return CopyDraft(self.name, copy_pieces)

    async def aclose(self) -> None:
        """Do nothing: it holds no resources."""

    def token_draft_refusal(self, target: TokenModel) -> None:  # noqa: ARG002 - any vocabulary
        return None

    def open_token_draft_for_request(
        self,
        request: ChatRequest | None,
        target: TokenModel,
        choose: TokenSampler,  # noqa: ARG002 - nothing is sampled
        prompt_ids: Sequence[int],
    ) -> TokenDraft:
        index = NgramIndex[int](self._max_ngram, self._min_ngram)
        index.extend(prompt_ids)
        return _LookupTokenDraft(
            index, ReformattedTextDrafter.open_for_request(request, target.tokenizer, len(prompt_ids))
        )


class _LookupTokenDraft:
    def __init__(self, index: NgramIndex[int], forms: ReformattedTextDrafter | None) -> None:
        self._index = index
        self._forms = forms
        self.source: DraftSource = "context"

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        self._index.extend(context_ids[len(self._index.items) :])
        found = self._index.find_continuation(context_ids)
        confidence = 0.0 if found is None else estimate_copy_confidence(found[1])
        following = None if self._forms is None else self._forms.propose(context_ids, confidence)
        self.source = "context" if following is None else "forms"
        if following is not None:
            yield from following
        elif found is not None:
            start, num_matching = found
            # The copy is cyclic: a repetition continues for longer than it has lasted.
            for offset, token_id in enumerate(cycle(self._index.items[start:])):
                yield DraftToken(token_id, estimate_copy_confidence(num_matching + offset))

    def close(self) -> None:
        """Do nothing: it holds no resources."""


def _load_prompt_lookup(model: str, base_url: str | None) -> PromptLookup:
    if model or base_url:
        raise ConfigError(f"lookup takes no model; write 'lookup' instead of 'lookup:{model}'")
    return PromptLookup()


PROMPT_LOOKUP: Final = ProviderEntry(
    load=_load_prompt_lookup, summary="draft: copies the text that followed the same words earlier", is_free=True
)
