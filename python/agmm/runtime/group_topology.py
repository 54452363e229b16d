"""What the ranks of a group agree on about the links between their GPUs."""

from __future__ import annotations

import json
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm.runtime import devices, groups, links
from agmm.runtime.group_gpus import group_facts
from agmm.runtime.topology import (
    FULLY_CONNECTED,
    Kind,
    Matrix,
    Schedule,
    kind_of,
    matrix_of,
    schedule_of,
)


class GroupTopology(NamedTuple):
    """What is known of a group's links, which is the same on all its ranks."""

    kind: Kind | None = None
    """None where it is not known of all ranks."""
    links: Matrix = ()
    """The links by rank."""
    relayed: Schedule | None = None
    """How data goes round the pairs that have no NVLink, in two steps; None where every pair has
    one, and where there is no such way: then a call goes as if nothing were known of the links."""
    unknown: str = ""
    """Why the kind is not known."""


_found: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupTopology] = weakref.WeakKeyDictionary()


def topology_of(group: dist.ProcessGroup, device: torch.device) -> GroupTopology:
    """The topology of a group. Collective at first use.

    All ranks decide from the same reports, one of each rank: where one has none, the kind is
    unknown to all.

    Args:
        device: this rank's. Of CPUs nothing is known.
    """
    if device.type == "cpu":
        return GroupTopology(unknown="CPU ranks have no links")
    known = _found.get(group)
    if known is None:
        with groups.of(group).lock:
            known = _found.get(group)
            if known is None:
                known = _found[group] = agree(group, links.uuid(device.index))
    return known


def relays_of(group: dist.ProcessGroup, device: torch.device) -> Schedule | None:
    """How data goes round the pairs of a group that have no NVLink; None where all have one, or
    where there is no such way. Collective at first use."""
    if group not in _found and group_facts(group, device).peer_atomics:
        return None
    return topology_of(group, device).relayed


def pretend(group: dist.ProcessGroup, matrix: Matrix) -> None:
    """From now on the ranks of a group have these links, for tests. To be called by all."""
    _found[group] = of_matrix(matrix)


def agree(group: dist.ProcessGroup, uuid: str) -> GroupTopology:
    """The topology of ranks whose GPUs have these UUIDs. Collective."""
    known = groups.of(group)
    if len(set(known.hosts())) > 1:
        return GroupTopology(unknown="the ranks are on several hosts")
    uuids = known.exchange("their GPUs", uuid)
    if len(set(uuids)) < len(uuids):
        return GroupTopology(unknown="ranks share a GPU")
    own = devices.links_of(uuid, uuids)
    said = {"why": devices.why_unknown() or "NVML does not know it"} if own is None else own
    told = [json.loads(each) for each in known.exchange("their links", json.dumps(said))]
    for rank, report in enumerate(told):
        if "why" in report:
            return GroupTopology(unknown=f"rank {rank} cannot ask about its GPU: {report['why']}")
    return of_matrix(matrix_of(dict(zip(uuids, told, strict=True))))


def of_matrix(matrix: Matrix) -> GroupTopology:
    """The topology of ranks with these links."""
    kind = kind_of(matrix)
    relayed = None if kind in FULLY_CONNECTED else schedule_of(matrix)
    return GroupTopology(kind, matrix, relayed)
