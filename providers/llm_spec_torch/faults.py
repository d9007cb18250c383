"""What may go wrong in a forward pass, as the errors that callers see."""

from __future__ import annotations

import torch

from llm_spec import ModelOutputError, TargetError

__all__ = ["not_finite", "out_of_memory"]


def not_finite(name: str) -> ModelOutputError:
    """For a model whose hidden states are no numbers."""
    return ModelOutputError(f"{name}: the model's hidden states hold NaN or infinity")


def out_of_memory(name: str, device: torch.device, num_tokens: int) -> TargetError:
    """For a pass over so many tokens; gives back to the device what torch keeps of its memory."""
    torch.cuda.empty_cache()
    return TargetError(
        f"{name}: out of memory on {device} reading {num_tokens} tokens; give cache_gib or max_requests less"
    )
