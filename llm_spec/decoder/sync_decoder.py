"""SyncDecoder: a decoder for code without `await`. A `SpeculativeDecoder` does the work, on a thread's event loop."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Self, Unpack

from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.endpoint import Feature
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest, Messages, RequestOptions
from llm_spec.decoder.answer_stream import SyncAnswerStream
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.result import DecoderStats, SpeculativeResult
from llm_spec.kit.event_loop_bridge import EventLoopBridge

__all__ = ["SyncDecoder"]


class SyncDecoder:
    """`SpeculativeDecoder` for code without `await`: the same arguments, answers, errors and speed.

    Threads may share one. It may be used where an event loop runs, as in a notebook; the loop stands still meanwhile,
    so a server needs `SpeculativeDecoder`. A child that is forked can go on using it. Ctrl-C ends the answer.

        with SyncDecoder(target="builtin:target", draft="builtin:draft") as decoder:
            result = decoder.decode("def getregentry():", max_tokens=64)
    """

    def __init__(
        self,
        *,
        target: LlmProvider | str,
        draft: DraftProvider | LlmProvider | str | None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        self._decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
        self._bridge = EventLoopBridge(f"decoder {self.name}", owns_loop=True, finish=self._decoder.aclose)

    @property
    def name(self) -> str:
        """`target+draft`."""
        return self._decoder.name

    @property
    def config(self) -> SpeculativeConfig:
        """What it may do."""
        return self._decoder.config

    @property
    def stats(self) -> DecoderStats:
        """Sums over its answers."""
        return self._decoder.stats

    def decode(self, request: Messages | ChatRequest, **options: Unpack[RequestOptions]) -> SpeculativeResult:
        """Answer at once, as `SpeculativeDecoder.decode`."""
        return self._bridge.run(partial(self._decoder.decode, request, **options))

    def stream(
        self, request: Messages | ChatRequest, *, rounds: bool = False, **options: Unpack[RequestOptions]
    ) -> SyncAnswerStream:
        """Answer piece by piece, as `SpeculativeDecoder.stream`."""
        stream = self._decoder.stream(request, rounds=rounds, **options)
        return SyncAnswerStream(self._bridge.stream(lambda: stream))

    def discover(self, feature: Feature | None = None) -> None:
        """Find out what the target can do, as `SpeculativeDecoder.discover`."""
        self._bridge.run(partial(self._decoder.discover, feature))

    def close(self) -> None:
        """End all answers with ClosedError, and close the providers that were opened here from strings.

        Those that were given stay open. The end of the process ends its answers and connections, too.
        """
        self._bridge.close()

    def __repr__(self) -> str:
        return repr(self._decoder).replace(SpeculativeDecoder.__name__, SyncDecoder.__name__, 1)

    def __enter__(self) -> Self:
        self._bridge.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
