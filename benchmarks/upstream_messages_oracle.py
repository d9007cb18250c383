"""What a client is owed for an answer of Anthropic's messages. Pure, and by the rules of `upstream_oracle.py`.

Events, blocks and pieces of unknown kinds are passed over, as Anthropic asks of its clients. Where a word for a known
kind was exchanged for an unknown word, several replies are right. Where it was exchanged for something that is not a
word, the whole answer or an error is right.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

from upstream_oracle import (
    ANY_ERROR,
    BROKEN,
    Expectation,
    ExpectedCall,
    ExpectedChoice,
    Range,
    RequestSize,
    ToldError,
    UnreadableError,
    Verdict,
    expect_status,
    is_count,
    mend,
    read_text,
    tells_error,
)

Json: TypeAlias = dict[str, Any]

_STOPS: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "calls",
    "refusal": "filter",
    "model_context_window_exceeded": "length",
}
_DOUBTFUL_STOPS: Final = {"pause_turn": "stop", "stop": "stop"}  # may go on; the word of another API
_CACHED: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")
_PIECES: Final = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


@dataclass
class _Block:
    kind: str
    id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list[str])
    input: Any = None

    def finish_call(self) -> ExpectedCall:
        """A call; what is there of its input in pieces is all of it."""
        text = "".join(self.texts)
        if not text and self.input:
            text = json.dumps(self.input)
        is_odd = mend(self.id) != self.id
        arguments = ("", "{}") if text.strip() in ("", "{}") else (mend(text),)
        return ExpectedCall(None if is_odd or not self.id else self.id, mend(self.name), arguments)


@dataclass
class _Message:
    """What has been said so far."""

    is_streamed: bool
    blocks: list[_Block] = field(default_factory=list[_Block])
    stop: str | None = None
    unknown_stop: str | None = None
    is_at_stop_sequence: bool = False
    is_ended: bool = False
    usages: list[Json] = field(default_factory=list[Json])
    num_usages: int = 0  # of places where one is due
    doubts: list[str] = field(default_factory=list[str])  # an error would be right, too
    unclear: list[str] = field(default_factory=list[str])  # several replies would be right

    def add_whole(self, value: Any) -> None:
        """An answer in one piece."""
        said = _get_object(value, "an answer")
        _look_for_error(said)
        if said.get("type") != "message":
            self.doubts.append("the answer does not say that it is a message")
        content = said.get("content")
        if not isinstance(content, list):
            raise UnreadableError("the content is not a list")
        for block in cast("list[Any]", content):
            self._start_block(block)
        self._add_stop(said.get("stop_reason"))
        self._add_usage(said.get("usage"))
        self.is_ended = True

    def add_event(self, value: Any, name: str) -> None:
        """An event with the name that its line says."""
        said = _get_object(value, "an event")
        kind = said.get("type")
        if kind != name:
            doubts = self.unclear if isinstance(kind, str) else self.doubts
            doubts.append("the kind of an event is told by its name alone")
        match name:
            case "message_start":
                message: Any = said.get("message")
                if isinstance(message, dict):
                    self._add_usage(cast("Json", message).get("usage"))
                    self._look_at_start(cast("Json", message))
                else:
                    self.doubts.append("the message is not begun with one")
            case "content_block_start":
                self._check_index(said.get("index"), len(self.blocks))
                self._start_block(said.get("content_block"))
            case "content_block_delta":
                self._check_index(said.get("index"), len(self.blocks) - 1)
                self._add_piece(said.get("delta"))
            case "content_block_stop":
                self._check_index(said.get("index"), len(self.blocks) - 1)
            case "message_delta":
                self._add_usage(said.get("usage"))
                delta: Any = said.get("delta")
                self._add_stop(None if delta is None else _get_object(delta, "delta").get("stop_reason"))
            case "message_stop":
                self.is_ended = True
            case "error":
                _look_for_error(said)
                self.doubts.append("an error is told without one")
                raise UnreadableError("it tells of an error")
            case _:
                pass

    def _look_at_start(self, message: Json) -> None:
        if message.get("stop_reason") is not None or message.get("content") not in ([], None):
            self.doubts.append("the message is begun with its end")

    def _check_index(self, index: Any, due: int) -> None:
        if is_count(index) and index < due:
            self.unclear.append("it may be of another block")
        elif is_count(index) and index != due:
            self.doubts.append("the block has another number")
        elif index != due and due > 0:
            self.doubts.append("which block it is is not told")

    def _start_block(self, value: Any) -> None:
        said = _get_object(value, "a block")
        kind = said.get("type")
        if kind not in ("text", "thinking", "tool_use"):
            (self.unclear if isinstance(kind, str) else self.doubts).append("a block is of no known kind")
            kind = "tool_use" if "name" in said else "thinking" if "thinking" in said else "text"
        block = _Block(kind)
        self.blocks.append(block)
        if kind == "text" and (isinstance(said.get("text"), str) or not self.is_streamed):
            self._add_text(block, said, "text")
        elif kind == "text":
            self.doubts.append("a block of text is begun with something else")
        elif kind == "thinking":
            self._add_thought(block, said)
        elif kind == "tool_use":
            call_id, name, given = said.get("id"), said.get("name"), said.get("input")
            if not isinstance(name, str) or not name:
                raise UnreadableError("a call has no name")
            if not isinstance(given, dict):
                if given is not None and not self.is_streamed:
                    raise UnreadableError("the input of a call is not an object")
                self.doubts.append("the input of a call is not an object")
            if given and self.is_streamed:
                self.unclear.append("a call has an input before its pieces")
            block.id, block.name = call_id if isinstance(call_id, str) else "", name
            block.input = cast("Any", given)

    def _add_text(self, block: _Block, said: Json, name: str) -> None:
        if said.get(name) is None:
            self.doubts.append(f"there is no {name}")
        block.texts.append(read_text(said.get(name), name))

    def _add_thought(self, block: _Block, said: Json) -> None:
        if isinstance(said.get("thinking"), str):
            block.texts.append(said["thinking"])
        else:
            self.doubts.append("the thinking cannot be read")
        signature = said.get("signature", "")
        if not isinstance(signature, str):
            self.doubts.append("the signature cannot be read")

    def _add_piece(self, value: Any) -> None:
        said = _get_object(value, "a piece")
        kind = said.get("type")
        if not self.blocks:
            raise UnreadableError("a piece has no block")
        block = self.blocks[-1]
        due = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}.get(block.kind)
        if not isinstance(kind, str):
            self.doubts.append("a piece is of no kind")
            kind = "signature_delta" if "signature" in said else due
        if kind == "signature_delta" and block.kind == "thinking":
            if not isinstance(said.get("signature"), str):
                self.doubts.append("the signature cannot be read")
        elif kind != due:
            self.unclear.append("a piece is of an unknown kind")
        elif kind == "thinking_delta":
            self._add_thought(block, said)
        else:
            self._add_text(block, said, _PIECES[cast("str", kind)])

    def _add_stop(self, value: Any) -> None:
        if not value:
            if value not in (None, ""):
                self.doubts.append("whether there is a stop reason is not told")
            return
        if isinstance(value, str) and value in _DOUBTFUL_STOPS:
            self.doubts.append("the turn is paused" if value == "pause_turn" else "the stop reason is of another API")
            self.stop = _DOUBTFUL_STOPS[value]
        elif isinstance(value, str) and value in _STOPS:
            self.stop = _STOPS[value]
            self.is_at_stop_sequence = value == "stop_sequence"
        else:
            self.unknown_stop = value if isinstance(value, str) else repr(value)

    def _add_usage(self, usage: Any) -> None:
        self.num_usages += 1
        if isinstance(usage, dict):
            self.usages.append(cast("Json", usage))

    def finish(self) -> ExpectedChoice:
        """The whole answer."""
        if self.unknown_stop in BROKEN:
            raise UnreadableError(f"the stop reason is {self.unknown_stop}")
        if self.unknown_stop is not None:
            self.stop = "length"
        if self.stop is None and not self.is_ended:
            raise UnreadableError("the answer has no stop reason")
        if self.stop is None or not self.is_ended:
            self.doubts.append("the answer has a stop reason or an end, but not both")
        calls = tuple(block.finish_call() for block in self.blocks if block.kind == "tool_use")
        finishes = {"calls" if calls and (self.stop or "stop") == "stop" else self.stop or "stop"}
        if self.is_at_stop_sequence:  # to clients of messages it is said as it is, calls or not
            finishes.add("stop")
        if "the turn is paused" in self.doubts:
            finishes.add("length")
        if "calls" in finishes and not calls:
            self.doubts.append("there is no call, though calls are the stop reason")
            finishes.add("stop")
        text = "".join(piece for block in self.blocks if block.kind == "text" for piece in block.texts)
        thought = "".join(piece for block in self.blocks if block.kind == "thinking" for piece in block.texts)
        if not (text or thought or calls):
            self.doubts.append("the answer says nothing")
        is_odd = any("thinking" in doubt or "signature" in doubt for doubt in self.doubts)
        return ExpectedChoice((mend(text),), None if is_odd else mend(thought), calls, frozenset(finishes))


def _get_object(value: Any, what: str) -> Json:
    if not isinstance(value, dict):
        raise UnreadableError(f"{what} is not an object")
    return cast("Json", value)


def _look_for_error(said: Json) -> None:
    error: Any = said.get("error")
    if isinstance(error, dict | str) and error:
        message: Any = cast("Json", error).get("message") if isinstance(error, dict) else error
        raise ToldError(message, cast("Any", error))
    if error is not None:
        raise UnreadableError("whether there is an error is not told")


def _list_events(answer: Any, names: Sequence[str]) -> list[tuple[Any, str]]:
    """The events with their names; whatever stands in a ping is no part of the answer."""
    return [(event, name) for event, name in zip(answer, names, strict=True) if name != "ping"]


def expect_messages(
    answer: Any, *, names: Sequence[str], is_streamed: bool, status: int, size: RequestSize
) -> Expectation:
    """What must come of an answer: a list of events with their names, or one value."""
    if status >= 400:
        return expect_status(answer, status, size)
    read = _Message(is_streamed)
    verdict: Verdict = "answer"
    choices: tuple[ExpectedChoice, ...] = ()
    statuses, words, why = frozenset({502}), None, ""
    try:
        if is_streamed:
            for event, name in _list_events(answer, names):
                read.add_event(event, name)
        else:
            read.add_whole(answer)
        choices = (read.finish(),)
    except UnreadableError as error:
        verdict, why = "error", str(error)
        statuses = ANY_ERROR if tells_error(answer if is_streamed else [answer]) else statuses
    except ToldError as error:
        verdict, why, statuses = "error", "it tells of an error", ANY_ERROR
        words = None if read.doubts else error.words
    if read.unclear:
        verdict, why = "open", read.unclear[0]
    elif verdict == "answer" and read.doubts:
        verdict, why = "either", read.doubts[0]
    elif verdict == "answer" and read.unknown_stop is not None:
        verdict, why = "incomplete", "the stop reason is unknown"
    prompt, completion = _expect_counts(read, size)
    if verdict != "answer":
        prompt = Range(0, max(prompt.high, size.prompt.high))
        completion = Range(0, max(completion.high, 3 * len(json.dumps(answer)) + 64))
    return Expectation(
        verdict=verdict,
        choices=choices,
        statuses=statuses,
        words=words,
        prompt=prompt,
        completion=completion,
        why=why,
    )


def _expect_counts(read: _Message, size: RequestSize) -> tuple[Range, Range]:
    """Input with what is cached of it, and output; a later event tells what it has again."""
    characters = sum(len(text) for block in read.blocks for text in block.texts)
    told: dict[str, int] = {}
    odd: set[str] = set()
    for usage in read.usages:
        for name in ("input_tokens", *_CACHED, "output_tokens"):
            value: Any = usage.get(name)
            if is_count(value):
                told[name] = value
            elif value is not None:
                odd.add(name)
    cached = sum(told.get(name, 0) for name in _CACHED)
    output = Range(told.get("output_tokens", 0), told.get("output_tokens", 0))
    if len(read.usages) < read.num_usages or odd or "input_tokens" not in told or "output_tokens" not in told:
        known = told.get("input_tokens", 0)
        inputs = Range(min(size.prompt.low, known or size.prompt.low), max(size.prompt.high, known + cached + 12))
        return inputs, Range(min(1, characters), max(3 * characters + 160, output.high))
    return Range(told["input_tokens"] + cached, told["input_tokens"] + cached), output
