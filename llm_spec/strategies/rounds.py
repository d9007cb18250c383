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
from llm_spec.chat import ChatRequest, Fallback, Finish, Origin, Round, StreamEvent, TextDelta, Usage, Weakened
from llm_spec.config import SpeculativeConfig
from llm_spec.counting import count_answer_tokens
from llm_spec.drafting.feed import DraftFeed
from llm_spec.drafting.guess import EncodedGuess
from llm_spec.errors import BudgetError, LlmSpecError, TargetError, is_refusal, one_line
from llm_spec.figures import PairFigures
from llm_spec.provider import DraftProvider, LlmProvider, NextToken, TokenEndpoint
from llm_spec.strategies.resume import resume_plain, stream_one_token
from llm_spec.text import StopMatcher
from llm_spec.tokens.lookahead import MAX_LOOKAHEAD, RoundReport

__all__ = ["Verify", "answer_in_rounds"]

# The target's own token after `context_ids` and after each of the drafted ids behind them: one more than were drafted.
Verify: TypeAlias = Callable[[list[int], list[int]], Awaitable[list[NextToken]]]

_UNDECODED: Final = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_TOKENS: Final = 4  # a character has at most so many bytes, so at most so many tokens
_MAX_HELD: Final = 8  # with more tokens than that undecoded, the first ones never will be
_DRAFT_TOKENS: Final = 64  # asked of the draft at a time
_MAX_REST: Final = 32  # tokens without a draft, after several that were wrong at once
_TRIAL_ROUNDS: Final = 12  # before speculation may turn out not to pay
_PATIENCE: Final = 1.15  # of the plain time: a few bad rounds say little
_MIN_LENGTH: Final = 1.2  # tokens a round, below which it does not, where the plain speed is not known


async def answer_in_rounds(
    *,
    draft: DraftProvider,
    target: LlmProvider,
    endpoint: TokenEndpoint,
    request: ChatRequest,
    config: SpeculativeConfig,
    figures: PairFigures,
    verify: Verify,
    max_under_way: int,
    is_rated: bool = False,
) -> AsyncGenerator[StreamEvent]:
    """Answer a request; `max_under_way` rounds may overlap. `is_rated`: what they confirm the target did not write.

    Whatever fails, and when rounds do not pay, the target goes on alone from what was confirmed.
    """
    rounds = _Rounds(
        draft=draft,
        target=target,
        endpoint=endpoint,
        request=request,
        config=config,
        figures=figures,
        verify=verify,
        max_under_way=max_under_way,
        is_rated=is_rated,
    )
    matcher = StopMatcher(request.stop)
    finish: Finish | None = None
    num_shown = 0
    try:
        async with aclosing(rounds.events()) as events:
            async for event in events:
                if isinstance(event, Finish):
                    finish = event
                    for held in matcher.flush():
                        yield held
                    break
                for shown in matcher.passed(event):
                    num_shown += count_answer_tokens(shown)
                    yield shown
                if matcher.matched is not None:
                    finish = Finish("stop", rounds.own_usage(num_shown), "stop_string")
                    break
        if finish is not None:  # else the target's own stream broke off without one
            yield finish
    finally:
        await rounds.aclose()


class _Answer(NamedTuple):
    """What the target said to a round, and how long that took it."""

    tokens: list[NextToken]
    seconds: float


@dataclass(eq=False, slots=True)
class _Sent:
    """A round under way."""

    drafted_ids: list[int]
    draft_s: float
    answer: asyncio.Task[_Answer]


