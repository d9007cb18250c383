"""Probing by virtual clock: the target's own text and law, one call a round, nothing twice, nothing left open."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.probing import EMOJI, WORDS, TextDraft, end_of, patient, probed
from support.targets import Call, Target, bytewise

from llm_spec import (
    ChatRequest,
    CostAware,
    Fixed,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
    Round,
    SpeculativeDecoder,
    StreamEvent,
    TextDelta,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.decoder.stop_rules import may_token_complete_two
from llm_spec.local.lookahead import LookaheadPolicy
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

VARIED = (
    "Here is the plan, step by step.\r\n\r\n```python title here\ndef area(radius: float) -> float:\n"
    "    return 3.14 * radius  # naïve\n```\n\n日本語 の 文章 😀 👩‍👩‍👧 text   with   runs\t\tof \n \n"
)


def plain_end(pieces: Sequence[str], max_tokens: int | None, stop: Sequence[str]) -> tuple[str, str, str]:
    """What the target alone would give: text, finish reason, what stopped it."""
    text = "".join(pieces[:max_tokens])
    found = min(((at + len(s), at) for s in stop if (at := text.find(s)) >= 0), default=None)
    if found is not None:
        return text[: found[1]], "stop", "stop_string"
    if max_tokens is not None and len(pieces) >= max_tokens:
        return text, "length", "max_tokens"
    return text, "stop", "eos"


# ------------------------------------------------------------------------------------------ the same text

WRITTEN = st.just(VARIED) | st.lists(
    st.sampled_from(
        ["word", " word", " a", "b", " other", "\n", "\n\n", "   ", "\t", ".", ", ", "naïve", "日本", " 😀", "```"]
    ),
    max_size=40,
).map("".join)
LOOKAHEADS: st.SearchStrategy[LookaheadPolicy] = st.one_of(st.integers(1, 8).map(Fixed), st.just(CostAware()))
SECONDS = st.sampled_from([0.0, 0.003, 0.02, 0.1])
KINDS = ["agreeing", "useless", "silent", "failing", "breaking", "short", "long", "once", "shifted", "lookup"]


def draft_of(kind: str, answer: str, agreement: float, seed: int, token_s: float) -> DraftProvider:
    pieces = split_into_pieces(answer)
    half = "".join(pieces[: len(pieces) // 2])
    rng = random.Random(seed)  # noqa: S311 - a reproducible draft
    drafts: dict[str, Callable[[], DraftProvider]] = {
        "agreeing": lambda: SimulatedDraft(answer, agreement, seed, token_s=token_s),
        "useless": lambda: TextDraft("nothing of the kind " * 20, token_s=token_s),
        "silent": lambda: TextDraft(answer, silent_after=seed % 3),
        "failing": lambda: TextDraft(answer, fail_after=0),
        "breaking": lambda: TextDraft(answer, fail_after=len(pieces) // 2, token_s=token_s),
        "short": lambda: TextDraft(half, token_s=token_s),
        "long": lambda: TextDraft(answer + " and so on without any end" * 3, token_s=token_s),
        "once": lambda: TextDraft(
            "".join(p if rng.random() < agreement else " other" for p in pieces),
            token_s=token_s,
            continues_prefix=False,
        ),
        "shifted": lambda: ReferenceDraft(half + " inserted" + answer[len(half) :]),
        "lookup": PromptLookup,
    }
    return drafts[kind]()


@settings(max_examples=250, deadline=None)
@given(
    answer=WRITTEN,
    kind=st.sampled_from(KINDS),
    agreement=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 1000),
    streams=st.integers(1, 6),
    lookahead=LOOKAHEADS,
    first_token_s=SECONDS,
    token_s=SECONDS,
    round_trip_s=SECONDS,
    draft_token_s=SECONDS,
    max_tokens=st.none() | st.integers(1, 45),
    stop=st.lists(st.sampled_from([" other", "word word", "\n", " a", "never", "😀"]), max_size=2).filter(
        lambda stop: not may_token_complete_two(stop)
    ),
)
def test_the_text_and_the_finish_are_the_targets_own(  # noqa: PLR0917 - hypothesis names them
    answer: str,
    kind: str,
    agreement: float,
    seed: int,
    streams: int,
    lookahead: LookaheadPolicy,
    first_token_s: float,
    token_s: float,
    round_trip_s: float,
    draft_token_s: float,
    max_tokens: int | None,
    stop: list[str],
) -> None:
    """Whatever the draft is, however fast anything is: text, finish reason and what stopped it are the target's."""
    target = SimulatedTarget(
        answer, first_token_s=first_token_s, token_s=token_s, round_trip_s=round_trip_s, by_ids=True
    )
    draft = draft_of(kind, answer, agreement, seed, draft_token_s)
    request = ChatRequest.create("say word a word", max_tokens=max_tokens, stop=stop)
    result = probed(draft, target, request, max_concurrent_streams=streams, lookahead=lookahead, draft_timeout_s=1.0)
    assert end_of(result) == plain_end(split_into_pieces(answer), max_tokens, stop)
    assert target.num_open == 0
    assert target.max_open <= streams + 1  # a call that is being given up may still be open when the target goes on
    assert getattr(draft, "num_open", 0) == 0


