"""Slots of a group's CPU ranks in POSIX shared memory: who has them, whose turn it is, how they
grow."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import ClassVar

import torch
import torch.distributed as dist

from agmm import _core, _env
from agmm.errors import AgmmError, Unsupported, reason_of
from agmm.runtime import calls, groups
from agmm.runtime.background import Worker
from agmm.runtime.calls import Call
from agmm.runtime.groups import Group

_NAN_BYTE = 0xFF  # a NaN in every floating-point type when all bytes of the number are this


@lru_cache(maxsize=4096)
def tag_of(rows: int, k: int, what: str, return_A: bool) -> int:
    """The tag that tells calls apart: the same on all ranks that call alike."""
    return _core.call_tag(rows, k, what, return_A)


class CpuSlots:
    """Two slots per rank of one group, in shared memory, each for a gathered A or for partial sums.

    Every method that is said to be collective must be called by all ranks of the group, in the same
    order. Threads of a process take turns.
    """

    poison: ClassVar[bool] = False
    """Whether each slot is filled with NaN before its senders may write to it, for tests."""

    rank: int
    world_size: int
    slot_bytes: int
    chunks_per_shard: int
    """The number of chunks of each rank for which a slot has signals."""

    def __init__(
        self, group: dist.ProcessGroup, slot_bytes: int, *, chunks_per_shard: int = 1
    ) -> None:
        # The reference is weak: workspaces are cached by group, and end with it.
        self._group_ref = weakref.ref(group)
        self.group = groups.of(group)
        self._push_delay_us = 0
        self.lent: Sequence[torch.Tensor] | torch.Tensor | None = None
        """The tensors that the copy thread reads."""
        self.worker = Worker()
        self._interrupted = False
        self._refused: tuple[int, int, str] | None = None
        calls.be_asked()
        self._use(_connect(self.group, slot_bytes, chunks_per_shard, poison=self.poison))

    def _use(self, core: _core.CpuWorkspace) -> None:
        self.core = core
        self._finalizer = weakref.finalize(self, _close, core, self.worker)
        self.rank = core.rank
        self.world_size = core.world_size
        self.slot_bytes = core.slot_bytes
        self.chunks_per_shard = core.chunks_per_shard
        self._slots = [_bytes_at(core.slot_ptr(s), self.slot_bytes) for s in (0, 1)]
        self._next_slot = 0
        core.set_push_delay_us(self._push_delay_us)

    def close(self) -> None:
        """Stop the copy thread and give the memory back. Harmless when called again."""
        self._slots = []
        self._finalizer()

    def set_push_delay_us(self, us: int) -> None:
        """Delay every chunk by a random time up to ``us`` before it is pushed, for tests."""
        self._push_delay_us = us
        self.core.set_push_delay_us(us)

    def reserve(self, slot_bytes: int) -> None:
        """Grow the slots to at least ``slot_bytes``, the same on all ranks. Collective.

        Raises:
            Unsupported: a rank has no memory for it; all ranks raise, and keep the slots they had.
        """
        tag = tag_of(0, 0, f"reserve {slot_bytes}", False)
        with self.in_step(tag, Call("reserve", nbytes=slot_bytes)):
            self._pass_tag(tag)
            self.make_room(slot_bytes, self.chunks_per_shard, tag)

    def meet(self, what: str, call: Call) -> None:
        """Wait until all ranks are about to do the same with the group's backend. Collective.

        The backend has limits and messages of its own, and takes a collective of another kind or
        shape for this one. After this it finds its peers there, with the same call.

        Args:
            what: what has to be the same on all ranks.
            call: the call, for messages.
        """
        if self.world_size == 1:
            return
        tag = tag_of(0, 0, what, False)
        with self.in_step(tag, call):
            self._pass_tag(tag)

    @contextmanager
    def in_step(self, tag: int, call: Call) -> Iterator[None]:
        """Enclose one call of the group, made after the calls in the background."""
        with self.group.lock:
            self.worker.wait_idle()
            self.begin(call)
            with self.under_way(tag, call):
                yield

    def begin(self, call: Call) -> None:
        """Do what precedes each call of the group: checks, limits and the call's number."""
        self.check_usable()
        self.core.timeout_s = _env.timeout_s()
        self.core.warn_s = _env.warn_s()
        self.group.calls += 1
        call.number = self.group.calls

    def check_usable(self) -> None:
        if self._interrupted:
            raise AgmmError(
                "workspace: found one whose last call was interrupted, wanted one in step with "
                "the other ranks; make a new process group"
            )
        if not self._finalizer.alive:
            raise AgmmError("workspace: found a closed one, wanted an open one")

    @contextmanager
    def under_way(self, tag: int, call: Call) -> Iterator[None]:
        """Enclose what the ranks do together in a call. An exception that ends it half-way, other
        than a refusal that all ranks make, leaves this rank out of step."""
        self.group.call = tag, call
        try:
            yield
        except Unsupported:
            raise
        except BaseException:
            self._interrupted = True
            raise
        finally:
            self.group.call = None

    def _pass_tag(self, tag: int) -> None:
        """Send the tag to all ranks in a round without data."""
        core, slot = self.core, self.take_slot()
        core.push(slot, 0, 0, 0, tag)
        for chunk in range(self.world_size * self.chunks_per_shard):
            if chunk // self.chunks_per_shard != self.rank:
                core.wait_chunk(slot, chunk, tag)
        core.release(slot)
        core.wait_pushed()

    def make_room(self, slot_bytes: int, chunks_per_shard: int, tag: int) -> None:
        """Replace the workspace by a larger one where it is too small. It is collective then.

        Whether to grow is each rank's own decision, and one with another shape would not take part.
        So the tag goes round first, without data: whoever made a different call is found out.
        """
        if slot_bytes <= self.slot_bytes and chunks_per_shard <= self.chunks_per_shard:
            return
        if self._refused is not None:
            refused_bytes, refused_chunks, reason = self._refused
            if slot_bytes >= refused_bytes and chunks_per_shard >= refused_chunks:
                raise Unsupported(reason)
        self._pass_tag(tag)
        slot_bytes = max(slot_bytes, self.slot_bytes)
        chunks_per_shard = max(chunks_per_shard, self.chunks_per_shard)
        try:
            core = _connect(self.group, slot_bytes, chunks_per_shard, poison=self.poison)
        except Unsupported as error:
            reason = f"workspace: no room for gather buffers of {slot_bytes} bytes: {error}"
            self._refused = slot_bytes, chunks_per_shard, reason
            raise Unsupported(reason) from None
        self.close()
        self._use(core)

    def take_slot(self) -> int:
        slot, self._next_slot = self._next_slot, 1 - self._next_slot
        return slot

    def memory_of(self, slot: int) -> torch.Tensor:
        """The bytes of a slot."""
        return self._slots[slot]

    def give_back(self, slot: int) -> None:
        """Let the senders write to a slot again."""
        if self.poison:
            self._slots[slot].fill_(_NAN_BYTE)
        self.core.release(slot)

    def arrivals(self, slot: int, tag: int) -> Iterator[tuple[int, int]]:
        """Yield source and number of each chunk that the workspace has room for, once it has
        arrived: the own ones first, then around the ring."""
        chunks = self.world_size * self.chunks_per_shard
        for step in range(chunks):
            chunk = (self.rank * self.chunks_per_shard + step) % chunks
            source, i = divmod(chunk, self.chunks_per_shard)
            if source != self.rank:
                self.core.wait_chunk(slot, chunk, tag)
            yield source, i


