"""``agmm.matmul_all_reduce_rms_norm`` and its torch op."""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.ops import invariant, kept, quantized_outs
from agmm.ops.checks import (
    check_flag,
    check_operand,
    check_reducible,
    check_residual,
    needs_gradient,
)
from agmm.ops.library import define, library
from agmm.ops.normed_all_reduce import NAME, Normed, NormedAllReduce, check_norm, norm_of
from agmm.ops.operands import autocast, is_plain, is_watched
from agmm.ops.pipeline import serve
from agmm.ops.streamed_all_reduce import STREAMED
from agmm.runtime import groups
from agmm.runtime.calls import part_of


class _Arguments(NamedTuple):
    """The arguments of the torch op."""

    A: torch.Tensor
    B: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor
    weight: torch.Tensor
    eps: float
    group_name: str
    world_size: int
    strict: bool = False
    batch_invariant: bool = False
    config: str = ""

    def check(self) -> None:
        check_reducible(self.A, self.B, self.bias)
        check_residual(self.residual, (*self.A.shape[:-1], self.B.shape[1]), self.A)
        check_norm(self.A, self.B, self.residual, self.weight, self.eps)


def _impl(call: _Arguments, keep_as: Any = None, quantize_out: str = "") -> Normed:
    group = groups.group_of_size(call.group_name, call.world_size)
    settings: dict[str, Any] = {"strict": call.strict, "batch_invariant": call.batch_invariant}
    settings |= {"streamed": call.config == STREAMED, "quantize_out": quantize_out}
    if call.batch_invariant:
        invariant.check_config(call.config)
    return serve(NormedAllReduce(call[:5], call.eps, group, **settings), keep_as)


def _fake(call: _Arguments) -> Normed:
    call.check()
    shape = *call.A.shape[:-1], call.B.shape[1]
    return call.A.new_empty(shape), call.A.new_empty(shape)


define(
    f"_{NAME}",
    _Arguments,
    "(Tensor normed, Tensor residual)",
    run=_impl,
    fake=_fake,
)


def _autograd(*given: Any) -> Normed:
    """Where a gradient is wanted, takes the parts of the op, which have one."""
    call = _Arguments(*given)
    if not needs_gradient(*call[:5]):
        with torch._C._AutoDispatchBelowAutograd():
            found: Normed = torch.ops.agmm._matmul_all_reduce_rms_norm.default(*call)
        return found
    call.check()
    with part_of(NAME):
        total: torch.Tensor = torch.ops.agmm._matmul_all_reduce.default(
            *(call.A, call.B, call.bias, call.group_name, call.world_size, call.strict),
            *(call.residual, call.config, call.batch_invariant),
        )
    normed = norm_of(total, call.weight, call.eps, row_by_row=call.batch_invariant)
    return normed, total


library.impl(f"_{NAME}", _autograd, "Autograd")


@overload
def matmul_all_reduce_rms_norm(
    A: torch.Tensor,
    B: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = ...,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    bias: torch.Tensor | None = ...,
    config: str | None = ...,
    quantize_out: None = ...,
    scale_out: None = ...,
    batch_invariant: bool | None = ...,
    strict: bool = ...,
) -> Normed: ...


@overload
def matmul_all_reduce_rms_norm(
    A: torch.Tensor,
    B: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = ...,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    bias: torch.Tensor | None = ...,
    config: str | None = ...,
    quantize_out: str,
    scale_out: torch.Tensor | None = ...,
    batch_invariant: bool | None = ...,
    strict: bool = ...,
) -> tuple[Normed, torch.Tensor]: ...


