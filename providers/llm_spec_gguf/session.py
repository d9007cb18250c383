"""One request's cache: a context that is replaced by a larger one when it is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llm_spec import TargetError
from llm_spec_gguf.library import PASS_TOKENS, LlamaContext

__all__ = ["GgufSession"]

_CAPACITY_STEP: Final = 256  # llama.cpp rounds to it


class GgufSession:
    """See `TokenSession`.

    `widths` are the ascending numbers of rows that a pass of at most `widths[-1]` tokens may have; shorter ones are
    padded. `first_capacity`: tokens that the first cache has room for; it doubles when they are used up.
    `acquire_context(num_tokens)` gives an empty context, `release_context` takes it back.
    """

    def __init__(
        self,
        acquire_context: Callable[[int], LlamaContext],
        release_context: Callable[[LlamaContext], None],
        *,
        widths: Sequence[int],
        first_capacity: int,
        context_length: int,
        name: str,
    ) -> None:
        self._acquire_context = acquire_context
        self._release_context = release_context
        self._widths = widths
        self._first_capacity = first_capacity
        self._context_length = context_length
        self._name = name
        self._context: LlamaContext | None = None
        self.length = 0

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> NDArray[np.float32]:
        count = len(token_ids)
        if count > self._widths[-1]:
            return self._read_prompt(token_ids)
        width = next(width for width in self._widths if width >= count)
        context = self._get_context(self.length + width)
        # Every row has its logits, whoever reads them: the head's kernel goes by their number, too.
        rows = self._read(context, [*token_ids, *[token_ids[-1]] * (width - count)], num_rows=width)
        self.length += count
        if width > count:
            context.forget_from(self.length)
        return rows[count - num_rows : count]

    def truncate(self, length: int) -> None:
        if self._context is not None and length < self.length:
            self._context.forget_from(length)
            self.length = length

    def close(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            self._release_context(context)

    def _read_prompt(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        context = self._get_context(self.length + len(token_ids))
        rows = np.empty((0, 0), np.float32)
        for start in range(0, len(token_ids), PASS_TOKENS):
            part = token_ids[start : start + PASS_TOKENS]
            rows = self._read(context, part, num_rows=1)
            self.length += len(part)
        return rows

    def _read(self, context: LlamaContext, token_ids: Sequence[int], *, num_rows: int) -> NDArray[np.float32]:
        try:
            return context.read(token_ids, num_rows=num_rows)
        except TargetError as error:
            raise TargetError(f"{self._name}: {error}") from error

    def _get_context(self, num_tokens: int) -> LlamaContext:
        """The context, with room for so many tokens."""
        old = self._context
        if old is not None and num_tokens <= old.capacity:
            return old
        grown = max(self._first_capacity, num_tokens, 0 if old is None else 2 * old.capacity)
        capacity = max(num_tokens, min(grown, self._context_length + self._widths[-1]))
        try:
            self._context = self._acquire_context(-(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP)
        except MemoryError as error:
            raise TargetError(f"{self._name}: {error}; give max_context less") from error
        if old is not None:
            self._context.copy_from(old)
            self._release_context(old)
        return self._context
