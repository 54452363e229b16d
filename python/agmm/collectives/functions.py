"""``agmm.collectives``: the public functions."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.collectives.checks import check_dim, check_op, check_out, check_settings
from agmm.collectives.run import Settings, start
from agmm.collectives.torch_ops import OPS, arguments_of
from agmm.collectives.work import Work
from agmm.errors import InvalidArgument
from agmm.ops import kept
from agmm.ops.checks import check_operand
from agmm.ops.operands import is_plain, is_watched
from agmm.planning.cost_model.collectives import Kind
from agmm.runtime import groups
from agmm.runtime.collectives import is_traced

Group = dist.ProcessGroup | DeviceMesh | str | None


def _called(kind: Kind, x: Any, group: Group, out: Any, settings: Settings) -> torch.Tensor | Work:
    """A call of a public function."""
    op, dim, async_op, strict, low_contention = settings
    keep_as = None
    if async_op is False and low_contention is False and type(dim) is int and dim == 0:
        keep_as = kept.kind_on_gpu((kind, op), strict, x, out)
    if keep_as is not None:
        again: torch.Tensor | None = kept.call_kept(groups.resolved(group), keep_as, x, out)
        if again is not None:
            return again
    check_operand("x", x)
    if out is not None:
        check_operand("out", out)
    check_settings(async_op=async_op, strict=strict, low_contention=low_contention)
    check_dim(x, dim)
    check_op(op, x)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    if torch.is_grad_enabled() and out is not None and out.requires_grad:
        raise InvalidArgument(
            "out: found one with requires_grad=True, wanted a call under torch.no_grad(), or none"
        )
    traced = is_traced(x)
    in_sight = traced or not (async_op or out is not None)
    if in_sight and (is_watched() or not is_plain(x)):
        found: torch.Tensor = OPS[kind](x, group_name, world_size, *arguments_of(kind, settings))
        if out is not None:
            check_out(out, x, list(found.shape))
            found = out.copy_(found)
        return Work(lambda: found, lambda: True) if async_op else found
    if not in_sight and torch.is_grad_enabled() and x.requires_grad:
        raise InvalidArgument(
            "x: found requires_grad=True with async_op or out, wanted a call under "
            "torch.no_grad(), or neither"
        )
    return start(kind, x, groups.group_of(group_name), out, settings, keep_as)


@overload
def all_gather(
    x: torch.Tensor,
    group: Group = ...,
    *,
    dim: int = ...,
    out: torch.Tensor | None = ...,
    async_op: Literal[False] = ...,
    strict: bool = ...,
    low_contention: bool = ...,
) -> torch.Tensor: ...
@overload
def all_gather(
    x: torch.Tensor,
    group: Group = ...,
    *,
    dim: int = ...,
    out: torch.Tensor | None = ...,
    async_op: Literal[True],
    strict: bool = ...,
    low_contention: bool = ...,
) -> Work: ...
@overload
def all_gather(
    x: torch.Tensor,
    group: Group = ...,
    *,
    dim: int = ...,
    out: torch.Tensor | None = ...,
    async_op: bool,
    strict: bool = ...,
    low_contention: bool = ...,
) -> torch.Tensor | Work: ...
def all_gather(
    x: torch.Tensor,
    group: Group = None,
    *,
    dim: int = 0,
    out: torch.Tensor | None = None,
    async_op: bool = False,
    strict: bool = False,
    low_contention: bool = False,
) -> torch.Tensor | Work:
    """The tensors of all ranks, one after the other along ``dim``. Collective.

    Every rank of the group calls with the same shape, dtype and settings, in the same order, as
    with any collective. agmm moves any dtype, on the CPU through shared memory, on Hopper by a
    kernel through symmetric memory; on CUDA the backend's collective (NCCL) gathers more than 16
    MiB in all. Differentiable; the backward is `reduce_scatter` of the sum.

    Args:
        x: [..., n, ...], of any shape, layout and number of elements; with no dimension it counts
            as [1].
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        dim: dimension along which the tensors are put one after the other.
        out: [..., world_size * n, ...], of the dtype and device of ``x``, to write to. ``x`` may be
            this rank's part of it, where nothing is copied then. Has no gradient.
        async_op: return a `Work` once the call has its place among those of the group, and carry
            it out beside what follows. Has no gradient. What is traced is carried out at once.
        strict: raise `Unsupported` instead of leaving the call to the backend's collective, of
            which agmm warns once for each reason but the size; of any size then it is agmm's.
        low_contention: on GPUs by copy engines, of any size and on GPUs of any generation that
            reach each other: a matmul beside it keeps its multiprocessors, but for a barrier's. On
            the CPU of no meaning.

    Returns:
        ``out`` or a new contiguous tensor [..., world_size * n, ...]; with ``async_op`` a `Work`,
        whose ``wait()`` returns it.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    settings = Settings("sum", dim, async_op, strict, low_contention)
    return _called("all_gather", x, group, out, settings)


