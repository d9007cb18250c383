"""A Hugging Face checkpoint as a TokenModel, on a CUDA device or a CPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from llm_spec import ConfigError, ModelLoadError
from llm_spec.model_folder.files import read_json
from llm_spec.model_folder.tokenizer import FolderTokenizer
from llm_spec_torch.batch_checks import rows_agree
from llm_spec_torch.batching import Batching, JoinedPasses
from llm_spec_torch.caches import CachePool, Slot, token_bytes
from llm_spec_torch.checkpoint import find_folder, load_module, resolve_device, resolve_dtype
from llm_spec_torch.checks import agreeing_widths, check_logits, some_ids, transformers_logits
from llm_spec_torch.faults import not_finite, out_of_memory
from llm_spec_torch.places import FairPlaces
from llm_spec_torch.session import FloatArray, TorchSession
from llm_spec_torch.shape import Shape
from llm_spec_torch.weights import read_network

__all__ = ["TorchModel", "TorchOptions"]

_KEY_STEP: Final = 256  # places; attention reads a multiple of so many
_SHARED_KEY_STEP: Final = (
    512  # torch's attention on a CPU reads keys in blocks of so many; a part of one has other bits
)
_MIN_CONTEXT: Final = 256  # tokens; with room for less a model is not worth loading
_CPU_SHARE: Final = 0.25  # of the machine's memory, for caches
_CUDA_SHARE: Final = 0.8  # of what is free after the weights
_CHECKED_TOKENS: Final = 24
_MAX_WIDTH: Final = 16
_CPU_WIDTHS: Final = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)  # tried, below max_width; a pass is padded to the next
_MAX_REQUESTS: Final = 8


class TorchOptions(TypedDict, total=False):
    """How a checkpoint is loaded and run.

    `dtype`: "float32", "bfloat16" or "float16"; by default the checkpoint's own on CUDA and float32 on a CPU.
    `device`: "cpu", "cuda", "cuda:1", …; by default CUDA where there is any.
    `attention`: "sdpa" (torch's fused one, the default) or "eager".
    `layers`: only the first so many, with the last norm and head behind them: an early-exit draft.
    `exact`: False gives up the same-text promise: passes are as wide as their tokens.
    `max_width`: most tokens of one verifying pass, 16 by default; lookahead is one less.
    `max_requests`: answers that may run at once, 8 by default; others wait their turn.
    `batched`: answers that run at once share forward passes. Exact ones share passes of one shape, `max_requests` times
    `max_width` tokens, whether one runs or all: more for many at once, less for one; give both no more than is needed.
    `max_context`: tokens of prompt and answer, by default the model's own.
    `cache_gib`: memory for all key-value caches together, by default a quarter of the machine's, or 0.8 of what is
    free on the device. Where the context does not fit, it is cut.
    """

    dtype: str
    device: str
    attention: Literal["sdpa", "eager"]
    layers: int
    exact: bool
    max_width: int
    max_requests: int
    batched: bool
    max_context: int
    cache_gib: float


class TorchModel:
    """A checkpoint, loaded: safetensors weights, config.json, tokenizer.json and its chat template.

    `model` is a folder, or a name on the Hugging Face hub. Raises ModelLoadError for whatever is missing, broken, too
    large, or built in a way that is not supported, and ConfigError for an option out of its range.
    """

    def __init__(self, model: str | Path, *, name: str | None = None, **options: Unpack[TorchOptions]) -> None:
        _check_options(options)
        folder = find_folder(model)
        self.name = name or f"torch:{model}"
        self.tokenizer = FolderTokenizer(folder)
        self.device = resolve_device(options.get("device"))
        self.dtype = resolve_dtype(options.get("dtype"), self.device, read_json(folder / "config.json", optional=True))
        self._max_requests = options.get("max_requests", _MAX_REQUESTS)
        self._places = FairPlaces(self._max_requests)
        self._cache_gib = options.get("cache_gib")
        max_width = options.get("max_width", _MAX_WIDTH)
        try:
            module = load_module(folder, self.dtype, self.device, options.get("layers"))
            self._load(module, max_width, options.get("max_context"), fused=options.get("attention") != "eager")
        except ModelLoadError:
            raise
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(f"{folder} does not fit into the memory of {self.device} in {self.dtype}") from error
        if self.tokenizer.vocab_size > self.vocab_size:
            raise ModelLoadError(
                f"tokenizer.json in {folder} has {self.tokenizer.vocab_size} ids, but the weights give logits for "
                f"{self.vocab_size}; they belong to different models"
            )
        self._exact = options.get("exact", True)
        batched = options.get("batched", False)
        find_widths = self._shared_widths if batched else self._agreeing_widths
        widths = find_widths(max_width) if self._exact else []
        self.same_text = bool(widths)
        key_step = _SHARED_KEY_STEP if batched else _KEY_STEP
        self._exact_shape = Shape(widths, key_step) if widths else self._loose_shape
        self._batching = self._make_batching() if batched else None

    def early_exit(self, layers: int) -> TorchModel:
        """A draft of this model's own first layers, its last norm and head behind them: no weights of its own."""
        if not 1 <= layers < len(self._network.layers):
            raise ConfigError(f"layers is {layers}; the model has {len(self._network.layers)}, give fewer")
        draft = copy.copy(self)
        draft.name = f"{self.name} (first {layers} layers)"
        draft._network = self._network.first_layers(layers)
        draft._places = FairPlaces(self._max_requests)
        draft._pool = draft._make_pool(self.context_length, self._pool.cache.capacity - self.context_length)
        draft._batching = draft._make_batching() if self._batching else None
        return draft

    # ------------------------------------------------------------------------------------- TokenModel

    @property
    def max_width(self) -> int:
        return self._exact_shape.max_width

    def open(self, *, exact: bool = True) -> TorchSession:
        exact = exact and self._exact
        shape = self._exact_shape if exact else self._loose_shape
        forwards = self._batching.forwards(self, exact=exact) if self._batching else self
        return TorchSession(self._pool, forwards, shape, exact=exact)

    def admit(self) -> AbstractAsyncContextManager[None]:
        """Wait for a free cache; see `AdmittingModel`."""
        return self._places.place()

    def run(self, slot: Slot, token_ids: Sequence[int], *, width: int, num_keys: int, num_rows: int) -> FloatArray:
        """One forward pass; see `session.Forwards`."""
        start, count = len(slot.token_ids), len(token_ids)
        try:
            with torch.inference_mode():
                ids = torch.tensor([[*token_ids, *token_ids[-1:] * (width - count)]], device=self.device)
                positions = torch.arange(start, start + width, device=self.device)[None]
                states = self._network.hidden(ids, positions, slot.cache, min(num_keys, slot.cache.capacity))
                return self._logits(states, slot, count, num_rows)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self.name, self.device, width) from error

    def leave(self, slot: Slot) -> None:
        """Nothing waits for a slot; see `session.Forwards`."""

    # ------------------------------------------------------------------------------------------ inside

    def _load(self, module: Any, max_width: int, max_context: int | None, *, fused: bool) -> None:
        own_context = int(module.config.get_text_config().max_position_embeddings)
        context = min(own_context, max_context or own_context)
        token_ids = some_ids(_CHECKED_TOKENS, self.tokenizer.vocab_size)
        expected = transformers_logits(module, token_ids)
        self._network = read_network(module, num_positions=context + max_width, fused=fused)
        self.vocab_size = self._network.vocab_size
        self._loose_shape = Shape(range(1 if self.device.type == "cuda" else 2, max_width + 1), _KEY_STEP)
        self._pool = self._make_pool(context, max_width)
        self.context_length = self._pool.cache.capacity - max_width
        slot = self._pool.take((), exact=True)
        check_logits(
            self.run(slot, token_ids, width=len(token_ids), num_keys=_KEY_STEP, num_rows=len(token_ids)),
            expected,
            self.dtype,
        )
        self._pool.give_back(slot)

    def _logits(self, states: Tensor, slot: Slot, count: int, num_rows: int) -> FloatArray:
        if not bool(torch.isfinite(states.sum())):
            slot.wipe()
            raise not_finite(self.name)
        if num_rows == 0:
            return np.empty((0, self.vocab_size), np.float32)
        if num_rows == 1 and count > self._loose_shape.max_width:  # a prompt: only its end counts
            states, count = states[-2:], 2
        logits = self._network.logits(states)[count - num_rows : count]
        return logits.cpu().numpy()

    def _make_pool(self, context: int, max_width: int) -> CachePool:
        """Caches for as many tokens a request as the model and the memory allow."""
        limit = self._memory_for_caches() if self._cache_gib is None else int(self._cache_gib * 2**30)
        room = limit // (token_bytes(self._network) * self._max_requests) - max_width
        if room < min(context, _MIN_CONTEXT):
            raise ModelLoadError(
                f"{self.name}: in {limit / 2**30:.2g} GiB, {self._max_requests} key-value caches hold {max(0, room)} "
                "tokens each; give cache_gib more or max_requests less"
            )
        return CachePool(self._network, num_slots=self._max_requests, capacity=min(context, room) + max_width)

    def _memory_for_caches(self) -> int:
        if self.device.type == "cuda":
            return int(_CUDA_SHARE * torch.cuda.mem_get_info(self.device)[0])
        return int(_CPU_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def _make_batching(self) -> Batching:
        return Batching(
            self._network,
            self._pool,
            self.name,
            exact_width=self._exact_shape.max_width if self.same_text else None,
            loose_widths=self._loose_shape.widths,
        )

    def _shared_widths(self, max_width: int) -> list[int]:
        """The one number of rows that a slot has in shared passes, where they agree whatever the others do."""
        joined = JoinedPasses(self._network, self._pool, self.name, fixed_width=max_width)
        ids = some_ids(2 * max_width, self.tokenizer.vocab_size)
        shape = Shape([max_width], _SHARED_KEY_STEP)
        return [max_width] if rows_agree(joined.run_all, self._pool, shape, ids) else []

    def _agreeing_widths(self, max_width: int) -> list[int]:
        """Numbers of rows that may be read in exact sessions: one on CUDA, all that agree on a CPU."""
        slot = self._pool.take((), exact=True)

        def read_at(start: int, token_ids: Sequence[int], width: int) -> FloatArray:
            slot.truncate(start)
            rows = self.run(slot, token_ids, width=width, num_keys=_KEY_STEP, num_rows=len(token_ids))
            slot.append(token_ids)
            return rows

        try:
            while max_width > 1:
                candidates = [w for w in _CPU_WIDTHS if w < max_width] if self.device.type == "cpu" else []
                ids = some_ids(_CHECKED_TOKENS + 2 * max_width, self.tokenizer.vocab_size)
                widths = agreeing_widths(read_at, ids, candidates, max_width)
                if widths:
                    return widths
                max_width //= 2
            return []
        finally:
            slot.truncate(0)
            self._pool.give_back(slot)


def _check_options(options: TorchOptions) -> None:
    for name, low in (("layers", 1), ("max_width", 2), ("max_requests", 1), ("max_context", _MIN_CONTEXT)):
        value = options.get(name)
        if value is not None and not (isinstance(value, int) and value >= low):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {low}")
    if options.get("attention", "sdpa") not in {"sdpa", "eager"}:
        raise ConfigError(f"attention is {options.get('attention')!r}; it must be 'sdpa' or 'eager'")
    cache_gib = options.get("cache_gib", 1.0)
    if not cache_gib > 0:
        raise ConfigError(f"cache_gib is {cache_gib!r}; it must be above 0")
