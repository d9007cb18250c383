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
from typing import Final

from llm_spec.contract.checks import check_number
from llm_spec.contract.draft import DraftCapabilities, DraftPiece, DraftProvider, get_draft_capabilities
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.optional import (
    RequestOptionalDrafter,
    copy_draft_for_new_client,
    find_token_draft_refusal,
    open_draft_for_request,
    open_token_draft,
)
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.token_model import DraftToken, SelfPacedTokenDraft, TokenDraft, TokenModel, TokenSampler
from llm_spec.drafting.draft_worth import DraftWorth
from llm_spec.local.propose import check_draft_token, get_confidence_before_sampling
from llm_spec.local.threads import as_closable_generator

__all__ = ["CascadeDraft"]

_STEP_GROWTH: Final = 1.05  # of the shortest step, at each plain one: the machine may have become slower


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
        self._worths = [DraftWorth() for _ in drafts]  # of each, as the last answer left them; of all its requests

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
        are_free, prompt = [get_draft_capabilities(draft).is_free for draft in self._drafts], tuple(prompt_ids)
        opened: list[TokenDraft] = []
        try:
            for draft, is_free in zip(self._drafts, are_free, strict=True):
                open_now = partial(open_token_draft, draft, target, choose, prompt, request=request)
                opened.append(open_now() if is_free else _LateTokenDraft(open_now))
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
    """A draft that is opened when its first token is asked for, and reads the prompt then."""

    def __init__(self, open_draft: Callable[[], TokenDraft]) -> None:
        self._open_draft = open_draft
        self._draft: TokenDraft | None = None
        self._self_paced: SelfPacedTokenDraft | None = None  # the draft, if it is one

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        if self._draft is None:
            self._draft = draft = self._open_draft()
            self._self_paced = draft if isinstance(draft, SelfPacedTokenDraft) else None
        yield from self._draft.propose(context_ids)

    def end_round(self, token_ids: Sequence[int], verify_s: float) -> None:
        """Report the round to the draft, if it takes reports."""
        if self._self_paced is not None:
            self._self_paced.end_round(token_ids, verify_s)

    def close(self) -> None:
        if self._draft is not None:
            self._draft.close()


class _CascadeTokenDraft:
    """One answer's joined drafts. `worths` are those of the drafts: they are read now, and replaced at the end."""

    def __init__(
        self,
        drafts: Sequence[TokenDraft],
        are_free: Sequence[bool],
        worths: list[DraftWorth],
        min_confidence: float,
        *,
        vocab_size: int,
        has_fallback_draft: bool,
    ) -> None:
        self._drafts = drafts
        self._known_worths = worths
        self._worths = [None if is_free else deepcopy(worth) for is_free, worth in zip(are_free, worths, strict=True)]
        for worth in self._timed_worths:
            worth.begin_answer()
        self._vocab_size = vocab_size
        self._min_confidence = min_confidence
        self._has_fallback_draft = has_fallback_draft
        self._chosen: DraftWorth | None = None  # of the draft that proposed the round's tokens, if it takes time
        self._proposed: list[int] = []
        self._step_s = next((worth.step_s for worth in self._timed_worths), None)

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        self._chosen = None
        self._proposed.clear()
        with contextlib.ExitStack() as stack:
            # all of them: the free ones learn of what others drafted, too
            proposals = [
                stack.enter_context(contextlib.closing(as_closable_generator(draft.propose(context_ids))))
                for draft in self._drafts
            ]
            last_resort = proposals[-1] if self._has_fallback_draft else None
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
        return sum(worth.turn_s for worth in self._timed_worths)

    def end_round(self, token_ids: Sequence[int], verify_s: float) -> None:
        """What became of the proposal: the steps that it saved, less what verifying took more than a step."""
        pairs = zip(self._proposed, token_ids, strict=False)
        num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._chosen is not None:
            self._chosen.judge_tokens(num_right, is_wrong=num_right < min(len(self._proposed), len(token_ids)))
        growth = 1.0 if self._proposed else _STEP_GROWTH
        step_s = min(verify_s, growth * self._step_s) if self._step_s else verify_s
        verifying_s = min(verify_s - step_s, step_s)  # more than one may be a hiccup
        won_s = min(num_right, len(token_ids) - 1) * step_s - verifying_s
        self._step_s = step_s
        for draft, worth in zip(self._drafts, self._worths, strict=True):
            if worth is not None:
                worth.end_turn(won_s if worth is self._chosen else 0.0, step_s)
            if isinstance(draft, _LateTokenDraft):
                draft.end_round(token_ids, verify_s)
        self._chosen = None
        self._proposed.clear()

    @property
    def _timed_worths(self) -> Iterator[DraftWorth]:
        """Of the drafts that take time."""
        return (worth for worth in self._worths if worth is not None)

    def close(self) -> None:
        for index, worth in enumerate(self._worths):
            if worth is not None:
                worth.end_turn(0.0, self._step_s or worth.turn_s)  # of a round that did not end: the draft failed
                worth.step_s = self._step_s
                self._known_worths[index] = worth
        _close_token_drafts(self._drafts)

    def _is_confident_enough(self, token: DraftToken) -> bool:
        # a token must not be dropped for what was drawn: that would favour the likely ones (see `token_checks`)
        confidence = get_confidence_before_sampling(check_draft_token(token, self._vocab_size))
        return confidence is None or confidence >= self._min_confidence


def _close_token_drafts(drafts: Sequence[TokenDraft]) -> None:
    """Close each of them, whatever the others raise."""
    with contextlib.ExitStack() as stack:
        for draft in drafts:
            stack.callback(draft.close)
