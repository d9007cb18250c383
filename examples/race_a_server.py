"""A server with a slow model, raced: several streams of the same target begin where a draft says it will arrive.

The server here is a simulated one on 127.0.0.1 (450 ms to the first token, 60 tokens/s); with a real one, write
`target = "vllm:model@http://host:8000/v1"`.

Needs nothing but llm-spec itself.
"""

import asyncio
from dataclasses import replace

from llm_spec_http import DIALECTS, HttpProvider

from llm_spec import ReferenceDraft, SpeculativeConfig, SpeculativeDecoder
from llm_spec.testing.server import ScriptedModelServer, ServerLatency, make_disagreeing_draft

ANSWER = "\n".join(f"Step {n}: take the {n} blue marbles out of box {n * 7} and count them again." for n in range(1, 9))


async def main() -> None:
    async with ScriptedModelServer(ANSWER, latency=ServerLatency(first_token_s=0.45, token_s=1 / 60)) as server:
        target = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"])
        draft = ReferenceDraft(make_disagreeing_draft(ANSWER, 0.99, seed=1))  # yesterday's answer: nearly the same
        config = SpeculativeConfig(strategy="race", max_concurrent_streams=8)
        decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
        await decoder.discover()  # until the server is known, answers are plain
        # through the same decoder, which then knows how long the server takes alone
        plain = await decoder.with_config(replace(config, strategy="plain")).decode("How?", temperature=0)
        raced = await decoder.decode("How?", temperature=0)
        await target.aclose()
    assert raced.content == plain.content
    print(raced.summary())
    clock = plain.timings.total_s / raced.timings.total_s
    print(f"the same text; alone {plain.timings.total_s:.2f} s, so {clock:.2f}x by the clock")
    print(f"for it, {raced.usage and raced.usage.cancelled_output_tokens} tokens were written in vain")


asyncio.run(main())
