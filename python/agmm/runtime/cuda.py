"""The CUDA workspace of gathers: slots, signals and credits on torch's symmetric memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from agmm import _core, _env
from agmm.runtime.symmetric import Barriers, Buffers, SymmetricWorkspace

_STAGING_ALIGNMENT = 256  # that of CUDA's own allocations


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _STAGING_ALIGNMENT) * _STAGING_ALIGNMENT


class CudaWorkspace(SymmetricWorkspace):
    """Gather buffers, signals and credits of one group on one device."""

    core_class = _core.CudaWorkspace
    _granule = 32 << 20

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._gather_stream: torch.cuda.Stream | None = None
        self._gathered = torch.cuda.Event()  # of the last eager gather by copies
        self._unfinished: torch.Tensor | None = None  # held while copies may be written to it

    def _staging_offset(self, slot_bytes: int) -> int:
        return _aligned(super().memory_bytes(slot_bytes))

    def memory_bytes(self, slot_bytes: int) -> int:
        return self._staging_offset(slot_bytes) + _aligned(-(-slot_bytes // self.world_size))

    def _staged(self, buffers: Buffers, rank: int, like: torch.Tensor) -> torch.Tensor:
        """The shard that a rank has staged for its peers' `start_all_gather`, a tensor of the shape
        and dtype of `like`. It does not lie where pull stages a shard, since a pull would have to
        wait until all peers have copied it."""
        offset = self._staging_offset(buffers.core.slot_bytes) // like.element_size()
        staged: torch.Tensor = buffers.handle.get_buffer(rank, like.shape, like.dtype, offset)
        return staged

    @torch.no_grad()
    def start_all_gather(self, shard: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to gather ``shard`` along dimension 0 by copy engines. Collective.

        A matmul beside it keeps its multiprocessors, which NCCL's kernel would take from it: each
        rank stages its shard, and after a barrier copies the others' from where they lie (so does
        torch's ``symm_mem._low_contention_all_gather``, in the workspace that torch's fused ops use
        at the same time). One gather of a group at a time: eager calls are ordered on whichever
        streams they come; those of a capture, and replays, the caller has to order.

        Invariant: a rank stages its shard after the first barrier, which every rank reaches after
        it has finished its previous gather; and copies after the second, which every rank reaches
        after it has staged. Both barriers are on the caller's stream: beside a matmul that fills
        the GPU they would not begin before its end.

        Args:
            shard: [M_local, ...], contiguous, the same shape and dtype on all ranks. It may be
                written as soon as this returns.

        Returns:
            A function to call once, on the same stream, which returns the gathered tensor
            [world_size * M_local, ...].

        Raises:
            Unsupported: the GPUs of the group cannot reach each other's memory; all ranks raise.
            AgmmError: the slots are smaller than the gathered tensor during CUDA graph capture, or
                an earlier call of the group failed half-way.
        """
        with self.lock:
            buffers = self.buffers_of(shard.nbytes * self.world_size)
            # This may fail for want of memory, with nothing enqueued yet.
            gathered = shard.new_empty(self.world_size * shard.shape[0], *shard.shape[1:])
            is_captured = torch.cuda.is_current_stream_capturing()
            with self.in_one_piece(is_captured=is_captured):
                return self._gather(buffers, shard, gathered, is_captured)

    def _gather(
        self, buffers: Buffers, shard: torch.Tensor, gathered: torch.Tensor, is_captured: bool
    ) -> Callable[[], torch.Tensor]:
        barriers = Barriers(self.device)
        self.come_in_turn(barriers)
        stream = torch.cuda.current_stream(self.device)
        if is_captured:
            self.captured = True
        else:
            stream.wait_event(self._gathered)
        if self._gather_stream is None:
            self._gather_stream = torch.cuda.Stream(self.device)
        limit_ms = _env.timeout_ms()
        buffers.handle.barrier(channel=0, timeout_ms=limit_ms)
        self._staged(buffers, self.rank, shard).copy_(shard)
        buffers.handle.barrier(channel=0, timeout_ms=limit_ms)
        barriers.over.record(stream)
        self._gather_stream.wait_stream(stream)
        done = torch.cuda.Event()
        # The tensor is held until it is finished. Where an exception keeps the caller from that, it
        # is held until the next gather, which waits for the copies.
        self._unfinished = gathered
        with torch.cuda.stream(self._gather_stream):
            parts = gathered.chunk(self.world_size)
            for i in range(self.world_size):  # the own one last: nobody waits for its links
                source = (self.rank + 1 + i) % self.world_size
                parts[source].copy_(self._staged(buffers, source, shard))
            done.record()
        if not is_captured:
            self._gathered = done

        def finish() -> torch.Tensor:
            torch.cuda.current_stream(self.device).wait_event(done)
            self._unfinished = None
            return gathered

        return finish
