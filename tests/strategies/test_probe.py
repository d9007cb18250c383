"""Probing by virtual clock: the target's own text and law, one call a round, nothing twice, nothing left open."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from llm_spec import (
    Capabilities,
    ChatRequest,
    ChatResponse,
    CostAware,
    DraftCapabilities,
    DraftPiece,
    Finish,
    Fixed,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
    Round,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    StreamEvent,
    TargetError,
    TextDelta,
    UnsupportedError,
    Usage,
)
from llm_spec.chat_response import complete_from_stream
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import SampledToken
from llm_spec.drafting.text_pieces import split_pieces
from llm_spec.pair_stats import PairStats
from llm_spec.simulation import SimulatedDraft, SimulatedTarget, run_virtual
from llm_spec.strategies.base import Ready, StrategyContext
from llm_spec.strategies.probe import prepare
from llm_spec.testing import ScriptedProvider
from llm_spec.tokens.lookahead import LookaheadPolicy

WORDS = " ".join(f"word{i}" for i in range(60))
VARIED = (
    "Here is the plan, step by step.\r\n\r\n```python title here\ndef area(radius: float) -> float:\n"
    "    return 3.14 * radius  # naïve\n```\n\n日本語 の 文章 😀 👩‍👩‍👧 text   with   runs\t\tof \n \n"
)
EMOJI = "a😀b👩‍👩‍👧 é日本c"

EOS_ID, PROMPT_ID, ELSE_ID = 0, 1, 2


# ------------------------------------------------------------------------------------------ targets and drafts


@dataclass(eq=False)
class Call:
    """One `sample_next`."""

    prefixes: list[list[int]]
    sampling: Sampling
    start_s: float
    end_s: float | None = None
    is_cancelled: bool = False


class TokenTarget:
    """Writes `tokens`, each some bytes (none: a control token), and encodes text `encode_size` bytes to a token.

    A token that is no whole text by itself has `undecoded` for its text. After a prefix that it would not write it
    samples a token of its own ("#"): a wrong context is seen in the text. `fails` names methods and which of their
    calls fail: those of a range, or all from a number on; a cancelled one takes `close_s` to close. Costs are counted
    when a call comes.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        encode_size: int = 1,
        undecoded: str = "",
        call_s: float = 0.0,
        fails: Mapping[str, int | range] | None = None,
        context_length: int | None = None,
        continue_prefix: bool = False,
        num_prompt_tokens: int = 1,
        encode_s: float = 0.0,
        close_s: float = 0.0,
    ) -> None:
        self.name = "token:target"
        self.capabilities = Capabilities(continue_prefix=continue_prefix, token_endpoint=self)
        self.context_length = context_length
        self.calls: list[Call] = []
        self.requests: list[ChatRequest] = []
        self.after: list[tuple[list[int], ChatRequest]] = []
        self.num_calls: Counter[str] = Counter()
        self.num_open = self.num_input_tokens = self.num_output_tokens = 0
        self.fails = dict(fails or {})
        self._bytes = [b"", b"", b"#"]
        self._ids: dict[bytes, int] = {}
        self.answer_ids = [self._id(token) for token in tokens]
        self._prompt = [PROMPT_ID] * num_prompt_tokens
        self._encode_size = encode_size
        self._undecoded = undecoded
        self._call_s = call_s
        self._encode_s = encode_s
        self._close_s = close_s

    @property
    def text(self) -> str:
        """All that it writes."""
        return self._decoded(self.answer_ids)

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.requests.append(request)
        await self._enter("stream")
        rest = self.text[len(request.prefix) :] if self.text.startswith(request.prefix) else "#"
        pieces = split_pieces(rest)
        limit = len(pieces) if request.max_tokens is None else request.max_tokens
        self.num_input_tokens += len(self._prompt) + len(request.prefix)

        async def written() -> AsyncGenerator[StreamEvent]:
            for piece in pieces[:limit]:
                await asyncio.sleep(self._call_s)
                self.num_output_tokens += 1
                yield TextDelta(piece)
            usage = Usage(input_tokens=len(self._prompt) + len(request.prefix), output_tokens=len(pieces[:limit]))
            is_cut = request.max_tokens is not None and limit <= len(pieces)
            yield Finish("length" if is_cut else "stop", usage, "max_tokens" if is_cut else "eos")

        async with self._open(written()) as events:
            yield events

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        pass

    # -------------------------------------------------------------------------------------- endpoint

    async def encode(self, text: str) -> list[int]:
        self.num_open += 1
        try:
            await asyncio.sleep(self._encode_s)
            await self._enter("encode")
        except asyncio.CancelledError:
            await asyncio.sleep(self._close_s)
            raise
        finally:
            self.num_open -= 1
        data, size = text.encode(), self._encode_size
        return [self._id(data[at : at + size]) for at in range(0, len(data), size)]

    async def decode(self, token_ids: Sequence[int]) -> str:
        await self._enter("decode")
        return self._decoded(token_ids)

    async def encode_chat(self, request: ChatRequest) -> list[int]:  # noqa: ARG002 - one prompt
        await self._enter("encode_chat")
        await asyncio.sleep(self._call_s)
        return list(self._prompt)

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        clock = asyncio.get_running_loop().time
        call = Call([list(prefix) for prefix in prefixes], sampling, clock())
        self.calls.append(call)
        self.num_open += 1
        try:
            await asyncio.sleep(self._call_s)
            await self._enter("sample_next")
        except asyncio.CancelledError:
            call.is_cancelled = True
            await asyncio.sleep(self._close_s)
            raise
        finally:
            self.num_open -= 1
            call.end_s = clock()
            self.num_input_tokens += sum(map(len, prefixes))
            self.num_output_tokens += len(prefixes)
        return [self._next(prefix) for prefix in call.prefixes]

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with self.stream_after(self._prompt, request) as events:
            yield events

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.after.append((list(token_ids), request))
        await self._enter("stream_after")
        written = list(token_ids[len(self._prompt) :])
        rest = self.answer_ids[len(written) :] if self.answer_ids[: len(written)] == written else [ELSE_ID]
        limit = len(rest) + 1 if request.max_tokens is None else request.max_tokens
        self.num_input_tokens += len(token_ids)

        async def events() -> AsyncGenerator[StreamEvent]:
            shown = ""
            for end, token_id in enumerate(rest[:limit], 1):
                await asyncio.sleep(self._call_s)
                await self._enter("stream_after piece")
                self.num_output_tokens += 1
                text = self._decoded(rest[:end])
                whole = text.rstrip("\ufffd") if end < len(rest) else text
                yield TextDelta(whole[len(shown) :], token_ids=(token_id,))
                shown = whole
            usage = Usage(input_tokens=len(token_ids), output_tokens=len(rest[:limit]))
            is_cut = limit <= len(rest)
            yield Finish("length" if is_cut else "stop", usage, "max_tokens" if is_cut else "eos")

        async with self._open(events()) as opened:
            yield opened

    # -------------------------------------------------------------------------------------- inside

    @asynccontextmanager
    async def _open(self, events: AsyncGenerator[StreamEvent]) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.num_open += 1
        try:
            yield events
        finally:
            await events.aclose()
            self.num_open -= 1

    async def _enter(self, method: str) -> None:
        await asyncio.sleep(0)
        self.num_calls[method] += 1
        at = self.fails.get(method)
        if at is not None and (
            self.num_calls[method] - 1 in at if isinstance(at, range) else self.num_calls[method] > at
        ):
            raise TargetError(f"{method} is broken")

    def _next(self, prefix: Sequence[int]) -> SampledToken:
        written = list(prefix[len(self._prompt) :])
        at = len(written)
        if list(prefix[: len(self._prompt)]) != self._prompt or written != self.answer_ids[:at]:
            return SampledToken(ELSE_ID, "#")
        if at == len(self.answer_ids):
            return SampledToken(EOS_ID, "", is_end=True)
        text = self._decoded([self.answer_ids[at]])
        return SampledToken(self.answer_ids[at], self._undecoded if "\ufffd" in text else text)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._bytes[token_id] for token_id in token_ids).decode("utf-8", "replace")

    def _id(self, token: bytes) -> int:
        if token not in self._ids:
            self._ids[token] = len(self._bytes)
            self._bytes.append(token)
        return self._ids[token]


