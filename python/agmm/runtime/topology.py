"""Which GPUs reach which over which links, and how data goes round PCIe where some pairs have no
NVLink.

Pure logic over a matrix of links; loads without torch. What the driver says of them is asked in
`devices`, and the ranks of a group tell each other in `group_topology`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import combinations, product
from typing import Any, NamedTuple

MOST_RELAYED = 8
"""GPUs for which relays are looked for. Hosts with more have switches."""

_QUAD = 4  # GPUs of one half of a hybrid cube mesh


class Link(NamedTuple):
    """What joins two GPUs."""

    nvlinks: int = 0
    """How many NVLinks the pair has: its own, or those of each GPU to the switches."""
    switched: bool = False
    """Whether these go through NVSwitches, so that other pairs share them."""
    pcie: str = ""
    """Where their ways over PCIe meet, as `nvidia-smi topo -m` calls it: PIX, PXB, PHB, NODE or
    SYS; "" where that is unknown."""
    peer: bool | None = None
    """Whether each reaches the other's memory; None where that is unknown."""

    def __str__(self) -> str:
        """The link as `nvidia-smi topo -m` writes it, with a "-" where there is no peer access."""
        if self.nvlinks:
            return f"NV{self.nvlinks}"
        return f"{self.pcie or '?'}{'-' if self.peer is False else ''}"


Matrix = Sequence[Sequence[Link]]
"""A link for each pair of GPUs, by their places; those on the diagonal do not count."""


class Kind(Enum):
    """What the links of some GPUs look like. The value is what `agmm doctor` calls it."""

    ONE = "one GPU"
    SWITCHED = "fully connected by NVSwitch"
    ALL_PAIRS = "fully connected, NVLinks between all pairs"
    CUBE_MESH = "hybrid cube mesh"
    PAIRS = "NVLink pairs"
    PARTIAL = "partial mesh of NVLinks"
    PCIE = "PCIe only"
    NONE = "no peer access"


FULLY_CONNECTED = frozenset({Kind.ONE, Kind.SWITCHED, Kind.ALL_PAIRS})
"""The kinds where any GPU reaches any other in one step over NVLink."""


def kind_of(links: Matrix) -> Kind:
    """The kind of a matrix, whatever the order of its GPUs."""
    pairs = list(combinations(range(len(links)), 2))
    if not pairs:
        return Kind.ONE
    linked = [links[a][b] for a, b in pairs if links[a][b].nvlinks]
    if len(linked) == len(pairs):
        return Kind.SWITCHED if any(link.switched for link in linked) else Kind.ALL_PAIRS
    if not linked:
        cut = any(links[a][b].peer is False for a, b in pairs)
        return Kind.NONE if cut else Kind.PCIE
    if quads(links) is not None:
        return Kind.CUBE_MESH
    return Kind.PAIRS if max(map(len, islands(links))) == 2 else Kind.PARTIAL


def neighbours(links: Matrix, gpu: int) -> list[int]:
    """The GPUs that one reaches over NVLink."""
    return [peer for peer in range(len(links)) if peer != gpu and links[gpu][peer].nvlinks]


def islands(links: Matrix) -> list[list[int]]:
    """The sets of GPUs that are joined by NVLinks, also over others; single ones too."""
    found: list[list[int]] = []
    left = set(range(len(links)))
    while left:
        island, queue = [], [min(left)]
        left.remove(queue[0])
        while queue:
            gpu = queue.pop()
            island.append(gpu)
            new = [peer for peer in neighbours(links, gpu) if peer in left]
            left.difference_update(new)
            queue += new
        found.append(sorted(island))
    return found


def quads(links: Matrix) -> tuple[list[int], list[int]] | None:
    """The two halves of a hybrid cube mesh, the second in the order of their partners in the first;
    None for another graph.

    Each half is fully connected, and each GPU has one more NVLink neighbour, its partner in the
    other. Two GPUs of a half have neighbours in common and partners have none, which tells them
    apart in any numbering. No other graph of eight has four neighbours for each, just one of which
    shares none: the other three share one only with each other, so they are a whole half.
    """
    if len(links) != 2 * _QUAD:
        return None
    near = [set(neighbours(links, gpu)) for gpu in range(len(links))]
    partners = [[p for p in sorted(near[g]) if not near[g] & near[p]] for g in range(len(links))]
    if any(len(found) != 1 for found in partners) or any(len(found) != _QUAD for found in near):
        return None
    first = sorted({0, *near[0]} - {partners[0][0]})
    return first, [partners[gpu][0] for gpu in first]


