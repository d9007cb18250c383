"""What is reported to Prometheus."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final, cast

from support.serving import PAIR, RULES, Asking, ask, discover_features, remote, serving

from llm_spec import RetryPolicy, SpeculativeConfig, SpeculativeDecoder, Usage
from llm_spec.server.metrics import ServerMetrics
from llm_spec.testing import RuleBasedProvider
from llm_spec.testing.server import ScriptedModelServer, ServerFaults

KINDS: Final = ("draft", "accepted", "wasted", "input", "output", "answer")
SAMPLE: Final = re.compile(r"^(\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)


async def told(server: Asking) -> dict[str, float]:
    """Every sample by its name and labels."""
    reply = await server.get("/metrics")
    assert reply.status == 200
    assert reply.headers["Content-Type"].startswith("text/plain")
    return {name + labels: float(value) for name, labels, value in SAMPLE.findall(reply.data.decode())}


async def test_requests_and_errors_are_counted() -> None:
    """By endpoint, model and status; what clients made up becomes no label."""
    async with serving() as server:
        await server.chat()
        await server.chat(stream=True)
        await server.post("/v1/messages", ask("/v1/messages"))
        await server.chat(model="made-up")
        await server.chat(messages=[])
        samples = await told(server)
    assert samples['llm_spec_requests_total{endpoint="chat.completions",model="fast"}'] == 3
    assert samples['llm_spec_requests_total{endpoint="messages",model="fast"}'] == 1
    assert samples['llm_spec_errors_total{status="404"}'] == 1
    assert samples['llm_spec_errors_total{status="400"}'] == 1
    assert not [name for name in samples if "made-up" in name]


async def test_tokens_and_rounds_are_counted() -> None:
    """Drafted, accepted, wasted, read and written ones, streamed or not."""
    async with serving(PAIR) as server:
        await server.chat("def test_spawnl(self):")
        await server.chat("def test_spawnl(self):", stream=True)
        samples = await told(server)
    tokens = {kind: samples.get(f'llm_spec_tokens_total{{kind="{kind}",model="fast"}}', 0.0) for kind in KINDS}
    assert tokens["output"] == tokens["answer"] == 48
    assert tokens["input"] > 0
    assert tokens["draft"] == tokens["accepted"] + tokens["wasted"]
    assert tokens["accepted"] > 0
    assert samples['llm_spec_rounds_total{model="fast"}'] > 0
    assert samples['llm_spec_answers_total{model="fast",strategy="tokens"}'] == 2


async def test_times_are_told() -> None:
    """Time to the first text, of the whole answer, and this server's own part of it."""
    async with serving() as server:
        await server.chat()
        await server.chat(stream=True)
        samples = await told(server)
    assert samples['llm_spec_first_text_seconds_count{model="fast"}'] == 2
    assert samples['llm_spec_answer_seconds_count{model="fast"}'] == 2
    assert samples["llm_spec_overhead_seconds_count"] == 2
    assert samples["llm_spec_overhead_seconds_sum"] > 0


async def test_times_and_tokens_are_those_of_a_client() -> None:
    """Times begin with the request, before the target is called; `answer` counts no token that was thrown away."""
    metrics = ServerMetrics()
    result = await SpeculativeDecoder(target=RuleBasedProvider(), draft=None).decode("Hi")
    usage = Usage(input_tokens=9, output_tokens=97, cancelled_output_tokens=37)
    metrics.count_answer("fast", replace(result, usage=usage), 5.0)
    text = metrics.render_prometheus_text([], cast("Any", [SimpleNamespace(name="fast")])).decode()
    samples = {name + labels: float(value) for name, labels, value in SAMPLE.findall(text)}
    assert 5.0 < samples['llm_spec_first_text_seconds_sum{model="fast"}'] < 10.0
    assert 5.0 < samples['llm_spec_answer_seconds_sum{model="fast"}'] < 10.0
    assert samples['llm_spec_tokens_total{kind="output",model="fast"}'] == 97
    assert samples['llm_spec_tokens_total{kind="answer",model="fast"}'] == 60


async def test_failures_are_told() -> None:
    """Drafts that were abandoned, targets that were asked again, and streams that broke."""
    quick = RetryPolicy(first_wait_s=0.0, max_wait_s=0.0)
    async with (
        ScriptedModelServer("one two three", faults=ServerFaults(num_requests=1, status=500)) as upstream,
        ScriptedModelServer("x", faults=ServerFaults(status=500)) as draft,
    ):
        speculative = SpeculativeConfig(strategy="probe", retry=quick)
        model = remote(upstream.url, draft=f"vllm:tiny@{draft.url}", speculative=speculative)
        upstream.faults = ServerFaults()
        await discover_features(model)
        async with serving(model) as server:
            await server.chat()
            upstream.faults = ServerFaults(num_requests=len(upstream.requests) + 1, status=500)
            await server.post("/v1/chat/completions", ask("/v1/chat/completions"), x_llm_spec_strategy="plain")
            samples = await told(server)
    assert samples['llm_spec_fallbacks_total{model="fast"}'] >= 1
    assert samples['llm_spec_retries_total{model="fast"}'] == 1


async def test_a_broken_stream_is_an_error() -> None:
    """A stream whose 200 was sent already counts as an error, too."""
    once = SpeculativeConfig(retry=RetryPolicy(max_attempts=1))
    async with (
        ScriptedModelServer("one two three", faults=ServerFaults(malformed_after=2)) as upstream,
        serving(remote(upstream.url, speculative=once)) as server,
    ):
        await server.chat(stream=True)
        samples = await told(server)
    assert samples['llm_spec_errors_total{status="stream"}'] == 1


async def test_a_target_that_is_left_alone_is_told() -> None:
    """The circuit breaker's state is a gauge of its own, for target and draft; its errors are 503."""
    once = SpeculativeConfig(retry=RetryPolicy(max_attempts=1))
    async with (
        ScriptedModelServer("one", faults=ServerFaults(status=503)) as upstream,
        serving(remote(upstream.url, speculative=once)) as server,
    ):
        before = await told(server)
        statuses = [(await server.chat()).status for _ in range(12)]
        reply = await server.chat()
        after = await told(server)
    name = 'llm_spec_breaker_open{model="fast",role="target"}'
    assert (before[name], after[name]) == (0.0, 1.0)
    assert 'llm_spec_breaker_open{model="fast",role="draft"}' in after
    assert statuses[0] == 503
    assert (reply.status, reply.error["code"]) == (503, "target_left_alone")
    assert 0 < int(reply.headers["Retry-After"]) <= 30


async def test_models_are_counted_apart() -> None:
    """Each model has its own figures."""
    async with serving({"fast": RULES, "other": RULES}) as server:
        await server.chat()
        samples = await told(server)
    assert samples['llm_spec_first_text_seconds_count{model="fast"}'] == 1
    assert 'llm_spec_first_text_seconds_count{model="other"}' not in samples
