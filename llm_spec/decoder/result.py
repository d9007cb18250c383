"""SpeculativeResult: a whole answer, how it was made, and what it cost."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import add
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from llm_spec.contract.events import (
    AnswerDetail,
    Finish,
    FinishReason,
    Guarantee,
    ReasoningDelta,
    Round,
    StoppedBy,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from llm_spec.contract.messages import ChatMessage, ReasoningDetail, ToolCall
from llm_spec.contract.reasoning_details import merge_reasoning_details
from llm_spec.contract.short_repr import cut_repr, format_short_repr
from llm_spec.contract.stats import SpeculativeStats
from llm_spec.decoder.answer_order import AnswerPart
from llm_spec.decoder.pricing import Cost

__all__ = [
    "PLAIN_REASONS",
    "DecoderStats",
    "PlainReason",
    "SpeculativeFinish",
    "SpeculativeResult",
    "Timings",
]

PlainReason: TypeAlias = Literal[
    "configured",
    "no_draft",
    "request",
    "seed",
    "target",
    "discovery",
    "baseline",
    "not_worthwhile",
    "not_measured",
    "not_verified",
    "budget",
    "refused",
    "retried",
    "draft_failed",
    "nothing_drafted",
]

PLAIN_REASONS: Final[Mapping[PlainReason, str]] = MappingProxyType(
    {
        "configured": "the configuration chose it",
        "no_draft": "there is no draft",
        "request": "the request uses an option that no strategy supports with this target",
        "seed": "the request samples with a seed, and a server cannot give its streams and batches seeds of their own",
        "target": "the target cannot verify this kind of draft",
        "discovery": "the target's capabilities are still being discovered",
        "baseline": "this answer measures the target without a draft",
        "not_worthwhile": "measurements show that the target alone is faster than with this draft",
        "not_measured": "no answer has shown yet whether this draft makes the target faster",
        "not_verified": "the target wrote the answer before anything that was drafted had been verified",
        "budget": "no budget is left, so nothing was sent",
        "refused": "the target refused the speculative attempt and answered without speculation",
        "retried": "the target failed, and the next attempt ran without speculation",
        "draft_failed": "the draft failed, was late or was not available",
        "nothing_drafted": "nothing was drafted that could be verified",
    }
)

_NO_SPEED: Final = (
    "too few times of the target alone, or they were unsteady; `llm-spec run --compare` and `llm-spec bench` measure it"
)


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds of this process's clock.

    `first_text_s` and `total_s` count from the request; `first_text_s` is None if no text came.
    `draft_s` and `verify_s` are inside the rounds; `other_s` is the rest: prompt reading and this
    library.
    """

    total_s: float
    first_text_s: float | None
    draft_s: float
    verify_s: float

    __repr__ = format_short_repr

    @property
    def other_s(self) -> float:
        """Time outside rounds; 0 if the parts of a concurrent draft exceed the whole."""
        return max(0.0, self.total_s - self.draft_s - self.verify_s)


