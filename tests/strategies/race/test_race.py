"""Racing by virtual clock: the target's own text and finish, never later than the target alone, and its own law."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from support.draft_checks import ItemDraft
from support.matrix import every_combination
from support.racing import DRAFTS, SLOW, WORDS, Reading, racing, read, request_of
from support.strategy_runs import open_strategy, run_strategy
from support.targets import Target

from llm_spec import ChatRequest, Finish, SpeculativeConfig, SpeculativeDecoder, StreamEvent, TextDelta
from llm_spec.contract.events import TargetStreamReport
from llm_spec.contract.provider import LlmProvider
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.strategies.race.race import prepare_or_refuse
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

VARIED = (
    "Here is the plan, step by step, for every reader of this text.\r\n\r\n"
    "```python title here\ndef area(radius: float) -> float:\n    return 3.14 * radius  # naïve\n```\n\n"
    "日本語 の 文章 も あります。 それは 長い 😀 👩‍👩‍👧 text   with   runs\t\tof \n \n whitespace  \n\n\n"
) * 3


async def read_plain(target: LlmProvider, request: ChatRequest) -> Reading:
    """What the target alone writes; stop strings are ours, as simulated targets know none."""
    plain = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(strategy="plain"))
    reading = await read(plain, replace(request, stop=()))
    ends = {(at + len(stop), at) for stop in request.stop if (at := reading.text.find(stop)) >= 0}
    if ends:
        reading.text = reading.text[: min(ends)[1]]
        reading.events[-1] = Finish("stop", stopped_by="stop_string")
    return reading


def assert_same(raced: Reading, plain: Reading) -> None:
    assert raced.text == plain.text
    assert raced.finish.finish_reason == plain.finish.finish_reason


# ------------------------------------------------------------------------------------------ the same text


@every_combination(draft=DRAFTS, num_streams=("1", "2", "12"), by=("ids", "text"))
def test_the_answer_is_the_targets_own(draft: str, num_streams: str, by: str) -> None:
    """Whatever the draft does, text and finish are plain's, twice on one decoder, and all streams are closed."""

    async def check() -> None:
        plain = await read_plain(Target(VARIED, **SLOW), request_of())
        target = Target(VARIED, by_ids=by == "ids", **SLOW)
        most_open = int(num_streams)
        decoder = racing(DRAFTS[draft](VARIED), target, max_concurrent_streams=most_open, draft_timeout_s=1.0)
        for _ in range(2):
            raced = await read(decoder, request_of())
            assert_same(raced, plain)
            assert target.num_open == 0
            assert target.max_open <= most_open
            assert raced.total_s <= plain.total_s + 1e-6

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize(("num_streams", "least"), [(2, 1.3), (4, 1.6), (12, 1.9)])
def test_racing_with_a_good_draft_pays(num_streams: int, least: float, by_ids: bool) -> None:
    """Streams do take over: a draft that agrees makes the answer faster, the more so the more streams there are."""

    async def check() -> None:
        plain = await read_plain(Target(WORDS, **SLOW), request_of())
        target = Target(WORDS, by_ids=by_ids, **SLOW)
        decoder = racing(SimulatedDraft(WORDS, 1.0, 0), target, max_concurrent_streams=num_streams)
        await read(decoder, request_of())
        raced = await read(decoder, request_of())
        assert raced.num_won > len(WORDS) / 3
        assert plain.total_s >= least * raced.total_s

    run_virtual(check())


PARTS = [
    *("the", " cat", " sat", ",", ".", " x = 1", "\n", "\n\n", " ", "   ", "\t", "\r\n", "```py title\n", "```\n"),
    *(" 日本語", "。", " 😀", "👩‍👩‍👧", " naïve", " e\u0301", " the", " mat", " on", " a", " dog"),
]
DELAYS_S = st.sampled_from([0.0, 0.003, 0.02, 0.3])


