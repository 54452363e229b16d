"""Collectives that leave out the links which a schedule leaves out: an all-gather in two steps, in
the second of which ranks pass on what they got in the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from agmm.runtime import backends, groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.topology import Move, Schedule
from agmm.runtime.workspaces import meet


def all_gather(
    shard: torch.Tensor, group: dist.ProcessGroup, schedule: Schedule
) -> list[torch.Tensor]:
    """Every rank's shard, by rank; each contiguous. Collective.

    Args:
        shard: of the same shape and dtype on all ranks.
        schedule: of as many ranks, the same on all. Messages go between the ranks of its moves and
            no others.
    """
    size = dist.get_world_size(group)
    assert schedule.world_size == size
    backends.check_backend(group, shard.device)
    rank, shard = dist.get_rank(group), shard.contiguous()
    call = Call("relayed_all_gather", input=shard)
    if nan_check.active:
        nan_check.look_through(call.op, "input", shard, rank)
    with groups.of(group).lock:
        if shard.device.type == "cpu":
            what = f"relayed all_gather of {list(shard.shape)} {shard.dtype}"
            meet(group, what, call)
        shards = [shard if owner == rank else torch.empty_like(shard) for owner in range(size)]
        for step in (schedule.first, schedule.second):
            _carry_out(step, shards, group, rank)
    return shards


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, schedule: Schedule) -> torch.Tensor:
    """The sum over all ranks, in the order of the ranks, of float32 values where the dtype has 16
    bits, rounded once: the same bits on every rank, and with any schedule. Collective.

    For small tensors: every rank gets all of them.
    """
    shards = all_gather(tensor, group, schedule)
    wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    total = shards[0].to(wide, copy=True)
    for shard in shards[1:]:
        total += shard
    return total.to(tensor.dtype)


def _carry_out(
    step: Sequence[Move], shards: list[torch.Tensor], group: dist.ProcessGroup, rank: int
) -> None:
    """This rank's part of a step. Both ends of a link name its messages in the same order."""
    messages = []
    for move in sorted(step):
        if rank not in (move.source, move.target):
            continue
        sends = rank == move.source
        way = dist.isend if sends else dist.irecv
        peer = move.target if sends else move.source
        shard = shards[move.owner]
        messages.append(dist.P2POp(way, shard, group=group, tag=move.owner, group_peer=peer))
    if messages and shards[rank].numel():
        for work in dist.batch_isend_irecv(messages):
            work.wait()
