"""The contexts of a GGUF model; contexts of closed sessions are kept for later ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from llm_spec.local.caches import choose_idle_cache
from llm_spec.local.forks import reset_in_forked_child
from llm_spec_gguf.library import LlamaContext

__all__ = ["ContextPool"]

# Contexts of closed sessions. Making one takes as long as some tokens, reading a prompt far longer.
_MAX_IDLE: Final = 2


class ContextPool:
    """The idle contexts, the longest idle one first; several threads may use the pool.

    `make_context(num_tokens)` returns a new context with room for that many tokens.
    """

    def __init__(self, make_context: Callable[[int], LlamaContext]) -> None:
        self._make_context = make_context
        self._lock = threading.Lock()
        self._idle: list[LlamaContext] = []
        reset_in_forked_child(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, num_tokens: int, token_ids: Sequence[int] = (), *, exact: bool) -> LlamaContext:
        """Return a context for a prompt, with the part of the prompt that an idle one holds.

        If no idle one holds a part that may be used, the context has room for `num_tokens`. Raises
        MemoryError.
        """
        with self._lock:
            kept = [context.kept for context in self._idle]
            choice = choose_idle_cache(kept, token_ids, exact=exact, may_add=len(kept) < _MAX_IDLE)
            context = None if choice.place is None else self._idle.pop(choice.place)
        if context is not None and choice.num_reused:
            context.forget_from(choice.num_reused)
            return context
        if context is not None and context.capacity >= num_tokens:
            context.clear()
            return context
        if context is not None:
            context.close()
        try:
            return self._make_context(num_tokens)
        except MemoryError:
            self.close()  # the idle ones, to free memory
        return self._make_context(num_tokens)

    def release(self, context: LlamaContext) -> None:
        """Put a context back; its tokens stay until another session takes it."""
        with self._lock:
            self._idle.append(context)
            oldest = self._idle.pop(0) if len(self._idle) > _MAX_IDLE else None
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        """Release the memory of all idle contexts."""
        with self._lock:
            idle, self._idle = self._idle, []
        for context in idle:
            context.close()
