"""What a linear that is shared out over ranks tells those that add to it, as adapters do."""

from __future__ import annotations

from typing import NamedTuple

import torch

from agmm.nn._ranks import Ranks
from agmm.nn._sharded import ShardedLinear
from agmm.nn.linear import ColumnParallelLinear

_NOTE = "_agmm_divided"


class Divided(NamedTuple):
    """How the ranks share a linear.

    Attributes:
        ranks: that share it.
        by_columns: whether each has some of the outputs; else some of the inputs.
        sequence_dim: the dimension of the activation on the linear's other side of which each rank
            has a shard; None where every rank has all of it.
    """

    ranks: Ranks
    by_columns: bool
    sequence_dim: int | None


def note(module: torch.nn.Module, divided: Divided) -> None:
    """Notes on a module how it is shared."""
    setattr(module, _NOTE, divided)


def forget(module: torch.nn.Module) -> None:
    """Makes a module one that nothing is added to: it returns what another style made of it."""
    module.__dict__.pop(_NOTE, None)


def divided(module: torch.nn.Module) -> Divided | None:
    """How the ranks share a module; None where it is not one of agmm's layers or styled by it."""
    if isinstance(module, ShardedLinear):
        sequence_dim = 0 if module.sequence_parallel else None
        return Divided(module.ranks, isinstance(module, ColumnParallelLinear), sequence_dim)
    found = module.__dict__.get(_NOTE)
    return found if isinstance(found, Divided) else None
