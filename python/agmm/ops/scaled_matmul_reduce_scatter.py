"""``agmm.scaled_matmul_reduce_scatter`` and its torch op."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.ops import kept, scatter_plan
from agmm.ops.checks import check_flag, check_no_backward
from agmm.ops.fp8_scatter import Fp8Scatter
from agmm.ops.fp8_sums import of_call
from agmm.ops.library import define
from agmm.ops.operands import is_watched
from agmm.ops.pipeline import serve
from agmm.ops.scaled_checks import check_scaled_scatter
from agmm.ops.scatter import ScatterSettings
from agmm.runtime import groups
from agmm.runtime.scaled import ScaledProducts

_Lists = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
_Settings = tuple[int, str, torch.dtype, bool, bool, str]


class _Arguments(NamedTuple):
    """The arguments of the torch op."""

    As: list[torch.Tensor]
    Bs: list[torch.Tensor]
    scale_as: list[torch.Tensor]
    scale_bs: list[torch.Tensor]
    bias: torch.Tensor | None
    result_scale: torch.Tensor | None
    group_name: str
    world_size: int
    scatter_dim: int
    reduce_op: str
    out_dtype: torch.dtype
    use_fast_accum: bool
    strict: bool = False
    config: str = ""

    def products(self) -> ScaledProducts:
        return ScaledProducts(*self[:6], self.out_dtype, self.use_fast_accum)


def _impl(call: _Arguments) -> torch.Tensor:
    given, group = call.products(), groups.group_of_size(call.group_name, call.world_size)
    settings: _Settings = call[8:]
    return _run(kept.kind_of_call(settings, *given[:6]), given, group, settings)


def _run(
    kind: Any, given: ScaledProducts, group: dist.ProcessGroup, settings: _Settings
) -> torch.Tensor:
    """Multiply, sum and scatter by a kept call, or as `serve` decides."""
    As, Bs, scale_as, scale_bs, bias, *_ = given
    operands = of_call(As, Bs, bias, scale_as, scale_bs)
    found: torch.Tensor | None = kept.call_kept(group, kind, *operands)
    if found is not None:
        return found
    scatter_dim, reduce_op, *_, strict, config = settings
    if not As:  # of which there is no call
        check_scaled_scatter(given, group.size(), scatter_dim, reduce_op)
    asked = ScatterSettings(scatter_dim, reduce_op, strict, scatter_plan.named(config))
    return serve(Fp8Scatter(given, group, asked), kind)


def _fake(call: _Arguments) -> torch.Tensor:
    check_scaled_scatter(call.products(), call.world_size, call.scatter_dim, call.reduce_op)
    shape = [*call.As[0].shape[:-1], call.Bs[0].shape[1]]
    shape[call.scatter_dim] = shape[call.scatter_dim] // call.world_size
    return call.As[0].new_empty(shape, dtype=call.out_dtype)


def _check_grad(call: _Arguments) -> None:
    named = zip(("A", "B", "scale_a", "scale_b"), call[:4], strict=True)
    check_no_backward(
        [(name, tensor) for name, given in named for tensor in given]
        + [("bias", call.bias), ("result_scale", call.result_scale)]
    )


define(
    "_scaled_matmul_reduce_scatter",
    _Arguments,
    "Tensor",
    run=_impl,
    fake=_fake,
    check_grad=_check_grad,
)


_Operand = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]


def scaled_matmul_reduce_scatter(
    A: _Operand,
    B: _Operand,
    scale_a: _Operand,
    scale_b: _Operand,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    strict: bool = False,
    config: str | None = None,
) -> torch.Tensor:
    """``reduce_scatter((A * scale_a) @ (B * scale_b)) (+ bias)`` of fp8 operands. Collective.

    The sum over the ranks of the products of their dequantised operands, of which each rank gets
    its part. Kinds of scales as of `all_gather_scaled_matmul`; they are each rank's own, since they
    cover its columns of A and rows of B. On the CPU agmm sends each rank its part as soon as it is
    computed, for any ``scatter_dim`` but the last: products and sums are made in float32, in the
    order of the ranks, and what goes to another rank is rounded to ``out_dtype`` (bf16 where that
    is fp8). So do agmm's kernels on Hopper, tile by tile, with all scales but block 1x128, a
    column-major B, a bf16 result and a bf16 bias or none. Else on CUDA it is ``torch._scaled_mm``
    where that has the scales, or float32, and the backend's reduce-scatter; of both agmm warns
    once. The op has no backward.

    Several products are summed in float32 before they are scattered. On CUDA, where agmm's kernels
    scale one product only, each that ``torch._scaled_mm`` does not write in float32 is rounded
    before, as with scales of rows.

    Args:
        A: [M, ..., K_local], this rank's columns of the whole A, float8_e4m3fn or float8_e5m2,
            K_local a multiple of 16; the same leading sizes on all ranks. On the CPU K_local is
            free on each rank, on CUDA the same on all. Or a list, for the sum of several products,
            each with a K_local, scales and dtypes of its own.
        B: [K_local, N], this rank's rows of the whole B, float8_e4m3fn or float8_e5m2 (not both
            float8_e5m2), best column-major; for a list of A a list of as many, of one N.
        scale_a: float32, of A; for a list of A a list of one each.
        scale_b: float32, of B; for a list of A a list of one each.
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
        config: see `scaled_matmul_all_reduce`.

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
    given = ScaledProducts(
        *_lists(A, B, scale_a, scale_b), bias, result_scale, out_dtype, use_fast_accum
    )
    scatter_plan.named(config)  # which refuses other names
    settings = scatter_dim, reduce_op, out_dtype, use_fast_accum, strict, config or ""
    kind = None if is_watched() else kept.kind_of_call(settings, *given[:6])
    if kind is not None:
        return _run(kind, given, groups.resolved(group), settings)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    # The check comes before the op's schema, which refuses what is no tensor in its own words.
    check_scaled_scatter(given, world_size, scatter_dim, reduce_op)
    out: torch.Tensor = torch.ops.agmm._scaled_matmul_reduce_scatter.default(
        *given[:6], group_name, world_size, *settings
    )
    return out


def _lists(A: Any, B: Any, scale_a: Any, scale_b: Any) -> _Lists:
    """The operands of each product, as lists.

    Raises:
        InvalidArgument: some of them are lists, and others are not.
    """
    several = isinstance(A, (list, tuple))
    found: list[list[torch.Tensor]] = []
    for name, given in (("A", A), ("B", B), ("scale_a", scale_a), ("scale_b", scale_b)):
        if isinstance(given, (list, tuple)) != several:
            wanted = f"a {type(A).__name__}" if several else "a tensor"
            raise InvalidArgument(f"{name}: found {type(given).__name__}, wanted {wanted} as A")
        found.append(list(given) if several else [given])
    of_A, of_B, scales_of_A, scales_of_B = found
    return of_A, of_B, scales_of_A, scales_of_B
