"""The forms in which a model may write an agent's texts again, and that its prompt does not have.

A file that a tool read stands in the prompt as it is. A call that writes it has it as a JSON string, whose escaped line
breaks and quotes are other tokens; a unified diff has a sign before each line. What a call wrote stands in the prompt
escaped, and an answer shows it as it is. Line numbers, which tools put before a file's lines, nobody writes again.

An answer that follows an earlier text in such a form is found as follows. Encoding and indexing take a millisecond for
about 1,000 characters. So it is done in steps, one a proposal, the newest text first, only for an answer that has begun
to write such a form (`_SIGNS`), and not while a long match is known.
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

_MAX_CHARACTERS: Final = 65_536  # of the texts that are read, the newest first; of one that is too long, its end
_LINE_NUMBER: Final = re.compile(r"^ *\d+(?:\t|→|:|\| )", re.MULTILINE)  # cat -n, and what agents' own tools write


def uses_tools(request: ChatRequest) -> bool:
    """Whether anything of a request was, or may be, written in another form: it has tools, or results of some."""
    return bool(request.tools) or any(message.role == "tool" for message in request.messages)


def escape_for_json_string(text: str) -> str:
    """A text as it stands between the quotes of a JSON string; characters that are not ASCII stay."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def iterate_json_escaped_texts(request: ChatRequest, max_characters: int = _MAX_CHARACTERS) -> Iterator[str]:
    """The texts of messages (the system's left out) as they stand in a JSON string, the newest first.

    Those that escaping leaves as they are in the prompt are left out.
    """
    for text in _take_last_characters(_iterate_message_texts(request), max_characters):
        escaped = escape_for_json_string(_remove_line_numbers(text))
        if escaped != text:
            yield escaped


def iterate_diff_marked_texts(request: ChatRequest, max_characters: int = _MAX_CHARACTERS) -> Iterator[str]:
    """The texts of messages (the system's left out) as a diff repeats lines that stay, the newest first."""
    for text in _take_last_characters(_iterate_message_texts(request), max_characters):
        if "\n" in text:
            yield _remove_line_numbers(text).replace("\n", "\n ")


def iterate_unescaped_tool_texts(request: ChatRequest, max_characters: int = _MAX_CHARACTERS) -> Iterator[str]:
    """The strings in calls' arguments and in JSON results as they are without escapes, the newest first.

    Also results without their line numbers. Those that stand in the prompt as they are are left out.
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
    """Results and calls' arguments, the newest first."""
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
    """The strings in a JSON value, in order; `json` bounds how deep it is."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for member in cast("Mapping[str, object]", value).values():
            yield from _iterate_json_strings(member)
    elif isinstance(value, Sequence):
        for member in cast("Sequence[object]", value):
            yield from _iterate_json_strings(member)


def _remove_line_numbers(text: str) -> str:
    """A text whose lines are mostly numbered, without the numbers; another one as it is."""
    stripped, num_numbers = _LINE_NUMBER.subn("", text)
    return stripped if num_numbers > text.count("\n") // 2 else text


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
