"""What a race costs: streams, tokens and prompts, and who pays for what is not used."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from support.draft_checks import ItemDraft
from support.racing import CODE, DRAFTS, SLOW, WORDS, racing, read, request_of
from support.targets import Target

from llm_spec import ChatRequest, Finish, Round, SpeculativeConfig, SpeculativeDecoder, StreamEvent
from llm_spec.contract.events import TargetStreamReport
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft

# ------------------------------------------------------------------------------------------ costs


def test_a_target_that_answers_at_once_asks_the_draft_for_no_more_than_a_server_takes() -> None:
    """Its tokens seem to take no time: the tokens worth drafting are bounded all the same."""

    async def check() -> None:
        asked: list[int] = []

        class Asked(ItemDraft):
            def draft(self, request: ChatRequest, max_tokens: int) -> Any:
                asked.append(max_tokens)
                return super().draft(request, max_tokens)

        decoder = racing(Asked(*split_into_pieces(WORDS)), Target(WORDS, first_token_s=0.5, token_s=1e-6))
        for _ in range(2):
            assert (await read(decoder, request_of())).text == WORDS
        assert 0 < max(asked) <= 1024

    run_virtual(check())


@pytest.mark.parametrize("counts", [True, False])
def test_the_first_answer_tells_plain_by_the_tokens_that_the_server_counts(*, counts: bool) -> None:
    """Two tokens of text without a space between them come in one piece, and look like one."""

    async def without_usage(_: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        async for event in events:
            yield event if counts or not isinstance(event, Finish) else replace(event, usage=None)

    pairs = Target(
        [b"a", b"b "] * 40, by_ids=False, continue_prefix=True, tokens_per_event=2, token_s=0.05, spoil=without_usage
    )
    result = run_virtual(racing(ItemDraft("x"), pairs).decode("tell"))
    assert result.plain_s == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("draft", ["never", "nothing", "differs at the first character"])
def test_a_useless_draft_is_asked_less_and_less(draft: str) -> None:
    """O(log) times at first, later once every 64 tokens."""

    async def check() -> None:
        answer = WORDS * 4
        useless = DRAFTS[draft](answer)
        calls = 0
        original = useless.draft

        def counting(request: ChatRequest, max_tokens: int) -> Any:
            nonlocal calls
            calls += 1
            return original(request, max_tokens)

        useless.draft = counting  # type: ignore[method-assign]
        await read(racing(useless, Target(answer, **SLOW)), request_of())
        assert 1 < calls <= 8 + len(split_into_pieces(answer)) / 64

    run_virtual(check())


def test_a_draft_that_writes_once_is_asked_once() -> None:
    """Its text is realigned with the answer instead; that still wins time."""

    async def check() -> None:
        draft = ItemDraft(*split_into_pieces("Sure. " + WORDS.replace("word60", "other")), continues_prefix=False)
        target = Target(WORDS, **SLOW)
        raced = await read(racing(draft, target, max_concurrent_streams=8), request_of())
        assert len(draft.requests) == 1
        assert draft.requests[0].prefix == ""
        assert raced.num_won > len(WORDS) / 4

    run_virtual(check())


def test_a_provider_that_cannot_continue_is_a_draft_that_writes_once() -> None:
    """A chat model as draft is asked once too, however often the answer departs from what it wrote."""

    async def check() -> None:
        draft = ScriptedProvider("Sure. " + WORDS.replace("word60", "other"))
        decoder = SpeculativeDecoder(
            target=Target(WORDS, **SLOW), draft=draft, config=SpeculativeConfig(strategy="race")
        )
        raced = await read(decoder, request_of())
        assert raced.text == WORDS
        assert len(draft.requests) == 1

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("num_streams", [2, 4, 12])
@pytest.mark.parametrize("agreement", [0.8, 0.98, 1.0])
def test_usage_is_what_the_target_was_asked_for(agreement: float, num_streams: int, by_ids: bool) -> None:
    """Written tokens add up: those of the answer, those cancelled, and at most one in flight for each call."""

    async def check() -> None:
        target = Target(WORDS, by_ids=by_ids, **SLOW)
        draft = SimulatedDraft(WORDS, agreement, 5, token_s=0.002)
        raced = await read(racing(draft, target, max_concurrent_streams=num_streams), request_of())
        usage, num_answer = raced.usage, len(split_into_pieces(WORDS))
        assert usage.output_tokens == num_answer + usage.cancelled_output_tokens
        assert 0 <= target.num_output_tokens - usage.output_tokens <= len(target.streams)
        assert (usage.extra_input_tokens > 0) == (len(target.streams) > 1)

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("agreement", [0.0, 0.9, 1.0])
def test_usage_where_a_stop_string_ends_the_answer(agreement: float, size: int, by_ids: bool) -> None:
    """What was written behind it is wasted, and no round tells of it."""

    async def check() -> None:
        target = Target(WORDS, by_ids=by_ids, tokens_per_event=size, **SLOW)
        draft = SimulatedDraft(WORDS, agreement, 5, token_s=0.002)
        raced = await read(racing(draft, target), request_of(stop=["word90"]))
        usage, num_answer = raced.usage, len(split_into_pieces(raced.text))
        assert raced.finish.stopped_by == "stop_string"
        own = usage.output_tokens - usage.cancelled_output_tokens
        assert num_answer <= own <= num_answer + size  # it is known by the piece of the stream
        assert own < usage.output_tokens or agreement < 1.0
        assert 0 <= target.num_output_tokens - usage.output_tokens <= size * len(target.streams)
        assert sum(e.num_emitted_tokens for e in raced.events if isinstance(e, Round)) <= own

    run_virtual(check())


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("agreement", [0.9, 1.0])
def test_a_cap_by_text_where_several_tokens_come_at_once(agreement: float, size: int) -> None:
    """It is kept to the piece, and no stream is asked for more than is left."""

    async def check() -> None:
        pieces = split_into_pieces(WORDS)
        for max_tokens in (5, 50, 51, 64, 100):
            target = Target(WORDS, tokens_per_event=size, **SLOW)
            draft = SimulatedDraft(WORDS, agreement, 5)
            raced = await read(racing(draft, target, max_total_tokens=max_tokens), request_of())
            assert raced.text == "".join(pieces[:max_tokens])
            assert (raced.finish.finish_reason, raced.finish.stopped_by) == ("length", "max_total_tokens")
            assert raced.usage.output_tokens - raced.usage.cancelled_output_tokens == max_tokens
            for request in target.requests:
                num_prefix = len(split_into_pieces(request.prefix))
                assert request.max_tokens == max_tokens - num_prefix

    run_virtual(check())


FINE = re.compile(r" ?\w{1,3}|[^\w\s]+|\s+")  # `radius` is two
COARSE = re.compile(r" ?\w+[^\w\s]*|[^\w\s]+|\s+")  # `area0(` is one, as is a line break with its indentation


@pytest.mark.parametrize("pattern", [FINE, COARSE], ids=["fine", "coarse"])
@pytest.mark.parametrize("agreement", [0.98, 1.0])
def test_a_cap_by_text_counts_the_targets_tokens_not_pieces(agreement: float, pattern: re.Pattern[str]) -> None:
    """Where a frame is a token, an answer has as many as the target alone would write."""

    async def check() -> None:
        won = 0
        for max_tokens in range(40, 160, 10):
            target = Target(
                [token.encode() for token in pattern.findall(CODE)], by_ids=False, continue_prefix=True, **SLOW
            )
            raced = await read(racing(SimulatedDraft(CODE, agreement, 5), target), request_of(max_tokens=max_tokens))
            assert raced.text == "".join(pattern.findall(CODE)[:max_tokens])
            assert (raced.finish.finish_reason, raced.finish.stopped_by) == ("length", "max_tokens")
            won += raced.num_won
        assert won > 150

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_an_answer_has_no_more_rounds_than_it_may(most: int, by_ids: bool) -> None:
    """It ends with the last one."""

    async def check() -> None:
        target = Target(WORDS, by_ids=by_ids, **SLOW)
        raced = await read(racing(SimulatedDraft(WORDS, 0.9, 5), target, max_iterations=most), request_of())
        assert (raced.finish.finish_reason, raced.finish.stopped_by) == ("length", "max_iterations")
        assert WORDS.startswith(raced.text)
        rounds = [event for event in raced.events if isinstance(event, Round)]
        assert len(rounds) == most
        assert sum(r.num_emitted_tokens for r in rounds) == len(split_into_pieces(raced.text))

    run_virtual(check())


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_stream_counts_until_it_is_closed(most: int) -> None:
    """No more are open at once than may be, those that are being closed included."""

    async def check() -> None:
        for agreement in (0.9, 1.0):
            target = Target(WORDS, close_s=0.2, **SLOW)
            draft = SimulatedDraft(WORDS, agreement, 5)
            raced = await read(racing(draft, target, max_concurrent_streams=most), request_of())
            assert raced.text == WORDS
            assert target.max_open == most
            assert len(target.streams) >= most

    run_virtual(check())


def test_no_extra_cost_means_plain() -> None:
    """`max_extra_cost=0`: the target is called once, and nothing is read or thrown away beside it."""

    async def check() -> None:
        target = Target(WORDS, **SLOW)
        raced = await read(racing(SimulatedDraft(WORDS, 1.0, 0), target, max_extra_cost=0.0), request_of())
        assert (raced.text, len(target.streams)) == (WORDS, 1)
        assert (raced.usage.extra_input_tokens, raced.usage.cancelled_output_tokens) == (0, 0)

    run_virtual(check())


@pytest.mark.parametrize("bound", [0.2, 1.0, 3.0])
def test_extra_cost_stays_within_its_bound(bound: float) -> None:
    """Tokens read and thrown away, by those that the target alone would read or write."""

    async def check() -> None:
        ratios: list[float] = []
        for agreement in (0.5, 0.9, 0.98, 1.0):
            draft = SimulatedDraft(WORDS, agreement, 5, token_s=0.002)
            decoder = racing(draft, Target(WORDS, **SLOW), max_concurrent_streams=12, max_extra_cost=bound)
            usage = (await read(decoder, request_of())).usage
            alone = usage.input_tokens - usage.extra_input_tokens + usage.output_tokens - usage.cancelled_output_tokens
            ratios.append((usage.extra_input_tokens + usage.cancelled_output_tokens) / alone)
        assert max(ratios) <= bound
        assert bound < 3 or max(ratios) > 0

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("agreement", [0.9, 1.0])
def test_rounds_tell_what_draft_and_streams_took(agreement: float, by_ids: bool) -> None:
    """A stream's rounds follow one another from its opening on; the draft's time is that of the tokens judged."""

    async def check() -> None:
        target = Target(WORDS, by_ids=by_ids, **SLOW)
        raced = await read(racing(SimulatedDraft(WORDS, agreement, 5, token_s=0.002), target), request_of())
        rounds = [event for event in raced.events if isinstance(event, Round)]
        streams = [event for event in raced.events if isinstance(event, TargetStreamReport)]
        most_s = sum(stream.ended_s - stream.started_s for stream in streams if stream.is_used)
        assert 0.4 < sum(r.verify_s for r in rounds) <= most_s + 1e-6
        for report in rounds:
            tokens_s = SLOW["token_s"] * report.num_emitted_tokens
            assert tokens_s * 0.9 <= report.verify_s <= tokens_s + SLOW["first_token_s"] + 1e-6
            assert 0.0 <= report.draft_s <= 0.002 * (report.num_draft_tokens + 1) + 1e-6
        num_drafted = sum(r.num_draft_tokens for r in rounds)
        assert 0.5 * 0.002 * num_drafted < sum(r.draft_s for r in rounds) <= 0.002 * num_drafted + 1e-6

    run_virtual(check())
