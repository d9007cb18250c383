"""Which numbers of rows give a row the same bits on this machine: looked at when a model is loaded.

Kernels choose their way by the number of rows, and attention also by how much of the cache is in use: llama.cpp reads
it in steps of 256 tokens, and where there are several threads, it divides it among them for a single row alone. To read
a prompt that long would take longer than all the rest. So copies of a short text, as sequences of their own that no
row may see, fill the cache up to where rows are compared.
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
_TEXT_TOKENS: Final = 16  # at least: rows may agree by chance, as what differs in a few bits is rounded to 8 of them
_FIRST_LOOK_TOKENS: Final = 4  # in which a single row that differs at all mostly does
_STEP: Final = 256  # tokens by which attention reads more
_NUM_TIMINGS: Final = 4  # of each width
_NUM_COPIES: Final = 2 * _STEP // _PROMPT_TOKENS - 1  # the cache is then some tokens short of the second step
SEARCH_SEQUENCES: Final = _NUM_COPIES + 1
SEARCH_CAPACITY: Final = 3 * _STEP


class AgreeingWidths(NamedTuple):
    """`widths` are ascending; [] for none. `pass_s`: what the fastest pass of each width took, in seconds.

    The costs are known where there are widths, and a single row was among the candidates.
    """

    widths: Sequence[int]
    pass_s: Mapping[int, float]

    @property
    def plain_cost(self) -> float:
        """The time of the narrowest pass, which is what a plain step takes, in that of a single row."""
        return self.pass_s[self.widths[0]] / self.pass_s[1]

    @property
    def verifying_speed(self) -> float:
        """Of the best width over single rows, in rows a second: what a draft gains that is always right."""
        return max(width * self.pass_s[1] / self.pass_s[width] for width in self.widths)

    @property
    def fast_widths(self) -> list[int]:
        """The widths but for those that take longer than a wider one, to which a pass is rather padded."""
        narrowest, *wider = self.widths
        fastest = [
            width for width in wider if self.pass_s[width] < min(self._list_pass_s(above=width), default=math.inf)
        ]
        return [narrowest, *fastest]

    @property
    def pass_costs(self) -> PassCosts:
        """The line that is nearest to what passes of several tokens take, and how far each of them is from it."""
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
        """Of a pass of so many tokens, padded to the fastest width that has room for them."""
        return min(self._list_pass_s(above=count - 1))


def find_agreeing_widths(
    context: LlamaContext, widths: Sequence[int], vocab_size: int, *, needs_first: bool = False
) -> AgreeingWidths:
    """Those of the ascending widths at which rows have the bits that they have in the widest pass.

    `needs_first`: where the first width is not among them, there are none, and the others are not looked at.

    It is looked at in a cache in which attention's way changes within the text that is read, and for some of the widths
    in an empty one, too. The context is empty, with room for SEARCH_CAPACITY tokens and SEARCH_SEQUENCES; it is of no
    use afterwards.
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
    """Reads a text in passes of one width, behind a prompt that is cached."""

    def __init__(self, context: LlamaContext, text_ids: Sequence[int]) -> None:
        self._context = context
        self._text_ids = text_ids

    def filter_agreeing_widths(self, widths: Sequence[int], *, needs_first: bool = False) -> list[int]:
        """The widths whose rows are those of the widest, as often as they are looked at."""
        reference = self._read_in_passes(widths[-1])
        if needs_first and not _have_equal_rows(self._read_in_passes(widths[0], _FIRST_LOOK_TOKENS), reference):
            return []
        agreeing = [width for width in widths if _have_equal_rows(self._read_in_passes(width), reference)]
        return agreeing if not needs_first or widths[0] in agreeing else []

    def time_passes(self, widths: Sequence[int]) -> dict[int, float]:
        """What the fastest pass of each width took, in seconds.

        They take turns, as the machine may be busy with something else for a while.
        """
        pass_s = dict.fromkeys(widths, math.inf)
        for width in [*widths] * _NUM_TIMINGS:
            self._context.forget_from(_PROMPT_TOKENS)
            started = time.perf_counter()
            self._context.read(self._text_ids[:width], num_rows=width)
            pass_s[width] = min(time.perf_counter() - started, pass_s[width])
        return pass_s

    def _read_in_passes(self, width: int, max_tokens: int | None = None) -> NDArray[np.float32]:
        """The rows of the text, or of its first `max_tokens`, but for a rest that fills no pass."""
        self._context.forget_from(_PROMPT_TOKENS)
        parts = [
            self._context.read(self._text_ids[start : start + width], num_rows=width).copy()
            for start in range(0, len(self._text_ids[:max_tokens]) - width + 1, width)
        ]
        return np.concatenate(parts)


def _have_equal_rows(rows: NDArray[np.float32], others: NDArray[np.float32]) -> bool:
    num_rows = min(len(rows), len(others))
    return np.array_equal(rows[:num_rows], others[:num_rows])
