"""What a client is owed for an answer of a chat server, however odd. Pure, and of the contract alone.

It shares nothing with the package that is measured against it. The rules:

- What no client needs (`id`, `object`, `created`, `model`, `role`, unknown fields) never matters.
- A text, a name or arguments that cannot be read are an error: a shortened answer is never told as a complete one.
- So is an answer that ends without a finish reason; `[DONE]` alone ends a stream. A finish reason that is unknown is an
  error, or the answer is told to be cut.
- What is told of an answer (`usage`, details, log-probabilities) is used where it can be read, and never costs the
  answer. A count is an integer from 0 to 2^53; others are as if they had not been told, and are estimated.
- Half a character is U+FFFD.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, cast

Json: TypeAlias = dict[str, Any]
Verdict: TypeAlias = Literal["answer", "incomplete", "error", "either", "open"]

MAX_COUNT: Final = 2**53
MAX_WORDS: Final = 100
FINISHES: Final = {
    "stop": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "calls",
    "function_call": "calls",
    "content_filter": "filter",
    "safety": "filter",
}
BROKEN: Final = frozenset({"abort", "error", "insufficient_system_resource"})  # words for an answer that failed
SYNONYMS: Final = {"end_turn": "stop", "STOP": "stop"}  # some vendors' words; known ones are read, others are errors


class UnreadableError(Exception):
    """The answer is not known to be whole."""


@dataclass(frozen=True)
class Range:
    """At least and at most."""

    low: int
    high: int

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class ExpectedCall:
    """A tool call; `id` is None where the server has to make one up. `arguments` are the texts that are right."""

    id: str | None
    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class ExpectedChoice:
    """One answer; `reasoning` is None where it may be left out."""

    texts: tuple[str, ...]  # the one that is right, in any order of text and refusal
    reasoning: str | None
    calls: tuple[ExpectedCall, ...]
    finishes: frozenset[str]  # "stop", "length", "calls", "filter"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What must come of an answer.

    "answer": `choices`; "error": one, with one of `statuses` if nothing was sent before it, and with `words`;
    "incomplete": an error, or `choices` that are told to be cut; "either": an error or `choices`; "open": anything but
    a failure of the server itself.
    """

    verdict: Verdict
    choices: tuple[ExpectedChoice, ...] = ()
    statuses: frozenset[int] = frozenset({502})
    words: str | None = None
    prompt: Range = Range(0, 0)
    completion: Range = Range(0, 0)
    why: str = ""

    @property
    def charge(self) -> Range:
        """The tokens that the budget loses by an answer."""
        return self.prompt + self.completion


# ------------------------------------------------------------------------------------------ values