def _close(core: _core.CpuWorkspace, worker: Worker) -> None:
    core.end_waits()
    worker.stop()
    core.close()


def _bytes_at(address: int, size: int) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def _connect(
    group: Group, slot_bytes: int, chunks_per_shard: int, *, poison: bool
) -> _core.CpuWorkspace:
    """Make a new workspace of the group. Raises Unsupported on all ranks where one cannot have
    it."""
    limit_s = _env.timeout_s()
    hosts = len(set(group.hosts()))
    if hosts > 1:
        raise Unsupported(
            f"group: found ranks on {hosts} hosts, wanted one: the CPU backend uses shared memory"
        )
    wishes = group.exchange("the size of a workspace", str(slot_bytes))
    slot_bytes = max(int(wish) for wish in wishes)

    core: _core.CpuWorkspace | None = None
    try:
        error = ""
        try:
            core = _core.CpuWorkspace(
                group.rank, group.world_size, slot_bytes, chunks_per_shard, limit_s
            )
        except Exception as e:  # whatever it is, the other ranks wait to hear of it
            error = reason_of(e)
        names = group.exchange("the name of a workspace", "" if core is None else core.name)
        if core is not None and all(names):
            try:
                core.connect(names)
            except Exception as e:
                error = reason_of(e)
        _check_all("whether they have mapped a workspace", error, group)
        assert core is not None
        # Every rank has mapped what it needs, so the names can go. Memory comes only then: nobody
        # who is killed leaves it behind.
        try:
            core.take_memory()
            if poison:
                for slot in (0, 1):
                    _bytes_at(core.slot_ptr(slot), slot_bytes).fill_(_NAN_BYTE)
        except Exception as e:
            error = reason_of(e)
        _check_all("whether they have a workspace", error, group)
        return core
    except BaseException:
        if core is not None:
            core.close()
        raise


def _check_all(topic: str, error: str, group: Group) -> None:
    """Raises Unsupported on all ranks where one has an error. Collective."""
    for peer, found in enumerate(group.exchange(topic, error)):
        if found:
            raise Unsupported(f"rank {peer}: {found}")
