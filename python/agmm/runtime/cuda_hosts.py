"""The portable path of GPUs that do not all reach each other's memory: those of several hosts, and
those of one host without peer access. Messages go by the group's NCCL, on a stream of their own;
the ranks of a host exchange by copies as elsewhere. `spanning` has the protocol."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from agmm.errors import Unsupported
from agmm.runtime import groups, hosts, spanning
from agmm.runtime.cuda_background import BackgroundStreams
from agmm.runtime.cuda_collectives import SLOT_BYTES
from agmm.runtime.cuda_portable import PortableGather, PortableScatter
from agmm.runtime.host_layout import apart, layout_of
from agmm.runtime.message_limit import watch
from agmm.runtime.portable import Consume, sent_bytes
from agmm.runtime.rank_sums import Total
from agmm.runtime.spanning import Message
from agmm.runtime.workspaces import collectives_workspace, portable_gathers, portable_scatters

CAPTURED = "workspace: found the group's first call during CUDA graph capture, wanted one before"
"""What `why_apart` says where it cannot be found out."""

_why_apart: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, str]]
_why_apart = weakref.WeakKeyDictionary()


def why_apart(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the GPUs of a group do not all reach each other's memory, or None; the same on all ranks.
    Collective at first use."""
    by_device = _why_apart.setdefault(group, {})
    found = by_device.get(device.index)
    if found is None:
        with groups.of(group).lock:
            found, workspace = "", collectives_workspace(group, device)
            if not workspace.is_ready and torch.cuda.is_current_stream_capturing():
                return CAPTURED  # which later calls are not told
            try:
                workspace.ensure(SLOT_BYTES)
            except Unsupported as error:
                found = str(error)
            by_device[device.index] = found
    return found or None


_found: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, CudaHosts]]
_found = weakref.WeakKeyDictionary()


def of(group: dist.ProcessGroup, device: torch.device) -> CudaHosts:
    """What serves the group on a device. Collective at first use, and raises as `CudaHosts`."""
    by_device = _found.setdefault(group, {})
    if device.index not in by_device:
        if torch.cuda.is_current_stream_capturing():
            raise Unsupported(CAPTURED)
        with groups.of(group).lock:
            by_device[device.index] = CudaHosts(group, device)
    return by_device[device.index]


class Messages:
    """The messages of one call. A batch is one group of NCCL's, on a stream beside the current one:
    it comes behind what the current stream holds when it is begun."""

    def __init__(self, group: dist.ProcessGroup, stream: torch.cuda.Stream) -> None:
        self._group, self._stream = group, stream
        self._current = torch.cuda.current_stream(stream.device)
        self._sent: list[torch.Tensor] = []
        """What is sent: memory that is given back goes to later work of the current stream."""

    def begin(
        self, number: int, sends: Sequence[Message], receives: Sequence[Message]
    ) -> torch.cuda.Event:
        del number  # NCCL carries out a rank's batches in the order in which they are begun
        batch = [
            dist.P2POp(way, tensor.view(-1).view(torch.uint8), group=self._group, group_peer=peer)
            for way, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensors in messages
            for tensor in tensors
        ]
        self._sent += (tensor for _, tensors in sends for tensor in tensors)
        done = torch.cuda.Event()
        self._stream.wait_stream(self._current)
        with torch.cuda.stream(self._stream):
            for work in dist.batch_isend_irecv(batch):
                work.wait()  # which makes the stream wait
            done.record()
        return done

    def wait(self, mark: torch.cuda.Event) -> None:
        self._current.wait_event(mark)

    def finish(self) -> None:
        self._current.wait_stream(self._stream)
        self._sent.clear()


class _Inside:
    """The exchanges of ranks that reach each other's memory."""

    def __init__(self, gathers: PortableGather, scatters: PortableScatter, words: str) -> None:
        self._gathers, self._scatters, self._words = gathers, scatters, words

    def share(
        self,
        parts: Sequence[torch.Tensor],
        targets: Sequence[Sequence[torch.Tensor]],
        consume: Consume,
        *,
        pieces: int,
        keeps_own: bool,
    ) -> None:
        self._gathers.gather(
            *(parts, targets, consume), pieces=pieces, keeps_own=keeps_own, words=self._words
        )

    def sum(self, product: Callable[[int, torch.Tensor], None], into: torch.Tensor) -> None:
        self._scatters.scatter(
            *(into, product, lambda come: Total()(come, into)), what="", words=self._words
        )