class _Rounds:
    """One request."""

    def __init__(
        self,
        *,
        draft: DraftProvider,
        target: LlmProvider,
        endpoint: TokenEndpoint,
        request: ChatRequest,
        config: SpeculativeConfig,
        figures: PairFigures,
        verify: Verify,
        max_under_way: int,
        is_rated: bool,
    ) -> None:
        self._target = target
        self._endpoint = endpoint
        self._request = request
        self._figures = figures
        self._verify = verify
        self._max_under_way = max_under_way
        self._is_rated = is_rated
        self._max_rounds = config.max_iterations
        self._max_open = config.max_concurrent_streams
        self._lookahead = config.lookahead.start()
        self._clock = clock()
        self._started_s = self._paced_s = self._clock()
        self._changed = asyncio.Event()
        self._feed = DraftFeed(
            draft, request, max_tokens=config.max_draft_tokens, timeout_s=config.draft_timeout_s, news=self._changed.set
        )
        self._guess = EncodedGuess(self._feed, endpoint, self._changed.set)
        self._under_way: deque[_Sent] = deque()
        self._given_up: set[asyncio.Task[_Answer]] = set()
        self._prompt_ids: list[int] | None = None
        self._answer_ids: list[int] = []
        self._text = ""
        self._unshown_ids: list[int] = []  # of which no text has come out yet …
        self._held_ids: list[int] = []  # … the last of them, because they end inside a character
        self._finish: Finish | None = None
        self._rest = 0  # tokens without a draft …
        self._resume_at = 0  # … until the answer has so many
        self._num_rounds = 0

    async def events(self) -> AsyncGenerator[StreamEvent]:
        """The answer; the last event is its `Finish`."""
        failure: Fallback | None = None
        try:
            async with aclosing(self._rounds()) as events:
                async for event in events:
                    yield event
        except Exception as error:
            if not self._answer_ids and is_refusal(error):
                raise  # there is nothing to go on from: whoever called asks plainly
            failure = Fallback(one_line(error), is_refusal=is_refusal(error))
        self._discard()
        if self._finish is None:
            while len(self._given_up) >= self._max_open:
                await asyncio.wait(self._given_up, return_when=asyncio.FIRST_COMPLETED)
            async with aclosing(self._alone(failure)) as events:
                async for event in events:
                    yield self._ended(event) if isinstance(event, Finish) else event
        if self._finish is not None:
            if self._held_ids:  # their text could not be told when they came
                yield self._shown(await self._decode_held(), "plain")
            yield replace(self._finish, usage=self.own_usage(len(self._answer_ids)))

    def _ended(self, finish: Finish) -> Finish:
        """The target's own end, with the tokens of all of the answer where those of its rest were counted."""
        if finish.usage is None or not self._answer_ids:
            return finish
        return replace(finish, usage=self.own_usage(len(self._answer_ids) + finish.usage.output_tokens))

    def own_usage(self, num_tokens: int) -> Usage:
        """An answer's tokens: those of rounds, and behind them those that the target wrote alone."""
        num_rated = min(num_tokens, len(self._answer_ids)) if self._is_rated else 0
        return Usage(output_tokens=num_tokens - num_rated, approved_output_tokens=num_rated)

    async def aclose(self) -> None:
        """End the draft and every round, and wait until they are closed."""
        self._discard()
        await asyncio.gather(*self._given_up, return_exceptions=True)
        await self._guess.aclose()
        await self._feed.aclose()

    async def _rounds(self) -> AsyncGenerator[StreamEvent]:
        """What rounds give, as long as they pay."""
        self._prompt_ids = await self._endpoint.encode_chat(self._request)
        self._guess.restart("", _DRAFT_TOKENS)
        while self._finish is None and self._pays():
            await self._advance()
            while self._finish is None and self._under_way and self._under_way[0].answer.done():
                async for event in self._judge(self._under_way.popleft()):
                    yield event

    # ----------------------------------------------------------------------------------------- sending

    async def _advance(self) -> None:
        """Send what can be sent, and wait until something has changed."""
        self._changed.clear()
        if self._guess.failure is not None:
            raise self._guess.failure
        if self._guess.is_wrong:
            self._depart()
        self._redraft()
        self._guess.follow()
        wait_s = self._send()
        if not (self._under_way and self._under_way[0].answer.done()):
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass  # the next round is due

    def _redraft(self) -> None:
        """Ask the draft for more, or anew where it has nothing to say; after it was of no use, later and later."""
        if self._feed.is_spent or not self._guess.is_idle:
            return
        if self._feed.is_cut and self._feed.text:
            if len(self._guess.ids) < _DRAFT_TOKENS:
                self._guess.go_on(_DRAFT_TOKENS)
        elif not self._guess.ids and len(self._answer_ids) >= self._resume_at:
            self._rest = min(max(1, 2 * self._rest), _MAX_REST)
            self._resume_at = len(self._answer_ids) + self._rest
            self._guess.restart(self._text, _DRAFT_TOKENS)

    def _depart(self) -> None:
        """The draft went wrong: it begins anew."""
        self._guess.restart(self._text, _DRAFT_TOKENS)
        self._paced_s = self._clock()

    def _send(self) -> float | None:
        """Send the next round if it is time to; seconds until it will be, None where that depends on other things."""
        num_sent = sum(len(sent.drafted_ids) + 1 for sent in self._under_way)
        room = self._room() - num_sent
        num_open = len(self._under_way) + len(self._given_up)  # until it is closed
        if num_open >= self._max_under_way or num_sent > len(self._guess.ids) or room < 0:
            return None
        drafted_ids = self._guess.ids[num_sent:]
        limit = self._limit(len(drafted_ids), room)
        if len(drafted_ids) <= limit < room and not self._guess.is_idle:  # more is to be drafted
            wait_s = self._paced_s + self._figures.verify_s / self._max_under_way - self._clock()
            if wait_s > 0:
                return wait_s
        context_ids = [*(self._prompt_ids or ()), *self._answer_ids, *self._guess.ids[:num_sent]]
        self._open(context_ids, drafted_ids[:limit], sum(self._guess.seconds[num_sent : num_sent + limit]))
        return self._send()

    def _limit(self, num_drafted: int, room: int) -> int:
        """How many of the drafted tokens the lookahead policy wants in one round."""
        most = min(self._lookahead.limit(), room, num_drafted)
        num_wanted = min(1, most)
        while num_wanted < most and self._lookahead.more([None] * num_wanted):
            num_wanted += 1
        return num_wanted

    def _open(self, context_ids: list[int], drafted_ids: list[int], draft_s: float) -> None:
        answer = asyncio.ensure_future(self._ask(context_ids, drafted_ids))
        answer.add_done_callback(lambda _: self._changed.set())
        self._paced_s = self._clock()
        self._under_way.append(_Sent(drafted_ids, draft_s, answer))

    async def _ask(self, context_ids: list[int], drafted_ids: list[int]) -> _Answer:
        sent_s = self._clock()
        tokens = await self._verify(context_ids, drafted_ids)
        return _Answer(tokens, self._clock() - sent_s)

    def _room(self) -> int:
        """Most tokens that may be drafted behind the confirmed ones: a round emits one more than it drafts."""
        num_answer = len(self._answer_ids)
        room = [MAX_LOOKAHEAD * self._max_under_way]
        if self._request.max_tokens is not None:
            room.append(self._request.max_tokens - num_answer - 1)
        if self._endpoint.context_length is not None:
            room.append(self._endpoint.context_length - len(self._prompt_ids or ()) - num_answer - 1)
        return min(room)

    # ----------------------------------------------------------------------------------------- judging

    async def _judge(self, sent: _Sent) -> AsyncGenerator[StreamEvent]:
        """Take in a round: its tokens are the target's own, up to the first that differs from the draft."""
        tokens, verify_s = await sent.answer
        if len(tokens) != len(sent.drafted_ids) + 1:
            raise TargetError(f"the target gave {len(tokens)} tokens for {len(sent.drafted_ids) + 1} prefixes")
        num_accepted = num_emitted = 0
        for token, drafted_id in zip(tokens, [*sent.drafted_ids, None], strict=True):
            is_accepted = token.token_id == drafted_id
            num_accepted += is_accepted
            num_emitted += 1
            text = await self._confirm(token)
            if text:
                yield self._shown(text, _origin(sent, drafted_id, is_accepted=is_accepted))
            if not is_accepted or self._finish is not None:
                break
        if self._guess.is_wrong:
            self._discard()  # what was sent on its word is worthless
        report = Round(
            index=self._num_rounds,
            num_draft_tokens=len(sent.drafted_ids),
            num_accepted_tokens=num_accepted,
            num_emitted_tokens=num_emitted,
            next_token_id=None if num_accepted == len(tokens) else tokens[num_accepted].token_id,
            draft_s=sent.draft_s,
            verify_s=verify_s,
        )
        self._learn(report)
        yield report

    async def _confirm(self, token: NextToken) -> str:
        """Add a token to the answer; the text that is complete with it.

        Whatever becomes of its text, it stays: to draw it again because of what it is would change the distribution.
        """
        self._answer_ids.append(token.token_id)
        self._unshown_ids.append(token.token_id)
        self._guess.confirm(token.token_id)
        self._stop_at(token)
        return await self._text_of(token)

    def _shown(self, text: str, origin: Origin) -> TextDelta:
        """Text that comes out now, with the tokens that it completes."""
        self._text += text
        num_shown = len(self._unshown_ids) - len(self._held_ids)
        shown_ids, self._unshown_ids = self._unshown_ids[:num_shown], self._unshown_ids[num_shown:]
        return TextDelta(text, origin, tuple(shown_ids))

    def _stop_at(self, token: NextToken) -> None:
        request, length = self._request, self._endpoint.context_length
        if token.is_end:
            self._finish = Finish("stop", None, "eos")
        elif request.max_tokens is not None and len(self._answer_ids) >= request.max_tokens:
            self._finish = Finish("length", None, "max_tokens")
        elif length is not None and len(self._prompt_ids or ()) + len(self._answer_ids) >= length:
            self._finish = Finish("length", None, "context_length")

    def _learn(self, report: Round) -> None:
        num_drafted, num_accepted = report.num_draft_tokens, report.num_accepted_tokens
        self._num_rounds += 1
        self._figures.see_round(num_drafted + 1, report.verify_s)
        if num_drafted:
            rejected = num_accepted < report.num_emitted_tokens <= num_drafted
            self._figures.acceptance.update(num_accepted, rejected=rejected)
        if num_drafted or self._lookahead.limit() == 0:
            draft_s = num_drafted * self._feed.token_s
            self._lookahead.update(RoundReport(num_drafted, num_accepted, draft_s, report.verify_s))
        if num_accepted:
            self._rest = 0
        if self._finish is None and self._max_rounds is not None and self._num_rounds >= self._max_rounds:
            self._finish = Finish("length", None, "max_iterations")

    def _discard(self) -> None:
        """Give up all rounds under way; how they end is nobody's concern."""
        while self._under_way:
            sent = self._under_way.pop()
            sent.answer.cancel()
            self._given_up.add(sent.answer)
            sent.answer.add_done_callback(self._given_up.discard)

    def _pays(self) -> bool:
        """Whether rounds are worth their time: against the target's plain speed, where that is known."""
        if self._feed.is_spent and self._guess.is_idle and not self._guess.ids:
            return False
        if self._room() < 0 and not self._under_way:
            return False  # the target says what it thinks of such a request
        if self._num_rounds < _TRIAL_ROUNDS:
            return True
        plain_s = self._figures.plain_s(len(self._answer_ids))
        if plain_s is None:
            return len(self._answer_ids) >= _MIN_LENGTH * self._num_rounds
        return self._clock() - self._started_s <= _PATIENCE * plain_s

    # -------------------------------------------------------------------------------------------- text

    async def _text_of(self, token: NextToken) -> str:
        """The text that a token completes; bytes of an incomplete character are held back, except at the end."""
        if not self._held_ids and (token.is_end or (token.text and _UNDECODED not in token.text)):
            return "" if token.is_end else token.text
        if not token.is_end:
            self._held_ids.append(token.token_id)
        return await self._decode_held()

    async def _decode_held(self) -> str:
        text, num_shown = await self._endpoint.decode(self._held_ids), len(self._held_ids)
        if text.endswith(_UNDECODED) and self._finish is None:
            text, num_shown = await self._decodable(self._held_ids, text)
        del self._held_ids[:num_shown]
        return text

    async def _decodable(self, held: list[int], text: str) -> tuple[str, int]:
        """What no later byte can change, and of how many tokens; nothing while it may still become a character."""
        if len(held) <= _MAX_HELD:
            return "", 0
        for num_tokens in range(len(held) - _CHARACTER_TOKENS + 1, 0, -1):
            part = await self._endpoint.decode(held[:num_tokens])
            if text.startswith(part):
                return part, num_tokens
        return "", 0

    # ------------------------------------------------------------------------------------------ alone

    async def _alone(self, failure: Fallback | None) -> AsyncGenerator[StreamEvent]:
        """The rest of the answer, after what is confirmed; without a `Finish` where `_finish` is set on the way."""
        if failure is not None:
            yield failure
        elif self._feed.failure is not None:
            yield Fallback(self._feed.failure)
        async with aclosing(self._complete_character()) as events:
            async for event in events:
                yield event
        if self._finish is not None:
            return
        plain = resume_plain(
            self._target,
            self._endpoint,
            self._request,
            prompt_ids=self._prompt_ids,
            answer_ids=self._answer_ids,
            text=self._text,
        )
        async with aclosing(self._measured(plain)) as events:
            async for event in events:
                yield event

    async def _complete_character(self) -> AsyncGenerator[StreamEvent]:
        """Token by token up to the end of a character, so that the text of all that follows begins with a whole one.

        Where no call gives the next token the beginning of the character is given up, and written anew.
        """
        try:
            while self._held_ids and self._finish is None:
                text = await self._confirm(await self._next_token())
                if text:
                    yield self._shown(text, "plain")
        except BudgetError:
            raise  # it ends the answer
        except LlmSpecError:
            if self._finish is not None:
                raise
            num_held = len(self._held_ids)
            self._held_ids, self._answer_ids = [], self._answer_ids[:-num_held]
            if self._request.sampling.temperature != 0:  # greedily the same tokens come again
                yield Weakened("lossy", "the beginning of a character was lost, and drawn again")

    async def _next_token(self) -> NextToken:
        """The target's own token after all that is confirmed."""
        context_ids = [*(self._prompt_ids or ()), *self._answer_ids]
        sampling = replace(self._request.sampling, seed=None)  # with one seed all of these calls draw the same noise
        try:
            return (await self._endpoint.sample_next([context_ids], sampling))[0]
        except LlmSpecError:
            request = replace(self._request, sampling=sampling, max_tokens=1, stop=())
            return await stream_one_token(self._endpoint, context_ids, request)

    async def _measured(self, plain: AsyncGenerator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        """The target alone: its speed is what rounds are measured by next time."""
        watch = self._figures.open_stream()
        async with aclosing(plain) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    watch.tick(1)
                yield event


def _origin(sent: _Sent, drafted_id: int | None, *, is_accepted: bool) -> Origin:
    if is_accepted:
        return "accepted"
    if not sent.drafted_ids:
        return "plain"
    return "bonus" if drafted_id is None else "correction"
