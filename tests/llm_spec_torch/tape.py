"""What a CUDA graph does, on a CPU: operations recorded once, then repeated on the same memory, whatever it holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records what runs under it; `replay` repeats that, and puts each result where the first one was."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._steps.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self._steps:
            old, new = tensors(out), tensors(func(*args, **kwargs))
            inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
            for place, result in zip(old, new, strict=True):
                if place.untyped_storage().data_ptr() not in inputs:  # else a view, or written in place
                    place.copy_(result)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
