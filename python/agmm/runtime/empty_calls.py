"""Calls on GPUs that have no elements on this rank, and how ranks that wait find out that they have
some on another."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

_EMPTY = "calls without elements"
_EmptyCalls = tuple[int, int, str]
"""The first and the last number of equal calls in a row, and one of them in words."""
_EMPTY_CALLS = 1024
"""The number of these that a rank tells of, the last ones: a rank without rows may be the layers of
a model ahead."""
_FRESH_S = 2.5
"""The greatest age of what a rank tells each second."""


class Ranks(Protocol):
    """What is needed of a `Group`."""

    rank: int
    world_size: int

    @property
    def eager_calls(self) -> int: ...
    def tell(self, topic: str, value: str) -> None: ...
    def told(self, topic: str, peer: int, limit_s: float) -> str | None: ...


class EmptyCalls:
    """The calls without elements of one group on this rank."""

    def __init__(self) -> None:
        self._calls: deque[_EmptyCalls] = deque(maxlen=_EMPTY_CALLS)
        self._found_before: dict[int, str] = {}

    def note(self, number: int, words: str) -> None:
        """The eager call of that number, which has just begun, has no elements. Under the group's
        lock."""
        known = self._calls
        if known and known[-1][1:] == (number - 1, words):
            known[-1] = known[-1][0], number, words
        else:
            known.append((number, number, words))

    def look(self, ranks: Ranks, *, waits_in_one: bool) -> str:
        """A rank that waits for others, on a GPU or on the host, calls this each second.

        A call without elements may wait where none of its peers does that have some: their kernels
        have other memory. So ranks that wait long tell each other of these calls, by their numbers.

        Args:
            ranks: the group.
            waits_in_one: whether what waits is such a call.

        Returns:
            What two ranks made of one call, in words, once that was found two times in a row; else
            "".
        """
        begun, own = ranks.eager_calls, list(self._calls)
        now = time.monotonic()  # of the host, which has all ranks that make such calls
        ranks.tell(_EMPTY, json.dumps([now, begun, waits_in_one, own]))
        found: dict[int, str] = {}
        for peer in range(ranks.world_size):
            told = None if peer == ranks.rank else ranks.told(_EMPTY, peer, 0.0)
            if told is None:
                continue
            then, their_begun, they_wait_in_one, theirs = json.loads(told)
            if now - then > _FRESH_S or waits_in_one == they_wait_in_one:
                continue
            if waits_in_one:
                empty, some, call = ranks.rank, peer, _first_beyond(theirs, own, their_begun)
            else:
                empty, some, call = peer, ranks.rank, _first_beyond(own, theirs, begun)
            if call is not None:
                found[peer] = (
                    f"rank {ranks.rank}: the ranks made different calls; rank {empty}: call "
                    f"{call[0]} of the group, {call[1]}, which has no elements; rank {some}: one "
                    "that has some"
                )
        again = next((found[peer] for peer in found if peer in self._found_before), "")
        self._found_before = found
        return again


def _first_beyond(
    known: Sequence[_EmptyCalls], others: Sequence[_EmptyCalls], begun: int
) -> tuple[int, str] | None:
    """The first of ``others`` up to number ``begun`` that is not among those known, in words."""
    oldest = known[0][0] if len(known) == _EMPTY_CALLS else 0  # of those that are not forgotten
    for first, last, words in others:
        number = max(first, oldest)
        for begin, end, _ in known:
            if begin <= number <= end:
                number = end + 1
        if number <= min(last, begun):
            return number, words
    return None
