"""Calls of agmm's own matmul + reduce-scatter on CUDA that are kept, without a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import agmm
from agmm.ops import matmul_reduce_scatter, scatter_cuda, scatter_plan
from agmm.planning.plans import BY_TORCH, UNFUSED, Plan

A = torch.randn(8, 16).bfloat16()
B = torch.randn(24, 16).bfloat16().t()


@pytest.fixture
def kept(group: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call that was kept for A and B, and counts how often it is made."""
    everyone = dist.group.WORLD
    assert everyone is not None
    call = mock.Mock(side_effect=lambda As, Bs, bias: As[0] @ Bs[0])
    ready: dict[Any, Any] = {}
    for strict in (False, True):
        ready[scatter_cuda._key([A], [B], None, "sum", strict)] = call
    monkeypatch.setitem(scatter_cuda._ready, everyone, ready)
    monkeypatch.setattr(matmul_reduce_scatter, "_is_on_gpu", lambda tensor: True)
    return call


def test_a_known_call_is_made_at_once(kept: mock.Mock, group: str) -> None:
    for given in (None, dist.group.WORLD):
        assert torch.equal(agmm.matmul_reduce_scatter(A, B, given), A @ B)
    agmm.matmul_reduce_scatter(A, B, strict=True)
    torch.ops.agmm._fused_matmul_reduce_scatter_native(A, B, "sum", group)
    assert kept.call_count == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reduce_op": "avg"}, {}),
        ({}, {"A": A.float(), "B": B.float()}),
        ({}, {"A": A[:4]}),
        ({}, {"B": B.contiguous()}),
        ({"bias": torch.zeros(24).bfloat16()}, {}),
        ({}, {"A": A.clone().requires_grad_()}),
        ({}, {"A": torch._neg_view(A)}),
        ({}, {"A": [A], "B": [B]}),
    ],
    ids=str,
)
def test_another_one_is_not(
    kept: mock.Mock, arguments: dict[str, Any], words: dict[str, Any]
) -> None:
    operands = {"A": A, "B": B, **words}
    agmm.matmul_reduce_scatter(operands["A"], operands["B"], **arguments)
    assert kept.call_count == 0


def test_compilers_and_profilers_see_the_op(kept: mock.Mock) -> None:
    with torch.profiler.profile() as profiled:
        agmm.matmul_reduce_scatter(A, B)
    assert any("_matmul_reduce_scatter" in event.key for event in profiled.key_averages())
    with torch.autocast("cpu", torch.bfloat16):
        agmm.matmul_reduce_scatter(A, B)
    assert kept.call_count == 0


@pytest.mark.parametrize("plan", [None, UNFUSED, BY_TORCH], ids=str)
def test_no_memory_is_taken_where_no_kernel_is_planned(
    group: str, monkeypatch: pytest.MonkeyPatch, plan: Plan | None
) -> None:
    everyone, workspace = dist.group.WORLD, mock.Mock()
    assert everyone is not None
    monkeypatch.setattr(dist, "get_world_size", lambda _: 4)
    monkeypatch.setattr(scatter_cuda, "scatter_workspace", workspace)
    monkeypatch.setattr(scatter_plan, "kernel_plan", lambda *_, **__: plan)
    assert scatter_cuda.run([A], [B], None, everyone, 0, "sum", strict=False) is None
    assert not workspace.called
