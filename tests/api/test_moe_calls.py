"""Mixtures of experts: refusals, ranks that differ, other paths, compilers, and the products that
GPUs make."""

from __future__ import annotations

import re
from typing import Any

import moe_call_work as work
import pytest
import quick
import torch
from moe_work import Case
from torch.utils._pytree import tree_map

import agmm
from agmm.errors import InvalidArgument
from agmm.ops import grouped_products
from agmm.testing.ranks import RankPool

moe: Any = agmm


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("capacity", "capacity: found 18 rows for the experts of rank 2, wanted at most 5"),
        (
            "sliced capacity",
            "capacity: found 18 rows for the experts of every rank, wanted at most 17",
        ),
        ("id", "topk_ids: found 6, wanted less than num_experts=6"),
        ("tokens", "tokens_per_rank: found 2 for rank .*, wanted 3 as the rows of topk_ids"),
    ],
)
def test_all_ranks_refuse_alike_and_go_on(rank_pools: Any, kind: str, message: str) -> None:
    for rank, (said, rows) in enumerate(rank_pools(3).run(work.refused, kind)):
        assert re.fullmatch(message, said), said
        assert rows == ("18" if rank == 0 else "0")


@pytest.mark.parametrize(
    ("kind", "op", "words"),
    [
        ("experts", "all_gather_grouped_matmul", ["[[2, 6, 3] float32", "[[3, 6, 3] float32"]),
        ("columns", "all_gather_grouped_matmul", ["[[2, 6, 3] float32", "[[2, 6, 4] float32"]),
        ("dtype", "all_gather_grouped_matmul", ["[4, 6] float32", "[4, 6] float64"]),
        ("scattered columns", "grouped_matmul_reduce_scatter", ["[[2, 6, 3]", "[[2, 6, 4]"]),
    ],
)
def test_ranks_that_differ_are_both_named(kind: str, op: str, words: list[str]) -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        pool.submit(work.differ, kind)
        assert pool.join(25) == [124, 124]
        (line,) = [x for x in pool.stderr(0).splitlines() if x.startswith("agmm: rank")]
        own, theirs = line.split("; this rank: ")[1].split("; rank 1: ")
        assert f"{op}(" in own and words[0] in own
        assert f"{op}(" in theirs and words[1] in theirs


def test_a_late_rank_changes_nothing(rank_pools: Any) -> None:
    case = Case((3, 3, 3), 2, 2, "zipf", seed=1)
    assert rank_pools(3).run(work.faults_of_late_ranks, case) == [[]] * 3


@pytest.mark.parametrize("call", quick.first(1, [1, 0, 2]))
def test_a_missing_rank_ends_the_wait(call: int) -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "1"}) as pool:
        pool.submit(work.misses, Case((3, 3), 2, 2, seed=1), call)
        pool.processes[0].join(20)
        assert pool.processes[0].exitcode == 124
        (line,) = [x for x in pool.stderr(0).splitlines() if x.startswith("agmm: rank")]
        assert re.match(r"agmm: rank 0 waited 1\.\d s for chunk 1 from rank 1: ", line), line
        pool.kill()


def test_hosts_of_their_own_exchange_by_the_backend(rank_pools: Any) -> None:
    cases = [
        Case((3, 0, 5), 2, 2, "drops", torch.bfloat16),
        Case((4, 4, 4), 2, 3, "zipf", seed=1),
        Case((2, 2, 2), 3, 4, "even", torch.float64, sliced=True),
        Case((0, 0, 0), 2, 2),
    ]
    assert rank_pools(3).run(work.unfused_faults, cases) == [[]] * 3


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_serves_all_numbers_of_tokens(rank_pools: Any) -> None:
    assert rank_pools(2).run(work.compiled_faults, 2) == [[]] * 2


