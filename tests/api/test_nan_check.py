"""`agmm.check_nan` in one process: what is found, and that a check that is off costs nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from steps_taken import planned

import agmm
from agmm import _core
from agmm.integrations import fsdp
from agmm.ops import fp8_scatter, fp8_sums, gather
from agmm.ops.gather import GatherSettings
from agmm.ops.pipeline import KERNEL, Route, serve
from agmm.ops.plain_gather import PlainGather
from agmm.ops.plain_scatter import PlainScatter
from agmm.ops.scatter import ScatterSettings
from agmm.planning import call_plans
from agmm.planning.plans import Plan
from agmm.planning.problems import KernelConfig, Problem
from agmm.runtime import groups, nan_check
from agmm.runtime.scaled import ScaledProducts


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    agmm.check_nan("off")
    yield
    agmm.check_nan("off")


def _look(tensor: torch.Tensor) -> None:
    nan_check.look_through("an_op", "x", tensor, 3)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn],
    ids=str,
)
def test_first_index(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 5, 6)
    x[2, 3, 1] = x[2, 4, 0] = torch.nan
    agmm.check_nan("raise")
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(agmm.AgmmError) as caught:
        _look(x.to(dtype))
    assert str(caught.value) == (
        f"x: found a NaN at [2, 3, 1] of [4, 5, 6] {name}, which rank 3 was about to send in "
        "an_op; wanted none (agmm.check_nan)"
    )
    with pytest.raises(agmm.AgmmError, match=r"NaN at \[0, 4, 2\] of \[6, 5, 4\] "):
        _look(x.to(dtype).permute(2, 1, 0))


def test_numbers_that_are_none_and_those_that_cannot_be() -> None:
    agmm.check_nan("raise")
    with pytest.raises(agmm.AgmmError, match=r"NaN at \[\] of \[\] float32"):
        _look(torch.tensor(torch.nan))
    with pytest.raises(agmm.AgmmError, match=r"NaN at \[1\] of \[2\] complex64"):
        _look(torch.tensor([1 + 2j, complex(0, float("nan"))]))
    for good in (torch.tensor([torch.inf, -torch.inf]), torch.ones(0), torch.ones(2).int()):
        _look(good)


def test_modes() -> None:
    found = [(agmm.check_nan(mode), nan_check.active) for mode in ("warn", "raise", "off")]
    assert found == [("off", True), ("warn", True), ("raise", False)]
    with pytest.raises(agmm.InvalidArgument, match=r"found 'loud', wanted one of off, warn, raise"):
        agmm.check_nan("loud")


def test_a_kept_call_knows_nothing_of_the_check_that_is_off(group: str) -> None:
    called: list[Any] = []
    assert nan_check.before(called.append, called.clear) == called.append
    A, B = torch.ones(2, 3), torch.ones(3, 2)
    with mock.patch.object(nan_check, "look_through") as look:
        agmm.all_gather_matmul(A, B)
        agmm.matmul_reduce_scatter(A, B)
        agmm.collectives.all_reduce(A)
        assert look.call_count == 0
        agmm.check_nan("warn")
        agmm.all_gather_matmul(A, B)
        assert [call.args[:2] for call in look.call_args_list] == [("all_gather_matmul", "A_shard")]


def test_calls_of_kernels_look_first(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in of the kernel, which is called again as it is while nobody looks for NaNs."""
    of_group = dist.group.WORLD
    assert of_group is not None
    kernel = mock.Mock(return_value=(None, None, [torch.ones(2, 2)]))
    monkeypatch.setattr(PlainGather, "why_no_kernel", lambda _: None)
    monkeypatch.setattr(PlainGather, "problem", lambda *_: Problem(2, 2, 2))
    monkeypatch.setattr(PlainGather, "ready_on_cuda", lambda *_: kernel)
    monkeypatch.setattr(gather, "cuda_workspace", lambda *_: None)
    B = torch.ones(2, 2)

    def call(shard: torch.Tensor) -> None:
        made = PlainGather(shard, [B], [None], of_group, GatherSettings())
        made.device = torch.device("cuda", 0)
        serve(made)

    with planned(Plan("push", KernelConfig.parse("128x128x64_1x1_pingpong"))):
        call(torch.full((2, 2), torch.nan))
        agmm.check_nan("raise")
        call(torch.ones(2, 2))
        with pytest.raises(agmm.AgmmError, match="A_shard: found a NaN at"):
            call(torch.full((2, 2), torch.nan))
    assert kernel.call_count == 2


class _Event:
    """An event of a GPU that is behind."""

    done = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done


class _OnGpu(torch.Tensor):
    """A CPU tensor that passes for one of a GPU."""

    is_cuda = True


def test_on_a_gpu_a_warning_comes_later_and_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    said: list[str] = []
    monkeypatch.setattr(_core, "write_line", said.append)
    bad = torch.tensor([1.0, torch.nan]).as_subclass(_OnGpu)
    good = torch.ones(2).as_subclass(_OnGpu)
    agmm.check_nan("warn")
    _look(bad)
    _look(good)
    assert said == []
    monkeypatch.setattr(_Event, "done", True)
    _look(good)
    (line,) = said
    assert line.startswith("agmm: rank 3 sends a NaN in an_op: x at [1] of [2] float32; further ")
    agmm.check_nan("raise")
    with pytest.raises(agmm.AgmmError, match=r"x: found a NaN at \[1\]"):
        _look(bad)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        _look(bad)
    assert said[1:] == ["agmm: check_nan: what is captured in a CUDA graph is not looked through"]


