"""All-gather + matmul of fp8 operands with few rows: agmm's gather, then agmm's matmul of all rows.
``torch._scaled_mm`` has no scales of shards, and takes longer where rows are few: it would need
scales of rows and columns in memory, or a product for each shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm.ops import small_collectives
from agmm.ops.fp8_operands import ready_matmul_of
from agmm.ops.gather import Gathered
from agmm.planning.problems import KernelConfig
from agmm.runtime.cuda_calls import SCALE_BYTES, ReadyMatmul
from agmm.runtime.scaled import Scaled, Weight
from agmm.runtime.scaling import ALL


class BehindGather(NamedTuple):
    """Computes calls of one kind along dimension 0."""

    gather: small_collectives.GatherOfTwo
    products: tuple[ReadyMatmul, ...]
    leading: tuple[int, ...]
    has_one: bool
    """Whether a shard has one scale, which is sent as the scales of its rows."""
    return_A: bool

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        scale_a: torch.Tensor,
        scale_bs: Sequence[torch.Tensor],
    ) -> Gathered:
        """Gather and multiply. Collective; the arguments and results are those of
        `cuda_gather.ReadyGather`."""
        gather, products, leading, has_one, return_A = self
        values = A_shard.flatten(0, -2)
        rows = len(values)
        if has_one:
            scale = scale_a.reshape(1, 1).expand(rows, 1).contiguous()
        else:
            scale = scale_a.reshape(rows, scale_a.shape[-1]).contiguous()
        A, scales = gather(values, scale)
        outs = [
            product(A, B, None, bias=bias, scale_a=scales, scale_b=scale_b).view(
                *leading, B.shape[1]
            )
            for product, B, bias, scale_b in zip(products, Bs, biases, scale_bs, strict=True)
        ]
        if not return_A:
            return Gathered(None, None, outs)
        if has_one:
            scales = scales[::rows].clone(memory_format=torch.contiguous_format)
        else:
            scales = scales.view(*leading, scales.shape[1])
        return Gathered(A.view(*leading, A.shape[1]), scales, outs)


def behind_gather(
    shard: Scaled,
    weights: Sequence[Weight],
    kernels: Sequence[KernelConfig | None],
    leading: tuple[int, ...],
    group: dist.ProcessGroup,
    return_A: bool,
) -> BehindGather:
    """The call for shards and weights of these kinds, which kernels serve. Collective.

    Args:
        kernels: one for each weight; None for that of the planner of one rank.
        leading: the leading sizes of the results, dimension 0 the gathered one.

    Raises:
        Unsupported: the GPUs of the group do not reach each other; all ranks raise.
    """
    rows, k = shard.values.shape
    has_one = shard.tile[0] == ALL
    columns = 1 if has_one else shard.scale.shape[1]
    all_rows = rows * group.size()
    # All rows of a kind, without memory for them.
    A = Scaled(
        shard.values[:1].expand(all_rows, k),
        shard.scale[:1].expand(all_rows, columns),
        (1, ALL) if has_one else shard.tile,
    )
    gather = small_collectives.prepare_gather_of_two(
        shard.values, rows * columns * SCALE_BYTES, group
    )
    products = tuple(
        ready_matmul_of(A, weight, config=kernel)
        for weight, kernel in zip(weights, kernels, strict=True)
    )
    return BehindGather(gather, products, leading, has_one, return_A)