@overload
def reduce_scatter(
    x: torch.Tensor,
    group: Group = ...,
    *,
    op: str = ...,
    dim: int = ...,
    out: torch.Tensor | None = ...,
    async_op: Literal[False] = ...,
    strict: bool = ...,
    low_contention: bool = ...,
) -> torch.Tensor: ...
@overload
def reduce_scatter(
    x: torch.Tensor,
    group: Group = ...,
    *,
    op: str = ...,
    dim: int = ...,
    out: torch.Tensor | None = ...,
    async_op: Literal[True],
    strict: bool = ...,
    low_contention: bool = ...,
) -> Work: ...
@overload
def reduce_scatter(
    x: torch.Tensor,
    group: Group = ...,
    *,
    op: str = ...,
    dim: int = ...,
    out: torch.Tensor | None = ...,
    async_op: bool,
    strict: bool = ...,
    low_contention: bool = ...,
) -> torch.Tensor | Work: ...
def reduce_scatter(
    x: torch.Tensor,
    group: Group = None,
    *,
    op: str = "sum",
    dim: int = 0,
    out: torch.Tensor | None = None,
    async_op: bool = False,
    strict: bool = False,
    low_contention: bool = False,
) -> torch.Tensor | Work:
    """This rank's part along ``dim`` of the sum over the ranks of ``x``. Collective.

    By agmm bf16, fp16 and float32, on the CPU float64 too: summed in the order of the ranks, in
    float32 (float64 for float64), and rounded once, so the same call has the same bits every time.
    Others, and on CUDA more than 16 MiB of ``x``, by the backend's collective. Differentiable; the
    backward is `all_gather`, divided by the world size for "avg".

    Args:
        x: [..., world_size * n, ...], of any shape with at least one dimension.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        op: "sum", or "avg" for the sum divided by the world size, on a GPU multiplied by its
            reciprocal.
        dim: dimension along which the sum is cut; its size is a multiple of the world size.
        out: [..., n, ...], of the dtype and device of ``x``, to write to; it may be this rank's
            part of ``x``. Has no gradient.
        async_op: as for `all_gather`.
        strict: as for `all_gather`.
        low_contention: as for `all_gather`, with one kernel that sums: in float32, rounded once,
            with the same bits in every call of the same sizes.

    Returns:
        ``out`` or a new contiguous tensor [..., n, ...]; with ``async_op`` a `Work`, whose
        ``wait()`` returns it.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    settings = Settings(op, dim, async_op, strict, low_contention)
    return _called("reduce_scatter", x, group, out, settings)


@overload
def all_reduce(
    x: torch.Tensor,
    group: Group = ...,
    *,
    op: str = ...,
    out: torch.Tensor | None = ...,
    async_op: Literal[False] = ...,
    strict: bool = ...,
) -> torch.Tensor: ...
@overload
def all_reduce(
    x: torch.Tensor,
    group: Group = ...,
    *,
    op: str = ...,
    out: torch.Tensor | None = ...,
    async_op: Literal[True],
    strict: bool = ...,
) -> Work: ...
@overload
def all_reduce(
    x: torch.Tensor,
    group: Group = ...,
    *,
    op: str = ...,
    out: torch.Tensor | None = ...,
    async_op: bool,
    strict: bool = ...,
) -> torch.Tensor | Work: ...
def all_reduce(
    x: torch.Tensor,
    group: Group = None,
    *,
    op: str = "sum",
    out: torch.Tensor | None = None,
    async_op: bool = False,
    strict: bool = False,
) -> torch.Tensor | Work:
    """The sum over the ranks of ``x``, the same bits on all of them where agmm sums. Collective.

    Sums are those of `reduce_scatter`: whatever the size, and so the way, the bits are the same.
    Differentiable as torch's functional all-reduce is: the backward is an all-reduce of the
    gradients, since ``x`` goes into the result of every rank. Where all ranks compute the same from
    the result, as behind a row-parallel layer, that is world_size times the gradient of Megatron's,
    which communicates nothing; `agmm.matmul_all_reduce` has that one.

    Args:
        x: of any shape.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        op: "sum", or "avg" for the sum divided by the world size, on a GPU multiplied by its
            reciprocal.
        out: of the shape, dtype and device of ``x``, to write to; ``x`` itself for in place. Has no
            gradient.
        async_op: as for `all_gather`.
        strict: as for `all_gather`.

    Returns:
        ``out`` or a new contiguous tensor of the shape of ``x``; with ``async_op`` a `Work`, whose
        ``wait()`` returns it.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    return _called("all_reduce", x, group, out, Settings(op, 0, async_op, strict))
