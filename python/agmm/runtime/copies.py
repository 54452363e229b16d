"""All-gather and reduce-scatter by copy engines, of tensors that lie anywhere: through slots in
symmetric memory that are made once. Beside a matmul they take one multiprocessor, for a barrier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from agmm import _env
from agmm.errors import InvalidArgument, Unsupported
from agmm.runtime import rings
from agmm.runtime.cuda_background import BackgroundStreams, CudaBackground
from agmm.runtime.symmetric import Barriers, SymmetricWorkspace

MOST_BYTES = 32 << 20
"""The largest slot. What is larger goes through it in pieces: at 300 GB/s a slot takes 0.1 ms for
each peer, a barrier 5 µs."""

_ALIGNMENT = 256  # that of CUDA's own allocations


class Slots(Protocol):
    """Slots of equal size on every rank, which all ranks of a group reach."""

    rank: int
    world_size: int
    ring: Sequence[int]
    """The ranks in the order in which they copy: see `rings`."""

    def of(self, rank: int) -> torch.Tensor:
        """The slots of that rank, uint8 [number of slots, bytes of a slot]."""
        ...

    def barrier(self) -> None:
        """What follows in the order of the stream runs once all ranks have come here."""
        ...


def all_gather(
    slots: Slots, out: torch.Tensor, shard: torch.Tensor, turn: int, *, is_captured: bool = False
) -> int:
    """Copies every rank's shard to ``out``. Needs two slots on each rank.

    Each rank copies its shard to one of its slots, and after a barrier the others' from theirs. The
    slots are taken in turn, so a rank overwrites what it had two barriers ago, and every rank has
    come to the second of these after its copies from there.

    A graph is replayed after any number of calls, and a rank may capture more than another. So a
    captured call takes no turn: a barrier before it says that all have copied what was there, and
    one behind it says so of what it had.

    Args:
        out: [world_size * n], contiguous.
        shard: [n], contiguous; it may be this rank's shard of ``out``.
        turn: what the last call returned, 0 before the first.
    """
    shards = _bytes(out).view(slots.world_size, -1)
    own = _bytes(shard)
    slot = 0 if is_captured else turn
    for begin, end in _pieces(own.numel(), slots.of(slots.rank).shape[1]):
        size = end - begin
        if is_captured:
            slots.barrier()
        slots.of(slots.rank)[slot, :size].copy_(own[begin:end])
        slots.barrier()
        for source in rings.others(slots.ring, slots.rank):
            shards[source, begin:end].copy_(slots.of(source)[slot, :size])
        if not is_captured:
            slot = turn = 1 - slot
    if is_captured:
        slots.barrier()
    if shards[slots.rank].data_ptr() != own.data_ptr():
        shards[slots.rank].copy_(own)
    return turn


def reduce_scatter(
    slots: Slots, out: torch.Tensor, partials: torch.Tensor, *, average: bool
) -> None:
    """Sums every rank's partial sum for this one into ``out``. Needs a slot for each rank on each.

    Each rank copies its partial sums to the slots of their owners. Before that, a barrier says
    that all have summed what was there; behind another one kernel sums what has come. The sum is
    float32 inside for dtypes of 16 bits, rounded once, and has the same bits in every call of the
    same sizes.

    Args:
        out: [n], contiguous, floating.
        partials: [world_size * n], contiguous, of the same dtype.
        average: divide by the number of ranks.
    """
    rows = partials.view(slots.world_size, -1)
    come = slots.of(slots.rank).view(out.dtype)
    for begin, end in _pieces(out.numel(), come.shape[1]):
        size = end - begin
        slots.barrier()
        for target in rings.others(slots.ring, slots.rank):
            slot = slots.of(target)[slots.rank].view(out.dtype)
            slot[:size].copy_(rows[target, begin:end])
        come[slots.rank, :size].copy_(rows[slots.rank, begin:end])
        slots.barrier()
        (torch.mean if average else torch.sum)(come[:, :size], dim=0, out=out[begin:end])


def _slot_bytes(nbytes: int) -> int:
    return min(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, MOST_BYTES)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _pieces(size: int, most: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size, most):
        yield begin, min(size, begin + most)


class CudaSlots:
    """Slots in torch's symmetric memory."""

    def __init__(self, handle: Any, slot_bytes: int, count: int) -> None:
        self.rank: int = handle.rank
        self.world_size: int = handle.world_size
        self.ring: Sequence[int] = range(self.world_size)
        self._handle = handle
        self._limit_ms = _env.timeout_ms()
        self.barriers: Barriers | None = None
        """The barriers of the call under way, if it comes in turn."""
        self._slots: list[torch.Tensor] = [
            handle.get_buffer(rank, (count, slot_bytes), torch.uint8)
            for rank in range(self.world_size)
        ]

    def of(self, rank: int) -> torch.Tensor:
        return self._slots[rank]

    def barrier(self) -> None:
        self._handle.barrier(channel=0, timeout_ms=self._limit_ms)
        if self.barriers is not None:
            self.barriers.over.record()


