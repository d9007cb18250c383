"""Rounds against a server: what `probe` and `score` share.

The draft writes ahead in the background; its text is encoded with the target's own tokenizer. A round asks for the
target's own token after the confirmed answer and after each drafted token behind it, in one call. Rounds overlap: while
one is being answered the next is sent for what has been drafted since, as if the first will confirm everything; the
first token that differs makes the ones behind it worthless, and they are given up. So every token that comes out is the
target's own, after exactly the tokens before it.

    drafted   a b c d e f g h
    round 1   a b c|              sent first; confirms a b c and tells what follows them
    round 2         e f|          sent while round 1 is under way
    round 3             h|
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from llm_spec._clock import clock
from llm_spec.chat import Fallback, Finish, GuaranteeWeakened, Origin, Round, StreamEvent, TextDelta, Usage
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import SampledToken, TokenEndpoint
from llm_spec.counting import count_answer_tokens
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.drafting.encoded_draft import EncodedDraft
from llm_spec.errors import BudgetError, LlmSpecError, TargetError, format_error_line, is_refusal
from llm_spec.strategies.base import StrategyContext
from llm_spec.strategies.resume_plain import stream_one_token, stream_rest_plain
from llm_spec.text import StopMatcher
from llm_spec.tokens.lookahead import MAX_LOOKAHEAD, RoundFeedback

__all__ = ["VerifyRound", "answer_in_rounds"]

# The target's own token after `context_ids` and after each of the drafted ids behind them: one more than were drafted.
VerifyRound: TypeAlias = Callable[[list[int], list[int]], Awaitable[list[SampledToken]]]

_REPLACEMENT_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_TOKENS: Final = 4  # a character has at most so many bytes, so at most so many tokens
_MAX_HELD_TOKENS: Final = 8  # with more tokens than that undecoded, the first ones never will be
_DRAFT_TOKENS: Final = 64  # asked of the draft at a time
_MAX_REST_TOKENS: Final = 32  # tokens without a draft, after several that were wrong at once
_MIN_TRIAL_ROUNDS: Final = 12  # before speculation may turn out not to pay
_MAX_SLOWDOWN: Final = 1.15  # of the plain time: a few bad rounds say little
_MIN_TOKENS_PER_ROUND: Final = 1.2  # tokens a round, below which it does not, where the plain speed is not known


async def answer_in_rounds(
    context: StrategyContext,
    *,
    draft: DraftProvider,
    endpoint: TokenEndpoint,
    verify: VerifyRound,
    max_pending_rounds: int,
    is_read_from_scores: bool = False,
) -> AsyncGenerator[StreamEvent]:
    """Answer a request; `max_pending_rounds` rounds may overlap.

    `is_read_from_scores`: what they confirm the target did not write.

    Whatever fails, and when rounds do not pay, the target goes on alone from what was confirmed.
    """
    rounds = _ServerRounds(
        context,
        draft=draft,
        endpoint=endpoint,
        verify=verify,
        max_pending_rounds=max_pending_rounds,
        is_read_from_scores=is_read_from_scores,
    )
    matcher = StopMatcher(context.request.stop)
    finish: Finish | None = None
    num_shown = 0
    try:
        async with aclosing(rounds.events()) as events:
            async for event in events:
                if isinstance(event, Finish):
                    finish = event
                    for held_event in matcher.flush():
                        yield held_event
                    break
                for shown_event in matcher.filter_event(event):
                    num_shown += count_answer_tokens(shown_event)
                    yield shown_event
                if matcher.matched is not None:
                    finish = Finish("stop", rounds.count_answer_usage(num_shown), "stop_string")
                    break
        if finish is not None:  # else the target's own stream broke off without one
            yield finish
    finally:
        await rounds.aclose()


class _RoundReply(NamedTuple):
    """What the target said to a round, and how long that took it."""

    tokens: list[SampledToken]
    seconds: float


@dataclass(eq=False, slots=True)
class _PendingRound:
    """A round under way."""

    drafted_ids: list[int]
    draft_s: float
    answer: asyncio.Task[_RoundReply]


class _ServerRounds:
    """One request."""

    def __init__(
        self,
        context: StrategyContext,
        *,
        draft: DraftProvider,
        endpoint: TokenEndpoint,
        verify: VerifyRound,
        max_pending_rounds: int,
        is_read_from_scores: bool,
    ) -> None:
        request, config = context.request, context.config
        self._target = context.target
        self._endpoint = endpoint
        self._request = request
        self._pair_stats = context.pair_stats
        self._verify = verify
        self._max_pending_rounds = max_pending_rounds
        self._is_rated = is_read_from_scores
        self._max_rounds = config.max_iterations
        self._max_open = config.max_concurrent_streams
        self._lookahead = config.lookahead.start()
        self._clock = clock()
        self._started_s = self._send_at_s = self._clock()
        self._changed = asyncio.Event()
        self._background_draft = BackgroundDraft(
            draft,
            request,
            max_tokens=config.max_draft_tokens,
            timeout_s=config.draft_timeout_s,
            changed=self._changed.set,
        )
        self._encoded_draft = EncodedDraft(self._background_draft, endpoint, self._changed.set)
        self._pending_rounds: deque[_PendingRound] = deque()
        self._cancelled_rounds: set[asyncio.Task[_RoundReply]] = set()
        self._prompt_ids: list[int] | None = None
        self._answer_ids: list[int] = []
        self._text = ""
        self._unshown_ids: list[int] = []  # of which no text has come out yet …
        self._held_ids: list[int] = []  # … the last of them, because they end inside a character
        self._finish: Finish | None = None
        self._num_rest_tokens = 0  # tokens without a draft …
        self._resume_at = 0  # … until the answer has so many
        self._num_rounds = 0

    async def events(self) -> AsyncGenerator[StreamEvent]:
        """The answer; the last event is its `Finish`."""
        failure: Fallback | None = None
        try:
            async with aclosing(self._run_rounds()) as events:
                async for event in events:
                    yield event
        except Exception as error:
            if not self._answer_ids and is_refusal(error):
                raise  # there is nothing to go on from: whoever called asks plainly
            failure = Fallback(format_error_line(error), is_refusal=is_refusal(error))
        self._cancel_pending_rounds()
        if self._finish is None:
            while len(self._cancelled_rounds) >= self._max_open:
                await asyncio.wait(self._cancelled_rounds, return_when=asyncio.FIRST_COMPLETED)
            async with aclosing(self._stream_target_alone(failure)) as events:
                async for event in events:
                    yield self._finish_with_usage(event) if isinstance(event, Finish) else event
        if self._finish is not None:
            if self._held_ids:  # their text could not be told when they came
                yield self._release_delta(await self._decode_held_ids(), "plain")
            yield replace(self._finish, usage=self.count_answer_usage(len(self._answer_ids)))

    def _finish_with_usage(self, finish: Finish) -> Finish:
        """The target's own end, with the tokens of all of the answer where those of its rest were counted."""
        if finish.usage is None or not self._answer_ids:
            return finish
        return replace(finish, usage=self.count_answer_usage(len(self._answer_ids) + finish.usage.output_tokens))

    def count_answer_usage(self, num_tokens: int) -> Usage:
        """An answer's tokens: those of rounds, and behind them those that the target wrote alone."""
        num_rated = min(num_tokens, len(self._answer_ids)) if self._is_rated else 0
        return Usage(output_tokens=num_tokens - num_rated, approved_output_tokens=num_rated)

    async def aclose(self) -> None:
        """End the draft and every round, and wait until they are closed."""
        self._cancel_pending_rounds()
        await asyncio.gather(*self._cancelled_rounds, return_exceptions=True)
        await self._encoded_draft.aclose()
        await self._background_draft.aclose()

    async def _run_rounds(self) -> AsyncGenerator[StreamEvent]:
        """What rounds give, as long as they pay."""
        self._prompt_ids = await self._endpoint.encode_chat(self._request)
        self._encoded_draft.restart("", _DRAFT_TOKENS)
        while self._finish is None and self._are_rounds_worthwhile():
            await self._send_and_wait()
            while self._finish is None and self._pending_rounds and self._pending_rounds[0].answer.done():
                async for event in self._collect_round(self._pending_rounds.popleft()):
                    yield event

    # ----------------------------------------------------------------------------------------- sending

    async def _send_and_wait(self) -> None:
        """Send what can be sent, and wait until something has changed."""
        self._changed.clear()
        if self._encoded_draft.failure is not None:
            raise self._encoded_draft.failure
        if self._encoded_draft.is_wrong:
            self._drop_wrong_draft()
        self._restart_draft()
        self._encoded_draft.encode_new_text()
        wait_s = self._send_next_round()
        if not (self._pending_rounds and self._pending_rounds[0].answer.done()):
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass  # the next round is due

    def _restart_draft(self) -> None:
        """Ask the draft for more, or anew where it has nothing to say; after it was of no use, later and later."""
        if self._background_draft.is_exhausted or not self._encoded_draft.is_idle:
            return
        if self._background_draft.is_cut and self._background_draft.text:
            if len(self._encoded_draft.ids) < _DRAFT_TOKENS:
                self._encoded_draft.extend_guess(_DRAFT_TOKENS)
        elif not self._encoded_draft.ids and len(self._answer_ids) >= self._resume_at:
            self._num_rest_tokens = min(max(1, 2 * self._num_rest_tokens), _MAX_REST_TOKENS)
            self._resume_at = len(self._answer_ids) + self._num_rest_tokens
            self._encoded_draft.restart(self._text, _DRAFT_TOKENS)

    def _drop_wrong_draft(self) -> None:
        """The draft went wrong: it begins anew."""
        self._encoded_draft.restart(self._text, _DRAFT_TOKENS)
        self._send_at_s = self._clock()

    def _send_next_round(self) -> float | None:
        """Send the next round if it is time to; seconds until it will be, None where that depends on other things."""
        num_sent = sum(len(pending.drafted_ids) + 1 for pending in self._pending_rounds)
        room = self._max_draft_room() - num_sent
        num_open = len(self._pending_rounds) + len(self._cancelled_rounds)  # until it is closed
        if num_open >= self._max_pending_rounds or num_sent > len(self._encoded_draft.ids) or room < 0:
            return None
        drafted_ids = self._encoded_draft.ids[num_sent:]
        limit = self._limit_by_lookahead(len(drafted_ids), room)
        if len(drafted_ids) <= limit < room and not self._encoded_draft.is_idle:  # more is to be drafted
            wait_s = self._send_at_s + self._pair_stats.verify_s / self._max_pending_rounds - self._clock()
            if wait_s > 0:
                return wait_s
        context_ids = [*(self._prompt_ids or ()), *self._answer_ids, *self._encoded_draft.ids[:num_sent]]
        self._send_round(
            context_ids, drafted_ids[:limit], sum(self._encoded_draft.seconds[num_sent : num_sent + limit])
        )
        return self._send_next_round()

    def _limit_by_lookahead(self, num_drafted: int, room: int) -> int:
        """How many of the drafted tokens the lookahead policy wants in one round."""
        most = min(self._lookahead.limit(), room, num_drafted)
        num_wanted = min(1, most)
        while num_wanted < most and self._lookahead.wants_more([None] * num_wanted):
            num_wanted += 1
        return num_wanted

    def _send_round(self, context_ids: list[int], drafted_ids: list[int], draft_s: float) -> None:
        answer = asyncio.ensure_future(self._request_tokens(context_ids, drafted_ids))
        answer.add_done_callback(lambda _: self._changed.set())
        self._send_at_s = self._clock()
        self._pending_rounds.append(_PendingRound(drafted_ids, draft_s, answer))

    async def _request_tokens(self, context_ids: list[int], drafted_ids: list[int]) -> _RoundReply:
        sent_s = self._clock()
        tokens = await self._verify(context_ids, drafted_ids)
        return _RoundReply(tokens, self._clock() - sent_s)

    def _max_draft_room(self) -> int:
        """Most tokens that may be drafted behind the confirmed ones: a round emits one more than it drafts."""
        num_answer = len(self._answer_ids)
        room = [MAX_LOOKAHEAD * self._max_pending_rounds]
        if self._request.max_tokens is not None:
            room.append(self._request.max_tokens - num_answer - 1)
        if self._endpoint.context_length is not None:
            room.append(self._endpoint.context_length - len(self._prompt_ids or ()) - num_answer - 1)
        return min(room)

    # ----------------------------------------------------------------------------------------- judging

    async def _collect_round(self, pending: _PendingRound) -> AsyncGenerator[StreamEvent]:
        """Take in a round: its tokens are the target's own, up to the first that differs from the draft."""
        tokens, verify_s = await pending.answer
        if len(tokens) != len(pending.drafted_ids) + 1:
            raise TargetError(f"the target gave {len(tokens)} tokens for {len(pending.drafted_ids) + 1} prefixes")
        num_accepted = num_emitted = 0
        for token, drafted_id in zip(tokens, [*pending.drafted_ids, None], strict=True):
            is_accepted = token.token_id == drafted_id
            num_accepted += is_accepted
            num_emitted += 1
            text = await self._confirm_token(token)
            if text:
                yield self._release_delta(text, _find_origin(pending, drafted_id, is_accepted=is_accepted))
            if not is_accepted or self._finish is not None:
                break
        if self._encoded_draft.is_wrong:
            self._cancel_pending_rounds()  # what was sent on its word is worthless
        report = Round(
            index=self._num_rounds,
            num_draft_tokens=len(pending.drafted_ids),
            num_accepted_tokens=num_accepted,
            num_emitted_tokens=num_emitted,
            next_token_id=None if num_accepted == len(tokens) else tokens[num_accepted].token_id,
            draft_s=pending.draft_s,
            verify_s=verify_s,
        )
        self._update_statistics(report)
        yield report

    async def _confirm_token(self, token: SampledToken) -> str:
        """Add a token to the answer; the text that is complete with it.

        Whatever becomes of its text, it stays: to draw it again because of what it is would change the distribution.
        """
        self._answer_ids.append(token.token_id)
        self._unshown_ids.append(token.token_id)
        self._encoded_draft.confirm(token.token_id)
        self._check_stop(token)
        return await self._decode_token(token)

    def _release_delta(self, text: str, origin: Origin) -> TextDelta:
        """Text that comes out now, with the tokens that it completes."""
        self._text += text
        num_shown = len(self._unshown_ids) - len(self._held_ids)
        shown_ids, self._unshown_ids = self._unshown_ids[:num_shown], self._unshown_ids[num_shown:]
        return TextDelta(text, origin, tuple(shown_ids))

    def _check_stop(self, token: SampledToken) -> None:
        request, length = self._request, self._endpoint.context_length
        if token.is_end:
            self._finish = Finish("stop", None, "eos")
        elif request.max_tokens is not None and len(self._answer_ids) >= request.max_tokens:
            self._finish = Finish("length", None, "max_tokens")
        elif length is not None and len(self._prompt_ids or ()) + len(self._answer_ids) >= length:
            self._finish = Finish("length", None, "context_length")

    def _update_statistics(self, report: Round) -> None:
        num_drafted, num_accepted = report.num_draft_tokens, report.num_accepted_tokens
        self._num_rounds += 1
        self._pair_stats.add_probe_round(num_drafted + 1, report.verify_s)
        if num_drafted:
            rejected = num_accepted < report.num_emitted_tokens <= num_drafted
            self._pair_stats.acceptance.update(num_accepted, rejected=rejected)
        if num_drafted or self._lookahead.limit() == 0:
            draft_s = num_drafted * self._background_draft.token_s
            self._lookahead.update(RoundFeedback(num_drafted, num_accepted, draft_s, report.verify_s))
        if num_accepted:
            self._num_rest_tokens = 0
        if self._finish is None and self._max_rounds is not None and self._num_rounds >= self._max_rounds:
            self._finish = Finish("length", None, "max_iterations")

    def _cancel_pending_rounds(self) -> None:
        """Give up all rounds under way; how they end is nobody's concern."""
        while self._pending_rounds:
            pending = self._pending_rounds.pop()
            pending.answer.cancel()
            self._cancelled_rounds.add(pending.answer)
            pending.answer.add_done_callback(self._cancelled_rounds.discard)

    def _are_rounds_worthwhile(self) -> bool:
        """Whether rounds are worth their time: against the target's plain speed, where that is known."""
        if self._background_draft.is_exhausted and self._encoded_draft.is_idle and not self._encoded_draft.ids:
            return False
        if self._max_draft_room() < 0 and not self._pending_rounds:
            return False  # the target says what it thinks of such a request
        if self._num_rounds < _MIN_TRIAL_ROUNDS:
            return True
        plain_s = self._pair_stats.estimate_plain_s(len(self._answer_ids))
        if plain_s is None:
            return len(self._answer_ids) >= _MIN_TOKENS_PER_ROUND * self._num_rounds
        return self._clock() - self._started_s <= _MAX_SLOWDOWN * plain_s

    # -------------------------------------------------------------------------------------------- text

    async def _decode_token(self, token: SampledToken) -> str:
        """The text that a token completes; bytes of an incomplete character are held back, except at the end."""
        if not self._held_ids and (token.is_end or (token.text and _REPLACEMENT_CHARACTER not in token.text)):
            return "" if token.is_end else token.text
        if not token.is_end:
            self._held_ids.append(token.token_id)
        return await self._decode_held_ids()

    async def _decode_held_ids(self) -> str:
        text, num_shown = await self._endpoint.decode(self._held_ids), len(self._held_ids)
        if text.endswith(_REPLACEMENT_CHARACTER) and self._finish is None:
            text, num_shown = await self._find_decodable_prefix(self._held_ids, text)
        del self._held_ids[:num_shown]
        return text

    async def _find_decodable_prefix(self, held_event: list[int], text: str) -> tuple[str, int]:
        """What no later byte can change, and of how many tokens; nothing while it may still become a character."""
        if len(held_event) <= _MAX_HELD_TOKENS:
            return "", 0
        for num_tokens in range(len(held_event) - _MAX_CHARACTER_TOKENS + 1, 0, -1):
            part = await self._endpoint.decode(held_event[:num_tokens])
            if text.startswith(part):
                return part, num_tokens
        return "", 0

    # ------------------------------------------------------------------------------------------ alone

    async def _stream_target_alone(self, failure: Fallback | None) -> AsyncGenerator[StreamEvent]:
        """The rest of the answer, after what is confirmed; without a `Finish` where `_finish` is set on the way."""
        if failure is not None:
            yield failure
        elif self._background_draft.failure is not None:
            yield Fallback(self._background_draft.failure)
        async with aclosing(self._complete_character()) as events:
            async for event in events:
                yield event
        if self._finish is not None:
            return
        plain = stream_rest_plain(
            self._target,
            self._endpoint,
            self._request,
            prompt_ids=self._prompt_ids,
            answer_ids=self._answer_ids,
            text=self._text,
        )
        async with aclosing(self._measure_plain_stream(plain)) as events:
            async for event in events:
                yield event

    async def _complete_character(self) -> AsyncGenerator[StreamEvent]:
        """Token by token up to the end of a character, so that the text of all that follows begins with a whole one.

        Where no call gives the next token the beginning of the character is given up, and written anew.
        """
        try:
            while self._held_ids and self._finish is None:
                text = await self._confirm_token(await self._sample_one_token())
                if text:
                    yield self._release_delta(text, "plain")
        except BudgetError:
            raise  # it ends the answer
        except LlmSpecError:
            if self._finish is not None:
                raise
            num_held = len(self._held_ids)
            self._held_ids, self._answer_ids = [], self._answer_ids[:-num_held]
            if self._request.sampling.temperature != 0:  # greedily the same tokens come again
                yield GuaranteeWeakened("lossy", "the beginning of a character was lost, and drawn again")

    async def _sample_one_token(self) -> SampledToken:
        """The target's own token after all that is confirmed."""
        context_ids = [*(self._prompt_ids or ()), *self._answer_ids]
        sampling = replace(self._request.sampling, seed=None)  # with one seed all of these calls draw the same noise
        try:
            return (await self._endpoint.sample_next([context_ids], sampling))[0]
        except LlmSpecError:
            request = replace(self._request, sampling=sampling, max_tokens=1, stop=())
            return await stream_one_token(self._endpoint, context_ids, request)

    async def _measure_plain_stream(self, plain: AsyncGenerator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        """The target alone: its speed is what rounds are measured by next time."""
        timer = self._pair_stats.open_stream()
        async with aclosing(plain) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    timer.add_tokens(1)
                yield event


def _find_origin(pending: _PendingRound, drafted_id: int | None, *, is_accepted: bool) -> Origin:
    if is_accepted:
        return "accepted"
    if not pending.drafted_ids:
        return "plain"
    return "bonus" if drafted_id is None else "correction"
