"""What the tests of relayed collectives run inside the ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from agmm.runtime import devices, group_topology, relays
from agmm.runtime.topology import Matrix, neighbours
from agmm.testing import machines

_groups: dict[int, dist.ProcessGroup] = {}


def _group_of(size: int) -> dist.ProcessGroup | None:
    """A group of the pool's last ranks, so that ranks in the group differ from the global ones."""
    first = dist.get_world_size() - size
    if size not in _groups:
        _groups[size] = dist.new_group(list(range(first, first + size)))
    return _groups[size] if dist.get_rank() >= first else None


@contextmanager
def only_over(links: Matrix, group: dist.ProcessGroup) -> Iterator[list[int]]:
    """Messages to and from neighbours pass; the partners are noted. Others raise."""
    rank, partners = dist.get_rank(group), []
    near = neighbours(links, rank)
    send = dist.batch_isend_irecv

    def checked(messages: list[dist.P2POp]) -> list[dist.Work]:
        for message in messages:
            if message.group_peer not in near:
                raise RuntimeError(f"a message between {rank} and {message.group_peer}")
            partners.append(message.group_peer)
        return send(messages)

    with mock.patch.object(dist, "batch_isend_irecv", checked):
        yield partners


def collectives(text: str, gpus: Sequence[int], seed: int, dtype: torch.dtype) -> list[str] | None:
    """Faults found, in words, of ranks that have these GPUs of a machine."""
    links = machines.some(machines.matrix(text), gpus)
    size = len(links)
    group = _group_of(size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    driver = machines.Driver(links)
    driver.visible = [rank]
    with mock.patch.object(devices, "nvml", return_value=driver):
        found = group_topology.agree(group, f"GPU-{rank}")
    schedule = found.relayed
    if schedule is None:
        return [f"no schedule for {found.kind}: {found.unknown}"]
    faults = []
    for shape in ((1,), (3, 5), (0, 4), (257,), (64, 33)):
        torch.manual_seed(seed)
        given = [torch.randn(shape).to(dtype) for _ in range(size)]
        with only_over(links, group) as partners:
            shards = relays.all_gather(given[rank], group, schedule)
            total = relays.all_reduce(given[rank], group, schedule)
        if not all(torch.equal(a, b) for a, b in zip(shards, given, strict=True)):
            faults.append(f"all_gather of {shape} is wrong")
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        wanted = torch.zeros(shape, dtype=wide)
        for each in given:
            wanted += each
        if not torch.equal(total, wanted.to(dtype)):
            faults.append(f"all_reduce of {shape} is wrong")
        if set(partners) != set(neighbours(links, rank)) and given[0].numel():
            faults.append(f"messages with {sorted(set(partners))} only")
    return faults


def first_message_without_a_link(text: str) -> bool:
    """Whether a plain exchange among all is found by `only_over`."""
    links = machines.matrix(text)
    group = _group_of(len(links))
    assert group is not None
    peers = [peer for peer in range(len(links)) if peer != dist.get_rank(group)]
    tensor = torch.ones(1)
    try:
        with only_over(links, group):
            dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer in peers]
            )
    except RuntimeError as error:
        return "a message between" in str(error)
    return False
