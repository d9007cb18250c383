"""Answers one request: whole, as a stream, or with the target's own chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web

from llm_spec.contract.errors import BudgetError, InvalidRequestError
from llm_spec.contract.events import AnswerStarted, Progress, StreamEvent
from llm_spec.contract.provider import ChunkStreaming
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.pricing import find_model_price
from llm_spec.decoder.result import SpeculativeFinish, SpeculativeResult
from llm_spec.kit.json import dumps
from llm_spec.measure.clock import get_loop_clock
from llm_spec.measure.tokens import estimate_request_tokens
from llm_spec.server.apis import AnswerEncodingContext, ApiDefinition
from llm_spec.server.apis.encoding import SSE_COMMENT, SSE_DONE, AnswerStreamEncoder, build_result_headers, format_sse
from llm_spec.server.apis.fields import ParsedRequest
from llm_spec.server.apis.relay import ChunkMerger, rewrite_chunk_for_client
from llm_spec.server.clients import ApiClient
from llm_spec.server.config import ServerConfig
from llm_spec.server.metrics import ServerMetrics
from llm_spec.server.models import ServedModel
from llm_spec.server.problems import HttpProblem
from llm_spec.server.stream_sender import StreamSender
from llm_spec.strategies.registry import PLAIN

__all__ = ["STRATEGY_HEADER", "Responder"]

STRATEGY_HEADER: Final = "x-llm-spec-strategy"
_STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_BUDGET_RETRY_S: Final = 1.0  # until running requests may have released some budget
_RELAY_HEADERS: Final = {STRATEGY_HEADER: PLAIN.name, "x-llm-spec-guarantee": PLAIN.guarantee}


class Responder:
    """Answers one request.

    `headers`: sent with every answer.
    `to_problem`: converts an error to what the client sees.
    """

    def __init__(
        self,
        request: web.Request,
        *,
        config: ServerConfig,
        metrics: ServerMetrics,
        api: ApiDefinition,
        model: ServedModel,
        client: ApiClient,
        parsed_requests: Sequence[ParsedRequest],
        context: AnswerEncodingContext,
        headers: Mapping[str, str],
        to_problem: Callable[[Exception], HttpProblem],
    ) -> None:
        self._request = request
        self._config = config
        self._metrics = metrics
        self._api = api
        self._model = model
        self._client = client
        self._parsed_requests = parsed_requests
        self._context = context
        self._headers = {"x-request-id": context.answer_id, **headers}
        self._to_problem = to_problem
        self._clock = get_loop_clock()

    async def respond_whole_or_streamed(self) -> web.StreamResponse:
        """Return the response, which has been sent if it is a stream.

        Raises errors that occur before anything is sent.
        """
        first = self._parsed_requests[0]
        decoder = self._model.get_decoder(self._client, self._request.headers.get(STRATEGY_HEADER))
        if first.num_choices > 1 or first.logprobs:
            return await self._relay_target_chunks(decoder, first)
        return await self._respond_stream(decoder, first) if first.stream else await self._respond_whole(decoder)

    def _build_budget_problem(self) -> HttpProblem:
        """The error for a client whose budget is spent, or reserved by its other requests."""
        budget, price = (
            self._client.budget,
            find_model_price(self._model.target.name, self._model.decoder.config.prices),
        )
        num_input = sum(estimate_request_tokens(parsed.request) for parsed in self._parsed_requests)
        if budget is not None and budget.max_affordable_tokens(num_input, price, held=False) != 0:
            message = (
                "the rest of this key's budget is reserved by its running requests; try again when they have ended"
            )
            return HttpProblem(429, message, code="budget_in_use", retry_after_s=_BUDGET_RETRY_S)
        message = "this key's budget is spent, or too small for this request"
        return HttpProblem(429, message, code="insufficient_quota", is_final=True)

    # -------------------------------------------------------------------------------- whole answers

    async def _respond_whole(self, decoder: SpeculativeDecoder) -> web.Response:
        results: list[SpeculativeResult] = []
        for parsed in self._parsed_requests:
            results.append(await decoder.decode(parsed.request))
            if results[0].plain_reason == "budget":
                raise self._build_budget_problem()
        spent_s = sum(result.timings.total_s for result in results)
        overhead_s = self._clock() - self._context.started_s - spent_s
        for result in results:
            self._metrics.count_answer(self._model.name, result, overhead_s)
        body = self._api.build_body(results, self._parsed_requests, self._context)
        return self._build_json_response(body, build_result_headers(results[-1], overhead_s))

    def _build_json_response(self, body: object, headers: Mapping[str, str]) -> web.Response:
        return web.Response(body=dumps(body), content_type="application/json", headers={**self._headers, **headers})

    # -------------------------------------------------------------------------------------- streams

    async def _respond_stream(self, decoder: SpeculativeDecoder, parsed: ParsedRequest) -> web.StreamResponse:
        overhead_s = self._clock() - self._context.started_s
        headers = {"x-llm-spec-overhead-ms": f"{overhead_s * 1e3:.3f}"}
        encoder = self._api.create_encoder(parsed, self._context)
        async with decoder.stream(parsed.request, rounds=True) as events:
            # Until the first answer event, an error is sent with its own status
            early_events = await _read_to_first_answer_event(events)
            for event in early_events:
                if isinstance(event, SpeculativeFinish) and event.result and event.result.plain_reason == "budget":
                    raise self._build_budget_problem()
                if isinstance(event, AnswerStarted):
                    headers |= {STRATEGY_HEADER: event.strategy, "x-llm-spec-guarantee": event.guarantee}
            async with self._open_stream_sender(encoder.keep_alive_bytes, headers) as sender:
                sender.put(encoder.encode_start())
                try:
                    for event in early_events:
                        self._send_event(event, encoder, sender, overhead_s)
                    async for event in events:
                        self._send_event(event, encoder, sender, overhead_s)
                        if sender.is_full:
                            await sender.wait_for_room()
                except Exception as error:  # noqa: BLE001 - an error ends the stream, as a message
                    sender.put(encoder.encode_error(self._convert_stream_error_to_problem(error)))
        return sender.response

    def _send_event(
        self, event: StreamEvent, encoder: AnswerStreamEncoder, sender: StreamSender, overhead_s: float
    ) -> None:
        if isinstance(event, SpeculativeFinish) and event.result is not None:
            sender.put(encoder.encode_end(event.result))
            self._metrics.count_answer(self._model.name, event.result, overhead_s)
        else:
            sender.put(encoder.encode_event(event))

    def _convert_stream_error_to_problem(self, error: Exception) -> HttpProblem:
        """Convert an error amid a stream; raises ConnectionError if the reader has gone."""
        if isinstance(error, ConnectionError):
            raise error
        self._metrics.errors.labels("stream").inc()
        return self._to_problem(error)

    @asynccontextmanager
    async def _open_stream_sender(self, keep_alive: bytes, headers: Mapping[str, str]) -> AsyncGenerator[StreamSender]:
        """Begin the response's stream, and end it when the context is left."""
        response = web.StreamResponse(headers={**_STREAM_HEADERS, **self._headers, **headers})
        await response.prepare(self._request)
        sender = StreamSender(response, keep_alive=keep_alive, keep_alive_s=self._config.keep_alive_s)
        async with sender.run_sender_task():
            yield sender
        await response.write_eof()

    # ------------------------------------------------------------------------------------ passed on

    async def _relay_target_chunks(self, decoder: SpeculativeDecoder, parsed: ParsedRequest) -> web.StreamResponse:
        """Relay the target's own chunks, for several choices or log-probabilities."""
        has_chunks = isinstance(self._model.target, ChunkStreaming)
        if not self._api.can_relay or not has_chunks or len(self._parsed_requests) > 1:
            name = "n" if parsed.num_choices > 1 else "logprobs"
            raise InvalidRequestError(f"{name} is set; {self._model.name} cannot serve it here: leave it out")
        merger = ChunkMerger()
        empty_answer = HttpProblem(502, f"{self._model.name} sent an empty answer", is_final=True)
        try:
            if parsed.stream:
                async with decoder.stream_chunks(parsed.request) as chunks:
                    first = await anext(chunks, None)
                    if first is None:
                        raise empty_answer
                    merger.add_chunk(first)
                    return await self._relay_chunk_stream(parsed, first, chunks, merger)
            whole = await decoder.collect_chunks(parsed.request)
            if not whole:
                raise empty_answer
            for chunk in whole:
                merger.add_chunk(chunk)
            merger.end_open_choices()
        except BudgetError:
            raise self._build_budget_problem() from None
        finally:
            self._metrics.count_relayed_answer(self._model.name, merger.usage)
        kind = "text_completion" if parsed.request.raw else "chat.completion"
        return self._build_json_response(
            merger.build_response_body(
                answer_id=self._build_prefixed_answer_id(parsed), model=self._context.model, kind=kind
            ),
            _RELAY_HEADERS,
        )

    async def _relay_chunk_stream(
        self,
        parsed: ParsedRequest,
        chunk: Mapping[str, Any] | None,
        chunks: AsyncIterator[Mapping[str, Any]],
        merger: ChunkMerger,
    ) -> web.StreamResponse:
        answer_id, model = self._build_prefixed_answer_id(parsed), self._context.model
        kind = "text_completion" if parsed.request.raw else "chat.completion.chunk"
        async with self._open_stream_sender(SSE_COMMENT, _RELAY_HEADERS) as sender:
            try:
                while chunk is not None:
                    rewritten = rewrite_chunk_for_client(
                        chunk, answer_id=answer_id, model=model, include_usage=parsed.include_usage, kind=kind
                    )
                    sender.put(b"" if rewritten is None else format_sse(rewritten))
                    if sender.is_full:
                        await sender.wait_for_room()
                    chunk = await anext(chunks, None)
                    merger.add_chunk(chunk or {})
                    if chunk is None:
                        chunk = merger.end_open_choices()
            except Exception as error:  # noqa: BLE001 - as above
                sender.put(format_sse(self._convert_stream_error_to_problem(error).to_openai()))
            sender.put(SSE_DONE)
        return sender.response

    def _build_prefixed_answer_id(self, parsed: ParsedRequest) -> str:
        return f"{'cmpl' if parsed.request.raw else 'chatcmpl'}-{self._context.answer_id}"


async def _read_to_first_answer_event(events: AsyncIterator[StreamEvent]) -> list[StreamEvent]:
    """Read events up to the first that belongs to the answer, or ends it."""
    early_events: list[StreamEvent] = []
    async for event in events:
        early_events.append(event)
        if not isinstance(event, Progress):
            break
    return early_events
