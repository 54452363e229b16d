"""Which kind of machine it is, and how data goes round the links that are missing."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agmm.runtime import topology
from agmm.runtime.topology import Kind, Link, Matrix, Schedule, kind_of, schedule_of
from agmm.testing import machines

MACHINES = {
    "DGX-1V": (machines.DGX_1V, Kind.CUBE_MESH),
    "DGX-1P": (machines.DGX_1P, Kind.CUBE_MESH),
    "DGX-2": (machines.DGX_2, Kind.SWITCHED),
    "DGX A100": (machines.DGX_A100, Kind.SWITCHED),
    "DGX H100": (machines.DGX_H100, Kind.SWITCHED),
    "HGX A100, 4": (machines.HGX_A100_4, Kind.ALL_PAIRS),
    "HGX H100, 4": (machines.HGX_H100_4, Kind.ALL_PAIRS),
    "H100 NVL, 4": (machines.H100_NVL_4, Kind.PAIRS),
    "H100 NVL, 8": (machines.H100_NVL_8, Kind.PAIRS),
    "PCIe, 8": (machines.PCIE_8, Kind.PCIE),
    "RTX 4090, 4": (machines.RTX_4090_4, Kind.NONE),
}


@pytest.mark.parametrize("name", MACHINES)
def test_real_machines(name: str) -> None:
    text, kind = MACHINES[name]
    links = machines.matrix(text)
    assert [[links[b][a] for b in range(len(links))] for a in range(len(links))] == links
    assert kind_of(links) is kind
    for seed in range(20):
        assert kind_of(machines.shuffled(links, seed)) is kind


@pytest.mark.parametrize(
    ("text", "gpus", "kind"),
    [
        (machines.DGX_1V, (0, 1, 2, 3), Kind.ALL_PAIRS),
        (machines.DGX_1V, (4, 5, 6, 7), Kind.ALL_PAIRS),
        (machines.DGX_1V, (0, 1, 4, 5), Kind.PARTIAL),  # a ring
        (machines.DGX_1V, (0, 1, 2, 4), Kind.PARTIAL),  # three and one at a corner
        (machines.DGX_1V, (0, 1, 2, 7), Kind.PARTIAL),  # three and one alone
        (machines.DGX_1V, (0, 1, 6, 7), Kind.PAIRS),
        (machines.DGX_1V, (0, 1, 2, 3, 4, 5), Kind.PARTIAL),
        (machines.DGX_1V, (0, 4), Kind.ALL_PAIRS),
        (machines.DGX_1V, (0, 5), Kind.NONE),
        (machines.DGX_1V, (3,), Kind.ONE),
        (machines.DGX_A100, (1, 3, 5, 7), Kind.SWITCHED),
        (machines.DGX_H100, (0, 1, 2, 3), Kind.SWITCHED),
        (machines.DGX_H100, (2, 6), Kind.SWITCHED),
        (machines.H100_NVL_8, (0, 1, 4, 5), Kind.PAIRS),
        (machines.H100_NVL_8, (0, 1, 2, 4), Kind.PAIRS),  # a pair and two alone
        (machines.H100_NVL_8, (0, 2, 4, 6), Kind.PCIE),
        (machines.H100_NVL_8, (6, 7), Kind.ALL_PAIRS),
        (machines.PCIE_8, (0, 2, 4, 6), Kind.PCIE),
        (machines.RTX_4090_4, (0, 2), Kind.NONE),
    ],
)
def test_some_visible(text: str, gpus: tuple[int, ...], kind: Kind) -> None:
    assert kind_of(machines.some(machines.matrix(text), gpus)) is kind


def test_every_four_of_a_cube_mesh() -> None:
    """What is left of it has a relay for every pair, or not one link between its parts."""
    whole = machines.matrix(machines.DGX_1V)
    kinds = [kind_of(machines.some(whole, four)) for four in combinations(range(8), 4)]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        Kind.ALL_PAIRS: 2,
        Kind.PAIRS: 6,
        Kind.PARTIAL: 62,
    }


def test_a_cube_mesh_with_one_link_less_is_none() -> None:
    links = machines.matrix(machines.DGX_1V)
    for a, b in ((0, 1), (0, 4)):
        cut = [list(row) for row in links]
        cut[a][b] = cut[b][a] = Link(pcie="SYS")
        assert kind_of(cut) is Kind.PARTIAL


def test_a_regular_graph_of_degree_four_need_not_be_a_cube_mesh() -> None:
    """The ring of eight with chords to the next but one; and two halves that are whole, with five
    links between them."""
    ring = [
        [Link(1) if (a - b) % 8 in (1, 2, 6, 7) else Link() for b in range(8)] for a in range(8)
    ]
    assert kind_of(ring) is Kind.PARTIAL
    more = machines.matrix(machines.DGX_1V)
    more[0][5] = more[5][0] = Link(1)
    assert kind_of(more) is Kind.PARTIAL


def test_quads_are_found_in_any_order() -> None:
    whole = machines.matrix(machines.DGX_1V)
    assert topology.quads(whole) == ([0, 1, 2, 3], [4, 5, 6, 7])
    links = machines.some(whole, (0, 5, 2, 7, 4, 1, 6, 3))
    assert topology.quads(links) == ([0, 2, 5, 7], [4, 6, 1, 3])


def test_islands() -> None:
    assert topology.islands(machines.matrix(machines.H100_NVL_4)) == [[0, 1], [2, 3]]
    four = machines.some(machines.matrix(machines.DGX_1V), (0, 1, 2, 7))
    assert topology.islands(four) == [[0, 1, 2], [3]]


def unknown_access(links: Matrix) -> Matrix:
    return [[link._replace(peer=None) for link in row] for row in links]


def test_unknown_access_over_pcie_is_taken_for_access() -> None:
    """`symmetric` takes it so too; its rendezvous says where there is none."""
    assert kind_of(unknown_access(machines.matrix(machines.RTX_4090_4))) is Kind.PCIE


# --- the schedule ---


def check(schedule: Schedule, links: Matrix) -> None:
    """Every rank gets every other's shard once, over NVLinks, from a rank that has it by then."""
    size = len(links)
    has = [{rank} for rank in range(size)]
    for step in (schedule.first, schedule.second):
        before = [set(shards) for shards in has]
        for move in step:
            assert links[move.source][move.target].nvlinks > 0
            assert move.owner in before[move.source]
            assert move.owner not in has[move.target]
            has[move.target].add(move.owner)
    assert has == [set(range(size))] * size


