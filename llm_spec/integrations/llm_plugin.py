"""Speculative decoding in the `llm` command and library.

Install it with `llm install 'llm-spec[onnx]'`, or with the extra `llm`.

    llm -m llm-spec/builtin "def getregentry():"
    llm -m llm-spec/builtin -o max_tokens 64 -o strategy plain "def getregentry():"
    export LLM_SPEC_TARGET=vllm:big@http://127.0.0.1:8000/v1 LLM_SPEC_DRAFT=suffix
    llm -m llm-spec/default "Hello"
    llm logs -n 1 --json    # "response_json" has strategy, guarantee, acceptance_rate, speedup, …

`llm_spec.json` in llm's directory (`dirname "$(llm logs path)"`) lists more models:

    [{"name": "code", "target": "vllm:big@http://127.0.0.1:8000/v1",
      "draft": "vllm:small@http://127.0.0.1:8001/v1"},
     {"name": "here", "target": "onnx:/path/to/folder", "draft": "lookup", "max_tokens": 500,
      "tools": false}]

`strategy` and `max_tokens` apply if `-o` does not set them. `tools`, `schema` and `images` say what
the target takes. With this file, `llm-spec/builtin` exists only if the file lists it. By default
the built-in pair writes at most 128 tokens, as it may repeat itself without end.

A model is opened at its first request, on one event loop in a thread of this module. The loop
serves `llm`'s models and async models, and ends with the process.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast
from uuid import uuid4

import click
import llm
from llm.parts import StreamEvent

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.errors import ConfigError, LlmSpecError
from llm_spec.contract.events import AnswerDetail, Finish, ReasoningDelta, TextDelta, ToolCallDelta
from llm_spec.contract.events import StreamEvent as AnswerEvent
from llm_spec.contract.messages import ReasoningDetail, ToolCall
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.reasoning_details import merge_reasoning_details
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.response import append_tool_call_delta
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.integrations._llm_plugin_request import (
    SpeculativeOptions,
    build_reasoning_metadata,
    convert_prompt_to_request,
)
from llm_spec.integrations._shared import ProviderSource, describe_finish_as_json, split_provider_name
from llm_spec.kit.event_loop_bridge import EventLoopBridge, OpenStream
from llm_spec.kit.openai_logprobs import convert_logprobs_to_openai

__all__ = ["AsyncSpeculativeModel", "ModelSpec", "SpeculativeModel", "read_model_specs", "register_models"]

_IMAGES: Final = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model: a target and a draft, as strings or providers, and what the target takes.

    Providers work on the event loop of this module. The caller closes them.
    """

    name: str
    target: LlmProvider | str
    draft: DraftProvider | LlmProvider | str | None = None
    strategy: str = "auto"
    max_tokens: int | None = None
    tools: bool = True
    schema: bool = True
    images: bool = False

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ModelSpec:
        """Read an entry. Raises ConfigError that names what is wrong with it."""
        try:
            spec = cls(**entry)
        except TypeError as error:
            raise ConfigError(f"a model of llm_spec.json is {entry!r}, which is not valid: {error}") from error
        for name in ("name", "target", "draft", "strategy"):
            value = getattr(spec, name)
            if not (isinstance(value, str) or (name == "draft" and value is None)):
                raise ConfigError(f"{name} of a model of llm_spec.json is {value!r}; it must be a text")
        limit: object = spec.max_tokens
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise ConfigError(f"max_tokens of a model of llm_spec.json is {limit!r}; it must be an integer from 1")
        return spec


_BUILTIN: Final = ModelSpec(
    name="builtin", target="builtin:target", draft="lookup+builtin:draft", max_tokens=128, tools=False
)


