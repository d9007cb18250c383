"""HttpTokenEndpoint over real sockets: encoding with a memory, decoding, continuing and scoring by token ids."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_spec_http import DIALECTS, HttpProvider
from llm_spec_http.tokens import HttpTokenEndpoint, _parse_scored_rows

from llm_spec import ChatRequest, Finish, InvalidRequestError, Sampling, StreamEvent, TargetError, TextDelta
from llm_spec.contract.endpoint import SampledToken, TokenEndpoint
from llm_spec.testing import run_virtual
from llm_spec.testing.server import EOS_ID, ScriptedModelServer, ServerFaults

ANSWER = "The cat sat on the mat, naïve and 日本語 😀 all day long in the warm sun of the year."
QUESTION = ChatRequest.create("Tell me.", temperature=0.0)
GREEDY = Sampling(temperature=0.0)


class Setup:
    """A server, a provider that found it out, and its endpoint."""

    def __init__(self, server: ScriptedModelServer, provider: HttpProvider, tokens: HttpTokenEndpoint) -> None:
        self.server = server
        self.provider = provider
        self.tokens = tokens

    def num_calls(self, path: str) -> int:
        return self.server.paths.count(path)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with ScriptedModelServer(ANSWER, continues_prefix="fields", context_length=500) as server:
        provider = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"])
        await provider.discover("token_endpoint")
        await provider.discover("token_scorer")
        tokens = provider.capabilities.token_endpoint
        assert isinstance(tokens, HttpTokenEndpoint)
        server.paths.clear()
        server.requests.clear()
        try:
            yield Setup(server, provider, tokens)
        finally:
            await provider.aclose()


async def whole(stream: AbstractAsyncContextManager[AsyncIterator[StreamEvent]]) -> tuple[str, list[int], Finish]:
    """Text, ids and end of a stream, every delta of which has ids."""
    text, ids = "", list[int]()
    async with stream as events:
        async for event in events:
            if isinstance(event, TextDelta):
                assert event.token_ids is not None
                text += event.text
                ids += event.token_ids
            if isinstance(event, Finish):
                return text, ids, event
    raise AssertionError("no finish")


# ------------------------------------------------------------------------------------------ encoding


async def test_known_words_need_no_request(setup: Setup) -> None:
    """In any order and number: a stretch is encoded once."""
    first = await setup.tokens.encode("The cat sat on")
    assert setup.num_calls("/tokenize") == 4
    assert await setup.tokens.encode("The cat sat on") == first
    assert await setup.tokens.encode("The sat cat on on cat") == [first[i] for i in (0, 2, 1, 3, 3, 1)]
    assert setup.num_calls("/tokenize") == 4


async def test_many_unknown_words_are_one_request(setup: Setup) -> None:
    """A draft's long text costs one round trip, not one a word."""
    ids = await setup.tokens.encode("a b c d e f g h i j")
    assert setup.num_calls("/tokenize") == 1
    assert await setup.tokens.decode(ids) == "a b c d e f g h i j"


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text("ab  \n.é日😀", max_size=12), min_size=1, max_size=4))
def test_encoding_in_stretches_is_encoding_the_whole(texts: list[str]) -> None:
    """The ids are those of one call for the whole text, remembered or not, and decode to it."""

    async def check() -> None:
        async with ScriptedModelServer(ANSWER) as server:
            provider = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"])
            await provider.discover("token_endpoint")
            tokens = provider.capabilities.token_endpoint
            assert tokens is not None
            for text in [*texts, *texts]:
                ids = await tokens.encode(text)
                assert ids == server._model.vocabulary.encode(text)
                assert await tokens.decode(ids) == text
            await provider.aclose()

    run_virtual(check())