@settings(max_examples=250, deadline=None)
@given(
    data=st.data(),
    text=st.text(st.sampled_from("ab \n.é日😀\u200d"), max_size=25),
    encode_size=st.integers(1, 6),
    undecoded=st.sampled_from(["", "\ufffd"]),
    streams=st.integers(1, 5),
    lookahead=st.integers(1, 8),
    call_s=SECONDS,
    wrong=st.integers(0, 30),
)
def test_a_target_whose_tokens_are_cut_otherwise_writes_its_own(  # noqa: PLR0917 - hypothesis names them
    data: st.DataObject,
    text: str,
    encode_size: int,
    undecoded: str,
    streams: int,
    lookahead: int,
    call_s: float,
    wrong: int,
) -> None:
    """Its own tokens are bytes cut anywhere and control tokens; encoded text gives others: the text stays whole."""
    encoded = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(encoded) - 1)))) | {0, len(encoded)})
    tokens = [encoded[a:b] for a, b in pairwise(cuts)]
    between = [at for at in range(len(tokens) + 1) if is_text(b"".join(tokens[:at]))]
    for at in sorted(data.draw(st.lists(st.sampled_from(between), max_size=2)), reverse=True):
        tokens.insert(at, b"")  # control tokens, which stand between characters
    target = Target(tokens, encode_size=encode_size, undecoded=undecoded, call_s=call_s)
    draft = TextDraft(text[:wrong] + "x" + text[wrong + 1 :], token_s=0.001)
    events = run_virtual(
        collected(patient(draft, target, max_concurrent_streams=streams, lookahead=Fixed(lookahead)), "tell")
    )
    shown = [event.text for event in events if isinstance(event, TextDelta)]
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)
    assert target.num_open == 0


def is_text(data: bytes) -> bool:
    """Whether the bytes are whole characters."""
    return "\ufffd" not in data.decode(errors="replace")


async def collected(decoder: SpeculativeDecoder, request: ChatRequest | str) -> list[StreamEvent]:
    async with decoder.stream(request, rounds=True) as events:
        return [event async for event in events]


def test_a_draft_that_never_ends_its_silence_costs_no_answer() -> None:
    """Nothing is waited for: the answer comes at the pace of the target, long before the draft's timeout."""
    target = SimulatedTarget(WORDS, first_token_s=0.02, token_s=0.02, by_ids=True)
    result = probed(TextDraft(WORDS, silent_after=0), target, draft_timeout_s=1000.0)
    assert result.content == WORDS
    assert result.timings.total_s < 2.0


def test_a_failing_draft_is_told_once() -> None:
    """One fallback, with what the draft said of itself; the text is whole."""
    for fail_after in (0, 5):
        result = probed(
            TextDraft(WORDS, fail_after=fail_after), SimulatedTarget(WORDS, by_ids=True, first_token_s=0.01)
        )
        assert result.content == WORDS
        assert len(result.fallbacks) == 1
        assert "the draft is down" in result.fallbacks[0]


def test_a_provider_that_cannot_continue_drafts_on_behind_a_difference() -> None:
    """One word of the draft is wrong: what it wrote behind it still serves, in one call of that provider."""
    written = ScriptedProvider(WORDS.replace(" word20", " other"), delay_piece_s=0.001)
    target = SimulatedTarget(WORDS, first_token_s=0.02, token_s=0.02, by_ids=True)
    result = probed(ProviderDraft(written), target, lookahead=Fixed(6))
    assert result.content == WORDS
    assert result.stats.num_accepted_draft_tokens > 40
    assert len(written.requests) == 1


# ------------------------------------------------------------------------------------------ characters in parts


@pytest.mark.parametrize("undecoded", ["", "\ufffd"])
@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_no_part_of_a_character_is_shown(undecoded: str, lookahead: int) -> None:
    """Each byte is a token: every piece that is shown holds whole characters, and together they are the text."""
    for draft in (TextDraft(EMOJI), TextDraft(EMOJI.replace("😀", "😁")), TextDraft("zzz")):
        target = Target(bytewise(EMOJI), undecoded=undecoded, call_s=0.01)
        events = run_virtual(collected(patient(draft, target, lookahead=Fixed(lookahead)), "tell"))
        shown = [event.text for event in events if isinstance(event, TextDelta)]
        assert "".join(shown) == EMOJI
        assert "\ufffd" not in "".join(shown)


