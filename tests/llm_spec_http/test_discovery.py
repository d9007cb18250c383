"""Discovery: what a server says that it does is tried, once, and what it does instead is found out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeGuard

import aiohttp
import pytest
from aiohttp import web
from llm_spec_http import DIALECTS, HttpProvider
from llm_spec_http.discovery import forget_all_server_findings
from support.wire import served

from llm_spec import (
    ChatRequest,
    InvalidRequestError,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    TargetError,
    TransientError,
)
from llm_spec.contract.endpoint import Feature
from llm_spec.decoder.config import StrategyName
from llm_spec.drafting.provider_draft import ProviderDraft
from llm_spec.testing.server import ScriptedModelServer, ServerFaults, ServerLatency
from llm_spec.testing.simulated import SimulatedDraft

ANSWER = "The cat sat on the mat, all day long."
Json: TypeAlias = dict[str, Any]
Change: TypeAlias = Callable[[str, Json, Any], Any]


class Odd(ScriptedModelServer):
    """A server whose requests and answers go through `on_request(path, body)` and `on_reply(path, body, reply)`."""

    def __init__(self, *, on_request: Change | None = None, on_reply: Change | None = None) -> None:
        super().__init__(ANSWER)
        self.on_request = on_request
        self.on_reply = on_reply

    @web.middleware
    async def _handle_with_latency_and_faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body: Json = await request.json() if request.can_read_body else {}
        if self.on_request is not None:
            try:
                changed = self.on_request(request.path, body, None)
            except InvalidRequestError as error:
                return web.json_response({"error": {"message": str(error)}}, status=400)
            request._read_bytes = json.dumps(changed).encode()
        response = await super()._handle_with_latency_and_faults(request, handler)
        if self.on_reply is not None and isinstance(response, web.Response) and response.body is not None:
            reply = json.loads(response.text or "null")
            return web.json_response(self.on_reply(request.path, body, reply), status=response.status)
        return response


@asynccontextmanager
async def opened(server: ScriptedModelServer, dialect: str = "vllm") -> AsyncGenerator[HttpProvider]:
    provider = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS[dialect])
    try:
        yield provider
    finally:
        await provider.aclose()


async def found(server: ScriptedModelServer) -> tuple[bool, bool]:
    """Whether the server works on tokens, and whether it scores them."""
    async with server, opened(server) as provider:
        with suppress(TransientError):
            await provider.discover("token_scorer")
        can = provider.capabilities
        return can.token_endpoint is not None, can.token_scorer is not None


# ------------------------------------------------------------------------------------------ what works


async def test_a_server_that_works_is_found_to() -> None:
    """By ids and with scores, also where its frames hold several tokens or an answer is one token long."""
    assert await found(ScriptedModelServer(ANSWER)) == (True, True)
    assert await found(ScriptedModelServer(ANSWER, tokens_per_frame=3)) == (True, True)
    assert await found(ScriptedModelServer("Yes")) == (True, True)


async def test_the_test_server_scores() -> None:
    """It gives prompt logprobs, so it is there for tests of `score`."""
    assert await found(ScriptedModelServer(ANSWER)) == (True, True)


@pytest.mark.parametrize("feature", ["token_endpoint", "token_scorer"])
async def test_discovery_happens_once(feature: Feature) -> None:
    """Concurrent first requests share it, later ones know, and it takes a handful of calls."""
    num_calls: list[int] = []
    async with ScriptedModelServer(ANSWER, latency=ServerLatency(round_trip_s=0.002)) as server:
        for num_callers in (1, 8):
            forget_all_server_findings()
            async with opened(server) as provider:
                before = len(server.paths)
                await asyncio.gather(*(provider.discover(feature) for _ in range(num_callers)))
                num_calls.append(len(server.paths) - before)
                await provider.discover(feature)
                assert len(server.paths) - before == num_calls[-1]
    assert 0 < num_calls[1] <= num_calls[0] <= 25


async def test_a_process_remembers_a_server() -> None:
    """What one client has found out, others know: at the same address, with the same model and key."""
    async with ScriptedModelServer(ANSWER) as server:
        async with opened(server) as first:
            await first.discover("token_endpoint")
        num_calls = len(server.paths)
        async with opened(server) as second:
            assert second.capabilities.token_endpoint is not None
            await second.discover("token_endpoint")
            assert len(server.paths) == num_calls
            second.mark_feature_lost("token_endpoint")  # and what one has lost, all have
            async with opened(server) as third:
                assert third.capabilities.token_endpoint is None


async def test_other_servers_are_not_confused_with_it() -> None:
    """Another model, another key, another dialect, or a session that may lead anywhere: each is tried for itself."""
    async with ScriptedModelServer(ANSWER) as server, opened(server) as known, aiohttp.ClientSession() as session:
        await known.discover("token_endpoint")
        others = [
            HttpProvider("other", base_url=server.url, dialect=DIALECTS["vllm"]),
            HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"], api_key="another"),
            HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["llamacpp"]),
            HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"], session=session),
        ]
        for other in others:
            assert other.capabilities.token_endpoint is None
            await other.aclose()


@pytest.mark.parametrize("strategy", ["race", "probe", "score"])
async def test_a_program_waits_for_what_its_strategy_needs(strategy: StrategyName) -> None:
    """Then the first answer is by the strategy; without that it is plain."""
    for waits in (True, False):
        async with Odd() as server, opened(server) as provider:
            config = SpeculativeConfig(strategy=strategy, baseline_every=0)
            async with SpeculativeDecoder(
                target=provider, draft=SimulatedDraft(ANSWER, 1.0, 0), config=config
            ) as decoder:
                if waits:
                    await decoder.discover()
                result = await decoder.decode("q", temperature=0.0)
        assert result.content == ANSWER
        assert result.strategy == (strategy if waits else "plain")
        assert (result.plain_reason == "discovery") == (not waits)


async def test_a_draft_whose_server_refuses_to_tell_ids_asks_for_them_ever_more_rarely(clock: Clock) -> None:
    """Nobody tries what its server can do: the refusals alone are remembered."""
    num_refused = 0

    def refused(_: str, body: Json, __: Any) -> Json:
        nonlocal num_refused
        if "return_token_ids" in body:
            num_refused += 1
            raise InvalidRequestError("Extra inputs are not permitted: body.return_token_ids")
        return body

    server = Odd()
    server.on_request = refused
    async with server, opened(server) as provider:
        draft, pauses, since_s = ProviderDraft(provider), list[float](), clock.now_s
        while len(pauses) < 6:
            before = num_refused
            async with draft.draft(ChatRequest.create("q"), 3) as pieces:
                assert "".join([piece.text async for piece in pieces])
            if num_refused > before:
                pauses.append(clock.now_s - since_s)
                since_s = clock.now_s
            clock.now_s += 10.0
    assert pauses == [0, 60, 120, 240, 480, 960]


async def test_raw_requests_are_no_chat() -> None:
    """A text that is to be gone on from as it is has an endpoint of its own, with ids or without."""
    async with ScriptedModelServer(ANSWER) as server, opened(server) as provider:
        async with ProviderDraft(provider).draft(ChatRequest.create("def f", raw=True), 3) as pieces:
            assert "".join([piece.text async for piece in pieces])
        assert server.paths == ["/v1/completions"]


async def test_concurrent_first_requests_share_it() -> None:
    """Each begins beside it."""
    async with (
        ScriptedModelServer(ANSWER, latency=ServerLatency(round_trip_s=0.002)) as server,
        opened(server) as provider,
    ):
        config = SpeculativeConfig(strategy="race", max_extra_cost=0.0)
        async with SpeculativeDecoder(target=provider, draft=SimulatedDraft(ANSWER, 1.0, 0), config=config) as decoder:
            results = await asyncio.gather(*(decoder.decode("q", temperature=0.0) for _ in range(6)))
        assert [(r.content, r.guarantee) for r in results] == [(ANSWER, "exact")] * 6
        num_chats = server.paths.count("/v1/chat/completions")
    assert num_chats <= 6 + 1


async def test_scores_can_be_discovered_alone() -> None:
    """Whoever needs a scorer asks for that."""
    async with ScriptedModelServer(ANSWER) as server, opened(server) as provider:
        await provider.discover("token_scorer")
        assert provider.capabilities.token_scorer is not None


async def test_a_dialect_without_token_ids_is_not_tried() -> None:
    """No request is made for what nobody knows how to ask."""
    async with ScriptedModelServer(ANSWER) as server, opened(server, "generic") as provider:
        await provider.discover("token_endpoint")
        await provider.discover("token_scorer")
        assert server.paths == []
        assert provider.capabilities.token_endpoint is None


# ------------------------------------------------------------------------------------------ what does not


def without_ids(_: str, body: Json, __: Any) -> Json:
    """The server ignores `return_token_ids`."""
    return {name: value for name, value in body.items() if name != "return_token_ids"}


def without_ids_in_chat(path: str, body: Json, _: Any) -> Json:
    return without_ids(path, body, None) if "messages" in body and path != "/tokenize" else body


def without_ids_in_completions(_: str, body: Json, __: Any) -> Json:
    return without_ids("", body, None) if "prompt" in body else body


def without_batches(path: str, body: Json, _: Any) -> Json:
    """The first of several prompts is answered alone."""
    prompt = body.get("prompt")
    return {**body, "prompt": prompt[:1]} if path.endswith("completions") and is_batch(prompt) else body


def is_batch(prompt: Any) -> TypeGuard[list[Any]]:
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], list)


def the_same_prompt_twice(path: str, body: Json, _: Any) -> Json:
    """As many choices as prompts, all of them for the first."""
    prompt = body.get("prompt")
    if path.endswith("completions") and is_batch(prompt):
        return {**body, "prompt": prompt[:1] * len(prompt)}
    return body


def prompts_as_one(path: str, body: Json, _: Any) -> Json:
    """A server that makes something else of ids in a stream."""
    streamed = path.endswith("completions") and "prompt" in body and body.get("stream")
    return {**body, "prompt": "<|assistant|>The"} if streamed else body


def wrong_ids(_: str, __: Json, reply: Any) -> Any:
    """Ids that are not those of the text."""
    for choice in reply.get("choices", []):
        if "token_ids" in choice:
            choice["token_ids"] = [i + 1 for i in choice["token_ids"]]
    return reply


def shuffled(_: str, __: Json, reply: Any) -> Any:
    """Choices whose index does not say which prompt they are for."""
    for number, choice in enumerate(reversed(reply.get("choices", []))):
        choice["index"] = number
    return reply


def stripped(path: str, _: Json, reply: Any) -> Any:
    """`/detokenize` that loses whitespace at the ends."""
    return {"prompt": reply["prompt"].strip()} if path == "/detokenize" else reply


def ascii_only(path: str, _: Json, reply: Any) -> Any:
    return {"prompt": reply["prompt"].replace("ï", "\ufffd")} if path == "/detokenize" else reply


def another_prompt(path: str, _: Json, reply: Any) -> Any:
    """`/tokenize` that applies no template: its ids are not those that the chat is answered for."""
    if path == "/tokenize" and len(reply.get("tokens", [])) > 2 and "count" in reply:
        return {**reply, "tokens": reply["tokens"][:2]}
    return reply


@pytest.mark.parametrize(
    "fault",
    [
        without_ids,
        without_ids_in_chat,
        without_ids_in_completions,
        without_batches,
        the_same_prompt_twice,
        prompts_as_one,
    ],
)
async def test_fields_that_are_ignored(fault: Change) -> None:
    """A server that does something else without a word does not work on tokens."""
    assert await found(Odd(on_request=fault)) == (False, False)


@pytest.mark.parametrize("fault", [wrong_ids, shuffled, stripped, ascii_only, another_prompt])
async def test_answers_that_are_wrong(fault: Change) -> None:
    """Ids, order or text that are not what the chat gave."""
    assert await found(Odd(on_reply=fault)) == (False, False)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"])
async def test_calls_that_are_missing(path: str) -> None:
    """A 404 is an answer, not an error."""
    assert await found(ScriptedModelServer(ANSWER, faults=ServerFaults(missing=frozenset([path])))) == (False, False)


@pytest.mark.parametrize(
    "faults",
    [ServerFaults(status=500), ServerFaults(status=400), ServerFaults(drop_after=0), ServerFaults(malformed_after=0)],
)
async def test_servers_that_fail(faults: ServerFaults) -> None:
    """They cannot be used; what may pass is raised."""
    assert await found(ScriptedModelServer(ANSWER, faults=faults)) == (False, False)


async def test_a_server_that_cannot_be_reached() -> None:
    """It may be there later."""
    provider = HttpProvider("m", base_url="http://127.0.0.1:9/v1", dialect=DIALECTS["vllm"])
    with pytest.raises(TransientError):
        await provider.discover("token_endpoint")
    assert provider.capabilities.token_endpoint is None
    await provider.aclose()


# ------------------------------------------------------------------------------------------ callers at the same time


class Gate(ScriptedModelServer):
    """It answers once `is_open`; `num_waiting` requests wait for that."""

    def __init__(self) -> None:
        super().__init__(ANSWER)
        self.is_open = asyncio.Event()
        self.num_waiting = 0

    @web.middleware
    async def _handle_with_latency_and_faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.num_waiting += 1
        try:
            await self.is_open.wait()
        finally:
            self.num_waiting -= 1
        return await super()._handle_with_latency_and_faults(request, handler)


async def waiting(server: Gate, number: int) -> None:
    async with asyncio.timeout(10):
        while server.num_waiting != number:  # noqa: ASYNC110 - the server is another party, it sets no event here
            await asyncio.sleep(0.001)


async def test_a_caller_may_leave_it_to_the_others() -> None:
    """One that began it as well as one that only waits; the last finds out."""
    async with Gate() as server, opened(server) as provider:
        callers = [asyncio.create_task(provider.discover("token_endpoint")) for _ in range(3)]
        await waiting(server, 1)
        for caller in callers[:2]:
            caller.cancel()
        await asyncio.wait(callers[:2])
        assert server.num_waiting == 1
        server.is_open.set()
        await callers[2]
        assert provider.capabilities.token_endpoint is not None
        num_calls = len(server.paths)
    assert num_calls == await _num_calls_alone()


async def _num_calls_alone() -> int:
    async with ScriptedModelServer(ANSWER) as server, opened(server) as provider:
        await provider.discover("token_endpoint")
        return len(server.paths)


async def test_clients_of_one_server_share_a_trial() -> None:
    """Decoders of one process that meet a new server at the same time do not each read prompts beside the others."""
    async with Gate() as server, opened(server) as first, opened(server) as second:
        callers = [asyncio.create_task(client.discover("token_endpoint")) for client in (first, second)]
        await waiting(server, 1)
        server.is_open.set()
        await asyncio.gather(*callers)
        assert first.capabilities.token_endpoint is not None
        assert second.capabilities.token_endpoint is not None
        num_calls = len(server.paths)
    assert num_calls == await _num_calls_alone()


async def test_a_trial_goes_on_with_another_client_when_one_is_closed() -> None:
    """What the closed one had begun is tried anew."""
    async with Gate() as server, opened(server) as second:
        async with opened(server) as first:
            callers = [asyncio.create_task(client.discover("token_endpoint")) for client in (first, second)]
            await waiting(server, 1)
        server.is_open.set()
        await asyncio.wait_for(asyncio.gather(*callers), 10)
        assert second.capabilities.token_endpoint is not None


async def test_a_client_that_is_closed_in_its_trial_tells_others_nothing() -> None:
    """Its calls fail since its connections are gone, not since the server cannot."""
    server = Gate()
    async with server:
        async with opened(server) as provider:
            trial = asyncio.create_task(provider.discover("token_endpoint"))
            await waiting(server, 1)
        await asyncio.wait_for(trial, 10)  # its calls end with the client's connections, unanswered
        server.is_open.set()
        async with opened(server) as another:
            await another.discover("token_endpoint")
            assert another.capabilities.token_endpoint is not None


async def test_what_nobody_waits_for_ends() -> None:
    """The last caller that leaves takes its requests with it; the next one begins anew."""
    async with Gate() as server, opened(server) as provider:
        before = asyncio.all_tasks()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.gather(provider.discover("token_endpoint"), provider.discover("token_endpoint"))
        await waiting(server, 0)
        assert {task for task in asyncio.all_tasks() if "discovery" in repr(task)} <= before
        assert provider.capabilities.token_endpoint is None
        server.is_open.set()
        await provider.discover("token_endpoint")
        assert provider.capabilities.token_endpoint is not None


async def test_every_event_loop_tries_for_itself() -> None:
    """None waits for a task of another; what one has found all know."""
    async with Gate() as server, opened(server) as provider:
        here = asyncio.create_task(provider.discover("token_endpoint"))
        await waiting(server, 1)
        there = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(provider.discover("token_endpoint"))))
        await waiting(server, 2)
        server.is_open.set()
        await asyncio.gather(here, there)
        num_calls = len(server.paths)
        await provider.discover("token_endpoint")
        assert len(server.paths) == num_calls


# ------------------------------------------------------------------------------------------ lost and found


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of what is tried again."""
    clock = Clock()
    monkeypatch.setattr("llm_spec_http.discovery.now", clock)
    return clock


