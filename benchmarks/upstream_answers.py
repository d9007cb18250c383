"""Answers of chat servers as JSON, and what may be wrong with one field of them. Pure, and always the same by seed.

A case is an answer, in one of the forms that servers send, with one value in it exchanged. It shares nothing with the
package that reads such answers.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, cast

Json: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str | int, ...]


class Missing:
    """Not a value: the field, or the item of a list, is left out."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()
LONG: Final = "long words " * 150

# ------------------------------------------------------------------------------------------ the answers


@dataclass(frozen=True, kw_only=True)
class Base:
    """An answer before anything is wrong with it; `events` are its chunks, `whole` is the same in one piece.

    `text`, `reasoning`, `calls` (name and arguments) and `finish` are those of its first choice; they are written down
    once more so that a reader of `events` and `whole` can be tried.
    """

    name: str
    whole: Json
    events: Sequence[Json]
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"
    status: int = 200


USAGE: Final[Json] = {
    "prompt_tokens": 31,
    "completion_tokens": 9,
    "total_tokens": 40,
    "prompt_tokens_details": {"cached_tokens": 12, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 2, "accepted_prediction_tokens": 0, "audio_tokens": 0},
}
SHORT_USAGE: Final[Json] = {"prompt_tokens": 31, "completion_tokens": 9, "total_tokens": 40}
CACHED_USAGE: Final[Json] = SHORT_USAGE | {"prompt_cache_hit_tokens": 12, "prompt_cache_miss_tokens": 19}

_NULLS: Final[Json] = {"refusal": None}
_VLLM_CHOICE: Final[Json] = {"logprobs": None, "stop_reason": None, "token_ids": None}


def _make_logprobs(tokens: Sequence[str]) -> Json:
    entries = [
        {
            "token": token,
            "logprob": -0.25,
            "bytes": list(token.encode()),
            "top_logprobs": [{"token": token, "logprob": -0.25, "bytes": list(token.encode())}],
        }
        for token in tokens
    ]
    return {"content": entries, "refusal": None}


@dataclass
class _Writer:
    """How one vendor writes: what stands around each choice."""

    top: Json = field(default_factory=dict[str, Any])
    choice: Json = field(default_factory=dict[str, Any])
    first_delta: Json = field(default_factory=lambda: {"role": "assistant"})
    usage: Json | None = None
    usage_with: str = "own"  # "own": a chunk without choices; "last": beside the finish reason; "each": in all chunks
    finish_with: str = "own"  # or "last": beside the last piece

    def write_whole(self, messages: Sequence[Json], finishes: Sequence[str], **choice: Any) -> Json:
        choices = [
            {"index": i, "message": {"role": "assistant"} | message, **self.choice, **choice, "finish_reason": finish}
            for i, (message, finish) in enumerate(zip(messages, finishes, strict=True))
        ]
        whole = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1790000000, "model": "m", **self.top}
        return whole | {"choices": choices} | ({} if self.usage is None else {"usage": self.usage})

    def write_events(
        self, pieces: Sequence[tuple[int, Json]], finishes: Sequence[str], logprobs: Sequence[Json] = ()
    ) -> list[Json]:
        """`pieces` are numbers of choices and what each says."""
        events: list[Json] = []
        seen: set[int] = set()
        for number, (index, piece) in enumerate(pieces):
            delta = piece if index in seen else self.first_delta | piece
            seen.add(index)
            choice: Json = {"index": index, "delta": delta, **self.choice, "finish_reason": None}
            if logprobs:
                choice["logprobs"] = logprobs[number]
            events.append(self._wrap([choice]))
        if self.finish_with == "last" and len(finishes) == 1:
            events[-1]["choices"][0]["finish_reason"] = finishes[0]
        else:
            for index, finish in enumerate(finishes):
                events.append(self._wrap([{"index": index, "delta": {}, **self.choice, "finish_reason": finish}]))
        if self.usage is not None and self.usage_with == "own":
            events.append(self._wrap([]) | {"usage": self.usage})
        elif self.usage is not None and self.usage_with == "last":
            events[-1]["usage"] = self.usage
        elif self.usage is not None:
            for number, event in enumerate(events):
                part = {"completion_tokens": min(9, number + 1), "total_tokens": 31 + min(9, number + 1)}
                event["usage"] = self.usage | (part if number + 1 < len(events) else {})
        return events

    def _wrap(self, choices: list[Json]) -> Json:
        event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1790000000, "model": "m"}
        return event | self.top | {"choices": choices}


