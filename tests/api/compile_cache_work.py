"""Functions that are compiled with Inductor and its caches on disk, in a pool of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config

import agmm
from agmm.nn import ColumnParallelLinear, RowParallelLinear


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def _layers(x: torch.Tensor, column: Any, row: Any) -> torch.Tensor:
    return row(column(x)).relu()  # type: ignore[no-any-return]


def _sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return agmm.matmul_reduce_scatter(a, b).relu() + agmm.matmul_all_reduce(a, b).relu().sum(0)


def _functions() -> dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...]]]:
    """Functions by name, of tensors whose shapes are the same for every world size."""
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name
    torch.manual_seed(0)
    column, row = ColumnParallelLinear(8, 24), RowParallelLinear(24, 4)
    for layer in (column, row):
        layer.requires_grad_(False)
    B, shard, whole = _numbers(8, 6, seed=1), _numbers(4, 8, seed=2), _numbers(12, 8, seed=3)
    native = torch.ops.agmm._fused_all_gather_matmul_native
    native_scatter = torch.ops.agmm._fused_matmul_reduce_scatter_native
    return {
        "gather with gradients": (
            lambda a, b: agmm.all_gather_matmul(a, b).relu(),
            (shard.clone().requires_grad_(), B),
        ),
        "sums": (_sums, (whole, B)),
        "layers": (_layers, (shard, column, row)),
        "native": (lambda a, b: native(a, b, name)[1].relu(), (shard, B)),
        "native scatter": (lambda a, b: native_scatter(a, b, "sum", name).relu(), (whole, B)),
    }


def compiled(kind: str) -> tuple[str, tuple[int, ...], int]:
    """What is wrong with the compiled function's result, its shape, and the hits in two caches: of
    autograd's graphs, which torch 2.11 does without for a DTensor's to_local, and Inductor's."""
    torch.compiler.reset()
    counters.clear()
    function, arguments = _functions()[kind]
    try:
        with config.patch(size_asserts=False):
            found = torch.compile(function, fullgraph=True)(*arguments)
        if found.requires_grad:
            found.sum().backward()  # the graphs are kept when both are compiled
    except Exception as error:
        return f"{type(error).__name__}: {error}", (), 0
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    hits += counters["inductor"]["fxgraph_cache_hit"]
    wanted = function(*arguments)
    if found.shape != wanted.shape or not torch.allclose(found, wanted):
        return f"{tuple(found.shape)} differs from {tuple(wanted.shape)}", tuple(found.shape), hits
    return "", tuple(found.shape), hits
