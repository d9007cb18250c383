"""RaceTarget: how the streams of one race are opened, by token ids or by text, and what is known of their prompts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from llm_spec.chat import ChatRequest, StreamEvent
from llm_spec.contract.endpoint import TokenEndpoint
from llm_spec.drafting.text_pieces import count_prompt_pieces
from llm_spec.errors import UnsupportedError
from llm_spec.strategies.base import StrategyContext
from llm_spec.strategies.prompt_trial import choose_prompt_stretch
from llm_spec.strategies.race_stream import RaceStream
from llm_spec.strategies.resume_plain import can_target_continue_text
from llm_spec.strategies.stream_scheduler import PromptTokenCosts
from llm_spec.strategies.undiscovered_endpoint import UndiscoveredEndpoint

__all__ = ["RaceTarget"]


class RaceTarget:
    """One request's target. `endpoint`: its calls by token ids; None: streams are begun by text.

    An endpoint that is still being discovered may turn out to be missing: then streams go on by text.
    """

    def __init__(self, context: StrategyContext, endpoint: TokenEndpoint | None) -> None:
        self.costs = PromptTokenCosts(count_prompt_pieces(context.request))
        self._target = context.target
        self._request = replace(context.request, stop=())  # a stop string may begin in one stream and end in another
        self._endpoint = endpoint
        self._is_text_untried = "continue_prefix" in context.untried
        self._is_trying_text = False
        self._root_shows_pace = asyncio.Event()
        self._prompts: dict[RaceStream, asyncio.Task[list[int]]] = {}  # token ids of all that is before a stream
        self._random = random.Random(context.request.sampling.seed)  # noqa: S311 - seeds of streams, no secret

    @property
    def is_by_ids(self) -> bool:
        """Whether streams are begun by token ids."""
        return self._endpoint is not None

    @property
    def is_being_tried(self) -> bool:
        """Whether the server has calls of ours that find out what it can do."""
        is_endpoint_tried = isinstance(self._endpoint, UndiscoveredEndpoint) and self._endpoint.is_being_tried
        return self._is_trying_text or is_endpoint_tried

    def open_first_stream(self) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """The answer's own stream."""
        endpoint = self._endpoint
        return self._target.stream(self._request) if endpoint is None else endpoint.stream_chat(self._request)

    def open_further_stream(
        self, stream: RaceStream, parent: RaceStream
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """A stream that begins where `parent` is expected to arrive; `prepare` has come to its end."""
        if self._endpoint is None:
            return self._open_stream_by_text(stream)
        self._prompts[stream] = asyncio.create_task(self._encode_expected_prefix(parent, self._endpoint))
        return self._open_stream_by_ids(stream, self._endpoint)

    async def prepare_further_streams(self, root: RaceStream, allow_early: Callable[[bool], None]) -> None:
        """Find out what further streams need: the prompt's token ids, or whether the target goes on from a text.

        `allow_early` is called with True where streams may begin before that is known (they write nothing until it is),
        and with False where they turn out to be of no use. Raises what the target raises, and UnsupportedError where it
        can do neither.
        """
        was_by_ids = self._endpoint is not None
        if self._endpoint is not None:
            try:
                await self._prepare_streams_by_ids(root, self._endpoint, allow_early)
            except UnsupportedError:
                if not (isinstance(self._endpoint, UndiscoveredEndpoint) and self._target.capabilities.continue_prefix):
                    raise
                self._endpoint = None
        if root.token_ids is None:  # it began before it was known to tell them
            self._endpoint = None
        if was_by_ids and self._endpoint is None:
            self._is_text_untried = True
            allow_early(False)
        if self._is_text_untried:
            await self._root_shows_pace.wait()
            await self._try_text_continuation()

    async def read_prompt_tokens(self, root: RaceStream, num_tokens: int) -> None:
        """Have so many tokens of the prompt read; only by token ids."""
        if self._endpoint is not None:
            prompt_ids = await asyncio.shield(self._prompts[root])
            await self._endpoint.sample_next([choose_prompt_stretch(prompt_ids, num_tokens)], self._request.sampling)

    def allow_disturbing_trials(self) -> None:
        """The first stream has shown how fast it is by itself: trials may disturb it now."""
        self._root_shows_pace.set()

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

    async def _prepare_streams_by_ids(
        self, root: RaceStream, endpoint: TokenEndpoint, allow_early: Callable[[bool], None]
    ) -> None:
        # a stream reads all of a prompt: only where that is known to cost little may it be the first call that does
        if not (isinstance(endpoint, UndiscoveredEndpoint) and self._target.capabilities.shares_prompt_cache):
            await self._encode_prompt(root, endpoint.encode_chat(self._request))
            return
        await self._encode_prompt(root, endpoint.encode_chat_early(self._request))
        if root.token_ids is not None:
            allow_early(True)
        await endpoint.wait_until_found()

    async def _encode_prompt(self, root: RaceStream, encoding: Coroutine[Any, Any, list[int]]) -> None:
        self._prompts[root] = asyncio.create_task(encoding)
        self.costs.num_prompt_tokens = len(await asyncio.shield(self._prompts[root]))

    async def _try_text_continuation(self) -> None:
        self._is_trying_text = True
        try:
            if not await can_target_continue_text(self._target):
                raise UnsupportedError(f"target {self._target.name} does not go on from a text")
        finally:
            self._is_trying_text = False

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
        text, written_ids = parent.text, list(parent.token_ids or ())
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
