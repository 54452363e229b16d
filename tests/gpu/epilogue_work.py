"""Activations by the kernels of all-gather + matmul, as the GPU tests run them in ranks."""

from __future__ import annotations

from typing import Any

import activation_work
import torch
import torch.distributed as dist
from gpu_work import Faults, device, group_of, last_ranks, poison, poison_freed_memory, randn

import agmm
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import LocalShape

op: Any = agmm.all_gather_matmul


def weights(name: str, n: int, k: int, dtype: torch.dtype, *, column_major: bool, seed: int) -> Any:
    """The weights that an activation takes, the first with a bias, and the biases."""
    count = 2 if name in activation_work.GATED else 1
    Bs = []
    for i in range(count):
        weight = randn((n, k), dtype, seed + i) / k**0.5
        Bs.append(weight.t() if column_major else weight.t().contiguous())
    biases = [randn((n,), dtype, seed + 7), None][:count]
    return Bs, biases


def exact(name: str, A: torch.Tensor, Bs: Any, biases: Any) -> torch.Tensor:
    """The result in float64."""
    products = [A.double() @ B.double() for B in Bs]
    for i, bias in enumerate(biases):
        if bias is not None:
            products[i] = products[i] + bias.double()
    return activation_work.activated(name, products)[0]


def fault(label: str, name: str, found: torch.Tensor, operands: Any) -> list[str]:
    """What is wrong with a result: it differs from float64 by more than one rounding and what sums
    in float32 differ by, or by more than torch's ops do, each of which rounds."""
    A, Bs, biases = operands
    wanted = exact(name, A, Bs, biases)
    if found.shape != wanted.shape or found.dtype != A.dtype:
        return [f"{label}: found {found.dtype} {tuple(found.shape)}"]
    error = (found.double() - wanted).abs()
    sums = sum(A.double().abs() @ B.double().abs() for B in Bs)
    allowed = torch.finfo(A.dtype).eps / 2 * wanted.abs() + 2**-18 * (1 + sums) * (1 + wanted.abs())
    worst = (error / allowed).max().item() if error.numel() else 0.0
    if not worst <= 1:
        return [f"{label}: an element is wrong by {worst:.3g} times what is allowed"]
    unfused = [
        torch.mm(A, B) if b is None else torch.addmm(b, A, B)
        for B, b in zip(Bs, biases, strict=True)
    ]
    by_torch = activation_work.activated(name, unfused)[0]
    if error.norm() > 1.05 * (by_torch.double() - wanted).norm() + 2**-22 * wanted.norm():
        return [f"{label}: found a larger error than torch's ops have"]
    return []


def activations(
    world_size: int, names: list[str], shapes: list[LocalShape], return_A: bool
) -> Faults:
    """Calls of all activations, each three times: planned, kept in the other slot, and once more.
    Ranks have weights of their own."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for seed, shape in enumerate(shapes):
        column_major, dtype = seed % 2 == 0, (torch.bfloat16, torch.float16)[seed // 2 % 2]
        A = randn((world_size * shape.M_local, shape.K), dtype, seed)
        shard = A[rank * shape.M_local : (rank + 1) * shape.M_local].clone()
        for name in names:
            layout: Any = {"column_major": column_major, "seed": 100 * rank + seed}
            Bs, biases = weights(name, shape.N, shape.K, dtype, **layout)
            many = len(Bs) > 1
            label = f"{name} {shape} {dtype} {column_major=} rank {rank}/{world_size}"
            poison(group)
            for _ in range(3):
                poison_freed_memory(A.shape[0] * shape.N * 2 + A.numel() * 2)
                given: Any = (Bs, biases) if many else (Bs[0], biases[0])
                found: Any = op(
                    shard,
                    given[0],
                    group,
                    bias=given[1],
                    activation=name,
                    return_A=return_A,
                    strict=True,
                )
                gathered, out = found if return_A else (None, found)
                if gathered is not None and not torch.equal(gathered, A):
                    faults.append(f"{label}: A differs")
                faults += fault(label, name, out, (A, Bs, biases))
    return faults


def every_way(world_size: int, names: list[str]) -> Faults:
    """Every kernel that has an activation, with each transport that it can serve."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    shape = LocalShape(200, 264, 520)
    A = randn((world_size * shape.M_local, shape.K), torch.bfloat16, 3)
    shard = A[rank * shape.M_local : (rank + 1) * shape.M_local].clone()
    for name in names:
        epilogue = "gate" if name in activation_work.GATED else "activation"
        for kernel in kernels_of(ALL_GATHER_MATMUL, "bfloat16", epilogue, "column"):
            Bs, biases = weights(name, 264, 520, torch.bfloat16, column_major=True, seed=rank)
            for transport in ("push", "sm4x64", "sm16x128+1", "pull"):
                if transport.startswith("sm") and not kernel.can_push:
                    continue
                label = f"{name} {kernel.kernel}/{transport} rank {rank}/{world_size}"
                return_A = transport in ("pull", "sm4x64")
                poison(group)
                given: Any = (Bs, biases) if len(Bs) > 1 else (Bs[0], biases[0])
                found: Any = op(
                    shard,
                    given[0],
                    group,
                    bias=given[1],
                    activation=name,
                    return_A=return_A,
                    config=f"{kernel.kernel}/{transport}",
                    strict=True,
                )
                faults += fault(label, name, found[1] if return_A else found, (A, Bs, biases))
    return faults


def captured_and_compiled(world_size: int, name: str) -> Faults:
    """A graph, and compiled code, have the bits of an eager call."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    A = randn((world_size * 200, 264), torch.bfloat16, 5)
    shard = A[rank * 200 : (rank + 1) * 200].clone()
    Bs, biases = weights(name, 136, 264, torch.bfloat16, column_major=True, seed=rank)
    given: Any = (Bs, biases) if len(Bs) > 1 else (Bs[0], biases[0])
    group_name = group.group_name

    def layer(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = op(
            x + 0, given[0], group_name, bias=given[1], activation=name, strict=True
        )
        return found

    try:
        layer(shard.clone().requires_grad_())
        faults.append(f"{name}: a call that keeps its products was served by a kernel")
    except agmm.Unsupported as error:
        if f"save_preactivation: found True with activation {name!r}" not in str(error):
            faults.append(f"{name}: refused with {error}")
    with torch.no_grad():
        wanted = [layer(shard) for _ in range(2)][1].clone()
        faults += fault(f"eager {name}", name, wanted, (A, Bs, biases))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(shard)
        if not torch.equal(compiled, wanted):
            faults.append(f"{name}: compiled code has other bits")
        torch.cuda.synchronize()
        dist.barrier(group, device_ids=[device().index])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = layer(shard)
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            if not torch.equal(out, wanted):
                faults.append(f"{name}: a replay has other bits")
    return faults
