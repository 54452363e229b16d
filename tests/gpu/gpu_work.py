"""What the GPU tests run inside the ranks. A rank that is not in the group returns None."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import agmm
from agmm import _core
from agmm.planning import call_plans
from agmm.planning.plans import KernelConfig
from agmm.runtime.workspaces import (
    collectives_workspace,
    cuda_workspace,
    gather_copies,
    scatter_copies,
    scatter_workspace,
)
from agmm.testing.cases import LocalShape
from agmm.testing.reference import allowed_error, gathered_product, relative_error

Faults = list[str] | None
_NAN_BYTE = 0xFF
SLOT_BYTES = 64 << 20
"""Large enough for every shape of the tests but the one that grows the workspace."""
PART_BYTES = 8 << 20
"""The same of what ranks send each other in a scatter."""
COPY_SLOT_BYTES = 4 << 20
"""Of the tests that send by copy engines."""
WAYS = {
    "planned": (False, ""),
    "planned-A": (True, ""),
    "push": (False, "push"),
    "push-A": (True, "push"),
    "pull": (True, "pull"),
    "sm": (False, "sm4x64"),
    "sm-A": (True, "sm16x128+1"),
    "sm-ctas": (False, "sm64x64h4"),
    "split": (False, "push"),
    "sm-split-A": (True, "sm8x64"),
}
"""Whether A is returned, and the transport; "" for the planned one, which depends on the shape."""
ALL_WAYS = tuple(WAYS)
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def config_of(way: str) -> str | None:
    """What to call with: a kernel that goes with every transport, or one that splits K; None: the
    planned one."""
    _, transport = WAYS[way]
    if not transport:
        return None
    kernels = call_plans.kernels()
    if "split" in way:  # in a build without such a kernel it is the transport alone
        kernels = tuple(replace(k, splits=2) for k in kernels if k.can_split) or kernels
    return f"{kernels[0].name}/{transport}"


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of these global ranks; None in the other ranks. Collective over all ranks."""
    if not _groups:
        _make_groups()
    return _groups[ranks] if dist.get_rank() in ranks else None


def _make_groups() -> None:
    """Every group of the tests, and their workspaces, the larger ones first.

    torch's rendezvous needs ranks that have taken part in equally many before.
    """
    everyone = dist.get_world_size()
    for ranks in [last_ranks(size) for size in range(everyone, 0, -1)]:
        _groups[ranks] = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            cuda_workspace(_groups[ranks], device()).ensure(SLOT_BYTES)
            scatter_workspace(_groups[ranks], device()).ensure(PART_BYTES)
            gather_copies(_groups[ranks], device()).ensure(COPY_SLOT_BYTES)
            scatter_copies(_groups[ranks], device()).ensure(COPY_SLOT_BYTES)
            collectives_workspace(_groups[ranks], device()).ensure(1)


def last_ranks(world_size: int) -> tuple[int, ...]:
    """The last ones, so that ranks in the group differ from the global ones."""
    everyone = dist.get_world_size()
    return tuple(range(everyone - world_size, everyone))


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def poison(group: dist.ProcessGroup) -> None:
    """Fill the gather buffers with NaN while no rank of the group is using them."""
    if dist.get_world_size(group) == 1:
        return
    buffers = cuda_workspace(group, device()).buffers
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    if buffers is not None:
        size = _core.CudaWorkspace.words_offset(buffers.core.slot_bytes, dist.get_world_size(group))
        buffers.memory[:size].fill_(_NAN_BYTE)
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device()).to(dtype)


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small whole numbers: sums of a few thousand products are exact in float32."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator, device=device()).to(torch.bfloat16)