@pytest.mark.parametrize("row_s", [0.005, 0.019, 0.021, 0.05])
@pytest.mark.parametrize("tokens_per_event", [1, 2, 3])
def test_a_stream_that_rows_have_overtaken_for_a_while_ends_without_its_end(
    row_s: float, tokens_per_event: int
) -> None:
    """Its last piece holds the end's id, whose text `decode` tells, alone or beside words that rows confirmed."""
    words = [word.encode() for word in split_into_pieces(WORDS)]
    for num_drafted in range(1 + 2 * (tokens_per_event % 2), len(words), 4):
        target = Target(words, call_s=0.02, row_s=row_s, encode_size=10**6, tokens_per_event=tokens_per_event)
        draft = TextDraft(b"".join(words[:num_drafted]).decode())
        assert probed(draft, target, ChatRequest.create("tell", temperature=0.0)).content == target.text


@pytest.mark.parametrize("events_per_text", [2, 3])
def test_text_that_a_stream_holds_back_is_not_given_twice(events_per_text: int) -> None:
    """Rows have confirmed some of the tokens whose text comes with a later piece."""
    words = [word.encode() for word in split_into_pieces(WORDS)]
    for num_drafted in range(1, len(words), 2):
        target = Target(words, call_s=0.02, row_s=0.019, encode_size=10**6, events_per_text=events_per_text)
        draft = TextDraft(b"".join(words[:num_drafted]).decode())
        assert probed(draft, target, ChatRequest.create("tell", temperature=0.0)).content == target.text


def test_control_tokens_have_no_text_and_no_effect_on_it() -> None:
    """A token without text may stand anywhere, even between the bytes of a character."""
    tokens = [b"", b"a", b"\xf0", b"\x9f", b"", b"\x98\x80", b"", b"", b"b", b""]
    for draft in (TextDraft("a😀b"), TextDraft("x")):
        assert probed(draft, Target(tokens, call_s=0.01)).content == "a😀b"


@pytest.mark.parametrize("end", [b"\xf0\x9f", b"\xff\xff", b"\xe6"])
def test_bytes_at_the_end_that_are_no_character_are_shown_as_such(end: bytes) -> None:
    """What never became a character is U+FFFD, once the answer is over, however it ended."""
    tokens = bytewise(b"abc" + end)
    expected = (b"abc" + end).decode("utf-8", "replace")
    assert probed(TextDraft("abcd"), Target(tokens)).content == expected
    cut = ChatRequest.create("tell", max_tokens=len(tokens))
    assert end_of(probed(TextDraft("abcd"), Target(tokens), cut)) == (expected, "length", "max_tokens")


@pytest.mark.parametrize(
    "num_undecodable",
    [1, 3, 7, 12],
)
def test_a_character_behind_undecodable_bytes_is_whole(num_undecodable: int) -> None:
    """However many bytes are no character, the one behind them is not cut into U+FFFD with them."""
    data = b"a" + b"\xff" * num_undecodable + "😀b".encode()
    assert probed(TextDraft("abc"), Target(bytewise(data))).content == data.decode("utf-8", "replace")


def test_a_draft_of_many_byte_characters_is_accepted() -> None:
    """After a difference inside a character the draft is still of use: it begins behind the last whole one."""
    text = "日本語文章" * 8
    draft = TextDraft("本" + text[1:])
    result = probed(draft, Target(bytewise(text), call_s=0.01), lookahead=Fixed(6))
    assert result.content == text
    assert result.stats.num_accepted_draft_tokens > 60


# ------------------------------------------------------------------------------------------ rounds


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_a_round_is_one_call_with_one_prefix_more_than_were_drafted(streams: int) -> None:
    """Its prefixes grow by one token each; no round is longer than the lookahead, no more are under way than may be.

    The stream writes the answer until rounds are ahead of it; a call that came too late for that is no round.
    """
    target = Target(bytewise(WORDS), call_s=0.05)
    decoder = patient(TextDraft(WORDS), target, lookahead=Fixed(4), max_concurrent_streams=streams)
    events = run_virtual(collected(decoder, "tell"))
    rounds = [event for event in events if isinstance(event, Round)]
    judged = [len(call.prefixes) for call in target.sample_calls if not call.is_cancelled]
    num_judged = [r.num_draft_tokens + 1 for r in rounds]
    assert judged[len(judged) - len(rounds) + 1 :] == num_judged[1:]
    assert len(judged) - len(rounds) <= streams
    for call in target.sample_calls:
        assert all(len(b) == len(a) + 1 and b[:-1] == a for a, b in pairwise(call.prefixes))
        assert 1 <= len(call.prefixes) <= 5
    assert max(most_at_once(target.sample_calls), 1) == streams
    num_streamed = len(WORDS.encode()) + 1 - sum(r.num_emitted_tokens for r in rounds)
    assert 0 <= num_streamed < 10
    assert [r.index for r in rounds] == list(range(len(rounds)))


