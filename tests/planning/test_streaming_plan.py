"""Plans of few rows: splits of K that depend on B alone, the kernels that serve, and their cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from agmm import _core
from agmm.ops import one_launch
from agmm.planning import cost_model, heuristics, kernel_table, legality
from agmm.planning.cost_model import At, Tiling
from agmm.planning.planner import Planner
from agmm.planning.plans import Plan
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig, Problem
from agmm.planning.transports import PULL, PUSH, SmPush

KERNELS = tuple(
    KernelConfig.parse(row.kernel)
    for row in kernel_table.rows_of("all", ALL_GATHER_MATMUL, is_fp8=False, epilogue="plain")
)
STREAMING = [kernel for kernel in KERNELS if kernel.is_streaming]
WEIGHTS = [
    (8, 8),
    (576, 7168),
    (1536, 4096),
    (2560, 8192),
    (4096, 4096),
    (8192, 2048),
    (57344, 8192),
]
SMS = 132


FP8 = tuple(f"float8_e4m3fn_float8_e4m3fn {one}" for one in ("fast", "slow", "block"))


def choose(problem: Problem) -> tuple[KernelConfig, float]:
    choice = Planner(lambda op, name: KERNELS).choose(problem, fused=True)
    assert choice.plan.kernel is not None and choice.predicted_us is not None
    return choice.plan.kernel, choice.predicted_us


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_splits_are_those_of_b(n: int, k: int) -> None:
    splits = _core.streaming_splits(n, k)
    assert 1 <= splits <= min(_core.MAX_STREAMING_CLUSTER, -(-k // 128))
    for kernel in STREAMING:
        fits = splits * kernel.cluster_n <= _core.MAX_STREAMING_CLUSTER
        for m in (1, 64, 4096):
            for sm_count in (0, 100):
                problem = Problem(m, n, k, sm_count=sm_count)
                legal = legality.legal_splits(problem, kernel)
                assert list(legal) == ([splits] if fits else [])
                plans = heuristics.usual_plans(problem, kernel)
                assert [plan.kernel.splits for plan in plans if plan.kernel] == list(legal)


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_a_batch_invariant_kernel_has_one_order_of_sums(n: int, k: int) -> None:
    default = tuple(
        KernelConfig.parse(row.kernel)
        for row in kernel_table.rows_of(
            "default", ALL_GATHER_MATMUL, is_fp8=False, epilogue="plain"
        )
    )
    tiles = {}
    for kernels in (default, KERNELS):
        for m in (1, 8, 9, 32, 33, 64, 65, 100_000):
            kernel = heuristics.batch_invariant_kernel(Problem(m, n, k, world_size=1), kernels)
            assert kernel is not None and kernel.is_streaming
            assert kernel.splits == _core.streaming_splits(n, k)
            if kernels is default:
                tiles[m] = kernel.tile_m
    assert tiles == {1: 32, 8: 32, 9: 32, 32: 32, 33: 64, 64: 64, 65: 64, 100_000: 64}
    others = [kernel for kernel in KERNELS if not kernel.is_streaming]
    assert heuristics.batch_invariant_kernel(Problem(8, n, k), others) is None


@pytest.mark.parametrize(("n", "k"), WEIGHTS[1:])
def test_reading_is_shared(n: int, k: int) -> None:
    """No multiprocessor that computes has much more to read than another, and there are many."""
    splits = _core.streaming_splits(n, k)
    tiles = -(-n // 64)
    at_once = _core.clusters_at_once(SMS, splits)
    rounds = -(-tiles // at_once)
    clusters = -(-tiles // rounds)
    assert clusters <= at_once
    assert rounds * clusters - tiles < clusters  # no cluster is without a tile
    assert clusters * splits >= 60


def test_other_splits_are_illegal() -> None:
    problem, kernel = Problem(8, 4096, 4096), STREAMING[0]
    own = replace(kernel, splits=_core.streaming_splits(4096, 4096))
    assert own.splits == 2
    assert legality.why_illegal(problem, Plan(PUSH, own), KERNELS) is None
    reason = legality.why_illegal(problem, Plan(PUSH, kernel), KERNELS)
    assert reason == "plan: found 1 splits of K for 8x64x128_1x1_streaming, wanted 2 to 2"
    narrow = Problem(8, 576, 7168)
    shares = next(one for one in STREAMING if one.cluster_n == 2)
    reason = legality.why_illegal(narrow, Plan(PUSH, shares), KERNELS)
    assert reason == f"plan: found 1 splits of K for {shares.kernel}, wanted another kernel"


def test_transports() -> None:
    """None has warps that push, or stores A."""
    problem = Problem(64, 4096, 4096, world_size=4)
    kernel = replace(STREAMING[0], splits=2)
    assert not kernel.can_push and KERNELS[0].can_push
    reason = legality.why_illegal(problem, Plan(SmPush(1, 64), kernel), KERNELS)
    assert reason == (f"plan: sm push: found {kernel.kernel}, wanted a kernel with spare warps")
    returns = replace(problem, return_A=True)
    assert legality.why_illegal(returns, Plan(PUSH, kernel), KERNELS) is not None
    assert legality.why_illegal(returns, Plan(PULL, kernel), KERNELS) is None


@pytest.mark.parametrize("gpu", cost_model.known_gpus())
@pytest.mark.parametrize(("n", "k"), [(8192, 8192), (28672, 4096), (1536, 4096)])
def test_few_rows_stream(gpu: str, n: int, k: int) -> None:
    for m in (1, 8):
        kernel, us = choose(Problem(m, n, k, gpu=gpu))
        assert kernel.is_streaming and kernel.tile_m >= m
        c = cost_model.constants(gpu)
        read_us = 2e-3 * n * k / c.streaming_gb_per_s
        assert read_us + c.launch_us < us < 1.05 * read_us + c.launch_us + 4


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("gpu", cost_model.known_gpus())
def test_few_rows_of_fp8_stream(gpu: str, name: str) -> None:
    """Reading takes half the time, and splits are those of a weight of half the bytes."""
    kernels = cost_model.default_kernels(name=name)
    assert sum(kernel.is_streaming for kernel in kernels) == 2
    planner = Planner(lambda op, format_name: cost_model.default_kernels(name=format_name))
    c = cost_model.constants(gpu)
    for m, n, k in ((1, 8192, 8192), (8, 28672, 4096), (32, 8192, 7168)):
        choice = planner.choose(Problem(m, n, k, gpu=gpu, format=name), fused=True)
        kernel, us = choice.plan.kernel, choice.predicted_us
        assert kernel is not None and us is not None
        assert kernel.is_streaming and kernel.tile_m >= m
        assert kernel.splits == _core.streaming_splits(n, k, 8)
        read_us = 1e-3 * n * k / c.streaming_gb_per_s
        assert read_us + c.launch_us < us < 1.05 * read_us + c.launch_us + 4
    choice = planner.choose(Problem(4096, 8192, 8192, gpu=gpu, format=name), fused=True)
    assert choice.plan.kernel is not None and not choice.plan.kernel.is_streaming


def test_splits_grow_no_faster_than_bytes() -> None:
    """Adding up costs the same whatever the elements are."""
    for n, k in WEIGHTS:
        splits = [_core.streaming_splits(n, k, bits) for bits in (4, 8, 16)]
        assert splits == sorted(splits)
        assert splits[2] == _core.streaming_splits(n, k)


def test_several_weights_are_one_launch() -> None:
    """They are with few rows, and of one kind, with the splits of all columns together."""
    planner = Planner(lambda op, name: KERNELS)
    few, many = ([Problem(m, n, 4096) for n in (4096, 1024, 1024)] for m in (8, 4096))
    plan = one_launch.plan_of(few, planner)
    assert plan is not None and plan.kernel is not None
    assert plan.kernel.splits == _core.streaming_splits(6144, 4096)
    assert plan == planner.fused_plan(Problem(8, 6144, 4096))
    assert one_launch.plan_of(many, planner) is None
    assert one_launch.plan_of(few[:1], planner) is None
    layouts = [few[0], replace(few[1], b_layout="row")]
    assert one_launch.plan_of(layouts, planner) is None
    assert one_launch.plan_of([few[0]] * (_core.MAX_STREAMED_WEIGHTS + 1), planner) is None
    behind = [replace(problem, epilogue="activation") for problem in few]
    assert one_launch.plan_of(behind, planner) is None


def test_many_rows_do_not() -> None:
    for m in (512, 4096):
        kernel, _ = choose(Problem(m, 8192, 8192))
        assert not kernel.is_streaming


def test_times_grow_and_chunks_are_awaited() -> None:
    for kernel in STREAMING:
        problems = [Problem(m, 8192, 4096) for m in (1, 8, 16, 64, 128, 1024)]
        times = [cost_model.fused_us(one, replace(kernel, splits=1)) for one in problems]
        assert all(before <= after for before, after in pairwise(times))
        gathered = Problem(64, 8192, 4096, world_size=4)
        at, tiling = At(gathered), Tiling(gathered, replace(kernel, splits=1))
        us = at.fused_us(tiling, at.load(tiling), is_pull=False)
        assert us > cost_model.arrival_us(gathered, 3)
        assert us > cost_model.fused_us(replace(gathered, world_size=1), replace(kernel, splits=1))


def test_names() -> None:
    for kernel in STREAMING:
        assert KernelConfig.parse(replace(kernel, splits=3).name) == replace(kernel, splits=3)
