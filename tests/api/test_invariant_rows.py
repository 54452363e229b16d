"""Batch invariance on CPU ranks: a row's bits do not depend on how many other rows there are."""

from __future__ import annotations

import re
import warnings
from typing import Any

import invariance_work
import pytest
import torch
from short_ids import short
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import agmm
from agmm import _env, nn
from agmm.errors import forget_warnings
from agmm.ops import invariant
from agmm.testing.ranks import RankPool

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check(results: list[list[str] | None], world_size: int) -> None:
    assert results == [None] * (len(results) - world_size) + [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(1, 65), (32, 64), (24, 1000), (7, 0)], ids=str)
def test_a_row_has_its_bits_among_any_others(
    pool: RankPool, world_size: int, sizes: tuple[int, int]
) -> None:
    for dtype in DTYPES:
        found = pool.run(invariance_work.rows_alone, world_size, sizes, dtype)
        check(found, world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_scattered_rows_have_their_bits_among_any_others(pool: RankPool, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check(pool.run(invariance_work.scattered_rows, world_size, dtype), world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_way_has_the_same_bits(pool: RankPool, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check(pool.run(invariance_work.by_other_ways, world_size, dtype), world_size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"batch_invariant": 1},
            "batch_invariant: found 1, wanted True, False or None",
        ),
        (
            {"batch_invariant": True, "config": "portable"},
            "config: found 'portable' of a batch-invariant call, wanted None",
        ),
    ],
    ids=short,
)
def test_bad_input_is_named(group: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        agmm.matmul_all_reduce(torch.ones(4, 6), torch.ones(6, 3), group, **settings)
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        agmm.matmul_reduce_scatter(torch.ones(4, 6), torch.ones(6, 3), group, **settings)


def test_the_environment_says_what_calls_leave_open(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, wanted in (("on", True), ("off", False)):
        monkeypatch.setattr(_env, "batch_invariant_at_start", value)
        assert invariant.is_asked(None) is wanted
        assert invariant.is_asked(True) and not invariant.is_asked(False)
    monkeypatch.setattr(_env, "batch_invariant_at_start", "maybe")
    assert not invariant.is_asked(False)
    message = "AGMM_BATCH_INVARIANT: found 'maybe', wanted 'on' or 'off'"
    with pytest.raises(agmm.InvalidArgument, match=message):
        agmm.matmul_all_reduce(torch.ones(4, 6), torch.ones(6, 3), group)


def test_ranks_whose_environments_differ_are_refused_by_name(pool: RankPool) -> None:
    found = ["'off' on rank 0", *(f"'on' on rank {r}" for r in range(1, pool.world_size))]
    words = f"AGMM_BATCH_INVARIANT: found {', '.join(found)} of a group, wanted the same on all"
    results = pool.run(invariance_work.by_differing_environments)
    assert [result.startswith(words) for result in results] == [True] * pool.world_size


def test_gradients_are_those_of_other_calls(group: str) -> None:
    A, B = torch.randn(5, 6, requires_grad=True), torch.randn(6, 3, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(agmm.matmul_all_reduce(A, B, batch_invariant=one).sum(), (A, B))
        for one in (True, False)
    )
    assert all(map(torch.equal, found, wanted))
    of_scatter = agmm.matmul_reduce_scatter(A, B, batch_invariant=True)
    assert all(map(torch.equal, torch.autograd.grad(of_scatter.sum(), (A, B)), wanted))


def test_what_agmm_does_not_sum_is_warned_of(group: str) -> None:
    A, B = torch.ones(4, 6, dtype=torch.int32), torch.ones(6, 3, dtype=torch.int32)
    reason = "A: dtype=torch.int32, the CPU backend wants a floating-point type"
    agmm.errors.forget_warnings()
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(agmm.matmul_all_reduce(A, B, batch_invariant=True), A @ B)
    with pytest.raises(agmm.Unsupported, match=reason):
        agmm.matmul_all_reduce(A, B, batch_invariant=True, strict=True)


@pytest.mark.parametrize("value", ["on", "off"])
def test_an_op_that_cannot_be_asked_says_so_once(
    group: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_env, "batch_invariant_at_start", value)
    forget_warnings()
    A, B = torch.ones(4, 6), torch.ones(6, 3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for rows in (4, 3, 2):
            agmm.matmul_all_reduce(A[:rows], B, group)
            agmm.all_gather_matmul(A[:rows], B, group)
    said = [str(one.message) for one in found if "AGMM_BATCH_INVARIANT" in str(one.message)]
    wanted = "AGMM_BATCH_INVARIANT: found on, but all_gather_matmul does not take batch_invariant"
    assert [one.split(",")[0:2] for one in said] == [wanted.split(",")] * (value == "on")


def _layer(kind: str, mesh: DeviceMesh, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes: Any = (65, [24, 40]) if kind == "several outputs" else (65, 24)
    if kind == "style":
        linear = torch.nn.Linear(65, 24, dtype=dtype)
        return parallelize_module(linear, mesh, nn.ReplicatedColwiseParallel())
    return nn.ColumnParallelLinear(*sizes, device_mesh=mesh, sequence_parallel=False, dtype=dtype)


@pytest.mark.parametrize("kind", ["layer", "several outputs", "style"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_for_decoding_keeps_the_bits_of_a_row(
    group: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = _layer(kind, init_device_mesh("cpu", (1,)), dtype)
    x = torch.randn(100, 65).to(dtype).requires_grad_()

    def outs(rows: torch.Tensor) -> torch.Tensor:
        found = layer(rows)
        return torch.cat(found, -1) if isinstance(found, tuple) else found

    of_torch = outs(x)
    inputs = [x, *layer.parameters()]
    wanted = torch.autograd.grad(of_torch.sum(), inputs)
    monkeypatch.setattr(_env, "batch_invariant_at_start", "on")
    recorded = outs(x)
    for found, one in zip(torch.autograd.grad(recorded.sum(), inputs), wanted, strict=True):
        assert torch.equal(found, one)
    with torch.no_grad():
        whole = outs(x)
        assert torch.equal(recorded, whole)
        torch.testing.assert_close(whole, of_torch.detach())
        for first, count in ((0, 1), (0, 5), (7, 33), (99, 1)):
            assert torch.equal(outs(x[first : first + count]), whole[first : first + count])
        assert torch.equal(outs(x.view(4, 25, 65)), whole.view(4, 25, -1))
        torch.compiler.reset()
        assert torch.equal(torch.compile(outs, backend="aot_eager")(x[:3]), whole[:3])


def test_a_product_that_is_not_invariant_is_warned_of(group: str) -> None:
    forget_warnings()
    A, B = torch.ones(4, 6, dtype=torch.int32), torch.ones(6, 3, dtype=torch.int32)
    message = "AGMM_BATCH_INVARIANT: found on, but torch multiplies: A: dtype=torch.int32"
    with pytest.warns(UserWarning, match=message):
        assert torch.equal(torch.ops.agmm._invariant_matmul(A, B, None), A @ B)
