"""A draft that breaks costs nothing but its time: the answer is the target's, and the result says what happened.

Needs: pip install '.[onnx]'
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from llm_spec import ChatRequest, SpeculativeConfig, SpeculativeDecoder
from llm_spec.contract.draft import DraftPiece


class BrokenDraft:
    """A draft whose server is down."""

    name = "broken"

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        raise ConnectionError("draft server is down")
        yield  # a context manager must yield somewhere

    async def aclose(self) -> None: ...


async def main() -> None:
    config = SpeculativeConfig(strategy="regenerate")
    async with SpeculativeDecoder(target="builtin:target", draft=BrokenDraft(), config=config) as decoder:
        result = await decoder.decode("def getregentry():", max_tokens=64)
    print(result.content)
    print(f"finished by {result.stopped_by}; fallbacks: {result.fallbacks}")


if __name__ == "__main__":
    asyncio.run(main())
