"""Suffix drafts: what most often followed the same words, here and in earlier answers.

After SuffixDecoding (arXiv 2411.04975). It finds the longest end of the context that occurred
before, and follows its most frequent continuation. The confidence of each token is its frequency.
It pays for agents that repeat themselves, retries and edits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Final, TypeVar

from llm_spec.contract.checks import check_number
from llm_spec.contract.draft import DraftCapabilities, DraftPiece
from llm_spec.contract.entry import ProviderEntry
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.optional import RequestOptionalDrafter
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.token_model import DraftToken, TokenDraft, TokenModel, TokenSampler
from llm_spec.drafting.copying import ConversationIndex, CopyDraft
from llm_spec.drafting.forms import DraftSource, ReformattedTextDrafter
from llm_spec.drafting.ngrams import OccurrenceMatch
from llm_spec.drafting.suffix_automaton import LikelyNextItem, PastAnswers, SuffixAutomaton, SuffixMatch

__all__ = ["SUFFIX_DRAFT", "SuffixDraft"]

T = TypeVar("T", bound=Hashable)

# What followed n matching tokens k of k times follows them again in about 1 - 0.6 / n of cases
# (measured on the built-in pair: 0.56, 0.59, 0.82, 0.87, 0.95, for any k). What followed k of m
# times does so in about k / m as many.
_MISMATCH_FACTOR: Final = 0.6
_MIN_SURVIVAL: Final = 0.1  # a proposal ends when it is less likely than this to stand
# between two turns of the event loop: in repetitive text each takes a millisecond
_NUM_SEARCHES: Final = 4


class SuffixDraft(RequestOptionalDrafter):
    """Draft what most often followed the longest matching end of the context.

    The context is the conversation and the answer so far, and earlier answers. These are answers by
    targets with the same tokenizer to requests of this object. At most `max_stored_tokens` of them
    are kept, and the oldest are forgotten first; 0 keeps none. One request's answer may so be
    proposed to another request, which can tell by what is accepted (prompts are never kept). Use
    one object only for users who may know of each other, and `copy_for_new_client` for others.
    Matches have `min_match` to `max_match` tokens. Text drafts use the conversation alone.
    """

    name = "suffix"
    capabilities = DraftCapabilities(is_free=True)

    def __init__(self, *, max_match: int = 32, min_match: int = 1, max_stored_tokens: int = 32768) -> None:
        check_number(ConfigError, "min_match", min_match, 1, integer=True)
        check_number(ConfigError, "max_match", max_match, min_match, integer=True)
        check_number(ConfigError, "max_stored_tokens", max_stored_tokens, 0, integer=True)
        self._max_match = max_match
        self._min_match = min_match
        self._max_stored_tokens = max_stored_tokens
        self._outputs = PastAnswers(max_stored_tokens, max_match)

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        return self.for_request().draft(request, max_tokens)

    def copy_for_new_client(self) -> SuffixDraft:
        return SuffixDraft(
            max_match=self._max_match, min_match=self._min_match, max_stored_tokens=self._max_stored_tokens
        )

    def for_request(self) -> CopyDraft:
        index = ConversationIndex()

        async def copy_pieces(request: ChatRequest, max_tokens: int) -> Sequence[str]:
            await index.index_request(request)
            context, survival = list(index.pieces[-self._max_match :]), 1.0
            num_known = len(context)
            for num_drafted in range(max_tokens):
                if num_drafted % _NUM_SEARCHES == _NUM_SEARCHES - 1:
                    await asyncio.sleep(0)
                found = index.find_longest_match(context, self._max_match, self._min_match)
                if found is None:
                    break
                text, confidence = _find_most_frequent_piece(index.pieces, found)
                survival *= confidence
                if survival < _MIN_SURVIVAL:
                    break
                context.append(text)
            return context[num_known:]

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
        conversation = SuffixAutomaton[int](self._max_match)
        forms = ReformattedTextDrafter.open_for_request(request, target.tokenizer, len(prompt_ids))
        fingerprint = target.tokenizer.fingerprint
        return _SuffixTokenDraft(self._outputs, fingerprint, conversation, prompt_ids, self._min_match, forms=forms)


class _SuffixTokenDraft:
    """Drafts tokens for one request; `conversation` is its own."""

    def __init__(
        self,
        outputs: PastAnswers,
        fingerprint: str,
        conversation: SuffixAutomaton[int],
        prompt_ids: Sequence[int],
        min_match: int,
        *,
        forms: ReformattedTextDrafter | None,
    ) -> None:
        self._outputs = outputs
        self._fingerprint = fingerprint
        self._min_match = min_match
        self._forms = forms
        self.source: DraftSource = "context"
        self._num_prompt_tokens = len(prompt_ids)
        self._context_ids = prompt_ids
        self._conversation = conversation
        self._automata = outputs.get_suffix_automata(fingerprint)
        self._matches = [SuffixMatch()] * len(self._automata)
        self._index_tokens(prompt_ids)

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        self._context_ids = context_ids
        return self._propose_tokens(context_ids)

    def close(self) -> None:
        """Remember the answer, up to the tokens confirmed so far."""
        answer_ids = self._context_ids[self._num_prompt_tokens :]
        self._num_prompt_tokens += len(answer_ids)  # a second close does nothing
        self._outputs.add_answer(self._fingerprint, answer_ids)

    def _propose_tokens(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        self._index_tokens(context_ids[self._conversation.num_items :])
        own = self._conversation
        best, first = own, _find_longest_match_with_next(own, own.find_longest_repeated_end(), self._min_match)
        if self._automata:
            with self._outputs.lock:
                for shelf, match in zip(self._automata, self._matches, strict=True):
                    found = _find_longest_match_with_next(shelf, match, self._min_match)
                    if _compute_match_confidence(found) > _compute_match_confidence(first):
                        best, first = shelf, found
        following = None if self._forms is None else self._forms.propose(context_ids, _compute_match_confidence(first))
        self.source = "forms" if following is not None else "context" if best is own else "answers"
        if following is not None:
            yield from following
            return
        lock = None if best is own else self._outputs.lock
        for token_id, confidence in _iterate_likely_items(best, first, self._min_match, lock):
            yield DraftToken(token_id, confidence)

    def _index_tokens(self, token_ids: Sequence[int]) -> None:
        self._conversation.extend(token_ids)
        if self._automata:
            with self._outputs.lock:
                pairs = zip(self._automata, self._matches, strict=True)
                self._matches = [shelf.advance_match(match, token_ids) for shelf, match in pairs]


def _find_longest_match_with_next(
    automaton: SuffixAutomaton[T], match: SuffixMatch, min_match: int
) -> LikelyNextItem[T] | None:
    """Find what followed the longest end of a match that anything followed."""
    while match.length >= min_match:
        if (found := automaton.find_likely_next(match)) is not None:
            return found
        match = automaton.shorten_match(match)
    return None


def _iterate_likely_items(
    automaton: SuffixAutomaton[T],
    found: LikelyNextItem[T] | None,
    min_match: int,
    lock: AbstractContextManager[object] | None = None,
) -> Iterator[tuple[T, float]]:
    """Yield the likeliest continuation with confidences, until it is too unlikely to stand."""
    survival = 1.0
    while found is not None:
        confidence = _compute_match_confidence(found)
        survival *= confidence
        if survival < _MIN_SURVIVAL:
            return
        yield found.item, confidence
        with lock or nullcontext():
            found = _find_longest_match_with_next(automaton, found.match, min_match)


def _compute_match_confidence(match: LikelyNextItem[T] | None) -> float:
    return 0.0 if match is None else _estimate_repeat_probability(match.num_times, match.num_total, match.length)


def _find_most_frequent_piece(pieces: Sequence[str], found: OccurrenceMatch) -> tuple[str, float]:
    """Return the likeliest piece at the places found, and its confidence; the latest wins a tie."""
    times: dict[str, int] = {}
    best = pieces[found.positions[0]]
    for place in found.positions:
        times[pieces[place]] = times.get(pieces[place], 0) + 1
        if times[pieces[place]] >= times[best]:
            best = pieces[place]
    return best, _estimate_repeat_probability(times[best], len(found.positions), found.length)


def _estimate_repeat_probability(num_times: int, num_total: int, length: int) -> float:
    """Estimate how likely the continuation of a match follows again.

    It followed a match of `length` items `num_times` of `num_total` times.
    """
    return num_times / num_total * (1 - _MISMATCH_FACTOR / length)


def _load_suffix_draft(model: str, base_url: str | None) -> SuffixDraft:
    if model or base_url:
        raise ConfigError(f"suffix takes no model; write 'suffix' instead of 'suffix:{model}'")
    return SuffixDraft()


SUFFIX_DRAFT: Final = ProviderEntry(
    load=_load_suffix_draft,
    summary="draft: copies the text that most often followed the same words, in earlier answers too",
    is_free=True,
)