async def is_tried(server: ScriptedModelServer, provider: HttpProvider) -> bool:
    before = len(server.paths)
    with suppress(TransientError):
        await provider.discover("token_endpoint")
    return len(server.paths) > before


async def pause_until_tried(
    clock: Clock, server: ScriptedModelServer, provider: HttpProvider, *, step_s: float = 10.0
) -> float:
    """Seconds until the provider tries again, to the nearest step."""
    since_s = clock.now_s
    while not await is_tried(server, provider):
        clock.now_s += step_s
        assert clock.now_s - since_s < 4000
    return clock.now_s - since_s


MISSING = ServerFaults(missing=frozenset(["/v1/completions"]))


async def test_a_server_that_cannot_yet_is_tried_again(clock: Clock) -> None:
    """After a minute, then later and later, up to an hour; once it can it is believed."""
    async with ScriptedModelServer(ANSWER, faults=MISSING) as server, opened(server) as provider:
        assert await is_tried(server, provider)
        pauses = [await pause_until_tried(clock, server, provider) for _ in range(8)]
        assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600]
        server.faults = ServerFaults()
        assert provider.capabilities.token_endpoint is None
        assert await pause_until_tried(clock, server, provider) == 3600
        assert provider.capabilities.token_endpoint is not None
        clock.now_s += 10_000.0
        assert not await is_tried(server, provider)


