"""Calls of agmm's own matmul + reduce-scatter on CUDA that are kept, without a GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from short_ids import short

import agmm
from agmm import _core
from agmm.ops import scatter_cuda, scatter_plan
from agmm.ops.kept import kept_calls
from agmm.planning.plans import BY_TORCH, UNFUSED, KernelConfig, Plan
from agmm.runtime import cuda_calls, cuda_scatter

A = torch.randn(8, 16).bfloat16()
B = torch.randn(24, 16).bfloat16().t()


@pytest.fixture
def kept(group: str) -> Any:
    """A call that was kept for A and B, and counts how often it is made."""
    everyone = dist.group.WORLD
    assert everyone is not None
    call = mock.Mock(side_effect=lambda As, Bs, bias: As[0] @ Bs[0])
    for strict in (False, True):
        scatter_cuda.keep(A, B, None, everyone, "sum", strict, call)
    return call


def test_a_kept_call_is_not_made_once_nans_are_looked_for(kept: mock.Mock) -> None:
    before = agmm.check_nan("warn")
    try:
        agmm.matmul_reduce_scatter(A, B)
    finally:
        agmm.check_nan(before)
    assert kept.call_count == 0


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
        ({}, {"B": torch.nn.Parameter(B)}),
    ],
    ids=short,
)
def test_another_one_is_not(
    kept: mock.Mock, arguments: dict[str, Any], words: dict[str, Any]
) -> None:
    operands = {"A": A, "B": B, **words}
    agmm.matmul_reduce_scatter(operands["A"], operands["B"], **arguments)
    assert kept.call_count == 0


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_compilers_and_profilers_see_the_op(kept: mock.Mock) -> None:
    with torch.profiler.profile() as profiled:
        agmm.matmul_reduce_scatter(A, B)
    assert any("_matmul_reduce_scatter" in event.key for event in profiled.key_averages())
    with torch.autocast("cpu", torch.bfloat16):
        agmm.matmul_reduce_scatter(A, B)
    assert kept.call_count == 0


@pytest.mark.parametrize(
    ("A", "reduce_op", "named"),
    [
        (A.float().numpy(), "sum", "A: found "),
        (A.to_sparse(), "sum", "A: "),
        (A, ["sum"], "reduce_op: found"),
        (None, "sum", "A: found None"),
    ],
    ids=["no tensor", "sparse", "no name", "nothing"],
)
def test_bad_input_is_refused_where_calls_are_kept(
    kept: mock.Mock, A: Any, reduce_op: Any, named: str
) -> None:
    with pytest.raises(agmm.InvalidArgument, match=f"^{named}"):
        agmm.matmul_reduce_scatter(A, B, reduce_op=reduce_op)
    assert kept.call_count == 0


class _Core:
    """A workspace's core, which notes its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def matmul_reduce_scatter(self, *arguments: Any) -> bool:
        self.calls += 1
        return False

    all_gather_matmul = matmul_reduce_scatter


def _functions_called(function: Callable[[], Any]) -> list[str]:
    """The names of all functions that it calls, whether of Python or not."""
    found = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.append(frame.f_code.co_name)
        elif event == "c_call":
            found.append(argument.__name__)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def test_the_host_time_of_a_kept_call(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls, which unlike microseconds are the same on each machine: four fifths of those of an
    `all_gather_matmul`, and none of the plan, the checks or the dispatcher."""
    everyone, core = dist.group.WORLD, _Core()
    assert everyone is not None
    workspace: Any = SimpleNamespace(
        lock=threading.RLock(),
        known=SimpleNamespace(calls=0),
        enter=lambda slot_bytes: SimpleNamespace(core=core),
        device=A.device,
        captured=False,
        world_size=4,
    )
    for module in (cuda_scatter, cuda_calls):
        monkeypatch.setattr(module, "stream_of", lambda device: 0)
    monkeypatch.setattr(cuda_calls, "is_on_current_gpu", lambda tensor: False)
    monkeypatch.setattr(scatter_cuda, "scatter_workspace", lambda *_: workspace)
    with mock.patch.object(dist, "get_world_size", return_value=4):
        kernel = KernelConfig.parse("128x128x64_1x1_pingpong")
        scatter = scatter_cuda.call_with(kernel, [A], [B], everyone, "sum")
    weight = cuda_calls.Weight(16, True, 24, (32, 24), kernel.core)
    dtype = _core.DType.bfloat16
    gather = cuda_calls.FusedCall(workspace, 8, 16, dtype, 1, (0,) * 5, None, (weight,))
    scatter_cuda.keep(A, B, None, everyone, "sum", False, scatter)
    before = set(kept_calls[everyone])
    agmm.all_gather_matmul(A, B)  # on the CPU, for the key under which its call is kept
    (key,) = set(kept_calls[everyone]) - before
    kept_calls[everyone][key] = gather

    found = _functions_called(lambda: agmm.matmul_reduce_scatter(A, B))
    assert core.calls == 1
    wanted = _functions_called(lambda: agmm.all_gather_matmul(A, B))
    assert core.calls == 2
    assert len(found) <= 0.8 * len(wanted), found
    assert found.count("matmul_reduce_scatter") == 2  # the function and the core's
    assert found.count("_ready_key") == 1
    assert not {"call", "check_scatterable", "why_not_native", "run"} & set(found), found


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
