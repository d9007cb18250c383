"""Where streams may begin, and who takes over from whom: the racing rules without any I/O."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from llm_spec import Finish, Round, TextDelta, Usage
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.strategies.race.chain import RaceStream, StreamChain, find_stream_boundary
from llm_spec.testing.clock import run_virtual

PARTS = [
    *("word", "Ünïcödé", "日本語", "。", "😀", "👩‍👩‍👧", "e\u0301", "x=1", ".", ",", "'s", "``", "`"),
    *(" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000"),
    *("```python title=one two", "\n```py a b\n", "\n  ~~~ text of info\n", "```", "~~~"),
]


# ------------------------------------------------------------------------------------------ boundaries


@given(st.lists(st.sampled_from(PARTS), max_size=60), st.integers(0, 200), st.integers(1, 30))
def test_boundaries_cut_nothing(parts: list[str], start: int, num_pieces: int) -> None:
    """No word, character, whitespace run or code fence's first line; at least so many pieces on; text on both sides."""
    text = "".join(parts)
    start = min(start, len(text))
    at = find_stream_boundary(text, start, num_pieces)
    if at is None:
        return
    before, after = text[:at], text[at:]
    assert before
    assert len(split_into_pieces(text[start:at])) >= num_pieces
    assert after[0] in " \n"
    assert not before[-1].isspace()
    if after[0] == " ":
        assert not after[1].isspace()  # so the run of whitespace is that space alone, and something follows it
    assert not before.rpartition("\n")[2].lstrip(" \t").startswith(("```", "~~~"))


@given(st.lists(st.sampled_from(PARTS), max_size=60), st.integers(1, 30), st.sampled_from(PARTS))
def test_boundaries_stay_where_they_are(parts: list[str], num_pieces: int, wants_more: str) -> None:
    """More of the draft does not move a place that was found."""
    text = "".join(parts)
    at = find_stream_boundary(text, 0, num_pieces)
    if at is not None:
        assert find_stream_boundary(text + wants_more, 0, num_pieces) == at


def test_plain_words_have_boundaries_before_each_space() -> None:
    """As soon as so many words have passed, and not before."""
    text = " ".join(f"w{i}" for i in range(40))
    for num_pieces in range(1, 39):
        at = find_stream_boundary(text, 0, num_pieces)
        assert at is not None
        assert len(split_into_pieces(text[:at])) == num_pieces
    assert find_stream_boundary(text, 0, 40) is None
    assert find_stream_boundary("", 0, 1) is None


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("```python title\ncode here", "```python title\ncode"),
        ("a\n```\nb c", "a"),
        ("~~~ x y z\nb c", "~~~ x y z\nb"),
        ("a  b c", "a  b"),
        ("a.\nb c", "a.\nb"),
        ("a\n\nb", "a"),
    ],
)
def test_the_first_place(text: str, at: str) -> None:
    """In or behind a fence, a run of whitespace, a newline."""
    assert find_stream_boundary(text, 0, 1) == len(at)


# ------------------------------------------------------------------------------------------ takeovers


class Race:
    """A chain whose streams are fed by hand."""

    def __init__(
        self,
        *,
        greedy: bool = True,
        max_tokens: int | None = None,
        max_rounds: int | None = None,
        by_ids: bool = False,
    ) -> None:
        self.pair_stats = PairStats()
        self.by_ids = by_ids
        self.closed: list[RaceStream] = []
        self.root = self.stream("")
        self.chain = StreamChain(
            self.root,
            self.pair_stats,
            greedy=greedy,
            max_tokens=max_tokens,
            max_rounds=max_rounds,
            close=self.closed.append,
        )

    def stream(self, prefix: str) -> RaceStream:
        stream = RaceStream(prefix, self.pair_stats.start_stream_timer())
        stream.token_ids = [] if self.by_ids else None
        return stream

    def begin(self, at: str) -> RaceStream:
        """A stream behind the last one, which is expected to write `at`."""
        tail = self.chain.last_stream
        child = self.stream(tail.prefix + at)
        self.chain.append_stream(child, len(at))
        if self.by_ids:
            tail.expected_ids = ids(at)
        return child

    def write(self, stream: RaceStream, *texts: str) -> None:
        for text in texts:
            self.chain.add_delta(stream, TextDelta(text, token_ids=tuple(ids(text)) if self.by_ids else None))

    @property
    def shown(self) -> str:
        return "".join(event.text for event in self.chain.output_events if isinstance(event, TextDelta))


