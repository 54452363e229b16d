"""The stress tests can fail: they find a deliberate fault (docs/dev/sm-push.md)."""

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
import pytest
import scatter_gpu_work
import scatter_stand_in
import streamed_sum_work
import stress_work
from at_hand import GPUS, RANKS, needs_two

from agmm import _core
from agmm.runtime import kernels
from agmm.testing.ranks import RankPool

SEARCH_S = 180.0
FIRST_BATCH, LARGEST_BATCH = 10, 1000
FIRST_OF_PROGRAM = 200
"""Calls of a program's first batch, which end at the first wrong one."""
WORK = {"no_credit": stress_work.back_to_back, "no_sent": stress_work.overwritten}
"""What finds a fault, where it is not the stress of SM push at its size."""
OF_SCATTERS = ("no_parts", "read_signal", "no_credit", "no_fence", "early_sum")
"""Faults that the kernels of matmul + reduce-scatter have."""
OF_COLLECTIVES = ("no_wait", "signal_first", "one_slot", "no_fence")
"""The faults that the kernels of the collectives have."""
OF_DISPATCHES = ("no_wait", "signal_first", "one_slot")
"""The faults of a dispatch of rows that one GPU shows."""
OF_COMBINES = ("no_wait", "signal_first", "no_credit")
"""The faults of the sums of rows that one GPU shows."""
OF_GATHERS = ("no_fence", "signal_first", "no_wait", "no_sent", "no_credit")
WAIT_S = "20"
NEED_DELAYS = {
    "gathers": ("no_credit",),
    "scatters": ("no_fence", "no_credit", "early_sum"),
    "collectives": ("signal_first", "one_slot", "no_fence"),
    "dispatches": ("signal_first", "one_slot"),
    "combines": ("signal_first", "no_credit"),
}
"""Faults that hardly ever show without AGMM_STRESS_DELAYS, on one GPU or at all."""


def needs_delays(of: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        _core.fault in NEED_DELAYS[of] and not _core.stress_delays,
        reason=f"without AGMM_STRESS_DELAYS {_core.fault} hardly ever shows",
    )


needs_fault_of_scatters = pytest.mark.skipif(
    _core.fault not in OF_SCATTERS or not kernels.built("matmul_reduce_scatter"),
    reason=f"agmm is built with AGMM_FAULT={_core.fault!r}, wanted one of {', '.join(OF_SCATTERS)}",
)


def _search(
    run: Callable[[int, int], list[str]], first_batch: int = FIRST_BATCH
) -> tuple[list[str], int]:
    """The wrong elements that `run` finds, which takes the calls of a batch and those so far, and
    within how many calls; batches are larger and larger. AGMM_STRESS_CALLS is the most calls that
    it makes. A wait without end is no find but an error."""
    most_calls = int(os.environ.get("AGMM_STRESS_CALLS", "100000"))
    begin = time.monotonic()
    calls, batch = 0, first_batch
    found: list[str] = []
    while not found and calls < most_calls and time.monotonic() - begin < SEARCH_S:
        batch = min(batch, most_calls - calls)
        calls += batch
        found = run(batch, calls)
        batch = min(2 * batch, LARGEST_BATCH)
    return found, calls


def _in_ranks(
    pool: RankPool, work: Callable[..., list[str] | None], batch: int, calls: int
) -> list[str]:
    results = pool.run(work, pool.world_size, batch, calls)
    return [fault for result in results for fault in result or []]


def _on_one_gpu(batch: int, calls: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, scatter_stand_in.__file__, "stress", str(batch), str(calls)],
        env={
            **os.environ,
            "AGMM_TIMEOUT_S": WAIT_S,
            "CUDA_MODULE_LOADING": "EAGER",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=SEARCH_S,
        check=False,
    )
    if done.returncode == 0:
        return []
    is_found = done.returncode == scatter_stand_in.WRONG
    assert is_found, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    return done.stderr.strip().splitlines()[-1:]


def _check(
    capsys: pytest.CaptureFixture[str], search: Callable[[], tuple[list[str], int]], where: str
) -> None:
    found, calls = search()
    build = f"{_core.fault}{' with delays' if _core.stress_delays else ''}, {where}"
    with capsys.disabled():
        print(f"\n{build}: {'found within' if found else 'not found in'} {calls} calls", *found)
    assert found != []


@needs_two
@pytest.mark.skipif(
    _core.fault not in OF_GATHERS,
    reason=f"agmm is built with AGMM_FAULT={_core.fault!r}, wanted one of {', '.join(OF_GATHERS)}",
)
@pytest.mark.skipif(
    _core.fault == "no_sent" and RANKS > GPUS,
    reason="copies inside a GPU end before the matmul does; no_sent needs a GPU per rank",
)
@needs_delays("gathers")
@pytest.mark.timeout(SEARCH_S + 200)
def test_stress_finds_the_fault(capsys: pytest.CaptureFixture[str]) -> None:
    work = WORK.get(_core.fault, stress_work.sm_push_at_its_size)
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": WAIT_S}) as pool:
        _check(capsys, lambda: _search(lambda *n: _in_ranks(pool, work, *n)), "gathers")


