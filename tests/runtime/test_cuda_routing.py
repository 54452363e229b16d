"""When the order of experts' rows is left to torch's ops, and what a kernel is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from agmm import _core
from agmm.runtime import capabilities, cuda_routing

MOST = 4096
"""The choices that the kernel is said to take."""


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The core's calls, in a build that is said to have kernels, on a Hopper."""
    found: list[Any] = []
    monkeypatch.setattr(_core, "cuda_built", True)
    monkeypatch.setattr(_core, "route_rows", lambda *given: found.append(given))
    monkeypatch.setattr(_core, "most_routed_choices", lambda: MOST)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda_routing, "stream_of", lambda device: 7)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: tensor.numel())
    capabilities.of.cache_clear()
    capabilities.why_not.cache_clear()
    yield found
    capabilities.of.cache_clear()
    capabilities.why_not.cache_clear()


def routed(
    shape: tuple[int, int],
    *,
    dtype: torch.dtype = torch.int64,
    device: str = "cuda:0",
    experts: tuple[int, int] = (64, 16),
    capacity: int = 100,
) -> tuple[torch.Tensor, ...] | None:
    every, held = experts
    with FakeTensorMode():
        ids = torch.empty(shape, dtype=dtype, device=device)
        return cuda_routing.routed(ids, every, held, held, capacity, checks_capacity=True)


def test_the_kernel_is_given_sizes_and_memory(calls: list[Any]) -> None:
    found = routed((40, 8), dtype=torch.int32)
    assert found is not None
    assert [tuple(one.shape) for one in found] == [(100,), (100,), (16,), (17,), (40, 8)]
    assert {one.dtype for one in found} == {torch.int32}
    sizes, addresses = (320, 8, 64, 16, 16, 100), (320, 100, 100, 16, 17, 320)
    assert calls == [(_core.RouteIds.int32, sizes, True, addresses, 7)]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((0, 8), {}),
        ((8, 0), {}),
        ((513, 8), {}),
        ((40, 8), {"capacity": MOST + 1}),
        ((40, 8), {"experts": (1026, 513)}),
        ((40, 8), {"experts": (1026, 2)}),
        ((40, 8), {"dtype": torch.int16}),
        ((40, 8), {"device": "cpu"}),
    ],
    ids=["no tokens", "no choices", "many", "room", "experts", "ranks", "int16", "cpu"],
)
def test_ops_serve_what_the_kernel_does_not(
    calls: list[Any], shape: tuple[int, int], options: dict[str, Any]
) -> None:
    assert routed(shape, **options) is None and calls == []


@pytest.mark.parametrize("capability", [(7, 5), None], ids=["old", "not built"])
def test_ops_serve_devices_without_kernels(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None
) -> None:
    if capability is None:
        monkeypatch.setattr(_core, "cuda_built", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert routed((40, 8)) is None and calls == []
