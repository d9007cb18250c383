"""What an agent of pydantic-ai gets from SpeculativeModel."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")

from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.exceptions import (
    ContentFilterError,
    ModelAPIError,
    ModelConnectionError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    UserError,
)
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import UsageLimits
from support.tool_models import write_model_without_tools

from llm_spec import (
    AnswerDetail,
    ChatRequest,
    Finish,
    Fixed,
    InvalidRequestError,
    Price,
    ProviderDraft,
    ReasoningDelta,
    SpeculativeConfig,
    SpeculativeDecoder,
    StreamEvent,
    TargetError,
    TextDelta,
    ToolCallDelta,
    TransientError,
    Usage,
)
from llm_spec.contract.provider import Capabilities
from llm_spec.integrations.pydantic_ai import SpeculativeModel
from llm_spec.testing import RuleBasedProvider, ScriptedProvider

PROMPT = "def area(radius):"
WORDS = "".join(f"word{i} " for i in range(30))
# drafts whatever it costs, on whatever machine
ALWAYS = SpeculativeConfig(strategy="tokens", lookahead=Fixed(4), baseline_every=0)


class Pet(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_text_is_the_decoders(temperature: float) -> None:
    """An agent's output on the built-in pair is the very text that the decoder gives, greedy and with a seed."""
    async with SpeculativeDecoder(target="builtin:target", draft="lookup+builtin:draft") as decoder:
        expected = await decoder.decode(PROMPT, max_tokens=48, temperature=temperature, seed=5)
        settings = ModelSettings(max_tokens=48, temperature=temperature, seed=5)
        result = await Agent(SpeculativeModel(decoder), model_settings=settings).run(PROMPT)
    assert result.output == expected.content
    assert expected.usage is not None
    assert result.usage.output_tokens == expected.usage.output_tokens
    assert result.response.finish_reason == expected.finish_reason


async def test_strings_make_a_decoder() -> None:
    """Target and draft may be strings; the model opens them again after its context was left."""
    model = SpeculativeModel("builtin:target", draft="builtin:draft", settings={"max_tokens": 16})
    agent = Agent(model)
    async with agent:
        first = await agent.run(PROMPT)
    assert (await agent.run(PROMPT)).output == first.output
    assert (model.system, model.model_name) == ("builtin", "target")
    await model.aclose()


async def test_a_given_provider_stays_open() -> None:
    """What was given is the giver's to close."""
    provider = ScriptedProvider("Hello.")
    async with Agent(SpeculativeModel(provider)) as agent:
        assert (await agent.run("Hi")).output == "Hello."
    assert provider.num_acloses == 0


async def test_streaming_gives_the_same_text_in_pieces() -> None:
    """A streamed run comes piece by piece and ends as the same text, with usage and figures."""
    agent = Agent(SpeculativeModel(RuleBasedProvider()))
    async with agent.run_stream("one two three") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        response = stream.response
    assert "".join(pieces) == "You said: one two three"
    assert len(pieces) > 2
    assert response.usage.output_tokens == len(pieces)
    assert response.finish_reason == "stop"
    assert response.state == "complete"


async def test_figures_and_rejected_drafts_are_in_the_response() -> None:
    """`provider_details` says how the answer came about, `failed_attempts` what the draft proposed in vain."""
    async with SpeculativeDecoder(target="builtin:target", draft="builtin:draft", config=ALWAYS) as decoder:
        result = await Agent(SpeculativeModel(decoder, settings={"max_tokens": 64})).run(PROMPT)
    details = result.response.provider_details
    assert details is not None
    assert (details["strategy"], details["guarantee"]) == ("tokens", "exact")
    assert 0 < details["acceptance_rate"] < 1
    assert "speedup" in details
    assert json.dumps(details)
    [attempt] = result.response.failed_attempts or []
    assert (attempt.outcome, attempt.provider_name, attempt.model_name) == ("rejected", "builtin", "draft")
    assert attempt.duration.total_seconds() > 0


