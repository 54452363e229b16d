"""`agmm.collectives` on CPU ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import collectives_work
import pytest
import quick
import torch

from agmm.runtime.cpu_collectives import BAND_BYTES
from agmm.testing.ranks import RankError, RankPool

CALLS = int(os.environ.get("AGMM_STRESS_CALLS", "5000"))
SHAPES = [(), (0,), (1,), (7,), (2, 3), (3, 1, 5), (2, 0, 4), (1001,)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = collectives_work.KINDS
FAULTS: list[str] = []


def check(results: list[Any], world_size: int, wanted: Any) -> None:
    assert results == [None] * (len(results) - world_size) + [wanted] * world_size


@pytest.mark.parametrize("world_size", quick.first(3, [1, 2, 3, 4, 5]))
@pytest.mark.parametrize("kind", KINDS)
def test_values(pool: RankPool, world_size: int, kind: str) -> None:
    for dtype in DTYPES:
        found = pool.run(collectives_work.values, world_size, kind, SHAPES, dtype)
        check(found, world_size, FAULTS)


def test_float64_is_summed_in_float64(pool: RankPool) -> None:
    found = pool.run(collectives_work.values, 3, "all_reduce", SHAPES, torch.float64)
    check(found, 3, FAULTS)


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.slow) for n in (6, 7, 8)])
def test_many_ranks(rank_pools: Callable[..., RankPool], world_size: int) -> None:
    pool = rank_pools(8)
    for kind in KINDS:
        found = pool.run(collectives_work.values, world_size, kind, SHAPES, torch.bfloat16)
        check(found, world_size, FAULTS)
    check(pool.run(collectives_work.repeated, world_size, 300, 300), world_size, FAULTS)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_through_bounded_memory(pool: RankPool, world_size: int, kind: str) -> None:
    for nbytes in (2, 64 << 10, (64 << 10) + 2, 4_999_990):
        for good, slots in pool.run(
            collectives_work.of_bytes, world_size, kind, nbytes, torch.bfloat16, "avg"
        )[5 - world_size :]:
            assert good
            assert slots <= BAND_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_64_mb(pool: RankPool, kind: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        found = pool.run(collectives_work.of_bytes, 4, kind, 64_000_000, dtype, "sum")
        check(found, 4, (True, BAND_BYTES))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_both_ways_of_an_all_reduce_have_the_same_bits(pool: RankPool, world_size: int) -> None:
    check(pool.run(collectives_work.both_ways, world_size, 1003), world_size, [True] * 4)


@pytest.mark.parametrize("world_size", quick.first(2, [2, 3, 5]))
def test_many_bands_of_a_few_numbers(pool: RankPool, world_size: int) -> None:
    check(pool.run(collectives_work.small_bands, world_size, 24), world_size, FAULTS)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_right_with_each_rank_late_in_turn(pool: RankPool, world_size: int) -> None:
    check(pool.run(collectives_work.repeated, world_size, 400, 3000), world_size, FAULTS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_calls(pool: RankPool) -> None:
    """AGMM_STRESS_CALLS says how many; in batches that a pool's time allows."""
    for done in range(0, CALLS, 500):
        calls = min(500, CALLS - done)
        check(pool.run(collectives_work.repeated, 4, calls, 100, done), 4, FAULTS)


OF_SLOTS = ["signal before data", "no credit", "own rows before the others' sums"]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        # Kinds share what the faults are in: of each kind one fault, and the others where there is
        # time.
        *quick.first(1, product(["none"], KINDS)),
        *quick.first(1, zip(OF_SLOTS, KINDS, strict=True)),
        *(
            pytest.param(fault, kind, marks=pytest.mark.slow)
            for fault, kind in product(OF_SLOTS, KINDS)
            if OF_SLOTS.index(fault) != KINDS.index(kind)
        ),
    ],
)
def test_deliberate_faults_are_found(fault: str, kind: str) -> None:
    """By wrong results, or by ranks that end since they miss a signal."""
    with RankPool(4) as pool:
        try:
            wrong = pool.run(collectives_work.with_fault, fault, kind, 300)
        except RankError:  # whose exit codes may not have come yet
            wrong = [1]
    assert any(wrong) == (fault != "none")


# --- in the background ---


def test_work_in_the_background_goes_on_without_a_wait(pool: RankPool) -> None:
    assert pool.run(collectives_work.progress_without_waiting) == [[True, True]] * 5


def test_calls_keep_their_order(pool: RankPool) -> None:
    assert pool.run(collectives_work.order_of_calls) == [[5.0**6] * 4] * 5


def test_memory_is_given_back_behind_calls_in_the_background(pool: RankPool) -> None:
    for faults in pool.run(collectives_work.release_and_end):
        assert len(faults) == 2
        assert all(fault.startswith("group: found ") for fault in faults)


def test_threads_of_a_rank_take_turns(pool: RankPool) -> None:
    assert pool.run(collectives_work.threads, 3, 20) == [FAULTS] * 5