async def test_the_memory_is_bounded(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its bound it begins anew; the ids stay right."""
    monkeypatch.setattr("llm_spec_http.tokens._MAX_CACHED_WORDS", 3)
    first = await setup.tokens.encode("a")
    for text in "bcdefgh":
        await setup.tokens.encode(text)
    assert setup.num_calls("/tokenize") == 8
    assert await setup.tokens.encode("a") == first
    assert setup.num_calls("/tokenize") == 9


async def test_the_memory_may_be_emptied_by_another_call(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent calls do not disturb each other."""
    known = await setup.tokens.encode("a b")
    monkeypatch.setattr("llm_spec_http.tokens._MAX_CACHED_WORDS", 1)
    calls = [setup.tokens.encode(text) for text in ("a b x", "a b y")]  # each knows a and b, and empties the memory
    first, second = await asyncio.gather(*calls)
    assert first[:2] == second[:2] == known
    assert [await setup.tokens.decode(ids) for ids in (first, second)] == ["a b x", "a b y"]


async def test_single_tokens_are_decoded_once(setup: Setup) -> None:
    """Several at once are asked for each time, for their text may depend on their neighbours."""
    ids = await setup.tokens.encode("The cat")
    assert [await setup.tokens.decode([i]) for i in (*ids, *ids)] == ["The", " cat"] * 2
    assert setup.num_calls("/detokenize") == 2
    assert [await setup.tokens.decode(ids) for _ in range(2)] == ["The cat"] * 2
    assert setup.num_calls("/detokenize") == 4


async def test_the_prompt_has_the_template_and_the_prefix(setup: Setup) -> None:
    """Ready for the answer, or for what follows the prefix; the context length is learned with it."""
    prompt = await setup.tokens.encode_chat(QUESTION)
    assert setup.server._model.vocabulary.decode(prompt) == "<|user|>Tell me.<|end|><|assistant|>"
    continued = await setup.tokens.encode_chat(ChatRequest.create("Tell me.", prefix="The cat"))
    assert setup.server._model.vocabulary.decode(continued) == "<|user|>Tell me.<|end|><|assistant|>The cat"
    assert setup.tokens.context_length == 500


# ------------------------------------------------------------------------------------------ sampling and streams


async def test_the_next_token_after_each_prefix(setup: Setup) -> None:
    """One request, in the order of the prefixes; an end is reported as one."""
    prompt, ids = await setup.tokens.encode_chat(QUESTION), await setup.tokens.encode(ANSWER)
    setup.server.requests.clear()
    ends = (2, 0, len(ids), 1)
    sampled = await setup.tokens.sample_next([[*prompt, *ids[:end]] for end in ends], Sampling(top_k=5, seed=3))
    expected = [SampledToken(ids[2], " sat"), SampledToken(ids[0], "The"), SampledToken(EOS_ID, "", True)]
    assert sampled == [*expected, SampledToken(ids[1], " cat")]
    (body,) = setup.server.requests
    assert (body["max_tokens"], body["top_k"], body["seed"]) == (1, 5, 3)


@pytest.mark.parametrize("tokens_per_frame", [1, 3])
async def test_streams_tell_their_ids(setup: Setup, tokens_per_frame: int) -> None:
    """A chat's, and what follows ids; the finish is the server's."""
    setup.server.tokens_per_frame = tokens_per_frame
    prompt, ids = await setup.tokens.encode_chat(QUESTION), await setup.tokens.encode(ANSWER)
    assert await whole(setup.tokens.stream_chat(QUESTION)) == (ANSWER, [*ids, EOS_ID], _ANY)
    text, rest, finish = await whole(setup.tokens.stream_after([*prompt, *ids[:3]], QUESTION))
    assert ("The cat sat" + text, rest, finish.finish_reason) == (ANSWER, [*ids[3:], EOS_ID], "stop")


@pytest.mark.parametrize("max_tokens", [None, 900])
async def test_a_continuation_goes_on_to_the_end_of_the_context(setup: Setup, max_tokens: int | None) -> None:
    """Where the request sets no limit servers stop after 16 tokens; more than there is room for they refuse."""
    prompt = await setup.tokens.encode_chat(QUESTION)
    setup.server.requests.clear()
    text, _, finish = await whole(setup.tokens.stream_after(prompt, replace(QUESTION, max_tokens=max_tokens)))
    assert (text, finish.finish_reason) == (ANSWER, "stop")
    assert setup.server.requests[0]["max_tokens"] == 500 - len(prompt)


async def test_a_continuation_has_the_requests_options(setup: Setup) -> None:
    """Sampling and limit, but neither messages nor prefix."""
    request = ChatRequest.create("q", prefix="The", max_tokens=2, temperature=0.5, seed=9, top_p=0.9)
    prompt = await setup.tokens.encode_chat(request)
    setup.server.requests.clear()
    _, ids, finish = await whole(setup.tokens.stream_after(prompt, request))
    assert (len(ids), finish.finish_reason) == (2, "length")
    (body,) = setup.server.requests
    assert (body["prompt"], body["temperature"], body["seed"], body["top_p"]) == (prompt, 0.5, 9, 0.9)
    assert not {"messages", "continue_final_message", "add_generation_prompt"} & body.keys()


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
async def test_scores_are_of_the_positions_asked_for(setup: Setup, num_rows: int, top: int) -> None:
    """After each of the last tokens given, best first, also behind a token that the model would not have written."""
    scorer = setup.provider.capabilities.token_scorer
    assert scorer is not None
    prompt, ids = await setup.tokens.encode_chat(QUESTION), await setup.tokens.encode(ANSWER)
    rows = await scorer.score([*prompt, *ids[:5]], num_rows=num_rows, top=top)
    assert [row.top[0][0] for row in rows] == ids[6 - num_rows : 6]
    assert all(len(row.top) <= top for row in rows)
    assert all(row.top == tuple(sorted(row.top, key=lambda entry: -entry[1])) for row in rows)


def scored_choice(rows: list[dict[str, float]], last: dict[str, float]) -> dict[str, Any]:
    prompt = [None, *({name: {"logprob": logprob} for name, logprob in row.items()} for row in rows)]
    top = {f"token_id:{name}": logprob for name, logprob in last.items()}
    return {"prompt_logprobs": prompt, "logprobs": {"top_logprobs": [top]}}


def test_of_equally_likely_tokens_the_given_one_is_not_preferred() -> None:
    """It comes first in the answer, but a server takes the lowest id."""
    row = {"7": -1.0, "5": -1.0, "6": -2.0}
    rows = _parse_scored_rows(scored_choice([row], row), 2, 2)
    assert [scored.top for scored in rows] == [((5, -1.0), (7, -1.0))] * 2


@pytest.mark.parametrize("row", [{}, {"5": -1.0}, {"5": math.nan, "6": -1.0}, {"5": -1.0, "6": -2.0, "7": math.nan}])
def test_a_row_that_cannot_be_ranked_is_an_error(row: dict[str, float]) -> None:
    """Too short, or with what is not a number; of a given position as of the last one."""
    good = {"5": -1.0, "6": -2.0}
    with pytest.raises(ValueError, match="does not hold the likeliest 2 tokens"):
        _parse_scored_rows(scored_choice([row], good), 2, 2)
    with pytest.raises(ValueError, match="does not hold the likeliest 2 tokens"):
        _parse_scored_rows(scored_choice([good], row), 2, 2)


async def test_scores_of_fewer_positions_than_given_are_not_taken_for_others(setup: Setup) -> None:
    """The last rows would be those of earlier tokens: nobody knows which are missing."""
    cut = setup.server._model.make_prompt_logprobs
    setup.server._model.make_prompt_logprobs = lambda ids, top: cut(ids, top)[:3]  # type: ignore[method-assign]
    prompt = await setup.tokens.encode_chat(QUESTION)
    with pytest.raises(TargetError, match="3 prompt logprobs for"):
        await setup.tokens.score([*prompt, *await setup.tokens.encode(ANSWER)], num_rows=2, top=2)
    assert setup.provider.capabilities.token_scorer is None


# ------------------------------------------------------------------------------------------ a call that is lost


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
async def test_a_call_that_the_server_does_not_know_any_more(setup: Setup, path: str) -> None:
    """Raises TargetError, and the capability is gone, so that the next request does without it."""
    setup.server.faults = ServerFaults(missing=frozenset([path]))
    prompt = [5, 6]

    async def use(tokens: TokenEndpoint) -> None:
        await tokens.encode("never heard")
        await tokens.decode(prompt)
        await tokens.sample_next([prompt], GREEDY)

    with pytest.raises(TargetError, match=f"vllm:scripted at .* answered 404: {path} is not here"):
        await use(setup.tokens)
    assert setup.provider.capabilities.token_endpoint is None
    assert setup.provider.capabilities.token_scorer is None
    assert setup.provider.capabilities.continue_prefix


async def test_a_stream_that_the_server_does_not_know_any_more(setup: Setup) -> None:
    """As any other call: it takes the capability away."""
    prompt = await setup.tokens.encode_chat(QUESTION)
    setup.server.faults = ServerFaults(missing=frozenset(["/v1/completions"]))
    with pytest.raises(TargetError, match="404"):
        await whole(setup.tokens.stream_after(prompt, QUESTION))
    assert setup.provider.capabilities.token_endpoint is None


async def test_a_failure_that_passes_takes_nothing_away(setup: Setup) -> None:
    """A busy server is asked again next time."""
    setup.server.faults = ServerFaults(status=503)
    with pytest.raises(TargetError, match="503"):
        await setup.tokens.sample_next([[5]], GREEDY)
    assert setup.provider.capabilities.token_endpoint is setup.tokens


async def test_a_prompt_that_does_not_fit_is_invalid(setup: Setup) -> None:
    """Named as the caller's to change, and the capability stays."""
    setup.server.context_length = 2
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        await setup.tokens.sample_next([[5, 6, 7]], GREEDY)
    assert setup.provider.capabilities.token_endpoint is setup.tokens


class _Anything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


_ANY = _Anything()
