"""Measuring, by virtual clock: what is timed, in which order, and what a failure leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llm_spec import ChatMessage, ChatRequest, ConfigError, PromptLookup, StreamEvent, TransientError
from llm_spec.cli.bench.prompts import BenchPrompt
from llm_spec.cli.bench.run import BenchOptions, BenchRun
from llm_spec.contract.endpoint import Feature
from llm_spec.contract.errors import InvalidRequestError, TargetError
from llm_spec.drafting.suffix import SuffixDraft
from llm_spec.testing import RuleBasedProvider, ScriptedProvider

from .doubles import TEXT, measure, pair, plain, prompts, report_of, script

pytestmark = pytest.mark.virtual_clock


async def test_times_are_those_of_the_clock_outside() -> None:
    """To the first token, between tokens, the longest pause, the whole; and ratios of them."""
    run = await measure([plain(script()), plain(script(token_s=0.05), "fast")], prompts(7))
    summary, fast = report_of(run).contenders
    assert run.is_complete
    assert summary.times.first.median_s == pytest.approx(0.2)
    assert summary.times.between.median_s == pytest.approx(0.1)
    assert summary.times.pause.median_s == pytest.approx(0.1)
    assert summary.times.whole.median_s == pytest.approx(0.2 + 6 * 0.1)  # its end comes after as long as a token
    assert summary.verdict == "reference"
    assert fast.ratios.median is not None
    assert fast.ratios.median.ratio == pytest.approx(2.0)
    assert (fast.ratios.totals, fast.ratios.first_ten) == (pytest.approx(2.0), pytest.approx(2.0))
    assert fast.verdict == "faster"
    assert (fast.texts.num_same, fast.texts.num_compared) == (7, 7)
    assert fast.tokens.answers == 7 * 6
    assert fast.times.tokens_per_s == pytest.approx(6 / 0.4)


async def test_contenders_rotate() -> None:
    """Each is equally often at each place; every answer is there once."""
    contenders = [plain(script(), name) for name in ("plain", "plain again", "other")]
    run = await measure(contenders, prompts(6), repeat=2)
    places = Counter((answer.key.contender, answer.key.place) for answer in run.answers)
    assert set(places.values()) == {4}
    assert len(places) == 9
    assert len({answer.key for answer in run.answers}) == len(run.answers) == 36


async def test_a_conversation_goes_on_from_plains_answers() -> None:
    """Whatever the others have said; its time is that of all turns."""
    hello, bye = (ChatMessage("user", text) for text in ("Hello", "Bye"))
    question = BenchPrompt(id="c", turns=((hello,), (bye,)))
    mine, other = script("mine"), script("something else", token_s=0.2)
    run = await measure([plain(mine), plain(other, "other")], [question], primes=False)
    said = (hello, ChatMessage("assistant", "mine"), bye)
    assert [request.messages for request in mine.requests[1:]] == [(hello,), said]
    assert [request.messages for request in other.requests[1:]] == [(hello,), said]
    ratios = report_of(run).contenders[1].ratios
    assert ratios.totals == pytest.approx((2 * 0.3) / (2 * 0.8))
    assert len(ratios.prompts) == 1


async def test_targets_read_each_prompt_before_it_is_timed() -> None:
    """One token for each address, not for each contender; not at all without priming."""
    for primes in (True, False):
        mine, again, other = script(), script(), script(name="scripted:other")
        run = await measure(
            [plain(mine), plain(again, "plain again"), plain(other, "other")], prompts(2), primes=primes
        )
        one_token = [sum(r.max_tokens == 1 for r in target.requests) for target in (mine, again, other)]
        assert one_token == ([2, 0, 2] if primes else [0, 0, 0])
        assert set(run.priming_s) == ({"scripted:script", "scripted:other"} if primes else set())


async def test_warm_up_is_not_counted() -> None:
    target = script()
    run = await measure([plain(target)], prompts(2), warmup=3, primes=False)
    assert len(target.requests) == 1 + 3 + 2  # one to connect
    assert len(run.answers) == 2


async def test_what_a_strategy_needs_is_tried_before_it_is_timed() -> None:
    """That a server lacks it is said by its answers."""

    class Discovering(ScriptedProvider):
        def __init__(self) -> None:
            super().__init__(TEXT)
            self.discovered: list[tuple[Feature, str]] = []  # and what was done then

        async def discover(self, feature: Feature) -> None:
            self.discovered.append((feature, steps[-1]))
            raise TransientError("nothing is known")

        def mark_feature_lost(self, feature: Feature) -> None:
            pass

    steps: list[str] = []
    scored, probed = Discovering(), Discovering()
    contenders = [plain(script()), pair(PromptLookup(), scored, "score"), pair(PromptLookup(), probed, "probe")]
    run = BenchRun(contenders, prompts(1), BenchOptions(), lambda _done, _total, step: steps.append(step))
    await run.measure_all_contenders()
    assert scored.discovered[0] == ("token_scorer", "score, discovery")
    assert probed.discovered[0] == ("token_endpoint", "probe, discovery")


async def test_a_strategy_that_refuses_is_left_out_at_once() -> None:
    """One line says why; the others are measured."""
    target = script()
    run = await measure([plain(target), pair(PromptLookup(), script(), "probe")], prompts(8))
    summary, probe = report_of(run).contenders
    assert (summary.num_answers, probe.num_answers) == (8, 0)
    assert probe.verdict == "failed"
    assert probe.failure is not None
    assert "probe" in probe.failure
    assert sum(answer.key.contender == "probe" for answer in run.answers) == 1


async def test_one_that_keeps_failing_is_left_out() -> None:
    """After three failures in a row; one that fails now and then is compared where it answers."""
    down = script(name="scripted:down", fail_at={0: TransientError("server down")})
    calls = iter(range(1000))

    def answer_now_and_then(_: ChatRequest) -> str:
        if next(calls) % 3 == 1:
            raise InvalidRequestError("too long")
        return TEXT

    contenders = [plain(script()), plain(down, "down"), plain(script(answer_now_and_then), "flaky")]
    run = await measure(contenders, prompts(12))
    summary, gone, flaky = report_of(run).contenders
    assert (gone.verdict, gone.num_answers) == ("failed", 0)
    assert gone.failure is not None
    assert "server down" in gone.failure
    assert "scripted:down" not in run.priming_s
    assert sum(answer.key.contender == "down" for answer in run.answers) == 3
    assert (summary.num_answers, flaky.num_answers, flaky.failure) == (12, 8, None)
    assert flaky.errors == ("too long",)
    assert len(flaky.ratios.prompts) == 8
    assert flaky.ratios.totals == pytest.approx(1.0)
    assert run.is_complete


async def test_the_first_reason_is_told() -> None:
    """Not what follows from it; an answer in between begins anew."""
    contender = plain(script())
    for reason in ("late", None, "server down", "circuit open", "circuit open", "circuit open"):
        assert contender.failure is None or reason == "circuit open"
        contender.drop_if_failing(None if reason is None else TargetError(reason))
    assert contender.failure == "server down"


async def test_plain_that_fails_ends_the_measurement() -> None:
    other = script()
    run = await measure([plain(script(fail_at={0: TransientError("down")})), plain(other, "other")], prompts(20))
    assert not run.is_complete
    assert report_of(run).plain.failure is not None
    assert sum(answer.key.contender == "other" for answer in run.answers) <= 3


class OneAtATime(ScriptedProvider):
    """A server that answers one request after another."""

    def __init__(self) -> None:
        super().__init__(TEXT, delay_piece_s=0.1)
        self._place = asyncio.Lock()

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with self._place, super().stream(request) as events:
            yield events


async def test_several_prompts_at_once() -> None:
    """Ratios are of throughput: of the time until a group of prompts is answered."""
    contenders = [plain(ScriptedProvider(TEXT, delay_piece_s=0.1)), plain(OneAtATime(), "one at a time")]
    run = await measure(contenders, prompts(10), concurrency=4)
    summary, other = report_of(run).contenders
    assert {(b.block, b.contender): round(b.total_s, 3) for b in run.blocks} == {
        **{(block, "plain"): 0.6 for block in range(3)},
        **{(block, "one at a time"): 0.6 * size for block, size in enumerate((4, 4, 2))},
    }
    assert other.ratios.median is not None
    assert (other.ratios.median.num_units, other.ratios.median.ratio) == (3, pytest.approx(0.25))
    assert len(other.ratios.prompts) == 10
    assert summary.times.tokens_per_s == pytest.approx(10 * 6 / 1.8)


async def test_repeated_runs_are_one_ratio_a_prompt() -> None:
    """The median of a prompt's runs; each run has a decoder and a draft that have learnt nothing."""
    copies: list[SuffixDraft] = []

    class Draft(SuffixDraft):
        def copy_for_new_client(self) -> SuffixDraft:
            copies.append(super().copy_for_new_client())
            return copies[-1]

    contenders = [plain(script()), pair(Draft(), RuleBasedProvider(), "regenerate")]
    run = await measure(contenders, prompts(3), repeat=3)
    summary = report_of(run).contenders[1]
    assert len(copies) == 3
    assert summary.num_answers == 9
    assert len(summary.ratios.prompts) == 3


async def test_what_is_measured_survives_a_cancellation() -> None:
    run = BenchRun([plain(script()), plain(script(), "plain again")], prompts(50), BenchOptions())
    task = asyncio.ensure_future(run.measure_all_contenders())
    await asyncio.sleep(10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    report = report_of(run)
    assert 8 < len(run.answers) < 20
    assert not report.is_complete
    assert report.contenders[1].ratios.median is not None


async def test_progress() -> None:
    """From nothing to all, and who is answering; what is left out counts as done."""
    seen: list[tuple[int, int, str]] = []
    contenders = [plain(script()), pair(PromptLookup(), script(), "probe")]
    run = BenchRun(contenders, prompts(3), BenchOptions(), lambda *shown: seen.append(shown))
    await run.measure_all_contenders()
    assert {total for _, total, _ in seen} == {6}
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {"plain", "probe"} <= {name for _, _, name in seen}


@pytest.mark.parametrize("name", ["concurrency", "repeat"])
async def test_options_are_checked(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        BenchOptions(**options)
