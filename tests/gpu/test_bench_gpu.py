"""`agmm bench` on GPUs: a kernel that does not end, and where the times of a timeline begin."""

from __future__ import annotations

from unittest import mock

import bench_gpu_work
import pytest
import torch
from at_hand import needs_nccl, needs_two

from agmm.bench import record, runner
from agmm.bench.moe_ways import MOE_WAYS
from agmm.bench.options import Options
from agmm.bench.ways import WAYS
from agmm.planning.shapes import MoEShape, Shape
from agmm.runtime import kernels
from agmm.testing.ranks import RankPool

pytestmark = [needs_two, needs_nccl]
SHAPE = Shape(1024, 256, 512)


def test_a_kernel_that_does_not_end_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "measure_watched", bench_gpu_work.measure_watched)
    names = [bench_gpu_work.NAME, "unfused", "agmm"]
    with mock.patch.dict(WAYS):
        bench_gpu_work.add_way()
        report = runner.run(Options("cuda", 2, [SHAPE], names, samples=3, limit_s=20.0))
    found = report["shapes"][0]["ways"]
    reason = found[bench_gpu_work.NAME]["reason"]
    assert reason is not None and reason.endswith("did not come back from it within 20 s")
    assert all(found[way]["median_us"] > 0 for way in ("roof", "unfused", "agmm"))


def test_a_timeline_of_a_scatter() -> None:
    if record.timed_scatter_kernel() is None:
        pytest.skip("this build has no timed kernel")
    op = "matmul_reduce_scatter"
    options = Options("cuda", 2, [SHAPE], ["agmm"], dtype=torch.bfloat16, op=op).resolved()
    with RankPool(2, "cuda") as pool:
        for rank, events in enumerate(pool.run(record.record_timeline, SHAPE, options)):
            (called_ns,) = {e["called_ns"] for e in events}
            first_ns = min(e["start_ns"] for e in events)
            assert 0 <= first_ns - called_ns < 1_000_000
            own = [e for e in events if e["chunk"] == rank]
            assert 2 * len(own) == len(events)
            assert all(e["computed_ns"] <= e["wait_end_ns"] for e in own)
            assert all(e["wait_end_ns"] <= e["arrived_ns"] for e in own)


@pytest.mark.parametrize("way", ["agmm", "agmm-graph", "agmm-fused", "unfused", "torch-fused"])
def test_ways_of_a_scatter(way: str) -> None:
    options = Options("cuda", 2, [SHAPE], [way], samples=3, op="matmul_reduce_scatter")
    found = runner.run(options)["shapes"][0]["ways"]
    assert (found[way]["reason"], found["roof"]["reason"]) == (None, None)
    assert found[way]["median_us"] > 0


@pytest.mark.parametrize("routing", ["even", "zipf"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ways_of_a_mixture_of_experts(dtype: torch.dtype, routing: str) -> None:
    shape = MoEShape(512, 256, 128, 8, 4, routing)
    options = Options("cuda", 2, [shape], samples=3, dtype=dtype, op="moe")
    found = runner.run(options)["shapes"][0]["ways"]
    assert {name: way["reason"] for name, way in found.items()} == dict.fromkeys(MOE_WAYS)


def test_a_timeline_begins_with_the_call() -> None:
    if not kernels.built("all_gather_matmul", timed=True):
        pytest.skip("this build has no timed kernel")
    options = Options("cuda", 2, [SHAPE], ["agmm"], dtype=torch.bfloat16).resolved()
    with RankPool(2, "cuda") as pool:
        for events in pool.run(record.record_timeline, SHAPE, options):
            (called_ns,) = {e["called_ns"] for e in events}
            first_ns = min(e["wait_begin_ns"] for e in events)
            assert 0 <= first_ns - called_ns < 1_000_000
