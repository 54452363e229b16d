"""Outputs that are computed for several linears at once, and wait until each has been called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._guards import CompileContext
from torch.distributed.tensor import DTensor

from agmm.errors import warn_once
from agmm.nn._stand_in import StandIn

_Changes = tuple[int, ...] | str
_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter)

_noted: list[str] = []


def _changes(tensor: torch.Tensor) -> _Changes:
    """Another one once the tensor has been changed in place; "" where torch does not count that."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    # The address, since torch.utils.swap_tensors takes the count along.
    address = local.data_ptr() if type(local) in _WITH_MEMORY else 0
    try:
        return tensor._version, local._version, address
    except RuntimeError:  # an inference tensor
        return ""


def _note_changes(context: Any) -> None:
    torch.compiler.assume_constant_result(_noted_changes)
    found = _changes(context.get_local("tensor").as_fake())
    # The count of a fake tensor is that of its trace: it says nothing in another one.
    _noted.append(f"{found} in {CompileContext.current_compile_id()}" if found else "")


def _noted_changes() -> str:
    return _noted.pop()


def _changes_so_far(tensor: torch.Tensor) -> _Changes:
    """`_changes`; in a trace a constant, since there no branch can depend on torch's count."""
    if not torch.compiler.is_dynamo_compiling():
        return _changes(tensor)
    torch._dynamo.comptime.comptime(_note_changes)
    return _noted_changes()


class _Seen(NamedTuple):
    """A tensor as it was."""

    tensor: torch.Tensor
    changes: _Changes
    requires_grad: bool

    def is_still(self, tensor: torch.Tensor) -> bool:
        return (
            self.tensor is tensor
            and self.requires_grad == tensor.requires_grad
            and self.changes != ""
            and self.changes == _changes_so_far(tensor)
        )


def _seen(tensor: torch.Tensor) -> _Seen:
    return _Seen(tensor, _changes_so_far(tensor), tensor.requires_grad)


def _tensors_of(linear: torch.nn.Module) -> list[torch.Tensor]:
    """What the linear's weight and bias are made of."""
    if linear._modules:  # of parametrizations, which make another tensor whenever it is asked for
        return [*linear.parameters(), *linear.buffers()]
    own: dict[str, Any] = linear._parameters
    weight: Any = own.get("weight")
    bias: Any = own.get("bias")
    if weight is None:  # a wrapper has put a tensor in its place that is no parameter
        weight = linear.weight
    if bias is None and "bias" not in own:
        bias = linear.bias
    return [weight] if bias is None else [weight, bias]


def _modes(x: torch.Tensor) -> tuple[Any, ...]:
    kind = x.device.type
    return (
        torch.is_grad_enabled(),
        not torch.compiler.is_compiling() and torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
    )


class _Waiting(NamedTuple):
    """The outputs of linears that have not been called yet, by their indices, and of what they are
    made."""

    x: _Seen
    modes: tuple[Any, ...]
    tensors: dict[int, list[_Seen]]
    outs: dict[int, torch.Tensor]

    def serves(self, x: torch.Tensor) -> bool:
        return self.x.is_still(x) and self.modes == _modes(x)

    def taken(self, i: int, linear: torch.nn.Module) -> torch.Tensor | None:
        """The output of a linear, which waits no longer; None where there is none, or its
        parameters are others by now."""
        out = self.outs.pop(i, None)
        if out is None:
            return None
        seen, tensors = self.tensors[i], _tensors_of(linear)
        if len(seen) != len(tensors):
            return None
        for one, tensor in zip(seen, tensors, strict=True):
            if not one.is_still(tensor):
                return None
        return out


def _are_counted(x: _Seen, *others: list[_Seen]) -> bool:
    """Whether torch counts how often the tensors are changed; warns where it does not."""
    for seen in ([x], *others):
        for one in seen:
            if one.changes == "":
                if not torch.compiler.is_compiling():
                    warn_once(
                        "SharedGatherParallel: each linear gathers by itself, since torch does not "
                        "count the changes of tensors made under torch.inference_mode; "
                        "torch.no_grad lets them share"
                    )
                return False
    return True


class SharedOutputs:
    """The outputs of linears of one module that take the same input.

    Args:
        linears: the linears.
        compute: what computes their outputs, from the input and the indices of those wanted.
    """

    def __init__(
        self,
        linears: Sequence[torch.nn.Module],
        compute: Callable[[torch.Tensor, Sequence[int]], list[torch.Tensor]],
    ) -> None:
        self.linears = linears
        self.compute = compute
        self.waiting: _Waiting | None = None
        self.in_forward = False

    def output(self, i: int, x: Any) -> torch.Tensor:
        """The output of one of the linears."""
        waiting = self.waiting
        if not isinstance(x, torch.Tensor):
            return self.compute(x, [i])[0]  # which says what is wrong with it
        shard = x.shard if isinstance(x, StandIn) else x
        wanted: Sequence[int] = range(len(self.linears))
        if waiting is not None and waiting.x.tensor is shard:
            if waiting.serves(shard):
                out = waiting.taken(i, self.linears[i])
                if not waiting.outs:
                    self.waiting = None
                return self.compute(x, [i])[0] if out is None else self._returned(out)
            wanted = sorted({i, *waiting.outs})  # the others have been called
        self.waiting = None
        if len(wanted) == 1:
            return self.compute(x, wanted)[0]
        seen = _seen(shard)
        tensors = {k: [_seen(t) for t in _tensors_of(self.linears[k])] for k in wanted if k != i}
        if not _are_counted(seen, *tensors.values()):
            return self.compute(x, [i])[0]
        outs = dict(zip(wanted, self.compute(x, wanted), strict=True))
        out = outs.pop(i)
        for k in outs:
            if self.linears[k]._modules:  # parametrizations may have changed their buffers
                tensors[k] = [_seen(t) for t in _tensors_of(self.linears[k])]
        self.waiting = _Waiting(seen, _modes(shard), tensors, outs)
        return self._returned(out)

    def _returned(self, out: torch.Tensor) -> torch.Tensor:
        """The output of a linear that was called outside the module's forward ends what waits
        when a backward reaches it, since that frees the graph of all."""
        if self.waiting is None or self.in_forward or torch.compiler.is_compiling():
            return out
        if out.requires_grad:
            out.register_hook(self._forget)
        return out

    def _forget(self, _: torch.Tensor) -> None:
        self.waiting = None

    def begin(self, *_: Any) -> None:
        """A forward of the module begins."""
        self.waiting = None
        self.in_forward = True

    def end(self, *_: Any) -> None:
        """It has ended, perhaps by an exception."""
        self.waiting = None
        self.in_forward = False
