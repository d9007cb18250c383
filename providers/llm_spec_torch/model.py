"""A Hugging Face checkpoint as a TokenModel, on a CUDA device or a CPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final, Unpack

import numpy as np
import torch
from torch import Tensor

from llm_spec import ConfigError, Sampling, TargetError
from llm_spec.contract.errors import ModelLoadError
from llm_spec.contract.token_model import TokenModel
from llm_spec.kit.model_folder.files import read_json
from llm_spec.kit.model_folder.tokenizer import FolderTokenizer
from llm_spec.local.forks import reset_in_forked_child
from llm_spec.local.threads import call_in_own_thread
from llm_spec_torch.batch_checks import do_joined_passes_agree
from llm_spec_torch.batching import BatchedPassRunner, PassBatching
from llm_spec_torch.caches import CachePool, CacheSlot, count_bytes_per_token
from llm_spec_torch.checkpoint import (
    find_checkpoint_folder,
    load_transformers_module,
    map_embedding,
    resolve_device,
    resolve_dtype,
    return_freed_memory_to_system,
)
from llm_spec_torch.checks import check_logits_match, compute_transformers_logits, make_fixed_token_ids
from llm_spec_torch.device_errors import make_not_finite_error, run_on_device, run_pass_on_device
from llm_spec_torch.fair_semaphore import FairSemaphore
from llm_spec_torch.joining import MAX_JOINED_ROWS, JoinedPassRunner, find_joined_row_counts
from llm_spec_torch.kept_findings import AgreeingWidthsCacheFile, describe_cpu_for_kernels, describe_model_for_kernels
from llm_spec_torch.kernel_choice import choose_network_with_kernels_or_without
from llm_spec_torch.network import TransformerNetwork
from llm_spec_torch.options import MAX_REQUESTS, MAX_WIDTH, MIN_CONTEXT, TorchOptions, check_torch_options
from llm_spec_torch.order_probes import has_tile_registers
from llm_spec_torch.pass_queue import PassRunner
from llm_spec_torch.round_engine import NetworkWithCache, RoundEnginePool
from llm_spec_torch.rounds import TorchRoundRunner, prefill_and_open_rounds
from llm_spec_torch.session import FloatArray, TorchSession
from llm_spec_torch.shape import PassShape
from llm_spec_torch.weights import check_architecture, convert_module_to_network
from llm_spec_torch.width_agreement import WidthAgreement
from llm_spec_torch.width_search import AgreeingWidthSearch

__all__ = ["TorchModel"]

_KEY_PADDING: Final = 256  # places; attention reads a multiple of it
# A CPU's attention reads blocks of this size; a part of a block has other bits.
_BATCHED_KEY_PADDING: Final = 512
_CPU_MEMORY_SHARE: Final = 0.25  # of the machine's memory, for caches
_CUDA_MEMORY_SHARE: Final = 0.8  # of the memory that is free after loading the weights
_NUM_CHECKED_TOKENS: Final = 48
# Tested, as far as they are below max_width; a pass is padded to the next one that agrees.
_CPU_WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)


class TorchModel:
    """A loaded checkpoint: safetensors weights, config.json, tokenizer.json and its chat template.

    `model` is a folder, or a name on the Hugging Face hub. `module` is an optional model that
    transformers has loaded. Its weights are used instead of the folder's, and it is empty
    afterwards.

    Raises ModelLoadError if something is missing, broken, too large or not supported, and
    ConfigError for an option out of range.
    """

    vocab_size: int
    context_length: int
    _network: TransformerNetwork
    _pool: CachePool
    _exact_shape: PassShape
    _loose_shape: PassShape
    _agreement: WidthAgreement | None
    _batching: PassBatching | None

    def __init__(
        self, model: str | Path, *, name: str | None = None, module: Any = None, **options: Unpack[TorchOptions]
    ) -> None:
        check_torch_options(options)
        folder = find_checkpoint_folder(model)
        self.name = name or f"torch:{model}"
        self.tokenizer = FolderTokenizer(folder)
        self.device = resolve_device(options.get("device") if module is None else str(module.device))
        self.dtype = resolve_dtype(options.get("dtype"), self.device, read_json(folder / "config.json", optional=True))
        self._options = options
        self._places = FairSemaphore(self.max_requests)
        self._engines = RoundEnginePool()
        self._is_lost_in_fork = False
        reset_in_forked_child(self)
        call_in_own_thread(partial(self._load, folder, module))

    def make_early_exit_draft(self, layers: int) -> TorchModel:
        """Make a draft of this model's first layers and its last norm and head.

        It has no weights of its own. Raises ConfigError if `layers` is out of range.
        """
        if not 1 <= layers < len(self._network.layers):
            raise ConfigError(f"layers is {layers}; the model has {len(self._network.layers)}, give fewer")
        draft = copy.copy(self)
        reset_in_forked_child(draft)
        call_in_own_thread(partial(draft._use_first_layers, layers))  # noqa: SLF001 - a copy of its own class
        return draft

    @property
    def max_requests(self) -> int:
        """The number of answers that may run at once."""
        return self._options.get("max_requests", MAX_REQUESTS)

    @property
    def has_fused_kernels(self) -> bool:
        """True if this package's kernels compute narrow passes: on CUDA, if they are faster."""
        return self._network.kernels is not None

    @property
    def pass_widths(self) -> Sequence[int]:
        """The numbers of rows that a pass of an exact session may have, ascending.

        Shorter passes are padded. If `same_text` is True, each row had the same bits at these
        widths when the model was loaded.
        """
        return self._exact_shape.widths

    # ----------------------------------------------------------------------------------- TokenModel

    @property
    def same_text(self) -> bool:
        return self._agreement is not None and self._agreement.holds

    @property
    def max_width(self) -> int:
        return self._exact_shape.max_width

    def open(self, *, exact: bool = True) -> TorchSession:
        exact = exact and self._options.get("exact", True)
        shape = self._exact_shape if exact else self._loose_shape
        forwards = self if self._batching is None else self._batching.make_forward_runner(self, exact=exact)
        return TorchSession(self._pool, forwards, shape, self._agreement if exact else None, exact=exact)

    def admit_request(self) -> AbstractAsyncContextManager[None]:
        """Wait for a free cache; see `RequestAdmittingModel`."""
        if self._is_lost_in_fork:
            raise TargetError(
                f"{self.name} was loaded on {self.device} before this process was forked, and CUDA does not "
                "survive a fork; load it in the child, or start the child with multiprocessing's spawn"
            )
        return self._places.hold_place()

    def reset_after_fork(self) -> None:
        """Note in a forked child that the parent's CUDA device cannot be used."""
        self._is_lost_in_fork = self.device.type == "cuda"

    def open_rounds(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        seed: int,
        draft: TokenModel | None,
        cancelled: Callable[[], bool],
    ) -> TorchRoundRunner | None:
        """Open whole rounds on the device; see `DeviceRoundModel`."""
        on_cuda = self.device.type == "cuda" and self._batching is None
        if not self._options.get("device_rounds", on_cuda) or len(prompt_ids) < 2:
            return None
        partner = draft if isinstance(draft, TorchModel) and draft.device == self.device else None
        return prefill_and_open_rounds(
            self,
            partner,
            prompt_ids,
            sampling=sampling,
            seed=seed,
            engines=self._engines,
            shape=self._exact_shape,
            agreement=self._agreement,
            cancelled=cancelled,
        )

    # ------------------------------------------------------------------------------------- Forwards

    def run_forward(
        self, slot: CacheSlot, token_ids: Sequence[int], *, width: int, num_keys: int, num_rows: int
    ) -> FloatArray:
        start, count = len(slot.token_ids), len(token_ids)
        slot.check_room(width, self.name)

        def compute() -> FloatArray:
            pad_width = [*token_ids, *[token_ids[-1]] * (width - count)]
            ids = torch.tensor([pad_width], device=self.device)
            positions = torch.arange(start, start + width, device=self.device)[None]
            states = self._network.compute_hidden_states(ids, positions, slot.cache, num_keys)
            return self._compute_logits(states, slot, count, num_rows)

        return run_pass_on_device(self.name, self.device, compute)

    def take_cost_s(self) -> None:
        """Return None: passes are not shared, so they cost what they take."""

    def forget_slot(self, slot: CacheSlot) -> None:
        """Do nothing: nothing waits for a slot."""

    def get_network_with_cache(self, slot: CacheSlot) -> NetworkWithCache:
        """Return this model's part in a round engine."""
        return NetworkWithCache(self._network, slot.cache, self._loose_shape.pad_width(1))

    # --------------------------------------------------------------------------------------- inside

    def _load(self, folder: Path, module: Any) -> None:
        try:
            if module is None:
                module = load_transformers_module(folder, self.dtype, self.device, self._options.get("layers"))
                self._load_network(module, map_embedding(folder, module.get_input_embeddings().weight.detach()))
            else:
                self._load_network(module)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(f"{folder} does not fit into the memory of {self.device} in {self.dtype}") from error
        return_freed_memory_to_system()
        self._find_exact_pass_shape()
        self._joined_row_counts = self._find_joined_row_counts()
        self._batching = self._make_batching()

    def _load_network(self, module: Any, embedding: Tensor | None = None) -> None:
        own_context = int(module.config.get_text_config().max_position_embeddings)
        check_architecture(module)
        context = min(own_context, self._options.get("max_context", own_context))
        max_width = self._options.get("max_width", MAX_WIDTH)
        self.tokenizer.leave_out_ids_without_rows(len(module.get_input_embeddings().weight))
        token_ids = make_fixed_token_ids(_NUM_CHECKED_TOKENS, self.tokenizer.vocab_size)
        with run_on_device(self.name, self.device):
            expected = compute_transformers_logits(module, token_ids)
        self._network = convert_module_to_network(
            module,
            num_positions=context + max_width,
            fused=self._options.get("attention") != "eager",
            embedding=embedding,
        )
        self._facts = describe_model_for_kernels(module.config, self.dtype, self._options)
        self.vocab_size = self._network.vocab_size
        is_cuda = self.device.type == "cuda"
        self._loose_shape = PassShape(range(1, max_width + 1), _KEY_PADDING, doubling=is_cuda)
        self._pool = self._make_cache_pool(context, max_width)
        self.context_length = self._pool.cache.capacity - max_width
        slot = self._pool.acquire_slot((), exact=True)
        found = self.run_forward(slot, token_ids, width=len(token_ids), num_keys=_KEY_PADDING, num_rows=len(token_ids))
        check_logits_match(found, expected, self.dtype)
        if is_cuda:
            with run_on_device(self.name, self.device):
                ids = torch.tensor(token_ids[:max_width], device=self.device)
                self._network = choose_network_with_kernels_or_without(
                    self._network, slot.cache, ids, num_keys=_KEY_PADDING
                )
        self._pool.release_slot(slot)

    def _compute_logits(self, states: Tensor, slot: CacheSlot, count: int, num_rows: int) -> FloatArray:
        """Return logits of the last `num_rows` of `count` tokens, [num_rows, vocab_size].

        `states` is [width, hidden_size].
        """
        if not bool(torch.isfinite(states.sum(dtype=torch.float32))):
            slot.erase()
            raise make_not_finite_error(self.name)
        if num_rows == 0:
            return np.empty((0, self.vocab_size), np.float32)
        if num_rows == 1 and count > self._loose_shape.max_width:  # a prompt: only its end counts
            states, count = states[-2:], 2
        rows: FloatArray = self._network.compute_logits(states)[count - num_rows : count].cpu().numpy()
        return rows

    def _use_first_layers(self, layers: int) -> None:
        self.name = f"{self.name} (first {layers} layers)"
        self._network = self._network.copy_with_first_layers(layers)
        self._places = FairSemaphore(self.max_requests)
        self._engines = RoundEnginePool()
        self._pool = self._make_cache_pool(self.context_length, self._pool.cache.capacity - self.context_length)
        self._batching = self._make_batching()

    def _make_cache_pool(self, context: int, max_width: int) -> CachePool:
        """Make caches for as many tokens a request as the model and the memory allow."""
        cache_gib = self._options.get("cache_gib")
        limit = self._measure_cache_memory() if cache_gib is None else int(cache_gib * 2**30)
        room = limit // (count_bytes_per_token(self._network) * self.max_requests) - max_width
        if room < min(context, MIN_CONTEXT):
            raise ModelLoadError(
                f"{self.name}: in {limit / 2**30:.2g} GiB, {self.max_requests} key-value caches hold {max(0, room)} "
                "tokens each; raise cache_gib or lower max_requests"
            )
        return CachePool(self._network, num_slots=self.max_requests, capacity=min(context, room) + max_width)

    def _measure_cache_memory(self) -> int:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                # Memory of weights that were joined is free, but still counts as used.
                torch.cuda.empty_cache()
            return int(_CUDA_MEMORY_SHARE * torch.cuda.mem_get_info(self.device)[0])
        return int(_CPU_MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def _make_batching(self) -> PassBatching | None:
        exact: PassRunner
        loose: PassRunner
        if self._options.get("batched"):
            exact = loose = BatchedPassRunner(self._network, self._pool, self.name)
            if self.same_text:
                width = self._exact_shape.max_width
                exact = BatchedPassRunner(self._network, self._pool, self.name, fixed_width=width)
        elif self._joined_row_counts:
            exact = JoinedPassRunner(self._network, self._pool, self.name, self._joined_row_counts)
            loose = JoinedPassRunner(self._network, self._pool, self.name, range(1, MAX_JOINED_ROWS + 1))
        else:
            return None
        return PassBatching(
            self.name,
            exact=exact,
            exact_widths=self._exact_shape.widths,
            loose=loose,
            loose_widths=self._loose_shape.widths,
        )

    def _find_joined_row_counts(self) -> Sequence[int]:
        """Return the numbers of rows of joined passes on a CPU; () if passes are not joined."""
        if "batched" in self._options or self.device.type != "cpu" or self.max_requests == 1:
            return ()
        if not self.same_text:
            return range(1, MAX_JOINED_ROWS + 1)
        token_ids = make_fixed_token_ids(MAX_JOINED_ROWS, self.tokenizer.vocab_size)
        with run_on_device(self.name, self.device):
            return find_joined_row_counts(
                self._network, self._exact_shape, context_length=self.context_length, token_ids=token_ids
            )

    def _find_exact_pass_shape(self) -> None:
        shape: PassShape | None = None
        if self._options.get("exact", True) and self._can_show_agreement():
            max_width = self._loose_shape.max_width
            shape = (
                self._find_shared_pass_shape(max_width)
                if self._options.get("batched")
                else self._find_agreeing_pass_shape(max_width)
            )
        self._agreement = None if shape is None else self._make_agreement(shape.widths)
        self._exact_shape = shape or self._loose_shape

    def _can_show_agreement(self) -> bool:
        """Return True if a search can see differing bits.

        On a CPU, rounding to bfloat16 hides most of them. The checks of shared passes do not show
        them. With tile registers (AMX), rows differed in practice that a search had passed.
        """
        if self.device.type != "cpu" or self.dtype == torch.float32:
            return True
        return not (self._options.get("batched") or has_tile_registers())

    def _make_agreement(self, widths: Sequence[int]) -> WidthAgreement:
        """Make the check of further numbers of keys: on a CPU, if passes have several shapes."""
        if self.device.type != "cpu" or self._options.get("batched"):
            return WidthAgreement()
        search = self._make_width_search()
        return WidthAgreement(
            # Without a reference to the model: see `PassBatching`.
            partial(_look_at_widths, search, widths, self.name, self.device),
            search.list_first_key_counts(),
        )

    def _find_shared_pass_shape(self, width: int) -> PassShape | None:
        """Return the shape of a shared pass, or None if its rows depend on each other."""
        shape = PassShape([width], _BATCHED_KEY_PADDING, doubling=self._loose_shape.doubling)
        joined = BatchedPassRunner(self._network, self._pool, self.name, fixed_width=width)
        ids = make_fixed_token_ids(2 * width, self.tokenizer.vocab_size)
        return shape if do_joined_passes_agree(joined.run_all, self._pool, shape, ids) else None

    def _find_agreeing_pass_shape(self, max_width: int) -> PassShape | None:
        """Return the shape of exact passes: one width on CUDA, all that agree on a CPU."""
        is_cpu = self.device.type == "cpu"
        search = self._make_width_search()
        finding = AgreeingWidthsCacheFile(self._facts | describe_cpu_for_kernels(), max_width) if is_cpu else None
        with run_on_device(self.name, self.device):
            widths = [] if finding is None else finding.read_widths()
            if not (widths and search.are_widths_still_agreeing(widths)):
                widths = search.search_agreeing_widths(_CPU_WIDTHS if is_cpu else (), max_width)
                if finding is not None:
                    finding.write_widths(widths)
        return PassShape(widths, _KEY_PADDING, doubling=self._loose_shape.doubling) if widths else None

    def _make_width_search(self) -> AgreeingWidthSearch:
        return AgreeingWidthSearch(
            self._network,
            self._loose_shape,
            capacity=self._pool.cache.capacity,
            token_ids=make_fixed_token_ids(2 * self._loose_shape.max_width, self.tokenizer.vocab_size),
        )


def _look_at_widths(
    search: AgreeingWidthSearch, widths: Sequence[int], name: str, device: torch.device, num_keys: int
) -> bool:
    return run_pass_on_device(name, device, lambda: search.do_widths_agree_at(widths, num_keys))
