"""A server that plays scripts in the wire of `llm-spec serve`: one script a model id, recorded or made up.

python tests/integrations/page/scripted_server.py     # serves the page with all scripts, to look at it
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final, TypeAlias

from aiohttp import web

from llm_spec.server.page import build_page

__all__ = ["HOSTILE_TEXT", "RACE_STREAMS", "RECORDING", "ScriptedServer", "parts_of", "serve_scripts"]

RECORDING: Final[dict[str, Any]] = json.loads(
    (files("llm_spec.server.page") / "recording.json").read_text(encoding="utf-8")
)
POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
HOSTILE_TEXT: Final = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> &amp; <b>b</b>"
)
ORIGINS: Final = ("accepted", "correction", "bonus", "plain")  # as the recording counts them
COUNTS: Final = ("index", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")  # of a recorded round
RACE_STREAMS: Final = (  # begins_at, started_s, ended_s, outcome, num_tokens
    (0, 0.00, 0.95, "emitted", 40),
    (40, 0.12, 1.30, "emitted", 44),
    (84, 0.20, 0.55, "cancelled", 9),
    (90, 0.30, 1.10, "cancelled", 31),
    (84, 0.60, 1.90, "emitted", 60),
    (144, 1.00, 2.10, "emitted", 48),
)

Part: TypeAlias = dict[str, Any]  # of a script: what one chunk tells
Script: TypeAlias = Callable[["Asked"], AsyncIterator[Part]]


@dataclass
class Asked:
    """One request, as the server got it."""

    body: dict[str, Any]
    headers: dict[str, str]
    is_open: bool = True  # until the answer ended or the reader left

    @property
    def strategy(self) -> str:
        return self.headers.get("x-llm-spec-strategy", "auto")


@dataclass
class ScriptedServer:
    """What the tests see of the server."""

    url: str
    asked: list[Asked] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    api_key: str | None = None
    budget: dict[str, Any] = field(default_factory=dict)  # what /v1/budget tells of the key
    speed: float = 50.0  # recorded seconds a real one
    scripts: dict[str, Script] = field(default_factory=dict)


def result(**told: Any) -> Part:
    """A whole result; `told` replaces what it tells."""
    plain: Part = {"strategy": "tokens", "guarantee": "exact", "same_text": True, "seed": None, "draft_tokens": 0}
    plain |= {"accepted_tokens": 0, "acceptance_rate": None, "speedup": None, "speedup_range": None}
    plain |= {"speedup_basis": None}
    plain |= {"metrics": {"num_rounds": 0, "mean_acceptance_length": None}, "fallbacks": [], "retries": []}
    plain |= {
        "timings": {"total_s": 1.0, "first_text_s": 0.1, "draft_s": 0, "verify_s": 0, "other_s": 1.0, "plain_s": None}
    }
    plain |= {"cost": {"target": None, "draft": None, "plain": None, "wasted": None, "saving": None}}
    return {"result": plain | told}


def started(strategy: str, guarantee: str = "exact") -> Part:
    about = {"strategy": strategy, "guarantee": guarantee, "target": "scripted:target", "draft": "scripted:draft"}
    return {"started": about}


def parts_of(lane: dict[str, Any]) -> list[Part]:
    """A recorded lane, as tools/record_race.py writes it."""
    parts: list[Part] = []
    for t_ms, *told in lane["events"]:
        if isinstance(told[0], str):
            parts.append({"text": told[0], "origin": ORIGINS[told[1]], "t": t_ms / 1000})
        else:
            counts = dict(
                zip(("index", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"), told, strict=False)
            )
            parts.append({"round": counts | {"draft_s": told[4] / 1000, "verify_s": told[5] / 1000, "t": t_ms / 1000}})
    parts.append({"finish_reason": lane["finish_reason"], "num_tokens": lane["usage"]["completion_tokens"]})
    return [*parts, result(**lane["result"])]


async def recorded(asked: Asked, server: ScriptedServer) -> AsyncIterator[Part]:
    """The built-in pair, at the recording's pace."""
    is_plain = asked.strategy == "plain"
    yield started("plain" if is_plain else "tokens")
    now = 0.0
    for part in parts_of(RECORDING["lanes"][is_plain]):
        t = part.get("t") or part.get("round", {}).get("t") or now
        await asyncio.sleep(max(0.0, t - now) / server.speed)
        now = t
        yield part


