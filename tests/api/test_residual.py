"""The residual of a sum over the ranks: its rounding, refusals, and what kernels are handed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import residual_work as work
import torch
import torch.distributed as dist

import agmm
from agmm.errors import InvalidArgument
from agmm.ops.pipeline import KERNEL, Route, serve
from agmm.ops.plain_all_reduce import PlainAllReduce
from agmm.ops.plain_scatter import PlainScatter
from agmm.ops.scatter import ScatterSettings
from agmm.ops.sums import SumCall
from agmm.planning.problems import KernelConfig
from agmm.testing.ranks import RankPool

A, B, RESIDUAL = torch.randn(4, 16), torch.randn(16, 8), torch.randn(4, 8)
OPS: list[Any] = [agmm.matmul_reduce_scatter, agmm.matmul_all_reduce]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"all_reduce": False},
        {"all_reduce": False, "dim": 1},
        {"all_reduce": True},
        {"all_reduce": True, "rows": 7},  # which the ranks cannot share
    ],
    ids=str,
)
def test_it_is_added_before_the_one_rounding(
    rank_pools: Callable[..., RankPool], world_size: int, options: dict[str, Any], dtype: Any
) -> None:
    rows = options.get("rows", 2 * world_size)
    arguments = {name: value for name, value in options.items() if name != "rows"}
    for found, behind in rank_pools(world_size).run(work.errors, dtype, rows, **arguments):
        assert found <= max(behind, 20 if dtype != torch.bfloat16 else 0)
        if dtype == torch.bfloat16:
            assert found < 0.95 * behind


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("op", OPS)
def test_special_numbers_are_those_of_a_sum(op: Any) -> None:
    special = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0, 0.0]])
    minus_zero = torch.full((1, 5), -0.0)
    found = op(-torch.ones(1, 1), torch.zeros(1, 5), bias=minus_zero[0], residual=special)
    torch.testing.assert_close(found, special, equal_nan=True)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (RESIDUAL[:3], r"residual: found shape \(3, 8\), wanted \(4, 8\) as the result"),
        (RESIDUAL.double(), "residual: found dtype torch.float64, wanted torch.float32 as A"),
        (3.0, "residual: found float, wanted a tensor"),
    ],
    ids=["shape", "dtype", "type"],
)
@pytest.mark.parametrize("op", OPS)
def test_a_residual_that_does_not_fit_is_refused(op: Any, residual: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        op(A, B, residual=residual)
    assert op(A, B, residual=RESIDUAL).shape == (4, 8)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("op", OPS)
def test_it_is_compiled_and_noted(op: Any) -> None:
    wanted = A @ B + RESIDUAL
    torch.testing.assert_close(op(A, B, residual=RESIDUAL), wanted)
    compiled = torch.compile(lambda r: op(A, B, residual=r), backend="aot_eager", fullgraph=True)
    leaf = RESIDUAL.clone().requires_grad_()
    out = compiled(leaf)
    torch.testing.assert_close(out, wanted)
    (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    torch.testing.assert_close(grad, torch.ones_like(grad))
    name = op.__name__
    assert any(one.residual and one.op == name for one in agmm.status().calls)
    assert f"{name} + residual" in str(agmm.status())


def _cuda_calls() -> list[SumCall]:
    world = dist.group.WORLD
    assert world is not None
    return [
        PlainScatter([A], [B], None, world, ScatterSettings(), residual=RESIDUAL),
        PlainAllReduce(A, B, None, world, strict=False, residual=RESIDUAL),
    ]


def _of_kernel(
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a kernel computes on one rank."""
    assert residual is not None
    assert bias is None
    return As[0] @ Bs[0] + residual


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_a_kernel_adds_it(which: int, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelConfig.parse("128x256x64_2x1_cooperative/swizzle4/along_m")
    plan = mock.Mock(kernel=kernel, sm_count=132)
    for module in ("plain_scatter", "plain_all_reduce"):
        monkeypatch.setattr(f"agmm.ops.{module}.call_with", lambda *_, **__: _of_kernel)
    call = _cuda_calls()[which]
    call.device = torch.device("cuda", 0)
    call.strict = strict
    monkeypatch.setattr(type(call), "route", lambda _: Route(KERNEL, plan=plan))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(serve(call), A @ B + RESIDUAL)
    noted = [one for one in agmm.status().calls if one.by == "agmm's kernel"]
    assert any(one.residual and one.op == call.op for one in noted)
    ready = call.prepare(call.route())
    kept = call.to_keep(ready, ready(*call.operands()))
    torch.testing.assert_close(kept(*call.operands()), A @ B + RESIDUAL)  # type: ignore[misc]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_scatter_hands_over_what_its_kernel_adds(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scattered dimension comes first, of A, residual and sum."""
    monkeypatch.setattr("agmm.ops.plain_scatter.call_with", lambda *_: _of_kernel)
    world = dist.group.WORLD
    assert world is not None
    given = torch.randn(4, 6, 16), torch.randn(4, 6, 8)
    call = PlainScatter(
        [given[0]], [B], None, world, ScatterSettings(scatter_dim=dim), residual=given[1]
    )
    ready = call.ready_on_cuda(KernelConfig.parse("128x256x64_2x1_cooperative/swizzle4/along_m"))
    torch.testing.assert_close(ready(*call.operands()), given[0] @ B + given[1])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("which", [0, 1])
def test_messages_of_mismatches_have_it(which: int) -> None:
    assert "residual [4, 8] float32 row-major" in str(_cuda_calls()[which].words())
