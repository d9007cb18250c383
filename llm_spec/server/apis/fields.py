"""Reading the fields of a request's body: what is absent or null is the default, what is wrong is one clear error.

`llm_spec.contract.fields` says which fields go to a target that this server does not read itself. A client speaks with
the operator's key, to the operator's server. What passes by default says how to sample, think, call tools and keep to a
form, labels a request, or caches it. What loads things (`lora`, `chat_template`), reaches other places
(`kv_transfer_params`), replaces the prompt (`prompt_embeds`), jumps a queue (`priority`) or costs more (`service_tier`,
`plugins`) passes where the operator says so, and what sets another limit of length never does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar, cast

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.fields import FIELDS, LIMIT_FIELDS, PASSED_FIELDS, find_local_field_use
from llm_spec.contract.messages import ChatMessage, ToolCallKind
from llm_spec.contract.request import ChatRequest, Sampling

__all__ = [
    "ALL_FIELDS",
    "Body",
    "ClientTool",
    "Json",
    "ParsedRequest",
    "build_chat_request",
    "build_dropped_fields_header",
    "drop_unsafe_fields",
    "get_num_choices",
    "get_object_field",
    "get_object_list_field",
    "get_requested_model_name",
    "get_typed_field",
    "parse_openai_messages",
    "parse_stop_strings",
]

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]
Body: TypeAlias = Mapping[str, Any]

_SEED_MASK: Final = (1 << 63) - 1
_MIN_TOP_P: Final = 1e-6  # a `top_p` that leaves the most probable token alone: what OpenAI means by 0
_TOP_K_OFF: Final = (0, -1)  # words of llama.cpp and vLLM for: all tokens
_SAMPLING_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_TYPE_NAMES: Final = {
    bool: "true or false",
    dict: "an object",
    int: "an integer",
    list: "a list",
    str: "a text",
}
# What this library says to a target itself: set beside it, it would pass by limits, budgets and names of models
_RESERVED_FIELDS: Final = frozenset(
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
_MAX_STOP_STRINGS: Final = 256  # each of them is looked for in each piece of the answer
_DEFAULT_VALUES: Final[Sequence[Any]] = (0, 1, "", [], {})


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client calls it."""

    name: str
    namespace: str | None = None
    kind: ToolCallKind = "function"


@dataclass(slots=True, kw_only=True)
class ParsedRequest:
    """One request, read. `num_choices`, `logprobs`: what only the target's own chunks can answer.

    `changes` names what the target is told in another way than the client said it (`x-llm-spec-changed`), `left_out`
    what of it the target is not told (`x-llm-spec-left-out`). `client_tools`: tools by the names that the target knows.
    """

    model: str
    request: ChatRequest
    stream: bool = False
    include_usage: bool = False
    num_choices: int = 1
    logprobs: bool = False
    echo: str = ""  # text that the answer begins with
    body: Body = field(default_factory=dict[str, Any])
    changes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict[str, ClientTool])


