"""What the tests of `agmm.collectives` and `agmm.check_nan` on GPUs run inside the ranks of a
pool."""

from __future__ import annotations

import itertools
import random
import time
from functools import partial
from typing import Any
from unittest import mock

import normed_sum_work
import torch
import torch.distributed as dist
from gpu_work import COPY_SLOT_BYTES, group_of, last_ranks

import agmm
from agmm.runtime import copies, group_topology
from agmm.runtime.topology import Link
from agmm.runtime.workspaces import collectives_workspace

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_SHAPES: list[tuple[int, ...]]
_SHAPES = [(), (0,), (1,), (7,), (2, 3), (3, 1, 5), (1001,), (300_001,), (1_500_007,)]
"""The last one is more than is NCCL's without strict=True."""


def _inputs(
    kind: str, shape: tuple[int, ...], world_size: int, dim: int, dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """The tensor of each rank: whole numbers, whose sums are exact in any order."""
    sizes = list(shape)
    if kind == "reduce_scatter":
        sizes[dim] *= world_size
    generators = [torch.Generator("cuda").manual_seed(100 * seed + r) for r in range(world_size)]
    return [
        torch.randint(-4, 5, sizes, generator=generator, device="cuda").to(dtype)
        for generator in generators
    ]


def _wanted(kind: str, every: list[torch.Tensor], op: str, dim: int, rank: int) -> torch.Tensor:
    if kind == "all_gather":
        return torch.cat([x.reshape(1) if x.dim() == 0 else x for x in every], dim)
    total = torch.stack(every).double().sum(0)
    total = (total / len(every) if op == "avg" else total).to(every[0].dtype)
    return total.chunk(len(every), dim)[rank] if kind == "reduce_scatter" else total


def _call(kind: str, x: torch.Tensor, group: Any, op: str, dim: int, **options: Any) -> Any:
    """Makes the call by a kernel."""
    options["strict"] = True
    if kind == "all_gather":
        return agmm.collectives.all_gather(x, group, dim=dim, **options)
    if kind == "reduce_scatter":
        return agmm.collectives.reduce_scatter(x, group, op=op, dim=dim, **options)
    return agmm.collectives.all_reduce(x, group, op=op, **options)


def values(world_size: int, kind: str, dtype: torch.dtype) -> list[str] | None:
    """Faults, in words: new results, given ones, in place, in the background."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for seed, (shape, op) in enumerate(itertools.product(_SHAPES, ("sum", "avg"))):
        for dim in range(max(1, len(shape))) if kind != "all_reduce" else (0,):
            if kind == "reduce_scatter" and not shape:
                continue
            every = _inputs(kind, shape, world_size, dim, dtype, seed)
            wanted, x = _wanted(kind, every, op, dim, rank), every[rank]
            given, strided = (torch.full_like(wanted, torch.nan) for _ in range(2))
            strided = torch.stack([strided, strided], -1)[..., 0]
            work = _call(kind, x, group, op, dim, async_op=True)
            _call(kind, x, group, op, dim, out=given)
            _call(kind, x, group, op, dim, out=strided)
            outs = [_call(kind, x, group, op, dim), given, strided, work.wait()]
            if kind == "all_reduce":
                outs.append(_call(kind, x, group, op, dim, out=x))
            for i, out in enumerate(outs):
                # An average may be rounded twice by the backend.
                close = torch.allclose(out.double(), wanted.double(), rtol=2**-7, atol=0)
                if out.shape != wanted.shape or not (close if op == "avg" else out.equal(wanted)):
                    faults.append(f"rank {rank}: {kind} {op} {shape} along {dim}: result {i}")
    return faults


def large(world_size: int) -> list[str] | None:
    """64 MB in all: many launches of a kernel, many pieces of copies."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for kind in KINDS:
        numbers = 32_000_001 // (1 if kind == "all_reduce" else world_size)
        every = _inputs(kind, (numbers,), world_size, 0, torch.bfloat16, 9)
        wanted, x = _wanted(kind, every, "sum", 0, rank), every[rank]
        options: list[dict[str, bool]] = [{}]
        if kind != "all_reduce":
            options.append({"low_contention": True})
        for each in options:
            # Ranks in several groups cannot make larger workspaces (`SymmetricWorkspace._agree`).
            with mock.patch.object(copies, "MOST_BYTES", COPY_SLOT_BYTES):
                found = _call(kind, x, group, "sum", 0, **each)
            if not torch.equal(found, wanted):
                faults.append(f"rank {rank}: {kind} {each}")
    return faults


def in_graphs(world_size: int) -> list[str] | None:
    """Replays in turn with eager calls, with new data each; the captured ones in the background
    too."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    x = torch.zeros(world_size * 64, device="cuda")
    for kind in KINDS:
        _call(kind, x, group, "sum", 0)
        torch.cuda.synchronize()
        dist.barrier(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work = _call(kind, x, group, "avg", 0, async_op=True)
            captured = _call(kind, x, group, "sum", 0)
            averaged = work.wait()
        for turn in range(20):
            x.fill_(turn + rank)
            graph.replay()
            work = _call(kind, x, group, "avg", 0, async_op=True)
            eager = _call(kind, x, group, "sum", 0)
            for found, wanted in ((captured, eager), (averaged, work.wait())):
                if not torch.equal(found, wanted) or not float(wanted.sum()) > 0:
                    faults.append(f"rank {rank}: {kind}, turn {turn}")
        del graph
    return faults


def in_turn(world_size: int, calls: int, seed: int) -> list[str] | None:
    """Calls of all kinds and sizes with new data each, in the background or not, by late ranks."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, draw = dist.get_rank(group), random.Random(seed)
    own = random.Random(100 * seed + rank)
    wrong = torch.zeros(len(KINDS), dtype=torch.int64, device="cuda")
    waiting: list[tuple[int, Any, torch.Tensor]] = []

    def finish() -> None:
        for which, work, wanted in waiting:
            wrong[which] += (work.wait() != wanted).sum()
        waiting.clear()

    for call in range(calls):
        which = draw.randrange(len(KINDS))
        kind, dtype = KINDS[which], draw.choice((torch.bfloat16, torch.float16, torch.float32))
        shape = (draw.choice((1, 7, 64, 1001, 4096, 50_000, 700_001)),)
        every = _inputs(kind, shape, world_size, 0, dtype, 1000 * seed + call)
        wanted, x = _wanted(kind, every, "sum", 0, rank), every[rank].clone()
        if own.random() < 0.3:
            torch.cuda._sleep(own.randrange(1, 2_000_000))
        if draw.random() < 0.4:
            waiting.append((which, _call(kind, x, group, "sum", 0, async_op=True), wanted))
            continue
        if kind == "all_reduce" and draw.random() < 0.5:
            found = _call(kind, x, group, "sum", 0, out=x)
        else:
            found = _call(kind, x, group, "sum", 0)
            x.fill_(torch.nan)  # behind the call
        wrong[which] += (found != wanted).sum()
        if len(waiting) > 3:
            finish()
    finish()
    faults = dict(zip(KINDS, wrong.tolist(), strict=True))
    return [f"rank {rank}: wrong elements {faults}"] if any(faults.values()) else []


def low_contention(world_size: int) -> list[str] | None:
    """Faults of calls by copies: eager, into given tensors and in the background, in turn with
    replays of a graph that has an odd number of each."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    options = {"low_contention": True}
    for kind in ("all_gather", "reduce_scatter"):
        for seed, numbers in enumerate((1, 1001, 300_000)):
            every = _inputs(kind, (numbers,), world_size, 0, torch.bfloat16, seed)
            wanted, x = _wanted(kind, every, "sum", 0, rank), every[rank].clone()
            given = torch.full_like(wanted, torch.nan)
            work = _call(kind, x, group, "sum", 0, async_op=True, **options)
            found = [_call(kind, x, group, "sum", 0, **options), given, work.wait()]
            _call(kind, x, group, "sum", 0, out=given, **options)
            torch.cuda.synchronize()
            dist.barrier(group)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                replayed = _call(kind, x, group, "sum", 0, **options)
            for turn in range(1, 21):
                x.copy_(every[rank] * turn)
                graph.replay()
                if turn % 3 == 0:
                    found.append(_call(kind, x, group, "sum", 0, **options) / turn)
                found.append(replayed / turn)
            for i, each in enumerate(found):
                if not torch.allclose(each.double(), wanted.double(), rtol=2**-6, atol=0):
                    faults.append(f"rank {rank}: {kind} of {numbers}: result {i}")
            del graph
    return faults


def repeated_bits(world_size: int) -> list[str] | None:
    """The bits of random data: the same in every call and on every rank, and those of sums in
    float32 in the order of the ranks."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for numbers in (1000, 100_000, 2_000_000):
        generator = torch.Generator("cuda").manual_seed(numbers)
        shape = world_size, numbers
        every = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        wanted = every[0].float()
        for other in every[1:]:
            wanted = wanted + other.float()
        for _ in range(3):
            if not torch.equal(
                _call("all_reduce", every[rank], group, "sum", 0), wanted.bfloat16()
            ):
                faults.append(f"rank {rank}: all_reduce of {numbers} has other bits")
    return faults


def normed(world_size: int) -> list[str] | None:
    """A norm behind the all-reduce: eager, and in a graph with new data."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    generator = torch.Generator("cuda").manual_seed(1)
    for rows, row in ((1, 8192), (5, 7), (130, 1024), (300, 4096)):
        shape = world_size + 1, rows, row
        every = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        weight = torch.randn(row, generator=generator, device="cuda").bfloat16()
        x, residual = every[rank].clone(), every[-1].clone()
        call = agmm.collectives.all_reduce_rms_norm
        call(x, residual, weight, 1e-5, group)
        torch.cuda.synchronize()
        dist.barrier(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            replayed = call(x, residual, weight, 1e-5, group)
        for turn in range(3):
            x.copy_(every[rank] * (turn + 1))
            graph.replay()
            eager = call(x, residual, weight, 1e-5, group)
            total = agmm.collectives.all_reduce(x, group) + residual
            exact = total.double()
            exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
            for found, summed in (eager, replayed):
                close = torch.allclose(found.double(), exact, rtol=2**-7, atol=1e-6)
                if not (close and torch.equal(summed, total) and torch.equal(found, eager[0])):
                    faults.append(f"rank {rank}: {rows} x {row}, turn {turn}")
        del graph
    return faults


def normed_sums(world_size: int) -> list[str] | None:
    """`agmm.matmul_all_reduce_rms_norm` of some and of many rows, and of rows among others."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    faults = []
    for shape in (*normed_sum_work.SHAPES, ((4,), 8192, 1024), ((600,), 4096, 512)):
        for dtype in (torch.bfloat16, torch.float16):
            faults += normed_sum_work.wrong(group, shape, dtype, "cuda")
    return faults + normed_sum_work.rows_alone(group, torch.bfloat16, "cuda", 4096)


def over_relays(matrix: list[list[Link]]) -> list[str]:
    """All ranks as if they had these links: bits of sums and gathers, by the relays' kernel."""
    group, faults = dist.group.WORLD, []
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group_topology.pretend(group, matrix)
    for seed, numbers in enumerate((1, 7, 1000, 30_000)):
        every = _inputs("all_reduce", (numbers,), world_size, 0, torch.bfloat16, seed)
        for kind in ("all_gather", "all_reduce"):
            wanted = _wanted(kind, every, "sum", 0, rank)
            if kind == "all_gather" and wanted.nbytes > 256 << 10:
                continue
            with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("by NCCL")):
                found = _call(kind, every[rank], group, "sum", 0)
            if not torch.equal(found, wanted):
                faults.append(f"rank {rank}: {kind} of {numbers}")
    try:
        _call("all_reduce", torch.zeros(300_000, device="cuda"), group, "sum", 0)
    except agmm.Unsupported:
        return faults
    return [*faults, f"rank {rank}: no limit of what goes over relays"]


