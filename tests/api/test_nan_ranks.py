"""`agmm.check_nan` on CPU ranks: what a rank is about to send is looked through."""

from __future__ import annotations

import nan_work
import pytest
import quick
import torch

from agmm.testing.ranks import RankPool

FOUND = {  # op, tensor and index
    "gather": ("all_gather_matmul", "A_shard", "[2, 1] of [4, 3] float32"),
    "gather kept": ("all_gather_matmul", "A_shard", "[2, 1] of [4, 3] float32"),
    "gather unfused": ("all_gather_matmul", "A_shard", "[2, 1] of [4, 3] float32"),
    "scatter": ("matmul_reduce_scatter", "A @ B", "[4, 0] of [6, 2] float32"),
    "scatter unfused": ("matmul_reduce_scatter", "A @ B", "[4, 0] of [6, 4] float32"),
    "matmul_all_reduce": ("matmul_all_reduce", "A @ B", "[4, 0] of [6, 2] float32"),
    "matmul_all_reduce_rms_norm": (
        *("matmul_all_reduce_rms_norm", "A @ B", "[4, 0] of [6, 2] float32"),
    ),
    "all_gather": ("all_gather", "x", "[1, 0] of [3, 4] float32"),
    "reduce_scatter": ("reduce_scatter", "x", "[0, 1] of [4, 3] float32"),
    "all_reduce": ("all_reduce", "x", "[2] of [4] bfloat16"),
    "background": ("all_reduce", "x", "[2] of [4] float32"),
    "torch": ("all_reduce", "x", "[2] of [4] complex64"),
    "own rows of an all-reduce": ("matmul_all_reduce", "A @ B", "[0, 0] of [6, 2] float32"),
    "scaled gather": ("all_gather_scaled_matmul", "A_shard", "[1, 2] of [4, 32] float8_e4m3fn"),
    "scale of a gather": ("all_gather_scaled_matmul", "scale_a", "[1, 0] of [4, 1] float32"),
    "scaled gather unfused": (
        *("all_gather_scaled_matmul", "A_shard", "[1, 2] of [4, 32] float8_e4m3fn"),
    ),
    "scaled scatter": ("scaled_matmul_reduce_scatter", "A @ B", "[4, 0] of [6, 16] bfloat16"),
    "scaled all-reduce": ("scaled_matmul_all_reduce", "A @ B", "[4, 0] of [6, 16] bfloat16"),
    "scale of a scatter": ("scaled_matmul_reduce_scatter", "A @ B", "[3, 0] of [6, 16] bfloat16"),
    "tensorwise": ("all_gather_matmul", "A_shard", "[1, 2] of [4, 32] bfloat16"),
    "rowwise": ("all_gather_matmul", "A_shard", "[1, 2] of [4, 32] float32"),
    "block": ("all_gather_matmul", "A_shard", "[1, 0, 2] of [4, 2, 32] float32"),
    "one scale": ("all_gather_matmul", "A_shard", "[1, 2] of [4, 32] float32"),
    "infinite": ("all_gather_matmul", "A_shard", "[0, 0] of [4, 32] float8_e4m3fn"),
    "fp8 layer": ("all_gather_scaled_matmul", "A_shard", "[1, 2] of [4, 32] float32"),
    "fp8 layer of rows": ("scaled_matmul_reduce_scatter", "A", "[1, 2] of [8, 16] float32"),
    "relays": ("relayed_all_gather", "input", "[0, 1] of [4, 3] float32"),
    "norm": ("all_reduce_rms_norm", "x", "[1, 2] of [2, 4] float32"),
    "backward of sum": ("matmul_reduce_scatter", "A @ B", "[3, 0] of [4, 3] float32"),
    "backward of gather": ("all_gather_matmul", "A_shard", "[1, 2] of [2, 4] float32"),
}


def _lines(pool: RankPool, rank: int) -> list[str]:
    return [x for x in pool.stderr(rank).splitlines() if x.startswith("agmm:")]


SENT_TOO = {"fp8 layer": "scale_a at [0, 0]", "fp8 layer of rows": "A @ B at [7, 0]"}
"""What a NaN that is found before the quantisation becomes there."""


