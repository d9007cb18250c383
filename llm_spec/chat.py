"""Chat values: messages, requests, usage and stream events. Frozen, no I/O.

Field names follow OpenAI's chat completions where such a field exists there; a mapping in that shape is accepted at
every public door (`ChatMessage.from_openai`, `ChatRequest.create`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypedDict, Unpack, cast, get_args

from llm_spec._checks import check_number
from llm_spec.errors import InvalidRequestError, UnsupportedError, format_error_line, is_permanent_refusal
from llm_spec.request_fields import describe_unknown_option

__all__ = [
    "AnswerDetail",
    "AnswerStarted",
    "ApiName",
    "ChatMessage",
    "ChatRequest",
    "ChatResponse",
    "Fallback",
    "FallbackCause",
    "Finish",
    "FinishReason",
    "Guarantee",
    "GuaranteeWeakened",
    "LocalTimings",
    "Messages",
    "NativeMessage",
    "Origin",
    "Progress",
    "ReasoningDelta",
    "ReasoningDetail",
    "RequestOptions",
    "Retry",
    "Role",
    "Round",
    "Sampling",
    "StoppedBy",
    "StreamEvent",
    "TargetStreamReport",
    "TextDelta",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallKind",
    "Usage",
]

Role = Literal["system", "developer", "user", "assistant", "tool"]
_ROLES: Final = get_args(Role)
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
StoppedBy = Literal[
    "eos",  # the model ended its answer
    "stop_string",
    "tool_calls",
    "content_filter",
    "max_tokens",  # the request's own limit, where the answer has so many tokens
    "max_total_tokens",  # the decoder's limits …
    "max_iterations",
    "budget",
    "deadline",
    "context_length",  # the model's window is full
]  # none of them beside "length": a limit of the server's own
FallbackCause: TypeAlias = Literal["draft_failed", "refused", "target"]
Origin = Literal["plain", "accepted", "correction", "bonus"]
# What holds for a text, strongest first. exact: the target's own output, the same greedy text and the same distribution
# when sampling. exact-text: the same, where the target tokenizes its own earlier text again. judged: the target has
# approved what it did not write. lossy: the rule, or what was lost on the way, may have changed it.
Guarantee: TypeAlias = Literal["exact", "exact-text", "judged", "lossy"]
ContentPart: TypeAlias = Mapping[str, Any]
ToolCallKind: TypeAlias = Literal["function", "custom"]
ApiName: TypeAlias = Literal["chat", "messages"]  # OpenAI's chat completions, Anthropic's messages
_MAX_TOP_LOGPROBS: Final = 20  # as at OpenAI
_MESSAGE_FIELDS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_SESSION_ID: Final = re.compile(r"[!-~]{1,256}")
_CALL_FIELDS: Final = frozenset({"id", "type", "function", "custom", "index"})


@dataclass(frozen=True)
class ToolCall:
    """One complete call by the model; `arguments` is the JSON text as the model wrote it, of a custom tool its input.

    A custom tool takes a text in place of JSON (OpenAI's chat completions).
    """

    id: str
    name: str
    arguments: str
    kind: ToolCallKind = "function"


@dataclass(frozen=True)
class NativeMessage:
    """A message as its client wrote it in the words of one API; targets of that API are sent it as it is."""

    api: ApiName
    value: Mapping[str, Any]


@dataclass(frozen=True)
class ChatMessage:
    """One message; `content` is text, or OpenAI content parts (kept as they are), or None beside tool calls.

    `reasoning` is the text of a model's reasoning in an earlier turn, for targets that read it again (`to_openai` calls
    it `reasoning_content`). `reasoning_details` are what the API that it came from needs back with it, each whole
    (`merge_reasoning_details`). `native` is there where a client said more than these fields hold.
    """

    role: Role
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    native: NativeMessage | None = None
    reasoning: str = ""
    reasoning_details: tuple[ReasoningDetail, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise InvalidRequestError(f"message role is {self.role!r}; it must be one of {', '.join(_ROLES)}")
        _check_message_content(self.content, "message")

    @classmethod
    def from_openai(cls, message: Mapping[str, Any], where: str = "message") -> ChatMessage:
        """Read an OpenAI chat message, found at `where`; raises InvalidRequestError naming the field that is wrong."""
        _check_field_type(where, message, Mapping, "a ChatMessage or an OpenAI chat dict")
        role = message.get("role")
        if role not in _ROLES:
            found = "missing" if role is None else repr(role)
            raise InvalidRequestError(f"{where}.role is {found}; it must be one of {', '.join(_ROLES)}")
        content = message.get("content")
        if not isinstance(content, str | None) and isinstance(content, Sequence):
            content = tuple(cast("Sequence[ContentPart]", content))
        _check_message_content(content, where)
        try:
            calls = tuple(
                _parse_openai_tool_call(call, f"{where}.tool_calls[{index}]")
                for index, call in enumerate(message.get("tool_calls") or ())
            )
            native = _keep_native_if_fields_are_lost(message)
            reasoning = _find_openai_reasoning(message)
            return cls(
                cast("Role", role), content, message.get("name"), calls, message.get("tool_call_id"), native, reasoning
            )
        except TypeError as error:
            raise InvalidRequestError(f"{where} is not in OpenAI's chat format: {error!r}") from error

    def to_openai(self) -> dict[str, Any]:
        """The message as an OpenAI chat dict, absent fields left out."""
        if self.native is not None and self.native.api == "chat":
            return dict(self.native.value)
        out: dict[str, Any] = {"role": self.role}
        out["content"] = list(self.content) if isinstance(self.content, tuple) else self.content
        if self.name is not None:
            out["name"] = self.name
        if self.tool_calls:
            out["tool_calls"] = list(map(_build_openai_tool_call, self.tool_calls))
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if details := [dict(detail.value) for detail in self.reasoning_details if detail.api == "chat"]:
            out["reasoning_details"] = details
        return out

    @property
    def text(self) -> str:
        """The message's text, parts joined; a part that is not text contributes nothing."""
        if isinstance(self.content, tuple):
            return "".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")
        return self.content or ""


