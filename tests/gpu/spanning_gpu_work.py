"""What the tests of messages between GPUs run inside the ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import portable_gpu_work
import torch
import torch.distributed as dist
from gpu_work import device, wait_for_the_end

import agmm
from agmm.integrations import async_tp
from agmm.nn import ColumnParallelLinear, RowParallelLinear
from agmm.runtime import cuda_hosts, groups

PORTABLE = portable_gpu_work.PORTABLE


@contextlib.contextmanager
def _apart(hosts: str) -> Iterator[dist.ProcessGroup]:
    """A group whose ranks take themselves to be on these hosts; "": on one, without peer access."""
    group = dist.new_group(list(range(dist.get_world_size())))
    assert group is not None
    facts = mock.patch.object(torch.cuda, "can_device_access_peer", return_value=False)
    if hosts:
        facts = mock.patch.object(groups, "host_id", return_value=hosts[dist.get_rank()])
    with facts:
        yield group


def results(hosts: str, case: portable_gpu_work.Case) -> list[str]:
    """Faults of the calls that `portable_gpu_work` makes."""
    with _apart(hosts) as group:
        faults = [
            *portable_gpu_work.gathers(case, group),
            *portable_gpu_work.scatters(case, group),
            *portable_gpu_work.all_reduces(case, group),
        ]
        if cuda_hosts.why_apart(group, device()) is None:
            faults.append("the ranks share memory")
    return faults


def fp8(hosts: str) -> list[str]:
    """Faults of gathers and scatters of fp8, against those of the unfused path."""
    faults = []
    with _apart(hosts) as group:
        size, e4m3 = dist.get_world_size(group), torch.float8_e4m3fn
        torch.manual_seed(dist.get_rank())
        shard = torch.randn(512, 256, device=device()).to(e4m3)
        B = torch.randn(128, 256, device=device()).to(e4m3).t()
        scale_b = torch.rand(1, 128, device=device()) + 0.5
        for rows in (512, 1):
            scale_a = torch.rand(rows, 1, device=device()) + 0.5
            scales = scale_a, (scale_b if rows > 1 else scale_b[:, :1].contiguous())
            found, wanted = (
                agmm.all_gather_scaled_matmul(shard, B, *scales, group, config=config)
                for config in ("portable", "unfused")
            )
            if (found.float() - wanted.float()).norm() > 1e-2 * wanted.float().norm():
                faults.append(f"gather with {rows} scales")
        A = torch.randn(64 * size, 256, device=device()).to(e4m3)
        out = agmm.scaled_matmul_reduce_scatter(
            A, B, torch.rand(64 * size, 1, device=device()) + 0.5, scale_b, group
        )
        if not out.isfinite().all():
            faults.append("scatter")
        A = torch.randn(64 * size - 1, 256, device=device()).to(e4m3)  # which ranks cannot share
        scale_a = torch.rand(64 * size - 1, 1, device=device()) + 0.5
        for out_dtype in (torch.bfloat16, e4m3):
            found, wanted = (
                agmm.scaled_matmul_all_reduce(
                    A, B, scale_a, scale_b, group, out_dtype=out_dtype, config=config
                )
                for config in ("portable", "unfused")
            )
            limit = 0.02 if out_dtype == torch.bfloat16 else 0.1
            if (found.float() - wanted.float()).norm() > limit * wanted.float().norm():
                faults.append(f"all-reduce to {out_dtype}")
    return faults


def async_tp_and_layers(hosts: str, messages: str) -> list[str]:
    """Faults of torch's async-TP ops and of layers with their backward, against a group whose ranks
    share memory; what serves them is agmm, by messages where AGMM_MESSAGES is on."""
    rows, faults = 2048, []
    near = dist.new_group(list(range(dist.get_world_size())))
    assert near is not None
    served: list[str] = []
    of = cuda_hosts.of

    def noted(group: dist.ProcessGroup, where: torch.device) -> Any:
        served.append("messages")
        return of(group, where)

    def trained(group: dist.ProcessGroup) -> list[torch.Tensor]:
        size = dist.get_world_size(group)
        torch.manual_seed(1)
        made: dict[str, Any] = {"group": group, "device": device(), "dtype": torch.bfloat16}
        up, down = ColumnParallelLinear(256, 512, **made), RowParallelLinear(512, 256, **made)
        x = torch.randn(rows // size, 256, device=device(), dtype=torch.bfloat16).requires_grad_()
        out = down(up(x))
        out.float().square().sum().backward()
        gradients: list[Any] = [parameter.grad for parameter in (*up.parameters(),)]
        return [out.detach(), x.grad, *(gradient.to_local() for gradient in gradients)]

    def by_torchs_ops(group: dist.ProcessGroup) -> list[torch.Tensor]:
        size, name = dist.get_world_size(group), group.group_name
        torch.manual_seed(2)
        A = torch.randn(rows // size, 256, device=device(), dtype=torch.bfloat16)
        B = torch.randn(256, 128, device=device(), dtype=torch.bfloat16)
        whole = torch.randn(rows, 256, device=device(), dtype=torch.bfloat16)
        with torch.no_grad(), async_tp.enable():
            _, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(A, [B], 0, name)
            part = torch.ops.symm_mem.fused_matmul_reduce_scatter(whole, B, "sum", 0, name)
        return [out, part]

    for call in (trained, by_torchs_ops):
        wanted = call(near)
        with (
            _apart(hosts) as group,
            mock.patch.dict(os.environ, AGMM_MESSAGES=messages),
            mock.patch.object(cuda_hosts, "of", noted),
        ):
            for _ in range(2):  # the second one by calls that are kept
                found = call(group)
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if (one.float() - other.float()).norm() > 0.02 * other.float().norm():
                faults.append(f"{call.__name__}: result {i} differs")
        if bool(served) != (messages == "on"):
            faults.append(f"{call.__name__}: served by messages: {served}")
        served.clear()
    return faults


def graphs(hosts: str) -> list[str]:
    """Faults of graphs that are replayed between calls."""
    with _apart(hosts) as group:
        return portable_gpu_work.graphs_between_calls(group)


def overlaps(hosts: str) -> list[str]:
    """Faults of the order in which a gather runs on the GPU: a receive of NCCL's has to run beside
    a matmul. The shards are such that both take long."""
    with _apart(hosts) as group:
        A = torch.randn(16384, 4096, device=device()).bfloat16()
        B = torch.randn(4096, 4096, device=device()).bfloat16()
        for _ in range(3):
            agmm.all_gather_matmul(A, B, group, **PORTABLE)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            agmm.all_gather_matmul(A, B, group, **PORTABLE)
            torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events():
        name = event.name.lower()
        if "nccl" in name or "gemm" in name or "nvjet" in name or "cutlass" in name:
            spans["nccl" in name].append((event.time_range.start, event.time_range.end))
    beside = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in spans[True]
        for other_begin, other_end in spans[False]
    )
    print(f"rank {dist.get_rank()}: {beside:.0f} us of messages beside matmuls, {spans}")
    return [] if beside > 0 else [f"no message beside a matmul: {spans}"]


def missing(hosts: str, op: str, kind: str) -> None:
    """Rank 1 does not make the second call, or has ended; rank 0 must end with a message."""
    with _apart(hosts) as group:
        size = dist.get_world_size(group)
        A, B = (torch.ones(m, 64, device=device()).bfloat16() for m in (64 * size, 64))
        call = agmm.all_gather_matmul if op == "gather" else agmm.matmul_reduce_scatter
        call(A, B, group, **PORTABLE)
        torch.cuda.synchronize()
        if dist.get_rank() == 1:
            if kind == "killed":
                os._exit(1)
            time.sleep(60)
        call(A, B, group, **PORTABLE)
        wait_for_the_end()
