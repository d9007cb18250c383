"""Steps recorded as CUDA graphs: one call starts all their kernels.

A step is recorded once for each key, after a normal run that chooses, compiles and loads kernels.
The caller restores what that run changed. Steps are played one after another on the thread's
stream. So they can share one memory pool, because nothing in it must last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeAlias

import torch

__all__ = ["CudaGraphs", "StepKey", "measure_replay_s"]

StepKey: TypeAlias = tuple[str, int, int]

_NUM_MEASURED_REPLAYS: Final = 5

# Recording waits for the whole device, which breaks another thread's recording
# (NVIDIA/TensorRT #2888).
_CAPTURE_LOCK: Final = threading.Lock()


class CudaGraphs:
    """The recorded steps of one engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream  # torch gives it no types
        self._stream = make(device)
        self._graphs: dict[StepKey, torch.cuda.CUDAGraph] = {}

    def __contains__(self, key: StepKey) -> bool:
        return key in self._graphs

    def capture(self, key: StepKey, step: Callable[[], object]) -> None:
        """Run a step and record it."""
        graph = torch.cuda.CUDAGraph()
        with _CAPTURE_LOCK:
            step()
            # The outer stream is restored even if recording fails.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                step()
        self._graphs[key] = graph

    def replay(self, key: StepKey) -> None:
        self._graphs[key].replay()


def measure_replay_s(step: Callable[[], object], device: torch.device) -> float:
    """Return a step's mean seconds when it is played as a graph several times in a row."""
    graphs = CudaGraphs(device)
    key = ("measured", 0, 0)
    graphs.capture(key, step)
    graphs.replay(key)  # the first one loads the graph onto the device
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    start, end = make(enable_timing=True), make(enable_timing=True)
    start.record()
    for _ in range(_NUM_MEASURED_REPLAYS):
        graphs.replay(key)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _NUM_MEASURED_REPLAYS
