"""How long a call takes: on a GPU by events, for which the host does not wait, on the CPU by its
clock. Tests put a clock of their own in their place (`agmm.testing.clocks`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Reading(Protocol):
    """The time of one call."""

    def end(self) -> None:
        """Say that the call was made."""

    def us(self) -> float | None:
        """The time in µs; None while it is not known. The host does not wait for it."""


class Clock(Protocol):
    """A source of times."""

    def begin(self, device: torch.device, plan: str) -> Reading:
        """Begin to time a call on a device, by the plan of that name."""


class _OnHost:
    def __init__(self) -> None:
        self._begin, self._us = time.perf_counter(), 0.0

    def end(self) -> None:
        self._us = 1e6 * (time.perf_counter() - self._begin)

    def us(self) -> float | None:
        return self._us


class _OnGpu:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._events[0].record(self._stream)

    def end(self) -> None:
        self._events[1].record(self._stream)

    def us(self) -> float | None:
        begin, end = self._events
        return 1e3 * begin.elapsed_time(end) if end.query() else None


class _Clocks:
    """The clock of each kind of device."""

    def begin(self, device: torch.device, plan: str) -> Reading:
        return _OnGpu(device) if device.type == "cuda" else _OnHost()


_clock: Clock = _Clocks()


def begin(device: torch.device, plan: str) -> Reading:
    """Begin to time a call."""
    return _clock.begin(device, plan)


@contextmanager
def using(clock: Clock) -> Iterator[None]:
    """Times come from this clock meanwhile, in this process."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
