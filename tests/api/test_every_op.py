"""What all ops promise, by a table of them: gradients, results, FLOPs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest import mock

import every_op
import every_op_work as work
import pytest
import torch
import torch.distributed as dist
from every_op import Sizes

import agmm
from agmm.ops import plain_scatter, quantize
from agmm.ops.gather import Gathered
from agmm.ops.pipeline import KERNEL, Route
from agmm.ops.scatter import ScatterSettings
from agmm.planning.plans import Plan
from agmm.planning.problems import KernelConfig
from agmm.runtime import cuda_quantize
from agmm.runtime.scaling import Tile, scale_shape
from agmm.testing.ranks import RankPool


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


def test_the_table_has_every_op_with_every_operand() -> None:
    given: dict[str, set[str]] = {name: set() for name in every_op.names()}
    for call in every_op.calls(2):
        given[call.op] |= {name for name, value in call.operands.items() if value is not None}
    wanted = {name: set(every_op.tensors_of(every_op.op_named(name))) for name in given}
    assert given == wanted


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_or_a_refusal(pool: RankPool, world_size: int) -> None:
    check(pool.run(work.gradients, world_size), world_size)


SIZES = [
    # Moved to the front or back, the dimension leaves the memory as it is.
    *[
        Sizes((1, 4), 1),
        Sizes((1, 4), 2, 1),
        Sizes((1, 1, 3), 2),
        Sizes((1,), 0),
        Sizes((1,), 1, 1),
    ],
    *[Sizes((2, 3), dim) for dim in range(3)],
    *[Sizes((2, 1), 1), Sizes((1, 3), 0)],
]


@pytest.mark.parametrize("paths", ["as planned", "unfused"])
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_result_is_a_view(pool: RankPool, world_size: int, paths: str) -> None:
    check(pool.run(work.views, world_size, paths, SIZES), world_size)


def test_every_op_has_a_rule_for_gradients_on_every_device() -> None:
    """Else torch computes them without, and warns in the backward."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    of_all_devices = ("Autograd", "CompositeImplicitAutograd")
    without = [n for n in every_op.REGISTERED if not any(has(n, key) for key in of_all_devices)]
    assert without == []


@pytest.mark.parametrize("operand", ["A_shard", "B", "bias"])
@pytest.mark.parametrize("kind", quantize.KINDS)
def test_a_kernel_that_quantises_hides_no_gradient(
    group: str, monkeypatch: pytest.MonkeyPatch, kind: str, operand: str
) -> None:
    """Kernels hand on tensors that require none."""

    def quantised(x: torch.Tensor, tile: Tile, dtype: torch.dtype, **_: Any) -> Any:
        return torch.zeros_like(x, dtype=dtype), torch.ones(scale_shape(x.shape, tile))

    out = torch.ones(6, 48)
    monkeypatch.setattr(cuda_quantize, "quantised", quantised)
    monkeypatch.setattr(cuda_quantize, "amax_of", lambda x, tile: None)
    monkeypatch.setattr(quantize, "gather", lambda *_, **__: Gathered(None, None, [out]))
    given = {"A_shard": torch.ones(6, 144), "B": torch.ones(144, 48), "bias": torch.ones(48)}
    op: Any = agmm.all_gather_matmul
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        assert op(**given, quantize=kind) is out
        given[operand].requires_grad_()
        message = f"^{operand}: found requires_grad=True, wanted a call under torch.no_grad"
        with pytest.raises(agmm.InvalidArgument, match=message):
            op(**given, quantize=kind)
        with torch.no_grad():
            assert op(**given, quantize=kind) is out


def test_one_rank_alone_is_refused_before_it_communicates(pool: RankPool) -> None:
    results = pool.run(work.refused_before_the_scales_are_agreed)
    assert results == [["A_shard", "B"]] * len(results)


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers(pool: RankPool, world_size: int) -> None:
    check(pool.run(work.layer_faults, world_size), world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_flops(pool: RankPool, world_size: int) -> None:
    check(pool.run(work.flops, world_size), world_size)


@pytest.mark.slow
def test_flops_are_counted_whoever_is_imported_first() -> None:
    """agmm does not import torch's counter, which imports Triton."""
    script = """
import sys, torch
if "counter first" in sys.argv:
    import torch.utils.flop_counter
import agmm
assert ("torch.utils.flop_counter" in sys.modules) == ("counter first" in sys.argv)
from torch.utils.flop_counter import flop_registry
assert torch.ops.agmm._all_gather_matmul in flop_registry
assert torch.ops.agmm._all_gather not in flop_registry  # which torch would take for a matmul
"""
    for first in ("counter first", "agmm first"):
        done = subprocess.run(
            [sys.executable, "-c", script, first], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, every_op.E4M3], ids=str)
def test_results_have_one_dtype_but_for_fp8(group: str, out_dtype: torch.dtype) -> None:
    """torch's estimates of the time want this of what has FLOPs."""
    call = next(c for c in every_op.calls(1) if c.op == "agmm::_all_gather_scaled_matmul")
    settings = call.settings | {"return_A": False, "out_dtype": out_dtype}
    settings |= {"group_name": group, "world_size": 1}
    found = every_op.op_named(call.op)(**call.operands, **settings)
    assert {t.dtype for t in (*found[:2], *found[2])} - {every_op.E4M3} <= {out_dtype}


@pytest.mark.parametrize("shape", [(1, 8, 16), (8, 8, 16)], ids=str)
def test_a_kernels_sum_is_moved_into_no_view(
    group: str, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """The kernel scatters between two GPUs, along dimension 1."""
    world = dist.group.WORLD
    assert world is not None
    kernel = KernelConfig.parse("128x256x64_2x1_cooperative/swizzle4/along_m")
    sums = mock.Mock(
        side_effect=lambda As, Bs, bias, residual: (As[0] @ Bs[0])[: As[0].shape[0] // 2].clone()
    )
    monkeypatch.setattr(plain_scatter, "call_with", lambda *_, **__: sums)
    A, B = torch.randn(shape), torch.randn(16, 8)
    call = plain_scatter.PlainScatter([A], [B], None, world, ScatterSettings(1))
    call.device = torch.device("cuda", 0)
    route = Route(KERNEL, plan=Plan("push", kernel))
    out = call.finished(call.prepare(route)(*call.operands()), route)
    assert torch.equal(out, (A @ B)[:, :4]) and not out._is_view()
    assert out.is_contiguous()
