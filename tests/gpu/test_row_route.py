"""The order of experts' rows by one launch, bit for bit that of torch's ops."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import row_route_work as work
import torch
from gpu_work import never_waits
from row_route_work import CASES, LARGEST, Case

from agmm.runtime import capabilities

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or capabilities.why_not(capabilities.ROUTING, torch.device("cuda", 0)) is not None,
    reason="found no kernel of routing for this GPU",
)

of_dtypes = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_clusters = pytest.mark.skipif(not is_hopper, reason="found no Hopper")


def taken(found: Any) -> work.Found:
    assert found is not None, "the kernel took no such ids"
    return tuple(found)


def is_taken(case: Case) -> bool:
    """Whether the kernel of this GPU takes so many."""
    return is_hopper or max(case.tokens * case.k, case.capacity) <= 1 << 15


@of_dtypes
def test_every_bit_is_that_of_ops_one_by_one(dtype: torch.dtype) -> None:
    faults = []
    for number, each in enumerate(CASES):
        case = each._replace(dtype=dtype)
        if not is_taken(case):
            continue
        ids = work.ids_of(case, number)
        for rank in {0, case.ranks - 1}:
            wanted = work.by_ops(case, ids, rank)
            for _ in range(2):
                work.garbage(case)
                faults += work.differences(case, taken(work.by_kernel(case, ids, rank)), wanted)
    assert faults == []


@of_dtypes
def test_a_graph_follows_the_ids(dtype: torch.dtype) -> None:
    faults = []
    for case in (Case(200, 8, 64, 2, "zipf", 0.2), Case(2000, 8, 128, 4, "even", 0.1)):
        case = case._replace(dtype=dtype)
        ids = work.ids_of(case)
        taken(work.by_kernel(case, ids, 1))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = taken(work.by_kernel(case, ids, 1))
        for seed in range(1, 9):
            ids.copy_(work.ids_of(case, seed))
            for one in found:
                one.fill_(-77)
            graph.replay()
            faults += work.differences(case, found, work.by_ops(case, ids, 1))
    assert faults == []


@needs_clusters
def test_calls_in_a_row_have_the_same_bits() -> None:
    """Nothing that CTAs of a cluster leave behind gets into the next call, and none waits."""
    case = Case(4000, 8, 128, 4, "zipf", 0.1)
    ids = work.ids_of(case)
    wanted = work.by_ops(case, ids, 2)
    with never_waits():
        every = [taken(work.by_kernel(case, ids, 2)) for _ in range(200)]
    assert [fault for found in every for fault in work.differences(case, found, wanted)] == []


def test_ops_stay_for_more_choices_and_other_ids() -> None:
    for case in (LARGEST, Case(8, 2, 1026, 2), Case(8, 2, 8, dtype=torch.int16)):
        assert work.by_kernel(case, work.ids_of(case), 0) is None
    case = Case(8, 2, 8, room=1 << 18)
    assert work.by_kernel(case, work.ids_of(case), 0) is None


def run(what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(work.__file__), what],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("what", "said"),
    [("rows", "capacity: found more rows than that"), ("id", "topk_ids: found an id too large")],
    ids=["rows", "id"],
)
def test_a_graph_ends_in_the_assertion_of_ops(what: str, said: str) -> None:
    ended = run(what)
    assert ended.stdout.splitlines()[:1] == [work.FITS], ended.stderr[-2000:]
    assert ended.returncode != 0 and said in ended.stdout + ended.stderr, ended.stderr[-2000:]
    assert "device-side assert triggered" in ended.stderr, ended.stderr[-2000:]


def test_the_op_takes_the_kernel() -> None:
    ended = run("op")
    assert ended.returncode == 0 and ended.stdout == "one launch\n", ended.stderr[-2000:]
