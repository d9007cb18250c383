"""One request's cache: a context that is replaced by a larger one if it is full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llm_spec import TargetError
from llm_spec.local.caches import PREFILL_CHUNK_TOKENS
from llm_spec_gguf.contexts import ContextPool
from llm_spec_gguf.library import LlamaContext

__all__ = ["GgufSession"]

_CAPACITY_STEP: Final = 256  # llama.cpp rounds up to a multiple of it


class GgufSession:
    """See `TokenSession`.

    `widths` are the numbers of rows, ascending, that a pass of at most `widths[-1]` tokens may
    have; shorter passes are padded. `first_capacity` is the room of the first cache in tokens. It
    doubles if it is used up.
    """

    def __init__(
        self,
        contexts: ContextPool,
        *,
        exact: bool,
        widths: Sequence[int],
        first_capacity: int,
        context_length: int,
        name: str,
    ) -> None:
        self._contexts = contexts
        self._exact = exact
        self._widths = widths
        self._first_capacity = first_capacity
        self._context_length = context_length
        self._name = name
        self._context: LlamaContext | None = None

    @property
    def length(self) -> int:
        return 0 if self._context is None else len(self._context.kept.token_ids)

    def reuse_prefix(self, token_ids: Sequence[int]) -> int:
        """Take an idle context and return how many of the prompt's tokens it already holds."""
        self._get_context(len(token_ids), token_ids)
        return self.length

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> NDArray[np.float32]:
        count = len(token_ids)
        if count > self._widths[-1]:
            return self._read_prompt(token_ids)
        width = next(width for width in self._widths if width >= count)
        length = self.length
        context = self._get_context(length + width)
        # All rows have logits, even unused ones: the head's kernel depends on their number.
        rows = self._read(context, [*token_ids, *[token_ids[-1]] * (width - count)], num_rows=width)
        context.kept.record_tokens(token_ids, exact=self._exact)
        if width > count:
            context.forget_from(length + count)
        return rows[count - num_rows : count]

    def truncate(self, length: int) -> None:
        if self._context is not None and length < self.length:
            self._context.forget_from(length)

    def close(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            self._contexts.release(context)

    def _read_prompt(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        context = self._get_context(self.length + len(token_ids))
        rows = np.empty((0, 0), np.float32)
        for start in range(0, len(token_ids), PREFILL_CHUNK_TOKENS):
            part = token_ids[start : start + PREFILL_CHUNK_TOKENS]
            rows = self._read(context, part, num_rows=1)
            context.kept.record_tokens(part, exact=self._exact)
        return rows

    def _read(self, context: LlamaContext, token_ids: Sequence[int], *, num_rows: int) -> NDArray[np.float32]:
        try:
            return context.read(token_ids, num_rows=num_rows)
        except TargetError as error:
            raise TargetError(f"{self._name}: {error}") from error

    def _get_context(self, num_tokens: int, prompt_ids: Sequence[int] = ()) -> LlamaContext:
        """Return the context, with room for that many tokens."""
        old = self._context
        if old is not None and num_tokens <= old.capacity:
            return old
        grown = max(self._first_capacity, num_tokens, 0 if old is None else 2 * old.capacity)
        capacity = max(num_tokens, min(grown, self._context_length + self._widths[-1]))
        try:
            self._context = self._contexts.acquire(
                -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP, prompt_ids, exact=self._exact
            )
        except MemoryError as error:
            raise TargetError(f"{self._name}: {error}; lower max_context") from error
        if old is not None:
            self._context.copy_from(old)
            old.close()  # for another prompt the copy is as good
        return self._context
