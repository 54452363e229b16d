"""The steps of ranks, seen from outside."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agmm.bench import steps
from agmm.bench.steps import BEGINNING, Watch, Writer


def test_who_is_behind(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 3, 60.0, 60.0)
    assert watch.behind() == ([0, 1, 2], BEGINNING)
    writers = [Writer(tmp_path, rank) for rank in range(3)]
    for writer in writers:
        writer.at(4)
    writers[1].at(2)
    assert watch.behind() == ([0, 2], 4)
    assert watch.behind([1]) == ([1], 2)


def test_each_step_has_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = Watch(tmp_path, 1, 10.0, 100.0)
    now = 99.0
    assert not watch.is_stuck()  # it has not begun a step
    writer = Writer(tmp_path, 0)
    for _ in range(3):
        writer.at(0)
        now += 9.0
        assert not watch.is_stuck()
    now += 10.5
    assert watch.is_stuck()


def test_a_thread_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "POLL_S", 0.01)
    said: list[str] = []
    end = Watch(tmp_path, 1, 0.0, 0.0).call_if_stuck(lambda: said.append("stuck"))
    deadline = time.monotonic() + 10
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    end()
    assert said == ["stuck"]
