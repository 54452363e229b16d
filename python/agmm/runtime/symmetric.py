"""A group's symmetric memory on CUDA, by torch: all ranks make and grow it together, and it lives
as long as CUDA graphs use it. Subclasses say what it holds."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from agmm import _core
from agmm.errors import AgmmError, InvalidArgument, Unsupported, reason_of
from agmm.runtime import backends, calls, capabilities, groups, rendezvous, sharing
from agmm.runtime.capabilities import Feature
from agmm.runtime.group_gpus import group_facts
from agmm.runtime.streams import capture_of, stream_of


def why_unfused(device: torch.device, feature: Feature = capabilities.MATMULS) -> str | None:
    """The reason why this device does not run a feature's kernels, or None."""
    return capabilities.why_not(feature, device)


_why_groups_unfused: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[torch.device, dict[Feature, str]]
]
_why_groups_unfused = weakref.WeakKeyDictionary()


def why_group_unfused(
    group: dist.ProcessGroup, device: torch.device, feature: Feature = capabilities.MATMULS
) -> str | None:
    """The reason why a rank of the group does not run a feature's kernels, or None; on all ranks
    alike, which may have several kinds of GPU. Collective at first use, whichever the feature.

    Args:
        device: this rank's, a GPU.
    """
    by_device = _why_groups_unfused.get(group)
    found = None if by_device is None else by_device.get(device)
    if found is None:
        known = groups.of(group)
        with known.lock:
            own = [why_unfused(device, each) or "" for each in capabilities.FEATURES]
            told = known.exchange("whether their GPUs run the kernels", json.dumps(own))
            reasons = capabilities.by_feature(told)
            found = {
                each: own[i] or _first(reasons[i]) for i, each in enumerate(capabilities.FEATURES)
            }
            _why_groups_unfused.setdefault(group, {})[device] = found
    return found[feature] or None


def _first(reasons: Sequence[str]) -> str:
    """The reason of the first rank that has one, or ""."""
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")


class Buffers(NamedTuple):
    core: Any
    """The core's object that makes calls with this memory."""
    memory: torch.Tensor
    handle: Any


