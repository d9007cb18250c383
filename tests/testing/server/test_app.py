"""ScriptedModelServer over real sockets: the wire, the time, the faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from llm_spec_http import DIALECTS, HttpProvider

from llm_spec import ChatRequest, Finish, InvalidRequestError, TargetError, TextDelta
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.server import (
    EOS_ID,
    MODEL,
    ScriptedModelServer,
    ServerFaults,
    ServerLatency,
    make_disagreeing_draft,
)

pytestmark = pytest.mark.virtual_clock

ANSWER = "The cat sat on the mat.\n\nIt slept, and dreamt of a cat."
NUM_TOKENS = len(split_into_pieces(ANSWER))
MESSAGES = [{"role": "user", "content": "Tell me."}]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        yield session


async def post(session: aiohttp.ClientSession, server: ScriptedModelServer, path: str, **body: Any) -> dict[str, Any]:
    url = server.url.removesuffix("/v1") + path
    async with session.post(url, json=body) as response:
        return {"status": response.status, **await response.json()}


async def ask(
    server: ScriptedModelServer, dialect: str = "generic", prefix: str = "", **options: Any
) -> tuple[str, Finish]:
    """Text and finish by the library's own client."""
    provider = HttpProvider(MODEL, base_url=server.url, dialect=DIALECTS[dialect])
    text, finish = "", None
    try:
        async with provider.stream(ChatRequest.create("Tell me.", prefix=prefix, **options)) as events:
            async for event in events:
                text += event.text if isinstance(event, TextDelta) else ""
                finish = event if isinstance(event, Finish) else finish
    finally:
        await provider.aclose()
    assert finish is not None
    return text, finish


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(1):
        while not condition():  # noqa: ASYNC110 - the server has counters, no events
            await asyncio.sleep(0.001)


async def test_a_stream_is_the_script_with_its_usage() -> None:
    async with ScriptedModelServer(ANSWER) as server:
        text, finish = await ask(server)
        assert (text, finish.finish_reason) == (ANSWER, "stop")
        assert finish.usage is not None
        assert finish.usage.output_tokens == NUM_TOKENS == server.num_generated_tokens
        assert server.requests[0]["messages"] == MESSAGES
        assert (server.num_open_streams, server.num_cancelled) == (0, 0)


async def test_usage_comes_only_when_asked_for(session: aiohttp.ClientSession) -> None:
    async with (
        ScriptedModelServer("Yes.") as server,
        session.post(f"{server.url}/chat/completions", json={"messages": MESSAGES, "stream": True}) as response,
    ):
        lines = (await response.text()).split("\n\n")
    assert len(lines) == 5  # two tokens, the finish, the end, nothing
    assert lines[-2:] == ["data: [DONE]", ""]
    assert not any("usage" in line for line in lines)


async def test_an_answer_that_is_not_streamed(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(ANSWER) as server:
        answer = await post(session, server, "/v1/chat/completions", messages=MESSAGES)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ANSWER}
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"max_tokens": 3}, "The cat sat", "length"),
        ({"max_tokens": NUM_TOKENS}, ANSWER, "length"),
        ({"max_tokens": NUM_TOKENS + 1}, ANSWER, "stop"),
        ({"stop": ["zebra", "at on"]}, "The cat s", "stop"),
        ({"stop": ["mat"], "max_tokens": 5}, "The cat sat on the", "length"),
    ],
)
async def test_limits(options: dict[str, Any], text: str, reason: str) -> None:
    async with ScriptedModelServer(ANSWER) as server:
        answer, finish = await ask(server, **options)
    assert (answer, finish.finish_reason) == (text, reason)


@pytest.mark.parametrize(
    ("prefix", "rest"),
    [
        ("The cat", ANSWER.removeprefix("The cat")),
        ("The cat sa", ANSWER.removeprefix("The cat sa")),
        ("The dog sat on", " the mat.\n\nIt slept, and dreamt of a cat."),  # behind the longest match of its end
        ("A long story of a dog that dreamt of a cat", "."),  # the nearest of two matches, and the longer one
        ("My cat", ANSWER.removeprefix("The cat")),  # the nearest of two equal matches
        ("Unheard", ANSWER),
        (ANSWER, ""),
    ],
)
async def test_a_prefix_is_continued(prefix: str, rest: str) -> None:
    async with ScriptedModelServer(ANSWER, continues_prefix="fields") as server:
        assert (await ask(server, "vllm", prefix))[0] == rest
    async with ScriptedModelServer(ANSWER, continues_prefix="repeats") as server:
        assert (await ask(server, "llamacpp", prefix))[0] == rest


