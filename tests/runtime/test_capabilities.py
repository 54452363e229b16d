"""Which GPUs agmm does what on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode

from agmm import _core
from agmm.runtime import capabilities, cuda_quantize, symmetric
from agmm.runtime.capabilities import (
    COLLECTIVES,
    FEATURES,
    GRADIENTS,
    MATMULS,
    QUANTISERS,
    ROUTING,
    Feature,
)
from agmm.runtime.scaling import ALL

GPU = torch.device("cuda", 0)
WITHOUT_MATMULS = (COLLECTIVES, QUANTISERS, GRADIENTS, ROUTING)


def _forget() -> None:
    capabilities.of.cache_clear()
    capabilities.why_not.cache_clear()


@pytest.fixture(autouse=True)
def build_with_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_core, "cuda_built", True)
    _forget()
    yield
    _forget()


def _pretend(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ((7, 5), ()),
        ((8, 0), WITHOUT_MATMULS),
        ((8, 6), WITHOUT_MATMULS),
        ((8, 9), WITHOUT_MATMULS),
        ((9, 0), (MATMULS, *WITHOUT_MATMULS)),
        ((10, 0), WITHOUT_MATMULS),
        ((12, 0), WITHOUT_MATMULS),
    ],
    ids=str,
)
def test_each_feature_asks_for_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], served: tuple[Feature, ...]
) -> None:
    _pretend(monkeypatch, version)
    assert tuple(f for f in FEATURES if capabilities.why_not(f, GPU) is None) == served
    assert (symmetric.why_unfused(GPU) is None) == (MATMULS in served)


@pytest.mark.parametrize(
    ("feature", "wanted"),
    [
        (MATMULS, "wanted 9.0 for agmm's matmuls"),
        (COLLECTIVES, "wanted at least 8.0 for agmm's collectives"),
        (QUANTISERS, "wanted at least 8.0 for agmm's quantisers"),
        (GRADIENTS, "wanted at least 8.0 for agmm's gradients of activations"),
        (ROUTING, "wanted at least 8.0 for agmm's routing"),
    ],
)
def test_a_refusal_names_feature_found_and_wanted(
    monkeypatch: pytest.MonkeyPatch, feature: Feature, wanted: str
) -> None:
    _pretend(monkeypatch, (7, 5))
    found = f"device: found cuda:0 of compute capability 7.5, {wanted}"
    assert capabilities.why_not(feature, GPU) == found


def test_a_build_without_cuda_has_no_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "cuda_built", False)
    for feature in FEATURES:
        assert "no CUDA kernels" in str(capabilities.why_not(feature, GPU))


def test_quantisers_leave_other_gpus_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, (7, 5))
    with FakeTensorMode():
        x = torch.empty(16, 64, dtype=torch.bfloat16, device="cuda:0")
        assert cuda_quantize.quantised(x, (1, ALL), torch.float8_e4m3fn, power_of_2=False) is None
