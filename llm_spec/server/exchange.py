"""One request on its way to an answer: whole, streamed, or passed on from the target as it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web

from llm_spec._clock import clock
from llm_spec.chat import Progress, Started, StreamEvent
from llm_spec.counting import count_input_tokens
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.errors import BudgetError, InvalidRequestError
from llm_spec.json_text import dumps
from llm_spec.money import find_price
from llm_spec.provider import ChunkStreaming
from llm_spec.result import SpeculativeFinish, SpeculativeResult
from llm_spec.server.apis import Api, Naming
from llm_spec.server.bodies import Asked
from llm_spec.server.clients import Client
from llm_spec.server.config import ServerConfig
from llm_spec.server.encoding import COMMENT, DONE, Encoder, header_figures, sse
from llm_spec.server.metrics import Metrics
from llm_spec.server.models import ServedModel
from llm_spec.server.outbox import Outbox
from llm_spec.server.problems import Problem
from llm_spec.server.relay import ChunkMerger, renamed

__all__ = ["STRATEGY_HEADER", "Exchange"]

STRATEGY_HEADER: Final = "x-llm-spec-strategy"
_STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_HELD_S: Final = 1.0  # to wait for requests under way that hold a budget
_RELAYED: Final = {STRATEGY_HEADER: "plain", "x-llm-spec-guarantee": "exact"}


class Exchange:
    """Answers one request. `headers` go with every answer; `problem_of` says what a client hears of an error."""

    def __init__(
        self,
        request: web.Request,
        *,
        config: ServerConfig,
        metrics: Metrics,
        api: Api,
        model: ServedModel,
        client: Client,
        asked: Sequence[Asked],
        naming: Naming,
        headers: Mapping[str, str],
        problem_of: Callable[[Exception], Problem],
    ) -> None:
        self._request = request
        self._config = config
        self._metrics = metrics
        self._api = api
        self._model = model
        self._client = client
        self._asked = asked
        self._naming = naming
        self._headers = {"x-request-id": naming.answer_id, **headers}
        self._problem_of = problem_of
        self._clock = clock()

    async def respond(self) -> web.StreamResponse:
        """The response, sent where it is a stream; raises what goes wrong before anything was sent."""
        first = self._asked[0]
        decoder = self._model.decoder_for(self._client, self._request.headers.get(STRATEGY_HEADER))
        if first.num_choices > 1 or first.logprobs:
            return await self._relay(decoder, first)
        return await self._stream(decoder, first) if first.stream else await self._whole(decoder)

    def _refuse_without_budget(self) -> Problem:
        """What a client hears whose budget is spent, or is held by its other requests."""
        budget, price = self._client.budget, find_price(self._model.target.name, self._model.decoder.config.prices)
        num_input = sum(count_input_tokens(asked.request) for asked in self._asked)
        if budget is not None and budget.affordable(num_input, price, held=False) != 0:
            message = "the rest of this key's budget is held by its requests under way; ask again when they have ended"
            return Problem(429, message, code="budget_in_use", retry_after_s=_HELD_S)
        message = "this key's budget is spent, or too small for what is asked"
        return Problem(429, message, code="insufficient_quota", is_final=True)

    # ------------------------------------------------------------------------------------------ whole answers

    async def _whole(self, decoder: SpeculativeDecoder) -> web.Response:
        results: list[SpeculativeResult] = []
        for asked in self._asked:
            results.append(await decoder.decode(asked.request))
            if results[0].plain_reason == "budget":
                raise self._refuse_without_budget()
        spent_s = sum(result.timings.total_s for result in results)
        overhead_s = self._clock() - self._naming.started_s - spent_s
        for result in results:
            self._metrics.count(self._model.name, result, overhead_s)
        body = self._api.whole(results, self._asked, self._naming)
        return self._json(body, header_figures(results[-1], overhead_s))

    def _json(self, body: object, headers: Mapping[str, str]) -> web.Response:
        return web.Response(body=dumps(body), content_type="application/json", headers={**self._headers, **headers})

    # ------------------------------------------------------------------------------------------ streams

    async def _stream(self, decoder: SpeculativeDecoder, asked: Asked) -> web.StreamResponse:
        overhead_s = self._clock() - self._naming.started_s
        headers = {"x-llm-spec-overhead-ms": f"{overhead_s * 1e3:.3f}"}
        encoder = self._api.encoder(asked, self._naming)
        async with decoder.stream(asked.request, rounds=True) as events:
            early = await _up_to_the_answer(events)  # until then an error has a status of its own
            for event in early:
                if isinstance(event, SpeculativeFinish) and event.result and event.result.plain_reason == "budget":
                    raise self._refuse_without_budget()
                if isinstance(event, Started):
                    headers |= {STRATEGY_HEADER: event.strategy, "x-llm-spec-guarantee": event.guarantee}
            async with self._sending(encoder.keep_alive, headers) as outbox:
                outbox.put(encoder.begin())
                try:
                    for event in early:
                        self._put(event, encoder, outbox, overhead_s)
                    async for event in events:
                        self._put(event, encoder, outbox, overhead_s)
                        if outbox.is_full:
                            await outbox.room()
                except Exception as error:  # noqa: BLE001 - whatever it is, the client hears of it
                    outbox.put(encoder.failure(self._failure(error)))
        return outbox.response

    def _put(self, event: StreamEvent, encoder: Encoder, outbox: Outbox, overhead_s: float) -> None:
        if isinstance(event, SpeculativeFinish) and event.result is not None:
            outbox.put(encoder.end(event.result))
            self._metrics.count(self._model.name, event.result, overhead_s)
        else:
            outbox.put(encoder.event(event))

    def _failure(self, error: Exception) -> Problem:
        """What went wrong in the middle of a stream; raises what only says that its reader has gone."""
        if isinstance(error, ConnectionError):
            raise error
        self._metrics.errors.labels("stream").inc()
        return self._problem_of(error)

    @asynccontextmanager
    async def _sending(self, keep_alive: bytes, headers: Mapping[str, str]) -> AsyncGenerator[Outbox]:
        """The response's stream, begun; it is ended when the context is left."""
        response = web.StreamResponse(headers={**_STREAM_HEADERS, **self._headers, **headers})
        await response.prepare(self._request)
        outbox = Outbox(
            response,
            keep_alive=keep_alive,
            keep_alive_s=self._config.keep_alive_s,
            patience_s=self._config.body_timeout_s,
        )
        try:
            async with outbox.sending():
                yield outbox
        except ConnectionError:
            if self._request.transport is not None:
                self._request.transport.abort()  # to close it would wait until its reader takes what is unsent
            raise
        await response.write_eof()

    # ------------------------------------------------------------------------------------------ passed on

    async def _relay(self, decoder: SpeculativeDecoder, asked: Asked) -> web.StreamResponse:
        """Several choices, or log-probabilities: the target's own chunks, without speculation."""
        has_chunks = isinstance(self._model.target, ChunkStreaming)
        if not self._api.relays or not has_chunks or len(self._asked) > 1:
            name = "n" if asked.num_choices > 1 else "logprobs"
            raise InvalidRequestError(f"{name} is set, which {self._model.name} cannot serve here")
        merger = ChunkMerger()
        nothing = Problem(502, f"{self._model.name} ended its answer before it began", is_final=True)
        try:
            if asked.stream:
                async with decoder.stream_chunks(asked.request) as chunks:
                    first = await anext(chunks, None)
                    if first is None:
                        raise nothing
                    merger.add(first)
                    return await self._pass_on(asked, first, chunks, merger)
            whole = await decoder.collect_chunks(asked.request)
            if not whole:
                raise nothing
            for chunk in whole:
                merger.add(chunk)
        except BudgetError:
            raise self._refuse_without_budget() from None
        finally:
            self._metrics.count_relayed(self._model.name, merger.usage)
        kind = "text_completion" if asked.request.raw else "chat.completion"
        return self._json(merger.whole(answer_id=self._chunk_id(asked), model=self._naming.model, kind=kind), _RELAYED)

    async def _pass_on(
        self,
        asked: Asked,
        chunk: Mapping[str, Any] | None,
        chunks: AsyncIterator[Mapping[str, Any]],
        merger: ChunkMerger,
    ) -> web.StreamResponse:
        answer_id, model = self._chunk_id(asked), self._naming.model
        async with self._sending(COMMENT, _RELAYED) as outbox:
            try:
                while chunk is not None:
                    told = renamed(chunk, answer_id=answer_id, model=model, include_usage=asked.include_usage)
                    outbox.put(b"" if told is None else sse(told))
                    if outbox.is_full:
                        await outbox.room()
                    chunk = await anext(chunks, None)
                    merger.add(chunk or {})
            except Exception as error:  # noqa: BLE001 - as above
                outbox.put(sse(self._failure(error).to_openai()))
            outbox.put(DONE)
        return outbox.response

    def _chunk_id(self, asked: Asked) -> str:
        return f"{'cmpl' if asked.request.raw else 'chatcmpl'}-{self._naming.answer_id}"


async def _up_to_the_answer(events: AsyncIterator[StreamEvent]) -> list[StreamEvent]:
    """The events up to the first that belongs to the answer, or ends it."""
    early: list[StreamEvent] = []
    async for event in events:
        early.append(event)
        if not isinstance(event, Progress):
            break
    return early