async def measured(asked: Asked) -> AsyncIterator[Part]:
    """A request that is plain to measure the target alone; the next one is not."""
    del asked
    yield started("plain")
    yield {"text": "One two three.", "origin": "plain", "t": 1.0}
    yield {"finish_reason": "stop", "num_tokens": 4}
    reason = "this answer measures the target without a draft"
    yield result(strategy="plain", plain_reason="baseline", plain_text=reason)


async def alone(asked: Asked) -> AsyncIterator[Part]:
    """A model without a draft."""
    del asked
    yield started("plain")
    yield {"text": "One two three.", "origin": "plain", "t": 1.0}
    yield {"finish_reason": "stop", "num_tokens": 4}
    yield result(strategy="plain", plain_reason="no_draft", plain_text="there is no draft")


async def behind(asked: Asked) -> AsyncIterator[Part]:
    """A draft that costs more than it saves, and says by how much."""
    is_plain = asked.strategy == "plain"
    yield started("plain" if is_plain else "tokens")
    total_s = 1.0 if is_plain else 1.5
    yield {"text": "One two three.", "origin": "plain" if is_plain else "accepted", "t": total_s}
    yield {"finish_reason": "stop", "num_tokens": 4}
    told = {} if is_plain else {"speedup": 0.8, "speedup_range": [0.7, 0.9], "seed": 41}
    told |= {} if is_plain else {"speedup_basis": "measured on 7 of its own tokens"}
    yield result(timings={"total_s": total_s, "first_text_s": total_s}, **told)


async def uneven(asked: Asked, server: ScriptedServer) -> AsyncIterator[Part]:
    """The target alone takes 2 s, 1 s and 1.5 s, the draft's side 1 s."""
    is_plain = asked.strategy == "plain"
    num_before = sum(other.strategy == asked.strategy for other in server.asked) - 1
    total_s = (2.0, 1.0, 1.5)[num_before % 3] if is_plain else 1.0
    yield started("plain" if is_plain else "tokens")
    yield {"text": "Text.", "origin": "plain", "t": total_s}
    yield {"finish_reason": "stop", "num_tokens": 2}
    yield result(timings={"total_s": total_s, "first_text_s": total_s})


async def echo(asked: Asked) -> AsyncIterator[Part]:
    """Says what it was sent; without rounds."""
    yield started("plain" if asked.strategy == "plain" else "tokens")
    said = " | ".join(f"{message['role']}: {message['content']}" for message in asked.body["messages"])
    yield {"text": f"[{said}]", "origin": "accepted", "t": 1.0}
    yield {"finish_reason": "stop", "num_tokens": 2}
    yield result(seed=7)


async def race(asked: Asked) -> AsyncIterator[Part]:
    """Six streams of a remote target, up to four at once; plain in other words."""
    if asked.strategy == "plain":
        yield started("plain")
        yield {"text": "One two three, otherwise.", "origin": "plain", "t": 4.2}
        yield result(strategy="plain", timings={"total_s": 4.2, "first_text_s": 0.3})
        return
    yield started("race", "exact-text")
    for index, (begins_at, started_s, ended_s, outcome, num_tokens) in enumerate(RACE_STREAMS):
        if outcome == "emitted":
            yield {"text": "One two three. ", "origin": "accepted", "t": ended_s}
        told = {"begins_at": begins_at, "started_s": started_s, "ended_s": ended_s}
        yield {"upstream": {"index": index, "outcome": outcome, "num_tokens": num_tokens} | told}
    yield {"fallback": {"reason": "draft: HTTP 503, <b>busy</b>", "t": 1.95}}
    yield {"retry": {"reason": "target: connection lost", "wait_s": 0.05, "is_continued": True, "t": 2.0}}
    yield {"finish_reason": "stop", "num_tokens": 192}
    cost = {"target": 0.00123, "draft": 0.00004, "plain": 0.0009, "wasted": 0.00037, "saving": -0.00037}
    timings = {"total_s": 2.1, "first_text_s": 0.25}
    rates = {"draft_tokens": 150, "accepted_tokens": 120, "acceptance_rate": 0.8}
    rates |= {"speedup": 2.1, "speedup_range": [1.9, 2.4]}
    basis = "the plain answers of this server so far"
    yield result(
        strategy="race",
        guarantee="exact-text",
        same_text=False,
        cost=cost,
        timings=timings,
        speedup_basis=basis,
        **rates,
    )