@pytest.mark.parametrize("name", quick.first(16, nan_work.CALLS))
def test_the_rank_that_sends_a_nan_says_so_once(name: str) -> None:
    op, tensor, where = FOUND[name]
    with RankPool(2) as pool:
        pool.run(nan_work.warned, name, 0)
        assert _lines(pool, 1) == []
        line, *more = [x for x in _lines(pool, 0) if "unfused" not in x]
        found = [x.split(": ")[2].partition(" of ")[0] for x in more]
        assert found == ([SENT_TOO[name]] if name in SENT_TOO else [])
        assert line.startswith(f"agmm: rank 0 sends a NaN in {op}: {tensor} at {where}; further")


def test_own_rows_of_a_sum_are_not_sent() -> None:
    with RankPool(2) as pool:
        pool.run(nan_work.warned, "scatter", 1)  # the NaN is in the rows that rank 1 keeps
        assert _lines(pool, 0) == _lines(pool, 1) == []


@pytest.mark.parametrize("name", ["gather", "all_gather", "reduce_scatter", "background", "torch"])
def test_nothing_is_sent_where_it_raises(name: str) -> None:
    op, tensor, where = FOUND[name]
    with RankPool(2) as pool:
        for rank, (message, next_call) in enumerate(pool.run(nan_work.raised, name)):
            assert message == (
                f"{tensor}: found a NaN at {where}, which rank {rank} was about to send in {op}; "
                "wanted none (agmm.check_nan)"
            )
            assert next_call == "[2.0, 2.0]"


# The arguments of each op whose numbers go to other ranks, themselves or in a product.
SENT: dict[str, set[str]] = {
    "_async_input_mm": set(),
    "_async_input_scaled_mm": set(),
    "_invariant_matmul": set(),
    "_scaled_matmul": set(),
    "_fused_all_gather_matmul_native": {"A_shard"},
    "_all_gather_matmul": {"A_shard"},
    "_all_gather_packed_matmul": {"A_shard"},
    "_all_gather_scaled_matmul": {"A_shard", "scale_a"},
    "_fused_matmul_reduce_scatter_native": {"A", "B"},
    "_matmul_reduce_scatter": {"As", "Bs"},
    "_scaled_matmul_reduce_scatter": {"As", "Bs", "scale_as", "scale_bs"},
    "_matmul_all_reduce": {"A", "B"},
    "_matmul_all_reduce_rms_norm": {"A", "B"},
    "_scaled_matmul_all_reduce": {"A", "B", "scale_a", "scale_b"},
    "_all_gather": {"x"},
    "_reduce_scatter": {"x"},
    "_all_reduce": {"x"},
    "_all_reduce_rms_norm": {"x"},
    "_route": set(),
    "_all_gather_grouped_matmul": {"x"},
    "_grouped_matmul_reduce_scatter": {"ys", "weights", "bias", "topk_weights"},
    "_all_gather_scaled_grouped_matmul": {"x", "scale_a"},
    "_scaled_grouped_matmul_reduce_scatter": {
        *("y", "weight", "scale_a", "scale_b", "bias", "topk_weights"),
    },
    "_grouped_grad_of_weight": set(),
    "_grouped_grad_of_bias": set(),
}


WITHOUT_NANS = {
    *("a_chunk_signals", "packed", "tokens", "offsets", "positions"),
    *("result_scale", "result_scales"),
}
"""Arguments that hold whole numbers, and those of the result, which is not sent."""


def test_whatever_an_op_sends_is_looked_through(pool: RankPool) -> None:
    """A new op, or a new argument of one, has to say whether it is sent."""
    registered = {
        name.removeprefix("agmm::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("agmm::")
    }
    assert registered == set(SENT)
    found = pool.run(nan_work.reported, 0)[0]
    without_numbers = {"_route"}
    for name, sent in SENT.items():
        if name in without_numbers:
            assert name not in found
            continue
        schema = getattr(torch.ops.agmm, name).default._schema
        tensors = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
        assert set(found[name]) <= tensors
        untried = tensors - set(found[name])
        assert untried <= WITHOUT_NANS, name
        assert {argument for argument, is_told in found[name].items() if is_told} == sent, name
