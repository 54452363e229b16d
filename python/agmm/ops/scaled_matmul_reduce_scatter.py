"""``agmm.scaled_matmul_reduce_scatter`` and its torch op."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.ops import kept
from agmm.ops.fp8_operands import Fp8Weights
from agmm.ops.fp8_scatter import Fp8Scatter
from agmm.ops.library import library
from agmm.ops.operands import is_watched
from agmm.ops.pipeline import serve
from agmm.ops.scaled_checks import check_flag, check_no_backward, check_scaled_scatter
from agmm.ops.scatter import ScatterSettings
from agmm.runtime import groups


def _impl(
    A: torch.Tensor,
    B: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    group_name: str,
    world_size: int,
    scatter_dim: int,
    reduce_op: str,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    strict: bool = False,
) -> torch.Tensor:
    given = A, B, scale_a, scale_b, bias, result_scale
    settings = scatter_dim, reduce_op, out_dtype, use_fast_accum, strict
    kind = kept.kind_of_call(settings, *given)
    return _run(kind, given, groups.group_of_size(group_name, world_size), settings)


_Given = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None
]
_Settings = tuple[int, str, torch.dtype, bool, bool]


def _run(kind: Any, given: _Given, group: dist.ProcessGroup, settings: _Settings) -> torch.Tensor:
    """By a call that is kept, or as `serve` decides."""
    A, B, scale_a, scale_b, bias, result_scale = given
    found: torch.Tensor | None
    found = kept.call_kept(group, kind, [A], [B], bias, [scale_a], [scale_b])
    if found is not None:
        return found
    scatter_dim, reduce_op, out_dtype, use_fast_accum, strict = settings
    weight = Fp8Weights([B], [scale_b], [bias], [result_scale], [out_dtype], [use_fast_accum])
    of_scatter = ScatterSettings(scatter_dim, reduce_op, strict)
    return serve(Fp8Scatter(A, scale_a, weight, group, of_scatter), kind)


def _fake(
    A: torch.Tensor,
    B: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    group_name: str,
    world_size: int,
    scatter_dim: int,
    reduce_op: str,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    strict: bool = False,
) -> torch.Tensor:
    check_scaled_scatter(
        A,
        B,
        scale_a,
        scale_b,
        bias,
        result_scale,
        out_dtype,
        world_size,
        scatter_dim,
        reduce_op,
    )
    shape = [*A.shape[:-1], B.shape[1]]
    shape[scatter_dim] = shape[scatter_dim] // world_size
    return A.new_empty(shape, dtype=out_dtype)


def _autograd(*arguments: Any) -> Any:
    names = "A", "B", "scale_a", "scale_b", "bias", "result_scale"
    check_no_backward(list(zip(names, arguments, strict=False)))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.agmm._scaled_matmul_reduce_scatter.default(*arguments)


for _key in ("CPU", "CUDA"):
    library.impl("_scaled_matmul_reduce_scatter", _impl, _key)
library.impl("_scaled_matmul_reduce_scatter", _fake, "Meta")
library.impl("_scaled_matmul_reduce_scatter", _autograd, "Autograd")


def scaled_matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    strict: bool = False,
) -> torch.Tensor:
    """``reduce_scatter((A * scale_a) @ (B * scale_b)) (+ bias)`` of fp8 operands. Collective.

    The sum over the ranks of the products of their dequantised operands, of which each rank gets
    its part. Kinds of scales as of `all_gather_scaled_matmul`; they are each rank's own, since they
    cover its columns of A and rows of B. On the CPU agmm sends each rank its part as soon as it is
    computed, for any ``scatter_dim`` but the last: products and sums are made in float32, in the
    order of the ranks, and what goes to another rank is rounded to ``out_dtype`` (bf16 where that
    is fp8). So do agmm's kernels on Hopper, tile by tile, with tensor-wise and row-wise scales, a
    column-major B, a bf16 result and a bf16 bias or none. Else on CUDA it is ``torch._scaled_mm``
    where that has the scales, or float32, and the backend's reduce-scatter; of both agmm warns
    once. The op has no backward.

    Args:
        A: [M, ..., K_local], this rank's columns of the whole A, float8_e4m3fn or float8_e5m2,
            K_local a multiple of 16; the same leading sizes on all ranks. On the CPU K_local is
            free on each rank, on CUDA the same on all.
        B: [K_local, N], this rank's rows of the whole B, float8_e4m3fn or float8_e5m2 (not both
            float8_e5m2), best column-major.
        scale_a: float32, of A.
        scale_b: float32, of B.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        scatter_dim: dimension of the product along which the sum is cut; its size is a multiple of
            the world size.
        reduce_op: "sum", or "avg" for the sum divided by the world size, on a GPU multiplied by its
            reciprocal.
        bias: [N], bf16, fp16 or float32, the same on all ranks; added once, to the (divided) sum.
            Not with the last dimension scattered.
        result_scale: one float32 with which a result in fp8 is multiplied before it is rounded.
        out_dtype: bf16, fp16, float32, or an fp8 dtype. fp8 results are cut at the largest number.
        use_fast_accum: let a GPU accumulate with less precision. No difference on the CPU.
        strict: raise `Unsupported` instead of taking the unfused path.

    Returns:
        ``out`` [M / world_size, ..., N] for ``scatter_dim`` 0.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    if type(scatter_dim) is not int:
        raise InvalidArgument(f"scatter_dim: found {scatter_dim!r}, wanted an int")
    for name, flag in (("use_fast_accum", use_fast_accum), ("strict", strict)):
        check_flag(name, flag)
    given = A, B, scale_a, scale_b, bias, result_scale
    settings = scatter_dim, reduce_op, out_dtype, use_fast_accum, strict
    kind = None if is_watched() else kept.kind_of_call(settings, *given)
    if kind is not None:
        return _run(kind, given, groups.resolved(group), settings)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    # Before the op's schema refuses in its own words what is no tensor.
    check_scaled_scatter(*given, out_dtype, world_size, scatter_dim, reduce_op)
    out: torch.Tensor = torch.ops.agmm._scaled_matmul_reduce_scatter.default(
        *given, group_name, world_size, *settings
    )
    return out
