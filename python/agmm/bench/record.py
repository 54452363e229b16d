"""Records the times of one call: when each chunk arrived, or was sent, and when its tiles were
computed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from agmm import _core
from agmm.bench.options import Options
from agmm.bench.timeline import ChunkEvent
from agmm.errors import AgmmError
from agmm.ops.gather import GatherSettings
from agmm.ops.plain_gather import PlainGather
from agmm.ops.plain_scatter import call_with
from agmm.planning import call_plans
from agmm.planning.heuristics import usual_plans, usual_scatter_order
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, KernelConfig
from agmm.planning.shapes import Shape
from agmm.planning.transports import FusedGather, SmPush
from agmm.runtime.calls import Call
from agmm.runtime.cpu import CpuWorkspace
from agmm.runtime.cpu_scatter import plain_sum
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.kernels import built
from agmm.testing.cases import make_operands, make_scatter_operands

_CALLS_BEFORE_TIMELINE = 3  # both slots have been used then, and one of them again

_ALIGNING_CYCLES = 1_000_000
"""How many cycles the GPU is kept busy before a timeline's call, so that the hosts' launches are
done by then. An all-reduce makes the ranks begin together."""


def tiles_on_cuda(
    A_shard: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup
) -> list[dict[str, int]]:
    """Record when each chunk arrived and when its tiles were computed, in one fused call.
    Collective.

    Uses the timed kernel, which reads the GPU's global timer in the warp that loads the tiles.

    Args:
        A_shard: [M_local, K] bf16, contiguous.
        B: [K, N] bf16, column-major.

    Returns:
        For each tile a dict with ``chunk`` (the last one it needs, in the order of arrival),
        ``source`` (its rank), ``row`` and ``column`` (of tiles), ``sm`` (the multiprocessor) and,
        in ns of the GPU's timer, ``arrived_ns`` (when a tile first found all of the chunk there),
        ``wait_begin_ns``, ``start_ns`` and ``end_ns`` (of the tile's loads), and ``called_ns``
        (when the stream came to the call).

    Raises:
        AgmmError: this build has no timed kernel.
    """
    timed = [KernelConfig.of(kernel) for kernel in built(ALL_GATHER_MATMUL, timed=True)]
    if not timed:
        raise AgmmError("config: found no timed kernel in this build, wanted one")
    config = timed[0]
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    m_local = A_shard.shape[0]
    m, n = world_size * m_local, B.shape[1]
    tiles_m, tiles_n = -(-m // config.tile_m), -(-n // config.tile_n)
    times = torch.zeros(
        tiles_m * tiles_n, _core.TILE_TIMES_BYTES, dtype=torch.uint8, device=A_shard.device
    )
    workspace = CudaWorkspace.create(group, m * A_shard.shape[1] * 2, A_shard.device)
    problem = call_plans.problem_of(
        (m, n, A_shard.shape[1]), A_shard.dtype, A_shard.device, group=group
    )
    # The transport of the recorded call, as it goes with this kernel.
    chosen = call_plans.planner(group, A_shard.device).fused_plan(problem).transport
    usual = [p.transport for p in usual_plans(problem, config)]
    transport = usual[-1] if isinstance(chosen, SmPush) else usual[0]
    assert isinstance(transport, FusedGather)
    token = torch.zeros(1, device=A_shard.device)
    called = torch.zeros(1, dtype=torch.int64, device=A_shard.device)
    stream = torch.cuda.current_stream(A_shard.device).cuda_stream
    gather = PlainGather(A_shard, [B], [None], group, GatherSettings())
    call = gather.ready_on_cuda(workspace, [config], transport)
    for _ in range(3):  # the first calls pay for loading the kernel
        torch.cuda.synchronize(A_shard.device)
        dist.barrier(group, device_ids=[A_shard.device.index])
        torch.cuda._sleep(_ALIGNING_CYCLES)
        dist.all_reduce(token, group=group)
        _core.record_time(called.data_ptr(), stream)
        call(A_shard, [B], [None], tile_times=times)
    words = times.cpu().view(torch.int64).view(tiles_m, tiles_n, -1)
    arrived: dict[int, int] = {}
    tiles = []
    for i in range(tiles_m):
        first, end = _core.chunks_of_rows(
            m, world_size, i * config.tile_m, min((i + 1) * config.tile_m, m)
        )
        chunk = max(range(first, end), key=lambda c: (c - rank) % world_size)
        for j in range(tiles_n):
            wait_begin, start, found, stop, sm = (int(v) for v in words[i, j, :5])
            arrived[chunk] = min(arrived.get(chunk, found), found)
            tiles.append(
                {
                    "chunk": chunk,
                    "source": chunk,
                    "wait_begin_ns": wait_begin,
                    "start_ns": wait_begin if chunk == rank else start,
                    "end_ns": stop,
                    "sm": sm & 0xFFFFFFFF,
                    "row": i,
                    "column": j,
                }
            )
    called_ns = int(called.item())
    return [
        {**tile, "arrived_ns": arrived[tile["chunk"]], "called_ns": called_ns} for tile in tiles
    ]


def timed_scatter_kernel() -> KernelConfig | None:
    """The kernel of this build that sends tiles and records when, with the usual order of tiles."""
    timed = (KernelConfig.of(kernel) for kernel in built(MATMUL_REDUCE_SCATTER, timed=True))
    return next((usual_scatter_order(kernel) for kernel in timed), None)


def scattered_tiles_on_cuda(
    A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup
) -> list[dict[str, int]]:
    """Record when each tile of one matmul + reduce-scatter was computed and sent. Collective.

    Args:
        A: [M, K] bf16, contiguous.
        B: [K, N] bf16, column-major.

    Returns:
        For each tile a dict with ``chunk`` (its owner), ``row`` and ``column`` (of tiles), ``sm``
        (the multiprocessor) and, in ns of the GPU's timer, ``start_ns`` and ``end_ns`` (of the
        tile's loads), ``computed_ns``, ``done_ns`` (when it had left, or, of an own tile, when the
        others' sums were added), and ``called_ns`` (when the stream came to the call).

    Raises:
        AgmmError: this build has no timed kernel.
    """
    config = timed_scatter_kernel()
    if config is None:
        raise AgmmError("config: found no timed kernel that sends tiles in this build, wanted one")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    launches = _core.scatter_steps(rank, world_size, A.shape[0], B.shape[1], config.core)
    count = sum(tile >= 0 for steps in launches for *_, tile in steps)
    times = torch.zeros(count, _core.SCATTER_TIMES_BYTES, dtype=torch.uint8, device=A.device)
    token = torch.zeros(1, device=A.device)
    called = torch.zeros(1, dtype=torch.int64, device=A.device)
    stream = torch.cuda.current_stream(A.device).cuda_stream
    call = call_with(config, [A], [B], group, "sum")
    for _ in range(3):  # the first calls pay for loading the kernel
        torch.cuda.synchronize(A.device)
        dist.barrier(group, device_ids=[A.device.index])
        torch.cuda._sleep(_ALIGNING_CYCLES)
        dist.all_reduce(token, group=group)
        _core.record_time(called.data_ptr(), stream)
        call([A], [B], None, tile_times=times)
    return decode_scatter_times(times, launches, world_size, config, int(called.item()))


def decode_scatter_times(
    times: torch.Tensor,
    launches: Sequence[Sequence[tuple[int, int, int, int, int]]],
    world_size: int,
    config: KernelConfig,
    called_ns: int,
) -> list[dict[str, int]]:
    """The return value of `scattered_tiles_on_cuda`, made of the kernel's records ``times`` and the
    tiles of each launch (`_core.scatter_steps`)."""
    words = times.cpu().view(torch.int64).view(-1, _core.SCATTER_TIMES_BYTES // 8).tolist()
    found, before = [], 0
    for steps in launches:
        in_chunk = sum(tile >= 0 for *_, tile in steps) // world_size
        for owner, row, _, column, tile in steps:
            if tile < 0:
                continue
            start, end, computed, done, sm = words[before + owner * in_chunk + tile]
            found.append(
                {
                    "chunk": owner,
                    "row": row // config.tile_m,
                    "column": column // config.tile_n,
                    "sm": sm & 0xFFFFFFFF,
                    "start_ns": start,
                    "end_ns": end,
                    "computed_ns": computed,
                    "done_ns": done,
                    "called_ns": called_ns,
                }
            )
        before += world_size * in_chunk
    return found


def record_timeline(shape: Shape, options: Options) -> Sequence[ChunkEvent]:
    """Return one call's times on this rank, by tile on CUDA and by chunk on the CPU. Every rank of
    the default group calls this."""
    group = dist.group.WORLD
    assert group is not None
    assert options.dtype is not None
    device = torch.device(options.device)
    if options.op == MATMUL_REDUCE_SCATTER:
        return _record_scatter(shape, options, group)
    operands = make_operands(
        shape, dist.get_rank(), dist.get_world_size(), dtype=options.dtype, device=device
    )
    if options.device == "cuda":
        return tiles_on_cuda(operands.A_shard, operands.B, group)
    slot_bytes = shape.M * shape.K * options.dtype.itemsize
    workspace = CpuWorkspace.create(group, slot_bytes)
    events: list[dict[str, int]] = []
    for _ in range(_CALLS_BEFORE_TIMELINE):
        events.clear()
        dist.barrier()
        workspace.all_gather_matmul(
            operands.A_shard, [operands.B], [None], return_A=False, timeline=events
        )
    dist.barrier()
    called_ns = next(e["arrived_ns"] for e in events if e["source"] == dist.get_rank())
    for event in events:
        event["called_ns"] = called_ns
    for previous, event in itertools.pairwise(events):
        event["wait_begin_ns"] = previous["end_ns"]
    return events


def _record_scatter(
    shape: Shape, options: Options, group: dist.ProcessGroup
) -> Sequence[ChunkEvent]:
    assert options.dtype is not None
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    device = torch.device(options.device)
    operands = make_scatter_operands(shape, rank, world_size, dtype=options.dtype, device=device)
    A, B = operands.A, operands.B
    if options.device == "cuda":
        return _scatter_events(scattered_tiles_on_cuda(A, B, group), rank)
    slot_bytes = _core.scatter_slot_bytes(shape.M, shape.N * A.element_size(), world_size)
    workspace = CpuWorkspace.create(group, slot_bytes)
    call = Call("matmul_reduce_scatter", A=A, B=B)
    events: list[dict[str, int]] = []
    for _ in range(_CALLS_BEFORE_TIMELINE):
        events.clear()
        dist.barrier()
        workspace.reduce_scatter(plain_sum([A], [B], None), "sum", call, timeline=events)
    return _scatter_events(events, rank)


def _scatter_events(events: list[dict[str, int]], rank: int) -> list[ChunkEvent]:
    """The events made of the records of the tiles, or pieces, of a matmul + reduce-scatter."""
    sent: dict[int, int] = {}
    for event in events:
        sent[event["chunk"]] = max(sent.get(event["chunk"], 0), event["done_ns"])
    found: list[ChunkEvent] = []
    for event in events:
        chunk, done_ns = event["chunk"], event["done_ns"]
        known = {key: value for key, value in event.items() if key != "done_ns"}
        wait = {}
        if chunk == rank:
            begin_ns = event.get("computed_ns", event["end_ns"])
            wait = {"wait_begin_ns": begin_ns, "wait_end_ns": max(begin_ns, done_ns)}
        found.append({**known, "source": chunk, "arrived_ns": sent[chunk], **wait})
    return found
