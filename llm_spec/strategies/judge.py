"""`judge`: the target reads a draft and says how much of it stands, instead of writing all of it.

For targets that can only chat. What it approves it has not written, so the text is `judged`, not exact: opt-in. One
short answer of the target decides about many tokens; where it costs less to read than to write, that saves money.
Anything that is not exactly a verdict ends the judging, and the target goes on alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Final

from llm_spec.contract.draft import DraftProvider, get_draft_capabilities
from llm_spec.contract.errors import InvalidRequestError, TargetError, TransientError, format_error_line
from llm_spec.contract.events import Fallback, Finish, Round, StreamEvent, TextDelta, Usage
from llm_spec.contract.messages import ChatMessage
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.response import complete_from_stream
from llm_spec.drafting.background_draft import BackgroundDraft
from llm_spec.drafting.draft_call import choose_max_draft_tokens
from llm_spec.local.detokenizing import StopMatcher
from llm_spec.measure.baseline import count_prompt_characters
from llm_spec.measure.clock import get_loop_clock
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext, TextGuarantee
from llm_spec.strategies.judge_verdict import (
    JudgedDraft,
    JudgeVerdict,
    cut_at_control_character,
    make_verdict_request,
    parse_verdict,
    split_into_passages,
)
from llm_spec.strategies.plain import stream_plain
from llm_spec.strategies.resume_plain import can_target_continue_text, continue_by_text, skip_repeated_text

__all__ = ["prepare_or_refuse"]

_MAX_PASSAGES: Final = 64  # shown at a time …
_MAX_CHARACTERS: Final = 60_000  # … and of so many characters, the first one whole
_CONTINUE_PROMPT: Final = (
    "Your answer broke off. Go on exactly where it ends: write only what follows, without repeating anything, "
    "without a remark."
)


def prepare_or_refuse(context: StrategyContext) -> ReadyStrategy | Refusal:
    """Any target, any draft; never chosen by `auto`."""
    draft, request = context.draft, context.request
    if draft is None:
        return Refusal("there is no draft")
    if request.prefix:
        return Refusal("the request continues an answer that has begun")
    unsupported = {
        "raw": request.raw,
        "tools": request.tools,
        "response_format": request.response_format,
        "top_logprobs": request.top_logprobs is not None,
    }
    name = next((name for name, value in unsupported.items() if value), None)
    if name is not None:
        return Refusal(f"the request sets {name}")
    return ReadyStrategy(TextGuarantee("judged", same_text=False), partial(_open_judged_answer, context, draft))


@asynccontextmanager
async def _open_judged_answer(
    context: StrategyContext, draft: DraftProvider
) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    judging = _JudgedAnswer(context, draft)
    try:
        async with aclosing(judging.stream_answer_events()) as events:
            yield events
    finally:
        await judging.aclose()


class _JudgedAnswer:
    """One request."""

    def __init__(self, context: StrategyContext, draft: DraftProvider) -> None:
        request, limits = context.request, context.limits
        self._target = context.target
        self._request = request
        self._limits = limits
        self._pair_stats = context.pair_stats
        self._clock = get_loop_clock()
        self._started_s = self._clock()
        self._changed = asyncio.Event()
        self._background_draft = BackgroundDraft(
            draft,
            request,
            max_tokens=limits.max_draft_tokens,
            timeout_s=limits.draft_timeout_s,
            changed=self._changed.set,
        )
        self._continues_prefix = get_draft_capabilities(draft).continues_prefix
        self._draft = JudgedDraft()
        self._remaining_draft_text: str | None = None  # of what was drafted and not judged yet; None: to be drafted
        self._later_draft_text = ""  # what the draft had written behind the last passage judged
        self._matcher = StopMatcher(request.stop)
        self._text = ""
        self._num_approved = 0  # characters of it
        self._num_tokens = 0
        self._num_approved_tokens = 0
        self._num_written_tokens = 0  # in verdicts, for the answer
        self._finish: Finish | None = None
        self._fallback: str | None = None

    async def stream_answer_events(self) -> AsyncGenerator[StreamEvent]:
        """The answer."""
        for index in range(self._limits.judge.max_rounds):
            self._fallback = self._describe_slowness_if_late()
            if self._fallback is not None:
                break
            started_s = self._clock()
            await self._fill_passages_to_judge()
            passages = self._draft.undecided_passages
            if not passages:
                break
            drafted_s = self._clock()
            verdict = await self._request_verdict()
            if verdict is None:
                self._fallback = self._fallback or "the target's answer was no verdict"
                break
            accepted = passages[: self._count_allowed_passages(passages, verdict.num_accepted)]
            for event in self._add_accepted_passages(
                accepted, verdict, is_last=index + 1 == self._limits.max_iterations
            ):
                yield event
            report = _make_round_of_passages(index, passages, accepted, verdict)
            yield replace(report, draft_s=drafted_s - started_s, verify_s=self._clock() - drafted_s)
            if self._finish is not None:
                break
            self._advance_past_judged_passages(passages, verdict)
            if len(accepted) < max(self._limits.judge.min_accepted * len(passages), verdict.num_accepted):
                break
        if self._background_draft.failure is not None or self._fallback is not None:
            yield Fallback(self._background_draft.failure or self._fallback or "")
        async with aclosing(self._stream_target_alone()) as events:
            async for event in events:
                yield self._make_finish_with_whole_usage(event) if isinstance(event, Finish) else event

    async def aclose(self) -> None:
        """End the draft, and wait until it is closed."""
        await self._background_draft.aclose()

    # ---------------------------------------------------------------------------------------- judging

    def _describe_slowness_if_late(self) -> str | None:
        """How far the answer has fallen behind the target's own pace; None: not, or that was not measured yet."""
        plain_s = self._pair_stats.baseline.estimate_answer_s(count_prompt_characters(self._request), self._num_tokens)
        elapsed_s = self._clock() - self._started_s
        if not self._text or plain_s is None or elapsed_s <= plain_s:
            return None
        return f"slower: judging took {elapsed_s:.3g} s for what takes the target alone {plain_s:.3g} s"

    async def _fill_passages_to_judge(self) -> None:
        """What the draft says comes next, as far as it is shown at once, where nothing is left to be decided."""
        if self._remaining_draft_text is not None and self._draft.undecided_passages:
            return
        if self._remaining_draft_text is None:
            self._background_draft.restart(self._text, choose_max_draft_tokens(self._request))
            await self._wait_for_draft()
            self._remaining_draft_text = self._background_draft.text or self._later_draft_text
        text = cut_at_control_character(self._remaining_draft_text)
        passages = split_into_passages(text)
        sizes = accumulate(len(passage) for passage in passages)
        num_shown = min(max(1, sum(size <= _MAX_CHARACTERS for size in sizes)), _MAX_PASSAGES)
        is_whole = (
            num_shown >= len(passages) and text == self._remaining_draft_text and self._background_draft.is_complete
        )
        self._draft = JudgedDraft(self._text, passages[:num_shown], is_whole)

    async def _wait_for_draft(self) -> None:
        """Until it has ended, or has had its time; then what it wrote by now is judged."""
        timeout_s = self._limits.draft_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not self._background_draft.ended:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._background_draft.abandon_as_late(f"late: the draft took longer than {timeout_s:.3g} s")

    def _advance_past_judged_passages(self, passages: list[str], verdict: JudgeVerdict) -> None:
        """What is judged next: the rest of the draft; a new one where the old was of no use."""
        is_replaced = verdict.num_accepted < len(passages)
        done = passages[: verdict.num_accepted + is_replaced]
        self._draft.num_settled += len(done)
        if is_replaced:
            self._draft.replaced[self._draft.num_settled] = verdict.replacement or ""
        self._later_draft_text = (self._remaining_draft_text or "")[sum(map(len, done)) :]
        is_useless = not self._later_draft_text or not verdict.num_accepted
        self._remaining_draft_text = (
            None if is_replaced and is_useless and self._continues_prefix else self._later_draft_text
        )

    async def _request_verdict(self) -> JudgeVerdict | None:
        """The target's verdict about the passages that are open, counted from the first of them."""
        nonce, draft = os.urandom(8).hex(), self._draft
        with_schema = self._target.capabilities.response_format
        question = make_verdict_request(self._request, draft, nonce=nonce, with_schema=with_schema)
        try:
            answer = await complete_from_stream(self._target, question)
        except (InvalidRequestError, TargetError) as error:  # perhaps it is only the question: it is too long, say
            self._fallback = format_error_line(error)
            return None
        if answer.finish_reason != "stop" or answer.message.tool_calls:
            return None
        verdict = parse_verdict(answer.content, nonce=nonce, lowest=draft.num_settled, highest=len(draft.passages))
        if verdict is None or (verdict == JudgeVerdict(0, None) and not self._text):
            return None  # an answer without a word is none
        return replace(verdict, num_accepted=verdict.num_accepted - draft.num_settled)

    def _count_allowed_passages(self, passages: list[str], num_accepted: int) -> int:
        """How many of the accepted passages may be used, by the share of the answer that may be approved only."""
        most = self._limits.judge.max_share * (len(self._text) + sum(map(len, passages)))
        sizes = accumulate(len(passage) for passage in passages[:num_accepted])
        return sum(self._num_approved + size <= most for size in sizes)

    def _add_accepted_passages(self, accepted: list[str], verdict: JudgeVerdict, *, is_last: bool) -> list[StreamEvent]:
        """Add to the answer what was accepted and what the target wrote; the end, where that is one.

        `is_last`: no further round may be made.
        """
        out: list[StreamEvent] = []
        for passage in accepted:
            out += self._add_text_and_list_shown(TextDelta(passage, "accepted"))
        if self._finish is None and len(accepted) == verdict.num_accepted:
            if verdict.replacement is not None:
                out += self._add_text_and_list_shown(TextDelta(verdict.replacement, "correction"))
            elif self._draft.is_whole or len(accepted) < len(self._draft.undecided_passages):
                out += self._matcher.flush()
                self._finish = Finish("stop", None, "eos")
        if is_last and self._finish is None:
            out += self._matcher.flush()
            self._finish = Finish("length", None, "max_iterations")
        return out

    def _add_text_and_list_shown(self, delta: TextDelta) -> list[TextDelta]:
        """What may be shown of a piece, within the request's limits."""
        if self._finish is not None:
            return []
        pieces = split_into_pieces(delta.text)
        num_pieces_left = (
            len(pieces) if self._request.max_tokens is None else self._request.max_tokens - self._num_tokens
        )
        text = "".join(pieces[:num_pieces_left]) if num_pieces_left < len(pieces) else delta.text
        self._num_tokens += min(num_pieces_left, len(pieces))
        self._text += text
        if delta.origin == "accepted":
            self._num_approved += len(text)
            self._num_approved_tokens += min(num_pieces_left, len(pieces))
        else:
            self._num_written_tokens += min(num_pieces_left, len(pieces))
        shown = self._matcher.push(text, delta.origin)
        if self._matcher.matched is not None:
            self._finish = Finish("stop", None, "stop_string", stop_string=self._matcher.matched)
        elif self._request.max_tokens is not None and self._num_tokens >= self._request.max_tokens:
            shown = [*shown, *self._matcher.flush()]
            self._finish = Finish("length", None, "max_tokens")
        return shown

    # ------------------------------------------------------------------------------------------ alone

    async def _stream_target_alone(self) -> AsyncGenerator[StreamEvent]:
        """What the target writes from here on, or all of it; only the end if verdicts have completed the answer."""
        if self._finish is not None:
            yield self._finish
            return
        if not self._text:
            async with stream_plain(self._target, self._request, self._limits) as events:
                async for event in events:
                    yield event
            return
        max_tokens_left = None if self._request.max_tokens is None else self._request.max_tokens - self._num_tokens
        request = replace(self._request, max_tokens=max_tokens_left, stop=())
        async with aclosing(self._stream_rest_of_answer(request)) as events:
            async for event in events:
                for shown_event in self._matcher.filter_event(event):
                    if isinstance(shown_event, Finish):
                        for held_delta in self._matcher.flush():
                            yield held_delta
                    yield shown_event
                if self._matcher.matched is not None:
                    yield Finish("stop", None, "stop_string", stop_string=self._matcher.matched)
                    return

    async def _stream_rest_of_answer(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        if await self._can_target_continue_text():
            async with aclosing(continue_by_text(self._target, request, self._text)) as events:
                async for event in events:
                    yield event
            return
        sent = self._text.rstrip()
        extra_messages = (ChatMessage("assistant", sent), ChatMessage("user", _CONTINUE_PROMPT))
        chat = self._target.stream(replace(request, messages=(*request.messages, *extra_messages)))
        async with chat as written, aclosing(skip_repeated_text(written, self._text[len(sent) :])) as rest:
            async for event in rest:
                yield event

    async def _can_target_continue_text(self) -> bool:
        try:
            return await can_target_continue_text(self._target)
        except TransientError:  # it cannot be tried now; what follows asks for no continuation
            return False

    def _make_finish_with_whole_usage(self, finish: Finish) -> Finish:
        """The end, with the tokens of all of the answer where those of its rest were counted."""
        if finish.usage is None or not self._text:
            return finish
        num_written = self._num_written_tokens + finish.usage.output_tokens
        own = Usage(output_tokens=num_written, approved_output_tokens=self._num_approved_tokens)
        return replace(finish, usage=own)


def _make_round_of_passages(index: int, passages: list[str], accepted: list[str], verdict: JudgeVerdict) -> Round:
    """A round in pieces that stand for tokens."""
    num_accepted = len(split_into_pieces("".join(accepted)))
    is_written = len(accepted) == verdict.num_accepted
    return Round(
        index=index,
        num_draft_tokens=len(split_into_pieces("".join(passages))),
        num_accepted_tokens=num_accepted,
        num_emitted_tokens=num_accepted + (len(split_into_pieces(verdict.replacement or "")) if is_written else 0),
    )