def test_nans_are_found(rank_pools: Any) -> None:
    assert (
        rank_pools(2).run(work.nan_is_found) == [["x: found a NaN", "y @ weights: found a NaN"]] * 2
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradcheck(pool: RankPool, world_size: int) -> None:
    case = Case((3,) * world_size, 2, 2, "drops", column_major=True, seed=1)
    results = pool.run(work.gradcheck, world_size, case, {})
    assert results[-world_size:] == [True] * world_size


# --- one rank ---


def _operands(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(6, 8, dtype=dtype),
        "weights": torch.randn(4, 8, 16, dtype=dtype),
        "topk_ids": torch.tensor([[0, 3], [3, 3], [-1, 0], [1, -1], [0, 1], [3, 0]]),
    }


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": torch.ones(6)}, "x: found 1 dimensions, wanted 2"),
        ({"x": torch.ones(6, 8).long()}, "x: found dtype torch.int64, wanted one of bfloat16, "),
        ({"x": torch.ones(6, 7)}, "weights: found K=8, wanted 7 as the columns of x"),
        ({"x": torch.ones(5, 8)}, "routing: found 6 tokens, wanted 5, those of all ranks"),
        ({"weights": []}, "weights: found an empty list, wanted at least one weight"),
        ({"weights": torch.ones(8, 16)}, "weights: found 2 dimensions, wanted 3: experts, K and N"),
        ({"weights": torch.ones(4, 8, 16).double()}, "weights: found dtype torch.float64, wanted "),
        ({"bias": torch.ones(16)}, r"bias: found shape \(16,\), wanted \(4, 16\), a row for each"),
        ({"bias": [None, None]}, "bias: found 2 for 1 weights, wanted one each"),
        (
            {"activation": "silu_mul"},
            "activation: found 'silu_mul' with weights a list of 1, wanted",
        ),
        ({"activation": "swish"}, "activation: found 'swish', wanted one of relu, "),
        ({"num_experts": 6}, "num_experts: found 6 with 4 on each of 1 ranks, wanted 4, or 4"),
        ({"num_experts": 0}, "num_experts: found 0, wanted an int of at least 1"),
        ({"capacity": -1}, "capacity: found -1, wanted an int of at least 0"),
        ({"capacity": 3}, "capacity: found 10 rows for the experts of rank 0, wanted at most 3"),
        ({"topk_ids": torch.zeros(6)}, "topk_ids: found 1 dimensions, wanted 2"),
        (
            {"topk_ids": torch.zeros(6, 2)},
            "topk_ids: found dtype torch.float32, wanted one of int32",
        ),
        ({"topk_ids": torch.full((6, 2), 4)}, "topk_ids: found 4, wanted less than num_experts=4"),
        ({"topk_ids": None}, "topk_ids: found None, wanted a tensor"),
        (
            {"tokens_per_rank": [6, 6]},
            "tokens_per_rank: found 2 numbers, wanted 1, one for each rank",
        ),
        ({"tokens_per_rank": [5]}, "tokens_per_rank: found 5 for rank 0, wanted 6 as the rows of"),
        (
            {"tokens_per_rank": 6},
            "tokens_per_rank: found 6, wanted a list of one int for each rank",
        ),
        ({"tokens_per_rank": [-6]}, "tokens_per_rank: found -6, wanted an int of at least 0"),
        ({"tokens_per_rank": []}, r"tokens_per_rank: found \[\], wanted a list of one int for"),
        ({"weights": torch.tensor(1.0)}, "weights: found 0 dimensions, wanted 3: experts, K and N"),
        ({"return_gathered": 1}, "return_gathered: found 1, wanted True or False"),
    ],
    ids=range(26),
)
def test_what_the_first_half_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        moe.all_gather_grouped_matmul(**_operands() | given)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"y": torch.ones(11, 16)}, "y: found 11 rows, wanted 12, those of the routing"),
        ({"y": torch.ones(12, 15)}, "weights: found K=16, wanted 15 as the columns of y"),
        ({"weights": torch.ones(3, 16, 8)}, "weights: found 3 experts, wanted 4, those of the rou"),
        ({"routing": None}, "routing: found NoneType, wanted an agmm.moe.Routing"),
        ({"topk_weights": None}, "topk_weights: found None, wanted a tensor"),
        (
            {"topk_weights": torch.ones(6, 3)},
            "topk_weights: found 3 columns, wanted 2, the choices",
        ),
        (
            {"topk_weights": torch.ones(5, 2)},
            "routing: found 6 tokens, wanted 5, those of all ranks",
        ),
        (
            {"topk_weights": torch.ones(6, 2).long()},
            "topk_weights: found dtype torch.int64, wanted",
        ),
        (
            {"bias": torch.ones(4, 7)},
            r"bias: found shape \(4, 7\), wanted \(4, 8\), a row for each",
        ),
        ({"strict": None}, "strict: found None, wanted True or False"),
        ({"routing": "meta"}, "routing: found device meta, wanted cpu as y"),
    ],
    ids=range(11),
)
def test_what_the_second_half_refuses(given: dict[str, Any], message: str) -> None:
    routing = moe.moe.route(_operands()["topk_ids"], num_experts=4)
    if given.get("routing") == "meta":
        tensors = (one.to("meta") if isinstance(one, torch.Tensor) else one for one in routing)
        given = {"routing": moe.moe.Routing(*tensors)}
    operands = {"y": torch.ones(12, 16), "weights": torch.ones(4, 16, 8), "routing": routing}
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        moe.grouped_matmul_reduce_scatter(**operands | {"topk_weights": torch.ones(6, 2)} | given)