async def test_a_repeated_prefix_is_on_the_wire_and_costs_nothing(session: aiohttp.ClientSession) -> None:
    continued = [*MESSAGES, {"role": "assistant", "content": "The cat"}]
    async with ScriptedModelServer(ANSWER, continues_prefix="repeats") as server:
        answer = await post(session, server, "/v1/chat/completions", messages=continued, max_tokens=1)
    assert answer["choices"][0]["message"]["content"] == "The cat sat"
    assert answer["usage"]["completion_tokens"] == 1 == server.num_generated_tokens


async def test_a_server_that_cannot_continue_answers_from_the_start() -> None:
    async with ScriptedModelServer(ANSWER) as server:
        assert (await ask(server, "vllm", "The cat"))[0] == ANSWER


async def test_a_batch_of_token_ids_gives_the_next_token_of_each(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(ANSWER) as server:
        prompt = (await post(session, server, "/tokenize", messages=MESSAGES))["tokens"]
        script = (await post(session, server, "/tokenize", prompt=ANSWER))["tokens"]
        batch = [prompt + script[:n] for n in range(len(script) + 1)]
        answer = await post(session, server, "/v1/completions", prompt=batch, max_tokens=1, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(batch)))
    assert [choice["token_ids"] for choice in answer["choices"]] == [[i] for i in [*script, EOS_ID]]
    assert [choice["text"] for choice in answer["choices"]] == [*split_into_pieces(ANSWER), ""]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * len(script) + ["stop"]


