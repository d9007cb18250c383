"""RaceTarget: how the streams of one race are opened, by token ids or by text, and what is known of their prompts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from llm_spec.contract.endpoint import TokenEndpoint
from llm_spec.contract.errors import UnsupportedError
from llm_spec.contract.events import StreamEvent
from llm_spec.contract.request import ChatRequest
from llm_spec.measure.tokens import count_prompt_pieces
from llm_spec.strategies.base import StrategyContext
from llm_spec.strategies.race.chain import RaceStream
from llm_spec.strategies.race.schedule import PromptTokenCosts
from llm_spec.strategies.rows.prompt_trial import choose_prompt_stretch

__all__ = ["RaceTarget"]


class RaceTarget:
    """One request's target. `endpoint`: its calls by token ids; None: streams are begun by text."""

    def __init__(self, context: StrategyContext, endpoint: TokenEndpoint | None) -> None:
        self.costs = PromptTokenCosts(count_prompt_pieces(context.request))
        self._target = context.target
        self._request = replace(context.request, stop=())  # a stop string may begin in one stream and end in another
        self._endpoint = endpoint
        self._prompts: dict[RaceStream, asyncio.Task[list[int]]] = {}  # token ids of all that is before a stream
        self._random = random.Random(context.request.sampling.seed)  # noqa: S311 - seeds of streams, no secret

    @property
    def is_by_ids(self) -> bool:
        """Whether streams are begun by token ids."""
        return self._endpoint is not None

    def open_first_stream(self) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """The answer's own stream."""
        endpoint = self._endpoint
        return self._target.stream(self._request) if endpoint is None else endpoint.stream_chat(self._request)

    def open_further_stream(
        self, stream: RaceStream, parent: RaceStream
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """A stream that begins where `parent` is expected to arrive; `encode_prompt` has come to its end."""
        if self._endpoint is None:
            return self._open_stream_by_text(stream)
        self._prompts[stream] = asyncio.create_task(self._encode_expected_prefix(parent, self._endpoint))
        return self._open_stream_by_ids(stream, self._endpoint)

    async def encode_prompt(self, root: RaceStream) -> None:
        """Have the prompt encoded, after which further streams begin by token ids; raises what the target raises."""
        if self._endpoint is not None:
            self._prompts[root] = asyncio.create_task(self._endpoint.encode_chat(self._request))
            self.costs.num_prompt_tokens = len(await asyncio.shield(self._prompts[root]))

    async def read_prompt_tokens(self, root: RaceStream, num_tokens: int) -> None:
        """Have so many tokens of the prompt read; only by token ids."""
        if self._endpoint is not None:
            prompt_ids = await asyncio.shield(self._prompts[root])
            await self._endpoint.sample_next([choose_prompt_stretch(prompt_ids, num_tokens)], self._request.sampling)

    def cancel_prompt_encoding(self, stream: RaceStream) -> None:
        """A stream is not needed any more, nor what is before it."""
        prompt = self._prompts.get(stream)
        if prompt is not None:
            prompt.cancel()

    async def aclose(self) -> None:
        """End all that is under way."""
        for task in self._prompts.values():
            task.cancel()
        await asyncio.gather(*self._prompts.values(), return_exceptions=True)

    # ------------------------------------------------------------------------------------------ inside

    @asynccontextmanager
    async def _open_stream_by_text(self, stream: RaceStream) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        request = self._limit_max_tokens(self._vary_seed_per_stream(self._request), stream.min_prefix_tokens)
        self.costs.num_extra_tokens += self.costs.num_prompt_tokens + stream.num_prefix_tokens
        async with self._target.stream(replace(request, prefix=request.prefix + stream.prefix)) as events:
            yield events

    @asynccontextmanager
    async def _open_stream_by_ids(
        self, stream: RaceStream, endpoint: TokenEndpoint
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        prompt_ids = await asyncio.shield(self._prompts[stream])
        stream.num_prefix_tokens = len(prompt_ids) - self.costs.num_prompt_tokens
        request = self._limit_max_tokens(self._vary_seed_per_stream(self._request), stream.num_prefix_tokens)
        self.costs.num_extra_tokens += len(prompt_ids)
        async with endpoint.stream_after(prompt_ids, request) as events:
            yield events

    async def _encode_expected_prefix(self, parent: RaceStream, endpoint: TokenEndpoint) -> list[int]:
        """All that is expected to be before the stream after `parent`, prompt included."""
        if parent.token_ids is None:
            raise UnsupportedError(f"target {self._target.name} does not tell its token ids")
        text, written_ids = parent.text, list(parent.token_ids)
        added_ids = await endpoint.encode(parent.expected[len(text) :])
        prompt_ids = await asyncio.shield(self._prompts[parent])
        parent.set_expected_ids(written_ids + added_ids)
        return prompt_ids + written_ids + added_ids

    def _limit_max_tokens(self, request: ChatRequest, num_before: int) -> ChatRequest:
        """With as many tokens as are left after so many."""
        if request.max_tokens is not None:
            left = request.max_tokens - num_before
            if left < 1:
                self.costs.is_at_end = True
                raise UnsupportedError("the answer ends before it would begin")
            request = replace(request, max_tokens=left)
        return request

    def _vary_seed_per_stream(self, request: ChatRequest) -> ChatRequest:
        """With a seed of its own: two streams with one seed would draw the same noise at different places."""
        if request.sampling.temperature == 0:
            return request
        return replace(request, sampling=replace(request.sampling, seed=self._random.getrandbits(31)))
