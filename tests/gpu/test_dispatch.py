"""Rows that are brought to the ranks of their experts, the grouped matmul that takes them as they
come, and their sums: several ranks on one GPU, in one process and in several, and one on each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import combine_stand_in
import dispatch_stand_in
import dispatch_work as work
import pytest
import torch
from at_hand import needs_two, world_sizes

from agmm import _core
from agmm.testing.ranks import RankPool

PROGRAMS = (str(dispatch_stand_in.__file__), str(combine_stand_in.__file__))
"""What makes calls of several ranks in one process."""
needs_no_fault = pytest.mark.skipif(
    _core.fault != "", reason=f"agmm is built with the fault {_core.fault!r}"
)


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


def run(program: str, *tool: str, arguments: tuple[str, ...] = ()) -> str:
    process = subprocess.run(
        [*tool, sys.executable, program, *arguments],
        env={
            **os.environ,
            "AGMM_TIMEOUT_S": "60",
            "CUDA_MODULE_LOADING": "EAGER",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    return process.stdout


@needs_no_fault
@pytest.mark.parametrize("program", PROGRAMS, ids=["dispatch", "combine"])
@pytest.mark.timeout(300)
def test_ranks_of_one_process_move_every_row(program: str) -> None:
    assert "all equal" in run(program)


@needs_no_fault
@pytest.mark.parametrize("program", PROGRAMS, ids=["dispatch", "combine"])
@pytest.mark.timeout(300)
def test_memcheck_finds_nothing(program: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    tool = (sanitizer, "--tool", "memcheck", "--error-exitcode", "9")
    assert "all equal" in run(program, *tool, arguments=("--short",))


@needs_two
@needs_no_fault
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", world_sizes(2, 3, 4))
def test_results_are_those_of_operations_one_by_one(
    gpu_pool: RankPool, world_size: int, dtype: torch.dtype
) -> None:
    check(gpu_pool.run(work.faults, world_size, 40, world_size, dtype), world_size)


@needs_two
@needs_no_fault
@pytest.mark.parametrize("scales", ["rowwise", "block"])
@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_fp8_rows_come_with_their_scales(gpu_pool: RankPool, world_size: int, scales: str) -> None:
    check(gpu_pool.run(work.scaled_faults, world_size, scales), world_size)


@needs_two
@needs_no_fault
@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_graphs_in_turn_follow_tokens_and_ids(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(work.captured, world_size, 60), world_size)


@needs_two
@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_nothing_waits_on_the_host(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(work.waits, world_size), world_size)
