"""Matrix products with constant weights, packed once for the CPU's kernels.

On a CPU, oneDNN with packed weights reads 16 rows in the time in which `torch.nn.functional.linear`
reads one (measured, 256 x 1408 in float32). From 2 rows on, it gives a row the same bits whatever
its neighbours are. A single row is computed differently and has other bits. If bits matter, callers
pad it to two.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Linear", "make_linear"]

_MIN_PACKED_ROWS: Final = 16  # packing is optimised for this number; others work too
_NUM_SAMPLED_ROWS: Final = 16  # enough for each thread and tile to have some


class Linear(Protocol):
    """A matrix product with a weight, [out, in]."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def weight_sample(self) -> Tensor:
        """Some rows of a bfloat16 weight, evenly spread: [num_rows, in]. Only checks need them."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows, [num_rows, in], into [num_rows, out]."""
        ...


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return `x @ weight.T + bias`; the memory of weight, [out, in], may be freed afterwards."""
    if weight.device.type == "cpu" and weight.dtype in {torch.float32, torch.bfloat16}:
        packed = _pack_weight_for_onednn(weight)
        if packed is not None:
            return _PackedLinear(packed, bias, _sample_rows(weight))
    return _UnpackedLinear(weight, bias)


class _UnpackedLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.num_outputs = len(weight)

    @property
    def weight_sample(self) -> Tensor:
        return _sample_rows(self._weight)

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._weight, self._bias)


class _PackedLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None, weight_sample: Tensor) -> None:
        self._weight, self._bias = weight, bias
        self.num_outputs, self.weight_sample = len(weight), weight_sample
        self._apply: Any = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - as in torch

    def __call__(self, rows: Tensor) -> Tensor:
        return cast("Tensor", self._apply(rows, self._weight, self._bias, "none", [], ""))


def _pack_weight_for_onednn(weight: Tensor) -> Tensor | None:
    """Return the weight in oneDNN's layout, or None if torch cannot pack this dtype."""
    try:
        pack: Any = torch.ops.mkldnn._reorder_linear_weight.default  # noqa: SLF001 - as above
        packed = cast("Tensor", pack(weight.contiguous(), _MIN_PACKED_ROWS))
        _PackedLinear(packed, None, weight[:0])(torch.zeros(2, weight.shape[1], dtype=weight.dtype))
    except (AttributeError, RuntimeError):
        return None
    return packed


def _sample_rows(weight: Tensor) -> Tensor:
    count = min(_NUM_SAMPLED_ROWS, len(weight)) if weight.dtype == torch.bfloat16 else 0
    return weight[torch.linspace(0, len(weight) - 1, count, device=weight.device).long()]
