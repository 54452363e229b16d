"""Exchanges what the ranks of a run tell each other about it: JSON values, through their group's
store."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from agmm.runtime import groups


def of_all_ranks(topic: str, mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, by rank. Collective.

    torch's exchange of objects goes over tensors on the device, needs numpy, and unpickles: who
    writes to the store of a job could have its ranks run anything.

    Args:
        topic: what the values are, for messages; the same on all ranks.
        mine: what JSON can hold; a tuple comes as a list, a key that is no string as one.
        group: None: the default group, or this process alone where torch.distributed is not
            initialised.

    Raises:
        AgmmError: a rank did not come within AGMM_TIMEOUT_S, or came with another topic.
    """
    group = group_or_alone(group)
    own = json.dumps(mine)
    said = [own] if group is None else groups.of(group).exchange(topic, own)
    return [json.loads(each) for each in said]


def group_or_alone(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The given group, else the default one, else None."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group