class TextDraft:
    """Guesses `text` from where the answer's length says it stands, `token_s` a piece; `piece_times` are told.

    It may break behind a number of pieces, be silent there, or (continues_prefix False) always write from the start.
    """

    name = "text-draft"

    def __init__(
        self,
        text: str,
        *,
        token_s: float = 0.0,
        fail_after: int | None = None,
        silent_after: int | None = None,
        continues_prefix: bool = True,
    ) -> None:
        self.capabilities = DraftCapabilities(continues_prefix=continues_prefix)
        self.num_calls = self.num_open = 0
        self.piece_times: list[float] = []
        self._text = text
        self._token_s = token_s
        self._fail_after = fail_after
        self._silent_after = silent_after

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self.num_calls += 1
        self.num_open += 1
        rest = self._text[len(request.prefix) if self.capabilities.continues_prefix else 0 :]
        pieces = self._pieces(split_pieces(rest)[:max_tokens])
        try:
            yield pieces
        finally:
            await pieces.aclose()
            self.num_open -= 1

    async def aclose(self) -> None:
        pass

    async def _pieces(self, texts: Sequence[str]) -> AsyncGenerator[DraftPiece]:
        for index, text in enumerate(texts):
            if index == self._fail_after:
                raise ConnectionError("the draft is down")
            await asyncio.sleep(1e9 if index == self._silent_after else self._token_s)
            self.piece_times.append(asyncio.get_running_loop().time())
            yield DraftPiece(text)
        yield DraftPiece("", finish_reason="stop")


class Patient(PairStats):
    """Figures by which rounds always pay."""

    def estimate_plain_s(self, num_tokens: int) -> float | None:  # noqa: ARG002 - whatever
        return 1e9


def probing(draft: DraftProvider | None, target: LlmProvider, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(draft, target, SpeculativeConfig(strategy="probe", **options))


def patient(draft: DraftProvider | None, target: LlmProvider, **options: Any) -> SpeculativeDecoder:
    """A decoder that probes to the end, whether it pays or not."""
    decoder = probing(draft, target, **options)
    decoder._planner.pair_stats = Patient()
    return decoder


def probed(
    draft: DraftProvider, target: LlmProvider, request: ChatRequest | str = "tell", **options: Any
) -> SpeculativeResult:
    return run_virtual(probing(draft, target, **options).decode(request))


def bytewise(text: str | bytes) -> list[bytes]:
    return [bytes([byte]) for byte in (text if isinstance(text, bytes) else text.encode())]


def plain_end(pieces: Sequence[str], max_tokens: int | None, stop: Sequence[str]) -> tuple[str, str, str]:
    """What the target alone would give: text, finish reason, what stopped it."""
    text = "".join(pieces[:max_tokens])
    found = min(((at + len(s), at) for s in stop if (at := text.find(s)) >= 0), default=None)
    if found is not None:
        return text[: found[1]], "stop", "stop_string"
    if max_tokens is not None and len(pieces) >= max_tokens:
        return text, "length", "max_tokens"
    return text, "stop", "eos"


def end_of(result: SpeculativeResult) -> tuple[str, str, str | None]:
    return result.content, result.finish_reason, result.stopped_by


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
    pieces = split_pieces(answer)
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
    stop=st.lists(st.sampled_from([" other", "word word", "\n", " a", "never", "😀"]), max_size=2),
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
    assert end_of(result) == plain_end(split_pieces(answer), max_tokens, stop)
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
    for at in data.draw(st.lists(st.integers(0, len(tokens)), max_size=2)):
        tokens.insert(at, b"")  # control tokens
    target = TokenTarget(tokens, encode_size=encode_size, undecoded=undecoded, call_s=call_s)
    draft = TextDraft(text[:wrong] + "x" + text[wrong + 1 :], token_s=0.001)
    events = run_virtual(
        collected(patient(draft, target, max_concurrent_streams=streams, lookahead=Fixed(lookahead)), "tell")
    )
    shown = [event.text for event in events if isinstance(event, TextDelta)]
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)
    assert target.num_open == 0


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
        target = TokenTarget(bytewise(EMOJI), undecoded=undecoded, call_s=0.01)
        events = run_virtual(collected(patient(draft, target, lookahead=Fixed(lookahead)), "tell"))
        shown = [event.text for event in events if isinstance(event, TextDelta)]
        assert "".join(shown) == EMOJI
        assert "\ufffd" not in "".join(shown)


