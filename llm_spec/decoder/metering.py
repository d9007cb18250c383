"""Counts what the target and draft calls of one answer read and wrote.

A provider counts a call that comes to its end (`Finish.usage`). Many calls do not: a stream of a
race that was overtaken, a broken connection, an answer that was not read to its end. For these the
input is what was sent and the output what arrived. Both are counted by token ids if these are
known, else in pieces of text. Text that a server had written but not sent when the call ended is
unknown here and missing. A call that was refused, or did not reach its server, counts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.errors import BudgetError, CircuitOpenError, ClosedError, TargetError, TransientError
from llm_spec.contract.events import Finish, Round, StreamEvent, TextDelta, Usage
from llm_spec.contract.request import ChatRequest
from llm_spec.decoder.budget import AnswerReservation, CallReservation
from llm_spec.decoder.pricing import Price
from llm_spec.measure.tokens import (
    MaxTokensCutter,
    check_draft_piece,
    count_answer_tokens_in_event,
    count_piece_tokens,
    count_pieces,
    estimate_request_tokens,
)

__all__ = ["MeteredCall", "TokenMeter", "is_call_unread"]

_NO_USAGE: Final = Usage()


class TokenMeter:
    """The calls of one model for the answer to `request`; each reserves what it uses."""

    def __init__(
        self, request: ChatRequest, allowance: AnswerReservation | None = None, price: Price | None = None
    ) -> None:
        self._request = request
        self._allowance = allowance
        self._price = price
        self._calls: list[MeteredCall] = []
        self._prompt = _PromptTokenCounter(request)

    def open_call(
        self,
        request: ChatRequest | None = None,
        *,
        num_input: int | None = None,
        num_output: int = 0,
        max_output: int | None = None,
        is_free: bool = False,
        counts_drafts: bool = False,
    ) -> MeteredCall:
        """Begin a call for a request, or for known numbers of tokens (a batch).

        `max_output` is the most that it writes. Raises BudgetError if too little budget is left.
        """
        # counted now: at the end it would be counted for all calls at once
        num_prefix = 0 if request is None else count_pieces(request.prefix)
        call = MeteredCall(
            self._prompt, request, num_input, num_output, is_free, num_prefix, counts_drafts=counts_drafts
        )
        if self._allowance is not None and not is_free:
            call.reservation = self._allowance.open_call_reservation(
                self._price, call.estimate_input_tokens(), num_output=num_output, max_output=max_output
            )
        self._calls.append(call)
        return call

    def record_prompt_tokens(self, num_tokens: int) -> None:
        """Record the number of tokens of the encoded prompt."""
        self._prompt.num_encoded = num_tokens

    @property
    def num_calls(self) -> int:
        """The number of calls that were begun, without those that read nothing."""
        return len([call for call in self._calls if not call.is_unread]) if self._calls else 0

    @property
    def is_one_uncounted_call(self) -> bool:
        """True if one call gave the whole answer and its provider did not count it."""
        calls = [call for call in self._calls if not call.is_unread]
        return len(calls) == 1 and calls[0].has_ended and calls[0].counted is None

    @property
    def usage(self) -> Usage:
        """The usage of all calls together so far."""
        if len(self._calls) == 1:  # nearly always
            return self._calls[0].usage
        return sum((call.usage for call in self._calls), _NO_USAGE)

    @property
    def num_drafted_tokens(self) -> int:
        """Tokens drafted in the rounds of these calls, if they are paid for."""
        if not self._calls:
            return 0
        events = [event for call in self._calls if call.counts_drafts for event in call.events]
        return sum(event.num_draft_tokens for event in events if isinstance(event, Round))

    @property
    def num_prompt_tokens(self) -> int:
        """The request's tokens: as its provider counted them, else as encoded, else in pieces."""
        counted = (call.counted for call in self._calls if call.is_for_request(self._request))
        found = next((usage.input_tokens for usage in counted if usage is not None), None)
        return (
            self._prompt.estimate_tokens(self._request, count_pieces(self._request.prefix)) if found is None else found
        )


class _PromptTokenCounter:
    """Counts the tokens of the prompt of `own_request`, for all calls made for it.

    It is separate from `TokenMeter`: calls that referenced their meter would form cycles with all
    their events, and only the garbage collector would free them.
    """

    def __init__(self, own_request: ChatRequest) -> None:
        self.num_encoded: int | None = None
        self._own_request = own_request
        self._num_pieces: int | None = None

    def estimate_tokens(self, request: ChatRequest, num_prefix: int) -> int:
        """Estimate the tokens of a request that its provider does not count.

        `num_prefix` of them are in its prefix.
        """
        if request.messages is not self._own_request.messages:
            return estimate_request_tokens(request) + num_prefix
        if self.num_encoded is not None and request.prefix == self._own_request.prefix:
            return self.num_encoded
        if self._num_pieces is None:  # the same for every stream of a race, and slow to count
            self._num_pieces = estimate_request_tokens(request)
        return self._num_pieces + num_prefix


