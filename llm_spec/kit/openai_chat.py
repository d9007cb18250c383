"""Translates chunks of OpenAI's chat completions (JSON objects) to events. Pure; for providers.

Servers are many, and each field may have another type than OpenAI's. Fields that decide the
answer's content must be right, or the answer ends with an error (`BrokenAnswerError`). Other fields
are read if possible, and otherwise left out.

- `choices` is a list of objects, `delta` (in a whole answer `message`) an object. Any other type is
  an error, and so is an answer without any such object. A chunk without choices may report usage.
  An object that is not a chunk is skipped, but after one, `[DONE]` alone is not a good end.
- `content`, `text` and `refusal` are texts: a wrong type is an error, null says nothing. `content`
  may also be a list of parts: texts, thinking, and objects of another type without a text
  (references), which say nothing.
- `tool_calls` is a list of objects whose `function` (or `custom`) has a name. Arguments are a text
  or an object. Ids, indices and kinds are read if possible (`openai_calls`).
- `finish_reason` says if the answer is complete (`answer_parts`). An unknown word or type means
  that it may not be.
- `index` is needed only if several choices were requested.
- `logprobs` matter to clients that requested them: an entry without a token or a number is an
  error. Numbers that are not finite are replaced.
- `usage` holds valid counts or is ignored (`answer_parts`). Then this library counts the tokens
  itself.
- Reasoning, details, `role`, `id`, `created`, `model` and `object` do not change the answer: a
  wrong type is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, cast

from llm_spec.contract.events import (
    AnswerDetail,
    Finish,
    FinishReason,
    ReasoningDelta,
    StoppedBy,
    StreamEvent,
    TextDelta,
    TokenLogprob,
    Usage,
)
from llm_spec.contract.messages import ReasoningDetail
from llm_spec.contract.request import ChatRequest
from llm_spec.kit.answer_parts import BrokenAnswerError, parse_usage, read_finish_reason
from llm_spec.kit.openai_calls import ToolCallReader
from llm_spec.kit.openai_logprobs import parse_logprobs
from llm_spec.kit.surrogates import SurrogateJoiner, is_encodable, mend_value

__all__ = [
    "DETAIL_FIELDS",
    "ChunkReader",
    "ReadTokenIds",
    "create_chunk_reader",
    "list_choices",
    "parse_finish_reason",
    "read_choice_index",
]

ReadTokenIds: TypeAlias = Callable[[Mapping[str, Any]], "tuple[int, ...] | None"]  # of a choice

_EMPTY_OBJECT: Final[Mapping[str, Any]] = {}
_TEXT_ONLY_FIELDS: Final = frozenset({"content", "role"})
_REASONING_ONLY_FIELDS: Final = frozenset({"reasoning", "reasoning_content", "role"})
_CHUNK_FIELDS: Final = frozenset({"choices", "created", "id", "model", "object"})
# Parts of an answer beside text, reasoning and calls; other fields of a delta are ignored
DETAIL_FIELDS: Final = ("annotations", "audio", "citations", "executed_tools", "images", "search_results", "videos")
_DETAIL_NAMES: Final = frozenset({"refusal", *DETAIL_FIELDS})
_STOPPED_BY: Final[Mapping[FinishReason, StoppedBy]] = {
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}
_LIMIT_WORDS: Final = frozenset({"length", "max_tokens", "max_completion_tokens", "max_output_tokens"})
_STOP_STRING_FIELDS: Final = ("stop_reason", "matched_stop")  # vLLM, SGLang: a text or a token id
_MAX_QUOTED_CHARS: Final = 60
_MAX_CHOICES: Final = 128  # the most that can be requested


class ChunkReader:
    """Reads the chunks of one answer, of chat or of a plain completion, streamed or whole.

    A refusal of the model is a detail (`{"refusal": …}`), and the answer ends with
    `content_filter`.

    `read_token_ids`: adds token ids to the text. Without it, empty text gives no event. The ids of
    a chunk with a tool call follow the call, with an empty text.
    `has_logprobs`: adds log-probabilities to the text.
    `stops`: the request's stop strings. Some servers report which one ended the answer.
    `is_only_choice`: one choice was requested. The first that comes is read, others are skipped.
    """

    def __init__(
        self,
        read_token_ids: ReadTokenIds | None = None,
        *,
        has_logprobs: bool = False,
        stops: Sequence[str] = (),
        is_only_choice: bool = True,
    ) -> None:
        self._read_token_ids = read_token_ids
        self._has_logprobs = has_logprobs
        self._stops = stops
        self._index = None if is_only_choice else 0  # None: that of the first choice
        self._is_text_alone = read_token_ids is None and not has_logprobs
        self._is_fast = self._is_text_alone  # False while half of a character is held
        self._text, self._reasoning, self._refusal = SurrogateJoiner(), SurrogateJoiner(), SurrogateJoiner()
        self._calls = ToolCallReader()
        self._reason: FinishReason | None = None
        self._stopped_by: StoppedBy | None = None
        self._stop_string: str | None = None
        self._has_begun = self._has_output = self._has_refused = self._has_foreign = False
        self._has_message = False  # or a delta, or a text, even an empty one
        self._usage: Usage | None = None
        self._service_tier: str | None = None  # the served one
        self._response_id: str | None = None  # the server's, the same in all chunks
        self._held_logprobs: tuple[TokenLogprob, ...] = ()  # of tokens that end inside a character

    def read_chunk(self, chunk: Mapping[str, Any]) -> list[StreamEvent]:
        """Return the events of the next chunk, without its finish; raise BrokenAnswerError."""
        if chunk.get("usage"):
            self._usage = parse_usage(chunk)
        tier: Any = chunk.get("service_tier")
        if tier != self._service_tier and isinstance(tier, str) and is_encodable(tier):
            self._service_tier = tier or self._service_tier
        if self._response_id is None and isinstance(id_ := chunk.get("id"), str) and is_encodable(id_):
            self._response_id = id_ or None
        choices: Any = chunk.get("choices")
        if self._is_fast and choices.__class__ is list and len(choices) == 1:
            choice: Any = choices[0]
            delta: Any = choice.get("delta") if choice.__class__ is dict and "text" not in choice else None
            if delta.__class__ is dict and not choice.get("finish_reason") and not choice.get("index"):
                content: Any = delta.get("content")
                if not content:
                    if (thought := _find_reasoning_alone(delta, content)) is not None:
                        self._has_begun = True
                        return [ReasoningDelta(thought)]
                elif (
                    content.__class__ is str
                    and (content.isascii() or is_encodable(content))
                    and (len(delta) == 1 or _says_nothing_but(_TEXT_ONLY_FIELDS, delta))
                ):
                    self._has_output = True
                    return [TextDelta(content)]  # nearly always
        found = self._find_choice(chunk)
        return [] if found is None else self.read_choice(found)

    def read_choice(self, choice: Mapping[str, Any]) -> list[StreamEvent]:
        """Return the events of a choice of the next chunk, without its finish.

        Raises BrokenAnswerError.
        """
        if error := choice.get("error"):
            raise BrokenAnswerError("broke off its answer", reported=error, is_transient=True)
        delta, is_whole = self._get_delta(choice)
        self._has_message = self._has_message or delta is not _EMPTY_OBJECT or "text" in choice
        text_of_choice = choice.get("text")  # some servers send both
        has_text_field = text_of_choice is not None and text_of_choice != ""
        content = text_of_choice if has_text_field else delta.get("content")
        is_over = self._read_end(choice)
        token_ids = self._find_token_ids(choice)
        texts: list[StreamEvent]
        if isinstance(content, list) and not has_text_field:
            texts = list(self._read_content_parts(cast("list[object]", content), is_over=is_over))
        else:
            text = self._text.push(_check_text("text" if has_text_field else "content", cast("object", content)))
            text += self._text.flush() if is_over else ""
            logprobs = self._read_logprobs_of_text(choice, has_text=bool(text))
            texts = [TextDelta(text, "plain", token_ids, logprobs)] if text or token_ids else []
        self._has_output = self._has_output or bool(texts)
        if is_over or not delta.keys() <= _TEXT_ONLY_FIELDS:
            texts = self._read_more_than_text(delta, texts, token_ids, is_whole=is_whole, is_over=is_over)
        self._is_fast = self._is_text_alone and not (self._text.held or self._reasoning.held or self._index)
        return texts

    def _read_more_than_text(
        self,
        delta: Mapping[str, Any],
        texts: list[StreamEvent],
        token_ids: tuple[int, ...] | None,
        *,
        is_whole: bool,
        is_over: bool,
    ) -> list[StreamEvent]:
        """Return the events of a delta in order: reasoning, texts, calls, and details."""
        calls: list[StreamEvent] = [*self._calls.read_delta(delta, is_whole=is_whole)]
        if is_over:
            calls += self._calls.flush()
        if calls and token_ids:  # ids mean that the server has parsed all text before them
            texts = [replace(text, token_ids=None) for text in texts if isinstance(text, TextDelta) and text.text]
            calls.append(TextDelta("", "plain", token_ids))
        events = [*self._read_reasoning(delta, is_over=is_over), *texts, *calls]
        if is_over or not delta.keys().isdisjoint(_DETAIL_NAMES):
            events += self._read_details(delta, is_over=is_over)
        self._has_begun = self._has_begun or bool(events)
        self._has_output = self._has_output or bool(calls)
        return events

    def flush(self) -> list[StreamEvent]:
        """Return the held pieces, if the answer ends without a finish reason."""
        reasoning, text = self._reasoning.flush(), self._text.flush()
        events: list[StreamEvent] = [ReasoningDelta(reasoning)] if reasoning else []
        events += [TextDelta(text)] if text else []
        return [*events, *self._calls.flush()]

    def make_finish(self, *, is_done: bool = False) -> Finish | None:
        """Return how the answer ended, or None if it did not end well.

        Then `failure_message` says why.

        `is_done`: the stream ended with `[DONE]`. Some servers never send a finish reason
        (Snowflake, gateways to Gemini), or sometimes omit it (vLLM). They still send `[DONE]`, and
        only when they have finished: after text or tool calls it is a good end. The SDKs also
        accept the end of a connection. But an answer whose server or gateway died ends in the same
        way: without `[DONE]` it has broken off.
        """
        reason = self._reason
        if reason is None and is_done and (self._has_output or self.has_calls) and not self._has_foreign:
            reason = "tool_calls" if self.has_calls else "stop"
        if reason is None or self._calls.is_nameless or not self.has_message:
            return None
        stopped_by = self._stopped_by
        # OpenAI ends a refusal with `stop`; for the caller it is not an answer
        if self._has_refused and reason == "stop":
            reason = stopped_by = "content_filter"
        elif stopped_by is None:
            stopped_by = None if reason == "length" else _STOPPED_BY.get(reason)
        return Finish(
            reason,
            self._usage,
            stopped_by,
            stop_string=self._stop_string,
            service_tier=self._service_tier,
            response_id=self._response_id,
        )

    @property
    def failure_message(self) -> str:
        """The server's mistake, if `make_finish` returns None."""
        if self._calls.is_nameless:
            return "called a tool without its name"
        if self._reason is not None and not self.has_message:
            return "ended its answer without a message"
        return "ended its answer without a finish reason"

    @property
    def has_message(self) -> bool:
        """True if a message, a delta or a text has come, even an empty one."""
        return self._has_message or self._has_begun or self._has_output

    @property
    def has_calls(self) -> bool:
        """True if a tool was called."""
        return self._calls.has_calls

    # --------------------------------------------------------------------------------------- inside

    def _find_choice(self, chunk: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the choice of a chunk that is read, or None if the chunk lacks it."""
        choices = list_choices(chunk)
        if choices is None:
            self._has_foreign = True
            return None
        if self._index is None and choices:
            self._index = 0 if self._has_output else read_choice_index(choices[0]) or 0
            self._is_fast = self._is_fast and self._index == 0
        own = (choice for position, choice in enumerate(choices) if self._is_own(position, choice))
        return next(own, None)

    def _is_own(self, position: int, choice: Mapping[str, Any]) -> bool:
        """True if a choice is the one that is read.

        A choice without an index is the one if it comes first.
        """
        index = read_choice_index(choice)
        return position == 0 if index is None else index == self._index

    def _get_delta(self, choice: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
        """Return the delta or message of a choice, and True if it is a whole message.

        A stream may contain a whole message, too, if the answer came at once.
        """
        for name in ("delta", "message"):
            value = choice.get(name)
            if value is not None and not isinstance(value, dict):
                raise BrokenAnswerError(f"sent a {name} of type {type(value).__name__}")
            # some servers repeat the whole text as `message`, beside the delta or at the end
            if value is not None:
                is_whole = name == "message"
                return (_EMPTY_OBJECT if is_whole and (self._has_begun or self._has_output) else value), is_whole  # pyright: ignore[reportUnknownVariableType]
        return _EMPTY_OBJECT, False

    def _read_end(self, choice: Mapping[str, Any]) -> bool:
        """Read the finish reason of a choice; return True if there is one."""
        word = choice.get("finish_reason")
        reason = read_finish_reason(word)
        if reason is None:
            return False
        if reason == "failed":
            quoted = str(word)[:_MAX_QUOTED_CHARS]
            raise BrokenAnswerError(f"broke off its answer: its finish reason is {quoted!r}", is_transient=True)
        self._reason = reason
        self._stopped_by = "max_tokens" if reason == "length" and str(word).lower() in _LIMIT_WORDS else None
        if reason == "stop":
            found = (choice.get(name) for name in _STOP_STRING_FIELDS)
            self._stop_string = next((stop for stop in found if isinstance(stop, str) and stop in self._stops), None)
            self._stopped_by = None if self._stop_string is None else "stop_string"
        return True

    def _find_token_ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the ids of a piece, or None if they are missing or invalid."""
        if self._read_token_ids is None:
            return None
        try:
            token_ids = self._read_token_ids(choice)
        except (AttributeError, LookupError, TypeError, ValueError):
            return None
        is_right = token_ids is not None and all(type(token_id) is int and token_id >= 0 for token_id in token_ids)
        return token_ids if is_right else None

    def _read_content_parts(self, content: Iterable[object], *, is_over: bool) -> Iterator[StreamEvent]:
        """Yield the events of a content in parts, as Mistral's thinking models send it.

        `[{"type": "thinking", "thinking": [{"type": "text", "text": …}]}, {"type": "text", "text":
        …}]`; after the thinking, plain text. Parts of other types may be references. One with a
        text is an error, since the text would be lost.
        """
        for part in content:
            if not isinstance(part, dict):
                raise BrokenAnswerError(f"sent a part of its content of type {type(part).__name__}")
            fields = cast("Mapping[str, object]", part)
            kind, said = fields.get("type"), fields.get("text")
            if kind == "text":
                if text := self._text.push(_check_text("a text part", said)):
                    yield TextDelta(text)
            elif kind == "thinking":
                if thought := self._reasoning.push(_join_thinking_text(fields.get("thinking"))):
                    yield ReasoningDelta(thought)
            elif not isinstance(kind, str) or said:
                raise BrokenAnswerError(
                    f"sent a part of its content of an unknown type: {str(kind)[:_MAX_QUOTED_CHARS]}"
                )
        if is_over and (text := self._text.flush()):
            yield TextDelta(text)

    def _read_logprobs_of_text(self, choice: Mapping[str, Any], *, has_text: bool) -> tuple[TokenLogprob, ...] | None:
        """Return the logprobs of a piece of text, and of earlier pieces without text."""
        if not self._has_logprobs or not choice.get("logprobs"):
            return None
        logprobs = self._held_logprobs + (parse_logprobs(choice) or ())
        self._held_logprobs = () if has_text else logprobs
        return logprobs if has_text else None

    def _read_reasoning(self, delta: Mapping[str, Any], *, is_over: bool) -> Iterator[StreamEvent]:
        reasoning = self._reasoning.push(_get_text_or_empty(delta.get("reasoning_content") or delta.get("reasoning")))
        if reasoning := reasoning + (self._reasoning.flush() if is_over else ""):
            yield ReasoningDelta(reasoning)
        details: object = delta.get("reasoning_details")
        for detail in cast("list[object]", details) if isinstance(details, list) else ():
            if isinstance(detail, dict):
                yield ReasoningDetail("chat", mend_value(detail))

    def _read_details(self, delta: Mapping[str, Any], *, is_over: bool) -> Iterator[StreamEvent]:
        refusal = self._refusal.push(_check_text("refusal", delta.get("refusal") or None))
        if refusal := refusal + (self._refusal.flush() if is_over else ""):
            self._has_refused = self._has_output = True
            yield AnswerDetail("chat", {"refusal": refusal})
        for name in DETAIL_FIELDS:
            value = delta.get(name)
            if value and isinstance(value, list | dict):
                self._has_output = True
                yield AnswerDetail("chat", {name: mend_value(value)})


def create_chunk_reader(request: ChatRequest, read_token_ids: ReadTokenIds | None = None) -> ChunkReader:
    """Return a reader for the answer to a request."""
    return ChunkReader(
        read_token_ids,
        has_logprobs=request.top_logprobs is not None,
        stops=request.stop,
        is_only_choice=request.extra.get("n") in (None, 1),
    )


def list_choices(chunk: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the choices of a chunk, or None if the object is not a chunk.

    Raises BrokenAnswerError for choices that cannot be read.
    """
    choices: object = chunk.get("choices")
    if choices is None:
        if chunk.get("usage"):
            return []
        if chunk.keys() & _CHUNK_FIELDS:
            raise BrokenAnswerError("sent a chunk without choices")
        return None if chunk else []
    if not isinstance(choices, list):
        raise BrokenAnswerError(f"sent choices of type {type(choices).__name__}")
    for choice in cast("list[object]", choices):
        if not isinstance(choice, dict):
            raise BrokenAnswerError(f"sent a choice of type {type(choice).__name__}")
    return cast("list[Mapping[str, Any]]", choices)


def read_choice_index(choice: Mapping[str, Any]) -> int | None:
    """Return the index of a choice, also from a text or a float.

    Returns None if it is missing or invalid.
    """
    index = choice.get("index")
    if isinstance(index, str) and index.isdecimal() and index.isascii():
        index = int(index[:9])
    if isinstance(index, float) and index.is_integer():
        index = int(index)
    return index if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < _MAX_CHOICES else None


def _says_nothing_but(names: frozenset[str], delta: Mapping[str, Any]) -> bool:
    """True if a delta has no other fields, or only empty ones.

    Many servers always send all fields.
    """
    for name, value in delta.items():  # noqa: SIM110 - `all` takes three times as long
        if value and name not in names:
            return False
    return True


def _find_reasoning_alone(delta: Mapping[str, Any], content: object) -> str | None:
    """Return the reasoning of a delta that has nothing else, or None.

    Returns None also for reasoning that cannot be encoded. `content` is that of the delta: anything
    but null or an empty text needs the full reader.
    """
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    is_alone = isinstance(thought, str) and (content is None or content == "") and is_encodable(thought)
    return thought if is_alone and thought and _says_nothing_but(_REASONING_ONLY_FIELDS, delta) else None


def _check_text(name: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BrokenAnswerError(f"sent {name} of type {type(value).__name__}")
    return value


def _get_text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""


def _join_thinking_text(thinking: object) -> str:
    """Return the text of a thinking part, which may itself consist of parts."""
    if not isinstance(thinking, list):
        return _get_text_or_empty(thinking)
    parts = cast("list[object]", thinking)
    return "".join(
        _get_text_or_empty(cast("Mapping[str, object]", part).get("text")) for part in parts if isinstance(part, dict)
    )


def parse_finish_reason(choice: Mapping[str, Any]) -> FinishReason | None:
    """Return why a choice ended, or None if it did not say or was broken off."""
    reason = read_finish_reason(choice.get("finish_reason"))
    return None if reason == "failed" else reason