async def test_a_server_that_still_loads_its_model_is_tried_again_soon(clock: Clock) -> None:
    """A 503 says nothing of what it can do; it is tried after as long as it has failed, and no longer."""
    loading = ServerFaults(status=503)
    async with ScriptedModelServer(ANSWER, faults=loading) as server, opened(server) as provider:
        assert await is_tried(server, provider)
        assert [await pause_until_tried(clock, server, provider, step_s=1.0) for _ in range(4)] == [2, 4, 8, 16]
        server.faults = ServerFaults()
        assert provider.capabilities.token_endpoint is None
        assert await pause_until_tried(clock, server, provider, step_s=1.0) == 32
        assert provider.capabilities.token_endpoint is not None


async def test_what_such_a_server_cannot_is_known_for_longer(clock: Clock) -> None:
    """Once it has answered that it has no such call."""
    loading = ServerFaults(status=503)
    async with ScriptedModelServer(ANSWER, faults=loading) as server, opened(server) as provider:
        assert await is_tried(server, provider)
        server.faults = MISSING
        assert await pause_until_tried(clock, server, provider, step_s=1.0) == 2
        assert await pause_until_tried(clock, server, provider) == 60


@pytest.mark.parametrize("strategy", ["race", "probe", "score", "auto"])
async def test_a_program_that_waits_hears_that_a_server_cannot_answer(strategy: StrategyName) -> None:
    """It is still loading, or nothing is there."""
    config = SpeculativeConfig(strategy=strategy)
    async with ScriptedModelServer(ANSWER, faults=ServerFaults(status=503)) as server, opened(server) as provider:
        with pytest.raises(TransientError, match="503"):
            await SpeculativeDecoder(target=provider, draft=SimulatedDraft(ANSWER, 1.0, 0), config=config).discover()
    forget_all_server_findings()
    async with opened(server) as provider:
        with pytest.raises(TransientError):
            await SpeculativeDecoder(target=provider, draft=SimulatedDraft(ANSWER, 1.0, 0), config=config).discover()


