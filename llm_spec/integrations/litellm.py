"""SpeculativeLLM: speculative decoders, or any providers, as a custom provider of LiteLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, cast

import httpx
import litellm
from litellm.exceptions import (
    APIConnectionError,
    APIError,
    AuthenticationError,
    BadGatewayError,
    BadRequestError,
    ContentPolicyViolationError,
    ContextWindowExceededError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
    ServiceUnavailableError,
    Timeout,
)
from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import ModelResponse

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import (
    CircuitOpenError,
    ConfigError,
    InvalidRequestError,
    LlmSpecError,
    TransientError,
    UnsupportedError,
)
from llm_spec.contract.events import StreamEvent
from llm_spec.contract.provider import LlmProvider
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.integrations._litellm_answer import Chunk, ChunkBuilder, fill_response
from llm_spec.integrations._litellm_params import declare_supported_params, forget_prices, register_price
from llm_spec.integrations._litellm_request import build_request_from_litellm
from llm_spec.integrations._shared import BridgedSource
from llm_spec.kit.event_loop_bridge import OpenStream

__all__ = ["SpeculativeLLM", "register"]

_CONTEXT_LENGTH_CODES: Final = ("context_length_exceeded", "request_too_large")
_POLICY_CODES: Final = ("content_filter", "content_policy_violation")
_TIMEOUT_STATUSES: Final = (408, 504)
_CONTENT_TOO_LARGE: Final = 413
_TOO_MANY_REQUESTS: Final = 429
_ERRORS_BY_STATUS: Final[Mapping[int | None, Callable[..., Exception]]] = {
    401: AuthenticationError,
    404: NotFoundError,
    500: InternalServerError,
    502: BadGatewayError,
    503: ServiceUnavailableError,
}


def register(
    name: str = "llm_spec",
    *,
    model: str | None = None,
    target: LlmProvider | str,
    draft: DraftProvider | LlmProvider | str | None = None,
    config: SpeculativeConfig | None = None,
) -> SpeculativeLLM:
    """Register a pair of models, or a provider, with litellm as `name/model`.

        register(model="fast", target="builtin:target", draft="lookup+builtin:draft")
        litellm.completion(model="llm_spec/fast", messages=[{"role": "user", "content": "Hi"}])

    If `model` is None, it serves every name that begins with `name/`. `target` is a provider,
    typically a `SpeculativeDecoder`, or a string. From a string a decoder is made with `draft` and
    `config`. Strings are opened at once, and `close` or `aclose` of the result closes them. A
    provider stays the caller's and works on the event loop of its first call. Another call with the
    same name adds a model. Raises ConfigError for a name that is taken, and what
    `SpeculativeDecoder` raises.
    """
    llm = next((item["custom_handler"] for item in litellm.custom_provider_map if item["provider"] == name), None)
    if llm is None and name in litellm.provider_list:
        raise ConfigError(f"name is {name!r}, a provider of litellm's own; choose another")
    if llm is not None and not isinstance(llm, SpeculativeLLM):
        raise ConfigError(f"name is {name!r}, which is another custom provider's; choose another")
    found = llm or SpeculativeLLM(name)
    found.add_model(model, BridgedSource(target, draft, config))
    if llm is None:
        declare_supported_params(name)
        litellm.custom_provider_map.append({"provider": name, "custom_handler": found})
    return found


class SpeculativeLLM(CustomLLM):
    """The handler that litellm calls; `register` makes it.

    It takes the options of `ChatRequest`; others go to the target in `extra`. Keys, addresses and
    headers belong to the providers: `api_base` and `extra_headers` are refused, and `api_key` is
    ignored. `functions` and `n` above 1 are refused, too. `timeout` limits a whole answer; in a
    stream it limits the wait for each piece. `max_retries` overrides the config's. Errors are
    litellm's; the cause of each is this library's.

    `provider_specific_fields["llm_spec"]` of an answer tell how it came about: `strategy`,
    `guarantee`, `acceptance_rate`, …. If they come back in `messages`, they are not sent on. A
    model whose target is a vendor's (`openai:gpt-4o-mini`) has the price that litellm knows for the
    target. The price of its draft is not included.
    """

    def __init__(self, name: str = "llm_spec") -> None:
        super().__init__()
        self.name = name
        self._bridges: dict[str | None, BridgedSource] = {}
        self._price_keys: list[str] = []

    def add_model(self, model: str | None, bridge: BridgedSource) -> None:
        """Serve one more model. If its name is taken, close the bridge and raise ConfigError."""
        if model in self._bridges:
            bridge.close()
            raise ConfigError(f"model is {model!r}, which {self.name} has already; choose another name")
        self._bridges[model] = bridge
        if model is not None and (key := register_price(self.name, model, bridge.source.target.name)) is not None:
            self._price_keys.append(key)

    def close(self) -> None:
        """Close what was opened from strings, end the threads, and remove the name from litellm."""
        self._unregister()
        for bridge in self._bridges.values():
            bridge.close()

    async def aclose(self) -> None:
        """As `close`, for a coroutine."""
        self._unregister()
        for bridge in self._bridges.values():
            await bridge.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _unregister(self) -> None:
        forget_prices(self._price_keys)
        litellm.custom_provider_map[:] = [i for i in litellm.custom_provider_map if i["custom_handler"] is not self]
        with suppress(ValueError):  # litellm adds it there with the first call
            litellm.provider_list.remove(self.name)

    # ------------------------------------------------------- what litellm calls, by keywords alone

    def completion(self, *_: Any, **keywords: Any) -> ModelResponse:
        with self._prepare_completion(keywords) as call:
            return call.build_response(call.bridge.run(call.collect_events))

    async def acompletion(self, *_: Any, **keywords: Any) -> ModelResponse:
        with self._prepare_completion(keywords) as call:
            return call.build_response(await call.bridge.arun(call.collect_events))

    def streaming(self, *_: Any, **keywords: Any) -> Generator[Chunk]:  # type: ignore[override]  # litellm reads both
        """Return the chunks. An error before the first one is raised here.

        litellm would report it as a broken stream.
        """
        chunks = self._stream_chunks(keywords)
        return _continue_stream(next(chunks), chunks)

    def _stream_chunks(self, keywords: Mapping[str, Any]) -> Generator[Chunk]:
        with self._prepare_completion(keywords) as call, closing(call.bridge.stream(call.open_events)) as events:
            builder = ChunkBuilder(call.model)
            for event in events:
                yield from builder.convert_event(event)

    async def astreaming(self, *_: Any, **keywords: Any) -> AsyncGenerator[Chunk]:  # type: ignore[override]  # as above
        with self._prepare_completion(keywords) as call:
            builder = ChunkBuilder(call.model)
            async with aclosing(call.bridge.astream(call.open_events)) as events:
                async for event in events:
                    for chunk in builder.convert_event(event):
                        yield chunk

    @contextmanager
    def _prepare_completion(self, keywords: Mapping[str, Any]) -> Iterator[_PreparedCompletion]:
        """Prepare a call. Errors inside the context become litellm's."""
        model = str(keywords["model"])
        try:
            bridge = self._bridges.get(model) or self._bridges.get(None)
            if bridge is None:
                known = ", ".join(str(name) for name in self._bridges)
                raise NotFoundError(f"no model {model!r} in {self.name}; it has: {known}", model, self.name)
            params: Mapping[str, Any] = keywords["optional_params"]
            _refuse_connection_options(keywords)
            request = build_request_from_litellm(keywords["messages"], params)
            source = bridge.source.limit(max_retries=params.get("max_retries"))
            timeout = keywords.get("timeout")
            timeout_s = timeout.read if isinstance(timeout, httpx.Timeout) else timeout
            open_stream = partial(source.stream, request)
            yield _PreparedCompletion(model, bridge, open_stream, timeout_s, keywords["model_response"])
        except (LlmSpecError, TimeoutError) as error:
            raise _to_litellm_error(error, model, self.name) from error


