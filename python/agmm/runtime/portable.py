"""The portable path of matmuls between ranks: copies through slots beside products of the library.

It needs memory that the ranks reach and kernels that every GPU from Ampere on runs, so it serves
GPUs for which agmm has no matmul. `gather` and `scatter` are the protocol, for slots of any kind;
`cuda_portable` has them in torch's symmetric memory.

Every call has one barrier, and takes one of two halves of the slots in turn. So a rank writes to
what was used two barriers ago: every rank comes to the second of these after it has read what was
there, since its calls run one after the other. A captured call is replayed after any number of
others. It takes the first half, with a barrier before it and one behind it in addition, as in
`copies.all_gather`.

No ranks wait in a ring. Only the barriers wait for other ranks. Copies and products wait for what
their own rank has enqueued before them, and every rank enqueues its barriers in one order
(`Group.last_before`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from agmm.runtime import rings
from agmm.runtime.copies import Slots

HALVES = 2
"""The halves of the slots, which calls take in turn."""
_ALIGNMENT = 256  # that of CUDA's own allocations

Consume = Callable[[int, slice, list[torch.Tensor]], None]
"""What multiplies rows that have come. It is called with the rank that they are from, their place
in its shard, and what that rank has sent of them."""

Whole = torch.Tensor | Sequence[torch.Tensor]
"""The memory of a part of all ranks: [world_size, *part.shape], or a tensor of its shape for each.
"""

Copy = tuple[torch.Tensor, torch.Tensor]
"""A copy: the memory to write, and what is written there."""


class Beside(Protocol):
    """A place for copies beside what the caller computes."""

    def fork(self) -> None:
        """Copies come from now on behind all that was computed so far."""
        ...

    def run(self, copies: Sequence[Copy]) -> Any:
        """Make copies behind those before, and return a mark of their end."""
        ...

    def wait(self, mark: Any) -> None:
        """What is computed from now on comes behind the mark."""
        ...

    def join(self) -> None:
        """What is computed from now on comes behind all copies."""
        ...


def cuts_of(rows: int, pieces: int) -> list[slice]:
    """The rows of each piece, as equal as they can be; none is empty."""
    size = -(-rows // pieces)
    return [slice(begin, min(rows, begin + size)) for begin in range(0, rows, size)]


def sent_bytes(parts: Sequence[torch.Tensor]) -> int:
    """The bytes of a slot that holds all of these."""
    return sum(map(_aligned_bytes, parts))


def gather(
    slots: Slots,
    parts: Sequence[torch.Tensor],
    wholes: Sequence[Whole],
    consume: Consume,
    turn: int,
    *,
    pieces: int,
    beside: Beside,
    keeps_own: bool = False,
    is_captured: bool = False,
) -> int:
    """Gather the parts of all ranks, and consume the rows of each piece once they are there, the
    own ones first, as one piece. Needs two slots on each rank.

    Each rank stages its parts in its slot, and after a barrier copies the others' from theirs.

    Args:
        parts: contiguous, of the same shapes on all ranks. The first one says how many rows a shard
            has; others have as many, or are sent whole with its first piece.
        wholes: for each part the memory of all ranks' ones, by rank.
        keeps_own: whether the own places there are written, too.
        turn: what the last call returned, 0 before the first.
    """
    rank, half = slots.rank, 0 if is_captured else turn
    rows = parts[0].shape[0]
    cuts = cuts_of(rows, pieces)
    if is_captured:
        slots.barrier()
    for own, place in zip(parts, _places(slots.of(rank)[half], parts), strict=True):
        place.copy_(own)
    slots.barrier()
    beside.fork()
    others = rings.others(slots.ring, rank)

    def copies_of(source: int) -> list[tuple[int, slice, Any]]:
        """The pieces of a rank, with the marks of their copies."""
        staged = _places(slots.of(source)[half], parts)
        found = []
        for cut in cuts:
            pairs = []
            for whole, there in zip(wholes, staged, strict=True):
                if there.shape[0] == rows:
                    pairs.append((whole[source][cut], there[cut]))
                elif cut.start == 0:
                    pairs.append((whole[source], there))
            found.append((source, cut, beside.run(pairs)))
        return found

    try:
        # The host enqueues the first copies, then the product that hides the enqueueing of others.
        awaited = [one for source in others[:1] for one in copies_of(source)]
        consume(rank, slice(0, rows), list(parts))
        awaited += [one for source in others[1:] for one in copies_of(source)]
        if keeps_own:
            beside.run([(whole[rank], own) for whole, own in zip(wholes, parts, strict=True)])
        for source, cut, mark in awaited:
            beside.wait(mark)
            come = [whole[source] for whole in wholes]
            consume(source, cut, [one[cut] if one.shape[0] == rows else one for one in come])
    finally:
        beside.join()
        if is_captured:
            slots.barrier()
    return turn if is_captured else 1 - turn


def scatter(
    slots: Slots,
    sent: torch.Tensor,
    product: Callable[[int, torch.Tensor], None],
    total: Callable[[torch.Tensor], None],
    turn: int,
    *,
    beside: Beside,
    meanwhile: Callable[[], None] | None = None,
    is_captured: bool = False,
) -> int:
    """Multiply for each rank in turn, the own one last, send each product once it is made, and sum
    what has come. Needs two slots for each rank on each.

    Args:
        sent: memory of the products for the others, [world_size - 1, ...], contiguous.
        product: writes the product for a rank, the first argument, to the second.
        total: is given the products of all ranks for this one, [world_size, ...] in their order.
        turn: what the last call returned, 0 before the first.
        meanwhile: called while the last products are on their way.
    """
    rank, world_size = slots.rank, slots.world_size
    first = 0 if is_captured else turn * world_size
    like = sent[0]

    def places(owner: int) -> torch.Tensor:
        here = slots.of(owner)[first : first + world_size, : like.nbytes]
        return here.view(like.dtype).view(world_size, *like.shape)

    if is_captured:
        slots.barrier()
    for owner, part in zip(rings.others(slots.ring, rank), sent, strict=True):
        product(owner, part)
        beside.fork()
        beside.run([(places(owner)[rank], part)])
    come = places(rank)
    product(rank, come[rank])
    if meanwhile is not None:
        meanwhile()
    beside.join()
    slots.barrier()
    total(come)
    if is_captured:
        slots.barrier()
    return turn if is_captured else 1 - turn


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _places(slot: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The places of the parts in a slot, which is uint8."""
    found, begin = [], 0
    for part in parts:
        place = slot[begin : begin + part.nbytes]
        found.append(place.view(part.dtype).view(part.shape))
        begin += _aligned_bytes(part)
    return found
