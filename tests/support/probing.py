"""A draft to probe with, decoders that probe whether it pays or not, and what to say of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from llm_spec import (
    ChatRequest,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
)
from llm_spec.contract.draft import DraftCapabilities, DraftPiece, DraftProvider
from llm_spec.contract.provider import LlmProvider
from llm_spec.local.lookahead import MAX_LOOKAHEAD
from llm_spec.measure.pair_stats import PairStats
from llm_spec.measure.row_stats import DraftAgreementStats, RowCallStats
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.clock import run_virtual

__all__ = ["EMOJI", "WORDS", "Patient", "TextDraft", "end_of", "make_patient", "patient", "probed", "probing"]

WORDS = " ".join(f"word{i}" for i in range(60))
EMOJI = "a😀b👩‍👩‍👧 é日本c"


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
    return make_patient(probing(draft, target, **options))


def make_patient(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """Its rows are sent to the end, whether they pay or not."""
    decoder._planner.pair_stats = Patient()
    return decoder


def probed(
    draft: DraftProvider, target: LlmProvider, request: ChatRequest | str = "tell", **options: Any
) -> SpeculativeResult:
    return run_virtual(patient(draft, target, **options).decode(request))


def end_of(result: SpeculativeResult) -> tuple[str, str, str | None]:
    return result.content, result.finish_reason, result.stopped_by