@dataclass(frozen=True, slots=True)
class _PreparedCompletion:
    model: str
    bridge: BridgedSource
    open_stream: OpenStream[StreamEvent]
    timeout_s: float | None
    response: ModelResponse

    async def collect_events(self) -> list[StreamEvent]:
        """Collect the events of the whole answer. Runs on the provider's loop."""
        async with asyncio.timeout(self.timeout_s), self.open_stream() as events:
            return [event async for event in events]

    @asynccontextmanager
    async def open_events(self) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        """Open the events as they come. The timeout limits the wait for each.

        Runs on the provider's loop.
        """
        async with (
            self.open_stream() as events,
            aclosing(_limit_wait_for_events(events, self.timeout_s)) as limited_events,
        ):
            yield limited_events

    def build_response(self, events: Sequence[StreamEvent]) -> ModelResponse:
        """Fill litellm's response object with the events."""
        return fill_response(self.response, events, self.model)


def _continue_stream(first: Chunk, rest: Generator[Chunk]) -> Generator[Chunk]:
    with closing(rest):
        yield first
        yield from rest


def _refuse_connection_options(keywords: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for an address or headers: the target is open without them."""
    if keywords.get("api_base"):
        raise InvalidRequestError("api_base is set, but the target has its own address; leave api_base out")
    headers = keywords.get("headers")
    if headers and headers != litellm.headers:  # litellm.headers are for every provider
        raise InvalidRequestError("headers or extra_headers are set, but the target has its own; leave them out")


async def _limit_wait_for_events(
    events: AsyncIterator[StreamEvent], timeout_s: float | None
) -> AsyncGenerator[StreamEvent]:
    iterator = aiter(events)
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                event = await anext(iterator)
        except StopAsyncIteration:
            return
        yield event


def _to_litellm_error(error: LlmSpecError | TimeoutError, model: str, name: str) -> Exception:
    """Return the error that litellm's OpenAI provider would raise.

    litellm's router and proxy read its class and status.
    """
    message = str(error) or "the timeout of this call has passed"
    if isinstance(error, TimeoutError) or error.status in _TIMEOUT_STATUSES:
        status = None if isinstance(error, TimeoutError) else error.status
        return Timeout(message, model, name, exception_status_code=status)
    if error.status == _TOO_MANY_REQUESTS:
        retry_after_s = error.retry_after_s if isinstance(error, TransientError) else None
        return RateLimitError(message, name, model, response=_build_response_with_retry_after(429, retry_after_s))
    kind = _ERRORS_BY_STATUS.get(error.status)
    if kind is not None:
        return kind(message=message, model=model, llm_provider=name)
    if error.status == _CONTENT_TOO_LARGE and error.code not in _CONTEXT_LENGTH_CODES:
        return APIError(_CONTENT_TOO_LARGE, message, name, model)
    if isinstance(error, InvalidRequestError | UnsupportedError | ConfigError):
        return _to_bad_request_error(error, message, model, name)
    return _to_failure_error(error, message, model, name)


def _to_failure_error(error: LlmSpecError, message: str, model: str, name: str) -> Exception:
    if isinstance(error, CircuitOpenError):
        return ServiceUnavailableError(message, name, model)
    if error.status is not None:
        return APIError(error.status, message, name, model)
    kind = APIConnectionError if isinstance(error, TransientError) else InternalServerError
    return kind(message, name, model)


def _to_bad_request_error(error: LlmSpecError, message: str, model: str, name: str) -> Exception:
    if error.code in _CONTEXT_LENGTH_CODES:
        return ContextWindowExceededError(message, model, name)
    if error.code in _POLICY_CODES:
        return ContentPolicyViolationError(message, model, name)
    body = {"message": message, "code": error.code, "param": error.param}
    bad_request: Any = BadRequestError(message, model, name, body=body)
    bad_request.status_code = error.status or bad_request.status_code
    return cast("Exception", bad_request)


def _build_response_with_retry_after(status: int, retry_after_s: float | None) -> httpx.Response:
    """Build a response whose headers say how long to wait: litellm reads it there."""
    headers = {} if retry_after_s is None else {"retry-after": f"{retry_after_s:g}"}
    return httpx.Response(status, headers=headers, request=httpx.Request("POST", "http://llm_spec"))