_BARE: Final = _Writer(first_delta={})
_OPENAI: Final = _Writer(
    top={"system_fingerprint": "fp_1", "service_tier": "default"},
    choice={"logprobs": None},
    first_delta={"role": "assistant", "content": "", "refusal": None},
    usage=USAGE,
)
_VLLM: Final = _Writer(choice=_VLLM_CHOICE, usage=SHORT_USAGE, usage_with="each")
_DEEPSEEK: Final = _Writer(choice={"logprobs": None}, usage=CACHED_USAGE, usage_with="last", finish_with="last")


def _write_text(name: str, writer: _Writer, pieces: Sequence[str], *, finish: str = "stop", **message: Any) -> Base:
    text = "".join(pieces)
    return Base(
        name=name,
        whole=writer.write_whole([{"content": text, **message}], [finish]),
        events=writer.write_events([(0, {"content": piece}) for piece in pieces], [finish]),
        text=text,
        finish=finish,
    )


def _write_reasoning(name: str, writer: _Writer, field_name: str) -> Base:
    pieces = [{field_name: "Let me "}, {field_name: "think."}, {"content": "It is "}, {"content": "42."}]
    return Base(
        name=name,
        whole=writer.write_whole([{"content": "It is 42.", field_name: "Let me think."}], ["stop"]),
        events=writer.write_events([(0, piece) for piece in pieces], ["stop"]),
        text="It is 42.",
        reasoning="Let me think.",
    )


def _write_call(call_id: str, name: str, arguments: str, **more: Any) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}} | more


_OSLO: Final = ('{"city":', ' "Oslo"}')
_RIGA: Final = ('{"city":', ' "Riga"}')


def _write_calls(name: str, writer: _Writer, names: Sequence[str], *, text: str = "", nulls: bool = False) -> Base:
    """Calls, one after the other; `nulls`: later pieces have all fields of the first, but null."""
    calls: list[Json] = []
    pieces: list[tuple[int, Json]] = [(0, {"content": text})] if text else []
    for index, (call_name, arguments) in enumerate(zip(names, (_OSLO, _RIGA), strict=False)):
        call_id = f"call_{index}"
        calls.append(_write_call(call_id, call_name, "".join(arguments)))
        pieces.append((0, {"tool_calls": [_write_call(call_id, call_name, "", index=index)]}))
        for piece in arguments:
            later: Json = {"index": index, "function": {"arguments": piece}}
            if nulls:
                later = {"index": index, "id": None, "type": None, "function": {"name": None, "arguments": piece}}
            pieces.append((0, {"tool_calls": [later]}))
    return Base(
        name=name,
        whole=writer.write_whole([{"content": text or None, "tool_calls": calls}], ["tool_calls"]),
        events=writer.write_events(pieces, ["tool_calls"]),
        text=text,
        calls=tuple((n, "".join(a)) for n, a in zip(names, (_OSLO, _RIGA), strict=False)),
        finish="tool_calls",
    )


def _write_whole_calls() -> Base:
    """Two calls, each in one piece, in one chunk (as Gemini and Mistral write them)."""
    calls = [_write_call("call_0", "get_weather", "".join(_OSLO), index=0)]
    calls.append(_write_call("call_1", "get_time", "".join(_RIGA), index=1))
    return Base(
        name="calls at once",
        whole=_DEEPSEEK.write_whole([{"content": "", "tool_calls": calls}], ["tool_calls"]),
        events=_DEEPSEEK.write_events([(0, {"tool_calls": calls})], ["tool_calls"]),
        calls=(("get_weather", "".join(_OSLO)), ("get_time", "".join(_RIGA))),
        finish="tool_calls",
    )


