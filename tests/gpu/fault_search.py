"""Searches for a deliberate fault on one GPU, each in a process of its own, since what a fault
leads to may be an access that ends the process's use of the GPU.

    python fault_search.py combines
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import collectives_stand_in
import combine_stand_in
import dispatch_stand_in
import grouped_work
import streamed_sum_work
import torch

from agmm import _core

SEARCH_S = 180.0
WRONG = 3
"""The program's exit code where a search finds something wrong."""
FIRST_BATCH, LARGEST_BATCH = 10, 1000
LARGEST_BATCH_OF_STAND_INS = 60
"""Calls of one batch, whose operands are all in memory together."""
LIMIT_S = "10"
"""The limit of every wait, in AGMM_TIMEOUT_S."""
ENDED_BY_GPU = ("illegal memory access", "misaligned address", "unspecified launch failure")
"""What CUDA says of an access that is outside of all memory; a build without the fault makes the
same calls without one. A wait that ends by its limit is none of these."""

Run = Callable[[int, int], list[str]]
"""Takes the calls of a batch and those so far, and returns what was wrong."""


def search(
    run: Run, first_batch: int = FIRST_BATCH, largest_batch: int = LARGEST_BATCH
) -> tuple[list[str], int]:
    """What `run` finds, and within how many calls; batches are larger and larger.
    AGMM_STRESS_CALLS is the most calls that it makes. A wait without end is no find but an
    error."""
    most_calls = int(os.environ.get("AGMM_STRESS_CALLS", "100000"))
    begin = time.monotonic()
    calls, batch = 0, first_batch
    found: list[str] = []
    while not found and calls < most_calls and time.monotonic() - begin < SEARCH_S:
        batch = min(batch, most_calls - calls)
        calls += batch
        found = run(batch, calls)
        batch = min(2 * batch, largest_batch)
    return found, calls


def _collectives(batch: int, calls: int) -> list[str]:
    every = collectives_stand_in.METHODS
    # Packets are data and signal in one, and have none of the other faults.
    methods = every if _core.fault == "no_wait" else [_core.CollectiveMethod.blocks]
    return collectives_stand_in.wrong_in_turn(4, batch, calls, methods)[:1]


def _dispatches(batch: int, calls: int) -> list[str]:
    return dispatch_stand_in.wrong(4, batch, calls)[:1]


def _combines(batch: int, calls: int) -> list[str]:
    return combine_stand_in.wrong(4, batch, calls)[:1]


def _streamed_sums(batch: int, calls: int) -> list[str]:
    return streamed_sum_work.wrong_by_late_ranks(4, batch, calls)


def _grouped_matmuls(batch: int, calls: int) -> list[str]:
    kernel = grouped_work.PLAIN[calls % len(grouped_work.PLAIN)]
    return grouped_work.faults_of_late_rows(kernel)[:1]


SEARCHES: dict[str, Run] = {
    "collectives": _collectives,
    "dispatches": _dispatches,
    "combines": _combines,
    "streamed sums": _streamed_sums,
    "grouped matmuls": _grouped_matmuls,
}


def run_program(*arguments: str, limit_s: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """A Python program that has run with this process's modules, all of its kernels loaded before
    any runs, and ``limit_s`` for each of its waits."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "AGMM_TIMEOUT_S": limit_s,
            "CUDA_MODULE_LOADING": "EAGER",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def in_a_process(name: str) -> str:
    """What the search of this name found, and within how many calls; raises AssertionError where
    it found nothing, or ended otherwise."""
    done = run_program(__file__, name, limit_s=LIMIT_S, seconds=SEARCH_S + 60)
    assert done.returncode == WRONG, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout.strip()


def main(name: str) -> None:
    """Prints what the search finds; its exit code is WRONG if there is something."""
    made = 0

    def run(batch: int, calls: int) -> list[str]:
        nonlocal made
        made = calls
        return SEARCHES[name](batch, calls)

    try:
        found, _ = search(run, largest_batch=LARGEST_BATCH_OF_STAND_INS)
    except RuntimeError as error:
        if not any(text in str(error) for text in ENDED_BY_GPU):
            raise
        found = [str(error).splitlines()[0]]
    verdict = "found within" if found else "not found in"
    print(f"{verdict} {made} calls", *found, flush=True)
    if found:
        # The GPU may be of no more use to this process: its end must not wait for it.
        os._exit(WRONG)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
