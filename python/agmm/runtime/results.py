"""Results get the shape in which an op returns them, and none of them is a view.

Autograd lets nobody change a view in place that a Function has made, nor one that was made under
``torch.no_grad()``. No op returns a view, since a caller does not know which path serves the call,
nor whether a dimension that moves leaves the memory as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reshaped(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor in another shape, in the same memory, which nobody else may have."""
    found: torch.Tensor = torch.ops.aten._unsafe_view.default(tensor, shape)
    return found


def moved(tensor: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """The tensor with a dimension moved, contiguous; the tensor itself where nothing changes. What
    it returns may share the tensor's memory, so an op returns it only where nobody else has
    that."""
    if source % tensor.dim() == target % tensor.dim():
        return tensor.contiguous()
    found = tensor.movedim(source, target)
    return reshaped(found, found.shape) if found.is_contiguous() else found.contiguous()


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
"""The dispatch key that takes note of views."""


def strided(tensor: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """The tensor with a dimension moved, in the same memory, which nobody else may have. It has the
    strides that follow, also those of dimensions of 1, which `reshaped` does not keep. It is not
    for traced tensors."""
    with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        return tensor.movedim(source, target)
