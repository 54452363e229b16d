"""The plan of a call, from its tensors and its group; the same on every rank of the group."""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from agmm import _core, _env
from agmm.errors import InvalidArgument
from agmm.planning import plans, tables
from agmm.planning.planner import Planner
from agmm.planning.plans import KernelConfig, Plan, Problem
from agmm.runtime import devices, groups

_planners: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Planner]]
_planners = weakref.WeakKeyDictionary()


_SMS_FOR_COPIES = 2
"""Of a GPU that ranks share, left to the copies inside it, which are kernels: while these are free
they run, however long the matmul beside them waits. An even number, for clusters of 2."""

_SMS_FOR_OTHER_GROUPS = 8

_LEAST_SMS = 2
"""For a cluster of a matmul."""

_asked_sms: int | None = None
"""What `reserve_sms` was told."""


class GroupFacts(NamedTuple):
    """What plans have to know of a group's GPUs; the same on all its ranks."""

    sm_count: int = 0
    """Multiprocessors for a matmul; 0 on the CPU."""
    reserved_sms: int = 0
    """Those that it leaves free."""
    peer_atomics: bool = True


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


def _wanted_sms(group: dist.ProcessGroup) -> int:
    asked = _env.reserved_sms() if _asked_sms is None else _asked_sms
    if asked is None:
        asked = _SMS_FOR_OTHER_GROUPS if _has_other_groups(group) else 0
    return asked


def _has_other_groups(group: dist.ProcessGroup) -> bool:
    """Whether this process is in another group whose NCCL kernels may run beside a call. The
    default group does not count: all programs have it, most for start and end only."""
    return any(
        other is not group
        and other is not dist.group.WORLD
        and other.size() > 1
        and "nccl" in dist.get_backend_config(other)
        for other in list(_world.pg_map)
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
    _, sm_count = device_facts(device)
    if dist.get_world_size(group) == 1:
        return GroupFacts(sm_count)
    own = devices.uuid(device.index)
    said = json.dumps([own, sm_count, _wanted_sms(group)])
    exchange, hosts = groups.of(group).exchange, groups.of(group).hosts()
    ranks = [json.loads(each) for each in exchange("their GPUs", said)]
    uuids = [rank[0] for rank in ranks]
    # Ranks on other hosts are not reached at all.
    near = [u for u, host in zip(uuids, hosts, strict=True) if host == hosts[dist.get_rank(group)]]
    reason = devices.why_no_atomics(own, near)
    reasons = [r for r in exchange("what their links lack", reason or "") if r]
    if reasons:
        warnings.warn(f"agmm takes no SM push: {reasons[0]}", stacklevel=2)
    sm_count = min(rank[1] for rank in ranks)
    reserved = max(rank[2] for rank in ranks)
    if len(set(uuids)) < len(uuids):
        reserved = max(reserved, _SMS_FOR_COPIES)
    if sm_count - reserved < _LEAST_SMS:
        raise InvalidArgument(
            f"{_env.RESERVED_SMS.name}, reserve_sms: found {reserved}, wanted at most "
            f"{sm_count - _LEAST_SMS} of {sm_count} multiprocessors"
        )
    return GroupFacts(sm_count - reserved, reserved, not reasons)


@cache
def kernels() -> tuple[KernelConfig, ...]:
    """The kernels of this build to choose from."""
    return tuple(KernelConfig.of(kernel) for kernel in _core.kernels() if not kernel.timed)


@cache
def device_facts(device: torch.device) -> tuple[str, int]:
    """`Problem.gpu` and `Problem.sm_count` of a device."""
    if device.type == "cpu":
        return plans.CPU, 0
    facts = torch.cuda.get_device_properties(device)
    return tables.gpu_name(facts.name), facts.multi_processor_count


def problem(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    world_size: int = 1,
    return_A: bool = False,
    column_major: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Problem:
    """Of a group's call, whose facts are collective at first use, or of any call that has all of
    the GPU to itself."""
    gpu, sm_count = device_facts(device)
    facts = GroupFacts(sm_count) if group is None else group_facts(group, device)
    name = str(dtype).removeprefix("torch.")
    layout = "column" if column_major else "row"
    return Problem(
        m, n, k, name, world_size, return_A, layout, gpu, facts.sm_count, facts.peer_atomics
    )


def planner(group: dist.ProcessGroup | None, device: torch.device) -> Planner:
    """The planner of a group, of this process alone for None. Collective at first use."""
    if group is None:
        return _lone_planner(device)
    by_gpu = _planners.setdefault(group, {})
    gpu, _ = device_facts(device)
    found = by_gpu.get(gpu)
    if found is None:
        with groups.of(group).lock:
            found = by_gpu.get(gpu)
            if found is None:
                found = by_gpu[gpu] = Planner(kernels(), _agreed_tables(group, gpu))
    return found


def call_plan(
    A_shard: torch.Tensor, Bs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, return_A: bool
) -> Plan:
    """How a legal call is best computed, chosen by the weights' columns together.

    The kernel of each weight is another question: see `Planner.fused_plan`.
    """
    k = A_shard.shape[-1]
    world_size = dist.get_world_size(group)
    asked = problem(
        world_size * (A_shard.numel() // k),
        sum(B.shape[1] for B in Bs),
        k,
        A_shard.dtype,
        A_shard.device,
        world_size=world_size,
        return_A=return_A,
        column_major=Bs[0].stride(0) == 1,
        group=group,
    )
    return planner(group, A_shard.device).plan(asked)


def prefers_unfused(
    A_shard: torch.Tensor, Bs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, return_A: bool
) -> bool:
    """Whether a call that may be fused is faster without."""
    return call_plan(A_shard, Bs, group, return_A=return_A) == plans.UNFUSED


@cache
def _lone_planner(device: torch.device) -> Planner:
    gpu, _ = device_facts(device)
    return Planner(kernels(), _tables(tables.user(gpu, 1), tables.packaged(gpu, 1)))


def _tables(*found: tables.Table | None) -> list[tables.Table]:
    return [table for table in found if table is not None]


def _agreed_tables(group: dist.ProcessGroup, gpu: str) -> list[tables.Table]:
    """The user's table where all ranks read the same one, and the packaged one."""
    world_size = dist.get_world_size(group)
    own = tables.user(gpu, world_size)
    digest = "" if own is None else own.digest
    digests = _exchange(group, f"their tuned tables for {gpu}", digest)
    if len(set(digests)) > 1:
        tables.warn_once(
            f"agmm ignores {tables.file_name(gpu, world_size)} of the user: its ranks found "
            f"{len(set(digests))} versions of it, wanted one"
        )
        own = None
    return _tables(own, tables.packaged(gpu, world_size))


def _exchange(group: dist.ProcessGroup, topic: str, value: str) -> list[str]:
    """Every rank's value, by rank. Collective."""
    return groups.of(group).exchange(topic, value)
