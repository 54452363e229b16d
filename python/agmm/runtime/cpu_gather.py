"""All-gather + matmul on the CPU: each chunk is multiplied once it has arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from agmm.runtime.cpu_slots import CpuSlots
from agmm.runtime.cpu_summands import sum_dtype
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.packed import Packed4BitWeight


class Products:
    """The products of rows with weights, chunk by chunk.

    Args:
        Bs: [K, N] each.
        biases: for each weight [N] or None.
        epilogue: what becomes of the products; None for the products themselves.
        like: a tensor of the products' dtype.
        m: the rows of all chunks.

    Attributes:
        outs: the results [m, N].
    """

    def __init__(
        self,
        Bs: Sequence[torch.Tensor | Packed4BitWeight],
        biases: Sequence[torch.Tensor | None],
        epilogue: Epilogue | None,
        like: torch.Tensor,
        m: int,
    ) -> None:
        self._Bs, self._biases, self._epilogue = Bs, biases, epilogue
        columns = [B.shape[1] for B in Bs]
        self.outs = [
            like.new_empty(m, n) for n in (epilogue.outs(columns) if epilogue else columns)
        ]
        self._wide = sum_dtype(like.dtype)
        if epilogue is not None:
            # Products of 16 bits stay in float32 until the activation has them.
            self._Bs = [B.to(self._wide) for B in Bs if isinstance(B, torch.Tensor)]
            self._biases = [None if bias is None else bias.to(self._wide) for bias in biases]

    def multiply(self, a: torch.Tensor, rows: slice) -> None:
        """Write the results of the chunk ``a``, whose place is ``rows``."""
        if self._epilogue is None:
            for B, bias, out in zip(self._Bs, self._biases, self.outs, strict=True):
                multiply(a, B, bias, out[rows])
            return
        a, found = a.to(self._wide), []
        for B, bias in zip(self._Bs, self._biases, strict=True):
            found.append(a.new_empty(a.shape[0], B.shape[1]))
            multiply(a, B, bias, found[-1])
        for out, result in zip(self.outs, self._epilogue.composed(found), strict=True):
            out[rows] = result


def products(
    slots: CpuSlots,
    shard: torch.Tensor,
    weights: Products,
    return_A: bool,
    chunks_per_shard: int,
    tag: int,
    timeline: list[dict[str, int]] | None,
) -> tuple[torch.Tensor | None, list[torch.Tensor], Exception | None]:
    """A, the products, and what went wrong with them."""
    called_ns = time.monotonic_ns()
    m_local, k = shard.shape
    m, shard_bytes = slots.world_size * m_local, shard.nbytes
    gathered_bytes = slots.world_size * shard_bytes
    A = shard.new_empty(m, k) if return_A else None
    core, per_shard = slots.core, slots.chunks_per_shard
    chunk_rows = -(-m_local // chunks_per_shard)
    slot = slots.take_slot()

    slots.lent = shard
    core.push(slot, shard.data_ptr(), shard_bytes, chunk_rows * k * shard.element_size(), tag)
    gathered = slots.memory_of(slot)[:gathered_bytes].view(shard.dtype).view(m, k)
    spans: list[tuple[int, int, int]] = []
    error: Exception | None = None
    for source, i in slots.arrivals(slot, tag):
        begin, end = min(i * chunk_rows, m_local), min((i + 1) * chunk_rows, m_local)
        rows = slice(source * m_local + begin, source * m_local + end)
        a = shard[begin:end] if source == slots.rank else gathered[rows]
        if i >= chunks_per_shard:  # the workspace has room for more; their signals come too
            continue
        start_ns = time.monotonic_ns()
        try:
            weights.multiply(a, rows)
        except Exception as e:  # the peers wait for the rest of this call
            error = error or e
        spans.append((source * per_shard + i, start_ns, time.monotonic_ns()))
    if timeline is not None:
        arrived = core.arrival_ns(slot)
        for chunk, start_ns, end_ns in spans:
            source = chunk // per_shard
            timeline.append(
                {
                    "chunk": chunk,
                    "source": source,
                    "arrived_ns": called_ns if source == slots.rank else arrived[chunk],
                    "start_ns": start_ns,
                    "end_ns": end_ns,
                }
            )
    if A is not None:
        A.copy_(gathered)
        A[slots.rank * m_local : (slots.rank + 1) * m_local] = shard
    slots.give_back(slot)
    core.wait_pushed()
    slots.lent = None
    return A, weights.outs, error


def records(
    slots: CpuSlots,
    sent: torch.Tensor,
    consume: Callable[[int, int, torch.Tensor], None],
    tag: int,
) -> Exception | None:
    """Hands the records of all ranks to ``consume`` and returns its first error, or None."""
    chunks, record_bytes = sent.shape
    core, slot = slots.core, slots.take_slot()
    error: Exception | None = None
    slots.lent = sent
    core.push(slot, sent.data_ptr(), sent.nbytes, record_bytes, tag)
    arrived = slots.memory_of(slot)[: slots.world_size * sent.nbytes]
    arrived = arrived.view(slots.world_size, chunks, record_bytes)
    for source, i in slots.arrivals(slot, tag):
        if i >= chunks:
            continue
        try:
            consume(source, i, sent[i] if source == slots.rank else arrived[source, i])
        except Exception as e:  # the peers wait for the rest of this call
            error = error or e
    slots.give_back(slot)
    core.wait_pushed()
    slots.lent = None
    return error


def multiply(
    a: torch.Tensor,
    b: torch.Tensor | Packed4BitWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    if isinstance(b, Packed4BitWeight):
        out.copy_(b.product(a))
        if bias is not None:
            out.add_(bias)
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)
