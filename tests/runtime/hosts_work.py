"""Calls of groups that span hosts, which CPU ranks play, each with a host id of its own."""

from __future__ import annotations

import time
from unittest import mock

import torch
import torch.distributed as dist
from rank_groups import fresh_group

import agmm
from agmm.runtime import groups
from agmm.runtime.calls import Call
from agmm.runtime.hosts import CpuHosts

FP8 = torch.float8_e4m3fn


def _operands(rank: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    A, B = (torch.randn(size, generator=generator) for size in ((rows, 6), (6, 5)))
    return A.to(dtype), B.to(dtype)


def products(hosts: str, rows: int, dtype: torch.dtype) -> list[str]:
    """Faults, in words, where rank i is on the host that the letter i of ``hosts`` names."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with mock.patch.object(groups, "host_id", return_value=hosts[rank]):
        return _products(fresh_group(), rank, size, rows, dtype)


def _products(
    group: dist.ProcessGroup, rank: int, size: int, rows: int, dtype: torch.dtype
) -> list[str]:
    faults: list[str] = []

    def compare(
        name: str,
        found: torch.Tensor,
        wanted: torch.Tensor,
        of: torch.dtype = dtype,
    ) -> None:
        limit = 4 * torch.finfo(of).eps
        if not torch.allclose(found.double(), wanted, rtol=limit, atol=8 * limit):
            faults.append(f"{name}: differs by {(found.double() - wanted).abs().max():.3g}")

    given = [_operands(source, rows, dtype) for source in range(size)]
    whole = [_operands(source, size * rows, dtype) for source in range(size)]
    A, Bs = (
        torch.cat([shard for shard, _ in given]),
        [given[0][1], given[1][1].t().contiguous().t()],
    )
    bias, residual = torch.linspace(-1, 1, 5).to(dtype), torch.ones(rows, 5, dtype=dtype)
    total = sum((A.double() @ B.double() for A, B in whole), torch.zeros(size * rows, 5).double())
    for _ in range(3):
        found, outs = agmm.all_gather_matmul(
            *(given[rank][0], Bs, group),
            bias=[None, bias],
            return_A=True,
            config="portable",
            strict=True,
        )
        if not torch.equal(found, A):
            faults.append("gather: A differs")
        compare("gather", outs[0], A.double() @ Bs[0].double())
        compare("gather with a bias", outs[1], A.double() @ Bs[1].double() + bias.double())
        own, B = whole[rank]
        part = agmm.matmul_reduce_scatter(own, B, group, config="portable", strict=True)
        compare("scatter", part, total.chunk(size)[rank])
        part = agmm.matmul_reduce_scatter(
            *([own, own], [B, B], group),
            bias=bias,
            residual=residual,
            reduce_op="avg",
            config="portable",
            strict=True,
        )
        wanted = 2 * total.chunk(size)[rank] / size + bias.double() + 1
        compare("scatter of two", part, wanted)
        scaled = [torch.arange(rows * 16).view(rows, 16) % (source + 5) for source in range(size)]
        scales = [torch.full((rows, 1), float(source + 1)) for source in range(size)]
        weight = (torch.arange(16 * 16).view(16, 16) % 7).float()
        out = agmm.all_gather_scaled_matmul(
            scaled[rank].to(FP8),
            weight.to(FP8).t().contiguous().t(),
            scales[rank],
            torch.ones(1, 16),
            group,
            config="portable",
            strict=True,
        )
        A_of_all = torch.cat([one * by for one, by in zip(scaled, scales, strict=True)])
        compare("fp8 gather", out.to(dtype), A_of_all.double() @ weight.double(), torch.bfloat16)
        ones, scale = torch.ones(size * rows - 1, 16).to(FP8), torch.tensor(rank + 1.0)
        summed = agmm.scaled_matmul_all_reduce(
            *(ones, weight.to(FP8).t().contiguous().t(), scale, torch.tensor(1.0), group),
            bias=torch.ones(16),
            config="portable",
            strict=True,
        )
        of_ones = weight.double().sum(0).mul(sum(range(size + 1))).add(1)
        compare("fp8 all-reduce", summed, of_ones.expand_as(summed), torch.bfloat16)
        some = own[: size * rows - 1]  # which the ranks cannot share equally
        summed = agmm.matmul_all_reduce(some, B, group, config="portable", strict=True)
        compare("all-reduce", summed, total[: size * rows - 1])
    return faults


def different(hosts: str) -> str:
    """The error of ranks whose calls differ between hosts."""
    rank = dist.get_rank()
    with mock.patch.object(groups, "host_id", return_value=hosts[rank]):
        group = fresh_group()
        agmm.all_gather_matmul(torch.ones(2, 4), torch.ones(4, 4), group, config="portable")
        shape = (2, 4) if hosts[rank] == hosts[0] else (4, 2)
        try:
            A, B = torch.ones(shape), torch.ones(shape[1], 4)
            agmm.all_gather_matmul(A, B, group, config="portable")
        except agmm.AgmmError as error:
            return str(error)
    return "no error"


def missing(hosts: str, limit_s: float) -> str:
    """The error of ranks of one host, where those of the other do not come."""
    rank = dist.get_rank()
    with mock.patch.object(groups, "host_id", return_value=hosts[rank]):
        group = fresh_group()
        A, B = torch.ones(2, 4), torch.ones(4, 4)
        agmm.all_gather_matmul(A, B, group, config="portable")
        if hosts[rank] != hosts[0]:
            time.sleep(3 * limit_s)
            return "came late"
        try:
            agmm.all_gather_matmul(A, B, group, config="portable")
        except agmm.AgmmError as error:
            return str(error)
    return "no error"


def order_of(hosts: str) -> list[tuple[bool, int]]:
    """Whether rows that a gather hands over are from another host, and where they begin in their
    shard, in the order in which they are handed over; the other host is late."""
    rank = dist.get_rank()
    order: list[tuple[bool, int]] = []
    with mock.patch.object(groups, "host_id", return_value=hosts[rank]):
        group, shard = fresh_group(), torch.full((8, 2), float(rank))
        if hosts[rank] != hosts[0]:
            time.sleep(0.2)

        def consume(source: int, cut: slice, parts: list[torch.Tensor]) -> None:
            (rows,) = parts
            assert torch.equal(rows, torch.full_like(rows, float(source)))
            order.append((hosts[source] != hosts[rank], cut.start))

        whole = shard.new_empty(len(hosts), *shard.shape)
        CpuHosts(group, Call("gather", A_shard=shard)).gather(
            *([shard], [whole], consume), pieces=1, keeps_own=False, words=""
        )
    return order
