"""What the ranks of a group agree on before they share memory of their GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch

from agmm import _env
from agmm.errors import AgmmError, reason_of
from agmm.runtime import links, rendezvous
from agmm.runtime.groups import Group


class Agreement(NamedTuple):
    """What the ranks agree on; it is the same on all of them, but for the words of a reason."""

    is_captured: bool
    """Whether a rank has captured calls with the memory that they have."""
    why_not: str | None
    """The reason why they cannot share memory, or None."""


def agree(known: Group, device: torch.device, slot_bytes: int, captured: bool) -> Agreement:
    """What comes of it when this rank wants slots of that size on its device. Collective.

    Args:
        captured: whether this rank has captured calls with the memory that it has.

    Raises:
        AgmmError: the ranks want slots of different sizes; all raise.
    """
    rendezvous.made.note_torchs()
    own, made = links.uuid(device.index), rendezvous.made
    told = json.dumps([slot_bytes, own, made.count, captured, made.failed, versions()])
    found = [json.loads(each) for each in known.exchange("the size of a workspace", told)]
    fields = [len(entry) for entry in found]
    if len(set(fields)) > 1:
        raise AgmmError(
            f"build of agmm: found ranks whose builds tell {fields} facts of a workspace, wanted "
            "the same build on all ranks"
        )
    sizes = sorted({entry[0] for entry in found})
    if len(sizes) > 1:
        raise AgmmError(
            f"workspace: found ranks that want slots of {sizes} bytes, wanted the same calls "
            "with the same shapes on all ranks"
        )
    hosts = len(set(known.hosts()))
    uuids, counts, failures, of_ranks = ([entry[i] for entry in found] for i in (1, 2, 4, 5))
    try:
        reason = _why_not(hosts, uuids, counts, failures) or _why_no_version(of_ranks)
    except Exception as e:  # the other ranks wait to hear of it
        reason = f"group: {reason_of(e)}"
    # Ranks may see different GPUs.
    reasons = known.exchange("whether their GPUs reach each other", reason)
    why_not = next((each for each in reasons if each), None)
    return Agreement(any(entry[3] for entry in found), why_not)


def _why_not(
    hosts: int,
    uuids: Sequence[str],
    made: Sequence[int],
    failures: Sequence[str],
) -> str:
    """The reason why, or "". By rank: UUIDs, how many rendezvous it made, and how one failed."""
    if hosts > 1:
        return f"group: found ranks on {hosts} hosts, wanted one"
    if len(set(uuids)) < len(uuids) and not _env.is_on(_env.SHARED_GPUS):
        shared = [rank for rank, uuid in enumerate(uuids) if uuids.count(uuid) > 1]
        return f"group: found ranks {shared} on GPUs that they share, wanted one each"
    for rank, failure in enumerate(failures):
        if failure:
            return f"group: found a rendezvous of rank {rank} that failed ({failure}), wanted none"
    if len(set(made)) > 1:
        # torch numbers the exchanges of a rendezvous with one counter per process; ranks whose
        # counters differ would wait for each other's keys forever (seen with torch 2.11).
        return (
            f"group: found ranks that have made {made} workspaces before, wanted equally many: "
            "torch's rendezvous would hang; call in the group with more ranks first"
        )
    return _why_no_peer_access(uuids)


def versions() -> dict[str, str]:
    """What processes have to have in common to map each other's memory: the driver's part of each
    process, which a container may bring along, maps it, and torch exchanges the handles."""
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return {
        "CUDA drivers": f"{driver // 1000}.{driver % 1000 // 10}",
        "versions of torch": ".".join(torch.__version__.split(".")[:2]),
    }


def _why_no_version(of_ranks: Sequence[dict[str, str]]) -> str:
    """The reason why ranks with such `versions` share no memory, or ""."""
    for name in of_ranks[0]:
        found = [each[name] for each in of_ranks]
        if len(set(found)) > 1:
            ranks = ", ".join(f"{version} on rank {rank}" for rank, version in enumerate(found))
            return f"group: found {name} {ranks}, wanted one: their processes share no memory"
    return ""


def _why_no_peer_access(uuids: Sequence[str]) -> str:
    """The reason why GPUs of this host, by UUID, do not reach each other's memory, or "".

    Only those that this process sees can be asked; under Slurm or Ray that is often its own alone.
    The others are taken to be reached: their memory is mapped by handles, which does not need them
    to be visible, and where it cannot be the rendezvous says so.
    """
    visible = links.visible()
    here = sorted({visible[uuid] for uuid in uuids if uuid in visible})
    for a in here:
        for b in here:
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                return f"group: cuda:{a} has no peer access to cuda:{b}"
    return ""