def ids(text: str) -> list[int]:
    return [hash(piece) & 0xFFFF for piece in split_into_pieces(text)]


BOTH = pytest.mark.parametrize("by_ids", [False, True])


@BOTH
async def test_a_stream_takes_over_where_it_began(by_ids: bool) -> None:
    """What it wrote meanwhile is shown at once, and the older one is closed."""
    race = Race(by_ids=by_ids)
    race.chain.extend_expected_text("a b c d e f")
    child = race.begin("a b")
    race.write(child, " c", " d")
    race.write(race.root, "a")
    assert race.shown == "a"
    race.write(race.root, " b")
    assert race.shown == "a b c d"
    assert race.closed == [race.root]
    assert race.chain.streams == [child]
    race.write(race.root, " X")  # was on its way
    race.write(child, " e")
    assert race.shown == "a b c d e"
    assert race.chain.num_cancelled_tokens == 1


@BOTH
async def test_it_does_not_matter_how_far_the_later_one_got(by_ids: bool) -> None:
    """One token is enough, whatever it is, and none is not: the older one is ahead then."""
    for written in ([" c"], [" entirely"], [" c", " d", " e"], []):
        race = Race(by_ids=by_ids)
        race.chain.extend_expected_text("a b c d e f g")
        child = race.begin("a b")
        race.write(child, *written)
        race.write(race.root, "a", " b")
        assert (race.closed == [race.root]) == bool(written)
        assert (race.closed == [child]) == (not written)
        assert race.shown == "a b" + "".join(written)


@BOTH
async def test_nothing_is_lost_at_a_difference(by_ids: bool) -> None:
    """The stream that differs goes on; those behind it are closed, those before it are not."""
    race = Race(by_ids=by_ids)
    race.chain.extend_expected_text("a b c d e f g h")
    second = race.begin("a b")
    third = race.begin(" c d")
    fourth = race.begin(" e f")
    race.write(fourth, " g")
    race.write(third, " e")
    race.write(second, " c", " X", " Y")
    assert race.closed == [third, fourth]
    assert race.chain.is_draft_wrong
    race.write(race.root, "a", " b")
    assert race.shown == "a b c X Y"
    assert race.chain.num_cancelled_tokens == 2


@BOTH
async def test_several_takeovers_at_once(by_ids: bool) -> None:
    """Streams that arrived before the first one did are passed in the same moment."""
    race = Race(by_ids=by_ids)
    race.chain.extend_expected_text("a b c d e f g h")
    second = race.begin("a b")
    third = race.begin(" c d")
    race.write(third, " e", " f")
    race.write(second, " c", " d")
    assert race.shown == ""
    race.write(race.root, "a", " b")
    assert race.shown == "a b c d e f"
    assert race.closed == [second, race.root]
    race.chain.record_stream_end(third, Finish("stop"))
    assert race.chain.finish == Finish("stop")


@BOTH
@pytest.mark.parametrize("ended", ["second", "root"])
async def test_an_end_closes_all_behind_it(ended: str, by_ids: bool) -> None:
    """And is the answer's own as soon as its stream is the first."""
    race = Race(by_ids=by_ids)
    race.chain.extend_expected_text("a b c d e f g h")
    second = race.begin("a b")
    third = race.begin(" c d")
    race.write(second, " c")
    race.write(third, " e")
    race.chain.record_stream_end(second if ended == "second" else race.root, Finish("stop"))
    assert race.closed == ([third] if ended == "second" else [second, third])
    race.write(race.root, "a", " b")
    assert race.chain.finish == Finish("stop")
    assert race.shown == ("a b c" if ended == "second" else "a b")


async def test_a_border_inside_a_piece_is_no_arrival() -> None:
    """Under sampling text that goes beyond it closes the later stream: the older one is ahead."""
    race = Race(greedy=False)
    race.chain.extend_expected_text("a b c d e f")
    child = race.begin("a b")
    race.write(child, " c", " d")
    race.write(race.root, "a", " b c")
    assert race.closed == [child]
    assert race.shown == "a b c"


