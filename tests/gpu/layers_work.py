"""What the GPU tests of the backward and the layers run inside the ranks, all in one group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

# It is imported before an op is replaced: its import goes through all of torch.ops.
import torch._inductor.decomposition
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import agmm
from agmm.nn import ColumnParallelLinear, RowParallelLinear, load_full_state_dict
from agmm.ops import kept, pipeline, scatter_plan
from agmm.ops.pipeline import Route
from agmm.ops.plain_scatter import PlainScatter
from agmm.planning import cost_model
from agmm.planning.problems import KernelConfig
from agmm.planning.shapes import LocalShape
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.workspaces import cuda_workspace
from agmm.testing.reference import allowed_error, relative_error

ERROR_FACTOR = 2.0
"""A gradient may have this many times the error of plain tensor parallelism with NCCL."""


def _randn(*shape: int, seed: int) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).bfloat16()


def _plain_reduce_scatter(partial: torch.Tensor) -> torch.Tensor:
    part = partial.new_empty(partial.shape[0] // dist.get_world_size(), *partial.shape[1:])
    scatter: Callable[..., Any] = (
        getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    )
    scatter(part, partial)
    return part


@dataclass
class Taken:
    fused_scatters: int = 0
    scatters_by_kernel: int = 0
    gathers_by_copies: int = 0


@contextmanager
def choices(*, fused: bool, by_copies: bool, by_kernel: bool = False) -> Iterator[Taken]:
    """The plans and the cost model say so; counts what was done. Scatters are agmm's kernels'
    (by_kernel), else torch's op's (fused), else unfused."""
    taken = Taken()
    op, start = torch.ops.symm_mem.fused_matmul_reduce_scatter, CudaWorkspace.start_all_gather
    route, ready = PlainScatter.route, PlainScatter.ready_on_cuda

    def routed(call: PlainScatter) -> Route:
        return route(call) if by_kernel else call.otherwise("for the test", is_planned=True)

    def ready_by_agmm(call: PlainScatter, kernel: KernelConfig) -> Callable[..., torch.Tensor]:
        made = ready(call, kernel)

        def counted(*operands: Any) -> torch.Tensor:
            taken.scatters_by_kernel += 1
            out: torch.Tensor = made(*operands)
            return out

        return counted

    def scatter(*arguments: Any) -> torch.Tensor:
        taken.fused_scatters += 1
        out: torch.Tensor = op(*arguments)
        return out

    def gather(workspace: CudaWorkspace, shard: torch.Tensor) -> Callable[[], torch.Tensor]:
        taken.gathers_by_copies += 1
        return start(workspace, shard)

    # Mocks would keep what they were called with, and so its graph and the streams of before.
    def is_fused(
        A: torch.Tensor, B: torch.Tensor, scatter_dim: int, group: dist.ProcessGroup
    ) -> bool:
        if fused:
            cuda_workspace(group, A.device).ensure(1)
        return fused and scatter_dim % A.dim() == 0

    def is_gather_by_copies(*_: Any, **__: Any) -> bool:
        return by_copies

    with (
        mock.patch.object(kept, "kept_calls", weakref.WeakKeyDictionary()),
        mock.patch.object(PlainScatter, "route", routed),
        mock.patch.object(PlainScatter, "ready_on_cuda", ready_by_agmm),
        mock.patch.object(scatter_plan, "is_fused", is_fused),
        mock.patch.object(cost_model, "is_gather_by_copies", is_gather_by_copies),
        mock.patch.object(torch.ops.symm_mem, "fused_matmul_reduce_scatter", scatter),
        mock.patch.object(CudaWorkspace, "start_all_gather", gather),
    ):
        yield taken


def _compare(
    label: str, found: torch.Tensor, plain: torch.Tensor, reference: torch.Tensor
) -> list[str]:
    error, plain_error = relative_error(found, reference), relative_error(plain, reference)
    limit = ERROR_FACTOR * plain_error + allowed_error(0.0)
    return [] if error <= limit else [f"{label}: error {error:.3g}, plain {plain_error:.3g}"]


def gather_gradients(shape: LocalShape, gathered_by: str, return_A: bool) -> list[str]:
    """Faults of the gradients of `all_gather_matmul` in bf16. What the backward needs of A has been
    "kept", or is gathered again by "nccl" or by "copies"."""
    save_gathered = gathered_by == "kept"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = slice(rank * shape.M_local, (rank + 1) * shape.M_local)
    m = world_size * shape.M_local
    A = _randn(m, shape.K, seed=1)
    weights = [_randn(shape.N, shape.K, seed=10 + r) for r in range(world_size)]
    douts = [_randn(m, shape.N, seed=20 + r) for r in range(world_size)]
    dA = _randn(m, shape.K, seed=3)
    leaves = [A[own].clone(), weights[rank].clone(), _randn(shape.N, seed=4)]
    shard, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    op: Callable[..., Any] = agmm.all_gather_matmul
    found = op(
        shard, weight.t(), bias=bias, strict=True, save_gathered=save_gathered, return_A=return_A
    )
    with choices(fused=False, by_copies=gathered_by == "copies") as taken:
        if return_A:
            gathered, out = found
            torch.autograd.backward([gathered, out], [dA, douts[rank]])
        else:
            found.backward(douts[rank])
    assert taken.gathers_by_copies == (gathered_by == "copies")
    partial = douts[rank] @ weights[rank]
    wanted = sum(d.double() @ w.double() for d, w in zip(douts, weights, strict=True))
    if return_A:
        partial += dA
        wanted = wanted + world_size * dA.double()
    assert isinstance(wanted, torch.Tensor)
    assert shard.grad is not None and weight.grad is not None and bias.grad is not None
    faults = _compare("A_shard", shard.grad, _plain_reduce_scatter(partial), wanted[own])
    faults += _compare("B", weight.grad, douts[rank].t() @ A, douts[rank].double().t() @ A.double())
    faults += _compare("bias", bias.grad, douts[rank].sum(0), douts[rank].double().sum(0))
    return [f"{shape} on rank {rank}: {fault}" for fault in faults]


def scatter_gradients(shape: LocalShape, reduce_op: str, fused: bool) -> list[str]:
    """Faults of `matmul_reduce_scatter` and its gradients in bf16, by the fused op or without."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = slice(rank * shape.M_local, (rank + 1) * shape.M_local)
    m = world_size * shape.M_local
    As = [_randn(m, shape.K, seed=10 + r) for r in range(world_size)]
    weights = [_randn(shape.N, shape.K, seed=20 + r) for r in range(world_size)]
    dout = _randn(m, shape.N, seed=1)
    A, weight = As[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    with choices(fused=fused, by_copies=False) as taken:
        out = agmm.matmul_reduce_scatter(A, weight.t(), reduce_op=reduce_op)
        out.backward(dout[own].clone())
    scale = world_size if reduce_op == "avg" else 1
    wanted = sum(a.double() @ w.double().t() for a, w in zip(As, weights, strict=True))
    assert isinstance(wanted, torch.Tensor) and A.grad is not None and weight.grad is not None
    plain = _plain_reduce_scatter(As[rank] @ weights[rank].t())
    faults = _compare("out", out.detach(), plain / scale, wanted[own] / scale)
    dA, dB = dout @ weights[rank], dout.t() @ As[rank]
    exact_dA = dout.double() @ weights[rank].double()
    faults += _compare("A", A.grad, dA / scale, exact_dA / scale)
    exact_dB = dout.double().t() @ As[rank].double()
    faults += _compare("B", weight.grad, dB / scale, exact_dB / scale)
    if (taken.fused_scatters > 0) != fused:
        faults.append(f"fused={fused}, but torch's op ran {taken.fused_scatters} times")
    return [f"{shape} on rank {rank}: {fault}" for fault in faults]


def _plain_and_exact(A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = _plain_reduce_scatter(A.double() @ B.double())
    return _plain_reduce_scatter(A @ B), exact


def scatter_in_a_graph() -> list[str]:
    """Faults of a graph of torch's fused op after an eager call that made its workspace larger."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    faults = []
    with choices(fused=True, by_copies=False) as taken, torch.no_grad():
        A, B = _randn(world_size * 512, 512, seed=rank), _randn(512, 1024, seed=9)
        given = A.clone()
        agmm.matmul_reduce_scatter(given, B)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = agmm.matmul_reduce_scatter(given, B)
        larger = A.repeat(4, 1)
        eager = agmm.matmul_reduce_scatter(larger, B)
        torch.cuda.empty_cache()
        trash = torch.full((64 << 20,), torch.nan, device=A.device)  # where the old one lay
        for scale in (1.0, -2.0):
            out.fill_(torch.nan)
            given.copy_(A * scale)
            graph.replay()
            torch.cuda.synchronize()
            faults += _compare(f"replay, {scale}", out, *_plain_and_exact(given, B))
        del trash
        faults += _compare("larger", eager, *_plain_and_exact(larger, B))
    if taken.fused_scatters != 3:
        faults.append(f"torch's op ran {taken.fused_scatters} times, wanted 3")
    return faults


def _mlp() -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """A whole module and its sharded copy, bf16."""
    torch.manual_seed(1)
    device = torch.device("cuda", torch.cuda.current_device())
    where: Any = {"device": device, "dtype": torch.bfloat16}
    whole = torch.nn.Sequential(
        torch.nn.Linear(512, 1024, **where), torch.nn.GELU(), torch.nn.Linear(1024, 512, **where)
    )
    sharded = torch.nn.Sequential(
        ColumnParallelLinear(512, 1024, strict=True, **where),
        torch.nn.GELU(),
        RowParallelLinear(1024, 512, **where),
    )
    load_full_state_dict(sharded, whole.state_dict())
    return whole, sharded


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank, without a graph."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradients(
    leaves: Sequence[torch.Tensor], run: Callable[[], torch.Tensor]
) -> list[torch.Tensor]:
    _zero(leaves)
    run()
    return [local_values(leaf.grad).clone() for leaf in leaves if leaf.grad is not None]


def _zero(leaves: Sequence[torch.Tensor]) -> None:
    for leaf in leaves:
        if leaf.grad is not None:
            local_values(leaf.grad).zero_()


def layers(how: str, by_kernel: bool) -> list[str]:
    """Faults of sharded layers: plain against the whole module; compiled and captured in a CUDA
    graph against plain ones. By agmm's matmul + reduce-scatter or torch's, and gathers beside it
    by copies."""
    with choices(fused=not by_kernel, by_copies=True, by_kernel=by_kernel) as taken:
        faults = _layers(how)
    scatters = (taken.fused_scatters, taken.scatters_by_kernel)
    if [count > 0 for count in scatters] != [not by_kernel, by_kernel] or (
        not taken.gathers_by_copies
    ):
        faults.append(f"not by the ways that were asked for: {taken}")
    return faults


def _layers(how: str) -> list[str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole, sharded = _mlp()
    x = _randn(world_size * 130, 512, seed=5)
    own = slice(rank * 130, (rank + 1) * 130)
    # Without a gradient of its own there is no product beside which it is gathered again.
    shard = x[own].clone().requires_grad_()
    leaves = [shard, *sharded.parameters()]
    scale = _randn(130, 512, seed=6)
    with torch.no_grad():
        out = sharded(shard)
    faults = []
    wanted = whole.double()(x.double())[own]
    error = relative_error(out, wanted.detach())
    if error > 0.02:
        faults.append(f"out: error {error}")

    run: torch.nn.Module | Callable[..., Any] = sharded
    if how == "compiled":
        torch.compiler.reset()
        run = torch.compile(sharded, fullgraph=True)

    def step() -> torch.Tensor:
        result: torch.Tensor = run(shard)
        (result.float() * scale).sum().backward()
        return result

    def eager_step() -> torch.Tensor:
        result: torch.Tensor = sharded(shard)
        (result.float() * scale).sum().backward()
        return result

    gradients = _gradients(leaves, eager_step)
    assert len(gradients) == len(leaves)
    if how == "graph":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                _zero(leaves)
                eager_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        _zero(leaves)
        with torch.cuda.graph(graph):
            eager_step()
        step = graph.replay  # type: ignore[assignment]
    for turn in range(3):
        for one, other in zip(_gradients(leaves, step), gradients, strict=True):
            error = relative_error(one, other.double())
            if error > 0.01:
                faults.append(f"{how}, turn {turn}: error {error}")
    return [f"rank {rank}: {fault}" for fault in faults]


def all_reduce(shape: LocalShape) -> list[str]:
    """Faults of `matmul_all_reduce` and its gradients in bf16: as planned, and by a kernel."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    m = world_size * shape.M_local + 1  # which the ranks need not share equally
    As = [_randn(m, shape.K, seed=10 + r) for r in range(world_size)]
    weights = [_randn(shape.N, shape.K, seed=20 + r) for r in range(world_size)]
    bias, dout = _randn(shape.N, seed=2), _randn(m, shape.N, seed=1)
    A, weight = As[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    with mock.patch.object(pipeline, "fall_back") as warned:
        out = agmm.matmul_all_reduce(A, weight.t(), bias=bias)
        by_kernel = [agmm.matmul_all_reduce(A, weight.t(), bias=bias, strict=True) for _ in "12"]
    out.backward(dout)
    faults = [f"{warned.call_args}"] if warned.call_count else []
    for again in by_kernel:
        found = [torch.empty_like(again) for _ in range(world_size)]
        dist.all_gather(found, again.detach())
        if not all(torch.equal(other, by_kernel[0]) for other in found):
            faults.append("other bits by a kernel")
    wanted = sum(a.double() @ w.double().t() for a, w in zip(As, weights, strict=True))
    assert isinstance(wanted, torch.Tensor) and A.grad is not None and weight.grad is not None
    plain = As[rank] @ weights[rank].t()
    dist.all_reduce(plain)
    for name, each in (("out", out), ("out by a kernel", by_kernel[0])):
        faults += _compare(name, each.detach(), plain + bias, wanted + bias.double())
    of_A = dout.double() @ weights[rank].double()
    faults += _compare("A", A.grad, dout @ weights[rank], of_A)
    of_B = dout.double().t() @ As[rank].double()
    faults += _compare("B", weight.grad, dout.t() @ As[rank], of_B)
    return [f"{shape} on rank {rank}: {fault}" for fault in faults]
