"""SyncDecoder: a decoder for code without `await`.

A `SpeculativeDecoder` does the work, on the event loop of a thread.
"""

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

    Threads may share one. It works inside a running event loop, as in a notebook, but blocks that
    loop. So use `SpeculativeDecoder` in a server. A forked child can go on using it. Ctrl-C ends
    the answer.

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
        """The decoder's configuration."""
        return self._decoder.config

    @property
    def stats(self) -> DecoderStats:
        """Sums over the decoder's answers."""
        return self._decoder.stats

    def decode(self, request: Messages | ChatRequest, **options: Unpack[RequestOptions]) -> SpeculativeResult:
        """Return the whole answer, as `SpeculativeDecoder.decode`."""
        return self._bridge.run(partial(self._decoder.decode, request, **options))

    def stream(
        self, request: Messages | ChatRequest, *, rounds: bool = False, **options: Unpack[RequestOptions]
    ) -> SyncAnswerStream:
        """Return the answer piece by piece, as `SpeculativeDecoder.stream`."""
        stream = self._decoder.stream(request, rounds=rounds, **options)
        return SyncAnswerStream(self._bridge.stream(lambda: stream))

    def discover(self, feature: Feature | None = None) -> None:
        """Find out what the target can do, as `SpeculativeDecoder.discover`."""
        self._bridge.run(partial(self._decoder.discover, feature))

    def close(self) -> None:
        """End all answers with ClosedError, and close the providers that were opened from strings.

        Providers that were passed in stay open. The end of the process also ends the answers and
        connections.
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
