"""The public API on CPU ranks."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import op_work
import pytest
import torch

import agmm
from agmm.planning.shapes import LocalShape
from agmm.testing.cases import CPU_UGLY_SHAPES
from agmm.testing.ranks import RankPool

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [*CPU_UGLY_SHAPES, LocalShape(1, 1, 65), LocalShape(13, 24, 1), LocalShape(37, 8, 66)]


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("return_A", [False, True])
def test_product(pool: RankPool, world_size: int, return_A: bool) -> None:
    results = pool.run(
        op_work.public_products, world_size, SHAPES, torch.bfloat16, return_A=return_A
    )
    check(results, world_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(pool: RankPool, dtype: torch.dtype) -> None:
    check(pool.run(op_work.public_products, 3, SHAPES, dtype), 3)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("return_A", [False, True])
def test_leading_dimensions_and_bias(pool: RankPool, world_size: int, return_A: bool) -> None:
    results = pool.run(
        op_work.public_products,
        world_size,
        SHAPES,
        torch.float32,
        leading=3,
        return_A=return_A,
        bias=True,
    )
    check(results, world_size)


@pytest.mark.parametrize("world_size", [1, 5])
@pytest.mark.parametrize("weights", [1, 3])
@pytest.mark.parametrize("return_A", [False, True])
def test_several_weights(pool: RankPool, world_size: int, weights: int, return_A: bool) -> None:
    results = pool.run(
        op_work.public_products,
        world_size,
        SHAPES,
        torch.bfloat16,
        weights=weights,
        return_A=return_A,
    )
    check(results, world_size)


@pytest.mark.parametrize("world_size", range(1, 6))
def test_native_op(pool: RankPool, world_size: int) -> None:
    check(pool.run(op_work.native_products, world_size, SHAPES), world_size)


def test_default_group(pool: RankPool) -> None:
    check(pool.run(op_work.default_group_product), 5)


@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_many_calls_with_changing_shapes_and_late_ranks(pool: RankPool, world_size: int) -> None:
    check(pool.run(op_work.calls_with_late_ranks, world_size, 240), world_size)


def test_groups_in_turns(pool: RankPool) -> None:
    check(pool.run(op_work.groups_in_turns, 40), 5)


def test_groups_in_threads(pool: RankPool) -> None:
    check(pool.run(op_work.groups_in_threads, 60), 5)


def test_workspace_follows_its_group(pool: RankPool) -> None:
    assert pool.run(op_work.workspace_follows_its_group) == [(True, True, True)] * 5


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gather_dim", "gather_dim: 1, the fused path wants 0"),
        ("strides", "A_shard: strides (1, 10) are not contiguous"),
        ("int", "A_shard: dtype=torch.int32, the CPU backend wants a floating-point type"),
    ],
)
def test_unfused_path_is_right_and_warns_once(pool: RankPool, kind: str, reason: str) -> None:
    for faults, caught, error in pool.run(op_work.unfused_products, kind):
        assert faults == []
        assert caught == [f"agmm takes the unfused path: {reason}"]
        assert error == f"{reason}; strict=True refuses the unfused path"


def test_unfused_path_on_request_does_not_warn(pool: RankPool) -> None:
    for faults, caught, _ in pool.run(op_work.unfused_products, "config"):
        assert faults == []
        assert caught == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dtype", "B: found dtype torch.float16, wanted torch.float32 as A_shard"),
        ("K", "B: found K=5, wanted 4 as the columns of A_shard"),
        ("device", "B: found device meta, wanted cpu as A_shard"),
        ("B dimensions", "B: found 1 dimensions, wanted 2"),
        ("A dimensions", "A_shard: found 1 dimensions, wanted at least 2"),
        ("no weights", "B: found an empty list, wanted at least one weight"),
        ("gather_dim", "gather_dim: found 2, wanted -2 to 1"),
        ("group", "group: found 'no such group', wanted the name of a process group"),
        ("bias shape", "bias: found shape (4,), wanted (3,) as B's columns"),
        ("bias dtype", "bias: found dtype torch.float16, wanted torch.float32 as A_shard"),
        ("bias count", "bias: found 1 for 2 weights, wanted one each"),
        ("config", "config: found 'no such config', wanted "),
    ],
)
def test_bad_call_is_named_in_one_line(pool: RankPool, kind: str, message: str) -> None:
    for error in pool.run(op_work.bad_call, kind):
        assert error.startswith(message)
        assert "\n" not in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.ones(4)}, "a: found 1 dimensions, wanted 2"),
        ({"b": torch.ones(4)}, "b: found 1 dimensions, wanted 2"),
        ({"b": torch.ones(3, 5)}, "b: found K=3, wanted 4 as the columns of a"),
        ({"b": torch.ones(4, 5).half()}, "b: found dtype torch.float16, wanted torch.float32 as a"),
        (
            {"a": torch.ones(8, 4).int(), "b": torch.ones(4, 5).int()},
            "a: found dtype torch.int32, wanted one of torch.bfloat16, ",
        ),
        ({"a": torch.ones(4, 8).t()}, "a: found strides (1, 8), wanted contiguous rows"),
        (
            {"signals": torch.ones(2, dtype=torch.int32)},
            "a_chunk_signals: found dtype torch.int32, wanted torch.uint32",
        ),
        (
            {"signals": torch.ones(2, 1, dtype=torch.uint32)},
            "a_chunk_signals: found 2 dimensions, wanted 1",
        ),
        (
            {"signals": torch.ones(3, dtype=torch.uint32)},
            "a_chunk_signals: found 3 signals, wanted a divisor of M=8",
        ),
        (
            {"signals": torch.ones(0, dtype=torch.uint32)},
            "a_chunk_signals: found 0 signals, wanted a divisor of M=8",
        ),
        ({"pivot": 2}, "a_chunk_pivot: found 2, wanted 0 to 1"),
        ({"pivot": -1}, "a_chunk_pivot: found -1, wanted 0 to 1"),
    ],
)
def test_bad_async_input_is_named_in_one_line(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "a": torch.ones(8, 4),
        "b": torch.ones(4, 5),
        "signals": torch.ones(2, dtype=torch.uint32),
        "pivot": 0,
        **change,
    }
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}") as caught:
        torch.ops.agmm._async_input_mm(*call.values())
    assert "\n" not in str(caught.value)


def test_ranks_with_different_shapes_are_named() -> None:
    with RankPool(3, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        started = time.monotonic()
        # Rank 1's A no longer fits into the workspace of the first call, the others' does.
        pool.submit(op_work.call_with_own_rows, [1, 3_000_000, 1])
        assert pool.join(25) == [124] * 3
        assert time.monotonic() - started < 20
        for rank in range(3):
            assert f"agmm: rank {rank}: chunk " in pool.stderr(rank)
        assert "the ranks made different calls" in pool.stderr(1)


def test_killed_rank_ends_the_others_and_leaves_no_memory() -> None:
    with RankPool(4, env={"AGMM_TIMEOUT_S": "2"}) as pool:
        pids = [process.pid for process in pool.processes]
        pool.submit(op_work.call_until_killed)
        time.sleep(1.5)
        assert pool.alive
        os.kill(pool.processes[2].pid or 0, signal.SIGKILL)
        assert pool.join(12) == [124, 124, -signal.SIGKILL, 124]
        stderr = "".join(pool.stderr(rank) for rank in (0, 1, 3))
        assert "for chunk 2 from rank 2: signal is 0, wanted " in stderr
        assert stderr.count("; ending the process (AGMM_TIMEOUT_S=2)") == 3
    left = [path.name for path in Path("/dev/shm").glob("agmm-*")]
    assert [name for name in left if any(name.startswith(f"agmm-{pid}-") for pid in pids)] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pivot", [0, 3])
def test_async_input_mm_computes_what_has_arrived(dtype: torch.dtype, pivot: int) -> None:
    chunks, rows = 4, 3
    wanted = torch.randn(chunks * rows, 65, dtype=dtype)
    a = torch.full_like(wanted, torch.nan)
    b = torch.randn(7, 65, dtype=dtype).t()
    signals = torch.zeros(chunks, dtype=torch.uint32)

    def deliver() -> None:
        for step in reversed(range(chunks)):
            chunk = (pivot + step) % chunks
            time.sleep(0.01)
            a[chunk * rows : (chunk + 1) * rows] = wanted[chunk * rows : (chunk + 1) * rows]
            signals[chunk] = 1

    sender = threading.Thread(target=deliver)
    sender.start()
    out = torch.ops.agmm._async_input_mm(a, b, signals, pivot)
    sender.join()
    torch.testing.assert_close(out, wanted @ b)


def test_async_input_mm_ends_when_a_signal_never_comes() -> None:
    with RankPool(1, env={"AGMM_TIMEOUT_S": "0.5"}) as pool:
        pool.submit(op_work.wait_for_a_signal_that_never_comes)
        assert pool.join(20) == [124]
        assert pool.stderr(0) == (
            "agmm: rank 0 waited 0.5 s for chunk 0: signal is 0, wanted 1; "
            "ending the process (AGMM_TIMEOUT_S=0.5)\n"
        )