@dataclass(eq=False, slots=True)
class MeteredCall:
    """One call. `counted` is its provider's count; `is_free`: no model was called.

    `reservation` is its part of a budget. `cap` cuts a target's text. `cut_by` is which of them
    ended it. With `counts_drafts`, the tokens drafted in its rounds are paid for, too.
    """

    prompt: _PromptTokenCounter
    request: ChatRequest | None
    num_input: int | None
    num_output: int
    is_free: bool
    num_prefix: int  # tokens of the answer so far that were sent
    events: list[StreamEvent] = field(default_factory=list["StreamEvent"])
    num_free_tokens: int = 0  # tokens drafted without a model
    num_paid_tokens: int = 0  # tokens drafted by a model
    has_drafted: bool = False
    counted: Usage | None = None
    has_ended: bool = False
    is_unread: bool = False
    reservation: CallReservation | None = None
    cap: MaxTokensCutter | None = None
    cut_by: Literal["budget", "max_tokens"] | None = None
    is_over: bool = False
    counts_drafts: bool = False
    num_seen_tokens: int = 0  # tokens that came, if a budget is reserved
    num_tokens_in_rounds: int = 0  # tokens of rounds among them

    def is_for_request(self, request: ChatRequest) -> bool:
        """Return True if it was for this request, not for a part of its answer."""
        own = self.request
        return own is not None and own.messages is request.messages and own.prefix == request.prefix

    def count_and_cut_target_event(self, event: StreamEvent) -> StreamEvent:
        """Count an event from a target; return what may be passed on."""
        self.events.append(event)
        if self.reservation is not None and type(event) is not Finish:
            self._count_event(self.reservation, event)
        if type(event) is TextDelta:  # nearly always true
            kept = event if self.cap is None else self.cap.cut_delta(event)
            if kept is not event:
                self.cut_by = "max_tokens"
            return self.finish_cut_target_call() if kept is None else kept
        if isinstance(event, Finish):
            self.counted, self.has_ended = event.usage, True
        return event

    def finish_cut_target_call(self) -> Finish:
        """Return the end of a target's call that is cut; nothing follows it."""
        self.is_over = True
        return Finish("length", None, self.cut_by)

    def count_and_cut_draft_piece(self, piece: DraftPiece) -> DraftPiece:
        """Count a piece from a draft; raises DraftError if it is not a valid piece."""
        checked, self.has_drafted = check_draft_piece(piece), True
        num_tokens = count_piece_tokens(checked)
        if self.is_free or checked.is_free:
            self.num_free_tokens += num_tokens
        else:
            self.num_paid_tokens += num_tokens
        if checked.usage is not None:
            self.counted = checked.usage if self.counted is None else self.counted + checked.usage
        if self.reservation is not None and not self.reservation.reserve_output_up_to(self.num_paid_tokens):
            self.cut_by = "budget"
        return piece

    def finish_cut_draft_call(self) -> DraftPiece:
        """Raise BudgetError: a draft's call was cut."""
        raise BudgetError("no budget is left for a draft")

    def _count_event(self, reservation: CallReservation, event: StreamEvent) -> None:
        if isinstance(event, Round):
            self.num_tokens_in_rounds += event.num_emitted_tokens + event.num_draft_tokens * self.counts_drafts
        self.num_seen_tokens += count_answer_tokens_in_event(event)
        if not reservation.reserve_output_up_to(max(self.num_seen_tokens, self.num_tokens_in_rounds)):
            self.cut_by = "budget"

    def close_call(self) -> None:
        """Close the call; release the unused part of its reservation."""
        if self.reservation is not None:
            self.reservation.settle_call(self.usage)

    def record_call_failure(self, error: Exception) -> None:
        """Record a failure; a call from which something came was read."""
        self.is_unread = not (self.events or self.has_drafted) and is_call_unread(error)

    @property
    def usage(self) -> Usage:
        """The usage of this call so far."""
        if self.is_unread:
            return _NO_USAGE
        num_free = self.num_free_tokens
        free = Usage(output_tokens=num_free, free_output_tokens=num_free) if num_free else _NO_USAGE
        if self.is_free or (num_free and not self.num_paid_tokens):
            return free
        own = self.counted
        if own is None:
            num_output = self.num_output + self.num_paid_tokens + self._estimate_output_tokens()
            own = Usage(input_tokens=self.estimate_input_tokens(), output_tokens=num_output)
        return free + own if num_free else own

    def estimate_input_tokens(self) -> int:
        """Return the tokens that it reads, as far as they can be counted here."""
        if self.num_input is not None:
            return self.num_input
        return 0 if self.request is None else self.prompt.estimate_tokens(self.request, self.num_prefix)

    def _estimate_output_tokens(self) -> int:
        """Return the output tokens; the rounds of a local model give the exact number."""
        rounds = [event.num_emitted_tokens for event in self.events if isinstance(event, Round)]
        return sum(rounds) if rounds else sum(map(count_answer_tokens_in_event, self.events))


def is_call_unread(error: Exception) -> bool:
    """Return True if a call that failed before its first event read nothing.

    Only an answer in an unusable form was read.
    """
    is_answer = isinstance(error, TargetError) and error.status is None
    return not is_answer or isinstance(error, TransientError | CircuitOpenError | ClosedError)
