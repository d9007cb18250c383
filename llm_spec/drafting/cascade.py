"""Several drafts as one: round by round, the first that is sure enough drafts.

A draft that takes time is left out for a while where that was more than the steps that it saved. Among those that pay
the rule does not measure. Choosing by expected tokens per second, from each draft's own acceptance and time as measured
in the request, was tried: with the built-in pair (60 prompts, greedy, both rules in one run) it was 0.1 % to 1.3 %
slower, because a request ends before there is much to learn; replayed with drafts that take .06 to .3 of a step a
token, it was within 2 % of this rule, but for the dearest drafts of sampled answers (3 % better).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from copy import deepcopy
from functools import partial
from time import perf_counter
from typing import Final

from llm_spec._checks import check_number
from llm_spec._iterators import as_closable_generator
from llm_spec.chat import ChatRequest
from llm_spec.contract.draft import DraftCapabilities, DraftPiece, DraftProvider, get_draft_capabilities
from llm_spec.contract.local import DraftToken, TokenDraft, TokenModel, TokenSampler
from llm_spec.drafting.optional_members import (
    RequestOptionalDrafter,
    copy_draft_for_new_client,
    find_token_draft_refusal,
    open_draft_for_request,
    open_token_draft,
)
from llm_spec.drafting.token_checks import check_draft_token, get_confidence_before_sampling
from llm_spec.errors import ConfigError
from llm_spec.tokens.statistics import AcceptanceEstimate, RobustTokenCostAverage

__all__ = ["CascadeDraft"]

_MIN_TURNS: Final = 3  # of a draft that takes time, before it is judged
_SETTLED_TURNS: Final = 16  # a draft that paid for so long is left out for a short while again, if ever
_FIRST_PAUSE: Final = 32  # turns that it is left out of, at least; twice as many each time …
_LAST_PAUSE: Final = 1024
_TRIAL_SHARE: Final = 0.03  # of a plain step that each turn adds to its credit, whoever has it
_KEEP: Final = 0.9  # of what it won and took, from one turn to the next
_STEP_GROWTH: Final = 1.05  # of the shortest step, at each step: the machine may have become slower
_PRIOR_ACCEPTANCE: Final = 0.5
_PRIOR_WEIGHT: Final = 4.0  # tokens
_ACCEPTANCE_HALF_LIFE: Final = 48.0  # judged tokens
_TOKEN_COST_HALF_LIFE: Final = 16.0  # tokens
_READING_COST_HALF_LIFE: Final = 4.0  # answers
_PRIOR_READING_COST: Final = 0.02  # plain steps for each token of a prompt that is read at once
_PRIOR_GAIN: Final = 0.1  # plain steps that a turn wins
_MAX_CREDIT: Final = 2.0  # plain steps that it may lose in an answer of any length


class CascadeDraft(RequestOptionalDrafter):
    """Cheap drafts first: `CascadeDraft(PromptLookup(), ProviderDraft(model))` asks the model where lookup is unsure.

    Drafts that ask no model come before those that do, whatever the order they are given in; else that order holds.
    A round is drafted by the first of `drafts` whose confidence in its first token is at least `min_confidence`
    (one that cannot say counts as sure), else by the last. Where that token was drawn from a distribution, the
    confidence is that in the likeliest token, whichever was drawn. Text drafts: the first that writes anything.

    For a local target a draft that asks a model reads the prompt when it is first needed. It drafts no further than its
    tokens are likely to save more time than they take, and is left out while it takes longer than the steps that it
    saves; how long, the next answers know.
    """

    def __init__(self, *drafts: DraftProvider, min_confidence: float = 0.65) -> None:
        check_number(ConfigError, "number of drafts", len(drafts), 1, integer=True)
        check_number(ConfigError, "min_confidence", min_confidence, 0.0, 1.0)
        self._drafts = tuple(sorted(drafts, key=lambda draft: not get_draft_capabilities(draft).is_free))
        self._min_confidence = min_confidence
        self._has_fallback_draft = True
        self._worths = [_DraftWorth() for _ in drafts]  # of each, as the last answer left them; of all its requests

    @property
    def name(self) -> str:
        return "+".join(draft.name for draft in self._drafts)

    @property
    def capabilities(self) -> DraftCapabilities:
        """What all of its drafts do; the last one's model, if it has one, with the other drafts as its companion."""
        each = [get_draft_capabilities(draft) for draft in self._drafts]
        model = each[-1].token_model if len(each) > 1 else None
        return DraftCapabilities(
            continues_prefix=all(can.continues_prefix for can in each),
            is_free=all(can.is_free for can in each),
            drafts=self._drafts,
            token_model=model,
            tells_second_choices=any(can.tells_second_choices for can in each),
            companion=None if model is None else self._copy_without_last_draft(),
        )

    def for_request(self) -> CascadeDraft:
        joined = CascadeDraft(*map(open_draft_for_request, self._drafts), min_confidence=self._min_confidence)
        joined._worths = self._worths
        return joined

    def copy_for_new_client(self) -> CascadeDraft:
        return CascadeDraft(*map(copy_draft_for_new_client, self._drafts), min_confidence=self._min_confidence)

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with aclosing(self._stream_first_nonempty_draft(request, max_tokens)) as pieces:
            yield pieces

    async def aclose(self) -> None:
        async with AsyncExitStack() as stack:
            for draft in self._drafts:
                stack.push_async_callback(draft.aclose)

    def token_draft_refusal(self, target: TokenModel) -> str | None:
        for draft in self._drafts:
            if (refusal := find_token_draft_refusal(draft, target)) is not None:
                return refusal
        return None

    def open_token_draft_for_request(
        self,
        request: ChatRequest | None,
        target: TokenModel,
        choose: TokenSampler,
        prompt_ids: Sequence[int],
    ) -> TokenDraft:
        are_free = [get_draft_capabilities(draft).is_free for draft in self._drafts]
        opened: list[TokenDraft] = []
        try:
            for draft, is_free in zip(self._drafts, are_free, strict=True):
                open_now = partial(open_token_draft, draft, target, choose, request=request)
                opened.append(open_now(prompt_ids) if is_free else _LateTokenDraft(open_now))
        except BaseException:
            _close_token_drafts(opened)
            raise
        return _CascadeTokenDraft(
            opened,
            are_free,
            self._worths,
            self._min_confidence,
            vocab_size=target.vocab_size,
            has_fallback_draft=self._has_fallback_draft,
        )

    def _copy_without_last_draft(self) -> CascadeDraft:
        """The other drafts; none of them drafts unless it is sure."""
        others = CascadeDraft(*self._drafts[:-1], min_confidence=self._min_confidence)
        others._has_fallback_draft = False
        return others

    async def _stream_first_nonempty_draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[DraftPiece]:
        for draft in self._drafts:
            written, is_free = False, get_draft_capabilities(draft).is_free
            async with draft.draft(request, max_tokens) as pieces:
                async for piece in pieces:
                    written = written or bool(piece.text)
                    if written or draft is self._drafts[-1]:
                        yield piece._replace(is_free=is_free)
                    elif piece.usage is not None:  # of a model that had nothing to say
                        yield piece._replace(finish_reason=None)
            if written:
                return


