"""Strategies against real servers: what they write is what the server alone writes.

Eight prompts by default; `LLM_SPEC_PEER_PROMPTS=50 pytest -m peers` takes fifty.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from itertools import zip_longest
from typing import Any

import pytest
from llm_spec_http import DIALECTS, HttpProvider
from peers.servers import MODELS
from peers.slow_relay import open_slow_relay
from scipy.stats import chi2_contingency
from support.probing import make_patient

from llm_spec import (
    ChatRequest,
    ChatResponse,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    StreamEvent,
    TextDelta,
    open_draft,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.provider import Capabilities, LlmProvider
from llm_spec.contract.response import complete_from_stream
from llm_spec.decoder.config import StrategyName
from llm_spec.strategies.race.chain import find_stream_boundary

pytestmark = pytest.mark.peers

NUM_PROMPTS = int(os.environ.get("LLM_SPEC_PEER_PROMPTS", "8"))
PROMPTS = [json.loads(line)["messages"] for line in (MODELS / "prompts.jsonl").read_text().splitlines()][:NUM_PROMPTS]
MAX_TOKENS = 48
SLOW_TOKEN_S = 0.04
DRAFTS = ["other server", "builtin:draft", "lookup", "random"]

_plain: dict[tuple[str, int], str] = {}


def provider(dialect: str, url: str, model: str = "target") -> HttpProvider:
    return HttpProvider(model, base_url=url, dialect=DIALECTS[dialect])


class ByText:
    """A provider of which nothing is known but that it continues a text."""

    def __init__(self, inner: LlmProvider) -> None:
        self.name = inner.name
        self.capabilities = Capabilities(continue_prefix=True)
        self._inner = inner

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        return self._inner.stream(request)

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """The inner one is closed by its owner."""


async def plain_text(target: LlmProvider, index: int) -> str:
    """What the server alone writes."""
    key = (target.name, index)
    if key not in _plain:
        request = ChatRequest.create(PROMPTS[index], temperature=0.0, max_tokens=MAX_TOKENS)
        _plain[key] = (await target.complete(request)).content
    return _plain[key]


async def answers(target: LlmProvider, draft: DraftProvider | LlmProvider, strategy: StrategyName) -> list[str]:
    """What a strategy writes for all prompts; nothing may have gone wrong on the way."""
    config = SpeculativeConfig(strategy=strategy, max_concurrent_streams=4)
    await SpeculativeDecoder(target=target, draft=draft, config=config).discover()
    texts = list[str]()
    for messages in PROMPTS:
        result = await answer(SpeculativeDecoder(target=target, draft=draft, config=config), messages)
        texts.append(result.content)
    return texts


async def answer(decoder: SpeculativeDecoder, messages: Any) -> SpeculativeResult:
    result = await decoder.decode(messages, temperature=0.0, max_tokens=MAX_TOKENS)
    assert result.strategy == decoder.config.strategy
    assert result.fallbacks == ()
    return result


async def discover_needs(target: HttpProvider, strategy: StrategyName) -> None:
    """Scores are tried when nobody asks for a second, which tests do not wait for."""
    await target.discover("token_scorer" if strategy == "score" else "token_endpoint")


def drafting(name: str, other: Callable[[], LlmProvider]) -> DraftProvider | LlmProvider:
    return other() if name == "other server" else open_draft(name)


@pytest.mark.parametrize("draft_name", DRAFTS)
@pytest.mark.parametrize("strategy", ["probe", "score", "race"])
async def test_vllm_writes_its_own_text(
    vllm_target: str, llama_draft: str, strategy: StrategyName, draft_name: str
) -> None:
    """Greedy answers through every strategy are byte for byte those of vLLM alone, whatever drafts."""
    target = provider("vllm", vllm_target)
    draft = drafting(draft_name, lambda: provider("llamacpp", llama_draft, "draft"))
    try:
        expected = [await plain_text(target, index) for index in range(len(PROMPTS))]
        assert await answers(target, draft, strategy) == expected
    finally:
        await target.aclose()
        await draft.aclose()


@pytest.mark.parametrize("draft_name", DRAFTS)
@pytest.mark.parametrize("strategy", ["probe", "race"])
async def test_llama_server_writes_its_own_text(
    llama_target: str, vllm_target: str, strategy: StrategyName, draft_name: str
) -> None:
    """Greedy answers through every strategy are byte for byte those of llama-server alone, whatever drafts."""
    target = provider("llamacpp", llama_target)
    draft = drafting(draft_name, lambda: provider("vllm", vllm_target))
    try:
        expected = [await plain_text(target, index) for index in range(len(PROMPTS))]
        assert await answers(target, draft, strategy) == expected
    finally:
        await target.aclose()
        await draft.aclose()


@pytest.mark.parametrize(("dialect", "strategy"), [("vllm", "probe"), ("vllm", "score"), ("llamacpp", "probe")])
async def test_rows_that_overtake_streams_write_the_servers_own_text(
    dialect: str, vllm_target: str, llama_target: str, strategy: StrategyName
) -> None:
    """The same where streams are slow and rows are taken to pay: drafted tokens are accepted, and nothing changes."""
    url = vllm_target if dialect == "vllm" else llama_target
    target = provider(dialect, url)
    draft = open_draft("builtin:target")
    try:
        expected = [await plain_text(target, index) for index in range(len(PROMPTS))]
        async with open_slow_relay(url, SLOW_TOKEN_S) as slow_url:
            slow_target = provider(dialect, slow_url)
            try:
                await discover_needs(slow_target, strategy)
                config = SpeculativeConfig(strategy=strategy, max_concurrent_streams=4, baseline_every=0)
                decoder = SpeculativeDecoder(target=slow_target, draft=draft, config=config)
                make_patient(decoder)  # whether rows pay depends on the machine
                results = [await answer(decoder, messages) for messages in PROMPTS]
            finally:
                await slow_target.aclose()
        assert [result.content for result in results] == expected
        assert sum(result.stats.num_accepted_draft_tokens for result in results) > 0
    finally:
        await target.aclose()
        await draft.aclose()


@pytest.mark.parametrize("dialect", ["vllm", "llamacpp"])
async def test_racing_by_text_differs_only_where_the_prefix_is_tokenized_otherwise(
    dialect: str, vllm_target: str, llama_target: str, report: Callable[[str, object], None]
) -> None:
    """Where a server tokenizes the prefix again, every difference lies behind a place where that gives other tokens."""
    target = provider(dialect, vllm_target if dialect == "vllm" else llama_target)
    draft = open_draft("builtin:target")
    try:
        await target.discover("token_endpoint")
        expected = [await plain_text(target, index) for index in range(len(PROMPTS))]
        raced = await answers(ByText(target), draft, "race")
        same = sum(a == b for a, b in zip(expected, raced, strict=True))
        report(f"{dialect}: raced by text, answers that are the same", f"{same} of {len(PROMPTS)}")
        for index, (ours, theirs) in enumerate(zip(raced, expected, strict=True)):
            if ours != theirs:
                assert await tokenized_otherwise(target, index, ours, theirs)
        assert same >= 0.8 * len(PROMPTS)
    finally:
        await target.aclose()
        await draft.aclose()


async def tokenized_otherwise(target: HttpProvider, index: int, ours: str, theirs: str) -> bool:
    """Whether some place before the first difference, where a stream may begin, has other ids when read as text."""
    endpoint = target.capabilities.token_endpoint
    assert endpoint is not None
    shared = next(at for at, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b)
    request = ChatRequest.create(PROMPTS[index], temperature=0.0, max_tokens=MAX_TOKENS)
    prompt_ids = await endpoint.encode_chat(request)
    texts, written = [""], list[int]()
    ids_at = {0: list[int]()}
    async with endpoint.stream_chat(request) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                written += event.token_ids or ()
                texts.append(texts[-1] + event.text)
                ids_at[len(texts[-1])] = list(written)
    at = find_stream_boundary(theirs, 0, 1)
    while at is not None and at <= shared:
        prefix_ids = await endpoint.encode_chat(ChatRequest.create(PROMPTS[index], temperature=0.0, prefix=theirs[:at]))
        if prefix_ids != prompt_ids + ids_at.get(at, []):
            return True
        at = find_stream_boundary(theirs, at + 1, 1)
    return False


# ------------------------------------------------------------------------------------------- sampling

NUM_SAMPLES = 200
NUM_PLAIN_SAMPLES = 600
SAMPLED_TOKENS = 8
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "max_tokens": SAMPLED_TOKENS}


_plain_samples = Counter[str]()


async def plain_samples(target: LlmProvider) -> Counter[str]:
    """Texts of many sampled answers of the target alone."""
    if not _plain_samples:
        _plain_samples.update((await sampled(target, None, "plain", NUM_PLAIN_SAMPLES))[0])
    return _plain_samples


async def sampled(
    target: LlmProvider, draft: DraftProvider | None, strategy: StrategyName, num_samples: int = NUM_SAMPLES
) -> tuple[Counter[str], int]:
    """Texts of many sampled answers to one prompt, and how many drafted tokens were accepted."""
    decoder = SpeculativeDecoder(
        target=target, draft=draft, config=SpeculativeConfig(strategy=strategy, max_concurrent_streams=4)
    )
    # these answers are too short to try anything: streams have shown that there is room, and rows that they pay
    if strategy == "race":
        decoder._planner.pair_stats.streams.num_extra = 3
    else:
        make_patient(decoder)
    counts, accepted = Counter[str](), 0
    slots = asyncio.Semaphore(2)

    async def one() -> None:
        nonlocal accepted
        async with slots:
            result = await decoder.decode(PROMPTS[0], **SAMPLING)
        assert result.fallbacks == ()
        counts[result.content] += 1
        accepted += result.stats.num_accepted_draft_tokens

    await asyncio.gather(*(one() for _ in range(num_samples)))
    return counts, accepted


def p_value(first: Counter[str], second: Counter[str]) -> float:
    """Of the hypothesis that both were drawn from one distribution; rare texts count as one."""
    common = [text for text, number in (first + second).items() if number >= 10]
    rows = [[counts[text] for text in common] for counts in (first, second)]
    for row, counts in zip(rows, (first, second), strict=True):
        row.append(counts.total() - sum(row))
    columns = [column for column in zip(*rows, strict=True) if sum(column)]
    return float(chi2_contingency(columns).pvalue)


@pytest.mark.parametrize("strategy", ["probe", "score", "race"])
async def test_sampled_answers_have_the_servers_own_law(vllm_target: str, strategy: StrategyName) -> None:
    """Sampled texts through a strategy, and their endings alone, are distributed as those of plain sampling.

    The strategy sees slow streams: at a server that writes a token in a millisecond it would not speculate.
    """
    target = provider("vllm", vllm_target)
    try:
        greedy = (await target.complete(ChatRequest.create(PROMPTS[0], temperature=0.0, max_tokens=40))).content
        plain = await plain_samples(target)
        async with open_slow_relay(vllm_target, SLOW_TOKEN_S) as url:
            slow_target = provider("vllm", url)
            try:
                await discover_needs(slow_target, strategy)
                through, accepted = await sampled(slow_target, ReferenceDraft(greedy), strategy)
            finally:
                await slow_target.aclose()
        assert accepted > NUM_SAMPLES // 3  # it did speculate
        assert p_value(plain, through) > 1e-3
        endings = [Counter[str](), Counter[str]()]
        for counts, ending in zip((plain, through), endings, strict=True):
            for text, number in counts.items():
                ending[text[-6:]] += number
        assert p_value(*endings) > 1e-3
    finally:
        await target.aclose()
