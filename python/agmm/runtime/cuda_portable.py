"""The portable path of GPUs that reach each other's memory: `portable`, in symmetric memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import Unsupported
from agmm.runtime.copies import CopyWorkspace, CudaSlots, Slots
from agmm.runtime.cuda_collectives import SLOT_BYTES, CollectivesWorkspace
from agmm.runtime.group_topology import topology_of
from agmm.runtime.portable import (
    HALVES,
    Beside,
    Consume,
    Copy,
    Whole,
    gather,
    scatter,
    sent_bytes,
)
from agmm.runtime.rings import ring_of


class _CopyStream:
    """A stream of copies beside the current one."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._current = torch.cuda.current_stream(stream.device)

    def fork(self) -> None:
        self._stream.wait_stream(self._current)

    def run(self, copies: Sequence[Copy]) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source)
            done = torch.cuda.Event()
            done.record()
        return done

    def wait(self, mark: torch.cuda.Event) -> None:
        self._current.wait_event(mark)

    def join(self) -> None:
        self._current.wait_stream(self._stream)


class _TaggedSlots(CudaSlots):
    """Slots whose barriers carry the tag of the call, so that ranks whose calls differ are found
    out, and end within the limit of every wait, with its message."""

    meet: Callable[[], None]

    def barrier(self) -> None:
        self.meet()


class _PortableWorkspace(CopyWorkspace):
    """Slots for calls of one kind, whose barriers are kernels of agmm's collectives."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, collectives: CollectivesWorkspace
    ) -> None:
        super().__init__(group, device)
        self._collectives = collectives
        self._turn = 0
        self._ring: Sequence[int] = range(self.world_size)

    def _know_group(self) -> None:
        links = topology_of(self.group, self.device).links
        if links:
            self._ring = ring_of(links)

    def core_of(self, places: list[int], handle: Any, slot_bytes: int) -> CudaSlots:
        _core.load_ordered_sums()  # loading them in a call waits for the GPU
        slots = _TaggedSlots(handle, slot_bytes, self._slots_per_rank())
        slots.ring = self._ring
        return slots

    def make_room(self, nbytes: int) -> None:
        """Make slots of at least that size. Collective.

        Raises:
            Unsupported: the group can have no such memory; all ranks raise.
        """
        with self.lock:
            self._collectives.ensure(SLOT_BYTES)
            self.ensure(nbytes)

    @contextmanager
    def _in_call(self, nbytes: int, what: str, words: str) -> Iterator[tuple[Slots, Beside, bool]]:
        """The slots for a call, which is enqueued meanwhile, the place of its copies, and whether
        it is captured. Under `lock`.

        Args:
            nbytes: the size that slots have to have.
            what: what all ranks have to agree on.
            words: the call, for messages.

        Raises:
            Unsupported: the group can have no such memory, or would have to make some during a
                capture; all ranks raise.
        """
        collectives = self._collectives
        is_captured = torch.cuda.is_current_stream_capturing()
        if is_captured and not (collectives.is_ready and nbytes <= self.slot_bytes):
            raise Unsupported(
                f"workspace: found slots of {self.slot_bytes} bytes for copies during CUDA graph "
                f"capture, wanted {nbytes}"
            )
        collectives.ensure(SLOT_BYTES)
        slots: _TaggedSlots = self.buffers_of(nbytes).core
        slots.meet = lambda: collectives.barrier(what, words)
        stream = torch.cuda.current_stream(self.device)
        with self.in_one_piece(is_captured=is_captured):
            if is_captured:
                self.captured = True
            else:
                stream.wait_event(self._done)
            yield slots, _CopyStream(self._background.of_capture()), is_captured
            if not is_captured:
                self._done.record(stream)


class PortableGather(_PortableWorkspace):
    """The workspace of all-gathers beside products of the library. A slot holds a shard."""

    def _slots_per_rank(self) -> int:
        return HALVES

    @torch.no_grad()
    def gather(
        self,
        parts: Sequence[torch.Tensor],
        wholes: Sequence[Whole],
        consume: Consume,
        *,
        pieces: int,
        keeps_own: bool,
        words: str,
    ) -> None:
        """Enqueue `gather` on the current stream. Collective.

        Args:
            words: the call, for messages.

        Raises:
            Unsupported: as `_in_call` does.
            AgmmError: an earlier call of the group failed half-way.
        """
        sent = ", ".join(f"{list(part.shape)} {part.dtype}" for part in parts)
        agreed = f"portable gather of {sent} in {pieces} pieces, {keeps_own}"
        errors: list[Exception] = []

        def consume_or_note(*rows: Any) -> None:
            try:
                if not errors:
                    consume(*rows)
            except Exception as error:  # the peers wait for the rest of this call
                errors.append(error)

        with self.lock:
            of_call = self._in_call(sent_bytes(parts), agreed, words)
            with of_call as (slots, beside, is_captured):
                self._turn = gather(
                    *(slots, parts, wholes, consume_or_note, self._turn),
                    pieces=pieces,
                    beside=beside,
                    keeps_own=keeps_own,
                    is_captured=is_captured,
                )
        if errors:
            raise errors[0]


class PortableScatter(_PortableWorkspace):
    """The workspace of products of the library that are scattered. A slot holds what one rank sends
    to another."""

    def _slots_per_rank(self) -> int:
        return HALVES * self.world_size

    @torch.no_grad()
    def scatter(
        self,
        like: torch.Tensor,
        product: Callable[[int, torch.Tensor], None],
        total: Callable[[torch.Tensor], None],
        *,
        what: str,
        words: str,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Enqueue `scatter` on the current stream. Collective; errors are those of
        `PortableGather.gather`.

        Args:
            like: of the shape, dtype and device of a product.
            what: what else has to be the same on all ranks.
            words: the call, for messages.
        """
        sent = like.new_empty(self.world_size - 1, *like.shape)
        agreed = f"portable scatter of {list(like.shape)} {like.dtype}{what}"
        with self.lock:
            of_call = self._in_call(sent_bytes([like]), agreed, words)
            with of_call as (slots, beside, is_captured):
                self._turn = scatter(
                    *(slots, sent, product, total, self._turn),
                    beside=beside,
                    meanwhile=meanwhile,
                    is_captured=is_captured,
                )
