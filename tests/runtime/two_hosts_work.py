"""A job on two hosts, as far as agmm can tell: tensor parallelism inside each, and a group that
spans both. Run by the ranks of a pool, and as a program by torchrun (see test_two_hosts.py)."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import agmm
from agmm.errors import forget_warnings
from agmm.nn import ColumnParallelLinear, RowParallelLinear
from agmm.runtime import groups

SPANS = "agmm takes the unfused path: group: found ranks on 2 hosts, wanted one: "


def job(host: int) -> list[str]:
    """Faults, in words, of one rank on that host of two."""
    with mock.patch.object(groups, "host_id", return_value=f"host {host}"):
        return _job()


def _job() -> list[str]:
    forget_warnings()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    faults: list[str] = []

    def product(group: Any, strict: bool) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        A = torch.arange(float(4 * size * 6)).remainder(5).view(4 * size, 6)
        B = torch.arange(12.0).view(6, 2)
        shard = A[4 * rank : 4 * rank + 4].clone().requires_grad_()
        out = agmm.all_gather_matmul(shard, B, group, strict=strict)
        if not torch.equal(out, A @ B):
            faults.append(f"{size} ranks: out differs")
        out.sum().backward()
        wanted = size * B.sum(1).expand(4, 6)
        if shard.grad is None or not torch.equal(shard.grad, wanted):
            faults.append(f"{size} ranks: the gradient differs")
        part = agmm.matmul_reduce_scatter(A, B, group)
        if not torch.equal(part, size * (A @ B)[4 * rank : 4 * rank + 4]):
            faults.append(f"{size} ranks: the sum differs")
        if not torch.equal(agmm.matmul_all_reduce(A, B, group, strict=strict), size * (A @ B)):
            faults.append(f"{size} ranks: the sum of all rows differs")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            product(mesh["tensor"].get_group(), strict=True)
            _train_step(mesh["tensor"].get_group(), faults)
    faults += [f"inside a host: {warning.message}" for warning in caught]
    for i, group in enumerate((mesh["data"].get_group(), dist.group.WORLD)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                product(group, strict=False)
        found = [str(warning.message) for warning in caught]
        # One for each reason, and theirs is the same.
        if [text.startswith(SPANS) for text in found] != [True] * (i == 0):
            faults.append(f"between hosts: warnings {found}")
        try:
            product(group, strict=True)
            faults.append("between hosts: strict=True went through")
        except agmm.Unsupported:
            pass
    try:
        agmm.reserve(dist.group.WORLD, 1000)
        faults.append("between hosts: reserve went through")
    except agmm.Unsupported:
        pass
    return faults


def _train_step(group: Any, faults: list[str]) -> None:
    """One step of two layers, inside a host."""
    torch.manual_seed(0)
    up, down = ColumnParallelLinear(8, 16, group=group), RowParallelLinear(16, 8, group=group)
    x = torch.ones(3, 8, requires_grad=True)
    down(torch.relu(up(x))).square().sum().backward()
    if any(p.grad is None for p in (*up.parameters(), *down.parameters())):
        faults.append("a parameter has no gradient")


def main() -> None:
    dist.init_process_group("gloo")
    faults = job(int(os.environ["GROUP_RANK"]))
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {os.environ['RANK']} on node {os.environ['GROUP_RANK']}: {faults}", flush=True)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
