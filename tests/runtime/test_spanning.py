"""The protocol between hosts, with ranks that are threads: messages are carried out batch by batch,
as NCCL does it, and those of a host exchange through slots."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from slot_threads import Rank, Threads, run, values

from agmm.runtime import rank_sums, spanning
from agmm.runtime.host_layout import Layout, apart, layout_of
from agmm.runtime.message_limit import Watch
from agmm.runtime.spanning import Message, Place

LAYOUTS = {
    name: layout_of(name)
    for name in ("ab", "aabb", "abab", "abb", "aaab", "abc", "aabbc", "aabccc")
} | {"apart": apart(4)}
LIMIT_S = 30


class Wires:
    """A wire between each two ranks, on which a message ends when both have come to it."""

    def __init__(self, world_size: int) -> None:
        ends = [(a, b) for a in range(world_size) for b in range(world_size)]
        self.sent: dict[tuple[int, int], queue.Queue[Any]] = {end: queue.Queue() for end in ends}


class Messages:
    """Messages whose batches a thread of the rank carries out in the order of their beginnings: all
    messages of one at a time, each batch after the one before."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self._wires, self._rank = wires, rank
        self._batches: queue.Queue[Any] = queue.Queue()
        self._random = random.Random(rank)
        threading.Thread(target=self._carry_out, daemon=True).start()

    def begin(
        self, number: int, sends: Sequence[Message], receives: Sequence[Message]
    ) -> threading.Event:
        done = threading.Event()
        self._batches.put((sends, receives, done))
        return done

    def _carry_out(self) -> None:
        while True:
            sends, receives, done = self._batches.get()
            time.sleep(self._random.random() * 1e-3)
            taken = []
            for target, tensors in sends:
                for tensor in tensors:
                    taken.append(threading.Event())
                    self._wires.sent[self._rank, target].put((tensor, taken[-1]))
            for source, tensors in receives:
                for tensor in tensors:
                    data, event = self._wires.sent[source, self._rank].get(timeout=LIMIT_S)
                    tensor.copy_(data)
                    event.set()
            if all(event.wait(LIMIT_S) for event in taken):
                done.set()

    def wait(self, mark: threading.Event) -> None:
        assert mark.wait(LIMIT_S), "a batch did not end"

    def finish(self) -> None:
        done = self.begin(0, [], [])
        self.wait(done)


class Inside:
    """The exchanges of a host's ranks through slots."""

    def __init__(self, gathers: Threads, scatters: Threads, place: int) -> None:
        self._gathers, self._scatters = Rank(gathers, place), Rank(scatters, place)

    def share(self, parts: Any, targets: Any, consume: Any, **settings: Any) -> None:
        self._gathers.gather(parts, targets, consume, **settings)

    def sum(self, product: Callable[[int, torch.Tensor], None], into: torch.Tensor) -> None:
        total = rank_sums.Total()
        self._scatters.scatter(into, product, lambda come: total(come, into), what="", words="")


class Machines:
    """What the threads of all ranks share."""

    def __init__(self, layout: Layout, slot_bytes: int = 4096) -> None:
        self.layout = layout
        self.world_size = sum(map(len, layout.hosts))
        self.wires = Wires(self.world_size)
        self._slots = [
            (
                Threads(len(ranks), 2, slot_bytes),
                Threads(len(ranks), 2 * len(ranks), slot_bytes),
            )
            for ranks in layout.hosts
        ]

    def steps(self, rank: int) -> tuple[Place, Messages, spanning.Inside]:
        host = self.layout.host_of(rank)
        near = self.layout.hosts[host]
        inside: spanning.Inside = spanning.Apart()
        if len(near) > 1:
            gathers, scatters = self._slots[host]
            inside = Inside(gathers, scatters, near.index(rank))
        return Place(self.layout, rank, near), Messages(self.wires, rank), inside


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_rows_come_once_those_of_the_own_host_first(name: str) -> None:
    machines = Machines(LAYOUTS[name])
    size = machines.world_size

    def work(rank: int) -> int:
        wrong, steps = 0, machines.steps(rank)
        near = set(steps[0].near)
        for call in range(6):
            rows, k = [(1, 3), (7, 4), (12, 2)][call % 3]
            shards = [
                values(each, call, rows * k, torch.float32).view(rows, k) for each in range(size)
            ]
            scales = [torch.full((1, 1), float(each)) for each in range(size)]
            wholes = [torch.full((size, *one[0].shape), 77.0) for one in (shards, scales)]
            come = torch.full((size, rows, k), 77.0)
            order: list[bool] = []

            def consume(
                source: int,
                cut: slice,
                parts: list[torch.Tensor],
                come: torch.Tensor = come,
                order: list[bool] = order,
            ) -> None:
                order.append(source in near)
                come[source, cut] = parts[0] + parts[1]

            sent = [shards[rank], scales[rank]]
            spanning.gather(*steps, sent, wholes, consume, pieces=3, keeps_own=True)
            wanted = torch.stack([a + b for a, b in zip(shards, scales, strict=True)])
            wrong += not torch.equal(come, wanted)
            wrong += not torch.equal(wholes[0], torch.stack(shards))
            wrong += order != sorted(order, reverse=True)
        return wrong

    assert run(size, work) == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_are_those_of_each_host(name: str) -> None:
    layout = LAYOUTS[name]
    machines = Machines(layout)
    size = machines.world_size

    def work(rank: int) -> int:
        wrong, steps = 0, machines.steps(rank)
        for call in range(6):
            rows, n = [(1, 3), (7, 4), (12, 2)][call % 3]
            given = [values(each, call, size * rows * n, torch.float32) for each in range(size)]
            parts = torch.stack(given).view(size, size, rows, n)
            come = torch.full((len(layout.hosts), rows, n), 77.0)
            began: list[int] = []

            def product(
                owner: int,
                into: torch.Tensor,
                parts: torch.Tensor = parts,
                began: list[int] = began,
            ) -> None:
                began.append(owner)
                into.copy_(parts[rank, owner])

            spanning.scatter(*steps, come, product, meanwhile=lambda: None)
            for host, ranks in enumerate(layout.hosts):
                wanted = torch.empty(rows, n)
                rank_sums.Total()(parts[list(ranks), rank], wanted)
                wrong += not torch.equal(come[host], wanted)
            far = [owner not in layout.hosts[layout.host_of(rank)] for owner in began]
            wrong += far != sorted(far, reverse=True)  # what is sent between hosts is made first
            wrong += sorted(began) != list(range(size))
        return wrong

    assert run(size, work) == 0


class Marker:
    """A place in a stream that a GPU comes to when the test says so."""

    def __init__(self, is_there: bool) -> None:
        self.is_there = is_there

    def query(self) -> bool:
        return self.is_there


@pytest.mark.parametrize(
    ("begun", "done", "ends"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_messages_that_do_not_come_end_the_process(
    monkeypatch: pytest.MonkeyPatch, begun: bool, done: bool, ends: bool
) -> None:
    """The time in which the GPU has not come to the call does not count."""
    monkeypatch.setattr("agmm._env.timeout_s", lambda: 0.02)
    told: list[str] = []
    end = Marker(done)
    Watch(told.append, 0.01).add(Marker(begun), end, "rank 3", "all_gather_matmul(A)")
    time.sleep(0.3)
    end.is_there = True
    assert [line[:60] for line in told] == ends * [
        "agmm: rank 3: waited 0.02 s for messages of other ranks in a"
    ]