async def mark_feature_lost(server: ScriptedModelServer, provider: HttpProvider) -> None:
    """A call fails because the server does not know it any more; afterwards it does again."""
    tokens = provider.capabilities.token_endpoint
    assert tokens is not None
    server.faults = MISSING
    with pytest.raises(TargetError, match="404"):
        await tokens.sample_next([[5]], Sampling(temperature=0.0))
    server.faults = ServerFaults()
    assert provider.capabilities.token_endpoint is None


async def test_what_was_lost_is_found_again(clock: Clock) -> None:
    """After a minute; later where it is lost again soon, and after a minute again where it had been there for long."""
    async with ScriptedModelServer(ANSWER) as server, opened(server) as provider:
        await provider.discover("token_scorer")
        clock.now_s = 5000.0
        for pause_s, good_s in ((60, 10.0), (120, 200.0), (60, 0.0)):
            await mark_feature_lost(server, provider)
            assert provider.capabilities.token_scorer is None
            assert await pause_until_tried(clock, server, provider) == pause_s
            assert provider.capabilities.token_endpoint is not None
            clock.now_s += good_s
        await provider.discover("token_scorer")
        assert provider.capabilities.token_scorer is not None


async def test_scores_are_lost_and_found_alone(clock: Clock) -> None:
    """Token ids stay."""
    server = Odd()
    async with server, opened(server) as provider:
        await provider.discover("token_scorer")
        scorer = provider.capabilities.token_scorer
        assert scorer is not None
        server.on_reply = ignored
        with pytest.raises(TargetError, match="in an unexpected form"):
            await scorer.score([5, 6], num_rows=1, top=1)
        assert (provider.capabilities.token_scorer, server.on_reply) == (None, ignored)
        assert provider.capabilities.token_endpoint is not None
        server.on_reply = None
        await provider.discover("token_scorer")
        assert provider.capabilities.token_scorer is None
        clock.now_s += 60.0
        await provider.discover("token_scorer")
        assert provider.capabilities.token_scorer is not None