def test_control_tokens_have_no_text_and_no_effect_on_it() -> None:
    """A token without text may stand anywhere, even between the bytes of a character."""
    tokens = [b"", b"a", b"\xf0", b"\x9f", b"", b"\x98\x80", b"", b"", b"b", b""]
    for draft in (TextDraft("a😀b"), TextDraft("x")):
        assert probed(draft, TokenTarget(tokens, call_s=0.01)).content == "a😀b"


@pytest.mark.parametrize("end", [b"\xf0\x9f", b"\xff\xff", b"\xe6"])
def test_bytes_at_the_end_that_are_no_character_are_shown_as_such(end: bytes) -> None:
    """What never became a character is U+FFFD, once the answer is over, however it ended."""
    tokens = bytewise(b"abc" + end)
    expected = (b"abc" + end).decode("utf-8", "replace")
    assert probed(TextDraft("abcd"), TokenTarget(tokens)).content == expected
    cut = ChatRequest.create("tell", max_tokens=len(tokens))
    assert end_of(probed(TextDraft("abcd"), TokenTarget(tokens), cut)) == (expected, "length", "max_tokens")


@pytest.mark.parametrize(
    "num_undecodable",
    [1, 3, 7, 12],
)
def test_a_character_behind_undecodable_bytes_is_whole(num_undecodable: int) -> None:
    """However many bytes are no character, the one behind them is not cut into U+FFFD with them."""
    data = b"a" + b"\xff" * num_undecodable + "😀b".encode()
    assert probed(TextDraft("abc"), TokenTarget(bytewise(data))).content == data.decode("utf-8", "replace")


def test_a_draft_of_many_byte_characters_is_accepted() -> None:
    """After a difference inside a character the draft is still of use: it begins behind the last whole one."""
    text = "日本語文章" * 8
    draft = TextDraft("本" + text[1:])
    result = probed(draft, TokenTarget(bytewise(text), call_s=0.01), lookahead=Fixed(6))
    assert result.content == text
    assert result.stats.num_accepted_draft_tokens > 60


# ------------------------------------------------------------------------------------------ rounds


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_a_round_is_one_call_with_one_prefix_more_than_were_drafted(streams: int) -> None:
    """Its prefixes grow by one token each; no round is longer than the lookahead, no more are under way than may be."""
    target = TokenTarget(bytewise(WORDS), call_s=0.05)
    decoder = probing(TextDraft(WORDS), target, lookahead=Fixed(4), max_concurrent_streams=streams)
    events = run_virtual(collected(decoder, "tell"))
    rounds = [event for event in events if isinstance(event, Round)]
    judged = [call for call in target.calls if not call.is_cancelled]
    assert [len(call.prefixes) for call in judged] == [r.num_draft_tokens + 1 for r in rounds]
    for call in target.calls:
        assert all(len(b) == len(a) + 1 and b[:-1] == a for a, b in pairwise(call.prefixes))
        assert 1 <= len(call.prefixes) <= 5
    assert max(most_at_once(target.calls), 1) == streams
    assert sum(r.num_emitted_tokens for r in rounds) == len(WORDS.encode()) + 1
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
    target = TokenTarget([piece.encode() for piece in split_pieces(WORDS)], encode_size=100, call_s=0.1)
    draft = TextDraft(WORDS, token_s=0.01)
    result = probed(draft, target, lookahead=Fixed(8), max_concurrent_streams=3)
    assert result.content == WORDS
    during = sum(any(c.start_s < at < (c.end_s or 0.0) for c in target.calls) for at in draft.piece_times)
    assert during > 0.8 * len(draft.piece_times)
    assert any(a.start_s < b.start_s < (a.end_s or 0.0) for a, b in pairwise(target.calls))
    in_turn = len(result.rounds) * 0.1 + len(draft.piece_times) * 0.01
    assert result.timings.total_s < 0.7 * in_turn


def test_rounds_behind_a_rejection_are_given_up_at_once() -> None:
    """When the target differs, every round that was sent on the draft's word ends then, not when it is answered."""
    wrong = WORDS.replace("word9 ", "wordX ")
    target = TokenTarget(bytewise(WORDS), call_s=0.5)
    result = probed(TextDraft(wrong, token_s=0.02), target, lookahead=Fixed(4), max_concurrent_streams=4)
    assert result.content == WORDS
    given_up = [call for call in target.calls if call.is_cancelled]
    assert given_up
    ends = {call.end_s for call in target.calls if not call.is_cancelled}
    for call in given_up:
        assert call.end_s in ends  # at the very time at which another one told the difference
        assert (call.end_s or 0.0) < call.start_s + 0.5