async def test_token_ids_are_the_chats_own_prompt_and_stable(session: aiohttp.ClientSession) -> None:
    continued = [*MESSAGES, {"role": "assistant", "content": "The cat"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    async with ScriptedModelServer(ANSWER, continues_prefix="fields") as server:
        tokens = (await post(session, server, "/tokenize", messages=continued, **options))["tokens"]
        prompt = (await post(session, server, "/tokenize", messages=MESSAGES))["tokens"]
        prefix = (await post(session, server, "/tokenize", prompt="The cat"))["tokens"]
        text = (await post(session, server, "/detokenize", tokens=tokens))["prompt"]
        again = (await post(session, server, "/tokenize", prompt=text))["tokens"]
        chat = await post(session, server, "/v1/chat/completions", messages=continued, **options)
    assert tokens == prompt + prefix == again
    assert text.endswith("<|assistant|>The cat")
    assert chat["usage"]["prompt_tokens"] == len(tokens)


async def test_prompt_logprobs_rank_the_scripts_token_first(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer("Yes, sir.") as server:
        prompt = (await post(session, server, "/tokenize", prompt="<|assistant|>Yes; sir."))["tokens"]
        comma = (await post(session, server, "/tokenize", prompt=","))["tokens"][0]
        answer = await post(session, server, "/v1/completions", prompt=prompt, max_tokens=1, prompt_logprobs=1)
    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert [entry[str(i)]["rank"] for entry, i in zip(entries[1:], prompt[1:], strict=True)][:2] == [1, 2]
    assert entries[2][str(comma)] == {"logprob": 0.0, "rank": 1, "decoded_token": ","}


async def test_models(session: aiohttp.ClientSession) -> None:
    async with (
        ScriptedModelServer(ANSWER, context_length=4096) as server,
        session.get(f"{server.url}/models") as response,
    ):
        assert (await response.json())["data"] == [{"id": MODEL, "object": "model", "max_model_len": 4096}]


async def test_every_request_leaves_its_path(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(ANSWER, faults=ServerFaults(missing=frozenset({"/tokenize"}))) as server:
        await ask(server)
        await post(session, server, "/tokenize", prompt="")
        async with session.get(f"{server.url}/unheard_of"):
            pass
        assert server.paths == ["/v1/chat/completions", "/tokenize", "/v1/unheard_of"]
        assert len(server.requests) == 1


async def test_time_to_first_token_prefill_and_time_per_token() -> None:
    loop = asyncio.get_running_loop()
    num_prompt = 6  # two marks of the user's message, " Tell", " me", ".", and the assistant's
    latency = ServerLatency(first_token_s=0.02, token_s=0.01, prefill_tokens_per_s=num_prompt / 0.03)
    async with ScriptedModelServer(ANSWER, latency=latency) as server:
        provider = HttpProvider(MODEL, base_url=server.url)
        times = [loop.time()]
        async with provider.stream(ChatRequest.create("Tell me.", max_tokens=4)) as events:
            times += [loop.time() async for event in events if isinstance(event, TextDelta)]
        await provider.aclose()
    assert 0.05 <= times[1] - times[0] + 0.001 < 1
    assert 0.03 <= times[4] - times[1] + 0.005 < 1


async def test_only_so_many_streams_at_once() -> None:
    async with ScriptedModelServer("Yes.", latency=ServerLatency(first_token_s=0.03, max_streams=1)) as server:
        start = asyncio.get_running_loop().time()
        asked = [asyncio.create_task(ask(server)) for _ in range(2)]
        await until(lambda: server.num_open_streams == 2)
        assert [text for text, _ in await asyncio.gather(*asked)] == ["Yes.", "Yes."]
        assert asyncio.get_running_loop().time() - start > 0.058


async def test_who_leaves_is_counted_waiting_or_not() -> None:
    async with ScriptedModelServer(ANSWER, latency=ServerLatency(first_token_s=5, max_streams=1)) as server:
        asked = [asyncio.create_task(ask(server)) for _ in range(2)]
        await until(lambda: server.num_open_streams == 2)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: server.num_open_streams == 0)
        assert (server.num_cancelled, server.num_generated_tokens) == (2, 0)


async def test_a_status_with_retry_after_for_the_first_requests(session: aiohttp.ClientSession) -> None:
    faults = ServerFaults(status=429, retry_after_s=0.5, num_requests=1)
    async with ScriptedModelServer(ANSWER, faults=faults) as server:
        async with session.post(f"{server.url}/chat/completions", json={"messages": MESSAGES}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "0.5")
        assert (await ask(server))[0] == ANSWER
        server.faults = ServerFaults(status=503)
        with pytest.raises(TargetError, match="503: scripted failure"):
            await ask(server)


async def test_a_dropped_connection_leaves_the_frames_before_it() -> None:
    async with ScriptedModelServer(ANSWER, faults=ServerFaults(drop_after=2)) as server:
        with pytest.raises(TargetError) as caught:
            await ask(server)
    assert caught.value.partial_text == "The cat"
    assert (server.num_open_streams, server.num_generated_tokens) == (0, 2)


async def test_a_malformed_frame() -> None:
    async with ScriptedModelServer(ANSWER, faults=ServerFaults(malformed_after=1)) as server:
        with pytest.raises(TargetError, match="not valid JSON") as caught:
            await ask(server)
    assert caught.value.partial_text == "The"


async def test_a_stall_lasts_until_the_client_leaves() -> None:
    async with ScriptedModelServer(ANSWER, faults=ServerFaults(stall_after=1)) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ask(server)
        await until(lambda: server.num_cancelled == 1)
        assert server.num_generated_tokens == 1


async def test_the_server_ends_while_an_answer_stalls() -> None:
    async with ScriptedModelServer(ANSWER, faults=ServerFaults(stall_after=0)) as server:
        asked = asyncio.create_task(ask(server))
        await until(lambda: server.num_open_streams == 1)
    with pytest.raises(TargetError):
        await asked


async def test_missing_paths(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(ANSWER, faults=ServerFaults(missing=frozenset({"/tokenize"}))) as server:
        assert (await post(session, server, "/tokenize", prompt=""))["status"] == 404
        assert (await ask(server))[0] == ANSWER


async def test_a_path_that_gets_lost_and_comes_back_while_a_stream_runs(session: aiohttp.ClientSession) -> None:
    async with ScriptedModelServer(ANSWER, latency=ServerLatency(token_s=0.005)) as server:
        asked = asyncio.create_task(ask(server))
        await until(lambda: server.num_generated_tokens > 0)
        statuses = [(await post(session, server, "/v1/completions", prompt="", max_tokens=1))["status"]]
        for missing in (frozenset({"/v1/completions"}), frozenset[str]()):
            server.faults = ServerFaults(missing=missing)
            statuses.append((await post(session, server, "/v1/completions", prompt="", max_tokens=1))["status"])
        assert (await asked)[0] == ANSWER
    assert statuses == [200, 404, 200]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 0}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [[999999]]}),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    ],
)
async def test_what_is_no_request_gets_a_400(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    async with ScriptedModelServer(ANSWER) as server:
        assert (await post(session, server, path, **body))["status"] == 400
        with pytest.raises(InvalidRequestError):
            await ask(server, extra={"messages": []})


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9, 1.0])
def test_a_draft_disagrees_as_often_as_it_is_told_to(agreement: float) -> None:
    text = (ANSWER + "\n  - other ~ things_x; a.b\n") * 100
    pieces, draft = split_into_pieces(text), split_into_pieces(make_disagreeing_draft(text, agreement, seed=1))
    assert len(pieces) == len(draft)
    equal = sum(a == b for a, b in zip(pieces, draft, strict=True)) / len(pieces)
    assert equal == pytest.approx(agreement, abs=0.02)
    assert make_disagreeing_draft(text, agreement, seed=1) == "".join(draft)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServerLatency(token_s=-1),
        lambda: ServerLatency(prefill_tokens_per_s=0),
        lambda: ServerLatency(max_streams=0),
        lambda: ServerLatency(round_trip_s=-1),
        lambda: ScriptedModelServer(ANSWER, context_length=0),
        lambda: ScriptedModelServer(ANSWER, tokens_per_frame=0),
        lambda: ServerFaults(status=200),
        lambda: ServerFaults(drop_after=-1),
        lambda: make_disagreeing_draft("a", 1.5, 0),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="it must be"):
        make()
