"""Matmul + all-reduce of few rows in one kernel, which streams the weight and sends its sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from agmm import _core
from agmm.errors import Unsupported
from agmm.ops import invariant, small_collectives
from agmm.ops.copying import Copying
from agmm.ops.pipeline import KERNEL, LIBRARY, Ready, Route
from agmm.ops.plain_all_reduce import PlainAllReduce
from agmm.planning import call_plans
from agmm.planning.cost_model.collectives import collective_method
from agmm.runtime import cuda_calls
from agmm.runtime.calls import Call
from agmm.runtime.cuda_collectives import SLOT_BYTES, CollectivesWorkspace
from agmm.runtime.results import reshaped
from agmm.runtime.workspaces import collectives_workspace

STREAMED = "streamed"
"""The ``config`` that asks for such calls."""


class StreamedAllReduce(PlainAllReduce):
    """``all_reduce(A @ B) (+ bias) (+ residual)`` by one streaming kernel. On the CPU, whose ranks
    send rows as they are computed anyway, it is the usual call."""

    learns = False
    is_normed = False
    """Whether the kernel norms the rows too, where they are not too long for it."""

    def words(self) -> Call:
        return Call(self.op, A=self.A, B=self.B, config=STREAMED, **self.asked)

    def route(self) -> Route:
        if self.device.type == "cuda":
            call_plans.agree(self.group, self.device)
            reason = self._why_not()
            return Route(LIBRARY if reason else KERNEL, reason)
        reason = self.why_no_kernel()
        return Route(LIBRARY, reason) if reason else Route(KERNEL, lasts=False)

    def _why_not(self) -> str | None:
        """Why no such kernel serves the call, or None; the same on all ranks."""
        if self.group.size() == 1:
            return "group: 1 rank, which has nothing to sum"
        product = self.A.new_empty(1, 1).expand(self.rows, self.columns)
        reason = invariant.why_not_streamed(self._matrix(), self.B) or small_collectives.why_not(
            "all_reduce", product, self.group, strict=True
        )
        if reason is not None:
            return reason
        if not small_collectives.goes_by_packets(product, self.group):
            return "group: found links over which no packets go, wanted NVLink between all GPUs"
        if self._method() is None:
            return (
                f"A: found {self.rows} rows, of whose sum with {self.columns} columns a slot does "
                f"not have room for the packets, wanted fewer for config={STREAMED!r}"
            )
        return None

    def _method(self) -> _core.CollectiveMethod | None:
        """The method that is predicted to be the fastest of those that have room; None for none."""
        methods = [_core.CollectiveMethod.one_shot, _core.CollectiveMethod.two_shot]
        size, world_size = (self.rows, self.columns), self.group.size()
        nbytes = self.rows * self.columns * self.A.element_size()
        if collective_method("all_reduce", nbytes, world_size) != "one_shot":
            del methods[0]
        for method in methods:
            by_rows = method == _core.CollectiveMethod.two_shot and self.norms_in_kernel
            if _core.streams_sum(method, *size, SLOT_BYTES, world_size, by_rows):
                return method
        return None

    @property
    def norms_in_kernel(self) -> bool:
        return self.is_normed and self.columns <= _core.MAX_STREAMED_NORM_COLUMNS

    def prepare(self, route: Route) -> Ready:
        if self.device.type == "cpu":
            return super().prepare(route)
        A = self._matrix().contiguous()
        copying = Copying.of([A], [self.B], 0)
        B = self.B if copying is None else copying.weight(self.B)
        kernel = invariant.kernel_of(A, B)
        if kernel is None:
            raise Unsupported("kernels: found no streaming one for it in this build, wanted one")
        of_core = cuda_calls.Kernel(kernel.core, cuda_calls.plain_format("A", A))
        matmul = cuda_calls.ready_matmul(A, B, None, 0, of_core)
        workspace = collectives_workspace(self.group, self.device)
        method = self._method()
        assert method is not None
        return StreamedOnCuda(workspace, method, matmul.problem, copying)

    def to_keep(self, ready: Ready, found: Any) -> Ready | None:
        return ready if isinstance(ready, StreamedOnCuda) and self.A.is_contiguous() else None

    def library_to_keep(self, found: torch.Tensor) -> Ready | None:
        return None


class StreamedOnCuda(NamedTuple):
    """Makes calls of one kind, any number of times. Collective."""

    workspace: CollectivesWorkspace
    method: _core.CollectiveMethod
    problem: _core.MatmulProblem
    copying: Copying | None

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._enqueue((A, B, bias, residual))

    def normed(
        self, operands: tuple[Any, ...], eps: float, quantize_out: str = ""
    ) -> tuple[Any, torch.Tensor]:
        """The norm of the sum's rows, with ``quantize_out`` its fp8 values and scales, and the sum.

        Args:
            operands: A, B, the bias or None, the residual and the norm's weight.
        """
        A, B, bias, residual, weight = operands
        shape, scales = (*A.shape[:-1], B.shape[1]), None
        normed = A.new_empty(shape, dtype=torch.float8_e4m3fn if quantize_out else A.dtype)
        if quantize_out:
            count = -(-shape[-1] // _core.QUANTIZE_BLOCK) if quantize_out == "block" else 1
            scales = A.new_empty(*shape[:-1], count, dtype=torch.float32)
        norm = weight, normed, scales
        total = self._enqueue((A, B, bias, residual), norm, eps, of_blocks=quantize_out == "block")
        return (normed if scales is None else (normed, scales)), total

    def _enqueue(
        self,
        operands: tuple[Any, ...],
        norm: tuple[torch.Tensor | None, ...] = (None, None, None),
        eps: float = 0.0,
        *,
        of_blocks: bool = False,
    ) -> torch.Tensor:
        A, B, *added = operands
        rows = A.reshape(-1, A.shape[-1]).contiguous()
        B = B if self.copying is None else self.copying.weight(B)
        out = rows.new_empty(len(rows), B.shape[1])
        copies: list[torch.Tensor] = []  # they live until the call is enqueued
        addresses = (
            cuda_calls.aligned_pointer(rows, copies),
            cuda_calls.aligned_pointer(B, copies),
            *(cuda_calls.bias_pointer(one, copies) for one in added),
            out.data_ptr(),
            cuda_calls.bias_pointer(norm[0], copies),
            *(0 if one is None else one.data_ptr() for one in norm[1:]),
        )
        given = self.method, self.problem, addresses, eps
        self.workspace.streamed_all_reduce(*given, of_blocks=of_blocks)
        return out if A.dim() == 2 else reshaped(out, [*A.shape[:-1], B.shape[1]])
