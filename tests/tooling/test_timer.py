"""The timing rule on the CPU: what is called how often, and whose time counts."""

from __future__ import annotations

import contextlib
import json
import pickle
import statistics
import time
from collections.abc import Iterator
from typing import Any, ClassVar, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from agmm.bench import timer
from agmm.bench.exchange import of_all_ranks
from agmm.bench.timer import host_time, pick_device, time_ways
from agmm.runtime import groups
from agmm.testing.ranks import RankPool

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2, device="cpu") as pool:
        yield pool


def test_every_way_has_its_samples_and_warm_up() -> None:
    calls = {"a": 0, "b": 0}

    def count(name: str) -> None:
        calls[name] += 1

    times = time_ways(
        {"a": lambda: count("a"), "b": lambda: count("b")}, samples=7, warmup=2, device=CPU
    )
    assert list(times) == ["a", "b"]
    assert [len(samples) for samples in times.values()] == [7, 7]
    assert calls == {"a": 9, "b": 9}


def test_samples_are_interleaved_in_changing_order() -> None:
    order: list[str] = []
    ways = {name: (lambda name=name: order.append(name)) for name in "abc"}
    time_ways(ways, samples=12, warmup=0, device=CPU)
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 1


def test_times_are_microseconds() -> None:
    times = time_ways({"sleep": lambda: time.sleep(0.005)}, samples=5, warmup=0, device=CPU)
    assert 5_000 <= statistics.median(times["sleep"]) < 50_000


def test_no_ways_take_no_time() -> None:
    assert time_ways({}, device=CPU) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples: found 0, wanted at least 1"),
        ({"warmup": -1}, "warmup: found -1, wanted at least 0"),
    ],
)
def test_bad_counts_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        time_ways({"a": lambda: None}, device=CPU, **arguments)


def test_host_time_is_the_median_in_microseconds() -> None:
    burst = [0.04, 0.002, 0.002, 0.3]
    pauses = iter([0.0] * 4 + burst * 3)
    found = host_time(lambda: time.sleep(next(pauses)), 3, calls_per_burst=4, warmup=1, device=CPU)
    assert 2_000 <= found.us < 30_000
    assert 40_000 <= found.after_drain_us < 250_000
    with pytest.raises(ValueError, match="bursts: found 0, wanted at least 1"):
        host_time(lambda: None, 0, device=CPU)
    with pytest.raises(ValueError, match="calls_per_burst: found 1, wanted at least 2"):
        host_time(lambda: None, calls_per_burst=1, device=CPU)


def _own_values(topic: str = "values") -> list[list[int | str]]:
    return of_all_ranks(topic, (dist.get_rank(), "x" * dist.get_rank()))


def test_values_of_all_ranks_come_by_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(_own_values) == [[[0, ""], [1, "x"]]] * 2
    assert of_all_ranks("values", (3, "y")) == [[3, "y"]]


def _what_a_word_in_the_store_does() -> list[bool]:
    """Where another process of the job has put a pickle in place of a value."""
    group = dist.group.WORLD
    assert group is not None
    ran = []
    for written in (pickle.dumps(_Runs()).hex(), json.dumps(pickle.dumps(_Runs()).hex())):
        with (
            mock.patch.object(groups.of(group), "exchange", return_value=[written]),
            contextlib.suppress(ValueError),
        ):
            of_all_ranks("values", 1)
        ran.append(_Runs.has_run)
    return ran


class _Runs:
    has_run = False

    def __reduce__(self) -> Any:
        return setattr, (_Runs, "has_run", True)


def test_a_word_in_the_store_is_read_and_never_run(two_ranks: RankPool) -> None:
    assert two_ranks.run(_what_a_word_in_the_store_does) == [[False, False]] * 2


class _FakeEvent:
    """Records its place in the order of calls; 25 µs lie between two events."""

    order: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.order.append("event")

    def elapsed_time(self, other: _FakeEvent) -> float:
        return 0.025


def test_order_of_a_cuda_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    order = _FakeEvent.order
    order.clear()
    zero_ = torch.Tensor.zero_

    def flush(tensor: torch.Tensor) -> torch.Tensor:
        order.append(f"flush {tensor.nbytes}")
        return zero_(tensor)

    monkeypatch.setattr(timer, "FLUSH_BYTES", 64)
    monkeypatch.setattr(timer, "cycles_per_us", lambda index: 2000.0)
    monkeypatch.setattr(torch.Tensor, "zero_", flush)
    monkeypatch.setattr(torch.cuda, "Event", _FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"spin {cycles}"))
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **keywords: order.append("align"))
    sample = timer.CudaSampler(cast(Any, object()), CPU, spin_us=400.0, flush_l2=True)
    order.clear()
    assert sample(lambda: order.append("op")) == 25.0
    assert order == [
        "synchronize",
        "flush 64",
        "spin 800000",
        "align",
        "event",
        "op",
        "event",
        "synchronize",
    ]


@pytest.mark.parametrize(
    ("late_calls", "spin_us", "group", "calls"),
    [
        (0, 1e5, None, 1),
        (1, 1e5, None, 2),
        (9, 1e5, None, 3),  # at most
        (9, 0.0, None, 1),  # nothing is hidden
        (9, 1e5, object(), 1),  # the other ranks do not know
    ],
)
def test_a_sample_that_a_late_host_spoilt_is_repeated(
    monkeypatch: pytest.MonkeyPatch, late_calls: int, spin_us: float, group: object, calls: int
) -> None:
    monkeypatch.setattr(timer, "cycles_per_us", lambda index: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", _FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **keywords: None)
    sample = timer.CudaSampler(cast(Any, group), CPU, spin_us=spin_us, flush_l2=False)
    made = 0

    def call() -> None:
        nonlocal made
        made += 1
        if made <= late_calls:
            time.sleep(0.15)

    assert sample(call) == 25.0
    assert made == calls


@pytest.mark.parametrize("group", [None, object()])
def test_a_slow_host_spins_longer_from_then_on(
    monkeypatch: pytest.MonkeyPatch, group: object
) -> None:
    spins: list[float] = []
    monkeypatch.setattr(timer, "cycles_per_us", lambda index: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", _FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **keywords: None)
    sample = timer.CudaSampler(cast(Any, group), CPU, spin_us=100.0, flush_l2=False)
    sample(lambda: time.sleep(0.001))
    assert set(spins) == {100.0}
    sample(lambda: None)
    assert 1_500 <= spins[-1] <= 5_000
    sample(lambda: time.sleep(0.1))
    sample(lambda: None)
    assert spins[-1] == 5_000  # at most


def _uneven_ranks() -> tuple[dict[str, list[float]], str]:
    slow = 0.02 if dist.get_rank() == 1 else 0.0
    times = time_ways({"uneven": lambda: time.sleep(slow), "even": lambda: None}, samples=4)
    return times, pick_device().type


def test_a_sample_is_the_slowest_ranks(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_uneven_ranks)
    assert first == second
    times, device = first
    assert device == "cpu"
    assert min(times["uneven"]) >= 20_000
    assert statistics.median(times["even"]) < 20_000


def _late_rank() -> dict[str, list[float]]:
    def way() -> None:
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.001:
            pass

    ways = {"way": way}
    if dist.get_rank() == 1:
        time.sleep(0.3)
    return time_ways(ways, samples=1, warmup=0)


def test_ranks_start_a_sample_together(two_ranks: RankPool) -> None:
    times, _ = two_ranks.run(_late_rank)
    assert times["way"][0] < 200_000
