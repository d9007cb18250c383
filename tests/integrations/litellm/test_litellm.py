"""litellm's own functions give what the decoder gives, with its chunks, its usage and its errors."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("litellm")

import litellm
from litellm.exceptions import MidStreamFallbackError

from llm_spec import (
    CircuitOpenError,
    ConfigError,
    Finish,
    Fixed,
    InvalidRequestError,
    LlmSpecError,
    ReasoningDelta,
    SpeculativeConfig,
    SpeculativeDecoder,
    TargetError,
    TextDelta,
    TransientError,
    Usage,
)
from llm_spec.integrations.litellm import SpeculativeLLM, register
from llm_spec.testing import RuleBasedProvider, ScriptedProvider

# it warns of its own models; as errors those would become errors of its calls
pytestmark = pytest.mark.filterwarnings("ignore")

CODE = "def test_spawnl(self):"
# drafts whatever it costs, on whatever machine
ALWAYS = SpeculativeConfig(strategy="tokens", lookahead=Fixed(4), baseline_every=0)
WORDS = " ".join(f"word{number}" for number in range(200))
ADD = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Nothing registered outlives its test."""
    litellm.suppress_debug_info = True
    yield
    for item in list(litellm.custom_provider_map):
        item["custom_handler"].close()


def asked(text: str = "Hi", **options: Any) -> dict[str, Any]:
    return {"model": "llm_spec/any", "messages": [{"role": "user", "content": text}], **options}


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)  # usage comes without


async def acollect(**options: Any) -> list[Any]:
    return [chunk async for chunk in await litellm.acompletion(stream=True, **options)]


# --------------------------------------------------------------------------------------------- answers


async def test_the_text_is_the_decoders() -> None:
    """The built-in pair, whole and streamed, blocking and not, gives what the decoder gives, sampled with a seed."""
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 5}
    async with SpeculativeDecoder(target="builtin:target", draft="builtin:draft") as decoder:
        expected = await decoder.decode(CODE, **options)
    async with register(model="fast", target="builtin:target", draft="builtin:draft", config=ALWAYS):
        call = asked(CODE, **options) | {"model": "llm_spec/fast"}
        answers = [litellm.completion(**call), await litellm.acompletion(**call)]
        streams = [list(litellm.completion(stream=True, **call)), await acollect(**call)]
    assert len(streams[0]) > 5
    answers += [litellm.stream_chunk_builder(chunks) for chunks in streams]
    for answer in answers:
        (choice,) = answer.choices
        assert choice.message.content == expected.content
        assert choice.finish_reason == expected.finish_reason
        assert expected.usage is not None
        assert answer.usage.prompt_tokens == expected.usage.input_tokens
        assert answer.usage.completion_tokens == expected.usage.output_tokens
        figures = choice.message.provider_specific_fields["llm_spec"]
        assert (figures["strategy"], figures["guarantee"], figures["same_text"]) == (
            "tokens",
            "exact",
            True,
        )
        assert 0 < figures["acceptance_rate"] <= 1


async def test_usage_comes_in_one_chunk_where_it_is_asked_for() -> None:
    usage = Usage(input_tokens=9, output_tokens=4, cached_input_tokens=2, reasoning_tokens=1)
    script = [ReasoningDelta("hm"), TextDelta("a"), TextDelta("b"), Finish("stop", usage, "eos")]
    register(target=ScriptedProvider(script))
    chunks = await acollect(**asked(stream_options={"include_usage": True}))
    counted = [chunk for chunk in chunks if getattr(chunk, "usage", None)]
    assert counted == chunks[-1:]
    whole = await litellm.acompletion(**asked())
    for told in (counted[0].usage, whole.usage):
        assert (told.prompt_tokens, told.completion_tokens, told.total_tokens) == (9, 4, 13)
        assert told.prompt_tokens_details.cached_tokens == 2
        assert told.completion_tokens_details.reasoning_tokens == 1
    assert whole.choices[0].message.reasoning_content == "hm"
    assert [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks[:2]] == ["hm", None]
    assert text_of(chunks) == whole.choices[0].message.content == "ab"


