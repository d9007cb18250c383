"""SpeculativeLLM: speculative decoders, or any providers, as models of a custom provider of LiteLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, Self, TypeAlias, cast

import httpx
import litellm
from litellm.exceptions import (
    APIConnectionError,
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
from litellm.types.llms.openai import ChatCompletionToolCallChunk, ChatCompletionUsageBlock
from litellm.types.utils import (
    ChoiceLogprobs,
    Delta,
    GenericStreamingChunk,
    Message,
    ModelResponse,
    ModelResponseStream,
    StreamingChoices,
)
from litellm.types.utils import Usage as LiteLLMUsage

from llm_spec.chat import (
    ChatRequest,
    Finish,
    ReasoningDelta,
    StreamEvent,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)
from llm_spec.chat_response import append_tool_call_delta
from llm_spec.config import SpeculativeConfig
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider
from llm_spec.errors import (
    CircuitOpenError,
    ConfigError,
    InvalidRequestError,
    LlmSpecError,
    TransientError,
    UnsupportedError,
)
from llm_spec.integrations._bridge import OpenStream
from llm_spec.integrations._shared import (
    BridgedSource,
    build_request_options,
    convert_usage_to_openai,
    describe_finish_as_json,
)
from llm_spec.openai_logprobs import build_chat_logprobs

__all__ = ["SpeculativeLLM", "register"]

Chunk: TypeAlias = GenericStreamingChunk | ModelResponseStream

_IGNORED_OPTIONS: Final = ("stream", "stream_options")  # litellm sees to these itself
_REFUSED_OPTIONS: Final = ("functions", "function_call")  # nothing of them would come back
_CONTEXT_LENGTH_CODES: Final = ("context_length_exceeded", "request_too_large")
_POLICY_CODES: Final = ("content_filter", "content_policy_violation")


def register(
    name: str = "llm_spec",
    *,
    model: str | None = None,
    target: LlmProvider | str,
    draft: DraftProvider | LlmProvider | str | None = None,
    config: SpeculativeConfig | None = None,
) -> SpeculativeLLM:
    """Make a pair of models, or a provider, known to litellm as `name/model` (model None: as `name/` with anything).

        register(model="fast", target="builtin:target", draft="lookup+builtin:draft")
        litellm.completion(model="llm_spec/fast", messages=[{"role": "user", "content": "Hi"}])

    `target` is a provider, typically a `SpeculativeDecoder`, or a string for a decoder to be made with `draft` and
    `config`. What strings name is opened at once and closed by the result's `close` or `aclose`; a provider stays the
    caller's and works on the event loop of its first call. Calling again with the same name adds a model. Raises
    ConfigError for a name that is taken, and what `SpeculativeDecoder` raises.
    """
    llm = next((item["custom_handler"] for item in litellm.custom_provider_map if item["provider"] == name), None)
    if llm is None and name in litellm.provider_list:
        raise ConfigError(f"name is {name!r}, a provider of litellm's own; choose another")
    if llm is not None and not isinstance(llm, SpeculativeLLM):
        raise ConfigError(f"name is {name!r}, which is another custom provider's; choose another")
    found = llm or SpeculativeLLM(name)
    found.add_model(model, BridgedSource(target, draft, config))
    if llm is None:
        litellm.custom_provider_map.append({"provider": name, "custom_handler": found})
    return found


class SpeculativeLLM(CustomLLM):
    """The handler that litellm calls; `register` makes it.

    Options that litellm passes on are those of `ChatRequest`; others go to the target as `extra`. Keys and addresses
    are the providers' own, `api_key`, `api_base` and `headers` are not looked at. `timeout` bounds a whole answer, or,
    streamed, the wait for each piece. Errors are litellm's, this library's the cause of each. An answer's
    `provider_specific_fields["llm_spec"]` tell how it came about: `strategy`, `guarantee`, `acceptance_rate`, ….
    """

    def __init__(self, name: str = "llm_spec") -> None:
        super().__init__()
        self.name = name
        self._bridges: dict[str | None, BridgedSource] = {}

    def add_model(self, model: str | None, bridge: BridgedSource) -> None:
        """Serve one more model."""
        if model in self._bridges:
            bridge.close()
            raise ConfigError(f"model is {model!r}, which {self.name} has already; choose another name")
        self._bridges[model] = bridge

    def close(self) -> None:
        """Close what was opened from strings, end threads and what they were doing; litellm forgets the name."""
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
        with self._prepare_completion(keywords) as call, closing(call.bridge.stream(call.open_events)) as events:
            for event in events:
                yield from _convert_event_to_litellm_chunk(event, call.model)

    async def astreaming(self, *_: Any, **keywords: Any) -> AsyncGenerator[Chunk]:  # type: ignore[override]  # as above
        with self._prepare_completion(keywords) as call:
            async with aclosing(call.bridge.astream(call.open_events)) as events:
                async for event in events:
                    for chunk in _convert_event_to_litellm_chunk(event, call.model):
                        yield chunk

    @contextmanager
    def _prepare_completion(self, keywords: Mapping[str, Any]) -> Iterator[_PreparedCompletion]:
        """What a call asks for; errors become litellm's."""
        model = str(keywords["model"])
        try:
            bridge = self._bridges.get(model) or self._bridges.get(None)
            if bridge is None:
                known = ", ".join(str(name) for name in self._bridges)
                raise NotFoundError(f"no model {model!r} in {self.name}; it has: {known}", model, self.name)
            request = _build_request_from_litellm(keywords["messages"], keywords["optional_params"])
            timeout = keywords.get("timeout")
            timeout_s = timeout.read if isinstance(timeout, httpx.Timeout) else timeout
            open_stream = partial(bridge.source.stream, request)
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
        """The events of the whole answer; runs on the provider's loop."""
        async with asyncio.timeout(self.timeout_s), self.open_stream() as events:
            return [event async for event in events]

    @asynccontextmanager
    async def open_events(self) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        """The events as they come, each waited for as long as the timeout; runs on the provider's loop."""
        async with (
            self.open_stream() as events,
            aclosing(_limit_wait_for_events(events, self.timeout_s)) as limited_events,
        ):
            yield limited_events

    def build_response(self, events: Sequence[StreamEvent]) -> ModelResponse:
        """The events in litellm's own response object."""
        (finish,) = (event for event in events if isinstance(event, Finish))
        calls: dict[int, ToolCall] = {}
        for event in events:
            if isinstance(event, ToolCallDelta):
                calls[event.index] = append_tool_call_delta(calls.get(event.index), event)
        message = Message(
            content="".join(event.text for event in events if isinstance(event, TextDelta)) or None,
            reasoning_content="".join(event.text for event in events if isinstance(event, ReasoningDelta)) or None,
            tool_calls=[
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for _, call in sorted(calls.items())
            ]
            or None,
            provider_specific_fields={"llm_spec": describe_finish_as_json(finish)},
        )
        (choice,) = self.response.choices
        choice.message = message
        choice.finish_reason = finish.finish_reason
        logprobs = [event.logprobs for event in events if isinstance(event, TextDelta) and event.logprobs is not None]
        if logprobs:
            choice.logprobs = _build_litellm_logprobs(list(chain.from_iterable(logprobs)))
        self.response.model = self.model
        if finish.usage is not None:
            self.response.usage = LiteLLMUsage(**convert_usage_to_openai(finish.usage))  # type: ignore[attr-defined]  # a field by assignment
        return self.response


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


