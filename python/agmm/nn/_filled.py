"""Rows that the ranks cannot share evenly. The ops are given zeros behind them, and what comes of
the zeros is cut off again.

The ranks' shards are then those of a DTensor, and of ``torch.chunk``: all have as many rows as the
first, but for the last ones, which have fewer or none.
"""

from __future__ import annotations

import torch

from agmm.nn._ranks import Ranks


def filled_up(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """The rows along dimension 0, and zeros up to a multiple of ``ranks``."""
    return _with_zeros(rows, -rows.shape[0] % ranks)


def filled_shard(shard: torch.Tensor, length: int, ranks: int) -> torch.Tensor:
    """A rank's shard of ``length`` rows, and zeros up to as many as the first rank has."""
    return _with_zeros(shard, -(-length // ranks) - shard.shape[0])


def own_rows_of(shard: torch.Tensor, length: int, ranks: Ranks) -> torch.Tensor:
    """A rank's shard of rows that were filled up, without what does not belong to ``length``."""
    size = shard.shape[0]
    return shard[: min(size, max(0, length - ranks.rank * size))]


def _with_zeros(rows: torch.Tensor, missing: int) -> torch.Tensor:
    if not missing:
        return rows
    return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