async def test_tools_are_called_whole_and_in_pieces() -> None:
    register(target=RuleBasedProvider())
    call = asked("Add the numbers 3 and 4.", tools=[ADD], tool_choice="auto")
    whole = litellm.completion(**call)
    chunks = await acollect(**call)
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 3
    for answer in (whole, litellm.stream_chunk_builder(chunks)):
        assert answer.choices[0].finish_reason == "tool_calls"
        (made,) = answer.choices[0].message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("add_numbers", {"a": 3, "b": 4})
    followed = [*call["messages"], whole.choices[0].message]
    followed.append({"role": "tool", "tool_call_id": made.id, "content": "7"})
    answer = litellm.completion(model="llm_spec/any", messages=followed, tools=[ADD])
    assert answer.choices[0].message.content == "The tool said: 7"


def test_options_arrive_as_options_of_the_request() -> None:
    provider = ScriptedProvider("So.")
    register(target=provider)
    options: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 3, "stop": ["y"]}
    options |= {"presence_penalty": 0.1, "logit_bias": {"5": 1}, "max_completion_tokens": 9, "n": 1}
    shape = {"type": "json_schema", "json_schema": {"name": "pet", "schema": {"type": "object", "properties": {}}}}
    litellm.completion(**asked(response_format=shape, parallel_tool_calls=False, extra_body={"priority": 1}, **options))
    (request,) = provider.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 3, 0.1)
    assert (sampling.seed, sampling.presence_penalty, sampling.logit_bias) == (3, 0.1, {5: 1})
    assert (request.max_tokens, request.stop, request.response_format) == (9, ("y",), shape)
    assert request.extra == {"priority": 1, "parallel_tool_calls": False}


@pytest.mark.parametrize("option", [{"n": 2}, {"top_logprobs": 21, "logprobs": True}, {"temperature": -1}])
def test_what_cannot_be_served_is_a_bad_request(option: dict[str, Any]) -> None:
    register(target=RuleBasedProvider())
    with pytest.raises(litellm.BadRequestError, match=next(iter(option))):
        litellm.completion(**asked(**option))


def test_json_comes_by_response_format() -> None:
    register(target=RuleBasedProvider())
    answer = litellm.completion(**asked("Hi", response_format={"type": "json_object"}))
    assert json.loads(answer.choices[0].message.content) == {"answer": "Hi"}


# ---------------------------------------------------------------------------------------------- errors


def named(error: LlmSpecError, code: str, param: str | None = None) -> LlmSpecError:
    """An error of a server that names what is wrong."""
    error.code, error.param = code, param
    return error


ERRORS = [
    (TransientError("slow down", status=429, retry_after_s=7), "RateLimitError", 429),
    (TransientError("busy", status=503), "ServiceUnavailableError", 503),
    (TransientError("late", status=504), "Timeout", 504),
    (TransientError("gone"), "APIConnectionError", 500),
    (CircuitOpenError("left alone"), "ServiceUnavailableError", 503),
    (InvalidRequestError("top_k is wrong"), "BadRequestError", 400),
    (named(InvalidRequestError("it is too long"), "context_length_exceeded"), "ContextWindowExceededError", 400),
    (named(InvalidRequestError("not this"), "content_policy_violation"), "ContentPolicyViolationError", 400),
    (TargetError("401 unknown key"), "InternalServerError", 500),
]


@pytest.mark.parametrize(("error", "kind", "status"), ERRORS)
async def test_errors_are_litellms(error: LlmSpecError, kind: str, status: int) -> None:
    """Each of litellm's kind with its status, this library's its cause; a stream wraps those worth another model."""
    register(target=ScriptedProvider("So it goes.", fail_at={1: error}))
    with pytest.raises(getattr(litellm, kind), match=str(error)) as caught:
        litellm.completion(**asked())
    assert caught.value.status_code == status
    assert caught.value.__cause__ is error
    with pytest.raises(getattr(litellm, kind), match=str(error)) as caught:
        await litellm.acompletion(**asked())
    assert caught.value.status_code == status
    with pytest.raises((getattr(litellm, kind), MidStreamFallbackError), match=str(error)) as caught:
        await acollect(**asked())
    original = getattr(caught.value, "original_exception", None) or caught.value
    assert type(original).__name__ == kind


def test_a_servers_own_names_are_told() -> None:
    """As by litellm's other providers."""
    error = named(InvalidRequestError("no such effort"), "unsupported_value", "reasoning_effort")
    register(target=ScriptedProvider("So.", fail_at={0: error}))
    with pytest.raises(litellm.BadRequestError) as caught:
        litellm.completion(**asked())
    assert (caught.value.code, caught.value.param) == ("unsupported_value", "reasoning_effort")


