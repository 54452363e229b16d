"""Linear layers that hold this rank's part of the weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm._collectives import group_of, name_of
from agmm.errors import InvalidArgument
from agmm.ops import all_gather_matmul
from agmm.reduce_scatter import matmul_reduce_scatter


class Sharding(NamedTuple):
    """How a parameter is cut: each of its blocks along ``dim`` into one part per rank."""

    dim: int
    blocks: tuple[int, ...]

    def full_shape(self, part: torch.Tensor) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        shape = list(part.shape)
        shape[self.dim] = sum(self.blocks)
        return tuple(shape)

    def part(self, full: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
        """What ``rank`` holds of ``full``."""
        blocks = full.split(self.blocks, self.dim)
        return torch.cat([block.chunk(world_size, self.dim)[rank] for block in blocks], self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of the parts of all ranks, in their order."""
        sizes = [block // len(parts) for block in self.blocks]
        by_block = zip(*(part.split(sizes, self.dim) for part in parts), strict=True)
        return torch.cat([piece for pieces in by_block for piece in pieces], self.dim)


def _chosen_group(group: dist.ProcessGroup | str | None, device_mesh: DeviceMesh | None) -> str:
    if device_mesh is None:
        return name_of(group)
    if group is not None:
        raise InvalidArgument("device_mesh: found one beside a group, wanted one of the two")
    if device_mesh.ndim != 1:
        raise InvalidArgument(
            f"device_mesh: found {device_mesh.ndim} dimensions, wanted 1, e.g. mesh['tp']"
        )
    return name_of(device_mesh.get_group())


def check_divides(name: str, size: int, world_size: int) -> None:
    if size % world_size:
        raise InvalidArgument(f"{name}: found {size}, wanted a multiple of {world_size} ranks")


def _check_features(x: torch.Tensor, wanted: int) -> None:
    if x.size(-1) != wanted:
        raise InvalidArgument(
            f"x: found {x.size(-1)} features in its last dimension, wanted {wanted}"
        )


class ShardedLinear(torch.nn.Module):
    """What the two layers share: the group, the parameters and their first values."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int | tuple[int, ...]

    def __init__(
        self,
        in_features: int,
        group: dist.ProcessGroup | str | None,
        device_mesh: DeviceMesh | None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        # By name, so that the layer can be copied and pickled.
        self.group_name = _chosen_group(group, device_mesh)
        found = group_of(self.group_name)
        self.world_size = dist.get_world_size(found)
        self.rank = dist.get_rank(found)
        self.shardings: dict[str, Sharding] = {}

    def _make_parameters(
        self, rows: int, bias: bool, device: Any, dtype: torch.dtype | None
    ) -> None:
        shapes = {"weight": [rows, self.in_features]}
        if bias:
            shapes["bias"] = [rows]
        else:
            self.register_parameter("bias", None)
        for name, shape in shapes.items():
            sharding = self.shardings.get(name)
            if sharding is not None:
                shape[sharding.dim] //= self.world_size
            parameter = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The values of ``torch.nn.Linear(in_features, sum(out_features))`` under the same seed.

        Every rank draws the whole weight, so that the ranks agree when their seeds do.
        """
        if self.weight.is_meta:
            return
        rows = self.out_features if isinstance(self.out_features, int) else sum(self.out_features)
        full = torch.nn.Linear(
            self.in_features,
            rows,
            self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        for name, parameter in full.named_parameters():
            part: torch.Tensor = parameter
            if name in self.shardings:
                part = self.shardings[name].part(parameter, self.rank, self.world_size)
            self.get_parameter(name).copy_(part)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, world_size={self.world_size}"
        )


class ColumnParallelLinear(ShardedLinear):
    """``all_gather(x) @ weightᵀ + bias``, each rank with its part of the outputs.

    The whole layer is ``torch.nn.Linear(in_features, sum(out_features))``. Several outputs share
    one gather and one matmul: with ``out_features=[q, k, v]`` the layer returns three tensors.

    Args:
        in_features: K.
        out_features: N, or one N for each output; multiples of the world size.
        bias: whether there is one; each rank holds its part.
        group: process group or its name; the default group when None.
        device_mesh: 1-D mesh, instead of ``group``.
        save_gathered, strict: see `agmm.all_gather_matmul`.
        device, dtype: of the parameters.

    Attributes:
        weight: [sum(out_features) / world_size, in_features]: this rank's part of each output.
        bias: [sum(out_features) / world_size] or None.

    Raises:
        InvalidArgument: sizes that the ranks cannot share, or a mesh that is not 1-D.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        *,
        group: dist.ProcessGroup | str | None = None,
        device_mesh: DeviceMesh | None = None,
        save_gathered: bool = False,
        strict: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        several = not isinstance(out_features, int)
        blocks = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        super().__init__(in_features, group, device_mesh)
        if not blocks:
            raise InvalidArgument("out_features: found an empty list, wanted at least one size")
        for block in blocks:
            check_divides("out_features", block, self.world_size)
        self.out_features = blocks if several else blocks[0]
        self.save_gathered = save_gathered
        self.strict = strict
        self._sizes = [block // self.world_size for block in blocks] if several else None
        self.shardings = {name: Sharding(0, blocks) for name in ("weight", "bias")}
        self._make_parameters(sum(blocks), bias, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The products of the gathered rows. Collective.

        Args:
            x: [M_local, ..., in_features], this rank's rows.

        Returns:
            [world_size * M_local, ..., N / world_size]; for several outputs a tuple of them, which
            are views of one tensor.
        """
        _check_features(x, self.in_features)
        out = all_gather_matmul(
            x,
            self.weight.t(),
            self.group_name,
            bias=self.bias,
            save_gathered=self.save_gathered,
            strict=self.strict,
        )
        if self._sizes is None:
            return out
        return torch.split(out, self._sizes, dim=-1)


class RowParallelLinear(ShardedLinear):
    """``reduce_scatter(x @ weightᵀ) + bias``, each rank with its part of the inputs.

    The whole layer is ``torch.nn.Linear(in_features, out_features)``.

    Args:
        in_features: K, a multiple of the world size.
        out_features: N.
        bias: whether there is one; it is the same on all ranks, and so is its gradient.
        group: process group or its name; the default group when None.
        device_mesh: 1-D mesh, instead of ``group``.
        device, dtype: of the parameters.

    Attributes:
        weight: [out_features, in_features / world_size].
        bias: [out_features] or None.

    Raises:
        InvalidArgument: sizes that the ranks cannot share, or a mesh that is not 1-D.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | str | None = None,
        device_mesh: DeviceMesh | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, group, device_mesh)
        check_divides("in_features", in_features, self.world_size)
        self.out_features = out_features
        self.shardings = {"weight": Sharding(1, (in_features,))}
        self._make_parameters(out_features, bias, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over the ranks. Collective.

        Args:
            x: [M, ..., in_features / world_size], M a multiple of the world size.

        Returns:
            [M / world_size, ..., out_features].
        """
        weight = self.weight
        _check_features(x, weight.size(1))
        return matmul_reduce_scatter(x, weight.t(), self.group_name, bias=self.bias)
