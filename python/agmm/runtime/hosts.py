"""Groups of CPU ranks that span hosts: messages between the hosts, along rails, beside what the
ranks of one host exchange through shared memory and multiply.

A rank's shard goes to one rank of each other host, its carrier there, which shares it with the
ranks of that host. In the mirror image a host's carrier for a rank of another one adds up the
products of its own host and sends the sum. So a shard, or a sum, goes to another host once.

No ranks wait in a ring, though there are two communicators. In an all-gather a rank sends all
messages before it waits for anything, so each message that is awaited comes. The ranks of a host
make their exchanges in one order, and each waits only for messages that are on their way. In a
reduce-scatter the exchanges inside a host wait for no message, so they end, and all sums are sent;
a rank awaits messages after that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from agmm import _env
from agmm.errors import AgmmError, Unsupported, reason_of
from agmm.runtime import cpu_scatter, cpu_summands, groups
from agmm.runtime.calls import Call
from agmm.runtime.cpu_slots import tag_of
from agmm.runtime.host_layout import layout_of
from agmm.runtime.portable import cuts_of
from agmm.runtime.workspaces import cpu_workspace

CHUNKS = 4
"""The messages in which a shard goes to another host. It is a choice: the first is multiplied while
the others are on their way."""

_MOST_TAGS = 2**24
"""The tags that messages tell apart: gloo numbers them by 32 bits with a sign."""


def spans(group: dist.ProcessGroup) -> bool:
    """Whether the ranks are on several hosts. Collective at first use."""
    return len(set(groups.of(group).hosts())) > 1


class _Spanning:
    """A group that spans hosts, and the group of its ranks on this one. Collective.

    Raises:
        Unsupported: the ranks of a host can have no group, or share no memory; all ranks raise.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        known = groups.of(group)
        self.rank, self.layout = known.rank, layout_of(known.hosts())
        self.host = self.layout.host_of(self.rank)
        global_ranks = {r: dist.get_global_rank(group, r) for r in self.layout.hosts[self.host]}
        self.near = sorted(global_ranks, key=lambda rank: global_ranks[rank])
        """The ranks of this host, in the order of their own group."""
        # torch names such a group by its ranks and the number of groups that a process has.
        counts = known.exchange("how many groups they have", str(len(_world.pg_names)))
        for ranks in self.layout.hosts:
            found = sorted({counts[rank] for rank in ranks})
            if len(found) > 1:
                raise Unsupported(
                    f"group: found ranks {list(ranks)} of a host in {' and '.join(found)} groups, "
                    "wanted equally many: torch could make no group of them"
                )
        # Every rank makes one, a lone one too, so that they stay in equally many.
        self._own = dist.new_group(
            sorted(global_ranks.values()), backend="gloo", use_local_synchronization=True
        )
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

    @property
    def local(self) -> dist.ProcessGroup | None:
        """The group of the ranks of this host; None for one rank."""
        return self._own if len(self.near) > 1 else None


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
    """The messages of one call between the hosts. Their numbers come from the tag of the call: one
    of another call, whose size may differ, is not taken for one of this."""

    def __init__(self, group: dist.ProcessGroup, rank: int, tag: int, call: Call) -> None:
        self._group, self._rank, self._call = group, rank, call
        self._first = tag % _MOST_TAGS * CHUNKS
        self._limit = timedelta(seconds=_env.timeout_s())
        self._sent: list[tuple[int, Any, torch.Tensor]] = []

    def send(self, data: torch.Tensor, target: int, number: int) -> None:
        """Begin to send a contiguous tensor, which lives until `finish`."""
        message = data.view(-1).view(torch.uint8)
        work = self._group.send([message], target, self._first + number)
        self._sent.append((target, work, message))

    def receive(self, nbytes: int, source: int, number: int) -> Callable[[], torch.Tensor]:
        """Begin to receive; the function that is returned awaits the bytes."""
        message = torch.empty(nbytes, dtype=torch.uint8)
        work = self._group.recv([message], source, self._first + number)

        def finish() -> torch.Tensor:
            self._await(work, source)
            return message

        return finish

    def finish(self) -> None:
        """What was sent may be overwritten from now on."""
        for target, work, _ in self._sent:
            self._await(work, target)

    def _await(self, work: Any, peer: int) -> None:
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            raise AgmmError(
                f"rank {self._rank}: waited for rank {peer}, on another host, in {self._call}; "
                f"wanted the same calls on all ranks within {self._limit.total_seconds():g} s: "
                f"{reason_of(error)}"
            ) from None


