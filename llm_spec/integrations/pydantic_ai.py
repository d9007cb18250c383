"""Speculative decoding as a pydantic-ai model (`pip install 'llm-spec[pydantic-ai]'`).

    from pydantic_ai import Agent
    from llm_spec.integrations.pydantic_ai import SpeculativeModel

    agent = Agent(SpeculativeModel("vllm:big@http://127.0.0.1:8000/v1", draft="vllm:small@http://127.0.0.1:8001/v1"))

Around a `SpeculativeDecoder`, each `ModelResponse` tells in `provider_details` how it came about (`strategy`,
`guarantee`, `acceptance_rate`, `speedup`, …) and in `failed_attempts` what was drafted in vain and what failed on
the way: the draft with outcome `rejected` where the target did not confirm all of it, or `error` where it was given up,
and the target with `error` for each time it had to be asked again. The usage of a response is the target's alone. What
a rejected draft used is in its attempt, and so in the run's usage and limits, where it cost money: by `Price`s, the
config's or the built-in list's. Else a run has the same usage with and without a draft.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final

from pydantic_ai import RunContext
from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelConnectionError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelUnavailableError,
)
from pydantic_ai.messages import (
    FinishReason,
    ModelMessage,
    ModelRequestAttempt,
    ModelResponse,
    ModelResponseStreamEvent,
)
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse, check_allow_model_requests
from pydantic_ai.profiles import ModelProfile, ModelProfileSpec
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import RequestUsage

from llm_spec.chat import Finish, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta, Usage
from llm_spec.config import SpeculativeConfig
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider
from llm_spec.errors import InvalidRequestError, LlmSpecError, TransientError, UnsupportedError
from llm_spec.integrations._pydantic_ai_messages import convert_messages_to_request
from llm_spec.integrations._shared import (
    ProviderSource,
    StreamClosedError,
    TaskReadEventStream,
    describe_finish_as_json,
)
from llm_spec.openai_logprobs import convert_logprobs_to_openai
from llm_spec.result import SpeculativeFinish, SpeculativeResult

__all__ = ["SpeculativeModel", "SpeculativeStreamedResponse"]

_SYSTEM: Final = "llm-spec"
_FINISH_REASONS: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content_filter",
    "tool_calls": "tool_call",
}
_TOO_MANY_REQUESTS: Final = 429


class SpeculativeModel(Model[Any]):
    """A pydantic-ai model that answers by an `llm_spec` provider, typically a `SpeculativeDecoder`.

    `target` is that provider, or a string for a decoder to be made with `draft` and `config`; what was made here is
    closed by `aclose` and by leaving `async with`, and opened again at the next use. Errors come as pydantic-ai's
    own, so that its fallbacks work: ModelConnectionError, ModelRateLimitError and ModelUnavailableError for a target
    that may answer later, ModelRequestRejectedError for a request that it cannot serve, else ModelAPIError.
    """

    unsupported_settings = frozenset({"extra_headers", "max_retries", "service_tier", "timeout"})
    _unsupported_file_inputs = frozenset({"audio", "document", "video"})

    def __init__(
        self,
        target: LlmProvider | str,
        *,
        draft: DraftProvider | LlmProvider | str | None = None,
        config: SpeculativeConfig | None = None,
        profile: ModelProfileSpec | None = None,
        settings: ModelSettings | None = None,
    ) -> None:
        self._source = ProviderSource(target, draft, config)
        self._name = self._source.name
        super().__init__(settings=settings, profile=profile)

    @property
    def model_name(self) -> str:
        """The provider's name: of a decoder `target+draft`."""
        return self._name

    @property
    def system(self) -> str:
        return _SYSTEM

    def _provider_model_profile(self) -> ModelProfile:
        """What the target can do, as far as it says so."""
        capabilities = self._source.provider.capabilities
        profile = ModelProfile(
            supports_tools=capabilities.tools,
            supports_json_schema_output=capabilities.response_format,
            supports_json_object_output=capabilities.response_format,
            supports_thinking=capabilities.token_model is not None,  # of a server it is not known
        )
        if not capabilities.tools:
            profile["default_structured_output_mode"] = "native" if capabilities.response_format else "prompted"
        if capabilities.context_length is not None:
            profile["context_window"] = capabilities.context_length
        return profile

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        async with self._open_response(messages, model_settings, model_request_parameters) as response:
            async for _ in response:
                pass
            return response.get()

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,  # noqa: ARG002 - the framework's signature
    ) -> AsyncGenerator[StreamedResponse]:
        async with self._open_response(messages, model_settings, model_request_parameters) as response:
            yield response

    @asynccontextmanager
    async def _open_response(
        self, messages: list[ModelMessage], settings: ModelSettings | None, parameters: ModelRequestParameters
    ) -> AsyncGenerator[SpeculativeStreamedResponse]:
        check_allow_model_requests()
        settings, parameters = self.prepare_request(settings, parameters)
        try:
            has_json_mode = self.profile.get("supports_json_object_output", False)
            request = convert_messages_to_request(messages, settings or {}, parameters, has_json_mode=has_json_mode)
        except InvalidRequestError as error:
            raise _convert_error_to_pydantic_ai(self._name, error) from error
        async with TaskReadEventStream(self._source.stream(request)) as stream:
            try:
                # what fails at once fails here, where a fallback model can still take over
                await stream.wait_for_first_event()
            except LlmSpecError as error:
                raise _convert_error_to_pydantic_ai(self._name, error) from error
            yield SpeculativeStreamedResponse(parameters, self._name, stream)

    async def aclose(self) -> None:
        """Close what was made of strings."""
        await self._source.aclose()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