def _write_refusal() -> Base:
    return Base(
        name="refusal",
        whole=_OPENAI.write_whole([{"content": None, "refusal": "I cannot help."}], ["stop"]),
        events=_OPENAI.write_events([(0, {"refusal": "I cannot "}), (0, {"refusal": "help."})], ["stop"]),
        text="I cannot help.",
        finish="refusal",
    )


def _write_parts() -> Base:
    """Content as a list of parts, as Mistral writes it."""
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "42."}]
    return Base(
        name="parts",
        whole=_DEEPSEEK.write_whole([{"content": parts}], ["stop"]),
        events=_DEEPSEEK.write_events([(0, {"content": [part]}) for part in parts], ["stop"]),
        text="It is 42.",
    )


def _write_error_fields() -> Base:
    """Fields that are null in answers without an error, or empty."""
    writer = replace(_OPENAI, top={"error": None}, usage_with="last")
    return _write_text("with null error", writer, ["It is ", "42."], annotations=[])


def _write_choices(name: str, calls: bool) -> Base:
    second: Json = {"content": "Number two."}
    pieces: list[tuple[int, Json]] = [(0, {"content": "It is "}), (1, {"content": "Number "}), (0, {"content": "42."})]
    finishes = ["stop", "stop"]
    if calls:
        call = _write_call("call_0", "get_weather", "".join(_OSLO))
        second, finishes[1] = {"content": None, "tool_calls": [call]}, "tool_calls"
        pieces[1] = (1, {"tool_calls": [call | {"index": 0}]})
    else:
        pieces.append((1, {"content": "two."}))
    return Base(
        name=name,
        whole=_OPENAI.write_whole([{"content": "It is 42."}, second], finishes),
        events=_OPENAI.write_events(pieces, finishes),
        text="It is 42.",
    )


def _write_logprobs() -> Base:
    tokens = ["It ", "is ", "42."]
    return Base(
        name="logprobs",
        whole=_OPENAI.write_whole([{"content": "It is 42."}], ["stop"], logprobs=_make_logprobs(tokens)),
        events=_OPENAI.write_events(
            [(0, {"content": token}) for token in tokens],
            ["stop"],
            [_make_logprobs([token]) for token in tokens],
        ),
        text="It is 42.",
    )


def _write_errors() -> list[Base]:
    """Errors: as an answer with a status, and as an event after some text."""
    bases: list[Base] = []
    for status, kind, code, words in (
        (400, "invalid_request_error", "context_length_exceeded", "The prompt is too long for the model."),
        (429, "rate_limit_error", "rate_limit_exceeded", "Too many requests at the moment."),
        (503, "server_error", "overloaded", "The engine is overloaded at the moment."),
        (500, "server_error", "internal_error", "Something broke behind the curtain."),
    ):
        error = {"error": {"message": words, "type": kind, "param": None, "code": code}}
        bases.append(Base(name=f"status {status}", whole=error, events=(), finish="error", status=status))
    error = {"error": {"message": "The engine has died.", "type": "server_error", "param": None, "code": 500}}
    events = [*_DEEPSEEK.write_events([(0, {"content": "It is "}), (0, {"content": "42."})], ["stop"])[:1], error]
    bases.append(Base(name="error in the stream", whole=error, events=events, finish="error"))
    return bases


ONE_CHOICE: Final[Sequence[Base]] = (
    _write_text("text", _OPENAI, ["It is ", "4", "2."], refusal=None),
    _write_text("bare text", _BARE, ["It is ", "42."]),
    _write_text("text with usage in each chunk", _VLLM, ["It ", "is ", "42."], reasoning_content=None, tool_calls=[]),
    _write_text("text, finish beside it", _DEEPSEEK, ["It is ", "42."]),
    _write_text("cut text", _OPENAI, ["It is ", "42 and"], finish="length"),
    _write_text("filtered text", _DEEPSEEK, ["It is ", "42 and"], finish="content_filter"),
    _write_reasoning("reasoning_content", _VLLM, "reasoning_content"),
    _write_reasoning("reasoning", _DEEPSEEK, "reasoning"),
    _write_calls("call", _OPENAI, ["get_weather"]),
    _write_calls("text and a call", _VLLM, ["get_weather"], text="I will look."),
    _write_calls("parallel calls", _OPENAI, ["get_weather", "get_time"]),
    _write_calls("parallel calls with nulls", _DEEPSEEK, ["get_weather", "get_time"], nulls=True),
    _write_whole_calls(),
    _write_refusal(),
    _write_parts(),
    _write_error_fields(),
    *_write_errors(),
)
TWO_CHOICES: Final[Sequence[Base]] = (_write_choices("two choices", False), _write_choices("two with a call", True))
LOGPROBS: Final[Sequence[Base]] = (_write_logprobs(),)