_KERNEL = "128x128x64_1x1_pingpong"
"""A kernel of every build."""


def beside_a_matmul(world_size: int) -> list[str] | None:
    """The ops with a matmul of few rows: by a gather, and with a small all-reduce."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []

    def whole(*shape: int, seed: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randint(-2, 3, shape, generator=generator, device="cuda").bfloat16()

    for rows in (1, 7, 16):
        every, B = whole(world_size * rows, 256, seed=rows), whole(256, 128, seed=50 + rank)
        shard = every.chunk(world_size)[rank]
        for config in ("gather", f"{_KERNEL}/gather", None):
            found = agmm.all_gather_matmul(shard, B, group, return_A=True, config=config)
            if not (torch.equal(found[0], every) and torch.equal(found[1], every @ B)):
                faults.append(f"rank {rank}: {rows} rows by {config}")
        As = [whole(rows, 64, seed=100 + each) for each in range(world_size)]
        Bs = [whole(64, 128, seed=200 + each) for each in range(world_size)]
        wanted = sum(
            (A.float() @ B.float() for A, B in zip(As, Bs, strict=True)), torch.zeros(()).cuda()
        )
        if not torch.equal(agmm.matmul_all_reduce(As[rank], Bs[rank], group), wanted.bfloat16()):
            faults.append(f"rank {rank}: matmul_all_reduce of {rows} rows")
    return faults


def on_streams(world_size: int) -> list[str] | None:
    """Calls of two workspaces in turn, each on another stream than the one before: they come one
    after the other, and are right."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    generator = torch.Generator("cuda").manual_seed(3)
    shape = world_size * 128, 256
    whole = torch.randint(-2, 3, shape, generator=generator, device="cuda").bfloat16()
    shard, B = whole.chunk(world_size)[rank].clone(), whole[:128].t().contiguous()
    product = whole @ B
    total = whole.float().view(world_size, 128, 256).sum(0).bfloat16()
    for turn in range(12):
        torch.cuda.synchronize()
        dist.barrier(group)
        slept, ended = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(streams[turn % 2]):
            torch.cuda._sleep(100_000_000 if turn % world_size == rank else 1)
            slept.record()
            if turn % 4 < 2:
                found = agmm.all_gather_matmul(shard, B, group, strict=True)
            else:
                found = _call("all_reduce", shard, group, "sum", 0)
        with torch.cuda.stream(streams[1 - turn % 2]):
            if turn % 4 < 2:
                other = _call("all_reduce", shard, group, "sum", 0)
            else:
                other = agmm.all_gather_matmul(shard, B, group, strict=True)
            ended.record()
        while True:
            is_over = ended.query()  # asked first: both may come in between
            if slept.query():
                break
            if is_over:
                faults.append(f"rank {rank}, turn {turn}: a call ended before the one before began")
                break
        torch.cuda.synchronize()
        wanted = (product, total) if turn % 4 < 2 else (total, product)
        if not (torch.equal(found, wanted[0]) and torch.equal(other, wanted[1])):
            faults.append(f"rank {rank}, turn {turn}: wrong values")
    return faults


