"""Finds the numbers of rows at which a row has the same bits on this machine.

The search runs when a model is loaded. llama.cpp chooses a kernel by the number of rows. Attention
also depends on how much of the cache is in use: it reads the cache in steps of 256 tokens, and with
several threads, a single row's attention is divided among them. Reading a prompt of that length
would take longer than everything else. So copies of a short text, as separate sequences that no row
may see, fill the cache up to where rows are compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_spec.contract.token_model import PassCosts

if TYPE_CHECKING:
    from llm_spec_gguf.library import LlamaContext

__all__ = ["SEARCH_CAPACITY", "SEARCH_SEQUENCES", "AgreeingWidths", "find_agreeing_widths"]

_PROMPT_TOKENS: Final = 24
# At least. Rows may agree by chance: different bits may be rounded to the same 8 bits.
_TEXT_TOKENS: Final = 16
_FIRST_LOOK_TOKENS: Final = 4  # a single row that differs at all mostly does so within these
_STEP: Final = 256  # tokens; attention reads a multiple of it
_NUM_TIMINGS: Final = 4  # of each width
# The cache is then a few tokens short of the second step.
_NUM_COPIES: Final = 2 * _STEP // _PROMPT_TOKENS - 1
SEARCH_SEQUENCES: Final = _NUM_COPIES + 1
SEARCH_CAPACITY: Final = 3 * _STEP


class AgreeingWidths(NamedTuple):
    """The widths that agree, and the times of their passes.

    `widths` are ascending, or empty. `pass_s` has the seconds of the fastest pass of each width.
    The properties need at least one width, and the time of a single row.
    """

    widths: Sequence[int]
    pass_s: Mapping[int, float]

    @property
    def plain_cost(self) -> float:
        """The time of a plain step (the narrowest pass), relative to a single row."""
        return self.pass_s[self.widths[0]] / self.pass_s[1]

    @property
    def verifying_speed(self) -> float:
        """The rows a second of the best width, relative to single rows.

        This is the gain from a draft that is always right.
        """
        return max(width * self.pass_s[1] / self.pass_s[width] for width in self.widths)

    @property
    def fast_widths(self) -> list[int]:
        """The widths without those that take longer than a wider one; passes are padded instead."""
        narrowest, *wider = self.widths
        fastest = [
            width for width in wider if self.pass_s[width] < min(self._list_pass_s(above=width), default=math.inf)
        ]
        return [narrowest, *fastest]

    @property
    def pass_costs(self) -> PassCosts:
        """The line nearest to the costs of passes of several tokens, and the distances from it."""
        plain_s = self.pass_s[self.widths[0]]
        costs = [self._get_pass_s(count) / plain_s - 1.0 for count in range(2, self.widths[-1] + 1)]
        if len(costs) < 2:
            return PassCosts(0.0, sum(costs))
        counts = range(1, len(costs) + 1)
        slope, _ = np.polyfit(counts, costs, 1)
        per_token = max(float(slope), 0.0)
        wide = sum(costs) / len(costs) - per_token * sum(counts) / len(counts)
        deviations = [cost - wide - per_token * count for count, cost in zip(counts, costs, strict=True)]
        return PassCosts(wide, per_token, tuple(deviations))

    def _list_pass_s(self, *, above: int) -> list[float]:
        return [self.pass_s[width] for width in self.widths if width > above]

    def _get_pass_s(self, count: int) -> float:
        """Return the seconds of a pass of that many tokens, padded to the fastest width."""
        return min(self._list_pass_s(above=count - 1))


def find_agreeing_widths(
    context: LlamaContext, widths: Sequence[int], vocab_size: int, *, needs_first: bool = False
) -> AgreeingWidths:
    """Return those of the ascending widths at which rows have the same bits as in the widest pass.

    If `needs_first` is set and the first width does not agree, none are returned, and the others
    are not compared.

    Rows are compared in a cache at whose length attention changes its way within the text. Some
    widths are also compared in an empty cache. `context` must be empty, with room for
    SEARCH_CAPACITY tokens and SEARCH_SEQUENCES sequences. It cannot be used afterwards.
    """
    num_tokens = max(_TEXT_TOKENS, widths[-1])
    ids = [int(token_id) for token_id in np.random.default_rng(0).integers(0, vocab_size, num_tokens + _PROMPT_TOKENS)]
    text_ids, prompt_ids = ids[:num_tokens], ids[num_tokens:]
    context.read(prompt_ids, num_rows=1)
    state = context.save_state()
    for sequence in range(1, SEARCH_SEQUENCES):
        context.load_state(state, sequence)
    reader = _TextReader(context, text_ids)
    agreeing = reader.filter_agreeing_widths(widths, needs_first=needs_first)
    pass_s: Mapping[int, float] = {}
    if agreeing:
        pass_s = reader.time_passes(sorted({widths[0], *agreeing}))
        context.clear()
        context.load_state(state, 0)
        some = sorted({agreeing[0], agreeing[len(agreeing) // 2], agreeing[-1]})
        differing = {*some}.difference(reader.filter_agreeing_widths(some))
        agreeing = [width for width in agreeing if width not in differing]
        if needs_first and widths[0] in differing:
            agreeing = []
    return AgreeingWidths(agreeing, pass_s)


class _TextReader:
    """Reads a text in passes of one width, after a cached prompt."""

    def __init__(self, context: LlamaContext, text_ids: Sequence[int]) -> None:
        self._context = context
        self._text_ids = text_ids

    def filter_agreeing_widths(self, widths: Sequence[int], *, needs_first: bool = False) -> list[int]:
        """Return the widths at which all rows are those of the widest pass."""
        reference = self._read_in_passes(widths[-1])
        if needs_first and not _have_equal_rows(self._read_in_passes(widths[0], _FIRST_LOOK_TOKENS), reference):
            return []
        agreeing = [width for width in widths if _have_equal_rows(self._read_in_passes(width), reference)]
        return agreeing if not needs_first or widths[0] in agreeing else []

    def time_passes(self, widths: Sequence[int]) -> dict[int, float]:
        """Return the seconds of the fastest pass of each width.

        The widths take turns, because the machine may be busy for a while.
        """
        pass_s = dict.fromkeys(widths, math.inf)
        for width in [*widths] * _NUM_TIMINGS:
            self._context.forget_from(_PROMPT_TOKENS)
            started = time.perf_counter()
            self._context.read(self._text_ids[:width], num_rows=width)
            pass_s[width] = min(time.perf_counter() - started, pass_s[width])
        return pass_s

    def _read_in_passes(self, width: int, max_tokens: int | None = None) -> NDArray[np.float32]:
        """Return the rows of the text, or of its first `max_tokens`, in full passes only."""
        self._context.forget_from(_PROMPT_TOKENS)
        parts = [
            self._context.read(self._text_ids[start : start + width], num_rows=width).copy()
            for start in range(0, len(self._text_ids[:max_tokens]) - width + 1, width)
        ]
        return np.concatenate(parts)


def _have_equal_rows(rows: NDArray[np.float32], others: NDArray[np.float32]) -> bool:
    num_rows = min(len(rows), len(others))
    return np.array_equal(rows[:num_rows], others[:num_rows])
