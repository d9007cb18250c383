"""A mode that refuses what makes a program wait for the device, or cannot be recorded in a CUDA graph.

Together with tensors on the `meta` device, which have no values that anybody could ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# a value on the host, or a size that depends on values
REFUSED = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "item", "masked_select", "nonzero",
    "unique_consecutive", "unique_dim",
}  # fmt: skip # one table


class SyncError(Exception):
    """Something waited for the device."""


class NoSync(TorchDispatchMode):
    """Raises SyncError at the first operation that would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in REFUSED or (name in {"index", "index_put", "index_put_"} and _has_mask(tensors[1:])):
            raise SyncError(name)
        devices = {tensor.device for tensor in tensors}
        if name == "_to_copy" and kwargs.get("device") is not None:
            devices.add(kwargs["device"])
        if name in {"_to_copy", "copy_"} and len(devices) > 1:
            raise SyncError(f"{name} between devices")
        return func(*args, **kwargs)


@contextmanager
def no_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also without tensors made from host values: each would be a copy to the device."""

    def refuse(*_: object, **__: object) -> Tensor:
        raise SyncError("a tensor of host values")

    with monkeypatch.context() as patch, NoSync():
        for name in ("tensor", "as_tensor", "from_numpy"):
            patch.setattr(torch, name, refuse)
        yield


def _has_mask(indices: list[Tensor]) -> bool:
    return any(index.dtype is torch.bool for index in indices)
