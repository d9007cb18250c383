"""Speculative decoding as a model of the OpenAI Agents SDK.

Install it with `pip install 'llm-spec[openai-agents]'`.

    from agents import Agent, Runner
    from llm_spec.integrations.openai_agents import SpeculativeModel

    model = SpeculativeModel(
        "vllm:big@http://127.0.0.1:8000/v1", draft="vllm:small@http://127.0.0.1:8001/v1"
    )
    result = await Runner.run(Agent(name="Assistant", model=model), "Hello")

`RunConfig(model_provider=SpeculativeModelProvider(…))` serves all agents of a run. The SDK's own
converter and stream handler for chat completions turn items into messages and answers into
Responses events. Every output item tells in `provider_data["llm_spec"]` how the answer came about
(`strategy`, `guarantee`, `acceptance_rate`, `speedup`, …). So does the generation span in its
`model_config`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, cast

from agents import (
    Agent,
    AgentOutputSchemaBase,
    Handoff,
    Model,
    ModelBehaviorError,
    ModelProvider,
    ModelResponse,
    ModelSettings,
    ModelTracing,
    Tool,
    TResponseInputItem,
    Usage,
    UserError,
)
from agents.items import TResponseStreamEvent
from agents.models._retry_runtime import should_disable_provider_managed_retries  # as the SDK does
from agents.models.chatcmpl_converter import Converter
from agents.models.chatcmpl_stream_handler import ChatCmplStreamHandler
from agents.models.fake_id import FAKE_RESPONSES_ID
from agents.models.reasoning_content_replay import ShouldReplayReasoningContent
from agents.retry import ModelRetryAdvice, ModelRetryAdviceRequest, ModelRetryNormalizedError
from agents.tracing import GenerationSpanData, Span, SpanError, generation_span
from openai import AsyncStream, Omit
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseOutputItem, ResponseReasoningItem
from openai.types.responses.response_prompt_param import ResponsePromptParam

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import CircuitOpenError, TransientError
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.integrations._openai_agents_chunks import ChatChunkStream
from llm_spec.integrations._openai_agents_errors import raise_as_openai_errors
from llm_spec.integrations._openai_agents_messages import REASONING_DETAILS, convert_items_to_messages
from llm_spec.integrations._openai_agents_settings import build_setting_options
from llm_spec.integrations._shared import (
    ProviderSource,
    TaskReadEventStream,
    build_request_options,
    split_provider_name,
)

__all__ = ["SpeculativeModel", "SpeculativeModelProvider"]

_REDACTED = "Error details are redacted."


class SpeculativeModel(Model):
    """A model that answers with an `llm_spec` provider, typically a `SpeculativeDecoder`.

    `target` is that provider, or a string. From a string a decoder is made with `draft` and
    `config`, which `close` closes. Of ModelSettings it takes what OpenAI's chat completions have,
    and refuses the rest by name (`extra_headers`, `extra_query`, `context_management`, …).
    `extra_args` takes the other options of `ChatRequest.create` (`seed`, `stop`, `logit_bias`,
    `top_k`, …). Unknown options go to a remote target unchanged, as does `extra_body`.

    Reasoning goes back to the model that it came from; `should_replay_reasoning_content` overrides
    this, as in the SDK's own models. Errors are both llm_spec's and those of OpenAI's client
    (`openai.RateLimitError`, …). An error that may pass says so to the runner's retry policy. A
    decoder does not retry what the runner retries.
    """

    def __init__(
        self,
        target: LlmProvider | str,
        *,
        draft: DraftProvider | LlmProvider | str | None = None,
        config: SpeculativeConfig | None = None,
        should_replay_reasoning_content: ShouldReplayReasoningContent | None = None,
    ) -> None:
        self._source = ProviderSource(target, draft, config)
        # the name that the SDK's models and price lists use
        _, self.model = split_provider_name(self._source.target.name)
        self._should_replay = should_replay_reasoning_content

    async def get_response(  # noqa: PLR0917 - the SDK's signature
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],  # noqa: A002 - the SDK's name
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff[Any, Agent[Any]]],
        tracing: ModelTracing,
        *,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: ResponsePromptParam | None = None,
    ) -> ModelResponse:
        completed: Response | None = None
        raw_usage: dict[str, Any] | None = None
        _refuse_server_state(previous_response_id, conversation_id, prompt)
        with raise_as_openai_errors():
            request = self._build_request(
                input, model_settings, tools, handoffs, instructions=system_instructions, output_schema=output_schema
            )
            async with aclosing(self._stream_answer(request, model_settings, tracing)) as events:
                async for event, chunks in events:
                    if event.type == "response.completed":
                        completed, raw_usage = event.response, chunks.raw_usage
        if completed is None:
            raise ModelBehaviorError(f"{self.model} gave no answer")
        return ModelResponse(
            output=completed.output,
            usage=_convert_usage_to_agents_sdk(completed),
            response_id=None,
            raw_usage=raw_usage if model_settings.preserve_raw_usage else None,
        )

    async def stream_response(  # noqa: PLR0917 - as above
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],  # noqa: A002 - the SDK's name
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff[Any, Agent[Any]]],
        tracing: ModelTracing,
        *,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: ResponsePromptParam | None = None,
    ) -> AsyncIterator[TResponseStreamEvent]:
        """Yield the answer as Responses events.

        Closing the iterator, or cancelling its reader, ends the upstream.
        """
        _refuse_server_state(previous_response_id, conversation_id, prompt)
        with raise_as_openai_errors():
            request = self._build_request(
                input, model_settings, tools, handoffs, instructions=system_instructions, output_schema=output_schema
            )
            async with aclosing(self._stream_answer(request, model_settings, tracing)) as events:
                async for event, _ in events:
                    yield event

    def get_retry_advice(self, request: ModelRetryAdviceRequest) -> ModelRetryAdvice | None:
        """Advise a retry if this failure of the target may pass. Otherwise return None."""
        error = request.error
        if not isinstance(error, TransientError | CircuitOpenError):
            return None
        return ModelRetryAdvice(
            suggested=True,
            retry_after=error.retry_after_s,
            reason=str(error),
            normalized=ModelRetryNormalizedError(
                status_code=error.status, retry_after=error.retry_after_s, is_network_error=error.status is None
            ),
            response_started=bool(error.partial_text),
        )

    async def close(self) -> None:
        """Close what was opened from strings."""
        await self._source.aclose()

    # --------------------------------------------------------------------------------------- inside

    async def _stream_answer(
        self, request: ChatRequest, settings: ModelSettings, tracing: ModelTracing
    ) -> AsyncGenerator[tuple[TResponseStreamEvent, ChatChunkStream]]:
        with self._open_span(request, settings, tracing) as span:
            source = self._source.limit(max_retries=0 if should_disable_provider_managed_retries() else None)
            async with TaskReadEventStream(source.stream(request)) as stream:
                chunks = ChatChunkStream(stream, request, self.model, self._source.target.name)
                try:
                    async for event in self._iter_response_events(chunks, request, settings):
                        if event.type == "response.completed":
                            _keep_reasoning_details(chunks, event.response)
                            _record_answer(span, chunks, event.response, tracing)
                        yield event, chunks
                except ModelBehaviorError:
                    _record_usage(span, chunks)
                    raise

    def _build_request(
        self,
        items: str | list[TResponseInputItem],
        settings: ModelSettings,
        tools: list[Tool],
        handoffs: list[Handoff[Any, Agent[Any]]],
        *,
        instructions: str | None,
        output_schema: AgentOutputSchemaBase | None,
    ) -> ChatRequest:
        messages = convert_items_to_messages(
            items,
            instructions=instructions,
            model=self.model,
            target=self._source.target.name,
            api=self._source.provider.capabilities.api,
            should_replay=self._should_replay,
        )
        options = build_setting_options(settings)
        converted_tools: list[Any] = [Converter.tool_to_openai(tool) for tool in tools]
        converted_tools += [Converter.convert_handoff_tool(handoff) for handoff in handoffs]
        if converted_tools:
            options["tools"] = converted_tools
            options["tool_choice"] = _convert_omit_to_none(Converter.convert_tool_choice(settings.tool_choice))
            options["parallel_tool_calls"] = settings.parallel_tool_calls
        if output_schema is not None:
            options["response_format"] = _convert_omit_to_none(Converter.convert_response_format(output_schema))
        return ChatRequest.create(messages, **build_request_options(options))

    def _iter_response_events(
        self, chunks: ChatChunkStream, request: ChatRequest, settings: ModelSettings
    ) -> AsyncIterator[TResponseStreamEvent]:
        response = Response(
            id=FAKE_RESPONSES_ID,
            created_at=time.time(),
            model=self.model,
            object="response",
            output=[],
            tool_choice="auto",
            tools=[],
            parallel_tool_calls=bool(request.tools) and bool(settings.parallel_tool_calls),
            temperature=settings.temperature,
            top_p=settings.top_p,
        )
        return ChatCmplStreamHandler.handle_stream(
            response,
            cast("AsyncStream[ChatCompletionChunk]", chunks.iter_chunks()),  # it is only iterated
            model=self.model,
            preserve_raw_usage=settings.preserve_raw_usage is True,
            raise_on_length_truncation=True,
        )

    @contextmanager
    def _open_span(
        self, request: ChatRequest, settings: ModelSettings, tracing: ModelTracing
    ) -> Iterator[Span[GenerationSpanData]]:
        """Open the generation span of the SDK's models, with data if `tracing` allows it."""
        config = settings.to_traceable_dict()
        if not tracing.include_data():
            config.pop("metadata", None)
        with generation_span(model=self.model, model_config=config, disabled=tracing.is_disabled()) as span:
            if tracing.include_data():
                span.span_data.input = [message.to_openai() for message in request.messages]
            try:
                yield span
            except Exception as error:
                model_config = str(error) if tracing.include_data() else _REDACTED
                span.set_error(SpanError(message="Error getting response", data={"error": model_config}))
                raise


