"""``agmm.matmul_reduce_scatter`` and its torch op."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.ops import invariant, kept, scatter_plan
from agmm.ops.autograd import MatmulReduceScatter
from agmm.ops.checks import (
    check_flag,
    check_listed,
    check_operand,
    check_residual,
    check_scatterable,
    needs_gradient,
)
from agmm.ops.invariant_scatter import InvariantScatter
from agmm.ops.library import library
from agmm.ops.operands import PLAIN_TYPES, autocast, is_watched
from agmm.ops.pipeline import serve
from agmm.ops.plain_scatter import kind_of_one, kind_of_scatter, scatter
from agmm.ops.scatter import ScatterSettings
from agmm.planning.plans import Plan
from agmm.runtime import groups


def _fake(
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    bias: torch.Tensor | None,
    group_name: str,
    world_size: int,
    scatter_dim: int,
    reduce_op: str,
    strict: bool = False,
    residual: torch.Tensor | None = None,
    config: str = "",
    batch_invariant: bool = False,
) -> torch.Tensor:
    check_scatterable(As, Bs, bias, world_size, scatter_dim, reduce_op)
    shape = [*As[0].shape[:-1], Bs[0].shape[1]]
    shape[scatter_dim] = shape[scatter_dim] // world_size
    check_residual(residual, shape, As[0])
    return As[0].new_empty(shape)


def _autograd(
    As: list[torch.Tensor], Bs: list[torch.Tensor], bias: torch.Tensor | None, *settings: Any
) -> Any:
    residual = settings[_RESIDUAL] if len(settings) > _RESIDUAL else None
    given = bias, residual, *As, *Bs
    if needs_gradient(*given):
        others = *settings[:_RESIDUAL], *settings[_RESIDUAL + 1 :]
        return MatmulReduceScatter.apply(len(As), others, *given)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.agmm._matmul_reduce_scatter.default(As, Bs, bias, *settings)


_RESIDUAL = 5
"""The place of the residual behind the bias."""


def _impl(
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    bias: torch.Tensor | None,
    group_name: str,
    world_size: int,
    scatter_dim: int,
    reduce_op: str,
    strict: bool = False,
    residual: torch.Tensor | None = None,
    config: str = "",
    batch_invariant: bool = False,
) -> torch.Tensor:
    group = groups.group_of_size(group_name, world_size)
    settings = ScatterSettings(
        scatter_dim, reduce_op, strict, scatter_plan.named_of_scatter(config)
    )
    if batch_invariant:
        invariant.check_config(config)
        return serve(InvariantScatter(As, Bs, bias, group, settings, residual=residual))
    return scatter(As, Bs, bias, group, settings, residual=residual)


def _kept(
    A: Any,
    B: Any,
    bias: Any,
    residual: Any,
    group: Any,
    scatter_dim: Any,
    reduce_op: Any,
    strict: bool,
    plan: Plan | None = None,
) -> torch.Tensor | None:
    """What an eager call without gradients computes by a kept call, for which the dispatcher has
    nothing to do; None where there is none. On the way of every call: a look into
    one dictionary, and no check that the look makes needless."""
    if is_watched() or torch._C._is_any_autocast_enabled():
        return None
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    found: torch.Tensor | None
    if bias is None and residual is None and type(A) in PLAIN_TYPES:
        kind = kind_of_one(A, B, scatter_dim, reduce_op, strict, plan)
        found = kept.call_kept(group, kind, (A,), (B,), None)
        return found
    As = A if type(A) is list or type(A) is tuple else (A,)
    Bs = B if type(B) is list or type(B) is tuple else (B,)
    if (As is A) is not (Bs is B):  # refused
        return None
    kind = kind_of_scatter(As, Bs, bias, residual, scatter_dim, reduce_op, strict, plan)
    if residual is None:
        found = kept.call_kept(group, kind, As, Bs, bias)
    else:
        found = kept.call_kept(group, kind, As, Bs, bias, residual)
    return found


def _native(A: torch.Tensor, B: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    is_invariant = invariant.is_asked(None)
    if not is_invariant:
        known = _kept(A, B, None, None, groups.group_of(group_name), 0, reduce_op, False)
        if known is not None:
            return known
    check_operand("A", A)
    check_operand("B", B)
    world_size = groups.world_size_of(group_name)
    op = torch.ops.agmm._matmul_reduce_scatter.default
    settings = group_name, world_size, 0, reduce_op, False, None, "", is_invariant
    out: torch.Tensor = op([A], [B], None, *settings)
    return out


for _key in ("CPU", "CUDA"):
    library.impl("_matmul_reduce_scatter", _impl, _key)
library.impl("_matmul_reduce_scatter", _fake, "Meta")
library.impl("_matmul_reduce_scatter", _autograd, "Autograd")
# It is a composite, so that what is traced is the op above, with the world size.
library.impl("_fused_matmul_reduce_scatter_native", _native, "CompositeImplicitAutograd")


_Operand = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]


def matmul_reduce_scatter(
    A: _Operand,
    B: _Operand,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    config: str | None = None,
    batch_invariant: bool | None = None,
    strict: bool = False,
) -> torch.Tensor:
    """``reduce_scatter(A @ B) (+ bias) (+ residual)``: the second half of a tensor-parallel layer.
    Collective.

    The sum over the ranks of ``A @ B``, of which each rank gets its part. Differentiable once; the
    backward is an all-gather and a matmul (`all_gather_matmul`). Under autocast the operands are
    cast as ``torch.nn.functional.linear`` casts them.

    agmm sends each rank its part as soon as it is computed, for any ``scatter_dim`` but the last:
    on the CPU for floating-point types, on Hopper for bf16 and fp16 with N and K_local multiples of
    8, in one kernel. Sums are made in float32 (float64 for float64) and always in the same order,
    on the CPU that of the ranks, so the same call has the same bits every time. Other calls on CUDA
    are torch's ``symm_mem.fused_matmul_reduce_scatter`` where that is legal and the cost model says
    that it is faster by what it costs the host, else a matmul and a reduce-scatter.

    Args:
        A: [M, ..., K_local], this rank's columns of the whole A; the same shape on all ranks (on
            the CPU K_local may differ). Or a list, for the sum of several products, each with a
            K_local of its own.
        B: [K_local, N], this rank's rows of the whole B, row-major or column-major; for a list of
            A a list of as many, of one N.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        scatter_dim: dimension of ``A @ B`` along which the sum is cut; its size is a multiple of
            the world size.
        reduce_op: "sum", or "avg" for the sum divided by the world size, on a GPU multiplied by its
            reciprocal.
        bias: [N], the same on all ranks. Added to the (divided) sum before it is rounded; where
            agmm's own does not serve, in its dtype, with a rounding of its own (0.21% off, not
            0.17%, in bf16, in the Frobenius norm, with a bias as large as the sum). Its gradient is
            that of the rows of all ranks, and so the same on all ranks. Not with the last
            dimension scattered.
        residual: this rank's shard of a residual, of the shape and dtype of ``out``. Added as the
            bias is: by agmm in float32 (float64 for float64) before the sum is rounded, else by
            torch to the rounded sum. Its gradient is that of ``out``.
        config: ``"portable"`` for copies beside products of the library, on GPUs that reach each
            other's memory; ``"streamed"`` for one kernel of few rows on Hopper, which reads the
            weight at the rate of memory and sends each rank its rows of the sums; ``"unfused"``; or
            None for the chosen plan.
        batch_invariant: the bits of a row do not depend on how many other rows there are, with a
            plan of its own, so without ``config``; None for what ``AGMM_BATCH_INVARIANT`` says.
        strict: raise `Unsupported` instead of taking the unfused path (``matmul`` +
            ``reduce_scatter_tensor``), of which the CPU warns once for each reason.

    Returns:
        ``out`` [M / world_size, ..., N] for ``scatter_dim`` 0.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    plan = None if config is None else scatter_plan.named_of_scatter(config)
    batch_invariant = invariant.is_asked(batch_invariant)
    if not batch_invariant and (strict is False or strict is True):
        known = _kept(A, B, bias, residual, group, scatter_dim, reduce_op, strict, plan)
        if known is not None:
            return known
    As = list(A) if isinstance(A, (list, tuple)) else [A]
    Bs = list(B) if isinstance(B, (list, tuple)) else [B]
    if isinstance(A, (list, tuple)) != isinstance(B, (list, tuple)):
        found, wanted = type(B).__name__, type(A).__name__
        raise InvalidArgument(f"B: found a {found}, wanted a {wanted} as A, both lists or neither")
    for name, tensors in (("A", As), ("B", Bs), ("bias", [bias]), ("residual", [residual])):
        for tensor in tensors:
            if tensor is not None or name in ("A", "B"):
                check_operand(name, tensor)
    check_listed("A", As)
    if not isinstance(scatter_dim, int):
        raise InvalidArgument(f"scatter_dim: found {scatter_dim!r}, wanted an int")
    if not isinstance(reduce_op, str):
        raise InvalidArgument(f"reduce_op: found {reduce_op!r}, wanted 'sum' or 'avg'")
    check_flag("strict", strict)
    bias, residual, *operands = autocast((bias, residual, *As, *Bs), As[0].device)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    op = torch.ops.agmm._matmul_reduce_scatter.default
    out: torch.Tensor = op(
        operands[: len(As)],
        operands[len(As) :],
        bias,
        group_name,
        world_size,
        scatter_dim,
        reduce_op,
        strict,
        residual,
        config or "",
        batch_invariant,
    )
    return out