@dataclass
class SpeculativeStreamedResponse(StreamedResponse):
    """One answer as it comes. `cancel()` and leaving the stream end the request."""

    _name: str
    _stream: TaskReadEventStream
    _started: datetime = field(default_factory=lambda: datetime.now(UTC))
    _logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], init=False)
    _usage_received: bool | None = field(default=False, init=False)  # a provider may leave usage out

    async def close_stream(self) -> None:
        """Close the upstream; a task that waits for the next event is released."""
        await self._stream.aclose()

    def get_stream_cancel_errors(self) -> tuple[type[BaseException], ...]:
        """What a waiting reader gets when `cancel()` closes the upstream."""
        return (StreamClosedError,)

    async def _get_event_iterator(self) -> AsyncIterator[ModelResponseStreamEvent]:
        has_begun = False
        try:
            async for event in self._stream:
                for part_event in self._convert_event_to_part_events(event):
                    has_begun = True
                    yield part_event
        except LlmSpecError as error:
            raise _convert_error_to_pydantic_ai(self._name, error, in_stream=has_begun) from error

    def _convert_event_to_part_events(self, event: StreamEvent) -> Iterator[ModelResponseStreamEvent]:
        match event:
            case TextDelta():
                self._logprobs += convert_logprobs_to_openai(event.logprobs)
                yield from self._parts_manager.handle_text_delta(vendor_part_id="text", content=event.text)
            case ReasoningDelta():
                yield from self._parts_manager.handle_thinking_delta(vendor_part_id="reasoning", content=event.text)
            case ToolCallDelta():
                yield from self._parts_manager.handle_tool_call_delta_events(
                    vendor_part_id=("call", event.index),
                    tool_name=event.name,
                    args=event.arguments or None,
                    tool_call_id=event.id,
                )
            case Finish():
                self._record_finish_in_response(event)
            case _:
                pass

    def _record_finish_in_response(self, finish: Finish) -> None:
        self.finish_reason = _FINISH_REASONS[finish.finish_reason]
        self.provider_details = describe_finish_as_json(finish)
        if self._logprobs:
            self.provider_details["logprobs"] = self._logprobs
        if finish.usage is not None:
            self._add_usage(_convert_usage_to_pydantic_ai(finish.usage), reported=True)
        if isinstance(finish, SpeculativeFinish) and finish.result is not None:
            attempts = _list_failed_attempts(finish.result, self._started)
            self.failed_attempts = [*(self.failed_attempts or []), *attempts] or None  # behind a fallback model's own

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def provider_name(self) -> str:
        return _SYSTEM

    @property
    def provider_url(self) -> None:
        return None

    @property
    def timestamp(self) -> datetime:
        return self._started


def _convert_usage_to_pydantic_ai(usage: Usage) -> RequestUsage:
    details = {
        "reasoning_tokens": usage.reasoning_tokens,
        "accepted_prediction_tokens": usage.accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        "extra_input_tokens": usage.extra_input_tokens,
        "cancelled_output_tokens": usage.cancelled_output_tokens,
    }
    return RequestUsage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_input_tokens,
        details={name: count for name, count in details.items() if count},
    )


def _list_failed_attempts(result: SpeculativeResult, started: datetime) -> list[ModelRequestAttempt]:
    """What was tried for an answer and is not in it, in pydantic-ai's words; of times only the draft's is known."""
    attempts = [_build_failed_attempt(result.target, reason, started) for reason in result.retries]
    attempts += [_build_failed_attempt(result.draft or "draft", reason, started) for reason in result.fallbacks]
    if result.draft is not None and result.stats.num_wasted_draft_tokens:
        rejected = ModelRequestAttempt(
            model_name=result.draft,
            provider_name=_SYSTEM,
            outcome="rejected",
            timestamp=started,
            duration=timedelta(seconds=result.stats.draft_s),
            usage=_convert_usage_to_pydantic_ai(result.draft_usage)
            if result.draft_usage is not None and result.cost.draft
            else None,
        )
        attempts.append(rejected)
    return attempts


def _build_failed_attempt(name: str, reason: str, started: datetime) -> ModelRequestAttempt:
    return ModelRequestAttempt(
        model_name=name,
        provider_name=_SYSTEM,
        outcome="error",
        error=reason,
        timestamp=started,
        duration=timedelta(),
    )


def _convert_error_to_pydantic_ai(name: str, error: LlmSpecError, *, in_stream: bool = False) -> ModelAPIError:
    if isinstance(error, InvalidRequestError | UnsupportedError):
        return ModelRequestRejectedError(name, str(error), in_stream=in_stream)
    if not isinstance(error, TransientError):
        return ModelAPIError(name, str(error), in_stream=in_stream)
    kind: type[ModelAPIError] = ModelUnavailableError
    if error.status in (None, _TOO_MANY_REQUESTS):
        kind = ModelConnectionError if error.status is None else ModelRateLimitError
    return kind(name, str(error), retry_after=error.retry_after_s, in_stream=in_stream)
