"""The providers that speak HTTP, against scripted servers of this process: what they send, and what comes of it."""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

from aiohttp import web
from llm_spec_anthropic import AnthropicProvider
from llm_spec_http import DIALECTS, HttpProvider
from llm_spec_openai import OpenAIProvider
from promises.draw import draw_case
from support.llama_wire import LlamaServer
from support.messages_wire import PROSE, serve

from behaviour.fixed import WorkClock, fixed_bytes
from behaviour.plain import decoder_stats_of
from behaviour.reading import read_request, run_steadily
from llm_spec import (
    ChatRequest,
    PromptLookup,
    ReferenceDraft,
    RetryPolicy,
    SpeculativeConfig,
    SpeculativeDecoder,
    Timeouts,
)
from llm_spec.local.lookahead import CostAware, Fixed
from llm_spec.testing.server import ScriptedModelServer, ServerFaults, ServerLatency, make_disagreeing_draft
from llm_spec.testing.simulated import SimulatedDraft

__all__ = ["draw_wires", "record_wire"]

_REQUESTS: Final = 3  # of a case; of some the first is answered plainly, to be compared with
_ANSWER: Final = (
    "Plan for the reader.\n\n```python\ndef f(x):\n    return x  # naïve\n```\n\n日本語 text, and a café at the end: "
) + " ".join(f"word{i}" for i in range(30))
_FRAME_S: Final = 0.002  # before each frame of an answer
_KEY: Final = "sk-any"
# Headers that are not the same everywhere, or not the same twice.
_LEFT_OUT: Final = ("host", "user-agent", "x-stainless", "traceparent")


@dataclass(frozen=True)
class _Wire:
    """A provider: the strategies that are tried with it, how a server is run, and what its requests may ask for."""

    strategies: tuple[str, ...]
    continues: Any = None  # how the scripted server continues a text
    model: str = "scripted"


_ANYWHERE: Final = ("plain", "judge", "regenerate", "auto")
_WIRES: Final[Mapping[str, _Wire]] = {
    "vllm": _Wire((*_ANYWHERE, "race", "race", "probe", "probe", "score", "score"), "fields"),
    "sglang": _Wire((*_ANYWHERE, "race", "race"), "fields"),
    "mistral": _Wire((*_ANYWHERE, "race", "predict"), "repeats"),
    "llamacpp": _Wire((*_ANYWHERE, "race", "probe", "probe")),
    "generic": _Wire(_ANYWHERE),
    "openai": _Wire((*_ANYWHERE, "predict", "predict"), model="gpt-4.1"),
    "anthropic": _Wire((*_ANYWHERE, "race"), model="claude-haiku-5-5"),
}


