"""A GGUF file as a TokenModel.

The same text with and without speculation needs equal logits, and kernels differ with the number of
rows. So exact sessions only run passes of widths at which a row has the same bits
(`width_search.py`), and pad to the next of them. Plain decoding reads a single row, which is one of
these widths if possible. If keys and values are both float16 (llama.cpp's default), llama.cpp with
several threads computes a single row differently. The cache then keeps keys in bfloat16.

With some kinds of weights, llama.cpp reads several rows hardly faster than one by one, or a single
row only agrees if it is padded to several. A draft cannot pay there. So `max_width` is 1 and
nothing is drafted, unless `max_width` was given. Otherwise lookahead starts with the costs that the
search measured: two rows may take as long as two passes, and then only long drafts that are likely
to be right pay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

from llm_spec import ConfigError
from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import ModelLoadError
from llm_spec.contract.token_model import PassCosts, TokenSession
from llm_spec.local.lookahead import MAX_LOOKAHEAD
from llm_spec.local.threads import count_usable_cores
from llm_spec_gguf.contexts import ContextPool
from llm_spec_gguf.library import KeyType, LlamaContext, LlamaModel
from llm_spec_gguf.session import GgufSession
from llm_spec_gguf.tokenizer import GgufTokenizer
from llm_spec_gguf.width_search import SEARCH_CAPACITY, SEARCH_SEQUENCES, AgreeingWidths, find_agreeing_widths

__all__ = ["GgufModel"]

_MAX_WIDTH: Final = 16
_WIDTHS: Final = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28)  # tested; kernels read 4 or 8 rows at a time
_WIDTHS_OF_NARROW_KERNELS: Final = (7, 3)  # some weights have other kernels from 8 or 4 rows on
# Drafts pay below this cost of a plain step, and above this gain from an always right draft.
_MAX_PLAIN_COST: Final = 1.1
_MIN_VERIFYING_SPEED: Final = 2.0
_MIN_CONTEXT: Final = 256  # tokens; a model with less is not worth loading
_FIRST_CAPACITY: Final = 1024  # tokens that a session's first cache has room for


class GgufModel:
    """A loaded file; see `GgufOptions`.

    Raises ModelLoadError, which names the file, and ConfigError for an option out of range.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        threads: int | None = None,
        exact: bool = True,
        max_width: int | None = None,
        flash_attention: bool = True,
        max_context: int | None = None,
    ) -> None:
        check_number(ConfigError, "threads", threads, 1, integer=True)
        check_number(ConfigError, "max_width", max_width, 2, MAX_LOOKAHEAD + 1, integer=True)
        check_number(ConfigError, "max_context", max_context, _MIN_CONTEXT, integer=True)
        path = Path(path).expanduser()
        self.name = name or f"gguf:{path}"
        self._threads = threads or count_usable_cores()
        self._flash_attention = flash_attention
        self._model = LlamaModel(path)
        self.context_length = min(self._model.context_length, max_context or self._model.context_length)
        self.vocab_size = self._model.vocab_size
        self.tokenizer = GgufTokenizer(self._model, path, self.context_length)
        self.max_width = min(max_width or _MAX_WIDTH, self.context_length)
        self._contexts = ContextPool(self._make_context)
        self._all_widths = range(1, self.max_width + 1)
        self._first_capacity = self._get_first_capacity()
        self._key_type: KeyType = "float16"
        self._widths: Sequence[int] = []
        self._found: AgreeingWidths | None = None
        if exact:
            self._key_type, found = self._search_exact_passes()
            if found.widths:
                self._found = found
                self._widths = found.fast_widths if max_width is not None or _can_pay(found) else [1]
                self.max_width = self._widths[-1]
        self.same_text = bool(self._widths)
        self.pass_costs: PassCosts | None = None if self._found is None else self._found.pass_costs

    def open(self, *, exact: bool = True) -> TokenSession:
        return GgufSession(
            self._contexts,
            exact=exact,
            widths=self._widths if exact and self.same_text else self._all_widths,
            first_capacity=self._first_capacity,
            context_length=self.context_length,
            name=self.name,
        )

    def describe_passes(self) -> str:
        """Return one line about exact passes on this machine."""
        if self._found is None:
            return "rows depend on the width of a pass"
        found = self._found
        widths = ", ".join(f"{width} ({found.pass_s[width] / found.pass_s[1]:.2f}x)" for width in found.widths)
        costs = (
            f"a plain step {found.plain_cost:.2f}x, several rows at once at best {found.verifying_speed:.2f}x the speed"
        )
        drafts = "nothing is drafted" if self.max_width == 1 else f"up to {self.max_width - 1} tokens are drafted"
        return f"equal bits with {self._key_type} keys in passes of {widths} rows (and their times): {costs}; {drafts}"

    def close(self) -> None:
        """Release the caches of closed sessions.

        The weights are freed with the last reference to the model.
        """
        self._contexts.close()

    def _search_exact_passes(self) -> tuple[KeyType, AgreeingWidths]:
        """Find a key type and widths at which a row has the same bits, with width 1 if possible."""
        max_widths = [self.max_width, *(width for width in _WIDTHS_OF_NARROW_KERNELS if width < self.max_width)]
        choices = list(itertools.product(max_widths, get_args(KeyType)))
        for needs_single_row in (True, False):
            for max_width, key_type in choices:
                found = self._search_widths(key_type, _list_widths(max_width), needs_single_row=needs_single_row)
                if found.widths:
                    return key_type, found
        return "float16", AgreeingWidths((), {})

    def _search_widths(self, key_type: KeyType, candidates: Sequence[int], *, needs_single_row: bool) -> AgreeingWidths:
        try:
            context = self._make_context(SEARCH_CAPACITY, key_type=key_type, num_sequences=SEARCH_SEQUENCES)
        except MemoryError as error:
            raise ModelLoadError(f"{self.name}: {error}") from error
        try:
            found = find_agreeing_widths(context, candidates, self.vocab_size, needs_first=needs_single_row)
        finally:
            context.close()
        return found if candidates[-1] in found.widths else found._replace(widths=())

    def _make_context(self, capacity: int, *, key_type: KeyType | None = None, num_sequences: int = 1) -> LlamaContext:
        return LlamaContext(
            self._model,
            capacity=capacity,
            threads=self._threads,
            key_type=key_type or self._key_type,
            flash_attention=self._flash_attention,
            num_sequences=num_sequences,
        )

    def _get_first_capacity(self) -> int:
        """Return the tokens that a session's first cache has room for.

        If the model's rotary embeddings depend on that number, this is the whole context: a larger
        cache could not use what a smaller one has read.
        """
        architecture = self._model.read_metadata("general.architecture")
        depends = self._model.read_metadata(f"{architecture}.rope.scaling.original_context_length") is not None
        return self.context_length if depends else min(_FIRST_CAPACITY, self.context_length)


def _can_pay(found: AgreeingWidths) -> bool:
    return found.plain_cost < _MAX_PLAIN_COST and found.verifying_speed > _MIN_VERIFYING_SPEED


def _list_widths(max_width: int) -> list[int]:
    return [*(width for width in _WIDTHS if width < max_width), max_width]
