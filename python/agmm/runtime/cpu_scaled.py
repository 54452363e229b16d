"""All-gather + matmul of fp8 operands on the CPU: each chunk travels with its scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agmm.runtime.calls import Call
from agmm.runtime.cpu import CpuWorkspace
from agmm.runtime.cpu_async_input import arrivals
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.scaled import Scaled, Weight, multiply, rounded_into, sum_of
from agmm.runtime.scaling import ALL

_SCALE_BYTES = 4  # of float32


class _Records(NamedTuple):
    """Where the values of a chunk lie in its record, and behind them their scales. The scales are
    aligned, since K is a multiple of 16."""

    rows: int
    k: int
    scales: int
    """For each row, or for the shard where they count for all of it."""
    scale_rows: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.rows * self.k + self.scale_rows * self.scales * _SCALE_BYTES

    def values(self, record: torch.Tensor) -> torch.Tensor:
        return record[: self.rows * self.k].view(self.dtype).view(self.rows, self.k)

    def scale(self, record: torch.Tensor) -> torch.Tensor:
        found = record[self.rows * self.k :].view(torch.float32)
        return found.view(self.scale_rows, self.scales)


def _records_of(shard: Scaled, chunks: int) -> tuple[_Records, torch.Tensor]:
    """The shard in chunks of rows; the last ones may be short or empty."""
    m_local, k = shard.values.shape
    rows = -(-m_local // chunks)
    is_one = shard.tile[0] == ALL
    layout = _Records(rows, k, shard.scale.shape[1], 1 if is_one else rows, shard.values.dtype)
    records = torch.zeros(chunks, layout.nbytes, dtype=torch.uint8)
    for i, record in enumerate(records):
        part = shard.rows(slice(i * rows, (i + 1) * rows))
        layout.values(record)[: len(part.values)] = part.values
        layout.scale(record)[: len(part.scale)] = part.scale
    return layout, records


class Products:
    """The products of dequantised rows with weights, or what an epilogue makes of them."""

    def __init__(self, weights: Sequence[Weight], m: int, epilogue: Epilogue | None) -> None:
        self._weights, self._epilogue = weights, epilogue
        self._Bs = [weight.B.dequantised() for weight in weights]
        dtypes = [weight.out_dtype for weight in weights]
        count = len(weights) if epilogue is None else epilogue.results_of(len(weights))
        self.outs = [
            torch.empty(m, B.shape[1], dtype=dtype)
            for B, dtype in zip(self._Bs[:count], dtypes, strict=False)
        ]

    def multiply(self, a: torch.Tensor, rows: slice) -> None:
        """Write the results of the chunk ``a``, whose place is ``rows``."""
        of_each = list(zip(self._Bs, self._weights, strict=True))
        if self._epilogue is None:
            for (B, weight), out in zip(of_each, self.outs, strict=True):
                multiply(a, B, weight, out[rows])
            return
        results = self._epilogue([sum_of(a, B, weight.bias) for B, weight in of_each])
        for out, result, (_, weight) in zip(self.outs, results, of_each, strict=False):
            rounded_into(out[rows], result, weight.result_scale)


def all_gather_scaled_matmul(
    workspace: CpuWorkspace,
    shard: Scaled,
    weights: list[Weight],
    call: Call,
    *,
    return_A: bool,
    chunks: int,
    epilogue: Epilogue | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """Gather the shard with its scales and multiply it by each weight. Collective.

    Args:
        shard: [M_local, K], K a multiple of 16, the same shape, dtype and kind of scales on all
            ranks.
        weights: of [K, N], N free for each of them and on each rank.
        call: the call, for messages.
        return_A: whether A and its scales are wanted.
        chunks: row chunks of each shard, the same on all ranks.
        epilogue: what becomes of the products before they are rounded; free on each rank.

    Returns:
        A [M, K] and its scales, [M, ...] or for one scale of each shard [world_size, 1], or None
        and None; and out [M, N] for each weight, or what the epilogue makes of them.

    Raises:
        Unsupported: as `CpuWorkspace.all_gather_matmul`.
        AgmmError: as `CpuWorkspace.all_gather_matmul`.
    """
    m_local, k = shard.values.shape
    m = workspace.world_size * m_local
    layout, records = _records_of(shard, chunks)
    products = Products(weights, m, epilogue)
    a = torch.empty(layout.rows, k, dtype=torch.float32)
    A = scale_A = None
    if return_A:
        A = shard.values.new_empty(m, k)
        scale_A = shard.scale.new_empty(workspace.world_size * len(shard.scale), layout.scales)

    def consume(source: int, i: int, record: torch.Tensor) -> None:
        begin = min(i * layout.rows, m_local)
        count = min(layout.rows, m_local - begin)
        rows = slice(source * m_local + begin, source * m_local + begin + count)
        chunk = shard._replace(values=layout.values(record), scale=layout.scale(record))
        chunk = chunk.rows(slice(0, count))
        if A is not None and scale_A is not None:
            A[rows] = chunk.values
            scale_A[source if shard.tile[0] == ALL else rows] = chunk.scale
        chunk.dequantised(a[:count])
        products.multiply(a[:count], rows)

    dtype = str(shard.values.dtype).removeprefix("torch.")
    workspace.all_gather_records(
        records,
        consume,
        call,
        agreed=f"of {m_local} rows of {k} {dtype}, scales {list(shard.scale.shape)}",
    )
    return A, scale_A, products.outs


def async_input_mm(
    A: Scaled,
    weights: Sequence[Weight],
    a_chunk_signals: torch.Tensor,
    pivot: int,
    epilogue: Epilogue | None = None,
) -> torch.Tensor:
    """Multiply, each row chunk of ``A`` [M, K] once its signal is 1, which counts for its scales
    too, for the one result that the products or their epilogue are. The arguments have been checked
    by the caller."""
    m = A.values.shape[0]
    products = Products(weights, m, epilogue)
    for rows in arrivals(m, a_chunk_signals, pivot):
        products.multiply(A.rows(rows).dequantised(), rows)
    (out,) = products.outs
    return out
