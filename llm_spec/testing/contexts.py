"""What holds of everything that is opened, read piece by piece and left: the checks that providers and drafts share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, Final

from llm_spec.chat import ChatRequest, TextDelta
from llm_spec.provider import DraftPiece

__all__ = [
    "ConformanceError",
    "Subject",
    "cancel_after_turns",
    "check_cancellation",
    "check_closing_twice",
    "check_concurrency",
    "check_leaving",
    "check_leaving_by_exception",
    "run_check",
]

_SETTLE_S: Final = 5.0  # how long after its stream was left a piece of work may take to be gone
_TURNS: Final = (0, 1, 2, 3, 5, 8, 13)  # turns of the loop after which a stream is cancelled


class ConformanceError(AssertionError):
    """A promise of the contract is broken; the message names whose and which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(ABC):
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


async def run_check(subject: Subject, what: str, check: Coroutine[Any, Any, None], patience_s: float) -> None:
    """Run one check within its time, and close what was checked."""
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


async def check_leaving(subject: Subject) -> None:
    """Leave before the first piece and after it: no more may come, and nothing may go on."""
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


async def check_leaving_by_exception(subject: Subject) -> None:
    """Raise inside the context: the same exception must come out."""
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


async def check_concurrency(subject: Subject) -> None:
    """Read two side by side, and leave one while the other goes on: each must say what it says alone."""
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


async def check_cancellation(subject: Subject) -> None:
    """Cancel at several moments: CancelledError must come out, and nothing may go on."""
    await cancel_after_turns(subject, lambda: subject.items(0))
    before = asyncio.all_tasks()
    begun = asyncio.Event()
    task = asyncio.create_task(_consume(subject, begun))
    await begun.wait()
    await _cancel(subject, task)
    await subject.require_idle(before, "cancellation")


async def _consume(subject: Subject, begun: asyncio.Event) -> None:
    try:
        async with subject.open(0) as items:
            async for _ in items:
                begun.set()
    finally:
        begun.set()


async def cancel_after_turns(subject: Subject, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Cancel a piece of work again and again, each time some turns of the loop later."""
    before = asyncio.all_tasks()
    for num_turns in _TURNS:
        task = asyncio.create_task(work())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await _cancel(subject, task)
        await subject.require_idle(before, "cancellation")


async def _cancel(subject: Subject, task: asyncio.Task[Any]) -> None:
    if not task.cancel():
        task.result()  # it had ended by itself; an error of its own is the caller's to see
        return
    _, pending = await asyncio.wait([task], timeout=_SETTLE_S)
    subject.require(not pending, f"cancellation must end a request; it ran on for {_SETTLE_S} s")
    if not task.cancelled():
        outcome = task.exception()
        became = "swallowed" if outcome is None else f"turned into {outcome!r}"
        subject.require(held=False, promise=f"cancellation must pass through; it was {became}")


async def check_closing_twice(subject: Subject) -> None:
    """Close again after use."""
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
