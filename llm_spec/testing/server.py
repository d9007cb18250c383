"""An OpenAI-compatible server with a scripted answer, a latency model and faults, on real sockets.

Tests and benchmarks talk to it. It stands for a greedy model that knows one text. Its tokens are the pieces of
`split_pieces`; a prompt is rendered as `<|user|>…<|end|><|assistant|>`, each mark one token, and what is behind the
last `<|assistant|>` is the beginning of the answer, whether it comes as messages, as text or as token ids.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, Literal, Self, TypeAlias, cast

from aiohttp import web

from llm_spec._checks import check_number
from llm_spec.chat import ChatMessage
from llm_spec.drafting.pieces import split_pieces
from llm_spec.errors import InvalidRequestError

__all__ = ["EOS_ID", "MODEL", "Faults", "Latency", "ModelServer", "disagreeing"]

EOS_ID: Final = 0
MODEL: Final = "scripted"
_ASSISTANT: Final = "<|assistant|>"
_MARK: Final = re.compile(r"(<\|\w+\|>)")
_MALFORMED: Final = b'data: {"choices": [{"del\n\n'
_UNLIKELY: Final = -10.0  # the logprob of a token that is not the script's

Json: TypeAlias = dict[str, Any]
ContinuesPrefix: TypeAlias = Literal["fields", "repeats"] | None


@dataclass(frozen=True, kw_only=True)
class Latency:
    """How long tokens take: the first `first_token_s` plus the prompt at `prefill_tokens_per_s`, each other `token_s`.

    A batch shares its prefixes, so its longest prompt counts. At most `max_streams` requests are answered at once, a
    batch being one; the others wait.
    """

    first_token_s: float = 0.0
    token_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    max_streams: int | None = None

    def __post_init__(self) -> None:
        check_number(ValueError, "first_token_s", self.first_token_s, 0)
        check_number(ValueError, "token_s", self.token_s, 0)
        check_number(ValueError, "prefill_tokens_per_s", self.prefill_tokens_per_s, 0, above=True)
        check_number(ValueError, "max_streams", self.max_streams, 1, integer=True)

    def until_first_s(self, num_prompt_tokens: int) -> float:
        """The time to the first token."""
        rate = self.prefill_tokens_per_s
        return self.first_token_s + (num_prompt_tokens / rate if rate else 0.0)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong with the first `num_requests` that ask for text (None: with all).

    `status` is answered instead of text, with `retry_after_s` if there is one. Behind that many frames of a stream the
    connection is dropped, falls silent, or carries a frame that is no JSON. Requests to `missing` paths ("/tokenize")
    get a 404, whatever their number.
    """

    num_requests: int | None = None
    status: int | None = None
    retry_after_s: float | None = None
    drop_after: int | None = None
    stall_after: int | None = None
    malformed_after: int | None = None
    missing: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_number(ValueError, "num_requests", self.num_requests, 0, integer=True)
        check_number(ValueError, "status", self.status, 400, 599, integer=True)
        check_number(ValueError, "retry_after_s", self.retry_after_s, 0)
        for name in ("drop_after", "stall_after", "malformed_after"):
            check_number(ValueError, name, getattr(self, name), 0, integer=True)


_NO_FAULTS: Final = Faults()
_NO_LATENCY: Final = Latency()


def disagreeing(text: str, agreement: float, seed: int) -> str:
    """A draft of `text` in which each piece is, with probability 1 - agreement, another word (a sign: another sign).

    The pieces around a replaced one stay as they are, so the draft agrees again right behind it.
    """
    check_number(ValueError, "agreement", agreement, 0, 1)
    rng = random.Random(seed)  # noqa: S311 - a reproducible draft, no secret
    return "".join(piece if rng.random() < agreement else _another(piece) for piece in split_pieces(text))


def _another(piece: str) -> str:
    word = piece.removeprefix(" ")
    if word[:1].isalnum() or word[:1] == "_":
        return piece.removesuffix(word) + ("else" if word == "other" else "other")
    return "^" if piece == "~" else "~"


