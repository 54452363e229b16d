"""Memory taken beforehand and given back, on CPU ranks."""

from __future__ import annotations

import memory_work
import pytest
import torch

import agmm
from agmm.testing.ranks import RankPool


def test_reserved_buffers_do_not_grow_again(pool: RankPool) -> None:
    assert pool.run(memory_work.reserve_and_call) == [(640, 640, 1280)] * 5


def test_released_memory_is_given_back_and_taken_anew(pool: RankPool) -> None:
    for names_before, names_after, good in pool.run(memory_work.release_and_call):
        assert names_before == 1
        assert names_after == 0
        assert good == [True, True]


def test_reserve_that_finds_no_room_is_refused_by_all() -> None:
    with RankPool(2) as pool:
        for error, good in pool.run(memory_work.reserve_too_much, 500_000):
            assert error.startswith("workspace: no room for gather buffers of 4000000 bytes: rank ")
            assert good


def test_reserve_of_different_sizes_is_named() -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        pool.submit(memory_work.reserve_own_size)
        assert pool.join(25) == [124, 124]
        assert "reserve(nbytes = 1000)" in pool.stderr(0)
        assert "reserve(nbytes = 1001)" in pool.stderr(0)


def test_bytes_of_a_call() -> None:
    assert agmm.workspace_bytes((128, 4, 64), torch.bfloat16, 8) == 8 * 128 * 4 * 64 * 2
    assert agmm.workspace_bytes([0, 8], torch.float64, 2) == 0
    # With a scale for each row and 128 columns.
    fp8 = agmm.workspace_bytes((2048, 4096), torch.float8_e4m3fn, 4)
    assert fp8 == 4 * 2048 * (4096 + 4 * 32)


@pytest.mark.parametrize(
    ("shape", "world_size", "wanted"),
    [
        ((4096, 8192), 4, 3 * 1024 * 8192 * 2),
        ((16, 1024, 8192), 4, 3 * 2048 * 8192 * 2),  # 8192 rows at a time
        ((0, 8), 4, 0),
        ((64, 8), 1, 0),
    ],
)
def test_bytes_of_a_scatter(shape: tuple[int, ...], world_size: int, wanted: int) -> None:
    options = {"op": "matmul_reduce_scatter"}
    assert agmm.workspace_bytes(shape, torch.bfloat16, world_size, **options) == wanted


@pytest.mark.parametrize(
    ("shape", "world_size", "wanted"),
    [
        # Each other rank sends a part of the sum, and as many finished rows.
        ((4096, 8192), 4, 2 * 3 * 1024 * 8192 * 2),
        ((16, 1024, 8192), 4, 2 * 3 * 2048 * 8192 * 2),  # 8192 rows at a time
        ((1022, 256), 4, 2 * 3 * 256 * 256 * 2),  # filled up to equal parts
        ((0, 8), 4, 0),
        ((64, 8), 1, 0),
    ],
)
def test_bytes_of_an_all_reduce(shape: tuple[int, ...], world_size: int, wanted: int) -> None:
    options = {"op": "matmul_all_reduce"}
    assert agmm.workspace_bytes(shape, torch.bfloat16, world_size, **options) == wanted


@pytest.mark.parametrize(
    ("op", "shape", "world_size", "wanted"),
    [
        ("all_gather", (100,), 4, 64 << 10),  # the least
        ("all_gather", (1 << 20,), 4, 2 << 20),  # the most
        ("all_reduce", (32, 1024), 4, 256 << 10),  # 64 KiB to each of the others
        ("all_reduce", (64, 1024), 4, 128 << 10),  # a quarter of 128 KiB, in two steps
        ("reduce_scatter", (64, 1024), 4, 128 << 10),
        ("reduce_scatter", (0, 4), 4, 0),
        ("all_reduce", (100,), 1, 0),
    ],
)
def test_bytes_of_a_collective(
    op: str, shape: tuple[int, ...], world_size: int, wanted: int
) -> None:
    assert agmm.workspace_bytes(shape, torch.bfloat16, world_size, op=op) == wanted


def test_a_collective_that_the_ranks_cannot_share_has_no_bytes() -> None:
    with pytest.raises(agmm.InvalidArgument, match="shape: found 7 elements, wanted a multiple"):
        agmm.workspace_bytes((7,), torch.bfloat16, 4, op="reduce_scatter")


def test_reserved_slots_are_enough_for_a_scatter(pool: RankPool) -> None:
    """10 rows a rank of 3 columns from 4 ranks, in float64; one row more is too much."""
    assert pool.run(memory_work.reserve_and_scatter, 960) == [(960, 960, 1056)] * 5


def test_bytes_of_a_scatter_are_enough_on_every_device(pool: RankPool) -> None:
    """A build with kernels counts whole tiles, more than CPU ranks use."""
    nbytes = agmm.workspace_bytes((50, 3), torch.float64, 5, op="matmul_reduce_scatter")
    assert nbytes >= 960
    for reserved, after_call, _ in pool.run(memory_work.reserve_and_scatter, nbytes):
        assert reserved == after_call == nbytes


@pytest.mark.parametrize(
    ("shape", "op", "message"),
    [
        ((8, 8), "scatter", r"op: found 'scatter', wanted one of \('all_gather_matmul', "),
        ((7, 8), "matmul_reduce_scatter", r"shape: found \(7, 8\), wanted at least 2 sizes, and "),
        ((8,), "matmul_reduce_scatter", r"shape: found \(8,\), wanted at least 2 sizes, and rows"),
        ((8,), "matmul_all_reduce", r"shape: found \(8,\), wanted at least 2 sizes$"),
        ((2**31, 8), "matmul_reduce_scatter", r"shape: found 2147483648 rows of 8, wanted at most"),
        ((2**16, 2**15, 8), "matmul_all_reduce", r"shape: found 2147483648 rows of 8, wanted at"),
        ((8, 2**31), "matmul_all_reduce", r"shape: found 8 rows of 2147483648, wanted at most "),
    ],
)
def test_nonsense_of_a_scatter_is_refused(shape: tuple[int, ...], op: str, message: str) -> None:
    with pytest.raises(agmm.InvalidArgument, match=message):
        agmm.workspace_bytes(shape, torch.float32, 2, op=op)


@pytest.mark.parametrize(
    ("shape", "dtype", "world_size", "message"),
    [
        ((-1, 8), torch.float32, 2, r"shape: found \(-1, 8\), wanted sizes >= 0"),
        ((1, 8), torch.float32, 0, "world_size: found 0, wanted at least 1"),
        ((1, 8), "bfloat16", 2, "dtype: found 'bfloat16', wanted a torch.dtype"),
    ],
)
def test_nonsense_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, world_size: int, message: str
) -> None:
    with pytest.raises(agmm.InvalidArgument, match=message):
        agmm.workspace_bytes(shape, dtype, world_size)


def test_reserve_below_zero_is_refused() -> None:
    with pytest.raises(agmm.InvalidArgument, match="nbytes: found -1, wanted at least 0"):
        agmm.reserve(None, -1)
