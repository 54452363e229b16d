"""What the tests of `agmm.status` and `agmm.record` run inside ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import agmm
from agmm.ops import seen

ROWS, K, N = 4, 24, 16


def calls(times: int) -> None:
    A, B = torch.randn(ROWS, K), torch.randn(N, K).t()
    C = torch.randn(8, K).t()
    for _ in range(times):
        agmm.all_gather_matmul(A, B)
        agmm.all_gather_matmul(A, [B, C], return_A=True)
        agmm.all_gather_matmul(A, B, config="unfused")
        agmm.matmul_reduce_scatter(torch.randn(8, K), torch.randn(K, N))
        agmm.matmul_all_reduce(torch.randn(7, K), torch.randn(K, N))


def recorded(path: str, times: int) -> None:
    """Calls that are recorded, between others that are not. The file is there when all return."""
    calls(1)
    with agmm.record(path):
        calls(times)
    calls(1)
    dist.barrier()


def raised_in_recording(path: str) -> None:
    def fails() -> None:
        with agmm.record(path):
            calls(1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    dist.barrier()


def fp8_recorded(path: str) -> None:
    A, B = torch.randn(4, 32).to(torch.float8_e4m3fn), torch.randn(16, 32).to(torch.float8_e4m3fn)
    with agmm.record(path):
        agmm.all_gather_scaled_matmul(A, B.t(), torch.ones(4, 1), torch.ones(1, 16))
        agmm.all_gather_scaled_matmul(A, B.t(), torch.ones(()), torch.ones(()))
    dist.barrier()


def status_of(m: int) -> list[Any]:
    """Who serves calls with so many rows, by `agmm.status`."""
    # The ranks of a pool have made more kinds of calls than a program makes.
    with mock.patch.object(seen, "MAX_KINDS", 1 << 20):
        A, B = torch.randn(m // dist.get_world_size(), K), torch.randn(N, K).t()
        for _ in range(3):
            agmm.all_gather_matmul(A, B)
        along_last = torch.randn(K, K)
        agmm.matmul_reduce_scatter(torch.randn(m, K), along_last, scatter_dim=1)
    found = agmm.status()
    assert str(found).splitlines()[0].split()[0] == "op"
    return [
        (one.op, one.n, one.by, one.reason, one.count, one.is_by_agmm)
        for one in found.calls
        if one.m == m
    ]


def rows_of(m: int) -> list[str]:
    """The lines of `agmm.status` of calls with so many rows, which differ in one thing each."""
    with mock.patch.object(seen, "MAX_KINDS", 1 << 20):
        A, B = torch.randn(m // dist.get_world_size(), K), torch.randn(N, K).t()
        A8, B8 = A[:, :16].to(torch.float8_e4m3fn), B[:16].t().contiguous().to(torch.float8_e4m3fn)
        agmm.all_gather_matmul(A, B)
        agmm.all_gather_matmul(A, B.contiguous())
        agmm.all_gather_matmul(A, B, return_A=True)
        agmm.all_gather_matmul(A, B, activation="silu")
        agmm.all_gather_scaled_matmul(A8, B8.t(), torch.ones(()), torch.ones(()))
        rowwise = torch.ones(len(A), 1), torch.ones(1, N)
        agmm.all_gather_scaled_matmul(A8, B8.t(), *rowwise)
    dist.barrier()
    return [line for line in str(agmm.status()).splitlines() if f" {m} x " in line]
