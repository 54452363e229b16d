"""Styles for ``torch.distributed.tensor.parallel.parallelize_module``, with sequence parallelism.

They turn the parameters of ``torch.nn.Linear`` into DTensors, as torch's own styles do, and its
forward into agmm's ops.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from agmm._collectives import name_of
from agmm.errors import InvalidArgument
from agmm.nn.linear import check_divides
from agmm.ops import all_gather_matmul
from agmm.reduce_scatter import matmul_reduce_scatter


def _check_linear(style: ParallelStyle, module: torch.nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(module, torch.nn.Linear):
        raise InvalidArgument(
            f"{type(style).__name__}: found {type(module).__name__}, wanted torch.nn.Linear"
        )
    if mesh.ndim != 1:
        raise InvalidArgument(
            f"device_mesh: found {mesh.ndim} dimensions, wanted 1, e.g. mesh['tp']"
        )


def _distribute(
    module: torch.nn.Module, mesh: DeviceMesh, placements: dict[str, Placement], source: int | None
) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter, mesh, [placements[name]], src_data_rank=source)
        module.register_parameter(
            name, torch.nn.Parameter(distributed, requires_grad=parameter.requires_grad)
        )


def _local(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor is that part already."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != (placement,):
        tensor = tensor.redistribute(placements=[placement])
    return tensor.to_local()


def _local_parameters(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight: Any = module.weight
    bias: Any = module.bias
    return weight.to_local().t(), None if bias is None else bias.to_local()


def _gathered_products(
    modules: list[torch.nn.Module], style: _GatherStyle, mesh: DeviceMesh, x: torch.Tensor
) -> list[torch.Tensor]:
    dim = style.sequence_dim
    if not -x.dim() <= dim < x.dim():
        raise InvalidArgument(
            f"sequence_dim: found {dim}, wanted one of the {x.dim()} dimensions of the input"
        )
    x = _local(x, Shard(dim))
    weights, biases = zip(*(_local_parameters(module) for module in modules), strict=True)
    outs = all_gather_matmul(
        x.movedim(dim, 0).contiguous(),  # the fused path gathers along dimension 0
        list(weights),
        name_of(mesh.get_group()),
        bias=list(biases),
        save_gathered=style.save_gathered,
    )
    outs = [out.movedim(0, dim) for out in outs]
    if style.use_local_output:
        return outs
    return [DTensor.from_local(out, mesh, [Shard(out.dim() - 1)], run_check=False) for out in outs]


class _GatherStyle(ParallelStyle):
    def __init__(
        self, *, sequence_dim: int = 1, use_local_output: bool = True, save_gathered: bool = False
    ) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output
        self.save_gathered = save_gathered

    def _shard(self, linear: torch.nn.Module, mesh: DeviceMesh) -> None:
        _check_linear(self, linear, mesh)
        check_divides("out_features", int(linear.out_features), mesh.size())  # type: ignore[arg-type]
        _distribute(linear, mesh, {"weight": Shard(0), "bias": Shard(0)}, self.src_data_rank)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"


class GatherColwiseParallel(_GatherStyle):
    """``torch.nn.Linear`` whose input is gathered along the sequence while it is multiplied.

    Takes the place of ``ColwiseParallel(input_layouts=Shard(sequence_dim))``.

    Args:
        sequence_dim: the dimension of the input that is sharded.
        use_local_output: return a tensor, not a DTensor sharded along its last dimension.
        save_gathered: see `agmm.all_gather_matmul`.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self._shard(module, device_mesh)
        module.forward = partial(_gathered_product, module, self, device_mesh)
        return module


def _gathered_product(
    module: torch.nn.Module, style: _GatherStyle, mesh: DeviceMesh, x: torch.Tensor
) -> torch.Tensor:
    return _gathered_products([module], style, mesh, x)[0]


class SharedGatherParallel(_GatherStyle):
    """Several ``torch.nn.Linear`` of one module that take the same input: one gather for all.

    Applied to the module that holds them: ``{"attention": SharedGatherParallel("wq", "wk")}``. The
    first of them that is called with an input computes the others' outputs too, which they return
    when they are called with the same tensor, before the module's forward ends.

    Args:
        names: the linear modules, by their names in the module.
        sequence_dim, use_local_output, save_gathered: as of `GatherColwiseParallel`.
    """

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__(**options)
        if not names:
            raise InvalidArgument("names: found none, wanted the names of torch.nn.Linear modules")
        self.names = names

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        linears = [module.get_submodule(name) for name in self.names]
        for linear in linears:
            self._shard(linear, device_mesh)
        shared = _SharedOutputs(linears, self, device_mesh)
        for i, linear in enumerate(linears):
            linear.forward = partial(shared.output, i)
        module.register_forward_hook(shared.forget, always_call=True)
        return module


class _SharedOutputs:
    """The outputs that were computed for linears which have not been called yet."""

    def __init__(
        self, linears: list[torch.nn.Module], style: _GatherStyle, mesh: DeviceMesh
    ) -> None:
        self.linears = linears
        self.style = style
        self.mesh = mesh
        self.x: torch.Tensor | None = None
        self.outs: dict[int, torch.Tensor] = {}

    def output(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if self.x is not x or i not in self.outs:
            outs = _gathered_products(self.linears, self.style, self.mesh, x)
            self.x, self.outs = x, dict(enumerate(outs))
        return self.outs.pop(i)

    def forget(self, *_: Any) -> None:
        self.x = None
        self.outs = {}


class RowwiseScatterParallel(ParallelStyle):
    """``torch.nn.Linear`` whose output is summed over the ranks and scattered along the sequence.

    Takes the place of ``RowwiseParallel(output_layouts=Shard(sequence_dim))``.

    Args:
        sequence_dim: the dimension of the output that is sharded.
        use_local_output: return a tensor, not a DTensor sharded along ``sequence_dim``.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        _check_linear(self, module, device_mesh)
        check_divides("in_features", int(module.in_features), device_mesh.size())  # type: ignore[arg-type]
        _distribute(
            module, device_mesh, {"weight": Shard(1), "bias": Replicate()}, self.src_data_rank
        )
        module.forward = partial(_scattered_product, module, self, device_mesh)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"


def _scattered_product(
    module: torch.nn.Module, style: RowwiseScatterParallel, mesh: DeviceMesh, x: torch.Tensor
) -> torch.Tensor:
    dim = style.sequence_dim
    weight, bias = _local_parameters(module)
    x = _local(x, Shard(x.dim() - 1))
    out = matmul_reduce_scatter(
        x.movedim(dim, 0), weight, name_of(mesh.get_group()), bias=bias
    ).movedim(0, dim)
    if style.use_local_output:
        return out
    return DTensor.from_local(out, mesh, [Shard(dim)], run_check=False)
