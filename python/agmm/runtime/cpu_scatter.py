"""Matmul + reduce-scatter and matmul + all-reduce on the CPU: products by torch, sums over the
ranks in one order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from agmm import _core
from agmm.runtime import nan_check
from agmm.runtime.cpu_slots import CpuSlots
from agmm.runtime.cpu_summands import ScaledSummands, Summands
from agmm.runtime.scaled import FP8, Scaled, Weight


class Sum(NamedTuple):
    """What is summed over the ranks, and how it is sent and returned."""

    rows: int
    columns: int
    sent_dtype: torch.dtype
    out_dtype: torch.dtype
    bias: torch.Tensor | None
    """The bias [N], which is added once."""
    summands: Callable[[int], Summands]
    """A function that makes this rank's summands for at most so many rows at a time."""
    residual: torch.Tensor | None = None
    """What is added to the sum before it is rounded: of a reduce-scatter [rows / world_size, N],
    this rank's rows; of an all-reduce [rows, N], the same on all ranks."""
    invariant: bool = False
    """Whether a row's bits may not depend on the other rows."""

    def own(self, product: torch.Tensor) -> torch.Tensor:
        """This rank's summand. Where its rows' owner must not matter, it is rounded as those are
        that were sent."""
        return product.to(self.sent_dtype) if self.invariant else product

    def residual_of(self, begin: int, end: int) -> torch.Tensor | None:
        """These rows of the residual, as many as there are; None where there is none."""
        return None if self.residual is None else self.residual[begin:end]


def plain_sum(
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    invariant: bool = False,
) -> Sum:
    """The `Sum` of ``sum(A @ B)`` over the ranks."""
    A = As[0]
    return Sum(
        A.shape[0],
        Bs[0].shape[1],
        A.dtype,
        A.dtype,
        bias,
        lambda most_rows: Summands(As, Bs, most_rows, invariant=invariant),
        residual,
        invariant,
    )


def scaled_sum(products: Sequence[tuple[Scaled, Weight]], *, is_bias_of_each: bool = False) -> Sum:
    """The `Sum` of ``A @ B`` for each pair, all dequantised, over the ranks.

    Args:
        products: the pairs; the first weight says the result's dtype, its scale and the bias.
        is_bias_of_each: whether the bias is this rank's own, added to its product.
    """
    A, weight = products[0]
    out_dtype = weight.out_dtype
    sent_dtype = torch.bfloat16 if out_dtype in FP8 else out_dtype
    of_each, of_all = (weight.bias, None) if is_bias_of_each else (None, weight.bias)
    return Sum(
        A.values.shape[0],
        weight.B.values.shape[1],
        sent_dtype,
        out_dtype,
        of_all,
        lambda most_rows: ScaledSummands(products, of_each, most_rows),
    )


