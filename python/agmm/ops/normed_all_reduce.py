"""Matmul + all-reduce, then a residual and its RMS norm: one flow for the public op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument, Unsupported
from agmm.ops import invariant, small_collectives
from agmm.ops.checks import FLOATS, check_dtype, check_eps, check_operand, check_same
from agmm.ops.invariant_all_reduce import InvariantAllReduce, streamed
from agmm.ops.pipeline import KERNEL, LIBRARY, OpCall, Ready, Route
from agmm.ops.plain_all_reduce import PlainAllReduce
from agmm.ops.streamed_all_reduce import StreamedAllReduce, StreamedOnCuda
from agmm.planning import call_plans
from agmm.planning.cost_model.collectives import Method, collective_method
from agmm.planning.problems import KernelConfig
from agmm.runtime import groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.results import reshaped

NAME = "matmul_all_reduce_rms_norm"
Normed = tuple[torch.Tensor, torch.Tensor]
"""The norm, and the sum with the residual."""
IN_KERNEL = ("rowwise", "block")
"""The scales that the kernel which norms can make: others are given."""


def check_norm(
    A: torch.Tensor, B: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float
) -> None:
    """Refuses what no sum of products can be normed with, beside what the sum refuses."""
    check_operand("residual", residual)
    check_operand("weight", weight)
    check_dtype("A", A, FLOATS)
    check_same("weight", weight, "A", A)
    if weight.shape != B.shape[1:]:
        raise InvalidArgument(
            f"weight: found shape {tuple(weight.shape)}, wanted {tuple(B.shape[1:])} as B's columns"
        )
    check_eps(eps)


def norm_of(
    total: torch.Tensor, weight: torch.Tensor, eps: float, *, row_by_row: bool = False
) -> torch.Tensor:
    """The RMS norm of each row by torch.

    Args:
        row_by_row: norm each row in a call of its own. How torch adds up the squares of one row may
            depend on how many rows it is given.
    """
    rms_norm, row = torch.nn.functional.rms_norm, total.shape[-1:]
    if not row_by_row or total.numel() == 0:
        return rms_norm(total, row, weight, eps)
    rows = total.flatten(0, -2)
    normed = [rms_norm(rows[i], row, weight, eps) for i in range(len(rows))]
    return reshaped(torch.stack(normed), total.shape)


class _Sum(PlainAllReduce):
    """The sum with its residual, under the name of the op that norms it."""

    op = NAME
    learns = False  # what it shares with sums that are not normed


class _StreamedSum(StreamedAllReduce):
    """The sum with its residual, by one kernel that streams the weight, and norms on CUDA."""

    op = NAME
    is_normed = True


class _InvariantSum(InvariantAllReduce):
    """The sum with its residual, of which no row depends on how many others there are."""

    op = NAME


class _Packets(NamedTuple):
    """The plan of a sum that goes by packets to a kernel that adds the residual and norms."""

    method: Method
    kernel: KernelConfig | None
    """The streaming kernel that multiplies; None for the library."""


class NormedAllReduce(OpCall[Normed]):
    """``norm(all_reduce(A @ B) (+ bias) + residual)`` and what is normed.

    On CUDA few rows are multiplied on each rank, by a streaming kernel where the plan of one rank
    has it faster than the library, and summed, added and normed by one kernel. Everything else is
    `matmul_all_reduce` with its residual, then torch's norm.

    Args:
        operands: A [M, ..., K], B [K, N], a bias [N] or None, the residual [M, ..., N] and the
            norm's weight [N].
        eps: is added to the mean of a row's squares.
        batch_invariant: the bits of a row do not depend on how many rows there are.
        streamed: the sum is that of `StreamedAllReduce`.
        quantize_out: one of `IN_KERNEL` has a kernel that norms return fp8 values and scales in
            place of the norm; everything else returns the norm.
    """

    learns = False

    def __init__(
        self,
        operands: tuple[Any, ...],
        eps: float,
        group: dist.ProcessGroup,
        *,
        strict: bool,
        batch_invariant: bool = False,
        streamed: bool = False,
        quantize_out: str = "",
    ) -> None:
        A, B, bias, self.residual, self.weight = operands
        kind: type[PlainAllReduce] = _StreamedSum if streamed else _Sum
        if batch_invariant:
            kind = _InvariantSum
        self.sum = kind(A, B, bias, group, strict, self.residual)
        self.eps, self.is_invariant = eps, batch_invariant
        self.quantize_out = quantize_out if quantize_out in IN_KERNEL else ""
        self.group, self.device, self.strict = group, self.sum.device, strict

    def check(self) -> None:
        self.sum.check()
        check_norm(self.sum.A, self.sum.B, self.residual, self.weight, self.eps)

    def words(self) -> Call:
        return self.sum.words()

    def is_empty(self) -> bool:
        return self.sum.is_empty()

    def without_elements(self, words: Call) -> Normed:
        total = self.sum.without_elements(words)
        return torch.empty_like(total), total

    def operands(self) -> tuple[Any, ...]:
        return self.sum.A, self.sum.B, self.sum.bias, self.residual, self.weight

    def route(self) -> Route:
        found = self.sum.route()
        packets = self._packets(found)
        if packets is None:
            return found
        return Route(LIBRARY if packets.kernel is None else KERNEL, plan=packets)

    def _packets(self, of_sum: Route) -> _Packets | None:
        """How the sum goes by packets, or None where it does not, on all ranks alike."""
        if self.device.type != "cuda" or isinstance(self.sum, _StreamedSum):
            return None
        product = self.sum.A.new_empty(1, 1).expand(self.sum.rows, self.sum.columns)
        method = _method(product, self.group, self.is_invariant)
        if method is None:
            return None
        if self.is_invariant:
            if of_sum.by != KERNEL:
                return None
            return _Packets(method, invariant.kernel_of(self.sum._matrix(), self.sum.B))
        kernel = None if of_sum.reason is not None else self._streaming()
        if kernel is None and (self.strict or of_sum.by != LIBRARY):
            return None
        return _Packets(method, kernel)

    def _streaming(self) -> KernelConfig | None:
        """The streaming kernel that the plan of one rank has faster than the library, or None. No
        other rank need choose alike."""
        A, B = self.sum._matrix(), self.sum.B
        if invariant.why_not_streamed(A, B) is not None:
            return None
        shape = A.shape[0], B.shape[1], B.shape[0]
        problem = call_plans.problem_of(shape, A.dtype, A.device, column_major=B.stride(0) == 1)
        planner = call_plans.planner(None, A.device)
        kernel = (planner.fused_plan if self.strict else planner.plan)(problem).kernel
        return kernel if kernel is not None and kernel.is_streaming else None

    def look(self, route: Route, words: Call) -> None:
        if not isinstance(route.plan, _Packets):
            self.sum.look(route, words)

    def prepare(self, route: Route) -> Ready:
        if isinstance(route.plan, _Packets):
            return self._by_packets(route.plan)
        ready = self.sum.prepare(route)
        is_streamed = isinstance(self.sum, _StreamedSum) and self.sum.norms_in_kernel
        if is_streamed and isinstance(ready, StreamedOnCuda):
            return _InKernel(ready, self.eps, self.quantize_out)
        return _ThenNorm(ready, self.eps, self.is_invariant)

    def finished(self, found: Any, route: Route) -> Normed:
        normed, total = found
        return normed, total

    def by_library(self, words: Call) -> Normed:
        packets = self._packets(Route(LIBRARY))
        if packets is not None and not self.is_invariant:
            with contextlib.suppress(Unsupported):  # nothing was begun, on no rank
                normed, total = self._by_packets(packets)(*self.operands())
                return normed, total
        total = self.sum.by_library(words)
        return norm_of(total, self.weight, self.eps, row_by_row=self.is_invariant), total

    def to_keep(self, ready: Ready, found: Any) -> Ready | None:
        if isinstance(ready, _ByPackets | _InKernel):
            return ready if self.sum.A.is_contiguous() else None
        kept = self.sum.to_keep(ready.sum, found[1])
        return None if kept is None else ready._replace(sum=kept)

    def library_to_keep(self, found: Normed) -> Ready | None:
        packets = self._packets(Route(LIBRARY))
        if packets is not None and self.sum.A.is_contiguous():
            ready = self._by_packets(packets)
            return ready if ready.norm.is_ready else None
        kept = self.sum.library_to_keep(found[1])
        return None if kept is None else _ThenNorm(kept, self.eps, self.is_invariant)

    def _by_packets(self, packets: _Packets) -> _ByPackets:
        """The call by packets, for which the group may have no memory: raises `Unsupported`."""
        product: Callable[..., torch.Tensor] = torch.matmul
        if packets.kernel is not None:
            product = streamed(self.sum.A, self.sum.B, packets.kernel).partial
        row = self.sum.A.new_empty(1, 1).expand(self.sum.rows, self.sum.columns)
        norm = small_collectives.prepare_norm(packets.method, row, self.group)
        return _ByPackets(product, norm, self.eps, groups.of(self.group).rank, self.words().op)


def _method(x: torch.Tensor, group: dist.ProcessGroup, is_any_size: bool) -> Method | None:
    """The method by which the kernel with residual and norm sums tensors like ``x``; None where it
    does not, on all ranks alike.

    Args:
        is_any_size: the kernel is taken for sums of any size, which have one order of additions.
    """
    if group.size() == 1:
        return None
    if small_collectives.why_not("all_reduce", x, group, strict=is_any_size) is not None:
        return None
    method = collective_method("all_reduce", x.nbytes, group.size())
    if is_any_size and method == "blocks":
        method = "two_shot"
    try:
        return method if small_collectives.has_norm(method, x, group) else None
    except Unsupported:  # over the group's links
        return None


class _ThenNorm(NamedTuple):
    """A sum of products with its residual, then torch's norm."""

    sum: Ready
    eps: float
    row_by_row: bool

    def __call__(self, A: Any, B: Any, bias: Any, residual: Any, weight: torch.Tensor) -> Normed:
        total = self.sum(A, B, bias, residual)
        return norm_of(total, weight, self.eps, row_by_row=self.row_by_row), total


class _InKernel(NamedTuple):
    """The product, its sum with the residual and the norm, in fp8 if asked for, by one kernel."""

    sum: StreamedOnCuda
    eps: float
    quantize_out: str

    def __call__(self, *operands: Any) -> tuple[Any, torch.Tensor]:
        return self.sum.normed(operands, self.eps, self.quantize_out)


class _ByPackets(NamedTuple):
    """A product, then one kernel that sums it over the ranks, adds the residual and norms. A bias
    is added to the residual."""

    product: Callable[..., torch.Tensor]
    norm: small_collectives.NormCall
    eps: float
    rank: int
    op: str

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
    ) -> Normed:
        partial = self.product(A, B).contiguous()
        if nan_check.active:
            nan_check.look_through(self.op, "A @ B", partial, self.rank)
        added = residual if bias is None else residual + bias
        total = torch.empty_like(partial)
        # The norm takes the place of the product, which nobody else has.
        given = partial, added.contiguous(), weight.contiguous()
        self.norm(*given, partial, total, self.eps)
        return partial, total
