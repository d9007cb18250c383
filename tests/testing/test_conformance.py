"""The checkers pass what keeps the contract, and fail each planted fault by the promise it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import cast

import pytest

from llm_spec import (
    ChatRequest,
    ChatResponse,
    DraftProvider,
    Finish,
    ProviderDraft,
    SpeculativeDecoder,
    StreamEvent,
    TargetError,
    TextDelta,
    Usage,
)
from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.token_model import TokenDraft, TokenModel, TokenSampler
from llm_spec.measure.tokens import stream_texts_as_draft_pieces
from llm_spec.testing import (
    ConformanceError,
    LocalProvider,
    RandomDraft,
    ScriptedProvider,
    TableModel,
    check_draft_conformance,
    check_provider_conformance,
    run_virtual,
)

Events = AsyncGenerator[AsyncIterator[StreamEvent]]
MARKER = "sk-marker"


def answer(request: ChatRequest) -> str:
    """A script that says something else to every prompt."""
    return f"You said: {request.messages[-1].text} I say: one two three."


class Honest(ScriptedProvider):
    """Keeps every promise; the faulty ones below break one each."""

    def __init__(self, *, usage: Usage | None = None, capabilities: Capabilities | None = None) -> None:
        super().__init__(answer, usage=usage or "counted", delay_piece_s=0.01, capabilities=capabilities)
        self.seen: list[str] = []


class Nameless(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.name = ""


class Incapable(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities = cast("Capabilities", {})


class Leaky(Honest):
    def __repr__(self) -> str:
        return f"Leaky(api_key={MARKER!r})"


class EndsWithoutFinish(Honest):
    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        async for event in super()._play_script(request):
            if not isinstance(event, Finish):
                yield event


class FinishesTwice(Honest):
    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        async for event in super()._play_script(request):
            yield event
            if isinstance(event, Finish):
                yield event


class TalksAfterFinish(Honest):
    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        async for event in super()._play_script(request):
            yield event
        yield TextDelta("and another thing")


class GivesTextAlone(Honest):
    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        async for event in super()._play_script(request):
            yield cast("StreamEvent", event.text) if isinstance(event, TextDelta) else event


class FinishesOddly(Honest):
    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        async for event in super()._play_script(request):
            yield replace(event, finish_reason="eos") if isinstance(event, Finish) else event  # type: ignore[arg-type] # pyright: ignore[reportArgumentType] - the fault


class CompletesOtherwise(Honest):
    async def complete(self, request: ChatRequest) -> ChatResponse:
        response = await super().complete(request)
        return replace(response, message=replace(response.message, content=response.content + "."))


class CompletesWithAnotherReason(Honest):
    async def complete(self, request: ChatRequest) -> ChatResponse:
        return replace(await super().complete(request), finish_reason="length")


class StaysOpen(Honest):
    """Nobody closes the events: they go on after the context was left."""

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> Events:
        yield self._play_script(request)


class LeavesATask(Honest):
    """Reads ahead in a task that outlives its stream."""

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> Events:
        self.reading = asyncio.create_task(asyncio.sleep(60))
        async with super().stream(request) as events:
            yield events


class ForgetsToCount(Honest):
    """A stream behind it stays open."""

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> Events:
        async with super().stream(request) as events:
            yield events
        self.num_open += 1


class TranslatesTheConsumersError(Honest):
    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> Events:
        try:
            async with super().stream(request) as events:
                yield events
        except Exception as error:
            raise TargetError("something failed") from error


class SwallowsTheConsumersError(Honest):
    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> Events:
        with suppress(Exception):
            async with super().stream(request) as events:
                yield events


class SharesItsState(Honest):
    """Streams side by side write into one buffer."""

    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        self.seen.clear()
        async for event in super()._play_script(request):
            self.seen.append(event.text if isinstance(event, TextDelta) else "")
            if isinstance(event, Finish):
                yield TextDelta("".join(self.seen))
            yield event


class OneAtATime(Honest):
    """A second stream waits until the first has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = asyncio.Lock()

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> Events:
        async with self.lock, super().stream(request) as events:
            yield events


