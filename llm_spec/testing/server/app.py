"""The server: its endpoints, and their times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Literal, Self, TypeAlias

from aiohttp import web

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import InvalidRequestError
from llm_spec.testing.server.bodies import (
    Json,
    compute_max_answer_tokens,
    parse_max_tokens,
    read_chat_messages,
    read_json_body,
    read_stop_strings,
    render_messages,
)
from llm_spec.testing.server.faults import ServerFaults
from llm_spec.testing.server.latency import PrefixCache, ServerLatency
from llm_spec.testing.server.model import ScriptedAnswer, ScriptedModel
from llm_spec.testing.server.replies import (
    MODEL,
    Kind,
    ScriptedFailure,
    StreamFrame,
    make_error_response,
    make_stream_frames,
    make_usage_fields,
    make_whole_choice,
    make_whole_response,
)

__all__ = ["ScriptedModelServer"]

_MALFORMED: Final = b'data: {"choices": [{"del\n\n'
_NO_FAULTS: Final = ServerFaults()
_NO_LATENCY: Final = ServerLatency()

ContinuesPrefix: TypeAlias = Literal["fields", "repeats"] | None


class ScriptedModelServer:
    """Answers every prompt with `answer`, on a free port of 127.0.0.1, inside its `async with`.

    `continues_prefix`: if and how a last message of the assistant is continued. "fields": with
    `continue_final_message`; "repeats": always, with that message's text repeated in front; None:
    never.
    `context_length`: the most tokens of a prompt and its answer together.
    `tokens_per_frame`: the tokens in a streamed frame, as from a busy server. It is sent when its
    last token is ready.
    `faults`: may be changed at any time.

    `paths` are those of all requests, `requests` the bodies of those for text. `num_open_streams`
    requests are being answered or wait for their turn, `num_cancelled` were left by their client.
    `num_generated_tokens` counts the tokens of all of them.
    """

    def __init__(
        self,
        answer: str,
        *,
        latency: ServerLatency = _NO_LATENCY,
        faults: ServerFaults = _NO_FAULTS,
        continues_prefix: ContinuesPrefix = None,
        context_length: int = 1 << 20,
        tokens_per_frame: int = 1,
    ) -> None:
        check_number(ValueError, "context_length", context_length, 1, integer=True)
        check_number(ValueError, "tokens_per_frame", tokens_per_frame, 1, integer=True)
        self.latency = latency
        self.faults = faults
        self.continues_prefix: ContinuesPrefix = continues_prefix
        self.context_length = context_length
        self.tokens_per_frame = tokens_per_frame
        self.url = ""
        self.paths: list[str] = []
        self.requests: list[Json] = []
        self.num_open_streams = self.num_cancelled = self.num_generated_tokens = 0
        self._model = ScriptedModel(answer)
        self._cache = PrefixCache()
        self._slots = None if latency.max_streams is None else asyncio.Semaphore(latency.max_streams)
        self._runner: web.AppRunner | None = None

    @property
    def answer(self) -> str:
        return self._model.script.text

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._handle_with_latency_and_faults], client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._handle_chat)
        app.router.add_post("/v1/completions", self._handle_completions)
        app.router.add_get("/v1/models", self._handle_models)
        app.router.add_post("/tokenize", self._handle_tokenize)
        app.router.add_post("/detokenize", self._handle_detokenize)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # ------------------------------------------------------------------------------------ endpoints

    async def _handle_chat(self, request: web.Request) -> web.StreamResponse:
        body, faults = await self._read_body_and_faults(request)
        prefix = self._find_continued_prefix(body)
        prompt_ids = self._model.vocabulary.encode(render_messages(body, continued=prefix is not None))
        answer = self._make_answer(body, prompt_ids, prefix or "", parse_max_tokens(body, None))
        return await self._respond_with_answers(request, body, "chat", [answer], faults)

    async def _handle_completions(self, request: web.Request) -> web.StreamResponse:
        body, faults = await self._read_body_and_faults(request)
        answers = [
            self._make_completion_answer(body, prompt_ids) for prompt_ids in self._parse_prompts(body.get("prompt"))
        ]
        if body.get("stream") and len(answers) > 1:
            raise InvalidRequestError("this server cannot stream several prompts; send one, or leave out stream")
        return await self._respond_with_answers(request, body, "text", answers, faults)

    async def _respond_with_answers(
        self, request: web.Request, body: Json, kind: Kind, answers: Sequence[ScriptedAnswer], faults: ServerFaults
    ) -> web.StreamResponse:
        async with self._hold_stream_place():
            num_cached = self._count_cached_tokens(body, answers)
            start = self._compute_first_token_time(answers, num_cached)
            usage = make_usage_fields(answers, num_cached)
            if body.get("stream"):
                frames = make_stream_frames(body, kind, answers[0], usage, self.tokens_per_frame)
                return await self._stream_frames(request, frames, start, faults)
            await self._wait_for_generation(answers, start)
        choices = [self._make_choice(body, kind, index, answer) for index, answer in enumerate(answers)]
        return make_whole_response(body, kind, answers, choices, usage)

    async def _handle_tokenize(self, request: web.Request) -> web.Response:
        body = await read_json_body(request)
        continued = bool(body.get("continue_final_message"))
        text = render_messages(body, continued=continued) if "messages" in body else str(body.get("prompt", ""))
        token_ids = self._model.vocabulary.encode(text)
        counts = {"count": len(token_ids), "max_model_len": self.context_length}
        return web.json_response({**counts, "tokens": token_ids})

    async def _handle_detokenize(self, request: web.Request) -> web.Response:
        token_ids = (await read_json_body(request)).get("tokens", [])
        return web.json_response({"prompt": self._model.vocabulary.decode(token_ids)})

    async def _handle_models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "max_model_len": self.context_length}
        return web.json_response({"object": "list", "data": [model]})

    # ------------------------------------------------------------------------------------- requests

    @web.middleware
    async def _handle_with_latency_and_faults(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.paths.append(request.path)
        await asyncio.sleep(self.latency.round_trip_s)
        if request.path in self.faults.missing:
            return make_error_response(404, f"{request.path} is not here")
        try:
            return await handler(request)
        except InvalidRequestError as error:
            return make_error_response(400, str(error))
        except ScriptedFailure as failure:
            return failure.response
        except ConnectionError:
            return web.Response(status=499)  # sent to nobody; aiohttp would log an exception

    async def _read_body_and_faults(self, request: web.Request) -> tuple[Json, ServerFaults]:
        """Return the body of a request for text, and the faults of its answer."""
        body = await read_json_body(request)
        self.requests.append(body)
        faults, last = self.faults, self.faults.num_requests
        if last is not None and len(self.requests) > last:
            faults = _NO_FAULTS
        if faults.status is not None:
            raise ScriptedFailure(faults.status, faults.retry_after_s)
        return body, faults

    # -------------------------------------------------------------------------------------- answers

    def _find_continued_prefix(self, body: Json) -> str | None:
        """Return the text that a chat request continues, or None."""
        last = read_chat_messages(body)[-1]
        requested_model = self.continues_prefix == "repeats" or (
            self.continues_prefix == "fields" and bool(body.get("continue_final_message"))
        )
        return last.text if requested_model and last.role == "assistant" else None

    def _parse_prompts(self, prompts: str | list[Any] | None) -> list[list[int]]:
        """Return the prompts of a completion: one or many, each a text or token ids."""
        if isinstance(prompts, str):
            return [self._model.vocabulary.encode(prompts)]
        if not prompts:
            raise InvalidRequestError("prompt must be a text, token ids, or a list of either")
        if isinstance(prompts[0], int):
            return [prompts]
        return [self._model.vocabulary.encode(p) if isinstance(p, str) else p for p in prompts]

    def _make_completion_answer(self, body: Json, prompt_ids: Sequence[int]) -> ScriptedAnswer:
        return self._make_answer(
            body, prompt_ids, self._model.find_answer_prefix(prompt_ids), parse_max_tokens(body, 16)
        )

    def _make_answer(
        self, body: Json, prompt_ids: Sequence[int], prefix: str, max_tokens: int | None
    ) -> ScriptedAnswer:
        return self._model.write_answer(
            prompt_ids,
            prefix,
            max_tokens=compute_max_answer_tokens(self.context_length, len(prompt_ids), max_tokens),
            stops=read_stop_strings(body),
            is_repeating=self.continues_prefix == "repeats" and "messages" in body,
        )

    def _make_choice(self, body: Json, kind: Kind, index: int, answer: ScriptedAnswer) -> Json:
        choice = make_whole_choice(body, kind, index, answer)
        if kind == "text" and body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self._model.make_prompt_logprobs(
                answer.prompt_ids, int(body["prompt_logprobs"])
            )
        return choice

    # ----------------------------------------------------------------------------------------- time

    @asynccontextmanager
    async def _hold_stream_place(self) -> AsyncGenerator[None]:
        """Count a request, and hold one of the `max_streams` places for it."""
        self.num_open_streams += 1
        try:
            async with AsyncExitStack() as stack:
                if self._slots is not None:
                    await stack.enter_async_context(self._slots)
                yield
        except (asyncio.CancelledError, ConnectionError):
            self.num_cancelled += 1
            raise
        finally:
            self.num_open_streams -= 1

    def _count_cached_tokens(self, body: Json, answers: Sequence[ScriptedAnswer]) -> int:
        """Count the prompt tokens that need not be computed.

        For the logprobs of a prompt, vLLM computes them all.
        """
        if not self.latency.cached:
            return 0
        num_cached = sum([self._cache.count_cached_and_add_prompt(answer.prompt_ids) for answer in answers])
        return num_cached if body.get("prompt_logprobs") is None else 0

    def _compute_first_token_time(self, answers: Sequence[ScriptedAnswer], num_cached: int) -> float:
        num_computed = sum(len(answer.prompt_ids) for answer in answers) - num_cached
        return asyncio.get_running_loop().time() + self.latency.compute_first_token_s(num_computed)

    async def _wait_for_generation(self, answers: Sequence[ScriptedAnswer], start: float) -> None:
        """Wait for the time of answers that are generated together."""
        for index in range(max(1, *(len(answer.pieces) for answer in answers))):
            await _sleep_until_loop_time(start + index * self.latency.token_s)
            self.num_generated_tokens += sum(index < len(answer.pieces) for answer in answers)

    async def _stream_frames(
        self, request: web.Request, frames: Sequence[StreamFrame], start: float, faults: ServerFaults
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_sent = 0
        for index, (line, num_tokens) in enumerate(frames):
            await _sleep_until_loop_time(start + max(0, num_tokens - 1) * self.latency.token_s)
            if index == faults.drop_after and request.transport is not None:
                request.transport.abort()
                break
            await _apply_stream_faults(response, faults, index)
            self.num_generated_tokens += num_tokens - num_sent
            num_sent = num_tokens
            await response.write(line)
        return response


async def _sleep_until_loop_time(at: float) -> None:
    """Sleep until a time of the loop's clock, so that late wake-ups do not add up."""
    await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))


async def _apply_stream_faults(response: web.StreamResponse, faults: ServerFaults, index: int) -> None:
    if index == faults.malformed_after:
        await response.write(_MALFORMED)
    if index == faults.stall_after:
        await asyncio.Event().wait()  # until the client leaves or the server ends
