"""What a sharded layer holds of the whole one's parameters, and the plain tensors of it that it
computes with."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from agmm.nn._ranks import ascending


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
        """The rows of this rank's part of each parameter."""
        parts = world_size if self.placement == Shard(0) else 1
        return [size // parts for size in self.sizes]


def local_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that every rank holds whole, as ``like`` is laid out.

    Raises:
        InvalidArgument: ``like`` lies over a mesh of several dimensions whose ranks do not ascend.
    """
    if not isinstance(like, DTensor):
        return whole
    mesh, whole = ascending(like.device_mesh), whole.detach()
    return distribute_tensor(whole, mesh, like.placements, src_data_rank=None).to_local()


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank, without a graph."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Place:
    """A parameter has it as an attribute while its part lies in a `Joined`, for a trace, which can
    compare attributes but no addresses. A copy of the parameter does not get it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # which torch.load(weights_only=True) takes


class Joined(NamedTuple):
    """A tensor in which the parts of several parameters lie one below another, and keep alive."""

    whole: weakref.ref[torch.Tensor]
    places: tuple[Place, ...]

    def filled_by(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The tensor, if these are still the parts that lie in it."""
        whole = self.whole()
        if whole is None:
            return None
        address = whole.data_ptr()
        for part in parts:
            if part.data_ptr() != address or not part.is_contiguous():
                return None
            address += part.nbytes
        return whole


def can_be_joined(parts: Sequence[torch.Tensor]) -> bool:
    first = parts[0]
    return len(parts) > 1 and all(
        type(part) is torch.Tensor
        and not part.is_meta
        and (part.dtype, part.device) == (first.dtype, first.device)
        for part in parts
    )


def pieces(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of a tensor, as many for each as those of the parts; each with its own storage."""
    return [_with_own_storage(rows) for rows in whole.split([part.shape[0] for part in parts])]


def without_offset(part: torch.Tensor) -> torch.Tensor:
    """The part's memory, at the beginning of a storage.

    A DTensor takes over its part's offset in the storage, and torch then looks for memory of the
    DTensor's own, which it has not: it could be neither copied nor pickled.
    """
    if not part.storage_offset() or type(part) is not torch.Tensor or part.is_meta:
        return part
    return _with_own_storage(part)


def _with_own_storage(rows: torch.Tensor) -> torch.Tensor:
    found = rows.detach()  # A change of it is known to whoever saved other rows of the tensor.
    found.data = from_dlpack(to_dlpack(rows))
    return found


class OperandPlan(NamedTuple):
    """What the parameters of a layer become on a rank: `outputs` weights and, where there is a
    bias, as many biases, by these names and with these rows each."""

    names: tuple[str, ...]
    rows: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return len(self.rows)

    def operands(
        self, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """The transposed weights, then the biases; one of each for all outputs where the parts lie
        in ``wholes``."""
        weights = len(self.rows)
        if wholes is not None:
            parts, weights = wholes, 1
        found = [part.t() for part in parts[:weights]]
        return found + [part.view_as(part) for part in parts[weights:]]


class LocalParts(torch.autograd.Function):
    """`OperandPlan.operands` of DTensors, and the gradients as DTensors."""

    @staticmethod
    def forward(
        ctx: Any, plan: OperandPlan, wholes: Sequence[torch.Tensor] | None, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.joined, ctx.parameters = plan, wholes is not None, parameters
        ctx.versions = [_version(parameter) for parameter in parameters]
        ctx.set_materialize_grads(False)
        return tuple(plan.operands([parameter._local_tensor for parameter in parameters], wholes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        plan: OperandPlan = ctx.plan
        if ctx.versions != [_version(parameter) for parameter in ctx.parameters]:
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
            DTensor(without_offset(part.contiguous()), parameter._spec, requires_grad=False)
            if part is not None and needed
            else None
            for part, parameter, needed in zip(
                parts, ctx.parameters, ctx.needs_input_grad[2:], strict=True
            )
        ]
        return None, None, *found


def _version(tensor: torch.Tensor) -> int:
    """How often the tensor was changed; 0 for one made under inference_mode, which counts not."""
    return 0 if tensor.is_inference() else tensor._version


class TracedWhole(torch.autograd.Function):
    """A tensor, with the gradients of the parts that lie one below another in it."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return (None, *grad.split(ctx.rows))
