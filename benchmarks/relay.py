"""What relaying one chunk of a served answer costs this process, in microseconds of CPU.

    python benchmarks/relay.py [--chunks 20000]

A server in a process of its own sends chunks as fast as they are read, fifty in a block; the provider alone and a
decoder around it read them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.queues import Queue

from aiohttp import web
from llm_spec_http import HttpProvider

from llm_spec import ChatRequest, SpeculativeDecoder

BLOCK = 50


def frame(delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


def serve(num_chunks: int, ports: Queue[int]) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        block = frame({"content": "hello "}, None) * BLOCK
        for _ in range(num_chunks // BLOCK):
            await response.write(block)
        await response.write(frame({}, "stop"))
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.put(runner.addresses[0][1])
        await asyncio.sleep(120)  # the parent ends it sooner

    asyncio.run(run())


async def measure(port: int) -> None:
    provider = HttpProvider("any", base_url=f"http://127.0.0.1:{port}/v1")
    for name, reader in (("provider", provider), ("decoder around it", SpeculativeDecoder(None, provider))):
        started, num_events = time.process_time(), 0
        async with reader.stream(ChatRequest.create("q")) as events:
            async for _ in events:
                num_events += 1
        spent = time.process_time() - started
        print(f"{name:<18} {num_events} events, {spent / num_events * 1e6:.1f} us of CPU each")
    await provider.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=20_000)
    ports: Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(parser.parse_args().chunks, ports), daemon=True)
    server.start()
    try:
        asyncio.run(measure(ports.get(timeout=30)))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