class Barriers:
    """The barriers of a call by copies, which comes in turn with the group's others: only the
    barriers wait for other ranks, so what follows the last one may run beside later calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.over = torch.cuda.Event()
        """The event to be recorded after the last barrier."""

    def precede(self, stream: int) -> None:
        """Make the current stream, which ``stream`` is, wait for the last barrier."""
        del stream
        torch.cuda.current_stream(self._device).wait_event(self.over)


_Made = TypeVar("_Made", bound="SymmetricWorkspace")


class SymmetricWorkspace:
    """Memory of one group on one device, in which the ranks reach each other's.

    Every rank of the group must make the same calls in the same order, as with any collective.
    """

    core_class: Any
    """The class of the core whose objects make calls with this memory."""
    _granule: int
    """Slots grow in steps of so many bytes, so that slightly larger calls do not grow them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group_ref = weakref.ref(group)
        self.known = groups.of(group)
        self.lock = self.known.lock
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.slot_bytes = 0
        self.buffers: Buffers | None = None
        """The buffers that calls use; None before the first call."""
        self.captured = False
        """Whether the buffers are used in a CUDA graph."""
        self.retained: list[Buffers] = []
        """Earlier buffers, which CUDA graphs use that may be replayed."""
        self._why_unfused: str | None = None
        self._refused: tuple[int, str] | None = None
        calls.be_asked()

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise AgmmError("group: found a destroyed one, wanted one that is alive")
        return group

    @classmethod
    def create(
        cls: type[_Made],
        group: dist.ProcessGroup,
        slot_bytes: int,
        device: torch.device | None = None,
    ) -> _Made:
        """Make the workspace of ``group``. Collective.

        Raises:
            Unsupported: the GPUs of the group cannot reach each other's memory; all ranks raise.
            AgmmError: not all ranks came within AGMM_TIMEOUT_S.
        """
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        workspace = cls(group, device)
        workspace.ensure(slot_bytes)
        return workspace

    def ensure(self, slot_bytes: int) -> None:
        """Grow the slots to at least ``slot_bytes``. Collective where they have to grow.

        Raises:
            Unsupported: the GPUs cannot reach each other's memory, or one has too little left; all
                ranks raise, and the slots are as they were.
        """
        with self.lock:
            self.known.check_in_step()
            if self._why_unfused is not None:
                raise Unsupported(self._why_unfused)
            if slot_bytes <= self.slot_bytes or self.world_size == 1:
                return
            if self._refused is not None and slot_bytes > self._refused[0]:
                raise Unsupported(self._refused[1])
            if backends.is_fake(self.group):
                raise Unsupported(f"group: backend {backends.FAKE}, which has no other ranks")
            if torch.cuda.is_current_stream_capturing():
                raise AgmmError(
                    f"workspace: found slots of {self.slot_bytes} bytes during CUDA graph capture, "
                    f"wanted {slot_bytes}; call once with this shape before the capture, or "
                    "agmm.reserve"
                )
            with torch.cuda.device(self.device):
                self._grow(slot_bytes)

    def release(self) -> None:
        """Give the memory back; the next call takes it anew. Collective.

        Raises:
            AgmmError: a CUDA graph was captured with this memory, which it may use at any time; all
                ranks raise.
        """
        with self.lock:
            if self.world_size == 1:
                return
            self.check_no_graphs()
            if self.buffers is None:
                return
            with torch.cuda.device(self.device):
                self._finish_calls()
            self.buffers, self.slot_bytes, self._refused = None, 0, None

    def check_no_graphs(self) -> None:
        """Raises AgmmError on all ranks where CUDA graphs use this memory. Collective."""
        with self.lock:
            if self.world_size == 1:
                return
            captured = self.captured or bool(self.retained)
            found = self.known.exchange("whether graphs need a workspace", json.dumps(captured))
            ranks = [rank for rank, told in enumerate(found) if json.loads(told)]
            if ranks:
                raise AgmmError(
                    f"workspace: found CUDA graphs that use it on ranks {ranks}, wanted none: a "
                    "graph may be replayed as long as the group is there"
                )

    def _finish_calls(self) -> None:
        """Waits until no rank reads or writes the buffers any more. Collective."""
        error = ""
        try:
            torch.cuda.synchronize(self.device)
        except Exception as e:
            error = reason_of(e)
        self._check_all("whether their GPUs have finished", error, AgmmError, "could not finish:")
        self.known.all_are_over()

    def _check_all(self, topic: str, error: str, raised: type[AgmmError], failed: str) -> None:
        """Raises on all ranks where one has an error. Collective."""
        for rank, found in enumerate(self.known.exchange(topic, error)):
            if found:
                raise raised(f"workspace: rank {rank} {failed} {found}")

    def _grow(self, slot_bytes: int) -> None:
        wanted = slot_bytes
        is_captured = self._agree(slot_bytes)
        if is_captured:
            # The old buffers stay for the graphs. All buffers that stay are smaller than the new
            # ones.
            slot_bytes = max(slot_bytes, 2 * self.slot_bytes)
        slot_bytes = -(-slot_bytes // self._granule) * self._granule
        self._know_group()
        try:
            memory = self._allocate(slot_bytes)
        except Unsupported as error:
            self._refused = wanted - 1, str(error)
            raise
        self._finish_calls()
        try:
            buffers = self._open(memory, slot_bytes)
        except Unsupported as error:
            # Slots of any larger size are refused from now on: what failed does not depend on the
            # size, and the next failure may take torch minutes to find out.
            self._refused = self.slot_bytes, str(error)
            raise
        if self.buffers is not None and self.captured:
            self.retained.append(self.buffers)
        self.buffers, self.slot_bytes, self.captured = buffers, slot_bytes, False

    def memory_bytes(self, slot_bytes: int) -> int:
        """The size of this rank's memory, in bytes."""
        return int(self.core_class.workspace_bytes(slot_bytes, self.world_size))

    def _allocate(self, slot_bytes: int) -> torch.Tensor:
        """Allocate this rank's memory before anything is given up. All ranks raise where one has no
        room."""
        memory, error = None, ""
        size = self.memory_bytes(slot_bytes)
        try:
            memory = symm_mem.empty(size, dtype=torch.uint8, device=self.device)
        except Exception as e:
            error = f"{size} bytes of GPU memory: {reason_of(e)}"
        topic = "whether they have memory for a workspace"
        self._check_all(topic, error, Unsupported, "could not get")
        assert memory is not None
        return memory

    def _open(self, memory: torch.Tensor, slot_bytes: int) -> Buffers:
        """Call `open_memory` on all ranks, which all raise where one of them does. After it all
        words are set: each rank's GPU has finished before the others hear of it."""
        buffers, error = None, ""
        try:
            buffers = self.open_memory(memory, slot_bytes)
            torch.cuda.synchronize(self.device)
        except Exception as e:  # whatever it is, the other ranks wait to hear of it
            error = reason_of(e)
        topic = "whether their workspaces are ready"
        self._check_all(topic, error, Unsupported, "could not get ready:")
        assert buffers is not None
        return buffers

    def open_memory(self, memory: torch.Tensor, slot_bytes: int) -> Buffers:
        """Make the buffers whose core object makes calls with memory that every rank has.
        Collective; it may raise on one rank alone."""
        rendezvous.made.count += 1
        try:
            handle = symm_mem.rendezvous(memory, self.group.group_name)
        except Exception as e:
            rendezvous.made.failed = reason_of(e)
            raise
        self._set_words(memory, slot_bytes)
        places = list(handle.buffer_ptrs)
        if places[self.rank] != memory.data_ptr():
            raise AgmmError(
                f"found it {memory.data_ptr() - places[self.rank]} bytes inside another "
                "allocation of torch's pool for symmetric memory, wanted one of its own; "
                "TORCH_SYMMMEM_IMPLICIT_POOL=0 does without the pool"
            )
        return Buffers(self.core_of(places, handle, slot_bytes), memory, handle)

    def _set_words(self, memory: torch.Tensor, slot_bytes: int) -> None:
        """Set the words to what they are before the first call."""
        first_word = self.core_class.words_offset(slot_bytes, self.world_size)
        words = memory[first_word:].view(torch.int32)
        words.zero_()
        given = self.core_class.credit_words(self.world_size)
        words[torch.tensor(given, dtype=torch.long)] = 1

    def _know_group(self) -> None:
        """Finds out what `core_of` has to know of the group, before a rank may fail alone.
        Collective at first use."""
        group_facts(self.group, self.device)

    def core_of(self, places: list[int], handle: Any, slot_bytes: int) -> Any:
        """The core's object that makes calls with the memory at these addresses, by rank. All ranks
        use as many multiprocessors for it: what a GPU has beyond the group's number stays free."""
        all_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        reserved = all_sms - group_facts(self.group, self.device).sm_count
        _core.load_quantizers()  # which run before calls; loading them later waits for the GPU
        return self.core_class(self.rank, places, slot_bytes, reserved)

    def _agree(self, slot_bytes: int) -> bool:
        """Check that all ranks want the same slots and that their GPUs reach each other; else all
        ranks raise.

        Returns:
            Whether a rank has captured calls with the present ones.
        """
        found = sharing.agree(self.known, self.device, slot_bytes, self.captured)
        self._why_unfused = found.why_not
        if found.why_not is not None:
            raise Unsupported(found.why_not)
        return found.is_captured

    def enter(self, slot_bytes: int) -> Buffers:
        """The buffers of a call on the current stream that needs slots of that size, after the wait
        for its turn; under `lock`. Every call comes here, so what it calls is written out."""
        known = self.known
        if not known.is_in_step:
            known.check_in_step()
        if slot_bytes > self.slot_bytes:
            self.ensure(slot_bytes)
        buffers = self.buffers
        assert buffers is not None
        last = known.last_before(buffers.core, capture_of(self.device))
        if last is not None:
            last.precede(stream_of(self.device))
        return buffers

    def buffers_of(self, slot_bytes: int) -> Buffers:
        """The buffers of a call that needs slots of that size and may run beside the group's
        others."""
        self.known.check_in_step()
        if slot_bytes > self.slot_bytes:
            self.ensure(slot_bytes)
        assert self.buffers is not None
        return self.buffers

    def come_in_turn(self, calls: groups.Calls) -> None:
        """Make the current stream wait for the group's last call: see `Group.last_before`."""
        last = self.known.last_before(calls, capture_of(self.device))
        if last is not None:
            last.precede(stream_of(self.device))

    @contextmanager
    def in_one_piece(self, *, is_captured: bool) -> Iterator[None]:
        """Enclose what enqueues a call by copies. Where that fails half-way, by a CUDA failure or
        an interrupt, later barriers would meet those that peers still wait in, since barriers carry
        no tag of their call. So all later calls of the group refuse; a capture, which has not run,
        ends."""
        try:
            yield
        except BaseException:
            if is_captured:
                with suppress(RuntimeError):  # not allowed in a capture, which ends it
                    torch.cuda.current_stream(self.device).synchronize()
            else:
                self.known.is_in_step = False
            raise

    def refused(self, error: ValueError) -> InvalidArgument:
        """The error to raise where the core has enqueued nothing of the call that entered last. It
        is called under `lock`."""
        self.known.give_turn_back()
        return InvalidArgument(str(error))


def enqueue(workspace: SymmetricWorkspace, slot_bytes: int, name: str, *arguments: Any) -> None:
    """Enqueue a call of the core, by its name there, which has slots of that size. It is called
    under `SymmetricWorkspace.lock`.

    Raises:
        InvalidArgument: what the core cannot take; nothing was enqueued.
        Unsupported, AgmmError: as `SymmetricWorkspace.ensure`.
    """
    buffers = workspace.enter(slot_bytes)
    captured = True  # also where the call fails half-way
    try:
        captured = getattr(buffers.core, name)(*arguments)
    except ValueError as error:
        captured = False
        raise workspace.refused(error) from None
    finally:
        if captured:
            workspace.captured = True
            workspace.known.captured_calls += 1
