"""What a strategy is: a function that takes a context, and is ready to run in it or refuses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, get_args, runtime_checkable

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import InvalidRequestError, UnsupportedError
from llm_spec.contract.events import Guarantee, StreamEvent
from llm_spec.contract.fields import allows_prediction, prevents_multi_call_answer
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.tools import parse_tool_use
from llm_spec.local.lookahead import LookaheadCostMemory
from llm_spec.measure.clock import Deadline
from llm_spec.measure.pair_stats import PairStats
from llm_spec.strategies.limits import Limits

__all__ = [
    "ConstraintBegunError",
    "OpenStream",
    "ReadyStrategy",
    "Refusal",
    "StrategyContext",
    "TextGuarantee",
    "count_call_if_target_is_metered",
    "find_multi_call_refusal",
    "find_prediction_refusal",
]

OpenStream: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncIterator[StreamEvent]]]

_STRONGEST_FIRST: Final[tuple[Guarantee, ...]] = get_args(Guarantee)


class TextGuarantee(NamedTuple):
    """What a strategy guarantees of its text. `same_text`: it equals, byte for byte, what the target alone writes."""

    guarantee: Guarantee
    same_text: bool

    def weaken_to(self, guarantee: Guarantee) -> TextGuarantee:
        """What is left of it where a part of the text has this guarantee only."""
        weakest = max(_STRONGEST_FIRST.index(self.guarantee), _STRONGEST_FIRST.index(guarantee))
        return TextGuarantee(_STRONGEST_FIRST[weakest], same_text=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyContext:
    """One request: who drafts for whom, what is asked, and what a strategy may know and use.

    Calls of target and draft are counted for this request alone. A strategy decides by `pair_stats`, and adds what it
    measures to them; `lookahead_costs` are those of rounds in this process. `deadline`: when the answer ends; None: it
    has time. `writes_raw_text`: what the strategy writes is read by a message parser afterwards (`message_answer.py`),
    so that the request may have tools. `keeps_constraints`: the server may constrain the answer; a stream that would
    begin within such a part raises ConstraintBegunError.
    """

    target: LlmProvider
    draft: DraftProvider | None
    request: ChatRequest
    limits: Limits
    pair_stats: PairStats
    lookahead_costs: LookaheadCostMemory = field(default_factory=LookaheadCostMemory)
    deadline: Deadline | None = None
    writes_raw_text: bool = False
    keeps_constraints: bool = False


@dataclass(frozen=True, slots=True)
class ReadyStrategy:
    """A strategy that can serve its context.

    `run()` opens the answer: verified text alone, a `Round` after each round, at most one `Fallback`, a `Finish` at the
    end. `GuaranteeWeakened` comes before text of which less than `text_guarantee` holds. A failing draft never raises
    out of it; a failing target does. Leaving the opened context ends all work behind it. It may be run again.
    """

    text_guarantee: TextGuarantee
    run: OpenStream


class ConstraintBegunError(UnsupportedError):
    """A server constrains what follows by what it has written itself; from there the answer is one stream's alone."""


class Refusal(NamedTuple):
    """A strategy that cannot serve its context, and why, in one sentence."""

    reason: str


def find_multi_call_refusal(
    request: ChatRequest, *, writes_raw_text: bool = False, keeps_constraints: bool = False
) -> str | None:
    """Why an answer to this request cannot be put together from several calls of a server; None: it can.

    `writes_raw_text`: somebody else reads the calls of tools in it, unless the server's decoding is constrained to
    them. `keeps_constraints`: that is left to one call, from where it begins.
    """
    read_elsewhere = {"tools"} if writes_raw_text else set[str]()
    if keeps_constraints:
        read_elsewhere.add("response_format")
    names = (name for name, value in _iterate_fields_to_check(request) if prevents_multi_call_answer(name, value))
    name = next((name for name in names if name not in read_elsewhere), None)
    if name is not None:
        return f"the request sets {name}"
    if not (writes_raw_text and request.tools):
        return None
    try:
        is_constrained = parse_tool_use(request).is_constrained
    except InvalidRequestError:  # they are not functions
        return "the request's tools are of kinds that only the server knows"
    return "a grammar holds the answer to the request's tools" if is_constrained and not keeps_constraints else None


def find_prediction_refusal(request: ChatRequest) -> str | None:
    """Why the request cannot have a predicted output; None: it can."""
    name = next((name for name, value in _iterate_fields_to_check(request) if not allows_prediction(name, value)), None)
    return None if name is None else f"the request sets {name}, which predicted outputs do not go with"


def _iterate_fields_to_check(request: ChatRequest) -> Iterator[tuple[str, Any]]:
    """What a request says that may keep it from speculation, by the names of the table of fields."""
    sampling = request.sampling
    yield "raw", request.raw
    yield "tools", request.tools or None
    yield "response_format", request.response_format or None
    yield "logprobs", None if request.top_logprobs is None else True
    yield "presence_penalty", sampling.presence_penalty
    yield "frequency_penalty", sampling.frequency_penalty
    yield from request.extra.items()


@runtime_checkable
class ExternalCallMeter(Protocol):
    """A target that counts calls which were not made by its own `stream`."""

    def count_external_call(
        self,
        opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]],
        request: ChatRequest,
        *,
        counts_drafts: bool = False,
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """The same call, counted."""
        ...


def count_call_if_target_is_metered(
    target: LlmProvider,
    opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]],
    request: ChatRequest,
    *,
    counts_drafts: bool = False,
) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
    """Count a call of a target that was not made by its `stream`, where the target is metered.

    `counts_drafts`: the tokens drafted in its rounds are paid for, and are counted here alone.
    """
    return (
        target.count_external_call(opened, request, counts_drafts=counts_drafts)
        if isinstance(target, ExternalCallMeter)
        else opened
    )
