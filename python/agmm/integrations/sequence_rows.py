"""Rows of activations that ranks share out: what enters and leaves a region of sequence
parallelism.

Outside the region every rank holds all rows, and the gradient of all rows is the same on each.
Inside it rank i holds the i-th shard of the rows, flattened over batch and sequence and filled up
by zeros to a multiple of the ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from agmm.collectives import all_gather
from agmm.nn._ranks import Ranks

_Group = dist.ProcessGroup | str
_TAG = "_agmm_rows"


class Rows(NamedTuple):
    """The rows of a forward, on all ranks together."""

    batch: int
    length: int

    @property
    def total(self) -> int:
        return self.batch * self.length


def rows_of(x: torch.Tensor) -> Rows | None:
    """What a shard of the rows is a shard of; None for a tensor with all rows."""
    return getattr(x, _TAG, None)


def mark(x: torch.Tensor, rows: Rows) -> None:
    """Notes on a shard of the rows what it is a shard of."""
    setattr(x, _TAG, rows)


def _shard(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    size = -(-whole.shape[0] // ranks)
    shard = whole[rank * size : (rank + 1) * size]
    missing = size - shard.shape[0]
    return torch.nn.functional.pad(shard, (0, 0, 0, missing)) if missing else shard.contiguous()


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: _Group, rank: int, ranks: int, whole: torch.Tensor
    ) -> torch.Tensor:
        ctx.group, ctx.total = group, whole.shape[0]
        return _shard(whole, rank, ranks).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dpart: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, all_gather(dpart.contiguous(), ctx.group)[: ctx.total]


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: _Group, rank: int, ranks: int, total: int, shard: torch.Tensor
    ) -> torch.Tensor:
        ctx.rank, ctx.world_size = rank, ranks
        return all_gather(shard.contiguous(), group)[:total]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dwhole: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, None, _shard(dwhole, ctx.rank, ctx.world_size)


def own_rows(whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's shard of all rows [rows, features]. The backward gathers the gradients."""
    found: torch.Tensor = _OwnRows.apply(ranks.for_ops, ranks.rank, ranks.size, whole)
    return found


def all_rows(shard: torch.Tensor, total: int, ranks: Ranks) -> torch.Tensor:
    """All rows of the shards. The backward takes this rank's shard of the gradient, which is the
    same on all ranks. Collective."""
    found: torch.Tensor = _AllRows.apply(ranks.for_ops, ranks.rank, ranks.size, total, shard)
    return found
