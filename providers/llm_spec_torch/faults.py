"""What goes wrong while a model runs, in words of llm_spec."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from llm_spec import ModelOutputError, TargetError

__all__ = ["not_finite", "told_when_full"]


@contextmanager
def told_when_full(name: str, device: torch.device) -> Generator[None]:
    """Turn the allocator's error into advice; what torch kept for later goes back to the device."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise TargetError(f"{name}: out of memory on {device}; give cache_gib or max_requests less") from error


def not_finite(name: str) -> ModelOutputError:
    """A model whose numbers are none."""
    return ModelOutputError(f"{name}: the model's hidden states or logits hold NaN or infinity")