class _LateTokenDraft:
    """A draft that is opened when its first token is asked for, and reads the prompt, and what followed it, then."""

    def __init__(self, open_draft: Callable[[Sequence[int]], TokenDraft]) -> None:
        self._open_draft = open_draft
        self._draft: TokenDraft | None = None

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        if self._draft is None:
            self._draft = self._open_draft(context_ids)
        yield from self._draft.propose(context_ids)

    def close(self) -> None:
        if self._draft is not None:
            self._draft.close()


class _CascadeTokenDraft:
    """One answer's joined drafts. `worths` are those of the drafts: they are read now, and replaced at the end."""

    def __init__(
        self,
        drafts: Sequence[TokenDraft],
        are_free: Sequence[bool],
        worths: list[_DraftWorth],
        min_confidence: float,
        *,
        vocab_size: int,
        has_fallback_draft: bool,
    ) -> None:
        self._drafts = drafts
        self._known_worths = worths
        self._worths = [
            None if is_free else _copy_for_new_answer(worth) for is_free, worth in zip(are_free, worths, strict=True)
        ]
        self._vocab_size = vocab_size
        self._min_confidence = min_confidence
        self._has_fallback_draft = has_fallback_draft
        self._chosen: _DraftWorth | None = None  # of the draft that proposed the round's tokens, if it takes time
        self._proposed: list[int] = []
        self._num_context = 0
        self._ended_s: float | None = None  # when the last round's proposal ended
        self._step_s: float | None = None

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        self._judge_last_round(context_ids)
        with contextlib.ExitStack() as stack:
            stack.callback(self._note_proposal_end)
            # all of them, since a draft learns of answers that it had no part in
            proposals = [
                stack.enter_context(contextlib.closing(as_closable_generator(draft.propose(context_ids))))
                for draft in self._drafts
            ]
            last_resort = proposals[-1] if self._has_fallback_draft else None
            for known in filter(None, self._worths):
                known.turn_s = 0.0
            for guesses, worth in zip(proposals, self._worths, strict=True):
                if worth is not None and not worth.take_turn(len(context_ids)):
                    continue
                tokens = guesses if worth is None else worth.draft_while_it_pays(guesses, self._step_s)
                first = next(tokens, None)
                if first is not None and (guesses is last_resort or self._is_confident_enough(first)):
                    self._chosen = worth
                    for token in itertools.chain([first], tokens):
                        self._proposed.append(token.token_id)
                        yield token
                    return

    @property
    def self_paced_s(self) -> float:
        """Seconds of the drafts that take time, each of which weighs them."""
        return sum(worth.turn_s for worth in self._worths if worth is not None)

    def close(self) -> None:
        for index, worth in enumerate(self._worths):
            if worth is not None:
                self._known_worths[index] = worth
        _close_token_drafts(self._drafts)

    def _note_proposal_end(self) -> None:
        self._ended_s = perf_counter()

    def _judge_last_round(self, context_ids: Sequence[int]) -> None:
        """What became of the last round's proposal: how many tokens more than a plain step it brought, and when."""
        if self._ended_s is not None:
            last_s, num_new = perf_counter() - self._ended_s, len(context_ids) - self._num_context
            if num_new <= len(self._proposed) + 1:  # else plain steps came between
                self._step_s = last_s if self._step_s is None else min(last_s, _STEP_GROWTH * self._step_s)
            pairs = zip(self._proposed, context_ids[self._num_context :], strict=False)
            num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if self._chosen is not None:
                self._chosen.judge_tokens(num_right, is_wrong=num_right < min(len(self._proposed), num_new))
            if self._step_s:
                verifying_s = min(max(last_s - self._step_s, 0.0), self._step_s)  # more than one may be a hiccup
                won_s = min(num_right, num_new - 1) * self._step_s - verifying_s
                for worth in filter(None, self._worths):
                    worth.end_turn(won_s if worth is self._chosen else 0.0, self._step_s)
        self._chosen, self._num_context = None, len(context_ids)
        self._proposed.clear()

    def _is_confident_enough(self, token: DraftToken) -> bool:
        # a token must not be dropped for what was drawn: that would favour the likely ones (see `token_checks`)
        confidence = get_confidence_before_sampling(check_draft_token(token, self._vocab_size))
        return confidence is None or confidence >= self._min_confidence


