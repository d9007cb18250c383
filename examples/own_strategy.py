"""A strategy of your own, registered in this program: the target writes, and confirms the draft's first sentence.

Needs nothing but llm-spec itself.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial

import llm_spec as ls
from llm_spec.strategies.base import ReadyStrategy, Refusal, StrategyContext, TextGuarantee
from llm_spec.strategies.registry import StrategyEntry, register_strategy
from llm_spec.testing import ScriptedProvider


def prepare(context: StrategyContext) -> ReadyStrategy | Refusal:
    """Any target, any draft. The text is the target's own stream, so it is exact."""
    if context.draft is None:
        return Refusal("there is no draft")
    return ReadyStrategy(TextGuarantee("exact", same_text=True), partial(run, context, context.draft))


@asynccontextmanager
async def run(context: StrategyContext, draft: ls.DraftProvider) -> AsyncGenerator[AsyncIterator[ls.StreamEvent]]:
    """Leaving it closes the target's stream."""
    async with context.target.stream(context.request) as events, aclosing(compare(events, context, draft)) as compared:
        yield compared


async def compare(
    events: AsyncIterator[ls.StreamEvent], context: StrategyContext, draft: ls.DraftProvider
) -> AsyncGenerator[ls.StreamEvent]:
    """The target's events, and before the end a round that tells how much of the draft they confirmed."""
    drafted, text = "", ""
    try:
        async with draft.draft(context.request, max_tokens=32) as pieces:
            drafted = "".join([piece.text async for piece in pieces]).partition(". ")[0]
    except ls.DraftError as error:  # the target's answer does not depend on it
        yield ls.Fallback(str(error))
    async for event in events:
        if isinstance(event, ls.TextDelta):
            text += event.text
        elif isinstance(event, ls.Finish):
            words, own = drafted.split(), text.split()
            num = next((n for n, word in enumerate(words) if own[n : n + 1] != [word]), len(words))
            yield ls.Round(index=0, num_draft_tokens=len(words), num_accepted_tokens=num, num_emitted_tokens=len(own))
        yield event


async def main() -> None:
    """Answer by it."""
    register_strategy(StrategyEntry(name="first_sentence", prepare=prepare, summary="confirms one sentence"))
    target, draft = ScriptedProvider("It rains in Spain. It pours."), ls.ReferenceDraft("It rains in Rome. It snows.")
    decoder = ls.SpeculativeDecoder(target=target, draft=draft, config=ls.SpeculativeConfig(strategy="first_sentence"))
    result = await decoder.decode("How is the weather?")
    accepted, drafted = result.stats.num_accepted_draft_tokens, result.stats.num_draft_tokens
    print(f"{result.content}\n{result.strategy} ({result.guarantee}): {accepted} of {drafted} drafted words confirmed")


asyncio.run(main())
