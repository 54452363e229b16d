"""`async_input_mm` on the CPU: a matmul whose A arrives in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from agmm import _core, _env
from agmm.runtime.cpu_gather import Products
from agmm.runtime.epilogues import Epilogue

_READY = 1


def arrivals(m: int, a_chunk_signals: torch.Tensor, pivot: int) -> Iterator[slice]:
    """The rows of each chunk of ``m`` rows once its signal is 1, in ring order from ``pivot``. The
    signals are a 1-D uint32 tensor whose length divides ``m``."""
    chunks = a_chunk_signals.numel()
    rows = m // chunks
    base, stride = a_chunk_signals.data_ptr(), 4 * a_chunk_signals.stride(0)
    rank = dist.get_rank() if dist.is_initialized() else -1
    limit_s = _env.timeout_s()
    for step in range(chunks):
        chunk = (pivot + step) % chunks
        _core.cpu_wait_signal(base + chunk * stride, _READY, rank, -1, chunk, limit_s)
        yield slice(chunk * rows, (chunk + 1) * rows)


def async_input_mm(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    a_chunk_signals: torch.Tensor,
    pivot: int,
    epilogue: Epilogue | None = None,
) -> torch.Tensor:
    """Multiply ``a`` [M, K] by each of ``bs`` [K, N], each row chunk of ``a`` once its signal is 1,
    for the one result that the products or their epilogue are.

    The arguments have been checked by the caller.
    """
    products = Products(bs, [None] * len(bs), epilogue, a, a.shape[0])
    for rows in arrivals(a.shape[0], a_chunk_signals, pivot):
        products.multiply(a[rows], rows)
    (out,) = products.outs
    return out
