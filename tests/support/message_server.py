"""A server of vLLM's kind on 127.0.0.1 whose chat endpoint takes tool calls and reasoning out of what its model writes.

The model writes, after each question, what a test says (`answers`): text with marks of calls in Hermes' form, which may
begin with reasoning. A `#` in it is drawn: 1, 2 or 3. Its tokens are words, signs and, of what is not ASCII, bytes.
`/v1/chat/completions/derender` reads token ids as chat does, and `/render` tells the prompt.

With `constrains` its decoding is constrained where a request says so, as vLLM's: within calls of strict tools every
digit is a 7, and a form (`response_format`, or a call that must be made) begins with a brace, after the reasoning. The
state of a constraint is that of what one request has written; `/inference/v1/generate` starts anew with it, as vLLM's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing as _closing
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aiohttp import web

from support.wire import served

__all__ = ["DRAWN", "END", "MessageServer", "ReadMessage", "call", "read_message", "serving_messages"]

_ANSWER: Final = "\nanswer\n"
_numbers: Final = itertools.count()
END: Final = "<|im_end|>"
_TOKEN: Final = re.compile(r"<\|im_\w+\|>|</?think>| ?[A-Za-z]+|.", re.DOTALL)
DRAWN: Final = (("1", 0.6), ("2", 0.3), ("3", 0.1))
_NAME: Final = re.compile(r'"name"\s*:\s*"([^"]+)"')
_ARGUMENTS: Final = re.compile(r'"arguments"\s*:\s*')


class ReadMessage(NamedTuple):
    """What chat makes of a text."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


