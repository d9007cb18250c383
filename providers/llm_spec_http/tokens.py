"""HttpTokenEndpoint: calls a server with token ids of its own vocabulary."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast

import aiohttp

from llm_spec import ChatRequest, InvalidRequestError, LlmSpecError, Sampling, StreamEvent, TargetError
from llm_spec.contract.endpoint import Feature, SampledToken, TopTokens
from llm_spec.kit.openai_chat import create_chunk_reader
from llm_spec_http.answer import read_http_answer_events
from llm_spec_http.client import HttpClient, MissingEndpointError
from llm_spec_http.convert import build_request_body, build_sampling_fields
from llm_spec_http.dialects.base import Body, ServerDialect, TokenApiDialect, read_choices_in_order

__all__ = ["HttpTokenEndpoint"]

T = TypeVar("T")
_WatchEvents: TypeAlias = Callable[[AsyncGenerator[StreamEvent]], AsyncGenerator[StreamEvent]]

# Every tokenizer cuts between a word and the space before the next word. So each such stretch can
# be encoded by itself and cached, and words that are drafted again need no round trip.
_WORD_START: Final = re.compile(r"(?<=\S)(?= \S)")
_MAX_SEPARATE_CALLS: Final = 4  # more unknown stretches are encoded in one call and not cached
_MAX_CACHED_WORDS: Final = 50_000


class HttpTokenEndpoint:
    """A `TokenEndpoint` and `TokenScorer`.

    `on_lost` is called with a feature if the server no longer supports it.
    """

    def __init__(
        self,
        client: HttpClient,
        model: str,
        dialect: ServerDialect,
        api: TokenApiDialect,
        on_lost: Callable[[Feature], None],
    ) -> None:
        self.context_length: int | None = None
        # `ServerFeatures` replaces it, to see if chat separates reasoning from the text.
        self.note_reasoning: _WatchEvents = _pass_on
        self.max_top = api.max_top
        self._client = client
        self._model = model
        self._dialect = dialect
        self._api = api
        self._on_lost = on_lost
        self._token_api_fields = {*api.build_token_id_fields(chat=True), *api.build_token_id_fields(chat=False)}
        if api.max_top:
            self._token_api_fields.update(api.build_score_fields(1))
        self._encoded_words: dict[str, tuple[int, ...]] = {}
        self._decoded_tokens: dict[int, str] = {}

    def forget_vocabulary(self) -> None:
        """Clear the cached words and tokens of the server's vocabulary."""
        self._encoded_words.clear()
        self._decoded_tokens.clear()

    async def encode(self, text: str) -> list[int]:
        words = _WORD_START.split(text)
        known = {s: self._encoded_words[s] for s in words if s in self._encoded_words}
        unknown = dict.fromkeys(s for s in words if s not in known)
        if len(unknown) > _MAX_SEPARATE_CALLS:
            return await self._call_and_check_answer_form(lambda: self._api.encode(self._post_json, text))
        encoded = await asyncio.gather(
            *(self._call_and_check_answer_form(partial(self._api.encode, self._post_json, s)) for s in unknown)
        )
        known.update(zip(unknown, map(tuple, encoded), strict=True))
        if len(self._encoded_words) > _MAX_CACHED_WORDS:
            self._encoded_words.clear()
        self._encoded_words.update(known)
        return [token_id for s in words for token_id in known[s]]

    async def decode(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) != 1:
            return await self._call_and_check_answer_form(lambda: self._api.decode(self._post_json, token_ids))
        if token_ids[0] not in self._decoded_tokens:
            self._decoded_tokens[token_ids[0]] = await self._call_and_check_answer_form(
                lambda: self._api.decode(self._post_json, token_ids)
            )
        return self._decoded_tokens[token_ids[0]]

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        body = self._build_chat_body(request)
        token_ids, context_length = await self._call_and_check_answer_form(
            lambda: self._api.encode_chat(self._post_json, body)
        )
        self.context_length = context_length or self.context_length
        return token_ids

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        return await self._call_and_check_answer_form(
            lambda: self._sample_and_check_tokens(prefixes, build_sampling_fields(sampling, self._dialect))
        )

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        repeated = request.prefix if self._dialect.repeats_prefix else ""
        body = self._build_chat_body(request) | self._api.build_token_id_fields(chat=True)
        async with self.open_stream("chat/completions", body, request, repeated) as events:
            yield events

    @asynccontextmanager
    async def stream_chat_trying_token_ids(
        self, request: ChatRequest, on_refusal: Callable[[], None]
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        """Stream a chat with token ids if the server gives them.

        If it refuses the field, `on_refusal` is called, and the request is sent without the field.
        """
        repeated = request.prefix if self._dialect.repeats_prefix else ""
        body = self._build_chat_body(request)
        try:
            response = await self._client.post("chat/completions", body | self._api.build_token_id_fields(chat=True))
        except InvalidRequestError:
            response = await self._client.post("chat/completions", body)
            on_refusal()
        async with self._open_response_events(response, request, repeated) as events:
            yield events

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        limit = request.max_tokens
        # Without a limit servers stop after 16 tokens, and they refuse a limit beyond the context.
        if self.context_length is not None:
            room = self.context_length - len(token_ids)
            limit = room if limit is None else min(limit, room)
        body = self._build_chat_body(replace(request, prefix="", max_tokens=limit))
        del body["messages"]
        body |= {"prompt": list(token_ids), **self._api.build_token_id_fields(chat=False)}
        async with self.open_stream("completions", body, request) as events:
            yield events

    @asynccontextmanager
    async def open_stream(
        self,
        path: str,
        body: Body,
        request: ChatRequest,
        repeated: str = "",
        feature: Feature = "token_endpoint",
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        """Stream a call's events with token ids.

        `feature` is lost if the server does not have the endpoint.
        """
        response = await self._call_and_check_answer_form(lambda: self._client.post(path, body), feature)
        async with self._open_response_events(response, request, repeated) as events:
            yield events

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        body: Body = {
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            **self._api.build_score_fields(top),
        }
        return await self._call_and_check_answer_form(
            lambda: self._score_and_check_rows(body, num_rows, top), "token_scorer"
        )

    # --------------------------------------------------------------------------------------- inside

    async def _call_and_check_answer_form(
        self, call: Callable[[], Awaitable[T]], feature: Feature = "token_endpoint"
    ) -> T:
        """Await a call; raises TargetError if the answer has an unexpected form.

        The feature is then lost.
        """
        try:
            return await call()
        except MissingEndpointError:
            self._on_lost(feature)
            raise
        except InvalidRequestError as error:
            if not any(name in str(error) for name in self._token_api_fields):
                raise
            # The server, or a proxy in front of it, refuses fields that are not the caller's.
            self._on_lost(feature)
            raise TargetError(str(error)) from error
        except LlmSpecError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self._on_lost(feature)
            raise TargetError(
                self._client.format_error_message(f"answered in an unexpected form ({type(error).__name__}: {error})")
            ) from error

    async def _sample_and_check_tokens(self, prefixes: Sequence[Sequence[int]], fields: Body) -> list[SampledToken]:
        tokens = await self._api.sample_next(self._post_json, prefixes, fields)
        if len(tokens) != len(prefixes):
            raise ValueError(f"{len(tokens)} tokens for {len(prefixes)} prompts")
        return tokens

    async def _score_and_check_rows(self, body: Body, num_rows: int, top: int) -> list[TopTokens]:
        (choice,) = read_choices_in_order(await self._post_json("completions", body))
        num_given, num_scored = len(body["prompt"]), len(choice["prompt_logprobs"])
        if num_scored != num_given:  # then their positions are unknown
            raise ValueError(f"{num_scored} prompt logprobs for {num_given} tokens")
        return _parse_scored_rows(choice, num_rows, top)

    async def _post_json(self, path: str, body: Body) -> Any:
        return await self._client.post_json(path, {"model": self._model, **body})

    def _build_chat_body(self, request: ChatRequest) -> Body:
        return build_request_body(request, self._model, self._dialect)

    @asynccontextmanager
    async def _open_response_events(
        self, response: aiohttp.ClientResponse, request: ChatRequest, repeated: str
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        reader = create_chunk_reader(request, self._api.read_token_ids)
        answer = read_http_answer_events(self._client, response, reader, repeated=repeated)
        async with response, aclosing(self.note_reasoning(answer)) as noted:
            yield noted


def _pass_on(events: AsyncGenerator[StreamEvent]) -> AsyncGenerator[StreamEvent]:
    return events


def _parse_scored_rows(choice: Mapping[str, Any], num_rows: int, top: int) -> list[TopTokens]:
    """Parse rows from vLLM's answer.

    vLLM puts a row at the position after it, and the last row with the generated token.
    """
    rows = cast("list[Mapping[str, Mapping[str, Any]]]", choice["prompt_logprobs"][1:])
    given = [[(int(token_id), float(entry["logprob"])) for token_id, entry in row.items()] for row in rows]
    generated = cast("Mapping[str, float]", choice["logprobs"]["top_logprobs"][0])
    given.append([(int(name.removeprefix("token_id:")), float(logprob)) for name, logprob in generated.items()])
    return [_take_likeliest_tokens(row, top) for row in given[len(given) - num_rows :]]


def _take_likeliest_tokens(row: list[tuple[int, float]], top: int) -> TopTokens:
    """Return the likeliest `top` tokens of a row, which also holds the given token.

    The lowest id comes first among equal ones, as on the server, so the given token is not
    preferred.
    """
    if len(row) < top or any(math.isnan(logprob) for _, logprob in row):
        raise ValueError(f"{row} does not hold the likeliest {top} tokens")
    return TopTokens(tuple(sorted(row, key=lambda entry: (-entry[1], entry[0]))[:top]))
