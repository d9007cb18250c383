"""Answers of chat servers, before anything is wrong with them: as one JSON value, and as chunks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

Json: TypeAlias = dict[str, Any]


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
    dialect: str = "chat"  # or "messages"


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


def _write_completion(name: str, writer: _Writer, pieces: Sequence[str], finish: str = "stop") -> Base:
    """The same by `/v1/completions`."""
    said: Json = {"index": 0, "text": "".join(pieces), **writer.choice, "finish_reason": finish}
    head: Json = {"id": "cmpl-1", "object": "text_completion", "created": 1790000000, "model": "m", **writer.top}
    events = [head | {"choices": [said | {"text": piece, "finish_reason": None}]} for piece in pieces]
    events.append(head | {"choices": [said | {"text": ""}], "usage": writer.usage})
    return Base(
        name=f"completion: {name}",
        whole=head | {"choices": [said], "usage": writer.usage},
        events=events,
        text="".join(pieces),
        finish=finish,
    )


COMPLETIONS: Final[Sequence[Base]] = (
    _write_completion("text", _OPENAI, ["It is ", "4", "2."]),
    _write_completion("text of vLLM", _VLLM, ["It is ", "42."]),
    _write_completion("cut text", _BARE, ["It is ", "42 and"], "length"),
)
