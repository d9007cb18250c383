"""Thousands of requests that are left in every way: no task, socket, stream or warning stays behind.

`LLM_SPEC_SLOW=1 pytest tests/test_leaks.py -m slow` makes 10,000 of them, which takes some minutes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import pytest
from llm_spec_http import DIALECTS, HttpProvider
from support.doubles import Double, Failure, forget_environment, provider_at, serve

from llm_spec import (
    ChatRequest,
    DraftError,
    LlmProvider,
    PromptLookup,
    ReferenceDraft,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    StreamEvent,
    TargetError,
    TextDelta,
    Timeouts,
)
from llm_spec.contract.draft import DraftPiece, DraftProvider
from llm_spec.contract.endpoint import Discoverable
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.server import ScriptedModelServer, ServerFaults, ServerLatency, make_disagreeing_draft
from llm_spec.testing.simulated import SimulatedDraft

FILES: Final = Path("/proc/self/fd")
WORDS: Final = " ".join(f"word{i}" for i in range(40))
QUESTION: Final = f"Say {WORDS[:60]}"
LATENCY: Final = ServerLatency(first_token_s=0.004, token_s=0.0006)
SETTLE_S: Final = 2.0  # how long the last end of a connection may take to be seen
NUM_AT_ONCE: Final = 12
LONGEST_S: Final = 0.05  # after which a request is left, if it has not ended
NO_WAIT: Final = RetryPolicy(max_attempts=2, first_wait_s=0.0, max_wait_s=0.0, max_retry_after_s=0.0)
PATIENCE: Final = Timeouts(first_chunk_s=0.5, between_chunks_s=0.15)
FAULTS: Final = [
    *(ServerFaults(drop_after=at) for at in (0, 1, 7, 30)),
    *(ServerFaults(stall_after=at) for at in (0, 5)),
    ServerFaults(malformed_after=3),
    ServerFaults(status=500),
    ServerFaults(status=429, retry_after_s=0),
    *[ServerFaults()] * 8,
]
FAILURES: Final = [
    *(Failure(drop_after=at) for at in (-1, 0, 1, 7, 30)),
    *(Failure(stall_after=at) for at in (-1, 0, 5)),
    Failure(status=529),
    *[Failure()] * 8,
]

pytestmark = pytest.mark.skipif(not FILES.is_dir(), reason="open files cannot be counted here")


class OwnError(Exception):
    """The consumer's."""


# ------------------------------------------------------------------------------------------ what is left


class Server(Protocol):
    """A server that knows how many answers it is writing."""

    def num_open_answers(self) -> int: ...


class Model(ScriptedModelServer):
    def num_open_answers(self) -> int:
        return self.num_open_streams


class Hosted(Double):
    def num_open_answers(self) -> int:
        return self.num_open


def open_files() -> Counter[str]:
    """What the open file descriptors are, by kind."""
    kinds: Counter[str] = Counter()
    for link in FILES.iterdir():
        with suppress(OSError):  # that of the listing itself
            kinds[str(link.readlink()).partition(":")[0]] += 1
    return kinds


async def settled(measure: Callable[[], object]) -> object:
    """What is left of something once it is nothing, or after a while."""
    give_up_at = asyncio.get_running_loop().time() + SETTLE_S
    while (left := measure()) and asyncio.get_running_loop().time() < give_up_at:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.005)
    return left


async def require_no_streams(servers: Sequence[Server]) -> None:
    """Every server has noticed that nobody listens any more."""
    left = await settled(lambda: [number for server in servers if (number := server.num_open_answers())])
    assert not left, f"streams are open: {left}"


@asynccontextmanager
async def nothing_left() -> AsyncGenerator[None]:
    """Whatever was opened inside is closed at the end: tasks and files, and nobody complained to the loop."""
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    gc.collect()
    files, tasks = open_files(), asyncio.all_tasks()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        yield
        gc.collect()
        left = await settled(lambda: asyncio.all_tasks() - tasks)
        assert not left, f"tasks are left: {left}"
        wants_more = await settled(lambda: open_files() - files)
        assert not wants_more, f"files are open: {wants_more}"
        assert complaints == []
    finally:
        loop.set_exception_handler(None)


# ------------------------------------------------------------------------------------------ the load


class Hanging:
    """A draft that writes a little and then nothing."""

    name = "hanging"

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:  # noqa: ARG002
        async def pieces() -> AsyncGenerator[DraftPiece]:
            yield DraftPiece(WORDS[len(request.prefix) :][:20])
            await asyncio.sleep(60.0)

        async with AsyncExitStack() as stack:
            out = pieces()
            stack.push_async_callback(out.aclose)
            yield out

    async def aclose(self) -> None:
        """Nothing to release."""


