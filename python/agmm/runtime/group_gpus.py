"""What the ranks of a group agree on about their GPUs: their kind, multiprocessors for a matmul,
links."""

from __future__ import annotations

import json
import warnings
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from agmm import _env
from agmm.errors import InvalidArgument, reason_of
from agmm.runtime import groups, links

_SMS_FOR_COPIES = 2
"""Multiprocessors of a GPU that ranks share, left to the copies inside it. These are kernels: while
the multiprocessors are free they run, however long the matmul beside them waits. The number is
even, for clusters of 2."""

_SMS_FOR_OTHER_GROUPS = 8
"""A choice, not measured: 6% of an H200's, and room for four clusters of 2."""

_LEAST_SMS = 2
"""A cluster of a matmul needs these."""

_asked_sms: int | None = None
"""What `reserve_sms` was told."""


class GroupFacts(NamedTuple):
    """What plans have to know of a group's GPUs; the same on all its ranks."""

    sm_count: int = 0
    """Multiprocessors for a matmul; 0 on the CPU."""
    reserved_sms: int = 0
    """Multiprocessors that a matmul leaves free."""
    peer_atomics: bool = True
    gpu: str = ""
    """The GPU that plans are made for, by torch's name; empty on the CPU. Ranks may have several
    kinds: it is the one of the fewest multiprocessors, of these the first by name."""

    @property
    def all_sms(self) -> int:
        """Multiprocessors that every rank's GPU has."""
        return self.sm_count + self.reserved_sms


_facts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, GroupFacts]]
_facts = weakref.WeakKeyDictionary()


def reserve_sms(count: int | None) -> None:
    """Leave multiprocessors to the kernels of other groups, in groups whose first call is to come.

    A matmul that fills its GPU and waits for a peer keeps out the kernels of other groups (a
    pipeline's or FSDP's NCCL, another group of agmm), and the peer may wait for just these. With
    some multiprocessors left free they run all the same; matmuls take longer by about the share
    that is missing. The largest number that a rank of a group says counts for all.

    Args:
        count: of each GPU; None: as AGMM_RESERVED_SMS says, by default 8 where the process is in
            other NCCL groups than the default one, else 0.

    Raises:
        InvalidArgument: ``count`` is negative or no int. (More than a GPU has is found at the first
            call.)
    """
    global _asked_sms
    if count is not None and (type(count) is not int or count < 0):
        raise InvalidArgument(f"count: found {count!r}, wanted None or an int of at least 0")
    _asked_sms = count


def wanted_sms(group: dist.ProcessGroup) -> int:
    asked = _env.reserved_sms() if _asked_sms is None else _asked_sms
    if asked is None:
        asked = _SMS_FOR_OTHER_GROUPS if has_other_groups(group) else 0
    return asked


def has_other_groups(group: dist.ProcessGroup) -> bool:
    """Whether this process is in another group whose NCCL kernels may run beside a call. The
    default group does not count: all programs have it, most for start and end only."""
    return any(
        other is not group
        and other is not dist.group.WORLD
        and other.size() > 1
        and "nccl" in dist.get_backend_config(other)
        for other in list(c10d._world.pg_map)
    )


def group_facts(group: dist.ProcessGroup, device: torch.device) -> GroupFacts:
    """The facts of a group. Collective at first use.

    Raises:
        InvalidArgument: more multiprocessors are set aside than a GPU has; all ranks raise.
    """
    if device.type == "cpu":
        return GroupFacts()
    by_device = _facts.get(group)
    if by_device is None:
        by_device = _facts.setdefault(group, {})
    found = by_device.get(device)
    if found is None:
        with groups.of(group).lock:
            found = by_device.get(device)
            if found is None:
                found = by_device[device] = _agreed_facts(group, device)
    return found


def _agreed_facts(group: dist.ProcessGroup, device: torch.device) -> GroupFacts:
    properties = torch.cuda.get_device_properties(device)
    sm_count, gpu = properties.multi_processor_count, properties.name
    if dist.get_world_size(group) == 1:
        return GroupFacts(sm_count, gpu=gpu)
    own = links.uuid(device.index)
    said = json.dumps([own, sm_count, wanted_sms(group), gpu])
    exchange, hosts = groups.of(group).exchange, groups.of(group).hosts()
    ranks = [json.loads(each) for each in exchange("their GPUs", said)]
    uuids = [rank[0] for rank in ranks]
    # Ranks on other hosts are not reached at all.
    near = [u for u, host in zip(uuids, hosts, strict=True) if host == hosts[dist.get_rank(group)]]
    try:
        reason = links.why_no_atomics(own, near)
    except Exception as e:  # the other ranks wait to hear of it
        why = reason_of(e)
        reason = f"whether the link from {own} to its peers has native atomics is unknown: {why}"
    reasons = [r for r in exchange("what their links lack", reason or "") if r]
    if reasons:
        warnings.warn(f"agmm takes no SM push: {reasons[0]}", stacklevel=2)
    sm_count, gpu = min((rank[1], rank[3]) for rank in ranks)
    reserved = max(rank[2] for rank in ranks)
    if len(set(uuids)) < len(uuids):
        reserved = max(reserved, _SMS_FOR_COPIES)
    if sm_count - reserved < _LEAST_SMS:
        raise InvalidArgument(
            f"{_env.RESERVED_SMS.name}, reserve_sms: found {reserved}, wanted at most "
            f"{sm_count - _LEAST_SMS} of {sm_count} multiprocessors"
        )
    return GroupFacts(sm_count - reserved, reserved, not reasons, gpu)
