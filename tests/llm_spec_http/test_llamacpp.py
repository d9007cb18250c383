"""llama-server: token ids also where a token ends inside a character."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from llm_spec_http import DIALECTS, HttpProvider
from support.llama_wire import EOS_ID, LlamaServer
from support.probing import patient

from llm_spec import ChatRequest, ReferenceDraft, Sampling, TextDelta
from llm_spec.contract.endpoint import SampledToken, TokenEndpoint

ANSWER = "A naïve café, 日本語 and 😀 all day long."
QUESTION = ChatRequest.create("Tell me.", temperature=0.0)
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(params=[True, False], ids=["new", "old"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[LlamaServer]:
    """One that tells probabilities after sampling where it is asked to, and an older one that does not know of that."""
    async with LlamaServer(ANSWER, has_post_sampling=request.param).serving() as server:
        yield server


@pytest.fixture
async def provider(server: LlamaServer) -> AsyncIterator[HttpProvider]:
    provider = HttpProvider("any", base_url=server.url, dialect=DIALECTS["llamacpp"])
    await provider.discover("token_endpoint")
    yield provider
    await provider.aclose()


@pytest.fixture
def tokens(provider: HttpProvider) -> TokenEndpoint:
    tokens = provider.capabilities.token_endpoint
    assert tokens is not None
    return tokens


async def test_every_token_has_an_id(server: LlamaServer, tokens: TokenEndpoint) -> None:
    """One alone and many at once, a byte of a character as well as the end of the answer."""
    prompt, ids = await tokens.encode_chat(QUESTION), [*server.encode(ANSWER), EOS_ID]
    prefixes = [[*prompt, *ids[:end]] for end in range(len(ids))]
    sampled = await tokens.sample_next(prefixes, GREEDY)
    assert [token.token_id for token in sampled] == ids
    assert [token.is_end for token in sampled] == [False] * (len(ids) - 1) + [True]
    assert await tokens.sample_next([prompt], GREEDY) == [SampledToken(ids[0], "A")]


async def test_a_stream_tells_the_ids_of_whole_characters(server: LlamaServer, tokens: TokenEndpoint) -> None:
    """Also of one that is not ASCII; where several tokens were one character, the ids of the others are unknown."""
    async with tokens.stream_after(await tokens.encode_chat(QUESTION), QUESTION) as events:
        pieces = [(event.text, event.token_ids) async for event in events if isinstance(event, TextDelta)]
    assert "".join(text for text, _ in pieces) == ANSWER
    assert {text: ids for text, ids in pieces if not text.isascii()} == {
        "ï": None,
        "é": tuple(server.encode("é")),
        "日": None,
        "本": None,
        "語": None,
        "😀": None,
    }


async def test_probing_an_answer_that_is_not_ascii(provider: HttpProvider) -> None:
    """The text is the target's own, also where the stream tells no ids, and the capability stays."""
    result = await patient(ReferenceDraft(ANSWER), provider).decode(QUESTION)
    assert (result.content, result.guarantee) == (ANSWER, "exact")
    assert provider.capabilities.token_endpoint is not None