# ------------------------------------------------------------------------------------------ what is exchanged

_NESTED: Final[Json] = {"a": {"b": [None, {"c": ["d", {}]}]}}


def _make_deep() -> Any:
    deep: Any = []
    for _ in range(150):
        deep = [deep]
    return deep


VALUES: Final[Sequence[Any]] = (
    MISSING,
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    1.5,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    -(10**400),
    2**53 + 1,
    "",
    "text",
    LONG,
    "\ud800",
    "a\udc00b",
    [],
    [1],
    [None],
    {},
    {"a": 1},
    _NESTED,
    _make_deep(),
)
_PARTS: Final = [{"type": "text", "text": "It may "}, {"type": "text", "text": "be."}]
WORDS: Final[dict[str, Sequence[Any]]] = {
    "finish_reason": (
        *("stop", "length", "content_filter", "tool_calls", "function_call", "max_tokens", "model_length", "safety"),
        *("abort", "error", "insufficient_system_resource", "end_turn", "STOP"),
    ),
    "content": (
        _PARTS,
        [{"type": "text"}],
        [{"type": "text", "text": 1}],
        ["It", " is"],
        {"type": "text", "text": "x"},
    ),
    "role": ("user", "tool", "system"),
    "object": ("chat.completion", "chat.completion.chunk", "text_completion"),
    "type": ("function", "custom", "text"),
    "arguments": ({"city": "Oslo"}, "{}", "null", [{"city": "Oslo"}]),
    "usage": ({"prompt_tokens": 5}, {"completion_tokens": 5}, [{"prompt_tokens": 5}]),
    "prompt_tokens": (5, 1000),
    "completion_tokens": (5, 1000),
    "code": (400, 429, "429", 503, "rate_limit_exceeded", "context_length_exceeded"),
    "error": ({"message": "It broke."}, "It broke."),
}


def list_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every place in a value, itself first."""
    yield path
    if isinstance(value, dict):
        for key, inner in cast("Json", value).items():
            yield from list_paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(cast("list[Any]", value)):
            yield from list_paths(inner, (*path, index))


def exchange(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value at a place; the place itself must not be the root if it is left out."""
    if not path:
        return copy.deepcopy(new)
    changed = copy.deepcopy(value)
    node = changed
    for step in path[:-1]:
        node = node[step]
    if isinstance(new, Missing):
        del node[path[-1]]
    else:
        node[path[-1]] = copy.deepcopy(new)
    return changed


# ------------------------------------------------------------------------------------------ the routes


@dataclass(frozen=True, kw_only=True)
class Route:
    """How the answer is asked for; `streams_upstream` is how the server asks its target then."""

    name: str
    api: str  # "chat", "responses" or "messages"
    is_streamed: bool
    model: str
    bases: Sequence[Base] = ONE_CHOICE
    num_choices: int = 1
    fields: Json = field(default_factory=dict[str, Any])
    streams_upstream: bool = True

    @property
    def has_budget(self) -> bool:
        """Whether its keys have one; a server is asked for a whole answer only without."""
        return self.streams_upstream


def _make_relay_route(name: str, bases: Sequence[Base], fields: Json, *, is_streamed: bool) -> Route:
    """Requests whose answers are passed on."""
    return Route(
        name=f"{name}, {'streamed' if is_streamed else 'whole'}",
        api="chat",
        is_streamed=is_streamed,
        model="generic",
        bases=bases,
        num_choices=fields.get("n", 1),
        fields=fields,
    )


