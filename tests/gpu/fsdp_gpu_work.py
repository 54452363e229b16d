"""What the tests of FSDP2 on GPUs run inside the ranks. A rank that is not in the group returns
None."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_work import group_of, last_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from agmm.integrations import fsdp
from agmm.nn import ColumnParallelLinear, RowParallelLinear
from agmm.runtime import copies
from agmm.runtime.workspaces import gather_copies, scatter_copies

Faults = list[str] | None
WIDTH = 256


def _values(rank: int, call: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, whose sums are exact."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(1000 * call + rank)
    return torch.randint(-9, 10, (size,), generator=generator, device=device).to(dtype)


def collectives(world_size: int, calls: int, most_bytes: int, beside: bool) -> Faults:
    """Gathers and reduce-scatters in turn on streams of their own; ``beside`` a matmul each."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    gather, scatter = fsdp.AllGather(strict=True), fsdp.ReduceScatter(strict=True)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    A = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    order = random.Random(7)  # the same on all ranks
    buffers: set[int] = set()
    with mock.patch.object(copies, "MOST_BYTES", most_bytes):
        for call in range(calls):
            dtype = order.choice((torch.bfloat16, torch.float32, torch.float16))
            size = order.choice((1, 7, 1000, 65_537, 1 << 20))
            asyn, average = order.random() < 0.3, order.random() < 0.5
            given = [_values(each, call, world_size * size, dtype) for each in range(world_size)]
            out, part = torch.zeros_like(given[0]), torch.zeros_like(given[0][:size])
            own = out.view(world_size, size)[rank]
            own.copy_(given[rank][:size])
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
            if beside:
                A @ A
            with torch.cuda.stream(streams[0]):
                work = gather(out, own, group, asyn)
                if work is not None:
                    work.wait()
            op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
            with torch.cuda.stream(streams[1]):
                scatter(part, given[rank], group, op)
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            if not torch.equal(out, torch.cat([each[:size] for each in given])):
                faults.append(f"call {call}: all-gather of {size} {dtype} is wrong")
            total = torch.stack(given).double().sum(0).view(world_size, size)[rank]
            wanted = total / world_size if average else total
            if not torch.allclose(part.double(), wanted, rtol=2.0**-7, atol=2.0**-7):
                faults.append(f"call {call}: reduce-scatter of {size} {dtype} is wrong")
            for known in (gather_copies(group, A.device), scatter_copies(group, A.device)):
                assert known.buffers is not None
                buffers.add(known.buffers.memory.data_ptr())
    if len(buffers) > 2:
        faults.append(f"{len(buffers)} workspaces were made for calls that fit into two")
    return faults


def repeated_bits(world_size: int) -> Faults:
    """Sums of the same values have the same bits."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    scatter = fsdp.ReduceScatter(strict=True)
    torch.manual_seed(dist.get_rank(group))
    parts = torch.randn(world_size * 50_000, device="cuda", dtype=torch.bfloat16)
    outs = [torch.empty(50_000, device="cuda", dtype=torch.bfloat16) for _ in range(20)]
    for out in outs:
        scatter(out, parts, group, dist.ReduceOp.AVG)
    same = all(torch.equal(outs[0], out) for out in outs)
    return [] if same else ["the bits differ between calls"]


class _Block(torch.nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        where: Any = {"device_mesh": mesh, "dtype": torch.float32, "device": "cuda"}
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, **where)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def trains(tp: int) -> list[str]:
    """Where training on all ranks is further from torch's than rounding. In ranks that have made
    no groups before, and so equally many workspaces."""
    dp = dist.get_world_size() // tp
    mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))

    def train(by_agmm: bool) -> list[torch.Tensor]:
        torch.manual_seed(5 + mesh["tp"].get_local_rank())
        model = torch.nn.Sequential(*(_Block(mesh["tp"]) for _ in range(4)))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model, model):
            fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
        if by_agmm:
            fsdp.enable(model, strict=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(5):
            torch.manual_seed(100 * step + dist.get_rank())
            x = torch.randn(512, WIDTH, device="cuda", dtype=torch.bfloat16)
            optimizer.zero_grad()
            (model(x) - x.flip(0)).float().square().mean().backward()
            optimizer.step()
        return [p.detach().to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]

    wanted, found = train(False), train(True)
    return [
        f"parameter {i}: {(a - b).abs().max()} apart"
        for i, (a, b) in enumerate(zip(wanted, found, strict=True))
        if not torch.allclose(a, b, rtol=1e-3, atol=1e-4)
    ]
