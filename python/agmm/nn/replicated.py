"""Styles without sequence parallelism: every rank holds all rows, and products are summed over the
ranks.

The forward of the second half of a layer and the backward of the first are the same op,
`matmul_all_reduce`.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from agmm.nn._column_product import column_product
from agmm.nn._ranks import Ranks
from agmm.nn._targets import BY_INPUTS, BY_OUTPUTS, Target, local, wanted_output
from agmm.ops.matmul_all_reduce import matmul_all_reduce


class _ReplicatedStyle(ParallelStyle):
    """A style that refuses fp8, since `scaled_matmul_all_reduce` has no backward."""

    def __init__(self, *, use_local_output: bool = True) -> None:
        super().__init__()
        self.use_local_output = use_local_output

    def _checked(self, module: torch.nn.Module, mesh: DeviceMesh, divided: str) -> Target:
        target = Target(self, module).checked(mesh, divided, None)
        if target.fp8 is not None:
            raise target.fault(f"fp8: found {target.fp8.name}, wanted a torch.nn.Linear without it")
        return target

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ReplicatedColwiseParallel(_ReplicatedStyle):
    """``torch.nn.Linear`` whose input is the same on all ranks, and whose outputs are sharded.

    Takes the place of ``ColwiseParallel()``. The forward communicates nothing; the backward
    multiplies and sums the input's gradient by `agmm.matmul_all_reduce`. With
    ``AGMM_BATCH_INVARIANT=on`` a row's bits do not depend on the other rows.

    Args:
        use_local_output: return a tensor, not a DTensor sharded along its last dimension.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        target = self._checked(module, device_mesh, "out_features")
        return target.serve(device_mesh, BY_OUTPUTS, _column_output)


def _column_output(
    target: Target, style: _ReplicatedStyle, ranks: Ranks, x: torch.Tensor
) -> torch.Tensor:
    target.check_operand(x)
    weight, bias = target.local_parameters(BY_OUTPUTS)
    x = local(x, Replicate())
    target.check_input(x, weight, 0, weight.shape[0])
    out = column_product(x, weight.t(), bias, ranks.for_ops)
    return wanted_output(style, ranks, out, Shard(out.dim() - 1))


class RowwiseAllReduceParallel(_ReplicatedStyle):
    """``torch.nn.Linear`` whose output is summed over the ranks, all of it on each.

    Takes the place of ``RowwiseParallel()``, by `agmm.matmul_all_reduce`. The bias is added once.
    The gradient of the output is taken to be the same on all ranks.

    Args:
        use_local_output: return a tensor, not a replicated DTensor.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        target = self._checked(module, device_mesh, "in_features")
        return target.serve(device_mesh, BY_INPUTS, _summed_output)


def _summed_output(
    target: Target, style: _ReplicatedStyle, ranks: Ranks, x: torch.Tensor
) -> torch.Tensor:
    target.check_operand(x)
    weight, bias = target.local_parameters(BY_INPUTS)
    x = local(x, Shard(x.dim() - 1))
    target.check_input(x, weight, 0, weight.shape[0])
    out = matmul_all_reduce(x, weight, ranks.for_ops, bias=bias)
    return wanted_output(style, ranks, out, Replicate())