def test_what_a_round_reports_adds_up() -> None:
    """Accepted tokens and corrections are the answer; origins say how each text came."""
    target = SimulatedTarget(WORDS, first_token_s=0.02, by_ids=True)
    draft = SimulatedDraft(WORDS, 0.7, 3, token_s=0.001)
    events = run_virtual(collected(probing(draft, target, lookahead=Fixed(4)), "tell"))
    rounds = [event for event in events if isinstance(event, Round)]
    for r in rounds:
        assert 0 <= r.num_accepted_tokens <= r.num_draft_tokens
        assert r.num_emitted_tokens in (r.num_accepted_tokens, r.num_accepted_tokens + 1)
    texts = Counter(event.origin for event in events if isinstance(event, TextDelta))
    assert texts["accepted"] == sum(r.num_accepted_tokens for r in rounds)
    assert texts["correction"] == sum(r.rejection_index is not None for r in rounds) - (
        rounds[-1].rejection_index is not None  # the end of the answer has no text
    )
    assert sum(texts.values()) == len(split_pieces(WORDS))


@pytest.mark.parametrize("max_tokens", [1, 2, 9, 30])
def test_no_round_reaches_beyond_the_cap(max_tokens: int) -> None:
    """The last token that may be asked for is the last one of the answer: none is paid for in vain."""
    target = TokenTarget(bytewise(WORDS), call_s=0.01)
    request = ChatRequest.create("tell", max_tokens=max_tokens)
    result = probed(TextDraft(WORDS), target, request, lookahead=Fixed(7), max_concurrent_streams=3)
    assert result.content == WORDS[:max_tokens]
    assert max(len(prefix) for call in target.calls for prefix in call.prefixes) == max_tokens


def test_a_cap_on_iterations_or_drafted_tokens_is_kept() -> None:
    """Rounds end at `max_iterations`; a spent draft leaves the rest to the target alone."""
    target = TokenTarget(bytewise(WORDS), call_s=0.01)
    result = probed(TextDraft(WORDS), target, max_iterations=3, lookahead=Fixed(4))
    assert (len(result.rounds), result.finish_reason, result.stopped_by) == (3, "length", "max_iterations")
    assert WORDS.startswith(result.content)
    assert result.content
    target = TokenTarget(bytewise(WORDS), call_s=0.01)
    result = probed(TextDraft(WORDS), target, max_draft_tokens=7, lookahead=Fixed(4))
    assert result.content == WORDS
    assert result.draft_usage is not None
    assert result.draft_usage.output_tokens == 7
    assert len(target.after) == 1


# ------------------------------------------------------------------------------------------ sampling


class MarkovTarget:
    """Samples one of three tokens by a law that depends on the last one; a seed makes a call a function of it.

    As servers do: one seed gives every row of a batch the same noise.
    """

    LAW = ((0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.35, 0.25, 0.4))  # by the last token, the prompt's being 0

    def __init__(self, seed: int = 0, *, call_s: float = 0.0) -> None:
        self.name = "markov:target"
        self.capabilities = Capabilities(token_endpoint=self)
        self.context_length: int | None = None
        self.num_open = self.max_open = 0
        self.samplings: list[Sampling] = []
        self.lengths: list[tuple[int, ...]] = []  # of the prefixes of each call
        self._random = random.Random(seed)  # noqa: S311 - a reproducible test
        self._call_s = call_s

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with self.stream_after([0], request) as events:
            yield events

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        pass

    async def encode(self, text: str) -> list[int]:
        return [ord(sign) - ord("a") for sign in text]

    async def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("abc"[token_id] for token_id in token_ids)

    async def encode_chat(self, request: ChatRequest) -> list[int]:  # noqa: ARG002 - one prompt
        return [0]

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        self.samplings.append(sampling)
        self.lengths.append(tuple(map(len, prefixes)))
        noise = None if sampling.seed is None else random.Random(sampling.seed).random()  # noqa: S311 - as above
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            await asyncio.sleep(self._call_s)
        finally:
            self.num_open -= 1
        return [self._sampled(prefix[-1], noise) for prefix in prefixes]

    def stream_chat(self, request: ChatRequest) -> Any:
        return self.stream(request)

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        noises = random.Random(request.sampling.seed)  # noqa: S311 - as above

        async def events() -> AsyncGenerator[StreamEvent]:
            last = token_ids[-1]
            for _ in range(request.max_tokens or 0):
                await asyncio.sleep(self._call_s)
                token = self._sampled(last, noises.random() if request.sampling.seed is not None else None)
                last = token.token_id
                yield TextDelta(token.text, token_ids=(last,))
            yield Finish("length", None, "max_tokens")

        async with _closing(events()) as opened:
            yield opened

    def _sampled(self, last: int, noise: float | None) -> SampledToken:
        noise = self._random.random() if noise is None else noise
        probs = self.LAW[last]
        token_id = 0 if noise < probs[0] else 1 if noise < probs[0] + probs[1] else 2
        return SampledToken(token_id, "abc"[token_id])


@asynccontextmanager
async def _closing(events: AsyncGenerator[StreamEvent]) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
    try:
        yield events
    finally:
        await events.aclose()


class LikelyDraft:
    """Always guesses tokens in a pattern of its own, chosen by `pattern`."""

    name = "likely"

    def __init__(self, pattern: str = "aabbbc") -> None:
        self._pattern = pattern

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        start = len(request.prefix)
        text = "".join(self._pattern[(start + n) % len(self._pattern)] for n in range(min(max_tokens, 24)))

        async def pieces() -> AsyncGenerator[DraftPiece]:
            await asyncio.sleep(0)
            yield DraftPiece(text, finish_reason="stop")

        opened = pieces()
        try:
            yield opened
        finally:
            await opened.aclose()

    async def aclose(self) -> None:
        pass


