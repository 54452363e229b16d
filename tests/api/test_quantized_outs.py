"""Results in fp8 (``quantize_out=``): what they are, that the next op takes them, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import quantized_outs_work as work
import torch
from short_ids import short

import agmm
from agmm.ops.quantize import KINDS
from agmm.testing.ranks import RankPool

A, B = torch.randn(6, 32), torch.randn(32, 48)
ONE = torch.tensor([0.05])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_op_takes_it(
    rank_pools: Callable[..., RankPool], world_size: int, kind: str
) -> None:
    for faults in rank_pools(world_size).run(work.gate_and_down, kind):
        assert faults == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("group")
def test_compiled(kind: str) -> None:
    op: Callable[..., Any] = agmm.all_gather_matmul
    given: dict[str, Any] = {"quantize_out": kind, "activation": "relu2"}
    if kind == "tensorwise":
        given["scale_out"] = ONE
    compiled = torch.compile(lambda a: op(a, B, **given), backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(A), op(A, B, **given), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found.float(), wanted.float())


@pytest.mark.usefixtures("group")
def test_special_numbers() -> None:
    """A given scale cuts infinities at the largest number; what is NaN stays so, and 0 is 0."""
    bias = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e9, 3.0, -3.0])
    op: Callable[..., Any] = agmm.all_gather_matmul
    given: dict[str, Any] = {"bias": bias, "quantize_out": "tensorwise"}
    values, scale = op(torch.zeros(1, 16), torch.zeros(16, 8), scale_out=torch.ones(()), **given)
    wanted = torch.tensor([[torch.nan, 448, -448, 0, 0, 448, 3, -3]])
    torch.testing.assert_close(values.float(), wanted, equal_nan=True, rtol=0, atol=0)
    assert scale.item() == 1


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantize_out": "columns"}, "quantize_out: found 'columns', wanted one of 'tensorwise'"),
        ({"scale_out": ONE}, "quantize_out: found None, wanted one of 'tensorwise'"),
        (
            {"quantize_out": "tensorwise"},
            "scale_out: found None with quantize_out='tensorwise', wanted one float32 number",
        ),
        (
            {"quantize_out": "rowwise", "scale_out": ONE},
            "scale_out: found one with quantize_out='rowwise', wanted None",
        ),
        (
            {"quantize_out": "tensorwise", "scale_out": torch.ones(2)},
            "scale_out: found (2,) torch.float32, wanted one float32 number",
        ),
        ({"quantize_out": "tensorwise", "scale_out": 1.0}, "scale_out: found float"),
        (
            {"quantize_out": "block", "return_A": True},
            "return_A: found True with quantize_out, wanted none",
        ),
        (
            {"quantize_out": "block", "save_gathered": True},
            "save_gathered: found True with quantize_out, wanted none",
        ),
        (
            {"quantize_out": "block", "A_shard": A.double(), "B": B.double()},
            "A_shard: found dtype torch.float64 with quantize_out='block', wanted bfloat16",
        ),
        (
            {"quantize_out": "block", "B": B.clone().requires_grad_()},
            "B: found requires_grad=True, wanted a call under torch.no_grad()",
        ),
    ],
    ids=short,
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    op: Callable[..., Any] = agmm.all_gather_matmul
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        op(**({"A_shard": A, "B": B} | given))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"out_dtype": torch.float8_e4m3fn},
            "out_dtype: found dtype torch.float8_e4m3fn with quantize_out='block', wanted bfloat16",
        ),
        ({"result_scale": ONE}, "result_scale: found True with quantize_out, wanted none"),
    ],
    ids=short,
)
def test_what_is_refused_of_fp8(given: dict[str, Any], message: str) -> None:
    op: Callable[..., Any] = agmm.all_gather_scaled_matmul
    fp8 = torch.float8_e4m3fn
    operands = {"A_shard": A.to(fp8), "B": B.to(fp8), "scale_a": ONE, "scale_b": ONE}
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        op(**(operands | {"quantize_out": "block"} | given))