def call(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def read_message(text: str, *, is_whole: bool) -> ReadMessage:
    """The message of a text; not `is_whole`, what may be the beginning of a mark is held back."""
    reasoning = ""
    if text.startswith("<think>"):
        reasoning, closed, text = text.removeprefix("<think>").partition("</think>")
        if not closed:
            return ReadMessage("", _hold_back(reasoning, "</think>", is_whole=is_whole), ())
    content, opened, rest = text.partition("<tool_call>")
    if not opened:
        content = _hold_back(content, "<tool_call>", is_whole=is_whole)
    calls: list[tuple[str, str]] = []
    for body in rest.split("<tool_call>") if opened else ():
        written, closed, _ = body.partition("</tool_call>")
        written = (written if closed else _hold_back(written, "</tool_call>", is_whole=False)).strip()
        name, arguments = _NAME.search(written), _ARGUMENTS.search(written)
        if name is None:
            break
        given = "" if arguments is None else written[arguments.end() :]
        if closed or is_json(written):
            given = given.removesuffix("}")
        calls.append((name[1], given))
    return ReadMessage(content, reasoning, tuple(calls))


def _hold_back(text: str, mark: str, *, is_whole: bool) -> str:
    longest = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
    return text if is_whole or not longest else text[:-longest]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@dataclass(eq=False)
class MessageServer:
    """The server, and what it was asked. `derender_status`: what `/derender` answers; `corrupts`: it reads wrongly."""

    answers: dict[str, str] = field(default_factory=dict[str, str])
    token_s: float = 0.002
    first_token_s: float = 0.004
    derender_status: int = 200
    detokenize_status: int = 200
    num_derenders_left: int | None = None  # after which it answers 404
    tokens_per_chunk: int = 1  # of chat
    corrupts: bool = False
    corrupts_parts: bool = False  # a call that is not whole is missing
    writes_anew: bool = False  # read without streaming, calls have other white space, and text before them is left out
    whole_status: int = 200  # … and this is what comes of it
    loses_rest: bool = False  # of tokens that come at once it reads no more than the reasoning, if there is any
    is_constrained: bool = False
    constrains: bool = False
    generate_status: int = 200
    reasons: bool = False  # its chat takes reasoning out of every answer
    url: str = ""
    paths: Counter[str] = field(default_factory=Counter[str])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_open: int = 0
    num_written: int = 0
    _ids: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _tokens: list[bytes] = field(default_factory=list[bytes])
    _random: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311 - no secret

    # ------------------------------------------------------------------------------------------ tokens

    def encode(self, text: str) -> list[int]:
        parts = (part.encode() for part in _TOKEN.findall(text))
        return [self._id(token) for part in parts for token in ((part,) if part.isascii() else _split_bytes(part))]

    def _id(self, token: bytes) -> int:
        if token not in self._ids:
            self._ids[token] = len(self._tokens)
            self._tokens.append(token)
        return self._ids[token]

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._tokens[token_id] for token_id in token_ids).decode(errors="replace")

    def _render(self, body: dict[str, Any]) -> list[int]:
        lines = [f"tool {json.dumps(tool)}" for tool in body.get("tools") or ()]
        for message in body["messages"]:
            calls = [call(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
            lines.append(f"{message['role']} {message.get('content') or ''}{''.join(calls)}")
        return self.encode("\n".join(lines) + _ANSWER)

    def _next_id(self, context_ids: Sequence[int], temperature: float) -> int:
        """The model's token after a prompt and what it has written so far."""
        mark = self.encode(_ANSWER)
        ends = (n for n in range(len(context_ids), 0, -1) if list(context_ids[max(0, n - len(mark)) : n]) == mark)
        end = next(ends, None)
        if end is None:
            return self._id(b"?")
        question = self.decode(context_ids[: end - len(mark)]).rpartition("user ")[2]
        script = [*self.encode(self.answers.get(question, "Hello there.")), self._id(END.encode())]
        written, num_written = list(context_ids[end:]), len(context_ids) - end
        drawn = [self._id(text.encode()) for text, _ in DRAWN]
        fits = len(written) < len(script) and all(
            own == due or (due == self._id(b"#") and own in drawn) or (self.constrains and self._is_forced(own, due))
            for own, due in zip(written, script, strict=False)
        )
        if not fits:
            return self._id(b"!")
        if script[num_written] != self._id(b"#"):
            return script[num_written]
        return self._random.choices(drawn, [p for _, p in DRAWN])[0] if temperature else drawn[0]

    def _is_forced(self, own: int, due: int) -> bool:
        """Whether a token is what a constraint makes of the one that the model would have written."""
        return self._tokens[own] == b"{" or (self._tokens[own] == b"7" and self._tokens[due].isdigit())

    def _find_constraint(self, body: dict[str, Any]) -> str | None:
        """What is constrained in a request's answer."""
        if not self.constrains:
            return None
        if body.get("response_format") or body.get("tool_choice") not in (None, "auto", "none"):
            return "answer"
        return "calls" if any(tool["function"].get("strict") for tool in body.get("tools") or ()) else None

    def _hold(
        self,
        token_id: int,
        constraint: str,
        prompt_ids: Sequence[int],
        written: Sequence[int],
        *,
        finds_reasoning: bool,
    ) -> int:
        """The token that a constraint lets be, by its state after what one request has `written`.

        `finds_reasoning`: the end of the reasoning, before which all is free, is found in the prompt as well.
        """
        text, mark = self.decode(written), "</think>"
        prompt = self.decode(prompt_ids).rpartition(_ANSWER)[2] if finds_reasoning else ""
        has_ended = not self.reasons or mark in prompt
        if constraint == "answer":
            is_first = not written if has_ended else text.endswith(mark)
            return self._id(b"{") if is_first else token_id
        is_inside = text.rfind("<tool_call>") > text.rfind("</tool_call>") and (has_ended or mark in text)
        return self._id(b"7") if is_inside and self._tokens[token_id].isdigit() else token_id

    # ------------------------------------------------------------------------------------------ answers

    async def _write(
        self,
        prompt_ids: list[int],
        body: dict[str, Any],
        constraint: str | None = None,
        *,
        finds_reasoning: bool = True,
    ) -> AsyncGenerator[tuple[int, str | None]]:
        """Tokens, the last with the reason why it is the last."""
        written: list[int] = []
        forced = next((int(token_id) for token_id in body.get("logit_bias") or ()), None)
        temperature, limit = body.get("temperature", 1.0), body.get("max_tokens") or 1000
        self.num_open += 1
        try:
            await asyncio.sleep(self.first_token_s)
            while True:
                token_id = self._next_id([*prompt_ids, *written], temperature) if forced is None else forced
                if constraint is not None:
                    token_id = self._hold(token_id, constraint, prompt_ids, written, finds_reasoning=finds_reasoning)
                written.append(token_id)
                self.num_written += 1
                is_end = written[-1] == self._id(END.encode())
                reason = "stop" if is_end else "length" if len(written) >= limit else None
                yield written[-1], reason
                if reason is not None:
                    return
                await asyncio.sleep(self.token_s)
        finally:
            self.num_open -= 1

    async def _answer_chat(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt_ids = self._render(body)
        written: list[int] = []
        untold: list[int] = []
        shown = ReadMessage("", "", ())
        response = await _open_stream(request)
        async with _closing(self._write(prompt_ids, body, self._find_constraint(body))) as tokens:
            async for token_id, reason in tokens:
                written.append(token_id)
                untold.append(token_id)
                if reason is None and len(untold) < self.tokens_per_chunk:
                    continue
                text = self._decode_whole_characters(written[:-1] if reason == "stop" else written)
                message = _join(shown, self._read(text, body, is_whole=reason is not None))
                choice = {"index": 0, "delta": _diff(shown, message), "token_ids": untold, "finish_reason": reason}
                untold = []
                if reason == "stop" and message.calls:
                    choice["finish_reason"] = "tool_calls"
                shown = message
                if not body.get("return_token_ids"):
                    del choice["token_ids"]
                await _send(response, {"choices": [choice]})
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(written)}
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _read(self, text: str, body: dict[str, Any], *, is_whole: bool) -> ReadMessage:
        return read_message(text, is_whole=is_whole) if body.get("tools") or self.reasons else ReadMessage(text, "", ())

    def _read_ids(self, token_ids: Sequence[int], body: dict[str, Any], *, is_whole: bool) -> ReadMessage:
        return self._read(self._decode_whole_characters(token_ids), body, is_whole=is_whole)

    def _decode_whole_characters(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids).rstrip("\N{REPLACEMENT CHARACTER}")

    async def _complete(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        if body.get("prompt_logprobs"):
            return web.json_response(self._score(prompts[0], body["prompt_logprobs"]))
        if not body.get("stream"):
            rows = [[token async for token in self._write(prompt, body)] for prompt in prompts]
            choices = [
                {
                    "index": index,
                    "text": self._get_text(row[-1][0]),
                    "token_ids": [token_id for token_id, _ in row],
                    "finish_reason": row[-1][1],
                }
                for index, row in enumerate(rows)
            ]
            return web.json_response({"choices": choices})
        return await self._stream_text(request, prompts[0], self._write(prompts[0], body))

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.generate_status != 200:
            return _refuse(self.generate_status)
        tag = body["sampling_params"]["structured_outputs"]["structural_tag"]
        constraint = "calls" if json.loads(tag)["format"]["type"] == "triggered_tags" else "answer"
        finds_reasoning = body["reasoning_ended"] is not False
        written = self._write(body["token_ids"], body["sampling_params"], constraint, finds_reasoning=finds_reasoning)
        return await self._stream_text(request, body["token_ids"], written)

    async def _stream_text(
        self, request: web.Request, prompt_ids: list[int], opened: AsyncGenerator[tuple[int, str | None]]
    ) -> web.StreamResponse:
        written: list[int] = []
        shown = ""
        response = await _open_stream(request)
        async with _closing(opened) as tokens:
            async for token_id, reason in tokens:
                written.append(token_id)
                text = self._decode_whole_characters(written[:-1] if reason == "stop" else written)
                choice = {"index": 0, "text": text[len(shown) :], "token_ids": [token_id], "finish_reason": reason}
                shown = text
                await _send(response, {"choices": [choice]})
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(written)}
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _get_text(self, token_id: int) -> str:
        return "" if token_id == self._id(END.encode()) else self.decode([token_id])

    def _score(self, prompt_ids: list[int], top: int) -> dict[str, Any]:
        """The model's own token at each place, likelier by far than others."""

        def rank(end: int) -> list[tuple[int, float]]:
            best = self._next_id(prompt_ids[:end], 0.0)
            others = [token_id for token_id in range(top + 1) if token_id != best][: top - 1]
            return [(best, -0.1), *((token_id, -5.0 - n) for n, token_id in enumerate(others))]

        rows = [{str(i): {"logprob": p} for i, p in rank(end)} for end in range(1, len(prompt_ids))]
        last = {f"token_id:{i}": p for i, p in rank(len(prompt_ids))}
        choice = {"index": 0, "text": "", "prompt_logprobs": [None, *rows], "logprobs": {"top_logprobs": [last]}}
        return {"choices": [choice | {"finish_reason": "length"}]}

    async def _derender(self, body: dict[str, Any]) -> web.Response:
        if self.num_derenders_left is not None:
            self.num_derenders_left -= 1
            if self.num_derenders_left < 0:
                self.derender_status = 404
        if self.derender_status != 200:
            return _refuse(self.derender_status)
        if "generate_response" in body:
            return self._derender_whole(body)
        (choice,) = body["generate_chunk"]["choices"]
        reason = choice["finish_reason"]
        read_ids = body["stream_state"]["output_token_ids"]
        shown = ReadMessage("", "", ())
        for end in range(1, len(read_ids) + 1):
            shown = _join(shown, self._read_ids(read_ids[:end], body["chat_request"], is_whole=False))
        message = _join(
            shown, self._read_ids([*read_ids, *choice["token_ids"]], body["chat_request"], is_whole=reason is not None)
        )
        if self.corrupts:
            message = message._replace(content=message.content.swapcase(), calls=message.calls[:-1])
        if self.corrupts_parts and reason is None:
            message = message._replace(calls=message.calls[:-1])
        if self.loses_rest and message.reasoning != shown.reasoning:
            message = message._replace(content=shown.content)
        calls_now = message.calls != shown.calls
        reason = "tool_calls" if reason is not None and calls_now else reason  # as vLLM, of a cut answer, too
        parsed = {"index": 0, "delta": _diff(shown, message), "finish_reason": reason}
        return web.json_response({"chunk": {"choices": [parsed]}, "stream_state": {}})

    def _derender_whole(self, body: dict[str, Any]) -> web.Response:
        if self.whole_status != 200:
            return _refuse(self.whole_status)
        (choice,) = body["generate_response"]["choices"]
        message = self._read_ids(choice["token_ids"], body["chat_request"], is_whole=True)
        if self.corrupts:
            message = message._replace(content=message.content.swapcase(), calls=message.calls[:-1])
        if self.writes_anew and message.calls:
            calls = tuple((name, json.dumps(json.loads(arguments), indent=1)) for name, arguments in message.calls)
            message = message._replace(content="", calls=calls)
        parsed = {"index": 0, "message": _diff(ReadMessage("", "", ()), message), "finish_reason": "stop"}
        return web.json_response({"choices": [parsed]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.paths[request.path] += 1
        self.bodies.append(body)
        calls = {
            "/v1/chat/completions": lambda: self._answer_chat(request, body),
            "/v1/completions": lambda: self._complete(request, body),
            "/tokenize": lambda: self._tokenize(body),
            "/detokenize": lambda: self._detokenize(body),
            "/v1/chat/completions/derender": lambda: self._derender(body),
            "/v1/chat/completions/render": lambda: self._tell_prompt(body),
            "/inference/v1/generate": lambda: self._generate(request, body),
        }
        return await calls[request.path]()

    async def _tokenize(self, body: dict[str, Any]) -> web.Response:
        ids = self._render(body) if "messages" in body else self.encode(body["prompt"])
        return web.json_response({"tokens": ids, "max_model_len": 100_000})

    async def _detokenize(self, body: dict[str, Any]) -> web.Response:
        if self.detokenize_status != 200:
            return _refuse(self.detokenize_status)
        return web.json_response({"prompt": self.decode(body["tokens"])})

    async def _tell_prompt(self, body: dict[str, Any]) -> web.Response:
        if self.derender_status != 200:
            return _refuse(self.derender_status)
        constraint = self._find_constraint(body) or ("answer" if self.is_constrained else None)
        form: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [{}], "excludes": []}
        if constraint == "answer":
            form = {"type": "tags_with_separator", "tags": [{}], "separator": ""}
        params: dict[str, Any] = {name: body[name] for name in ("temperature", "seed") if name in body}
        params["max_tokens"] = body.get("max_tokens") or 1000
        if constraint is not None:
            params["structured_outputs"] = {"json": None, "structural_tag": json.dumps({"format": form})}
        prompt_ids, reasoning_ended = self._render(body), False if self.reasons else None
        rendered = {"request_id": "r", "token_ids": prompt_ids, "sampling_params": params, "model": body["model"]}
        return web.json_response(rendered | {"reasoning_ended": reasoning_ended, "stream": False})


def _refuse(status: int) -> web.Response:
    return web.json_response({"error": {"message": "there is no such call"}}, status=status)


def _split_bytes(part: bytes) -> list[bytes]:
    return [part[at : at + 1] for at in range(len(part))]


def _join(shown: ReadMessage, message: ReadMessage) -> ReadMessage:
    """A message as a stream gives it, which takes nothing back."""
    calls = [
        (name, given if index >= len(shown.calls) else max(shown.calls[index][1], given, key=len))
        for index, (name, given) in enumerate(message.calls)
    ]
    return message._replace(calls=tuple(calls))


def _diff(shown: ReadMessage, message: ReadMessage) -> dict[str, Any]:
    """The delta that makes one of the other."""
    calls: list[dict[str, Any]] = []
    for index, (name, given) in enumerate(message.calls):
        if index >= len(shown.calls):
            function = {"name": name, "arguments": given}
            calls.append({"index": index, "id": f"call-{next(_numbers)}", "type": "function", "function": function})
        elif more := given[len(shown.calls[index][1]) :]:
            calls.append({"index": index, "function": {"arguments": more}})
    delta: dict[str, Any] = {"tool_calls": calls} if calls else {}
    for name in ("content", "reasoning"):
        if more := getattr(message, name)[len(getattr(shown, name)) :]:
            delta[name] = more
    return delta


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@asynccontextmanager
async def serving_messages(server: MessageServer) -> AsyncGenerator[MessageServer]:
    """The server, open; its address is `url`."""
    async with served("/{path:.*}", server.answer) as root:
        server.url = f"{root}/v1"
        yield server