@pytest.mark.parametrize(("piece", "shown"), [(" b c", "a b c d"), (" bc", "a bc"), (" b.", "a b.")])
async def test_a_greedy_border_inside_a_piece(piece: str, shown: str) -> None:
    """Whitespace behind it shows that a token ended there, and nothing but whitespace does."""
    race = Race()
    race.chain.extend_expected_text("a b c d e f")
    child = race.begin("a b")
    race.write(child, " c", " d")
    race.write(race.root, "a", piece)
    assert race.shown == shown


async def test_other_tokens_for_the_same_text_are_a_difference() -> None:
    """By ids, the later stream continued other ids than those that were written."""
    race = Race(by_ids=True)
    race.chain.extend_expected_text("a b c d")
    child = race.begin("a b")
    race.write(child, " c")
    race.chain.add_delta(race.root, TextDelta("a b", token_ids=(70001,)))
    assert race.closed == [child]
    assert race.shown == "a b"


async def test_an_end_is_no_place_to_arrive_at() -> None:
    """The draft has the text of the token that ends answers, and goes on after it; the target does not."""
    race = Race(by_ids=True)
    race.chain.extend_expected_text("a b <end> c")
    end_id = 70001
    child = race.begin("a b <end>")
    race.root.set_expected_ids([*ids("a b"), end_id])
    race.write(child, " c")
    race.write(race.root, "a", " b")
    race.chain.add_delta(race.root, TextDelta("", token_ids=(end_id,)))
    race.chain.record_stream_end(race.root, Finish("stop"))
    assert race.shown == "a b"
    assert race.closed == [child]
    assert race.chain.finish == Finish("stop")


@BOTH
async def test_a_stream_that_fails_takes_those_behind_it_along(by_ids: bool) -> None:
    """The one before it goes on, and is expected to write what they were."""
    race = Race(by_ids=by_ids)
    race.chain.extend_expected_text("a b c d e f g h")
    second, third = race.begin("a b"), race.begin(" c d")
    race.chain.drop_stream(second)
    assert race.closed == [second, third]
    assert race.root.expected == "a b c d e f g h"
    race.write(race.root, "a", " b", " c")
    assert race.shown == "a b c"
    assert not race.chain.is_draft_wrong


@BOTH
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6])
async def test_caps_around_a_takeover(limit: int, by_ids: bool) -> None:
    """The answer has as many tokens as it may have, told once as its end."""
    race = Race(by_ids=by_ids, max_tokens=limit)
    race.chain.extend_expected_text("a b c d e f g h")
    child = race.begin("a b c")
    race.write(child, " d", " e", " f")
    race.write(race.root, "a", " b", " c")
    assert race.shown == "".join(split_into_pieces("a b c d e f")[:limit])
    assert race.chain.finish == Finish("length", None, "max_tokens")
    assert race.chain.num_answer_tokens == limit


@pytest.mark.parametrize("limit", range(1, 9))
async def test_a_cap_within_what_came_at_once(limit: int) -> None:
    """Where only the text of several tokens is known its pieces are counted, and the text is cut between two."""
    race = Race(max_tokens=limit)
    race.chain.extend_expected_text("a b c d e f g h")
    child = race.begin("a b c")
    race.write(child, " d e f", " g h i")
    race.write(race.root, "a b", " c d")
    assert race.shown == "".join(split_into_pieces("a b c d e f g h i")[:limit])
    assert race.chain.finish == Finish("length", None, "max_tokens")
    assert race.chain.num_answer_tokens == limit
    rounds = [event for event in race.chain.output_events if isinstance(event, Round)]
    assert sum(r.num_emitted_tokens for r in rounds) == limit
    assert race.chain.count_answer_usage() == Usage(output_tokens=limit)


async def test_what_came_beyond_a_border_is_counted_once() -> None:
    """The stream that takes over writes it, too."""
    race = Race()
    race.chain.extend_expected_text("a b c d e f")
    child = race.begin("a b")
    race.write(child, " c d")
    race.write(race.root, "a b c d")
    assert race.shown == "a b c d"
    assert (race.chain.num_answer_tokens, race.chain.num_cancelled_tokens) == (4, 2)


