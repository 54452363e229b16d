"""Products by all-gather + matmul and its kernels, as the GPU tests run them in ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_work import Faults, fault, group_of, last_ranks, poison, poison_freed_memory, randn

import agmm
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig
from agmm.planning.shapes import LocalShape


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


def kernels() -> list[KernelConfig]:
    return list(kernels_of(ALL_GATHER_MATMUL, "bfloat16"))
