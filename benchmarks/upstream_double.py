"""A chat server that answers each request with the case whose number its prompt has, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import re
from multiprocessing.connection import Connection
from typing import Any, Final

from aiohttp import web
from upstream_answers import Case, make_case, make_control

PROMPT: Final = re.compile(rb"seed (\d+) (case|base) (\d+)\.")


def find_case(body: bytes) -> Case:
    """The case that a request asks for."""
    found = PROMPT.search(body)
    if found is None:
        raise web.HTTPNotFound(text="no case")
    seed, number = int(found[1]), int(found[3])
    return make_case(seed, number) if found[2] == b"case" else make_control(number)


def run_double(port: Connection) -> None:
    """Serve until the process ends; `GET /asked` tells `[stream, max_tokens]` of each request."""
    asked: dict[str, list[Any]] = {}

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        case, fields = find_case(body), json.loads(body)
        prompt = PROMPT.search(body)
        assert prompt is not None
        limit = fields.get("max_tokens", fields.get("max_completion_tokens"))
        asked[f"{prompt[2].decode()} {int(prompt[3])}"] = [bool(fields.get("stream")), limit]
        kind = "text/event-stream" if case.is_streamed else "application/json"
        return web.Response(body=case.encode(), status=case.base.status, content_type=kind)

    async def tell_asked(_: web.Request) -> web.Response:
        return web.json_response(asked)

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/asked", tell_asked)
        for path in ("chat/completions", "completions", "messages"):
            app.router.add_post(f"/v1/{path}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())
