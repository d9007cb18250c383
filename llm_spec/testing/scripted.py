"""A provider that answers from a script, with its pieces, delays and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Literal, TypeAlias

from llm_spec.contract.events import ChatResponse, Finish, FinishReason, StoppedBy, StreamEvent, TextDelta, Usage
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.response import complete_from_stream
from llm_spec.measure.tokens import split_into_pieces

__all__ = ["Script", "ScriptedProvider"]

Script: TypeAlias = "str | Sequence[StreamEvent] | Callable[[ChatRequest], str | Sequence[StreamEvent]]"


class ScriptedProvider:
    """Answer every request with `script`.

    `ProviderDraft(ScriptedProvider(...))` is a scripted draft.

    A text comes in pieces of `piece_size` characters (words, if None), which stand for tokens. It
    honours `max_tokens`, `stop` and, with the capability `continue_prefix`, a `prefix` that it
    begins with. Events come unchanged, even if they break promises; no Finish is added. `fail_at`
    maps indices of events to errors that are raised in their place.

    `requests` are the requests that it got. `num_open` streams are open now, `num_closed` have been
    left, `num_acloses` counts calls of `aclose`. Delays are `asyncio.sleep`; even without delay,
    every event gives the loop a turn.
    """

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted:script",
        piece_size: int | None = None,
        delay_first_s: float = 0.0,
        delay_piece_s: float = 0.0,
        finish_reason: FinishReason = "stop",
        stopped_by: StoppedBy | None = None,
        usage: Usage | Literal["counted"] | None = "counted",
        fail_at: Mapping[int, Exception] | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        self.script = script
        self.name = name
        self.capabilities = capabilities or Capabilities()
        self.requests: list[ChatRequest] = []
        self.num_open = self.num_closed = self.num_acloses = 0
        self._piece_size = piece_size
        self._delay_first_s = delay_first_s
        self._delay_piece_s = delay_piece_s
        self._end = Finish(finish_reason, None, stopped_by)
        self._usage = usage
        self._fail_at = fail_at or {}

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.requests.append(request)
        self.num_open += 1
        try:
            async with aclosing(self._play_script(request)) as events:
                yield events
        finally:
            self.num_open -= 1
            self.num_closed += 1

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        self.num_acloses += 1

    async def _play_script(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        script = self.script(request) if callable(self.script) else self.script
        events = self._make_answer_events(script, request) if isinstance(script, str) else script
        for index, event in enumerate(events):
            await asyncio.sleep(self._delay_piece_s if index else self._delay_first_s)
            if index in self._fail_at:
                raise self._fail_at[index]
            yield event

    def _make_answer_events(self, text: str, request: ChatRequest) -> list[StreamEvent]:
        """Make the events of a text, as a correct model would."""
        if self.capabilities.continue_prefix:
            text = text.removeprefix(request.prefix)
        pieces = self._split_text_into_pieces(text)
        finish_reason, stopped_by = self._end.finish_reason, self._end.stopped_by
        if request.max_tokens is not None and len(pieces) > request.max_tokens:
            del pieces[request.max_tokens :]
            finish_reason, stopped_by = "length", "max_tokens"
        text = "".join(pieces)
        found = min(((at, stop) for stop in request.stop if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            pieces = self._split_text_into_pieces(text[: found[0]])
            finish_reason, stopped_by = "stop", "stop_string"
        stop_string = None if found is None else found[1]
        finish = Finish(finish_reason, self._count_usage(request, pieces), stopped_by, stop_string=stop_string)
        return [*map(TextDelta, pieces), finish]

    def _split_text_into_pieces(self, text: str) -> list[str]:
        size = self._piece_size
        return split_into_pieces(text) if size is None else [text[i : i + size] for i in range(0, len(text), size)]

    def _count_usage(self, request: ChatRequest, pieces: Sequence[str]) -> Usage | None:
        if isinstance(self._usage, str):
            num_input = sum(len(self._split_text_into_pieces(message.text)) for message in request.messages)
            return Usage(input_tokens=num_input, output_tokens=len(pieces))
        return self._usage