def _rest_behind(script: str, prefix: str) -> str:
    """What follows `prefix` in the script; where it is no beginning, what follows the longest match of its end.

    Of equally long matches the one nearest to the prefix's length counts; without any the script begins again.
    """
    if script.startswith(prefix):
        return script[len(prefix) :]
    pieces, asked = split_pieces(script), split_pieces(prefix)

    def fit(end: int) -> tuple[int, int]:
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], _backwards(pieces, end, asked)))
        return num_shared, -abs(end - len(asked)) if num_shared else -end

    return "".join(pieces[max(range(len(pieces) + 1), key=fit) :])


def _backwards(pieces: Sequence[str], end: int, asked: Sequence[str]) -> zip[tuple[str, str]]:
    return zip(reversed(pieces[:end]), reversed(asked), strict=False)


class _Vocabulary:
    """Ids of pieces, given out in the order in which they are seen; the mark of the end has EOS_ID and no text."""

    def __init__(self) -> None:
        self._pieces = [""]
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        parts = _MARK.split(text)  # every second one is a mark
        return [self._id(p) for i, part in enumerate(parts) for p in ([part] if i % 2 else split_pieces(part))]

    def decode(self, token_ids: Sequence[int]) -> str:
        if any(not 0 <= token_id < len(self._pieces) for token_id in token_ids):
            raise InvalidRequestError(f"token ids are out of range; this server has given out {len(self._pieces)}")
        return "".join(self._pieces[token_id] for token_id in token_ids)

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """The answer to one prompt; `repeated` is a prefix that comes again in front of it, `ending` the ids behind it."""

    prompt_ids: Sequence[int]
    pieces: Sequence[str]
    finish_reason: Literal["stop", "length"]
    ending: Sequence[int] = ()
    repeated: str = ""

    @property
    def text(self) -> str:
        return self.repeated + "".join(self.pieces)


_Frame: TypeAlias = Callable[[str, str | None], Json]  # a choice of a stream, from a text and a finish reason


