"""Translates failures of a running model into llm_spec's errors."""

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
    """Run a model without gradients on its own device; raises TargetError if memory runs out.

    The device is set because a new thread uses device 0.
    """
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
                torch.cuda.empty_cache()  # torch returns the memory that it kept for later
        raise TargetError(f"{name}: out of memory on {device}; lower cache_gib or max_requests") from error


def run_pass_on_device(name: str, device: torch.device, compute: Callable[[], T]) -> T:
    """Run a forward pass as `run_on_device` does; on a CPU, in a thread for passes (`run_pass`)."""

    def run() -> T:
        with run_on_device(name, device):
            return compute()

    return run_pass(run, num_threads=torch.get_num_threads()) if device.type == "cpu" else run()


def make_not_finite_error(name: str) -> ModelOutputError:
    return ModelOutputError(f"{name}: the model's hidden states or logits hold NaN or infinity")
