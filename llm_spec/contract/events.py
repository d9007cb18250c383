"""The events of an answer, its usage, and the whole response. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from llm_spec.contract.errors import UnsupportedError, format_error_line, is_permanent_refusal
from llm_spec.contract.messages import ApiName, ChatMessage, ReasoningDetail, ToolCallKind
from llm_spec.contract.short_repr import format_short_repr

__all__ = [
    "AnswerDetail",
    "AnswerStarted",
    "ChatResponse",
    "Fallback",
    "FallbackCause",
    "Finish",
    "FinishReason",
    "Guarantee",
    "GuaranteeWeakened",
    "LocalTimings",
    "Origin",
    "Progress",
    "ReasoningDelta",
    "Retry",
    "Round",
    "StoppedBy",
    "StreamEvent",
    "TargetStreamReport",
    "TextDelta",
    "TokenLogprob",
    "ToolCallDelta",
    "Usage",
]

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
StoppedBy = Literal[
    "eos",  # the model ended its answer
    "stop_string",
    "tool_calls",
    "content_filter",
    "max_tokens",  # the request's own limit, if the answer has so many tokens
    "max_total_tokens",  # the decoder's limits …
    "max_iterations",
    "budget",
    "deadline",
    "context_length",  # the model's window is full
]  # "length" with none of them: a limit of the server itself
FallbackCause: TypeAlias = Literal["draft_failed", "refused", "target"]
Origin = Literal["plain", "accepted", "correction", "bonus"]
# Guarantees of a text, strongest first.
# exact: the target's own output: the same greedy text, and the same distribution when sampling.
# exact-text: the same, but the target tokenizes its own earlier text again.
# judged: the target has approved text that it did not write.
# lossy: the acceptance rule, or lost data, may have changed the text.
Guarantee: TypeAlias = Literal["exact", "exact-text", "judged", "lossy"]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens as the provider counted them; addition adds field by field.

    `input_tokens` are all tokens of the prompt. They include those read from a cache
    (`cached_input_tokens`) and those newly written to one (`cache_write_input_tokens`, if the
    provider reports them).

    `accepted_prediction_tokens` and `rejected_prediction_tokens` count the confirmed and the
    rejected tokens of a request's `prediction`, or of another draft used for such a request. A
    provider that bills for rejected ones includes them in its output.

    `extra_input_tokens` and `cancelled_output_tokens` are the parts of the input and output that
    the target alone would not have read or written (`race`, `probe`, `judge`; rejected predictions
    in the output). `approved_output_tokens` are tokens that the target alone would have written,
    but only approved (`judge`) or rated (`score`). `free_output_tokens` are the tokens of a draft's
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

    __repr__ = format_short_repr

    @property
    def answer_tokens(self) -> int:
        """Output tokens of the answer itself: as many as the target alone would have written."""
        return self.output_tokens - self.cancelled_output_tokens + self.approved_output_tokens

    def __add__(self, other: Usage) -> Usage:
        ours, theirs = vars(self), vars(other)
        return Usage(**{name: ours[name] + theirs[name] for name in ours})


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, and the natural logarithm of its probability after the text before it.

    The probability is that of the target's own distribution, before penalties, temperature, filters
    and grammars.

    `token_bytes`: the token's UTF-8, which may be a part of a character, or None if unknown.
    `token` shows such a part as U+FFFD.
    `top`: the likeliest tokens at this position, likeliest first, as many as were requested.
    """

    token: str
    logprob: float
    token_bytes: bytes | None = None
    top: tuple[TokenLogprob, ...] = ()

    __repr__ = format_short_repr


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the answer; `origin` says how a speculative round produced it.

    `token_ids`: set if they were requested (`TokenEndpoint`), or None if unknown.
    `logprobs`: those of the tokens that begin in this piece, if they were requested
    (`ChatRequest.top_logprobs`). A token that is only partly text of the answer counts as a whole.
    """

    text: str
    origin: Origin = "plain"
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    __repr__ = format_short_repr


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the model's reasoning, if a provider shows it."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerDetail:
    """A part of an answer that this library passes on unread, in the format of its API.

    In chat completions these are some fields of a delta, such as `annotations`, `images` or
    `audio`, and the text of a refusal, which is not text of an answer.
    """

    api: ApiName
    value: Mapping[str, Any]

    __repr__ = format_short_repr

    @property
    def refusal(self) -> str:
        """The text of the model's refusal; "" for any other part."""
        refusal = self.value.get("refusal")
        return refusal if isinstance(refusal, str) else ""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the call at `index`.

    `id` and `name` come with its first piece. The `arguments` of all pieces are joined.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    kind: ToolCallKind = "function"

    __repr__ = format_short_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One finished round: a draft and its verification.

    A round with `num_draft_tokens` 0 is a plain step.

    The first `num_accepted_tokens` drafted tokens were confirmed. `num_emitted_tokens` also counts
    the correction or bonus; it is smaller if EOS, a stop string or a limit ended the answer.
    `next_token_id` is that correction or bonus, or None if token ids are unknown.

    Times are seconds of this process's clock. If the target runs in this process, they add up to
    the whole round. Otherwise `draft_s` is the time that the draft took for these tokens, as they
    came. `verify_s` is the time from sending them to the target until its answer. In a race it
    begins at the end of the previous round of the target's stream (or when the stream was opened)
    and ends with the last token of this round. Rounds may overlap, so the sums can exceed the time
    of the answer. Rounds of `regenerate` are compared afterwards, and have no times.
    """

    index: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    next_token_id: int | None = None
    draft_s: float = 0.0
    verify_s: float = 0.0

    __repr__ = format_short_repr

    @property
    def rejection_index(self) -> int | None:
        """Index in the draft of the first token that was not confirmed, or None if all were."""
        return self.num_accepted_tokens if self.num_accepted_tokens < self.num_draft_tokens else None


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """Describes how an answer is produced; comes before all of it, once for each decoder."""

    strategy: str
    guarantee: Guarantee
    target: str
    draft: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStreamReport:
    """Reports on one of the target's streams that raced for an answer (`race`).

    It comes at the end of the answer. The stream began after `begins_at` tokens of the answer and
    wrote `num_tokens`. Times are seconds since the first stream was opened. `is_used` is True if
    some of its text was emitted.
    """

    index: int
    begins_at: int
    num_tokens: int
    started_s: float
    ended_s: float
    is_used: bool

    __repr__ = format_short_repr


@dataclass(frozen=True, slots=True)
class LocalTimings:
    """The times of an answer of a model in this process, besides those of its rounds.

    It comes once, before the `Finish`. Times are seconds of this process's clock.

    `prompt_s`: the time to open the target's session and to read the prompt.
    `open_draft_s`: the time to open the draft, which may read the prompt, too.
    `between_s`: the time from the end of each round to the beginning of the next, summed up. In it
    text is decoded and passed on.
    `lookahead`: measurements of the lookahead controller (`LookaheadController.describe`), empty
    without a draft.
    `num_concurrent`: the average number of answers that the models of this process wrote at the
    same time, this one included.
    """

    prompt_s: float
    open_draft_s: float
    lookahead: Mapping[str, float] = field(default_factory=dict[str, float])
    between_s: float = 0.0
    num_concurrent: float = 1.0

    __repr__ = format_short_repr


@dataclass(frozen=True, slots=True)
class Fallback:
    """Speculation was given up: from here the target goes on alone.

    `reason`: a text for people and logs.
    `cause`: `draft_failed`; or `refused`, if the target refused a call that speculation needs; or
    `target`, if the target does not support such a call.
    """

    reason: str
    cause: FallbackCause = "draft_failed"

    __repr__ = format_short_repr

    @classmethod
    def from_error(cls, error: Exception) -> Fallback:
        """Return the fallback for a failure of the target's calls."""
        cause: FallbackCause = "refused" if is_permanent_refusal(error) else "draft_failed"
        return cls(format_error_line(error), "target" if isinstance(error, UnsupportedError) else cause)


