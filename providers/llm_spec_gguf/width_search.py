"""Which numbers of rows give a row the same bits on this machine: looked at when a model is loaded.

Kernels choose their way by the number of rows, and attention also by how much of the cache is in use: llama.cpp reads
it in steps of 256 tokens, and where there are several threads, it divides it among them for a single row alone. To read
a prompt that long would take longer than all the rest. So copies of a short text, as sequences of their own that no
row may see, fill the cache up to where rows are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from llm_spec_gguf.library import LlamaContext

__all__ = ["SEARCH_CAPACITY", "SEARCH_SEQUENCES", "find_agreeing_widths"]

_PROMPT_TOKENS: Final = 24
_STEP: Final = 256  # tokens by which attention reads more
_NUM_COPIES: Final = 2 * _STEP // _PROMPT_TOKENS - 1  # the cache is then some tokens short of the second step
SEARCH_SEQUENCES: Final = _NUM_COPIES + 1
SEARCH_CAPACITY: Final = 3 * _STEP


def find_agreeing_widths(context: LlamaContext, widths: Sequence[int], vocab_size: int) -> list[int]:
    """Those of the ascending widths at which rows have the bits that they have in the widest pass.

    It is looked at in a cache in which attention's way changes within the text that is read, and for some of the widths
    in an empty one, too. The context is empty, with room for SEARCH_CAPACITY tokens and SEARCH_SEQUENCES; it is of no
    use afterwards.
    """
    text_ids = [int(token_id) for token_id in np.random.default_rng(0).integers(0, vocab_size, 2 * widths[-1])]
    prompt_ids, text_ids = (text_ids * _PROMPT_TOKENS)[-_PROMPT_TOKENS:], text_ids[: widths[-1]]
    context.read(prompt_ids, num_rows=1)
    state = context.save_state()
    for sequence in range(1, SEARCH_SEQUENCES):
        context.load_state(state, sequence)
    agreeing = _filter_agreeing(context, widths, text_ids)
    context.clear()
    context.load_state(state, 0)
    some = sorted({agreeing[0], agreeing[len(agreeing) // 2], agreeing[-1]}) if agreeing else []
    differing = {*some}.difference(_filter_agreeing(context, some, text_ids) if some else [])
    return [width for width in agreeing if width not in differing]


def _filter_agreeing(context: LlamaContext, widths: Sequence[int], text_ids: Sequence[int]) -> list[int]:
    """The widths take turns at reading on in the text, from its first token again where it is over."""
    num_tokens = widths[-1]
    reference = context.read(text_ids, num_rows=num_tokens).copy()
    agreeing: list[int] = []
    at = num_tokens
    for width in widths:
        if at + width > num_tokens:
            at = 0
        context.forget_from(_PROMPT_TOKENS + at)
        rows = context.read(text_ids[at : at + width], num_rows=width)
        if np.array_equal(rows, reference[at : at + width]):
            agreeing.append(width)
            at += width
        else:  # what it left in the cache may differ, too
            context.forget_from(_PROMPT_TOKENS)
            context.read(text_ids, num_rows=num_tokens)
            at = num_tokens
    return agreeing
