"""Collectives on CUDA: the symmetric memory that they take, and their calls."""

from __future__ import annotations

import torch

from agmm import _core
from agmm.runtime.cuda_calls import stream_of
from agmm.runtime.symmetric import SymmetricWorkspace

ELEMENTS = {
    torch.bfloat16: _core.CollectiveElement.bfloat16,
    torch.float16: _core.CollectiveElement.float16,
    torch.float32: _core.CollectiveElement.float32,
}
"""What sums are made of. Anything is gathered."""


class CollectivesWorkspace(SymmetricWorkspace):
    """The slots through which the ranks of a group send each other data. Calls of all sizes fit."""

    _core_class = _core.CudaCollectives
    _granule = 32 << 20

    def call(
        self,
        op: _core.CollectiveOp,
        method: _core.CollectiveMethod,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        is_average: bool = False,
    ) -> None:
        """Enqueue a collective on the current stream. Collective.

        Args:
            op: what is made of the ranks' ``x``.
            method: how the data travels; "two_shot" for all_reduce alone. Alike on all ranks.
            x: contiguous; for reduce_scatter [world_size, ...] in all.
            out: contiguous, as large as the result; of all_reduce it may be ``x``.
            is_average: sums are divided by the world size.

        Raises:
            Unsupported, AgmmError: as `SymmetricWorkspace.ensure`.
        """
        with self.lock:
            self.known.calls += 1
            buffers = self.enter(self._granule)
            count = out.numel() if op == _core.CollectiveOp.reduce_scatter else x.numel()
            element = ELEMENTS.get(x.dtype)
            if op == _core.CollectiveOp.all_gather:
                element, count = _core.CollectiveElement.uint8, count * x.element_size()
            assert element is not None, x.dtype
            captured = True  # also where the call fails half-way
            try:
                captured = buffers.core.call(
                    op,
                    method,
                    element,
                    x.data_ptr(),
                    out.data_ptr(),
                    count,
                    is_average,
                    stream_of(x.device),
                )
            finally:
                if captured:
                    self.captured = True
