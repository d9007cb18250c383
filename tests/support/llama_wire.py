"""A llama-server for tests, as its sources have it: what it says of tokens that end inside a character."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Self, TypeAlias

from aiohttp import web

from llm_spec.measure.tokens import split_into_pieces
from support.wire import served

__all__ = ["EOS_ID", "LlamaServer"]

Json: TypeAlias = dict[str, Any]

EOS_ID: Final = 256
_MARK: Final = "<|assistant|>"
_WHOLE: Final = ("é",)  # characters that are one token; all others that are not ASCII are a token a byte


class _Sent(NamedTuple):
    """A token that was sent, with the text that had waited for it."""

    token_id: int
    text: bytes


class LlamaServer:
    """Greedily writes `answer`; what follows any other beginning is a tilde. `paths` are those of all requests.

    `has_post_sampling`: it knows the field that has it tell probabilities after sampling, under other names.
    """

    def __init__(self, answer: str, *, has_post_sampling: bool = True) -> None:
        self._has_post_sampling = has_post_sampling
        self._pieces = [bytes([byte]) for byte in range(256)] + [b""]
        self._answer_ids = [*self.encode(answer), EOS_ID]
        self.paths: list[str] = []
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[Self]:
        async with served("/{path:.*}", self._answer, shutdown_s=0.05) as root:
            self.url = f"{root}/v1"
            yield self

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for piece in split_into_pieces(text):
            for part in [piece] if piece.isascii() else list(piece):
                if part.isascii() or part in _WHOLE:
                    token_ids.append(self._id_of(part.encode()))
                else:
                    token_ids += part.encode()
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._pieces[token_id] for token_id in token_ids).decode(errors="replace")

    # ------------------------------------------------------------------------------------------ the model

    def _id_of(self, piece: bytes) -> int:
        if piece not in self._pieces:
            self._pieces.append(piece)
        return self._pieces.index(piece)

    def _next_id(self, prompt_ids: Sequence[int]) -> int:
        mark = self._id_of(_MARK.encode())
        reverse = [*prompt_ids[::-1], mark]
        written = reverse[: reverse.index(mark)][::-1]
        fits = mark in prompt_ids and written == self._answer_ids[: len(written)]
        return self._answer_ids[len(written)] if fits and len(written) < len(self._answer_ids) else self._id_of(b"~")

    def _written(self, prompt_ids: Sequence[int], max_tokens: int) -> Iterator[int]:
        context = list(prompt_ids)
        for _ in range(max_tokens):
            context.append(self._next_id(context))
            yield context[-1]
            if context[-1] == EOS_ID:
                return

    def _prompt_ids(self, text: str) -> list[int]:
        before, mark, behind = text.rpartition(_MARK)
        return [*self.encode(before), self._id_of(mark.encode()), *self.encode(behind)]

    # ------------------------------------------------------------------------------------------ the wire

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        match request.path:
            case "/apply-template":
                return await self._apply_template(request)
            case "/tokenize":
                return await self._handle_tokenize(request)
            case "/detokenize":
                return await self._handle_detokenize(request)
            case "/completion":
                return await self._completion(request)
            case "/v1/completions" | "/v1/chat/completions":
                return await self._openai(request)
            case _:
                raise web.HTTPNotFound

    async def _apply_template(self, request: web.Request) -> web.Response:
        texts = [f"<|{message['role']}|>{message['content']}" for message in (await request.json())["messages"]]
        return web.json_response({"prompt": "".join(texts) + _MARK})

    async def _handle_tokenize(self, request: web.Request) -> web.Response:
        content = (await request.json())["content"]
        return web.json_response({"tokens": self._prompt_ids(content) if _MARK in content else self.encode(content)})

    async def _handle_detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"content": self.decode((await request.json())["tokens"])})

    async def _completion(self, request: web.Request) -> web.Response:
        """Its own call: every id in `tokens`; one prompt is answered by an object, several by a list."""
        body = await request.json()
        assert (body["n_predict"], body["return_tokens"]) == (1, True)
        answers: list[Json] = []
        for index, prompt_ids in enumerate(body["prompt"]):
            token_id = self._next_id(prompt_ids)
            stop_type = "eos" if token_id == EOS_ID else "limit"
            content = self.decode([token_id])
            answers.append({"index": index, "content": content, "tokens": [token_id], "stop_type": stop_type})
        return web.json_response(answers if len(answers) > 1 else answers[0])

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's calls; ids are in logprobs, and a token that ends inside a character is in none."""
        body: Json = await request.json()
        is_chat = "messages" in body
        if not body.get("stream"):
            return web.json_response({"choices": [self._choice(*prompt) for prompt in enumerate(body["prompt"])]})
        prompt_ids = self._prompt_ids(body["messages"][-1]["content"] + _MARK) if is_chat else body["prompt"]
        written = list(self._written(prompt_ids, body.get("max_tokens") or 1000))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for sent in self._sent(written):
            text = sent.text.decode(errors="replace")
            choice: Json = {"index": 0, "finish_reason": None, "logprobs": {"content": [self._entry(sent, body)]}}
            await _write(response, choice | ({"delta": {"content": text}} if is_chat else {"text": text}))
        reason = "stop" if written[-1] == EOS_ID else "length"
        end: Json = {"delta": {}} if is_chat else {"text": "", "logprobs": None}
        await _write(response, {"index": 0, "finish_reason": reason, **end})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _choice(self, index: int, prompt_ids: Sequence[int]) -> Json:
        """What follows a prompt of a batch, one token."""
        token_id = self._next_id(prompt_ids)
        sent = list(self._sent([token_id]))
        reason = "stop" if token_id == EOS_ID else "length"
        logprobs = {"content": [self._entry(token, {}) for token in sent]} if sent else None
        return {"index": index, "text": self.decode([token_id]), "logprobs": logprobs, "finish_reason": reason}

    def _sent(self, token_ids: Sequence[int]) -> Iterator[_Sent]:
        waiting = b""
        for token_id in token_ids:
            waiting += self._pieces[token_id]
            if not waiting.decode(errors="replace").endswith("\N{REPLACEMENT CHARACTER}"):
                yield _Sent(token_id, waiting)
                waiting = b""

    def _entry(self, sent: _Sent, body: Json) -> Json:
        likely = {"id": sent.token_id, "bytes": [*self._pieces[sent.token_id]]}
        if self._has_post_sampling and body.get("post_sampling_probs"):
            probs: Json = {"prob": 1.0, "top_probs": [{**likely, "prob": 1.0}]}
        else:
            probs = {"logprob": 0.0, "top_logprobs": [{**likely, "logprob": 0.0}]}
        return {"id": sent.token_id, "bytes": [*sent.text], **probs}


async def _write(response: web.StreamResponse, choice: Json) -> None:
    await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