async def slow(asked: Asked) -> AsyncIterator[Part]:
    """A token every 50 ms, without end."""
    yield started("tokens")
    index = 0
    while asked.is_open:
        await asyncio.sleep(0.05)
        yield {"text": f"word{index} ", "origin": "accepted", "t": 0.05 * index}
        index += 1


async def broken(asked: Asked) -> AsyncIterator[Part]:
    """The target fails midway."""
    del asked
    yield started("tokens")
    yield {"text": "Half an ", "origin": "accepted", "t": 0.1}
    yield {"error": {"message": "target scripted:target: out of <memory>", "type": "server_error", "code": None}}


async def cut(asked: Asked) -> AsyncIterator[Part]:
    """The connection is closed without an end."""
    del asked
    yield started("tokens")
    yield {"text": "Half an ", "origin": "accepted", "t": 0.1}
    yield {"cut": True}


async def torn(asked: Asked) -> AsyncIterator[Part]:
    """The connection breaks."""
    del asked
    yield started("tokens")
    yield {"text": "Half an ", "origin": "accepted", "t": 0.1}
    await asyncio.sleep(0.1)
    yield {"torn": True}


async def hostile(asked: Asked) -> AsyncIterator[Part]:
    """A model that writes markup, everywhere a server can carry its words."""
    del asked
    yield started("tokens", HOSTILE_TEXT)
    yield {"reasoning": HOSTILE_TEXT}
    yield {"text": HOSTILE_TEXT, "origin": "correction", "t": 0.1}
    yield {"text": HOSTILE_TEXT, "origin": HOSTILE_TEXT, "t": 0.1}
    yield {"fallback": {"reason": HOSTILE_TEXT, "t": 0.1}}
    yield {"finish_reason": "stop", "num_tokens": 2}
    told = {"speedup": 2.0, "speedup_range": [1.5, 2.5], "speedup_basis": HOSTILE_TEXT}
    yield result(strategy=HOSTILE_TEXT, guarantee=HOSTILE_TEXT, **told)


async def long(asked: Asked) -> AsyncIterator[Part]:
    """5,000 tokens in rounds of five, as fast as the socket takes them; plain ends in another word."""
    yield started("tokens")
    for index in range(1000):
        t = 0.004 * (index + 1)
        if index % 10 == 0:
            await asyncio.sleep(0.01)
        for word in ("alpha", "beta", "gamma", "delta"):
            yield {"text": f"{word} ", "origin": "accepted", "t": t}
        yield {"text": "omega\n" if index % 4 == 0 else "omega ", "origin": "correction", "t": t}
        counts = {"num_draft_tokens": 6, "num_accepted_tokens": 4, "num_emitted_tokens": 5}
        yield {"round": counts | {"index": index, "draft_s": 0.001, "verify_s": 0.003, "t": t}}
    if asked.strategy == "plain":
        yield {"text": "otherwise", "origin": "plain", "t": 4.0}
    yield {"finish_reason": "length", "num_tokens": 5000}
    yield result(draft_tokens=6000, accepted_tokens=4000, acceptance_rate=2 / 3)


async def lines(asked: Asked) -> AsyncIterator[Part]:
    """One answer in odd but legal events: comments, two data lines, a line end and a character cut in two."""
    del asked
    yield {"raw": b": keep-alive\n\n"}
    yield started("tokens")
    choices = json.dumps([{"delta": {"content": "caf\u00e9 \u2192 \U0001f40d"}}], ensure_ascii=False).encode()
    half = choices.index("\u00e9".encode()) + 1
    yield {"raw": b'event: message\r\nid: 1\r\ndata:{"choices":\r'}
    for piece in (b"\ndata: " + choices[:half], choices[half:] + b"}\r", b"\n\r\n: keep-alive\n\n"):
        await asyncio.sleep(0.05)
        yield {"raw": piece}
    yield result()


def to_chunk(part: Part) -> dict[str, Any]:
    """A part of a script as a chunk of the wire."""
    envelope: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "scripted",
    }
    choice: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": None}
    if "started" in part:
        choice["delta"] = {"role": "assistant", "content": ""}
        return envelope | {"choices": [choice], "llm_spec": part}
    if "text" in part:
        choice["delta"] = {"content": part["text"]}
        return envelope | {"choices": [choice], "llm_spec": {"origin": part["origin"], "t": part["t"]}}
    if "reasoning" in part:
        choice["delta"] = {"reasoning_content": part["reasoning"]}
        return envelope | {"choices": [choice], "llm_spec": {}}
    if "finish_reason" in part:
        return envelope | {"choices": [choice | {"finish_reason": part["finish_reason"]}]}
    return envelope | {"choices": [], "llm_spec": part}