class ModelServer:
    """Answers every prompt with `answer`, on a free port of 127.0.0.1, inside its `async with`.

    continues_prefix: whether a last message of the assistant is continued: with `continue_final_message` ("fields"),
    always and with that message's text once more in front ("repeats"), or never. `faults` may be set anew at any time.

    `requests` are the bodies of those that asked for text; `num_open_streams` of them are being answered or wait for
    their turn, `num_cancelled` were left by their client; `num_generated_tokens` is what all of them cost.
    """

    def __init__(
        self,
        answer: str,
        *,
        latency: Latency = _NO_LATENCY,
        faults: Faults = _NO_FAULTS,
        continues_prefix: ContinuesPrefix = None,
    ) -> None:
        self.answer = answer
        self.latency = latency
        self.faults = faults
        self.continues_prefix: ContinuesPrefix = continues_prefix
        self.url = ""
        self.requests: list[Json] = []
        self.num_open_streams = self.num_cancelled = self.num_generated_tokens = 0
        self._vocabulary = _Vocabulary()
        self._slots = None if latency.max_streams is None else asyncio.Semaphore(latency.max_streams)
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._refuse], client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # ------------------------------------------------------------------------------------------ endpoints

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, faults = await self._admit(request)
        prefix = self._prefix(body)
        prompt_ids = self._vocabulary.encode(_rendered(body, continued=prefix is not None))
        repeated = prefix or "" if self.continues_prefix == "repeats" else ""
        answer = self._answer(body, prompt_ids, prefix or "", _max_tokens(body, None), repeated)

        def frame(text: str, finish: str | None) -> Json:
            return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish}

        async with self._turn():
            if body.get("stream"):
                return await self._stream(request, answer, _lines(body, answer, "chat.completion.chunk", frame), faults)
            await self._generate([answer])
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
        return _json("chat.completion", [choice], _usage([answer]))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body, faults = await self._admit(request)
        answers = [self._completion(body, prompt_ids) for prompt_ids in self._prompts(body.get("prompt"))]

        def frame(text: str, finish: str | None) -> Json:
            token_ids = [*self._vocabulary.encode(text), *(answers[0].ending if finish else ())]
            return {"index": 0, "text": text, "token_ids": token_ids, "finish_reason": finish}

        async with self._turn():
            if body.get("stream"):
                if len(answers) > 1:
                    raise InvalidRequestError("this server streams no batches")
                lines = _lines(body, answers[0], "text_completion", frame)
                return await self._stream(request, answers[0], lines, faults)
            await self._generate(answers)
        choices = [self._choice(body, index, answer) for index, answer in enumerate(answers)]
        return _json("text_completion", choices, _usage(answers))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _read(request)
        continued = bool(body.get("continue_final_message"))
        text = _rendered(body, continued=continued) if "messages" in body else str(body.get("prompt", ""))
        token_ids = self._vocabulary.encode(text)
        return web.json_response({"tokens": token_ids, "count": len(token_ids), "max_model_len": 1 << 20})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self._vocabulary.decode((await _read(request)).get("tokens", []))})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    # ------------------------------------------------------------------------------------------ refusals

    @web.middleware
    async def _refuse(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path in self.faults.missing:
            return _error(404, f"{request.path} is not here")
        try:
            return await handler(request)
        except InvalidRequestError as error:
            return _error(400, str(error))
        except _Failure as failure:
            return failure.response

    async def _admit(self, request: web.Request) -> tuple[Json, Faults]:
        """The body of a request for text, and the faults its answer has."""
        body = await _read(request)
        self.requests.append(body)
        faults, last = self.faults, self.faults.num_requests
        if last is not None and len(self.requests) > last:
            faults = _NO_FAULTS
        if faults.status is not None:
            raise _Failure(faults.status, faults.retry_after_s)
        return body, faults

    # ------------------------------------------------------------------------------------------ answers

    def _prefix(self, body: Json) -> str | None:
        """The text that a chat request wants continued."""
        last = _messages(body)[-1]
        wanted = self.continues_prefix == "repeats" or (
            self.continues_prefix == "fields" and bool(body.get("continue_final_message"))
        )
        return last.text if wanted and last.role == "assistant" else None

    def _prompts(self, prompts: str | list[Any] | None) -> list[list[int]]:
        """The prompts of a completion: one or many, each a text or token ids."""
        if isinstance(prompts, str):
            return [self._vocabulary.encode(prompts)]
        if not prompts:
            raise InvalidRequestError("prompt must be a text, token ids, or a list of either")
        if isinstance(prompts[0], int):
            return [prompts]
        return [self._vocabulary.encode(p) if isinstance(p, str) else p for p in prompts]

    def _completion(self, body: Json, prompt_ids: Sequence[int]) -> _Answer:
        prefix = self._vocabulary.decode(prompt_ids).rpartition(_ASSISTANT)[2]
        return self._answer(body, prompt_ids, prefix, _max_tokens(body, 16), "")

    def _answer(
        self, body: Json, prompt_ids: Sequence[int], prefix: str, max_tokens: int | None, repeated: str
    ) -> _Answer:
        pieces = split_pieces(_rest_behind(self.answer, prefix))
        is_cut = max_tokens is not None and len(pieces) >= max_tokens
        text = "".join(pieces[:max_tokens])
        stops = [at for stop in _stops(body) if (at := text.find(stop)) >= 0]
        return _Answer(
            prompt_ids=prompt_ids,
            pieces=split_pieces(text[: min(stops)]) if stops else pieces[:max_tokens],
            finish_reason="length" if is_cut and not stops else "stop",
            ending=() if is_cut or stops else (EOS_ID,),
            repeated=repeated,
        )

    def _choice(self, body: Json, index: int, answer: _Answer) -> Json:
        token_ids = [*self._vocabulary.encode(answer.text), *answer.ending]
        choice: Json = {
            "index": index,
            "text": answer.text,
            "token_ids": token_ids,
            "finish_reason": answer.finish_reason,
        }
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(answer.prompt_ids)
        return choice

    def _prompt_logprobs(self, prompt_ids: Sequence[int]) -> list[Json | None]:
        """As vLLM has them: by position the token itself and the likeliest; the first token has none."""
        pieces = [self._vocabulary.decode([token_id]) for token_id in prompt_ids]
        first = len(pieces) - pieces[::-1].index(_ASSISTANT) if _ASSISTANT in pieces else 0
        entries: list[Json | None] = []
        for at, token_id in enumerate(prompt_ids):
            rest = split_pieces(_rest_behind(self.answer, "".join(pieces[first:at])))
            likeliest = token_id if at < first else self._vocabulary.encode(rest[0])[0] if rest else EOS_ID
            entries.append(self._ranked(likeliest, token_id) if at else None)
        return entries

    def _ranked(self, likeliest: int, token_id: int) -> Json:
        return {
            str(each): {"logprob": logprob, "rank": rank, "decoded_token": self._vocabulary.decode([each])}
            for each, logprob, rank in ((token_id, _UNLIKELY, 2), (likeliest, 0.0, 1))  # if they are one, the last wins
        }

    # ------------------------------------------------------------------------------------------ time

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None]:
        """Counts a request, and holds one of the `max_streams` places for it."""
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

    async def _generate(self, answers: Sequence[_Answer]) -> None:
        """Spends the time of answers that are generated together."""
        start = self._first_at(answers)
        for index in range(max(1, *(len(answer.pieces) for answer in answers))):
            await _sleep_until(start + index * self.latency.token_s)
            self.num_generated_tokens += sum(index < len(answer.pieces) for answer in answers)

    async def _stream(
        self, request: web.Request, answer: _Answer, lines: Sequence[bytes], faults: Faults
    ) -> web.StreamResponse:
        start = self._first_at([answer])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index, line in enumerate(lines):
            await _sleep_until(start + max(0, min(index, len(answer.pieces) - 1)) * self.latency.token_s)
            if index == faults.drop_after and request.transport is not None:
                request.transport.abort()
                break
            await _disturb(response, faults, index)
            self.num_generated_tokens += index < len(answer.pieces)
            await response.write(line)
        return response

    def _first_at(self, answers: Sequence[_Answer]) -> float:
        num_prompt_tokens = max(len(answer.prompt_ids) for answer in answers)
        return asyncio.get_running_loop().time() + self.latency.until_first_s(num_prompt_tokens)


