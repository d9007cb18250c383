"""What is checked on this machine when a model is loaded: that the logits are right, and which widths agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llm_spec import ModelLoadError

__all__ = ["ReadRowsAt", "check_logits", "compute_transformers_logits", "find_agreeing_widths", "make_fixed_ids"]

FloatArray: TypeAlias = NDArray[np.float32]

# Read tokens from a position on, padded to a width, behind what is there: logits after each, [len(token_ids), vocab].
ReadRowsAt: TypeAlias = Callable[[int, Sequence[int], int], FloatArray]

_FIRST_CHECKED_POSITION: Final = 21
_MAX_LOGIT_ERROR: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # of the logits' spread


def make_fixed_ids(count: int, vocab_size: int) -> list[int]:
    """Token ids that are always the same."""
    return [int(token_id) for token_id in np.random.default_rng(0).integers(0, vocab_size, count)]


def compute_transformers_logits(module: Any, token_ids: Sequence[int]) -> Tensor:
    """What transformers' own modules say, in inference mode: [len(token_ids), vocab_size] float32."""
    ids = torch.tensor([list(token_ids)], device=module.device)
    try:
        logits: Tensor = module(ids, use_cache=False).logits[0].float()
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelLoadError(f"transformers' own {type(module).__name__} cannot read text here: {error}") from error
    return logits


def check_logits(computed: FloatArray, expected: Tensor, dtype: torch.dtype) -> None:
    """Raise ModelLoadError unless logits are transformers' own up to rounding: then the model was read rightly."""
    ours, theirs = torch.as_tensor(computed), expected.cpu()
    error = float((ours - theirs).square().mean().sqrt() / theirs.std())
    if not error <= _MAX_LOGIT_ERROR[dtype]:
        raise ModelLoadError(
            f"this architecture is not supported: logits differ from transformers' own by {error:.2g} of their spread; "
            "serve this checkpoint with vLLM or SGLang and use vllm:model@url"
        )


def find_agreeing_widths(
    read_at: ReadRowsAt, token_ids: Sequence[int], widths: Iterable[int], max_width: int
) -> list[int]:
    """The widths at which every row has the bits that it has at `max_width`, in whatever company; [] if not even there.

    Rows are read at different places of a pass, alone and beside others, followed by their own successors and by other
    tokens. `token_ids`: at least 21 + 2 * max_width of them.
    """
    tail = token_ids[_FIRST_CHECKED_POSITION : _FIRST_CHECKED_POSITION + max_width]
    others = token_ids[_FIRST_CHECKED_POSITION + max_width :]
    read_at(0, token_ids[:_FIRST_CHECKED_POSITION], max(_FIRST_CHECKED_POSITION, max_width))
    reference = read_at(_FIRST_CHECKED_POSITION, tail, max_width).copy()

    def is_agreeing(width: int) -> bool:
        for offset in sorted({0, max_width // 3, max_width - 1}):
            count = min(width, max_width - offset)
            for num_own in sorted({1, (count + 1) // 2, count}):
                own = tail[offset : offset + num_own]
                rows = read_at(_FIRST_CHECKED_POSITION + offset, [*own, *others[: width - num_own]], width)[:num_own]
                if not np.array_equal(rows, reference[offset : offset + num_own]):
                    return False
                read_at(_FIRST_CHECKED_POSITION, tail, max_width)  # the places behind the offset hold other tokens now
        return True

    return [width for width in sorted({*widths, max_width}) if is_agreeing(width)] if is_agreeing(max_width) else []
