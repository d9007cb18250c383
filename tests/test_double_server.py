"""`benchmarks/double_server.py` speaks vLLM's dialect: strategies give plain's text against it, by ids and by text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llm_spec import (
    ChatRequest,
    DraftProvider,
    LlmProvider,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    open_draft,
    open_provider,
)
from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.endpoint import Discoverable

SERVER = Path(__file__).parent.parent / "benchmarks" / "double_server.py"
NUM_TOKENS = 40
PROMPT = "What happens next?"


@contextmanager
def start_double(*options: str) -> Generator[str]:
    """Its address; it ends with its standard input, or after a minute."""
    prices = [f"--{name}-ms=1" for name in ("token", "first-token", "call")]
    bounds = ["--end-with-stdin", "--lifetime-s=60", f"--answer-tokens={NUM_TOKENS}"]
    with subprocess.Popen(
        [sys.executable, SERVER, *prices, *bounds, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.stdin.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with start_double() as address:
        yield address


@pytest.fixture(scope="module")
def draft_url() -> Iterator[str]:
    with start_double("--agreement=0.9") as address:
        yield address


@pytest.fixture
async def target(url: str) -> AsyncGenerator[LlmProvider]:
    provider = open_provider(f"vllm:double@{url}")
    yield provider
    await provider.aclose()


async def answer(url: str, draft_url: str | None, strategy: str) -> str:
    draft = None if draft_url is None else f"vllm:double@{draft_url}"
    config = SpeculativeConfig(strategy=strategy, max_concurrent_streams=12)
    async with SpeculativeDecoder(target=f"vllm:double@{url}", draft=draft, config=config) as decoder:
        result = await decoder.decode(PROMPT, temperature=0.0)
    assert not result.fallbacks
    return result.content


@pytest.mark.parametrize("strategy", ["probe", "race", "score"])
async def test_strategies_give_the_text_of_plain(url: str, draft_url: str, strategy: str) -> None:
    """By token ids."""
    plain = await answer(url, None, "plain")
    assert len(plain.split()) == NUM_TOKENS
    assert await answer(url, draft_url, strategy) == plain


@pytest.mark.parametrize("options", [(), ("--no-token-endpoints",)])
async def test_a_draft_tells_the_ids_of_what_it_writes(target: LlmProvider, options: tuple[str, ...]) -> None:
    """Those of the target, which has the same vocabulary; and none where its server does not know the field."""
    assert isinstance(target, Discoverable)
    await target.discover("token_endpoint")
    endpoint = target.capabilities.token_endpoint
    assert endpoint is not None
    with start_double("--agreement=0.9", *options) as url:
        draft = open_draft(f"vllm:double@{url}")
        pieces = [piece for piece in await read_pieces(draft, ChatRequest.create(PROMPT)) if piece.text]
        await draft.aclose()
    given = [None if piece.token_ids is None else list(piece.token_ids) for piece in pieces]
    assert given == ([None] * len(pieces) if options else [await endpoint.encode(piece.text) for piece in pieces])


async def read_pieces(draft: DraftProvider, request: ChatRequest) -> list[DraftPiece]:
    async with draft.draft(request, 20) as pieces:
        return [piece async for piece in pieces]


async def test_race_gives_the_text_of_plain_by_text(draft_url: str) -> None:
    """A server without token endpoints."""
    with start_double("--no-token-endpoints") as url:
        assert await answer(url, draft_url, "race") == await answer(url, None, "plain")


async def test_its_token_calls_agree_with_its_answers(target: LlmProvider) -> None:
    """All that the package finds out about a vLLM: ids, batches and scores."""
    assert isinstance(target, Discoverable)
    await target.discover("token_scorer")
    assert target.capabilities.token_endpoint is not None
    assert target.capabilities.token_scorer is not None
    await target.discover("continue_prefix")
    assert target.capabilities.continue_prefix


async def test_a_wrong_token_changes_everything_after_it(target: LlmProvider) -> None:
    """A strategy that went on from a wrong prefix would be found out."""
    assert isinstance(target, Discoverable)
    await target.discover("token_endpoint")
    endpoint = target.capabilities.token_endpoint
    assert endpoint is not None
    right = await endpoint.encode(" bada bede")
    wrong = [right[0] + 1, *right[1:]]
    first, second = await endpoint.sample_next([right, wrong], Sampling(temperature=0.0))
    assert first != second


async def test_samples_are_those_of_the_seed(url: str) -> None:
    """The same seed gives the same text, another one another."""
    async with SpeculativeDecoder(target=f"vllm:double@{url}", draft=None) as decoder:
        texts = [(await decoder.decode(PROMPT, temperature=1.0, seed=seed)).content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


async def test_stop_strings_end_an_answer(url: str) -> None:
    """And are not part of it."""
    async with SpeculativeDecoder(target=f"vllm:double@{url}", draft=None) as decoder:
        whole = (await decoder.decode(PROMPT, temperature=0.0)).content
        stop = whole.split()[7]
        result = await decoder.decode(PROMPT, temperature=0.0, stop=stop)
    assert result.content == whole[: whole.index(stop)]
    assert result.finish_reason == "stop"


async def test_max_tokens_end_an_answer(url: str) -> None:
    """After as many tokens."""
    async with SpeculativeDecoder(target=f"vllm:double@{url}", draft=None) as decoder:
        result = await decoder.decode(PROMPT, temperature=0.0, max_tokens=9)
    assert (len(result.content.split()), result.num_tokens, result.finish_reason) == (9, 9, "length")
