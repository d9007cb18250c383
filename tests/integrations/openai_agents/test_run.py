"""What a run of the OpenAI Agents SDK gets from SpeculativeModel and SpeculativeModelProvider."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    ModelBehaviorError,
    ModelRetrySettings,
    ModelSettings,
    ModelTracing,
    RunConfig,
    Runner,
    UserError,
    function_tool,
    retry_policies,
    set_trace_processors,
)
from agents.tracing import Span, Trace, TracingProcessor
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel

from llm_spec import (
    Finish,
    Fixed,
    InvalidRequestError,
    ReasoningDelta,
    SpeculativeConfig,
    SpeculativeDecoder,
    TargetError,
    TextDelta,
    ToolCallDelta,
    TransientError,
    Usage,
)
from llm_spec.integrations.openai_agents import SpeculativeModel, SpeculativeModelProvider
from llm_spec.testing import RuleBasedProvider, ScriptedProvider

PROMPT = "def area(radius):"
WORDS = "".join(f"word{i} " for i in range(30))
# drafts whatever it costs, on whatever machine
ALWAYS = SpeculativeConfig(strategy="tokens", lookahead=Fixed(4), baseline_every=0)


class Pet(BaseModel):
    name: str
    age: int


class Spans(TracingProcessor):
    """Keeps what the SDK would export."""

    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []

    def on_trace_start(self, trace: Trace) -> None: ...
    def on_trace_end(self, trace: Trace) -> None: ...
    def on_span_start(self, span: Span[Any]) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...

    def on_span_end(self, span: Span[Any]) -> None:
        self.ended.append(span.export() or {})

    @property
    def generations(self) -> list[dict[str, Any]]:
        return [span for span in self.ended if span["span_data"]["type"] == "generation"]


@pytest.fixture(autouse=True)
def spans() -> Iterator[Spans]:
    """No test sends traces anywhere."""
    processor = Spans()
    set_trace_processors([processor])
    yield processor
    set_trace_processors([])


def agent_of(provider: Any, **options: Any) -> Agent[None]:
    return Agent(name="Assistant", model=SpeculativeModel(provider), **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_text_is_the_decoders(temperature: float) -> None:
    """A run on the built-in pair ends with the very text that the decoder gives, greedy and with a seed."""
    async with SpeculativeDecoder(target="builtin:target", draft="lookup+builtin:draft") as decoder:
        expected = await decoder.decode(PROMPT, max_tokens=48, temperature=temperature, seed=5)
        settings = ModelSettings(max_tokens=48, temperature=temperature, extra_args={"seed": 5})
        result = await Runner.run(agent_of(decoder, model_settings=settings), PROMPT)
    assert result.final_output == expected.content
    assert expected.usage is not None
    usage = result.context_wrapper.usage
    assert (usage.input_tokens, usage.output_tokens) == (expected.usage.input_tokens, expected.usage.output_tokens)
    assert usage.requests == 1


async def test_items_tell_how_the_answer_came_about() -> None:
    """`provider_data` of the output holds the figures, as JSON values."""
    async with SpeculativeDecoder(target="builtin:target", draft="builtin:draft", config=ALWAYS) as decoder:
        result = await Runner.run(agent_of(decoder, model_settings=ModelSettings(max_tokens=48)), PROMPT)
    figures = result.raw_responses[0].output[0].model_dump()["provider_data"]["llm_spec"]
    assert (figures["strategy"], figures["guarantee"]) == ("tokens", "exact")
    assert 0 < figures["acceptance_rate"] <= 1
    assert json.dumps(figures)


async def test_streaming_gives_the_same_text_in_pieces() -> None:
    """A streamed run comes as Responses events, with usage, and ends as the same text."""
    streamed = Runner.run_streamed(agent_of(RuleBasedProvider()), "one two three")
    data = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
    deltas = [event.delta for event in data if event.type == "response.output_text.delta"]
    assert "".join(deltas) == streamed.final_output == "You said: one two three"
    assert len(deltas) > 2
    assert data[0].type == "response.created"
    assert data[-1].type == "response.completed"
    assert streamed.context_wrapper.usage.output_tokens == len(deltas)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_is_called_and_answered(is_streamed: bool) -> None:
    """A run with a tool goes there and back."""

    @function_tool
    def add_numbers(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    agent = agent_of(RuleBasedProvider(), tools=[add_numbers])
    if is_streamed:
        streamed = Runner.run_streamed(agent, "Add the numbers 3 and 4.")
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "The tool said: 7"
        return
    result = await Runner.run(agent, "Add the numbers 3 and 4.")
    assert result.final_output == "The tool said: 7"
    [call] = [item for response in result.raw_responses for item in response.output if item.type == "function_call"]
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments) == {"a": 3, "b": 4}


async def test_a_call_id_is_never_used_twice() -> None:
    """The SDK takes the id for the call, for a whole run: a server that always says `call_0`, or none, is corrected."""
    called: list[str] = []

    @function_tool
    def look_up(word: str) -> str:
        called.append(word)
        return word

    answers = iter(
        [
            [ToolCallDelta(0, "call_0", "look_up", '{"word": "a"}'), Finish("tool_calls")],
            [ToolCallDelta(0, "call_0", "look_up", '{"word": "b"}'), Finish("tool_calls")],
            [ToolCallDelta(0, None, "look_up", '{"word": "c"}'), Finish("tool_calls")],
            [TextDelta("done"), Finish("stop")],
        ]
    )
    provider = ScriptedProvider(lambda _: next(answers))
    result = await Runner.run(agent_of(provider, tools=[look_up]), "Go")
    assert result.final_output == "done"
    assert called == ["a", "b", "c"]
    ids = [call.id for message in provider.requests[-1].messages for call in message.tool_calls]
    assert len(set(ids)) == 3
    assert all(ids)


async def test_a_handoff_hands_over() -> None:
    """A handoff is offered as a tool, and the other agent's model answers."""
    other = Agent(name="Billing", model=SpeculativeModel(ScriptedProvider("Paid.")))
    result = await Runner.run(agent_of(RuleBasedProvider(), handoffs=[other]), "A billing question.")
    assert result.final_output == "Paid."
    assert result.last_agent is other


