"""Groups that span hosts: who exchanges with whom, and products of CPU ranks that play them."""

from __future__ import annotations

import hosts_work
import pytest
import torch

from agmm.runtime.host_layout import layout_of
from agmm.testing.ranks import RankPool

HOSTS = ["ab", "aabb", "abab", "abb", "aaab", "abc", "aabbc"]
"""The host of each rank: equal and uneven numbers of ranks, interleaved ones, three hosts."""


@pytest.mark.parametrize("hosts", [*HOSTS, "aaaabbbbcc", "abcabcabca"])
def test_each_shard_goes_to_each_other_host_once(hosts: str) -> None:
    layout = layout_of(hosts)
    assert sorted(rank for ranks in layout.hosts for rank in ranks) == list(range(len(hosts)))
    for host, ranks in enumerate(layout.hosts):
        carried = [other for rank in ranks for other in layout.carried(rank)]
        assert sorted(carried) == [r for r in range(len(hosts)) if layout.host_of(r) != host]
        for rank in ranks:
            for other in layout.carried(rank):
                assert layout.carrier(other, host) == rank
        # The work is shared as equally as it can be, between hosts of as many ranks.
        assert layout.rounds(host) >= -(-len(carried) // len(ranks))


def test_hosts_of_as_many_ranks_exchange_along_rails() -> None:
    layout = layout_of("aaaabbbb")
    assert [layout.carrier(rank, 1) for rank in range(4)] == [4, 5, 6, 7]
    assert [layout.rounds(host) for host in (0, 1)] == [1, 1]


@pytest.mark.parametrize("hosts", HOSTS)
def test_products(hosts: str) -> None:
    # Ranks of their own: some of those that tests share have been in more groups than others.
    with RankPool(len(hosts)) as pool:
        for rows, dtype in ((1, torch.float32), (7, torch.bfloat16)):
            assert pool.run(hosts_work.products, hosts, rows, dtype) == [[]] * len(hosts)


def test_calls_that_differ_between_hosts_are_found() -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "2"}) as pool:
        found = pool.run(hosts_work.different, "ab")
    assert all("wanted the same calls on all ranks" in error for error in found), found
    assert [f"rank {rank}: waited" in error for rank, error in enumerate(found)] == [True, True]


@pytest.mark.slow
def test_a_host_that_does_not_come_is_named() -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "2"}) as pool:
        found = pool.run(hosts_work.missing, "ab", 2.0)
    assert "rank 0: waited for rank 1, on another host, in all_gather_matmul(" in found[0]
    assert "within 2 s" in found[0]


def test_rows_of_the_own_host_come_first_then_chunk_by_chunk() -> None:
    with RankPool(4) as pool:
        orders = pool.run(hosts_work.order_of, "aabb")
    for order in orders:
        near, far = [[start for is_far, start in order if is_far is one] for one in (False, True)]
        assert order == [(False, start) for start in near] + [(True, start) for start in far]
        assert sorted(near) == sorted(far) == far == [0, 0, 2, 2, 4, 4, 6, 6]