def least_load(links: Matrix) -> float:
    """By trying all choices of relays for each target: they do not touch each other's links."""
    worst = 0.0
    size = len(links)
    for target in range(size):
        near = topology.neighbours(links, target)
        far = [owner for owner in range(size) if owner != target and owner not in near]
        ways = [[n for n in near if links[n][owner].nvlinks] for owner in far]
        worst = max(
            worst,
            min(
                max((1 + relays.count(n)) / links[n][target].nvlinks for n in near)
                for relays in product(*ways)
            ),
        )
    return worst


@pytest.mark.parametrize("text", [machines.DGX_1V, machines.DGX_1P], ids=["V100", "P100"])
@pytest.mark.parametrize("seed", range(10))
def test_cube_mesh(text: str, seed: int) -> None:
    links = machines.shuffled(machines.matrix(text), seed)
    schedule = schedule_of(links)
    assert schedule is not None
    check(schedule, links)
    assert len(schedule.first) == 8 * 4 and len(schedule.second) == 8 * 3
    # Over the partners' links alone it would be four on a single link.
    assert schedule.load(links) == least_load(links) == 2


def test_cube_mesh_spares_single_links_where_it_can() -> None:
    """GPU 4 gets the shards of 1 and 2 by the double link from 0, that of 3 by the double one
    from 7: no link of it carries more than 1.5 for each NVLink."""
    links = machines.matrix(machines.DGX_1V)
    schedule = schedule_of(links)
    assert schedule is not None
    assert [move for move in schedule.second if move.target == 4] == [
        (1, 0, 4),
        (2, 0, 4),
        (3, 7, 4),
    ]


@given(st.sets(st.integers(0, 7), min_size=2), st.randoms(use_true_random=False))
def test_any_part_of_a_cube_mesh(gpus: set[int], order: object) -> None:
    chosen = sorted(gpus)
    order.shuffle(chosen)  # type: ignore[attr-defined]
    links = machines.some(machines.matrix(machines.DGX_1V), chosen)
    schedule = schedule_of(links)
    far = [
        pair
        for pair in combinations(range(len(links)), 2)
        if not links[pair[0]][pair[1]].nvlinks
        and not set(topology.neighbours(links, pair[0])) & set(topology.neighbours(links, pair[1]))
    ]
    assert (schedule is None) == bool(far)
    if schedule is not None:
        check(schedule, links)
        assert schedule.load(links) == least_load(links)


@given(st.integers(2, 8), st.data())
def test_any_graph(size: int, data: st.DataObject) -> None:
    links = [[Link() for _ in range(size)] for _ in range(size)]
    for a, b in combinations(range(size), 2):
        links[a][b] = links[b][a] = Link(data.draw(st.integers(0, 2)))
    schedule = schedule_of(links)
    if schedule is not None:
        check(schedule, links)
        assert schedule.load(links) == least_load(links)
        assert topology.islands(links) == [list(range(size))]
    assert schedule_of(links) == schedule
    kind = kind_of(links)
    assert (kind in topology.FULLY_CONNECTED) == all(
        links[a][b].nvlinks for a, b in combinations(range(size), 2)
    )


def test_all_pairs_need_no_second_step() -> None:
    for text in (machines.DGX_2, machines.DGX_H100, machines.HGX_H100_4):
        links = machines.matrix(text)
        schedule = schedule_of(links)
        assert schedule is not None and schedule.second == ()
        check(schedule, links)


def test_no_way_without_a_common_neighbour() -> None:
    assert schedule_of(machines.matrix(machines.H100_NVL_4)) is None
    assert schedule_of(machines.matrix(machines.PCIE_8)) is None
    chain = machines.matrix("X NV1 SYS SYS\nNV1 X NV1 SYS\nSYS NV1 X NV1\nSYS SYS NV1 X")
    assert schedule_of(chain) is None
    assert schedule_of(machines.some(chain, (0, 1, 2))) is not None


def test_more_gpus_than_are_looked_at() -> None:
    links = machines.matrix(machines.switched(9, 1))
    links[0][1] = links[1][0] = Link()
    assert schedule_of(links) is None
