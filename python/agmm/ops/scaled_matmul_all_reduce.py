"""``agmm.scaled_matmul_all_reduce`` and its torch op."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.ops import kept, scatter_plan
from agmm.ops.checks import check_flag, check_no_backward
from agmm.ops.fp8_all_reduce import Fp8AllReduce
from agmm.ops.library import define
from agmm.ops.operands import is_watched
from agmm.ops.pipeline import serve
from agmm.ops.scaled_checks import check_scaled_sum
from agmm.planning.plans import Plan
from agmm.runtime import groups
from agmm.runtime.scaled import ScaledProducts


class _Arguments(NamedTuple):
    """The arguments of the torch op."""

    A: torch.Tensor
    B: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    bias: torch.Tensor | None
    result_scale: torch.Tensor | None
    group_name: str
    world_size: int
    out_dtype: torch.dtype
    use_fast_accum: bool
    strict: bool = False
    config: str = ""

    def products(self) -> ScaledProducts:
        return ScaledProducts(
            *([self.A], [self.B], [self.scale_a], [self.scale_b]),
            *(self.bias, self.result_scale, self.out_dtype, self.use_fast_accum),
        )


def _impl(call: _Arguments) -> torch.Tensor:
    given, group = call.products(), groups.group_of_size(call.group_name, call.world_size)
    settings = call.strict, scatter_plan.named(call.config)
    return _run(_kind(given, settings), given, group, settings)


_Settings = tuple[bool, Plan | None]
"""``strict``, and the plan that is asked for."""


def _kind(given: ScaledProducts, settings: _Settings) -> Any:
    """The kind under which calls are kept."""
    *operands, out_dtype, fast_accum = given
    return kept.kind_of_call((Fp8AllReduce.op, out_dtype, fast_accum, *settings), *operands)


def _run(
    kind: Any, given: ScaledProducts, group: dist.ProcessGroup, settings: _Settings
) -> torch.Tensor:
    """Multiply and sum by a kept call, or as `serve` decides."""
    (A,), (B,), (scale_a,), (scale_b,), bias, result_scale, *_ = given
    found: torch.Tensor | None
    found = kept.call_kept(group, kind, A, B, bias, scale_a, scale_b, result_scale)
    return serve(Fp8AllReduce(given, group, *settings), kind) if found is None else found


def _fake(call: _Arguments) -> torch.Tensor:
    check_scaled_sum(call.products())
    return call.A.new_empty((*call.A.shape[:-1], call.B.shape[1]), dtype=call.out_dtype)


def _check_grad(call: _Arguments) -> None:
    check_no_backward([(name, getattr(call, name)) for name in call._fields[:6]])


define(
    "_scaled_matmul_all_reduce",
    _Arguments,
    "Tensor",
    run=_impl,
    fake=_fake,
    check_grad=_check_grad,
)


def scaled_matmul_all_reduce(
    A: torch.Tensor,
    B: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    strict: bool = False,
    config: str | None = None,
) -> torch.Tensor:
    """``all_reduce((A * scale_a) @ (B * scale_b)) (+ bias)`` of fp8 operands. Collective.

    The sum over the ranks of the products of their dequantised operands, on every rank: the end of
    a tensor-parallel layer without sequence parallelism, as in serving. Kinds of scales as of
    `all_gather_scaled_matmul`; they are each rank's own, since they cover its columns of A and rows
    of B. On the CPU it is computed as `matmul_all_reduce` computes it: products and sums are made
    in float32, in the order of the ranks, what goes to another rank on the way is rounded to
    ``out_dtype`` (bf16 where that is fp8), and every rank gets the same bits, in every call. On
    Hopper it is the scatter of `scaled_matmul_reduce_scatter` in one kernel and an all-gather of
    the result, with the same bits on all ranks, for what that kernel serves and where the cost
    model has it faster. Else on CUDA it is ``torch._scaled_mm`` where that has the scales, or
    float32, and an all-reduce: agmm's where it is meant to serve it
    (`agmm.collectives.all_reduce`), with the same bits on all ranks, else the backend's. Of calls
    that no kernel serves agmm warns once. The op has no backward.

    Args:
        A: [M, ..., K_local], this rank's columns of the whole A, float8_e4m3fn or float8_e5m2,
            K_local a multiple of 16; the same leading sizes, of any number of rows, on all ranks.
            On the CPU K_local is free on each rank, on CUDA the same on all.
        B: [K_local, N], this rank's rows of the whole B, float8_e4m3fn or float8_e5m2 (not both
            float8_e5m2), best column-major.
        scale_a: float32, of A.
        scale_b: float32, of B.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        bias: [N], bf16, fp16 or float32, the same on all ranks; added once, to the sum.
        result_scale: one float32 with which a result in fp8 is multiplied before it is rounded; the
            same on all ranks.
        out_dtype: bf16, fp16, float32, or an fp8 dtype. fp8 results are cut at the largest number.
        use_fast_accum: let a GPU accumulate with less precision. No difference on the CPU.
        strict: raise `Unsupported` instead of taking the unfused path.
        config: ``"portable"`` for copies, or messages between hosts, beside products of the
            library, on GPUs of any generation from 8.0 on; ``"unfused"`` for the backend's
            collective behind the product. By default as planned.

    Returns:
        ``out`` [M, ..., N], the same on all ranks.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    for name, flag in (("use_fast_accum", use_fast_accum), ("strict", strict)):
        check_flag(name, flag)
    given = ScaledProducts(
        [A], [B], [scale_a], [scale_b], bias, result_scale, out_dtype, use_fast_accum
    )
    settings = strict, None if config is None else scatter_plan.named(config)
    kind = None if is_watched() else _kind(given, settings)
    if kind is not None:
        return _run(kind, given, groups.resolved(group), settings)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    # The check comes before the op's schema, which refuses what is no tensor in its own words.
    check_scaled_sum(given)
    out: torch.Tensor = torch.ops.agmm._scaled_matmul_all_reduce.default(
        *(A, B, scale_a, scale_b, bias, result_scale),
        *(group_name, world_size, out_dtype, use_fast_accum, strict, config or ""),
    )
    return out
