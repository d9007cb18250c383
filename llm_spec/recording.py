"""Recording: the events of one request on their way to a SpeculativeResult."""

from __future__ import annotations

from dataclasses import replace

from llm_spec._clock import clock
from llm_spec.chat import (
    ChatRequest,
    ChatResponse,
    Fallback,
    Finish,
    ReasoningDelta,
    Retry,
    Round,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    Weakened,
)
from llm_spec.drafting.pieces import num_prompt_pieces, split_pieces
from llm_spec.figures import PairFigures
from llm_spec.money import Spending
from llm_spec.provider import add_call
from llm_spec.result import SpeculativeResult, SpeculativeStats, Timings
from llm_spec.strategies import Promise
from llm_spec.strategies.base import refuse_request

__all__ = ["Recording"]


class Recording:
    """One request's events, added as they come; the event loop's clock starts when it is made."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.promise = Promise("exact", same_text=True)  # of the strategy, as it was chosen
        self.finish: Finish | None = None
        self._clock = clock()
        self._started = self._clock()
        self._first_text_s: float | None = None
        self._first_s: float | None = None  # of text or reasoning
        self._texts: list[TextDelta] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCall] = {}
        self._rounds: list[Round] = []
        self._fallbacks: list[str] = []
        self._retries: list[Retry] = []
        self._weakened: list[Weakened] = []
        self._num_others = 0  # pieces that are no text

    @property
    def content(self) -> str:
        """The text so far."""
        return "".join([delta.text for delta in self._texts])

    @property
    def _num_tokens(self) -> int:
        return sum(map(_num_tokens, self._texts))

    @property
    def has_begun(self) -> bool:
        """Whether anything of the answer has been emitted."""
        return bool(self._texts or self._reasoning or self._calls)

    def estimated_usage(self) -> Usage:
        """What the answer took so far, where nobody counts: text in pieces that stand for tokens."""
        return Usage(input_tokens=num_prompt_pieces(self.request), output_tokens=self._num_tokens + self._num_others)

    @property
    def is_full(self) -> bool:
        """Whether the answer has as many tokens as it may."""
        return self.request.max_tokens is not None and self._num_tokens >= self.request.max_tokens

    def rest(self) -> ChatRequest | None:
        """The request for what follows the text so far, without that text; None where no request says that.

        Tokens are counted as the pieces that came, where their ids are not known.
        """
        request = self.request
        if self._reasoning or self._calls or self.is_full or refuse_request(request) is not None:
            return None
        left = None if request.max_tokens is None else request.max_tokens - self._num_tokens
        return replace(request, max_tokens=left)

    @property
    def _is_all_plain(self) -> bool:
        return all(delta.origin == "plain" for delta in self._texts)

    def _approved_spans(self) -> tuple[tuple[int, int], ...]:
        """Where text was accepted, neighbours joined."""
        spans: list[tuple[int, int]] = []
        end = 0
        for delta in self._texts:
            start, end = end, end + len(delta.text)
            if delta.origin != "accepted":
                continue
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, end))
        return tuple(spans)

    def add(self, event: StreamEvent) -> None:
        """Take in one event."""
        if isinstance(event, TextDelta):  # nearly always
            if self._first_text_s is None:
                self._first_text_s = self._clock() - self._started
                self._first_s = self._first_s or self._first_text_s
            self._texts.append(event)
            return
        match event:
            case ReasoningDelta():
                self._num_others += 1
                self._reasoning.append(event.text)
                self._first_s = self._first_s or self._clock() - self._started
            case ToolCallDelta():
                self._num_others += 1
                self._calls[event.index] = add_call(self._calls.get(event.index), event)
            case Round():
                self._rounds.append(event)
            case Fallback():
                self._fallbacks.append(event.reason)
            case Retry():
                self._retries.append(event)
            case Weakened():
                self._weakened.append(event)
            case Finish():
                self.finish = event
            case _:
                pass

    def add_response(self, response: ChatResponse) -> None:
        """Take in an answer that came whole."""
        if response.reasoning:
            self.add(ReasoningDelta(response.reasoning))
        if response.content:
            self.add(TextDelta(response.content))
        self._calls = dict(enumerate(response.message.tool_calls))
        self.finish = Finish(response.finish_reason, response.usage, response.stopped_by)

    def teach(self, figures: PairFigures) -> None:
        """Tell how fast the target wrote this answer, which nobody drafted and nothing interrupted."""
        if self._first_s is None or self._retries:
            return
        figures.first_token_s.update(self._first_s)
        num_more = len(self._texts) + len(self._reasoning) - 1
        if num_more:
            figures.token_s.update(num_more, self._clock() - self._started - self._first_s)

    def _kept_promise(self) -> Promise:
        """What holds for the text as it has come about."""
        promise = self.promise
        if promise.guarantee == "judged" and self._is_all_plain:
            promise = Promise("exact", same_text=False)  # the target was asked what the caller asked, and nothing else
        for event in self._weakened:
            promise = promise.weaken(event.guarantee)
        return promise

    def result(
        self, finish: Finish, *, strategy: str, target: str, draft: str | None, spending: Spending
    ) -> SpeculativeResult:
        """The whole, now that it has ended."""
        stats = SpeculativeStats.of_rounds(self._rounds, num_fallbacks=len(self._fallbacks))
        promise = self._kept_promise()
        usage = finish.usage
        if any(retry.is_continued for retry in self._retries):
            usage = None  # what was counted is the last part alone
        return SpeculativeResult(
            content=self.content,
            finish_reason=finish.finish_reason,
            stopped_by=finish.stopped_by,
            strategy=strategy,
            guarantee=promise.guarantee,
            same_text=promise.same_text,
            target=target,
            draft=draft,
            seed=self.request.sampling.seed,
            stats=stats,
            rounds=tuple(self._rounds),
            timings=Timings(
                total_s=self._clock() - self._started,
                first_text_s=self._first_text_s,
                draft_s=stats.draft_s,
                verify_s=stats.verify_s,
            ),
            usage=usage,
            draft_usage=finish.draft_usage,
            fallbacks=tuple(self._fallbacks),
            retries=tuple(retry.reason for retry in self._retries),
            tool_calls=tuple(call for _, call in sorted(self._calls.items())),
            reasoning="".join(self._reasoning),
            approved_spans=self._approved_spans() if promise.guarantee == "judged" else (),
            cost=spending.cost(usage, finish.draft_usage, has_drafted=draft is not None),
        )


def _num_tokens(delta: TextDelta) -> int:
    """How many tokens a piece of text is: as it tells, else one where a target streams, else roughly."""
    if delta.token_ids is not None:
        return len(delta.token_ids)
    return 1 if delta.origin == "plain" else len(split_pieces(delta.text))