@dataclass(frozen=True, kw_only=True)
class SpeculativeResult:
    """A whole answer, how it was made, and what it took.

    - `stopped_by`: the limit or stop string that ended the answer. None if the target did not say,
      or ended it by a limit of its own. `stop_string` is the stop string, if known.
    - `guarantee`: the strategy's promise, or what was left of it (`GuaranteeWeakened`).
    - `same_text`: True if, with this seed or greedily, the target alone would have given exactly
      this text on this machine.
    - `rounds`, `stats`: the rounds of drafting and verification, and their sums.
    - `usage`, `draft_usage`: tokens that all calls of the target, and of the draft, read and wrote;
      None if not counted. The provider's own count is used if there is one. Calls that broke off or
      were abandoned count what was sent and received.
    - `fallbacks`, `retries`: why drafts were dropped, and why the target was called again.
    - `logprobs`: one for each token of `content`, if the request has `top_logprobs`. Tokens of
      reasoning and tool calls have none, nor those that a stop string cut off.
    - `reasoning_events`: the reasoning as it came, with the data that its provider needs back in
      the next turn.
    - `approved_spans`: ranges of characters of `content` that the target approved but did not write
      (`judge`).
    - `plain_s`: an estimate of the target's time alone for this answer, by the measurement that
      `speedup_basis` names; None if there is none yet.
    - `plain_range_s`: the bounds of that time; None if there are too few measurements, or if they
      are too unsteady.
    - `plain_reason`: why nothing was speculated (`PLAIN_REASONS`), with details in `plain_detail`;
      None if something was.
    - `lookahead`: the state of a local model's lookahead policy at the end
      (`LookaheadController.describe`).
    - `details`: parts of the answer that this library does not read.
    - `order`: the parts of the answer as they came, if that is not reasoning, then text, then
      calls.
    - `service_tier`, `speed`: the ones that the target's server says it served, in its own words.
    - `response_id`: the server's id of the answer.
    """

    content: str
    finish_reason: FinishReason
    stopped_by: StoppedBy | None
    strategy: str
    guarantee: Guarantee
    same_text: bool
    target: str
    draft: str | None
    seed: int | None
    stats: SpeculativeStats
    rounds: tuple[Round, ...]
    timings: Timings
    usage: Usage | None
    draft_usage: Usage | None = None
    fallbacks: tuple[str, ...] = ()
    retries: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    reasoning_events: tuple[ReasoningDelta | ReasoningDetail, ...] = ()
    approved_spans: tuple[tuple[int, int], ...] = ()
    cost: Cost = field(default_factory=Cost)
    plain_s: float | None = None
    plain_range_s: tuple[float, float] | None = None
    speedup_basis: str | None = None
    plain_reason: PlainReason | None = None
    plain_detail: str | None = None
    lookahead: Mapping[str, float] = field(default_factory=dict[str, float])
    stop_string: str | None = None
    details: tuple[AnswerDetail, ...] = ()
    order: tuple[AnswerPart, ...] = ()
    service_tier: str | None = None
    speed: str | None = None
    response_id: str | None = None

    @property
    def refusal(self) -> str:
        """The model's text of a refusal, or "" if it does not refuse. It is not in `content`."""
        return "".join(detail.refusal for detail in self.details)

    @property
    def message(self) -> ChatMessage:
        """The answer as a chat message."""
        return ChatMessage(
            "assistant",
            self.content or None,
            tool_calls=self.tool_calls,
            reasoning=self.reasoning,
            reasoning_details=merge_reasoning_details(self.reasoning_events),
        )

    def iterate_answer(self) -> Iterator[TextDelta | ReasoningDelta | ToolCallDelta | AnswerDetail]:
        """Yield the answer's parts in order, each as one piece; details follow the first text."""
        calls: list[AnswerPart] = [("call", index) for index in range(len(self.tool_calls))]
        usual: list[AnswerPart] = [("reasoning", len(self.reasoning)), ("text", len(self.content)), *calls]
        reasoning, content = io.StringIO(self.reasoning), io.StringIO(self.content)
        logprobs, details = self.logprobs, self.details
        for kind, number in self.order or usual:
            if kind == "reasoning":
                yield ReasoningDelta(reasoning.read(number))
            elif kind == "call":
                call = self.tool_calls[number]
                yield ToolCallDelta(number, call.id, call.name, call.arguments, call.kind)
            else:
                yield TextDelta(content.read(number), logprobs=logprobs)
                yield from details
                logprobs, details = None, ()
        yield from details

    @property
    def speedup(self) -> float | None:
        """The target's time alone (`plain_s`) / the time taken; 1 for the target's own answer.

        It is less than 1 for an own answer that first waited for the discovery of the target. It is
        None if `plain_s` is not known well enough, and if nothing could be speculated
        (`configured`, `no_draft`).
        """
        return None if self.plain_s is None or self.speedup_range is None else self.plain_s / self.timings.total_s

    @property
    def speedup_range(self) -> tuple[float, float] | None:
        """The bounds of `speedup`; None if it is."""
        if self.plain_range_s is None or not self.timings.total_s:
            return None
        least_s, most_s = self.plain_range_s
        return least_s / self.timings.total_s, most_s / self.timings.total_s

    @property
    def time_saved_s(self) -> float | None:
        """Seconds saved against the target alone, negative if speculation lost time.

        None if `speedup` is.
        """
        return None if self.plain_s is None or self.speedup is None else self.plain_s - self.timings.total_s

    @property
    def plain_explanation(self) -> str | None:
        """`plain_reason` and its detail, for people."""
        if self.plain_reason is None:
            return None
        return PLAIN_REASONS[self.plain_reason] + ("" if self.plain_detail is None else f" ({self.plain_detail})")

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the answer, or None if they were not counted."""
        return None if self.usage is None else self.usage.answer_tokens

    def to_report(self) -> dict[str, Any]:
        """Return how the answer was made, as JSON values.

        Servers and adapters send this beside an answer and its usage.
        """
        stats, speedup_range = self.stats, self.speedup_range
        plain_s, basis = (None, None) if speedup_range is None else (self.plain_s, self.speedup_basis)
        return {
            "strategy": self.strategy,
            "guarantee": self.guarantee,
            "same_text": self.same_text,
            "target": self.target,
            "draft": self.draft,
            "service_tier": self.service_tier,
            "speed": self.speed,
            "seed": self.seed,
            "draft_tokens": stats.num_draft_tokens,
            "accepted_tokens": stats.num_accepted_draft_tokens,
            "acceptance_rate": stats.draft_acceptance_rate,
            "speedup": self.speedup,
            "speedup_range": speedup_range and list(speedup_range),
            "speedup_basis": basis,
            "time_saved_s": self.time_saved_s,
            "plain_reason": self.plain_reason,
            "plain_detail": self.plain_detail,
            "plain_text": self.plain_explanation,
            "lookahead": dict(self.lookahead),
            "metrics": stats.to_dict(),
            "timings": dataclasses.asdict(self.timings) | {"other_s": self.timings.other_s, "plain_s": plain_s},
            "approved_spans": [list(span) for span in self.approved_spans],
            "cost": dataclasses.asdict(self.cost) | {"wasted": self.cost.wasted, "saving": self.cost.saving},
            "fallbacks": list(self.fallbacks),
            "retries": list(self.retries),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; `logprobs` only if they were requested."""
        return {
            "content": self.content,
            **({} if self.logprobs is None else {"logprobs": [_logprob_to_dict(logprob) for logprob in self.logprobs]}),
            "finish_reason": self.finish_reason,
            "stopped_by": self.stopped_by,
            "stop_string": self.stop_string,
            **self.to_report(),
            "rounds": [dataclasses.asdict(report) for report in self.rounds],
            "usage": {
                "target": None if self.usage is None else dataclasses.asdict(self.usage),
                "draft": None if self.draft_usage is None else dataclasses.asdict(self.draft_usage),
                "wasted": self.stats.num_wasted_draft_tokens,
            },
            "tool_calls": [dataclasses.asdict(call) for call in self.tool_calls],
            "reasoning": self.reasoning,
        }

    def summary(self) -> str:
        """Return a few lines for people."""
        money = self._describe_cost()
        counts = f"{self._describe_counts()}, {self.timings.total_s:.3f} s"
        last = "" if money is None else f"\ncost {money}"
        return f"{self.strategy} ({self.guarantee}): {counts}\n{self._describe_speed()}{last}"

    def __repr__(self) -> str:
        answer = self.content or tuple(call.name for call in self.tool_calls)
        counts = f"{self._describe_counts()}, {self.timings.total_s:.3f} s"
        return f"<SpeculativeResult {cut_repr(answer)}, {self.strategy} ({self.guarantee}): {counts}>"

    def _repr_markdown_(self) -> str:
        """Return the answer and a table of figures for a notebook."""
        rows = {
            "strategy": f"{self.strategy} ({self.guarantee})",
            "tokens": self._describe_counts(),
            "time": f"{self.timings.total_s:.3f} s",
            "speed": self._describe_speed().removeprefix("speed "),
            "cost": self._describe_cost(),
        }
        calls = "".join(f"`{call.name}({call.arguments})`\n\n" for call in self.tool_calls)
        lines = [f"| {name} | {' '.join(row.split()).replace('|', '&#124;')} |" for name, row in rows.items() if row]
        return "\n".join([self.content, "", f"{calls}| | |", "| --- | --- |", *lines])

    def _describe_counts(self) -> str:
        if self.rounds:
            return self.stats.summary()
        # only a remote target itself counts its tokens
        return "tokens not counted" if self.usage is None else f"{self.usage.output_tokens} tokens"

    def _describe_cost(self) -> str | None:
        cost = self.cost
        if cost.total is None or cost.saving is None:
            return None if cost.total is None else f"{cost.total:.6f}"
        return f"{cost.total:.6f}, {abs(cost.saving):.6f} {'less' if cost.saving >= 0 else 'more'} than plain"

    def _describe_speed(self) -> str:
        if self.plain_explanation is not None:
            return f"no speculation: {self.plain_explanation}"
        if self.speedup_range is None:
            return f"speed not measured: {_NO_SPEED}"
        least, most = (f"{bound:.2f}x" for bound in self.speedup_range)
        return f"{least if least == most else f'{least} to {most}'} as fast as the target alone ({self.speedup_basis})"