def late(late_s: float, numbers: int) -> list[str]:
    """Faults of calls to which rank 1 and the last one come late."""
    group, faults = dist.group.WORLD, []
    assert group is not None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.full((numbers,), float(rank), device="cuda")
    for turn in range(2):
        if turn == 1 and rank in (1, ranks - 1):
            time.sleep(late_s)
        total = _call("all_reduce", x, group, "sum", 0)
        if not bool((total == ranks * (ranks - 1) / 2).all()):
            faults.append(f"rank {rank}, turn {turn}: {total[:4].tolist()}")
    return faults


def missing(numbers: int) -> None:
    """Rank 1 stays away from the second call."""
    x = torch.ones(numbers, device="cuda")
    _call("all_reduce", x, None, "sum", 0)
    torch.cuda.synchronize()
    if dist.get_rank() != 1:
        _call("all_reduce", x, None, "sum", 0)
        torch.cuda.synchronize()
    time.sleep(30)


def different(numbers: int) -> None:
    """Rank 1 sums other numbers."""
    x = torch.ones(numbers, device="cuda")
    _call("all_reduce", x, None, "sum", 0)
    torch.cuda.synchronize()
    _call("all_reduce", x[: numbers - dist.get_rank() % 2], None, "sum", 0)
    torch.cuda.synchronize()
    time.sleep(30)


