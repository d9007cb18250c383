"""The client of `remote_speed.py`: one decoder in a process of its own, timed around the public call.

It is started with a `ClientSetup` as JSON, answers each line of its standard input (a prompt as JSON) with a line (an
`Answer`), and ends with it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from double_model import END_ID, DraftModel, Model, decode, encode_chat

from llm_spec import ChatRequest, DraftProvider, LlmSpecError, SpeculativeConfig, SpeculativeDecoder, SpeculativeResult
from llm_spec.contract.draft import DraftPiece

ANSWER_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class ClientSetup:
    """What a client process is started with. Without `draft_url` the draft is an instant one."""

    strategy: str
    target_url: str
    draft_url: str | None
    agreement: float
    answer_tokens: int
    streams: int | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer by the outside clock, what its result says, and what the server counted."""

    taken_s: float
    text: str | None = None
    reported_speedup: float | None = None
    strategy: str = ""
    plain_reason: str | None = None
    accepted_share: float = 0.0
    server: dict[str, float] = field(default_factory=dict[str, float])


class InstantDraft:
    """Text that is there at once, and right with the given probability."""

    name = "instant"

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        yield self._write(request, max_tokens)

    async def aclose(self) -> None:
        pass

    async def _write(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[DraftPiece]:
        messages = [message.to_openai() for message in request.messages]
        if request.prefix:
            messages.append({"role": "assistant", "content": request.prefix})
        prompt_ids = encode_chat(messages, continues=bool(request.prefix))
        for _, token_id in zip(range(max_tokens), self._model.write(prompt_ids), strict=False):
            if token_id == END_ID:
                yield DraftPiece("", finish_reason="stop")
                return
            yield DraftPiece(decode((token_id,)))
        yield DraftPiece("", finish_reason="length")


def open_client(setup: ClientSetup) -> SpeculativeDecoder:
    """The decoder that a user would make."""
    target = f"vllm:double@{setup.target_url}"
    if setup.strategy == "plain":
        return SpeculativeDecoder(target=target, draft=None)
    model = Model(answer_tokens=setup.answer_tokens)
    draft: DraftProvider | str = InstantDraft(DraftModel(model=model, agreement=setup.agreement))
    if setup.draft_url is not None:
        draft = f"vllm:double@{setup.draft_url}"
    options: dict[str, Any] = {} if setup.streams is None else {"max_concurrent_streams": setup.streams}
    return SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy=setup.strategy, **options))


async def run_client(setup: ClientSetup) -> None:
    """Answer each line of the standard input, one after another, in one decoder."""
    decoder, lines = open_client(setup), asyncio.StreamReader(limit=2**20)
    await decoder.discover()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    try:
        while line := await lines.readline():
            answer = await time_answer(decoder, json.loads(line), setup.answer_tokens)
            print(json.dumps(asdict(answer)), flush=True)
    finally:
        await decoder.aclose()


async def time_answer(decoder: SpeculativeDecoder, prompt: str, answer_tokens: int) -> Answer:
    """The whole time around the public call; an answer that fails is one without text."""
    started = time.perf_counter()
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            result = await decoder.decode(prompt, temperature=0.0)
    except (LlmSpecError, TimeoutError) as error:
        reason = f"failed: {type(error).__name__}: {error}"
        return Answer(taken_s=time.perf_counter() - started, plain_reason=reason)
    return describe(result, time.perf_counter() - started, answer_tokens)


def describe(result: SpeculativeResult, taken_s: float, answer_tokens: int) -> Answer:
    return Answer(
        text=result.content,
        taken_s=taken_s,
        reported_speedup=result.speedup,
        strategy=result.strategy,
        plain_reason=result.plain_reason,
        accepted_share=result.stats.num_accepted_draft_tokens / answer_tokens,
    )


if __name__ == "__main__":
    asyncio.run(run_client(ClientSetup(**json.loads(sys.argv[1]))))
