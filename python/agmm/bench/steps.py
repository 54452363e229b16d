"""Tells a watcher outside which step each rank is at: a rank that hangs cannot be asked.

A rank writes each step into a file of its own that is mapped into memory, at the price of a few
hundred ns, and the watcher reads them.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

_STEP = struct.Struct("<qq")

BEGINNING = -1
"""What a rank does before its first numbered thing."""

POLL_S = 0.5  # short beside the limits of a way, which are seconds


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.step"


class Writer:
    """The steps of this rank, which it writes."""

    def __init__(self, folder: Path, rank: int) -> None:
        with _path(folder, rank).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _STEP.size)
        self._number = 0

    def at(self, what: int) -> None:
        """Begin this rank's next step: `what` is a number that the watcher understands."""
        self._number += 1
        _STEP.pack_into(self._memory, 0, self._number, what)


class Watch:
    """The steps of all ranks, seen from outside.

    Args:
        folder: an existing one, for a file of each rank.
        limit_s: how long a step may take, in seconds.
        beginning_limit_s: how long all that comes before the first step may take.
    """

    def __init__(
        self, folder: Path, world_size: int, limit_s: float, beginning_limit_s: float
    ) -> None:
        self._limit_s = limit_s
        self._beginning_limit_s = beginning_limit_s
        self._paths = [_path(folder, rank) for rank in range(world_size)]
        for path in self._paths:
            path.write_bytes(_STEP.pack(0, BEGINNING))
        self._seen = self._read()
        self._since = time.monotonic()

    def _read(self) -> list[tuple[int, int]]:
        return [_STEP.unpack(path.read_bytes()) for path in self._paths]

    def is_stuck(self) -> bool:
        """Whether no rank has begun a step for longer than the limit. It has to be asked often."""
        seen = self._read()
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        has_begun = any(what != BEGINNING for _, what in seen)
        limit = self._limit_s if has_begun else self._beginning_limit_s
        return time.monotonic() - self._since > limit

    def behind(self, ranks: list[int] | None = None) -> tuple[list[int], int]:
        """The ranks that are furthest behind, of `ranks` or of all, and what they do.

        Ranks that wait for each other are at most one step apart: one that has left a step behind
        may wait in the next for one that hangs in it.
        """
        steps = self._read()
        among = ranks or list(range(len(steps)))
        number, what = min(steps[rank] for rank in among)
        return [rank for rank in among if steps[rank][0] == number], what

    def call_if_stuck(self, stuck: Callable[[], None]) -> Callable[[], None]:
        """Begin to watch in a thread of its own, which calls `stuck` once; return what ends it."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(POLL_S):
                if self.is_stuck():
                    stuck()
                    return

        threading.Thread(target=look, name="agmm-watch", daemon=True).start()
        return ended.set
