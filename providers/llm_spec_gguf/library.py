"""Models and contexts of llama.cpp, through llama-cpp-python's low-level API.

Their memory is freed with the last reference. llama.cpp's log goes to the logger `llm_spec.gguf`.
Its errors are logged as INFO, since each becomes an exception here, and the rest as DEBUG. There is
one such log in a process, so it also has the messages of other users of llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import re
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_spec import TargetError
from llm_spec.contract.errors import ModelLoadError
from llm_spec.local.caches import PREFILL_CHUNK_TOKENS, KeptTokens
from llm_spec.local.pass_threads import run_pass

__all__ = ["KeyType", "LlamaContext", "LlamaModel", "llama"]

# The decorator of its functions hides their types.
llama: Any = importlib.import_module("llama_cpp.llama_cpp")

KeyType: TypeAlias = Literal["float16", "bfloat16"]  # of cached keys; cached values are float16

_LOG: Final = logging.getLogger("llm_spec.gguf")
_ERROR_LEVEL: Final = 4  # GGML_LOG_LEVEL_ERROR
_SPARE_BYTES: Final = 128 * 2**20  # for intermediate results, and for other programs
_SEQUENCE: Final = 0  # the only one of a session's context
_GGML_TYPES: Final[dict[KeyType, int]] = {"float16": 1, "bfloat16": 30}
_FUNCTION_NAME: Final = re.compile(r"^\w+: ")
_errors: deque[str] = deque(maxlen=16)
_loading = threading.Lock()  # one load at a time, so that an error belongs to its load


def _log(level: int, text: bytes | None, _: object) -> None:
    line = (text or b"").decode(errors="replace").strip()
    if level == _ERROR_LEVEL and line:
        _errors.append(line)
    if line.strip("."):  # dots show progress
        _LOG.log(logging.INFO if level == _ERROR_LEVEL else logging.DEBUG, "%s", line)


_log_callback: Final = llama.llama_log_callback(_log)  # kept because llama.cpp calls it later
llama.llama_log_set(_log_callback, ctypes.c_void_p(0))
llama.llama_backend_init()


class LlamaModel:
    """The weights and the vocabulary of a GGUF file.

    Raises ModelLoadError with llama.cpp's reason.
    """

    def __init__(self, path: Path) -> None:
        _check_is_gguf(path)
        with _loading:
            _errors.clear()
            self.pointer = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
            if not self.pointer:
                raise ModelLoadError(f"{path} is not a model that llama.cpp can load: {_describe_load_error()}")
        weakref.finalize(self, llama.llama_model_free, self.pointer)
        self.vocab = llama.llama_model_get_vocab(self.pointer)
        self.vocab_size: int = llama.llama_vocab_n_tokens(self.vocab)
        self.context_length: int = llama.llama_model_n_ctx_train(self.pointer)
        if reason := self._find_architecture_refusal():
            raise ModelLoadError(f"{path} {reason}")

    @property
    def cache_bytes_per_token(self) -> int:
        """The approximate size of a token's keys and values, which have 16 bits."""
        num_heads, num_kv_heads = llama.llama_model_n_head(self.pointer), llama.llama_model_n_head_kv(self.pointer)
        head_dim = llama.llama_model_n_embd(self.pointer) // max(1, num_heads)
        return int(2 * 2 * llama.llama_model_n_layer(self.pointer) * num_kv_heads * head_dim)

    @property
    def score_bytes_per_token(self) -> int:
        """Bytes of a pass for each cached token without flash attention: float32 a row and head."""
        return int(4 * PREFILL_CHUNK_TOKENS * llama.llama_model_n_head(self.pointer))

    def _find_architecture_refusal(self) -> str | None:
        if llama.llama_model_has_encoder(self.pointer) or not llama.llama_model_has_decoder(self.pointer):
            return "has an encoder; only decoder-only models can be used"
        if llama.llama_model_is_diffusion(self.pointer):
            return "writes by diffusion, not token by token"
        if llama.llama_model_is_recurrent(self.pointer) or llama.llama_model_is_hybrid(self.pointer):
            return "keeps a recurrent state, from which rejected tokens cannot be taken back"
        return None

    def read_metadata(self, key: str) -> str | None:
        """Return a text of the file's metadata, or None if it has none."""
        size = llama.llama_model_meta_val_str(self.pointer, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        llama.llama_model_meta_val_str(self.pointer, key.encode(), buffer, size + 1)
        return buffer.value.decode(errors="replace")


class LlamaContext:
    """One key-value cache with room for `capacity` tokens, for one thread at a time.

    `kept` tells which tokens it holds. `num_sequences` is 1 except in the search of widths. Raises
    MemoryError if there is not enough memory. That is checked first, because llama.cpp ends the
    process if it gets none.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        capacity: int,
        threads: int,
        key_type: KeyType = "float16",
        flash_attention: bool = True,
        num_sequences: int = 1,
    ) -> None:
        self._model = model  # must live as long as the context
        self._threads = threads
        self.capacity = capacity
        self.kept = KeptTokens()
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = capacity
        parameters.n_batch = parameters.n_ubatch = min(PREFILL_CHUNK_TOKENS, capacity)
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.n_seq_max = num_sequences
        parameters.kv_unified = True
        parameters.type_k = _GGML_TYPES[key_type]
        if not flash_attention:  # by default it is used if the model can
            parameters.flash_attn_type = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.no_perf = True
        bytes_per_token = model.cache_bytes_per_token + (0 if flash_attention else model.score_bytes_per_token)
        has_room = capacity * bytes_per_token + _SPARE_BYTES < _read_available_bytes()
        self._pointer = llama.llama_init_from_model(model.pointer, parameters) if has_room else None
        if not self._pointer:
            raise MemoryError(f"no memory for a key-value cache of {capacity} tokens")
        self.close = weakref.finalize(self, llama.llama_free, self._pointer)
        self._memory = llama.llama_get_memory(self._pointer)
        self._token_ids = np.zeros(PREFILL_CHUNK_TOKENS, np.int32)
        self._is_output = np.zeros(PREFILL_CHUNK_TOKENS, np.int8)
        self._batch = llama.llama_batch(
            token=self._token_ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            logits=self._is_output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self._decode = partial(llama.llama_decode, self._pointer, self._batch)
        self._logits_address = 0
        self._logits_by_num_rows: dict[int, NDArray[np.float32]] = {}

    def read(self, token_ids: Sequence[int], *, num_rows: int) -> NDArray[np.float32]:
        """Append tokens, at most PREFILL_CHUNK_TOKENS; return logits after the last `num_rows`.

        The logits are [num_rows, vocab_size], valid until the next call. Raises TargetError if
        llama.cpp cannot compute them.
        """
        count = len(token_ids)
        self._token_ids[:count] = token_ids
        self._is_output[:count] = 0
        self._is_output[count - num_rows : count] = 1
        self._batch.n_tokens = count
        status = run_pass(self._decode, num_threads=self._threads)
        if status != 0:
            raise TargetError(f"llama.cpp could not read {count} tokens (llama_decode returned {status})")
        return self._view_logits(num_rows)

    def _view_logits(self, num_rows: int) -> NDArray[np.float32]:
        """Return a view of llama.cpp's logits.

        They stay at one address until a pass needs more room.
        """
        pointer = llama.llama_get_logits(self._pointer)
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_address:
            self._logits_address, self._logits_by_num_rows = address, {}
        logits = self._logits_by_num_rows.get(num_rows)
        if logits is None:
            logits = np.ctypeslib.as_array(pointer, (num_rows, self._model.vocab_size))
            self._logits_by_num_rows[num_rows] = logits
        return logits

    def forget_from(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not llama.llama_memory_seq_rm(self._memory, _SEQUENCE, length, -1):
            raise TargetError(f"llama.cpp could not cut its cache to {length} tokens")
        self.kept.truncate(length)

    def clear(self) -> None:
        """Forget all tokens."""
        llama.llama_memory_clear(self._memory, False)
        self.kept.truncate(0)

    def copy_from(self, other: LlamaContext) -> None:
        """Copy what another context of this model holds into this empty one."""
        self.load_state(other.save_state(), _SEQUENCE)
        self.kept = replace(other.kept, token_ids=list(other.kept.token_ids))

    def save_state(self) -> ctypes.Array[ctypes.c_uint8]:
        """Return what the context holds, in llama.cpp's format."""
        size = llama.llama_state_seq_get_size(self._pointer, _SEQUENCE)
        state: ctypes.Array[ctypes.c_uint8] = (ctypes.c_uint8 * size)()
        llama.llama_state_seq_get_data(self._pointer, state, size, _SEQUENCE)
        return state

    def load_state(self, state: ctypes.Array[ctypes.c_uint8], sequence: int) -> None:
        """Load a saved state as a new sequence."""
        if not llama.llama_state_seq_set_data(self._pointer, state, len(state), sequence):
            raise TargetError("llama.cpp could not copy its cache")


def _read_available_bytes() -> float:
    """Return the available memory, or infinity if the system does not tell it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration):
        return float("inf")


def _check_is_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelLoadError(f"{path} is not a GGUF file: it begins with {magic!r}")


def _describe_load_error() -> str:
    """Return the first error that llama.cpp reported: later ones follow from it."""
    first = _errors[0] if _errors else "it does not say why"
    return _FUNCTION_NAME.sub("", first).removeprefix("error loading model: ")
