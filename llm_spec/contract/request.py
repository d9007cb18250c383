"""Requests: messages, sampling and a client's other options. Frozen, no I/O."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypedDict, Unpack

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.fields import describe_unknown_option
from llm_spec.contract.messages import ChatMessage, check_field_type
from llm_spec.contract.short_repr import format_short_repr

__all__ = [
    "ChatRequest",
    "Messages",
    "RequestOptions",
    "Sampling",
    "create_request_unless_given",
]

_MAX_TOP_LOGPROBS: Final = 20  # as at OpenAI
_SESSION_ID: Final = re.compile(r"[!-~]{1,256}")


Messages: TypeAlias = "str | Sequence[ChatMessage | Mapping[str, Any]]"


def _parse_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Mapping[str, Any], ...]:
    check_field_type("tools", tools or (), Sequence, "a list of tools")
    for index, tool in enumerate(tools or ()):
        check_field_type(f"tools[{index}]", tool, Mapping, 'an object such as {"type": "function", "function": {…}}')
    return tuple(tools or ())


def _parse_messages(messages: Messages) -> tuple[ChatMessage, ...]:
    if isinstance(messages, str):
        return (ChatMessage("user", messages),)
    check_field_type("messages", messages, Sequence, "a text or a list of messages")
    return tuple(
        message if isinstance(message, ChatMessage) else ChatMessage.from_openai(message, f"messages[{index}]")
        for index, message in enumerate(messages)
    )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The target's rules for drawing its next token.

    None leaves a choice to the target's own default (a local model: greedy). Filters apply in this
    order: logit bias and penalties, temperature, top-k, top-p, min-p. `repetition_penalty` counts
    prompt and answer (arXiv 1909.05858). `presence_penalty` and `frequency_penalty` count the
    answer alone (OpenAI).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        check_number(InvalidRequestError, "temperature", self.temperature, 0.0, 100.0)
        check_number(InvalidRequestError, "top_p", self.top_p, 0.0, 1.0, above=True)
        check_number(InvalidRequestError, "top_k", self.top_k, 1, None, integer=True)
        check_number(InvalidRequestError, "min_p", self.min_p, 0.0, 1.0)
        check_number(InvalidRequestError, "repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        check_number(InvalidRequestError, "presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number(InvalidRequestError, "frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number(InvalidRequestError, "seed", self.seed, 0, 2**64 - 1, integer=True)
        for token_id, bias in self.logit_bias.items():
            check_number(InvalidRequestError, "logit_bias key", token_id, 0, integer=True)
            check_number(InvalidRequestError, f"logit_bias[{token_id}]", bias, -100.0, 100.0)


class RequestOptions(TypedDict, total=False):
    """The options of a request besides its messages, given by keyword.

    Every function that makes a request takes them.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    prefix: str
    prediction: str | None
    top_logprobs: int | None
    raw: bool
    session_id: str | None
    extra: Mapping[str, Any]


_SAMPLING_FIELDS = frozenset(f.name for f in dataclasses.fields(Sampling))


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One request to a provider.

    `prefix`: assistant text that the answer continues without repeating it. Only some targets
    understand it.
    `prediction`: a guess at the answer. Only some targets understand it.
    `response_format`: OpenAI's. A local model also takes `{"type": "regex", "pattern": …}` and
    `{"type": "grammar", "grammar": …}` (llguidance's variant of Lark). Its answer keeps to the
    format unless a limit or stop string cuts it.
    `top_logprobs`: the number of likely tokens given with each token of the answer, with their
    log-probabilities (`TokenLogprob`). 0 gives only that of the answer's own token, None nothing.
    `raw`: the text of the only message is the prompt itself, continued without a chat template.
    `session_id`: the conversation's name in `SpeculativeConfig.session_header`, 1 to 256 visible
    ASCII characters.
    `extra`: fields that a remote target receives unchanged.
    """

    messages: tuple[ChatMessage, ...]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    prefix: str = ""
    prediction: str | None = None
    top_logprobs: int | None = None
    raw: bool = False
    session_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)  # it may have a key

    __repr__ = format_short_repr

    def __post_init__(self) -> None:
        if not self.messages:
            raise InvalidRequestError("messages is empty; give at least one message")
        if self.raw and len(self.messages) > 1:
            raise InvalidRequestError(f"raw is set with {len(self.messages)} messages; a raw prompt is one message")
        check_number(InvalidRequestError, "max_tokens", self.max_tokens, 1, None, integer=True)
        check_number(InvalidRequestError, "top_logprobs", self.top_logprobs, 0, _MAX_TOP_LOGPROBS, integer=True)
        if self.session_id is not None:
            check_field_type("session_id", self.session_id, str, "a text")
            if _SESSION_ID.fullmatch(self.session_id) is None:
                raise InvalidRequestError(
                    f"session_id is {self.session_id[:300]!r}; it must have 1 to 256 visible ASCII characters"
                )
        for text in self.stop:
            check_field_type("stop string", text, str, "a text")
            if not text:
                raise InvalidRequestError("stop holds an empty string; every stop string must have a character")

    @classmethod
    def create(cls, messages: Messages, **options: Unpack[RequestOptions]) -> ChatRequest:
        """Make a request from messages and options given by keyword.

        A text alone is one user message. Raises InvalidRequestError naming the option that is
        wrong.
        """
        unknown = options.keys() - RequestOptions.__annotations__.keys()
        if unknown:
            raise InvalidRequestError(describe_unknown_option(min(unknown), RequestOptions.__annotations__))
        values: dict[str, Any] = dict(options)
        sampling = Sampling(**{k: values.pop(k) for k in list(values) if k in _SAMPLING_FIELDS})
        stop = values.pop("stop", None) or ()
        check_field_type("stop", stop, Sequence, "a text or a list of texts")
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        values["tools"] = _parse_tools(values.get("tools"))
        return cls(messages=_parse_messages(messages), sampling=sampling, **values)


def create_request_unless_given(request: Messages | ChatRequest, options: RequestOptions) -> ChatRequest:
    """The request of messages and options, or the one that is given as a whole and takes no options."""
    if not isinstance(request, ChatRequest):
        return ChatRequest.create(request, **options)
    if options:
        raise InvalidRequestError(f"{min(options)} was given together with a ChatRequest; put it into the request")
    return request
