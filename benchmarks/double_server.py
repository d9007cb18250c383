"""A server with prices that nobody knows: it speaks vLLM's dialect of OpenAI's API, and answers by its own clock.

    python benchmarks/double_server.py --token-ms 25 --call-ms 45 --first-token-ms 45 --places 12
    python benchmarks/double_server.py --token-ms 3 --first-token-ms 5 --agreement 0.8      # a draft of the one above

It listens on 127.0.0.1 and prints `{"url": "http://127.0.0.1:PORT/v1"}`. `double_model.py` is its model, and
`double_engine.py` what its times mean; it shares nothing with the package that is measured against it. `GET /stats`
tells what it has done. It ends after `--lifetime-s`, or with its standard input (`--end-with-stdin`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Final, Protocol

from aiohttp import web
from double_engine import Costs, Engine
from double_model import DraftModel, InvalidPromptError, Model, decode, encode
from double_wire import (
    MAX_MODEL_LEN,
    MODEL_NAME,
    AnswerFormat,
    ChatFormat,
    CompletionOptions,
    InvalidRequestError,
    Piece,
    Row,
    TextFormat,
    parse_chat,
    parse_prompts,
)

VERSION: Final = "0.32.0"  # of the vLLM whose answers these are like


class Writer(Protocol):
    """A model that goes on from a prompt."""

    def __call__(self, prompt_ids: Sequence[int], options: CompletionOptions) -> Iterator[int]: ...


def make_target_writer(model: Model) -> Writer:
    """The target's tokens; sampled with the request's seed, or with one of the server's own."""

    def write(prompt_ids: Sequence[int], options: CompletionOptions) -> Iterator[int]:
        context = model.read(prompt_ids)
        rng = random.Random(options.seed)  # noqa: S311 - draws of a toy model
        while True:
            token_id = context.sample(options.sampling, rng)
            yield token_id
            context.push(token_id)

    return write


def make_draft_writer(draft: DraftModel) -> Writer:
    """The draft's tokens, greedy."""

    def write(prompt_ids: Sequence[int], options: CompletionOptions) -> Iterator[int]:  # noqa: ARG001 - a Writer
        return draft.write(prompt_ids)

    return write


