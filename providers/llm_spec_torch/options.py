"""Options for loading and running a checkpoint."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from llm_spec import ConfigError
from llm_spec.contract.checks import check_number
from llm_spec.local.lookahead import MAX_LOOKAHEAD

__all__ = ["MAX_REQUESTS", "MAX_WIDTH", "MIN_CONTEXT", "TorchOptions", "check_torch_options"]

MAX_WIDTH: Final = 16
MAX_REQUESTS: Final = 8
MIN_CONTEXT: Final = 256  # tokens; a model with less is not worth loading


class TorchOptions(TypedDict, total=False):
    """Keyword options of TorchModel and TorchProvider; in a string they follow a question mark.

    `dtype`: "float32", "bfloat16" or "float16"; the default is the checkpoint's own on CUDA and
    float32 on a CPU.
    `device`: "cpu", "cuda", "cuda:1", …; the default is CUDA if there is any.
    `attention`: "sdpa" (torch's fused attention, the default) or "eager".
    `layers`: the number of first layers that an early-exit draft has before the last norm and head;
    all by default.
    `exact`: False gives up the same-text promise: passes are not padded. The promise has a price.
    On a CPU, passes are padded to the next width with equal bits (mostly by nothing, but a single
    row is read as two). On CUDA, every pass has `max_width` rows, which costs little as long as
    reading the weights takes longer than multiplying.
    `max_width`: most tokens of one verifying pass, 16 by default; lookahead is one less.
    `max_requests`: answers that may run at once, 8 by default; others wait.
    `batched`: lets answers that run at once share forward passes. By default they do on a CPU while
    several wait, if rows had the same bits that way when the model was loaded; a single answer is
    not slower. True: exact answers share passes of one shape, `max_requests` times `max_width`
    tokens, whether one runs or all. On CUDA that is faster for many at once and slower for one, so
    make both no larger than needed. False: each answer has its own passes.
    `max_context`: most tokens of prompt and answer, by default the model's own limit.
    `cache_gib`: memory for all key-value caches together; the default is a quarter of the machine's
    memory, or 0.8 of the device's free memory. If the context does not fit, it is cut.
    `device_rounds`: draft, sample and accept on the device as well; the default is True on CUDA if
    nothing is batched.
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
    """Raise ConfigError for a value out of range, or for two options that exclude each other."""
    check_number(ConfigError, "layers", options.get("layers"), 1, integer=True)
    check_number(ConfigError, "max_width", options.get("max_width"), 2, MAX_LOOKAHEAD + 1, integer=True)
    check_number(ConfigError, "max_requests", options.get("max_requests"), 1, integer=True)
    check_number(ConfigError, "max_context", options.get("max_context"), MIN_CONTEXT, integer=True)
    check_number(ConfigError, "cache_gib", options.get("cache_gib"), 0.0, above=True)
    if options.get("attention", "sdpa") not in {"sdpa", "eager"}:
        raise ConfigError(f"attention is {options.get('attention')!r}; it must be 'sdpa' or 'eager'")
    if options.get("batched") and options.get("device_rounds"):
        raise ConfigError("batched and device_rounds are set; rounds on the device belong to one request, choose one")
