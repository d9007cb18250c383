"""Finding out what a server really does: a field that it ignores silently is as bad as a call that it lacks.

Each check compares two ways to the same greedy tokens. It costs a handful of short requests, once per provider.
"""

from __future__ import annotations

from typing import Final

from llm_spec import ChatRequest, Sampling, TextDelta
from llm_spec_http.tokens import HttpTokens

__all__ = ["scores_tokens", "works_on_tokens"]

_GREEDY: Final = Sampling(temperature=0.0)
_ONE_TOKEN: Final = ChatRequest.create("-", temperature=0.0, max_tokens=1)
_REQUEST: Final = ChatRequest.create("Count from one to ten.", temperature=0.0, max_tokens=2)
_WORDS: Final = "return one more word"
_SAMPLE: Final = "def naïve(x):\n    return x + 1  # one more\n"


async def works_on_tokens(tokens: HttpTokens) -> bool:
    """Whether chat, batched one-token completions and continued ids give the same tokens, and text survives ids."""
    prompt_ids = await tokens.encode_chat(_REQUEST)
    text, answer_ids = "", list[int]()
    async with tokens.stream_chat(_REQUEST) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                text += event.text
                answer_ids += event.token_ids or ()
    if not answer_ids:
        return False
    prefixes = [[*prompt_ids, *answer_ids[:end]] for end in range(len(answer_ids))]
    sampled = await tokens.sample_next(prefixes, _GREEDY)
    same_ids = [token.token_id for token in sampled] == answer_ids
    same_text = "".join(token.text for token in sampled) == text
    return same_ids and same_text and await _continues(tokens, prefixes[-1], answer_ids[-1]) and await _reads(tokens)


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


async def _continues(tokens: HttpTokens, token_ids: list[int], next_id: int) -> bool:
    async with tokens.stream_after(
        token_ids, ChatRequest(messages=_REQUEST.messages, sampling=_GREEDY, max_tokens=1)
    ) as events:
        continued = [i async for event in events if isinstance(event, TextDelta) for i in event.token_ids or ()]
    return continued == [next_id]


async def _reads(tokens: HttpTokens) -> bool:
    return await tokens.decode(await tokens.encode(_SAMPLE)) == _SAMPLE
