"""Where an answer follows an earlier text of its request in another form than the prompt's.

Encoding and indexing take a millisecond for about 1,000 characters. So it is done in steps, one a proposal, the newest
text first, only for an answer that has begun to write such a form (`_SIGNS`), and not while a long match is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final, Literal, TypeAlias

from llm_spec.contract.model import DraftToken, Tokenizer
from llm_spec.contract.request import ChatRequest
from llm_spec.drafting.ngrams import SequenceFollower, estimate_copy_confidence
from llm_spec.drafting.written_forms import (
    escape_for_json_string,
    iterate_diff_marked_texts,
    iterate_json_escaped_texts,
    iterate_unescaped_tool_texts,
    uses_tools,
)

__all__ = ["DraftSource", "ReformattedTextDrafter"]

# What a proposal was copied from: prompt and answer, a form of an earlier text, or an earlier answer
DraftSource: TypeAlias = Literal["context", "forms", "answers"]

_STEP_CHARACTERS: Final = 4096
_SURE: Final = estimate_copy_confidence(8)
_TAIL: Final = 8  # tokens of the answer by which its place is found at first
_SIGN_LENGTH: Final = 4  # characters at most
_SIGNS: Final[Mapping[re.Pattern[str], Callable[[ChatRequest], Iterator[str]]]] = {
    re.compile(r"\\"): iterate_json_escaped_texts,
    re.compile(r"\n\w"): iterate_unescaped_tool_texts,  # calls' own marks have no line that begins with a word
    re.compile(r"\n@@"): iterate_diff_marked_texts,
    re.compile(r"\\n@@"): lambda request: map(escape_for_json_string, iterate_diff_marked_texts(request)),
}


class ReformattedTextDrafter:
    """One request's forms, and the answer's place in them."""

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, num_prompt_tokens: int) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._num_read = num_prompt_tokens
        self._signs = dict(_SIGNS)  # not seen yet
        self._unread: Iterator[str] = iter(())
        self._text = ""  # the answer's end
        self._follower: SequenceFollower[int] | None = None

    @classmethod
    def open_for_request(
        cls, request: ChatRequest | None, tokenizer: Tokenizer, num_prompt_tokens: int
    ) -> ReformattedTextDrafter | None:
        """The forms of a request that has tools; None: nothing has another form."""
        return None if request is None or not uses_tools(request) else cls(request, tokenizer, num_prompt_tokens)

    def propose(self, context_ids: Sequence[int], confidence: float) -> Iterator[DraftToken] | None:
        """What follows, where a form is surer of it than `confidence`; to be called in every round."""
        new = context_ids[self._num_read :]
        self._num_read = len(context_ids)
        self._queue_forms_hinted_by_answer(new)
        follower = self._follower
        if confidence < _SURE and (follower is None or follower.num_matching < _TAIL):
            self._index_next_queued_texts()
        if self._follower is None:
            return None
        start = self._follower.advance(new if follower is not None else context_ids[-_TAIL:])
        num_matching = self._follower.num_matching
        if start is None or not num_matching or estimate_copy_confidence(num_matching) <= confidence:
            return None
        following = islice(self._follower.items, start, None)
        return (
            DraftToken(token_id, estimate_copy_confidence(num_matching + offset))
            for offset, token_id in enumerate(following)
        )

    def _queue_forms_hinted_by_answer(self, new: Sequence[int]) -> None:
        text = self._text + self._tokenizer.decode(new)
        for sign in [sign for sign in self._signs if sign.search(text)]:
            self._unread = chain(_split_texts_into_steps(self._signs.pop(sign)(self._request)), self._unread)
        self._text = text[-_SIGN_LENGTH:]

    def _index_next_queued_texts(self) -> None:
        """Read some thousand characters of what is needed, if there is more."""
        text = next(self._unread, None)
        if text is not None:
            self._follower = self._follower or SequenceFollower()
            self._follower.extend(self._tokenizer.encode(text))


def _split_texts_into_steps(texts: Iterable[str]) -> Iterator[str]:
    """Texts in steps."""
    for text in texts:
        yield from (text[start : start + _STEP_CHARACTERS] for start in range(0, len(text), _STEP_CHARACTERS))
