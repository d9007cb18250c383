"""Targets and drafts to probe by virtual clock."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from llm_spec import (
    ChatRequest,
    ChatResponse,
    Finish,
    Sampling,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    StreamEvent,
    TargetError,
    TextDelta,
    Usage,
)
from llm_spec.contract.draft import DraftCapabilities, DraftPiece, DraftProvider
from llm_spec.contract.endpoint import SampledToken
from llm_spec.contract.provider import Capabilities, LlmProvider
from llm_spec.contract.response import complete_from_stream
from llm_spec.local.lookahead import MAX_LOOKAHEAD
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.row_stats import DraftAgreementStats, RowCallStats
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.clock import run_virtual

__all__ = [
    "EMOJI",
    "PROMPT_ID",
    "WORDS",
    "Call",
    "Patient",
    "TextDraft",
    "TokenTarget",
    "bytewise",
    "end_of",
    "patient",
    "probed",
    "probing",
]

WORDS = " ".join(f"word{i}" for i in range(60))
EMOJI = "a😀b👩‍👩‍👧 é日本c"
EOS_ID, PROMPT_ID, ELSE_ID = 0, 1, 2


# ------------------------------------------------------------------------------------------ targets and drafts


@dataclass(eq=False)
class Call:
    """One `sample_next`."""

    prefixes: list[list[int]]
    sampling: Sampling
    start_s: float
    end_s: float | None = None
    is_cancelled: bool = False


class TokenTarget:
    """Writes `tokens`, each some bytes (none: a control token), and encodes text `encode_size` bytes to a token.

    A token that is no whole text by itself has `undecoded` for its text. After a prefix that it would not write it
    samples a token of its own ("#"): a wrong context is seen in the text. `fails` names methods and which of their
    calls fail: those of a range, or all from a number on; a cancelled one takes `close_s` to close. Costs are counted
    when a call comes.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        encode_size: int = 1,
        undecoded: str = "",
        call_s: float = 0.0,
        row_s: float | None = None,
        tokens_per_piece: int = 1,
        pieces_per_text: int = 1,
        fails: Mapping[str, int | range] | None = None,
        context_length: int | None = None,
        continue_prefix: bool = False,
        num_prompt_tokens: int = 1,
        encode_s: float = 0.0,
        close_s: float = 0.0,
    ) -> None:
        self.name = "token:target"
        self.capabilities = Capabilities(continue_prefix=continue_prefix, token_endpoint=self)
        self.context_length = context_length
        self.calls: list[Call] = []
        self.requests: list[ChatRequest] = []
        self.after: list[tuple[list[int], ChatRequest]] = []
        self.num_calls: Counter[str] = Counter()
        self.num_open = self.num_input_tokens = self.num_output_tokens = 0
        self.fails = dict(fails or {})
        self._bytes = [b"</s>", b"", b"#"]  # of the end too, as `/detokenize` of servers has it
        self._ids: dict[bytes, int] = {}
        self.answer_ids = [self._id(token) for token in tokens]
        self._prompt = [PROMPT_ID] * num_prompt_tokens
        self._encode_size = encode_size
        self._undecoded = undecoded
        self._call_s = call_s
        self._tokens_per_piece = tokens_per_piece
        self._pieces_per_text = pieces_per_text
        self._row_s = call_s if row_s is None else row_s
        self._encode_s = encode_s
        self._close_s = close_s

    @property
    def text(self) -> str:
        """All that it writes."""
        return self._decoded(self.answer_ids)

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.requests.append(request)
        await self._enter("stream")
        rest = self.text[len(request.prefix) :] if self.text.startswith(request.prefix) else "#"
        pieces = split_into_pieces(rest)
        limit = len(pieces) if request.max_tokens is None else request.max_tokens
        self.num_input_tokens += len(self._prompt) + len(request.prefix)

        async def written() -> AsyncGenerator[StreamEvent]:
            for piece in pieces[:limit]:
                await asyncio.sleep(self._call_s)
                self.num_output_tokens += 1
                yield TextDelta(piece)
            usage = Usage(input_tokens=len(self._prompt) + len(request.prefix), output_tokens=len(pieces[:limit]))
            is_cut = request.max_tokens is not None and limit <= len(pieces)
            yield Finish("length" if is_cut else "stop", usage, "max_tokens" if is_cut else "eos")

        async with self._open(written()) as events:
            yield events

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        pass

    # -------------------------------------------------------------------------------------- endpoint

    async def encode(self, text: str) -> list[int]:
        self.num_open += 1
        try:
            await asyncio.sleep(self._encode_s)
            await self._enter("encode")
        except asyncio.CancelledError:
            await asyncio.sleep(self._close_s)
            raise
        finally:
            self.num_open -= 1
        data, size = text.encode(), self._encode_size
        return [self._id(data[at : at + size]) for at in range(0, len(data), size)]

    async def decode(self, token_ids: Sequence[int]) -> str:
        await self._enter("decode")
        return self._decoded(token_ids)

    async def encode_chat(self, request: ChatRequest) -> list[int]:  # noqa: ARG002 - one prompt
        await self._enter("encode_chat")
        await asyncio.sleep(self._call_s)
        return list(self._prompt)

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        clock = asyncio.get_running_loop().time
        call = Call([list(prefix) for prefix in prefixes], sampling, clock())
        self.calls.append(call)
        self.num_open += 1
        try:
            await asyncio.sleep(self._row_s)
            await self._enter("sample_next")
        except asyncio.CancelledError:
            call.is_cancelled = True
            await asyncio.sleep(self._close_s)
            raise
        finally:
            self.num_open -= 1
            call.end_s = clock()
            self.num_input_tokens += sum(map(len, prefixes))
            self.num_output_tokens += len(prefixes)
        return [self._next(prefix) for prefix in call.prefixes]

    @asynccontextmanager
    async def stream_chat(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with self.stream_after(self._prompt, request) as events:
            yield events

    @asynccontextmanager
    async def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.after.append((list(token_ids), request))
        await self._enter("stream_after")
        room = sys.maxsize if self.context_length is None else self.context_length - len(token_ids)
        if room < 1:
            raise TargetError("the prompt fills the context")
        written = list(token_ids[len(self._prompt) :])
        rest = self.answer_ids[len(written) :] if self.answer_ids[: len(written)] == written else [ELSE_ID]
        limit = min(room, len(rest) + 1 if request.max_tokens is None else request.max_tokens)
        self.num_input_tokens += len(token_ids)

        async def events() -> AsyncGenerator[StreamEvent]:
            shown, size, is_cut = "", self._tokens_per_piece, limit <= len(rest)
            written = rest[:limit] if is_cut else [*rest, EOS_ID]
            for start in range(0, len(written), size):
                piece_ids = written[start : start + size]
                for _ in range(len(piece_ids) - (EOS_ID in piece_ids)):
                    await asyncio.sleep(self._call_s)
                    await self._enter("stream_after piece")
                    self.num_output_tokens += 1
                text = self._decoded(rest[: start + len(piece_ids)])
                whole = text.rstrip("\ufffd") if start + size < len(rest) else text
                if start + size < len(rest) and (start // size + 1) % self._pieces_per_text:
                    whole = shown  # it comes with the next one
                yield TextDelta(whole[len(shown) :], token_ids=tuple(piece_ids))
                shown = whole
            usage = Usage(input_tokens=len(token_ids), output_tokens=len(rest[:limit]))
            cause = None if limit == room else "max_tokens"  # as servers do, which do not say which limit it was
            yield Finish("length" if is_cut else "stop", usage, cause if is_cut else "eos")

        async with self._open(events()) as opened:
            yield opened

    # -------------------------------------------------------------------------------------- inside

    @asynccontextmanager
    async def _open(self, events: AsyncGenerator[StreamEvent]) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        self.num_open += 1
        try:
            yield events
        finally:
            await events.aclose()
            self.num_open -= 1

    async def _enter(self, method: str) -> None:
        await asyncio.sleep(0)
        self.num_calls[method] += 1
        at = self.fails.get(method)
        if at is not None and (
            self.num_calls[method] - 1 in at if isinstance(at, range) else self.num_calls[method] > at
        ):
            raise TargetError(f"{method} is broken")

    def _next(self, prefix: Sequence[int]) -> SampledToken:
        written = list(prefix[len(self._prompt) :])
        at = len(written)
        if list(prefix[: len(self._prompt)]) != self._prompt or written != self.answer_ids[:at]:
            return SampledToken(ELSE_ID, "#")
        if at == len(self.answer_ids):
            return SampledToken(EOS_ID, "", is_end=True)
        text = self._decoded([self.answer_ids[at]])
        return SampledToken(self.answer_ids[at], self._undecoded if "\ufffd" in text else text)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._bytes[token_id] for token_id in token_ids).decode("utf-8", "replace")

    def _id(self, token: bytes) -> int:
        if token not in self._ids:
            self._ids[token] = len(self._bytes)
            self._bytes.append(token)
        return self._ids[token]


class TextDraft:
    """Guesses `text` from where the answer's length says it stands, `token_s` a piece; `piece_times` are told.

    It may break behind a number of pieces, be silent there, or (continues_prefix False) always write from the start.
    """

    name = "text-draft"

    def __init__(
        self,
        text: str,
        *,
        token_s: float = 0.0,
        fail_after: int | None = None,
        silent_after: int | None = None,
        continues_prefix: bool = True,
    ) -> None:
        self.capabilities = DraftCapabilities(continues_prefix=continues_prefix)
        self.num_calls = self.num_open = 0
        self.piece_times: list[float] = []
        self._text = text
        self._token_s = token_s
        self._fail_after = fail_after
        self._silent_after = silent_after

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        self.num_calls += 1
        self.num_open += 1
        rest = self._text[len(request.prefix) if self.capabilities.continues_prefix else 0 :]
        pieces = self._pieces(split_into_pieces(rest)[:max_tokens])
        try:
            yield pieces
        finally:
            await pieces.aclose()
            self.num_open -= 1

    async def aclose(self) -> None:
        pass

    async def _pieces(self, texts: Sequence[str]) -> AsyncGenerator[DraftPiece]:
        for index, text in enumerate(texts):
            if index == self._fail_after:
                raise ConnectionError("the draft is down")
            await asyncio.sleep(1e9 if index == self._silent_after else self._token_s)
            self.piece_times.append(asyncio.get_running_loop().time())
            yield DraftPiece(text)
        yield DraftPiece("", finish_reason="stop")


class PatientRows(RowCallStats):
    """Rows that always pay, whatever they cost."""

    def __init__(self) -> None:
        super().__init__()
        self.add_call_time(MAX_LOOKAHEAD, 0.0)

    def add_call_time(self, num_rows: int, seconds: float, *, num_other_rows: int = 0) -> None:  # noqa: ARG002 - none
        super().add_call_time(num_rows, 0.0, num_other_rows=num_other_rows)

    def estimate_speedup(self, agreement: DraftAgreementStats, step_s: float, max_calls: int) -> float:  # noqa: ARG002 - always
        return 1e9

    def estimate_allowed_loss_s(self, elapsed_s: float, step_s: float, max_tokens: int | None) -> float:  # noqa: ARG002
        return 1e9

    def estimate_answer_s(self, step_s: float, max_tokens: int | None) -> float:  # noqa: ARG002 - always
        return 1e10


class Patient(PairStats):
    """Figures by which rounds always pay."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = PatientRows()
        self.first_token_s.update(0.0)
        self.token_s.update(1, 0.02)


def probing(draft: DraftProvider | None, target: LlmProvider, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy="probe", **options))


def patient(draft: DraftProvider | None, target: LlmProvider, **options: Any) -> SpeculativeDecoder:
    """A decoder that probes to the end, whether it pays or not."""
    decoder = probing(draft, target, **options)
    decoder._planner.pair_stats = Patient()
    return decoder


def probed(
    draft: DraftProvider, target: LlmProvider, request: ChatRequest | str = "tell", **options: Any
) -> SpeculativeResult:
    return run_virtual(patient(draft, target, **options).decode(request))


def bytewise(text: str | bytes) -> list[bytes]:
    return [bytes([byte]) for byte in (text if isinstance(text, bytes) else text.encode())]


def end_of(result: SpeculativeResult) -> tuple[str, str, str | None]:
    return result.content, result.finish_reason, result.stopped_by
