"""Which tokens of an answer have log-probabilities, what these say, and how a request asks for them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pytest

from llm_spec import (
    ChatRequest,
    Fixed,
    InvalidRequestError,
    PromptLookup,
    Round,
    SpeculativeConfig,
    SpeculativeDecoder,
    TextDelta,
    UnsupportedError,
)
from llm_spec.contract.events import StreamEvent
from llm_spec.contract.formats import FORMATS, MessageFormat, ReasoningMarks
from llm_spec.kit.openai_chat import ChunkReader
from llm_spec.local.chosen_logprobs import ChosenLogprob, compute_chosen_logprobs
from llm_spec.local.emit import AnswerEmitter
from llm_spec.local.loop import TokenRound
from llm_spec.local.messages.parser import MessageParser
from llm_spec.testing import LocalProvider, TableModel

HERMES: Final = next(row for row in FORMATS if row.name == "hermes")


class PieceTokenizer:
    """Ids are the numbers of pieces, some of which are control tokens that mark reasoning and calls."""

    fingerprint = "pieces"
    eos_token_ids = frozenset({0})
    message_format: MessageFormat | None = HERMES
    reasoning: ReasoningMarks | None = ReasoningMarks("<think>", "</think>")

    def __init__(self, pieces: Sequence[bytes], marks: Mapping[int, str]) -> None:
        self.pieces = pieces
        self.mark_tokens = marks

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        shown = b"".join(self.pieces[i] for i in token_ids if i and i not in self.mark_tokens)
        return shown.decode(errors="replace")

    def encode_chat(self, request: ChatRequest) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def emit(pieces: Sequence[bytes], *, stop: Sequence[str] = (), marks: Sequence[bytes] = (), seed: int = 0) -> list[Any]:
    """What is told of an answer of these pieces and EOS, cut into rounds at random: each token by its bytes."""
    all_pieces = [b"", *pieces]
    tokenizer = PieceTokenizer(all_pieces, {i: p.decode() for i, p in enumerate(all_pieces) if p in marks})
    parser = MessageParser(
        HERMES, {"now"}, tokenizer.reasoning, is_reasoning=False, make_call_id="call_{}".format, max_calls=None
    )
    emitter = AnswerEmitter(tokenizer, stop, parser if marks else None, has_logprobs=True)
    events, left, rng = list[StreamEvent](), [*range(1, len(all_pieces)), 0], random.Random(seed)  # noqa: S311 - repeatable
    while left and emitter.stopped_by is None:
        ids, left = tuple(left[: (width := rng.randrange(1, 5))]), left[width:]
        report = Round(index=0, num_draft_tokens=len(ids), num_accepted_tokens=len(ids), num_emitted_tokens=len(ids))
        logprobs = tuple(ChosenLogprob(i, -float(i), ()) for i in ids)
        events += emitter.emit_round(TokenRound(report, ids, ("accepted",) * len(ids), None, logprobs))[1]
    texts = [event for event in [*events, *emitter.flush()] if isinstance(event, TextDelta)]
    told = [logprob for delta in texts for logprob in delta.logprobs or ()]
    for delta in texts if not (stop or marks) else ():  # each with the text of its token
        token_bytes = b"".join(logprob.token_bytes or b"" for logprob in delta.logprobs or ())
        assert token_bytes.decode(errors="replace") == delta.text
    assert all(all_pieces[-round(logprob.logprob)] == logprob.token_bytes for logprob in told)
    return ["".join(delta.text for delta in texts), [logprob.token_bytes for logprob in told]]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_that_end_inside_a_character_have_their_bytes(seed: int) -> None:
    """A token each, held back or not; EOS has none."""
    pieces = [b"caf", b"\xc3", b"\xa9 ", b"\xe2\x82", b"\xac", b"\xff", b"!"]
    assert emit(pieces, seed=seed) == ["café €\ufffd!", pieces]
    assert emit([b"\x80"] * 14, seed=seed) == ["\ufffd" * 14, [b"\x80"] * 14]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_that_a_stop_string_cut_off_have_none(seed: int) -> None:
    """That of which a part is text of the answer is reported; those held back in vain are reported, too."""
    pieces = [b"one ", b"ST", b"ORE ", b"two", b" ST", b"OP", b" three"]
    assert emit(pieces, stop=["STOP"], seed=seed) == ["one STORE two ", pieces[:5]]
    assert emit(pieces, stop=["two"], seed=seed) == ["one STORE ", pieces[:3]]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_of_reasoning_and_calls_have_none(seed: int) -> None:
    """Marks have none either, whether they are tokens of their own or not."""
    call = b'{"name": "now", "arguments": {}}'
    pieces = [b"<think>", b"h", b"m", b"</think>", b"\n\nLet", b" me", b"<tool_call>", call, b"</tool_call>"]
    marks = (b"<think>", b"</think>", b"<tool_call>", b"</tool_call>")
    assert emit(pieces, marks=marks, seed=seed) == ["Let me", [b"\n\nLet", b" me"]]
    halved = [b"a", b"\xc3", b"<tool_call>", call, b"</tool_call>"]
    assert emit(halved, marks=marks, seed=seed) == ["a\ufffd", halved[:2]]
    broken = [*pieces[:7], b"{oh", b"</tool_call>"]
    text = "Let me<tool_call>{oh</tool_call>"
    assert emit(broken, marks=marks, seed=seed) == [text, [b"\n\nLet", b" me", *broken[6:]]]


def test_they_are_normalised_and_ordered() -> None:
    """In float64 of the row as it is; equal ones by id; what is impossible is -inf."""
    row = np.array([[1.0, 3.0, 3.0, -np.inf, 2.0, 3.0], [0, 0, 0, 0, 0, 0]], dtype=np.float32)
    (told, even) = compute_chosen_logprobs(row, [4, 2], 4)
    total = math.log(math.e + 3 * math.e**3 + math.e**2)
    assert told.logprob == pytest.approx(2 - total, rel=1e-14)
    assert [token_id for token_id, _ in told.top] == [1, 2, 5, 4]
    assert even == (2, pytest.approx(-math.log(6)), tuple((i, pytest.approx(-math.log(6))) for i in range(4)))
    assert compute_chosen_logprobs(row, [3], 20)[0].logprob == -math.inf
    assert len(compute_chosen_logprobs(row, [3], 20)[0].top) == 6


@pytest.mark.parametrize("value", [21, -1, 1.5, "2", True])
def test_a_wrong_number_is_one_clear_error(value: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"top_logprobs is .*; it must be an integer at least 0 and at most 20"
    ):
        ChatRequest.create("q", top_logprobs=value)


async def test_in_extra_they_are_an_error_that_says_how_to_ask() -> None:
    provider = LocalProvider(TableModel("story"))
    with pytest.raises(InvalidRequestError, match=r"extra has logprobs.*use `top_logprobs`"):
        await provider.complete(ChatRequest.create("tell", extra={"logprobs": True}))


async def test_whole_answers_streams_and_dicts_have_the_same() -> None:
    """By a provider alone, by a decoder, and as JSON values."""
    provider = LocalProvider(TableModel("once upon a café", order=16))
    decoder = SpeculativeDecoder(target=provider, draft=PromptLookup(), config=SpeculativeConfig(lookahead=Fixed(3)))
    request = ChatRequest.create("once upon a café", top_logprobs=1)
    result, response = await decoder.decode(request), await provider.complete(request)
    assert result.logprobs is not None
    assert result.logprobs == response.logprobs
    assert len(result.logprobs) == len(b"once upon a caf\xc3\xa9")
    told = result.to_dict()["logprobs"][0]
    assert (told["token"], told["token_bytes"], told["top"][0]["token"]) == ("o", [111], "o")
    without = await decoder.decode("once upon a café")
    assert "logprobs" not in without.to_dict()


async def test_an_answer_without_text_has_an_empty_list() -> None:
    """Not None: they were asked for."""
    provider = LocalProvider(TableModel("", order=4))
    request = ChatRequest.create("x", max_tokens=1, top_logprobs=0, logit_bias={256: 100})
    result = await SpeculativeDecoder(target=provider, draft=None).decode(request)
    assert (result.content, result.logprobs, (await provider.complete(request)).logprobs) == ("", (), ())


async def test_a_judge_does_not_have_them() -> None:
    """It approves text that it did not write."""
    provider = LocalProvider(TableModel("once upon a time"))
    decoder = SpeculativeDecoder(target=provider, draft=PromptLookup(), config=SpeculativeConfig(strategy="judge"))
    with pytest.raises(UnsupportedError, match="top_logprobs"):
        await decoder.decode("tell", top_logprobs=0)


def test_those_of_a_server_are_read() -> None:
    """Of chat, where a token may come without text; and of plain completions."""
    entry = {"token": "é", "logprob": -0.5, "bytes": [0xA9], "top_logprobs": [{"token": "a", "logprob": -1}]}
    reader = ChunkReader(has_logprobs=True)
    assert reader.read_chunk({"choices": [{"delta": {"content": ""}, "logprobs": {"content": [entry]}}]}) == []
    [delta] = reader.read_chunk({"choices": [{"delta": {"content": "é"}, "logprobs": {"content": [entry]}}]})
    assert isinstance(delta, TextDelta)
    assert delta.logprobs is not None
    assert len(delta.logprobs) == 2
    assert (delta.logprobs[0].token_bytes, delta.logprobs[1].top[0].logprob) == (b"\xa9", -1.0)
    told = {"tokens": ["a", "b"], "token_logprobs": [None, -0.25], "top_logprobs": [None, {"c": -2.0, "b": -0.25}]}
    [delta] = ChunkReader(has_logprobs=True).read_chunk({"choices": [{"text": "ab", "logprobs": told}]})
    assert isinstance(delta, TextDelta)
    assert delta.logprobs is not None
    assert [likely.token for likely in delta.logprobs[0].top] == ["b", "c"]
