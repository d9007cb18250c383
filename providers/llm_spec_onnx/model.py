"""A decoder-only ONNX model as a TokenModel.

Inputs and outputs have the names of Hugging Face's exports: `input_ids, attention_mask[,
position_ids], past_key_values.N.key/value -> logits, present.N.key/value`. If past and present may
be one buffer (the built-in pair, and exports for onnxruntime-genai), a rollback only changes the
length. Otherwise the cache is the model's output, cut to the length.

Equal texts with and without speculation need equal logits, but matrix kernels differ with the
number of rows: a single row uses another kernel than two or more. So an exact session never runs a
single row; it adds a row and discards the result. When the model is loaded, `_has_agreeing_rows`
checks on this machine up to which width the logits are equal.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from llm_spec import ConfigError
from llm_spec.contract.errors import ModelLoadError
from llm_spec.contract.token_model import TokenSession
from llm_spec.kit.model_folder.files import read_json
from llm_spec.kit.model_folder.tokenizer import FolderTokenizer
from llm_spec.local.caches import prefill_prompt
from llm_spec.local.threads import count_usable_cores
from llm_spec_onnx.model_bytes import read_model_bytes
from llm_spec_onnx.sessions import (
    GrowingCacheSession,
    IdleBuffers,
    InPlaceCacheSession,
    LoadedOnnxModel,
    SharedSession,
    ThreadChoice,
)
from llm_spec_onnx.weights import find_weights_file

__all__ = ["OnnxModel"]

_TELEMETRY_SWITCH: Final = "ORT_DISABLE_TELEMETRY"


def _import_onnxruntime() -> Any:
    """Import onnxruntime without its telemetry, unless the user sets the switch.

    The telemetry's thread reports to the vendor. A forked child would wait for this thread at its
    end, for ever.
    """
    if _TELEMETRY_SWITCH in os.environ:
        return importlib.import_module("onnxruntime")
    os.environ[_TELEMETRY_SWITCH] = "1"
    try:
        return importlib.import_module("onnxruntime")
    finally:
        del os.environ[_TELEMETRY_SWITCH]


ort: Any = _import_onnxruntime()  # it has no type information

_WEIGHTS_FOLDER: Final = "session.model_external_initializers_file_folder_path"
# tokens of one verification at most: the first width whose rows agree
_WIDTHS: Final = (32, 16, 8, 4, 2)
_MAX_IDLE_CACHES: Final = 4  # closed sessions whose buffers are kept for the next requests
# size of a model that may be loaded twice, for several threads
_MAX_DOUBLED_BYTES: Final = 64 * 2**20
_MAX_THREADS: Final = 8
_MIN_GAIN: Final = 0.9  # several threads must take less than this share of one thread's time
# of the prompt and its continuation, to compare numbers of threads
_NUM_COMPARED_TOKENS: Final = 56
_NUM_COMPARED_PASSES: Final = 4  # of each width
_DEFAULT_CONTEXT: Final = 2048  # if config.json does not say
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
}
_KNOWN_INPUT: Final = re.compile(r"input_ids|attention_mask|position_ids|past_key_values\.\d+\.(key|value)")


class OnnxModel:
    """A loaded model folder: `model.onnx` or `onnx/model.onnx`, config.json and a tokenizer.

    - `model`: a folder, or `org/name` on the Hugging Face hub. Only the needed files are fetched.
    - `weights`: a kind of weights by its file's name: "q4" is `model_q4.onnx`, "fp32" is
      `model.onnx`. The default is the available kind that did best in the benchmark of
      `weights.py`.
    - `threads`: onnxruntime's threads for one forward pass. More than one helps large models only,
      and slows small drafts down.
    - `exact`: False gives up the promise of the same text for a plain step that is a few per cent
      faster.

    `threads=0` means 1, except for a target that answers one request at a time. Such a target uses
    the fastest number of threads, measured while loading, if it gives the same bits. The first
    answer of a process gains nothing by that, later ones do. The weights are then in memory twice,
    so this is limited to models up to 64 MiB whose cache is one buffer: the attention of other
    models may sum in another order for a long context. These do not promise the same text with
    several `threads`.

    Raises ModelLoadError that names the missing or broken file.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        name: str | None = None,
        threads: int = 1,
        exact: bool = True,
        weights: str | None = None,
    ) -> None:
        if threads < 0:
            raise ConfigError(f"threads is {threads}; it must be at least 1, or 0 for the fastest number")
        self.name = name or f"onnx:{model}"
        folder, path = find_weights_file(model, weights)
        self.tokenizer = FolderTokenizer(folder)
        config = read_json(folder / "config.json", optional=True)
        self._graph = _load_onnx_model(path, config, threads or 1)
        self._shared = _allows_one_buffer_for_cache(self._graph.session, folder)
        self.vocab_size = self._graph.vocab_size
        self.context_length = self._graph.context_length
        self.tokenizer.leave_out_ids_without_rows(self.vocab_size)
        self._exact = exact
        self._idle = IdleBuffers(_MAX_IDLE_CACHES)
        self._draft_threads = self._target_threads = ThreadChoice(self._graph)
        may_agree = exact and (self._shared or threads <= 1)
        agreeing = next((width for width in _WIDTHS if self._has_agreeing_rows(width)), None) if may_agree else None
        self.max_width = agreeing or _WIDTHS[0]
        self.same_text = agreeing is not None
        if not threads and self._shared and _count_bytes_of_model(path) <= _MAX_DOUBLED_BYTES:
            parallel = self._find_faster_graph(lambda num_threads: _load_onnx_model(path, config, num_threads))
            self._target_threads = ThreadChoice(self._graph, parallel)
            if exact and not self._has_agreeing_rows(self.max_width):
                self._target_threads = self._draft_threads

    def open(self, *, exact: bool = True) -> TokenSession:
        return self._open_session(self._target_threads if exact else self._draft_threads, exact=exact)

    def _open_session(self, threads: ThreadChoice, *, exact: bool = True) -> TokenSession:
        min_rows = 2 if exact and self._exact else 1
        if not self._shared:
            return GrowingCacheSession(self._graph, min_rows)
        return InPlaceCacheSession(threads, min_rows, self._idle, exact=exact)

    def _find_faster_graph(self, load: Callable[[int], LoadedOnnxModel]) -> LoadedOnnxModel | None:
        """Load the model with the fastest number of threads.

        Returns None if one thread is fastest, or if the bits differ. Passes of one token and of a
        few, after a prompt, are timed in turns.
        """
        num_most = min(count_usable_cores(), _MAX_THREADS)
        best: LoadedOnnxModel | None = None
        for num_threads in sorted({num_most, max(1, num_most // 2), 2} - {1}) if num_most > 1 else ():
            graph = load(num_threads)
            times_s = self._compare_graphs(best or self._graph, graph)
            if times_s is not None and times_s[1] < _MIN_GAIN * times_s[0]:
                best = graph
        return best

    def _compare_graphs(self, one: LoadedOnnxModel, other: LoadedOnnxModel) -> tuple[float, float] | None:
        """Return each graph's seconds for the same passes, or None if their bits differ."""
        widths, most = (1, 4, 8), min(_NUM_COMPARED_TOKENS, self.context_length)
        ids = [int(t) for t in np.random.default_rng(1).integers(0, self.tokenizer.vocab_size, most)]
        prompt_ids, read_ids = ids[: -max(widths)], ids[-max(widths) :]
        self._idle.clear()  # so that each session reads the whole prompt
        sessions = [self._open_session(ThreadChoice(graph)) for graph in (one, other)]
        times_s = np.full((2, len(widths)), np.inf)
        try:
            for session in sessions:
                prefill_prompt(session, prompt_ids)
            for number, width in [*enumerate(widths)] * _NUM_COMPARED_PASSES:
                rows: list[Any] = []
                for index, session in enumerate(sessions):
                    started_s = time.perf_counter()
                    rows.append(session.forward(read_ids[:width], num_rows=width).copy())
                    times_s[index, number] = min(times_s[index, number], time.perf_counter() - started_s)
                    session.truncate(len(prompt_ids))
                if not np.array_equal(rows[0], rows[1]):
                    return None
        finally:
            for session in sessions:
                session.close()
            self._idle.clear()
        return float(times_s[0].sum()), float(times_s[1].sum())

    def _has_agreeing_rows(self, width: int) -> bool:
        """Return True if one forward of `width` gives the same bits as shorter ones.

        The shorter ones begin at all kinds of offsets. Some are followed by other tokens, and in
        some the last row counts: kernels work in blocks, and a single row in a block uses another
        kernel.
        """
        generator = np.random.default_rng(0)
        start = 21
        token_ids = [int(t) for t in generator.integers(0, self.tokenizer.vocab_size, start + width)]
        session = self.open()
        try:
            session.forward(token_ids[:start], num_rows=1)
            reference = session.forward(token_ids[start:], num_rows=width).copy()
            for number, offset in enumerate({*range(0, width, max(1, width // 10)), width - 1}):
                count = min((1, 2, 1, 3, 5, 1, 8, 13, 21)[number % 9], width - offset)
                others = [0] * (number % 4 if count + 4 <= width else 0)
                session.truncate(start + offset)
                read = token_ids[start + offset : start + offset + count] + others
                rows = session.forward(read, num_rows=len(read))[:count]
                if not np.array_equal(rows, reference[offset : offset + count]):
                    return False
                session.truncate(start + offset)
                session.forward(token_ids[start + offset :], num_rows=1)
        finally:
            session.close()
        return True


def _count_bytes_of_model(path: Path) -> int:
    """Return the size of the model's folder, without JSON files: any file may hold weights."""
    return sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file() and file.suffix != ".json")


def _make_session_options(threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # idle threads would spin on the cores that drafts need between passes
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # errors are exceptions; onnxruntime's log lines would repeat them
    options.log_severity_level = 4
    return options


def _load_onnx_model(path: Path, config: dict[str, Any], threads: int) -> LoadedOnnxModel:
    def load_session() -> Any:
        try:
            content, weights_folder = read_model_bytes(path)
            # new after a fork: setting an entry twice gives a warning
            options = _make_session_options(threads)
            options.add_session_config_entry(_WEIGHTS_FOLDER, str(weights_folder))
            return ort.InferenceSession(content or str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors have no common base class
            message = f"{path} is not a model that onnxruntime {ort.__version__} can load: {error}"
            raise ModelLoadError(message) from error

    shared_session = SharedSession(load_session)
    session = shared_session.get()
    inputs: dict[str, Any] = {node.name: node for node in session.get_inputs()}
    outputs: dict[str, Any] = {node.name: node for node in session.get_outputs()}
    cache_names = tuple(name for name in inputs if name.startswith("past_key_values."))
    odd = [name for name in inputs if not _KNOWN_INPUT.fullmatch(name)]
    if odd or not cache_names or "input_ids" not in inputs or "logits" not in outputs:
        what = f"input {odd[0]!r} is unknown" if odd else "input_ids, past_key_values.N.key/value or logits is missing"
        raise ModelLoadError(f"{path} is not exported as a decoder with a key-value cache: {what}")
    _, num_kv_heads, _, head_dim = _get_empty_cache_shape(path, inputs[cache_names[0]].shape)
    vocab_size = outputs["logits"].shape[-1]
    if not isinstance(vocab_size, int):
        vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ModelLoadError(f"{path} has logits of no fixed width; give vocab_size in config.json")
    return LoadedOnnxModel(
        shared_session=shared_session,
        cache_names=cache_names,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        cache_dtype=_get_numpy_dtype(path, inputs[cache_names[0]].type),
        logits_dtype=_get_numpy_dtype(path, outputs["logits"].type),
        takes_positions="position_ids" in inputs,
        vocab_size=vocab_size,
        context_length=int(config.get("max_position_embeddings", _DEFAULT_CONTEXT)),
    )


def _get_empty_cache_shape(path: Path, shape: list[Any]) -> tuple[int, int, int, int]:
    if len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        raise ModelLoadError(
            f"{path} has a cache of shape {shape}; it must be [batch, kv_heads, length, head_dim] with kv_heads and "
            "head_dim fixed"
        )
    return (1, shape[1], 0, shape[3])


def _get_numpy_dtype(path: Path, onnx_type: str) -> np.dtype[Any]:
    if onnx_type not in _DTYPES:
        raise ModelLoadError(f"{path} computes in {onnx_type}; only {', '.join(_DTYPES)} are supported")
    return _DTYPES[onnx_type]


def _allows_one_buffer_for_cache(session: Any, folder: Path) -> bool:
    """Return True if past and present may be one buffer.

    Our own models and onnxruntime-genai's exports are marked for that.
    """
    if session.get_modelmeta().custom_metadata_map.get("llm_spec.kv_cache") == "shared":
        return True
    genai = read_json(folder / "genai_config.json", optional=True)
    return bool(genai.get("search", {}).get("past_present_share_buffer", False))