ROUTES: Final[Sequence[Route]] = (
    Route(name="chat, whole", api="chat", is_streamed=False, model="generic"),
    Route(name="chat, streamed", api="chat", is_streamed=True, model="generic"),
    Route(name="responses, whole", api="responses", is_streamed=False, model="generic"),
    Route(name="responses, streamed", api="responses", is_streamed=True, model="generic"),
    Route(name="messages, whole", api="messages", is_streamed=False, model="generic"),
    Route(name="messages, streamed", api="messages", is_streamed=True, model="generic"),
    Route(name="chat of vLLM, streamed", api="chat", is_streamed=True, model="vllm"),
    Route(name="chat of vLLM, whole", api="chat", is_streamed=False, model="vllm", streams_upstream=False),
    Route(name="responses of vLLM, whole", api="responses", is_streamed=False, model="vllm", streams_upstream=False),
    Route(name="messages of vLLM, whole", api="messages", is_streamed=False, model="vllm", streams_upstream=False),
    _make_relay_route("two choices", TWO_CHOICES, {"n": 2}, is_streamed=False),
    _make_relay_route("two choices", TWO_CHOICES, {"n": 2}, is_streamed=True),
    _make_relay_route("logprobs", LOGPROBS, {"logprobs": True, "top_logprobs": 1}, is_streamed=False),
    _make_relay_route("logprobs", LOGPROBS, {"logprobs": True, "top_logprobs": 1}, is_streamed=True),
)

# ------------------------------------------------------------------------------------------ the cases

_WHOLE_SHARE: Final = 0.15
_NO_DONE_SHARE: Final = 0.15
_UNTOUCHED_SHARE: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request, and what the server's target answers to it."""

    seed: int
    number: int
    route: Route
    base: Base
    is_streamed: bool  # as events; else as one JSON value, also where a stream was asked for
    has_done: bool = True
    path: Path = ()  # for events, its first step is the number of the event
    value: Any = None
    is_untouched: bool = False
    is_control: bool = False

    @property
    def plain_answer(self) -> Any:
        """What the target would send if nothing was exchanged: events, or one value."""
        return list(self.base.events) if self.is_streamed else self.base.whole

    @property
    def answer(self) -> Any:
        """What the target sends."""
        return self.plain_answer if self.is_untouched else exchange(self.plain_answer, self.path, self.value)

    def encode(self) -> bytes:
        """The body of the answer."""
        if not self.is_streamed:
            return json.dumps(self.answer).encode()
        end = b"data: [DONE]\n\n" if self.has_done else b""
        return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in self.answer) + end

    def __str__(self) -> str:
        form = ("events" if self.has_done else "events without [DONE]") if self.is_streamed else "whole"
        place = "nothing" if self.is_untouched else f"{'.'.join(map(str, self.path)) or 'all'} = {_shorten(self.value)}"
        return f"--seed {self.seed} --only {self.number}: {self.route.name}; {self.base.name} as {form}; {place}"


def _shorten(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 60 else f"{shown[:40]}… ({len(shown)} characters)"


def make_case(seed: int, number: int) -> Case:
    """The case of a number."""
    r = random.Random(f"{seed}/{number}")  # noqa: S311 - not for secrets
    route = ROUTES[number % len(ROUTES)]
    base = r.choice(route.bases)
    is_streamed = route.streams_upstream and bool(base.events) and r.random() >= _WHOLE_SHARE
    case = Case(
        seed=seed,
        number=number,
        route=route,
        base=base,
        is_streamed=is_streamed,
        has_done=r.random() >= _NO_DONE_SHARE,
        is_untouched=r.random() < _UNTOUCHED_SHARE,
    )
    paths = [path for path in list_paths(case.plain_answer) if path or not is_streamed]
    path = r.choice(paths)
    words = WORDS.get(str(path[-1]), ()) if path else ()
    value = r.choice(words) if words and r.random() < 0.3 else r.choice(VALUES)
    if isinstance(value, Missing) and (not path or (is_streamed and len(path) == 1)):
        value = None
    return replace(case, path=path, value=value)


def make_control(number: int) -> Case:
    """A plain answer, always the same for a route."""
    route = ROUTES[number % len(ROUTES)]
    return Case(
        seed=0,
        number=number,
        route=route,
        base=route.bases[0],
        is_streamed=route.streams_upstream,
        is_untouched=True,
        is_control=True,
    )