class DoubleServer:
    """The endpoints; `model` is what the target is, also where a draft of it answers."""

    def __init__(self, engine: Engine, model: Model, write: Writer, *, token_endpoints: bool = True) -> None:
        self._engine = engine
        self._model = model
        self._write = write
        self._takes_ids = token_endpoints
        self._num_answers = 0

    def make_app(self) -> web.Application:
        app = web.Application(middlewares=[_report_errors], client_max_size=64 * 2**20)
        app.router.add_get("/version", _constant({"version": VERSION}))
        app.router.add_get("/health", _constant({}))
        model = {"id": MODEL_NAME, "object": "model", "owned_by": "vllm", "max_model_len": MAX_MODEL_LEN}
        app.router.add_get("/v1/models", _constant({"object": "list", "data": [model]}))
        app.router.add_get("/stats", self._tell_stats)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        if self._takes_ids:
            app.router.add_post("/tokenize", self._tokenize)
            app.router.add_post("/detokenize", self._detokenize)
        return app

    async def _tell_stats(self, request: web.Request) -> web.Response:
        return web.json_response(self._engine.stats.to_dict())

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._engine.stats.num_token_calls += 1
        await self._engine.travel()
        token_ids = parse_chat(body) if "messages" in body else encode(str(body["prompt"]))
        answer = {"count": len(token_ids), "max_model_len": MAX_MODEL_LEN, "tokens": token_ids, "token_strs": None}
        return web.json_response(answer)

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._engine.stats.num_token_calls += 1
        await self._engine.travel()
        return web.json_response({"prompt": decode(body["tokens"])})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        options = CompletionOptions.parse(body, is_chat=True, takes_ids=self._takes_ids)
        return await self._answer(request, [parse_chat(body)], options, ChatFormat(self._make_id("chatcmpl")))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        options = CompletionOptions.parse(body, is_chat=False, takes_ids=self._takes_ids)
        prompts = parse_prompts(body.get("prompt"), takes_ids=self._takes_ids)
        return await self._answer(request, prompts, options, TextFormat(self._make_id("cmpl"), self._model))

    def _make_id(self, kind: str) -> str:
        self._num_answers += 1
        return f"{kind}-{self._num_answers}"

    async def _answer(
        self, request: web.Request, prompts: list[list[int]], options: CompletionOptions, answer_format: AnswerFormat
    ) -> web.StreamResponse:
        if max(map(len, prompts)) + options.max_tokens > MAX_MODEL_LEN:
            raise InvalidRequestError(f"This model's maximum context length is {MAX_MODEL_LEN} tokens.")
        rows = [Row(n, ids, options, self._write(ids, options)) for n, ids in enumerate(prompts)]
        self._engine.stats.num_calls += 1
        self._engine.stats.num_streams += options.is_streamed
        try:
            await self._engine.travel()
            async with self._engine.take_place(len(rows)):
                if options.is_streamed:
                    return await self._stream(request, rows, options, answer_format)
                num_cached = await self._run(rows, options)
                return web.json_response(answer_format.make_whole(rows, options, num_cached))
        except asyncio.CancelledError:  # the client has gone
            self._engine.stats.num_left += 1
            raise

    async def _run(self, rows: Sequence[Row], options: CompletionOptions) -> int:
        """Write all rows to their ends; how many tokens of their prompts were cached."""
        extra_ms, num_cached = self._read_prompts(rows, options)
        costs, started, num_steps = self._engine.costs, self._engine.now(), 0
        while options.max_tokens and not all(row.is_finished for row in rows):
            self._step(rows)
            num_steps += 1
        first_ms = costs.call_ms if options.max_tokens <= 1 else costs.first_token_ms
        taken_ms = extra_ms + first_ms + max(0, num_steps - 1) * costs.token_ms
        await self._engine.sleep_until(started + taken_ms / 1e3)
        return num_cached

    async def _stream(
        self, request: web.Request, rows: Sequence[Row], options: CompletionOptions, answer_format: AnswerFormat
    ) -> web.StreamResponse:
        """Write rows token by token, each at its time."""
        extra_ms, num_cached = self._read_prompts(rows, options)
        costs, started = self._engine.costs, self._engine.now()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        due_s = started + (extra_ms + costs.first_token_ms) / 1e3
        try:
            await response.prepare(request)
            opening = answer_format.make_opening(rows, options)
            while not all(row.is_finished for row in rows):
                await self._engine.sleep_until(due_s)
                due_s += costs.token_ms / 1e3
                chunks = [answer_format.make_chunk(row, piece, options) for row, piece in self._step(rows)]
                await response.write(b"".join(map(_format_event, [*opening, *chunks])))
                opening = []
            ending = [answer_format.make_usage(rows, num_cached)] if options.has_usage else []
            await response.write(b"".join(map(_format_event, ending)) + b"data: [DONE]\n\n")
            await response.write_eof()
        except ConnectionError:  # the client has gone, and this came before the cancellation
            self._engine.stats.num_left += 1
        return response

    def _read_prompts(self, rows: Sequence[Row], options: CompletionOptions) -> tuple[float, int]:
        is_scored = options.num_prompt_logprobs is not None
        return self._engine.read_prompts([row.prompt_ids for row in rows], is_scored=is_scored)

    def _step(self, rows: Sequence[Row]) -> list[tuple[Row, Piece]]:
        active = [row for row in rows if not row.is_finished]
        self._engine.stats.completion_tokens += len(active)
        pieces = [(row, row.step()) for row in active]
        for row in active:
            if len(row.written_ids) > 1:
                self._engine.remember([*row.prompt_ids, *row.written_ids])
        return pieces


def _constant(value: Mapping[str, Any]) -> Callable[[web.Request], Any]:
    async def tell(request: web.Request) -> web.Response:  # noqa: ARG001 - a handler
        return web.json_response(value)

    return tell


def _format_event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


@web.middleware
async def _report_errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    try:
        return await handler(request)
    except (InvalidRequestError, InvalidPromptError, KeyError, TypeError) as error:
        reported = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
        return web.json_response({"error": reported}, status=400)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Costs()).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(flag, type=int if isinstance(default, int) else float, default=default)
    parser.add_argument("--token-endpoints", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--answer-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0, help="another seed, another model")
    parser.add_argument("--agreement", type=float, help="be a draft that is right with this probability at each token")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--lifetime-s", type=float, default=3600.0)
    parser.add_argument("--end-with-stdin", action="store_true")
    return parser.parse_args()


async def serve(arguments: argparse.Namespace) -> None:
    """Listen until the time is over."""
    costs = Costs(**{f.name: getattr(arguments, f.name) for f in fields(Costs)})
    model = Model(seed=arguments.seed, answer_tokens=arguments.answer_tokens)
    write = make_target_writer(model)
    if arguments.agreement is not None:
        write = make_draft_writer(DraftModel(model=model, agreement=arguments.agreement))
    server = DoubleServer(Engine(costs), model, write, token_endpoints=arguments.token_endpoints)
    runner = web.AppRunner(server.make_app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", arguments.port)
    await site.start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}/v1"}), flush=True)
    ended = asyncio.Event()
    if arguments.end_with_stdin:
        asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    try:
        async with asyncio.timeout(arguments.lifetime_s):
            await ended.wait()
    except TimeoutError:
        pass
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(parse_arguments()))
