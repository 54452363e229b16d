"""``agmm.matmul_all_reduce`` and its torch op."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.ops import invariant, kept, scatter_plan
from agmm.ops.autograd import MatmulAllReduce
from agmm.ops.checks import (
    check_flag,
    check_operand,
    check_reducible,
    check_residual,
    needs_gradient,
)
from agmm.ops.invariant_all_reduce import InvariantAllReduce
from agmm.ops.library import library
from agmm.ops.operands import autocast, is_plain, is_watched
from agmm.ops.pipeline import serve
from agmm.ops.plain_all_reduce import PlainAllReduce
from agmm.ops.streamed_all_reduce import STREAMED, StreamedAllReduce
from agmm.runtime import groups


def _impl(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    world_size: int,
    strict: bool = False,
    residual: torch.Tensor | None = None,
    config: str = "",
    batch_invariant: bool = False,
    keep_as: Any = None,
) -> torch.Tensor:
    group = groups.group_of_size(group_name, world_size)
    plan = scatter_plan.named(config, (STREAMED,))
    if batch_invariant:
        invariant.check_config(config)
        return serve(InvariantAllReduce(A, B, bias, group, strict, residual), keep_as)
    if config == STREAMED:
        return serve(StreamedAllReduce(A, B, bias, group, strict, residual), keep_as)
    return serve(PlainAllReduce(A, B, bias, group, strict, residual, plan), keep_as)


def _fake(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    world_size: int,
    strict: bool = False,
    residual: torch.Tensor | None = None,
    config: str = "",
    batch_invariant: bool = False,
) -> torch.Tensor:
    check_reducible(A, B, bias)
    shape = *A.shape[:-1], B.shape[1]
    check_residual(residual, shape, A)
    return A.new_empty(shape)


_RESIDUAL = 3
"""The place of the residual behind the bias."""


def _autograd(
    A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> torch.Tensor:
    residual = settings[_RESIDUAL] if len(settings) > _RESIDUAL else None
    given = A, B, bias, residual
    out: torch.Tensor
    if needs_gradient(*given):
        out = MatmulAllReduce.apply(*given, *settings[:_RESIDUAL], *settings[_RESIDUAL + 1 :])
    else:
        with torch._C._AutoDispatchBelowAutograd():
            out = torch.ops.agmm._matmul_all_reduce.default(A, B, bias, *settings)
    return out


for _key in ("CPU", "CUDA"):
    library.impl("_matmul_all_reduce", _impl, _key)
library.impl("_matmul_all_reduce", _fake, "Meta")
library.impl("_matmul_all_reduce", _autograd, "Autograd")


def matmul_all_reduce(
    A: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    config: str | None = None,
    batch_invariant: bool | None = None,
    strict: bool = False,
) -> torch.Tensor:
    """``all_reduce(A @ B) (+ bias) (+ residual)``: the end of a tensor-parallel layer without
    sequence parallelism, as in serving. Collective.

    On the CPU agmm sends each rank its part of the rows as soon as it is computed, and finished
    rows to all, while others are computed: every rank gets the same bits, in every call. Sums are
    made in float32 (float64 for float64), in the order of the ranks, and rounded once; what goes to
    another rank on the way is rounded too. On Hopper, for bf16 and fp16 with N and K_local
    multiples of 8, it is the scatter of `matmul_reduce_scatter` in one kernel and an all-gather of
    the result, with the same promise but for the order of a sum, which is each row's own and always
    the same; or one kernel as on the CPU. Each is taken where the cost model has it faster, as with
    some thousand rows, one kernel between 4 GPUs where K_local is some 3000 to 5000; else a matmul
    and an all-reduce. That is agmm's where it is meant to serve it
    (`agmm.collectives.all_reduce`), with the same bits on all ranks, else the backend's.

    Differentiable once. The gradient of ``out`` is taken to be the same on all ranks, as it is
    where all of them compute the same from ``out``, so the backward communicates nothing: ``dA =
    dout @ Bᵀ`` and ``dB = Aᵀ @ dout``. It is that of Megatron's and torch's row-parallel layers
    without sequence parallelism. Ranks that use ``out`` for something of their own have to sum its
    gradient over the ranks themselves. Under autocast the operands are cast as
    ``torch.nn.functional.linear`` casts them.

    Args:
        A: [M, ..., K_local], this rank's columns of the whole A; the same leading sizes, of any
            number of rows, on all ranks.
        B: [K_local, N], this rank's rows of the whole B, row-major or column-major. On the CPU
            K_local is free on each rank, on CUDA the same on all.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        bias: [N], the same on all ranks; added once, to the sum, before it is rounded; on the
            unfused path in its dtype, with a rounding of its own. Its gradient is the same on all
            ranks.
        residual: [M, ..., N], of the dtype of A, the same on all ranks; added once, to the sum, as
            the bias is. Its gradient is that of ``out``.
        config: ``"portable"`` for copies beside products of the library, on GPUs that reach each
            other's memory; ``"streamed"`` for one kernel of few rows on Hopper, which reads the
            weight at the rate of memory and sends its sums to all ranks; ``"unfused"``; or None for
            the chosen plan.
        batch_invariant: the bits of a row do not depend on how many other rows there are, with a
            plan of its own, so without ``config``; None for what ``AGMM_BATCH_INVARIANT`` says.
        strict: raise `Unsupported` instead of taking the unfused path (``matmul`` +
            ``all_reduce``), of which agmm warns once for each reason why it cannot do otherwise.

    Returns:
        ``out`` [M, ..., N], the same on all ranks.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    if config is not None:
        scatter_plan.named(config, (STREAMED,))  # which refuses other names
    config = config or ""
    batch_invariant = invariant.is_asked(batch_invariant)
    keep_as = None
    of_kind = "matmul_all_reduce", config, batch_invariant
    if not torch.is_autocast_enabled("cuda"):  # which casts operands
        if residual is None:
            keep_as = kept.kind_on_gpu(of_kind, strict, A, B, bias)
        else:
            keep_as = kept.kind_on_gpu(of_kind, strict, A, B, bias, residual)
    if keep_as is not None:
        known = groups.resolved(group)
        again: torch.Tensor | None
        if residual is None:
            again = kept.call_kept(known, keep_as, A, B, bias)
        else:
            again = kept.call_kept(known, keep_as, A, B, bias, residual)
        if again is not None:
            return again
    maybes = [(n, t) for n, t in (("bias", bias), ("residual", residual)) if t is not None]
    for name, tensor in (("A", A), ("B", B), *maybes):
        check_operand(name, tensor)
    check_flag("strict", strict)
    bias, residual, A, B = autocast((bias, residual, A, B), A.device)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    there = [tensor for tensor in (A, B, bias, residual) if tensor is not None]
    settings = group_name, world_size, strict, residual, config, batch_invariant
    if not is_watched() and all(map(is_plain, there)):
        return _impl(A, B, bias, *settings, keep_as)
    op = torch.ops.agmm._matmul_all_reduce.default
    found: torch.Tensor = op(A, B, bias, *settings)
    return found
