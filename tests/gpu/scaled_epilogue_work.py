"""Activations by the fp8 kernels, as the GPU tests run them in one process and in ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import activation_work
import torch
import torch.distributed as dist
from gpu_work import Faults, device, group_of, last_ranks, poison, poison_freed_memory
from scaled_gpu_work import E4M3, Operands, by_torch, operands

import agmm
from agmm.ops import fp8_operands
from agmm.runtime.scaled import Scaled, Weight
from agmm.testing.reference import allowed_error, relative_error

Biases = Sequence[torch.Tensor | None]
op: Any = agmm.all_gather_scaled_matmul


def weights(scaling: str, m: int, n: int, k: int, count: int, seed: int) -> list[Operands]:
    """The operands of one product or of two with the same A, whose products are small numbers."""
    first = operands(scaling, m, n, k, (E4M3, E4M3), seed)
    found = [first._replace(scale_b=first.scale_b / k**0.5)]
    for i in range(1, count):
        more = operands(scaling, m, n, k, (E4M3, E4M3), 100 * i + seed)
        found.append(first._replace(B=more.B, scale_b=more.scale_b / k**0.5))
    return found


def described(given: Sequence[Operands], biases: Biases, fast: bool) -> tuple[Scaled, list[Weight]]:
    count = len(given)
    of_kernel = fp8_operands.Fp8Weights(
        *([one.B for one in given], [one.scale_b for one in given], list(biases)),
        *([None] * count, [torch.bfloat16] * count, [fast] * count),
    )
    tile, found = of_kernel.described(given[0].A, given[0].scale_a)
    return fp8_operands.rows_of(given[0].A, given[0].scale_a, tile, 0), found


def fault(
    label: str,
    name: str,
    found: torch.Tensor,
    given: Sequence[Operands],
    biases: Biases,
    fast: bool,
) -> list[str]:
    """What is wrong with a result: it differs from float64 by more than torch's ops do, each of
    which rounds."""
    exact = [one.product(bias) for one, bias in zip(given, biases, strict=True)]
    rounded = [by_torch(one, fast, bias) for one, bias in zip(given, biases, strict=True)]
    wanted = activation_work.activated(name, exact)[0]
    if found.shape != wanted.shape or found.dtype != torch.bfloat16:
        return [f"{label}: found {found.dtype} {tuple(found.shape)}"]
    composed = activation_work.activated(name, [one.float() for one in rounded])[0]
    allowed = allowed_error(relative_error(composed.to(torch.bfloat16), wanted))
    error = relative_error(found, wanted)
    return [] if error <= allowed else [f"{label}: error {error:.3g}, allowed {allowed:.3g}"]


def _shard(given: Operands, rank: int, rows: int) -> Operands:
    return given.rows(slice(rank * rows, (rank + 1) * rows))


def between_ranks(world_size: int, scaling: str, return_A: bool) -> Faults:
    """Calls of a gate and of an activation, each three times: planned, kept in the other slot, and
    once more. Ranks have weights of their own; a tensor-wise scale is that of all ranks."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for name in ("silu_mul", "gelu_tanh"):
        for rows, n, k in ((200, 272, 528), (37, 520, 1040), (701, 1032, 272)):
            first = operands(scaling, world_size * rows, n, k, (E4M3, E4M3), rows)
            given = [
                first._replace(B=one.B, scale_b=one.scale_b)
                for one in weights(scaling, rows, n, k, 2, 10 * rank + rows)
            ][: 2 if name in activation_work.GATED else 1]
            bias = torch.randn(n, device=device(), dtype=torch.bfloat16)
            biases = [bias, None][: len(given)]
            shard, many = _shard(first, rank, rows), len(given) > 1
            Bs, scale_bs = [one.B for one in given], [one.scale_b for one in given]
            of_op: Any = (Bs, scale_bs, biases) if many else (Bs[0], scale_bs[0], biases[0])
            poison(group)
            for fast in (True, True, False):
                poison_freed_memory(world_size * rows * n * 2)
                found = op(
                    *(shard.A, of_op[0], shard.scale_a, of_op[1], group),
                    bias=of_op[2],
                    activation=name,
                    use_fast_accum=fast,
                    return_A=return_A,
                    strict=True,
                )
                label = f"{name} {scaling} {rows}x{n}x{k} {fast=} rank {rank}/{world_size}"
                if return_A:
                    A, scale_A, found = found
                    whole = first.scale_a.reshape(1, 1).expand(world_size, 1)
                    scales = whole if scaling == "tensorwise" else first.scale_a
                    if not torch.equal(A.view(torch.uint8), first.A.view(torch.uint8)):
                        faults.append(f"{label}: A differs")
                    if not torch.equal(scale_A, scales):
                        faults.append(f"{label}: the scales of A differ")
                faults += fault(label, name, found, given, biases, fast)
    return faults


def captured(world_size: int) -> Faults:
    """A graph has the bits of an eager call."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults, rows = dist.get_rank(group), [], 200
    first = operands("rowwise", world_size * rows, 272, 528, (E4M3, E4M3), 1)
    gate, up = weights("rowwise", rows, 272, 528, 2, rank)
    shard = _shard(first, rank, rows)

    def layer() -> torch.Tensor:
        found: torch.Tensor = op(
            *(shard.A, [gate.B, up.B], shard.scale_a, [gate.scale_b, up.scale_b], group),
            activation="silu_mul",
            strict=True,
        )
        return found

    wanted = [layer() for _ in range(2)][1].clone()
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = layer()
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(out, wanted):
            faults.append(f"rank {rank}: a replay has other bits")
    return faults
