"""Which ranks of a group are on which host, and who exchanges with whom between hosts.

This module is pure logic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """Which ranks are on which host."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host, ascending; the hosts by their first ranks."""

    def host_of(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self.hosts) if rank in ranks)

    def carrier(self, rank: int, host: int) -> int:
        """The rank of another host that exchanges with ``rank``: that of the same place among its
        host's, counted round where these are fewer."""
        place = self.hosts[self.host_of(rank)].index(rank)
        there = self.hosts[host]
        return there[place % len(there)]

    def carried(self, rank: int) -> list[int]:
        """The ranks of other hosts whose carrier a rank is."""
        own = self.host_of(rank)
        return [
            other
            for host, ranks in enumerate(self.hosts)
            for other in ranks
            if host != own and self.carrier(other, own) == rank
        ]

    def rounds(self, host: int) -> int:
        """The most ranks of other hosts that a rank of this one carries."""
        return max(len(self.carried(rank)) for rank in self.hosts[host])


def layout_of(hosts: Sequence[str]) -> Layout:
    """The layout of ranks whose hosts are given."""
    of_each: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        of_each.setdefault(host, []).append(rank)
    return Layout(tuple(tuple(ranks) for ranks in of_each.values()))


def apart(world_size: int) -> Layout:
    """The layout of ranks that share nothing: each is a host of its own."""
    return Layout(tuple((rank,) for rank in range(world_size)))
