"""Mixtures of experts in fp8 on CPU ranks: results against an unfused model in float64, refusals,
and what torch makes of the ops."""

from __future__ import annotations

from typing import Any

import moe_scaled_work as work
import pytest
import torch
from moe_scaled_work import Kind
from moe_work import Case

import agmm
from agmm.errors import InvalidArgument
from agmm.testing.ranks import RankPool

E5M2 = torch.float8_e5m2
KINDS = (
    Kind(),
    Kind("block"),
    Kind(out=torch.float32, fast_accum=True),
    Kind("block", out=torch.float16, rows=E5M2),
    Kind(weights=E5M2, out=torch.float32),
)


def table(world_size: int) -> list[tuple[Case, Kind]]:
    """Cases of every skew and kind; K and N have whole scale blocks, or one that is cut short."""
    even, uneven = (4,) * world_size, tuple((3 * rank + 5) % 7 for rank in range(world_size))
    small: dict[str, Any] = {"hidden": 160, "inner": 48}
    cases = [
        Case(even, 2, 2, "even", **small),
        Case(uneven, 3, 3, "zipf", column_major=True, seed=1, **small),
        Case(even, 1, 2, "one", activation=None, hidden=128, inner=144, seed=2),
        Case(uneven, 2, 2, "drops", sliced=True, bias=False, seed=3, **small),
        Case(even, 2, 2, "none", **small),
    ]
    found = [(case, kind) for i, case in enumerate(cases) for kind in (KINDS[i], KINDS[i % 2])]
    return [*found, (Case((0,) * world_size, 2, 2, **small), Kind())]


@pytest.mark.parametrize("world_size", [1, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_results_are_those_of_the_model(pool: RankPool, world_size: int) -> None:
    results = pool.run(work.faults, world_size, table(world_size))
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


def test_calls_that_quantise_have_the_gradients_of_what_they_are_given(pool: RankPool) -> None:
    sizes: dict[str, Any] = {"hidden": 144, "inner": 48, "activation": None}
    cases = [(Case((5, 5), 2, 2, "zipf", **sizes), kind) for kind in ("rowwise", "block")]
    cases += [(Case((4, 4), 2, 2, seed=1, column_major=True, **sizes), "block")]
    assert pool.run(work.quantised_faults, 2, cases)[-2:] == [[], []]


def _operands() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(6, 32).to(torch.float8_e4m3fn),
        "weights": torch.randn(4, 32, 16).to(torch.float8_e4m3fn),
        "topk_ids": torch.tensor([[0, 3], [3, 3], [-1, 0], [1, -1], [0, 1], [3, 0]]),
        "scale_a": torch.ones(6, 1),
        "scale_b": torch.ones(4, 1, 16),
    }


FP32 = torch.ones(6, 32)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale_a": None}, "scale_a: found None, wanted a tensor"),
        ({"scale_b": None}, "scale_b: found None, wanted a tensor"),
        (
            {"scale_a": torch.ones(1)},
            r"scale_a: found shape \(1,\), wanted \(6, 1\) \(rowwise\)",
        ),
        (
            {"scale_b": torch.ones(4, 16)},
            r"scale_b: found shape \(4, 16\), wanted \(4, 1, 16\) \(rowwise\) or \(4, 1, 1\) \(bl",
        ),
        ({"scale_a": torch.ones(6, 1).double()}, "scale_a: found dtype torch.float64, wanted floa"),
        ({"scale_b": [torch.ones(4, 1, 16)] * 2}, "scale_b: found 2 for 1 weights, wanted one eac"),
        (
            {"weights": [torch.ones(4, 32, 16).to(E5M2)] * 2},
            "scale_b: found one for 2 weights, wanted a list of one each",
        ),
        (
            {"x": FP32.to(E5M2), "weights": torch.ones(4, 32, 16).to(E5M2)},
            "weights: found dtype torch.float8_e5m2 as x, wanted torch.float8_e4m3fn for one",
        ),
        ({"weights": torch.ones(4, 32, 16)}, "weights: found dtype torch.float32, wanted one of f"),
        ({"x": FP32}, "x: found dtype torch.float32, wanted one of float8_e4m3fn, float8_e5m2"),
        (
            {"x": FP32[:, :24].to(E5M2), "weights": torch.ones(4, 24, 16).to(torch.float8_e4m3fn)},
            "x: found K=24, wanted a multiple of 16",
        ),
        ({"out_dtype": torch.float64}, "out_dtype: found torch.float64, wanted one of bfloat16, f"),
        ({"use_fast_accum": 1}, "use_fast_accum: found 1, wanted True or False"),
        ({"return_gathered": True}, "return_gathered: found True with tokens that travel in fp8"),
        ({"bias": torch.ones(4, 15)}, r"bias: found shape \(4, 15\), wanted \(4, 16\), a row for"),
        (
            {"x": FP32, "weights": torch.ones(4, 32, 16), "scale_a": None, "scale_b": None}
            | {"out_dtype": torch.float32},
            "out_dtype: found torch.float32 with x in torch.float32, wanted none: only products of",
        ),
        ({"quantize": "rowwise"}, "quantize: found 'rowwise' with x in torch.float8_e4m3fn and sc"),
        (
            {"x": FP32, "weights": torch.ones(4, 32, 16), "scale_a": None, "scale_b": None}
            | {"quantize": "tensorwise"},
            "quantize: found 'tensorwise' for experts, wanted 'rowwise' or 'block' or None",
        ),
        (
            {"bias": torch.ones(4, 16, requires_grad=True)},
            "bias: found requires_grad=True, wanted a call under torch.no_grad",
        ),
    ],
    ids=range(19),
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        agmm.all_gather_grouped_matmul(**_operands() | given)


