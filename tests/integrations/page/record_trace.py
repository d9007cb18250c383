"""Records what the built-in pair does with one prompt, and the target alone, for the page's tests and screenshots.

    python tests/integrations/page/record_trace.py        # writes trace.json beside it (pip install '.[onnx]')

Each of `tokens` and `plain` is a list of chunks' `llm_spec` parts in order, text deltas with their `text`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Final

from llm_spec import Round, SpeculativeDecoder, SpeculativeFinish, TextDelta

PROMPT: Final = '''import heapq

class PriorityQueue:
    """Smallest item first."""

    def __init__(self, items=()):
        self._items = list(items)
        heapq.heapify(self._items)

    def push(self, item):
'''
_KEYS: Final = (
    *("strategy", "guarantee", "same_text", "seed", "draft_tokens", "accepted_tokens", "acceptance_rate"),
    *("speedup", "speedup_basis", "metrics", "timings", "cost", "fallbacks", "retries"),
)


async def _record(decoder: SpeculativeDecoder, settings: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    began = time.perf_counter()
    async with decoder.stream(PROMPT, rounds=True, **settings) as events:
        async for event in events:
            t = round(time.perf_counter() - began, 6)
            if isinstance(event, TextDelta):
                parts.append({"text": event.text, "origin": event.origin, "t": t})
            elif isinstance(event, Round):
                parts.append({"round": dataclasses.asdict(event) | {"t": t}})
            elif isinstance(event, SpeculativeFinish) and event.result is not None:
                told = event.result.to_dict()
                num_tokens = told["usage"]["target"]["output_tokens"]
                parts.append({"finish_reason": told["finish_reason"], "num_tokens": num_tokens})
                parts.append({"result": {key: told[key] for key in _KEYS}})
    return parts


async def main(settings: dict[str, Any]) -> None:
    trace: dict[str, Any] = {"prompt": PROMPT, "settings": settings}
    async with (
        SpeculativeDecoder("lookup+builtin:draft", "builtin:target") as decoder,
        SpeculativeDecoder(None, "builtin:target") as plain,
    ):
        for _ in range(3):  # the first request finds cold caches; keep the last
            trace["tokens"] = await _record(decoder, settings)
            trace["plain"] = await _record(plain, settings)
    (Path(__file__).parent / "trace.json").write_text(json.dumps(trace, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    asyncio.run(main({"max_tokens": 160, "temperature": 0.5, "seed": 1}))
