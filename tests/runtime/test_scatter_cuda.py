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
from steps_taken import planned

import agmm
from agmm.ops import kept as kept_calls
from agmm.ops import plain_scatter, scatter_plan
from agmm.ops.pipeline import LIBRARY, Route
from agmm.ops.plain_scatter import PlainScatter, kind_of_scatter
from agmm.ops.scatter import ScatterSettings
from agmm.planning.plans import BY_TORCH, UNFUSED, Plan
from agmm.planning.problems import KernelConfig
from agmm.runtime import cuda_calls, cuda_gather, cuda_scatter

A = torch.randn(8, 16).bfloat16()
B = torch.randn(24, 16).bfloat16().t()


@pytest.fixture
def kept(group: str) -> Any:
    """A call that was kept for A and B, and counts how often it is made."""
    everyone = dist.group.WORLD
    assert everyone is not None
    call = mock.Mock(side_effect=lambda As, Bs, bias: As[0] @ Bs[0])
    for strict in (False, True):
        keep(everyone, call, strict)
    return call


def keep(group: dist.ProcessGroup, call: Any, strict: bool = False) -> None:
    kind = kind_of_scatter([A], [B], None, None, 0, "sum", strict)
    kept_calls.keep(group, kind, call)


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
        ({}, {"A": [A, A], "B": [B, B]}),
    ],
    ids=short,
)
def test_another_one_is_not(
    kept: mock.Mock, arguments: dict[str, Any], words: dict[str, Any]
) -> None:
    operands = {"A": A, "B": B, **words}
    agmm.matmul_reduce_scatter(operands["A"], operands["B"], **arguments)
    assert kept.call_count == 0


def test_the_dispatcher_sees_what_a_kept_call_does_not_know(kept: mock.Mock) -> None:
    """Below it the call may be made as it was before."""
    leaf = torch.nn.Parameter(B)
    assert agmm.matmul_reduce_scatter(A.clone().requires_grad_(), B).requires_grad
    assert agmm.matmul_reduce_scatter(A, leaf).requires_grad
    assert torch.equal(agmm.matmul_reduce_scatter(torch._neg_view(A), B), -(A @ B))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_compilers_and_profilers_see_the_op(kept: mock.Mock) -> None:
    with torch.profiler.profile() as profiled:
        agmm.matmul_reduce_scatter(A, B)
    assert any("_matmul_reduce_scatter" in event.key for event in profiled.key_averages())
    with torch.autocast("cpu", torch.float16):
        assert agmm.matmul_reduce_scatter(A, B).dtype == torch.float16


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
    for module in (cuda_scatter, cuda_gather):
        monkeypatch.setattr(module, "stream_of", lambda device: 0)
    monkeypatch.setattr(cuda_calls, "is_on_current_gpu", lambda tensor: False)
    monkeypatch.setattr(plain_scatter, "scatter_workspace", lambda *_: workspace)
    with mock.patch.object(dist, "get_world_size", return_value=4):
        kernel = KernelConfig.parse("128x128x64_1x1_pingpong")
        scatter = plain_scatter.call_with(kernel, [A], [B], everyone, "sum")
    ready = cuda_calls.Kernel(kernel.core, cuda_calls.plain_format("A", A))
    gather = cuda_gather.ready_gather(workspace, A, [B], [ready], return_A=False)
    keep(everyone, scatter)
    before = set(kept_calls.kept_calls[everyone])
    agmm.all_gather_matmul(A, B)  # on the CPU, for the key under which its call is kept
    (key,) = set(kept_calls.kept_calls[everyone]) - before
    kept_calls.kept_calls[everyone][key] = gather

    found = _functions_called(lambda: agmm.matmul_reduce_scatter(A, B))
    assert core.calls == 1
    wanted = _functions_called(lambda: agmm.all_gather_matmul(A, B))
    assert core.calls == 2
    assert len(found) <= 0.8 * len(wanted), found
    assert found.count("matmul_reduce_scatter") == 2  # the function and the core's
    assert found.count("kind_of_product") == 1
    assert not {"check_scatterable", "why_not_native", "serve"} & set(found), found


@pytest.mark.parametrize("plan", [UNFUSED, BY_TORCH], ids=str)
def test_no_memory_is_taken_where_no_kernel_is_planned(
    group: str, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    workspace, group_of_four = mock.Mock(), mock.Mock(**{"size.return_value": 4})
    monkeypatch.setattr(plain_scatter, "scatter_workspace", workspace)
    monkeypatch.setattr(scatter_plan, "why_not_native", lambda *_: None)
    monkeypatch.setattr(scatter_plan, "is_fused", lambda *_: False)
    monkeypatch.setattr(scatter_plan, "sum_problem", lambda *_: None)
    call = PlainScatter([A], [B], None, group_of_four, ScatterSettings())
    call.device = torch.device("cuda", 0)
    with planned(plan):
        assert call.route() == Route(LIBRARY)
    assert not workspace.called