@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=40),
    num_repeats=st.integers(1, 8),
    agreement=st.sampled_from([0.0, 0.5, 0.9, 0.98, 1.0]),
    seed=st.integers(0, 1 << 16),
    num_streams=st.sampled_from([1, 2, 4, 12]),
    target_s=st.tuples(DELAYS_S, DELAYS_S, DELAYS_S),
    draft_s=st.tuples(DELAYS_S, DELAYS_S),
    tokens_per_event=st.sampled_from([1, 1, 3]),
    by_ids=st.booleans(),
    greedy=st.booleans(),
    stop=st.sampled_from([(), (), ("cat sat",), (" the", "."), ("\n\n",), ("mat on a dog",)]),
    max_tokens=st.none() | st.integers(1, 260),
    warm=st.booleans(),
)
def test_any_race_gives_plain_text_and_is_never_behind(
    *,
    parts: list[str],
    num_repeats: int,
    agreement: float,
    seed: int,
    num_streams: int,
    target_s: tuple[float, float, float],
    draft_s: tuple[float, float],
    tokens_per_event: int,
    by_ids: bool,
    greedy: bool,
    stop: tuple[str, ...],
    max_tokens: int | None,
    warm: bool,
) -> None:
    """Text and finish are plain's; every character comes no later, and no stream is open beyond what was allowed."""
    answer = "".join(parts) * num_repeats
    if not by_ids:
        max_tokens = None  # see the tests of caps by text
    latency: dict[str, Any] = dict(zip(("first_token_s", "token_s", "round_trip_s"), target_s, strict=True))

    def target() -> Target:
        return Target(answer, by_ids=by_ids, tokens_per_event=tokens_per_event, **latency)

    async def check() -> None:
        request = request_of(temperature=0.0 if greedy else None, stop=stop, max_tokens=max_tokens)
        plain = await read_plain(target(), request)
        draft = SimulatedDraft(answer, agreement, seed, first_token_s=draft_s[0], token_s=draft_s[1])
        raced_target = target()
        decoder = racing(draft, raced_target, max_concurrent_streams=num_streams)
        if warm:
            await read(decoder, request)
        raced = await read(decoder, request)
        assert_same(raced, plain)
        assert raced_target.num_open == 0
        assert raced_target.max_open <= num_streams
        if not stop:  # what may be the beginning of one is held back
            assert all(late <= soon + 1e-6 for late, soon in zip(raced.times, plain.times, strict=True))

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("at", ["before a word", "inside a word", "across words"])
def test_stop_strings_wherever_streams_take_over(at: str, by_ids: bool) -> None:
    """All over the answer, so also where the beginning is one stream's and the end another's."""

    async def check() -> None:
        for number in range(21 if by_ids else 20, 60, 4):  # streams begin at other words in each
            word = f" word{number}"
            stop = {"before a word": word, "inside a word": word[3:], "across words": f"{word} wo"}[at]
            target = Target(WORDS, by_ids=by_ids, **SLOW)
            raced = await read(racing(SimulatedDraft(WORDS, 1.0, 0), target), request_of(stop=(stop,)))
            assert raced.text == WORDS[: WORDS.find(stop)]
            assert (raced.finish.finish_reason, raced.finish.stopped_by) == ("stop", "stop_string")
            assert target.num_open == 0

    run_virtual(check())


@pytest.mark.parametrize(
    "by_ids",
    [
        False,
        True,
    ],
)
def test_token_caps_wherever_streams_take_over(by_ids: bool) -> None:
    """At, before and behind every boundary the answer has as many tokens as it may have, and was ended by that."""

    async def check() -> None:
        pieces = split_into_pieces(WORDS)
        won = 0
        for max_tokens in [1, 2, *range(15, 75), len(pieces) - 1]:
            target = Target(WORDS, by_ids=by_ids, **SLOW)
            raced = await read(racing(SimulatedDraft(WORDS, 1.0, 0), target), request_of(max_tokens=max_tokens))
            assert raced.text == "".join(pieces[:max_tokens])
            assert (raced.finish.finish_reason, raced.finish.stopped_by) == ("length", "max_tokens")
            assert target.num_open == 0
            won += raced.num_won
        assert won > 500

    run_virtual(check())


