"""What the ranks of a run tell each other about it: Python values, through their group's store."""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch.distributed as dist

from agmm.runtime import groups

_T = TypeVar("_T")


def of_all_ranks(topic: str, mine: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Every rank's value, by rank. Collective.

    torch's exchange of objects goes over tensors on the device and needs numpy.

    Args:
        topic: what the values are, for messages; the same on all ranks.
        mine: anything that can be pickled.
        group: None: the default group, or this process alone where torch.distributed is not
            initialised.

    Raises:
        AgmmError: a rank did not come within AGMM_TIMEOUT_S, or came with another topic.
    """
    group = group_or_alone(group)
    if group is None:
        return [mine]
    said = groups.of(group).exchange(topic, pickle.dumps(mine).hex())
    return [pickle.loads(bytes.fromhex(each)) for each in said]


def group_or_alone(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group that was given, else the default one, else None."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group
