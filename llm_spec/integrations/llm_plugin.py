"""Speculative decoding in the `llm` command and library (`llm install 'llm-spec[onnx]'`, or the extra `llm`).

    llm -m llm-spec/builtin "def area(radius):"
    llm -m llm-spec/builtin -o max_tokens 64 -o strategy plain "def area(radius):"
    LLM_SPEC_TARGET=vllm:big@http://127.0.0.1:8000/v1 LLM_SPEC_DRAFT=suffix llm -m llm-spec/default "Hello"
    llm logs -n 1 --json        # "response_json" has strategy, guarantee, draft_acceptance_rate, speedup, …

`llm_spec.json` in llm's directory (`dirname "$(llm logs path)"`) lists more models; its `strategy` is the one to use
where `-o strategy` says nothing, `tools`, `schema` and `images` what the target takes:

    [{"name": "code", "target": "vllm:big@http://127.0.0.1:8000/v1", "draft": "vllm:small@http://127.0.0.1:8001/v1"},
     {"name": "here", "target": "onnx:/path/to/folder", "draft": "lookup", "strategy": "tokens", "tools": false}]

With it `llm-spec/builtin` is there only if listed. A model is opened when it is first asked, on one event loop on a
thread of this module, which serves `llm`'s models and async models alike and ends with the process.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from uuid import uuid4

import click
import llm
from llm.parts import StreamEvent

from llm_spec import chat
from llm_spec.config import SpeculativeConfig
from llm_spec.decoder import SpeculativeDecoder
from llm_spec.errors import ConfigError, LlmSpecError
from llm_spec.integrations._llm_plugin_request import SpeculativeOptions, to_request
from llm_spec.integrations._shared import OwnedStream, figures
from llm_spec.provider import DraftProvider, LlmProvider, add_call
from llm_spec.registry import open_draft, open_provider

__all__ = ["AsyncSpeculativeModel", "ModelSpec", "SpeculativeModel", "read_specs", "register_models"]

T = TypeVar("T")

_IMAGES: Final = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})
_END_S: Final = 10.0  # for closing at the end of the process


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model: a target and a draft, as llm_spec's strings or providers, and what the target takes.

    Providers are used on the event loop of this module, and are their giver's to close.
    """

    name: str
    target: LlmProvider | str
    draft: DraftProvider | LlmProvider | str | None = None
    strategy: str = "auto"
    tools: bool = True
    schema: bool = True
    images: bool = False

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ModelSpec:
        """Read an entry; raises ConfigError naming what is wrong with it."""
        try:
            spec = cls(**entry)
        except TypeError as error:
            raise ConfigError(f"a model of llm_spec.json is {entry!r}: {error}") from error
        for name in ("name", "target", "draft", "strategy"):
            value = getattr(spec, name)
            if not (isinstance(value, str) or (name == "draft" and value is None)):
                raise ConfigError(f"{name} of a model of llm_spec.json is {value!r}; it must be a text")
        return spec


_BUILTIN: Final = ModelSpec(name="builtin", target="builtin:target", draft="lookup+builtin:draft", tools=False)


def read_specs(text: str | None, environment: Mapping[str, str]) -> list[ModelSpec]:
    """The models of `llm_spec.json` (None: there is none) and of the environment; raises ConfigError."""
    specs = [_BUILTIN]
    if text is not None:
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"llm_spec.json is not JSON: {error}") from error
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
    """Tell `llm` of the models; a configuration that is wrong is told on stderr and leaves `llm` usable."""
    folder: Path = llm.user_dir()  # type: ignore[no-untyped-call] # llm's own
    path = folder / "llm_spec.json"
    try:
        specs = read_specs(path.read_text(encoding="utf-8") if path.exists() else None, os.environ)
    except (ConfigError, OSError) as error:
        click.echo(f"llm-spec: {error}", err=True)
        return
    for spec in specs:
        pair = _Pair(spec)
        register(SpeculativeModel(spec, pair), AsyncSpeculativeModel(spec, pair))


# ------------------------------------------------------------------------------------------------- models


class _Shared:
    """What the two classes of a model have in common."""

    can_stream = True
    model_id: str
    supports_tools: bool
    supports_schema: bool
    attachment_types: set[str] | frozenset[str]

    def __init__(self, spec: ModelSpec, pair: _Pair | None = None) -> None:
        self._pair = pair or _Pair(spec)
        self.model_id = f"llm-spec/{spec.name}"
        self.supports_tools = spec.tools
        self.supports_schema = spec.schema
        self.attachment_types = _IMAGES if spec.images else frozenset()

    def _asked(self, prompt: llm.Prompt) -> _Asked:
        strategy = cast("SpeculativeOptions", prompt.options).strategy
        try:
            return _Asked(OwnedStream(_HOME.run(self._pair.provider(strategy)).result(), to_request(prompt)))
        except LlmSpecError as error:
            raise llm.ModelError(str(error)) from error


class SpeculativeModel(_Shared, llm.Model):
    """A model of `llm` that answers by a target and its draft. Errors are llm.ModelError."""

    class Options(SpeculativeOptions):
        """See SpeculativeOptions."""

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,  # noqa: ARG002 - the framework's signature
        response: llm.Response,
        conversation: llm.Conversation | None,  # noqa: ARG002 - as above
    ) -> Iterator[str | StreamEvent]:
        asked = self._asked(prompt)
        try:
            _HOME.run(asked.stream.__aenter__()).result()
            while (event := _HOME.run(asked.next()).result()) is not None:
                yield from asked.told(event, response)
        except LlmSpecError as error:
            raise llm.ModelError(str(error)) from error
        finally:
            _HOME.end(asked.stream)