@pytest.mark.slow
def test_process_ends_while_work_waits() -> None:
    started = time.monotonic()
    code, out = collectives_work.ends_with_work_under_way()
    assert (code, out.splitlines()[-1:]) == (0, ["at its end"])
    assert time.monotonic() - started < 25


# --- gradients, compilation ---


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(pool: RankPool, world_size: int, kind: str, op: str) -> None:
    for dim in (0, 1):
        found = pool.run(collectives_work.gradients, world_size, kind, op, dim)
        check(found, world_size, True)


@pytest.mark.parametrize("world_size", [1, 3])
def test_second_gradients(pool: RankPool, world_size: int) -> None:
    w = float(world_size)
    found = pool.run(collectives_work.second_gradients, world_size)
    check(found, world_size, [2 * w, 2 * w, 2 * w**2])


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_compiled(pool: RankPool, world_size: int) -> None:
    check(pool.run(collectives_work.compiled, world_size), world_size, [True] * 12)


# --- torch's collective ---


def test_what_agmm_does_not_sum_torch_does(pool: RankPool) -> None:
    for found in pool.run(collectives_work.by_torch, 3)[2:]:
        assert found["good"]
        reason = "x: dtype=torch.int{}, agmm sums floating-point types of 2 to 8 bytes"
        assert found["caught"] == [
            *(
                f"agmm leaves {kind} to torch: {reason.format(bits)}"
                for kind in ("reduce_scatter", "all_reduce")
                for bits in (32, 64)
            ),
            f"{reason.format(32)}; strict=True refuses torch's collective",
        ]


def test_other_types_are_gathered(pool: RankPool) -> None:
    check(pool.run(collectives_work.types_that_are_moved, 3), 3, FAULTS)


@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_collective_has_the_same_forms(pool: RankPool, world_size: int) -> None:
    check(pool.run(collectives_work.torchs_with_all, world_size), world_size, FAULTS)


def test_no_room_for_larger_slots_leaves_a_call_to_torch() -> None:
    with RankPool(2) as pool:
        for found in pool.run(collectives_work.with_little_room):
            assert found["good"]
            (warning,) = found["caught"]
            assert warning.startswith(
                "agmm leaves all_reduce to torch: workspace: no room for gather buffers of "
            )


# --- lock step ---


@pytest.mark.parametrize(
    ("kind", "words"),
    quick.first(
        5,
        [
            ("size", ["all_gather(x [4] float32", "all_gather(x [5] float32"]),
            ("shape", ["all_reduce(x [2, 3]", "all_reduce(x [3, 3]"]),
            ("dtype", ["x [4, 2] float32", "x [4, 2] bfloat16"]),
            ("op", ["op = 'sum'", "op = 'avg'"]),
            ("dim", ["dim = 0", "dim = 1"]),
            ("kind", ["all_reduce(x [4, 2]", "reduce_scatter(x [4, 2]"]),
            ("other op", ["all_gather(x [4, 2]", "all_gather_matmul(A_shard [4, 2]"]),
            ("background", ["all_gather(x [4] float32", "all_gather(x [5] float32"]),
            ("torch", ["all_reduce(x [4] int32", "all_reduce(x [5] int32"]),
        ],
    ),
)
def test_calls_that_differ_are_both_named(kind: str, words: list[str]) -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        pool.submit(collectives_work.differ, kind)
        assert pool.join(25) == [124, 124]
        for rank in (0, 1):
            (line,) = [x for x in pool.stderr(rank).splitlines() if x.startswith("agmm: rank")]
            own, theirs = line.split("; this rank: ")[1].split(f"; rank {1 - rank}: ")
            assert own.startswith("call 4 of the group, ")
            assert theirs.startswith("call 4 of the group, ")
            assert words[rank] in own
            assert words[1 - rank] in theirs


@pytest.mark.parametrize("kind", quick.first(1, ["plain", "background", "torch"]))
def test_missing_rank_ends_the_wait(kind: str) -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "2", "AGMM_WARN_S": "0.5"}) as pool:
        pool.submit(collectives_work.one_is_late, kind, 60.0)
        started = time.monotonic()
        pool.processes[0].join(20)
        assert time.monotonic() - started < 15
        assert pool.processes[0].exitcode == 124
        lines = [x for x in pool.stderr(0).splitlines() if x.startswith("agmm: rank")]
        assert re.match(r"agmm: rank 0 has waited \d\.\d s, since .* from rank 1: ", lines[0])
        assert re.match(r"agmm: rank 0 waited 2\.\d s for chunk 1 from rank 1: ", lines[1])
        pool.kill()


@pytest.mark.parametrize("kind", quick.first(1, ["background", "plain", "torch"]))
def test_late_rank_is_waited_for_within_the_limit(kind: str) -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "30", "AGMM_WARN_S": "0.5"}) as pool:
        assert pool.run(collectives_work.one_is_late, kind, 1.5) == [[2] * 4] * 2
        lines = [x for x in pool.stderr(0).splitlines() if x.startswith("agmm: rank")]
        assert len(lines) == 1
        assert re.search(r" has waited [01]\.\d s, since ", lines[0])
