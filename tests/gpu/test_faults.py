"""The stress tests can fail: they find a deliberate fault (docs/dev/sm-push.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import fault_search
import grouped_work
import pytest
import scatter_gpu_work
import scatter_stand_in
import streamed_sum_work
import stress_work
from at_hand import GPUS, RANKS, needs_two
from fault_search import SEARCH_S, run_program, search

from agmm import _core
from agmm.runtime import kernels
from agmm.testing.ranks import RankPool

FIRST_OF_PROGRAM = 200
"""Calls of a program's first batch, which end at the first wrong one."""
WORK = {"no_credit": stress_work.back_to_back, "no_sent": stress_work.overwritten}
"""What finds a fault, where it is not the stress of SM push at its size."""
OF_SCATTERS = ("no_parts", "read_signal", "no_credit", "no_fence", "early_sum")
"""Faults that the kernels of matmul + reduce-scatter have."""
OF = {
    "collectives": ("no_wait", "signal_first", "one_slot", "no_fence"),
    "dispatches": ("no_wait", "signal_first", "one_slot"),
    "combines": ("no_wait", "signal_first", "no_credit"),
    "streamed sums": ("no_wait",),
    "grouped matmuls": ("no_wait",),
}
"""The faults that each search on one GPU finds."""
NEEDED: dict[tuple[str, str], Sequence[object]] = {
    ("streamed sums", "no_wait"): streamed_sum_work.KERNELS,
    ("grouped matmuls", "no_wait"): grouped_work.PLAIN,
    ("combines", "signal_first"): grouped_work.PLAIN,
}
"""The kernels without which there is nothing to find. Rows that are there before the call are
copied before either place of the signal."""
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


def _hardly_shows() -> str:
    return f"without AGMM_STRESS_DELAYS {_core.fault} hardly ever shows"


def _build() -> str:
    return f"{_core.fault}{' with delays' if _core.stress_delays else ''}"


def needs_delays(of: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        _core.fault in NEED_DELAYS[of] and not _core.stress_delays, reason=_hardly_shows()
    )


needs_fault_of_scatters = pytest.mark.skipif(
    _core.fault not in OF_SCATTERS or not kernels.built("matmul_reduce_scatter"),
    reason=f"agmm is built with AGMM_FAULT={_core.fault!r}, wanted one of {', '.join(OF_SCATTERS)}",
)


def _in_ranks(
    pool: RankPool, work: Callable[..., list[str] | None], batch: int, calls: int
) -> list[str]:
    results = pool.run(work, pool.world_size, batch, calls)
    return [fault for result in results for fault in result or []]


def _on_one_gpu(batch: int, calls: int) -> list[str]:
    stress = scatter_stand_in.__file__, "stress", str(batch), str(calls)
    done = run_program(*stress, limit_s=WAIT_S, seconds=SEARCH_S)
    if done.returncode == 0:
        return []
    is_found = done.returncode == scatter_stand_in.WRONG
    assert is_found, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    return done.stderr.strip().splitlines()[-1:]


def _check(
    capsys: pytest.CaptureFixture[str], find: Callable[[], tuple[list[str], int]], where: str
) -> None:
    found, calls = find()
    with capsys.disabled():
        print(
            f"\n{_build()}, {where}: {'found within' if found else 'not found in'} {calls} calls",
            *found,
        )
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
        _check(capsys, lambda: search(lambda *n: _in_ranks(pool, work, *n)), "gathers")


@needs_fault_of_scatters
@pytest.mark.skipif(
    _core.fault == "early_sum" and not scatter_stand_in.kernels_that_split(),
    reason="no kernel of this build splits K, wanted AGMM_KERNELS=default",
)
@needs_delays("scatters")
@pytest.mark.timeout(2 * SEARCH_S + 60)
def test_one_gpu_finds_the_fault_of_a_scatter(capsys: pytest.CaptureFixture[str]) -> None:
    _check(capsys, lambda: search(_on_one_gpu, FIRST_OF_PROGRAM), "scatters on one GPU")


@pytest.mark.parametrize("name", fault_search.SEARCHES)
@pytest.mark.timeout(SEARCH_S + 90)
def test_one_gpu_finds_the_fault(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if _core.fault not in OF[name]:
        pytest.skip(f"agmm is built with AGMM_FAULT={_core.fault!r}, wanted one of {OF[name]}")
    if not NEEDED.get((name, _core.fault), [True]):
        pytest.skip(f"found no kernel of the {name}, wanted AGMM_KERNELS=default")
    if _core.fault in NEED_DELAYS.get(name, ()) and not _core.stress_delays:
        pytest.skip(_hardly_shows())
    found = fault_search.in_a_process(name)
    with capsys.disabled():
        print(f"\n{_build()}, {name} on one GPU: {found}")


@needs_two
@needs_fault_of_scatters
@needs_delays("scatters")
@pytest.mark.skipif(_core.fault == "early_sum", reason="no two ranks share a sum of parts of K")
@pytest.mark.timeout(SEARCH_S + 200)
def test_ranks_find_the_fault_of_a_scatter(capsys: pytest.CaptureFixture[str]) -> None:
    work = scatter_gpu_work.stress
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": WAIT_S}) as pool:
        _check(capsys, lambda: search(lambda *n: _in_ranks(pool, work, *n)), "scatters")