def _check_message_content(content: object, where: str) -> None:
    if type(content) not in (str, tuple, type(None)):
        raise InvalidRequestError(
            f"{where}.content is of type {type(content).__name__}; it must be text, a tuple of parts or None"
        )
    for index, part in enumerate(cast("tuple[object, ...]", content) if isinstance(content, tuple) else ()):
        _check_field_type(f"{where}.content[{index}]", part, Mapping, "a part such as {'type': 'text', 'text': …}")


def _parse_openai_tool_call(call: Mapping[str, Any], where: str) -> ToolCall:
    _check_field_type(where, call, Mapping, "an object with id and function")
    kind: ToolCallKind = "custom" if call.get("type") == "custom" else "function"
    text = "input" if kind == "custom" else "arguments"
    called = _require_field(call, kind, where)
    _check_field_type(f"{where}.{kind}", called, Mapping, f"an object with name and {text}")
    name, arguments = (_require_field(called, field, f"{where}.{kind}") for field in ("name", text))
    return ToolCall(_require_field(call, "id", where), name, arguments, kind)


def _require_field(fields: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in fields:
        raise InvalidRequestError(f"{where}.{name} is missing")
    return fields[name]


def _build_openai_tool_call(call: ToolCall) -> dict[str, Any]:
    if call.kind == "custom":
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _find_openai_reasoning(message: Mapping[str, Any]) -> str:
    """The reasoning of an earlier turn, by either of the names that servers give it."""
    found = message.get("reasoning_content") or message.get("reasoning")
    return found if isinstance(found, str) else ""


def _keep_native_if_fields_are_lost(message: Mapping[str, Any]) -> NativeMessage | None:
    """The message as it is, where it says more than a ChatMessage's own fields; what is null or empty says nothing."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    if message.keys() <= _MESSAGE_FIELDS and all(call.keys() <= _CALL_FIELDS for call in calls):  # nearly always
        return None
    more = any(message[name] for name in message.keys() - _MESSAGE_FIELDS)
    if not more and not any(call[name] for call in calls for name in call.keys() - _CALL_FIELDS):
        return None
    return NativeMessage("chat", {name: value for name, value in message.items() if value or name in _MESSAGE_FIELDS})


def _check_field_type(name: str, value: object, kind: type, wanted: str) -> None:
    """Raise InvalidRequestError unless a value from outside is of the kind that its annotation promises."""
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{name} is {value!r} of type {type(value).__name__}; it must be {wanted}")


Messages: TypeAlias = "str | Sequence[ChatMessage | Mapping[str, Any]]"


def _parse_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Mapping[str, Any], ...]:
    _check_field_type("tools", tools or (), Sequence, "a list of tools")
    for index, tool in enumerate(tools or ()):
        _check_field_type(f"tools[{index}]", tool, Mapping, 'an object such as {"type": "function", "function": {…}}')
    return tuple(tools or ())


def _parse_messages(messages: Messages) -> tuple[ChatMessage, ...]:
    if isinstance(messages, str):
        return (ChatMessage("user", messages),)
    _check_field_type("messages", messages, Sequence, "a text or a list of messages")
    return tuple(
        message if isinstance(message, ChatMessage) else ChatMessage.from_openai(message, f"messages[{index}]")
        for index, message in enumerate(messages)
    )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target draws its next token; None leaves a choice to the target's own default (a local model: greedy).

    Filters apply in this order: logit bias and penalties, temperature, top-k, top-p, min-p. `repetition_penalty`
    counts prompt and answer (arXiv 1909.05858), `presence_penalty` and `frequency_penalty` the answer alone (OpenAI).
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
    """What may be said of a request beside its messages, by keyword, wherever a request is made."""

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

    `prefix` is assistant text that the answer continues (it is not repeated in the answer), `prediction` a guess at
    the answer; only some targets understand them. `response_format` is OpenAI's; a local model also takes
    `{"type": "regex", "pattern": …}` and `{"type": "grammar", "grammar": …}` (llguidance's variant of Lark), and its
    answer keeps to it unless a cap or stop string cuts it. `top_logprobs`: how many likely tokens are given at
    each token of the answer, with their log-probabilities (`TokenLogprob`); 0: that of the answer's own token alone,
    None: nothing. `raw`: the text of the only message is the prompt itself, to be continued without a chat template.
    `session_id`: what the conversation is called in `SpeculativeConfig.session_header`; 1 to 256 visible ASCII
    characters. `extra` goes to a remote target untouched.
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
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if not self.messages:
            raise InvalidRequestError("messages is empty; give at least one message")
        if self.raw and len(self.messages) > 1:
            raise InvalidRequestError(f"raw is set with {len(self.messages)} messages; a raw prompt is one message")
        check_number(InvalidRequestError, "max_tokens", self.max_tokens, 1, None, integer=True)
        check_number(InvalidRequestError, "top_logprobs", self.top_logprobs, 0, _MAX_TOP_LOGPROBS, integer=True)
        if self.session_id is not None:
            _check_field_type("session_id", self.session_id, str, "a text")
            if _SESSION_ID.fullmatch(self.session_id) is None:
                raise InvalidRequestError(
                    f"session_id is {self.session_id[:300]!r}; it must have 1 to 256 visible ASCII characters"
                )
        for text in self.stop:
            _check_field_type("stop string", text, str, "a text")
            if not text:
                raise InvalidRequestError("stop holds an empty string; every stop string must have a character")

    @classmethod
    def create(cls, messages: Messages, **options: Unpack[RequestOptions]) -> ChatRequest:
        """Make a request of messages (a text alone is one user message) and options given by keyword."""
        unknown = options.keys() - RequestOptions.__annotations__.keys()
        if unknown:
            raise InvalidRequestError(describe_unknown_option(min(unknown), RequestOptions.__annotations__))
        values: dict[str, Any] = dict(options)
        sampling = Sampling(**{k: values.pop(k) for k in list(values) if k in _SAMPLING_FIELDS})
        stop = values.pop("stop", None) or ()
        _check_field_type("stop", stop, Sequence, "a text or a list of texts")
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        values["tools"] = _parse_tools(values.get("tools"))
        return cls(messages=_parse_messages(messages), sampling=sampling, **values)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens as the provider counted them; addition adds field by field.

    `input_tokens` are all of the prompt: those read from a cache (`cached_input_tokens`) and those newly written to one
    (`cache_write_input_tokens`, where the provider tells them) are among them.

    `accepted_prediction_tokens` and `rejected_prediction_tokens` are those of a request's `prediction`, or of what else
    drafted for such a request: confirmed, and not. A provider that bills for rejected ones has them in its output.

    `extra_input_tokens` and `cancelled_output_tokens` are those of the input and output that the target alone would not
    have read or written (`race`, `probe`, `judge`; rejected predictions in the output). `approved_output_tokens` it
    would have written, but only approved (`judge`) or rated (`score`). `free_output_tokens` are those of a draft's
    output that no model wrote (`lookup`).
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_input_tokens: int = 0
    cache_write_input_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    extra_input_tokens: int = 0
    cancelled_output_tokens: int = 0
    approved_output_tokens: int = 0
    free_output_tokens: int = 0

    @property
    def answer_tokens(self) -> int:
        """Output tokens of the answer itself: as many as the target alone would have written for it."""
        return self.output_tokens - self.cancelled_output_tokens + self.approved_output_tokens

    def __add__(self, other: Usage) -> Usage:
        ours, theirs = vars(self), vars(other)
        return Usage(**{name: ours[name] + theirs[name] for name in ours})


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, and the natural logarithm of the probability that the target gave it after the text before it.

    Of the target's own distribution, before penalties, temperature, filters and grammars. `token_bytes` are the token's
    UTF-8 (None: not known), which may be a part of a character; `token` shows that as U+FFFD. `top` are the likeliest
    tokens there, likeliest first, as many as were requested.
    """

    token: str
    logprob: float
    token_bytes: bytes | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the answer; `origin` says how a speculative round came by it.

    `token_ids` are set if they were requested (`TokenEndpoint`); None: not known. `logprobs` are those of the
    tokens that begin in it, if they were requested (`ChatRequest.top_logprobs`); a token of which only a part is
    text of the answer counts as a whole.
    """

    text: str
    origin: Origin = "plain"
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the model's reasoning, where a provider shows it."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDetail:
    """What a provider sends beside its reasoning and needs back with the next turn, in the words of its API.

    In a stream: of messages a `signature_delta` or a `redacted_thinking` block, of chat completions a piece of one of
    `reasoning_details`. In a message: whole blocks of thinking with their signatures, whole items.
    """

    api: ApiName
    value: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerDetail:
    """A part of an answer that this library does not read, in the words of its API: it is handed on.

    Of chat completions some fields of a delta, such as `annotations`, `images` or `audio`, and what the model says to
    refuse, which is no text of an answer.
    """

    api: ApiName
    value: Mapping[str, Any]

    @property
    def refusal(self) -> str:
        """What the model says to refuse; "" for any other part."""
        refusal = self.value.get("refusal")
        return refusal if isinstance(refusal, str) else ""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the call at `index`; `id` and `name` come with its first piece, `arguments` adds up."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    kind: ToolCallKind = "function"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One finished round: a draft and its verification (`num_draft_tokens` 0: a plain step).

    `num_accepted_tokens` leading drafted tokens were confirmed; `num_emitted_tokens` also counts the correction or
    bonus and is smaller where EOS, a stop string or a cap ended the answer. `next_token_id` is that correction or
    bonus, None where tokens are unknown.

    Times are seconds of this process's clock; where the target runs in this process they add up to the whole round.
    Otherwise `draft_s` is what the draft took for these tokens, as they came, and `verify_s` what the target took: from
    when they were sent to its answer, in a race from the end of its stream's round before (or from its opening) to the
    last token of this one. Rounds that overlap do so in their times, too, so the sums can exceed the time of the
    answer. Those of `regenerate` are compared afterwards, and have none.
    """

    index: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    next_token_id: int | None = None
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def rejection_index(self) -> int | None:
        """Index in the draft of the first token that was not confirmed, None if all were."""
        return self.num_accepted_tokens if self.num_accepted_tokens < self.num_draft_tokens else None


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """How an answer is going to be given: comes before all of it, once for each decoder."""

    strategy: str
    guarantee: Guarantee
    target: str
    draft: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStreamReport:
    """What became of one of a target's streams that raced for an answer (`race`); comes at the end of the answer.

    It went on after `begins_at` tokens of the answer and wrote `num_tokens`. Times are seconds since the first of them
    was opened. `is_used`: something that it wrote was emitted.
    """

    index: int
    begins_at: int
    num_tokens: int
    started_s: float
    ended_s: float
    is_used: bool


@dataclass(frozen=True, slots=True)
class LocalTimings:
    """What an answer of a model in this process took besides its rounds; comes once, before the `Finish`.

    `prompt_s`: opening the target's session and reading the prompt. `open_draft_s`: opening the draft, which may read
    the prompt, too. `between_s`: from the end of a round to the beginning of the next, all together: text is decoded
    and handed on. All are seconds of this process's clock. `lookahead` is what the lookahead controller had measured
    by then (`LookaheadController.describe`), empty without a draft. `num_concurrent`: answers that the models of this
    process wrote at the same time, this one included, on average.
    """

    prompt_s: float
    open_draft_s: float
    lookahead: Mapping[str, float] = field(default_factory=dict[str, float])
    between_s: float = 0.0
    num_concurrent: float = 1.0


@dataclass(frozen=True, slots=True)
class Fallback:
    """Speculation was given up: from here the target goes on alone. `reason` is for people and logs.

    `cause`: the draft failed, or the target (`refused`) refused a call that speculation needs, or (`target`) does not
    support what it needs.
    """

    reason: str
    cause: FallbackCause = "draft_failed"

    @classmethod
    def from_error(cls, error: Exception) -> Fallback:
        """What a failure of the target's calls means."""
        cause: FallbackCause = "refused" if is_permanent_refusal(error) else "draft_failed"
        return cls(format_error_line(error), "target" if isinstance(error, UnsupportedError) else cause)


@dataclass(frozen=True, slots=True)
class Retry:
    """The target failed for a passing reason. It is called again after `wait_s` seconds, or goes on.

    `reason` is for people and logs. What a continued answer is worth is said by `GuaranteeWeakened`.
    """

    reason: str
    wait_s: float
    is_continued: bool


@dataclass(frozen=True, slots=True)
class GuaranteeWeakened:
    """From here on the answer has this guarantee at best, and is not promised to be the target's text byte for byte.

    `reason` is for people and logs. A result has the weakest guarantee of all.
    """

    guarantee: Guarantee
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of every stream that ends well.

    `usage` is None where the provider does not count, `stopped_by` where it does not say; `draft_usage` is what a
    draft beside it used. `stop_string` is the one of the request's that ended the answer, where it is known.
    `service_tier` and `speed` are those that the server says it served, in its own words. `response_id` is the
    server's for the answer, of several requests the last one's; it is no part of what makes two finishes equal.
    """

    finish_reason: FinishReason
    usage: Usage | None = None
    stopped_by: StoppedBy | None = None
    draft_usage: Usage | None = None
    stop_string: str | None = None
    service_tier: str | None = None
    speed: str | None = None
    response_id: str | None = field(default=None, compare=False)


# How an answer comes about, none of its text.
Progress: TypeAlias = AnswerStarted | Round | TargetStreamReport | LocalTimings | Fallback | Retry | GuaranteeWeakened
StreamEvent: TypeAlias = TextDelta | ReasoningDelta | ReasoningDetail | AnswerDetail | ToolCallDelta | Progress | Finish


@dataclass(frozen=True, kw_only=True)
class ChatResponse:
    """A whole answer."""

    message: ChatMessage
    finish_reason: FinishReason
    usage: Usage | None = None
    reasoning: str = ""
    stopped_by: StoppedBy | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_string: str | None = None
    details: tuple[AnswerDetail, ...] = ()
    service_tier: str | None = None
    speed: str | None = None
    response_id: str | None = field(default=None, compare=False)

    @property
    def content(self) -> str:
        """The answer's text."""
        return self.message.text

    @property
    def refusal(self) -> str:
        """What the model says to refuse; "" where it does not."""
        return "".join(detail.refusal for detail in self.details)