async def sampled_text(target: MarkovTarget, request: ChatRequest, draft: DraftProvider, **options: Any) -> str:
    config = SpeculativeConfig(strategy="probe", **options)
    context = StrategyContext(draft=draft, target=target, request=request, config=config, pair_stats=Patient())
    ready = prepare(context)
    assert isinstance(ready, Ready)
    async with ready.run() as events:
        return "".join([event.text async for event in events if isinstance(event, TextDelta)])


def triples_p_value(texts: Sequence[str]) -> float:
    """Chi-square of all windows of three tokens, given the token before each, against the exact law."""
    probs = MarkovTarget.LAW
    statistic, freedom = 0.0, 0
    for before in range(3):
        counts: Counter[tuple[int, ...]] = Counter()
        for text in texts:
            ids = [0, *(ord(sign) - ord("a") for sign in text)]
            counts.update(tuple(ids[at + 1 : at + 4]) for at in range(0, len(ids) - 3, 3) if ids[at] == before)
        for ids in product(range(3), repeat=3):
            expected = counts.total() * probs[before][ids[0]] * probs[ids[0]][ids[1]] * probs[ids[1]][ids[2]]
            statistic += (counts[ids] - expected) ** 2 / expected
        freedom += 26
    return float(chi2.sf(statistic, freedom))


