"""How a GGUF file is loaded and run."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["GgufOptions"]


class GgufOptions(TypedDict, total=False):
    """Options of GgufModel and GgufProvider, all by keyword; in a string after a question mark.

    `threads`: of llama.cpp for one pass, by default as many as this process has processors.
    `exact`: False gives up the same-text promise, for llama.cpp's own cache and passes as wide as their tokens.
    `max_width`: most tokens of one verifying pass; lookahead is one less. By default 16, or 1 where rows at once are at
    best not twice as fast as one by one, so that drafts rarely pay.
    `flash_attention`: False computes attention by matrix products, which on a CPU may halve the time of a token after a
    prompt of some thousand. A single row then rarely has the bits of several: drafts pay with `exact=False` only.
    `max_context`: tokens of prompt and answer, by default the model's own. Memory is taken as they come.
    """

    threads: int
    exact: bool
    max_width: int
    flash_attention: bool
    max_context: int
