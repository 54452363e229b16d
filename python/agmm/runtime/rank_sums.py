"""The sum of what the ranks have for one of them, added up in the order of the ranks: by a kernel
on GPUs, and elsewhere by the CPU backend's steps, which give the same bits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from agmm import _core
from agmm.runtime import capabilities
from agmm.runtime.cpu_summands import add_up, sum_dtype
from agmm.runtime.scaled import FP8, rounded_into
from agmm.runtime.streams import stream_of


class Total(NamedTuple):
    """What becomes of the partial sums of all ranks for one of them."""

    divisor: int = 1
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    """Rows of the result's shape."""
    result_scale: torch.Tensor | None = None

    def __call__(self, come: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of ``come`` [world_size, rows, N], of contiguous matrices, to ``out``,
        which is contiguous. It is added up in float32 (float64 for float64), in the order of the
        ranks, and rounded once, behind the bias and the residual."""
        summands = self.bias, self.residual
        has_kernel = _has_kernel(come)
        alike = all(one is None or one.dtype == come.dtype for one in summands)
        if has_kernel and alike and out.dtype == come.dtype:
            self._enqueue(come, out, self.bias, self.residual)
            return
        total = torch.empty_like(out, dtype=sum_dtype(come.dtype))
        if has_kernel:
            self._enqueue(come, total, None, None)
        else:
            add_up(list(come), self.divisor, total)
        for summand in summands:
            if summand is not None:
                total.add_(summand)
        if out.dtype in FP8:
            rounded_into(out, total, self.result_scale)
        else:
            out.copy_(total)

    def _enqueue(
        self,
        come: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> None:
        bias, residual = (one if one is None else one.contiguous() for one in (bias, residual))
        count, rows, columns = come.shape
        with torch.cuda.device(come.device):
            _core.ordered_sum(
                come.data_ptr(),
                come.stride(0) * come.itemsize,
                _ELEMENTS[str(come.dtype).removeprefix("torch.")],
                count,
                rows,
                columns,
                self.divisor,
                0 if bias is None else bias.data_ptr(),
                0 if residual is None else residual.data_ptr(),
                out.data_ptr(),
                out.dtype != come.dtype,
                stream_of(come.device),
            )


_ELEMENTS = _core.SummedElement.__members__


def _has_kernel(come: torch.Tensor) -> bool:
    return (
        come.is_cuda
        and str(come.dtype).removeprefix("torch.") in _ELEMENTS
        and come.numel() > 0
        and capabilities.why_not(capabilities.COLLECTIVES, come.device) is None
    )