def is_count(value: Any) -> bool:
    """True and False are integers for Python alone."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def mend(text: str) -> str:
    """Halves of characters that stand alone are U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_text(value: Any, what: str) -> str:
    """A text, or none; raises UnreadableError for all else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnreadableError(f"{what} is not a text")
    return value


# ------------------------------------------------------------------------------------------ calls


@dataclass
class _Call:
    id: str = ""
    name: str = ""
    pieces: list[Any] = field(default_factory=list[Any])  # texts and objects
    index: Any = None

    def finish(self) -> ExpectedCall:
        if not self.name:
            raise UnreadableError("a call has no name")
        texts = "".join(piece if isinstance(piece, str) else json.dumps(piece) for piece in self.pieces)
        # "" and {} are the same to whoever runs the call
        arguments = ("", "{}") if not texts.strip() else (mend(texts),)
        is_odd = mend(self.id) != self.id
        return ExpectedCall(None if is_odd or not self.id else self.id, mend(self.name), arguments)


@dataclass
class _Choice:
    """What one choice has said so far."""

    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    refusal: list[str] = field(default_factory=list[str])
    said: list[str] = field(default_factory=list[str])  # both, as they came
    calls: list[_Call] = field(default_factory=list[_Call])
    finishes: list[str] = field(default_factory=list[str])
    unknown_finish: str | None = None
    is_incomplete: bool = False
    has_odd_reasoning: bool = False
    doubts: list[str] = field(default_factory=list[str])  # an error would be right, too
    unclear: list[str] = field(default_factory=list[str])  # several answers would be right

    def add_message(self, message: Any, *, in_pieces: bool) -> None:
        """A message, or a piece of one."""
        if not isinstance(message, dict):
            raise UnreadableError("a message is not an object")
        said = cast("Json", message)
        self.texts.append(self._read_content(said.get("content")))
        self.refusal.append(read_text(self._read_or_none(said, "refusal"), "refusal"))
        self.said += [self.texts[-1], self.refusal[-1]]
        for name in ("reasoning_content", "reasoning"):
            value = said.get(name)
            if isinstance(value, str):
                self.reasoning.append(value)
            elif value is not None:
                self.has_odd_reasoning = True
        calls = self._read_or_none(said, "tool_calls")
        if calls is None:
            return
        if not isinstance(calls, list):
            raise UnreadableError("tool_calls is not a list")
        for call in cast("list[Any]", calls):
            self._add_call(call, in_pieces=in_pieces)

    def _read_or_none(self, said: Json, name: str) -> Any:
        """A field, or None where it has nothing, however that is written."""
        value: Any = said.get(name)
        if value:
            return value
        if value not in (None, []) and not (value == "" and name == "refusal"):
            self.doubts.append(f"whether there is a field {name} is not told")
        return None

    def _read_content(self, value: Any) -> str:
        """A text, or a list of parts with texts."""
        if not isinstance(value, list):
            return read_text(value, "content")
        texts: list[str] = []
        for part in cast("list[Any]", value):
            fields = cast("Json", part) if isinstance(part, dict) else {}
            if fields and fields.get("text") is None:
                self.doubts.append("a part of the content has no text")
                continue
            if not isinstance(fields.get("text"), str):
                raise UnreadableError("a part of the content is not a text")
            if fields.get("type") != "text":
                self.doubts.append("a part of the content does not say that it is a text")
            texts.append(fields["text"])
        return "".join(texts)

    def _add_call(self, value: Any, *, in_pieces: bool) -> None:
        if not isinstance(value, dict):
            raise UnreadableError("a call is not an object")
        said = cast("Json", value)
        function: Any = said.get("function")
        if function is None:
            function = {}
            if in_pieces and not said.keys() & {"id", "index"}:
                # a call whose all is lost, or a piece that says nothing
                self.doubts.append("whether this is a call is not told")
        if not isinstance(function, dict):
            raise UnreadableError("a call's function is not an object")
        function = cast("Json", function)
        raw_id, index = said.get("id"), said.get("index")
        call_id = raw_id if isinstance(raw_id, str) else ""
        name, arguments = function.get("name"), function.get("arguments")
        call = self._find_call(call_id, index, name) if in_pieces else None
        if call is None:
            call = _Call(id=call_id, index=index)
            self.calls.append(call)
        elif name is not None and not isinstance(name, str):
            # the name is known already
            self.doubts.append("a later piece has an odd name")
            name = None
        if name is not None and not isinstance(name, str):
            raise UnreadableError("a call's name is not a text")
        if name and call.name and name != call.name:
            self.unclear.append("a later piece has another name")
        call.name = call.name or name or ""
        call.id = call.id or call_id
        self._add_arguments(call, arguments)

    def _find_call(self, call_id: str, index: Any, name: Any) -> _Call | None:
        """The call that a piece goes on with, or None for a new one."""
        by_id = [call for call in self.calls if call_id and call.id == call_id]
        if by_id or not self.calls:
            return by_id[0] if by_id else None
        last = self.calls[-1]
        by_index = [call for call in self.calls if is_count(index) and call.index == index]
        if isinstance(name, str) and name:
            is_repeated = not call_id and name == last.name and last in by_index
            is_late = not last.name and not any(last.pieces) and not (call_id and last.id)
            return last if is_repeated or is_late else None
        if call_id and (name or (is_count(index) and not by_index)):
            return None  # it has no name that can be read
        if not by_index and (is_count(index) or len(self.calls) > 1):
            self.doubts.append("whose arguments these are is not told")
        return by_index[-1] if by_index else last

    def _add_arguments(self, call: _Call, arguments: Any) -> None:
        if arguments is None:
            return
        if not isinstance(arguments, str | dict):
            raise UnreadableError("a call's arguments are neither a text nor an object")
        has_text = any(isinstance(piece, str) and piece for piece in call.pieces)
        has_object = any(isinstance(piece, dict) for piece in call.pieces)
        if (isinstance(arguments, dict) and has_text) or (arguments and has_object):
            self.unclear.append("arguments are partly a text and partly an object")
        call.pieces.append(cast("Any", arguments))

    def add_finish(self, value: Any) -> None:
        """A finish reason, if it is one."""
        if not value:
            if value not in (None, ""):
                self.doubts.append("whether there is a finish reason is not told")
            return
        if isinstance(value, str) and value in SYNONYMS:
            self.doubts.append(f"the finish reason {value} is another vendor's word")
            value = SYNONYMS[value]
        if isinstance(value, str) and value in FINISHES:
            self.finishes.append(FINISHES[value])
            if self.unknown_finish is not None:
                self.doubts.append("a finish reason that cannot be read is followed by one that can")
                self.unknown_finish = None
        else:
            self.unknown_finish = value if isinstance(value, str) else repr(value)

    def finish(self, *, has_done: bool) -> ExpectedChoice:
        """The whole choice."""
        if self.unknown_finish in BROKEN:
            raise UnreadableError(f"the finish reason is {self.unknown_finish}")
        if self.unknown_finish is not None:
            self.is_incomplete = True
            self.finishes = ["length"]
        if not self.finishes and not has_done:
            raise UnreadableError("the answer has no finish reason")
        calls = tuple(call.finish() for call in self.calls)
        finishes = {self._interpret(finish, calls) for finish in self.finishes or ["stop"]}
        if len(finishes) > 1:
            self.doubts.append("there are two finish reasons")
        text, refusal = mend("".join(self.texts)), mend("".join(self.refusal))
        if "calls" in finishes and not calls:
            self.doubts.append("there is no call, though calls are the finish reason")
            finishes.add("stop")
        if refusal and finishes & {"stop", "filter"}:
            # both are words for the end of a refusal, which is there to be seen
            finishes |= {"stop", "filter"}
        if not (text or refusal or calls or "".join(self.reasoning)):
            self.doubts.append("the answer says nothing")
        if self.has_odd_reasoning:
            self.doubts.append("the reasoning cannot be read")
        reasoning = None if self.has_odd_reasoning else mend("".join(self.reasoning))
        in_order = mend("".join(self.said))
        return ExpectedChoice((in_order, text + refusal, refusal + text), reasoning, calls, frozenset(finishes))

    @staticmethod
    def _interpret(finish: str, calls: Sequence[ExpectedCall]) -> str:
        return "calls" if finish == "stop" and calls else finish


# ------------------------------------------------------------------------------------------ answers


class _Answer:
    """What has been read of an answer of `num_choices`."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [_Choice() for _ in range(num_choices)]
        self.seen: set[int] = set()
        self.doubts: list[str] = []
        self.unclear: list[str] = []
        self.usages: list[Any] = []

    def add(self, value: Any, *, in_pieces: bool) -> None:
        """A whole answer, or an event of one."""
        if not isinstance(value, dict):
            raise UnreadableError("an answer is not an object")
        said = cast("Json", value)
        self._look_for_error(said)
        if said.get("usage") is not None:
            self.usages.append(said["usage"])
        choices = said.get("choices")
        if choices is None:
            if not said.get("usage"):
                self.doubts.append("a chunk is neither of an answer nor of its usage")
            choices = []
        if not isinstance(choices, list):
            raise UnreadableError("choices are not a list")
        for position, choice in enumerate(cast("list[Any]", choices)):
            self._add_choice(choice, position, in_pieces=in_pieces)

    def _look_for_error(self, said: Json) -> None:
        error = said.get("error")
        if error is None:
            return
        if isinstance(error, dict | str) and error:
            message = cast("Json", error).get("message") if isinstance(error, dict) else cast("Any", error)
            raise ToldError(message, cast("Any", error))
        self.doubts.append("whether there is an error is not told")

    def _add_choice(self, value: Any, position: int, *, in_pieces: bool) -> None:
        if not isinstance(value, dict):
            raise UnreadableError("a choice is not an object")
        said = cast("Json", value)
        choice = self._find_choice(said.get("index"), position, in_pieces=in_pieces)
        message = said.get("delta") if said.get("delta") is not None else said.get("message")
        if message is None and "text" in said:
            message = {"content": read_text(said["text"], "text")}
        if message is None and not in_pieces:
            raise UnreadableError("a choice has no message")
        choice.add_finish(said.get("finish_reason"))
        if message is not None:
            choice.add_message(message, in_pieces=in_pieces)

    def _find_choice(self, index: Any, position: int, *, in_pieces: bool) -> _Choice:
        number = len(self.choices)
        is_told = is_count(index) and index < number
        if number == 1:
            if is_count(index) and not is_told:
                # it may be a choice that nobody asked for
                self.unclear.append("the choice has another number")
            self.seen.add(0)
            return self.choices[0]
        if not is_told or (not in_pieces and index != position):
            self.unclear.append("which choice it is is not told")
        found = index if is_told and in_pieces else min(position, number - 1)
        self.seen.add(found)
        return self.choices[found]

    def finish(self, *, has_done: bool) -> list[ExpectedChoice]:
        """All choices."""
        if len(self.seen) < len(self.choices):
            if not self.seen:
                raise UnreadableError("there is no choice")
            # so answers a server that knows no `n`, and clients see how many there are
            self.unclear.append("a choice is not there")
        finished = [choice.finish(has_done=has_done) for choice in self.choices]
        for choice in self.choices:
            self.doubts += choice.doubts
            self.unclear += choice.unclear
        return finished

    def count_characters(self) -> int:
        """Of all that was said."""
        total = 0
        for choice in self.choices:
            total += sum(map(len, choice.texts + choice.reasoning + choice.refusal))
            total += sum(len(call.name) + len(json.dumps(call.pieces)) for call in choice.calls)
        return total


