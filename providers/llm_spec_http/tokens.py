"""HttpTokens: a server asked by token ids of its own vocabulary."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, cast

from llm_spec import (
    ChatRequest,
    InvalidRequestError,
    LlmSpecError,
    NextToken,
    Sampling,
    ScoredToken,
    StreamEvent,
    TargetError,
)
from llm_spec.provider import Feature
from llm_spec_http.answer import read_answer
from llm_spec_http.client import HttpClient, MissingError
from llm_spec_http.convert import request_body, sampling_fields
from llm_spec_http.dialects.base import Body, Dialect, TokenApi, read_choices

__all__ = ["HttpTokens"]

T = TypeVar("T")

# Tokenizers cut between a word and a space that another word follows, whatever else they do: such stretches can be
# encoded by themselves and remembered, so that redrafted words need no round trip.
_STRETCH: Final = re.compile(r"(?<=\S)(?= \S)")
_MAX_SINGLE: Final = 4  # more unknown stretches than that are encoded in one call, and not remembered
_MAX_REMEMBERED: Final = 50_000


class HttpTokens:
    """A `TokenEndpoint` and `TokenScorer`. `lost` is called when the server does not do any more what that needs."""

    def __init__(
        self, client: HttpClient, model: str, dialect: Dialect, api: TokenApi, lost: Callable[[Feature], None]
    ) -> None:
        self.context_length: int | None = None
        self.max_top = api.max_top
        self._client = client
        self._model = model
        self._dialect = dialect
        self._api = api
        self._lost = lost
        self._own_fields = {*api.id_fields(chat=True), *api.id_fields(chat=False)}
        if api.max_top:
            self._own_fields.update(api.score_fields(1))
        self._remembered: dict[str, tuple[int, ...]] = {}
        self._decoded: dict[int, str] = {}

    def forget(self) -> None:
        """Forget what the server has told of its vocabulary."""
        self._remembered.clear()
        self._decoded.clear()

    async def encode(self, text: str) -> list[int]:
        stretches = _STRETCH.split(text)
        known = {s: self._remembered[s] for s in stretches if s in self._remembered}
        unknown = dict.fromkeys(s for s in stretches if s not in known)
        if len(unknown) > _MAX_SINGLE:
            return await self._told(lambda: self._api.encode(self._call, text))
        encoded = await asyncio.gather(*(self._told(partial(self._api.encode, self._call, s)) for s in unknown))
        known.update(zip(unknown, map(tuple, encoded), strict=True))
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered.update(known)
        return [token_id for s in stretches for token_id in known[s]]

    async def decode(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) != 1:
            return await self._told(lambda: self._api.decode(self._call, token_ids))
        if token_ids[0] not in self._decoded:
            self._decoded[token_ids[0]] = await self._told(lambda: self._api.decode(self._call, token_ids))
        return self._decoded[token_ids[0]]

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        body = self._chat_body(request)
        token_ids, context_length = await self._told(lambda: self._api.encode_chat(self._call, body))
        self.context_length = context_length or self.context_length
        return token_ids

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[NextToken]:
        return await self._told(lambda: self._sampled(prefixes, sampling_fields(sampling, self._dialect)))

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        repeated = request.prefix if self._dialect.repeats_prefix else ""
        body = self._chat_body(request) | self._api.id_fields(chat=True)
        async with self._stream("chat/completions", body, repeated) as events:
            yield events

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        limit = request.max_tokens
        if self.context_length is not None:  # servers stop after 16 tokens where nothing is said, and refuse too many
            room = self.context_length - len(token_ids)
            limit = room if limit is None else min(limit, room)
        body = self._chat_body(replace(request, prefix="", max_tokens=limit))
        del body["messages"]
        body |= {"prompt": list(token_ids), **self._api.id_fields(chat=False)}
        async with self._stream("completions", body, "") as events:
            yield events

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[ScoredToken]:
        body: Body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, **self._api.score_fields(top)}
        return await self._told(lambda: self._scored(body, num_rows, top), "token_scorer")

    # ------------------------------------------------------------------------------------------ inside

    async def _told(self, ask: Callable[[], Awaitable[T]], feature: Feature = "token_endpoint") -> T:
        """What a server tells, where it tells it in the form that was asked for."""
        try:
            return await ask()
        except MissingError:
            self._lost(feature)
            raise
        except InvalidRequestError as error:
            if not any(name in str(error) for name in self._own_fields):
                raise
            self._lost(feature)  # the server, or what is before it now, refuses what the caller knows nothing of
            raise TargetError(str(error)) from error
        except LlmSpecError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self._lost(feature)
            raise TargetError(
                self._client.told(f"answered in another form ({type(error).__name__}: {error})")
            ) from error

    async def _sampled(self, prefixes: Sequence[Sequence[int]], fields: Body) -> list[NextToken]:
        tokens = await self._api.sample_next(self._call, prefixes, fields)
        if len(tokens) != len(prefixes):
            raise ValueError(f"{len(tokens)} tokens for {len(prefixes)} prompts")
        return tokens

    async def _scored(self, body: Body, num_rows: int, top: int) -> list[ScoredToken]:
        (choice,) = read_choices(await self._call("completions", body))
        num_given, num_scored = len(body["prompt"]), len(choice["prompt_logprobs"])
        if num_scored != num_given:  # then nobody knows of which positions they are
            raise ValueError(f"{num_scored} prompt logprobs for {num_given} tokens")
        return _scored_rows(choice, num_rows, top)

    async def _call(self, path: str, body: Body) -> Any:
        return await self._client.call(path, {"model": self._model, **body})

    def _chat_body(self, request: ChatRequest) -> Body:
        return request_body(request, self._model, self._dialect)

    @asynccontextmanager
    async def _stream(self, path: str, body: Body, repeated: str) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with await self._told(lambda: self._client.open(path, body)) as response:
            answer = read_answer(self._client, response, repeated=repeated, read_token_ids=self._api.token_ids)
            async with aclosing(answer):
                yield answer


def _scored_rows(choice: Mapping[str, Any], num_rows: int, top: int) -> list[ScoredToken]:
    """As vLLM has them: a row is told at the position behind it, the last one with the token that it generated."""
    rows = cast("list[Mapping[str, Mapping[str, Any]]]", choice["prompt_logprobs"][1:])
    given = [[(int(token_id), float(entry["logprob"])) for token_id, entry in row.items()] for row in rows]
    generated = cast("Mapping[str, float]", choice["logprobs"]["top_logprobs"][0])
    given.append([(int(name.removeprefix("token_id:")), float(logprob)) for name, logprob in generated.items()])
    return [_ranked(row, top) for row in given[len(given) - num_rows :]]


def _ranked(row: list[tuple[int, float]], top: int) -> ScoredToken:
    """The likeliest `top` of a row; the token that was given is told besides them.

    Of equal ones the lowest id comes first, as where the server takes the likeliest: the given one is not preferred.
    """
    if len(row) < top or any(math.isnan(logprob) for _, logprob in row):
        raise ValueError(f"{row} for the likeliest {top} tokens")
    return ScoredToken(tuple(sorted(row, key=lambda entry: (-entry[1], entry[0]))[:top]))
