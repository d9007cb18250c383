"""How long until the first token of a conversation's next turn?

    python benchmarks/next_turn.py gguf:/path/model.gguf [--words 800] [--repeat 5]

A model in this process goes on with the cache of an earlier answer. `first turn` is a question about a text of so many
words, `next turn` another one after the answer, and `other text` as long a conversation that it has not read. `llm-spec
bench` has no such conversation: there all contenders share the cache. Seconds are medians by this program's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator

import numpy as np

from llm_spec import ChatMessage, ChatRequest, LlmProvider, TextDelta, open_provider

WORDS = ("the", "cat", "dog", "house", "tree", "runs", "sees", "finds", "old", "new", "blue", "small", "and", "near")


def make_texts(num_words: int) -> Iterator[str]:
    """Different texts of so many words."""
    for seed in itertools.count():
        yield " ".join(np.random.default_rng(seed).choice(WORDS, num_words))


async def time_first_token(target: LlmProvider, messages: list[ChatMessage]) -> tuple[float, str]:
    """Seconds until it comes, and the text of the answer."""
    request = ChatRequest.create(messages, temperature=0, max_tokens=16)
    started, first_s, text = time.perf_counter(), None, ""
    async with target.stream(request) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                first_s = first_s or time.perf_counter() - started
                text += event.text
    return first_s or time.perf_counter() - started, text


async def time_turns(target: LlmProvider, texts: Iterator[str]) -> dict[str, float]:
    """The seconds of the first turn, the next one, and one as long of another conversation."""
    said = [ChatMessage("user", f"What is this about? {next(texts)}")]
    first_s, answer = await time_first_token(target, said)
    more = [ChatMessage("assistant", answer), ChatMessage("user", "And why?")]
    next_s, _ = await time_first_token(target, [*said, *more])
    other = [ChatMessage("user", f"What is this about? {next(texts)}"), *more]
    other_s, _ = await time_first_token(target, other)
    return {"first turn": first_s, "next turn": next_s, "other text": other_s}


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--words", type=int, default=800)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    provider = open_provider(arguments.model)
    texts = make_texts(arguments.words)
    await time_turns(provider, texts)  # what is slow once
    times = [await time_turns(provider, texts) for _ in range(arguments.repeat)]
    await provider.aclose()
    for name in times[0]:
        print(f"{name:12}{statistics.median(one[name] for one in times):8.3f} s")


if __name__ == "__main__":
    asyncio.run(main())
