"""That the stress test can fail: it finds a deliberate fault (docs/dev/sm-push.md)."""

from __future__ import annotations

import os
import time

import gpu_work
import pytest
from at_hand import RANKS, needs_two

from agmm import _core
from agmm.testing.ranks import RankError, RankPool

SEARCH_S = 180.0
FIRST_BATCH, LARGEST_BATCH = 10, 1000
WORK = {"no_credit": gpu_work.back_to_back, "no_sent": gpu_work.overwritten}
"""What finds a fault, where it is not the stress of SM push at its size."""


def _search(pool: RankPool, most_calls: int) -> tuple[list[str], int]:
    """What the stress finds, and within how many calls; they come in batches, larger and larger."""
    ends = _core.fault == "no_credit"  # a signal of the next call is counted in this one, or lost
    work = WORK.get(_core.fault, gpu_work.sm_push_at_its_size)
    begin = time.monotonic()
    calls, batch = 0, FIRST_BATCH
    found: list[str] = []
    while not found and calls < most_calls and time.monotonic() - begin < SEARCH_S:
        batch = min(batch, most_calls - calls)
        calls += batch
        try:
            results = pool.run(work, pool.world_size, batch, calls)
            found = [fault for result in results for fault in result or []]
        except RankError as error:
            if not ends or 124 not in error.exit_codes.values():
                raise
            found = [str(error)]
        batch = min(2 * batch, LARGEST_BATCH)
    return found, calls


@needs_two
@pytest.mark.skipif(_core.fault == "", reason="agmm is built without AGMM_FAULT")
@pytest.mark.skipif(
    _core.fault == "no_credit" and not _core.stress_delays,
    reason="without AGMM_STRESS_DELAYS ranks are hardly ever so far apart that no_credit shows",
)
@pytest.mark.timeout(SEARCH_S + 200)
def test_stress_finds_the_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """AGMM_STRESS_CALLS is the most calls that it makes."""
    most_calls = int(os.environ.get("AGMM_STRESS_CALLS", "100000"))
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": "5"}) as pool:
        found, calls = _search(pool, most_calls)
    build = f"{_core.fault}{' with delays' if _core.stress_delays else ''}"
    with capsys.disabled():
        print(f"\n{build}: {'found within' if found else 'not found in'} {calls} calls", *found)
    assert found != []