@pytest.mark.usefixtures("group")
def test_the_second_half_refuses_too() -> None:
    given = _operands()
    routing = agmm.moe.route(given["topk_ids"], num_experts=4)
    y, weight = torch.ones(12, 16).to(E5M2), torch.ones(4, 16, 32).to(torch.float8_e4m3fn)
    scales: dict[str, Any] = {"scale_a": torch.ones(12, 1), "scale_b": torch.ones(4, 1, 32)}
    topk = torch.ones(6, 2)
    out = agmm.grouped_matmul_reduce_scatter(y, weight, routing, topk, **scales)
    assert out.dtype == torch.bfloat16
    for wrong, message in (
        ({"scale_a": torch.ones(6, 1)}, r"scale_a: found shape \(6, 1\), wanted \(12, 1\)"),
        ({"scale_b": None}, "scale_b: found None, wanted a tensor"),
        ({"out_dtype": E5M2}, "out_dtype: found torch.float8_e5m2, wanted one of"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{message}"):
            agmm.grouped_matmul_reduce_scatter(y, weight, routing, topk, **scales | wrong)


CHECKS = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
"""All of opcheck but the look at the schema, which multiplies the operands by themselves: torch has
no such product in fp8."""


def test_opcheck(group: str, fresh_compiler: None) -> None:
    given, ops = _operands(), torch.ops.agmm
    routing = agmm.moe.route(given["topk_ids"], num_experts=4)
    tensors = routing.tokens, routing.offsets, routing.positions
    settings = group, 1, torch.bfloat16, False
    weights, scales = [given["weights"]] * 2, [given["scale_b"]] * 2
    operands = given["x"], given["scale_a"], weights, scales, [torch.ones(4, 16), None]
    for activation in ("", "silu_mul"):
        torch.library.opcheck(
            ops._all_gather_scaled_grouped_matmul.default,
            (*operands, *tensors, *settings, [], False, activation),
            test_utils=CHECKS,
        )
    y, scale = torch.ones(12, 32).to(torch.float8_e4m3fn), torch.ones(12, 1)
    of_sum = y, scale, given["weights"], given["scale_b"], None, *tensors, torch.rand(6, 2)
    torch.library.opcheck(
        ops._scaled_grouped_matmul_reduce_scatter.default,
        (*of_sum, *settings, [6]),
        test_utils=CHECKS,
    )