@pytest.mark.slow
@pytest.mark.parametrize(("lookahead", "streams", "num_windows"), [(1, 1, 5_000), (4, 1, 25_000), (3, 3, 20_000)])
def test_sampled_text_has_the_targets_law(lookahead: int, streams: int, num_windows: int) -> None:
    """Windows of three tokens, 50,000 of them: chi-square tests against the exact law, whatever the draft likes."""
    options = {"lookahead": Fixed(lookahead), "max_concurrent_streams": streams}

    async def texts() -> list[str]:
        request = ChatRequest.create("tell", temperature=1.0, max_tokens=600)
        target, patterns = MarkovTarget(7 + lookahead), ("aabbbc", "b", "abc", "cb", "a")
        drafts = [LikelyDraft(patterns[n % 5]) for n in range(num_windows // 200)]
        return [await sampled_text(target, request, draft, **options) for draft in drafts]

    drawn = run_virtual(texts())
    assert sum(len(text) // 3 for text in drawn) == num_windows
    assert triples_p_value(drawn) > 1e-3


def test_short_answers_have_the_targets_law() -> None:
    """Whole answers of three tokens, each a request of its own."""

    async def texts() -> list[str]:
        request = ChatRequest.create("tell", temperature=1.0, max_tokens=3)
        target = MarkovTarget(5)
        options = {"lookahead": Fixed(2), "max_concurrent_streams": 2}
        return [await sampled_text(target, request, LikelyDraft("ab"), **options) for _ in range(3000)]

    counts = Counter(run_virtual(texts()))
    probs, statistic = MarkovTarget.LAW, 0.0
    for a, b, c in product(range(3), repeat=3):
        expected = 3000 * probs[0][a] * probs[a][b] * probs[b][c]
        statistic += (counts["abc"[a] + "abc"[b] + "abc"[c]] - expected) ** 2 / expected
    assert chi2.sf(statistic, 26) > 1e-3


def test_a_sampled_batch_carries_no_seed() -> None:
    """Without a seed of the caller's none is sent, and nothing else of the sampling is lost."""
    target = MarkovTarget()
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=2, min_p=0.01, logit_bias={1: 2.0}, repetition_penalty=1.1)
    request = replace(ChatRequest.create("tell", max_tokens=40), sampling=sampling)
    run_virtual(sampled_text(target, request, LikelyDraft(), lookahead=Fixed(4)))
    assert set(map(repr, target.samplings)) == {repr(sampling)}
    assert max(map(len, target.lengths)) > 1


def test_at_temperature_0_a_seed_is_dropped() -> None:
    """Nothing is drawn: the rounds stay batches, without it."""
    target = TokenTarget(bytewise(WORDS))
    request = ChatRequest.create("tell", temperature=0.0, seed=5)
    assert probed(TextDraft(WORDS), target, request, lookahead=Fixed(4)).content == WORDS
    assert {call.sampling.seed for call in target.calls} == {None}
    assert max(len(call.prefixes) for call in target.calls) > 1


def test_a_seeded_request_is_answered_plain() -> None:
    """One seed would give every prefix of a batch the same noise: the target's own seeded text instead."""
    target = TokenTarget(bytewise(WORDS))
    request = ChatRequest.create("tell", temperature=0.8, seed=5)
    result = probed(TextDraft(WORDS), target, request, lookahead=Fixed(4))
    assert (result.content, result.strategy, target.calls) == (WORDS, "plain", [])
    assert [sent.sampling.seed for sent in target.requests] == [5]


# ------------------------------------------------------------------------------------------ what is not served


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        ("response_format", {"type": "json_object"}),
        ("extra", {"guided_regex": "a*"}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
    ],
)
def test_what_depends_on_more_than_the_prefix_is_refused_by_name(field: str, value: Any) -> None:
    """`probe` names the field; `auto` serves the request plain, to the target unchanged, whatever it has learned."""
    target = SimulatedTarget(WORDS, first_token_s=0.02, token_s=0.02, by_ids=True)
    request = ChatRequest.create("tell", **{field: value})
    with pytest.raises(UnsupportedError, match=field):
        probed(ReferenceDraft(WORDS), target, request)
    assert target.num_calls == 0

    async def served() -> list[str]:
        decoder = SpeculativeDecoder(TextDraft(WORDS), target, SpeculativeConfig(strategy="auto"))
        others = [await decoder.decode("tell") for _ in range(4)]  # it gets to know what pays
        assert {other.strategy for other in others} > {"plain"}
        results = [await decoder.decode(request) for _ in range(3)]
        assert all(result.content == WORDS for result in results)
        return [result.strategy for result in results]

    assert run_virtual(served()) == ["plain"] * 3


def test_a_pair_that_cannot_be_probed_is_refused() -> None:
    """No draft, or a target without token ids: the error says which."""
    with pytest.raises(UnsupportedError, match="no draft"):
        run_virtual(probing(None, SimulatedTarget(WORDS, by_ids=True)).decode("tell"))
    with pytest.raises(UnsupportedError, match="simulated:target"):
        probed(ReferenceDraft(WORDS), SimulatedTarget(WORDS))


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("at", range(8))
def test_a_failing_call_leaves_the_rest_to_the_target_alone(at: int, streams: int) -> None:
    """From any call on: nothing is lost or said twice, one fallback, and the rest comes after the confirmed tokens."""
    target = TokenTarget(bytewise(WORDS), call_s=0.03, fails={"sample_next": at})
    result = probed(TextDraft(WORDS, token_s=0.001), target, lookahead=Fixed(4), max_concurrent_streams=streams)
    assert end_of(result) == (WORDS, "stop", "eos")
    assert len(result.fallbacks) == 1
    assert "sample_next is broken" in result.fallbacks[0]
    assert target.num_open == 0
    assert len(target.after) + len(target.requests) == 1
    for token_ids, _ in target.after:
        assert token_ids == [PROMPT_ID, *target.answer_ids[: len(token_ids) - 1]]


def test_a_failing_call_of_a_sampled_request_leaves_the_rest_to_the_target_alone() -> None:
    """As of a greedy one."""
    target = TokenTarget(bytewise(WORDS), call_s=0.03, fails={"sample_next": 9})
    request = ChatRequest.create("tell", temperature=1.0)
    result = probed(TextDraft(WORDS), target, request, lookahead=Fixed(4), max_concurrent_streams=2)
    assert result.content == WORDS
    assert len(result.fallbacks) == 1
    assert "sample_next is broken" in result.fallbacks[0]


class Unfinished(TokenTarget):
    """Its streams just end."""

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async def without_finish(events: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
            async for event in events:
                if not isinstance(event, Finish):
                    yield event

        async with super().stream_after(token_ids, request) as events:
            yield without_finish(events)


def test_a_rest_without_a_finish_is_an_error() -> None:
    """As of the target alone: nobody knows whether it was the whole answer."""
    target = Unfinished(bytewise(WORDS), fails={"sample_next": 3})
    with pytest.raises(TargetError, match="without a finish reason") as caught:
        probed(TextDraft(WORDS), target, lookahead=Fixed(4))
    assert caught.value.partial_text == WORDS


@pytest.mark.parametrize("method", ["encode", "encode_chat"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_text_that_cannot_be_encoded_any_more_ends_speculation_alone(method: str, at: int) -> None:
    """The target goes on, from where the answer stood."""
    if method == "encode_chat" and at:
        pytest.skip("it is called once")
    target = TokenTarget(bytewise(WORDS), call_s=0.02, fails={method: at})
    result = probed(TextDraft(WORDS, token_s=0.01), target, lookahead=Fixed(3))
    assert result.content == WORDS
    assert len(result.fallbacks) == 1
    assert f"{method} is broken" in result.fallbacks[0]


class Odd(TokenTarget):
    """From its second call on it gives, or does, what nobody asked for."""

    def __init__(self, spoil: Callable[[list[SampledToken]], list[SampledToken]]) -> None:
        super().__init__(bytewise(WORDS), call_s=0.02)
        self._spoil = spoil

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        tokens = await super().sample_next(prefixes, sampling)
        return tokens if len(self.calls) == 1 else self._spoil(tokens)


def raising(_: list[SampledToken]) -> list[SampledToken]:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    "spoil", [raising, lambda _: [], lambda tokens: tokens[1:], lambda tokens: [*tokens, tokens[0]]]
)
def test_a_round_that_ends_oddly_is_given_up(spoil: Callable[[list[SampledToken]], list[SampledToken]]) -> None:
    """With an error of another kind, or with too few or too many tokens: the target goes on alone."""
    target = Odd(spoil)
    result = probed(TextDraft(WORDS, token_s=0.01), target, lookahead=Fixed(3), max_concurrent_streams=1)
    assert (result.content, result.guarantee, len(result.fallbacks)) == (WORDS, "exact", 1)
    assert len(target.calls) == 2


DECODED = "ab😀cd😀efgh😀ij" * 2


@pytest.mark.parametrize("at", range(9))
def test_a_call_for_text_that_fails_once_loses_and_doubles_none(at: int) -> None:
    """Tokens that a round had confirmed before the failure are shown, once; the rest follows them."""
    target = TokenTarget(bytewise(DECODED), call_s=0.02, fails={"decode": range(at, at + 1)})
    result = run_virtual(patient(TextDraft(DECODED), target, lookahead=Fixed(6)).decode("tell"))
    assert result.content == DECODED
    assert len(result.fallbacks) == 1


@pytest.mark.parametrize("at", range(9))
def test_text_that_cannot_be_told_any_more_is_never_wrong(at: int) -> None:
    """Either the target alone tells the rest, or the error has what was confirmed."""
    target = TokenTarget(bytewise(DECODED), call_s=0.02, fails={"decode": at})
    shown = ""

    async def run() -> None:
        nonlocal shown
        async with patient(TextDraft(DECODED), target, lookahead=Fixed(6)).stream("tell") as events:
            async for event in events:
                shown += event.text if isinstance(event, TextDelta) else ""

    error: TargetError | None = None
    try:
        run_virtual(run())
    except TargetError as raised:
        error = raised
    assert DECODED.startswith(shown)
    assert shown == (DECODED if error is None else error.partial_text)


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("by_text", [False, True])
def test_a_failure_inside_a_character_gives_it_whole(at: int, by_text: bool) -> None:
    """The bytes confirmed so far are part of it: neither U+FFFD nor the character twice."""
    text = "😀日é😁" * 3
    fails = {"sample_next": at, **({"stream_after": 0} if by_text else {})}
    target = TokenTarget(bytewise(text), call_s=0.02, fails=fails, continue_prefix=by_text)
    decoder = patient(TextDraft("x"), target, lookahead=Fixed(2), max_concurrent_streams=1)
    assert run_virtual(decoder.decode("tell")).content == text


def test_failures_of_overlapping_rounds_are_nobodys_concern() -> None:
    """Only the first of several failing rounds is told; asyncio has nothing to say about the others."""
    told: list[Mapping[str, Any]] = []

    async def run() -> SpeculativeResult:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        target = TokenTarget(bytewise(WORDS), call_s=0.02, fails={"sample_next": 6})
        decoder = probing(TextDraft(WORDS), target, lookahead=Fixed(2), max_concurrent_streams=5)
        result = await decoder.decode("tell")
        gc.collect()
        await asyncio.sleep(0.1)
        return result

    result = run_virtual(run())
    gc.collect()
    assert result.content == WORDS
    assert told == []


def test_the_context_length_ends_the_answer() -> None:
    """No prefix leaves no room for its token; the end is told as the context's."""
    for length in (2, 5, 17, 40):
        target = TokenTarget(bytewise(WORDS), call_s=0.01, context_length=length)
        result = probed(TextDraft(WORDS), target, lookahead=Fixed(6), max_concurrent_streams=3)
        assert end_of(result) == (WORDS[: length - 1], "length", "context_length")
        assert max(len(prefix) for call in target.calls for prefix in call.prefixes) <= length - 1


@pytest.mark.parametrize("num_prompt_tokens", [10, 11])
def test_a_prompt_that_fills_the_context_is_the_targets_to_refuse(num_prompt_tokens: int) -> None:
    """There is no room for a round: the target answers, or refuses, as it would alone; nothing is waited for."""

    async def run() -> None:
        target = TokenTarget(
            bytewise(WORDS), context_length=10, num_prompt_tokens=num_prompt_tokens, fails={"stream": 0}
        )
        async with asyncio.timeout(100):
            with pytest.raises(TargetError, match="stream is broken"):
                await probing(TextDraft(WORDS), target).decode("tell")
        assert target.calls == []

    run_virtual(run())


# ------------------------------------------------------------------------------------------ when it does not pay


@pytest.mark.parametrize("draft_token_s", [0.0, 0.001, 0.05])
@pytest.mark.parametrize("round_trip_s", [0.0, 0.05])
def test_a_useless_draft_is_given_up_soon(draft_token_s: float, round_trip_s: float) -> None:
    """With the plain speed known, 300 tokens take at most 1.3 times the plain time, the rest of them plainly."""
    text = " ".join(f"word{i}" for i in range(300))
    target = SimulatedTarget(text, first_token_s=0.05, token_s=0.02, round_trip_s=round_trip_s, by_ids=True)

    async def run() -> tuple[SpeculativeResult, SpeculativeResult]:
        plain = SpeculativeConfig(strategy="plain")
        decoder = SpeculativeDecoder(TextDraft("no " * 400, token_s=draft_token_s), target, plain)
        first = await decoder.decode("tell")
        decoder.config = replace(plain, strategy="probe")
        return first, await decoder.decode("tell")

    plain, result = run_virtual(run())
    assert result.content == text
    assert result.timings.total_s <= 1.3 * plain.timings.total_s
    assert len(result.rounds) < 60


# ------------------------------------------------------------------------------------------ leaving


@pytest.mark.parametrize("number", range(40))
def test_cancelling_ends_every_call_at_once(number: int) -> None:
    """At any moment: before the prompt is encoded, drafting, with rounds under way, going on alone."""

    async def run() -> None:
        target = TokenTarget(bytewise(WORDS), call_s=0.011, fails={"sample_next": 12})
        draft = TextDraft(WORDS.replace("word7", "other"), token_s=0.003)
        decoder = probing(draft, target, lookahead=Fixed(3), max_concurrent_streams=4)
        task = asyncio.create_task(decoder.decode("tell"))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        await asyncio.sleep(number * 0.0037)
        is_over = task.done()
        task.cancel()
        if not is_over:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (target.num_open, draft.num_open) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())


@pytest.mark.parametrize("number", range(0, 300, 7))
def test_cancelling_at_any_turn_of_the_loop_leaves_nothing(number: int) -> None:
    """Nothing takes time: every await is a turn of the loop, and any of them may be the last."""

    async def run() -> None:
        target = TokenTarget(bytewise(EMOJI * 4))
        draft = TextDraft(EMOJI * 2 + "x" + EMOJI)
        task = asyncio.create_task(probing(draft, target, lookahead=Fixed(3)).decode("tell"))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (target.num_open, draft.num_open) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())


@pytest.mark.parametrize("num_events", [1, 4, 30])
def test_leaving_the_stream_ends_every_call(num_events: int) -> None:
    """A caller that goes away takes all calls with it, rounds and draft both."""

    async def run() -> None:
        target = TokenTarget(bytewise(WORDS), call_s=0.05)
        draft = TextDraft(WORDS, token_s=0.01)
        async with probing(draft, target, max_concurrent_streams=4).stream("tell") as events:
            for _ in range(num_events):
                await anext(events)
            assert target.num_open > 0
        assert (target.num_open, draft.num_open) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())