class AsyncSpeculativeModel(_Shared, llm.AsyncModel):
    """As SpeculativeModel, for `llm.get_async_model`; works on any event loop."""

    class Options(SpeculativeOptions):
        """See SpeculativeOptions."""

    async def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,  # noqa: ARG002 - as above
        response: llm.AsyncResponse,
        conversation: llm.AsyncConversation | None,  # noqa: ARG002 - as above
    ) -> AsyncGenerator[str | StreamEvent, None]:
        asked = await asyncio.to_thread(self._asked, prompt)  # opening a model may take a while
        try:
            await asyncio.wrap_future(_HOME.run(asked.stream.__aenter__()))
            while (event := await asyncio.wrap_future(_HOME.run(asked.next()))) is not None:
                for told in asked.told(event, response):
                    yield told
        except LlmSpecError as error:
            raise llm.ModelError(str(error)) from error
        finally:
            await asyncio.wrap_future(_HOME.run(asked.stream.aclose()))


class _Asked:
    """One answer on its way into a response of `llm`."""

    def __init__(self, stream: OwnedStream) -> None:
        self.stream = stream
        self._calls: dict[int, chat.ToolCall] = {}

    async def next(self) -> chat.StreamEvent | None:
        return await anext(self.stream, None)

    def told(self, event: chat.StreamEvent, response: llm.Response | llm.AsyncResponse) -> Iterator[StreamEvent]:
        match event:
            case chat.TextDelta():
                yield StreamEvent(type="text", chunk=event.text)
            case chat.ReasoningDelta():
                yield StreamEvent(type="reasoning", chunk=event.text)
            case chat.ToolCallDelta():
                yield from self._told_call(event)
            case chat.Finish():
                self._finish(event, response)
            case _:
                pass

    def _told_call(self, delta: chat.ToolCallDelta) -> Iterator[StreamEvent]:
        is_new = delta.index not in self._calls
        call = add_call(self._calls.get(delta.index), delta)
        if not call.id:
            call = chat.ToolCall(f"call_{uuid4().hex}", call.name, call.arguments)
        self._calls[delta.index] = call
        if is_new:
            yield StreamEvent(type="tool_call_name", chunk=call.name, tool_call_id=call.id)
        if delta.arguments:
            yield StreamEvent(type="tool_call_args", chunk=delta.arguments, tool_call_id=call.id)

    def _finish(self, finish: chat.Finish, response: llm.Response | llm.AsyncResponse) -> None:
        for call in self._calls.values():
            try:
                arguments = json.loads(call.arguments or "{}")
            except ValueError as error:
                raise llm.ModelError(f"the model called {call.name} with what is not JSON: {error}") from error
            response.add_tool_call(llm.ToolCall(name=call.name, arguments=arguments, tool_call_id=call.id))
        response.response_json = figures(finish)
        usage = finish.usage
        if usage is not None:
            counts = {"cached_tokens": usage.cached_input_tokens, "reasoning_tokens": usage.reasoning_tokens}
            details = {name: count for name, count in counts.items() if count}
            response.set_usage(input=usage.input_tokens, output=usage.output_tokens, details=details or None)


# ------------------------------------------------------------------------------------------- where they live


class _Pair:
    """A target and its draft, opened once and on first use, with a decoder for each strategy that was asked for."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._opened: tuple[LlmProvider, DraftProvider | LlmProvider | None] | None = None
        self._decoders: dict[str, SpeculativeDecoder] = {}

    async def provider(self, strategy: str | None) -> LlmProvider:
        """Who answers by that strategy, by default the one that the model was configured with."""
        name = strategy or self._spec.strategy
        target, draft = self._open()
        if name == "auto" and draft is None and not isinstance(self._spec.target, str):
            return target
        if name not in self._decoders:
            config = SpeculativeConfig(strategy=cast("Any", name))  # it says itself what is no strategy
            self._decoders[name] = SpeculativeDecoder(draft, target, config)
        return self._decoders[name]

    def _open(self) -> tuple[LlmProvider, DraftProvider | LlmProvider | None]:
        if self._opened is None:
            target, draft = self._spec.target, self._spec.draft
            if isinstance(target, str):
                target = open_provider(target)
                _HOME.closing.push_async_callback(target.aclose)
            if isinstance(draft, str):
                draft = open_draft(draft)
                _HOME.closing.push_async_callback(draft.aclose)
            self._opened = target, draft
        return self._opened


class _Home:
    """An event loop on a thread, begun when it is first needed: providers may hold what belongs to one loop."""

    def __init__(self) -> None:
        self.closing = AsyncExitStack()
        self._lock = threading.RLock()  # a forgotten response may end anywhere, also in here
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_over = False

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin some work at home; raises RuntimeError once the process ends."""
        with self._lock:
            if self._is_over:
                work.close()
                raise RuntimeError("llm-spec: the process is ending")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="llm-spec", daemon=True)
                self._thread.start()
                atexit.register(self._close)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self, stream: OwnedStream) -> None:
        """Close a stream, and wait until it is closed; not where that would wait for itself, or for ever.

        The garbage collector ends what was forgotten on whichever thread it runs, and at the end of the process.
        """
        if not self._is_over:
            closing = self.run(stream.aclose())
            if threading.current_thread() is not self._thread:
                closing.result()

    def _close(self) -> None:
        loop = self._loop
        if loop is not None:
            try:
                self.run(self._finish()).result(_END_S)
            finally:
                self._is_over = True
                loop.call_soon_threadsafe(loop.stop)

    async def _finish(self) -> None:
        """End what is under way, then close what was opened."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        await self.closing.aclose()


_HOME: Final = _Home()
