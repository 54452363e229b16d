"""All-reduce, residual and RMS norm as one call: the public function and its torch op."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from agmm.collectives.functions import Group
from agmm.collectives.paths import SYMMETRIC_MEMORY, choose
from agmm.errors import InvalidArgument, Unsupported
from agmm.ops import small_collectives
from agmm.ops.checks import check_eps, check_operand
from agmm.ops.library import library
from agmm.runtime import groups, nan_check
from agmm.runtime.calls import part_of
from agmm.runtime.collectives import is_traced

Normed = tuple[torch.Tensor, torch.Tensor]
_NAME = "all_reduce_rms_norm"


def _check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise InvalidArgument(
            f"x: found {x.dim()} dimensions of {x.dtype}, wanted at least 1, of a floating-point "
            "type"
        )
    for name, tensor, shape in (
        ("residual", residual, x.shape),
        ("weight", weight, x.shape[-1:]),
    ):
        if tensor.shape != shape:
            raise InvalidArgument(
                f"{name}: found shape {tuple(tensor.shape)}, wanted {tuple(shape)}"
            )
        if tensor.dtype != x.dtype:
            raise InvalidArgument(f"{name}: found dtype {tensor.dtype}, wanted {x.dtype} as x")
        if tensor.device != x.device:
            raise InvalidArgument(f"{name}: found device {tensor.device}, wanted {x.device} as x")
    check_eps(eps)


def _composite(
    reduced: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Normed:
    """What the kernel computes, by torch."""
    total = reduced + residual
    return torch.nn.functional.rms_norm(total, total.shape[-1:], weight, eps), total


def _start(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    eps: float,
    strict: bool,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> Normed:
    """Writes into the tensors given, or new ones. Collective."""
    groups.check_alive(group)
    found = _by_kernel(x, residual, weight, group, eps, strict, out, residual_out)
    if found is None:
        op = torch.ops.agmm._all_reduce.default
        with part_of(_NAME):
            reduced = op(x, group.group_name, group.size(), "sum", strict)
        found = _composite(reduced, residual, weight, eps)
    normed, total = found
    if residual_out is not None and total is not residual_out:
        total = residual_out.copy_(total)
    if out is not None and normed is not out:
        normed = out.copy_(normed)
    return normed, total


def _by_kernel(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    eps: float,
    strict: bool,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
) -> Normed | None:
    """None where the kernel does not serve the call, on all ranks alike."""
    if group.size() == 1 or x.numel() == 0 or not x.is_cuda:
        return None
    path = choose("all_reduce", x, group, strict=strict)
    if path.by != SYMMETRIC_MEMORY or path.method is None:
        return None
    try:
        if small_collectives.why_not_captured(x, group) is not None:
            return None
        if not small_collectives.has_norm(path.method, x, group):
            return None
    except Unsupported:  # not over these links
        return None
    if nan_check.active:
        nan_check.look_through(_NAME, "x", x, groups.of(group).rank)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    read = (x, residual, weight)
    normed = out if out is not None and _may_receive(out, read) else torch.empty_like(x)
    is_given = residual_out is not None and _may_receive(residual_out, (*read, normed))
    total = residual_out if residual_out is not None and is_given else torch.empty_like(x)
    try:
        norm = small_collectives.prepare_norm(path.method, x, group)
        norm(x, residual, weight, normed, total, eps)
    except Unsupported:  # nothing was begun, on no rank; the all-reduce says why
        return None
    return normed, total


def _may_receive(target: torch.Tensor, others: tuple[torch.Tensor, ...], same: int = 2) -> bool:
    """Whether a result can be written to while ``others`` are still read, and written: it is one of
    the first ``same`` of them, or lies apart from it."""
    if not target.is_contiguous():
        return False
    begin = target.data_ptr()
    for i, other in enumerate(others):
        at = other.data_ptr()
        is_apart = at + other.nbytes <= begin or begin + target.nbytes <= at
        if not is_apart and not (i < same and at == begin):
            return False
    return True


@torch.no_grad()
def _impl(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    group_name: str,
    world_size: int,
    eps: float,
    strict: bool = False,
) -> Normed:
    _check(x, residual, weight, eps)
    group = groups.group_of_size(group_name, world_size)
    return _start(x, residual, weight, group, eps, strict)


def _fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    group_name: str,
    world_size: int,
    eps: float,
    strict: bool = False,
) -> Normed:
    _check(x, residual, weight, eps)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _autograd(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    group_name: str,
    world_size: int,
    eps: float,
    strict: bool = False,
) -> Normed:
    """Where a gradient is wanted, takes the parts of the op, which have one."""
    needs_grad = x.requires_grad or residual.requires_grad or weight.requires_grad
    if torch.is_grad_enabled() and needs_grad:
        _check(x, residual, weight, eps)
        op = torch.ops.agmm._all_reduce.default
        with part_of(_NAME):
            reduced = op(x, group_name, world_size, "sum", strict)
        return _composite(reduced, residual, weight, eps)
    with torch._C._AutoDispatchBelowAutograd():
        found = torch.ops.agmm._all_reduce_rms_norm.default(
            x, residual, weight, group_name, world_size, eps, strict
        )
    return cast(Normed, found)


for _key in ("CPU", "CUDA"):
    library.impl("_all_reduce_rms_norm", _impl, _key)
library.impl("_all_reduce_rms_norm", _fake, "Meta")
library.impl("_all_reduce_rms_norm", _autograd, "Autograd")


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    strict: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm(all_reduce(x) + residual)`` and the sum in it, the residual of the next layer.
    Collective.

    Where agmm's kernel serves an all-reduce in packets, one kernel does all of it; else
    `all_reduce`, an addition and `torch.nn.functional.rms_norm` do. The new residual has the same
    bits either way: the sum over the ranks is rounded as `all_reduce` rounds it, ``residual`` is
    added and that is rounded. The norm is that of the rounded residual: by the kernel in float32,
    rounded once, and with the same bits on every rank; by torch as it rounds. Differentiable, by
    the parts.

    Args:
        x: [..., n], this rank's part of the sum.
        residual: of the shape, dtype and device of ``x``, with the same values on all ranks.
        weight: [n], of the dtype and device of ``x``, with the same values on all ranks.
        eps: is added to the mean of the squares of a row of n.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        out: of the shape, dtype and device of ``x``, to write the norm to; it may be ``x`` or
            ``residual``. Has no gradient.
        residual_out: the same for the new residual; not ``out``.
        strict: as for `all_gather`, of the all-reduce.

    Returns:
        The norm and the new residual: ``out`` and ``residual_out`` or new contiguous tensors.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        check_operand(name, tensor)
    if strict is not True and strict is not False:
        raise InvalidArgument(f"strict: found {strict!r}, wanted True or False")
    _check(x, residual, weight, eps)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    given: dict[str, Any] = {"out": out, "residual_out": residual_out}
    for name, tensor in given.items():
        if tensor is None:
            continue
        check_operand(name, tensor)
        wanted = tuple(x.shape), x.dtype, x.device
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != wanted:
            raise InvalidArgument(
                f"{name}: found {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, wanted "
                f"{wanted[0]} {wanted[1]} on {wanted[2]} as x"
            )
    if out is None and residual_out is None:
        op = torch.ops.agmm._all_reduce_rms_norm.default
        return cast(Normed, op(x, residual, weight, group_name, world_size, float(eps), strict))
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad
        for tensor in (x, residual, weight, out, residual_out)
    ):
        raise InvalidArgument(
            "x: found requires_grad=True with out or residual_out, wanted a call under "
            "torch.no_grad(), or neither"
        )
    if is_traced(x):
        op = torch.ops.agmm._all_reduce_rms_norm.default
        normed, total = op(x, residual, weight, group_name, world_size, float(eps), strict)
        total = total if residual_out is None else residual_out.copy_(total)
        return (normed if out is None else out.copy_(normed)), total
    with torch.no_grad():
        return _start(
            x, residual, weight, groups.group_of(group_name), eps, strict, out, residual_out
        )