@pytest.mark.parametrize("after_s", [0.03, 0.09, 0.21])
def test_whoever_leaves_waits_until_every_call_is_closed(after_s: float) -> None:
    """Closing a connection takes a moment, of a round and of text that is being encoded: then it is over."""

    async def run() -> None:
        target = TokenTarget(bytewise(WORDS), call_s=0.05, encode_s=0.02, close_s=0.005)
        decoder = probing(TextDraft(WORDS, token_s=0.002), target, lookahead=Fixed(2))
        task = asyncio.create_task(decoder.decode("tell"))
        await asyncio.sleep(0.05 + after_s)
        assert target.num_open > 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert target.num_open == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())


def test_a_deadline_gives_the_confirmed_text() -> None:
    """It ends all calls then, and says what ended the answer."""
    target = TokenTarget(bytewise(WORDS), call_s=0.1)
    draft = TextDraft(WORDS, token_s=0.03)
    result = probed(draft, target, deadline_s=1.05)
    assert (result.finish_reason, result.stopped_by) == ("length", "deadline")
    assert WORDS.startswith(result.content)
    assert 0 < len(result.content) < len(WORDS)
    assert result.timings.total_s == pytest.approx(1.05)
    assert (target.num_open, draft.num_open) == (0, 0)


# ------------------------------------------------------------------------------------------ times


