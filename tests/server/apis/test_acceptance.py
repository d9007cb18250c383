"""`metrics.speculative_decoding` of answers, and counters of drafts in `/metrics`: vLLM's names and meanings."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

import pytest
from support.serving import PAIR, Asking, ask, remote, serving

from llm_spec import Round, SpeculativeConfig, SpeculativeDecoder, SpeculativeStats
from llm_spec.server import KeyConfig
from llm_spec.server.apis.acceptance import build_acceptance_fields
from llm_spec.testing import RuleBasedProvider
from llm_spec.testing.server import ScriptedModelServer

PROMPT: Final = "def test_spawnl(self):"
VLLM_FIELDS: Final = {  # those of `SpeculativeDecodingMetrics` at the level "summary"
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
}
USAGE: Final = {"include_usage": True}
COUNTER: Final = re.compile(
    r'^llm_spec_spec_decode_(\w+)_total\{model_name="fast"(?:,position="(\d+)")?\} (\S+)$', re.M
)


async def answer(server: Asking, path: str, *, stream: bool, **fields: Any) -> Any:
    """A whole answer's body, or the last chunk of a streamed one."""
    if stream:
        fields |= {"stream": True, "stream_options": USAGE}
    reply = await server.post(path, ask(path, PROMPT, **fields))
    assert reply.status == 200
    return reply.chunks[-1] if stream else reply.json


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_answer_tells_its_acceptance(path: str, stream: bool) -> None:
    """Every figure of vLLM's is there, and fits the usage and itself; a stream has it beside the usage."""
    async with serving(PAIR) as server:
        body = await answer(server, path, stream=stream, max_tokens=24)
    acceptance = body["metrics"]["speculative_decoding"]
    assert set(acceptance) == VLLM_FIELDS
    histogram, steps = acceptance["acceptance_histogram"], acceptance["num_spec_steps"]
    accepted = sum(number * count for number, count in enumerate(histogram))
    assert accepted == acceptance["num_accepted_draft_tokens"]
    assert acceptance["num_draft_tokens"] > 0
    assert sum(histogram) == steps
    assert len(histogram) == acceptance["num_spec_tokens"] + 1
    assert acceptance["mean_acceptance_length"] == 1 + accepted / steps
    assert acceptance["draft_acceptance_rate"] == accepted / acceptance["num_draft_tokens"]
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == accepted
    assert details["rejected_prediction_tokens"] == acceptance["num_draft_tokens"] - accepted


async def test_figures_are_those_of_the_rounds() -> None:
    """A trace shows each round, and the figures are their sums."""
    body = ask("/v1/chat/completions", PROMPT, stream=True, stream_options=USAGE)
    async with serving(PAIR) as server:
        reply = await server.post("/v1/chat/completions", body, x_llm_spec_trace="1")
    rounds = [chunk["llm_spec"]["round"] for chunk in reply.chunks if "round" in chunk.get("llm_spec", {})]
    drafted = [one for one in rounds if one["num_draft_tokens"]]
    acceptance = reply.chunks[-1]["metrics"]["speculative_decoding"]
    assert acceptance["num_spec_steps"] == len(drafted)
    assert acceptance["num_spec_tokens"] == max(one["num_draft_tokens"] for one in drafted)
    assert acceptance["num_draft_tokens"] == sum(one["num_draft_tokens"] for one in drafted)
    for number, count in enumerate(acceptance["acceptance_histogram"]):
        assert count == sum(one["num_accepted_tokens"] == number for one in drafted)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_answer_without_speculation_tells_none(path: str, stream: bool) -> None:
    """No field rather than zeros."""
    async with serving() as server:
        assert "metrics" not in await answer(server, path, stream=stream)


async def test_a_stream_tells_it_only_with_its_usage() -> None:
    """Without `include_usage` no chunk has it, as vLLM's."""
    async with serving(PAIR) as server:
        reply = await server.chat(PROMPT, stream=True)
    assert not any("metrics" in chunk for chunk in reply.chunks)


async def test_several_prompts_tell_none() -> None:
    """Figures of several answers belong to none of them, as vLLM's."""
    async with serving(PAIR) as server:
        body = await answer(server, "/v1/completions", stream=False, prompt=[PROMPT, PROMPT])
    assert len(body["choices"]) == 2
    assert "metrics" not in body


async def test_predicted_outputs_tell_none() -> None:
    """How many rounds a server of predicted outputs took is not known; its counts are in the usage."""
    plain = await SpeculativeDecoder(target=RuleBasedProvider(), draft=None).decode("Hi")
    rounds = (Round(index=0, num_draft_tokens=3, num_accepted_tokens=2, num_emitted_tokens=4),)
    predicted = replace(plain, rounds=rounds, stats=SpeculativeStats.from_rounds(rounds), strategy="predict")
    assert build_acceptance_fields(predicted) == {}
    acceptance = build_acceptance_fields(replace(predicted, strategy="race"))["metrics"]["speculative_decoding"]
    assert acceptance["acceptance_histogram"] == [0, 0, 1, 0]


async def count(server: Asking) -> dict[tuple[str, str], float]:
    """The counters of drafts of the model `fast`, by name and position."""
    text = (await server.get("/metrics")).data.decode()
    return {(name, position): float(value) for name, position, value in COUNTER.findall(text)}


async def test_counters_add_answers_up() -> None:
    """Drafts, drafted and accepted tokens, and those accepted at each position, over all answers of a model."""
    async with serving(PAIR) as server:
        answers = [await answer(server, "/v1/chat/completions", stream=stream) for stream in (False, True)]
        samples = await count(server)
    acceptance = [body["metrics"]["speculative_decoding"] for body in answers]
    assert samples["num_drafts", ""] == sum(one["num_spec_steps"] for one in acceptance)
    assert samples["num_draft_tokens", ""] == sum(one["num_draft_tokens"] for one in acceptance)
    assert samples["num_accepted_tokens", ""] == sum(one["num_accepted_draft_tokens"] for one in acceptance)
    for position in range(16):
        accepted = sum(sum(one["acceptance_histogram"][position + 1 :]) for one in acceptance)
        assert samples["num_accepted_tokens_per_pos", str(position)] == accepted


async def test_counters_of_other_keys_models_are_not_told() -> None:
    """A key sees the counters of its own models alone."""
    keys = {
        "alice": KeyConfig(key="a" * 20, models=("fast",)),
        "bob": KeyConfig(key="b" * 20, models=("other",)),
    }
    async with serving({"fast": PAIR, "other": PAIR}, keys=keys) as server:
        await server.post(
            "/v1/chat/completions", ask("/v1/chat/completions", PROMPT), authorization=f"Bearer {'a' * 20}"
        )
        own = (await server.get("/metrics", authorization=f"Bearer {'a' * 20}")).data
        others = (await server.get("/metrics", authorization=f"Bearer {'b' * 20}")).data
    assert b'spec_decode_num_drafts_total{model_name="fast"}' in own
    assert b"fast" not in others


async def test_rounds_at_a_server_are_counted() -> None:
    """A target behind a server tells the same."""
    speculative = SpeculativeConfig(strategy="regenerate")
    async with ScriptedModelServer("one two three four five six") as upstream:
        model = remote(upstream.url, draft=f"vllm:tiny@{upstream.url}", speculative=speculative)
        async with serving(model) as server:
            acceptance = (await answer(server, "/v1/chat/completions", stream=False))["metrics"]["speculative_decoding"]
    assert acceptance["draft_acceptance_rate"] == 1.0
