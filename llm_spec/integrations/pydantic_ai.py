"""Speculative decoding as a pydantic-ai model.

Install it with `pip install 'llm-spec[pydantic-ai]'`.

    from pydantic_ai import Agent
    from llm_spec.integrations.pydantic_ai import SpeculativeModel

    model = SpeculativeModel(
        "vllm:big@http://127.0.0.1:8000/v1", draft="vllm:small@http://127.0.0.1:8001/v1"
    )
    agent = Agent(model)

Provider and model of a response are the target's (`openai`, `gpt-4.1`), so `response.cost()` finds
its prices. With a `SpeculativeDecoder`, each `ModelResponse` tells in `provider_details` how it
came about (`strategy`, `guarantee`, `acceptance_rate`, `plain_reason`, `speedup`, …). So does the
span of an instrumented request (`llm_spec.strategy`, …).

`failed_attempts` lists what was drafted in vain and what failed on the way. The draft has the
outcome `rejected` if the target did not confirm all of it, or `error` if it was given up. The
target has `error` for each retry.

The usage of a response is the target's alone. If a rejected draft cost money by the config's
`Price`s or the built-in list, its usage is in its attempt, and so in the run's usage and limits.
Otherwise a run has the same usage with and without a draft.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, cast

from pydantic_ai import RunContext
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import ModelMessage, ModelResponse, ThinkingPart
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse, check_allow_model_requests
from pydantic_ai.profiles import ModelProfile, ModelProfileSpec
from pydantic_ai.settings import ModelSettings, merge_model_settings

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import ConfigError, InvalidRequestError, LlmSpecError
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.integrations._pydantic_ai_errors import convert_error_to_pydantic_ai
from llm_spec.integrations._pydantic_ai_messages import MessageConverter
from llm_spec.integrations._pydantic_ai_names import describe_target
from llm_spec.integrations._pydantic_ai_profile import build_profile
from llm_spec.integrations._pydantic_ai_reasoning import (
    ThoughtSplitter,
    can_only_be_text,
    get_thinking_tags,
    separate_thoughts,
)
from llm_spec.integrations._pydantic_ai_settings import (
    KEPT_ANNOTATIONS,
    build_request_options,
    warn_about_unused_settings,
)
from llm_spec.integrations._pydantic_ai_stream import SpeculativeStreamedResponse, find_request_span
from llm_spec.integrations._shared import ProviderSource, TaskReadEventStream

__all__ = ["SpeculativeModel", "SpeculativeStreamedResponse"]

_DECODER_SETTINGS: Final = frozenset({"max_retries", "timeout"})


class SpeculativeModel(Model[Any]):
    """A pydantic-ai model that answers with an `llm_spec` provider.

    `target` is that provider, typically a `SpeculativeDecoder`, or a string. From a string a
    decoder is made with `draft` and `config`. `aclose`, and leaving `async with`, close it; the
    next use opens it again.

    Errors are pydantic-ai's own, so its fallbacks work. An error with a status is a ModelHTTPError
    of the category that pydantic-ai's own models use (ModelRateLimitError,
    ModelAuthenticationError, …). An error without a status has only the category
    (ModelConnectionError, ModelRequestRejectedError for a request that cannot be served, …).

    A decoder obeys `max_retries` and `timeout` (the longest silence). An UnsupportedSettingWarning
    names a setting that the model does not use.
    """

    unsupported_settings = frozenset({"citations", "extra_headers"})
    _unsupported_file_inputs = frozenset({"video"})
    _relocates_tool_files = True

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
        self._target = describe_target(self._source.provider, target)
        super().__init__(settings=settings, profile=profile)

    @property
    def model_name(self) -> str:
        """The target's model."""
        return self._target.model

    @property
    def system(self) -> str:
        """The target's provider, as pydantic-ai calls it."""
        return self._target.provider

    @property
    def base_url(self) -> str | None:
        """The target's address without credentials, or None if none was given."""
        return self._target.url

    def _provider_model_profile(self) -> ModelProfile:
        """Return what the target can do, as it says or as pydantic-ai knows its model."""
        return build_profile(self._target, self._source.provider.capabilities)

    def _carries_thinking_in_user_turn(self, message: ModelResponse, part: ThinkingPart) -> bool:
        """Return True if this reasoning is sent back in a user turn."""
        is_carried = self.profile.get("mimics_assistant_message_formatting", False)
        return is_carried and can_only_be_text(message, part, self.accepts_stateless_artifacts, self.profile)

    def _unsupported_settings(self) -> Any:  # the framework's name for a setting is a literal
        """Return the unused settings. Only a decoder retries, or has a timeout for each request."""
        is_decoder = isinstance(self._source.provider, SpeculativeDecoder)
        return self.unsupported_settings if is_decoder else self.unsupported_settings | _DECODER_SETTINGS

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        opened = self._open_response(messages, model_settings, model_request_parameters, is_streamed=False)
        async with opened as response:
            async for _ in response:
                pass
            answer = response.get()
        if response.has_refused:  # text before a refusal is not an answer
            return replace(answer, parts=[])
        tags = self._get_parsed_tags()
        return (
            answer if tags is None else replace(answer, parts=list(separate_thoughts(answer.parts, tags, self.system)))
        )

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,  # noqa: ARG002 - the framework's signature
    ) -> AsyncGenerator[StreamedResponse]:
        opened = self._open_response(messages, model_settings, model_request_parameters, is_streamed=True)
        async with opened as response:
            yield response

    def _get_parsed_tags(self) -> tuple[str, str] | None:
        """Return the tags that enclose reasoning in text, or None if the API has blocks for it."""
        return None if self.system == "anthropic" else get_thinking_tags(self.profile)

    @asynccontextmanager
    async def _open_response(
        self,
        messages: list[ModelMessage],
        settings: ModelSettings | None,
        parameters: ModelRequestParameters,
        *,
        is_streamed: bool,
    ) -> AsyncGenerator[SpeculativeStreamedResponse]:
        check_allow_model_requests()
        given_settings = merge_model_settings(self.settings, settings) or {}
        warn_about_unused_settings(given_settings, self._target, self._source.provider.capabilities)
        settings, parameters = self.prepare_request(settings, parameters)
        settings = settings or {}
        request = await self._build_request(messages, settings, parameters)
        source, tags = _configure_source(self._source, settings), self._get_parsed_tags()
        async with TaskReadEventStream(source.stream(request)) as stream:
            try:
                # raise an early failure here, so that a fallback model can still take over
                await stream.wait_for_first_event()
            except LlmSpecError as error:
                raise convert_error_to_pydantic_ai(self.model_name, error) from error
            yield SpeculativeStreamedResponse(
                parameters,
                self._target,
                stream,
                ThoughtSplitter(tags) if is_streamed and tags is not None else None,
                _ignores_leading_space=is_streamed and self.profile.get("ignore_streamed_leading_whitespace", False),
                _keeps_annotations=bool(cast("Mapping[str, Any]", settings).get(KEPT_ANNOTATIONS)),
                _span=find_request_span(),
            )

    async def _build_request(
        self, messages: list[ModelMessage], settings: ModelSettings, parameters: ModelRequestParameters
    ) -> ChatRequest:
        converter = MessageConverter(
            system=self.system,
            profile=self.profile,
            is_accepted=self.accepts_stateless_artifacts,
            format_text_file=self._format_text_file,
        )
        converted = await converter.convert(messages, parameters)
        options = build_request_options(settings, parameters, self.profile, self._target)
        try:
            return ChatRequest.create(converted, **options)
        except InvalidRequestError as error:
            raise convert_error_to_pydantic_ai(self.model_name, error) from error

    def _format_text_file(self, text: str, media_type: str, identifier: str) -> str:
        return self._format_inlined_text_file(text, media_type=media_type, identifier=identifier)

    async def aclose(self) -> None:
        """Close what was opened from strings."""
        await self._source.aclose()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def _configure_source(source: ProviderSource, settings: ModelSettings) -> ProviderSource:
    """Return the source with a request's `max_retries` and `timeout`.

    `max_retries` counts the attempts after the first. `timeout` is the longest silence, as in
    pydantic-ai's own models: a number of seconds, or an httpx timeout whose `read` counts. Raises
    UserError for a value that is not valid.
    """
    timeout: Any = settings.get("timeout")
    timeout_s = timeout if isinstance(timeout, int | float) else getattr(timeout, "read", None)
    try:
        return source.limit(timeout_s=timeout_s, max_retries=settings.get("max_retries"))
    except ConfigError as error:
        raise UserError(f"max_retries or timeout cannot be used: {error}") from error