def poison_freed_memory(nbytes: int) -> None:
    """Leave NaN in the allocator's free blocks, where the next outputs come from."""
    torch.full((nbytes // 2 + 512,), torch.nan, dtype=torch.bfloat16, device=device())


def fault(
    label: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None
) -> list[str]:
    reference = gathered_product(A, B, bias)
    plain = torch.mm(A, B) if bias is None else torch.addmm(bias, A, B)
    error = relative_error(out, reference)
    allowed = allowed_error(relative_error(plain, reference))
    return [] if error <= allowed else [f"{label}: error {error:.3g}, allowed {allowed:.3g}"]


def products(
    world_size: int,
    shapes: list[LocalShape],
    dtype: torch.dtype,
    column_major: bool,
    return_A: bool,
    config: str | None = None,
    weights: int = 1,
    with_bias: bool = False,
    leading: int | None = None,
) -> Faults:
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank = dist.get_rank(group)
    faults: list[str] = []
    for seed, shape in enumerate(shapes):
        label = f"{shape} {dtype} {column_major=} {return_A=} rank {rank}/{world_size} {config}"
        inner = (shape.K,) if leading is None else (leading, shape.K)
        A = randn((world_size * shape.M_local, *inner), dtype, seed)
        shard = A[rank * shape.M_local : (rank + 1) * shape.M_local].clone()
        Bs, biases = [], []
        for i in range(weights):
            n = shape.N + 8 * i
            weight = randn((n, shape.K), dtype, 1000 + 10 * seed + rank + i)
            Bs.append(weight.t() if column_major else weight.t().contiguous())
            biases.append(randn((n,), dtype, 77 + i) if with_bias else None)
        poison(group)
        for _ in range(2):  # both slots
            poison_freed_memory(sum(A.shape[0] * B.shape[1] * 2 for B in Bs) + A.numel() * 2)
            op: Callable[..., Any] = agmm.all_gather_matmul
            found = op(
                shard,
                Bs if weights > 1 else Bs[0],
                group,
                return_A=return_A,
                bias=biases if weights > 1 else biases[0],
                config=config,
                strict=True,
            )
            gathered, found = found if return_A else (None, found)
            if gathered is not None and not torch.equal(gathered, A):
                faults.append(f"{label}: A differs in {int((gathered != A).sum())} elements")
            for B, bias, out in zip(Bs, biases, found if weights > 1 else [found], strict=True):
                faults += fault(label, out.reshape(-1, B.shape[1]), A.reshape(-1, shape.K), B, bias)
    return faults


def native_op(world_size: int) -> Faults:
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank = dist.get_rank(group)
    A = randn((world_size * 256, 512), torch.bfloat16, 5)
    B = randn((512, 264), torch.bfloat16, 6)
    shard = A[rank * 256 : (rank + 1) * 256].clone()
    gathered, out = torch.ops.agmm._fused_all_gather_matmul_native(shard, B, group.group_name)
    faults = [] if torch.equal(gathered, A) else ["A differs"]
    return faults + fault("native", out, A, B, None)


class ExactCalls:
    """Calls whose data changes every time and whose results are compared on the GPU, exactly."""

    def __init__(self, group: dist.ProcessGroup, shape: LocalShape, seed: int = 0) -> None:
        self.group, self.shape = group, shape
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.B = integers((shape.N, shape.K), 1 + seed + self.rank).t()
        self.A = integers((self.world_size * shape.M_local, shape.K), seed)
        self.shard = self.A[self.rank * shape.M_local : (self.rank + 1) * shape.M_local].clone()
        self.wrong = torch.zeros((), dtype=torch.int64, device=device())

    def new_data(self) -> None:
        """The same change of A on all ranks, with no communication."""
        self.A.copy_(self.A.roll(1, 0))
        self.A.mul_(-1)
        rows = self.shape.M_local
        self.shard.copy_(self.A[self.rank * rows : (self.rank + 1) * rows])

    def product(self, way: str) -> tuple[torch.Tensor | None, torch.Tensor]:
        op: Callable[..., Any] = agmm.all_gather_matmul
        return_A, _ = WAYS[way]
        config = config_of(way)
        found = op(self.shard, self.B, self.group, return_A=return_A, config=config, strict=True)
        return found if return_A else (None, found)

    def call(self, way: str) -> None:
        self.compare(*self.product(way))

    def compare(self, gathered: torch.Tensor | None, out: torch.Tensor) -> None:
        self.wrong += torch.ne(out, torch.mm(self.A, self.B)).sum()
        if gathered is not None:
            self.wrong += (gathered != self.A).sum()

    def faults(self, label: str) -> list[str]:
        torch.cuda.synchronize()
        wrong = int(self.wrong)
        return [] if wrong == 0 else [f"{label}: {wrong} wrong elements on rank {self.rank}"]


def loop(
    world_size: int,
    shape: LocalShape,
    calls: int,
    seed: int,
    delayed_rank: int | None,
    ways: tuple[str, ...] = ALL_WAYS,
) -> Faults:
    """`calls` calls with no synchronisation between; one rank or all are slowed at random."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    exact = ExactCalls(group, shape, seed)
    poison(group)
    draw = random.Random(seed + exact.rank)
    for i in range(calls):
        exact.new_data()
        if delayed_rank in (exact.rank, -1) and draw.random() < 0.5:
            torch.cuda._sleep(draw.randrange(1, 400_000))
        exact.call(ways[i % len(ways)])
    return exact.faults(f"{shape} delayed={delayed_rank}")


def overwritten(world_size: int, calls: int, seed: int) -> Faults:
    """The shard is overwritten right behind the call. A rank that begins late finds all other
    shards there, and with few columns its products end long before its own shard is sent."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    shape = LocalShape(8192 // world_size, 64, 4096)
    exact = ExactCalls(group, shape, seed)
    poison(group)
    late = random.Random(seed)
    for i in range(calls):
        exact.new_data()
        if late.randrange(world_size) == exact.rank:
            torch.cuda._sleep(2_000_000)
        found = exact.product(("push", "push-A", "pull", "sm")[i % 4])
        exact.shard.fill_(torch.nan)
        exact.compare(*found)
    return exact.faults(f"{shape} overwritten")


def gathers_by_copies(world_size: int, calls: int, seed: int) -> Faults:
    """Gathers beside a matmul, with new data in each, by late ranks, on two streams in turn that
    nothing else orders, and with fused calls in between. The shard is overwritten at once."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    workspace, rank = cuda_workspace(group, device()), dist.get_rank(group)
    poison(group)
    same, own = random.Random(seed), random.Random(seed + 1 + rank)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    weight = randn((512, 512), torch.bfloat16, seed)
    wrong = [torch.zeros((), dtype=torch.int64, device=device()) for _ in streams]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for i in range(calls):
        # In float64 no more than a slot for 8 ranks.
        shape = (same.choice([1, 37, 500]), *same.choice([(8,), (3, 264), (2048,)]))
        dtype = same.choice([torch.bfloat16, torch.float32, torch.float64])
        turn = same.randrange(len(streams))
        with torch.cuda.stream(streams[turn]):
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(1, 400_000))
            ranks = torch.arange(world_size, device=device()).repeat_interleave(shape[0])
            rows = torch.arange(shape[0], device=device()).repeat(world_size)
            wanted = ((rows * 7 + ranks * 31 + i) % 199).to(dtype)
            wanted = wanted.view(-1, *(1,) * (len(shape) - 1)).expand(-1, *shape[1:])
            shard = wanted[rank * shape[0] : (rank + 1) * shape[0]].contiguous()
            poison_freed_memory(wanted.numel() * dtype.itemsize)
            finish = workspace.start_all_gather(shard)
            shard.fill_(torch.nan)
            torch.mm(weight, weight)
            wrong[turn] += (finish() != wanted).sum()
            if i % 10 == 0:
                _small_call(group, "push")
    torch.cuda.synchronize()
    count = sum(int(each) for each in wrong)
    return [f"{count} wrong elements"] if count else []


def gathers_in_a_graph(world_size: int, replays: int) -> Faults:
    """A graph of two gathers, replayed with new data, eager ones in between."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    workspace, rank = cuda_workspace(group, device()), dist.get_rank(group)
    shard = torch.zeros(300, 264, device=device())
    workspace.start_all_gather(shard)()
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        first = workspace.start_all_gather(shard)()
        second = workspace.start_all_gather(shard + 1)()
    draw = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    ranks = torch.arange(world_size, device=device()).repeat_interleave(300)[:, None]
    for i in range(replays):
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(1, 300_000))
        shard.fill_(100 * i + rank)
        graph.replay()
        wrong += (first != ranks + 100 * i).sum() + (second != ranks + 100 * i + 1).sum()
        if i % 3 == 0:
            wrong += (workspace.start_all_gather(shard)() != ranks + 100 * i).sum()
    return [f"{int(wrong)} wrong elements"] if int(wrong) else []


def sm_push_at_its_size(world_size: int, calls: int, seed: int) -> Faults:
    """The stress test of SM push."""
    shape = LocalShape(1024 // world_size, 3584, 8192)
    return loop(world_size, shape, calls, seed, -1, ("sm", "sm-A", "sm-ctas"))


def back_to_back(world_size: int, calls: int, seed: int) -> Faults:
    """A graph of one call, replayed with other data and hardly a pause: all in the same buffer, so
    that only the credits keep a rank from writing to it while a slower one reads. (Eager calls take
    the buffers in turn, and no rank ends one before all others have begun it.)"""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    exact = ExactCalls(group, LocalShape(1024 // world_size, 3584, 8192), seed)
    datas = []
    for _ in range(2):
        exact.new_data()
        exact.call("sm")
        datas.append((exact.shard.clone(), torch.mm(exact.A, exact.B)))
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        _, out = exact.product("sm")
    draw = random.Random(seed + exact.rank)
    for i in range(calls):
        shard, wanted = datas[i % 2]
        exact.shard.copy_(shard)
        if draw.random() < 0.1:
            torch.cuda._sleep(draw.randrange(1, 400_000))
        graph.replay()
        exact.wrong += (out != wanted).sum()
    return exact.faults("back to back")


def mixed_loop(world_size: int, shapes: list[LocalShape], calls: int, seed: int) -> Faults:
    """Shapes and transports in a random order that is the same on all ranks."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    parts = [ExactCalls(group, shape, seed + i) for i, shape in enumerate(shapes)]
    poison(group)
    same, own = random.Random(seed), random.Random(seed + 1 + dist.get_rank())
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(calls):
        part, way, stream = same.choice(parts), same.choice(ALL_WAYS), same.choice(streams)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(1, 200_000))
            part.new_data()
            part.call(way)
        torch.cuda.current_stream().wait_stream(stream)
    return [f for i, part in enumerate(parts) for f in part.faults(f"{shapes[i]}")]


def graphs(
    world_size: int, shape: LocalShape, calls_per_graph: int, first_way: str, replays: int
) -> Faults:
    """A graph of several calls, replayed with new data, eager calls in between."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    exact = ExactCalls(group, shape)
    for way in WAYS:
        exact.call(way)
    first = ALL_WAYS.index(first_way)
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(calls_per_graph):
            exact.new_data()
            exact.call(ALL_WAYS[(first + i) % len(WAYS)])
    poison(group)
    draw = random.Random(dist.get_rank())
    for i in range(replays):
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(1, 300_000))
        graph.replay()
        if i % 3 == 0:
            exact.new_data()
            exact.call(ALL_WAYS[i // 3 % len(WAYS)])
    return exact.faults("graphs")


def two_rounds(world_size: int, calls: int, seed: int) -> Faults:
    """SM push of more than kConsumersCopyBytes, the nearest peer first, by a cooperative kernel:
    the warp of the first item finds credits that the second round has taken."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    k = 4096
    rows = 14 * 2**20 // (2 * k * (world_size - 1))
    kernel = next(c for c in call_plans.kernels() if c.schedule == "cooperative")
    exact = ExactCalls(group, LocalShape(rows, 264, k), seed)
    poison(group)
    draw = random.Random(seed + exact.rank)
    for _ in range(calls):
        exact.new_data()
        if draw.random() < 0.2:
            torch.cuda._sleep(draw.randrange(1, 400_000))
        out = agmm.all_gather_matmul(
            exact.shard, exact.B, group, config=f"{kernel.name}/sm32x128+1", strict=True
        )
        exact.compare(None, out)
    return exact.faults("two rounds")


def captured_by_some(world_size: int, way: str) -> Faults:
    """Ranks that capture different numbers of calls, and fail in a capture, are still in step."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    exact = ExactCalls(group, LocalShape(192, 256, 512))
    exact.call(way)
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    attempts = [torch.cuda.CUDAGraph() for _ in range(exact.rank)]
    for attempt, unused in enumerate(attempts):
        try:
            with torch.cuda.graph(unused, capture_error_mode="thread_local"):
                for _ in range(1 + attempt % 2):
                    exact.call(way)
                if attempt == 0:
                    raise InterruptedError
        except InterruptedError:
            continue
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exact.new_data()
        exact.call(way)
    for i in range(20):
        for _ in range(i % 3):
            graph.replay()
        exact.new_data()
        exact.call(way)
    return exact.faults("captured by some")


def profiled_graph(way: str) -> Faults:
    """A graph of two calls under torch's profiler. In ranks of its own."""
    group = dist.group.WORLD
    assert group is not None
    exact = ExactCalls(group, LocalShape(192, 256, 512))
    exact.call(way)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(2):
            exact.new_data()
            exact.call(way)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        for _ in range(5):
            graph.replay()
            exact.new_data()
            exact.call(way)
        torch.cuda.synchronize()
    return exact.faults("profiled")


def graph_outlives_growth() -> Faults:
    """In ranks of its own: a workspace grows only where all ranks have made equally many."""
    group = dist.group.WORLD
    assert group is not None
    small = ExactCalls(group, LocalShape(256, 128, 256), 3)
    small.call("push")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        small.new_data()
        small.call("push")
    slot_bytes = cuda_workspace(group, device()).slot_bytes
    rows = slot_bytes // (2 * 1024 * dist.get_world_size()) + 256
    large = ExactCalls(group, LocalShape(rows, 64, 1024), 4)
    for _ in range(4):
        graph.replay()
        large.new_data()
        large.call("push")
    return small.faults("captured before the growth") + large.faults("after the growth")


def two_groups() -> Faults:
    """Calls in two groups of all ranks at once, on two streams and from two threads. In ranks of
    its own, as above."""
    first = dist.group.WORLD
    assert first is not None
    second = dist.new_group(list(range(first.size())))
    parts = [
        ExactCalls(g, LocalShape(192, 256, 512), 10 * i) for i, g in enumerate((first, second))
    ]
    index = device().index

    def work(part: ExactCalls) -> None:
        torch.cuda.set_device(index)
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(100):
                part.new_data()
                part.call(ALL_WAYS[i % len(WAYS)])
            torch.cuda.current_stream().synchronize()

    # Makes the workspaces, which is collective, and loads every kernel: loading one waits for the
    # device, on which the other group's call may wait for its peers.
    for part in parts:
        for way in ALL_WAYS:
            part.new_data()
            part.call(way)
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [f for part in parts for f in part.faults("two groups")]


_MEETING = """
extern "C" __global__ void __cluster_dims__(%d, 1, 1) __launch_bounds__(512)
meet(unsigned* here, unsigned volatile* own, unsigned volatile* peer, unsigned turn) {
  if (threadIdx.x != 0) return;
  atomicAdd(here, 1);  // as one that has all of its CTAs: none goes on before all run
  while (atomicAdd(here, 0) < turn * gridDim.x) {
  }
  peer[blockIdx.x] = turn;
  __threadfence_system();
  while (own[blockIdx.x] < turn) {
  }
}
"""


def two_communicators(ctas: int, cluster: int, way: str) -> Faults:
    """Another group's kernel meets the calls in an order that only free multiprocessors resolve.

    Rank 0 starts the matmul, which waits for rank 1, then the other kernel on a second stream. Rank
    1 starts the other kernel, which waits for rank 0's, and its call comes behind it. The kernel
    has ``ctas`` CTAs of 512 threads, too many to run beside a CTA of the matmul, and wants
    all of them at once. In two ranks of its own.
    """
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    exact = ExactCalls(group, LocalShape(1024, 4096, 1024))
    exact.call(way)
    words = symm_mem.empty(ctas, dtype=torch.int32, device=device())
    handle = symm_mem.rendezvous(words, group.group_name)
    words.zero_()
    peer = handle.get_buffer(1 - rank, (ctas,), torch.int32)
    here = torch.zeros(1, dtype=torch.int32, device=device())
    meet: Any = torch.cuda._compile_kernel(_MEETING % cluster, "meet")
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    for turn in range(1, 6):
        if turn > 1:  # the first one loads the kernel, which waits for the device
            exact.new_data()
            if rank == 0:
                found = exact.product(way)
                time.sleep(0.1)  # until it has filled the GPU
        with torch.cuda.stream(other if rank == 0 else torch.cuda.current_stream()):
            meet((ctas, 1, 1), (512, 1, 1), (here, words, peer, turn))
        if turn > 1:
            if rank == 1:
                found = exact.product(way)
            exact.compare(*found)
        torch.cuda.synchronize()
        dist.barrier(group, device_ids=[device().index])
    return exact.faults("two communicators")


def compiled(world_size: int) -> Faults:
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    name = group.group_name
    rank = dist.get_rank(group)
    A = randn((world_size * 128, 256), torch.bfloat16, 2)
    B = randn((512, 256), torch.bfloat16, 3).t()
    shard = A[rank * 128 : (rank + 1) * 128].clone()

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gathered, out = agmm.all_gather_matmul(x + 0, [B, B], name, return_A=True, strict=True)
        return gathered, out[1]

    gathered, out = torch.compile(layer, fullgraph=True, backend="aot_eager")(shard)
    torch.library.opcheck(
        torch.ops.agmm._fused_all_gather_matmul_native.default,
        (shard, B, name),
        test_utils=("test_schema", "test_faketensor"),
    )
    faults = [] if torch.equal(gathered, A) else ["A differs"]
    return faults + fault("compiled", out, A, B, None)


def unfused(world_size: int) -> Faults:
    """What the fused path cannot serve is right all the same, and refused under strict."""
    import warnings

    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank = dist.get_rank(group)
    faults = []
    cases = [(torch.float32, 0, 64), (torch.bfloat16, 1, 64), (torch.bfloat16, 0, 65)]
    for dtype, gather_dim, k in cases:
        A = randn((world_size * 8, world_size * 4, k), dtype, 1)
        shard = A.tensor_split(world_size, gather_dim)[rank].contiguous()
        B = randn((k, 24), dtype, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = agmm.all_gather_matmul(shard, B, group, gather_dim=gather_dim)
        faults += fault(
            f"unfused {dtype} {gather_dim} {k}", out.reshape(-1, 24), A.reshape(-1, k), B, None
        )
        try:
            agmm.all_gather_matmul(shard, B, group, gather_dim=gather_dim, strict=True)
            faults.append(f"{dtype} {gather_dim} {k}: not refused under strict")
        except agmm.Unsupported:
            pass
    return faults


def _small_call(group: dist.ProcessGroup, way: str, width: int = 512) -> None:
    ExactCalls(group, LocalShape(64, 64, width)).call(way)


def everyone() -> dist.ProcessGroup:
    group = group_of(tuple(range(dist.get_world_size())))
    assert group is not None
    return group


def wait_for_the_end() -> None:
    torch.cuda.synchronize()
    threading.Event().wait(60)


def different_shapes(way: str) -> None:
    """Rank 0 calls with other columns than the rest; every rank must end with a message."""
    group = everyone()
    for width in (512, 1024 if dist.get_rank() == 0 else 512):
        _small_call(group, way, width)
    wait_for_the_end()


def _small_scatter(group: dist.ProcessGroup, k: int) -> torch.Tensor:
    """How many elements are wrong. Every rank adds the same, whose bf16 is exact."""
    A, B = (integers(shape, 1).clamp(-1, 1) for shape in ((64 * group.size(), k), (64, k)))
    B = B.t()
    out = agmm.matmul_reduce_scatter(A, B, group, strict=True)
    wanted = group.size() * torch.mm(A.float(), B.float())
    rank = dist.get_rank(group)
    return torch.ne(out, wanted[64 * rank : 64 * rank + 64].to(out.dtype)).sum()


def different_scatters(_: str) -> None:
    """The same of matmul + reduce-scatter."""
    group = everyone()
    for k in (64, 128 if dist.get_rank() == 0 else 64):
        _small_scatter(group, k)
    wait_for_the_end()


def one_rank_late(way: str, late_s: float) -> list[str]:
    """Faults of a call to which rank 1 comes late."""
    group = everyone()
    exact = ExactCalls(group, LocalShape(64, 64, 512))
    for turn in range(2):
        if turn == 1 and dist.get_rank() == 1:
            time.sleep(late_s)
        if way == "scatter":
            exact.wrong += _small_scatter(group, 64)
        else:
            exact.new_data()
            exact.call(way)
        torch.cuda.synchronize()
        dist.barrier(group, device_ids=[device().index])
    return exact.faults(f"{way}, a late rank")


def one_rank_missing(way: str) -> None:
    """Rank 1 stays away from the second call."""
    group = everyone()
    _small_call(group, way)
    if dist.get_rank() != 1:
        _small_call(group, way)
    wait_for_the_end()


def one_rank_misses_a_replay(way: str) -> None:
    """Rank 1 stays away from the second replay, of a call whose tiles lie in two shards."""
    group = everyone()
    exact = ExactCalls(group, LocalShape(100, 64, 64))
    exact.call(way)
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exact.call(way)
    graph.replay()
    if dist.get_rank() != 1:
        graph.replay()
    wait_for_the_end()


def credit_missing(way: str) -> None:
    """Rank 1 never gives rank 0 the credit that the call has to await."""
    group = everyone()
    if dist.get_rank() == 0:
        workspace = cuda_workspace(group, device())
        assert workspace.buffers is not None
        memory, core = workspace.buffers.memory, workspace.buffers.core
        first = core.words_offset(core.slot_bytes, dist.get_world_size())
        memory[first:].view(torch.int32)[core.credit_words(dist.get_world_size())[1]] = 0
        torch.cuda.synchronize()
    dist.barrier(device_ids=[device().index])
    _small_call(group, way)
    wait_for_the_end()


def kernels() -> list[KernelConfig]:
    return list(call_plans.kernels())