# ---------------------------------------------------------------------------------- to and from litellm


def _build_request_from_litellm(messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any]) -> ChatRequest:
    """A request of the options that litellm passes on."""
    options = {name: value for name, value in params.items() if value is not None and name not in _IGNORED_OPTIONS}
    for name in _REFUSED_OPTIONS:
        if options.pop(name, None):
            raise InvalidRequestError(f"{name} is not supported by llm_spec")
    if (num_answers := options.pop("n", 1)) != 1:
        raise InvalidRequestError(f"n is {num_answers!r}; llm_spec gives one answer a request")
    if "max_completion_tokens" in options:
        options["max_tokens"] = options.pop("max_completion_tokens")
    return ChatRequest.create(messages, **build_request_options(options))


def _convert_event_to_litellm_chunk(event: StreamEvent, model: str) -> Iterator[Chunk]:
    """An event as litellm's chunk, if it is of those that have one."""
    match event:
        case TextDelta(text=text, logprobs=tuple() as logprobs):  # for which the generic chunk has no place
            choice = StreamingChoices(index=0, delta=Delta(content=text), logprobs=_build_litellm_logprobs(logprobs))
            yield ModelResponseStream(model=model, choices=[choice])
        case TextDelta():
            yield _build_litellm_chunk(event.text)
        case ReasoningDelta():  # the generic chunk has no place for it
            delta = Delta(content=None, reasoning_content=event.text)
            yield ModelResponseStream(model=model, choices=[StreamingChoices(index=0, delta=delta)])
        case ToolCallDelta():
            yield _build_litellm_chunk(
                tool_use={
                    "id": event.id,
                    "type": "function",
                    "function": {"name": event.name, "arguments": event.arguments},
                    "index": event.index,
                }
            )
        case Finish():
            yield _build_litellm_chunk(finish=event)
        case _:
            pass  # rounds, fallbacks and retries are no part of an answer


