"""Matrix products with weights that never change: packed once for the CPU's kernels, plain elsewhere.

On a CPU, oneDNN with weights packed beforehand reads 16 rows in the time in which `torch.nn.functional.linear` reads
one (measured, 256 x 1408 in float32), and gives a row the same bits whatever stands beside it from 2 rows on. A single
row takes a path of its own there, with other bits: where they count, callers pad it to two.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Linear", "make_linear"]

_MIN_PACKED_ROWS: Final = 16  # the number of rows that packing is made for; others work as well
_NUM_SAMPLED_ROWS: Final = 16  # threads and tiles have some of them each


class Linear(Protocol):
    """A matrix product with a weight, [out, in]."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def weight_sample(self) -> Tensor:
        """Some rows of a weight in bfloat16, evenly spread over all: [num_rows, in]. Only checks need them."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """[num_rows, in] -> [num_rows, out]."""
        ...


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`x @ weight.T + bias`; weight [out, in], whose memory may be let go."""
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
        self._apply: Any = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - what torch.compile itself calls

    def __call__(self, rows: Tensor) -> Tensor:
        return cast("Tensor", self._apply(rows, self._weight, self._bias, "none", [], ""))


def _pack_weight_for_onednn(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's own layout; None where this build of torch has none, or no kernel for the dtype."""
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