class ToldError(Exception):
    """The server says that it failed."""

    def __init__(self, words: Any, error: Any) -> None:
        super().__init__(words)
        self.words = get_words(words)
        self.error = error


def get_words(message: Any) -> str | None:
    """What the client must find in its error; a long message may be cut."""
    return mend(message) if isinstance(message, str) and 0 < len(message) < MAX_WORDS else None


ANY_ERROR: Final = frozenset({*range(400, 500), *range(501, 600)})


def tells_error(events: Iterable[Any]) -> bool:
    """Whether one of them does."""
    return any(isinstance(event, dict) and bool(cast("Json", event).get("error")) for event in events)


@dataclass(frozen=True, kw_only=True)
class RequestSize:
    """What bounds the estimate of a prompt: the bytes of its texts, and of its whole request."""

    text: int
    request: int

    @property
    def prompt(self) -> Range:
        """One token for each 4 bytes of text at least, one for each byte of the request at most."""
        return Range(self.text // 4, self.request + 64)


def expect(
    answer: Any,
    *,
    is_streamed: bool,
    has_done: bool,
    status: int,
    num_choices: int,
    size: RequestSize,
) -> Expectation:
    """What must come of an answer: a list of events, or one value."""
    if status >= 400:
        return expect_status(answer, status, size)
    read = _Answer(num_choices)
    events: Iterable[Any] = cast("list[Any]", answer) if is_streamed else [answer]
    verdict: Verdict = "answer"
    choices: list[ExpectedChoice] = []
    statuses, words, why = frozenset({502}), None, ""
    try:
        for event in events:
            read.add(event, in_pieces=is_streamed)
        choices = read.finish(has_done=is_streamed and has_done)
    except UnreadableError as error:
        verdict, why = "error", str(error)
        statuses = ANY_ERROR if tells_error(events) else statuses
    except ToldError as error:
        verdict, why, statuses = "error", "it tells of an error", ANY_ERROR
        is_first = not read.doubts and not any(choice.doubts or choice.unknown_finish for choice in read.choices)
        words = error.words if is_first else None
    if read.unclear:
        verdict, why = "open", read.unclear[0]
    elif verdict == "answer" and read.doubts:
        verdict, why = "either", read.doubts[0]
    elif verdict == "answer" and any(choice.is_incomplete for choice in read.choices):
        verdict, why = "incomplete", "a finish reason is unknown"
    characters = read.count_characters()
    estimate = Range(min(1, characters) + characters // 16, 3 * characters + 8 * len(list(events)) + 16)
    prompt, completion = _expect_counts(read.usages, size.prompt, estimate)
    if verdict != "answer":
        # what was generated before an error is charged as far as it is known
        prompt = Range(0, max(prompt.high, size.prompt.high))
        completion = Range(0, max(completion.high, 3 * len(json.dumps(answer)) + 64))
    return Expectation(
        verdict=verdict,
        choices=tuple(choices),
        statuses=statuses,
        words=words,
        prompt=prompt,
        completion=completion,
        why=why,
    )


def _expect_counts(usages: Sequence[Any], prompt: Range, completion: Range) -> tuple[Range, Range]:
    """Those that are told last, if they can be read; else estimates, or what is told of them elsewhere."""
    told = [cast("Json", usage) if isinstance(usage, dict) else {} for usage in usages]
    prompts, completions = ([usage.get(name) for usage in told] for name in ("prompt_tokens", "completion_tokens"))
    last = (prompts[-1], completions[-1]) if told else (None, None)
    if is_count(last[0]) and is_count(last[1]):
        inputs, outputs = cast("tuple[int, int]", last)
        return Range(inputs, inputs), Range(outputs, outputs)
    return _widen(prompt, prompts), _widen(completion, completions)


def _widen(estimate: Range, told: Sequence[Any]) -> Range:
    counts: list[int] = [cast("int", value) for value in told if is_count(value)]
    return Range(min([estimate.low, *counts]), max([estimate.high, *counts]))


def expect_status(answer: Any, status: int, size: RequestSize) -> Expectation:
    """A refusal; what its body says is of use only where it can be read."""
    said: Mapping[str, Any] = cast("Json", answer) if isinstance(answer, dict) else {}
    error: Any = said.get("error")
    message: Any = cast("Json", error).get("message") if isinstance(error, dict) else None
    return Expectation(
        verdict="error",
        statuses=_STATUSES.get(status, ANY_ERROR),
        words=get_words(message),
        prompt=Range(0, size.prompt.high),
        completion=Range(0, 0),
        why=f"it is answered {status}",
    )


_STATUSES: Final = {
    400: frozenset({400}),
    429: frozenset({429}),
    500: frozenset({502, 503}),
    503: frozenset({503, 529}),
    529: frozenset({503, 529}),
}
