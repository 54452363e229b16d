"""Which kernel an fp8 product gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agmm import _core
from agmm.planning import fp8_kernels
from agmm.planning.plans import FUSED_DTYPES, KernelConfig

E4M3 = _core.DType.float8_e4m3fn_float8_e4m3fn
MIXED = _core.DType.float8_e5m2_float8_e4m3fn
NARROW, WIDE = "128x128x128_1x1_pingpong", "128x256x128_2x1_cooperative"
SLOW = "128x128x128_2x1_cooperative"


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fact(kernel: str, dtype: Any, fast_accum: bool, is_fp8: bool = True) -> SimpleNamespace:
        return SimpleNamespace(kernel=kernel, dtype=dtype, fast_accum=fast_accum, is_fp8=is_fp8)

    built = [
        fact("128x128x64_1x1_pingpong", _core.DType.bfloat16, True, False),
        fact(NARROW, E4M3, True),
        fact(WIDE, E4M3, True),
        fact(SLOW, E4M3, False),
        fact(SLOW, MIXED, False),
    ]
    monkeypatch.setattr(_core, "kernel_facts", lambda: built)
    fp8_kernels.built.cache_clear()
    fp8_kernels.accumulates_fast.cache_clear()


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    fp8_kernels.built.cache_clear()
    fp8_kernels.accumulates_fast.cache_clear()


def names(dtype: Any, fast_accum: bool) -> list[str]:
    return [kernel.kernel for kernel in fp8_kernels.built(dtype.name, fast_accum)]


def test_kernels_of_a_dtype_and_accumulation(facts: None) -> None:
    assert names(E4M3, True) == [NARROW, WIDE]
    assert names(E4M3, False) == [SLOW]
    assert names(MIXED, False) == [SLOW]
    assert names(_core.DType.float8_e4m3fn_float8_e5m2, True) == []


def test_slow_accumulation_serves_where_there_is_no_fast_one(facts: None) -> None:
    assert names(MIXED, True) == [SLOW]
    assert not fp8_kernels.accumulates_fast(MIXED.name, SLOW)
    assert fp8_kernels.accumulates_fast(E4M3.name, WIDE)


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