def _build_litellm_logprobs(logprobs: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    return ChoiceLogprobs.model_validate(build_chat_logprobs(logprobs))


def _build_litellm_chunk(
    text: str = "",
    *,
    tool_use: ChatCompletionToolCallChunk | None = None,
    finish: Finish | None = None,
) -> GenericStreamingChunk:
    usage = None if finish is None or finish.usage is None else convert_usage_to_openai(finish.usage)
    return GenericStreamingChunk(
        text=text,
        tool_use=tool_use,
        is_finished=finish is not None,
        finish_reason="" if finish is None else finish.finish_reason,
        usage=cast("ChatCompletionUsageBlock | None", usage),
        index=0,
        provider_specific_fields=None if finish is None else {"llm_spec": describe_finish_as_json(finish)},
    )


def _to_litellm_error(error: LlmSpecError | TimeoutError, model: str, name: str) -> Exception:
    """The error in litellm's tree, with the status that its router and proxy go by."""
    message = str(error) or "the timeout of this call has passed"
    match error:
        case InvalidRequestError() | UnsupportedError() | ConfigError():
            return _to_bad_request_error(error, message, model, name)
        case TransientError(status=429):
            return RateLimitError(
                message, name, model, response=_build_response_with_retry_after(429, error.retry_after_s)
            )
        case TimeoutError() | TransientError(status=408 | 504):
            return Timeout(message, model, name)
        case TransientError(status=None):
            return APIConnectionError(message, name, model)
        case TransientError() | CircuitOpenError():
            return ServiceUnavailableError(message, name, model)
        case _:
            return InternalServerError(message, name, model)


def _to_bad_request_error(error: LlmSpecError, message: str, model: str, name: str) -> Exception:
    if error.code in _CONTEXT_LENGTH_CODES:
        return ContextWindowExceededError(message, model, name)
    if error.code in _POLICY_CODES:
        return ContentPolicyViolationError(message, model, name)
    return BadRequestError(message, model, name, body={"message": message, "code": error.code, "param": error.param})


def _build_response_with_retry_after(status: int, retry_after_s: float | None) -> httpx.Response:
    """A response whose headers say how long to wait, where litellm looks for that."""
    headers = {} if retry_after_s is None else {"retry-after": f"{retry_after_s:g}"}
    return httpx.Response(status, headers=headers, request=httpx.Request("POST", "http://llm_spec"))
