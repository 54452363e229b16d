"""What the tests of gathers before a streaming kernel, and of scatters by one, run: ranks of one
process on one GPU, and ranks of a pool."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from collectives_stand_in import METHODS, StandIn
from gpu_work import group_of, last_ranks
from streamed_sum_work import SHAPES, configs, randn

import agmm
from agmm import _core
from agmm.ops import async_input_mm, invariant
from agmm.planning.problems import KernelConfig
from agmm.runtime import cuda_calls


class Gathers:
    """The operands of all ranks, whose rows each of them gathers and multiplies by its own B."""

    def __init__(
        self, world_size: int, shape: tuple[int, int, int], config: KernelConfig, *, bias: bool
    ) -> None:
        m, n, k = shape
        self.config = config
        self.shards = [randn(m, k) for _ in range(world_size)]
        self.Bs = [randn(n, k).t() for _ in range(world_size)]
        self.biases = [randn(n) if bias else None for _ in range(world_size)]
        self.As = [torch.full((world_size * m, k), torch.nan).to(self.shards[0]) for _ in self.Bs]
        self.outs = [torch.full((world_size * m, n), torch.nan).to(self.As[0]) for _ in self.Bs]
        gathered = torch.cat(self.shards)
        self.wanted = [
            async_input_mm.on_cuda(gathered, B, None, 0, config=config, bias=one)
            for B, one in zip(self.Bs, self.biases, strict=True)
        ]

    def enqueue(self, ranks: StandIn, rank: int, method: _core.CollectiveMethod) -> None:
        shard, A, B = self.shards[rank], self.As[rank], self.Bs[rank]
        kernel = cuda_calls.Kernel(self.config.core, cuda_calls.plain_format("A", A))
        problem = cuda_calls.ready_matmul(A, B, None, 0, kernel).problem
        given = shard, A, B, self.biases[rank], self.outs[rank]
        addresses = [0 if one is None else one.data_ptr() for one in given]
        stream = ranks.streams[rank].cuda_stream
        ranks.cores[rank].gathered_matmul(method, problem, addresses, shard.nbytes, stream)

    def wrong(self, rank: int) -> torch.Tensor:
        is_gathered = self.As[rank] != torch.cat(self.shards)
        return (self.outs[rank] != self.wanted[rank]).sum() + is_gathered.sum()


def wrong_gathers_on_one_gpu(world_size: int, calls: int, seed: int) -> list[str]:
    """Faults of gathers of every kernel in turn, before which some ranks are late."""
    ranks, draw, sets = StandIn(world_size), random.Random(seed), []
    for shape in SHAPES:
        for i, config in enumerate(configs(*shape[1:])):
            sets.append((shape, Gathers(world_size, shape, config, bias=i % 2 == 1)))
    wrong = torch.zeros(len(sets), dtype=torch.int64, device="cuda")
    for call in range(calls):
        index = call if call < len(sets) else draw.randrange(len(sets))
        _, gathers = sets[index]
        # Blocks let nothing start before they have ended.
        method = METHODS[0] if draw.random() < 0.8 else METHODS[2]
        for rank, stream in enumerate(ranks.streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                gathers.As[rank].fill_(torch.nan)
                gathers.outs[rank].fill_(torch.nan)
                if draw.random() < 0.3:
                    torch.cuda._sleep(draw.randrange(1, 200_000))
            gathers.enqueue(ranks, rank, method)
        ranks.wait()
        for rank in range(world_size):
            wrong[index] += gathers.wrong(rank)
    faults = [
        f"{shape} by {gathers.config.name}: {count}"
        for (shape, gathers), count in zip(sets, wrong.tolist(), strict=True)
        if count
    ]
    left = ranks.unclean_words()
    return [*faults, *([f"{left} words left behind"] if left else [])]


# --- ranks of a pool ---


def _numbers(seed: int, *sizes: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(sizes, generator=generator, device="cuda").bfloat16()


def _product(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    return async_input_mm.on_cuda(A, B, None, 0, config=invariant.kernel_of(A, B))


class _Case:
    """A call of either op on a group, and what it is by its definition."""

    def __init__(self, op: str, shape: tuple[int, int, int], group: dist.ProcessGroup) -> None:
        self.op, self.group = op, group
        self.rank, self.ranks = dist.get_rank(group), group.size()
        self.m, self.n, self.k = shape
        is_gather = op == "gather"
        rows = self.m if is_gather else self.m * self.ranks
        self.As = [_numbers(self.m + r, rows, self.k) for r in range(self.ranks)]
        self.Bs = [_numbers(self.n + r, self.n, self.k).t() for r in range(self.ranks)]
        self.bias, self.residual = _numbers(5, self.n), _numbers(6, self.m, self.n)
        self.A, self.B = self.As[self.rank].clone(), self.Bs[self.rank]

    def __call__(self, config: str = "streamed") -> torch.Tensor:
        options: Any = {"bias": self.bias, "config": config, "strict": True}
        if self.op == "gather":
            gathered: torch.Tensor = agmm.all_gather_matmul(self.A, self.B, self.group, **options)
            return gathered
        options |= {"residual": self.residual, "reduce_op": "avg"}
        out: torch.Tensor = agmm.matmul_reduce_scatter(self.A, self.B, self.group, **options)
        return out

    def wanted(self, factor: float = 1.0) -> torch.Tensor:
        As = [A * factor for A in self.As]
        if self.op == "gather":
            A = torch.cat(As)
            kernel = invariant.kernel_of(A, self.B)
            return async_input_mm.on_cuda(A, self.B, None, 0, config=kernel, bias=self.bias)
        total: Any = None
        for A, B in zip(As, self.Bs, strict=True):
            part = _product(A, B).float()
            total = part if total is None else total + part
        mine = (total * (1.0 / self.ranks)).chunk(self.ranks)[self.rank]
        found: torch.Tensor = (mine + self.bias.float() + self.residual.float()).bfloat16()
        return found


def values(world_size: int, op: str) -> list[str] | None:
    """Faults of eager, kept and captured calls, in turn with calls of collectives."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    faults = []
    for shape in ((1, 8192, 1024), (3, 264, 1032), (16, 4096, 896)):
        case = _Case(op, shape, group)
        label, wanted = f"rank {case.rank}: {shape}", case.wanted()
        for turn in range(3):
            agmm.collectives.all_reduce(case.A, group)
            if not torch.equal(case(), wanted):
                faults.append(f"{label}, call {turn}")
        torch.cuda.synchronize()
        dist.barrier(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            replayed = [case() for _ in range(3)]
        for factor in (1.0, 0.5):  # which changes no digit
            case.A.copy_(case.As[case.rank] * factor)
            scaled = case.wanted(factor)
            graph.replay()
            faults += [
                f"{label}, replay at {factor}" for one in replayed if not torch.equal(one, scaled)
            ]
            if not torch.equal(case(), scaled):
                faults.append(f"{label}, between replays")
        del graph
    return faults


def stress(world_size: int, calls: int, seed: int) -> list[str] | None:
    """Faults of many calls of both ops, in turn with collectives, by ranks that are late."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    draw, own = random.Random(seed), random.Random(100 * seed + dist.get_rank(group))
    shapes = ((1, 2048, 512), (2, 264, 1032), (5, 1000, 520))
    cases = [_Case(op, shape, group) for op in ("gather", "scatter") for shape in shapes]
    wanted = [case.wanted() for case in cases]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(calls):
        index = draw.randrange(len(cases))
        if own.random() < 0.05:
            torch.cuda._sleep(own.randrange(1, 500_000))
        wrong += (cases[index]() != wanted[index]).sum()
        if draw.random() < 0.2:
            agmm.collectives.all_reduce(cases[index].A, group)
    found = int(wrong)
    return [f"rank {dist.get_rank(group)}: {found} elements of {calls} calls"] if found else []


def missing(op: str) -> None:
    """Rank 1 stays away from the second call."""
    group = dist.group.WORLD
    assert group is not None
    case = _Case(op, (2, 1024, 512), group)
    case()
    torch.cuda.synchronize()
    if dist.get_rank() != 1:
        case()
        torch.cuda.synchronize()
    time.sleep(30)