@pytest.mark.parametrize(
    ("beyond", "by_ids"),
    [
        *((beyond, True) for beyond in (0, 1, 5)),
        *((beyond, False) for beyond in (0, 1, 5)),
    ],
)
def test_a_cap_that_the_answer_just_reaches(beyond: int, by_ids: bool) -> None:
    """The finish is plain's: `length` where the last token was the last allowed one, `stop` where one more was."""

    async def check() -> None:
        request = request_of(max_tokens=len(split_into_pieces(WORDS)) + beyond)
        plain = await read_plain(Target(WORDS, by_ids=by_ids, **SLOW), request)
        target = Target(WORDS, by_ids=by_ids, **SLOW)
        assert_same(await read(racing(SimulatedDraft(WORDS, 1.0, 0), target), request), plain)

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
def test_an_answer_that_continues_the_requests_prefix(by_ids: bool) -> None:
    """The prefix is not repeated, and the draft is asked for what follows it."""

    async def check() -> None:
        prefix = " ".join(WORDS.split(" ")[:40])
        draft = SimulatedDraft(WORDS, 1.0, 0)
        raced = await read(racing(draft, Target(WORDS, by_ids=by_ids, **SLOW)), request_of(prefix=prefix))
        assert prefix + raced.text == WORDS
        assert raced.num_won > 0

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [True, False])
def test_the_streams_of_a_race_are_told(by_ids: bool) -> None:
    """At the end comes what each stream did; those that were used wrote the answer between them."""

    async def run() -> list[StreamEvent]:
        target = SimulatedTarget(WORDS, **SLOW, by_ids=by_ids)
        decoder = SpeculativeDecoder(
            target=target, draft=SimulatedDraft(WORDS, 0.95, 1), config=SpeculativeConfig(strategy="race")
        )
        async with decoder.stream(ChatRequest.create("q", temperature=0.0), rounds=True) as events:
            return [event async for event in events]

    events = run_virtual(run())
    streams = [event for event in events if isinstance(event, TargetStreamReport)]
    assert len(streams) > 2
    assert [stream.index for stream in streams] == list(range(len(streams)))
    used = [stream for stream in streams if stream.is_used]
    assert used[0].started_s == 0.0
    assert all(earlier.begins_at < later.begins_at for earlier, later in pairwise(used))
    assert all(stream.started_s <= stream.ended_s for stream in streams)
    assert sum(stream.num_tokens for stream in used) >= len(split_into_pieces(WORDS))


def test_an_empty_answer() -> None:
    """No text, and the target's finish."""

    async def check() -> None:
        raced = await read(racing(SimulatedDraft(WORDS, 1.0, 0), Target("", **SLOW)), request_of())
        assert (raced.text, raced.finish.finish_reason) == ("", "stop")

    run_virtual(check())


# ------------------------------------------------------------------------------------------ never behind


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("num_races", [8, pytest.param(25, marks=pytest.mark.slow)])
def test_every_character_comes_no_later_than_plains(num_races: int, by_ids: bool) -> None:
    """For random latencies and agreements, also in the second and third answer of one decoder."""

    async def check() -> None:
        rng = random.Random(7)  # noqa: S311 - reproducible tests
        for seed in range(num_races):
            latency: dict[str, Any] = {
                "first_token_s": rng.choice([0.02, 0.1, 0.45]),
                "token_s": rng.choice([0.01, 0.016, 0.066]),
                "round_trip_s": rng.choice([0.0, 0.05]),
            }
            draft_s = rng.choice([(0.0, 0.0), (0.1, 0.004), (0.5, 0.1)])
            agreement = rng.choice([0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0])
            plain = await read_plain(Target(WORDS, **latency), request_of())
            draft = SimulatedDraft(WORDS, agreement, seed, first_token_s=draft_s[0], token_s=draft_s[1])
            target = Target(WORDS, by_ids=by_ids, **latency)
            decoder = racing(draft, target, max_concurrent_streams=rng.choice([2, 4, 12]))
            for _ in range(3):
                raced = await read(decoder, request_of())
                assert raced.total_s <= plain.total_s + 1e-6
                assert all(late <= soon + 1e-6 for late, soon in zip(raced.times, plain.times, strict=True))

    run_virtual(check())


# ------------------------------------------------------------------------------------------ the law of samples

LONG_WORDS = (" a", " bbb", " cccccc")
LAW = {"": (0.7, 0.2, 0.1), " a": (0.6, 0.15, 0.25), " bbb": (0.2, 0.5, 0.3), " cccccc": (0.45, 0.35, 0.2)}
NUM_TOKENS = 4


