"""The portable path of GPUs that share no memory: ranks that take themselves to be on several
hosts, or that are told that they have no peer access. NCCL carries their messages."""

from __future__ import annotations

import time
from collections.abc import Callable

import portable_gpu_work
import pytest
import spanning_gpu_work as work
from at_hand import RANKS, needs_nccl, needs_two

from agmm.testing.ranks import RankError, RankPool

pytestmark = [needs_two, needs_nccl]

HOSTS = [
    pytest.param(hosts, marks=pytest.mark.skipif(len(hosts) > RANKS, reason="needs more GPUs"))
    for hosts in ("ab", "aabb", "abab", "abbb", "aabc")
]
"""The host of each rank; "" would be one host."""


def check(results: list[list[str]]) -> None:
    assert [fault for faults in results for fault in faults] == []


@pytest.mark.parametrize("hosts", [*HOSTS, ""])
@pytest.mark.parametrize("case", portable_gpu_work.CASES, ids=str)
def test_results(
    rank_pools: Callable[..., RankPool], case: portable_gpu_work.Case, hosts: str
) -> None:
    """Gathers, scatters and all-reduces are right; without hosts, between ranks that have no peer
    access."""
    check(rank_pools(len(hosts) or 2, "cuda").run(work.results, hosts, case))


@pytest.mark.parametrize("hosts", [*HOSTS, "aa"])
def test_fp8(rank_pools: Callable[..., RankPool], hosts: str) -> None:
    """The path by copies inside one host, too."""
    check(rank_pools(len(hosts), "cuda").run(work.fp8, hosts))


@pytest.mark.parametrize("messages", ["off", "on"])
@pytest.mark.parametrize("hosts", [*HOSTS, ""])
def test_async_tp_and_layers(
    rank_pools: Callable[..., RankPool], hosts: str, messages: str
) -> None:
    pool = rank_pools(len(hosts) or 2, "cuda")
    check(pool.run(work.async_tp_and_layers, hosts, messages))


@pytest.mark.parametrize("hosts", HOSTS)
def test_graphs_and_calls(rank_pools: Callable[..., RankPool], hosts: str) -> None:
    check(rank_pools(len(hosts), "cuda").run(work.graphs, hosts))


@pytest.mark.parametrize("hosts", HOSTS[:1])
def test_what_comes_is_multiplied_while_the_rest_is_on_its_way(
    rank_pools: Callable[..., RankPool], hosts: str
) -> None:
    check(rank_pools(len(hosts), "cuda").run(work.overlaps, hosts))


@pytest.mark.parametrize("kind", ["late", "killed"])
@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_ends_with_a_message(kind: str, op: str) -> None:
    with RankPool(2, "cuda", 120, {"AGMM_TIMEOUT_S": "2"}) as pool:
        begin = time.monotonic()
        with pytest.raises(RankError) as failure:
            pool.run(work.missing, "ab", op, kind)
        assert time.monotonic() - begin < 90
        stderr = pool.stderr(0)
    assert failure.value.exit_codes.get(0) == 124, (failure.value, stderr)
    assert "waited 2 s for messages of other ranks" in stderr, stderr
