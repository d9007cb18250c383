"""Reading the fields of a request's body: what is absent or null is the default, what is wrong is one clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar, cast

from llm_spec.chat import ChatMessage, ChatRequest, Sampling
from llm_spec.errors import InvalidRequestError

__all__ = [
    "Asked",
    "Body",
    "Json",
    "chat_request",
    "listed",
    "read_messages",
    "read_model",
    "read_num_choices",
    "read_stop",
    "table",
    "wanted",
]

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]
Body: TypeAlias = Mapping[str, Any]

_DEFAULT_SAMPLING: Final = Sampling()
_MASK: Final = (1 << 63) - 1
_ONE_TOKEN: Final = 1e-6  # a `top_p` that leaves the most probable token alone: what OpenAI means by 0
_NO_TOP_K: Final = (0, -1)  # words of llama.cpp and vLLM for: all tokens
_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_KINDS: Final = {
    bool: "true or false",
    dict: "an object",
    int: "an integer",
    list: "a list",
    str: "a text",
}
# What this library says to a target itself: set beside it, it would pass by limits, budgets and names of models
_OURS: Final = frozenset(
    {
        "best_of",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "models",
        "n",
        "prefix",
        "prompt",
        "raw",
        "stream",
        "stream_options",
    }
)
_MAX_STOPS: Final = 256  # each of them is looked for in each piece of the answer
_HARMLESS: Final[Sequence[Any]] = (0, 1, "", [], {})
# What would change the answer; a model in this process has none of it
_NOT_LOCAL: Final = ("audio", "best_of", "function_call", "functions", "suffix", "web_search_options")


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request, read. `num_choices`, `logprobs`: what only the target's own chunks can answer."""

    model: str
    request: ChatRequest
    stream: bool = False
    include_usage: bool = False
    num_choices: int = 1
    logprobs: bool = False
    echo: str = ""  # text that the answer begins with
    body: Body = field(default_factory=dict[str, Any])


def wanted(body: Body, name: str, default: T, kind: type | None = None) -> T:
    """A field of the type of its default, or of `kind`; raises InvalidRequestError for another type."""
    value = body.get(name)
    if value is None:
        return default
    kind = kind or type(default)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of numbers
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequestError(f"{name} is of type {type(value).__name__}; it must be {_KINDS[kind]}")
    return cast("T", value)


def listed(body: Body, name: str) -> list[Json]:
    """A list of objects."""
    values = cast("list[Any]", wanted(body, name, None, list)) or []
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{name}[{index}] is of type {type(value).__name__}; it must be an object")
    return cast("list[Json]", values)


def table(body: Body, name: str) -> Json:
    """An object; empty where there is none."""
    return cast("Json", wanted(body, name, None, dict)) or {}


def read_messages(body: Body) -> tuple[ChatMessage, ...]:
    """Chat messages in OpenAI's form."""
    messages = listed(body, "messages")
    if not messages:
        raise InvalidRequestError("messages is empty; it must hold at least one message")
    read: list[ChatMessage] = []
    for index, message in enumerate(messages):
        try:
            read.append(ChatMessage.from_openai(message))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"messages[{index}] is wrong: {error}") from error
    return tuple(read)


def chat_request(
    body: Body, known: frozenset[str], *, is_local: bool, more: Body | None = None, **fields: Any
) -> ChatRequest:
    """The request of a body: sampling and what this library knows by its name, the rest as `extra`.

    `known` fields are read by the caller, who gives them in `fields`. A model in this process takes no others: what
    would change its answer is refused, what would not is left out. `more` goes into `extra` all the same.
    """
    extra = _others(body, known)
    sampling: Json = {name: extra.pop(name) for name in _SAMPLING if name in extra}
    seed: int | None = wanted(extra, "seed", None, int)
    if seed is not None and (is_local or seed >= 0):
        del extra["seed"]
        sampling["seed"] = seed & _MASK  # a negative one goes to a server as it is
    if sampling.get("top_p") == 0:
        sampling["top_p"] = _ONE_TOKEN
    if sampling.get("top_k") in _NO_TOP_K:  # a server may have a default that this switches off
        extra["top_k"] = sampling.pop("top_k")
    bias = table(extra, "logit_bias")
    if is_local or all(name.isdecimal() for name in bias):  # other names go to a server, who may know them
        extra.pop("logit_bias", None)
        if bias:
            sampling["logit_bias"] = _token_biases(bias)
    if fields.get("max_tokens") == 0 and not is_local:  # some servers read the prompt alone then, some refuse
        fields["max_tokens"] = None
        extra["max_tokens"] = 0
    if is_local:
        for name in _NOT_LOCAL:
            if extra.get(name):
                raise InvalidRequestError(f"{name} is set; a model in this process cannot serve it")
        extra = {}
    extra.update(more or {})
    return ChatRequest(sampling=Sampling(**sampling) if sampling else _DEFAULT_SAMPLING, extra=extra, **fields)


def _others(body: Body, known: frozenset[str]) -> Json:
    """The fields that this library knows nothing of; raises InvalidRequestError for one that is not the client's."""
    others = {name: value for name, value in body.items() if name not in known and value is not None}
    for name in _OURS & others.keys():
        if others.pop(name) not in _HARMLESS:
            raise InvalidRequestError(f"{name} is set, which is no field of this API, or not taken here")
    return others


def _token_biases(bias: Json) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError as error:
        raise InvalidRequestError(f"logit_bias has a key that is no token id: {error}") from error


def read_stop(body: Body, name: str = "stop") -> tuple[str, ...]:
    """Stop strings: a text, or a list of texts."""
    stop = body.get(name)
    if stop is None or stop == "":
        return ()
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, list):
        raise InvalidRequestError(f"{name} is of type {type(stop).__name__}; it must be a text or a list of texts")
    texts = cast("list[str]", stop)
    if len(texts) > _MAX_STOPS:
        raise InvalidRequestError(f"{name} has {len(texts)} texts; it may have {_MAX_STOPS}")
    return tuple(texts)  # the request checks each of them


def read_num_choices(body: Body) -> int:
    """`n`."""
    number = wanted(body, "n", 1)
    if not 1 <= number <= 128:
        raise InvalidRequestError(f"n is {number}; it must be from 1 to 128")
    return number


def read_model(body: Body) -> str:
    """The name of the model asked for; "" where none is."""
    return wanted(body, "model", "")
