"""Does a provider or a draft keep what `llm_spec.provider` promises? Each check raises ConformanceError if not.

The checks watch from outside: what comes out of a stream, which asyncio tasks are left when it has been left, and,
where the caller can tell, how many streams are still open behind it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from llm_spec.chat import ChatRequest, Finish, FinishReason, StreamEvent, TextDelta
from llm_spec.provider import (
    Capabilities,
    DraftPiece,
    DraftProvider,
    DraftToken,
    LlmProvider,
    TokenDrafter,
    TokenModel,
)

__all__ = ["ConformanceError", "check_draft", "check_provider"]

FloatArray = NDArray[np.floating[Any]]
P = TypeVar("P", bound=LlmProvider)
D = TypeVar("D", bound=DraftProvider)

_REQUESTS: Final = tuple(
    ChatRequest.create(prompt, max_tokens=32, temperature=0.0, seed=0)
    for prompt in ("Count from one to twenty in words.", "Name the colours of the rainbow.")
)
_SETTLE_S: Final = 1.0  # how long after its stream was left a piece of work may take to be gone
_TURNS: Final = (0, 1, 2, 3, 5, 8, 13)  # turns of the loop after which a stream is cancelled


class ConformanceError(AssertionError):
    """A promise of the contract is broken; the message names whose and which."""


async def check_provider(
    make: Callable[[], P],
    *,
    requests: Sequence[ChatRequest] = _REQUESTS,
    num_open: Callable[[P], int] | None = None,
    secret: str | None = None,
    patience_s: float = 30.0,
) -> None:
    """Check a provider against the docstrings of `LlmProvider`; `make` gives a fresh one for each promise.

    `requests` are two that it answers with the same text every time. `num_open` tells how many streams are open behind
    a provider; `secret` is an API key that `make` gave it. `patience_s` is for one promise.
    """
    for what, check in _PROVIDER_CHECKS.items():
        provider = make()
        opened = None if num_open is None else partial(num_open, provider)
        subject = _Provider(num_open=opened, provider=provider, requests=requests, secret=secret)
        await _run(subject, what, check(subject), patience_s)


async def check_draft(
    make: Callable[[], D],
    *,
    requests: Sequence[ChatRequest] = _REQUESTS,
    num_open: Callable[[D], int] | None = None,
    target: TokenModel | None = None,
    patience_s: float = 30.0,
) -> None:
    """Check a draft against the docstrings of `DraftProvider`; with a `target` that it can serve, of `TokenDrafter`.

    The other parameters are those of `check_provider`.
    """
    for what, check in _DRAFT_CHECKS.items():
        draft = make()
        opened = None if num_open is None else partial(num_open, draft)
        subject = _Draft(num_open=opened, draft=draft, requests=requests, target=target)
        await _run(subject, what, check(subject), patience_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject(ABC):
    """What is checked."""

    requests: Sequence[ChatRequest]
    num_open: Callable[[], int] | None

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def open(self, index: int) -> AbstractAsyncContextManager[AsyncIterator[object]]:
        """Begin to answer `requests[index]`."""

    @abstractmethod
    async def aclose(self) -> None: ...

    def require(self, held: bool, promise: str) -> None:
        if not held:
            raise ConformanceError(f"{self.name or 'a provider without a name'}: {promise}")

    async def items(self, index: int) -> list[object]:
        """Collect all that one piece of work gives."""
        async with self.open(index) as items:
            return [item async for item in items]

    async def require_idle(self, before: set[asyncio.Task[Any]], what: str) -> None:
        """Wait until nothing runs any more but the tasks of `before`, those that were there before the work."""
        deadline = asyncio.get_running_loop().time() + _SETTLE_S
        while left := self._left_over(before):
            self.require(asyncio.get_running_loop().time() < deadline, f"{what} must end the work behind it; {left}")
            await asyncio.sleep(0.01)

    def _left_over(self, before: set[asyncio.Task[Any]]) -> str:
        tasks = asyncio.all_tasks() - before
        if tasks:
            return f"still running: {sorted(task.get_name() for task in tasks)}"
        num_open = 0 if self.num_open is None else self.num_open()
        return f"{num_open} streams are open" if num_open else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Provider(_Subject):
    provider: LlmProvider
    secret: str | None

    @property
    def name(self) -> str:
        return self.provider.name

    def open(self, index: int) -> AbstractAsyncContextManager[AsyncIterator[object]]:
        return self.provider.stream(self.requests[index])

    async def aclose(self) -> None:
        await self.provider.aclose()

    async def answer(self, request: ChatRequest) -> tuple[list[str], Finish]:
        """Collect the text deltas of one stream, and its end."""
        async with self.provider.stream(request) as stream:
            events: list[object] = [event async for event in stream]
        self.require_one_finish(events)
        finish = events[-1]
        assert isinstance(finish, Finish)  # noqa: S101 - has just been required
        return [event.text for event in events if isinstance(event, TextDelta)], finish

    def require_one_finish(self, events: Sequence[object]) -> None:
        num = sum(isinstance(event, Finish) for event in events)
        self.require(num == 1, f"a stream must hold exactly one Finish; it held {num}")
        self.require(isinstance(events[-1], Finish), f"nothing may follow Finish; {events[-1]!r} did")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft(_Subject):
    draft: DraftProvider
    target: TokenModel | None

    @property
    def name(self) -> str:
        return self.draft.name

    def open(self, index: int) -> AbstractAsyncContextManager[AsyncIterator[object]]:
        return self.draft.draft(self.requests[index], _DRAFT_TOKENS)

    async def aclose(self) -> None:
        await self.draft.aclose()


async def _run(subject: _Subject, what: str, check: Coroutine[Any, Any, None], patience_s: float) -> None:
    timeout = asyncio.timeout(patience_s)
    try:
        async with timeout:
            await check
    except TimeoutError:
        subject.require(not timeout.expired(), f"{what} took longer than {patience_s} s to check")
        raise
    finally:
        with suppress(Exception):  # closing is a promise of its own, and must not hide the one that was broken
            await subject.aclose()


# --------------------------------------------------------------------------- providers and drafts alike


async def _check_leaving(subject: _Subject) -> None:
    before = asyncio.all_tasks()
    for num_read in (0, 1):
        async with subject.open(0) as items:
            for _ in range(num_read):
                await anext(items, None)
        late = None
        with suppress(Exception):  # the end of the iteration, or that it is closed: both say that no more comes
            late = await anext(items, None)
        subject.require(late is None, f"nothing may come after the context was left; {late!r} came")
        await subject.require_idle(before, "leaving a stream early")


async def _check_leaving_by_exception(subject: _Subject) -> None:
    before = asyncio.all_tasks()
    told: BaseException | None = None
    reason = RuntimeError("the consumer's own error")
    try:
        async with subject.open(0) as items:
            await anext(items, None)
            raise reason
    except Exception as error:  # noqa: BLE001 - whatever came of it is looked at
        told = error
    subject.require(told is reason, f"an exception inside the context must leave it as it is; it became {told!r}")
    await subject.require_idle(before, "an exception inside the context")


async def _check_concurrency(subject: _Subject) -> None:
    alone = [_text(await subject.items(index)) for index in (0, 1)]
    async with subject.open(0) as first, subject.open(1) as second:
        head = await anext(first, None)
        texts = [_text([item async for item in second])]
        texts.insert(0, _text([head, *[item async for item in first]]))
    subject.require(texts == alone, f"streams must not disturb each other; {alone} became {texts} side by side")
    async with subject.open(0) as kept:
        head = await anext(kept, None)
        async with subject.open(1) as left:
            await anext(left, None)
        text = _text([head, *[item async for item in kept]])
    subject.require(text == alone[0], f"leaving one stream must not disturb another; {alone[0]!r} became {text!r}")


async def _check_cancellation(subject: _Subject) -> None:
    for num_turns in _TURNS:
        await _cancel_after_turns(subject, subject.items(0), num_turns)
    before = asyncio.all_tasks()
    begun = asyncio.Event()
    task = asyncio.create_task(_consume(subject, begun))
    await begun.wait()
    await _cancel(subject, task)
    await subject.require_idle(before, "cancellation")


async def _consume(subject: _Subject, begun: asyncio.Event) -> None:
    try:
        async with subject.open(0) as items:
            async for _ in items:
                begun.set()
    finally:
        begun.set()


async def _cancel_after_turns(subject: _Subject, work: Coroutine[Any, Any, object], num_turns: int) -> None:
    before = asyncio.all_tasks()
    task = asyncio.create_task(work)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await _cancel(subject, task)
    await subject.require_idle(before, "cancellation")


async def _cancel(subject: _Subject, task: asyncio.Task[Any]) -> None:
    if not task.cancel():
        return  # it had ended by itself
    _, pending = await asyncio.wait([task], timeout=_SETTLE_S)
    subject.require(not pending, f"cancellation must end a request; it ran on for {_SETTLE_S} s")
    if not task.cancelled():
        outcome = task.exception()
        became = "swallowed" if outcome is None else f"turned into {outcome!r}"
        subject.require(held=False, promise=f"cancellation must pass through; it was {became}")


async def _check_closing_twice(subject: _Subject) -> None:
    before = asyncio.all_tasks()
    await subject.items(0)
    await subject.aclose()
    try:
        await subject.aclose()
    except Exception as error:
        raise ConformanceError(f"{subject.name}: calling aclose twice must be harmless; it raised {error!r}") from error
    await subject.require_idle(before, "aclose")


def _text(items: Iterable[object]) -> str:
    return "".join(item.text for item in items if isinstance(item, TextDelta | DraftPiece))


# ------------------------------------------------------------------------------------------- providers


async def _check_identity(subject: _Provider) -> None:
    name, capabilities = subject.provider.name, subject.provider.capabilities
    subject.require(isinstance(name, str) and bool(name), f"name must be a text that is not empty; it is {name!r}")  # pyright: ignore[reportUnnecessaryIsInstance] - what the type promises is what is checked
    subject.require(
        isinstance(capabilities, Capabilities),  # pyright: ignore[reportUnnecessaryIsInstance] - as above
        f"capabilities must be Capabilities; it is {capabilities!r}",
    )


async def _check_secret(subject: _Provider) -> None:
    shown = f"{subject.provider!r} {subject.provider} {subject.name} {subject.provider.capabilities!r}"
    subject.require(subject.secret is None or subject.secret not in shown, "its representation must not show a secret")


async def _check_ending(subject: _Provider) -> None:
    for index in (0, 1):
        events = await subject.items(index)
        for event in events:
            subject.require(isinstance(event, get_args(StreamEvent)), f"{event!r} is no stream event")
            if isinstance(event, Finish):
                known = event.finish_reason in get_args(FinishReason)
                subject.require(known, f"finish_reason must be one of FinishReason; it is {event.finish_reason!r}")
        subject.require_one_finish(events)


async def _check_complete(subject: _Provider) -> None:
    deltas, finish = await subject.answer(subject.requests[0])
    response = await subject.provider.complete(subject.requests[0])
    text = "".join(deltas)
    subject.require(response.content == text, f"complete must give stream's text {text!r}; got {response.content!r}")
    subject.require(
        response.finish_reason == finish.finish_reason,
        f"complete must give stream's finish_reason {finish.finish_reason!r}; got {response.finish_reason!r}",
    )


async def _check_cancelling_complete(subject: _Provider) -> None:
    for num_turns in _TURNS:
        await _cancel_after_turns(subject, subject.provider.complete(subject.requests[0]), num_turns)


async def _check_max_tokens(subject: _Provider) -> None:
    _, whole = await subject.answer(subject.requests[0])
    _, cut = await subject.answer(replace(subject.requests[0], max_tokens=2))
    if whole.usage is None or cut.usage is None:
        return
    num = cut.usage.output_tokens
    subject.require(num <= 2, f"max_tokens 2 must be honoured; usage counts {num} tokens")
    if whole.usage.output_tokens > 2:
        reason = cut.finish_reason
        subject.require(reason == "length", f"an answer cut by max_tokens must finish with 'length', not {reason!r}")


async def _check_stop(subject: _Provider) -> None:
    deltas, _ = await subject.answer(subject.requests[0])
    stop, text = _stop_across_deltas(deltas), "".join(deltas)
    if stop is None:
        return
    stopped, finish = await subject.answer(replace(subject.requests[0], stop=(stop,)))
    got, wanted = "".join(stopped), text.partition(stop)[0]
    subject.require(got == wanted, f"text must end before the stop string {stop!r}, {wanted!r}; got {got!r}")
    subject.require(
        finish.finish_reason == "stop", f"a stop string must finish with 'stop', not {finish.finish_reason!r}"
    )


def _stop_across_deltas(deltas: Sequence[str]) -> str | None:
    """Two neighbouring characters of an answer, of different deltas where there are such: the hard case for a stop."""
    seams = [left[-1] + right[0] for left, right in pairwise(deltas) if left and right]
    text = "".join(deltas)
    pairs = seams or [text[i : i + 2] for i in range(len(text) - 1)]
    return pairs[len(pairs) // 2] if pairs else None


async def _check_prefix(subject: _Provider) -> None:
    if not subject.provider.capabilities.continue_prefix:
        return
    text = "".join((await subject.answer(subject.requests[0]))[0])
    prefix, rest = text[: len(text) // 2].rstrip(), text[len(text) // 2 :]
    if prefix and not rest.lstrip().startswith(prefix):
        continued = "".join((await subject.answer(replace(subject.requests[0], prefix=prefix)))[0])
        subject.require(not continued.startswith(prefix), f"the prefix {prefix!r} must not be repeated in the answer")


_PROVIDER_CHECKS: Final[Mapping[str, Callable[[_Provider], Coroutine[Any, Any, None]]]] = {
    "name and capabilities": _check_identity,
    "hiding secrets": _check_secret,
    "the end of a stream": _check_ending,
    "complete": _check_complete,
    "leaving a stream": _check_leaving,
    "leaving a stream by an exception": _check_leaving_by_exception,
    "two streams at once": _check_concurrency,
    "cancelling a stream": _check_cancellation,
    "cancelling complete": _check_cancelling_complete,
    "max_tokens": _check_max_tokens,
    "stop strings": _check_stop,
    "continuing a prefix": _check_prefix,
    "closing twice": _check_closing_twice,
}


# ---------------------------------------------------------------------------------------------- drafts

_DRAFT_TOKENS: Final = 8


async def _check_draft_ending(subject: _Draft) -> None:
    subject.require(bool(subject.name), "name must not be empty")
    pieces = await subject.items(0)
    for piece in pieces:
        subject.require(isinstance(piece, DraftPiece), f"{piece!r} is no DraftPiece")
    ends = [isinstance(piece, DraftPiece) and piece.finish_reason is not None for piece in pieces]
    subject.require(
        ends == [False] * (len(ends) - 1) + [True], "the last piece, and no other, must have a finish_reason"
    )


async def _check_draft_length(subject: _Draft) -> None:
    pieces = [piece for piece in await subject.items(0) if isinstance(piece, DraftPiece)]
    usage = pieces[-1].usage
    counted = [len(piece.token_ids) if piece.token_ids is not None else int(bool(piece.text)) for piece in pieces]
    num = sum(counted) if usage is None else usage.output_tokens
    subject.require(num <= _DRAFT_TOKENS, f"a draft of at most {_DRAFT_TOKENS} tokens had {num}")


async def _check_token_draft(subject: _Draft) -> None:
    if subject.target is None:
        return
    draft, target = subject.draft, subject.target
    if not isinstance(draft, TokenDrafter):
        raise ConformanceError(f"{subject.name}: to draft for a target it must be a TokenDrafter")
    refusal = draft.token_draft_refusal(target)
    subject.require(refusal is None, f"it refuses the target {target.name}: {refusal}")
    await asyncio.to_thread(_propose, subject, draft, target)


def _propose(subject: _Draft, drafter: TokenDrafter, target: TokenModel) -> None:
    """Draft for two requests at once, as their answers grow, and close the drafts."""
    prompts = [target.tokenizer.encode_chat(request) for request in _REQUESTS]
    drafts = [drafter.open_token_draft(target, _choose_best, prompt_ids) for prompt_ids in prompts]
    for num_confirmed in (0, 1, 3):
        for draft, prompt_ids in zip(drafts, prompts, strict=True):
            context_ids = [*prompt_ids, *target.tokenizer.encode("abc")[:num_confirmed]]
            for token, _ in zip(draft.propose(context_ids), range(4), strict=False):
                held = 0 <= token.token_id < target.vocab_size
                subject.require(held, f"drafted ids must be below {target.vocab_size}; {token.token_id} is not")
    for draft in drafts:
        draft.close()


def _choose_best(logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:  # noqa: ARG001 - greedy
    return DraftToken(int(logits.argmax()))


_DRAFT_CHECKS: Final[Mapping[str, Callable[[_Draft], Coroutine[Any, Any, None]]]] = {
    "the end of a draft": _check_draft_ending,
    "the length of a draft": _check_draft_length,
    "leaving a draft": _check_leaving,
    "leaving a draft by an exception": _check_leaving_by_exception,
    "two drafts at once": _check_concurrency,
    "cancelling a draft": _check_cancellation,
    "drafting by token": _check_token_draft,
    "closing twice": _check_closing_twice,
}