def most_at_once(calls: Sequence[Call]) -> int:
    """How many calls were open together."""
    changes = sorted([(c.start_s, 1) for c in calls] + [(c.end_s or 0.0, -1) for c in calls])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def test_the_draft_goes_on_while_a_round_is_under_way() -> None:
    """Pieces of the draft come while calls are open, and the whole takes less than drafting and verifying in turn."""
    target = Target([piece.encode() for piece in split_into_pieces(WORDS)], encode_size=100, call_s=0.1)
    draft = TextDraft(WORDS, token_s=0.01)
    result = probed(draft, target, lookahead=Fixed(8), max_concurrent_streams=3)
    assert result.content == WORDS
    during = sum(any(c.start_s < at < (c.end_s or 0.0) for c in target.sample_calls) for at in draft.piece_times)
    assert during > 0.8 * len(draft.piece_times)
    assert any(a.start_s < b.start_s < (a.end_s or 0.0) for a, b in pairwise(target.sample_calls))
    in_turn = len(result.rounds) * 0.1 + len(draft.piece_times) * 0.01
    assert result.timings.total_s < 0.7 * in_turn


def test_rounds_behind_a_rejection_are_given_up_at_once() -> None:
    """When the target differs, every round that was sent on the draft's word ends then, not when it is answered."""
    wrong = WORDS.replace("word9 ", "wordX ")
    target = Target(bytewise(WORDS), call_s=0.5)
    result = probed(TextDraft(wrong, token_s=0.2), target, max_concurrent_streams=4)
    assert result.content == WORDS
    given_up = [call for call in target.sample_calls if call.is_cancelled]
    assert given_up
    ends = {call.end_s for call in target.sample_calls if not call.is_cancelled}
    for call in given_up:
        assert call.end_s in ends  # at the very time at which another one told the difference
        assert (call.end_s or 0.0) < call.start_s + 0.5


def test_what_a_round_reports_adds_up() -> None:
    """Accepted tokens and corrections are the answer; origins say how each text came."""
    target = SimulatedTarget(WORDS, first_token_s=0.02, by_ids=True)
    draft = SimulatedDraft(WORDS, 0.7, 3, token_s=0.001)
    events = run_virtual(collected(patient(draft, target, lookahead=Fixed(4)), "tell"))
    rounds = [event for event in events if isinstance(event, Round)]
    for r in rounds:
        assert 0 <= r.num_accepted_tokens <= r.num_draft_tokens
        assert r.num_emitted_tokens in (r.num_accepted_tokens, r.num_accepted_tokens + 1)
    texts = Counter(event.origin for event in events if isinstance(event, TextDelta))
    assert texts["accepted"] == sum(r.num_accepted_tokens for r in rounds)
    assert texts["correction"] == sum(r.rejection_index is not None for r in rounds) - (
        rounds[-1].rejection_index is not None  # the end of the answer has no text
    )
    assert sum(texts.values()) == len(split_into_pieces(WORDS))


@pytest.mark.parametrize("max_tokens", [1, 2, 9, 30])
def test_no_round_reaches_beyond_the_cap(max_tokens: int) -> None:
    """The last token that may be asked for is the last one of the answer: none is paid for in vain."""
    target = Target(bytewise(WORDS), call_s=0.01)
    request = ChatRequest.create("tell", max_tokens=max_tokens)
    result = probed(TextDraft(WORDS), target, request, lookahead=Fixed(7), max_concurrent_streams=3)
    assert result.content == WORDS[:max_tokens]
    assert max((len(prefix) for call in target.sample_calls for prefix in call.prefixes), default=0) <= max_tokens


def test_a_cap_on_iterations_or_drafted_tokens_is_kept() -> None:
    """Rounds end at `max_iterations`; a spent draft leaves the rest to the target alone."""
    target = Target(bytewise(WORDS), call_s=0.01)
    result = probed(TextDraft(WORDS), target, max_iterations=3, lookahead=Fixed(4))
    assert (len(result.rounds), result.finish_reason, result.stopped_by) == (3, "length", "max_iterations")
    assert WORDS.startswith(result.content)
    assert result.content
    target = Target(bytewise(WORDS), call_s=0.01)
    result = probed(TextDraft(WORDS), target, max_draft_tokens=7, lookahead=Fixed(4))
    assert result.content == WORDS
    assert result.draft_usage is not None
    assert result.draft_usage.output_tokens == 7
    assert len(target.streams) == 2  # the answer's own stream, and what follows the rounds