@pytest.mark.parametrize("price", [None, Price(input=1.0, output=2.0)])
async def test_what_a_rejected_draft_was_paid_joins_the_runs_usage(price: Price | None) -> None:
    """The response's usage is the target's; the run's is both where the draft costs money, else the target's too."""
    usage = Usage(input_tokens=3, output_tokens=7)
    target = ScriptedProvider("one two three four", usage=Usage(input_tokens=2, output_tokens=4))
    draft = ScriptedProvider("one two wrong", usage=usage)
    config = SpeculativeConfig(strategy="regenerate", prices={} if price is None else {"scripted:script": price})
    decoder = SpeculativeDecoder(target=target, draft=ProviderDraft(draft), config=config)
    result = await Agent(SpeculativeModel(decoder)).run("Count")
    assert (result.response.usage.input_tokens, result.response.usage.output_tokens) == (2, 4)
    [attempt] = result.response.failed_attempts or []
    assert attempt.outcome == "rejected"
    assert (attempt.usage is None) == (price is None)
    assert (result.usage.input_tokens, result.usage.output_tokens) == ((2, 4) if price is None else (5, 11))


async def test_a_draft_that_fails_is_a_failed_attempt() -> None:
    """A draft that breaks costs nothing but a note: the output is the target's."""
    draft = ScriptedProvider("", fail_at={0: RuntimeError("no draft today")})
    decoder = SpeculativeDecoder(
        target=ScriptedProvider("fine"), draft=ProviderDraft(draft), config=SpeculativeConfig(strategy="regenerate")
    )
    result = await Agent(SpeculativeModel(decoder)).run("Hi")
    assert result.output == "fine"
    [attempt] = result.response.failed_attempts or []
    assert attempt.outcome == "error"
    assert "no draft today" in (attempt.error or "")