def test_two_threads_say_what_has_come_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ask for the first answer before either takes it; the second has not come."""
    both_ask = threading.Barrier(2)

    made: list[_Event] = []

    class Event(_Event):
        def __init__(self) -> None:
            made.append(self)

        def query(self) -> bool:
            if self.done:
                with contextlib.suppress(threading.BrokenBarrierError):
                    both_ask.wait(0.5)
            return self.done

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    said: list[str] = []
    monkeypatch.setattr(_core, "write_line", said.append)
    bad = torch.tensor([1.0, torch.nan]).as_subclass(_OnGpu)
    agmm.check_nan("warn")
    _look(bad)
    nan_check.look_through("another_op", "x", bad, 3)
    made[0].done = True
    good = torch.ones(2).as_subclass(_OnGpu)
    threads = [threading.Thread(target=_look, args=(good,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    (line,) = said
    assert line.startswith("agmm: rank 3 sends a NaN in an_op: x at [1]")
    for event in made:
        event.done = True
    agmm.check_nan("off")
    assert [line.split(":")[1] for line in said[1:]] == [" rank 3 sends a NaN in another_op"]


def test_operands_of_a_scatter_kernel_are_looked_through(group: str) -> None:
    of_group = dist.group.WORLD
    assert of_group is not None
    A, B = torch.ones(4, 2), torch.ones(2, 2)
    B[1, 0] = torch.nan
    agmm.check_nan("raise")
    call = PlainScatter([A], [B], None, of_group, ScatterSettings())
    call.device = torch.device("cuda", 0)
    with pytest.raises(agmm.AgmmError, match=r"B: found a NaN at \[1, 0\] .* in matmul_reduce_sca"):
        call.look(Route(KERNEL), call.words())


@pytest.mark.parametrize("name", ["A", "B", "scale_a", "scale_b"])
def test_operands_of_a_scaled_scatter_kernel_are_looked_through(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On a stand-in of the kernel."""
    E4M3 = torch.float8_e4m3fn
    given = {
        "A": torch.ones(4, 16).to(E4M3),
        "B": torch.ones(16, 16).to(E4M3),
        "scale_a": torch.ones(4, 1),
        "scale_b": torch.ones(1, 16),
    }
    made = mock.Mock(return_value=torch.ones(2, 16).bfloat16())
    kernel = KernelConfig.parse("128x128x128_1x1_pingpong")
    planner = mock.Mock(fused_plan=lambda problem: Plan("push", kernel))
    for place, stand_in in (
        (
            "problem_of",
            lambda *_, **__: Problem(4, 16, 16, format="float8_e4m3fn_float8_e4m3fn slow"),
        ),
        ("scatter_workspace", lambda *_: None),
        ("ready_scatter", lambda *_, **__: made),
    ):
        monkeypatch.setattr(fp8_sums, place, stand_in)
    monkeypatch.setattr(fp8_sums, "why_unfused", lambda *_: None)
    monkeypatch.setattr(call_plans, "planner", lambda *_: planner)
    monkeypatch.setattr(groups, "check_alive", lambda group: None)
    monkeypatch.setattr(groups, "of", lambda group: mock.MagicMock(rank=1))
    group = mock.Mock(**{"size.return_value": 2})

    def scatter() -> torch.Tensor:
        A, B, scale_a, scale_b = ([given[name]] for name in ("A", "B", "scale_a", "scale_b"))
        products = ScaledProducts(A, B, scale_a, scale_b, None, None, torch.bfloat16, False)
        call = fp8_scatter.Fp8Scatter(products, group, ScatterSettings(strict=True))
        call.device = torch.device("cuda", 0)
        return serve(call)

    agmm.check_nan("raise")
    assert scatter().shape == (2, 16)
    given[name] = given[name].float().fill_(torch.nan).to(given[name].dtype)
    with pytest.raises(agmm.AgmmError, match=rf"^{name}: found a NaN .* in scaled_matmul_reduce_"):
        scatter()
    assert made.call_count == 1


def test_what_fsdp_sends_is_looked_through(group: str) -> None:
    x, out = torch.ones(6), torch.empty(6)
    assert dist.group.WORLD is not None
    gather = partial(fsdp.AllGather(), out, x, dist.group.WORLD)
    scatter = partial(fsdp.ReduceScatter(), out, x, dist.group.WORLD, dist.ReduceOp.SUM)
    agmm.check_nan("raise")
    for call in (gather, scatter):
        call()
    x[4] = torch.nan
    for call, kind in ((gather, "all_gather"), (scatter, "reduce_scatter")):
        with pytest.raises(agmm.AgmmError, match=rf"at \[4\] of .* send in fsdp\.{kind}"):
            call()
    agmm.check_nan("off")
    for call in (gather, scatter):
        call()


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("raise", "agmm.errors.AgmmError: A_shard: found a NaN at [0, 1] of [2, 2] float32, which"),
        pytest.param(
            "maybe",
            "InvalidArgument: AGMM_CHECK_NAN: found 'maybe', wanted one of off, warn, raise",
            marks=pytest.mark.slow,
        ),
        pytest.param("off", "done", marks=pytest.mark.slow),
        pytest.param("", "done", marks=pytest.mark.slow),
    ],
)
def test_environment(value: str, wanted: str) -> None:
    script = (
        "import torch, torch.distributed as dist\n"
        "import agmm\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "A = torch.ones(2, 2)\n"
        "A[0, 1] = torch.nan\n"
        "agmm.all_gather_matmul(A, A)\n"
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "AGMM_CHECK_NAN": value},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert wanted in (done.stdout + done.stderr).strip().splitlines()[-1]
