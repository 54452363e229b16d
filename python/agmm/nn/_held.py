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
        sizes: of the whole parameters along `dim`; the whole layer's has their sum.
        placement: how each is laid over the ranks.
        dim: along which they lie in the whole layer's.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    placement: Placement
    dim: int = 0

    def split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The whole parameters by name; views of the whole layer's."""
        return dict(zip(self.names, whole.split(self.sizes, self.dim), strict=True))

    def join(self, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole layer's parameter."""
        return torch.cat(list(wholes), self.dim) if len(wholes) > 1 else wholes[0]

    def shape(self, parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The shape of the whole layer's parameter."""
        found = list(parameters[0].shape)
        found[self.dim] = sum(parameter.shape[self.dim] for parameter in parameters)
        return tuple(found)

    def rows(self, world_size: int) -> list[int]:
        """The rows of this rank's shard of each parameter."""
        ranks = world_size if self.placement == Shard(0) else 1
        return [size // ranks for size in self.sizes]


def local_shard(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that every rank holds whole, as ``like`` is laid out.

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
    """A parameter has it as an attribute while its shard lies in a `Joined`, for a trace, which can
    compare attributes but no addresses. A copy of the parameter does not get it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # which torch.load(weights_only=True) takes


class Joined(NamedTuple):
    """A tensor in which the shards of several parameters lie one below another, and keep alive."""

    whole: weakref.ref[torch.Tensor]
    places: tuple[Place, ...]

    def filled_by(self, shards: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The tensor, if these are still the shards that lie in it."""
        whole = self.whole()
        if whole is None:
            return None
        address = whole.data_ptr()
        for shard in shards:
            if shard.data_ptr() != address or not shard.is_contiguous():
                return None
            address += shard.nbytes
        return whole


def can_be_joined(shards: Sequence[torch.Tensor]) -> bool:
    first = shards[0]
    return len(shards) > 1 and all(
        type(shard) is torch.Tensor
        and not shard.is_meta
        and (shard.dtype, shard.device) == (first.dtype, first.device)
        for shard in shards
    )


def pieces(whole: torch.Tensor, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of a tensor, as many for each as those of the shards; each with its own storage."""
    return [_with_own_storage(rows) for rows in whole.split([shard.shape[0] for shard in shards])]


def without_offset(shard: torch.Tensor) -> torch.Tensor:
    """The shard's memory, at the beginning of a storage.

    A DTensor takes over its shard's offset in the storage, and torch then looks for memory of the
    DTensor's own, which it has not: it could be neither copied nor pickled.
    """
    if not shard.storage_offset() or type(shard) is not torch.Tensor or shard.is_meta:
        return shard
    return _with_own_storage(shard)


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
        self, shards: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """The transposed weights, then the biases; one of each for all outputs where the shards lie
        in ``wholes``."""
        weights = len(self.rows)
        if wholes is not None:
            shards, weights = wholes, 1
        found = [shard.t() for shard in shards[:weights]]
        return found + [shard.view_as(shard) for shard in shards[weights:]]


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
            # DTensors hide such changes from the checks of those who saved their shards.
            raise RuntimeError(
                f"{', '.join(plan.names)}: found changed by an inplace operation between the "
                "forward and the backward, wanted the values of the forward"
            )
        weights = 1 if ctx.joined else plan.outputs
        shards: list[torch.Tensor | None] = []
        for i, grad in enumerate(grads):
            if grad is not None and i < weights:
                grad = grad.t()
            if not ctx.joined:
                shards.append(grad)
            elif grad is None:
                shards += [None] * plan.outputs
            else:
                shards += grad.split(plan.rows)
        found = [
            DTensor(without_offset(shard.contiguous()), parameter._spec, requires_grad=False)
            if shard is not None and needed
            else None
            for shard, parameter, needed in zip(
                shards, ctx.parameters, ctx.needs_input_grad[2:], strict=True
            )
        ]
        return None, None, *found


def _version(tensor: torch.Tensor) -> int:
    """How often the tensor was changed; 0 for one made under inference_mode, which counts not."""
    return 0 if tensor.is_inference() else tensor._version


class TracedWhole(torch.autograd.Function):
    """A tensor, with the gradients of the shards that lie one below another in it."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        ctx.rows = [shard.shape[0] for shard in shards]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return (None, *grad.split(ctx.rows))
