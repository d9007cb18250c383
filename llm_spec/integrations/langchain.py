"""SpeculativeChatModel: a speculative decoder, or any provider, as a LangChain chat model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ConfigDict, Field, GetPydanticSchema, PrivateAttr, model_validator
from pydantic_core import core_schema

from llm_spec.chat import (
    ChatRequest,
    Finish,
    ReasoningDelta,
    RequestOptions,
    StreamEvent,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from llm_spec.config import SpeculativeConfig, Timeouts
from llm_spec.contract.chat import LlmProvider
from llm_spec.contract.draft import DraftProvider
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.errors import InvalidRequestError
from llm_spec.integrations._bridge import OpenStream
from llm_spec.integrations._shared import BridgedSource, convert_logprob_options, describe_finish_as_json
from llm_spec.openai_logprobs import build_chat_logprobs
from llm_spec.request_fields import EXTRA_FIELDS

__all__ = ["SpeculativeChatModel"]

_OPTIONS: Final = (  # fields of the model that are options of a request
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "max_tokens",
    "stop",
    "logprobs",
    "top_logprobs",
    "extra",
)

_NOT_OPTIONS: Final = ("stream",)  # what LangChain's own machinery leaves in a call's keywords

# content blocks of an answer that are no content in OpenAI's form: calls are fields there, reasoning does not go back
_NON_CONTENT_TYPES: Final = ("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "reasoning", "thinking")

Schema: TypeAlias = dict[str, Any] | type
Tool: TypeAlias = dict[str, Any] | type | Callable[..., Any] | BaseTool
# a dataclass whose fields Pydantic would want to check again, by annotations that are there for type checkers alone
_Config: TypeAlias = Annotated[
    SpeculativeConfig, GetPydanticSchema(lambda _, __: core_schema.is_instance_schema(SpeculativeConfig))
]


class SpeculativeChatModel(BaseChatModel):
    """A target that answers with the help of a draft, as a chat model.

        model = SpeculativeChatModel(target="builtin:target", draft="lookup+builtin:draft", max_tokens=64)
        model = SpeculativeChatModel(target=decoder)

    `target` is a provider, typically a `SpeculativeDecoder`, or a string for a decoder to be made with `draft` and
    `config`. What strings name is opened at once, used on an event loop of the model's own thread, whoever calls, and
    closed by `close` or `aclose`. A provider stays the caller's, and works on one event loop: that of the first
    asynchronous call, or the model's thread where the first call is synchronous. Other calls are carried there.
    RuntimeError says so where that cannot be: the loop has ended, or a synchronous call is made on that very loop.

    `timeout` (how many seconds the target may be silent) and `max_retries` come before what `config`, or a decoder's
    own, says of them. The other fields are options of `ChatRequest`, for each call unless its own keywords say
    otherwise; a call also takes the fields of docs/request-fields.md by their names (`reasoning_effort`, `user`, …).
    Keys belong to providers, so they are no fields here. Errors are this library's.
    A message's `response_metadata["llm_spec"]` tells how it came about: `strategy`, `guarantee`, `acceptance_rate`, ….
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    target: LlmProvider | str = Field(exclude=True, repr=False)  # may hold an address with a password
    draft: DraftProvider | LlmProvider | str | None = Field(default=None, exclude=True, repr=False)
    config: _Config | None = Field(default=None, exclude=True, repr=False)
    timeout: float | None = Field(default=None, gt=0)
    max_retries: int | None = Field(default=None, ge=0)
    streaming: bool = False
    """Whether `invoke`, too, tells callbacks each token."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    logprobs: bool | None = None
    """Whether messages have log-probabilities, as ChatOpenAI's: `response_metadata["logprobs"]["content"]`."""
    top_logprobs: int | None = None
    extra: dict[str, Any] | None = Field(default=None, exclude=True, repr=False)  # goes to a server as it is

    _bridge: BridgedSource = PrivateAttr()

    @model_validator(mode="after")
    def _open_bridge(self) -> Self:
        target, config = self.target, self.config
        if self.timeout is not None or self.max_retries is not None:
            if isinstance(target, SpeculativeDecoder) and self.draft is None and config is None:
                target = target.with_config(self._override_timeouts(target.config))
            else:
                config = self._override_timeouts(config or SpeculativeConfig())
        self._bridge = BridgedSource(target, self.draft, config)
        return self

    def _override_timeouts(self, config: SpeculativeConfig) -> SpeculativeConfig:
        """A config with this model's own timeout and retries."""
        if self.timeout is not None:
            timeouts = Timeouts(first_chunk_s=self.timeout, between_chunks_s=self.timeout)
            config = replace(config, timeouts=timeouts)
        if self.max_retries is not None:
            config = replace(config, retry=replace(config.retry, max_attempts=self.max_retries + 1))
        return config

    def close(self) -> None:
        """Close what was opened from strings, and end the thread and what it was doing; twice is harmless."""
        self._bridge.close()

    async def aclose(self) -> None:
        """As `close`."""
        await self._bridge.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def model_name(self) -> str:
        """The provider's name."""
        return self._bridge.source.name

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield "model_name", self.model_name
        yield from ((name, value) for name, value in self._identifying_params.items() if name != "model_name")

    # --------------------------------------------------------------------------- what LangChain asks for

    @property
    def _llm_type(self) -> str:
        return "llm_spec"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        params = {name: getattr(self, name) for name in _OPTIONS if name != "extra"}
        return {"model_name": self.model_name} | {name: value for name, value in params.items() if value is not None}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = self._llm_type
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with aclosing(self._astream(messages, stop, run_manager, **kwargs)) as chunks:
            return generate_from_stream(iter([chunk async for chunk in chunks]))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - the caller reports the chunks
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with closing(self._bridge.stream(self._build_stream_opener(messages, stop, kwargs))) as events:
            for event in events:
                yield from _convert_event_to_langchain_chunk(event, self.model_name)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002 - the caller reports the chunks
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk]:
        async with aclosing(self._bridge.astream(self._build_stream_opener(messages, stop, kwargs))) as events:
            async for event in events:
                for chunk in _convert_event_to_langchain_chunk(event, self.model_name):
                    yield chunk

    def _build_stream_opener(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> OpenStream[StreamEvent]:
        """What opens the stream of an answer."""
        call_options = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        call_options |= {name: value for name, value in options.items() if name not in _NOT_OPTIONS}
        if stop is not None:
            call_options["stop"] = stop
        given = [name for name in call_options if name in EXTRA_FIELDS]  # OpenAI's words are a habit with bind_tools
        if given:
            fields = {name: call_options.pop(name) for name in given}
            call_options["extra"] = {**call_options.get("extra", {}), **fields}
        request_options = cast("RequestOptions", convert_logprob_options(call_options))
        request = ChatRequest.create(_convert_langchain_messages(messages), **request_options)
        return partial(self._bridge.source.stream, request)

    # ------------------------------------------------------------------------------ tools and structure

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools at hand.

        `tool_choice`: "any", "required" or True for some tool, a tool's name or OpenAI's dict for that one, "auto" or
        None as the model likes, "none" or False for none. `strict` goes into the tools; `kwargs` are call keywords.
        """
        functions = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choice = _convert_tool_choice_from_langchain(
            tool_choice, [function["function"]["name"] for function in functions]
        )
        return self.bind(tools=functions, **({} if choice is None else {"tool_choice": choice}), **kwargs)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        include_raw: bool = False,
        method: Literal["function_calling", "json_schema", "json_mode"] = "function_calling",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """The model, its answers parsed: a Pydantic class gives its instances, any other schema gives dicts.

        `function_calling` makes the answer a tool call, `json_schema` and `json_mode` set `response_format`; in
        `json_mode` the prompt has to say what is wanted, and `schema` may be missing. With `include_raw` the result is
        a dict of `raw`, `parsed` and `parsing_error`, and what cannot be parsed raises nothing.
        """
        if schema is None and method != "json_mode":
            raise InvalidRequestError(f"schema is None; method {method!r} needs one")
        is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        parser: BaseOutputParser[Any]
        if method == "function_calling":
            assert schema is not None  # noqa: S101 - checked above
            name = convert_to_openai_tool(schema)["function"]["name"]
            kwargs |= {"tool_choice": name, "strict": strict, "ls_structured_output_format": traced}
            answer_chain = self.bind_tools([schema], **kwargs)
            parser = (
                PydanticToolsParser(tools=[cast("type[BaseModel]", schema)], first_tool_only=True)
                if is_class
                else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
            )
        elif method in ("json_schema", "json_mode"):
            response_format = _build_response_format(schema if method == "json_schema" else None, strict)
            answer_chain = self.bind(response_format=response_format, ls_structured_output_format=traced, **kwargs)
            parser = (
                PydanticOutputParser(pydantic_object=cast("type[BaseModel]", schema))
                if is_class
                else JsonOutputParser()
            )
        else:
            raise InvalidRequestError(f"method is {method!r}; it must be function_calling, json_schema or json_mode")
        return _return_raw_and_parsed(answer_chain, parser) if include_raw else answer_chain | parser


def _convert_tool_choice_from_langchain(
    choice: str | dict[str, Any] | bool | None, names: Sequence[str]
) -> str | dict[str, Any] | None:
    """A tool choice in OpenAI's words."""
    if choice is None or isinstance(choice, dict):
        return choice
    if isinstance(choice, bool):
        return "required" if choice else "none"
    if choice in names:
        return {"type": "function", "function": {"name": choice}}
    if choice in ("any", "auto", "none", "required"):
        return "required" if choice == "any" else choice
    raise InvalidRequestError(f"tool_choice is {choice!r}; the tools are {', '.join(names)}")


def _build_response_format(schema: Schema | None, strict: bool | None) -> dict[str, Any]:
    if schema is None:
        return {"type": "json_object"}
    named = {"name": convert_to_openai_tool(schema)["function"]["name"], "schema": convert_to_json_schema(schema)}
    return {"type": "json_schema", "json_schema": named if strict is None else named | {"strict": strict}}


def _return_raw_and_parsed(
    answer_chain: Runnable[LanguageModelInput, AIMessage], parser: BaseOutputParser[Any]
) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
    """The answer beside what it was parsed to, or beside what went wrong."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=answer_chain) | parsed.with_fallbacks([unparsed], exception_key="parsing_error")


# ------------------------------------------------------------------------------------------------ messages


def _convert_langchain_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form."""
    converted = convert_to_openai_messages(messages)
    for message in converted:
        if message["role"] == "assistant" and isinstance(message["content"], list):
            parts = [part for part in message["content"] if part.get("type") not in _NON_CONTENT_TYPES]
            is_text = all(part.get("type") == "text" for part in parts)
            message["content"] = "".join(part["text"] for part in parts) if is_text else parts
    return converted


def _convert_event_to_langchain_chunk(event: StreamEvent, model_name: str) -> Iterator[ChatGenerationChunk]:
    """An event as LangChain's chunk, if it is of those that have one; the finish is the one with usage."""
    match event:
        case TextDelta():
            logprobs = build_chat_logprobs(event.logprobs)
            info = None if logprobs is None else {"logprobs": logprobs}
            yield ChatGenerationChunk(message=AIMessageChunk(content=event.text), generation_info=info)
        case ReasoningDelta():
            message = AIMessageChunk(content="", additional_kwargs={"reasoning_content": event.text})
            yield ChatGenerationChunk(message=message)
        case ToolCallDelta():
            piece = tool_call_chunk(name=event.name, args=event.arguments, id=event.id, index=event.index)
            yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[piece]))
        case Finish():
            message = AIMessageChunk(
                content="",
                response_metadata={
                    "model_name": model_name,
                    "finish_reason": event.finish_reason,
                    "llm_spec": describe_finish_as_json(event),
                },
                usage_metadata=None if event.usage is None else _convert_usage_to_langchain(event.usage),
                chunk_position="last",
            )
            yield ChatGenerationChunk(message=message)
        case _:
            pass  # rounds, fallbacks and retries are no part of an answer


def _convert_usage_to_langchain(usage: Usage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_input_tokens),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )
