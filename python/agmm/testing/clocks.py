"""Clocks for tests of `agmm.learn_plans`: what a call takes is what the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from agmm.runtime import call_times

TimeOf = Callable[[str], float | None]
"""The time in µs of a call by the plan of a name; None while it is not known."""


class _Fed:
    def __init__(self, plan: str, time_of: TimeOf) -> None:
        self._plan, self._time_of = plan, time_of

    def end(self) -> None:
        pass

    def us(self) -> float | None:
        return self._time_of(self._plan)


class _FedClock:
    def __init__(self, time_of: TimeOf, tried: list[str]) -> None:
        self._time_of, self._tried = time_of, tried

    def begin(self, device: torch.device, plan: str) -> call_times.Reading:
        self._tried.append(plan)
        return _Fed(plan, self._time_of)


@contextmanager
def fed(time_of: TimeOf) -> Iterator[list[str]]:
    """Meanwhile this process takes the times of calls from ``time_of``, which is asked when they
    are wanted. Yields the plans of the calls that were timed, by their names and in order."""
    tried: list[str] = []
    with call_times.using(_FedClock(time_of, tried)):
        yield tried
