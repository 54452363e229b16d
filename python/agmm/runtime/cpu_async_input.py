"""`async_input_mm` on the CPU: an A whose chunks are still on their way."""

from __future__ import annotations

import torch
import torch.distributed as dist

from agmm import _core, _env
from agmm.runtime.cpu_gather import multiply

_READY = 1


def async_input_mm(
    a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, pivot: int
) -> torch.Tensor:
    """Multiply ``a`` [M, K] by ``b`` [K, N], each row chunk of ``a`` once its signal is 1.

    Takes the chunks in ring order from ``pivot``. The arguments have been checked by the caller:
    ``a_chunk_signals`` is a 1-D uint32 tensor whose length divides M.
    """
    chunks = a_chunk_signals.numel()
    rows = a.shape[0] // chunks
    base, stride = a_chunk_signals.data_ptr(), 4 * a_chunk_signals.stride(0)
    rank = dist.get_rank() if dist.is_initialized() else -1
    limit_s = _env.timeout_s()
    out = a.new_empty(a.shape[0], b.shape[1])
    for step in range(chunks):
        chunk = (pivot + step) % chunks
        _core.cpu_wait_signal(base + chunk * stride, _READY, rank, -1, chunk, limit_s)
        part = slice(chunk * rows, (chunk + 1) * rows)
        multiply(a[part], b, None, out[part])
    return out
