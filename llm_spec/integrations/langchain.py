"""SpeculativeChatModel: a speculative decoder, or any provider, as a LangChain chat model."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial, reduce
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult, Generation
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json import parse_json_markdown
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PrivateAttr,
    SkipValidation,
    model_validator,
)
from pydantic_core import core_schema

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.events import StreamEvent
from llm_spec.contract.fields import EXTRA_FIELDS
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest, RequestOptions
from llm_spec.contract.token_model import Tokenizer
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.integrations._identity import compute_digest
from llm_spec.integrations._langchain_errors import acheck_refusal, check_refusal, raise_as_langchain_errors
from llm_spec.integrations._langchain_messages import (
    ChunkBuilder,
    build_chat_result,
    convert_langchain_messages,
    separate_invalid_tool_calls,
    sum_token_usage,
)
from llm_spec.integrations._shared import (
    BridgedSource,
    ProviderSource,
    convert_logprob_options,
    convert_prediction,
    limit_config,
    split_provider_name,
)
from llm_spec.kit.event_loop_bridge import OpenStream

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

# Keywords of a call that are read elsewhere, or by LangChain itself
_NOT_OPTIONS: Final = ("stream", "stream_usage", "timeout")
_TOKENS_AROUND_A_MESSAGE: Final = 3  # LangChain's estimate for a chat template
# OpenAI's names for `max_tokens`
_LIMIT_WORDS: Final = ("max_completion_tokens", "max_output_tokens")

Schema: TypeAlias = dict[str, Any] | type
Tool: TypeAlias = dict[str, Any] | type | Callable[..., Any] | BaseTool
# Pydantic would check the fields of this dataclass again, by annotations made for type checkers
_Config: TypeAlias = Annotated[
    SpeculativeConfig, GetPydanticSchema(lambda _, __: core_schema.is_instance_schema(SpeculativeConfig))
]


class _OpenedTargets:
    """The bridges that a model has opened, each once. Its copies made by LangChain share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bridges: dict[str, BridgedSource] = {}
        self._limited: dict[tuple[int, float | None, int | None], ProviderSource] = {}

    def __deepcopy__(self, _: object) -> Self:
        return self

    @property
    def bridges(self) -> list[BridgedSource]:
        """All open bridges."""
        return list(self._bridges.values())

    def get_or_open(
        self,
        target: LlmProvider | str,
        draft: DraftProvider | LlmProvider | str | None,
        config: SpeculativeConfig | None,
    ) -> BridgedSource:
        """Return the bridge for this pair, and open it first if there is none."""
        key = compute_digest((target, draft, config))
        if key not in self._bridges:
            with self._lock:
                self._bridges[key] = self._bridges.get(key) or BridgedSource(target, draft, config)
        return self._bridges[key]

    def get_or_limit(self, source: ProviderSource, timeout: float | None, max_retries: int | None) -> ProviderSource:
        """Return the same provider with this timeout and these retries. None changes nothing."""
        key = (id(source), timeout, max_retries)
        if key not in self._limited:
            provider = source.provider
            decoder = (
                provider
                if isinstance(provider, SpeculativeDecoder)
                else SpeculativeDecoder(target=provider, draft=None)
            )
            config = limit_config(decoder.config, timeout_s=timeout, max_retries=max_retries)
            self._limited.setdefault(key, ProviderSource(decoder.with_config(config)))
        return self._limited[key]