@BOTH
@pytest.mark.parametrize(("limit", "text"), [(1, "a b c"), (2, "a b c d e f"), (3, "a b c d e f g X")])
async def test_the_answer_ends_with_the_last_round_that_it_may_have(limit: int, text: str, by_ids: bool) -> None:
    """Also where more of it is there already."""
    race = Race(max_rounds=limit, by_ids=by_ids)
    race.chain.extend_expected_text("a b c d e f g h i")
    second = race.begin("a b c")
    third = race.begin(" d e f")
    race.write(third, " g", " X", " y")
    race.write(second, " d", " e", " f")
    race.write(race.root, "a", " b", " c")
    assert race.shown == text
    assert race.chain.finish == Finish("length", None, "max_iterations")
    assert race.chain.count_answer_usage() == Usage(output_tokens=len(split_into_pieces(text)))
    rounds = [event for event in race.chain.output_events if isinstance(event, Round)]
    assert [r.index for r in rounds] == list(range(limit))
    assert sum(r.num_emitted_tokens for r in rounds) == len(split_into_pieces(text))


async def test_an_end_of_the_targets_own_comes_before_a_limit_of_rounds() -> None:
    race = Race(max_rounds=1)
    race.chain.extend_expected_text("a b c")
    race.write(race.root, "a", " b", " c")
    race.chain.record_stream_end(race.root, Finish("stop", Usage(output_tokens=7), "eos"))
    assert race.chain.finish == Finish("stop", Usage(output_tokens=7), "eos")
    assert race.chain.count_answer_usage() == Usage(output_tokens=7)  # as the target counted


async def test_tokens_up_to_a_place_in_the_answer() -> None:
    """All that came at once with the last character counts."""
    race = Race()
    race.chain.extend_expected_text("a b c d e f")
    child = race.begin("a b c")
    race.write(child, " d e", " f")
    race.write(race.root, "a", " b", " c")
    assert race.shown == "a b c d e f"
    assert [race.chain.count_tokens_until_character(n) for n in (0, 1, 2, 5, 6, 9, 10, 11)] == [1, 1, 2, 3, 5, 5, 6, 6]


async def test_rounds_say_what_was_drafted_and_accepted() -> None:
    """A round is told once it is confirmed; those of closed streams are not."""
    race = Race()
    race.chain.extend_expected_text("a b c d e f g h")
    second = race.begin("a b")
    third = race.begin(" c d")
    race.write(third, " X")
    race.write(second, " c", " Y")
    race.write(race.root, "a", " b")
    rounds = [event for event in race.chain.output_events if isinstance(event, Round)]
    assert [(r.index, r.num_draft_tokens, r.num_accepted_tokens, r.num_emitted_tokens) for r in rounds] == [
        (0, 2, 2, 2),
        (1, 2, 1, 2),
    ]


# ------------------------------------------------------------------------------------------ any order of events


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[str], list[str], list[int], list[int], bool]:
    words = draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=14))
    truth = [w if i == 0 else f" {w}" for i, w in enumerate(words)]
    draft = [w if draw(st.integers(0, 9)) else " z" for w in truth]
    borders = sorted(draw(st.sets(st.integers(1, len(truth)), max_size=4)))
    order = draw(st.lists(st.integers(0, 4), max_size=80))
    return truth, draft, borders, order, draw(st.booleans())


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_whatever_comes_first_the_text_is_one_streams_after_the_other(
    schedule: tuple[list[str], list[str], list[int], list[int], bool],
) -> None:
    """Greedy streams, begun at a draft's borders, fed in any order: nothing but the truth, and at last all of it."""
    truth, draft, borders, order, by_ids = schedule

    def rest_behind(prefix: str) -> list[str]:
        """What a greedy model writes behind a prefix: the truth, or a z where the prefix is none of its own."""
        whole = "".join(truth)
        return split_into_pieces(whole[len(prefix) :]) if whole.startswith(prefix) else [" z"] * 20

    async def check() -> None:
        race = Race(by_ids=by_ids)
        race.chain.extend_expected_text("".join(draft))
        streams = [race.root]
        last = 0
        for border in borders:
            if draft[border:] and not race.chain.is_draft_wrong:
                streams.append(race.begin("".join(draft[last:border])))
                last = border
        rests = [rest_behind(stream.prefix) for stream in streams]
        turns = [*order, *(i for _ in range(30) for i in range(len(streams)))]
        for index in turns:
            if index >= len(streams) or streams[index] in race.closed or race.chain.finish is not None:
                continue
            stream, rest = streams[index], rests[index]
            if rest:
                race.write(stream, rest.pop(0))
            elif stream.finish is None:
                race.chain.record_stream_end(stream, Finish("stop"))
            assert "".join(truth).startswith(race.shown)
        assert race.shown == "".join(truth)
        assert race.chain.finish == Finish("stop")
        assert race.chain.num_answer_tokens == len(truth)

    run_virtual(check())


# ------------------------------------------------------------------------------------------ the law of samples

NEXT = {"": (0.7, 0.2, 0.1), " a": (0.6, 0.15, 0.25), " bb": (0.2, 0.5, 0.3), " ccc": (0.45, 0.35, 0.2)}
SIGNS = (" a", " bb", " ccc")
LENGTH = 3
BORDERS = (1, 2)


async def raced_counts(num_samples: int) -> Counter[str]:
    """Streams with noise of their own, begun at borders of one draft, in a random order that no text has a part in."""
    rng = random.Random(5)  # noqa: S311 - reproducible tests
    counts: Counter[str] = Counter()
    for _ in range(num_samples):
        race = Race(greedy=False)
        race.chain.extend_expected_text(" a" * LENGTH)
        streams = [race.root, *(race.begin(" a") for _ in BORDERS)]
        words = [""] + [" a"] * len(BORDERS)
        while (
            race.chain.finish is None and len(race.shown) < 3 * LENGTH and len(split_into_pieces(race.shown)) < LENGTH
        ):
            index = rng.randrange(len(streams))
            if streams[index] in race.closed:
                continue
            words[index] = rng.choices(SIGNS, NEXT[words[index]])[0]
            race.write(streams[index], words[index])
        counts["".join(split_into_pieces(race.shown)[:LENGTH])] += 1
    return counts


def probs() -> dict[str, float]:
    out: dict[str, float] = {}
    for words in product(SIGNS, repeat=LENGTH):
        probability = 1.0
        for before, word in zip(("", *words), words, strict=False):
            probability *= NEXT[before][SIGNS.index(word)]
        out["".join(words)] = probability
    return out


def p_value(counts: Counter[str]) -> float:
    expected = {text: probability * counts.total() for text, probability in probs().items()}
    often = [text for text, number in expected.items() if number >= 8]
    seen = [counts[text] for text in often]
    wanted = [expected[text] for text in often]
    if len(often) < len(expected):
        seen.append(counts.total() - sum(seen))
        wanted.append(counts.total() - sum(wanted))
    return float(chisquare(seen, wanted).pvalue)


@pytest.mark.parametrize("num_samples", [5_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_the_law_of_a_raced_text_is_the_streams_own(num_samples: int) -> None:
    """Samples against the exact law of three words."""
    assert p_value(run_virtual(raced_counts(num_samples))) > 1e-4


ARRIVE = StreamChain._hand_over_to_next_stream


def when_longer(chain: StreamChain, stream: RaceStream) -> None:
    child = chain.streams[chain.streams.index(stream) + 1]
    (ARRIVE if len(child.text) > 3 else StreamChain._drop_streams_after)(chain, stream)


def when_agreeing(chain: StreamChain, stream: RaceStream) -> None:
    child = chain.streams[chain.streams.index(stream) + 1]
    (ARRIVE if child.text.startswith(" a") else StreamChain._drop_streams_after)(chain, stream)


@pytest.mark.parametrize("fault", [when_longer, when_agreeing])
def test_a_biased_takeover_would_be_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is sharp: deciding by how far the later stream got, or by what it wrote, fails it."""
    monkeypatch.setattr(StreamChain, "_hand_over_to_next_stream", fault)
    assert p_value(run_virtual(raced_counts(5_000))) < 1e-6
