"""A target and a draft that know one text and take their time: a latency model for strategies.

Their tokens are the pieces of `split_into_pieces`. Times are `asyncio.sleep`, so a long answer
takes no time by the virtual clock. `ScriptedModelServer` is the same over real sockets.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final

from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.endpoint import SampledToken
from llm_spec.contract.events import ChatResponse, Finish, StreamEvent, TextDelta, Usage
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.request import ChatRequest, Sampling
from llm_spec.contract.response import complete_from_stream
from llm_spec.measure.tokens import split_into_pieces

__all__ = ["SimulatedDraft", "SimulatedTarget"]

_EOS_ID: Final = 0
_PROMPT_ID: Final = 1


class SimulatedTarget:
    """Writes `answer`, greedily, from any point; a text that differs from it is skipped.

    A `LlmProvider` that continues prefixes, and with `by_ids` a `TokenEndpoint`. The first token of
    a call takes `round_trip_s + first_token_s`, every other token `token_s`. Every prompt has
    `num_prompt_tokens`. A call of `sample_next` takes `row_s` more for each prefix but its first,
    and for each stream and each prefix of other calls that run when it is sent. `num_open` calls
    are open now, at most `max_open` were.
    """

    context_length: int | None = None

    def __init__(
        self,
        answer: str,
        *,
        first_token_s: float = 0.0,
        token_s: float = 0.0,
        round_trip_s: float = 0.0,
        row_s: float = 0.0,
        by_ids: bool = False,
        num_prompt_tokens: int = 1,
    ) -> None:
        self.name = "simulated:target"
        self.capabilities = Capabilities(continue_prefix=True, token_endpoint=self if by_ids else None)
        self.num_open = self.max_open = self.num_calls = self.num_generated_tokens = 0
        self._pieces = split_into_pieces(answer)
        self._first_token_s = first_token_s
        self._token_s = token_s
        self._round_trip_s = round_trip_s
        self._row_s = row_s
        self._num_further_prefixes = 0  # of open calls, without the first of each
        self._num_prompt = num_prompt_tokens
        self._texts = ["", "<prompt>"]
        self._ids: dict[str, int] = {}
        self._tokenized_pieces: set[str] = set()

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with aclosing(
            self._stream_rest_of_answer(split_into_pieces(request.prefix), request.max_tokens, with_ids=False)
        ) as events:
            yield events

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """Nothing to release."""

    # ------------------------------------------------------------------------------- token endpoint

    async def encode(self, text: str) -> list[int]:
        pieces = split_into_pieces(text)
        await asyncio.sleep(
            0.0 if self._tokenized_pieces.issuperset(pieces) else self._round_trip_s
        )  # known pieces are cached
        self._tokenized_pieces.update(pieces)
        return self._encode_pieces(pieces)

    async def decode(self, token_ids: Sequence[int]) -> str:
        await asyncio.sleep(0)
        return "".join(self._texts[i] for i in token_ids)

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        await asyncio.sleep(self._round_trip_s)
        return [_PROMPT_ID] * self._num_prompt + self._encode_pieces(split_into_pieces(request.prefix))

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:  # noqa: ARG002 - greedy
        self._change_num_open_calls(1)
        self._num_further_prefixes += len(prefixes) - 1
        rows_s = self._row_s * (self.num_open - 1 + self._num_further_prefixes)
        try:
            await asyncio.sleep(self._round_trip_s + self._first_token_s + rows_s)
        finally:
            self._change_num_open_calls(-1)
            self._num_further_prefixes -= len(prefixes) - 1
        self.num_generated_tokens += len(prefixes)
        return [self._get_answer_token_after(prefix) for prefix in prefixes]

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with aclosing(
            self._stream_rest_of_answer(split_into_pieces(request.prefix), request.max_tokens, with_ids=True)
        ) as events:
            yield events

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        written = [self._texts[i] for i in token_ids[self._num_prompt :]]
        async with aclosing(self._stream_rest_of_answer(written, request.max_tokens, with_ids=True)) as events:
            yield events

    # --------------------------------------------------------------------------------------- inside

    async def _stream_rest_of_answer(
        self, written: Sequence[str], max_tokens: int | None, *, with_ids: bool
    ) -> AsyncGenerator[StreamEvent]:
        rest = self._pieces[len(written) :]
        is_cut = max_tokens is not None and len(rest) >= max_tokens
        self._change_num_open_calls(1)
        try:
            at = asyncio.get_running_loop().time() + self._round_trip_s + self._first_token_s
            for piece in rest[:max_tokens]:
                await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
                at += self._token_s
                self.num_generated_tokens += 1
                yield TextDelta(piece, token_ids=tuple(self._encode_pieces([piece])) if with_ids else None)
            usage = Usage(input_tokens=self._num_prompt + len(written), output_tokens=len(rest[:max_tokens]))
            yield Finish("length" if is_cut else "stop", usage, "max_tokens" if is_cut else "eos")
        finally:
            self._change_num_open_calls(-1)

    def _change_num_open_calls(self, change: int) -> None:
        self.num_open += change
        self.num_calls += change > 0
        self.max_open = max(self.max_open, self.num_open)

    def _get_answer_token_after(self, prefix: Sequence[int]) -> SampledToken:
        at = max(0, len(prefix) - self._num_prompt)  # a prefix may be a part of the prompt
        if at >= len(self._pieces):
            return SampledToken(_EOS_ID, "", is_end=True)
        return SampledToken(self._encode_pieces([self._pieces[at]])[0], self._pieces[at])

    def _encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        for piece in pieces:
            if piece not in self._ids:
                self._ids[piece] = len(self._texts)
                self._texts.append(piece)
        return [self._ids[piece] for piece in pieces]


class SimulatedDraft:
    """Guesses `answer`, each piece correctly with probability `agreement`.

    Each call draws anew, by `seed`. The first piece of a call takes `first_token_s`, every other
    piece `token_s`. `num_calls` counts the calls.
    """

    name = "simulated:draft"

    def __init__(
        self, answer: str, agreement: float, seed: int, *, first_token_s: float = 0.0, token_s: float = 0.0
    ) -> None:
        self.num_calls = 0
        self._pieces = split_into_pieces(answer)
        self._agreement = agreement
        self._random = random.Random(seed)  # noqa: S311 - a reproducible draft, no secret
        self._first_token_s = first_token_s
        self._token_s = token_s

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self.num_calls += 1
        start = len(split_into_pieces(request.prefix))
        async with aclosing(self._stream_draft_remainder(self._pieces[start : start + max_tokens])) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _stream_draft_remainder(self, rest: Sequence[str]) -> AsyncGenerator[DraftPiece]:
        at = asyncio.get_running_loop().time() + self._first_token_s
        for piece in rest:
            wait_s = at - asyncio.get_running_loop().time()
            if wait_s > 0 or not self._token_s:
                await asyncio.sleep(max(0.0, wait_s))
            at += self._token_s
            yield DraftPiece(piece if self._random.random() < self._agreement else " other")
        yield DraftPiece("", finish_reason="stop")
