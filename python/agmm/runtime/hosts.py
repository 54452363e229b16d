"""Groups of CPU ranks that span hosts: messages by the group's backend, shared memory on each host.
`spanning` has the protocol."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from agmm import _env
from agmm.errors import AgmmError, Unsupported, reason_of
from agmm.runtime import cpu_collectives, groups, spanning
from agmm.runtime.calls import Call
from agmm.runtime.cpu_slots import tag_of
from agmm.runtime.host_layout import Layout, layout_of
from agmm.runtime.portable import Consume, cuts_of
from agmm.runtime.spanning import Message
from agmm.runtime.workspaces import cpu_workspace

CHUNKS = 4
"""The messages in which a shard goes to another host. It is a choice: the first is multiplied while
the others are on their way."""

_MOST_NUMBERS = 64
_MOST_PARTS = 2
"""The tensors of a message: values and scales."""
_MOST_TAGS = 2**30 // (_MOST_NUMBERS * _MOST_PARTS)
"""The calls that tags of messages tell apart: gloo numbers messages by 32 bits with a sign."""


def spans(group: dist.ProcessGroup) -> bool:
    """Whether the ranks are on several hosts. Collective at first use."""
    return len(set(groups.of(group).hosts())) > 1


def local_group(
    group: dist.ProcessGroup, layout: Layout
) -> tuple[dist.ProcessGroup | None, list[int]]:
    """A group of the ranks of this host, None for one rank, and these ranks in its order.
    Collective. Its backend is gloo, on whatever device the ranks are: they exchange through memory.

    Raises:
        Unsupported: the ranks of a host can have no group; all ranks raise.
    """
    known = groups.of(group)
    own = layout.hosts[layout.host_of(known.rank)]
    global_ranks = {rank: dist.get_global_rank(group, rank) for rank in own}
    near = sorted(own, key=lambda rank: global_ranks[rank])
    # torch names such a group by its ranks and the number of groups that a process has.
    counts = known.exchange("how many groups they have", str(len(_world.pg_names)))
    for ranks in layout.hosts:
        found = sorted({counts[rank] for rank in ranks})
        if len(found) > 1:
            raise Unsupported(
                f"group: found ranks {list(ranks)} of a host in {' and '.join(found)} groups, "
                "wanted equally many: torch could make no group of them"
            )
    # Every rank makes one, a lone one too, so that they stay in equally many.
    made = dist.new_group(
        sorted(global_ranks.values()), backend="gloo", use_local_synchronization=True
    )
    return (made if len(near) > 1 else None), near


class _Spanning:
    """A group that spans hosts, and the group of its ranks on this one. Collective.

    Raises:
        Unsupported: the ranks of a host can have no group, or share no memory; all ranks raise.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        known = groups.of(group)
        layout = layout_of(known.hosts())
        self.local, near = local_group(group, layout)
        self.place = spanning.Place(layout, known.rank, near)
        error = ""
        if self.local is not None:
            try:
                cpu_workspace(self.local)
            except Unsupported as found_error:
                error = str(found_error)
        reasons = known.exchange("whether the ranks of a host share memory", error)
        reason = next(filter(None, reasons), None)
        if reason is not None:
            raise Unsupported(reason)


_spanning: weakref.WeakKeyDictionary[dist.ProcessGroup, _Spanning | Unsupported]
_spanning = weakref.WeakKeyDictionary()


def _of(group: dist.ProcessGroup) -> _Spanning:
    """What is known of the group; under its lock. Collective at first use."""
    found = _spanning.get(group)
    if found is None:
        try:
            found = _Spanning(group)
        except Unsupported as error:
            found = error
        _spanning[group] = found
    if isinstance(found, Unsupported):
        raise Unsupported(str(found))
    return found


class _Messages:
    """The messages of one call, whose numbers come from the tag of the call: one of another call,
    whose size may differ, is not taken for one of this."""

    def __init__(self, group: dist.ProcessGroup, rank: int, tag: int, call: Call) -> None:
        self._group, self._rank, self._call = group, rank, call
        self._first = tag % _MOST_TAGS * _MOST_NUMBERS * _MOST_PARTS
        self._limit = timedelta(seconds=_env.timeout_s())
        self._sent: list[tuple[int, Any, torch.Tensor]] = []

    def begin(
        self, number: int, sends: Sequence[Message], receives: Sequence[Message]
    ) -> list[tuple[int, Any, torch.Tensor]]:
        first = self._first + number % _MOST_NUMBERS * _MOST_PARTS

        def started(way: Any, messages: Sequence[Message]) -> list[tuple[int, Any, torch.Tensor]]:
            found = []
            for peer, tensors in messages:
                for j, tensor in enumerate(tensors):
                    data = tensor.view(-1).view(torch.uint8)
                    found.append((peer, way([data], peer, first + j), data))
            return found

        coming = started(self._group.recv, receives)
        self._sent += started(self._group.send, sends)
        return coming

    def wait(self, mark: list[tuple[int, Any, torch.Tensor]]) -> None:
        for peer, work, _ in mark:
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                raise AgmmError(
                    f"rank {self._rank}: waited for rank {peer}, on another host, in {self._call}; "
                    "wanted the same calls on all ranks within "
                    f"{self._limit.total_seconds():g} s: {reason_of(error)}"
                ) from None

    def finish(self) -> None:
        self.wait(self._sent)