def _logprob_to_dict(logprob: TokenLogprob) -> dict[str, Any]:
    token_bytes = None if logprob.token_bytes is None else list(logprob.token_bytes)
    top = [_logprob_to_dict(likely) for likely in logprob.top]
    return {"token": logprob.token, "logprob": logprob.logprob, "token_bytes": token_bytes, "top": top}


@dataclass(frozen=True, slots=True)
class SpeculativeFinish(Finish):
    """A decoder's last event: a `Finish` that carries the whole result."""

    result: SpeculativeResult | None = None

    __repr__ = format_short_repr

    @classmethod
    def from_finish(cls, finish: Finish, result: SpeculativeResult) -> SpeculativeFinish:
        """Make it of a strategy's end and the result."""
        return cls(
            finish.finish_reason,
            result.usage,
            finish.stopped_by,
            result.draft_usage,
            finish.stop_string,
            finish.service_tier,
            finish.speed,
            finish.response_id,
            result,
        )


_USAGE_FIELDS: Final = tuple(vars(Usage()))
_NO_TOKENS: Final = (0,) * len(_USAGE_FIELDS)


class DecoderStats:
    """Sums over a decoder's answers, without those that failed or were left early.

    - `strategies`, `plain_reasons`: numbers of requests.
    - `rounds`: the sums of all rounds.
    - `usage`, `draft_usage`: the tokens of target and draft.
    - `compared_s`: the time of the requests whose speedup is known; `plain_s` is the target's time
      alone for them.
    - `cost`, `cost_saving`: None once a cost is not known.

    For one event loop; `decoder.with_config` shares it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all sums to zero."""
        self.num_requests = 0
        self.strategies = Counter[str]()
        self.plain_reasons = Counter[str]()
        self.rounds = SpeculativeStats()
        self._usage = self._draft_usage = _NO_TOKENS
        self.total_s = 0.0
        self.compared_s = 0.0
        self.plain_s = 0.0
        self.num_retries = 0
        self.cost: float | None = 0.0
        self.cost_saving: float | None = 0.0

    def add(self, result: SpeculativeResult) -> None:
        """Add a finished answer."""
        self.num_requests += 1
        self.strategies[result.strategy] += 1
        if result.plain_reason is not None:
            self.plain_reasons[result.plain_reason] += 1
        if result.rounds or result.fallbacks:
            self.rounds += result.stats
        if result.usage is not None:
            self._usage = _add_usage_to_totals(self._usage, result.usage)
        if result.draft_usage is not None:
            self._draft_usage = _add_usage_to_totals(self._draft_usage, result.draft_usage)
        self.total_s += result.timings.total_s
        if result.plain_s is not None and result.speedup is not None:
            self.compared_s += result.timings.total_s
            self.plain_s += result.plain_s
        self.num_retries += len(result.retries)
        if self.cost is not None:
            self.cost = _add_unless_none(self.cost, result.cost.total)
        if self.cost_saving is not None:
            self.cost_saving = _add_unless_none(self.cost_saving, result.cost.saving)

    @property
    def usage(self) -> Usage:
        """Tokens of the target."""
        return Usage(**dict(zip(_USAGE_FIELDS, self._usage, strict=True)))

    @property
    def draft_usage(self) -> Usage:
        """Tokens of the draft."""
        return Usage(**dict(zip(_USAGE_FIELDS, self._draft_usage, strict=True)))

    @property
    def speedup(self) -> float | None:
        """The target's time alone / the time taken, over all requests for which both are known.

        None if there are none.
        """
        return self.plain_s / self.compared_s if self.compared_s else None

    @property
    def time_saved_s(self) -> float:
        """Seconds saved against the target alone, over the same requests.

        Negative if speculation lost time.
        """
        return self.plain_s - self.compared_s

    def to_dict(self) -> dict[str, Any]:
        """Return everything, including derived figures, as JSON values."""
        sums = {
            "num_requests": self.num_requests,
            "num_retries": self.num_retries,
            "strategies": dict(self.strategies),
            "plain_reasons": dict(self.plain_reasons),
            "usage": dataclasses.asdict(self.usage),
            "draft_usage": dataclasses.asdict(self.draft_usage),
            "total_s": self.total_s,
            "plain_s": self.plain_s,
            "compared_s": self.compared_s,
            "speedup": self.speedup,
            "time_saved_s": self.time_saved_s,
            "cost": self.cost,
            "cost_saving": self.cost_saving,
        }
        return sums | self.rounds.to_dict()

    def summary(self) -> str:
        """Return a line for people."""
        speedup = "speedup not measured yet" if self.speedup is None else f"{self.speedup:.2f}x"
        return f"{self.num_requests} requests in {self.total_s:.3f} s ({speedup}): {self.rounds.summary()}"

    def __repr__(self) -> str:
        return f"<DecoderStats: {self.summary()}>"


def _add_usage_to_totals(totals: tuple[int, ...], usage: Usage) -> tuple[int, ...]:
    """Return the sums by field; a new `Usage` for each request would take ten times as long."""
    return tuple(map(add, totals, vars(usage).values()))


def _add_unless_none(total: float | None, value: float | None) -> float | None:
    return None if total is None or value is None else total + value
