"""Checks on this machine when a model is loaded: are the logits right, which widths agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llm_spec.contract.errors import ModelLoadError

__all__ = [
    "FloatArray",
    "ReadRowsAt",
    "check_logits_match",
    "compute_transformers_logits",
    "find_agreeing_widths",
    "make_fixed_token_ids",
]

FloatArray: TypeAlias = NDArray[np.float32]

# Reads tokens in one pass from a position on, after what is there, and returns a row for each:
# [len(token_ids), any].
ReadRowsAt: TypeAlias = Callable[[int, Sequence[int]], FloatArray]

# As a share of the logits' standard deviation.
_MAX_LOGIT_ERROR: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def make_fixed_token_ids(count: int, vocab_size: int) -> list[int]:
    """Return token ids that are the same in every call."""
    return [int(token_id) for token_id in np.random.default_rng(0).integers(0, vocab_size, count)]


def compute_transformers_logits(module: Any, token_ids: Sequence[int]) -> Tensor:
    """Return the logits of transformers' own modules, [len(token_ids), vocab_size] float32.

    Call it in inference mode. Raises ModelLoadError if the modules fail.
    """
    ids = torch.tensor([list(token_ids)], device=module.device)
    try:
        logits: Tensor = module(ids, use_cache=False).logits[0].float()
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelLoadError(f"transformers' own {type(module).__name__} cannot read text here: {error}") from error
    return logits


def check_logits_match(computed: FloatArray, expected: Tensor, dtype: torch.dtype) -> None:
    """Raise ModelLoadError unless logits equal transformers' own up to rounding."""
    ours, theirs = torch.as_tensor(computed), expected.cpu()
    error = float((ours - theirs).square().mean().sqrt() / theirs.std())
    if not error <= _MAX_LOGIT_ERROR[dtype]:
        raise ModelLoadError(
            f"this architecture is not supported: logits differ from transformers' own by {error:.2g} of their spread; "
            "serve this checkpoint with vLLM or SGLang and use vllm:model@url"
        )


def find_agreeing_widths(
    read_at: ReadRowsAt, token_ids: Sequence[int], widths: Sequence[int], *, start: int = 21, thorough: bool = True
) -> list[int]:
    """Return those of ascending widths at which a row has the same bits as at the widest.

    Returns [] if rows at the widest do not agree with each other.

    A row's place in a pass, its neighbours and what follows it must make no difference. Each width
    is read once from the middle on, half of it with other tokens. If `thorough`, it is also read
    from the second place on with its own tokens, so that at the widest every row is compared with
    its neighbour. `token_ids` needs at least twice the widest; they are read from position `start`
    on.
    """
    max_width = widths[-1]
    tail, others = token_ids[:max_width], token_ids[max_width:]
    reference = read_at(start, tail)

    def is_width_agreeing(width: int, offset: int, num_parts: int) -> bool:
        num_own = -(-min(width, max_width - offset) // num_parts)
        own = tail[offset : offset + num_own]
        rows = read_at(start + offset, [*own, *others[: width - num_own]])[:num_own]
        return np.array_equal(rows, reference[offset : offset + num_own])

    agreeing = list(widths)
    # Back to front, so that nothing is read after the leftovers of another reading.
    readings = [(max(1, max_width // 3), 2), (1, 1)]
    for offset, num_parts in readings if thorough else readings[:1]:
        agreeing = [width for width in reversed(agreeing) if is_width_agreeing(width, offset, num_parts)][::-1]
        if max_width not in agreeing:
            return []
    return agreeing
