"""The reference, the error measure and the cases that everything else is checked with."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from agmm.errors import InvalidArgument
from agmm.planning.shapes import LocalShape, Shape
from agmm.testing.cases import (
    BENCH_SHAPES,
    UGLY_SHAPES,
    Operands,
    make_operands,
    make_scatter_operands,
    random_local_shapes,
)
from agmm.testing.reference import (
    allowed_error,
    gathered_product,
    poison,
    relative_error,
    scattered_sum,
)


def test_product_is_exact_where_bf16_is_not() -> None:
    A = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    B = torch.tensor([[1.0], [1.0]], dtype=torch.bfloat16)
    bias = torch.tensor([0.5], dtype=torch.bfloat16)
    assert gathered_product(A, B, bias).item() == 257.5
    assert (A @ B).item() != 257.0


def test_product_keeps_leading_dimensions() -> None:
    A, B = torch.randn(2, 3, 4), torch.randn(4, 5)
    assert gathered_product(A, B).shape == (2, 3, 5)


def test_relative_error_is_frobenius() -> None:
    reference = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(reference, reference) == 0.0
    assert relative_error(reference + torch.tensor([[0.5, 0.0], [0.0, 0.0]]), reference) == 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bad_word_never_passes(bad: float, dtype: torch.dtype) -> None:
    reference = torch.ones(64, 64)
    out = torch.ones(64, 64, dtype=dtype)
    out[17, 3] = bad
    error = relative_error(out, reference)
    assert error == math.inf
    assert not error <= allowed_error(1e9)


def test_poisoned_tensor_never_passes() -> None:
    reference = torch.ones(4, 4)
    assert relative_error(poison(torch.ones(4, 4, dtype=torch.float16)), reference) == math.inf


def test_zero_reference() -> None:
    zero = torch.zeros(2, 2)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(torch.ones(2, 2), zero) == math.inf


def test_broken_reference_and_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"found shape \(2, 3\), wanted the reference's \(3, 2\)"):
        relative_error(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="reference: found a NaN"):
        relative_error(torch.ones(2), torch.tensor([1.0, math.nan]))


def test_a_wrong_tile_is_not_allowed() -> None:
    torch.manual_seed(0)
    A, B = torch.randn(512, 64).bfloat16(), torch.randn(64, 256).bfloat16()
    reference = gathered_product(A, B)
    mm_error = relative_error(A @ B, reference)
    wrong = A @ B
    wrong[128:144, 16:32] = 0
    assert relative_error(A @ B, reference) <= allowed_error(mm_error)
    assert relative_error(wrong, reference) > allowed_error(mm_error)


def test_shape_reads_back() -> None:
    for shape in BENCH_SHAPES:
        assert Shape.parse(str(shape)) == shape
    assert Shape.parse(" 4096×3584×8192 ") == (4096, 3584, 8192)
    assert Shape(2, 3, 4).flops(1) == 48


@pytest.mark.parametrize("text", ["", "4096", "1x2", "1x2x3x4", "1x-2x3", "0x1x1", "axbxc"])
def test_bad_shape_is_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"shape: found .*, wanted MxNxK"):
        Shape.parse(text)


def test_ranks_agree_on_A_and_have_weights_of_their_own() -> None:
    shape = Shape(12, 8, 16)
    ranks = [make_operands(shape, r, 3, dtype=torch.float32, device="cpu") for r in range(3)]
    assert all(torch.equal(o.A, ranks[0].A) for o in ranks)
    assert torch.equal(torch.cat([o.A_shard for o in ranks]), ranks[0].A)
    assert ranks[0].B.shape == (16, 8)
    assert ranks[0].B.t().is_contiguous()
    assert not torch.equal(ranks[0].B, ranks[1].B)


def test_a_scattered_sum_is_that_of_all_ranks() -> None:
    shape, world_size = Shape(12, 8, 16), 3

    def made(rank: int) -> Operands:
        return make_scatter_operands(shape, rank, world_size, dtype=torch.bfloat16, device="cpu")

    ranks = [made(rank) for rank in range(world_size)]
    assert all(torch.equal(made(1).A, ranks[1].A) for _ in range(2))
    assert not torch.equal(ranks[0].A, ranks[1].A) and not torch.equal(ranks[0].B, ranks[1].B)
    assert all(o.A_shard is o.A and o.B.t().is_contiguous() for o in ranks)
    whole = torch.stack([o.A.double() @ o.B.double() for o in ranks]).sum(0)
    for rank in range(world_size):
        found = scattered_sum(lambda source: (ranks[source].A, ranks[source].B), rank, world_size)
        torch.testing.assert_close(found.rows, whole[4 * rank : 4 * rank + 4])
        # bf16: 8 bits, rounded once and again with each sum.
        assert 2**-10 < found.error < 2**-7


@pytest.mark.parametrize("make", [make_operands, make_scatter_operands])
def test_rows_must_divide(make: Callable[..., Operands]) -> None:
    with pytest.raises(
        InvalidArgument, match="M: found 10, wanted a multiple of the world size, 4"
    ):
        make(Shape(10, 8, 8), 0, 4, dtype=torch.float32, device="cpu")


def test_cases_are_legal_for_the_kernels() -> None:
    drawn = random_local_shapes(200, seed=3)
    assert drawn == random_local_shapes(200, seed=3) != random_local_shapes(200, seed=4)
    for case in (*UGLY_SHAPES, *drawn):
        assert case.M_local >= 1
        assert case.N % 8 == 0
        assert case.K % 8 == 0
    assert any(case.M_local == 1 for case in UGLY_SHAPES)
    assert any((case.N, case.K) == (2112, 7168) for case in UGLY_SHAPES)
    assert LocalShape(3, 8, 8).gathered(4) == Shape(12, 8, 8)