class CudaHosts:
    """The portable path of a group on one device: what `PortableGather` and `PortableScatter` are
    to ranks that reach each other's memory. Collective.

    Raises:
        Unsupported: the group's backend takes no messages of GPUs, or the ranks of a host can have
            no group; all ranks raise.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        known = groups.of(group)
        self._group_ref, self._device = weakref.ref(group), device
        self.rank, self.world_size = known.rank, known.world_size
        self.lock = known.lock
        self._known = known
        if "nccl" not in dist.get_backend_config(group):
            raise Unsupported(
                f"group: found backend {dist.get_backend(group)} for ranks that share no memory, "
                "wanted nccl, which sends between GPUs"
            )
        layout = layout_of(known.hosts())
        self.local, near = None, [self.rank]
        is_apart = len(layout.hosts) == 1
        if not is_apart:
            self.local, near = hosts.local_group(group, layout)
            reason = "" if self.local is None else why_apart(self.local, device)
            is_apart = any(known.exchange("whether ranks of a host are apart", reason or ""))
        if is_apart:
            layout, self.local, near = apart(self.world_size), None, [self.rank]
        self.place = spanning.Place(layout, self.rank, near)
        self._background = BackgroundStreams(device)
        self._agreed: set[str] = set()
        # NCCL makes its communicator at the first call, in which all ranks have to take part.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def gather(
        self,
        parts: Sequence[torch.Tensor],
        wholes: Sequence[torch.Tensor],
        consume: Consume,
        *,
        pieces: int,
        keeps_own: bool,
        words: str,
    ) -> None:
        """Enqueue as `PortableGather.gather` does."""
        sent = ", ".join(f"{list(part.shape)} {part.dtype}" for part in parts)
        first = spanning.First(consume)
        agreed = f"gather of {sent} in {pieces} pieces, {keeps_own}"
        with self._in_call(portable_gathers, sent_bytes(parts), agreed, words) as steps:
            spanning.gather(*steps, parts, wholes, first, pieces=pieces, keeps_own=keeps_own)
        first.raise_it()

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
        """Enqueue as `PortableScatter.scatter` does, but for ``total``, which is given a sum of
        each host, in their order."""
        come = like.new_empty(len(self.place.layout.hosts), *like.shape)
        agreed = f"scatter of {list(like.shape)} {like.dtype}{what}"
        with self._in_call(portable_scatters, sent_bytes([like]), agreed, words) as steps:
            spanning.scatter(*steps, come, product, meanwhile=meanwhile)
        total(come)

    @contextmanager
    def _in_call(
        self,
        workspace: Callable[..., PortableGather | PortableScatter],
        nbytes: int,
        agreed: str,
        words: str,
    ) -> Iterator[tuple[spanning.Place, Messages, spanning.Inside]]:
        """Enclose a call, which is enqueued on the current stream meanwhile.

        Args:
            workspace: makes what the ranks of a host exchange through.
            nbytes: the size of its slots.
            agreed: what all ranks have to agree on.
            words: the call, for messages.

        NCCL does not look at what it is sent, so the ranks meet at the first call of each kind, to
        tell calls that differ apart. A call whose messages do not come within AGMM_TIMEOUT_S ends
        the process.
        """
        with self.lock, torch.no_grad():
            self._known.check_in_step()
            if agreed not in self._agreed:
                self._meet(workspace, nbytes, agreed)
            is_captured = torch.cuda.is_current_stream_capturing()
            messages = Messages(self._group(), self._background.of_capture())
            inside: spanning.Inside = spanning.Apart()
            if self.local is not None:
                inside = _Inside(
                    portable_gathers(self.local, self._device),
                    portable_scatters(self.local, self._device),
                    words,
                )
            begun = None if is_captured else torch.cuda.Event()
            if begun is not None:
                begun.record(messages._current)
            try:
                yield self.place, messages, inside
            except BaseException:
                self._known.is_in_step = False
                raise
            if begun is not None:
                done = torch.cuda.Event()
                done.record(messages._current)
                watch(begun, done, f"rank {self.rank}", words)

    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        assert group is not None
        return group

    def _meet(
        self, workspace: Callable[..., PortableGather | PortableScatter], nbytes: int, agreed: str
    ) -> None:
        """Remember a kind of call that all ranks make, and for which every host has memory.
        Collective.

        Raises:
            Unsupported: a host has no memory for it, or a capture has come to it first.
            AgmmError: the ranks make other calls, or one did not come within AGMM_TIMEOUT_S.
        """
        if torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                f"workspace: found a first {agreed} during CUDA graph capture, wanted one before"
            )
        reason = ""
        if self.local is not None:
            try:
                workspace(self.local, self._device).make_room(nbytes)
            except Unsupported as error:
                reason = str(error)
        reasons = self._known.exchange(f"whether hosts have memory for a {agreed}", reason)
        found = next(filter(None, reasons), None)
        if found is not None:
            raise Unsupported(found)
        self._agreed.add(agreed)
