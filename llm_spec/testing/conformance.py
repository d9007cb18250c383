"""Checks that a provider or a draft keeps the promises of `llm_spec.contract`.

Each check raises ConformanceError if a promise is broken. The checks watch from outside: the items
of a stream, the asyncio tasks left after it, and, if the caller can count them, the upstream
streams still open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.contract.events import Finish, FinishReason, StreamEvent, TextDelta
from llm_spec.contract.provider import Capabilities, LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.token_model import DraftToken, TokenDrafter, TokenModel
from llm_spec.testing.stream_checks import (
    ConformanceError,
    SubjectUnderTest,
    cancel_after_turns,
    check_cancellation,
    check_closing_twice,
    check_concurrency,
    check_early_exit,
    check_exit_by_exception,
    run_check,
)

__all__ = ["ConformanceError", "check_draft_conformance", "check_provider_conformance"]

FloatArray = NDArray[np.floating[Any]]
P = TypeVar("P", bound=LlmProvider)
D = TypeVar("D", bound=DraftProvider)

_REQUESTS: Final = tuple(
    ChatRequest.create(prompt, max_tokens=32, temperature=0.0, seed=0)
    for prompt in ("Count from one to twenty in words.", "Name the colours of the rainbow.")
)


async def check_provider_conformance(
    make: Callable[[], P],
    *,
    requests: Sequence[ChatRequest] = _REQUESTS,
    num_open: Callable[[P], int] | None = None,
    secret: str | None = None,
    patience_s: float = 30.0,
) -> None:
    """Check a provider against the docstrings of `LlmProvider`.

    `make`: makes a new provider for each promise.
    `requests`: two requests that it answers with the same text every time.
    `num_open`: returns the number of upstream streams that a provider has open.
    `secret`: an API key that `make` gave it.
    `patience_s`: the time limit for one promise.

    Raises ConformanceError if a promise is broken.
    """
    for what, check in _PROVIDER_CHECKS.items():
        provider = make()
        opened = None if num_open is None else partial(num_open, provider)
        subject = _ProviderUnderTest(num_open=opened, provider=provider, requests=requests, secret=secret)
        await run_check(subject, what, check(subject), patience_s)


async def check_draft_conformance(
    make: Callable[[], D],
    *,
    requests: Sequence[ChatRequest] = _REQUESTS,
    num_open: Callable[[D], int] | None = None,
    target: TokenModel | None = None,
    patience_s: float = 30.0,
) -> None:
    """Check a draft against the docstrings of `DraftProvider`.

    With a `target` that it can draft for, `TokenDrafter` is checked, too. The other parameters are
    those of `check_provider_conformance`.
    """
    for what, check in _DRAFT_CHECKS.items():
        draft = make()
        opened = None if num_open is None else partial(num_open, draft)
        subject = _DraftUnderTest(num_open=opened, draft=draft, requests=requests, target=target)
        await run_check(subject, what, check(subject), patience_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProviderUnderTest(SubjectUnderTest):
    provider: LlmProvider
    secret: str | None

    @property
    def name(self) -> str:
        return self.provider.name

    def open_stream(self, index: int) -> AbstractAsyncContextManager[AsyncIterator[object]]:
        return self.provider.stream(self.requests[index])

    async def aclose(self) -> None:
        await self.provider.aclose()

    async def collect_answer(self, request: ChatRequest) -> tuple[list[str], Finish]:
        """Collect the text deltas of one stream, and its finish."""
        async with self.provider.stream(request) as stream:
            events: list[object] = [event async for event in stream]
        self.require_one_finish(events)
        finish = events[-1]
        assert isinstance(finish, Finish)  # noqa: S101 - has just been required
        return [event.text for event in events if isinstance(event, TextDelta)], finish

    def require_one_finish(self, events: Sequence[object]) -> None:
        num = sum(isinstance(event, Finish) for event in events)
        self.require_promise(num == 1, f"a stream must hold exactly one Finish; it held {num}")
        self.require_promise(isinstance(events[-1], Finish), f"nothing may follow Finish; {events[-1]!r} did")


@dataclass(frozen=True, slots=True, kw_only=True)
class _DraftUnderTest(SubjectUnderTest):
    draft: DraftProvider
    target: TokenModel | None

    @property
    def name(self) -> str:
        return self.draft.name

    def open_stream(self, index: int) -> AbstractAsyncContextManager[AsyncIterator[object]]:
        return self.draft.draft(self.requests[index], _DRAFT_TOKENS)

    async def aclose(self) -> None:
        await self.draft.aclose()


# ---------------------------------------------------------------------------------------- providers


async def _check_name_and_capabilities(subject: _ProviderUnderTest) -> None:
    name, capabilities = subject.provider.name, subject.provider.capabilities
    is_text = isinstance(name, str)  # pyright: ignore[reportUnnecessaryIsInstance] - what the type promises is checked
    subject.require_promise(is_text and bool(name), f"name must be a text that is not empty; it is {name!r}")
    subject.require_promise(
        isinstance(capabilities, Capabilities),  # pyright: ignore[reportUnnecessaryIsInstance] - as above
        f"capabilities must be Capabilities; it is {capabilities!r}",
    )


async def _check_secret_is_hidden(subject: _ProviderUnderTest) -> None:
    shown = f"{subject.provider!r} {subject.provider} {subject.name} {subject.provider.capabilities!r}"
    subject.require_promise(
        subject.secret is None or subject.secret not in shown, "its representation must not show a secret"
    )


async def _check_stream_ends_with_one_finish(subject: _ProviderUnderTest) -> None:
    for index in (0, 1):
        events = await subject.collect_items(index)
        for event in events:
            subject.require_promise(isinstance(event, get_args(StreamEvent)), f"{event!r} is not a stream event")
            if isinstance(event, Finish):
                known = event.finish_reason in get_args(FinishReason)
                subject.require_promise(
                    known, f"finish_reason must be one of FinishReason; it is {event.finish_reason!r}"
                )
        subject.require_one_finish(events)


async def _check_complete_equals_stream(subject: _ProviderUnderTest) -> None:
    deltas, finish = await subject.collect_answer(subject.requests[0])
    response = await subject.provider.complete(subject.requests[0])
    text = "".join(deltas)
    subject.require_promise(
        response.content == text, f"complete must give stream's text {text!r}; got {response.content!r}"
    )
    subject.require_promise(
        response.finish_reason == finish.finish_reason,
        f"complete must give stream's finish_reason {finish.finish_reason!r}; got {response.finish_reason!r}",
    )


async def _check_cancelling_complete(subject: _ProviderUnderTest) -> None:
    await cancel_after_turns(subject, lambda: subject.provider.complete(subject.requests[0]))


async def _check_max_tokens_is_kept(subject: _ProviderUnderTest) -> None:
    _, whole = await subject.collect_answer(subject.requests[0])
    _, cut = await subject.collect_answer(replace(subject.requests[0], max_tokens=2))
    if whole.usage is None or cut.usage is None:
        return
    num = cut.usage.output_tokens
    subject.require_promise(num <= 2, f"max_tokens 2 must be honoured; usage counts {num} tokens")
    if whole.usage.output_tokens > 2:
        reason = cut.finish_reason
        subject.require_promise(
            reason == "length", f"an answer cut by max_tokens must finish with 'length', not {reason!r}"
        )


async def _check_stop_string_ends_answer(subject: _ProviderUnderTest) -> None:
    deltas, _ = await subject.collect_answer(subject.requests[0])
    stop, text = _find_stop_across_deltas(deltas), "".join(deltas)
    if stop is None:
        return
    stopped, finish = await subject.collect_answer(replace(subject.requests[0], stop=(stop,)))
    got, wanted = "".join(stopped), text.partition(stop)[0]
    subject.require_promise(got == wanted, f"text must end before the stop string {stop!r}, {wanted!r}; got {got!r}")
    subject.require_promise(
        finish.finish_reason == "stop", f"a stop string must finish with 'stop', not {finish.finish_reason!r}"
    )


def _find_stop_across_deltas(deltas: Sequence[str]) -> str | None:
    """Return two adjacent characters of an answer, of different deltas if there are any.

    Across deltas is the hard case for a stop string.
    """
    seams = [left[-1] + right[0] for left, right in pairwise(deltas) if left and right]
    text = "".join(deltas)
    pairs = seams or [text[i : i + 2] for i in range(len(text) - 1)]
    return pairs[len(pairs) // 2] if pairs else None


async def _check_prefix_is_continued(subject: _ProviderUnderTest) -> None:
    if not subject.provider.capabilities.continue_prefix:
        return
    text = "".join((await subject.collect_answer(subject.requests[0]))[0])
    prefix, rest = text[: len(text) // 2].rstrip(), text[len(text) // 2 :]
    if prefix and not rest.lstrip().startswith(prefix):
        continued = "".join((await subject.collect_answer(replace(subject.requests[0], prefix=prefix)))[0])
        subject.require_promise(
            not continued.startswith(prefix), f"the prefix {prefix!r} must not be repeated in the answer"
        )


_PROVIDER_CHECKS: Final[Mapping[str, Callable[[_ProviderUnderTest], Coroutine[Any, Any, None]]]] = {
    "name and capabilities": _check_name_and_capabilities,
    "hiding secrets": _check_secret_is_hidden,
    "the end of a stream": _check_stream_ends_with_one_finish,
    "complete": _check_complete_equals_stream,
    "leaving a stream": check_early_exit,
    "leaving a stream by an exception": check_exit_by_exception,
    "two streams at once": check_concurrency,
    "cancelling a stream": check_cancellation,
    "cancelling complete": _check_cancelling_complete,
    "max_tokens": _check_max_tokens_is_kept,
    "stop strings": _check_stop_string_ends_answer,
    "continuing a prefix": _check_prefix_is_continued,
    "closing twice": check_closing_twice,
}


# ------------------------------------------------------------------------------------------- drafts

_DRAFT_TOKENS: Final = 8


async def _check_only_last_draft_piece_is_final(subject: _DraftUnderTest) -> None:
    subject.require_promise(bool(subject.name), "name must not be empty")
    pieces = await subject.collect_items(0)
    for piece in pieces:
        subject.require_promise(isinstance(piece, DraftPiece), f"{piece!r} is not a DraftPiece")
    ends = [isinstance(piece, DraftPiece) and piece.finish_reason is not None for piece in pieces]
    subject.require_promise(
        ends == [False] * (len(ends) - 1) + [True], "the last piece, and no other, must have a finish_reason"
    )


async def _check_draft_keeps_to_max_tokens(subject: _DraftUnderTest) -> None:
    pieces = [piece for piece in await subject.collect_items(0) if isinstance(piece, DraftPiece)]
    usage = pieces[-1].usage
    counted = [len(piece.token_ids) if piece.token_ids is not None else int(bool(piece.text)) for piece in pieces]
    num = sum(counted) if usage is None else usage.output_tokens
    subject.require_promise(num <= _DRAFT_TOKENS, f"a draft of at most {_DRAFT_TOKENS} tokens had {num}")


async def _check_token_drafts_of_two_requests(subject: _DraftUnderTest) -> None:
    if subject.target is None:
        return
    draft, target = subject.draft, subject.target
    if not isinstance(draft, TokenDrafter):
        raise ConformanceError(f"{subject.name}: to draft for a target it must be a TokenDrafter")
    refusal = draft.token_draft_refusal(target)
    subject.require_promise(refusal is None, f"it refuses the target {target.name}: {refusal}")
    await asyncio.to_thread(_propose_for_two_requests_at_once, subject, draft, target)


def _propose_for_two_requests_at_once(subject: _DraftUnderTest, drafter: TokenDrafter, target: TokenModel) -> None:
    """Draft for two requests at once, as their answers grow, and close the drafts."""
    prompts = [target.tokenizer.encode_chat(request) for request in _REQUESTS]
    drafts = [drafter.open_token_draft(target, _choose_best_token, prompt_ids) for prompt_ids in prompts]
    for num_confirmed in (0, 1, 3):
        for draft, prompt_ids in zip(drafts, prompts, strict=True):
            context_ids = [*prompt_ids, *target.tokenizer.encode("abc")[:num_confirmed]]
            for token, _ in zip(draft.propose(context_ids), range(4), strict=False):
                is_kept = 0 <= token.token_id < target.vocab_size
                subject.require_promise(
                    is_kept, f"drafted ids must be below {target.vocab_size}; {token.token_id} is not"
                )
    for draft in drafts:
        draft.close()


def _choose_best_token(logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:  # noqa: ARG001 - greedy
    return DraftToken(int(logits.argmax()))


_DRAFT_CHECKS: Final[Mapping[str, Callable[[_DraftUnderTest], Coroutine[Any, Any, None]]]] = {
    "the end of a draft": _check_only_last_draft_piece_is_final,
    "the length of a draft": _check_draft_keeps_to_max_tokens,
    "leaving a draft": check_early_exit,
    "leaving a draft by an exception": check_exit_by_exception,
    "two drafts at once": check_concurrency,
    "cancelling a draft": check_cancellation,
    "drafting by token": _check_token_drafts_of_two_requests,
    "closing twice": check_closing_twice,
}
