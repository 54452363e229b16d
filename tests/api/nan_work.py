"""What the tests of `agmm.check_nan` run inside ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import agmm


def _bad(shape: tuple[int, ...], index: tuple[int, ...], rank: int) -> torch.Tensor:
    """Ones, on that rank with a NaN at the index and one behind it."""
    x = torch.ones(shape)
    if dist.get_rank() == rank:
        x[index] = torch.nan
        x.view(-1)[-1] = torch.nan
    return x


def _backward_of_sum(rank: int) -> None:
    """A NaN comes with the gradient: it is in the partial sums of dA_shard."""
    shard = torch.ones(2, 3, requires_grad=True)
    out = agmm.all_gather_matmul(shard, torch.ones(3, 4))
    out.backward(_bad((2 * dist.get_world_size(), 4), (3, 1), rank))


def _backward_of_gather(rank: int) -> None:
    """The other gradient: it is in the rows that are gathered."""
    A = torch.ones(2 * dist.get_world_size(), 3, requires_grad=True)
    out = agmm.matmul_reduce_scatter(A, torch.ones(3, 4))
    out.backward(_bad((2, 4), (1, 2), rank))


_ops: Any = agmm.collectives
CALLS: dict[str, Callable[[int], Any]] = {
    "gather": lambda rank: agmm.all_gather_matmul(_bad((4, 3), (2, 1), rank), torch.ones(3, 2)),
    "gather kept": lambda rank: [
        agmm.all_gather_matmul(_bad((4, 3), (2, 1), of), torch.ones(3, 2)) for of in (-1, rank)
    ],
    "gather unfused": lambda rank: agmm.all_gather_matmul(
        _bad((4, 3), (2, 1), rank), torch.ones(3, 2), config="unfused"
    ),
    # Row 3 of A is rank 1's: rank 0 sends it, rank 1 does not.
    "scatter": lambda rank: agmm.matmul_reduce_scatter(
        _bad((6, 3), (4, 2), rank), torch.ones(3, 2)
    ),
    "scatter unfused": lambda rank: agmm.matmul_reduce_scatter(
        _bad((6, 3), (4, 2), rank), torch.ones(3, 4), scatter_dim=1
    ),
    "matmul_all_reduce": lambda rank: agmm.matmul_all_reduce(
        _bad((6, 3), (4, 2), rank), torch.ones(3, 2)
    ),
    "all_gather": lambda rank: _ops.all_gather(_bad((4, 3), (0, 1), rank).t()),
    "reduce_scatter": lambda rank: _ops.reduce_scatter(_bad((4, 3), (0, 1), rank), op="avg"),
    "all_reduce": lambda rank: _ops.all_reduce(_bad((4,), (2,), rank).bfloat16()),
    "background": lambda rank: _ops.all_reduce(_bad((4,), (2,), rank), async_op=True).wait(),
    "torch": lambda rank: _ops.all_reduce(_bad((4,), (2,), rank).to(torch.complex64)),
    "backward of sum": _backward_of_sum,
    "backward of gather": _backward_of_gather,
}


def warned(name: str, rank: int) -> None:
    assert agmm.check_nan("warn") == "off"
    CALLS[name](-1)  # without a NaN
    CALLS[name](rank)
    CALLS[name](rank)  # is not reported again
    assert agmm.check_nan("off") == "warn"
    CALLS[name](rank)


def raised(name: str) -> list[str]:
    """Every rank has a NaN, so none waits for another."""
    agmm.check_nan("raise")
    found = []
    try:
        CALLS[name](dist.get_rank())
    except agmm.AgmmError as error:
        found.append(str(error))
    agmm.check_nan("off")
    out = agmm.collectives.all_reduce(torch.ones(2))
    return [*found, str(out.tolist())]
