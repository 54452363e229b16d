"""The work that tests of plans and of the tuner do inside ranks."""

from __future__ import annotations

import os
import resource
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import agmm
from agmm.bench import tuning_session
from agmm.ops import fp8_gather
from agmm.planning import tables
from agmm.planning.plans import UNFUSED, Plan, Row
from agmm.runtime import cpu


def check_with_faults(plan: Plan) -> tuning_session.Verdict:
    """Checks a plan like `tuning_session.check`, but 2 chunks are wrong, 4 raise in one rank and 8
    end it."""
    last = dist.get_rank() == dist.get_world_size() - 1
    if plan.chunks_per_shard == 8 and last:
        os._exit(7)
    original = cpu.CpuWorkspace.all_gather_matmul

    def faulty(workspace: Any, *arguments: Any, **keywords: Any) -> Any:
        A, outs = original(workspace, *arguments, **keywords)
        if plan.chunks_per_shard == 4 and last:
            raise RuntimeError("the kernel did not start")
        if plan.chunks_per_shard == 2 and last:
            outs[0][0, 0] += 1.0
        return A, outs

    cpu.CpuWorkspace.all_gather_matmul = faulty  # type: ignore[method-assign,assignment]
    try:
        return tuning_session.check(plan)
    finally:
        cpu.CpuWorkspace.all_gather_matmul = original  # type: ignore[method-assign]


def check_with_none_fused(plan: Plan) -> tuning_session.Verdict:
    """Checks a plan like `tuning_session.check`, but every fused plan fails."""
    return (
        tuning_session.check(plan) if plan == UNFUSED else tuning_session.Verdict("ValueError: no")
    )


def fp8_call_with_table(strict: bool) -> tuple[bool, int]:
    """Whether a product of whole numbers is right, and how many calls were fused."""
    fused = 0
    original: Any = vars(fp8_gather)["all_gather_on_cpu"]

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal fused
        fused += 1
        return original(*arguments, **keywords)

    generator = torch.Generator().manual_seed(1)
    A = torch.randint(-4, 5, (16, 32), generator=generator).float()
    B = torch.randint(-4, 5, (8, 32), generator=generator).float().t()
    fp8 = torch.float8_e4m3fn
    scale_a, scale_b = torch.full((8, 1), 2.0), torch.full((1, 8), 0.5)
    shard = A.chunk(2)[dist.get_rank()].to(fp8)
    with (
        mock.patch.object(fp8_gather, "all_gather_on_cpu", counted),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        out = agmm.all_gather_scaled_matmul(
            shard, B.to(fp8), scale_a, scale_b, out_dtype=torch.float32, strict=strict
        )
    return torch.equal(out, A @ B), fused


def call_with_table(m: int, n: int, k: int, strict: bool) -> tuple[bool, int, list[str]]:
    """Whether the product is right; its chunks per shard, 0 unfused; what was warned of."""
    chunks = 0
    original = cpu.CpuWorkspace.all_gather_matmul

    def counted(workspace: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal chunks
        chunks = keywords["chunks_per_shard"]
        return original(workspace, *arguments, **keywords)

    rank, rows = dist.get_rank(), m // dist.get_world_size()
    A = torch.randint(-8, 9, (m, k), generator=torch.Generator().manual_seed(1)).float()
    Bs = [torch.full((n - 1, k), 2.0).t(), torch.full((1, k), 3.0).t()]  # the table knows their sum
    cpu.CpuWorkspace.all_gather_matmul = counted  # type: ignore[method-assign,assignment]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shard = A[rank * rows : (rank + 1) * rows].clone()
            outs = agmm.all_gather_matmul(shard, Bs, strict=strict)
    finally:
        cpu.CpuWorkspace.all_gather_matmul = original  # type: ignore[method-assign]
    right = all(torch.equal(out, A @ B) for out, B in zip(outs, Bs, strict=True))
    return right, chunks, [str(w.message) for w in caught]


def check_with_wrong_scatter(plan: Plan) -> tuning_session.Verdict:
    """Checks a plan like `tuning_session.check`, but the last rank's own sums are wrong."""
    last = dist.get_rank() == dist.get_world_size() - 1
    original = cpu.CpuWorkspace.reduce_scatter

    def faulty(workspace: Any, *arguments: Any, **keywords: Any) -> Any:
        out = original(workspace, *arguments, **keywords)
        if last:
            out[0, 0] += 1.0
        return out

    cpu.CpuWorkspace.reduce_scatter = faulty  # type: ignore[method-assign,assignment]
    try:
        return tuning_session.check(plan)
    finally:
        cpu.CpuWorkspace.reduce_scatter = original  # type: ignore[method-assign]


def scatter_with_table(m: int, n: int, k: int, strict: bool) -> tuple[bool, bool, list[str]]:
    """Whether the sum is right; whether agmm made it; what was warned of."""
    calls = 0
    original = cpu.CpuWorkspace.reduce_scatter

    def counted(workspace: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(workspace, *arguments, **keywords)

    rank, world_size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(1)
    As = [torch.randint(-8, 9, (m, k), generator=draw).float() for _ in range(world_size)]
    Bs = [torch.randint(-8, 9, (n, k), generator=draw).float().t() for _ in range(world_size)]
    cpu.CpuWorkspace.reduce_scatter = counted  # type: ignore[method-assign,assignment]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = agmm.matmul_reduce_scatter(As[rank], Bs[rank], strict=strict)
    finally:
        cpu.CpuWorkspace.reduce_scatter = original  # type: ignore[method-assign]
    whole = torch.stack([A @ B for A, B in zip(As, Bs, strict=True)]).sum(0)
    right = torch.equal(out, whole.chunk(world_size)[rank])
    return right, calls == 1, [str(w.message) for w in caught]


def save_on_a_full_disk(folder: str, gpu: str, world_size: int, key: tables.Key) -> str:
    """What rank 0 is told where writes fail part of the way, as they do where no space is left."""
    if dist.get_rank() != 0:
        return ""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        save_row(folder, gpu, world_size, key, 2)
    except tables.TableError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved"


def save_row(folder: str, gpu: str, world_size: int, key: tables.Key, m: int) -> None:
    with mock.patch.dict(os.environ, {"AGMM_CACHE_DIR": folder, "AGMM_CACHE": "on"}):
        tables.save(gpu, world_size, [(key, Row(m, UNFUSED, 1.0))])


def save_rows(folder: str, gpu: str, world_size: int, key: tables.Key, count: int) -> None:
    """Each rank saves so many rows of its own, all ranks at once, into one table."""
    first = 1 + dist.get_rank() * count
    dist.barrier()
    for m in range(first, first + count):
        save_row(folder, gpu, world_size, key, m)


def use_folder_of_rank(folders: list[str]) -> None:
    """Each rank reads its own tables from now on."""
    os.environ["AGMM_CACHE_DIR"] = folders[dist.get_rank()]
