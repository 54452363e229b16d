"""Gradients of partly sharded models on CPU ranks: their sum over the ranks and their norm."""

from __future__ import annotations

import gradient_work
import pytest
import torch

from agmm.testing.ranks import RankPool


def test_a_tied_parameter_is_summed_once(pool: RankPool) -> None:
    assert pool.run(gradient_work.summed, [])[2:] == [[3.0, 3.0, 1.0]] * 3


@pytest.mark.parametrize(
    ("exclude", "wanted"),
    [
        (["third"], [3.0, 1.0, 1.0]),
        (["second.weight"], [1.0, 3.0, 1.0]),
        (["first", "third.weight"], [1.0, 1.0, 1.0]),
    ],
)
def test_what_is_excluded_stays_as_it_is(
    pool: RankPool, exclude: list[str], wanted: list[float]
) -> None:
    assert pool.run(gradient_work.summed, exclude)[2:] == [wanted] * 3


def test_an_unknown_name_is_refused(pool: RankPool) -> None:
    message = "exclude: found 'forth', wanted the name of a parameter or of a module in Tied"
    assert pool.run(gradient_work.summed, ["third", "forth"])[2:] == [message] * 3


def test_dtensors_over_other_ranks_are_summed(pool: RankPool) -> None:
    """Over the ranks of the group, 0 and 1, and 2 and 3; those over them too are right already."""
    results = pool.run(gradient_work.summed_over_other_ranks)
    for rank, found in enumerate(results[:4]):
        own = [1.0 + rank] * 2
        summed = [3.0 if rank < 2 else 7.0] * 2
        assert found == [summed, own, own]


def test_a_missing_gradient_counts_as_zero(pool: RankPool) -> None:
    """The second sum shows that all ranks got the first one."""
    both = [6.0]
    for found in pool.run(gradient_work.summed_with_missing_ones)[3:]:
        assert found == {
            "both": both,
            "first": [2.0],
            "none": None,
            "second": [4.0],
            "large": both,
            "transposed on one": both,
            "empty": [],
            "frozen": None,
            "last": both,
        }


@pytest.mark.parametrize(
    ("kind", "found", "other"),
    [
        ("another", "no other parameter", "'audio.weight' [4] torch.float32 on cpu 0"),
        (
            "fewer",
            "'text.weight' [4] torch.float32 on cpu 0",
            "'words.weight' [3, 4] torch.float32 on cpu 0",
        ),
        ("none", "'image.weight' [4] torch.float32 on cpu 0", "no other parameter"),
        (
            "shape",
            "'text.weight' [4] torch.float32 on cpu 0",
            "'text.weight' [5] torch.float32 on cpu 0",
        ),
        (
            "dtype",
            "'text.weight' [4] torch.float32 on cpu 0",
            "'text.weight' [4] torch.float64 on cpu 0",
        ),
        (
            "device",
            "'text.weight' [4] torch.float32 on cpu 0",
            "'text.weight' [4] torch.float32 on meta 1",
        ),
        (
            "order",
            "'image.weight' [4] torch.float32 on cpu 0",
            "'text.weight' [4] torch.float32 on cpu 0",
        ),
        (
            "frozen",
            "'text.weight' [4] torch.float32 on cpu 0",
            "'words.weight' [3, 4] torch.float32 on cpu 0",
        ),
        (
            "exclude",
            "'text.weight' [4] torch.float32 on cpu 0",
            "'words.weight' [3, 4] torch.float32 on cpu 0",
        ),
    ],
)
def test_ranks_with_other_parameters_are_told(
    pool: RankPool, kind: str, found: str, other: str
) -> None:
    message = (
        f"module: found {found} on rank 0 and {other} on rank 2, wanted the same parameters, by "
        "name, shape, dtype and device, on all ranks"
    )
    assert pool.run(gradient_work.summed_where_ranks_differ, kind)[2:] == [message] * 3


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (
            "unknown",
            "exclude: found 'txt', wanted the name of a parameter or of a module in ModuleDict",
        ),
        (
            "sparse",
            (
                "module: found a gradient of 'words.weight' of layout torch.sparse_coo, wanted "
                "torch.strided"
            ),
        ),
    ],
)
def test_a_fault_of_one_rank_is_told_to_all(pool: RankPool, kind: str, fault: str) -> None:
    results = pool.run(gradient_work.summed_where_ranks_differ, kind)[2:]
    assert results == [f"rank 2: {fault}"] * 2 + [fault]


@pytest.mark.parametrize("by_list", [False, True])
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("world_size", [1, 3])
def test_clip_is_that_of_the_whole_model(
    pool: RankPool, world_size: int, norm_type: float, max_norm: float, by_list: bool
) -> None:
    results = pool.run(gradient_work.clipped, world_size, norm_type, max_norm, by_list)
    assert results[5 - world_size :] == [[]] * world_size


def test_a_gradient_that_every_rank_has_whole_counts_once(pool: RankPool) -> None:
    for found, wanted in pool.run(gradient_work.clip_of_an_embedding):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_the_norm_has_the_bits_of_float32(pool: RankPool) -> None:
    results = pool.run(gradient_work.clip_of_few_bits, 5)
    assert results == [(pytest.approx(4160**0.5, rel=1e-6), torch.float32)] * 5


def test_what_clip_refuses(pool: RankPool) -> None:
    assert pool.run(gradient_work.refused_clips)[0] == [
        "InvalidArgument: norm_type: found 0.0, wanted a number larger than 0",
        "RuntimeError: the gradients' norm of order 2.0 is inf",
        "[inf, 1.0]",
    ]


@pytest.mark.parametrize("at_once", ["foreach", "fused"])
def test_an_optimizer_takes_all_parameters_of_a_group_at_once(pool: RankPool, at_once: str) -> None:
    assert pool.run(gradient_work.stepped, True, at_once)[3:] == [[True] * 4] * 2
    # The test can fail: without groups the optimizer refuses them.
    for error in pool.run(gradient_work.stepped, False, at_once)[3:]:
        assert "mixed torch.Tensor and DTensor" in error