def matmul_all_reduce_rms_norm(
    A: torch.Tensor,
    B: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    bias: torch.Tensor | None = None,
    config: str | None = None,
    quantize_out: str | None = None,
    scale_out: torch.Tensor | None = None,
    batch_invariant: bool | None = None,
    strict: bool = False,
) -> tuple[Any, torch.Tensor]:
    """``norm(all_reduce(A @ B) (+ bias) + residual)`` and the sum in it, the residual of the next
    layer: the end of a sublayer of a transformer in decoding. Collective.

    On CUDA, with few rows and where agmm's kernel serves an all-reduce in packets, it is a matmul,
    by a streaming kernel where the plan of one rank has it faster than the library, and one kernel
    that sums over the ranks, adds the residual and norms. The sum is rounded there, as
    `agmm.collectives.all_reduce_rms_norm` rounds it, a bias is added to ``residual``, and the norm
    is computed in float32 and rounded once. Elsewhere it is `matmul_all_reduce` with its residual,
    which CPU ranks and kernels add before the one rounding, then `torch.nn.functional.rms_norm`.
    Every rank gets the same bits where the sum gives it the same, and in every call of one kind.
    Differentiable once, by these two parts, as `matmul_all_reduce` is.

    Args:
        A: [M, ..., K_local], as `matmul_all_reduce` takes it, of a floating-point dtype.
        B: [K_local, N].
        residual: [M, ..., N], of the dtype and device of A, with the same values on all ranks.
        weight: [N], of the dtype and device of A, with the same values on all ranks.
        eps: is added to the mean of the squares of a row of N.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        bias: [N], the same on all ranks; added once.
        config: ``"streamed"`` for all of it by one kernel on CUDA, whose sum is that of
            `matmul_all_reduce`; None for the chosen way.
        quantize_out: ``"rowwise"``, ``"block"`` (1 × 128) or ``"tensorwise"``: return the norm in
            float8_e4m3fn with the scales that the next op's A wants, as `all_gather_matmul` returns
            its result. Without a gradient.
        scale_out: one float32 number, the scale of a tensor-wise norm.
        batch_invariant: the bits of a row, in both results, do not depend on how many other rows
            there are; None for what ``AGMM_BATCH_INVARIANT`` says.
        strict: as for `matmul_all_reduce`.

    Returns:
        The norm [M, ..., N] and the new residual, the same on all ranks, in the dtype of A. With
        ``quantize_out`` the norm is a tuple of its values and scales.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    given = A, B, bias, residual, weight
    quantised = None
    if quantize_out is not None or scale_out is not None:
        quantised = quantized_outs.checked(
            *(quantize_out, scale_out),
            dtype=("A", getattr(A, "dtype", None)),
            others={},
            operands={"A": A, "B": B, "bias": bias, "residual": residual, "weight": weight},
        )
    config = config or ""
    if config not in ("", STREAMED):
        raise InvalidArgument(f"config: found {config!r}, wanted {STREAMED!r} or None")
    batch_invariant = invariant.is_asked(batch_invariant)
    settings = strict, batch_invariant, config
    normed, total = _found(given, eps, group, settings, quantize_out or "")
    if quantised is None or isinstance(normed, tuple):
        return normed, total
    return quantised(normed), total


def _found(
    given: tuple[Any, ...],
    eps: float,
    group: Any,
    settings: tuple[bool, bool, str],
    quantize_out: str,
) -> tuple[Any, torch.Tensor]:
    """The norm and the sum, by a kept call if there is one. With ``quantize_out`` the norm may be
    a tuple of fp8 values and scales already."""
    (strict, batch_invariant, config), keep_as = settings, None
    if not torch.is_autocast_enabled("cuda"):  # which casts operands
        kind = NAME, eps, batch_invariant, config, quantize_out
        keep_as = kept.kind_on_gpu(kind, strict, *given)
    if keep_as is not None:
        again: Normed | None = kept.call_kept(groups.resolved(group), keep_as, *given)
        if again is not None:
            return again
    for name, tensor in zip(_Arguments._fields, given, strict=False):
        if tensor is not None or name != "bias":
            check_operand(name, tensor)
    check_flag("strict", strict)
    residual = given[3]
    A, B, bias, added, weight = given = autocast(given, given[0].device)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    check_norm(A, B, residual, weight, eps)
    of_group = float(eps), group_name, world_size
    call = _Arguments(A, B, bias, added, weight, *of_group, strict, batch_invariant, config)
    there = [tensor for tensor in given if tensor is not None]
    if not is_watched() and all(map(is_plain, there)):
        return _impl(call, keep_as, quantize_out)
    found: Normed = torch.ops.agmm._matmul_all_reduce_rms_norm.default(*call)
    return found