def get_typed_field(body: Body, name: str, default: T, kind: type | None = None) -> T:
    """A field of the type of its default, or of `kind`; raises InvalidRequestError for another type."""
    value = body.get(name)
    if value is None:
        return default
    kind = kind or type(default)
    if type(value) is kind:  # nearly always
        return cast("T", value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of numbers
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequestError(f"{name} is of type {type(value).__name__}; it must be {_TYPE_NAMES[kind]}")
    return cast("T", value)


def get_object_list_field(body: Body, name: str) -> list[Json]:
    """A list of objects."""
    values = cast("list[Any]", get_typed_field(body, name, None, list)) or []
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{name}[{index}] is of type {type(value).__name__}; it must be an object")
    return cast("list[Json]", values)


def get_object_field(body: Body, name: str) -> Json:
    """An object; empty where there is none."""
    return cast("Json", get_typed_field(body, name, None, dict)) or {}


def parse_openai_messages(body: Body) -> tuple[ChatMessage, ...]:
    """Chat messages in OpenAI's form."""
    messages = get_object_list_field(body, "messages")
    if not messages:
        raise InvalidRequestError("messages is empty; it must hold at least one message")
    return tuple(ChatMessage.from_openai(message, f"messages[{index}]") for index, message in enumerate(messages))


def build_chat_request(
    body: Body, known_fields: frozenset[str], *, is_local: bool, extra_fields: Body | None = None, **fields: Any
) -> ChatRequest:
    """The request of a body: sampling and what this library knows by its name, the rest as `extra`.

    `known_fields` are read by the caller, who gives them in `fields`. `extra_fields` goes into `extra` all the same.
    For a model in this process, what says nothing is left out; raises InvalidRequestError for what it cannot serve.
    """
    extra = _get_unknown_fields(body, known_fields)
    if not extra and not extra_fields and fields.get("max_tokens") != 0:  # nearly always
        return ChatRequest(**fields)
    sampling: Json = {name: extra.pop(name) for name in _SAMPLING_FIELDS if name in extra}
    seed: int | None = get_typed_field(extra, "seed", None, int)
    if seed is not None and (is_local or seed >= 0):
        del extra["seed"]
        sampling["seed"] = seed & _SEED_MASK  # a negative one goes to a server as it is
    if sampling.get("top_p") == 0:
        sampling["top_p"] = _MIN_TOP_P
    if sampling.get("top_k") in _TOP_K_OFF:  # a server may have a default that this switches off
        extra["top_k"] = sampling.pop("top_k")
    bias = get_object_field(extra, "logit_bias")
    if is_local:
        bias = {name: value for name, value in bias.items() if value != 0}  # which says nothing
    if is_local or all(name.isdecimal() for name in bias):  # other names go to a server, who may know them
        extra.pop("logit_bias", None)
        if bias:
            sampling["logit_bias"] = _parse_logit_bias_ids(bias)
    if fields.get("max_tokens") == 0 and not is_local:  # some servers read the prompt alone then, some refuse
        fields["max_tokens"] = None
        extra["max_tokens"] = 0
    if is_local:
        extra = _check_and_filter_local_fields(extra)
    extra.update(extra_fields or {})
    return ChatRequest(sampling=Sampling(**sampling), extra=extra, **fields)


def _get_unknown_fields(body: Body, known_fields: frozenset[str]) -> Json:
    """The fields that this library knows nothing of; raises InvalidRequestError for one that is not the client's."""
    if body.keys() <= known_fields:
        return {}
    unknown = {name: value for name, value in body.items() if name not in known_fields and value is not None}
    for name in _RESERVED_FIELDS & unknown.keys():
        if unknown.pop(name) not in _DEFAULT_VALUES:
            raise InvalidRequestError(f"{name} is set; this server does not support that field")
    return unknown


def _check_and_filter_local_fields(extra: Json) -> Json:
    """What a model in this process reads, and what it does not know; raises InvalidRequestError for what it refuses."""
    uses = {name: find_local_field_use(name, value) for name, value in extra.items()}
    for name, use in uses.items():
        if use == "refused" and extra[name]:
            raise InvalidRequestError(f"{name} is set; a model in this process cannot serve it ({FIELDS[name].note})")
    return {name: value for name, value in extra.items() if uses[name] in ("kept", "left_out")}


def _parse_logit_bias_ids(bias: Json) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError as error:
        raise InvalidRequestError(f"logit_bias has a key that is not a token id: {error}") from error


def parse_stop_strings(body: Body, name: str = "stop") -> tuple[str, ...]:
    """Stop strings: a text, or a list of texts."""
    stop = body.get(name)
    if stop is None or stop == "":
        return ()
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, list):
        raise InvalidRequestError(f"{name} is of type {type(stop).__name__}; it must be a text or a list of texts")
    texts = cast("list[str]", stop)
    if len(texts) > _MAX_STOP_STRINGS:
        raise InvalidRequestError(f"{name} has {len(texts)} texts; it may have {_MAX_STOP_STRINGS}")
    return tuple(texts)  # the request checks each of them


def get_num_choices(body: Body) -> int:
    """`n`."""
    number = get_typed_field(body, "n", 1)
    if not 1 <= number <= 128:
        raise InvalidRequestError(f"n is {number}; it must be from 1 to 128")
    return number


def get_requested_model_name(body: Body) -> str:
    """The name of the requested model; "" if there is none."""
    return get_typed_field(body, "model", "")


ALL_FIELDS: Final = "*"
_HEADER_SAFE_NAME: Final = re.compile(r"[\w.-]{1,60}", re.ASCII)  # that a header can carry
_MAX_REPORTED_FIELDS: Final = 16


def drop_unsafe_fields(
    parsed: ParsedRequest, allowed_fields: AbstractSet[str], *, is_local: bool
) -> tuple[ParsedRequest, list[str]]:
    """A request with no other fields than those that pass, and the names of the others.

    `is_local`: its target runs in this process, and reads what it understands.
    """
    extra = parsed.request.extra
    if is_local:
        kept = {name: value for name, value in extra.items() if find_local_field_use(name, value) != "left_out"}
    else:
        kept = {name: value for name, value in extra.items() if _is_field_allowed(name, allowed_fields)}
    dropped_fields = sorted(extra.keys() - kept.keys())
    return (replace(parsed, request=replace(parsed.request, extra=kept)) if dropped_fields else parsed), dropped_fields


def _is_field_allowed(name: str, allowed_fields: AbstractSet[str]) -> bool:
    if name in PASSED_FIELDS:
        return True
    return name.lower() not in LIMIT_FIELDS and (name in allowed_fields or ALL_FIELDS in allowed_fields)


def build_dropped_fields_header(names: Sequence[str]) -> Mapping[str, str]:
    """What tells a client which of its fields were left out."""
    if not names:
        return {}
    shown = [name for name in names if _HEADER_SAFE_NAME.fullmatch(name)][:_MAX_REPORTED_FIELDS]
    return {"x-llm-spec-left-out": ", ".join(shown)} if shown else {}