async def test_a_tool_is_called_and_answered() -> None:
    """A run with a tool goes there and back."""
    agent = Agent(SpeculativeModel(RuleBasedProvider()))

    @agent.tool_plain
    def add_numbers(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    result = await agent.run("Add the numbers 3 and 4.")
    assert result.output == "The tool said: 7"
    parts = [part for message in result.all_messages() for part in message.parts]
    assert [p.args_as_dict() for p in parts if isinstance(p, ToolCallPart)] == [{"a": 3, "b": 4}]
    assert [p.content for p in parts if isinstance(p, ToolReturnPart)] == [7]


async def test_a_tool_round_trip_may_be_streamed() -> None:
    """The same run streamed ends with the tool's answer."""
    agent = Agent(SpeculativeModel(RuleBasedProvider()))

    @agent.tool_plain
    def add_numbers(a: int, b: int) -> int:
        return a + b

    async with agent.run_stream("Add the numbers 3 and 4.") as stream:
        assert await stream.get_output() == "The tool said: 7"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("later_id", ["c1", "other", "", None])
async def test_a_name_in_every_piece_is_one_name(later_id: str | None, is_streamed: bool) -> None:
    """Its id, too: the first are the call's."""
    pieces = [
        ToolCallDelta(0, "c1" if not at else later_id, "get", text) for at, text in enumerate(['{"a"', ": 1", "}"])
    ]

    def script(request: ChatRequest) -> list[StreamEvent]:
        is_first = not any(message.role == "tool" for message in request.messages)
        return [*pieces, Finish("tool_calls")] if is_first else [TextDelta("done"), Finish("stop")]

    provider = ScriptedProvider(script)
    agent = Agent(SpeculativeModel(provider))
    arguments: list[int] = []

    @agent.tool_plain
    def get(a: int) -> None:
        arguments.append(a)

    if is_streamed:
        async with agent.run_stream("Go") as run:
            assert await run.get_output() == "done"
    else:
        assert (await agent.run("Go")).output == "done"
    assert arguments == [1]
    assert [(call.id, call.name) for call in provider.requests[1].messages[1].tool_calls] == [("c1", "get")]


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_refusal_is_one_whatever_ended_the_answer(reason: Any, is_streamed: bool) -> None:
    """Not an answer, and not a reason to ask again."""
    provider = ScriptedProvider(
        [AnswerDetail("chat", {"refusal": "I will "}), AnswerDetail("chat", {"refusal": "not"}), Finish(reason)]
    )
    agent = Agent(SpeculativeModel(provider))
    run: Any = agent.run_stream("Go").__aenter__() if is_streamed else agent.run("Go")
    with pytest.raises(ContentFilterError, match="'I will not'"):
        await run
    assert len(provider.requests) == 1


@pytest.mark.parametrize("output_type", [Pet, ToolOutput(Pet), NativeOutput(Pet)], ids=["default", "tool", "native"])
async def test_structured_output(output_type: type[Pet]) -> None:
    """An output type is filled by an output tool, or by a JSON schema."""
    agent = Agent(SpeculativeModel(RuleBasedProvider()), output_type=output_type)
    assert (await agent.run("A dog named 'Rex', 3 years old.")).output == Pet(name="Rex", age=3)


async def test_a_model_without_tools_fills_a_schema(tmp_path: Path) -> None:
    """It is asked for JSON by schema if a grammar can hold it to it, else by words."""
    model = SpeculativeModel(f"onnx:{write_model_without_tools(tmp_path / 'model')}")
    native = model.profile.get("supports_json_schema_output")
    assert model.profile.get("default_structured_output_mode") == ("native" if native else "prompted")
    assert not model.profile.get("supports_tools")
    await model.aclose()


async def test_reasoning_is_a_thinking_part() -> None:
    """What a provider shows of its reasoning comes as thinking, and goes back as such, not as text."""
    script = [ReasoningDelta("hm"), TextDelta("Yes."), Finish("stop", Usage(input_tokens=1, output_tokens=2))]
    provider = ScriptedProvider(script)
    agent = Agent(SpeculativeModel(provider))
    first = await agent.run("Really?")
    assert (first.response.thinking, first.output) == ("hm", "Yes.")
    await agent.run("Sure?", message_history=first.all_messages())
    assert [m.text for m in provider.requests[1].messages] == ["Really?", "Yes.", "Sure?"]
    assert provider.requests[1].messages[1].reasoning == "hm"


async def test_a_provider_that_counts_nothing_is_unmeasured() -> None:
    """Usage that no provider told is not made up."""
    result = await Agent(SpeculativeModel(ScriptedProvider("Hi", usage=None))).run("Hi")
    assert result.response.usage.output_tokens == 0
    assert result.response.usage.unmeasured_requests == 1


async def test_a_usage_limit_stops_a_run() -> None:
    """The framework's own limits see the usage."""
    agent = Agent(SpeculativeModel(RuleBasedProvider()))
    with pytest.raises(Exception, match="output_tokens_limit"):
        await agent.run("one two three four", usage_limits=UsageLimits(output_tokens_limit=2))


async def test_leaving_a_stream_early_closes_the_upstream() -> None:
    """Whoever leaves after the first piece leaves no upstream generating."""
    provider = ScriptedProvider(WORDS, delay_piece_s=0.001)
    async with Agent(SpeculativeModel(provider)).run_stream("Go") as stream:
        async for _ in stream.stream_text(delta=True, debounce_by=None):
            assert provider.num_open == 1
            break
    assert (provider.num_open, provider.num_closed) == (0, 1)


async def test_cancelling_a_stream_closes_the_upstream_and_keeps_what_came() -> None:
    """`cancel()` from another task ends a reader that waits, and the response says that it was interrupted."""
    provider = ScriptedProvider([TextDelta("Hello"), TextDelta(" never")], delay_piece_s=3600.0)
    async with Agent(SpeculativeModel(provider)).run_stream("Go") as stream:
        asyncio.get_running_loop().call_later(0.01, lambda: cancels.append(asyncio.create_task(stream.cancel())))
        cancels: list[asyncio.Task[None]] = []
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        await asyncio.gather(*cancels)
        assert provider.num_open == 0
    assert pieces == ["Hello"]
    assert stream.response.state == "interrupted"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_cancellation_passes_through(is_streamed: bool) -> None:
    """A cancelled run ends as cancelled, with the upstream closed."""
    provider = ScriptedProvider(WORDS, delay_piece_s=3600.0)
    agent = Agent(SpeculativeModel(provider))

    async def go() -> None:
        if not is_streamed:
            await agent.run("Go")
        async with agent.run_stream("Go") as stream:
            await stream.get_output()

    task = asyncio.create_task(go())
    while not provider.num_open:  # noqa: ASYNC110 - a provider tells nobody when it is asked
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.num_open == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TargetError("broken"), ModelAPIError),
        (TransientError("away"), ModelConnectionError),
        (TransientError("slow down", status=429, retry_after_s=2.0), ModelRateLimitError),
        (InvalidRequestError("not this"), ModelRequestRejectedError),
    ],
)
@pytest.mark.parametrize("at", [0, 3])
async def test_errors_are_the_frameworks_own(error: Exception, expected: type[Exception], at: int) -> None:
    """What the target raises, at once or midway, comes as pydantic-ai's error of that meaning, its cause kept."""
    provider = ScriptedProvider(WORDS, fail_at={at: error})
    with pytest.raises(expected, match=str(error)) as raised:
        await Agent(SpeculativeModel(provider)).run("Go")
    assert raised.value.__cause__ is error
    assert provider.num_open == 0


