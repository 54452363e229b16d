"""torch's fake process group, as dry runs of trainers have it: all goes as with torch's own
collectives, without memory, waits or warnings."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import agmm
from agmm import nn
from agmm.errors import forget_warnings

WORLD = 4
K, N = 64, 32


@pytest.fixture(autouse=True)
def fake_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AGMM_TIMEOUT_S", "2")
    forget_warnings()
    mine = f"agmm-{os.getpid()}-*"  # other processes' tests run beside this one
    before = set(Path("/dev/shm").glob(mine))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=WORLD)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        dist.destroy_process_group()
    assert set(Path("/dev/shm").glob(mine)) <= before


def _fp8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def _gather_scaled(rows: int, **options: Any) -> Any:
    one = torch.ones(())
    return agmm.all_gather_scaled_matmul(_fp8(rows, K), _fp8(N, K).t(), one, one, **options)


def _scatter_scaled(rows: int, **options: Any) -> Any:
    one = torch.ones(())
    return agmm.scaled_matmul_reduce_scatter(_fp8(rows, K), _fp8(N, K).t(), one, one, **options)


def _reduce_scaled(rows: int, **options: Any) -> Any:
    one = torch.ones(())
    return agmm.scaled_matmul_all_reduce(_fp8(rows, K), _fp8(N, K).t(), one, one, **options)


def _norm(rows: int) -> Any:
    x = torch.ones(rows, K)
    return agmm.collectives.all_reduce_rms_norm(x, x, torch.ones(K))[0]


def _normed_sum(rows: int) -> Any:
    residual, weight = torch.ones(rows, N), torch.ones(N)
    op = agmm.matmul_all_reduce_rms_norm
    return op(torch.ones(rows, K), torch.ones(K, N), residual, weight, strict=True)[0]


def _tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens of a rank, a weight of two experts, and two experts of other ranks for each
    token."""
    return torch.ones(rows, K), torch.ones(2, K, N), torch.tensor([[0, 5]]).repeat(rows, 1)