@pytest.mark.usefixtures("group")
def test_a_routing_takes_the_place_of_ids() -> None:
    given = _operands()
    y, routing = moe.all_gather_grouped_matmul(**given)
    again, same = moe.all_gather_grouped_matmul(**given | {"topk_ids": routing})
    assert same is routing and torch.equal(y, again)
    moved = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, routing)
    assert isinstance(moved, moe.moe.Routing)
    for name in ("num_experts", "capacity", "tokens_per_rank"):
        with pytest.raises(InvalidArgument, match=f"^{name}: found 4 with a Routing, wanted None"):
            moe.all_gather_grouped_matmul(**given | {"topk_ids": routing, name: 4})


@pytest.mark.usefixtures("group")
def test_autocast_casts_all_but_the_router() -> None:
    given = _operands()
    with torch.autocast("cpu", torch.bfloat16):
        y, routing = moe.all_gather_grouped_matmul(**given)
        topk = torch.rand(6, 2, requires_grad=True)
        out = moe.grouped_matmul_reduce_scatter(y, given["weights"].mT, routing, topk)
        out.sum().backward()
    assert y.dtype == out.dtype == torch.bfloat16
    assert topk.grad is not None and topk.grad.dtype == torch.float32


@pytest.mark.usefixtures("group")
def test_status_names_the_calls() -> None:
    given = _operands()
    y, routing = moe.all_gather_grouped_matmul(**given, activation="relu")
    topk = torch.ones(6, 2)
    moe.grouped_matmul_reduce_scatter(y, given["weights"].mT, routing, topk, strict=True)
    found = {
        (one.op, one.m, one.n, one.k, one.activation)
        for one in agmm.status().calls
        if one.by == "agmm's CPU backend"
    }
    assert ("all_gather_grouped_matmul", 6, (16,), 8, "relu") in found
    assert ("grouped_matmul_reduce_scatter", 12, (8,), 16, None) in found


