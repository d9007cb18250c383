"""A chat server for agents: it makes the tool calls that a prompt spells out, and refuses what strict servers refuse.

    python upstream.py LOG [RULE...]

Its first line is its port. `LOG` gets the body of each request, one JSON text a line. A prompt with `SCRIPT [[…], …]`
is answered by these calls, one turn after another: `["end of a tool's name", {arguments}]`, several pairs for parallel
calls; then by text. `$ID` in arguments is the last agent's id that a result told. `THINK` in a prompt: each turn begins
with reasoning. `BIG`: the first turn says that it filled the window. `REFUSE 429 code`: the answer is that error.

Rules: `system` (one system message, at the beginning, as Qwen's templates want it), `developer` (no such role),
`alternate` (no two messages of the user, as Mistral's templates want it), `reasoning` (calls come back with their
reasoning, as DeepSeek's API wants it). Results of tools must follow their calls always.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

Json = dict[str, Any]
DONE = "All calls ran. Done: ünïcode ✓"
LOG = Path(sys.argv[1]).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - for the life of the process
RULES = sys.argv[2:]
_SCRIPT = re.compile(r"SCRIPT (\[.*\])", re.DOTALL)
_AGENT_ID = re.compile(r'"agent_id":\s*"([^"]+)"')
_HAS_FILLED: set[str] = set()


def iterate_problems(messages: list[Json]) -> Iterator[str]:
    """What a strict server says of these messages."""
    roles = [message["role"] for message in messages]
    if "system" in RULES and "system" in roles[1:]:
        yield "System message must be at the beginning."
    if "developer" in RULES and "developer" in roles:
        yield "Unexpected message role."
    if "alternate" in RULES and any(a == b == "user" for a, b in itertools.pairwise(roles)):
        yield "Conversation roles must alternate."
    open_calls: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                yield "A result follows no such call."
            open_calls.discard(message["tool_call_id"])
        elif open_calls:
            yield "A call has no result."
        open_calls |= {call["id"] for call in message.get("tool_calls") or ()}
        if "reasoning" in RULES and message.get("tool_calls") and "reasoning_content" not in message:
            yield "The `reasoning_content` must be passed back."


def get_text(message: Json) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def plan_turn(body: Json) -> tuple[str, int, list[tuple[str, str]]]:
    """The prompt, how many turns of calls it has had, and the calls of the next."""
    messages = body["messages"]
    if not body.get("tools"):  # for a title, or a summary
        return "", 0, []
    asked = [i for i, message in enumerate(messages) if message["role"] == "user" and "PROMPT" in get_text(message)]
    if not asked:
        return "", 0, []
    said = get_text(messages[asked[-1]])
    if said.startswith('"PROMPT'):  # opencode quotes it
        said = json.loads(said)
    prompt = said.partition("PROMPT")[2]
    num_turns = sum(bool(message.get("tool_calls")) for message in messages[asked[-1] :])
    found = _SCRIPT.search(prompt)
    turns = json.JSONDecoder().raw_decode(found[1])[0] if found else []
    if num_turns >= len(turns):
        return prompt, num_turns, []
    ids = _AGENT_ID.findall(" ".join(get_text(m) for m in messages if m["role"] == "tool")) or ["none"]
    names = [tool["function"]["name"] for tool in body.get("tools") or ()]
    turn = turns[num_turns]
    pairs = zip(turn[::2], turn[1::2], strict=True)
    calls = [
        (next((name for name in names if name.endswith(end)), f"missing_{end}"), json.dumps(arguments))
        for end, arguments in pairs
    ]
    return prompt, num_turns, [(name, arguments.replace("$ID", ids[-1])) for name, arguments in calls]


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    LOG.write(json.dumps(body) + "\n")
    if problem := next(iterate_problems(body["messages"]), None):
        return web.json_response({"error": {"message": problem, "type": "invalid_request_error"}}, status=400)
    prompt, num_turns, calls = plan_turn(body)
    if refused := re.search(r"REFUSE (\d+) (\w+)", prompt):
        error = {"message": f"refused: {refused[2]}", "type": refused[2], "code": refused[2]}
        return web.json_response({"error": error}, status=int(refused[1]))
    message: Json = {"role": "assistant", "content": "I will run it." if calls else DONE}
    if "THINK" in prompt:
        message["reasoning_content"] = f"Now comes step {num_turns}."
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{len(body['messages'])}_{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    usage = count_tokens(prompt)
    if body.get("stream"):
        return await stream_message(request, message, usage)
    choice = {"index": 0, "message": message, "finish_reason": get_finish_reason(message)}
    return web.json_response({"object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})


def get_finish_reason(message: Json) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def count_tokens(prompt: str) -> Json:
    num_read = 10
    if "BIG" in prompt and prompt not in _HAS_FILLED:
        _HAS_FILLED.add(prompt)
        num_read = 5000
    return {"prompt_tokens": num_read, "completion_tokens": 5, "total_tokens": num_read + 5}


async def stream_message(request: web.Request, message: Json, usage: Json) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    envelope = {"id": "x", "object": "chat.completion.chunk", "model": "m"}
    for delta in iterate_deltas(message):
        choices = [{"index": 0, "delta": delta, "finish_reason": None}]
        await response.write(b"data: " + json.dumps({**envelope, "choices": choices}).encode() + b"\n\n")
    end = [{"index": 0, "delta": {}, "finish_reason": get_finish_reason(message)}]
    for last in ({**envelope, "choices": end}, {**envelope, "choices": [], "usage": usage}):
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def iterate_deltas(message: Json) -> Iterator[Json]:
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        for word in re.findall(r"\S+\s*", message.get(name, "")):
            yield {name: word}
    for index, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        yield {"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]}
        for begin in range(0, len(arguments), 7):
            yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[begin : begin + 7]}}]}


def main() -> None:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", lambda _: web.json_response({"object": "list", "data": [{"id": "m"}]}))
    runner = web.AppRunner(app)

    async def serve() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sys.stdout.write(f"{runner.addresses[0][1]}\n")
        sys.stdout.flush()
        await asyncio.sleep(3600)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
