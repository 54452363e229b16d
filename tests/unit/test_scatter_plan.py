"""When torch's fused matmul + reduce-scatter is taken, and when copy engines gather."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from agmm.ops import scatter_plan
from agmm.planning import cost_model
from agmm.planning.plans import Problem
from agmm.runtime import collectives, cuda, groups


def scattered(rows: int, n: int, k: int, world_size: int = 4) -> Problem:
    return Problem(rows, n, k, world_size=world_size)


# Rows, columns, k, ranks, and the µs of matmul + NCCL and of torch's fused op: H200, 2026-11-22.
MEASURED = [
    (16384, 8192, 2048, 4, 1403.8, 946.0),
    (4096, 8192, 2048, 4, 377.5, 297.0),
    (2048, 8192, 2048, 4, 205.2, 193.2),
    (1024, 8192, 2048, 4, 112.9, 144.3),
    (128, 8192, 2048, 4, 36.5, 102.1),
    (8192, 8192, 7168, 4, 1603.6, 1358.2),
    (4096, 8192, 7168, 4, 803.7, 696.3),
    (2048, 8192, 7168, 4, 412.1, 360.8),
    (512, 8192, 7168, 4, 128.4, 167.3),
    (8192, 8192, 14336, 4, 2842.2, 2627.5),
    (4096, 8192, 14336, 4, 1404.6, 1326.9),
    (16384, 8192, 14336, 4, 5805.5, 5260.5),
    (512, 8192, 14336, 4, 203.3, 269.5),
    (16384, 4096, 1024, 4, 552.8, 437.4),
    (2048, 4096, 1024, 4, 91.5, 124.6),
    (8192, 4096, 3584, 4, 503.0, 374.2),
    (1024, 4096, 3584, 4, 86.5, 125.1),
    (4096, 2048, 512, 4, 81.2, 115.6),
    (16384, 2048, 8192, 4, 885.5, 768.5),
    (2048, 2048, 8192, 4, 136.2, 154.6),
    (8192, 8192, 2048, 2, 673.8, 531.1),
    (2048, 8192, 2048, 2, 192.4, 163.0),
    (512, 8192, 2048, 2, 63.8, 78.3),
    (2048, 8192, 7168, 2, 397.3, 358.0),
    (1024, 4096, 1024, 2, 52.4, 69.8),
]


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_what_saves_its_host_time_by_measurement(
    case: tuple[int, int, int, int, float, float],
) -> None:
    rows, n, k, world_size, unfused_us, fused_us = case
    problem = scattered(rows, n, k, world_size)
    assert cost_model.is_reduce_scatter_fused(problem) == (unfused_us - fused_us > 60)
    assert cost_model.matmul_reduce_scatter_us(problem) == pytest.approx(unfused_us, rel=0.4)
    assert cost_model.fused_matmul_reduce_scatter_us(problem) == pytest.approx(fused_us, rel=0.25)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("k", [2048, 4096, 14336])
def test_more_rows_take_longer_and_are_fused_in_the_end(k: int, world_size: int) -> None:
    problems = [scattered(world_size << i, 8192, k, world_size) for i in range(4, 15)]
    for us in (cost_model.matmul_reduce_scatter_us, cost_model.fused_matmul_reduce_scatter_us):
        times = [us(problem) for problem in problems]
        assert times == sorted(times) and times[0] > 0
    fused = [cost_model.is_reduce_scatter_fused(problem) for problem in problems]
    assert fused == sorted(fused) and not fused[0] and fused[-1]


def test_copy_engines_gather_beside_a_long_product() -> None:
    def by_copies(rows: int, columns: int, *, fused: bool = True) -> bool:
        problem = scattered(rows, 8192, columns)
        return cost_model.is_gather_by_copies(problem, is_scatter_fused=fused)

    assert by_copies(4096, 14336) and by_copies(8192, 5120) and by_copies(2048, 8192)
    assert not by_copies(4096, 2560) and not by_copies(8192, 2560)
    assert by_copies(1024, 2560, fused=False)


@pytest.mark.parametrize("shape", [(64, 32), (0, 32), (64, 2, 32)], ids=str)
def test_never_on_the_cpu(
    group: str, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(cost_model, "is_reduce_scatter_fused", lambda _: True)
    monkeypatch.setattr(cost_model, "is_gather_by_copies", lambda *_, **__: True)
    monkeypatch.setattr(cuda, "why_unfused", lambda _: None)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 4)
    everyone = groups.group_of(group)
    A, B = torch.randn(shape, dtype=torch.bfloat16), torch.randn(32, 8, dtype=torch.bfloat16)
    assert not scatter_plan.is_fused(A, B, 0, everyone)
    assert not scatter_plan.is_gather_by_copies(A, A, B, everyone, is_scatter_fused=True)


def test_what_is_traced() -> None:
    tensor = torch.ones(2)
    assert not collectives.is_traced(tensor)
    assert not collectives.is_traced(torch.nn.Parameter(tensor))
    with FakeTensorMode() as mode:
        assert collectives.is_traced(mode.from_tensor(tensor))
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(collectives.is_traced(x))
        return x + 1

    make_fx(look, tracing_mode="real")(tensor)
    assert seen == [True]
