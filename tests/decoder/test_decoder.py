"""The decoder: request in, verified text out, whatever draft, target, caller and clock do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType
from typing import Any

import pytest

from llm_spec import (
    AnswerStarted,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    CircuitOpenError,
    CostAware,
    DraftProvider,
    Fallback,
    Finish,
    Fixed,
    InvalidRequestError,
    LlmProvider,
    ModelOutputError,
    PromptLookup,
    ReferenceDraft,
    RetryPolicy,
    Round,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    StreamEvent,
    TargetError,
    TextDelta,
    ToolCallDelta,
    TransientError,
    UnsupportedError,
    Usage,
    open_provider,
)
from llm_spec.contract.entry import ProviderEntry
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.events import LocalTimings
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.local import threads as worker
from llm_spec.testing import (
    CharTokenizer,
    LocalProvider,
    RandomDraft,
    ScriptedProvider,
    TableModel,
    VirtualClockEventLoop,
    run_virtual,
)

STORY = "It is a truth universally acknowledged, that a café in want of a crème brûlée is 😀."
ASK = "tell"
STEP_S = 1000.0


def story_model(**options: Any) -> TableModel:
    return TableModel(STORY, order=16, **options)


def slow_model() -> TableModel:
    """Each step takes `STEP_S` of the virtual clock, beside which what the machine needs is nothing."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockEventLoop)
    return story_model(forward_s=STEP_S, sleep=loop.sleep_in_thread)


def random_model(seed: int = 3, **options: Any) -> TableModel:
    return TableModel(tokenizer=CharTokenizer("abcdelt "), seed=seed, **options)


def decoder_of(draft: Any, target: Any, **config: Any) -> SpeculativeDecoder:
    if isinstance(target, TableModel):
        target = LocalProvider(target)
    if isinstance(draft, TableModel):
        draft = LocalProvider(draft)
    return SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(**config))


# ------------------------------------------------------------------------------------------ exactness

