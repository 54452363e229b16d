"""Ranks that are threads, which come at any time: their slots, and the portable path in them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agmm.runtime import portable


class Threads:
    """Slots of ranks that are threads. A rank sleeps at random before what it does."""

    def __init__(self, world_size: int, count: int, slot_bytes: int, skipped: int = 0) -> None:
        self.memory = [
            torch.full((count, slot_bytes), 0x7F, dtype=torch.uint8) for _ in range(world_size)
        ]
        self.meeting = threading.Barrier(world_size)
        self.skipped = skipped
        """Every so many barriers one is left out: a fault."""


class Slots:
    def __init__(self, threads: Threads, rank: int, seed: int) -> None:
        self.rank, self.world_size = rank, len(threads.memory)
        # Any ring that all ranks have in common.
        self.ring: Sequence[int] = [*range(0, self.world_size, 2), *range(1, self.world_size, 2)]
        self._threads = threads
        self._random = random.Random(seed)
        self._barriers = 0

    def of(self, rank: int) -> torch.Tensor:
        if self._random.random() < 0.05:
            time.sleep(self._random.random() * 1e-3)
        return self._threads.memory[rank]

    def barrier(self) -> None:
        self._barriers += 1
        if not self._threads.skipped or self._barriers % self._threads.skipped:
            self._threads.meeting.wait(30)


def run(world_size: int, work: Callable[[int], int]) -> int:
    """The sum of what the threads return."""
    found = [0] * world_size
    errors = []

    def one(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(found)


def values(rank: int, call: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randint(-9, 10, (size,), generator=generator).to(dtype)


def is_found(wrong: Callable[[], int]) -> bool:
    """A fault, in one of some attempts: threads may happen to come in a harmless order."""
    return any(wrong() > 0 for _ in range(20))


class Late:
    """Copies that are made no earlier than somebody waits for them."""

    def __init__(self) -> None:
        self._copies: list[Sequence[portable.Copy]] = []
        self._made = 0
        self._is_forked = False

    def fork(self) -> None:
        self._is_forked = True

    def run(self, copies: Sequence[portable.Copy]) -> int:
        assert self._is_forked
        self._copies.append(copies)
        return len(self._copies)

    def wait(self, mark: int) -> None:
        for copies in self._copies[self._made : mark]:
            for target, source in copies:
                target.copy_(source)
        self._made = max(self._made, mark)

    def join(self) -> None:
        self.wait(len(self._copies))


class Rank:
    """A workspace of a rank that is a thread."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.slots, self.turn = Slots(threads, rank, rank), 0
        self.rank, self.world_size = rank, len(threads.memory)
        self.is_captured = False

    def gather(self, *given: Any, words: str = "", **settings: Any) -> None:
        settings |= {"turn": self.turn, "beside": Late(), "is_captured": self.is_captured}
        self.turn = portable.gather(self.slots, *given, **settings)

    def scatter(self, *given: Any, what: str, words: str) -> None:
        like, product, total = given
        sent = torch.full((self.world_size - 1, *like.shape), 77.0).to(like)
        self.turn = portable.scatter(
            *(self.slots, sent, product, total, self.turn),
            beside=Late(),
            is_captured=self.is_captured,
        )