class _Inside:
    """The exchanges of ranks that share memory."""

    def __init__(self, local: dist.ProcessGroup, call: Call, agreed: str) -> None:
        self._workspace = cpu_workspace(local)
        self._rank, self._call, self._agreed = dist.get_rank(local), call, agreed

    def share(
        self,
        parts: Sequence[torch.Tensor],
        targets: Sequence[Sequence[torch.Tensor]],
        consume: Consume,
        *,
        pieces: int,
        keeps_own: bool,
    ) -> None:
        del keeps_own  # all rows are written, the own ones too
        rows = parts[0].shape[0]
        cuts = cuts_of(rows, pieces)

        def of_cut(tensor: torch.Tensor, cut: slice) -> torch.Tensor:
            return tensor[cut] if tensor.shape[0] == rows else tensor

        def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view(-1).view(torch.uint8)

        packed = [torch.cat([bytes_of(of_cut(part, cut)) for part in parts]) for cut in cuts]
        records = torch.zeros(len(cuts), max(map(len, packed)), dtype=torch.uint8)
        for record, data in zip(records, packed, strict=True):
            record[: len(data)] = data

        def hand_over(near: int, i: int, record: torch.Tensor) -> None:
            come = [of_cut(places[near], cuts[i]) for places in targets]
            begin = 0
            for place in come:
                bytes_of(place).copy_(record[begin : begin + place.nbytes])
                begin += place.nbytes
            consume(near, cuts[i], come)

        self._workspace.all_gather_records(records, hand_over, self._call, agreed=self._agreed)

    def sum(self, product: Callable[[int, torch.Tensor], None], into: torch.Tensor) -> None:
        size = self._workspace.world_size
        made = into.new_empty(size, *into.shape)
        for near in range(size):
            product(near, made[near])
        job = cpu_collectives.ReduceScatter(
            self._rank, size, made.view(-1), into.view(-1), is_avg=False
        )
        self._workspace.collective(
            job, self._call, lambda: into, agreed=f"sum inside a host {self._agreed}"
        )


class CpuHosts:
    """The portable path of one call of CPU ranks on several hosts: what `PortableGather` and
    `PortableScatter` are to ranks that share memory. Its methods are collective.

    Raises:
        AgmmError: a rank did not come within AGMM_TIMEOUT_S, or made another call.
        Unsupported: the ranks of a host can share no memory.
    """

    def __init__(self, group: dist.ProcessGroup, call: Call) -> None:
        self._group, self._call = group, call
        self.world_size = group.size()

    @torch.no_grad()
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
        """Gather as `PortableGather.gather` does."""
        pieces = max(pieces, min(CHUNKS, parts[0].shape[0]))
        sent = ", ".join(f"{list(part.shape)} {part.dtype}" for part in parts)
        first = spanning.First(consume)
        with self._in_step(f"gather of {sent} in {pieces} pieces {keeps_own}") as steps:
            spanning.gather(*steps, parts, wholes, first, pieces=pieces, keeps_own=keeps_own)
        first.raise_it()

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
        """Scatter as `PortableScatter.scatter` does, but for ``total``, which is given a sum of
        each host, in their order."""
        with self._in_step(f"scatter of {list(like.shape)} {like.dtype}{what}") as steps:
            come = like.new_empty(len(steps[0].layout.hosts), *like.shape)
            spanning.scatter(*steps, come, product, meanwhile=meanwhile)
        total(come)

    @contextmanager
    def _in_step(self, agreed: str) -> Iterator[tuple[spanning.Place, _Messages, spanning.Inside]]:
        """Enclose a call of the group. One that fails half-way leaves the group out of step."""
        known = groups.of(self._group)
        with known.lock:
            known.check_in_step()
            here = _of(self._group)
            known.calls += 1
            tag = tag_of(0, 0, f"between hosts, {agreed}", False)
            messages = _Messages(self._group, known.rank, tag, self._call)
            inside: spanning.Inside = spanning.Apart()
            try:
                if here.local is not None:
                    inside = _Inside(here.local, self._call, agreed)
                yield here.place, messages, inside
            except BaseException:
                known.is_in_step = False
                raise