async def test_a_fallback_model_takes_over() -> None:
    """An error at the start lets pydantic-ai's FallbackModel go on to the next, also when streamed."""
    broken = ScriptedProvider("", fail_at={0: TransientError("away")})
    agent = Agent(FallbackModel(SpeculativeModel(broken), TestModel(custom_output_text="instead")))
    assert (await agent.run("Hi")).output == "instead"
    async with agent.run_stream("Hi") as stream:
        assert await stream.get_output() == "instead"


async def test_attempts_of_a_fallback_model_come_first() -> None:
    """What a fallback model moved on from and what the draft proposed in vain are both reported, in their order."""
    broken = SpeculativeModel(ScriptedProvider("", fail_at={0: TransientError("away")}))
    async with SpeculativeDecoder(target="builtin:target", draft="builtin:draft", config=ALWAYS) as decoder:
        agent = Agent(FallbackModel(broken, SpeculativeModel(decoder, settings={"max_tokens": 64})))
        async with agent.run_stream(PROMPT) as stream:
            await stream.get_output()
        streamed, whole = stream.response, (await agent.run(PROMPT)).response
    for response in (streamed, whole):
        assert [attempt.outcome for attempt in response.failed_attempts or []] == ["error", "rejected"]


async def test_eight_runs_at_once() -> None:
    """Concurrent runs on one model share nothing but the provider."""
    async with SpeculativeDecoder(target="builtin:target", draft="builtin:draft") as decoder:
        prompts = [f"def f{i}(self):" for i in range(8)]
        agent = Agent(SpeculativeModel(decoder, settings={"max_tokens": 16}))
        results = await asyncio.gather(*map(agent.run, prompts))
        alone = [(await decoder.decode(prompt, max_tokens=16)).content for prompt in prompts]
    assert [result.output for result in results] == alone


async def test_tools_for_a_model_without_them_are_refused() -> None:
    """An output tool for a target without tools is the user's error, told before anything is asked."""
    provider = ScriptedProvider("x", capabilities=Capabilities())
    with pytest.raises(UserError):
        await Agent(SpeculativeModel(provider), output_type=ToolOutput(Pet)).run("Hi")
    assert not provider.requests


def test_a_run_without_a_loop() -> None:
    """`run_sync` works, twice."""
    model = SpeculativeModel("builtin:target", draft="builtin:draft", settings={"max_tokens": 8})
    agent = Agent(model)
    with asyncio.Runner() as runner:  # else the framework leaves a loop of its own open
        asyncio.set_event_loop(runner.get_loop())
        assert agent.run_sync(PROMPT).output == agent.run_sync(PROMPT).output
        runner.run(model.aclose())
