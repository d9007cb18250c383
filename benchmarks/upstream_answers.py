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

from upstream_chat_bases import COMPLETIONS, LOGPROBS, ONE_CHOICE, TWO_CHOICES, Base
from upstream_messages_bases import MESSAGES

Json: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str | int, ...]


class Missing:
    """Not a value: the field, or the item of a list, is left out."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()
LONG: Final = "long words " * 150

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
    "stop_reason": ("end_turn", "max_tokens", "tool_use", "refusal", "pause_turn", "stop_sequence", "abort", "stop"),
    "stop_sequence": ("text",),
    "input": ({"city": "Oslo"},),
    "input_tokens": (5, 1000),
    "output_tokens": (5, 1000),
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
    api: str  # "chat", "completions", "responses" or "messages"
    is_streamed: bool
    model: str
    bases: Sequence[Base] = ONE_CHOICE
    num_choices: int = 1
    fields: Json = field(default_factory=dict[str, Any])
    streams_upstream: bool = True
    has_wholes: bool = True  # whether a whole answer in place of a stream is tried, too

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


def _make_messages_route(api: str, *, is_streamed: bool) -> Route:
    """Requests to a target that speaks Anthropic's messages."""
    return Route(
        name=f"{api} of anthropic, {'streamed' if is_streamed else 'whole'}",
        api=api,
        is_streamed=is_streamed,
        model="anthropic",
        bases=MESSAGES,
        has_wholes=False,
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
    Route(name="chat of openai, whole", api="chat", is_streamed=False, model="openai", has_wholes=False),
    Route(name="chat of openai, streamed", api="chat", is_streamed=True, model="openai", has_wholes=False),
    Route(name="completions, whole", api="completions", is_streamed=False, model="generic", bases=COMPLETIONS),
    Route(name="completions, streamed", api="completions", is_streamed=True, model="generic", bases=COMPLETIONS),
    _make_messages_route("chat", is_streamed=False),
    _make_messages_route("responses", is_streamed=True),
    _make_messages_route("messages", is_streamed=False),
    _make_messages_route("messages", is_streamed=True),
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
        if self.base.dialect == "messages":
            lines = zip(self.event_names, self.answer, strict=True)
            return b"".join(f"event: {name}\ndata: {json.dumps(event)}\n\n".encode() for name, event in lines)
        end = b"data: [DONE]\n\n" if self.has_done else b""
        return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in self.answer) + end

    @property
    def event_names(self) -> list[str]:
        """The names of the events of messages; they are never exchanged."""
        return [event["type"] for event in self.base.events]

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
    is_whole = not route.streams_upstream or not base.events or (r.random() < _WHOLE_SHARE and route.has_wholes)
    case = Case(
        seed=seed,
        number=number,
        route=route,
        base=base,
        is_streamed=not is_whole,
        has_done=base.dialect == "messages" or r.random() >= _NO_DONE_SHARE,
        is_untouched=r.random() < _UNTOUCHED_SHARE,
    )
    paths = [path for path in list_paths(case.plain_answer) if path or is_whole]
    path = r.choice(paths)
    words = WORDS.get(str(path[-1]), ()) if path else ()
    value = r.choice(words) if words and r.random() < 0.3 else r.choice(VALUES)
    if isinstance(value, Missing) and (not path or (len(path) == 1 and not is_whole)):
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
