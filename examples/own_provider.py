"""A provider of your own: five members, checked by the conformance suite, then used as target.

Needs nothing but llm-spec itself.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from llm_spec import ChatRequest, ChatResponse, Finish, SpeculativeConfig, SpeculativeDecoder, StreamEvent
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.local.detokenizing import StopMatcher
from llm_spec.testing import check_provider_conformance


class Parrot:
    """Repeats the last message, word by word."""

    name = "example:parrot"
    capabilities = Capabilities()

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with aclosing(self._answer(request)) as events:  # whoever opens a stream closes it, on every path
            yield events

    async def _answer(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        words, limit = request.messages[-1].text.split(), request.max_tokens
        stop = StopMatcher(request.stop)  # lets text through, but never a stop string or the beginning of one
        for word in words[:limit]:
            for delta in stop.push(word + " "):
                yield delta
        for delta in stop.flush():
            yield delta
        yield Finish("length" if limit is not None and limit < len(words) and not stop.matched else "stop")

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None: ...


async def main() -> None:
    await check_provider_conformance(Parrot)
    pair = SpeculativeDecoder(target=Parrot(), draft=Parrot(), config=SpeculativeConfig(strategy="regenerate"))
    result = await pair.decode("what a draft is worth can be measured before anything is paid for")
    print(result.content, result.summary(), sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