@contextmanager
def _in_step(group: dist.ProcessGroup) -> Iterator[_Spanning]:
    """Enclose a call of the group. One that fails half-way leaves the group out of step."""
    known = groups.of(group)
    with known.lock:
        known.check_in_step()
        here = _of(group)
        known.calls += 1
        try:
            yield here
        except BaseException:
            known.is_in_step = False
            raise


@torch.no_grad()
def gather(
    group: dist.ProcessGroup,
    shard: torch.Tensor,
    consume: Callable[[int, slice, torch.Tensor], None],
    call: Call,
    *,
    agreed: str = "",
) -> None:
    """Hand the rows of all ranks to ``consume``, with their rank and place in its shard: those of
    the own host first, then those of others, chunk by chunk as they come. Collective.

    Args:
        shard: [M_local, K], contiguous, the same shape and dtype on all ranks.
        consume: its rows are valid during the call. What it raises is raised when the call is done.
        call: the call, for messages.
        agreed: what else has to be the same on all ranks.

    Raises:
        AgmmError: a rank did not come within AGMM_TIMEOUT_S, or made another call.
        Unsupported: the ranks of a host can share no memory.
    """
    rows, k = shard.shape
    chunks = min(CHUNKS, rows)
    cuts = cuts_of(rows, chunks)
    row_bytes = k * shard.element_size()
    tag = tag_of(rows, k, f"between hosts, {shard.dtype} {agreed}", False)
    errors: list[Exception] = []

    def hand_over(source: int, i: int, record: torch.Tensor) -> None:
        cut = cuts[i]
        rows_of_it = record[: (cut.stop - cut.start) * row_bytes].view(shard.dtype)
        try:
            if not errors:
                consume(source, cut, rows_of_it.view(-1, k))
        except Exception as error:  # the peers wait for the rest of this call
            errors.append(error)

    with _in_step(group) as here:
        layout, rank = here.layout, here.rank
        messages = _Messages(group, rank, tag, call)
        carried = {near: layout.carried(near) for near in here.near}
        coming = {
            (source, i): messages.receive((cut.stop - cut.start) * row_bytes, source, i)
            for i, cut in enumerate(cuts)
            for source in carried[rank]
        }
        for i, cut in enumerate(cuts):
            for host in range(len(layout.hosts)):
                if host != here.host:
                    messages.send(shard[cut], layout.carrier(rank, host), i)
        own = [shard[cut].view(-1).view(torch.uint8) for cut in cuts]
        longest = (cuts[0].stop - cuts[0].start) * row_bytes
        _share(here, own, longest, hand_over, call, agreed)
        for i in range(len(cuts)):
            come = [coming[source, i]() for source in carried[rank]]
            come += [torch.empty(0, dtype=torch.uint8)] * (layout.rounds(here.host) - len(come))

            def hand_on(near: int, turn: int, record: torch.Tensor, i: int = i) -> None:
                if turn < len(carried[near]):
                    hand_over(carried[near][turn], i, record)

            _share(here, come, longest, hand_on, call, f"{agreed}, chunk {i} of others")
        messages.finish()
    if errors:
        raise errors[0]


def _share(
    here: _Spanning,
    records: Sequence[torch.Tensor],
    record_bytes: int,
    consume: Callable[[int, int, torch.Tensor], None],
    call: Call,
    agreed: str,
) -> None:
    """Hand the records of this host's ranks to ``consume``, with their rank and number, the own
    ones first. There are as many on each of them, of at most so many bytes."""
    if here.local is None:
        for i, record in enumerate(records):
            consume(here.rank, i, record)
        return
    padded = torch.zeros(len(records), record_bytes, dtype=torch.uint8)
    for place, record in zip(padded, records, strict=True):
        place[: record.numel()] = record
    workspace = cpu_workspace(here.local)
    workspace.all_gather_records(
        padded, lambda near, i, record: consume(here.near[near], i, record), call, agreed=agreed
    )