class World:
    """Servers, providers and drafts, and what they can do together."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.models: list[Model] = []
        self.hosted: list[Hosted] = []
        self.targets: list[tuple[LlmProvider, Sequence[str], bool]] = []
        self.drafts: list[DraftProvider | LlmProvider] = []
        self.shared: list[SpeculativeDecoder] = []

    @property
    def servers(self) -> list[Server]:
        return [*self.models, *self.hosted]

    async def open(self, stack: AsyncExitStack) -> None:
        for dialect, continues in (("vllm", "fields"), ("mistral", "repeats"), ("vllm", "fields")):
            server = Model(WORDS, latency=LATENCY, continues_prefix=continues)  # type: ignore[arg-type]
            await stack.enter_async_context(server)
            self.models.append(server)
            provider = HttpProvider("any", base_url=server.url, dialect=DIALECTS[dialect])
            stack.push_async_callback(provider.aclose)
            names = ["plain", "regenerate", "auto", "race"] if dialect == "vllm" else ["plain", "predict", "race"]
            names += ["probe", "score"] if dialect == "vllm" else []
            self.targets.append((provider, names, True))
            if dialect == "vllm":
                await provider.discover("token_scorer")
                assert provider.capabilities.token_scorer is not None
        self.drafts.append(self.targets[-1][0])  # the last server serves drafts too
        for kind, model, names in (
            ("openai", None, ["plain", "predict", "regenerate", "auto"]),
            ("openai given", None, ["plain", "predict"]),
            ("anthropic", "claude-sonnet-4-5", ["plain", "race", "regenerate"]),
            ("anthropic given", None, ["plain", "regenerate"]),
        ):
            double = await stack.enter_async_context(serve(Hosted()))
            double.pieces, double.pause_s = split_into_pieces(WORDS), 0.0006
            assert isinstance(double, Hosted)
            self.hosted.append(double)
            self.targets.append(
                (await stack.enter_async_context(provider_at(double.url, kind, model=model)), names, False)
            )
        for target, _, _ in self.targets:
            if isinstance(target, Discoverable):
                await target.discover("continue_prefix")
        self.drafts += [
            ReferenceDraft(WORDS),
            ReferenceDraft(make_disagreeing_draft(WORDS, 0.9, 3)),
            SimulatedDraft(WORDS, 0.9, 4, token_s=0.0002),
            PromptLookup(),
            ScriptedProvider(WORDS, fail_at={9: DraftError("no more")}),
            Hanging(),
        ]
        for target, names, _ in self.targets:
            if "auto" in names:
                config = SpeculativeConfig(retry=NO_WAIT, draft_timeout_s=0.02, timeouts=PATIENCE)
                self.shared.append(SpeculativeDecoder(target=target, draft=ReferenceDraft(WORDS), config=config))

    def fail(self) -> None:
        """Servers fail now as chance has it."""
        for model in self.models:
            model.faults = self.rng.choice(FAULTS)
        for double in self.hosted:
            double.reset(self.rng.choice(FAILURES))

    def decoder(self, deadline_s: float | None) -> SpeculativeDecoder:
        target, names, _ = self.rng.choice(self.targets)
        strategy: Any = self.rng.choice(names)
        if strategy == "auto" and deadline_s is None:
            return self.rng.choice(self.shared)
        config = SpeculativeConfig(
            strategy=strategy,
            retry=NO_WAIT,
            deadline_s=deadline_s,
            draft_timeout_s=0.02,
            timeouts=PATIENCE,
        )
        return SpeculativeDecoder(target=target, draft=self.rng.choice(self.drafts), config=config)


async def listen(
    decoder: SpeculativeDecoder, shown: list[str], *, leave_after: int | None = None, fail_after: int | None = None
) -> None:
    """Read an answer, all of it or so many events."""
    num_read = 0
    request = ChatRequest.create(QUESTION, temperature=0.0)
    async with decoder.stream(request, rounds=True) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                shown.append(event.text)
            if isinstance(event, SpeculativeFinish) and event.result is not None:
                assert event.result.content == "".join(shown)
                assert event.result.content == WORDS or event.result.stopped_by == "deadline"
            num_read += 1
            if num_read == leave_after:
                break
            if num_read == fail_after:
                raise OwnError


async def ask(world: World, seen: Counter[str]) -> None:
    """One request, left in one of the ways; what it showed is a beginning of the answer."""
    rng = world.rng
    if rng.random() < 0.3:
        world.fail()
    way = rng.choice(["cancel", "cancel", "timeout", "break", "exception", "deadline", "end"])
    after_s, after = LONGEST_S * rng.random() ** 2, rng.randint(1, 30)
    decoder = world.decoder(after_s + 1e-3 if way == "deadline" else None)
    shown: list[str] = []
    numbers = {"leave_after": after if way == "break" else None, "fail_after": after if way == "exception" else None}
    failure: TargetError | None = None
    patience = asyncio.timeout(after_s if way == "timeout" else 10.0)
    task = asyncio.create_task(listen(decoder, shown, **numbers))
    if way == "cancel":
        await asyncio.wait([task], timeout=after_s)
        task.cancel()
    try:
        async with patience:
            await task
        seen["ended"] += 1
    except OwnError:
        seen["failed by its consumer"] += 1
    except TargetError as error:
        failure = error
        seen["failed by its target"] += 1
    except asyncio.CancelledError:
        assert way == "cancel"
        seen["cancelled"] += 1
    except TimeoutError:
        assert patience.expired()
        assert way == "timeout"
        seen["timed out"] += 1
    assert failure is None or failure.partial_text == "".join(shown)
    seen["with text"] += bool(shown)
    assert WORDS.startswith("".join(shown)), (way, decoder.name, decoder.config, shown)


async def load(num_requests: int, seed: int) -> Counter[str]:
    """So many requests, some at a time, and everything closed."""
    world, seen = World(random.Random(seed)), Counter[str]()  # noqa: S311 - a reproducible load, no secret
    async with AsyncExitStack() as stack:
        await world.open(stack)
        left = num_requests

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await ask(world, seen)

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(work())
        await require_no_streams(world.servers)
    return seen


IF_ASKED = pytest.mark.skipif("LLM_SPEC_SLOW" not in os.environ, reason="LLM_SPEC_SLOW=1 pytest -m slow runs it")


@pytest.mark.virtual_clock
@pytest.mark.parametrize("num_requests", [300, pytest.param(10_000, marks=[pytest.mark.slow, IF_ASKED])])
async def test_nothing_is_left(
    num_requests: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By random strategies, drafts, faults and times: not a task, not a file, not a stream, not a word of complaint."""
    forget_environment(monkeypatch)
    caplog.set_level(logging.WARNING)
    async with nothing_left():
        seen = await load(num_requests, seed=num_requests)
    assert not [record for record in caplog.records if "closing_failed" in record.getMessage()]
    assert not [record for record in caplog.records if record.name == "asyncio"]
    ends = ["ended", "failed by its consumer", "failed by its target", "cancelled", "timed out"]
    assert sum(seen[end] for end in ends) == num_requests
    assert min(seen[end] for end in ends) >= num_requests / 100  # each of them was there
    assert seen["with text"] >= num_requests / 3
    print(dict(seen))  # noqa: T201 - figures of the long run, shown by -s