def send_and_sum(
    slots: CpuSlots,
    summed: Sum,
    divisor: int,
    pieces: int,
    tag: int,
    op: str,
    meanwhile: Callable[[], None] | None = None,
    timeline: list[dict[str, int]] | None = None,
) -> tuple[torch.Tensor, Exception | None]:
    """Return the sum, and what went wrong in ``meanwhile``. ``op`` is for messages."""
    called_ns = time.monotonic_ns()
    error: Exception | None = None
    core, rank = slots.core, slots.rank
    columns, dtype = summed.columns, summed.sent_dtype
    m_local = summed.rows // slots.world_size
    bands = _core.scatter_bands(summed.rows, slots.world_size)
    band_rows = max(end - begin for begin, end in bands)
    owners = [_core.scatter_owner(rank, i, slots.world_size) for i in range(slots.world_size - 1)]
    sources = [source for source in range(slots.world_size) if source != rank]
    out = torch.empty(m_local, columns, dtype=summed.out_dtype)
    sent = torch.empty(len(owners), band_rows, columns, dtype=dtype)
    summands = summed.summands(-(-band_rows // pieces))
    row_bytes = columns * dtype.itemsize
    slots.lent = sent
    for begin, end in bands:
        slot, part_bytes = slots.take_slot(), (end - begin) * row_bytes
        piece_rows = -(-(end - begin) // pieces)
        cuts = [  # of the band; the workspace may have room for more than there are
            slice(min(i * piece_rows, end - begin), min((i + 1) * piece_rows, end - begin))
            for i in range(slots.chunks_per_shard)
        ]
        core.take_credits(slot)
        for owner, part in zip(owners, sent, strict=True):
            first = owner * m_local + begin
            for i, cut in enumerate(cuts):
                piece = part[cut]
                start_ns = time.monotonic_ns()
                if len(piece):
                    piece.copy_(summands.product(slice(first + cut.start, first + cut.stop)))
                end_ns = time.monotonic_ns()
                if len(piece) and nan_check.active:
                    place = first + cut.start, summed.rows
                    nan_check.look_through(op, "A @ B", piece, rank, rows=place)
                core.send(
                    slot,
                    owner,
                    i,
                    piece.data_ptr(),
                    piece.nbytes,
                    part_bytes,
                    cut.start * row_bytes,
                    tag,
                )
                if len(piece) and timeline is not None:
                    timeline.append(_piece_times(called_ns, owner, start_ns, end_ns))
        if meanwhile is not None and end == m_local:
            try:
                meanwhile()
            except Exception as e:  # the peers wait for the rest of this call
                error = e
        arrived = slots.memory_of(slot)[: len(sources) * part_bytes].view(dtype)
        arrived = arrived.view(len(sources), end - begin, columns)
        first = rank * m_local + begin
        for i, cut in enumerate(cuts):
            own = slice(first + cut.start, first + cut.stop)
            start_ns = time.monotonic_ns()
            product = summands.product(own) if own.stop > own.start else None
            end_ns = time.monotonic_ns()
            for source in sources:
                core.wait_chunk(slot, source * slots.chunks_per_shard + i, tag)
            if product is not None:
                if timeline is not None:
                    timeline.append(_piece_times(called_ns, rank, start_ns, end_ns))
                parts = [arrived[_core.part_place(s, rank, slots.world_size)][cut] for s in sources]
                rows = slice(begin + cut.start, begin + cut.stop)
                residual = summed.residual_of(rows.start, rows.stop)
                mine = summed.own(product)
                summands.sum(mine, parts, rank, divisor, summed.bias, out[rows], residual)
        slots.give_back(slot)
        core.wait_pushed()  # what was sent may be overwritten
    slots.lent = None
    return out, error


def _piece_times(called_ns: int, owner: int, start_ns: int, end_ns: int) -> dict[str, int]:
    return {
        "chunk": owner,
        "called_ns": called_ns,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "done_ns": time.monotonic_ns(),
    }


MOST_PIECES = 4
"""The most pieces that a rank's rows of a band are cut into, in an all-reduce."""
_PIECE_ROWS = 32
_LAG = 2
"""The lag of own rows behind the others' in an all-reduce, in pieces. It is what a copy thread has
to send."""


def all_reduce_pieces(rows: int) -> int:
    """The number of pieces that each rank's rows of a band are cut into."""
    return min(MOST_PIECES, -(-rows // _PIECE_ROWS))


def all_reduce_slot_bytes(rows: int, row_bytes: int, world_size: int) -> int:
    """The bytes of a slot for the partial sums of so many rows of ``A @ B``, and for as many
    finished rows."""
    shared = -(-rows // world_size) * world_size
    return 2 * _core.scatter_slot_bytes(shared, row_bytes, world_size)


def send_sum_and_return(
    slots: CpuSlots,
    summed: Sum,
    pieces: int,
    tag: int,
    op: str,
    *,
    band: slice,
) -> torch.Tensor:
    """Return the sum of one band on all ranks, [rows, columns]; its rows are a multiple of the
    ranks, and the last band may end behind the last row. Order and protocol are those of the kernel
    (`src/order/lagged_order.hpp`, with the argument why no ranks wait for each other in a ring):
    own pieces follow the others' at a lag, and go to all ranks once they are finished. At each
    place of a slot lie partial sums, then finished rows, which take no more bytes; both have
    signals, and share one credit. ``op`` is for messages."""
    core, rank, world_size = slots.core, slots.rank, slots.world_size
    dtype, m_local = summed.sent_dtype, (band.stop - band.start) // slots.world_size
    row_bytes = summed.columns * dtype.itemsize
    finished_row_bytes = summed.columns * summed.out_dtype.itemsize
    part_bytes = m_local * row_bytes
    piece_rows = -(-m_local // pieces)
    cuts = [
        slice(min(i * piece_rows, m_local), min((i + 1) * piece_rows, m_local))
        for i in range(slots.chunks_per_shard // 2)
    ]
    others = [_core.scatter_owner(rank, i, world_size) for i in range(world_size - 1)]
    sources = [source for source in range(world_size) if source != rank]
    out = torch.empty(band.stop - band.start, summed.columns, dtype=summed.out_dtype)
    own = out[rank * m_local : (rank + 1) * m_local]
    sent = {owner: torch.empty(m_local, summed.columns, dtype=dtype) for owner in others}
    summands = summed.summands(piece_rows)
    slots.lent = [out, *sent.values()]
    slot = slots.take_slot()
    arrived = slots.memory_of(slot)[: 2 * (world_size - 1) * part_bytes]
    arrived = arrived.view(world_size - 1, 2, part_bytes)
    places = {source: _core.part_place(source, rank, world_size) for source in sources}

    def rows_of(source: int, i: int, *, finished: bool) -> torch.Tensor:
        """What a rank has sent of a piece."""
        nbytes = m_local * finished_row_bytes if finished else part_bytes
        here = arrived[places[source], int(finished), :nbytes]
        here = here.view(summed.out_dtype if finished else dtype)
        return here.view(m_local, summed.columns)[cuts[i]]

    def send(owner: int, rows: torch.Tensor, i: int, *, finished: bool) -> None:
        index = len(cuts) + i if finished else i
        offset = cuts[i].start * (finished_row_bytes if finished else row_bytes)
        offset += part_bytes if finished else 0
        core.send(slot, owner, index, rows.data_ptr(), rows.nbytes, 2 * part_bytes, offset, tag)

    def await_all(index: int) -> None:
        for source in sources:
            core.wait_chunk(slot, source * slots.chunks_per_shard + index, tag)

    core.take_credits(slot)
    for position, i in _core.lagged_steps(world_size, len(cuts), 1, _LAG):
        cut = cuts[i]
        owner = _core.scatter_owner(rank, position, world_size)
        first = owner * m_local
        product = None
        if cut.stop > cut.start:
            begin = band.start + first
            product = summands.product(slice(begin + cut.start, begin + cut.stop))
            if nan_check.active:  # the own rows go to all ranks, too, in the sum
                place = begin + cut.start, summed.rows
                nan_check.look_through(op, "A @ B", product.to(dtype), rank, rows=place)
        if owner != rank:
            piece = sent[owner][cut]
            if product is not None:
                piece.copy_(product)
            send(owner, piece, i, finished=False)
            continue
        await_all(i)
        if product is not None:
            parts = [rows_of(source, i, finished=False) for source in sources]
            residual = summed.residual_of(begin + cut.start, begin + cut.stop)
            mine = summed.own(product)
            summands.sum(mine, parts, rank, 1, summed.bias, own[cut], residual)
        for other in others:
            send(other, own[cut], i, finished=True)
    for i, cut in enumerate(cuts):
        await_all(len(cuts) + i)
        for source in sources:
            first = source * m_local
            out[first + cut.start : first + cut.stop] = rows_of(source, i, finished=True)
    slots.give_back(slot)
    core.wait_pushed()  # what was sent may be overwritten
    slots.lent = None
    return out