async def test_a_continuation_is_tried_again(clock: Clock) -> None:
    """A server that did not go on from a text may do so after an update; one that fails is tried by the next caller."""
    async with ScriptedModelServer(ANSWER, continues_prefix=None) as server, opened(server) as provider:
        server.faults = ServerFaults(status=503)
        with pytest.raises(TransientError, match="503"):
            await provider.discover("continue_prefix")
        assert provider.capabilities.continue_prefix
        server.faults = ServerFaults()
        await provider.discover("continue_prefix")
        assert not provider.capabilities.continue_prefix
        server.continues_prefix, num_calls = "fields", len(server.paths)
        await provider.discover("continue_prefix")
        assert len(server.paths) == num_calls
        clock.now_s += 60.0
        await provider.discover("continue_prefix")
        assert provider.capabilities.continue_prefix
        assert provider.capabilities.token_endpoint is None


@pytest.mark.parametrize("feature", ["token_endpoint", "token_scorer", "continue_prefix"])
async def test_whoever_calls_may_say_that_something_is_lost(clock: Clock, feature: Feature) -> None:
    """What a refusal meant the provider cannot always tell; the others stay, but for scores, which need token ids."""
    async with ScriptedModelServer(ANSWER, continues_prefix="fields") as server, opened(server) as provider:

        def can() -> dict[Feature, bool]:
            can = provider.capabilities
            return {
                "token_endpoint": can.token_endpoint is not None,
                "token_scorer": can.token_scorer is not None,
                "continue_prefix": can.continue_prefix,
            }

        await provider.discover("token_scorer")
        provider.mark_feature_lost(feature)
        with_it = {"token_endpoint": ["token_scorer"]}.get(feature, [])
        assert can() == {name: name not in (feature, *with_it) for name in can()}
        clock.now_s += 60.0
        for name in can():
            await provider.discover(name)
        assert all(can().values())