class CancelsItsNeighbours(Honest):
    """Leaving one stream ends them all."""

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> Events:
        self.ended = False
        async with super().stream(request) as events, aclosing(self._until_ended(events)) as out:
            yield out
        self.ended = True

    async def _until_ended(self, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        async for event in events:
            if not self.ended:
                yield event


class TranslatesCancellation(Honest):
    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        try:
            async for event in super()._play_script(request):
                yield event
        except asyncio.CancelledError as error:
            raise TargetError("the connection was lost") from error


class SwallowsCancellation(Honest):
    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        with suppress(asyncio.CancelledError):
            async for event in super()._play_script(request):
                yield event


class OutlivesCancellation(Honest):
    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        try:
            async for event in super()._play_script(request):
                yield event
        except asyncio.CancelledError:
            await asyncio.sleep(60)
            raise


class CompletesDespiteCancellation(Honest):
    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await asyncio.shield(self._complete_late(request))

    async def _complete_late(self, request: ChatRequest) -> ChatResponse:
        await asyncio.sleep(20)
        return await super().complete(request)


class WritesOn(Honest):
    """Ignores max_tokens."""

    def _make_answer_events(self, text: str, request: ChatRequest) -> list[StreamEvent]:
        return super()._make_answer_events(text, replace(request, max_tokens=None))


class HidesItsCut(Honest):
    """Says `stop` where max_tokens cut it."""

    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        async for event in super()._play_script(request):
            yield replace(event, finish_reason="stop") if isinstance(event, Finish) else event


class IgnoresStop(Honest):
    def _make_answer_events(self, text: str, request: ChatRequest) -> list[StreamEvent]:
        return super()._make_answer_events(text, replace(request, stop=()))


class ShowsHalfAStop(Honest):
    """Looks for stop strings in each piece alone."""

    def _make_answer_events(self, text: str, request: ChatRequest) -> list[StreamEvent]:
        events = super()._make_answer_events(text, replace(request, stop=()))
        held = [e for e in events if not (isinstance(e, TextDelta) and any(s in e.text for s in request.stop))]
        return [*held[:-1], Finish("stop", Usage())]


class NamesNoStop(Honest):
    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        async for event in super()._play_script(request):
            yield replace(event, finish_reason="length") if isinstance(event, Finish) and request.stop else event


class RepeatsThePrefix(Honest):
    def __init__(self) -> None:
        super().__init__(capabilities=Capabilities(continue_prefix=True))

    def _make_answer_events(self, text: str, request: ChatRequest) -> list[StreamEvent]:
        return super()._make_answer_events(text, replace(request, prefix=""))


class ClosesOnce(Honest):
    async def aclose(self) -> None:
        await super().aclose()
        if self.num_acloses > 1:
            raise RuntimeError("is closed")


class Hangs(Honest):
    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        async for event in super()._play_script(request):
            if isinstance(event, Finish):
                await asyncio.sleep(3600)
            yield event


def check(make: Callable[[], ScriptedProvider]) -> None:
    run_virtual(check_provider_conformance(make, num_open=lambda provider: provider.num_open, secret=MARKER))


@pytest.mark.parametrize(
    "make",
    [
        Honest,
        lambda: ScriptedProvider(answer, usage=None),
        lambda: ScriptedProvider(answer, piece_size=1, capabilities=Capabilities(continue_prefix=True)),
        lambda: ScriptedProvider(answer, delay_first_s=0.5, delay_piece_s=0.1),
        lambda: ScriptedProvider(""),
        lambda: ScriptedProvider([TextDelta(""), TextDelta("x"), TextDelta(""), Finish("stop")]),
    ],
    ids=["honest", "no usage", "letters", "slow", "empty answer", "empty deltas"],
)
def test_a_provider_that_keeps_the_contract_passes(make: Callable[[], ScriptedProvider]) -> None:
    """Nothing but promises is required: usage, capabilities, delays and empty deltas are free."""
    check(make)


@pytest.mark.parametrize("text", ["", "naïve café 日本語 😀, and so on for a while"])
def test_a_local_provider_passes(text: str) -> None:
    """A token model behind `LocalProvider` keeps the contract, and closes its sessions."""

    def num_open(provider: LocalProvider) -> int:
        assert isinstance(provider.model, TableModel)
        return provider.model.num_open

    run_virtual(check_provider_conformance(lambda: LocalProvider(TableModel(text)), num_open=num_open))


def test_a_decoder_passes() -> None:
    """A decoder is a provider and keeps the same contract, and so do its draft and target."""
    draft, target = Honest(), Honest()

    def num_open(_: SpeculativeDecoder) -> int:
        return draft.num_open + target.num_open

    run_virtual(check_provider_conformance(lambda: SpeculativeDecoder(target=target, draft=draft), num_open=num_open))


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (Nameless, "name must be a text that is not empty"),
        (Incapable, "capabilities must be Capabilities"),
        (Leaky, "must not show a secret"),
        (EndsWithoutFinish, "exactly one Finish; it held 0"),
        (FinishesTwice, "exactly one Finish; it held 2"),
        (TalksAfterFinish, "nothing may follow Finish"),
        (GivesTextAlone, "is not a stream event"),
        (FinishesOddly, "finish_reason must be one of FinishReason"),
        (CompletesOtherwise, "complete must give stream's text"),
        (CompletesWithAnotherReason, "complete must give stream's finish_reason"),
        (StaysOpen, "nothing may come after the context was left"),
        (LeavesATask, "leaving a stream early must end the work behind it; still running"),
        (ForgetsToCount, "leaving a stream early must end the work behind it; 1 streams are open"),
        (TranslatesTheConsumersError, "an exception inside the context must leave it as it is"),
        (SwallowsTheConsumersError, "an exception inside the context must leave it as it is; it became None"),
        (SharesItsState, "streams must not disturb each other"),
        (OneAtATime, "two streams at once took longer"),
        (CancelsItsNeighbours, "must not disturb"),
        (TranslatesCancellation, "cancellation must pass through; it was turned into TargetError"),
        (SwallowsCancellation, "cancellation must pass through; it was swallowed"),
        (OutlivesCancellation, "cancellation must end a request; it ran on"),
        (CompletesDespiteCancellation, "cancellation must end the work behind it; still running"),
        (WritesOn, "max_tokens 2 must be honoured"),
        (HidesItsCut, "an answer cut by max_tokens must finish with 'length'"),
        (IgnoresStop, "text must end before the stop string"),
        (ShowsHalfAStop, "text must end before the stop string"),
        (NamesNoStop, "a stop string must finish with 'stop'"),
        (RepeatsThePrefix, "must not be repeated in the answer"),
        (ClosesOnce, "calling aclose twice must be harmless"),
        (Hangs, "the end of a stream took longer than 30.0 s"),
    ],
)
def test_a_broken_promise_is_named(make: Callable[[], ScriptedProvider], promise: str) -> None:
    """Each fault fails by its own promise, in one line."""
    with pytest.raises(ConformanceError, match=promise) as caught:
        check(make)
    assert "\n" not in str(caught.value)