def read_model_specs(text: str | None, environment: Mapping[str, str]) -> list[ModelSpec]:
    """Read the models of `llm_spec.json` and of the environment.

    `text` is None if there is no file. Raises ConfigError if the file is not valid.
    """
    specs = [_BUILTIN]
    if text is not None:
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"llm_spec.json is not valid JSON: {error}") from error
        if not isinstance(entries, list):
            raise ConfigError("llm_spec.json must be a list of models")
        specs = [ModelSpec.from_json(entry) for entry in entries]
    target = environment.get("LLM_SPEC_TARGET")
    if target:
        draft, strategy = environment.get("LLM_SPEC_DRAFT") or None, environment.get("LLM_SPEC_STRATEGY") or "auto"
        specs.append(ModelSpec(name="default", target=target, draft=draft, strategy=strategy))
    return specs


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the models with `llm`.

    An invalid configuration is reported on stderr; no model is registered, and `llm` stays usable.
    """
    folder: Path = llm.user_dir()  # type: ignore[no-untyped-call] # llm's own
    path = folder / "llm_spec.json"
    try:
        specs = read_model_specs(path.read_text(encoding="utf-8") if path.exists() else None, os.environ)
    except (ConfigError, OSError) as error:
        click.echo(f"llm-spec: {error}", err=True)
        return
    for spec in specs:
        pair = _LazyTargetDraftPair(spec)
        register(SpeculativeModel(spec, pair), AsyncSpeculativeModel(spec, pair))


# ------------------------------------------------------------------------------------------- models


class _SpeculativeModelBase:
    """The common part of the synchronous and the asynchronous model."""

    can_stream = True
    model_id: str
    supports_tools: bool
    supports_schema: bool
    attachment_types: set[str] | frozenset[str]

    def __init__(self, spec: ModelSpec, pair: _LazyTargetDraftPair | None = None) -> None:
        self._pair = pair or _LazyTargetDraftPair(spec)
        self._max_tokens = spec.max_tokens
        self.model_id = f"llm-spec/{spec.name}"
        self.supports_tools = spec.tools
        self.supports_schema = spec.schema
        self.attachment_types = _IMAGES if spec.images else frozenset()

    def _build_stream_opener(self, prompt: llm.Prompt) -> OpenStream[AnswerEvent]:
        """Return a function that opens the answer to a prompt."""
        return partial(
            self._pair.stream,
            convert_prompt_to_request(prompt, max_tokens=self._max_tokens),
            cast("SpeculativeOptions", prompt.options).strategy,
        )


class SpeculativeModel(_SpeculativeModelBase, llm.Model):
    """A model of `llm` that answers with a target and its draft.

    Errors are llm.ModelError. A refusal, and a call that was cut off or is not JSON, are errors,
    too.
    """

    class Options(SpeculativeOptions):
        """See SpeculativeOptions."""

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,  # noqa: ARG002 - the framework's signature
        response: llm.Response,
        conversation: llm.Conversation | None,  # noqa: ARG002 - as above
    ) -> Iterator[str | StreamEvent]:
        writer = _ResponseWriter(response)
        try:
            with closing(_BRIDGE.stream(self._build_stream_opener(prompt))) as events:
                for event in events:
                    yield from writer.convert_event(event)
        except LlmSpecError as error:
            raise llm.ModelError(str(error)) from error


class AsyncSpeculativeModel(_SpeculativeModelBase, llm.AsyncModel):
    """As SpeculativeModel, for `llm.get_async_model`. It works on any event loop."""

    class Options(SpeculativeOptions):
        """See SpeculativeOptions."""

    async def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,  # noqa: ARG002 - as above
        response: llm.AsyncResponse,
        conversation: llm.AsyncConversation | None,  # noqa: ARG002 - as above
    ) -> AsyncGenerator[str | StreamEvent, None]:
        writer = _ResponseWriter(response)
        try:
            async with aclosing(_BRIDGE.astream(self._build_stream_opener(prompt))) as events:
                async for event in events:
                    for converted in writer.convert_event(event):
                        yield converted
        except LlmSpecError as error:
            raise llm.ModelError(str(error)) from error


class _ResponseWriter:
    """Writes one answer into a response of `llm`."""

    def __init__(self, response: llm.Response | llm.AsyncResponse) -> None:
        self._response = response
        self._calls: dict[int, ToolCall] = {}
        self._logprobs: list[dict[str, Any]] = []
        self._reasoning: list[ReasoningDelta | ReasoningDetail] = []
        self._refusal = ""

    def convert_event(self, event: AnswerEvent) -> Iterator[StreamEvent]:
        match event:
            case TextDelta():
                self._logprobs += convert_logprobs_to_openai(event.logprobs)
                yield StreamEvent(type="text", chunk=event.text)
            case ReasoningDelta():
                self._reasoning.append(event)
                yield StreamEvent(type="reasoning", chunk=event.text)
            case ReasoningDetail():
                self._reasoning.append(event)
            case AnswerDetail():
                self._refusal += event.refusal
            case ToolCallDelta():
                yield from self._convert_tool_call_delta(event)
            case Finish():
                if details := merge_reasoning_details(self._reasoning):
                    yield StreamEvent(type="reasoning", chunk="", provider_metadata=build_reasoning_metadata(details))
                self._record_finish_in_response(event)
            case _:
                pass

    def _convert_tool_call_delta(self, delta: ToolCallDelta) -> Iterator[StreamEvent]:
        is_new = delta.index not in self._calls
        call = append_tool_call_delta(self._calls.get(delta.index), delta)
        if not call.id:
            call = ToolCall(f"call_{uuid4().hex}", call.name, call.arguments)
        self._calls[delta.index] = call
        if is_new:
            yield StreamEvent(type="tool_call_name", chunk=call.name, tool_call_id=call.id)
        if delta.arguments:
            yield StreamEvent(type="tool_call_args", chunk=delta.arguments, tool_call_id=call.id)

    def _record_finish_in_response(self, finish: Finish) -> None:
        response = self._response
        if self._refusal:
            raise llm.ModelError(f"the model refused to answer: {self._refusal}")
        for call in [_parse_tool_call(call, finish) for call in self._calls.values()]:
            response.add_tool_call(call)
        response.response_json = describe_finish_as_json(finish)
        if finish.response_id is not None:
            response.response_json["id"] = finish.response_id
        if target := response.response_json.get("target"):
            response.set_resolved_model(split_provider_name(target)[1])
        if self._logprobs:
            response.response_json["logprobs"] = {"content": self._logprobs}
        usage = finish.usage
        if usage is not None:
            counts = {
                "cached_tokens": usage.cached_input_tokens,
                "cache_write_tokens": usage.cache_write_input_tokens,
                "reasoning_tokens": usage.reasoning_tokens,
            }
            details = {name: count for name, count in counts.items() if count}
            response.set_usage(input=usage.input_tokens, output=usage.output_tokens, details=details or None)


def _parse_tool_call(call: ToolCall, finish: Finish) -> llm.ToolCall:
    """Parse a call. Raises ModelError if it was cut off or is not a JSON object."""
    is_cut = not call.arguments and finish.finish_reason == "length"
    try:
        arguments: object = None if is_cut else json.loads(call.arguments or "{}")
    except ValueError as error:
        raise llm.ModelError(f"the model called {call.name} with invalid JSON: {error}") from error
    if not isinstance(arguments, dict):
        found = "no arguments, as it was cut off" if is_cut else f"{call.arguments[:100]!r}, which is not an object"
        raise llm.ModelError(f"the model called {call.name} with {found}")
    return llm.ToolCall(name=call.name, arguments=cast("dict[str, Any]", arguments), tool_call_id=call.id)


# ----------------------------------------------------------------------------------- open models


class _LazyTargetDraftPair:
    """A target and its draft, opened on the bridge's loop at first use."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._source: ProviderSource | None = None

    @asynccontextmanager
    async def stream(self, request: ChatRequest, strategy: str | None) -> AsyncGenerator[AsyncIterator[AnswerEvent]]:
        """Open the events of an answer. If `strategy` is None, the model's own applies."""
        async with self._get_or_open_source(strategy or self._spec.strategy).stream(request) as events:
            yield events

    def _get_or_open_source(self, strategy: str) -> ProviderSource:
        spec = self._spec
        if self._source is None:
            config = None if spec.strategy == "auto" else SpeculativeConfig(strategy=cast("Any", spec.strategy))
            self._source = ProviderSource(spec.target, spec.draft, config)
            _OPEN_SOURCES.push_async_callback(self._source.aclose)
            atexit.register(_BRIDGE.close)
        if strategy == spec.strategy:
            return self._source
        provider = self._source.provider
        decoder = (
            provider if isinstance(provider, SpeculativeDecoder) else SpeculativeDecoder(target=provider, draft=None)
        )
        # the config raises if this is not a strategy
        return ProviderSource(decoder.with_config(replace(decoder.config, strategy=cast("Any", strategy))))


_OPEN_SOURCES: Final = AsyncExitStack()
_BRIDGE: Final = EventLoopBridge("llm-spec", owns_loop=True, finish=_OPEN_SOURCES.aclose)
