"""Collectives without a matmul on the CPU: what the ranks exchange, and what is made of it.

All three are made of one step, in which each rank sends every other rank a tensor: its shard to
all (all-gather), or to each the shard that this one sums (reduce-scatter). An all-reduce of little
is one such step, of all to all, and each rank adds everything up; an all-reduce of much is a
reduce-scatter, then an all-gather of the sums. Shards are added as they were given, in the order of
the ranks, in float32 (float64 for float64), and rounded once, so both ways have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from agmm import _core
from agmm.runtime.cpu_slots import CpuSlots
from agmm.runtime.cpu_summands import add_up, sum_dtype

BAND_BYTES = 2 << 20
"""The most bytes that a slot holds. With 8 ranks all slots are 32 MiB, half of what a container's
/dev/shm has by default. None of 0.5 to 16 MiB was faster, on 2 and 4 ranks."""

_LEAST_BYTES = 64 << 10
"""The least bytes of a slot, so that sizes which grow bit by bit do not make it grow each time."""

ONE_STEP_BYTES = 64 << 10
"""An all-reduce of at most this many bytes is one step, which takes half of the time of two on 2
ranks. On 4 the bytes cost more than the second step from 256 KiB on."""

Band = tuple[int, int]
Exchange = Callable[
    [Sequence[torch.Tensor], Sequence[int]], Iterator[tuple[slice, list[torch.Tensor]]]
]
"""A function that sends ``outgoing[r]`` to each rank r and takes a tensor of ``incoming[r]``
numbers from it, all of one dtype. For each band it yields the band's slice of the tensors, and what
came from each rank in that slice, by rank, with ``outgoing`` at the own place; valid until the next
one. After the last band nobody reads ``outgoing`` any more."""


def bands(outgoing: Sequence[torch.Tensor], incoming: Sequence[int]) -> list[Band]:
    """The bands in which the tensors go through a slot, the same on all ranks. Tensors without
    elements take one band without elements, so that such a call takes its turn too."""
    most = max(*incoming, *(len(part) for part in outgoing))
    others = max(1, len(outgoing) - 1)
    each = max(1, BAND_BYTES // (others * outgoing[0].element_size()))
    return [(begin, min(begin + each, most)) for begin in range(0, max(most, 1), each)]


def exchange(
    slots: CpuSlots, tag: int, outgoing: Sequence[torch.Tensor], incoming: Sequence[int]
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """The `Exchange` through the slots, band after band.

    All bands are handed to the copy thread at once. It takes a slot's credits before it writes to
    it, and those come with the release of the band before the last, so two are under way.
    """
    core, rank = slots.core, slots.rank
    taken: list[int] = []
    owners = [_core.scatter_owner(rank, i, slots.world_size) for i in range(slots.world_size - 1)]
    own = outgoing[rank]
    cuts = bands(outgoing, incoming)
    for begin, end in cuts:
        slot, part_bytes = slots.take_slot(), (end - begin) * own.element_size()
        taken.append(slot)
        core.take_credits(slot)
        for owner in owners:
            piece = outgoing[owner][begin:end]
            core.send(slot, owner, 0, piece.data_ptr(), piece.nbytes, part_bytes, 0, tag)
            for i in range(1, slots.chunks_per_shard):  # of other calls: empty in this one
                core.send(slot, owner, i, 0, 0, part_bytes, 0, tag)
    for slot, (begin, end) in zip(taken, cuts, strict=True):
        part_bytes = (end - begin) * own.element_size()
        parts = []
        for source in range(slots.world_size):
            if source == rank:
                parts.append(own[begin:end])
                continue
            for i in range(slots.chunks_per_shard):
                core.wait_chunk(slot, source * slots.chunks_per_shard + i, tag)
            at = _core.part_place(source, rank, slots.world_size) * part_bytes
            part = slots.memory_of(slot)[at : at + part_bytes].view(own.dtype)
            parts.append(part[: max(0, min(end, incoming[source]) - begin)])
        yield slice(begin, end), parts
        slots.give_back(slot)
    core.wait_pushed()


def _slot_bytes(most: int, itemsize: int, world_size: int) -> int:
    """The size of a slot for tensors of ``most`` numbers at most, rounded up to a power of two."""
    if most == 0:
        return 0
    others = world_size - 1
    # A band has at least one number, however many ranks there are.
    needed = max(min(others * most * itemsize, BAND_BYTES), others * itemsize)
    return max(_LEAST_BYTES, 1 << (needed - 1).bit_length())


def _gather(
    exchange: Exchange, rank: int, shard: torch.Tensor, parts: Sequence[torch.Tensor]
) -> None:
    for band, arrived in exchange([shard] * len(parts), [len(part) for part in parts]):
        for source, (part, found) in enumerate(zip(parts, arrived, strict=True)):
            target = part[band]
            if source != rank or target.data_ptr() != found.data_ptr():
                target.copy_(found)


def _scatter(
    exchange: Exchange, rank: int, parts: Sequence[torch.Tensor], divisor: int, out: torch.Tensor
) -> None:
    total = out.new_empty(0, dtype=sum_dtype(out.dtype))
    for band, arrived in exchange(parts, [len(out)] * len(parts)):
        target = out[band]
        if len(total) < len(target):  # the first band is the longest
            total = torch.empty_like(target, dtype=total.dtype)
        found = total[: len(target)]
        add_up(arrived, divisor, found)
        target.copy_(found)


@dataclass(frozen=True)
class Job:
    """One collective of this rank. Memory is 1-D, contiguous and of one dtype. ``out`` does not
    overlap what is sent, or holds this rank's shard at its place."""

    rank: int
    world_size: int
    sent: torch.Tensor
    out: torch.Tensor

    @property
    def lent(self) -> Sequence[torch.Tensor]:
        """The memory that others may read or write as long as the job runs."""
        return self.sent, self.out

    def slot_bytes(self) -> int:
        return _slot_bytes(self._most(), self.sent.element_size(), self.world_size)

    def _most(self) -> int:
        """The most numbers that one rank sends another."""
        raise NotImplementedError

    def run(self, exchange: Exchange) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class AllGather(Job):
    """Gathers ``sent`` [n] to ``out`` [world_size * n], or as many numbers as ``sizes`` has."""

    sizes: Sequence[int] | None = None
    """How many numbers each rank sends; None for one n on all ranks."""

    def _most(self) -> int:
        return max(self.sizes or [len(self.sent)])

    def run(self, exchange: Exchange) -> None:
        sizes = self.sizes or [len(self.sent)] * self.world_size
        _gather(exchange, self.rank, self.sent, list(self.out.split(list(sizes))))


