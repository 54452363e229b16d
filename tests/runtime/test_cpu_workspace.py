"""The CPU backend over real processes: numerics, order, delays, groups, growth, failures."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import rank_work
import torch

from agmm import _core
from agmm.planning.shapes import LocalShape
from agmm.testing.cases import CPU_UGLY_SHAPES
from agmm.testing.ranks import RankPool

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [
    *CPU_UGLY_SHAPES,
    LocalShape(1, 1, 65),  # K just above 64, one row per rank, one column
    LocalShape(13, 1, 1),
    LocalShape(37, 24, 66),
    LocalShape(2, 40, 1),
]


def faults_of(results: list[list[str] | None], world_size: int) -> list[str]:
    assert sum(result is not None for result in results) == world_size
    return [fault for result in results for fault in result or []]


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_is_as_exact_as_mm(pool: RankPool, world_size: int, dtype: torch.dtype) -> None:
    results = pool.run(rank_work.products, world_size, SHAPES, dtype)
    assert faults_of(results, world_size) == []


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("chunks_per_shard", [1, 4])
def test_gathered_a_weights_and_bias(
    pool: RankPool, world_size: int, chunks_per_shard: int
) -> None:
    results = pool.run(
        rank_work.products,
        world_size,
        SHAPES,
        torch.bfloat16,
        chunks_per_shard=chunks_per_shard,
        return_A=True,
        weights=3,
        bias=True,
    )
    assert faults_of(results, world_size) == []


@pytest.mark.parametrize(
    ("world_size", "chunks_per_shard"), [(5, 1), pytest.param(4, 3, marks=pytest.mark.slow), (2, 1)]
)
def test_many_calls_with_each_rank_late_in_turn(
    pool: RankPool, world_size: int, chunks_per_shard: int
) -> None:
    calls = 240 // world_size
    results = pool.run(rank_work.delayed_calls, world_size, calls, chunks_per_shard, 3000)
    assert faults_of(results, world_size) == []


def test_two_groups_at_once(pool: RankPool) -> None:
    assert pool.run(rank_work.two_groups_at_once, 150) == [[]] * 5


@pytest.mark.parametrize("world_size", [2, 5])
def test_mixed_shapes_grow_the_workspace(pool: RankPool, world_size: int) -> None:
    results = pool.run(rank_work.mixed_sequence, world_size, seed=7, calls=25)
    members = [result for result in results if result is not None]
    assert faults_of([faults for faults, _ in members], world_size) == []
    for _, sizes in members:
        assert sizes == members[0][1]
        assert sizes == sorted(sizes)
        assert len(set(sizes)) > 3


@pytest.mark.parametrize("chunks_per_shard", [1, 2])
def test_timeline_follows_the_ring(pool: RankPool, chunks_per_shard: int) -> None:
    world_size = 4
    chunks = world_size * chunks_per_shard
    timelines = pool.run(rank_work.timeline_of_a_call, world_size, chunks_per_shard)
    assert timelines[0] is None
    for rank, timeline in enumerate(timelines[1:]):
        assert {entry["rank"] for entry in timeline} == {rank}
        first = rank * chunks_per_shard
        assert [entry["chunk"] for entry in timeline] == [
            (first + step) % chunks for step in range(chunks)
        ]
        for entry in timeline:
            assert entry["source"] == entry["chunk"] // chunks_per_shard
            assert entry["arrived_ns"] <= entry["start_ns"] <= entry["end_ns"]
        for before, after in itertools.pairwise(timeline):
            assert before["end_ns"] <= after["start_ns"]


def test_no_name_is_left_once_all_ranks_are_connected(pool: RankPool) -> None:
    assert pool.run(rank_work.names_left_after_create) == [[]] * 5


def test_largest_wish_sets_the_slot_size(pool: RankPool) -> None:
    assert pool.run(rank_work.create_with_differing_sizes) == [1004] * 5


@pytest.mark.parametrize("step", ["CpuWorkspace", "connect", "take_memory"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no room"), "no room"),
        (ValueError("slot_bytes: found 5"), "slot_bytes: found 5"),
        (TypeError("__init__(): incompatible\narguments"), "__init__(): incompatible"),
        (MemoryError(), "MemoryError"),
    ],
    ids=repr,
)
def test_all_ranks_raise_what_one_fails_with(
    pool: RankPool, step: str, error: Exception, said: str
) -> None:
    found = pool.run(rank_work.create_where_one_fails, 3, step, error)
    assert found == [(f"Unsupported: rank 3: {said}", [], True)] * 5


@pytest.mark.parametrize(
    "topic",
    [
        "the name of a workspace",
        "whether they have mapped a workspace",
        "whether they have a workspace",
    ],
)
def test_a_rank_killed_while_slots_grow_leaves_no_memory(topic: str) -> None:
    """At most a name without memory, which the next workspace sweeps."""
    with RankPool(2, env={"AGMM_TIMEOUT_S": "1"}) as pool:
        killed = pool.processes[1]
        pool.submit(rank_work.killed_while_growing, 1, topic)
        killed.join(30)
        assert killed.exitcode == -signal.SIGKILL
    left = list(Path("/dev/shm").glob(f"agmm-{killed.pid}-*"))
    assert sum(512 * path.stat().st_blocks for path in left) < 1 << 16
    _core.CpuWorkspace(0, 1, 0, 1, 1.0).close()
    assert not any(path.exists() for path in left)


def test_closed_workspace_refuses(pool: RankPool) -> None:
    wanted = "workspace: found a closed one, wanted an open one"
    assert pool.run(rank_work.use_after_close) == [wanted] * 5


def test_interrupted_workspace_refuses(pool: RankPool) -> None:
    for first, second in pool.run(rank_work.use_after_interruption):
        assert first == "KeyboardInterrupt()"
        assert "workspace: found one whose last call was interrupted" in second


def test_failed_product_leaves_the_group_in_step(pool: RankPool) -> None:
    for error, out in pool.run(rank_work.use_after_failed_product):
        assert "mat1 and mat2" in error
        assert out == [0, 2, 4, 6, 8]


def test_killed_rank_ends_the_others_with_a_message() -> None:
    limit_s = 2
    with RankPool(3, env={"AGMM_TIMEOUT_S": str(limit_s)}) as pool:
        pids = [process.pid for process in pool.processes]
        pool.submit(rank_work.call_forever)
        time.sleep(1.0)
        assert pool.alive
        os.kill(pool.processes[1].pid or 0, signal.SIGKILL)
        killed = time.monotonic()
        assert pool.join(limit_s + 10) == [124, -signal.SIGKILL, 124]
        assert time.monotonic() - killed < limit_s + 5
        for rank in (0, 2):
            lines = [line for line in pool.stderr(rank).splitlines() if line.startswith("agmm:")]
            assert len(lines) == 1
            assert lines[0].startswith(f"agmm: rank {rank} waited 2.0 s for ")
            assert lines[0].endswith("; ending the process (AGMM_TIMEOUT_S=2)")
        # Whoever waited first waited for the dead rank; the other may have waited for that one.
        everything = pool.stderr(0) + pool.stderr(2)
        assert "for chunk 1 from rank 1: signal is 0, wanted " in everything
    left = [path.name for path in Path("/dev/shm").glob("agmm-*")]
    assert [name for name in left if any(name.startswith(f"agmm-{pid}-") for pid in pids)] == []


@pytest.mark.parametrize(
    ("slot_bytes", "rows", "return_A"),
    [
        pytest.param(4096, [2, 3], [False, False], id="rows"),
        pytest.param(4096, [2, 2], [False, True], id="return_A"),
        pytest.param(64, [2, 5], [False, False], id="one rank grows"),
        pytest.param(64, [5, 6], [False, False], id="both ranks grow"),
    ],
)
def test_differing_calls_are_named_not_awaited(
    slot_bytes: int, rows: list[int], return_A: list[bool]
) -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        started = time.monotonic()
        pool.submit(rank_work.call_with_own_shape, slot_bytes, rows, return_A)
        assert pool.join(20) == [124, 124]
        assert time.monotonic() - started < 10
        for rank in (0, 1):
            assert (
                f"agmm: rank {rank}: chunk {1 - rank} from rank {1 - rank} carries tag 0x"
                in pool.stderr(rank)
            )
            assert "the ranks made different calls" in pool.stderr(rank)
