"""The checks that providers and drafts share.

They hold for everything that is opened, read piece by piece and left.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, Final

from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.events import TextDelta
from llm_spec.contract.request import ChatRequest

__all__ = [
    "ConformanceError",
    "SubjectUnderTest",
    "cancel_after_turns",
    "check_cancellation",
    "check_closing_twice",
    "check_concurrency",
    "check_early_exit",
    "check_exit_by_exception",
    "run_check",
]

_MAX_SETTLE_S: Final = 5.0  # the most time that work may take to end after its stream was left
_NUM_LOOP_TURNS: Final = (0, 1, 2, 3, 5, 8, 13)  # a stream is cancelled after so many turns


class ConformanceError(AssertionError):
    """A promise of the contract is broken; the message names the object and the promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectUnderTest(ABC):
    """The provider or draft that is checked."""

    requests: Sequence[ChatRequest]
    num_open: Callable[[], int] | None

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def open_stream(self, index: int) -> AbstractAsyncContextManager[AsyncIterator[object]]:
        """Begin to answer `requests[index]`."""

    @abstractmethod
    async def aclose(self) -> None: ...

    def require_promise(self, is_kept: bool, promise: str) -> None:
        if not is_kept:
            raise ConformanceError(f"{self.name or 'a provider without a name'}: {promise}")

    async def collect_items(self, index: int) -> list[object]:
        """Collect all items of one stream."""
        async with self.open_stream(index) as items:
            return [item async for item in items]

    async def require_idle(self, before: set[asyncio.Task[Any]], what: str) -> None:
        """Wait until only the tasks of `before` are left, those that existed before the work."""
        deadline = asyncio.get_running_loop().time() + _MAX_SETTLE_S
        while leftover := self._describe_leftover_tasks(before):
            self.require_promise(
                asyncio.get_running_loop().time() < deadline, f"{what} must end the work behind it; {leftover}"
            )
            await asyncio.sleep(0.01)

    def _describe_leftover_tasks(self, before: set[asyncio.Task[Any]]) -> str:
        tasks = asyncio.all_tasks() - before
        if tasks:
            return f"still running: {sorted(task.get_name() for task in tasks)}"
        num_open = 0 if self.num_open is None else self.num_open()
        return f"{num_open} streams are open" if num_open else ""


async def run_check(subject: SubjectUnderTest, what: str, check: Coroutine[Any, Any, None], patience_s: float) -> None:
    """Run one check within its time limit, and close the subject."""
    timeout = asyncio.timeout(patience_s)
    try:
        async with timeout:
            await check
    except TimeoutError:
        subject.require_promise(not timeout.expired(), f"{what} took longer than {patience_s} s to check")
        raise
    finally:
        with suppress(Exception):  # closing is another promise; its error must not hide this one
            await subject.aclose()


async def check_early_exit(subject: SubjectUnderTest) -> None:
    """Leave before the first piece and after it.

    No more pieces may come, and no work may continue.
    """
    before = asyncio.all_tasks()
    for num_read in (0, 1):
        async with subject.open_stream(0) as items:
            for _ in range(num_read):
                await anext(items, None)
        late = None
        with suppress(Exception):  # the end of the iteration, or a closed iterator
            late = await anext(items, None)
        subject.require_promise(late is None, f"nothing may come after the context was left; {late!r} came")
        await subject.require_idle(before, "leaving a stream early")


async def check_exit_by_exception(subject: SubjectUnderTest) -> None:
    """Raise inside the context: the same exception must come out."""
    before = asyncio.all_tasks()
    texts_read: BaseException | None = None
    reason = RuntimeError("the consumer's own error")
    try:
        async with subject.open_stream(0) as items:
            await anext(items, None)
            raise reason
    except Exception as error:  # noqa: BLE001 - any exception is examined
        texts_read = error
    subject.require_promise(
        texts_read is reason, f"an exception inside the context must leave it as it is; it became {texts_read!r}"
    )
    await subject.require_idle(before, "an exception inside the context")


async def check_concurrency(subject: SubjectUnderTest) -> None:
    """Read two streams side by side, and leave one while the other continues.

    Each must give the same text as alone.
    """
    alone = [_join_item_texts(await subject.collect_items(index)) for index in (0, 1)]
    async with subject.open_stream(0) as first, subject.open_stream(1) as second:
        head = await anext(first, None)
        texts = [_join_item_texts([item async for item in second])]
        texts.insert(0, _join_item_texts([head, *[item async for item in first]]))
    subject.require_promise(texts == alone, f"streams must not disturb each other; {alone} became {texts} side by side")
    async with subject.open_stream(0) as kept:
        head = await anext(kept, None)
        async with subject.open_stream(1) as leftover:
            await anext(leftover, None)
        text = _join_item_texts([head, *[item async for item in kept]])
    subject.require_promise(
        text == alone[0], f"leaving one stream must not disturb another; {alone[0]!r} became {text!r}"
    )


async def check_cancellation(subject: SubjectUnderTest) -> None:
    """Cancel at several moments: CancelledError must come out, and no work may continue."""
    await cancel_after_turns(subject, lambda: subject.collect_items(0))
    before = asyncio.all_tasks()
    started_event = asyncio.Event()
    task = asyncio.create_task(_read_expecting_cancel(subject, started_event))
    await started_event.wait()
    await _cancel_and_check(subject, task)
    await subject.require_idle(before, "cancellation")


async def _read_expecting_cancel(subject: SubjectUnderTest, started_event: asyncio.Event) -> None:
    try:
        async with subject.open_stream(0) as items:
            async for _ in items:
                started_event.set()
    finally:
        started_event.set()


async def cancel_after_turns(subject: SubjectUnderTest, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Cancel the same work repeatedly, each time some turns of the loop later."""
    before = asyncio.all_tasks()
    for num_turns in _NUM_LOOP_TURNS:
        task = asyncio.create_task(work())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await _cancel_and_check(subject, task)
        await subject.require_idle(before, "cancellation")


async def _cancel_and_check(subject: SubjectUnderTest, task: asyncio.Task[Any]) -> None:
    if not task.cancel():
        task.result()  # it had ended; the caller sees its error
        return
    _, pending = await asyncio.wait([task], timeout=_MAX_SETTLE_S)
    subject.require_promise(not pending, f"cancellation must end a request; it ran on for {_MAX_SETTLE_S} s")
    if not task.cancelled():
        outcome = task.exception()
        became = "swallowed" if outcome is None else f"turned into {outcome!r}"
        subject.require_promise(is_kept=False, promise=f"cancellation must pass through; it was {became}")


async def check_closing_twice(subject: SubjectUnderTest) -> None:
    """Close again after use."""
    before = asyncio.all_tasks()
    await subject.collect_items(0)
    await subject.aclose()
    try:
        await subject.aclose()
    except Exception as error:
        raise ConformanceError(f"{subject.name}: calling aclose twice must be harmless; it raised {error!r}") from error
    await subject.require_idle(before, "aclose")


def _join_item_texts(items: Iterable[object]) -> str:
    return "".join(item.text for item in items if isinstance(item, TextDelta | DraftPiece))
