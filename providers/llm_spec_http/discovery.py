"""Finding out what a server really does: a field that it ignores silently is as bad as a call that it lacks.

Each check compares two ways to the same greedy tokens. It costs a handful of short requests, once per provider.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final

from llm_spec import ChatRequest, Sampling, StreamEvent, TextDelta
from llm_spec_http.tokens import HttpTokens

__all__ = ["scores_tokens", "works_on_tokens"]

_GREEDY: Final = Sampling(temperature=0.0)
_REQUEST: Final = ChatRequest.create("Count from one to ten.", temperature=0.0, max_tokens=2)
_NUM_PREFIXES: Final = 4  # of a batch: more than one, and not all with the same next token
_WORDS: Final = "return one more word"
_SAMPLE: Final = "def naïve(x):\n    return x + 1  # one more\n"


async def works_on_tokens(tokens: HttpTokens) -> bool:
    """Whether chat, continued ids and batched one-token completions give the same tokens, and text survives ids.

    All at once, so that it takes about as long as a first token does.
    """
    prompt_ids = await tokens.encode_chat(_REQUEST)
    prefixes = [prompt_ids[: len(prompt_ids) - cut] for cut in range(_NUM_PREFIXES)]
    async with asyncio.TaskGroup() as group:
        chat = group.create_task(_written(tokens.stream_chat(_REQUEST)))
        continued = group.create_task(_written(tokens.stream_after(prompt_ids, _REQUEST)))
        read = group.create_task(_read_back(tokens))
        batch = group.create_task(tokens.sample_next(prefixes, _GREEDY))
        alone = [group.create_task(tokens.sample_next([prefix], _GREEDY)) for prefix in prefixes]
    text, token_ids = chat.result()
    first = batch.result()[0]
    same_start = token_ids[:1] == [first.token_id] and (first.is_end or text.startswith(first.text))
    same_batch = batch.result() == [token for task in alone for token in task.result()]
    return chat.result() == continued.result() and same_start and same_batch and read.result() == _SAMPLE


async def scores_tokens(tokens: HttpTokens) -> bool:
    """Whether the likeliest tokens that it reports are those that it samples, position by position."""
    prompt_ids = await tokens.encode_chat(_REQUEST)
    first = (await tokens.sample_next([prompt_ids], _GREEDY))[0].token_id
    second = (await tokens.sample_next([[*prompt_ids, first]], _GREEDY))[0].token_id
    rows = await tokens.score([*prompt_ids, first], num_rows=2, top=2)
    same_tokens = [row.top[0][0] for row in rows] == [first, second]
    # scores come without text, so that the text of a token must not depend on its neighbours
    alone = [await tokens.decode([token_id]) for token_id in await tokens.encode(_WORDS)]
    return same_tokens and "".join(alone) == _WORDS


async def _written(opened: AbstractAsyncContextManager[AsyncIterator[StreamEvent]]) -> tuple[str, list[int]]:
    text, token_ids = "", list[int]()
    async with opened as events:
        async for event in events:
            if isinstance(event, TextDelta):
                text += event.text
                token_ids += event.token_ids or ()
    return text, token_ids


async def _read_back(tokens: HttpTokens) -> str:
    return await tokens.decode(await tokens.encode(_SAMPLE))