def reserved_and_released() -> list[str]:
    """Faults of ranks of its own: memory is taken before a capture, and given back without
    graphs."""
    group = dist.group.WORLD
    assert group is not None
    faults, device = [], torch.device("cuda", torch.cuda.current_device())
    workspace = collectives_workspace(group, device)
    x = torch.ones(1000, device="cuda")
    _call("all_reduce", x, group, "sum", 0)
    agmm.release(group, device=device)
    if workspace.is_ready:
        faults.append("it has memory after its release")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            _call("all_reduce", x, group, "sum", 0)
        faults.append("a capture took memory")
    except agmm.AgmmError as error:
        if "during CUDA graph capture" not in str(error):
            faults.append(str(error))
    agmm.reserve(group, 0, device=device, op="all_reduce")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total = _call("all_reduce", x, group, "sum", 0)
    graph.replay()
    if not bool((total == dist.get_world_size()).all()):
        faults.append("a replay is wrong")
    try:
        agmm.release(group, device=device)
        faults.append("memory of a graph was released")
    except agmm.AgmmError:
        pass
    return faults


def nan_warned(world_size: int) -> None:
    """Rank 1 of the group sends a NaN in every op, twice."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return
    rank = dist.get_rank(group)
    shard = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    if rank == 1:
        shard[3, 5] = torch.nan
    agmm.check_nan("warn")
    try:
        for _ in range(2):
            agmm.all_gather_matmul(shard, shard, group)
            agmm.matmul_reduce_scatter(shard.repeat(world_size, 1), shard, group)
            agmm.collectives.all_reduce(shard, group)
            torch.cuda.synchronize()
    finally:
        agmm.check_nan("off")  # says what came


def nan_warned_of_fp8(world_size: int) -> None:
    """Rank 1 of the group has a NaN in an operand or a scale of each call, all by kernels."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return

    def ones(*shape: int, at: tuple[int, int] | None = None) -> torch.Tensor:
        found = torch.ones(shape, device="cuda")
        if at is not None and dist.get_rank(group) == 1:
            found[at] = torch.nan
        return found

    f8, many, bad = torch.float8_e4m3fn, 64 * world_size, (3, 5)
    B, of_b = ones(64, 64).to(f8).t(), ones(1, 64)
    agmm.check_nan("warn")
    try:
        for _ in range(2):
            gather: Any = partial(agmm.all_gather_scaled_matmul, group=group, strict=True)
            gather(ones(64, 64, at=bad).to(f8), B, ones(64, 1), of_b)
            gather(ones(64, 64).to(f8), B, ones(64, 1, at=(3, 0)), of_b)
            scatter: Any = partial(agmm.scaled_matmul_reduce_scatter, group=group, strict=True)
            scatter(ones(many, 64, at=bad).to(f8), B, ones(many, 1), of_b)
            scatter(ones(many, 64).to(f8), B, ones(many, 1), ones(1, 64, at=(0, 5)))
            shard, weight = ones(64, 64, at=bad).bfloat16(), ones(64, 64).bfloat16()
            agmm.all_gather_matmul(shard, weight, group, quantize="tensorwise", strict=True)
            torch.cuda.synchronize()
    finally:
        agmm.check_nan("off")  # says what came


def nan_raised(world_size: int) -> list[str] | None:
    """Every rank has one, so none waits for another."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    shard = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    bad = shard.clone()
    bad[3, 5] = torch.nan
    calls = [
        lambda x: agmm.all_gather_matmul(x, shard, group),
        lambda x: agmm.matmul_reduce_scatter(x.repeat(world_size, 1), shard, group),
        lambda x: agmm.collectives.all_gather(x, group),
    ]
    found = []
    for call in calls:
        call(shard)  # kept
        agmm.check_nan("raise")
        try:
            call(shard)
            call(bad)
        except agmm.AgmmError as error:
            found.append(str(error).split(":")[0] + str(error).split("NaN at ")[1].split(" of")[0])
        finally:
            agmm.check_nan("off")
        call(shard)
    return found
