"""How a checkpoint is loaded and run."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from llm_spec import ConfigError
from llm_spec.contract.checks import check_number
from llm_spec.local.lookahead import MAX_LOOKAHEAD

__all__ = ["MAX_REQUESTS", "MAX_WIDTH", "MIN_CONTEXT", "TorchOptions", "check_torch_options"]

MAX_WIDTH: Final = 16
MAX_REQUESTS: Final = 8
MIN_CONTEXT: Final = 256  # tokens; with room for less a model is not worth loading


class TorchOptions(TypedDict, total=False):
    """Options of TorchModel and TorchProvider, all by keyword; in a string after a question mark.

    `dtype`: "float32", "bfloat16" or "float16"; by default the checkpoint's own on CUDA and float32 on a CPU.
    `device`: "cpu", "cuda", "cuda:1", …; by default CUDA where there is any.
    `attention`: "sdpa" (torch's fused one, the default) or "eager".
    `layers`: only the first so many, followed by the last norm and head: an early-exit draft.
    `exact`: False gives up the same-text promise: passes are as wide as their tokens. What the promise costs: on a CPU
    passes are padded to the next width of equal bits (mostly none, but a single row is read as two); on CUDA
    every pass has `max_width` rows, which costs little as long as reading the weights takes longer than multiplying.
    `max_width`: most tokens of one verifying pass, 16 by default; lookahead is one less.
    `max_requests`: answers that may run at once, 8 by default; others wait their turn.
    `batched`: whether answers that run at once share forward passes. By default those on a CPU do, whenever several
    wait, if rows had the same bits so when the model was loaded; one that runs alone is not slower. True: exact ones
    share passes of one shape, `max_requests` times `max_width` tokens, whether one runs or all: on CUDA more for many
    at once, less for one; give both no more than is needed. False: each has its own.
    `max_context`: tokens of prompt and answer, by default the model's own.
    `cache_gib`: memory for all key-value caches together, by default a quarter of the machine's, or 0.8 of what is
    free on the device. Where the context does not fit, it is cut.
    `device_rounds`: draft, sample and accept on the device as well, by default on CUDA and where nothing is batched.
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
    device_rounds: bool


def check_torch_options(options: TorchOptions) -> None:
    """Raise ConfigError for a value out of range, or two options that exclude each other."""
    check_number(ConfigError, "layers", options.get("layers"), 1, integer=True)
    check_number(ConfigError, "max_width", options.get("max_width"), 2, MAX_LOOKAHEAD + 1, integer=True)
    check_number(ConfigError, "max_requests", options.get("max_requests"), 1, integer=True)
    check_number(ConfigError, "max_context", options.get("max_context"), MIN_CONTEXT, integer=True)
    check_number(ConfigError, "cache_gib", options.get("cache_gib"), 0.0, above=True)
    if options.get("attention", "sdpa") not in {"sdpa", "eager"}:
        raise ConfigError(f"attention is {options.get('attention')!r}; it must be 'sdpa' or 'eager'")
    if options.get("batched") and options.get("device_rounds"):
        raise ConfigError("batched and device_rounds are set; rounds on the device belong to one request, choose one")