@dataclass(frozen=True)
class _Sum(Job):
    is_avg: bool

    @property
    def _divisor(self) -> int:
        return self.world_size if self.is_avg else 1


@dataclass(frozen=True)
class ReduceScatter(_Sum):
    """Sums ``sent`` [world_size * n], or of as many numbers as ``sizes`` has, over the ranks;
    ``out`` [n] is this rank's shard of the sum."""

    sizes: Sequence[int] | None = None
    """How many numbers each rank gets; None for one n on all ranks."""

    def _most(self) -> int:
        return max(self.sizes or [len(self.out)])

    def run(self, exchange: Exchange) -> None:
        sizes = self.sizes or [len(self.out)] * self.world_size
        parts = list(self.sent.split(list(sizes)))
        _scatter(exchange, self.rank, parts, self._divisor, self.out)


class AllReduce(_Sum):
    """Sums ``sent`` [n], of one n on all ranks, to ``out`` [n]; they may be one tensor."""

    def _is_one_step(self) -> bool:
        nbytes = self.sent.nbytes
        return nbytes <= ONE_STEP_BYTES and nbytes * (self.world_size - 1) <= BAND_BYTES

    def _most(self) -> int:
        n = len(self.sent)
        return n if self._is_one_step() else -(-n // self.world_size)

    def run(self, exchange: Exchange) -> None:
        most = self._most()
        if self._is_one_step():
            total = torch.empty_like(self.sent, dtype=sum_dtype(self.sent.dtype))
            for _, arrived in exchange([self.sent] * self.world_size, [most] * self.world_size):
                add_up(arrived, self._divisor, total)
            self.out.copy_(total)  # not before: it may be what is sent
            return
        # The last ranks' shards are shorter, or empty, where n is no multiple of the world size.
        cuts = [slice(i * most, (i + 1) * most) for i in range(self.world_size)]
        sent, sums = ([whole[cut] for cut in cuts] for whole in (self.sent, self.out))
        _scatter(exchange, self.rank, sent, self._divisor, sums[self.rank])
        _gather(exchange, self.rank, sums[self.rank], sums)
