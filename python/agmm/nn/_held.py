"""What a sharded layer holds of the whole one's parameters, and the plain tensors of it that it
computes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor


class Held(NamedTuple):
    """The parameters that hold one of the whole layer, one for each output.

    Attributes:
        names: of the parameters.
        sizes: of the whole parameters along dimension 0; the whole layer's has their sum.
        placement: how each is laid over the ranks.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    placement: Placement

    def split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The whole parameters by name; views of the whole layer's."""
        return dict(zip(self.names, whole.split(self.sizes), strict=True))

    def join(self, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole layer's parameter."""
        return torch.cat(list(wholes)) if len(wholes) > 1 else wholes[0]

    def rows(self, world_size: int) -> list[int]:
        """Of this rank's part of each parameter."""
        parts = world_size if self.placement == Shard(0) else 1
        return [size // parts for size in self.sizes]


def local_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that every rank holds whole, as ``like`` is laid out."""
    if not isinstance(like, DTensor):
        return whole
    whole = whole.detach()
    cut = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return cut.to_local()


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank, without a graph."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copyable(tensor: Any, requires_grad: bool | None = None) -> Any:
    """The same over the same memory, for ``copy`` and ``pickle``; a parameter where it is said
    whether it requires a gradient.

    A DTensor takes over its part's offset in memory, and torch then looks for memory of the
    DTensor's own, which it has not. So this one is made of an empty part.
    """
    part = tensor._local_tensor
    found: Any = DTensor(part.new_empty(0), tensor._spec, requires_grad=False)
    if requires_grad is not None:
        found = torch.nn.Parameter(found, requires_grad)
    found._local_tensor = part
    return found


def one_below_another(parts: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous tensors of one storage follow each other in memory."""
    storage = parts[0].untyped_storage().data_ptr()
    address = parts[0].data_ptr()
    for part in parts:
        if (
            part.data_ptr() != address
            or not part.is_contiguous()
            or part.untyped_storage().data_ptr() != storage
        ):
            return False
        address += part.nbytes
    return True


class Plan(NamedTuple):
    """What the parameters of a layer become on a rank: `outputs` weights and, where there is a
    bias, as many biases, by these names and with these rows each; `features` in a row."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    features: int

    @property
    def outputs(self) -> int:
        return len(self.rows)

    def operands(self, parts: Sequence[torch.Tensor], joined: bool) -> list[torch.Tensor]:
        """The transposed weights, then the biases; one of each for all outputs where joined."""
        outputs = len(self.rows)
        if not joined:
            found = [part.t() for part in parts[:outputs]]
            return found + [part.view_as(part) for part in parts[outputs:]]
        rows, k = sum(self.rows), self.features
        found = [parts[0].as_strided((k, rows), (1, k))]
        if len(parts) > outputs:
            found.append(parts[outputs].as_strided((rows,), (1,)))
        return found


class LocalParts(torch.autograd.Function):
    """`Plan.operands` of DTensors, and the gradients as DTensors."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, joined: bool, *parameters: Any) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.joined, ctx.parameters = plan, joined, parameters
        ctx.versions = [parameter._version for parameter in parameters]
        ctx.set_materialize_grads(False)
        return tuple(plan.operands([parameter._local_tensor for parameter in parameters], joined))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        if ctx.versions != [parameter._version for parameter in ctx.parameters]:
            # DTensors hide such changes from the checks of those who saved their parts.
            raise RuntimeError(
                f"{', '.join(plan.names)}: found changed by an inplace operation between the "
                "forward and the backward, wanted the values of the forward"
            )
        weights = 1 if ctx.joined else plan.outputs
        parts: list[torch.Tensor | None] = []
        for i, grad in enumerate(grads):
            if grad is not None and i < weights:
                grad = grad.t()
            if not ctx.joined:
                parts.append(grad)
            elif grad is None:
                parts += [None] * plan.outputs
            else:
                parts += grad.split(plan.rows)
        found = [
            DTensor(part.contiguous(), parameter._spec, requires_grad=False)
            if part is not None and needed
            else None
            for part, parameter, needed in zip(
                parts, ctx.parameters, ctx.needs_input_grad[2:], strict=True
            )
        ]
        return None, None, *found


class TracedWhole(torch.autograd.Function):
    """A tensor, with the gradients of the parts that lie one below another in it."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return (None, *grad.split(ctx.rows))
