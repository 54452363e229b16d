"""Ids of experts of all ranks, their order by agmm's kernel and by torch's ops, on one GPU."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

import agmm
from agmm.ops import routing
from agmm.runtime import cuda_routing

NAMES = ("tokens", "choices", "counts", "offsets", "positions")
FITS = "as many rows as there is room for"
"""What `ends` says before the call that the device ends."""
Found = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    """Ids, and what a rank asks of them."""

    tokens: int
    k: int
    experts: int
    """How many there are on all ranks."""
    ranks: int = 1
    spread: str = "even"
    """Which experts the tokens want: "even", "zipf", or "one", which all of them want."""
    dropped: float = 0.0
    """The share of choices that no expert gets."""
    room: int = 0
    """The rows that there is room for beyond all choices; below 0 fewer."""
    dtype: torch.dtype = torch.int64

    @property
    def label(self) -> str:
        """The case in words that are the same in every run."""
        sizes = f"{self.tokens}x{self.k} of {self.experts} on {self.ranks}"
        return f"{sizes}, {self.spread}, {self.dropped} dropped, room {self.room}, {self.dtype}"

    @property
    def held(self) -> int:
        """The experts of each rank."""
        return self.experts // self.ranks

    @property
    def capacity(self) -> int:
        """The rows that there is room for."""
        return max(0, self.tokens * self.k + self.room)


CASES = [
    # one CTA: less than a step of a warp, whole steps, an odd end, all that it takes
    *[Case(tokens, k, 8) for tokens, k in ((1, 1), (3, 2), (16, 2), (512, 8), (255, 16))],
    # the least for a cluster, an odd end of one, and the most that there is
    *[Case(tokens, k, 128, 4) for tokens, k in ((4097, 1), (1025, 5), (8192, 8), (16384, 8))],
    # experts: one for each thread, more than those of one rank, whole ones of all ranks
    *[Case(3000, 8, experts, ranks) for experts, ranks in ((512, 1), (2048, 4), (64, 64), (1, 1))],
    *[Case(tokens, 8, 64, 2, spread) for tokens in (60, 2000) for spread in ("zipf", "one")],
    *[Case(tokens, 4, 16, 2, "zipf", dropped) for tokens in (99, 3001) for dropped in (0.3, 1.0)],
    # more rows of room than choices, and fewer than there are rows
    *[Case(77, 8, 64, 2, room=room) for room in (1000, -600)],
    *[Case(4000, 8, 64, 2, room=room) for room in (700, -31000)],
]
"""The ids whose order is compared."""
LARGEST = Case(16385, 8, 128, 4)
"""One choice of each token more than the kernel takes of 16,384."""


def ids_of(case: Case, seed: int = 0) -> torch.Tensor:
    """The ids of a case, drawn: a token may name an expert twice, and ids below 0 are any."""
    draw = torch.Generator("cuda").manual_seed(seed)
    shape, experts = (case.tokens, case.k), case.experts
    where = torch.rand(shape, device="cuda", generator=draw)
    if case.spread == "one":
        where = torch.ones_like(where)
    elif case.spread == "zipf":
        where = experts**where / experts
    ids = (where * experts).long().clamp(max=experts - 1)
    gone = torch.rand(shape, device="cuda", generator=draw) < case.dropped
    lowest = torch.iinfo(case.dtype).min
    ids[gone] = torch.where(where < 0.5, -1, lowest)[gone]
    return ids.to(case.dtype)


def garbage(case: Case) -> None:
    """Leave numbers that are no rows in the allocator's free blocks, where results come from."""
    sizes = case.capacity, case.capacity, case.held, case.held + 1, case.tokens * case.k
    held = [torch.full((size,), -77, dtype=torch.int32, device="cuda") for size in sizes]
    del held


def by_kernel(case: Case, ids: torch.Tensor, rank: int, *, checks: bool = False) -> Found | None:
    """What agmm's kernel makes of the ids, of a rank; None where it does not take them."""
    sizes = case.experts, rank * case.held, case.held, case.capacity
    return cuda_routing.routed(ids, *sizes, checks_capacity=checks)


def by_ops(case: Case, ids: torch.Tensor, rank: int) -> Found:
    """What torch's ops make of them."""
    return routing.rows_of(ids, rank * case.held, case.held, case.capacity)


def differences(case: Case, found: Found, wanted: Found) -> list[str]:
    """The tensors that differ, in any bit."""
    return [
        f"{case.label}: {name}"
        for name, one, other in zip(NAMES, found, wanted, strict=True)
        if one.dtype != other.dtype or not torch.equal(one, other)
    ]


def ends(what: str) -> None:
    """A call of a captured graph that the device ends, behind one that it does not: ids come that
    are too large, or more rows than there is room for; of another rank than this one."""
    case = Case(600, 8, 16, 4, room=-4000)
    ids = torch.full((case.tokens, case.k), -1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    by_kernel(case, ids, 0, checks=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        assert by_kernel(case, ids, 0, checks=True) is not None
    ids.view(-1)[: case.capacity] = 15
    graph.replay()
    torch.cuda.synchronize()
    print(FITS, flush=True)
    if what == "id":
        ids[-1, -1] = 16
    else:
        ids.view(-1)[case.capacity] = 15
    graph.replay()
    torch.cuda.synchronize()


def through_the_op() -> None:
    """A call of the public function in a group of one rank, which makes one launch of agmm's, none
    of a sort, and the same bits."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    case = Case(700, 8, 64)
    ids = ids_of(case)
    agmm.moe.route(ids, num_experts=case.experts)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = agmm.moe.route(ids, num_experts=case.experts)
        torch.cuda.synchronize()
    launches = {event.key: event.count for event in profile.key_averages()}
    ours = [count for name, count in launches.items() if "route_kernel" in name]
    assert ours == [1], launches
    assert not any("radix" in name.lower() for name in launches), launches
    assert differences(case, found[:5], by_ops(case, ids, 0)) == []
    print("one launch", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "op":
        through_the_op()
    else:
        ends(sys.argv[1])
