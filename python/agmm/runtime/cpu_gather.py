"""All-gather + matmul on the CPU: each chunk is multiplied once it has arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from agmm.runtime.cpu_slots import CpuSlots
from agmm.runtime.packed import Packed4BitWeight


def products(
    slots: CpuSlots,
    shard: torch.Tensor,
    Bs: Sequence[torch.Tensor | Packed4BitWeight],
    biases: list[torch.Tensor | None],
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
    outs = [shard.new_empty(m, B.shape[1]) for B in Bs]
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
            for B, bias, out in zip(Bs, biases, outs, strict=True):
                multiply(a, B, bias, out[rows])
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
    return A, outs, error


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