async def test_structured_output() -> None:
    """An output type becomes a JSON schema, and the answer that type."""
    agent = agent_of(RuleBasedProvider(), output_type=Pet)
    assert (await Runner.run(agent, "A dog named 'Rex', 3 years old.")).final_output == Pet(name="Rex", age=3)


async def test_instructions_and_settings_reach_the_provider() -> None:
    """The request has the system message, what the settings say, and by `extra_args` what they have no name for."""
    provider = ScriptedProvider("Hi")
    settings = ModelSettings(
        temperature=0.5, top_p=0.9, max_tokens=7, frequency_penalty=0.1, presence_penalty=0.2,
        extra_args={"seed": 3, "stop": "END", "logit_bias": {5: 1.0}, "guided": True}, extra_body={"mirostat": 1},
    )  # fmt: skip
    await Runner.run(agent_of(provider, instructions="Be kind.", model_settings=settings), "Hello")
    [request] = provider.requests
    assert [(m.role, m.text) for m in request.messages] == [("system", "Be kind."), ("user", "Hello")]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, request.max_tokens) == (0.5, 0.9, 3, 7)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.logit_bias) == (0.1, 0.2, {5: 1.0})
    assert request.stop == ("END",)
    assert request.extra == {"guided": True, "mirostat": 1}


async def test_reasoning_is_an_item() -> None:
    """What a provider shows of its reasoning comes as a reasoning item before the message."""
    script = [ReasoningDelta("hm"), TextDelta("Yes."), Finish("stop", Usage(input_tokens=1, output_tokens=2))]
    result = await Runner.run(agent_of(ScriptedProvider(script)), "Really?")
    assert [item.type for item in result.raw_responses[0].output] == ["reasoning", "message"]
    assert result.final_output == "Yes."