@needs_fault_of_scatters
@pytest.mark.skipif(
    _core.fault == "early_sum" and not scatter_stand_in.kernels_that_split(),
    reason="no kernel of this build splits K, wanted AGMM_KERNELS=default",
)
@needs_delays("scatters")
@pytest.mark.timeout(2 * SEARCH_S + 60)
def test_one_gpu_finds_the_fault_of_a_scatter(capsys: pytest.CaptureFixture[str]) -> None:
    _check(capsys, lambda: _search(_on_one_gpu, FIRST_OF_PROGRAM), "scatters on one GPU")


@pytest.mark.skipif(
    _core.fault not in OF_COLLECTIVES,
    reason=f"agmm is built with AGMM_FAULT={_core.fault!r}, wanted one of "
    f"{', '.join(OF_COLLECTIVES)}",
)
@needs_delays("collectives")
@pytest.mark.timeout(SEARCH_S + 60)
def test_one_gpu_finds_the_fault_of_a_collective(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGMM_TIMEOUT_S", collectives_stand_in.LIMIT_S)
    every = collectives_stand_in.METHODS
    # Packets are data and signal in one, and have none of the others.
    methods = every if _core.fault == "no_wait" else [_core.CollectiveMethod.blocks]

    def run(batch: int, calls: int) -> list[str]:
        return collectives_stand_in.wrong_in_turn(4, min(batch, 100), calls, methods)[:1]

    _check(capsys, lambda: _search(run), "collectives on one GPU")


@pytest.mark.skipif(
    _core.fault not in OF_DISPATCHES,
    reason=f"agmm is built with AGMM_FAULT={_core.fault!r}, wanted one of "
    f"{', '.join(OF_DISPATCHES)}",
)
@needs_delays("dispatches")
@pytest.mark.timeout(SEARCH_S + 60)
def test_one_gpu_finds_the_fault_of_a_dispatch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGMM_TIMEOUT_S", dispatch_stand_in.LIMIT_S)

    def run(batch: int, calls: int) -> list[str]:
        return dispatch_stand_in.wrong(4, min(batch, 60), calls)[:1]

    _check(capsys, lambda: _search(run), "dispatches on one GPU")


@pytest.mark.skipif(
    _core.fault not in OF_COMBINES,
    reason=f"agmm is built with AGMM_FAULT={_core.fault!r}, wanted one of {', '.join(OF_COMBINES)}",
)
@needs_delays("combines")
@pytest.mark.timeout(SEARCH_S + 60)
def test_one_gpu_finds_the_fault_of_a_combine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGMM_TIMEOUT_S", combine_stand_in.LIMIT_S)

    def run(batch: int, calls: int) -> list[str]:
        return combine_stand_in.wrong(4, min(batch, 60), calls)[:1]

    _check(capsys, lambda: _search(run), "combines on one GPU")


@pytest.mark.skipif(
    _core.fault != "no_wait" or not streamed_sum_work.KERNELS,
    reason="found no streaming kernel whose sums await no packets",
)
@pytest.mark.timeout(SEARCH_S + 60)
def test_one_gpu_finds_a_streamed_sum_that_does_not_wait(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGMM_TIMEOUT_S", collectives_stand_in.LIMIT_S)

    def run(batch: int, calls: int) -> list[str]:
        return streamed_sum_work.wrong_by_late_ranks(4, min(batch, 100), calls)

    _check(capsys, lambda: _search(run), "streamed sums on one GPU")


@needs_two
@needs_fault_of_scatters
@needs_delays("scatters")
@pytest.mark.skipif(_core.fault == "early_sum", reason="no two ranks share a sum of parts of K")
@pytest.mark.timeout(SEARCH_S + 200)
def test_ranks_find_the_fault_of_a_scatter(capsys: pytest.CaptureFixture[str]) -> None:
    work = scatter_gpu_work.stress
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": WAIT_S}) as pool:
        _check(capsys, lambda: _search(lambda *n: _in_ranks(pool, work, *n)), "scatters")


@pytest.mark.skipif(
    _core.fault != "no_wait" or not grouped_work.PLAIN,
    reason="found no kernel of grouped matmuls whose loads await no rows",
)
def test_rows_that_come_late_find_a_grouped_matmul_that_does_not_wait() -> None:
    assert any(grouped_work.faults_of_late_rows(kernel) for kernel in grouped_work.PLAIN)