def test_a_failing_provider_shows_its_own_error() -> None:
    """What a provider raises on its own account passes through the checker."""
    with pytest.raises(TargetError, match="down"):
        check(lambda: ScriptedProvider(answer, fail_at={0: TargetError("down")}))


class BrokenDraft(ProviderDraft):
    """Breaks a draft's promises by editing its pieces."""

    def __init__(self, edit: Callable[[list[DraftPiece], int], Sequence[object]]) -> None:
        super().__init__(Honest())
        self.edit = edit

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with super().draft(request, max_tokens) as pieces, aclosing(self._edited(pieces, max_tokens)) as out:
            yield out

    async def _edited(self, pieces: AsyncIterator[DraftPiece], max_tokens: int) -> AsyncGenerator[DraftPiece]:
        for piece in self.edit([piece async for piece in pieces], max_tokens):
            yield cast("DraftPiece", piece)


class TextDraft:
    """A draft of text alone."""

    name = "text"

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with RandomDraft().draft(request, max_tokens) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Nothing to release."""


class StaysOpenDraft(TextDraft):
    """Nobody closes the pieces."""

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:  # noqa: ARG002 - it says the same to all
        yield stream_texts_as_draft_pieces(["a", "b"][:max_tokens])


class RefusingDraft(RandomDraft):
    def token_draft_refusal(self, target: TokenModel) -> str:  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride] - the fault
        return f"not for {target.name}"


class StrayingDraft(RandomDraft):
    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:
        larger = TableModel(vocab_size=100 * target.vocab_size)
        return super().open_token_draft(larger, choose, prompt_ids)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ProviderDraft(Honest()),
        lambda: ProviderDraft(ScriptedProvider("")),
        lambda: ProviderDraft(LocalProvider(TableModel("some text of a draft"))),
        RandomDraft,
    ],
    ids=["provider", "empty", "local", "random"],
)
def test_a_draft_that_keeps_the_contract_passes(make: Callable[[], DraftProvider]) -> None:
    """Drafts by text pass without a target."""
    run_virtual(check_draft_conformance(make))


@pytest.mark.parametrize(
    "make", [lambda: ProviderDraft(LocalProvider(TableModel("abc", seed=1))), RandomDraft], ids=["local", "random"]
)
def test_a_token_drafter_that_keeps_the_contract_passes(make: Callable[[], DraftProvider]) -> None:
    """Drafts by token pass with a target of their vocabulary."""
    run_virtual(check_draft_conformance(make, target=TableModel()))


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (lambda: BrokenDraft(lambda pieces, _: pieces[:-1]), "the last piece, and no other"),
        (lambda: BrokenDraft(lambda pieces, _: [*pieces, pieces[-1]]), "the last piece, and no other"),
        (lambda: BrokenDraft(lambda pieces, _: pieces[:0]), "the last piece, and no other"),
        (lambda: BrokenDraft(lambda pieces, _: ["text", *pieces]), "'text' is not a DraftPiece"),
        (
            lambda: BrokenDraft(lambda _, n: [DraftPiece(" a")] * (n + 1) + [DraftPiece("", None, "stop")]),
            "a draft of at most 8 tokens had 9",
        ),
        (StaysOpenDraft, "nothing may come after the context was left"),
        (lambda: ProviderDraft(SharesItsState()), "streams must not disturb each other"),
        (lambda: ProviderDraft(TranslatesCancellation()), "turned into TargetError"),
        (lambda: ProviderDraft(ClosesOnce()), "calling aclose twice must be harmless"),
    ],
)
def test_a_broken_promise_of_a_draft_is_named(make: Callable[[], DraftProvider], promise: str) -> None:
    """Each fault of a draft fails by its own promise."""
    with pytest.raises(ConformanceError, match=promise):
        run_virtual(check_draft_conformance(make))


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (lambda: ProviderDraft(Honest()), "refuses the target table:model: draft scripted:script gives text"),
        (RefusingDraft, "refuses the target table:model: not for table:model"),
        (StrayingDraft, "drafted ids must be below 258"),
        (TextDraft, "it must be a TokenDrafter"),
    ],
)
def test_a_broken_promise_of_a_token_drafter_is_named(make: Callable[[], DraftProvider], promise: str) -> None:
    """With a target, the promises of a TokenDrafter are checked as well."""
    with pytest.raises(ConformanceError, match=promise):
        run_virtual(check_draft_conformance(make, target=TableModel()))