async def play(script: AsyncIterator[Part], request: web.Request, response: web.StreamResponse) -> None:
    """Writes a script's parts; the answer has no end where it says `cut` or `torn`."""
    num_tokens = None
    async for part in script:
        if "raw" in part:
            await response.write(part["raw"])
            continue
        if "torn" in part and request.transport is not None:
            request.transport.abort()
        if "cut" in part or "torn" in part:
            return
        told = {"error": part["error"]} if "error" in part else to_chunk(part)
        num_tokens = part.get("num_tokens", num_tokens)
        if "result" in part and num_tokens is not None:
            told["usage"] = {"prompt_tokens": 9, "completion_tokens": num_tokens, "total_tokens": 9 + num_tokens}
        await response.write(b"data: " + json.dumps(told).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")


def refusal(status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
    told = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": told}, status=status, headers=headers)


REFUSALS: Final[dict[str, Callable[[], web.Response]]] = {  # by model
    "refused": lambda: refusal(429, "Busy, <b>wait</b>", **{"Retry-After": "3"}),
    "no-json": lambda: web.Response(status=502, text="<html>Bad gateway</html>"),
    "bad-request": lambda: refusal(400, "temperature is -1"),
    "forbidden": lambda: refusal(403, "not from this origin", "origin"),
    "spent": lambda: refusal(429, "this key's budget is spent", "insufficient_quota"),
    "held": lambda: refusal(429, "the rest of this key's budget is reserved", "budget_in_use"),
}


def make_app(server: ScriptedServer) -> web.Application:
    async def page(request: web.Request) -> web.Response:
        del request
        body = await asyncio.to_thread(build_page)
        return web.Response(text=body, content_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def models(request: web.Request) -> web.Response:
        del request
        data = [describe(name) for name in (*server.scripts, *REFUSALS)]
        return web.json_response({"object": "list", "data": data})

    async def budget(request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "budget", "tokens": None, "cost": None, **server.budget})

    async def chat(request: web.Request) -> web.StreamResponse:
        asked = Asked(await request.json(), {key.lower(): value for key, value in request.headers.items()})
        server.asked.append(asked)
        model = asked.body["model"]
        if model in REFUSALS:
            return REFUSALS[model]()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await play(server.scripts[model](asked), request, response)
        finally:
            asked.is_open = False
        return response

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        server.paths.append(request.path)
        allowed = server.api_key is None or request.headers.get("Authorization") == f"Bearer {server.api_key}"
        if request.path.startswith("/v1/") and not allowed:
            return refusal(401, "the API key is missing; send it as Authorization: Bearer or x-api-key")
        return await handler(request)

    app = web.Application(middlewares=[check])
    routes = [web.get("/", page), web.get("/v1/models", models), web.get("/v1/budget", budget)]
    app.add_routes([*routes, web.post("/v1/chat/completions", chat)])
    return app


def describe(name: str) -> dict[str, Any]:
    """What the list of models tells of one."""
    about: dict[str, Any]
    pair = {"target": "builtin:target", "draft": "lookup+builtin:draft"}
    about = pair if name == "builtin" else {"target": "scripted:target", "draft": "scripted:draft"}
    strategies = ["auto", "plain", "race" if name == "race" else "tokens"]
    if name == "alone":
        about, strategies = about | {"draft": None}, ["auto", "plain"]
    told = about | {"strategy": "race" if name == "race" else "auto", "strategies": strategies}
    return {"id": name, "object": "model", "created": 0, "owned_by": "llm-spec", "llm_spec": told}


@asynccontextmanager
async def serve_scripts(port: int = 0) -> AsyncIterator[ScriptedServer]:
    """A server on 127.0.0.1, closed on exit."""
    server = ScriptedServer(url="")
    server.scripts = {"builtin": lambda asked: recorded(asked, server), "uneven": lambda asked: uneven(asked, server)}
    server.scripts |= {
        s.__name__: s for s in (race, echo, measured, alone, behind, slow, broken, cut, torn, hostile, long, lines)
    }
    runner = web.AppRunner(make_app(server), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        yield server
    finally:
        await runner.cleanup()


async def main() -> None:
    async with serve_scripts(8765) as server:
        server.speed = 0.1
        print(server.url)  # noqa: T201 - to open it
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