class CopyWorkspace(SymmetricWorkspace):
    """Slots of a group on one device. Its calls are ordered on whichever streams they come; those
    of a CUDA graph's capture, and replays, the caller has to order.

    ``in_turn``: a call comes behind the group's last one, of any kind, and later ones come behind
    its barriers. Without it, for FSDP2, docs/dev/no-ring.md says why no ranks wait in a ring.
    """

    _granule = 4 << 20

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._done = torch.cuda.Event()
        self._background = BackgroundStreams(device)

    def _slots_per_rank(self) -> int:
        raise NotImplementedError

    def memory_bytes(self, slot_bytes: int) -> int:
        return self._slots_per_rank() * slot_bytes

    def _set_words(self, memory: torch.Tensor, slot_bytes: int) -> None:
        """It has none: torch's barrier has words of its own."""

    def _know_group(self) -> None:
        """Copies take no multiprocessors, and no links with atomics."""

    def core_of(self, places: list[int], handle: Any, slot_bytes: int) -> CudaSlots:
        return CudaSlots(handle, slot_bytes, self._slots_per_rank())

    def ensure_for(self, nbytes: int) -> None:
        """`ensure` for a call that sends so many bytes to each rank; Unsupported also where the
        slots would have to grow during a capture."""
        wanted = _slot_bytes(nbytes)
        if wanted > self.slot_bytes and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                f"workspace: found slots of {self.slot_bytes} bytes for copies during CUDA graph "
                f"capture, wanted {wanted}"
            )
        self.ensure(wanted)

    @contextmanager
    def _call(
        self, one: torch.Tensor, whole: torch.Tensor, in_turn: bool, is_captured: bool
    ) -> Iterator[Slots]:
        """The slots for a call, which is enqueued meanwhile. Under `lock`.

        Args:
            one: what a rank sends in a gather, or receives in a reduce-scatter.
            whole: as many of these as there are ranks.
        """
        if not (
            one.is_contiguous()
            and whole.is_contiguous()
            and (self.world_size * one.numel(), one.dtype) == (whole.numel(), whole.dtype)
        ):
            raise InvalidArgument(
                f"out: found tensors of {list(whole.shape)} {whole.dtype} and {list(one.shape)} "
                f"{one.dtype}, wanted contiguous ones of [{self.world_size} * n] and [n] of one "
                "dtype"
            )
        self.ensure_for(one.nbytes)
        slots: CudaSlots = self.buffers_of(_slot_bytes(one.nbytes)).core
        with self.in_one_piece(is_captured=is_captured):
            slots.barriers = Barriers(self.device) if in_turn else None
            if slots.barriers is not None:
                self.come_in_turn(slots.barriers)
            if is_captured:
                self.captured = True
            else:
                torch.cuda.current_stream(self.device).wait_event(self._done)
            yield slots
            if not is_captured:
                self._done.record(torch.cuda.current_stream(self.device))


class GatherCopies(CopyWorkspace):
    """The workspace of all-gathers by copies."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._turn = 0

    def _slots_per_rank(self) -> int:
        return 2

    @torch.no_grad()
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, in_turn: bool = False) -> None:
        """Enqueue an all-gather on the current stream. Collective; arguments as `all_gather`'s.

        Raises:
            Unsupported: the GPUs of the group cannot reach each other's memory, or the slots would
                have to grow during CUDA graph capture; all ranks raise.
            InvalidArgument: tensors of other sizes, strides or dtypes.
            AgmmError: an earlier call of the group failed half-way.
        """
        with self.lock:
            is_captured = torch.cuda.is_current_stream_capturing()
            with self._call(shard, out, in_turn, is_captured) as slots:
                self._turn = all_gather(slots, out, shard, self._turn, is_captured=is_captured)

    def start_all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> CudaBackground:
        """`all_gather` in turn, behind the current stream, on another one."""
        with self.lock:
            self.ensure_for(shard.nbytes)  # may raise, with nothing forked yet
            return self._background.start(
                lambda: self.all_gather(out, shard, in_turn=True), shard, out
            )


class ScatterCopies(CopyWorkspace):
    """The workspace of reduce-scatters by copies."""

    def _slots_per_rank(self) -> int:
        return self.world_size

    @torch.no_grad()
    def reduce_scatter(
        self, out: torch.Tensor, partials: torch.Tensor, *, average: bool, in_turn: bool = False
    ) -> None:
        """Enqueue a reduce-scatter on the current stream. Collective; arguments as
        `reduce_scatter`'s, errors as `GatherCopies.all_gather`'s."""
        with self.lock:
            is_captured = torch.cuda.is_current_stream_capturing()
            with self._call(out, partials, in_turn, is_captured) as slots:
                reduce_scatter(slots, out, partials, average=average)

    def start_reduce_scatter(
        self, out: torch.Tensor, partials: torch.Tensor, *, average: bool
    ) -> CudaBackground:
        """`reduce_scatter` in turn, behind the current stream, on another one."""
        with self.lock:
            self.ensure_for(out.nbytes)
            return self._background.start(
                lambda: self.reduce_scatter(out, partials, average=average, in_turn=True),
                partials,
                out,
            )
