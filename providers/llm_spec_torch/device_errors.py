"""What goes wrong while a model runs, in words of llm_spec."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import torch

from llm_spec import ModelOutputError, TargetError
from llm_spec.local.pass_threads import run_pass

__all__ = ["make_not_finite_error", "run_on_device", "run_pass_on_device"]

T = TypeVar("T")


@contextmanager
def run_on_device(name: str, device: torch.device) -> Generator[None]:
    """Run a model without gradients and on its own device (a new thread has device 0), errors as advice."""
    try:
        with torch.inference_mode():
            if device.type != "cuda":
                yield
                return
            with torch.cuda.device(device):
                yield
    except torch.OutOfMemoryError as error:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.empty_cache()  # what torch kept for later goes back
        raise TargetError(f"{name}: out of memory on {device}; give cache_gib or max_requests less") from error


def run_pass_on_device(name: str, device: torch.device, compute: Callable[[], T]) -> T:
    """What a forward pass gives, run as by `run_on_device`; on a CPU in a thread for passes, see `run_pass`."""

    def run() -> T:
        with run_on_device(name, device):
            return compute()

    return run_pass(run, num_threads=torch.get_num_threads()) if device.type == "cpu" else run()


def make_not_finite_error(name: str) -> ModelOutputError:
    """A model whose numbers are none."""
    return ModelOutputError(f"{name}: the model's hidden states or logits hold NaN or infinity")
