"""Finds forms in which a model may repeat an agent's texts and that its prompt does not have.

The prompt holds a file that a tool read as plain text. A call that writes it holds it as a JSON
string, in which line breaks and quotes are escaped and become other tokens. A unified diff has a
sign before each line. What a call wrote is escaped in the prompt, and an answer shows it unescaped.
Tools put line numbers before a file's lines, which models do not repeat.

Encoding and indexing take a millisecond for about 1,000 characters. So it is done in steps, one for
each proposal, the newest text first. It is done only for an answer that has begun to write such a
form (`_SIGNS`), and only while no long match is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final, Literal, TypeAlias, cast

from llm_spec.contract.messages import ChatMessage
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.token_model import DraftToken, Tokenizer
from llm_spec.drafting.ngrams import SequenceFollower, estimate_copy_confidence

__all__ = [
    "DraftSource",
    "ReformattedTextDrafter",
    "escape_for_json_string",
    "iterate_diff_marked_texts",
    "iterate_json_escaped_texts",
    "iterate_unescaped_tool_texts",
    "uses_tools",
]

# limit of the texts that are read, newest first; a text beyond it is cut to its end
_MAX_CHARACTERS: Final = 65_536
# as `cat -n` and agents' own tools write them
_LINE_NUMBER: Final = re.compile(r"^ *\d+(?:\t|→|:|\| )", re.MULTILINE)


def uses_tools(request: ChatRequest) -> bool:
    """Return True if texts of a request may be written in another form: it has tools or results."""
    return bool(request.tools) or any(message.role == "tool" for message in request.messages)


def escape_for_json_string(text: str) -> str:
    """Return a text as it stands between the quotes of a JSON string; non-ASCII characters stay."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def iterate_json_escaped_texts(request: ChatRequest, max_characters: int = _MAX_CHARACTERS) -> Iterator[str]:
    """Yield messages' texts (not the system's) as in a JSON string, the newest first.

    Texts that escaping does not change are left out: they are in the prompt.
    """
    for text in _take_last_characters(_iterate_message_texts(request), max_characters):
        escaped = escape_for_json_string(_remove_line_numbers(text))
        if escaped != text:
            yield escaped


def iterate_diff_marked_texts(request: ChatRequest, max_characters: int = _MAX_CHARACTERS) -> Iterator[str]:
    """Yield messages' texts (not the system's) as unchanged lines of a diff, newest first."""
    for text in _take_last_characters(_iterate_message_texts(request), max_characters):
        if "\n" in text:
            yield _remove_line_numbers(text).replace("\n", "\n ")


def iterate_unescaped_tool_texts(request: ChatRequest, max_characters: int = _MAX_CHARACTERS) -> Iterator[str]:
    """Yield the strings in calls' arguments and JSON results without escapes, the newest first.

    Results that are not JSON come without their line numbers. Texts that the prompt already has in
    this form are left out.
    """
    room = max_characters
    for source in _iterate_tool_texts(request):
        if len(source) > room:
            continue
        room -= len(source)
        value = _parse_json_or_none(source)
        if isinstance(value, (dict, list)):
            yield from (
                text for text in _iterate_json_strings(cast("object", value)) if escape_for_json_string(text) != text
            )
        elif (text := _remove_line_numbers(source)) != source:
            yield text


def _iterate_message_texts(request: ChatRequest) -> Iterator[str]:
    return (message.text for message in reversed(request.messages) if message.role not in ("system", "developer"))


def _iterate_tool_texts(request: ChatRequest) -> Iterator[str]:
    """Yield results and calls' arguments, the newest first."""
    return chain.from_iterable(_list_tool_texts(message) for message in reversed(request.messages))


def _list_tool_texts(message: ChatMessage) -> list[str]:
    result = [message.text] if message.role == "tool" else []
    return [*result, *(call.arguments for call in reversed(message.tool_calls))]


def _take_last_characters(texts: Iterator[str], room: int) -> Iterator[str]:
    for text in texts:
        if not room:
            return
        kept = text[-room:]
        room -= len(kept)
        yield kept


def _parse_json_or_none(text: str) -> Any:
    try:
        return json.loads(text) if text.lstrip()[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        return None


def _iterate_json_strings(value: object) -> Iterator[str]:
    """Yield the strings in a JSON value, in order; `json` bounds its depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for member in cast("Mapping[str, object]", value).values():
            yield from _iterate_json_strings(member)
    elif isinstance(value, Sequence):
        for member in cast("Sequence[object]", value):
            yield from _iterate_json_strings(member)


def _remove_line_numbers(text: str) -> str:
    """Remove line numbers from a text whose lines are mostly numbered."""
    stripped, num_numbers = _LINE_NUMBER.subn("", text)
    return stripped if num_numbers > text.count("\n") // 2 else text


# Where a proposal was copied from: prompt and answer, a form of an earlier text, or an earlier
# answer
DraftSource: TypeAlias = Literal["context", "forms", "answers"]

_STEP_CHARACTERS: Final = 4096
_SURE: Final = estimate_copy_confidence(8)
_TAIL: Final = 8  # last tokens of the answer that locate it at first
_SIGN_LENGTH: Final = 4  # characters at most
_SIGNS: Final[Mapping[re.Pattern[str], Callable[[ChatRequest], Iterator[str]]]] = {
    re.compile(r"\\"): iterate_json_escaped_texts,
    # the marks of calls have no line that begins with a word
    re.compile(r"\n\w"): iterate_unescaped_tool_texts,
    re.compile(r"\n@@"): iterate_diff_marked_texts,
    re.compile(r"\\n@@"): lambda request: map(escape_for_json_string, iterate_diff_marked_texts(request)),
}


class ReformattedTextDrafter:
    """The forms of one request's texts, and the answer's position in them."""

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, num_prompt_tokens: int) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._num_read = num_prompt_tokens
        self._signs = dict(_SIGNS)  # those not seen yet
        self._unread: Iterator[str] = iter(())
        self._text = ""  # the answer's end
        self._follower: SequenceFollower[int] | None = None

    @classmethod
    def open_for_request(
        cls, request: ChatRequest | None, tokenizer: Tokenizer, num_prompt_tokens: int
    ) -> ReformattedTextDrafter | None:
        """Open the forms of a request, or return None if nothing has another form."""
        return None if request is None or not uses_tools(request) else cls(request, tokenizer, num_prompt_tokens)

    def propose(self, context_ids: Sequence[int], confidence: float) -> Iterator[DraftToken] | None:
        """Propose what follows if a form is surer than `confidence`; call it in every round."""
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
        """Read the next step of the queued texts, if there is one."""
        text = next(self._unread, None)
        if text is not None:
            self._follower = self._follower or SequenceFollower()
            self._follower.extend(self._tokenizer.encode(text))


def _split_texts_into_steps(texts: Iterable[str]) -> Iterator[str]:
    """Split texts into steps."""
    for text in texts:
        yield from (text[start : start + _STEP_CHARACTERS] for start in range(0, len(text), _STEP_CHARACTERS))