def make_sampling_target(seed: int) -> Target:
    """Draws each word by the one before it, with the noise of its own seed; delays have nothing to do with words.

    The noise of the first token of every call with one seed is the same, as it is on real servers.
    """
    delays = random.Random(seed)  # noqa: S311 - as above

    async def delay(_: int, events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
        async for event in events:
            if isinstance(event, TextDelta):
                await asyncio.sleep(delays.choice((0.5, 1.0, 2.0)))
            yield event

    def draw_by_last(written: Sequence[bytes]) -> dict[bytes, float]:
        law = LAW[written[-1].decode() if written else ""]
        return dict(zip((word.encode() for word in LONG_WORDS), law, strict=True))

    return Target(table=draw_by_last, spoil=delay)


async def sampled(num_samples: int, draft_words: Sequence[str]) -> tuple[Counter[str], int]:
    """Raced answers, and how many of them a later stream had a part in."""
    seeds = random.Random(99)  # noqa: S311 - as above
    target, draft = make_sampling_target(3), ItemDraft(*draft_words)
    counts: Counter[str] = Counter()
    num_won = 0
    for _ in range(num_samples):
        request = ChatRequest.create("q", temperature=1.0, seed=seeds.getrandbits(31), max_tokens=NUM_TOKENS)
        pair_stats = PairStats()
        pair_stats.streams.num_extra = 64  # room is not what this is about
        events = await run_strategy(prepare_or_refuse, draft, target, request, pair_stats, max_concurrent_streams=64)
        deltas = [event for event in events if isinstance(event, TextDelta)]
        counts["".join(delta.text for delta in deltas)] += 1
        num_won += any(delta.origin == "accepted" for delta in deltas)
    return counts, num_won


def p_value(counts: Counter[str]) -> float:
    """Of a chi-square test against the law itself, rare answers put together."""
    total = counts.total()
    statistic, num_cells, rest_expected, rest_seen = 0.0, 0, 0.0, total
    for words in product(LONG_WORDS, repeat=NUM_TOKENS):
        expected = float(total)
        for before, word in zip(("", *words), words, strict=False):
            expected *= LAW[before][LONG_WORDS.index(word)]
        seen = counts["".join(words)]
        if expected >= 8:
            statistic += (seen - expected) ** 2 / expected
            num_cells += 1
            rest_seen -= seen
        else:
            rest_expected += expected
    if rest_expected:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        num_cells += 1
    return float(chi2.sf(statistic, num_cells - 1))


DRAFT_WORDS = (" a", " a", " a", " a", " a")


@pytest.mark.parametrize("num_answers", [1_000, pytest.param(4_000, marks=pytest.mark.slow)])
def test_sampled_answers_have_the_targets_law(num_answers: int) -> None:
    """Whichever stream wrote them: raced answers against the exact law of four words."""
    counts, num_won = run_virtual(sampled(num_answers, DRAFT_WORDS))
    assert num_won > 0.3 * num_answers
    assert p_value(counts) > 1e-4


def test_one_seed_for_all_streams_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is sharp (test_stream_chain.py has the faults of who takes over)."""
    monkeypatch.setattr("llm_spec.strategies.race.target.RaceTarget._vary_seed_per_stream", lambda _, request: request)
    counts, num_won = run_virtual(sampled(1_000, DRAFT_WORDS))
    assert num_won > 200
    assert p_value(counts) < 1e-6


@pytest.mark.parametrize("temperature", [None, 0.8])
@pytest.mark.parametrize("by_ids", [False, True])
def test_each_stream_has_a_seed_of_its_own(by_ids: bool, temperature: float | None) -> None:
    """The first keeps the request's; no two are the same."""

    async def check() -> None:
        for seed in (11, None):
            target = Target(WORDS, by_ids=by_ids, **SLOW)
            await read(racing(SimulatedDraft(WORDS, 1.0, 0), target), request_of(temperature=temperature, seed=seed))
            seeds = [request.sampling.seed for request in target.requests]
            assert seeds[0] == seed
            assert None not in seeds[1:]
            assert len(set(seeds)) == len(seeds) > 2

    run_virtual(check())


@pytest.mark.parametrize("seed", [None, 11])
def test_greedy_streams_are_given_no_seed(seed: int | None) -> None:
    """At temperature 0 nothing is drawn: the request's own, or none."""

    async def check() -> None:
        target = Target(WORDS, **SLOW)
        await read(racing(SimulatedDraft(WORDS, 1.0, 0), target), request_of(seed=seed))
        assert len(target.requests) > 2
        assert {request.sampling.seed for request in target.requests} == {seed}

    run_virtual(check())


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("num_streams", [1, 4])
def test_a_slow_consumer_lets_nothing_pile_up(num_streams: int, by_ids: bool) -> None:
    """Reading waits for it once a thousand events do, the text stays plain's, and its pauses are not the target's."""
    answer = " ".join(f"word{i}" for i in range(2000))
    target = Target(answer, by_ids=by_ids, **SLOW)
    pair_stats = PairStats()

    async def check() -> None:
        text, num_read, most = "", 0, 0
        draft = SimulatedDraft(answer, 0.9, 1, first_token_s=0.1, token_s=0.01)
        async with open_strategy(
            prepare_or_refuse, draft, target, request_of(), pair_stats, max_concurrent_streams=num_streams
        ) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    text += event.text
                    num_read += len(split_into_pieces(event.text))
                    most = max(most, target.num_output_tokens - num_read)
                    await asyncio.sleep(1.0)
        assert (text, num_read) == (answer, len(split_into_pieces(answer)))
        assert most <= 1100

    run_virtual(check())
    assert pair_stats.target_token_s == pytest.approx(SLOW["token_s"], rel=0.2)
