"""The backward of the collectives, made of each other, so that it has a backward too.

``all_gather``: ``reduce_scatter(dout)``. ``reduce_scatter``: ``all_gather(dout)``. ``all_reduce``:
``all_reduce(dout)``. With "avg" those of the sum, divided by the world size.
"""

from __future__ import annotations

from typing import Any

import torch

from agmm.errors import InvalidArgument


def _check_real(x: torch.Tensor) -> None:
    if x.is_complex():
        raise InvalidArgument(
            f"x: found dtype {x.dtype} where a gradient is wanted, wanted a real floating-point "
            "type"
        )


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group_name: str,
        world_size: int,
        dim: int,
        strict: bool = False,
        low_contention: bool = False,
    ) -> torch.Tensor:
        _check_real(x)
        ctx.settings = group_name, world_size, "sum", dim, False, low_contention
        ctx.has_no_dim = x.dim() == 0
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = torch.ops.agmm._all_gather.default(
                x, group_name, world_size, dim, strict, low_contention
            )
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        dx = torch.ops.agmm._reduce_scatter.default(dout, *ctx.settings)
        return dx.view(()) if ctx.has_no_dim else dx, None, None, None, None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group_name: str,
        world_size: int,
        op: str,
        dim: int,
        strict: bool = False,
        low_contention: bool = False,
    ) -> torch.Tensor:
        _check_real(x)
        ctx.settings, ctx.op = (group_name, world_size, dim, False, low_contention), op
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = torch.ops.agmm._reduce_scatter.default(
                x, group_name, world_size, op, dim, strict, low_contention
            )
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        world_size = ctx.settings[1]
        dx = torch.ops.agmm._all_gather.default(dout, *ctx.settings)
        dx = dx / world_size if ctx.op == "avg" else dx
        return dx, None, None, None, None, None, None


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group_name: str, world_size: int, op: str, strict: bool = False
    ) -> torch.Tensor:
        _check_real(x)
        ctx.settings = group_name, world_size, op
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = torch.ops.agmm._all_reduce.default(
                x, group_name, world_size, op, strict
            )
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        return torch.ops.agmm._all_reduce.default(dout, *ctx.settings), None, None, None, None
