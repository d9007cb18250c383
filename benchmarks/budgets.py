"""What a key's budget lets through when many ask at once, beside what it should.

    python benchmarks/budgets.py [--requests 200] [--budget 10000] [--workers 1 2]

`llm-spec serve` in processes of its own, in front of an upstream that writes 900 words, one every 30 ms, and counts
what it writes. All requests are sent at once, with `max_tokens` and without. At least 95 % of a budget should be used,
and more than it by a slice (256 tokens) for each request under way at most; at least 16 should be answered at once.
Limits that are not kept are named in the last line, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from llm_spec.decoder.budget import RESERVED_OUTPUT_TOKENS
from llm_spec.testing.server import ScriptedModelServer, ServerLatency

TEXT: Final = " ".join(f"word{i}" for i in range(900))
PROMPT: Final = "one two three"
KEY: Final = "secret-of-poor"
MIN_SHARE: Final = 0.95
MIN_AT_ONCE: Final = 16


@dataclass(frozen=True)
class Outcome:
    """What came of all requests; tokens are those that the upstream wrote, and the prompts that it was sent."""

    statuses: Mapping[int, int]
    num_at_once: int
    num_tokens: int

    def failures(self, budget: int) -> list[str]:
        """Which limits were not kept."""
        over = self.num_tokens - budget
        kept = {
            f"{self.num_tokens / budget:.0%} of the budget is used": self.num_tokens >= MIN_SHARE * budget,
            f"{over} tokens too many": over <= self.num_at_once * RESERVED_OUTPUT_TOKENS,
            f"{self.num_at_once} are answered at once": self.num_at_once >= MIN_AT_ONCE,
        }
        return [what for what, is_kept in kept.items() if not is_kept]


@asynccontextmanager
async def serve_budgeted(upstream: str, budget: int, workers: int) -> AsyncGenerator[str]:
    """The server's address."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "llm-spec.toml"
        config.write_text(
            f'[server]\nworkers = {workers}\n[models.fast]\ntarget = "vllm:tiny@{upstream}"\n'
            f'[keys.poor]\nkey = "{KEY}"\nmax_tokens = {budget}\n'
        )
        command = [str(Path(sys.executable).with_name("llm-spec")), "serve", "--config", str(config), "--port", "0"]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            line = b"" if process.stdout is None else await process.stdout.readline()
            found = re.search(r"http://[\d.]+:\d+", line.decode())
            if found is None:
                raise SystemExit(f"no server: {line!r}")
            yield found[0]
        finally:
            process.terminate()
            await process.wait()


async def send_all_at_once(url: str, number: int, upstream: ScriptedModelServer, fields: Mapping[str, Any]) -> Outcome:
    """Send all requests, each by a connection of its own, and read what comes."""
    body = {"model": "fast", "stream": True, "messages": [{"role": "user", "content": PROMPT}], **fields}
    most = 0

    async def watch_upstream() -> None:
        nonlocal most
        while True:
            most = max(most, upstream.num_open_streams)
            await asyncio.sleep(0.01)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), headers={"x-api-key": KEY}
    ) as session:

        async def send_one() -> int:
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                await response.read()
                return response.status

        watching = asyncio.create_task(watch_upstream())
        statuses = await asyncio.gather(*(send_one() for _ in range(number)))
        watching.cancel()
    num_read = len(upstream.requests) * len(PROMPT.split())
    return Outcome(Counter(statuses), most, upstream.num_generated_tokens + num_read)


async def measure(number: int, budget: int, workers: int, fields: Mapping[str, Any]) -> Outcome:
    """One case, with an upstream and a server of its own."""
    async with (
        ScriptedModelServer(TEXT, latency=ServerLatency(first_token_s=1.0, token_s=0.03)) as upstream,
        serve_budgeted(upstream.url, budget, workers) as url,
        aiohttp.ClientSession(headers={"x-api-key": KEY}, connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        for _ in range(20 * workers):  # until all workers have come up, most likely
            async with session.get(f"{url}/v1/models") as response:
                await response.read()
            await asyncio.sleep(0.1 if workers > 1 else 0.0)
        return await send_all_at_once(url, number, upstream, fields)


def main() -> int:
    """Measure every case, and say which limits were not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--budget", type=int, default=10_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # its clients leave
    print(f"{args.requests} requests at once, a budget of {args.budget} tokens")
    print(f"{'workers':>8}{'max_tokens':>12}{'answered':>10}{'refused':>9}{'at once':>9}{'used':>8}{'':>8}")
    failures: list[str] = []
    for workers in args.workers:
        for fields in ({"max_tokens": 800}, {}):
            outcome = asyncio.run(measure(args.requests, args.budget, workers, fields))
            answered, refused = outcome.statuses.get(200, 0), outcome.statuses.get(429, 0)
            share = f"{outcome.num_tokens / args.budget:.1%}"
            print(
                f"{workers:>8}{fields.get('max_tokens', 'none'):>12}{answered:>10}{refused:>9}{outcome.num_at_once:>9}"
                f"{outcome.num_tokens:>8}{share:>8}",
                flush=True,
            )
            failures += [f"{workers} workers, {fields}: {what}" for what in outcome.failures(args.budget)]
    print("not kept: " + "; ".join(failures) if failures else "all limits are kept")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