class Move(NamedTuple):
    """A shard on its way over one link."""

    owner: int
    """The rank whose shard it is."""
    source: int
    """The rank that has it."""
    target: int


class Schedule(NamedTuple):
    """An all-gather over NVLinks alone. The moves of a step may go at once; a rank passes on in the
    second what it got in the first."""

    world_size: int
    first: tuple[Move, ...]
    """The moves from each rank to its neighbours."""
    second: tuple[Move, ...]
    """The moves to ranks that have no link to the owner, by one that has links to both."""

    def load(self, links: Matrix) -> float:
        """Shards that the busiest NVLink carries in one direction."""
        carried: dict[tuple[int, int], int] = {}
        for move in (*self.first, *self.second):
            way = move.source, move.target
            carried[way] = carried.get(way, 0) + 1
        return max((n / links[a][b].nvlinks for (a, b), n in carried.items()), default=0.0)


def schedule_of(links: Matrix) -> Schedule | None:
    """How every rank gets every other's shard over NVLinks in at most two steps; None where that
    cannot be, or where there are more than `MOST_RELAYED` GPUs and not all of them are linked.

    The relays are those that leave the busiest link the least to carry for each NVLink of it. Every
    target chooses for itself: what it gets comes over links that carry nothing for others, so the
    best choices of all are the best choice. Ties go to the lower ranks, so the same matrix has the
    same schedule on every rank.
    """
    size = len(links)
    near = [neighbours(links, gpu) for gpu in range(size)]
    first = tuple(Move(owner, owner, target) for owner in range(size) for target in near[owner])
    second: list[Move] = []
    for target in range(size):
        far = [gpu for gpu in range(size) if gpu != target and gpu not in near[target]]
        if far and size > MOST_RELAYED:
            return None
        relays = [[gpu for gpu in near[target] if gpu in near[owner]] for owner in far]
        if not all(relays):
            return None

        def burden(chosen: Sequence[int], target: int = target) -> list[float]:
            """Shards per NVLink on the ways into the target, the most first."""
            ways = ((1 + chosen.count(n)) / links[n][target].nvlinks for n in near[target])
            return sorted(ways, reverse=True)

        best = min(product(*relays), key=burden)
        second += [Move(owner, relay, target) for owner, relay in zip(far, best, strict=True)]
    return Schedule(size, first, tuple(second))


def matrix_of(reports: Mapping[str, Mapping[str, Any]]) -> list[list[Link]]:
    """The matrix of GPUs from what `devices.links_of` said of each, in the order of the mapping.

    Args:
        reports: by UUID; each with the keys "bus", "nvlinks", "pcie", "peer" and "nvlink_peer".
            A report may lack peers that its process did not see.
    """
    return [
        [_link(a, reports[a], b, reports[b]) if a != b else Link() for b in reports]
        for a in reports
    ]


def _link(a: str, of_a: Mapping[str, Any], b: str, of_b: Mapping[str, Any]) -> Link:
    # A link that is down at one end is down.
    direct = min(_ends_at(of_a, of_b["bus"]), _ends_at(of_b, of_a["bus"]))
    over_switches = min(_to_switches(of_a), _to_switches(of_b))
    if _both(of_a["nvlink_peer"].get(b), of_b["nvlink_peer"].get(a)) is False:
        # It is so between the partitions of a switch, or while its manager does not run.
        direct = over_switches = 0
    return Link(
        nvlinks=direct or over_switches,
        switched=bool(over_switches) and not direct,
        pcie=of_a["pcie"].get(b) or of_b["pcie"].get(a) or "",
        peer=_both(of_a["peer"].get(b), of_b["peer"].get(a)),
    )


def _ends_at(report: Mapping[str, Any], bus: str) -> int:
    return sum(end == "gpu" and at == bus for end, at in report["nvlinks"])


def _to_switches(report: Mapping[str, Any]) -> int:
    # In a virtual machine the other end may be a switch that cannot be seen.
    return sum(end in ("switch", "unknown") for end, _ in report["nvlinks"])


def _both(a: bool | None, b: bool | None) -> bool | None:
    """What two say of the same link."""
    if a is False or b is False:
        return False
    return a if b is None else b
