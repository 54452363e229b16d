"""When torch's fused matmul + reduce-scatter is taken, and when copy engines gather."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from agmm.ops import scatter_plan
from agmm.planning import call_plans, cost_model
from agmm.planning.plans import BY_TORCH, UNFUSED, Plan, Problem
from agmm.runtime import collectives, groups, symmetric


def scattered(rows: int, n: int, k: int, world_size: int = 4) -> Problem:
    return Problem(rows, n, k, world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("k", [2048, 4096, 14336])
def test_more_rows_take_longer_and_are_fused_in_the_end(k: int, world_size: int) -> None:
    problems = [scattered(world_size << i, 8192, k, world_size) for i in range(4, 15)]
    for us in (cost_model.matmul_reduce_scatter_us, cost_model.fused_matmul_reduce_scatter_us):
        times = [us(problem) for problem in problems]
        assert times == sorted(times) and times[0] > 0
    fused = [cost_model.is_reduce_scatter_fused(problem) for problem in problems]
    assert fused == sorted(fused) and not fused[0] and fused[-1]


@pytest.mark.parametrize("shape", [(64, 32), (0, 32), (64, 2, 32)], ids=str)
def test_never_on_the_cpu(
    group: str, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(scatter_plan, "_is_planned", lambda *_: True)
    monkeypatch.setattr(cost_model, "is_gather_by_copies", lambda *_, **__: True)
    monkeypatch.setattr(symmetric, "why_unfused", lambda _: None)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 4)
    everyone = groups.group_of(group)
    A, B = torch.randn(shape, dtype=torch.bfloat16), torch.randn(32, 8, dtype=torch.bfloat16)
    assert not scatter_plan.is_fused(A, B, 0, everyone)
    assert not scatter_plan.is_gather_by_copies(A, A, B, everyone, is_scatter_fused=True)


@pytest.mark.parametrize(("plan", "fused"), [(BY_TORCH, True), (UNFUSED, False)])
def test_the_plan_decides(
    group: str, monkeypatch: pytest.MonkeyPatch, plan: Plan, fused: bool
) -> None:
    asked = []

    class Planner:
        def plan(self, problem: Problem) -> Plan:
            asked.append(problem)
            return plan

    monkeypatch.setattr(scatter_plan, "_has_kernels", lambda *_: True)
    monkeypatch.setattr(scatter_plan, "cuda_workspace", mock.Mock())
    monkeypatch.setattr(call_plans, "planner", lambda *_: Planner())
    monkeypatch.setattr(call_plans, "device_facts", lambda _: ("nvidia-h200", 132))
    with FakeTensorMode():
        A = torch.empty(8, 4, 16, dtype=torch.bfloat16, device="cuda:0")
        B = torch.empty(16, 24, dtype=torch.bfloat16, device="cuda:0")
    assert scatter_plan.is_fused(A, B, 0, groups.group_of(group)) == fused
    wanted = Problem(32, 24, 16, gpu="nvidia-h200", sm_count=132, op="matmul_reduce_scatter")
    assert asked == [wanted]


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
