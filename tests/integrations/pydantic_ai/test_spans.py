"""What the span of an instrumented request says of how its answer came about."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pydantic_ai")
pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic_ai import Agent
from pydantic_ai.capabilities import Instrumentation
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.instrumented import InstrumentationSettings

from llm_spec import Fixed, SpeculativeConfig, SpeculativeDecoder, TransientError
from llm_spec.integrations.pydantic_ai import SpeculativeModel
from llm_spec.testing import ScriptedProvider

SPANS = [("whole", False), ("streamed", False), ("whole", True), ("streamed", True)]


@pytest.mark.parametrize(("mode", "is_behind_fallback"), SPANS)
async def test_a_span_says_how_an_answer_came_about(mode: str, is_behind_fallback: bool) -> None:
    """Beside pydantic-ai's own attributes; a span of somebody else's is left alone."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(4), baseline_every=0)
    async with SpeculativeDecoder(target="builtin:target", draft="builtin:draft", config=config) as decoder:
        model: Any = SpeculativeModel(decoder, settings={"max_tokens": 32})
        if is_behind_fallback:
            broken = ScriptedProvider("", fail_at={0: TransientError("away")})
            model = FallbackModel(SpeculativeModel(broken), model)
        agent = Agent(model, capabilities=[Instrumentation(settings=InstrumentationSettings(tracer_provider=provider))])
        with provider.get_tracer("test").start_as_current_span("outer"):
            await Agent(SpeculativeModel(decoder)).run("def area(radius):", model_settings={"max_tokens": 4})
            if mode == "whole":
                details = (await agent.run("def area(radius):")).response.provider_details
            else:
                async with agent.run_stream("def area(radius):") as run:
                    await run.get_output()
                details = run.response.provider_details
    assert details is not None
    spans = {span.name.partition(" ")[0]: dict(span.attributes or {}) for span in exporter.get_finished_spans()}
    said = {name: value for name, value in spans["chat"].items() if name.startswith("llm_spec.")}
    assert said == {
        "llm_spec.strategy": "tokens",
        "llm_spec.guarantee": "exact",
        "llm_spec.acceptance_rate": details["acceptance_rate"],
        "llm_spec.draft_tokens": details["draft_tokens"],
        "llm_spec.accepted_tokens": details["accepted_tokens"],
    }
    assert not [name for name in spans["outer"] if name.startswith("llm_spec.")]
    if not is_behind_fallback:
        assert (spans["chat"]["gen_ai.provider.name"], spans["chat"]["gen_ai.request.model"]) == ("builtin", "target")


async def test_a_span_says_why_nothing_was_drafted() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    model = SpeculativeModel(SpeculativeDecoder(target=ScriptedProvider("hi"), draft=None))
    instrumentation = Instrumentation(settings=InstrumentationSettings(tracer_provider=provider))
    response = (await Agent(model, capabilities=[instrumentation]).run("hi")).response
    [chat] = [dict(span.attributes or {}) for span in exporter.get_finished_spans() if span.name.startswith("chat")]
    assert chat["llm_spec.plain_reason"] == "no_draft" == (response.provider_details or {})["plain_reason"]