OPS: dict[str, tuple[Callable[[int], Any], Callable[[int], tuple[int, int]]]] = {
    "gather": (
        lambda rows: agmm.all_gather_matmul(torch.ones(rows, K), torch.ones(K, N)),
        lambda rows: (WORLD * rows, N),
    ),
    "gather, strict": (
        lambda rows: agmm.all_gather_matmul(torch.ones(rows, K), torch.ones(K, N), strict=True),
        lambda rows: (WORLD * rows, N),
    ),
    "gather, gated": (
        lambda rows: agmm.all_gather_matmul(
            torch.ones(rows, K), [torch.ones(K, N)] * 2, activation="silu_mul", strict=True
        ),
        lambda rows: (WORLD * rows, N),
    ),
    "gather, quantize": (
        lambda rows: agmm.all_gather_matmul(
            torch.ones(rows, K), torch.ones(K, N), quantize="tensorwise", reduce_amax=True
        ),
        lambda rows: (WORLD * rows, N),
    ),
    "gather, fp8": (_gather_scaled, lambda rows: (WORLD * rows, N)),
    "gather, fp8, relu2": (
        lambda rows: _gather_scaled(rows, activation="relu2"),
        lambda rows: (WORLD * rows, N),
    ),
    "scatter, residual": (
        lambda rows: agmm.matmul_reduce_scatter(
            torch.ones(rows, K), torch.ones(K, N), residual=torch.ones(rows // WORLD, N)
        ),
        lambda rows: (rows // WORLD, N),
    ),
    "all-reduce, residual": (
        lambda rows: agmm.matmul_all_reduce(
            torch.ones(rows, K), torch.ones(K, N), residual=torch.ones(rows, N)
        ),
        lambda rows: (rows, N),
    ),
    "gather, fp8, strict": (
        lambda rows: _gather_scaled(rows, strict=True),
        lambda rows: (WORLD * rows, N),
    ),
    "scatter": (
        lambda rows: agmm.matmul_reduce_scatter(torch.ones(rows, K), torch.ones(K, N)),
        lambda rows: (rows // WORLD, N),
    ),
    "scatter, strict": (
        lambda rows: agmm.matmul_reduce_scatter(
            torch.ones(rows, K), torch.ones(K, N), reduce_op="avg", strict=True
        ),
        lambda rows: (rows // WORLD, N),
    ),
    "scatter, fp8, strict": (
        lambda rows: _scatter_scaled(rows, strict=True),
        lambda rows: (rows // WORLD, N),
    ),
    "all-reduce": (
        lambda rows: agmm.matmul_all_reduce(torch.ones(rows, K), torch.ones(K, N), strict=True),
        lambda rows: (rows, N),
    ),
    "all-reduce, norm": (_normed_sum, lambda rows: (rows, N)),
    "all-reduce, fp8, strict": (
        lambda rows: _reduce_scaled(rows, strict=True),
        lambda rows: (rows, N),
    ),
    "all_gather": (
        lambda rows: agmm.collectives.all_gather(torch.ones(rows, K), strict=True),
        lambda rows: (WORLD * rows, K),
    ),
    "all_gather, later": (
        lambda rows: agmm.collectives.all_gather(torch.ones(rows, K), async_op=True).wait(),
        lambda rows: (WORLD * rows, K),
    ),
    "reduce_scatter": (
        lambda rows: agmm.collectives.reduce_scatter(torch.ones(rows, K), op="avg"),
        lambda rows: (rows // WORLD, K),
    ),
    "all_reduce": (
        lambda rows: agmm.collectives.all_reduce(torch.ones(rows, K)),
        lambda rows: (rows, K),
    ),
    "experts, in": (
        lambda rows: agmm.all_gather_grouped_matmul(*_tokens(rows), capacity=40, strict=True)[0],
        lambda rows: (40, N),
    ),
    "experts, out": (
        lambda rows: agmm.grouped_matmul_reduce_scatter(
            torch.ones(40, K),
            torch.ones(2, K, N),
            agmm.moe.route(_tokens(rows)[2], num_experts=2 * WORLD, capacity=40),
            torch.ones(rows, 2),
        ),
        lambda rows: (rows, N),
    ),
    "all_reduce_rms_norm": (_norm, lambda rows: (rows, K)),
}


@pytest.mark.parametrize("rows", [8, 0])
@pytest.mark.parametrize("name", OPS)
def test_ops(name: str, rows: int) -> None:
    op, shape = OPS[name]
    for _ in range(2):
        assert tuple(op(rows).shape) == shape(rows)


def test_gradients() -> None:
    shard = torch.ones(8, K, requires_grad=True)
    first = torch.ones(K, N, requires_grad=True)
    second = torch.ones(N, K, requires_grad=True)
    out = agmm.matmul_reduce_scatter(agmm.all_gather_matmul(shard, first), second)
    agmm.matmul_all_reduce(out, first).sum().backward()
    for tensor in (shard, first, second):
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))


def _train(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out: torch.Tensor = model(x)
    out.sum().backward()
    optimizer.step()
    return out


@pytest.mark.parametrize("fp8", [None, "tensorwise"])
def test_layers(fp8: str | None) -> None:
    mesh = _mesh()
    model = torch.nn.Sequential(
        nn.ColumnParallelLinear(K, WORLD * N, device_mesh=mesh, fp8=fp8, strict=fp8 is None),
        nn.RowParallelLinear(WORLD * N, K, device_mesh=mesh, fp8=fp8),
    )
    assert _train(model, torch.randn(8, K)).shape == (8, K)
    nn.sum_replicated_gradients(model)
    nn.clip_grad_norm_(model, 1.0)
    assert nn.full_state_dict(model)["0.weight"].shape == (WORLD * N, K)


def test_styles() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wq, self.wk = (torch.nn.Linear(K, WORLD * N) for _ in range(2))
            self.wo = torch.nn.Linear(WORLD * N, K)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.wo(self.wq(x) + self.wk(x))
            return out

    model = torch.nn.Sequential(Block(), torch.nn.Linear(K, WORLD * N))
    plan = {
        "0": nn.SharedGatherParallel("wq", "wk"),
        "0.wo": nn.RowwiseScatterParallel(),
        "1": nn.GatherColwiseParallel(),
    }
    parallelize_module(model, _mesh(), plan)
    assert _train(model, torch.randn(2, 8, K)).shape == (2, WORLD * 8, N)


@pytest.mark.parametrize("factor", [None, 1.0, 0.01])
def test_experts_have_room_for_what_other_ranks_are_taken_to_hold(factor: float | None) -> None:
    """All ranks are taken to have this one's ids, which may be more than there is room for."""
    moe = nn.MoE(K, N, 2 * WORLD, 2, capacity_factor=factor)
    assert _train(moe, torch.randn(8, K)).shape == (8, K)
    ids = torch.full((8, 2), 2)
    routing = agmm.moe.route(ids, num_experts=2 * WORLD, capacity=5)
    assert int(routing.positions.max()) == 4 and routing.offsets.tolist() == [0, 5, 5]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_tensors_without_memory(device: str) -> None:
    """A dry run of a model that fits on no machine."""
    with FakeTensorMode():
        shard = torch.empty(1 << 20, 1 << 14, device=device, dtype=torch.bfloat16)
        B = torch.empty(1 << 14, 1 << 16, device=device, dtype=torch.bfloat16)
        assert agmm.all_gather_matmul(shard, B).shape == (WORLD << 20, 1 << 16)
        assert agmm.matmul_reduce_scatter(shard, B).shape == ((1 << 20) // WORLD, 1 << 16)
        assert agmm.collectives.all_reduce(shard).shape == shard.shape


def test_compiled(fresh_compiler: None) -> None:
    B = torch.ones(K, N)
    op = torch.compile(lambda A: agmm.all_gather_matmul(A, B) + 1, backend="aot_eager")
    assert op(torch.ones(8, K)).shape == (WORLD * 8, N)


def test_memory_is_neither_taken_nor_given_back() -> None:
    agmm.reserve(None, 1 << 20)
    agmm.release(None)
