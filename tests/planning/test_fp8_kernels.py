"""Which kernel an fp8 product gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agmm import _core
from agmm._core import Accumulation
from agmm.bench import candidates
from agmm.planning import fp8_kernels
from agmm.planning.planner import Planner
from agmm.planning.plans import (
    ALL_GATHER_MATMUL,
    MATMUL_REDUCE_SCATTER,
    UNFUSED,
    KernelConfig,
    Plan,
    Problem,
    Row,
)
from agmm.planning.tables import Key, Table

E4M3 = _core.DType.float8_e4m3fn_float8_e4m3fn
MIXED = _core.DType.float8_e5m2_float8_e4m3fn
NARROW, WIDE = "128x128x128_1x1_pingpong", "128x256x128_2x1_cooperative"
SLOW = "128x128x128_2x1_cooperative"
SWAPPED = "64x128x128_1x1_cooperative_swapped"


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fact(
        kernel: str, dtype: Any, accumulation: Accumulation, op: str = ALL_GATHER_MATMUL
    ) -> SimpleNamespace:
        return SimpleNamespace(
            op=op,
            kernel=kernel,
            config=KernelConfig.parse(kernel).core,
            dtype=dtype,
            accumulation=accumulation,
            is_fp8=dtype != _core.DType.bfloat16,
            timed=False,
        )

    built = [
        fact("128x128x64_1x1_pingpong", _core.DType.bfloat16, Accumulation.fast),
        fact(NARROW, E4M3, Accumulation.fast),
        fact(WIDE, E4M3, Accumulation.fast),
        fact(SWAPPED, E4M3, Accumulation.fast),
        fact(SLOW, E4M3, Accumulation.slow),
        fact(SLOW, MIXED, Accumulation.slow),
        fact(WIDE, E4M3, Accumulation.block),
        fact(SLOW, E4M3, Accumulation.slow, MATMUL_REDUCE_SCATTER),
    ]
    monkeypatch.setattr(_core, "kernel_facts", lambda: built)
    forget_built()


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    forget_built()


def forget_built() -> None:
    fp8_kernels.built.cache_clear()
    fp8_kernels.served_by.cache_clear()


def names(dtype: Any, accumulation: Accumulation, *, scatters: bool = False) -> list[str]:
    found = fp8_kernels.built(dtype.name, accumulation, scatters=scatters)
    return [kernel.kernel for kernel in found]


def test_kernels_of_a_dtype_and_accumulation(facts: None) -> None:
    assert names(E4M3, Accumulation.fast) == [NARROW, WIDE, SWAPPED]
    assert names(E4M3, Accumulation.slow) == [SLOW]
    assert names(E4M3, Accumulation.block) == [WIDE]
    assert names(E4M3, Accumulation.block_1x128) == []
    assert names(MIXED, Accumulation.slow) == [SLOW]
    assert names(_core.DType.float8_e4m3fn_float8_e5m2, Accumulation.fast) == []


def test_slow_accumulation_serves_where_there_is_no_fast_one(facts: None) -> None:
    assert fp8_kernels.served_by(MIXED.name, Accumulation.fast) == Accumulation.slow
    assert fp8_kernels.served_by(E4M3.name, Accumulation.fast) == Accumulation.fast
    assert fp8_kernels.served_by(MIXED.name, Accumulation.block) == Accumulation.block


def test_kernels_that_scatter_are_others(facts: None) -> None:
    assert names(E4M3, Accumulation.slow, scatters=True) == [SLOW]
    assert names(E4M3, Accumulation.fast, scatters=True) == []
    wanted = Accumulation.slow
    assert fp8_kernels.served_by(E4M3.name, Accumulation.fast, scatters=True) == wanted


@pytest.mark.parametrize(
    ("m", "n", "name"),
    [
        (128, 8 * 132, NARROW),  # as few tiles as leave most multiprocessors idle
        (4096, 8192, WIDE),
        (8192, 7168, WIDE),
    ],
)
@pytest.mark.parametrize("k", [1024, 8192])
def test_the_kernel_with_the_least_work_in_whole_waves(m: int, n: int, k: int, name: str) -> None:
    kernels = (KernelConfig.parse(NARROW), KernelConfig.parse(WIDE))
    assert fp8_kernels.choose(kernels, m, n, k, 132).kernel == name


def test_few_tiles_more_than_a_wave_take_larger_ones() -> None:
    """2048 x 2112 is 144 tiles of 128 x 256, and 126 of 256 x 160."""
    kernels = [KernelConfig.parse(name) for name in (NARROW, WIDE, "256x160x128_1x1_cooperative")]
    assert fp8_kernels.choose(kernels, 2048, 2112, 7168, 132).kernel == kernels[2].kernel


def test_few_tiles_of_a_long_k_are_split() -> None:
    """Between the CTAs of a cluster; in one wave, and only where a kernel can."""
    kernels = [KernelConfig.parse(name) for name in (NARROW, SWAPPED)]
    chosen = fp8_kernels.choose(kernels, 128, 1024, 16384, 132)
    assert chosen.kernel == kernels[1].kernel
    assert 2 <= chosen.splits <= _core.MAX_CLUSTER_SPLITS
    assert fp8_kernels.choose(kernels[:1], 128, 1024, 16384, 132).splits == 1
    assert fp8_kernels.choose(kernels, 2048, 8192, 16384, 132).splits == 1
    for m, n, k in ((0, 1024, 256), (128, 1024, 128), (128, 1024, 300), (1024, 1024, 16384)):
        for config in fp8_kernels.with_splits(chosen, m, n, k, 132):
            assert config.splits <= -(-k // 128)
            assert config.splits == 1 or -(-m // 64) * n // 128 * config.splits <= 132


def test_parts_of_a_row_that_do_not_fit_are_not_taken(facts: None) -> None:
    """With another M, or fewer multiprocessors than the row was measured with."""
    alone = PROBLEM._replace(m=128, n=4096, k=16384, world_size=1)
    rows = planner(row(128, f"{SWAPPED}/split2"), problem=alone)
    for problem, fits in (
        (alone, True),
        (alone._replace(sm_count=100), False),
        (alone._replace(m=512), False),
    ):
        kernel = rows.choose(problem).plan.kernel
        assert kernel is not None
        assert (kernel.splits == 2) == fits
        assert fp8_kernels.fits(kernel, problem.m, problem.n, problem.k, problem.sm_count or 132)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_swapped_kernels_are_behind_a_gather_where_a_table_names_them(
    facts: None, world_size: int
) -> None:
    problem = PROBLEM._replace(m=64, n=1024, k=16384, world_size=world_size)
    kernel = planner().choose(problem).plan.kernel
    assert kernel is not None and not kernel.swapped

    tuned = planner(row(64, f"{SWAPPED}/split4"), problem=problem)
    kernel = tuned.choose(problem).plan.kernel
    assert kernel is not None and (kernel.kernel, kernel.splits) == (SWAPPED, 4)
    kernel = tuned.choose(problem._replace(m=128)).plan.kernel
    assert kernel is not None and kernel.swapped


def test_a_kernel_that_cannot_store_a_gathered_a_is_not_asked_to(
    facts: None, recwarn: pytest.WarningsRecorder
) -> None:
    """Though it was tuned for a call that does not return A."""
    problem = PROBLEM._replace(m=64, n=1024, k=16384)
    tuned = planner(row(64, f"{SWAPPED}/split4"), problem=problem)
    for m in (64, 128):
        kernel = tuned.choose(problem._replace(m=m, return_A=True)).plan.kernel
        assert kernel is not None and "column" in kernel.stores_A
    plans = candidates.candidates(problem._replace(return_A=True), (), UNFUSED)
    kernels = [plan.kernel for plan in plans if plan.kernel is not None]
    assert kernels and all("column" in kernel.stores_A for kernel in kernels)
    assert not recwarn.list


def test_swapped_kernels_are_tuned_behind_a_gather(facts: None) -> None:
    """With K whole and in parts."""
    problem = PROBLEM._replace(m=64, n=1024, k=16384)
    plans = candidates.candidates(problem, (), planner().plan(problem))
    parts = {p.kernel.splits for p in plans if p.kernel is not None and p.kernel.swapped}
    assert len(parts) == 2 and 1 in parts


# --- by the tables ---

PROBLEM = Problem(4096, 3584, 8192, E4M3.name, 4, gpu="nvidia-h200", accumulation="fast")


def planner(*rows: Row, problem: Problem = PROBLEM) -> Planner:
    return Planner((), [Table("t", {Key.of(problem): {row.m: row for row in rows}})])


def row(m: int, kernel: str | None, us: float = 1.0) -> Row:
    if kernel is None:
        return Row(m, UNFUSED, us)
    return Row(m, Plan("push", KernelConfig.parse(f"{kernel}/swizzle2/along_m")), us)


def test_without_rows_it_goes_by_waves(facts: None) -> None:
    choice = planner().choose(PROBLEM)
    assert choice.plan.kernel == fp8_kernels.choose(
        fp8_kernels.predicted(PROBLEM), PROBLEM.m, PROBLEM.n, PROBLEM.k, 132
    )
    assert (choice.plan.transport, choice.source) == ("push", "whole waves")
    assert choice.predicted_us is None
    slow = PROBLEM._replace(accumulation="slow")
    assert planner().plan(slow).kernel == KernelConfig.parse(f"{SLOW}/swizzle8/along_n")
    nothing = PROBLEM._replace(accumulation="block_1x128")
    assert planner().plan(nothing) == UNFUSED
    with pytest.raises(ValueError, match="no kernel"):
        planner().fused_plan(nothing)


def test_a_row_of_the_problem_decides(facts: None) -> None:
    found = planner(row(4096, NARROW), row(2048, WIDE))
    choice = found.choose(PROBLEM)
    assert (choice.plan, choice.source, choice.row) == (
        row(4096, NARROW).plan,
        "t",
        row(4096, NARROW),
    )
    assert found.plan(PROBLEM._replace(return_A=True)) == choice.plan
    others = (PROBLEM._replace(accumulation="slow"), PROBLEM._replace(op=MATMUL_REDUCE_SCATTER))
    for other in others:  # of which it says nothing
        assert found.choose(other).row is None


def test_rows_of_other_m(facts: None) -> None:
    near = planner(row(4096, NARROW), row(64, WIDE))
    choice = near.choose(PROBLEM._replace(m=8192))
    assert choice.plan.kernel == KernelConfig.parse(f"{NARROW}/swizzle4/along_m")
    assert choice.source == "tuned at M=4096 (t)"
    assert near.choose(PROBLEM._replace(m=65536)).source == "whole waves", "too far"


def test_unfused_rows(facts: None) -> None:
    found = planner(row(64, None), row(128, WIDE))
    assert found.plan(PROBLEM._replace(m=64)) == found.plan(PROBLEM._replace(m=72)) == UNFUSED
    kernel = found.fused_plan(PROBLEM._replace(m=64)).kernel
    assert kernel is not None and kernel.kernel == WIDE


def test_rows_of_kernels_that_are_not_built(facts: None) -> None:
    found = planner(row(4096, "128x64x128_1x1_pingpong"))
    with pytest.warns(UserWarning, match="passes over rows of t: 128x64x128_1x1_pingpong for fp8"):
        assert found.choose(PROBLEM).source == "whole waves"


def test_what_is_tuned(facts: None) -> None:
    plans = candidates.candidates(PROBLEM, (), planner().plan(PROBLEM))
    kernels = {plan.kernel.kernel for plan in plans if plan.kernel is not None}
    assert kernels == {NARROW, WIDE, SWAPPED} and plans[-1] == UNFUSED
    medians = {plan: float(i) for i, plan in enumerate(plans)}
    assert len(candidates.other_orders(medians)) > len(kernels)
    assert candidates.other_pushes(PROBLEM, medians) == []