async def test_a_vocabulary_is_forgotten_with_it(clock: Clock) -> None:
    """Behind the address there may be another model by then."""
    async with ScriptedModelServer(ANSWER) as server, opened(server) as provider:
        await provider.discover("token_endpoint")
        tokens = provider.capabilities.token_endpoint
        assert tokens is not None
        await tokens.encode("cat")
        await mark_feature_lost(server, provider)
        assert await pause_until_tried(clock, server, provider) == 60
        num_calls = server.paths.count("/tokenize")
        await tokens.encode("cat")
        assert server.paths.count("/tokenize") == num_calls + 1


async def test_a_field_that_is_not_permitted_any_more() -> None:
    """A 400 for a field that the caller knows nothing of is no fault of the request; the capability is lost."""

    def refused(_: str, body: Json, __: Any) -> Json:
        if "return_token_ids" in body:
            raise InvalidRequestError("Extra inputs are not permitted: body.return_token_ids")
        return body

    server = Odd()
    async with server, opened(server) as provider:
        await provider.discover("token_endpoint")
        tokens = provider.capabilities.token_endpoint
        assert tokens is not None
        server.on_request = refused
        with pytest.raises(TargetError, match="Extra inputs are not permitted"):
            await tokens.sample_next([[5]], Sampling(temperature=0.0))
        assert provider.capabilities.token_endpoint is None