def draw_wires(num_requests: int) -> list[tuple[str, int]]:
    return [(name, number) for name in _WIRES for number in range(-(-num_requests // _REQUESTS))]


@dataclass
class _Scene:
    """What a case is made of, but for its requests."""

    strategy: str
    draft: str
    agreement: float
    config: dict[str, Any]
    faults: dict[str, Any]
    latency: dict[str, float]
    leave_after: int | None
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def record_wire(name: str, number: int) -> dict[str, Any]:
    """A few requests of one decoder: those sent over the wire, their events and results."""
    rng = random.Random(f"wire {name} {number}")  # noqa: S311 - a reproducible case, no secret
    scene, sent = _draw(rng, name), list[Any]()

    async def play() -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            target = await stack.enter_async_context(_SERVERS.get(name, _scripted)(name, scene))
            decoder = SpeculativeDecoder(target=target, draft=_draft(scene, _answer(name)), config=_config(scene))
            requests = [ChatRequest.create(**options) for options in scene.requests]
            read = [await read_request(decoder, request, leave_after=scene.leave_after) for request in requests]
            await decoder.aclose()
        return {
            "drawn": repr(scene),
            "requests": read,
            "sent": sent,
            "faults": len(scene.faults),
            "stats": decoder_stats_of(decoder.stats),
        }

    with fixed_bytes(f"wire {name} {number}"), WorkClock().replacing(), _noting(sent):
        return run_steadily(play)


@contextmanager
def _noting(sent: list[Any]) -> Iterator[None]:
    """Every server that is made meanwhile notes what it is sent, and does nothing twice at one instant."""
    make = web.Application

    @web.middleware
    async def note(request: web.Request, handler: Callable[..., Any]) -> Any:
        body = await request.text()
        await asyncio.sleep(_moment_s(request.path_qs, body))
        headers = sorted(
            [name.lower(), value] for name, value in request.headers.items() if not name.lower().startswith(_LEFT_OUT)
        )
        sent.append([request.method, request.path_qs, headers, json.loads(body) if body else None])
        return await handler(request)

    def noted(*, middlewares: Any = (), **options: Any) -> web.Application:
        return make(middlewares=[note, *middlewares], **options)

    write = web.StreamResponse.write

    async def write_later(response: web.StreamResponse, data: Any) -> None:
        await asyncio.sleep(_FRAME_S)
        await write(response, data)

    with mock.patch.object(web, "Application", noted), mock.patch.object(web.StreamResponse, "write", write_later):
        yield


def _moment_s(path: str, body: str) -> float:
    """Of requests that come at one instant, in what order the kernel hands them over is not the same each time."""
    said = json.dumps([path, json.loads(body) if body else None], sort_keys=True)
    return 1e-3 + 1e-6 * (zlib.crc32(said.encode()) % 1000)


# ------------------------------------------------------------------------------------------ drawing


def _answer(name: str) -> str:
    return PROSE if name == "anthropic" else _ANSWER


def _draw(rng: random.Random, name: str) -> _Scene:
    drawn = draw_case(rng.randrange(10**6))
    while drawn.is_local:
        drawn = draw_case(rng.randrange(10**6))
    strategy = rng.choice(_WIRES[name].strategies)
    draft = rng.choice(("given", "given", "given", "timed", "timed", "timed", "timed", "lookup", "none"))
    if draft == "none" and strategy not in ("plain", "auto"):
        draft = "timed"
    first_s, token_s = rng.choice(((0.0, 0.0), (0.1, 0.02), (0.4, 0.02)))
    return _Scene(
        strategy=strategy,
        draft=draft,
        agreement=rng.choice((1.0, 0.95, 0.95, 0.5)),
        config={
            "lookahead": rng.choice((None, 1, 4, 9)),
            "baseline_every": drawn.baseline_every,
            "max_total_tokens": drawn.max_total_tokens,
            "max_draft_tokens": drawn.max_draft_tokens,
            "max_concurrent_streams": drawn.max_concurrent_streams,
            "deadline_s": drawn.deadline_s,
        },
        faults=rng.choice(_FAULTS) if name != "llamacpp" and _is_drawn(rng, 0.3) else {},
        latency={"first_token_s": first_s, "token_s": token_s, "round_trip_s": rng.choice((0.0, 0.01))},
        leave_after=4 if _is_drawn(rng, 0.1) else None,
        requests=[_request(rng, drawn, name) for _ in range(_REQUESTS)],
    )


_FAULTS: Final[tuple[dict[str, Any], ...]] = (
    {"num_requests": 1, "status": 500},
    {"num_requests": 1, "status": 429, "retry_after_s": 0.5},
    {"num_requests": 2, "status": 400},
    {"status": 503},
    {"num_requests": 1, "drop_after": 3},
    {"num_requests": 2, "drop_after": 0},
    {"num_requests": 1, "malformed_after": 2},
    {"num_requests": 1, "stall_after": 2},
    {"missing": frozenset({"/tokenize"})},
)
_TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_CALL: Final = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_MESSAGES: Final[tuple[Any, ...]] = (
    "Tell me.",
    "Tell me.",
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me."}],
    [
        {"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "text", "text": "there."}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "content": "nothing", "tool_call_id": "call_1"},
        {"role": "user", "content": "Tell me."},
    ],
)
_ODD: Final[tuple[dict[str, Any], ...]] = (
    {"tools": [_TOOL]},
    {"tools": [_TOOL], "tool_choice": "auto"},
    {"response_format": {"type": "json_object"}},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"logit_bias": {5: 1.0}},
    {"min_p": 0.05},
    {"extra": {"user": "somebody"}},
    {"prediction": _ANSWER[:60]},
)


def _is_drawn(rng: random.Random, share: float) -> bool:
    return rng.random() < share


def _request(rng: random.Random, drawn: Any, name: str) -> dict[str, Any]:
    """The options of a request; of a drawn case those that go with any target."""
    ask, answer = rng.choice(drawn.asks), _answer(name)
    options: dict[str, Any] = {"messages": rng.choice(_MESSAGES), "temperature": 0.0}
    if _is_drawn(rng, 0.2):
        options |= {"temperature": ask.temperature, "top_k": ask.top_k, "seed": ask.seed, "top_p": 0.9}
    if _is_drawn(rng, 0.2):
        options["max_tokens"] = ask.max_tokens or 25
    if _is_drawn(rng, 0.2):
        start = rng.randrange(len(answer) - 6)
        options["stop"] = [answer[start : start + rng.choice((2, 3, 6))]]
    if _is_drawn(rng, 0.2):
        options |= rng.choice(_ODD)
    if _WIRES[name].continues and _is_drawn(rng, 0.1):
        options["prefix"] = answer[:8].rstrip()
    return options


def _draft(scene: _Scene, answer: str) -> Any:
    match scene.draft:
        case "given":
            return ReferenceDraft(make_disagreeing_draft(answer, scene.agreement, 1))
        case "timed":
            return SimulatedDraft(answer, scene.agreement, 1, first_token_s=0.02, token_s=0.002)
        case "lookup":
            return PromptLookup()
        case _:
            return None


def _config(scene: _Scene) -> SpeculativeConfig:
    lookahead = scene.config["lookahead"]
    return SpeculativeConfig(
        strategy=scene.strategy,  # type: ignore[arg-type] - it is one
        retry=RetryPolicy(max_attempts=3, first_wait_s=0.1, max_wait_s=0.2),
        timeouts=Timeouts(first_chunk_s=20.0, between_chunks_s=5.0),
        **scene.config | {"lookahead": CostAware() if lookahead is None else Fixed(lookahead)},
    )


# ------------------------------------------------------------------------------------------ servers and providers


@asynccontextmanager
async def _scripted(name: str, scene: _Scene) -> AsyncGenerator[Any]:
    wire = _WIRES[name]
    server = ScriptedModelServer(
        _ANSWER,
        latency=ServerLatency(**scene.latency),
        faults=ServerFaults(**scene.faults),
        continues_prefix=wire.continues,
    )
    async with server:
        if name == "openai":
            target: Any = OpenAIProvider(wire.model, base_url=server.url, api_key=_KEY)
        else:
            target = HttpProvider(wire.model, base_url=server.url, dialect=DIALECTS[name], api_key=_KEY)
        yield target
        await target.aclose()


@asynccontextmanager
async def _llamacpp(name: str, _: _Scene) -> AsyncGenerator[Any]:
    async with LlamaServer(_ANSWER).serving() as server:
        target = HttpProvider(_WIRES[name].model, base_url=server.url, dialect=DIALECTS[name])
        yield target
        await target.aclose()


@asynccontextmanager
async def _anthropic(name: str, scene: _Scene) -> AsyncGenerator[Any]:
    async with serve() as server:
        server.wait_s, server.pause_s = scene.latency["first_token_s"], scene.latency["token_s"]
        server.status = scene.faults.get("status", 200)
        server.error = {"type": "error", "error": {"type": "overloaded_error", "message": "not now"}}
        server.drop = "drop_after" in scene.faults
        target = AnthropicProvider(_WIRES[name].model, base_url=server.url, api_key=_KEY)
        yield target
        await target.aclose()


_SERVERS: Final[Mapping[str, Callable[..., Any]]] = {"llamacpp": _llamacpp, "anthropic": _anthropic}