def test_a_wait_that_was_asked_for_is_told() -> None:
    error = TransientError("slow down", status=429, retry_after_s=7)
    register(target=ScriptedProvider("So.", fail_at={0: error}))
    with pytest.raises(litellm.RateLimitError) as caught:
        litellm.completion(**asked())
    assert caught.value.response.headers["retry-after"] == "7"


async def test_the_timeout_of_a_call_is_kept() -> None:
    """It bounds a whole answer, and, streamed, the wait for each piece."""
    slow = ScriptedProvider(WORDS, delay_piece_s=0.05)
    register(target=slow)
    with pytest.raises(litellm.Timeout):
        await litellm.acompletion(**asked(timeout=0.2))
    assert len(await acollect(**asked(timeout=5, max_tokens=8))) > 8
    with pytest.raises((litellm.Timeout, MidStreamFallbackError)):
        await acollect(**asked(timeout=0.01))
    assert slow.num_open == 0


# ----------------------------------------------------------------------------------- names, loops, ends


async def test_a_name_has_several_models() -> None:
    first = register(model="one", target=ScriptedProvider("One."))
    assert register(model="two", target=ScriptedProvider("Two.")) is first
    answers = [await litellm.acompletion(**asked() | {"model": f"llm_spec/{name}"}) for name in ("one", "two")]
    assert [answer.choices[0].message.content for answer in answers] == ["One.", "Two."]
    with pytest.raises(litellm.NotFoundError, match="'three' in llm_spec; it has: one, two"):
        await litellm.acompletion(**asked() | {"model": "llm_spec/three"})


def test_a_name_that_is_taken_is_refused() -> None:
    register(model="one", target="rules:any")
    with pytest.raises(ConfigError, match="model is 'one'"):
        register(model="one", target="rules:any")
    with pytest.raises(ConfigError, match="name is 'openai', a provider of litellm's own"):
        register("openai", target="rules:any")
    with pytest.raises(ConfigError, match="provider 'nowhere'"):
        register("other", target="nowhere:at-all")
    assert [item["provider"] for item in litellm.custom_provider_map] == ["llm_spec"]


async def test_blocking_calls_work_where_a_loop_runs() -> None:
    register(target=RuleBasedProvider())
    assert litellm.completion(**asked()).choices[0].message.content == "You said: Hi"
    assert (await litellm.acompletion(**asked())).choices[0].message.content == "You said: Hi"


def test_eight_threads_at_once() -> None:
    register(target="rules:any")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda n: litellm.completion(**asked(f"Number {n}.")), range(24)))
    assert [answer.choices[0].message.content for answer in answers] == [f"You said: Number {n}." for n in range(24)]


async def test_leaving_a_stream_early_closes_the_providers() -> None:
    provider = ScriptedProvider(WORDS)
    register(target=provider)
    stream = await litellm.acompletion(**asked(stream=True))
    await anext(stream)
    assert provider.num_open == 1
    await stream.aclose()
    assert (provider.num_open, provider.num_closed) == (0, 1)


def test_leaving_a_blocking_stream_early_closes_the_providers() -> None:
    provider = ScriptedProvider(WORDS)
    register(target=provider)
    stream = litellm.completion(**asked(stream=True))
    next(stream)
    del stream
    for _ in range(100):  # litellm's logging in other threads may hold it for a while
        gc.collect()
        if not provider.num_open:
            break
        time.sleep(0.05)
    assert (provider.num_open, provider.num_closed) == (0, 1)


async def test_cancelling_closes_the_providers_stream() -> None:
    provider = ScriptedProvider(WORDS, delay_first_s=60)
    register(target=provider)
    task = asyncio.create_task(litellm.acompletion(**asked()))
    async with asyncio.timeout(10):
        while not provider.num_open:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.num_open == 0


def test_closing_ends_threads_and_forgets_the_name() -> None:
    llm = register(target="rules:any")
    assert isinstance(llm, SpeculativeLLM)
    litellm.completion(**asked())
    assert "llm_spec rules:any" in {thread.name for thread in threading.enumerate()}
    llm.close()
    llm.close()
    assert "llm_spec rules:any" not in {thread.name for thread in threading.enumerate()}
    assert litellm.custom_provider_map == []
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**asked())
    with register(target="rules:any"):  # the name is free again
        assert litellm.completion(**asked()).choices[0].message.content == "You said: Hi"
