"""The order in which ranks copy over PCIe, from facts."""

from __future__ import annotations

from itertools import permutations

import pytest

from agmm.runtime.rings import others, ring_of
from agmm.runtime.topology import Matrix
from agmm.testing import machines

TWO_BY_TWO = "X PIX SYS SYS\nPIX X SYS SYS\nSYS SYS X PIX\nSYS SYS PIX X"
DEEP = """\
X PIX NODE NODE SYS SYS
PIX X NODE NODE SYS SYS
NODE NODE X PXB SYS SYS
NODE NODE PXB X SYS SYS
SYS SYS SYS SYS X PHB
SYS SYS SYS SYS PHB X"""
WAYS = {"PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}


def length(ring: list[int], links: Matrix) -> list[int]:
    """How long the steps of a ring are, the longest first."""
    steps = [links[a][b] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    return sorted((0 if link.nvlinks else WAYS[link.pcie] for link in steps), reverse=True)


@pytest.mark.parametrize("text", [TWO_BY_TWO, DEEP])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_ring_crosses_long_ways_less_often(text: str, seed: int) -> None:
    links = machines.shuffled(machines.matrix(text), seed)
    ring = ring_of(links)
    assert sorted(ring) == list(range(len(links)))
    best = min(length(list(one), links) for one in permutations(range(len(links))))
    assert length(ring, links) == best


def test_gpus_behind_switches_stay_together() -> None:
    links = machines.matrix(machines.PCIE_8)
    ring = ring_of(links)
    for way in WAYS:
        # GPUs that reach each other by no longer way than this are neighbours in the ring.
        for gpu in ring:
            near = [p for p in ring if p == gpu or WAYS[links[gpu][p].pcie] <= WAYS[way]]
            places = sorted(ring.index(peer) for peer in near)
            assert places == list(range(places[0], places[0] + len(places)))


def test_equal_ways_keep_the_order_of_the_ranks() -> None:
    assert ring_of(machines.matrix(machines.switched(8, 18))) == list(range(8))
    assert ring_of([]) == []
    links = machines.matrix("X ? ?\n? X ?\n? ? X")
    assert ring_of(links) == [0, 1, 2]


def test_each_rank_begins_with_the_next_one_of_the_ring() -> None:
    ring = [0, 2, 1, 3]
    firsts = [others(ring, rank)[0] for rank in range(4)]
    assert firsts == [2, 3, 1, 0]
    for step in range(3):  # no two ranks copy from one at a time
        assert sorted(others(ring, rank)[step] for rank in range(4)) == [0, 1, 2, 3]