DRAFTS: dict[str, Callable[[], Any]] = {
    "same": lambda: random_model(3),
    "other": lambda: random_model(4),
    "random": lambda: RandomDraft(5),
    "lookup": lambda: PromptLookup(min_ngram=1),
    "given": lambda: ReferenceDraft("abcabcabc"),
    "text only": lambda: ScriptedProvider("abc"),
    "none": lambda: None,
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_the_draft_does_not_change_the_answer(draft: str, temperature: float) -> None:
    """One seed, one text: with any draft and any lookahead the answer is that of the target alone."""
    plain = decoder_of(None, random_model())
    for seed in range(3):
        options: Any = {"temperature": temperature, "seed": seed, "max_tokens": 40, "top_p": 0.95}
        expected = await plain.decode(ASK, **options)
        for lookahead in (Fixed(1), Fixed(3), Fixed(8), CostAware()):
            result = await decoder_of(DRAFTS[draft](), random_model(), lookahead=lookahead).decode(ASK, **options)
            assert result.content == expected.content
            assert (result.finish_reason, result.stopped_by) == (expected.finish_reason, expected.stopped_by)
            assert result.usage == expected.usage
            assert (result.guarantee, result.same_text, result.seed) == ("exact", True, seed)
            assert result.fallbacks == ()


async def test_a_result_tells_the_seed_it_was_drawn_with() -> None:
    """A sampled answer without a seed can be had again by the one in its result; others differ."""
    decoder = decoder_of(random_model(4), random_model())
    options: Any = {"temperature": 3.0, "max_tokens": 60}
    first, second = await decoder.decode(ASK, **options), await decoder.decode(ASK, **options)
    assert first.seed is not None
    assert first.seed != second.seed
    assert (await decoder.decode(ASK, **options, seed=first.seed)).content == first.content


async def test_the_configurations_seed_is_for_requests_without_one() -> None:
    """A request's own seed wins."""
    decoder = decoder_of(None, random_model(), seed=7)
    assert (await decoder.decode(ASK, temperature=1.0, max_tokens=5)).seed == 7
    assert (await decoder.decode(ASK, temperature=1.0, max_tokens=5, seed=8)).seed == 8


async def test_a_stream_is_the_decoded_text_piece_by_piece() -> None:
    """Deltas joined are the content; the last event carries the result; rounds come only when asked for."""
    decoder = decoder_of(ReferenceDraft(STORY), story_model(), lookahead=Fixed(4))
    result = await decoder.decode(ASK)
    for rounds in (False, True):
        async with decoder.stream(ASK, rounds=rounds) as events:
            seen = [event async for event in events]
        assert "".join(event.text for event in seen if isinstance(event, TextDelta)) == result.content == STORY
        assert isinstance(seen[-1], SpeculativeFinish)
        assert seen[-1].result is not None
        assert seen[-1].result.content == STORY
        assert sum(isinstance(event, Finish) for event in seen) == 1
        assert any(isinstance(event, Round | Fallback) for event in seen) == rounds
    origins = {event.origin for event in seen if isinstance(event, TextDelta)}
    assert "accepted" in origins


@pytest.mark.virtual_clock
async def test_text_comes_as_it_is_verified() -> None:
    """The first text does not wait for the last."""
    result = await decoder_of(None, slow_model()).decode(ASK)
    assert result.timings.first_text_s is not None
    assert result.timings.first_text_s < result.timings.total_s / 4


@pytest.mark.parametrize(
    "messages",
    [ASK, [ChatMessage("user", ASK)], [{"role": "user", "content": ASK}], ChatRequest.create(ASK)],
    ids=["text", "messages", "dicts", "request"],
)
async def test_every_form_of_messages_is_accepted(messages: Any) -> None:
    """A text, messages, OpenAI dicts and a whole request mean the same."""
    assert (await decoder_of(ReferenceDraft(STORY), story_model()).decode(messages)).content == STORY


async def test_options_beside_a_whole_request_are_not_ignored() -> None:
    """They are followed or refused; a cap that is silently dropped would be neither."""
    decoder = decoder_of(None, story_model())
    try:
        result = await decoder.decode(ChatRequest.create(ASK), max_tokens=3)
    except (InvalidRequestError, TypeError):
        return
    assert result.content == STORY[:3]


# ----------------------------------------------------------------------------------------------- caps


async def ending(draft: Any, config: dict[str, Any], **options: Any) -> tuple[str, str, str | None]:
    result = await decoder_of(draft, story_model(), lookahead=Fixed(4), **config).decode(ASK, **options)
    return result.content, result.finish_reason, result.stopped_by


@pytest.mark.parametrize("draft", [None, ReferenceDraft(STORY), RandomDraft()], ids=["plain", "given", "random"])
async def test_each_cap_says_that_it_was_the_one(draft: Any) -> None:
    """`finish_reason` and `stopped_by` of every ending, with and without a draft."""
    assert await ending(draft, {}) == (STORY, "stop", "eos")
    assert await ending(draft, {}, max_tokens=6) == (STORY[:6], "length", "max_tokens")
    assert await ending(draft, {"max_total_tokens": 6}) == (STORY[:6], "length", "max_total_tokens")
    assert await ending(draft, {"max_total_tokens": 6}, max_tokens=9) == (STORY[:6], "length", "max_total_tokens")
    assert await ending(draft, {"max_total_tokens": 9}, max_tokens=6) == (STORY[:6], "length", "max_tokens")
    assert await ending(draft, {"max_total_tokens": 1000}) == (STORY, "stop", "eos")
    assert await ending(draft, {}, stop="truth") == (STORY.split("truth", maxsplit=1)[0], "stop", "stop_string")
    assert await ending(draft, {"max_draft_tokens": 7}) == (STORY, "stop", "eos")
    content, *how = await ending(draft, {"max_iterations": 3})
    assert how == ["length", "max_iterations"]
    assert STORY.startswith(content)


async def test_the_cap_on_draft_tokens_is_kept() -> None:
    """No more are drafted, the rest is plain, the answer is unchanged."""
    decoder = decoder_of(ReferenceDraft(STORY), story_model(), lookahead=Fixed(4), max_draft_tokens=10)
    result = await decoder.decode(ASK)
    assert result.stats.num_draft_tokens == 10
    assert result.stats.num_plain_steps > 0
    assert result.content == STORY


@pytest.mark.virtual_clock
@pytest.mark.parametrize("draft", [None, ReferenceDraft(STORY), RandomDraft()], ids=["plain", "given", "random"])
async def test_a_deadline_gives_the_verified_text_so_far(draft: Any) -> None:
    """No exception: the text up to then, at the end of the step under way, and the thread has ended."""
    model = slow_model()
    result = await decoder_of(draft, model, lookahead=Fixed(1), deadline_s=4.5 * STEP_S).decode(ASK)
    assert result.timings.total_s == pytest.approx(5 * STEP_S, rel=0.05)
    assert (result.finish_reason, result.stopped_by) == ("length", "deadline")
    assert STORY.startswith(result.content)
    assert result.content
    assert (model.num_open, len(model.widths)) == (0, 5)


@pytest.mark.virtual_clock
async def test_a_deadline_before_the_first_token() -> None:
    """A target that has not begun gives an empty answer, not an error."""
    result = await decoder_of(None, slow_model(), deadline_s=0.1 * STEP_S).decode(ASK)
    assert (result.content, result.stopped_by) == ("", "deadline")
    assert result.timings.first_text_s is None


async def test_a_deadline_while_waiting_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a request whose turn never came ends in time."""
    monkeypatch.setattr(worker, "_NUM_PLACES", 1)
    model = story_model()
    async with worker._get_places(asyncio.get_running_loop()):
        result = await decoder_of(None, model, deadline_s=0.05).decode(ASK)
    assert (result.content, result.stopped_by) == ("", "deadline")
    assert model.num_open == model.num_closed == 0


def test_a_deadline_of_a_remote_target_is_kept_to_the_moment() -> None:
    """By the virtual clock: text of whole pieces, at the deadline, and the stream is left."""
    target = ScriptedProvider("one two three four five", delay_piece_s=1.0)
    result = run_virtual(decoder_of(None, target, deadline_s=2.5).decode(ASK))
    assert (result.content, result.stopped_by) == ("one two three", "deadline")
    assert result.timings.total_s == pytest.approx(2.5)
    assert (target.num_open, target.num_closed) == (0, 1)


def test_a_targets_own_timeout_is_not_the_deadline() -> None:
    """A TimeoutError of the target is its failure."""
    target = ScriptedProvider("one two", fail_at={1: TimeoutError("read timed out")})
    with pytest.raises(TargetError, match="TimeoutError") as caught:
        run_virtual(decoder_of(None, target, deadline_s=100.0).decode(ASK))
    assert caught.value.partial_text == "one"


async def test_a_full_context_ends_the_answer() -> None:
    """With the window's own name."""
    result = await decoder_of(ReferenceDraft(STORY), story_model(context_length=20)).decode(ASK)
    assert (result.finish_reason, result.stopped_by) == ("length", "context_length")
    assert len(result.content) == 20 - 5


# ------------------------------------------------------------------------------------ failing targets


@pytest.mark.parametrize("at", [0, 2])
async def test_what_a_target_raises_becomes_a_target_error(at: int) -> None:
    """With the text so far, the provider's name, and the original as its cause."""
    error = ConnectionResetError("peer went away")
    target = ScriptedProvider("one two three", name="scripted:t", fail_at={at: error})
    with pytest.raises(TargetError, match=r"scripted:t.*ConnectionResetError.*peer went away") as caught:
        await decoder_of(None, target).decode(ASK)
    assert caught.value.partial_text == "one two"[: [0, 0, 7][at]]
    assert caught.value.__cause__ is error
    assert target.num_open == 0


async def test_a_targets_own_error_gets_the_text_so_far() -> None:
    """A TargetError passes through as it is."""
    error = TargetError("overloaded")
    target = ScriptedProvider("one two three", fail_at={1: error})
    with pytest.raises(TargetError) as caught:
        await decoder_of(None, target).decode(ASK)
    assert caught.value is error
    assert error.partial_text == "one"


class OddProvider:
    """A provider that fails where well-behaved ones do not."""

    name = "odd:provider"
    capabilities = Capabilities()

    def __init__(self, where: str) -> None:
        self._where = where

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:  # noqa: ARG002
        if self._where == "call":
            raise OSError("odd")
        return self._stream()

    @asynccontextmanager
    async def _stream(self) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        if self._where == "enter":
            raise OSError("odd")
        yield self._events()
        if self._where == "exit":
            raise OSError("odd")

    async def _events(self) -> AsyncGenerator[StreamEvent]:
        yield TextDelta("one")
        yield Finish("stop")

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """Nothing to release."""


@pytest.mark.parametrize("where", ["call", "enter", "exit"])
async def test_wherever_a_target_fails_the_error_is_ours(where: str) -> None:
    """Calling, entering or leaving its stream: a foreign exception never reaches the caller (an answer may)."""
    try:
        result = await decoder_of(None, OddProvider(where)).decode(ASK)
    except TargetError as error:
        assert "odd" in str(error)  # noqa: PT017 - an answer would do as well
    else:
        assert where == "exit"
        assert result.content == "one"


@pytest.mark.parametrize("draft", [None, ReferenceDraft(STORY), RandomDraft()], ids=["plain", "given", "random"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_nan_logits_of_the_target_are_an_error_with_the_text_so_far(draft: Any, temperature: float) -> None:
    """The error says what is wrong and where; its text is a beginning of the answer; all is closed."""
    model = story_model(nan_at=range(25, 1000))
    with pytest.raises(ModelOutputError, match="NaN") as caught:
        await decoder_of(draft, model, lookahead=Fixed(4)).decode(ASK, temperature=temperature, seed=1)
    assert isinstance(caught.value, TargetError)
    assert "\n" not in str(caught.value)
    if not temperature:
        assert STORY.startswith(caught.value.partial_text)
    assert caught.value.partial_text
    assert model.num_open == 0


async def test_nan_logits_behind_a_rejection_are_never_looked_at() -> None:
    """Only what plain decoding would have computed can fail."""
    model = story_model()
    model.nan_at = range(5 + len(STORY.encode()), 1000)  # behind the answer's EOS
    result = await decoder_of(RandomDraft(), model, lookahead=Fixed(8)).decode(ASK)
    assert result.content == STORY


async def test_a_model_that_breaks_is_a_target_error() -> None:
    """Also an exception out of a local model's forward, with the verified text."""
    model = story_model(fail_at={20: MemoryError("out of memory")})
    with pytest.raises(TargetError, match="MemoryError") as caught:
        await decoder_of(ReferenceDraft(STORY), model).decode(ASK)
    assert STORY.startswith(caught.value.partial_text)
    assert model.num_open == 0


async def test_a_stream_without_an_end_is_an_error() -> None:
    """The text so far is in it."""
    with pytest.raises(TargetError, match="finish reason") as caught:
        await decoder_of(None, ScriptedProvider([TextDelta("one")])).decode(ASK)
    assert caught.value.partial_text == "one"


# --------------------------------------------------------------------- concurrency and cancellation


async def test_fifty_at_once_are_as_each_alone() -> None:
    """Concurrent calls of one decoder share no state."""
    draft, target = random_model(4), random_model()
    decoder = decoder_of(draft, target, lookahead=CostAware())
    requests: list[Any] = [{"temperature": 1.0, "seed": i, "max_tokens": 20 + i % 7} for i in range(50)]
    alone = [await decoder.decode(f"ab {'cd' * (i % 3)}", **options) for i, options in enumerate(requests)]
    together = await asyncio.gather(
        *(decoder.decode(f"ab {'cd' * (i % 3)}", **options) for i, options in enumerate(requests))
    )
    for one, other in zip(alone, together, strict=True):
        assert (one.content, one.stopped_by, one.usage, one.seed) == (
            other.content,
            other.stopped_by,
            other.usage,
            other.seed,
        )
        assert other.stats.num_emitted_tokens == other.usage.output_tokens if other.usage else False
    assert draft.num_open == target.num_open == 0


@pytest.mark.virtual_clock
async def test_cancelling_stops_the_work_behind_it() -> None:
    """It stays cancellation, closes both caches, and no forward pass runs after it."""
    draft, target = story_model(), slow_model()
    task = asyncio.create_task(decoder_of(draft, target, lookahead=Fixed(2)).decode(ASK))
    await asyncio.sleep(3.5 * STEP_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert draft.num_open == target.num_open == 0
    assert len(target.widths) == 4
    await asyncio.sleep(10 * STEP_S)
    assert len(target.widths) == 4


@pytest.mark.virtual_clock
async def test_leaving_a_stream_early_stops_the_work_behind_it() -> None:
    """By a break, and by an exception of the caller's own, which stays what it is."""
    for error in (None, KeyError("the caller's own")):
        draft, target = story_model(), slow_model()
        try:
            async with decoder_of(draft, target).stream(ASK) as events:
                await anext(events)
                if error is not None:
                    raise error
        except KeyError as caught:
            assert caught is error  # noqa: PT017 - the other turn of the loop raises nothing
        assert draft.num_open == target.num_open == 0
        num_forwards = len(target.widths)
        await asyncio.sleep(10 * STEP_S)
        assert len(target.widths) == num_forwards


def test_cancelling_leaves_a_remote_target() -> None:
    """Nothing goes on generating upstream."""
    target = ScriptedProvider("one two three", delay_piece_s=1.0)

    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await decoder_of(None, target).decode(ASK)

    run_virtual(cancel())
    assert (target.num_open, target.num_closed) == (0, 1)


async def test_a_draft_being_cancelled_inside_is_not_the_callers_cancellation() -> None:
    """A remote draft that raises CancelledError by itself does not cancel the request."""
    draft = ScriptedProvider("one", fail_at={0: asyncio.CancelledError()})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType] - some libraries do raise it
    result = await decoder_of(draft, ScriptedProvider("one"), strategy="regenerate").decode(ASK)
    assert result.content == "one"


# ------------------------------------------------------------------------------- a provider itself


def test_the_decoder_is_a_provider() -> None:
    """It has what a provider has, and does not offer its target's tokens past the draft."""
    decoder = decoder_of(ReferenceDraft("x"), story_model())
    assert isinstance(decoder, LlmProvider)
    assert decoder.name == "table:model+given-text"
    assert decoder.capabilities.token_model is None
    assert decoder.capabilities.context_length == 4096
    assert decoder_of(None, story_model()).name == "table:model"


async def test_complete_is_decode_as_a_provider_gives_it() -> None:
    """The same text and ending, in a ChatResponse."""
    response = await decoder_of(ReferenceDraft(STORY), story_model()).complete(ChatRequest.create(ASK))
    assert (response.content, response.finish_reason, response.stopped_by) == (STORY, "stop", "eos")
    assert response.usage is not None


async def test_a_pair_can_be_the_target_of_another() -> None:
    """Nested, the text is the innermost target's, and its ending is reported."""
    inner = decoder_of(ReferenceDraft(STORY), story_model())
    outer = decoder_of(ReferenceDraft("x"), inner)
    result = await outer.decode(ASK, max_tokens=9)
    assert (result.content, result.stopped_by, result.strategy) == (STORY[:9], "max_tokens", "plain")
    result = await decoder_of(None, decoder_of(None, story_model(), max_total_tokens=4)).decode(ASK)
    assert (result.content, result.stopped_by) == (STORY[:4], "max_total_tokens")


async def test_a_pair_can_be_the_draft_of_another() -> None:
    """A decoder drafts like any provider of text."""
    draft = decoder_of(ReferenceDraft(STORY), story_model())
    result = await decoder_of(draft, ScriptedProvider(STORY), strategy="regenerate").decode(ASK)
    assert result.content == STORY
    assert result.stats.draft_acceptance_rate == 1.0
    assert result.fallbacks == ()
    result = await decoder_of(draft, story_model()).decode(ASK)
    assert (result.content, result.strategy) == (STORY, "plain")


async def test_tool_calls_pass_through() -> None:
    """A target's tool calls are in the result, and its reason to stop."""
    script = [
        ToolCallDelta(0, "1", "f", "{"),
        ToolCallDelta(0, arguments="}"),
        Finish("tool_calls", None, "tool_calls"),
    ]
    result = await decoder_of(ReferenceDraft("x"), ScriptedProvider(script)).decode(ASK, tools=[{"type": "function"}])
    assert (result.finish_reason, result.stopped_by) == ("tool_calls", "tool_calls")
    assert result.tool_calls[0].arguments == "{}"
    assert result.message.to_openai()["tool_calls"][0]["function"]["name"] == "f"


async def test_a_remote_targets_ending_is_told_as_far_as_it_is_known() -> None:
    """`length` under a cap of the request's is that cap; a reason nobody gave stays None."""
    result = await decoder_of(None, ScriptedProvider("one two three")).decode(ASK, max_tokens=2)
    assert (result.content, result.finish_reason, result.stopped_by) == ("one two", "length", "max_tokens")
    result = await decoder_of(None, ScriptedProvider("one", finish_reason="content_filter")).decode(ASK)
    assert (result.finish_reason, result.usage) == ("content_filter", Usage(input_tokens=1, output_tokens=1))


# -------------------------------------------------------------------------------- strings and closing


def install(monkeypatch: pytest.MonkeyPatch, **entries: ProviderEntry) -> None:
    module = ModuleType("some_package")
    for name, entry in entries.items():
        setattr(module, name, entry)
    monkeypatch.setitem(sys.modules, "some_package", module)
    points = EntryPoints(EntryPoint(name, f"some_package:{name}", "llm_spec.providers") for name in entries)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points.select(group=group))


async def test_strings_open_providers_and_only_those_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the decoder opened it closes, once; what it was given stays the caller's."""
    opened: list[ScriptedProvider] = []

    def load(model: str, base_url: str | None) -> LlmProvider | DraftProvider:  # noqa: ARG001 - it has none
        opened.append(ScriptedProvider("answer", name=f"fake:{model}"))
        return opened[-1]

    install(monkeypatch, fake=ProviderEntry(load=load, summary="for this test"))
    async with SpeculativeDecoder(target="fake:target", draft="fake:draft") as decoder:
        assert decoder.name == "fake:target+fake:draft"
        assert (await decoder.decode(ASK)).content == "answer"
        assert [provider.num_acloses for provider in opened] == [0, 0]
    await decoder.aclose()
    assert sorted((provider.name, provider.num_acloses) for provider in opened) == [
        ("fake:draft", 1),
        ("fake:target", 1),
    ]
    given = ScriptedProvider("answer")
    async with SpeculativeDecoder(target="fake:target", draft=given):
        pass
    assert (given.num_acloses, opened[-1].num_acloses) == (0, 1)


async def test_one_that_cannot_be_closed_does_not_keep_the_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are closed, and the error is reported."""
    opened: list[ScriptedProvider] = []

    class Unclosable(ScriptedProvider):
        async def aclose(self) -> None:
            await super().aclose()
            raise OSError("cannot close")

    def load(model: str, base_url: str | None) -> LlmProvider | DraftProvider:  # noqa: ARG001 - it has none
        opened.append(Unclosable("x") if model == "draft" else ScriptedProvider("x"))
        return opened[-1]

    install(monkeypatch, fake=ProviderEntry(load=load, summary="for this test"))
    with pytest.raises(OSError, match="cannot close"):
        async with SpeculativeDecoder(target="fake:target", draft="fake:draft"):
            pass
    assert [provider.num_acloses for provider in opened] == [1, 1]


# -------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, ["messages is empty"]),
        ([{"role": "robot", "content": "x"}], {}, ["role", "'robot'"]),
        ([{"role": "user", "content": 5}], {}, ["content"]),
        (["just text"], {}, ["message"]),
        (ASK, {"max_tokens": 0}, ["max_tokens", "0"]),
        (ASK, {"max_tokens": -1}, ["max_tokens", "-1"]),
        (ASK, {"temperature": float("nan")}, ["temperature", "nan"]),
        (ASK, {"stop": [""]}, ["stop"]),
        (ASK, {"tools": [{"type": "function"}]}, ["tools"]),
        (ASK, {"response_format": {"type": "json_object"}}, ["response_format"]),
        (ASK, {"extra": {"x": 1}}, ["x is set"]),
        (ASK, {"logit_bias": {100_000: 1.0}}, ["logit_bias", "100000"]),
        ("x" * 5000, {}, ["5001", "4096"]),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, ["text"]),
    ],
    ids=str,
)
async def test_bad_input_is_a_one_line_error(messages: Any, options: dict[str, Any], words: list[str]) -> None:
    """A request that cannot be served is refused by name, before or on its way to a local model."""
    model = story_model()
    for draft in (None, RandomDraft()):
        with pytest.raises(InvalidRequestError) as caught:
            await decoder_of(draft, model).decode(messages, **options)
        text = str(caught.value)
        assert "\n" not in text
        for word in words:
            assert word in text
    assert model.num_open == 0


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("x" * 200, ["200 characters", "20 tokens"]),
        ([{"role": "user", "content": ""}] * 20, ["20 messages", "20 tokens"]),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 200}], ["201 characters"]),
    ],
    ids=["text", "messages", "two texts"],
)
async def test_what_cannot_fit_is_refused_before_it_is_encoded(messages: Any, words: list[str]) -> None:
    """To encode a long text takes seconds."""

    class Longest(CharTokenizer):
        max_token_chars = 9

        def encode_chat(self, request: ChatRequest) -> list[int]:
            raise AssertionError(request)

    with pytest.raises(InvalidRequestError) as caught:
        await decoder_of(None, TableModel(tokenizer=Longest("xy"), context_length=20)).decode(messages)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [0, 33, -1])
def test_bad_lookahead_and_caps_are_refused(value: int) -> None:
    """At the API: field, value and range in one line."""
    with pytest.raises(ConfigError, match=f"lookahead is {value}"):
        decoder_of(None, story_model(), lookahead=Fixed(value))
    if value < 0:
        for field in ("max_draft_tokens", "max_total_tokens", "max_iterations"):
            with pytest.raises(ConfigError, match=f"{field} is {value}"):
                decoder_of(None, story_model(), **{field: value})


async def test_mismatched_vocabularies_mean_plain_or_a_clear_refusal() -> None:
    """`auto` goes on without the draft; `tokens` says why it cannot."""
    draft = TableModel(name="table:draft", tokenizer=CharTokenizer("abc"))
    result = await decoder_of(draft, story_model()).decode(ASK)
    assert (result.content, result.strategy, result.draft) == (STORY, "plain", None)
    with pytest.raises(UnsupportedError, match=r"table:draft.*table:model.*tokenizers") as caught:
        await decoder_of(draft, story_model(), strategy="tokens").decode(ASK)
    assert "\n" not in str(caught.value)


async def test_the_result_adds_up() -> None:
    """Counts of result, rounds and usage agree, and everything is JSON values."""
    result: SpeculativeResult = await decoder_of(
        TableModel(STORY, order=2, seed=9), story_model(), lookahead=Fixed(4)
    ).decode(ASK)
    assert result.usage is not None
    assert result.draft_usage is not None
    assert result.stats.num_rounds == len(result.rounds)
    assert result.stats.num_emitted_tokens == sum(r.num_emitted_tokens for r in result.rounds)
    assert result.usage.output_tokens == result.stats.num_emitted_tokens
    assert result.draft_usage.output_tokens == result.stats.num_draft_tokens
    assert result.timings.draft_s + result.timings.verify_s <= result.timings.total_s
    out = result.to_dict()
    assert out["draft_tokens"] == result.stats.num_draft_tokens
    assert out["usage"]["wasted"] == out["draft_tokens"] - out["accepted_tokens"]


async def test_a_local_answers_times_are_progress() -> None:
    """They come once, at the end, and only for those who want to hear of progress."""
    decoder = SpeculativeDecoder(target=LocalProvider(story_model()), draft=ReferenceDraft(STORY))
    for rounds in (False, True):
        async with decoder.stream(ASK, rounds=rounds) as stream:
            events = [event async for event in stream]
        assert [isinstance(event, LocalTimings) for event in events[-2:]] == [rounds, False]
        assert sum(isinstance(event, LocalTimings) for event in events) == rounds


# ------------------------------------------------------------------------------------------ variants and raw prompts


async def test_progress_begins_with_how_the_answer_is_given() -> None:
    """`AnswerStarted` comes before everything else, and only for those who want to hear of progress."""
    decoder = SpeculativeDecoder(target=LocalProvider(story_model()), draft=ReferenceDraft(STORY))
    async with decoder.stream(ASK, rounds=True) as events:
        first = await anext(events)
    assert isinstance(first, AnswerStarted)
    assert (first.strategy, first.guarantee, first.draft) == ("tokens", "exact", "given-text")
    async with decoder.stream(ASK) as events:
        assert not any(isinstance(event, AnswerStarted) for event in [e async for e in events])


async def test_the_same_pair_under_another_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """`with_config` changes the configuration of its own answers alone, and closing it closes nothing."""
    decoder = SpeculativeDecoder(target=LocalProvider(story_model()), draft=RandomDraft())
    plain = decoder.with_config(SpeculativeConfig(strategy="plain"))
    results = [await plain.decode(ASK), await decoder.decode(ASK)]
    assert [result.strategy for result in results] == ["plain", "tokens"]
    assert results[0].content == results[1].content == STORY
    closed: list[object] = []

    async def close(draft: RandomDraft) -> None:
        closed.append(draft)

    monkeypatch.setattr(RandomDraft, "aclose", close)
    async with SpeculativeDecoder(target=LocalProvider(story_model()), draft="random") as owner:
        await owner.with_config(SpeculativeConfig()).aclose()
        assert not closed
    assert len(closed) == 1


async def test_a_variant_shares_what_is_known_of_failures() -> None:
    """A target that failed often is left alone by all variants."""
    target = ScriptedProvider("never", fail_at={0: TransientError("down")})
    decoder = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(retry=RetryPolicy(max_attempts=1)))
    for _ in range(5):
        with pytest.raises(TransientError):
            await decoder.decode(ASK)
    assert decoder.is_target_circuit_open
    with pytest.raises(CircuitOpenError):
        await decoder.with_config(SpeculativeConfig()).decode(ASK)


async def test_a_raw_prompt_is_continued_without_a_template() -> None:
    """`raw` leaves the chat template out: a local model reads the text as it is."""
    provider = open_provider("builtin:target")
    model = provider.capabilities.token_model
    assert model is not None
    raw, chat = (ChatRequest.create("import os", raw=raw, max_tokens=8) for raw in (True, False))
    assert model.tokenizer.encode_chat(raw) == model.tokenizer.encode("import os") != model.tokenizer.encode_chat(chat)
    assert (await SpeculativeDecoder(target=provider, draft="lookup").decode(raw)).content
    await provider.aclose()


def test_a_raw_prompt_is_one_text() -> None:
    """A conversation cannot be raw."""
    with pytest.raises(InvalidRequestError, match="raw"):
        ChatRequest.create([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], raw=True)