class _DraftWorth:
    """What a draft has won and what it took, in this answer and those before: it is left out where that was more.

    Before its first turn of an answer it has to read the prompt. It does so once as many turns as it could have had
    would have won what reading takes: as the answer's length is not known, it is taken to be half over at any time.
    What it may lose at once is its credit, a few plain steps; that grows by what it wins, and slowly by itself.
    """

    def __init__(self) -> None:
        self._acceptance = AcceptanceEstimate(
            half_life=_ACCEPTANCE_HALF_LIFE, prior=_PRIOR_ACCEPTANCE, prior_weight=_PRIOR_WEIGHT
        )
        self._token_s = RobustTokenCostAverage(half_life=_TOKEN_COST_HALF_LIFE)
        self._reading_steps = RobustTokenCostAverage(half_life=_READING_COST_HALF_LIFE)  # of a token
        self._gain = _PRIOR_GAIN  # plain steps that a turn has won, of late
        self._credit = _MAX_CREDIT  # plain steps
        self._num_turns_left_out = 0
        self._pause = _FIRST_PAUSE  # turns that it is left out of the next time
        self._num_turns = 0  # since then, …
        self._won_s = self._taken_s = 0.0  # … and what they won and took, of late
        self.begin_answer()

    def begin_answer(self) -> None:
        """Nothing is read yet."""
        self._num_waiting = 0  # turns that it could have had before it read the prompt
        self._has_read = False
        self._is_reading = False  # in this turn: what it has missed, …
        self._num_reading = 0  # … which are so many tokens, if that is known
        self._reading_s = 0.0
        self.turn_s = 0.0  # that this round has taken so far

    def take_turn(self, num_context: int) -> bool:
        """Whether it may draft in this round, in which those before it do not; the context has so many tokens."""
        self._add_credit(_TRIAL_SHARE)
        if self._num_turns_left_out:
            self._num_turns_left_out -= 1
            self._is_reading = self._has_read
            return False
        if not self._has_read:
            token_steps = self._reading_steps.value
            reading_steps = num_context * (_PRIOR_READING_COST if token_steps is None else token_steps)
            if reading_steps > self._credit + max(self._gain, 0.0) * self._num_waiting:
                self._num_waiting += 1
                return False
            self._has_read = self._is_reading = True
            self._num_reading = num_context
        return True

    def draft_while_it_pays(self, guesses: Iterator[DraftToken], step_s: float | None) -> Iterator[DraftToken]:
        """Its tokens, until the next is likely to take more time than it saves of a step; they are timed."""
        survival = 1.0
        started_s = perf_counter()
        for token in guesses:
            self._add_token(perf_counter() - started_s)
            yield token
            token_s, rate = self._token_s.value, self._acceptance.rate
            confidence = get_confidence_before_sampling(token)
            survival *= rate if confidence is None else (rate + confidence) / 2.0
            if step_s and token_s is not None and survival * rate * step_s < token_s:
                return
            started_s = perf_counter()
        self.turn_s += perf_counter() - started_s

    def judge_tokens(self, num_right: int, *, is_wrong: bool) -> None:
        """Of the tokens that it drafted so many were right, and whether the next was wrong."""
        self._acceptance.update(num_right, rejected=is_wrong)

    def end_turn(self, won_s: float, step_s: float) -> None:
        """The round has ended in which it may have had a turn, and won so much time by it."""
        if not self.turn_s:
            return
        gain = (won_s - self.turn_s) / step_s
        if self._num_reading and self._token_s.value is not None:
            reading_s = max(self._reading_s - self._token_s.value, 0.0)  # a token was drafted, too
            self._reading_steps.update(self._num_reading, reading_s / step_s)
            self._num_reading = 0
        if self._is_reading:
            self._is_reading = False
            # what reading takes beyond the credit, the turns before it were worth
            self._add_credit(max(gain, -max(self._credit, 0.0)))
            return
        self._add_credit(gain)
        self._num_turns += 1
        self._won_s = _KEEP * self._won_s + won_s
        self._taken_s = _KEEP * self._taken_s + self.turn_s
        self._gain = _KEEP * self._gain + (1.0 - _KEEP) * gain
        if self._num_turns >= _MIN_TURNS and self._won_s < self._taken_s:
            self._num_turns_left_out = max(self._pause, round(-self._credit / _TRIAL_SHARE))
            self._pause = min(2 * self._pause, _LAST_PAUSE)
            self._num_turns, self._won_s, self._taken_s = 0, 0.0, 0.0
        elif self._num_turns >= _SETTLED_TURNS:
            self._pause = _FIRST_PAUSE

    def _add_token(self, seconds: float) -> None:
        if self._is_reading and not self.turn_s:
            self._reading_s = seconds
        else:
            self._token_s.update(1, seconds)
        self.turn_s += seconds

    def _add_credit(self, num_steps: float) -> None:
        self._credit = min(self._credit + num_steps, _MAX_CREDIT)


def _copy_for_new_answer(worth: _DraftWorth) -> _DraftWorth:
    copied = deepcopy(worth)
    copied.begin_answer()
    return copied


def _close_token_drafts(drafts: Sequence[TokenDraft]) -> None:
    """Close each of them, whatever the others raise."""
    with contextlib.ExitStack() as stack:
        for draft in drafts:
            stack.callback(draft.close)