# From torch 2.14 on opcheck clones the arguments and reads .grad of the clones, which warns; torch
# hides that in a way that comes too late where warnings are errors.
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not:UserWarning")
@pytest.mark.parametrize("uneven", quick.first(1, [True, False]))
def test_opcheck(group: str, fresh_compiler: None, uneven: bool) -> None:
    given, ops = _operands(), torch.ops.agmm
    ids, tokens = given["topk_ids"], [6] if uneven else []
    torch.library.opcheck(ops._route.default, (ids, group, 1, 4, 4, 11, tokens))
    routing = moe.moe.route(ids, num_experts=4)
    tensors = routing.tokens, routing.offsets, routing.positions
    x = given["x"].requires_grad_()
    weights = [given["weights"].clone().requires_grad_() for _ in range(2)]
    biases = [torch.randn(4, 16, requires_grad=True), None]
    for activation, saves in (("", False), ("silu_mul", True), ("gelu_mul", False)):
        last = group, 1, tokens, True, False, False, activation, saves
        torch.library.opcheck(
            ops._all_gather_grouped_matmul.default, (x, weights, biases, *tensors, *last)
        )
    ys = [torch.randn(12, 8, requires_grad=True) for _ in range(2)]
    bias, topk = torch.randn(4, 16, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    scattered = ys, weights, bias, *tensors, topk, group, 1, tokens, 6
    torch.library.opcheck(ops._grouped_matmul_reduce_scatter.default, scattered)
    douts = torch.randn(12, 16)
    grad = ops._grouped_grad_of_weight.default
    torch.library.opcheck(grad, (ys[0].detach(), douts, routing.offsets))
    torch.library.opcheck(ops._grouped_grad_of_bias.default, (douts, routing.offsets))


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize(
    ("dtype", "k"),
    [(torch.bfloat16, 16), (torch.bfloat16, 12), (torch.float16, 16), (torch.float32, 5)],
    ids=str,
)
def test_products_of_gpus_are_those_of_the_cpu(
    dtype: torch.dtype, k: int, column_major: bool
) -> None:
    """torch's grouped matmul takes CPU tensors too; it and the batch look at no number."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 7, 8], dtype=torch.int32)
    rows, douts = torch.randn(11, k).to(dtype), torch.randn(11, 16).to(dtype)
    rows[8:], douts[8:] = torch.nan, torch.nan
    weight, bias = torch.randn(4, k, 16).to(dtype), torch.randn(4, 16).to(dtype)
    weight = weight.mT.contiguous().mT if column_major else weight
    found = grouped_products.products_by_torch(rows, weight, bias, offsets)
    (wanted,) = grouped_products.products(rows, [weight], [bias], offsets, None)
    torch.testing.assert_close(
        found, wanted, rtol=0.02, atol=0.02
    )  # a bias comes behind a rounding
    of_weight = grouped_products.grad_of_weight_by_torch(rows, douts, offsets)
    wanted = torch.ops.agmm._grouped_grad_of_weight(rows, douts, offsets)
    rounded_twice: dict[str, Any] = (
        {"rtol": 2**-7, "atol": 2**-10} if dtype == torch.float16 else {}
    )
    torch.testing.assert_close(of_weight, wanted, **rounded_twice)
    assert of_weight.dtype == dtype
    of_bias = torch.ops.agmm._grouped_grad_of_bias(douts, offsets)
    sums = [douts[b:e].float().sum(0) for b, e in ((0, 3), (3, 3), (3, 7), (7, 8))]
    torch.testing.assert_close(of_bias, torch.stack(sums).to(dtype))


def test_gradients_of_float16_on_gpus_are_not_made_of_rounded_numbers() -> None:
    """The sums cancel, so that numbers rounded to bfloat16 would be wrong by more than they are."""
    torch.manual_seed(0)
    rows, douts = (1 + torch.randint(0, 8, (64, 16)) / 1024 for _ in range(2))
    rows[::2] *= -1
    rows[0, 0], douts[1, 1] = 65504, -65504  # the largest that float16 has
    offsets = torch.tensor([0, 64, 64], dtype=torch.int32)
    found = grouped_products.grad_of_weight_by_torch(rows.half(), douts.half(), offsets)
    exact = rows.double().T @ douts.double()
    assert found[1].eq(0).all()
    inner = exact[2:, 2:]
    assert (found[0, 2:, 2:].double() - inner).abs().max() < 2**-7 * inner.abs().max()
    assert not found.isnan().any()
