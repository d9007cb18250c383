"""Options for loading and running a GGUF file."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["GgufOptions"]


class GgufOptions(TypedDict, total=False):
    """Keyword options of GgufModel and GgufProvider; in a string they follow a question mark.

    `threads`: threads of llama.cpp for one pass; by default, one for each processor of this
    process.
    `exact`: False gives up the same-text promise and uses llama.cpp's own cache and unpadded
    passes.
    `max_width`: most tokens of one verifying pass; lookahead is one less. The default is 16, or 1
    if several rows at once are at best not twice as fast as one by one, so that drafts rarely pay.
    `flash_attention`: False computes attention by matrix products. On a CPU that may halve the time
    of a token after a prompt of some thousand tokens. A single row then rarely has the same bits as
    several, so drafts pay only with `exact=False`.
    `max_context`: most tokens of prompt and answer, by default the model's own limit. Memory is
    taken as the tokens come.
    """

    threads: int
    exact: bool
    max_width: int
    flash_attention: bool
    max_context: int
