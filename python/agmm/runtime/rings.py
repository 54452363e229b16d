"""The order in which the ranks of a group copy from each other, where some ways are longer than
others. Pure logic over a matrix of links."""

from __future__ import annotations

from collections.abc import Sequence

from agmm.runtime.topology import Link, Matrix

_WAYS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Where two GPUs' ways over PCIe meet, as `nvidia-smi topo -m` calls it, the nearest first: at one
switch, at several, at the host's bridge, in one NUMA node, between two."""


def ring_of(links: Matrix) -> list[int]:
    """The GPUs in the order of a ring, in which those that share a switch follow each other, and so
    do those of a NUMA node: the ring crosses each longer way as seldom as it can, once in and once
    out of what lies behind it. The same matrix has the same ring on every rank; GPUs with equal
    ways stay in their order."""
    return _ordered(links, list(range(len(links))), len(_WAYS) + 1)


def others(ring: Sequence[int], rank: int) -> list[int]:
    """The other ranks from the next one in the ring on, so that no two ranks use a third's links at
    a time."""
    place = list(ring).index(rank)
    return [ring[(place + i) % len(ring)] for i in range(1, len(ring))]


def _ordered(links: Matrix, gpus: list[int], longest: int) -> list[int]:
    """GPUs whose ways to each other are no longer than the longest."""
    if len(gpus) < 2 or longest == 0:
        return gpus
    found: list[int] = []
    left = list(gpus)
    while left:
        near, queue = [], [left.pop(0)]
        while queue:
            gpu = queue.pop()
            near.append(gpu)
            new = [peer for peer in left if _way(links[gpu][peer]) < longest]
            left = [peer for peer in left if peer not in new]
            queue += new
        found += _ordered(links, sorted(near), longest - 1)
    return found


def _way(link: Link) -> int:
    """How long a way is: 0 over NVLink; one that is unknown is the longest."""
    if link.nvlinks:
        return 0
    return 1 + (_WAYS.index(link.pcie) if link.pcie in _WAYS else len(_WAYS) - 1)
