"""Shared by the adapters: sources of providers, streams that any task may close, conversions."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, cast

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import InvalidRequestError, TargetError
from llm_spec.contract.events import Finish, StreamEvent, Usage
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest, RequestOptions
from llm_spec.decoder.config import SpeculativeConfig, Timeouts
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.result import SpeculativeFinish
from llm_spec.kit.event_loop_bridge import EventLoopBridge

__all__ = [
    "BridgedSource",
    "ProviderSource",
    "StreamClosedError",
    "TaskReadEventStream",
    "build_request_options",
    "convert_logprob_options",
    "convert_prediction",
    "convert_usage_to_openai",
    "describe_finish_as_json",
    "limit_config",
    "split_provider_name",
]

_TARGET_NAME: Final = re.compile(r"([A-Za-z0-9_-]+):(.+)", re.DOTALL)


class ProviderSource:
    """A provider that the caller gave, or a decoder made of a target, a draft and a config.

    `aclose` closes what was opened here from strings; the next use opens it again. The caller
    closes what it gave. Raises what `SpeculativeDecoder` raises.
    """

    def __init__(
        self,
        target: LlmProvider | str,
        draft: DraftProvider | LlmProvider | str | None = None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        self._target, self._draft, self._config = target, draft, config
        self._decoder: SpeculativeDecoder | None = None
        self.name = self.provider.name  # raises at once if a string is wrong

    @property
    def provider(self) -> LlmProvider:
        """The provider that answers."""
        if not isinstance(self._target, str) and self._draft is None and self._config is None:
            return self._target
        if self._decoder is None:
            self._decoder = SpeculativeDecoder(target=self._target, draft=self._draft, config=self._config)
        return self._decoder

    @property
    def target(self) -> LlmProvider:
        """The target of the decoder, or the provider if it is not a decoder."""
        provider = self.provider
        if provider is self._decoder or isinstance(provider, SpeculativeDecoder):
            return provider.target
        return provider

    def limit(self, *, timeout_s: float | None = None, max_retries: int | None = None) -> ProviderSource:
        """Return the same provider with the limits of `limit_config`.

        A provider that is not a decoder has no config and is returned unchanged. Nothing is opened
        again. Raises ConfigError for a limit that is not valid.
        """
        decoder = self.provider
        if (timeout_s is None and max_retries is None) or not isinstance(decoder, SpeculativeDecoder):
            return self
        config = limit_config(decoder.config, timeout_s=timeout_s, max_retries=max_retries)
        return ProviderSource(decoder.with_config(config))

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        """Open the events of an answer.

        They end with TargetError if there is no Finish: a part of an answer must not pass for a
        whole one.
        """
        async with (
            self.provider.stream(request) as events,
            aclosing(_require_finish_event(events, self.name)) as checked_events,
        ):
            yield checked_events

    async def aclose(self) -> None:
        """Close what was opened here."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            await decoder.aclose()


def limit_config(
    config: SpeculativeConfig, *, timeout_s: float | None = None, max_retries: int | None = None
) -> SpeculativeConfig:
    """Return the config with a framework's limits; None leaves a limit unchanged.

    `timeout_s` is the longest silence. `max_retries` counts the attempts after the first. Raises
    ConfigError for a value that is not valid.
    """
    if timeout_s is not None:
        config = replace(config, timeouts=Timeouts(first_chunk_s=timeout_s, between_chunks_s=timeout_s))
    if max_retries is not None:
        config = replace(config, retry=replace(config.retry, max_attempts=max_retries + 1))
    return config


async def _require_finish_event(events: AsyncIterator[StreamEvent], name: str) -> AsyncGenerator[StreamEvent]:
    has_finished = False
    async for event in events:
        has_finished |= isinstance(event, Finish)
        yield event
    if not has_finished:
        raise TargetError(f"{name} ended its stream without a finish reason")