# ------------------------------------------------------------------------------------------ scores


def off_by_one(_: str, body: Json, reply: Any) -> Any:
    """Token i scored with row i instead of i - 1, as by llama-cpp-python."""
    if body.get("prompt_logprobs") is not None:
        for choice in reply["choices"]:
            generated = str(next(iter(choice["logprobs"]["top_logprobs"][0])))
            behind = {generated.removeprefix("token_id:"): {"logprob": 0.0}, "1": {"logprob": -9.0}}
            choice["prompt_logprobs"] = [None, *choice["prompt_logprobs"][2:], behind]
    return reply


def ignored(_: str, __: Json, reply: Any) -> Any:
    """As by servers that know the field and do nothing about it."""
    for choice in reply.get("choices", []):
        choice.pop("prompt_logprobs", None)
    return reply


def the_given_alone(_: str, body: Json, reply: Any) -> Any:
    """Only the given tokens' own logprobs, all of them bad: the likeliest are not told."""
    if body.get("prompt_logprobs") is not None:
        for choice in reply["choices"]:
            rows = choice["prompt_logprobs"]
            choice["prompt_logprobs"] = [None] + [{"1": {"logprob": -9.0}} for _ in rows[1:]]
    return reply


def nulls(_: str, body: Json, reply: Any) -> Any:
    """A row for each token, and nothing in it."""
    if body.get("prompt_logprobs") is not None:
        for choice in reply["choices"]:
            choice["prompt_logprobs"] = [None for _ in choice["prompt_logprobs"]]
    return reply


def numbers(_: str, body: Json, reply: Any) -> Any:
    """A number for each token."""
    if body.get("prompt_logprobs") is not None:
        for choice in reply["choices"]:
            choice["prompt_logprobs"] = [0.0 for _ in choice["prompt_logprobs"]]
    return reply


@pytest.mark.parametrize(
    "fault",
    [
        off_by_one,
        ignored,
        the_given_alone,
        nulls,
        numbers,
    ],
)
async def test_scores_that_are_not_those_of_the_positions(fault: Change) -> None:
    """Found out; the rest of the capability stays."""
    assert await found(Odd(on_reply=fault)) == (True, False)


# ------------------------------------------------------------------------------------------ what is no answer at all


@pytest.mark.parametrize(
    "reply",
    [
        {},
        [],
        None,
        "text",
        {"tokens": None},
        {"tokens": 3},
        {"tokens": ["a"], "choices": []},
        {"tokens": [1, 2], "choices": None},
        {"tokens": [1, 2], "choices": [None]},
        {"tokens": [1, 2], "choices": ["x"]},
        {"tokens": [1, 2], "choices": {"a": 1}},
        {"tokens": [1, 2], "choices": [{"index": "x"}]},
        {"tokens": [1, 2], "choices": [{"token_ids": 3, "text": 5, "delta": 7}]},
        {"tokens": [1, 2], "choices": [{"delta": {"content": "x"}, "token_ids": ["a"], "finish_reason": "stop"}]},
        {"tokens": [1, 2], "choices": [{"delta": {"content": 5}, "token_ids": [1], "finish_reason": {}}]},
        {"tokens": [1, 2], "choices": [{"delta": {"content": "x"}, "token_ids": [[1]], "finish_reason": "stop"}]},
    ],
    ids=str,
)
async def test_any_json_at_all(reply: Any) -> None:
    """Discovery never raises, whatever a server answers to every call."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response(reply)
        text = f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async with served("/{path:.*}", answer, shutdown_s=0.05) as root:
        provider = HttpProvider("m", base_url=f"{root}/v1", dialect=DIALECTS["vllm"])
        await provider.discover("token_endpoint")
        await provider.discover("token_scorer")
        assert provider.capabilities.token_endpoint is None
        await provider.aclose()