@pytest.mark.parametrize("streams", [1, 3])
def test_rounds_tell_what_draft_and_target_took(streams: int) -> None:
    """The draft's time is that of the tokens of the round, and the target's that of its call, without the draft's."""
    pieces = split_pieces(WORDS)
    target = TokenTarget([p.encode() for p in pieces], encode_size=100, call_s=0.1)
    request = ChatRequest.create("tell", max_tokens=len(pieces))
    draft = TextDraft(WORDS, token_s=0.02)
    result = run_virtual(patient(draft, target, lookahead=Fixed(4), max_concurrent_streams=streams).decode(request))
    assert result.content == WORDS
    for report in result.rounds:
        num_pieces = report.draft_s / 0.02  # the target may make one token of several
        assert num_pieces == pytest.approx(round(num_pieces), abs=1e-6)
        assert num_pieces >= report.num_draft_tokens - 1e-6
        assert report.verify_s == pytest.approx(0.1, abs=1e-6)
    assert result.stats.draft_s <= 0.02 * len(pieces) + 1e-6
    assert result.stats.num_draft_tokens > len(pieces) / 3
    assert result.stats.mean_lookahead == result.stats.num_draft_tokens / result.stats.num_spec_steps


def test_the_time_of_a_draft_that_was_wrong_counts_where_it_was_verified() -> None:
    """What was drafted and never sent is nobody's."""
    pieces = split_pieces(WORDS)
    target = TokenTarget([p.encode() for p in pieces], encode_size=100, call_s=0.1)
    draft = SimulatedDraft(WORDS, 0.8, 3, token_s=0.02)
    result = run_virtual(patient(draft, target, lookahead=Fixed(4), max_concurrent_streams=1).decode("tell"))
    assert result.content == WORDS
    drafted = [report for report in result.rounds if report.num_draft_tokens]
    assert drafted
    assert all(0.0 <= report.draft_s <= 0.02 * 4 + 1e-6 for report in result.rounds)
    assert result.stats.draft_s <= 0.02 * result.stats.num_draft_tokens + 1e-6
    assert result.stats.draft_s > 0.0


# ------------------------------------------------------------------------------------------ costs


def usage_of(result: SpeculativeResult) -> Usage:
    assert result.usage is not None
    return result.usage


@pytest.mark.parametrize("agreement", [1.0, 0.8, 0.3])
@pytest.mark.parametrize("streams", [1, 3])
def test_usage_is_what_the_target_counted(agreement: float, streams: int) -> None:
    """Everything it read and wrote, and how much of that the target alone would not have."""
    pieces = split_pieces(WORDS)
    target = TokenTarget([p.encode() for p in pieces], encode_size=100, call_s=0.02, num_prompt_tokens=9)
    draft = SimulatedDraft(WORDS, agreement, 1, token_s=0.002)
    request = ChatRequest.create("tell", max_tokens=len(pieces))
    result = probed(draft, target, request, lookahead=Fixed(4), max_concurrent_streams=streams)
    assert result.content == WORDS
    usage = usage_of(result)
    assert usage.input_tokens == target.num_input_tokens
    assert usage.output_tokens == target.num_output_tokens
    assert usage.input_tokens - usage.extra_input_tokens == 9
    assert usage.output_tokens - usage.cancelled_output_tokens == len(pieces)


@pytest.mark.parametrize("fails", [{"sample_next": 4}, {"sample_next": 0}, {"encode_chat": 0}])
def test_usage_of_an_answer_that_the_target_ended_alone(fails: dict[str, int]) -> None:
    """The prompt is counted once as the target's own input; what else was read is extra."""
    pieces = split_pieces(WORDS)
    target = TokenTarget([p.encode() for p in pieces], encode_size=100, call_s=0.02, num_prompt_tokens=9, fails=fails)
    result = probed(TextDraft(WORDS), target, lookahead=Fixed(4), max_concurrent_streams=1)
    assert result.content == WORDS
    usage = usage_of(result)
    assert usage.input_tokens - usage.extra_input_tokens == 9
    assert usage.output_tokens - usage.cancelled_output_tokens == len(pieces)
    if "encode_chat" in fails or fails.get("sample_next"):
        assert usage.input_tokens == target.num_input_tokens


def test_usage_of_an_answer_without_a_draft_is_plain() -> None:
    """No draft tokens are allowed: the target answers alone, and nothing is counted twice."""
    target = TokenTarget(bytewise(WORDS), num_prompt_tokens=9)
    usage = usage_of(probed(TextDraft(WORDS), target, max_draft_tokens=0))
    assert (usage.input_tokens, usage.extra_input_tokens) == (9, 0)
    assert usage.cancelled_output_tokens == 0