@dataclass(frozen=True, slots=True)
class Retry:
    """The target failed for a temporary reason.

    It is called again after `wait_s` seconds, or, with `is_continued`, continues the answer.
    `reason` is for people and logs. `GuaranteeWeakened` reports the guarantee of a continued
    answer.
    """

    reason: str
    wait_s: float
    is_continued: bool


@dataclass(frozen=True, slots=True)
class GuaranteeWeakened:
    """From here on, the answer has this guarantee at best.

    It may differ from the target's own text. `reason` is for people and logs. A result has the
    weakest guarantee of all.
    """

    guarantee: Guarantee
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of every stream that ends well.

    `usage`: None if the provider does not count.
    `stopped_by`: None if the provider does not say.
    `draft_usage`: the usage of a draft, if there was one.
    `stop_string`: the stop string of the request that ended the answer, if known.
    `service_tier`, `speed`: those that the server reports, in its own words.
    `response_id`: the server's id of the answer, or of the last request if there were several.
    Comparisons of two finishes ignore it.
    """

    finish_reason: FinishReason
    usage: Usage | None = None
    stopped_by: StoppedBy | None = None
    draft_usage: Usage | None = None
    stop_string: str | None = None
    service_tier: str | None = None
    speed: str | None = None
    response_id: str | None = field(default=None, compare=False)

    __repr__ = format_short_repr


# Events about the answer's production, without any of its text.
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

    __repr__ = format_short_repr

    @property
    def content(self) -> str:
        """The answer's text."""
        return self.message.text

    @property
    def refusal(self) -> str:
        """The text of the model's refusal, or "" if it did not refuse."""
        return "".join(detail.refusal for detail in self.details)