# ------------------------------------------------------------------------------------------ leaks on purpose


async def test_a_stream_that_is_not_closed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that forgets its streams."""
    monkeypatch.setitem(globals(), "SETTLE_S", 0.3)
    async with nothing_left(), AsyncExitStack() as stack:
        server = await stack.enter_async_context(Model(WORDS, latency=ServerLatency(first_token_s=0.01, token_s=1.0)))
        provider = HttpProvider("any", base_url=server.url)
        stack.push_async_callback(provider.aclose)
        forgotten = await stack.enter_async_context(AsyncExitStack())

        class Forgetting(HttpProvider):
            @asynccontextmanager
            async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
                yield await forgotten.enter_async_context(super().stream(request))

        leaky = Forgetting("any", base_url=server.url)
        stack.push_async_callback(leaky.aclose)
        for target in (provider, leaky):
            await listen(
                SpeculativeDecoder(target=target, draft=None), [], leave_after=2
            )  # the first is that it has started
            if target is provider:
                await require_no_streams([server])
        with pytest.raises(AssertionError, match="streams are open"):
            await require_no_streams([server])
        await forgotten.aclose()


async def leave_a_task(keeper: AsyncExitStack) -> None:
    task = asyncio.create_task(asyncio.sleep(60.0))

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])

    keeper.push_async_callback(end)


async def leave_a_socket(keeper: AsyncExitStack) -> None:
    keeper.enter_context(socket.socket())


async def leave_an_error(keeper: AsyncExitStack) -> None:  # noqa: ARG001 - there is nothing to keep
    task = asyncio.create_task(asyncio.sleep(0.0))
    task.add_done_callback(lambda _: next(iter(())))  # what a callback raises, the loop is told
    await asyncio.wait([task])
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("leave", "words"),
    [(leave_a_task, "tasks are left"), (leave_a_socket, "files are open"), (leave_an_error, "in callback leave_an")],
)
async def test_what_is_left_is_seen(
    leave: Callable[[AsyncExitStack], Awaitable[None]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task, a socket, an error that nobody catches."""
    monkeypatch.setitem(globals(), "SETTLE_S", 0.05)
    async with AsyncExitStack() as keeper:
        with pytest.raises(AssertionError, match=words):
            async with nothing_left():
                await leave(keeper)
