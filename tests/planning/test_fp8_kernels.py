"""Which kernel an fp8 product gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agmm import _core
from agmm._core import Accumulation
from agmm.planning import fp8_kernels
from agmm.planning.plans import FUSED_DTYPES, KernelConfig

E4M3 = _core.DType.float8_e4m3fn_float8_e4m3fn
MIXED = _core.DType.float8_e5m2_float8_e4m3fn
NARROW, WIDE = "128x128x128_1x1_pingpong", "128x256x128_2x1_cooperative"
SLOW = "128x128x128_2x1_cooperative"


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fact(
        kernel: str, dtype: Any, accumulation: Accumulation, is_fp8: bool = True
    ) -> SimpleNamespace:
        return SimpleNamespace(kernel=kernel, dtype=dtype, accumulation=accumulation, is_fp8=is_fp8)

    built = [
        fact("128x128x64_1x1_pingpong", _core.DType.bfloat16, Accumulation.fast, False),
        fact(NARROW, E4M3, Accumulation.fast),
        fact(WIDE, E4M3, Accumulation.fast),
        fact(SLOW, E4M3, Accumulation.slow),
        fact(SLOW, MIXED, Accumulation.slow),
        fact(WIDE, E4M3, Accumulation.block),
    ]
    monkeypatch.setattr(_core, "kernel_facts", lambda: built)
    monkeypatch.setattr(_core, "scatter_kernel_facts", lambda: built[3:4])
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
    assert names(E4M3, Accumulation.fast) == [NARROW, WIDE]
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
def test_the_kernel_with_the_least_work_in_whole_waves(m: int, n: int, name: str) -> None:
    kernels = (KernelConfig.parse(NARROW), KernelConfig.parse(WIDE))
    assert fp8_kernels.choose(kernels, m, n, 132).kernel == name


def test_the_planner_knows_no_fp8() -> None:
    assert FUSED_DTYPES == ("bfloat16", "float16")
