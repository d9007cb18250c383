"""Reads the fields of a request's body. A field that is absent or null has its default.

`llm_spec.contract.fields` lists the fields that go to a target without being read here. A client
uses the operator's key and the operator's server. By default, fields pass that say how to sample,
think, call tools and format the answer, that label a request, or that cache it. Other fields pass
only if the operator says so: those that load things (`lora`, `chat_template`), reach other places
(`kv_transfer_params`), replace the prompt (`prompt_embeds`), jump a queue (`priority`) or cost more
(`service_tier`, `plugins`). Fields that set another limit of length never pass.
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
_MIN_TOP_P: Final = 1e-6  # keeps only the most probable token, as 0 does at OpenAI
_TOP_K_OFF: Final = (0, -1)  # mean all tokens at llama.cpp and vLLM
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
# Fields that this library sets. From a client they would bypass limits, budgets and model names
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
_MAX_STOP_STRINGS: Final = 256  # each is searched in each piece of the answer
_DEFAULT_VALUES: Final[Sequence[Any]] = (0, 1, "", [], {})


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client names it."""

    name: str
    namespace: str | None = None
    kind: ToolCallKind = "function"


@dataclass(slots=True, kw_only=True)
class ParsedRequest:
    """One parsed request.

    `num_choices`, `logprobs`: what only the target's own chunks can answer.
    `changes`: names of what the target is told in another way than the client said it
    (`x-llm-spec-changed`).
    `left_out`: names of what the target is not told (`x-llm-spec-left-out`).
    `client_tools`: the client's tools by the names that the target knows.
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
    """Return a field of its default's type, or of `kind`.

    Raises InvalidRequestError if it has another type.
    """
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
    """Return a list of objects, empty if there is none.

    Raises InvalidRequestError if the field is anything else.
    """
    values = cast("list[Any]", get_typed_field(body, name, None, list)) or []
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{name}[{index}] is of type {type(value).__name__}; it must be an object")
    return cast("list[Json]", values)


def get_object_field(body: Body, name: str) -> Json:
    """Return an object, empty if there is none.

    Raises InvalidRequestError if the field is anything else.
    """
    return cast("Json", get_typed_field(body, name, None, dict)) or {}


def parse_openai_messages(body: Body) -> tuple[ChatMessage, ...]:
    """Parse chat messages in OpenAI's form."""
    messages = get_object_list_field(body, "messages")
    if not messages:
        raise InvalidRequestError("messages is empty; it must hold at least one message")
    return tuple(ChatMessage.from_openai(message, f"messages[{index}]") for index, message in enumerate(messages))


def build_chat_request(
    body: Body, known_fields: frozenset[str], *, is_local: bool, extra_fields: Body | None = None, **fields: Any
) -> ChatRequest:
    """Build the request of a body; fields that this library does not know go into `extra`.

    `known_fields`: names of fields that the caller has read; it gives them in `fields`.
    `extra_fields`: fields that go into `extra` all the same.
    `is_local`: the model runs in this process. Fields without effect are then left out.

    Raises InvalidRequestError for a field that cannot be served.
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
        bias = {name: value for name, value in bias.items() if value != 0}  # 0 has no effect
    # Other names go to a server, which may know them
    if is_local or all(name.isdecimal() for name in bias):
        extra.pop("logit_bias", None)
        if bias:
            sampling["logit_bias"] = _parse_logit_bias_ids(bias)
    # Some servers then only read the prompt, some refuse
    if fields.get("max_tokens") == 0 and not is_local:
        fields["max_tokens"] = None
        extra["max_tokens"] = 0
    if is_local:
        extra = _check_and_filter_local_fields(extra)
    extra.update(extra_fields or {})
    return ChatRequest(sampling=Sampling(**sampling), extra=extra, **fields)


def _get_unknown_fields(body: Body, known_fields: frozenset[str]) -> Json:
    """Return the fields that are unknown here; raises InvalidRequestError for a reserved one."""
    if body.keys() <= known_fields:
        return {}
    unknown = {name: value for name, value in body.items() if name not in known_fields and value is not None}
    for name in _RESERVED_FIELDS & unknown.keys():
        if unknown.pop(name) not in _DEFAULT_VALUES:
            raise InvalidRequestError(f"{name} is set; this server does not support that field")
    return unknown


def _check_and_filter_local_fields(extra: Json) -> Json:
    """Return the fields that a model in this process reads, and those that it does not know.

    Raises InvalidRequestError for a field that it refuses.
    """
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
    """Parse stop strings: a text, or a list of texts."""
    stop = body.get(name)
    if stop is None or stop == "":
        return ()
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, list):
        raise InvalidRequestError(f"{name} is of type {type(stop).__name__}; it must be a text or a list of texts")
    texts = cast("list[str]", stop)
    if len(texts) > _MAX_STOP_STRINGS:
        raise InvalidRequestError(f"{name} has {len(texts)} texts; it may have at most {_MAX_STOP_STRINGS}")
    return tuple(texts)  # the request checks each of them


def get_num_choices(body: Body) -> int:
    """Return `n`, the number of choices."""
    number = get_typed_field(body, "n", 1)
    if not 1 <= number <= 128:
        raise InvalidRequestError(f"n is {number}; it must be from 1 to 128")
    return number


def get_requested_model_name(body: Body) -> str:
    """Return the name of the requested model, or "" if there is none."""
    return get_typed_field(body, "model", "")


ALL_FIELDS: Final = "*"
_HEADER_SAFE_NAME: Final = re.compile(r"[\w.-]{1,60}", re.ASCII)  # names that a header can carry
_MAX_REPORTED_FIELDS: Final = 16


def drop_unsafe_fields(
    parsed: ParsedRequest, allowed_fields: AbstractSet[str], *, is_local: bool
) -> tuple[ParsedRequest, list[str]]:
    """Drop the fields that do not pass; return the request and their names.

    `is_local`: the target runs in this process, and reads what it understands.
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
    """Build the header that tells a client which of its fields were left out."""
    if not names:
        return {}
    shown = [name for name in names if _HEADER_SAFE_NAME.fullmatch(name)][:_MAX_REPORTED_FIELDS]
    return {"x-llm-spec-left-out": ", ".join(shown)} if shown else {}