class BridgedSource(EventLoopBridge):
    """A `source` on one event loop, for synchronous and asynchronous callers.

    Closing the bridge closes the source. If all parts are strings, the source works on a loop in a
    thread of its own. If a part is the caller's provider, it works on the loop of the first call,
    or in such a thread if that call is synchronous.
    """

    def __init__(
        self,
        target: LlmProvider | str,
        draft: DraftProvider | LlmProvider | str | None = None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        self.source = ProviderSource(target, draft, config)
        is_opened_here = [isinstance(part, str) for part in (target, draft) if part is not None]
        finish = self.source.aclose if any(is_opened_here) else None
        super().__init__(self.source.name, owns_loop=all(is_opened_here), finish=finish)


class StreamClosedError(Exception):
    """The stream was closed before or during the wait for its next event."""


class TaskReadEventStream:
    """The events of `stream_context`, which a task of its own reads at most one event ahead.

    A provider's stream belongs to one task. Frameworks may open a stream in one task, read it in
    another and close it in a third, even during a wait for an event. Whoever enters the stream has
    to leave it, which ends the work behind it.
    """

    def __init__(self, stream_context: AbstractAsyncContextManager[AsyncIterator[StreamEvent]]) -> None:
        self._open_context = stream_context
        self._events: deque[StreamEvent] = deque()
        self._event_arrived, self._event_taken = asyncio.Event(), asyncio.Event()
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._read_events_into_queue())
        self._task.add_done_callback(lambda _: self._event_arrived.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def wait_for_first_event(self) -> None:
        """Wait for the first event. Raises what the provider raises before it."""
        task = self._task
        while task is not None and not self._events:
            if task.done():
                if not self._is_closed:
                    task.result()
                return
            self._event_arrived.clear()
            await self._event_arrived.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        """Return the next event.

        Raises what the provider raises, or StreamClosedError once the stream is closed.
        """
        await self.wait_for_first_event()
        if self._is_closed:
            raise StreamClosedError
        if not self._events:
            raise StopAsyncIteration
        self._event_taken.set()
        return self._events.popleft()

    async def aclose(self) -> None:
        """End the stream's work and wait until it has ended. Any task may call this, also twice."""
        self._is_closed = True
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # it was raised already, or no reader is left

    async def _read_events_into_queue(self) -> None:
        async with self._open_context as events:
            async for event in events:
                self._events.append(event)
                self._event_taken.clear()
                self._event_arrived.set()
                await self._event_taken.wait()


def describe_finish_as_json(finish: Finish) -> dict[str, Any]:
    """Describe how an answer ended and, if a decoder gave it, how it came about, as JSON values."""
    fields: dict[str, Any] = {"finish_reason": finish.finish_reason, "stopped_by": finish.stopped_by}
    if isinstance(finish, SpeculativeFinish) and finish.result is not None:
        draft_usage = finish.result.draft_usage
        fields |= finish.result.to_report() | {
            "draft_usage": None if draft_usage is None else dataclasses.asdict(draft_usage)
        }
    return fields


def convert_usage_to_openai(usage: Usage) -> dict[str, Any]:
    """Convert usage to the fields of OpenAI's chat completions."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_input_tokens,
            "cache_write_tokens": usage.cache_write_input_tokens,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def build_request_options(options: Mapping[str, Any]) -> RequestOptions:
    """Convert options to those of `ChatRequest.create`. None means that an option is not set.

    Unknown options go into `extra`, and so to a remote target unchanged. So does the content of
    `extra_body`, an option of OpenAI's client.
    """
    unknown = convert_logprob_options({name: value for name, value in options.items() if value is not None})
    known = {name: unknown.pop(name) for name in RequestOptions.__annotations__ if name in unknown}
    if "prediction" in known:
        known["prediction"] = convert_prediction(known["prediction"])
    if "logit_bias" in known:  # keys in JSON are texts
        known["logit_bias"] = {int(token_id): bias for token_id, bias in known["logit_bias"].items()}
    extra = {**known.pop("extra", {}), **unknown.pop("extra_body", {}), **unknown}
    return cast("RequestOptions", known | {"extra": extra} if extra else known)


def convert_prediction(prediction: object) -> str:
    """Return the text of a predicted output, given as a text or in OpenAI's form.

    Raises InvalidRequestError if it has no text.
    """
    content = cast("Mapping[str, Any]", prediction).get("content") if isinstance(prediction, Mapping) else prediction
    if isinstance(content, str):
        return content
    parts: Any = content if isinstance(content, list) else [None]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("prediction has no text; its content must be a text or text parts")
    return "".join(texts)


def split_provider_name(name: str) -> tuple[str, str]:
    """Split a name (`openai:gpt-5`) into provider and model, as price lists know it.

    The provider is "" if the name has none.
    """
    match = _TARGET_NAME.fullmatch(name)
    return ("", name) if match is None else (match[1], match[2])


def convert_logprob_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Express OpenAI's `logprobs` by `top_logprobs` alone.

    If `top_logprobs` is None or missing, no log-probabilities are requested.
    """
    converted = dict(options)
    is_requested = converted.pop("logprobs", None)
    if is_requested:
        converted["top_logprobs"] = converted.get("top_logprobs") or 0
    elif is_requested is not None:
        converted.pop("top_logprobs", None)
    return converted