class Settings(NamedTuple):
    """What becomes of a sum over the ranks."""

    divisor: int = 1
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    """This rank's rows."""
    agreed: str = ""
    """What else has to be the same on all ranks."""


@torch.no_grad()
def scatter(
    group: dist.ProcessGroup,
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    settings: Settings,
    call: Call,
    meanwhile: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Return this rank's rows of the sum over the ranks of ``sum(A @ B)``: each host adds up its
    own products for a rank and sends it their sum, rounded once. Collective; errors as `gather`'s.

    Products and sums are made in float32 (float64 for float64): of a host in the order of its
    ranks, then in the order of the hosts. So the result has the same bits in every call.

    Args:
        As: [M, K] each, of as many rows.
        Bs: [K, N] each.
        call: the call, for messages.
        meanwhile: called while the last messages are on their way.
    """
    dtype, n = As[0].dtype, Bs[0].shape[1]
    rows = len(As[0]) // group.size()
    tag = tag_of(rows, n, f"between hosts, {dtype} {settings.divisor} {settings.agreed}", False)
    with _in_step(group) as here:
        layout, rank = here.layout, here.rank
        messages = _Messages(group, rank, tag, call)
        carried = [layout.carried(near) for near in here.near]
        coming = {
            host: messages.receive(rows * n * dtype.itemsize, layout.carrier(rank, host), 0)
            for host in range(len(layout.hosts))
            if host != here.host
        }

        def summed(owners: list[int | None]) -> torch.Tensor:
            """The sum over this host's ranks for this one's owner, of one for each, or None."""
            given = []
            for A in As:
                none, shards = A.new_zeros(rows, A.shape[1]), A.split(rows)
                given.append(torch.cat([none if one is None else shards[one] for one in owners]))
            if here.local is None:
                return cpu_summands.Summands(given, Bs, rows).product(slice(0, rows)).clone()
            of_host = cpu_scatter.plain_sum(given, Bs, None)
            of_host = of_host._replace(out_dtype=cpu_summands.sum_dtype(dtype))
            workspace = cpu_workspace(here.local)
            return workspace.reduce_scatter(of_host, "sum", call, agreed=settings.agreed)

        for turn in range(layout.rounds(here.host)):
            owners = [ranks[turn] if turn < len(ranks) else None for ranks in carried]
            part, owner = summed(owners), owners[here.near.index(rank)]
            if owner is not None:
                messages.send(part.to(dtype), owner, 0)
        own = summed(list(here.near))
        if meanwhile is not None:
            meanwhile()
        parts = [
            coming[host]().view(dtype).view(rows, n) if host in coming else own
            for host in range(len(layout.hosts))
        ]
        messages.finish()
    total = torch.empty_like(own)
    cpu_summands.add_up(parts, settings.divisor, total)
    for summand in (settings.bias, settings.residual):
        if summand is not None:
            total.add_(summand)
    return total.to(dtype)


def all_reduce(
    group: dist.ProcessGroup,
    A: torch.Tensor,
    B: torch.Tensor,
    settings: Settings,
    call: Call,
) -> torch.Tensor:
    """Return the sum over the ranks of ``A @ B``, [M, N] with the same bits on all: a `scatter` of
    rows that are filled up with zeros, and a `gather`. Collective; errors are those of `gather`.

    Args:
        settings: the residual is [M, N], the same on all ranks.
    """
    size, rank = group.size(), groups.of(group).rank
    missing = -len(A) % size

    def filled(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows

    residual = settings.residual
    if residual is not None:
        residual = filled(residual).chunk(size)[rank]
    own = scatter(group, [filled(A)], [B], settings._replace(residual=residual), call)
    out = own.new_empty(size, *own.shape)

    def keep(source: int, cut: slice, rows: torch.Tensor) -> None:
        out[source, cut] = rows

    gather(group, own, keep, call, agreed=f"finished rows {settings.agreed}")
    return out.flatten(0, 1)[: len(A)].clone()