async def _sleep_until(at: float) -> None:
    """Sleep to a time of the loop's clock, so that the lateness of sleeps does not add up."""
    await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))


async def _disturb(response: web.StreamResponse, faults: Faults, index: int) -> None:
    if index == faults.malformed_after:
        await response.write(_MALFORMED)
    if index == faults.stall_after:
        await asyncio.Event().wait()  # until the client leaves or the server ends


# ---------------------------------------------------------------------------------------------- bodies


class _Failure(Exception):  # noqa: N818 - it is an answer, not an error of this server
    def __init__(self, status: int, retry_after_s: float | None) -> None:
        super().__init__(status)
        self.response = _error(status, f"scripted failure {status}")
        if retry_after_s is not None:
            self.response.headers["Retry-After"] = f"{retry_after_s:g}"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _json(name: str, choices: list[Json], usage: Json) -> web.Response:
    return web.json_response({"id": MODEL, "object": name, "model": MODEL, "choices": choices, "usage": usage})


async def _read(request: web.Request) -> Json:
    try:
        body = await request.json()
    except ValueError as error:
        raise InvalidRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return cast("Json", body)


def _messages(body: Json) -> list[ChatMessage]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages must be a list of at least one")
    return [ChatMessage.from_openai(message) for message in cast("list[Mapping[str, Any]]", messages)]


def _rendered(body: Json, *, continued: bool) -> str:
    text = "".join(f"<|{message.role}|>{message.text}<|end|>" for message in _messages(body))
    if continued:
        return text.removesuffix("<|end|>")
    return text + (_ASSISTANT if body.get("add_generation_prompt", True) else "")


def _max_tokens(body: Json, default: int | None) -> int | None:
    value = body.get("max_completion_tokens", body.get("max_tokens", default))
    check_number(InvalidRequestError, "max_tokens", value, 1, integer=True)
    return cast("int | None", value)


def _stops(body: Json) -> list[str]:
    stop: str | list[str] = body.get("stop") or []
    return [stop] if isinstance(stop, str) else stop


def _usage(answers: Sequence[_Answer]) -> Json:
    num_prompt = sum(len(answer.prompt_ids) for answer in answers)
    num_answer = sum(len(answer.pieces) for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
    }


def _lines(body: Json, answer: _Answer, name: str, frame: _Frame) -> list[bytes]:
    """The frames of a stream: one for each token, one for the finish, the usage if asked for, the end."""
    texts = list(answer.pieces)
    if answer.repeated:
        texts[:1] = [answer.repeated + "".join(texts[:1])]
    choices = [[frame(text, None)] for text in texts] + [[frame("", answer.finish_reason)]]
    head = {"id": MODEL, "object": name, "model": MODEL}
    chunks: list[Json] = [{**head, "choices": choice} for choice in choices]
    options: Json = body.get("stream_options") or {}
    if options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": _usage([answer])})
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]