async def test_the_span_is_the_sdks(spans: Spans) -> None:
    """A traced run has a generation span with input, output, usage and figures."""
    await Runner.run(agent_of(RuleBasedProvider()), "one two")
    [span] = spans.generations
    data = span["span_data"]
    assert data["input"] == [{"role": "user", "content": "one two"}]
    assert data["output"]
    assert data["usage"]["output_tokens"] == 5
    assert data["model_config"]["llm_spec"]["finish_reason"] == "stop"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_span_has_counts_and_figures(spans: Spans, is_cut: bool, is_streamed: bool) -> None:
    """The target's name, tokens read from and written to caches, how the answer came about; also of an empty answer."""
    counted = Usage(input_tokens=100, output_tokens=7, cached_input_tokens=40, cache_write_input_tokens=50)
    script = [Finish("length", counted)] if is_cut else [TextDelta("Hi"), Finish("stop", counted)]
    async with SpeculativeDecoder(target=ScriptedProvider(script), draft="lookup") as decoder:
        agent = agent_of(decoder)
        with pytest.raises(ModelBehaviorError) if is_cut else nullcontext():
            if is_streamed:
                async for _ in Runner.run_streamed(agent, "Go").stream_events():
                    pass
            else:
                await Runner.run(agent, "Go")
    [span] = spans.generations
    data = span["span_data"]
    assert data["model"] == "script"
    assert data["usage"] == {
        "requests": 1,
        "input_tokens": 100,
        "output_tokens": 7,
        "total_tokens": 107,
        "input_tokens_details": {"cached_tokens": 40, "cache_write_tokens": 50},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    assert {"acceptance_rate", "guarantee", "plain_reason"} <= data["model_config"]["llm_spec"].keys()
    assert (span["error"] is not None) == is_cut


async def test_a_span_without_data_and_none_at_all(spans: Spans) -> None:
    """What a run keeps out of its traces stays out."""
    await Runner.run(agent_of(RuleBasedProvider()), "one", run_config=RunConfig(trace_include_sensitive_data=False))
    [span] = spans.generations
    assert (span["span_data"]["input"], span["span_data"]["output"]) == (None, None)
    assert span["span_data"]["usage"]["requests"] == 1
    await Runner.run(agent_of(RuleBasedProvider()), "one", run_config=RunConfig(tracing_disabled=True))
    assert len(spans.generations) == 1


@pytest.mark.parametrize(("has_data", "told"), [(True, "broken"), (False, "Error details are redacted.")])
async def test_an_error_is_on_its_span(spans: Spans, has_data: bool, told: str) -> None:
    """A failed call is told from a good one in the trace, without details where data is to stay out."""
    provider = ScriptedProvider(WORDS, fail_at={2: TargetError("broken")})
    config = RunConfig(trace_include_sensitive_data=has_data)
    with pytest.raises(TargetError):
        await Runner.run(agent_of(provider), "Go", run_config=config)
    assert spans.generations[0]["error"]["data"] == {"error": told}


@pytest.mark.parametrize("error", [TargetError("broken"), TransientError("away"), InvalidRequestError("not this")])
@pytest.mark.parametrize("at", [0, 3])
async def test_errors_come_as_they_are(error: Exception, at: int) -> None:
    """What the target raises, at once or midway, comes through a run, with the upstream closed."""
    provider = ScriptedProvider(WORDS, fail_at={at: error})
    with pytest.raises(type(error), match=str(error)):
        await Runner.run(agent_of(provider), "Go")
    streamed = Runner.run_streamed(agent_of(provider), "Go")
    with pytest.raises(type(error), match=str(error)):
        async for _ in streamed.stream_events():
            pass
    assert provider.num_open == 0


async def test_a_runner_told_to_retry_hears_that_it_may() -> None:
    """A passing failure is advised to be retried, and the second answer counts."""
    answers: Iterator[Any] = iter([TransientError("away"), "here"])

    def script(_: Any) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    retry = ModelRetrySettings(max_retries=1, policy=retry_policies.provider_suggested())
    settings = ModelSettings(retry=retry)
    result = await Runner.run(agent_of(ScriptedProvider(script), model_settings=settings), "Go")
    assert result.final_output == "here"


async def test_closing_a_stream_early_closes_the_upstream() -> None:
    """Whoever closes the model's stream after the first piece leaves no upstream generating."""
    provider = ScriptedProvider(WORDS, delay_piece_s=0.001)
    events: Any = SpeculativeModel(provider).stream_response(
        None, "Go", ModelSettings(), [], None, [], ModelTracing.DISABLED
    )
    async for event in events:
        if event.type == "response.output_text.delta":
            assert provider.num_open == 1
            break
    await events.aclose()
    assert (provider.num_open, provider.num_closed) == (0, 1)


async def test_a_cancelled_streamed_run_closes_the_upstream() -> None:
    """`cancel()` of a streamed run that waits for its next piece ends the upstream."""
    provider = ScriptedProvider([TextDelta("Hello"), TextDelta(" never")], delay_piece_s=3600.0)
    streamed = Runner.run_streamed(agent_of(provider), "Go")
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            streamed.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    assert (provider.num_open, provider.num_closed) == (0, 1)


async def test_cancellation_passes_through() -> None:
    """A cancelled run ends as cancelled, with the upstream closed."""
    provider = ScriptedProvider(WORDS, delay_piece_s=3600.0)
    task = asyncio.create_task(Runner.run(agent_of(provider), "Go"))
    while not provider.num_open:  # noqa: ASYNC110 - a provider tells nobody when it is asked
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        await asyncio.sleep(0)
    assert provider.num_open == 0


async def test_what_only_openais_servers_keep_is_refused() -> None:
    """A conversation that lives on a server cannot be continued here: said, not ignored."""
    provider = ScriptedProvider("Hi")
    with pytest.raises(UserError, match="previous_response_id"):
        await Runner.run(agent_of(provider), "Go", previous_response_id="resp_1")
    assert not provider.requests


async def test_eight_runs_at_once() -> None:
    """Concurrent runs on one model share nothing but the provider."""
    async with SpeculativeDecoder(target="builtin:target", draft="builtin:draft") as decoder:
        prompts = [f"def f{i}(self):" for i in range(8)]
        agent = agent_of(decoder, model_settings=ModelSettings(max_tokens=16))
        results = await asyncio.gather(*(Runner.run(agent, prompt) for prompt in prompts))
        alone = [(await decoder.decode(prompt, max_tokens=16)).content for prompt in prompts]
    assert [result.final_output for result in results] == alone


async def test_the_provider_makes_models_by_name() -> None:
    """An agent without a model gets the provider's target, a name its own, each made once and closed in the end."""
    provider = SpeculativeModelProvider(RuleBasedProvider())
    config = RunConfig(model_provider=provider)
    result = await Runner.run(Agent(name="Any"), "one", run_config=config)
    assert result.final_output == "You said: one"
    named = provider.get_model("rules:other")
    assert named is provider.get_model("rules:other")
    assert isinstance(named, SpeculativeModel)
    assert named.model == "other"
    await provider.aclose()
    assert named is not provider.get_model("rules:other")
    await provider.aclose()