class SpeculativeModelProvider(ModelProvider):
    """Models by name, for `RunConfig(model_provider=…)`.

    An agent without a model gets `target`. A name is an llm_spec provider string
    (`vllm:model@http://…`); its model has the same `draft` and `config`. Each model is made once;
    `aclose` closes those that were opened from strings.
    """

    def __init__(
        self,
        target: LlmProvider | str,
        *,
        draft: DraftProvider | LlmProvider | str | None = None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        self._target, self._draft, self._config = target, draft, config
        self._model_by_name: dict[str | None, SpeculativeModel] = {}

    def get_model(self, model_name: str | None) -> Model:
        if model_name not in self._model_by_name:
            target = self._target if model_name is None else model_name
            self._model_by_name[model_name] = SpeculativeModel(target, draft=self._draft, config=self._config)
        return self._model_by_name[model_name]

    async def aclose(self) -> None:
        while self._model_by_name:
            _, model = self._model_by_name.popitem()
            await model.close()


def _convert_omit_to_none(value: Any) -> Any:
    return None if isinstance(value, Omit) else value


def _refuse_server_state(
    previous_response_id: str | None, conversation_id: str | None, prompt: ResponsePromptParam | None
) -> None:
    state_fields = {"previous_response_id": previous_response_id, "conversation_id": conversation_id, "prompt": prompt}
    for name, value in state_fields.items():
        if value is not None:
            raise UserError(f"{name} is set, but only OpenAI's Responses API keeps it; pass the whole conversation")


def _convert_usage_to_agents_sdk(completed: Response) -> Usage:
    counted = completed.usage
    if counted is None:
        return Usage(requests=1)
    return Usage(
        requests=1,
        input_tokens=counted.input_tokens,
        output_tokens=counted.output_tokens,
        total_tokens=counted.total_tokens,
        input_tokens_details=counted.input_tokens_details,
        output_tokens_details=counted.output_tokens_details,
    )


def _keep_reasoning_details(chunks: ChatChunkStream, completed: Response) -> None:
    """Put the details that the API needs back into an item of reasoning, which the run keeps."""
    if not chunks.reasoning_details:
        return
    items = [item for item in completed.output if item.type == "reasoning"]
    if not items:
        # a field of the SDK that OpenAI's types do not have
        fields: Any = {"provider_data": {"model": completed.model}}
        items = [ResponseReasoningItem(id=FAKE_RESPONSES_ID, summary=[], type="reasoning", **fields)]
        completed.output[:0] = items
    _add_provider_data(items[0], {REASONING_DETAILS: chunks.reasoning_details})


def _add_provider_data(item: ResponseOutputItem, fields: dict[str, Any]) -> None:
    data = cast("Any", item)  # the SDK's items take fields that OpenAI's types do not have
    data.provider_data = {**(getattr(item, "provider_data", None) or {}), **fields}


def _record_answer(
    span: Span[GenerationSpanData], chunks: ChatChunkStream, completed: Response, tracing: ModelTracing
) -> None:
    """Record in items and span how the answer came about, before the last event is yielded."""
    ids = {} if chunks.response_id is None else {"response_id": chunks.response_id}
    for item in completed.output:
        _add_provider_data(item, {"llm_spec": chunks.figures, **ids})
    if tracing.include_data():
        span.span_data.output = [completed.model_dump()]
    _record_usage(span, chunks)


def _record_usage(span: Span[GenerationSpanData], chunks: ChatChunkStream) -> None:
    span.span_data.model_config = {**(span.span_data.model_config or {}), "llm_spec": chunks.figures}
    usage = chunks.raw_usage or {}
    prompt, completion = usage.get("prompt_tokens_details", {}), usage.get("completion_tokens_details", {})
    span.span_data.usage = {
        "requests": 1,
        "input_tokens": usage.get("prompt_tokens", 0),
        "output_tokens": usage.get("completion_tokens", 0),
        "total_tokens": usage.get("total_tokens", 0),
        "input_tokens_details": {name: prompt.get(name, 0) for name in ("cached_tokens", "cache_write_tokens")},
        "output_tokens_details": {"reasoning_tokens": completion.get("reasoning_tokens", 0)},
    }