def _check_timeout(timeout: Any) -> None:
    """Raise InvalidRequestError if a call's timeout is neither None nor a positive number."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise InvalidRequestError(f"timeout is {timeout!r}; it must be a number of seconds greater than 0")


class SpeculativeChatModel(BaseChatModel):
    """A chat model whose target answers with the help of a draft.

        model = SpeculativeChatModel(
            target="builtin:target", draft="lookup+builtin:draft", max_tokens=64
        )
        model = SpeculativeChatModel(target=decoder)

    `target` is a provider, typically a `SpeculativeDecoder`, or a string. From a string a decoder
    is made with `draft` and `config`. Strings are opened at once, on an event loop in a thread of
    the model, and `close` or `aclose` closes them. A provider stays the caller's and works on one
    event loop: that of the first asynchronous call, or the model's thread if the first call is
    synchronous. Other calls are carried there. If that loop has ended, the loop of the next call
    takes its place. A synchronous call on that loop itself raises RuntimeError.

    `timeout` (the longest silence of the target, in seconds) and `max_retries` override those of
    `config`, or of a given decoder. The other fields are options of `ChatRequest` for every call;
    keywords of a call override them. A call also takes the fields of docs/request-fields.md by name
    (`reasoning_effort`, `user`, …), and `extra_body`, `max_completion_tokens`, `stream_usage` and
    `timeout`, as ChatOpenAI does. Keys belong to providers, so there are no fields for them.

    Errors are this library's, and also LangChain's if it has a matching one (`ModelRateLimitError`,
    `ContextOverflowError`, …). `response_metadata["llm_spec"]` of a message tells how it came
    about: `strategy`, `guarantee`, `acceptance_rate`, …. Its `additional_kwargs` keep what goes
    back with it: `reasoning_content`, `reasoning_details`, `thinking_blocks`.
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    # may hold an address with a password
    target: LlmProvider | str = Field(exclude=True, repr=False)
    draft: DraftProvider | LlmProvider | str | None = Field(default=None, exclude=True, repr=False)
    config: _Config | None = Field(default=None, exclude=True, repr=False)
    timeout: float | None = Field(default=None, gt=0)
    max_retries: int | None = Field(default=None, ge=0)
    streaming: bool = False
    """If True, `invoke` also reports each token to callbacks."""
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
    stop: list[str] | str | None = None
    logprobs: bool | None = None
    """If True, `response_metadata["logprobs"]["content"]` is set, as in ChatOpenAI."""
    top_logprobs: int | None = None
    # sent to a server unchanged
    extra: dict[str, Any] | None = Field(default=None, exclude=True, repr=False)

    opened: Annotated[_OpenedTargets | None, SkipValidation] = Field(default=None, exclude=True, repr=False)
    """The bridges that this model has opened. Copies that LangChain makes of it share them."""

    _bridge: BridgedSource = PrivateAttr()

    @model_validator(mode="after")
    def _open_bridge(self) -> Self:
        opened = self.opened or _OpenedTargets()
        # an assignment would validate the model, and so call this method, again
        self.__dict__["opened"] = opened
        self._bridge = opened.get_or_open(self.target, self.draft, self.config)
        return self

    def close(self) -> None:
        """Close what was opened from strings, and end the thread. May be called twice."""
        for bridge in self._list_bridges():
            bridge.close()

    async def aclose(self) -> None:
        """As `close`, for a coroutine."""
        for bridge in self._list_bridges():
            await bridge.aclose()

    def _list_bridges(self) -> list[BridgedSource]:
        return [] if self.opened is None else self.opened.bridges

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
        yield from self._get_option_fields().items()

    # ---------------------------------------------------------------------- what LangChain asks for

    @property
    def _llm_type(self) -> str:
        return "llm_spec"

    def _get_option_fields(self) -> dict[str, Any]:
        """Return the fields that are request options, without `extra`, which may hold secrets."""
        values = {name: getattr(self, name) for name in _OPTIONS if name != "extra"}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """The values by which caches tell models apart.

        Addresses, `config` and `extra` appear only as a digest.
        """
        parts = (self.target, self.draft, self.config, self.extra, self.timeout, self.max_retries)
        return {"model_name": self.model_name, "configuration": compute_digest(parts)} | self._get_option_fields()

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """Return the key of a cached answer, hashed: options of a call may hold secrets, too."""
        return f"{self._llm_type} {self.model_name} {compute_digest(super()._get_llm_string(stop=stop, **kwargs))}"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        own_stop = [self.stop] if isinstance(self.stop, str) else self.stop
        params = super()._get_ls_params(stop=stop or own_stop, **kwargs)
        provider, model = split_provider_name(self._target_provider.name)
        params["ls_provider"] = provider or self._llm_type
        params["ls_model_name"] = str(kwargs.get("model", model))
        return params

    @property
    def _target_provider(self) -> LlmProvider:
        return self._bridge.source.target

    def get_num_tokens(self, text: str) -> int:
        """Count the tokens of a text.

        The count is exact if the target runs in this process, otherwise an estimate.
        """
        if self.custom_get_token_ids is None and self._find_tokenizer() is None:
            return count_tokens_approximately([text], extra_tokens_per_message=0)
        return len(self.get_token_ids(text))

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text's tokens.

        Raises InvalidRequestError if `custom_get_token_ids` is not set and the target does not run
        in this process.
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        tokenizer = self._find_tokenizer()
        if tokenizer is None:
            raise InvalidRequestError(f"{self.model_name} does not tell token ids; set custom_get_token_ids")
        return tokenizer.encode(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Tool] | None = None) -> int:
        """Estimate the number of tokens of messages and tools."""
        described = [convert_to_openai_tool(tool) for tool in tools or ()]
        if self.custom_get_token_ids is not None or self._find_tokenizer() is not None:
            texts = [message.text for message in messages] + [json.dumps(tool) for tool in described]
            return sum(self.get_num_tokens(text) + _TOKENS_AROUND_A_MESSAGE for text in texts)
        return count_tokens_approximately(messages, tools=cast("Any", described) or None)

    def _find_tokenizer(self) -> Tokenizer | None:
        model = self._target_provider.capabilities.token_model
        return None if model is None else model.tokenizer

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        told = [output for output in llm_outputs if output is not None]
        if not told:
            return {}
        usages = [output["token_usage"] for output in told if "token_usage" in output]
        combined = {name: value for name, value in told[0].items() if name != "token_usage"}
        return combined | ({"token_usage": reduce(sum_token_usage, usages)} if usages else {})

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        """Generate a whole answer. Broken calls that LangChain has completed are separated."""
        return separate_invalid_tool_calls(super()._generate_with_cache(messages, stop, run_manager, **kwargs))

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        result = await super()._agenerate_with_cache(messages, stop, run_manager, **kwargs)
        return separate_invalid_tool_calls(result)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - nobody listens to single tokens here
        **kwargs: Any,
    ) -> ChatResult:
        builder = ChunkBuilder(self._target_provider.name)
        chunks = list(self._stream_chunks(builder, messages, stop, kwargs))
        return build_chat_result(chunks, builder.llm_output)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002 - as above
        **kwargs: Any,
    ) -> ChatResult:
        builder = ChunkBuilder(self._target_provider.name)
        async with aclosing(self._astream_chunks(builder, messages, stop, kwargs)) as chunks:
            return build_chat_result([chunk async for chunk in chunks], builder.llm_output)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - the caller reports the chunks
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        builder = ChunkBuilder(self._target_provider.name, has_usage=kwargs.get("stream_usage") is not False)
        return self._stream_chunks(builder, messages, stop, kwargs)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002 - the caller reports the chunks
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk]:
        builder = ChunkBuilder(self._target_provider.name, has_usage=kwargs.get("stream_usage") is not False)
        async with aclosing(self._astream_chunks(builder, messages, stop, kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _stream_chunks(
        self, builder: ChunkBuilder, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> Iterator[ChatGenerationChunk]:
        open_stream = self._build_stream_opener(messages, stop, options)
        with raise_as_langchain_errors(), closing(self._bridge.stream(open_stream)) as events:
            for event in events:
                yield from builder.convert(event)

    async def _astream_chunks(
        self, builder: ChunkBuilder, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> AsyncGenerator[ChatGenerationChunk]:
        open_stream = self._build_stream_opener(messages, stop, options)
        with raise_as_langchain_errors():
            async with aclosing(self._bridge.astream(open_stream)) as events:
                async for event in events:
                    for chunk in builder.convert(event):
                        yield chunk

    def _build_stream_opener(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> OpenStream[StreamEvent]:
        """Return a function that opens the stream of an answer."""
        call_options = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        call_options |= _convert_call_options(options, self.extra or {})
        if stop is not None:
            call_options["stop"] = stop
        extra = {name: call_options.pop(name) for name in list(call_options) if name in EXTRA_FIELDS}
        if extra:  # users of bind_tools pass OpenAI's options as keywords
            call_options["extra"] = {**call_options.get("extra", {}), **extra}
        request_options = cast("RequestOptions", convert_logprob_options(call_options))
        request = ChatRequest.create(convert_langchain_messages(messages), **request_options)
        return partial(self._find_source(options.get("timeout")).stream, request)

    def _find_source(self, call_timeout: float | None) -> ProviderSource:
        """Return the source with the retries and timeout of this model, or the call's timeout."""
        _check_timeout(call_timeout)
        timeout = self.timeout if call_timeout is None else call_timeout
        source = self._bridge.source
        if timeout is None and self.max_retries is None:
            return source
        assert self.opened is not None  # noqa: S101 - set by `_open_bridge`
        return self.opened.get_or_limit(source, timeout, self.max_retries)

    # -------------------------------------------------------------------------- tools and structure

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools to the model.

        `tool_choice` "any", "required" or True forces some tool, a tool's name or OpenAI's dict
        forces that one. "auto" or None leaves the choice to the model, "none" or False forbids
        tools. `strict` goes into the tools; `kwargs` are keywords of a call.
        """
        functions = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choice = _convert_tool_choice_from_langchain(tool_choice, _list_tool_names(functions))
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
        """Return a model that parses its answers: to a Pydantic class, otherwise to dicts.

        `schema` is a class, a JSON schema with a `title`, a function, or a schema in the form of
        OpenAI's `response_format`. `function_calling` makes the answer a tool call. `json_schema`
        and `json_mode` set `response_format`; in `json_mode` the prompt has to say what is wanted,
        and `schema` may be missing. With `include_raw` the result is a dict of `raw`, `parsed` and
        `parsing_error`, and an answer that cannot be parsed raises nothing.
        """
        if schema is None and method != "json_mode":
            raise InvalidRequestError(f"schema is None; method {method!r} needs one")
        is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        schema_strict = strict
        if method != "json_mode":  # which sends no schema
            schema, schema_strict = _read_schema(schema, strict)
        parser: BaseOutputParser[Any]
        if method == "function_calling":
            assert schema is not None  # noqa: S101 - checked above
            function = convert_to_openai_tool(schema, strict=schema_strict)
            name = function["function"]["name"]
            others = kwargs.pop("tools", None) or ()
            kwargs |= {"tool_choice": name, "strict": strict, "ls_structured_output_format": traced}
            kwargs.setdefault("parallel_tool_calls", False)  # only the first call is read
            answer_chain = self.bind_tools([function, *others], **kwargs)
            parser = (
                PydanticToolsParser(tools=[cast("type[BaseModel]", schema)], first_tool_only=True)
                if is_class
                else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
            )
        elif method in ("json_schema", "json_mode"):
            response_format = _build_response_format(schema if method == "json_schema" else None, schema_strict)
            options = {"response_format": response_format, "ls_structured_output_format": traced, **kwargs}
            tools = options.pop("tools", None)
            answer_chain = self.bind_tools(tools, strict=strict, **options) if tools else self.bind(**options)
            parser = (
                _WholePydanticOutputParser(pydantic_object=cast("type[BaseModel]", schema))
                if is_class
                else _WholeJsonOutputParser()
            )
        else:
            raise InvalidRequestError(f"method is {method!r}; it must be function_calling, json_schema or json_mode")
        checked_parser = RunnableGenerator(check_refusal, acheck_refusal) | parser
        return _return_raw_and_parsed(answer_chain, checked_parser) if include_raw else answer_chain | checked_parser


class _WholeJsonOutputParser(JsonOutputParser):
    """Parses an answer that has ended. It refuses an incomplete object."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _require_whole_json(result, partial=partial)
        return super().parse_result(result, partial=partial)


class _WholePydanticOutputParser(PydanticOutputParser[Any]):
    """As `_WholeJsonOutputParser`, for a Pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _require_whole_json(result, partial=partial)
        return super().parse_result(result, partial=partial)


def _require_whole_json(result: list[Generation], *, partial: bool) -> None:
    """Raise OutputParserException if a whole answer is not valid JSON.

    LangChain's parsers would complete it.
    """
    if partial:
        return
    text = result[0].text
    try:
        parse_json_markdown(text, parser=json.loads)
    except ValueError as error:
        raise OutputParserException(f"the answer is not valid JSON: {error}", llm_output=text) from error


def _convert_call_options(options: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a call's keywords, including those that only ChatOpenAI has, to request options."""
    converted = {name: value for name, value in options.items() if name not in _NOT_OPTIONS}
    for name in _LIMIT_WORDS:
        if name not in converted:
            continue
        limit = converted.pop(name)
        if converted.setdefault("max_tokens", limit) != limit:
            raise InvalidRequestError(
                f"max_tokens is {converted['max_tokens']} and {name} is {limit}; give one of them"
            )
    body = converted.pop("extra_body", None)
    if body is not None:
        own = {name: value for name, value in body.items() if name in _OPTIONS and name not in ("extra", "logprobs")}
        others = {name: value for name, value in body.items() if name not in own}
        converted = own | converted | {"extra": {**converted.get("extra", extra), **others}}
    if isinstance(bias := converted.get("logit_bias"), Mapping):  # keys in JSON are texts
        converted["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
    if converted.get("tools"):
        converted["tools"] = [convert_to_openai_tool(tool) for tool in converted["tools"]]
        choice, names = converted.get("tool_choice"), _list_tool_names(converted["tools"])
        converted["tool_choice"] = _convert_tool_choice_from_langchain(choice, names)
    if isinstance(schema := converted.get("response_format"), type):
        converted["response_format"] = _build_response_format(schema, strict=True)
    if converted.get("prediction") is not None:
        converted["prediction"] = convert_prediction(converted["prediction"])
    return converted


def _list_tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of tools. Tools that a vendor runs may have none."""
    return [name for tool in tools if (name := tool.get("function", tool.get("custom", tool)).get("name"))]


def _convert_tool_choice_from_langchain(
    choice: str | dict[str, Any] | bool | None, names: Sequence[str]
) -> str | dict[str, Any] | None:
    """Convert a tool choice to OpenAI's form."""
    if choice is None or isinstance(choice, dict):
        return choice
    if isinstance(choice, bool):
        return "required" if choice else "none"
    if choice in names:
        return {"type": "function", "function": {"name": choice}}
    if choice in ("any", "auto", "none", "required"):
        return "required" if choice == "any" else choice
    raise InvalidRequestError(f"tool_choice is {choice!r}; the tools are {', '.join(names)}")


def _read_schema(schema: Schema | None, strict: bool | None) -> tuple[Schema | None, bool | None]:
    """Return a schema and how to make it strict. OpenAI's response formats become a function.

    A schema with its own `strict` keeps it.
    """
    if not isinstance(schema, dict):
        return schema, strict
    named = schema.get("json_schema") if schema.get("type") == "json_schema" else schema.get("function", schema)
    if "title" in schema and "properties" not in schema:  # LangChain would send its title alone
        named = {"name": schema["title"], "schema": schema}
    if not isinstance(named, dict) or "name" not in named:
        return schema, strict
    function = {name: value for name, value in named.items() if name != "schema" and value is not None}
    if "schema" in named:
        function["parameters"] = named["schema"]
    if not isinstance(function.get("parameters", function.get("input_schema")), dict):
        raise InvalidRequestError(f"schema {named['name']!r} has no JSON schema; give it as 'schema' or 'parameters'")
    return function, None if "strict" in function else strict


def _build_response_format(schema: Schema | None, strict: bool | None) -> dict[str, Any]:
    """Build a response format from a schema that `_read_schema` returned."""
    if schema is None:
        return {"type": "json_object"}
    function = convert_to_openai_tool(schema, strict=strict)["function"]
    named = {name: function[name] for name in ("name", "description", "strict") if function.get(name) not in (None, "")}
    is_function = isinstance(schema, dict) and "parameters" in schema
    named["schema"] = function["parameters"] if is_function else convert_to_json_schema(schema, strict=strict)
    return {"type": "json_schema", "json_schema": named}


def _return_raw_and_parsed(
    answer_chain: Runnable[LanguageModelInput, AIMessage], parser: Runnable[Any, Any]
) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
    """Return a chain that gives the answer and its parsed form, or the error."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=answer_chain) | parsed.with_fallbacks([unparsed], exception_key="parsing_error")
