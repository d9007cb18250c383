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

    __repr__ = format_short_repr

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

    __repr__ = format_short_repr


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

    __repr__ = format_short_repr


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the model's reasoning, where a provider shows it."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerDetail:
    """A part of an answer that this library does not read, in the words of its API: it is handed on.

    Of chat completions some fields of a delta, such as `annotations`, `images` or `audio`, and what the model says to
    refuse, which is no text of an answer.
    """

    api: ApiName
    value: Mapping[str, Any]

    __repr__ = format_short_repr

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

    __repr__ = format_short_repr


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

    __repr__ = format_short_repr

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

    __repr__ = format_short_repr


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

    __repr__ = format_short_repr


@dataclass(frozen=True, slots=True)
class Fallback:
    """Speculation was given up: from here the target goes on alone. `reason` is for people and logs.

    `cause`: the draft failed, or the target (`refused`) refused a call that speculation needs, or (`target`) does not
    support what it needs.
    """

    reason: str
    cause: FallbackCause = "draft_failed"

    __repr__ = format_short_repr

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

    __repr__ = format_short_repr


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

    __repr__ = format_short_repr

    @property
    def content(self) -> str:
        """The answer's text."""
        return self.message.text

    @property
    def refusal(self) -> str:
        """What the model says to refuse; "" where it does not."""
        return "".join(detail.refusal for detail in self.details)
