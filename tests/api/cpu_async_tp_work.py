"""What the tests of torch's async TP over agmm run inside the ranks of a pool of five."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import left_to_torch
import op_work
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as symm_mem
from steps_taken import noted
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from agmm.integrations import async_tp
from agmm.ops.plain_gather import PlainGather
from agmm.ops.plain_scatter import PlainScatter
from agmm.testing.reference import relative_error

op: Callable[..., Any] = torch.ops.symm_mem.fused_all_gather_matmul

scatter: Callable[..., Any] = torch.ops.symm_mem.fused_matmul_reduce_scatter

# torch 2.13 renamed them and deprecates the old names.
all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor

LAYOUTS = ("contiguous", "optimal", "strided")


def _shard(A: torch.Tensor, gather_dim: int, group: dist.ProcessGroup, layout: str) -> torch.Tensor:
    """This rank's part of A."""
    part = A.tensor_split(dist.get_world_size(group), gather_dim)[dist.get_rank(group)].contiguous()
    if layout == "optimal":
        part = symm_mem.restride_A_shard_for_fused_all_gather_matmul(part, gather_dim)
        assert part.movedim(gather_dim, 0).is_contiguous()
    elif layout == "strided":
        part = torch.stack([part, part], -1)[..., 0]
    return part


def _torch_stride(shape: tuple[int, ...], gather_dim: int, world_size: int) -> tuple[int, ...]:
    """The strides of an output [*shape, n] of torch's CUDA kernel, shape being the gathered one."""
    front = torch.empty(shape, device="meta").movedim(gather_dim, 0)
    leading = [world_size, front.shape[0] // world_size, *front.shape[1:-1]]
    flat = torch.empty(front[..., 0].numel(), shape[-1], device="meta")
    return flat.view(*leading, shape[-1]).flatten(0, 1).movedim(0, gather_dim).stride()


def products(
    world_size: int,
    shapes: list[tuple[int, ...]],
    gather_dim: int,
    dtype: torch.dtype,
    weights: int = 1,
    return_A: bool = True,
) -> op_work.Result:
    """Faults, in words. `shapes` are A_shard's [..., K]; every call has to be served by agmm."""
    group = op_work._prepare(world_size)
    if group is None:
        return None
    faults = []
    for seed, shape in enumerate(shapes):
        gathered = list(shape)
        gathered[gather_dim] *= world_size
        A = op_work._random(tuple(gathered), dtype, seed)
        Bs = [op_work._random((5 + i, shape[-1]), dtype, 50 + seed + i).t() for i in range(weights)]
        for layout in LAYOUTS:
            label = f"{shape} {gather_dim=} {dtype} {layout} rank {dist.get_rank(group)}"
            shard = _shard(A, gather_dim, group, layout)
            with left_to_torch.enabled() as left:
                found, outs = op(shard, Bs, gather_dim, group.group_name, return_A=return_A)
            faults += left
            if return_A and not torch.equal(found, A):
                faults.append(f"{label}: A differs")
            if return_A and found.stride() != _torch_stride(tuple(A.shape), gather_dim, world_size):
                faults.append(f"{label}: strides of A {found.stride()}")
            if not return_A and found is not None:
                faults.append(f"{label}: found an A")
            for B, out in zip(Bs, outs, strict=True):
                wanted = _torch_stride((*A.shape[:-1], B.shape[1]), gather_dim, world_size)
                if out.stride() != wanted:
                    faults.append(f"{label}: strides {out.stride()}, wanted {wanted}")
                faults += op_work._fault(label, out, A, B, None)
    return faults


def as_torch(world_size: int, gather_dim: int) -> op_work.Result:
    """The op against torch's own decomposition: values, shapes and strides. The last gather_dim is
    torch's to serve."""
    group = op_work._prepare(world_size)
    if group is None:
        return None
    shape = [3, 4, 6]
    shape[gather_dim] *= world_size
    A = op_work._random(tuple(shape), torch.float32, 1)
    Bs = [op_work._random((shape[-1], 5), torch.float32, 2 + i) for i in range(3)]
    shard = _shard(A, gather_dim, group, "contiguous")
    name = group.group_name
    by_torch: Any = symm_mem._fused_all_gather_matmul_fallback(shard, Bs, gather_dim, name)
    wanted_A, wanted = by_torch
    with left_to_torch.enabled() as left:
        found_A, found = op(shard, Bs, gather_dim, name)
    faults = []
    if not torch.equal(found_A, wanted_A) or found_A.stride() != wanted_A.stride():
        faults.append(f"A differs, strides {found_A.stride()} and {wanted_A.stride()}")
    for out, other in zip(found, wanted, strict=True):
        if not torch.allclose(out, other, atol=1e-5) or out.stride() != other.stride():
            faults.append(f"out differs, strides {out.stride()} and {other.stride()}")
    if bool(left) != (gather_dim == 2):
        faults.append(f"{gather_dim=}, left to torch: {left}")
    return faults


def compiled_by_pass(
    function: Callable[..., Any], group: dist.ProcessGroup, *inputs: torch.Tensor
) -> tuple[Callable[..., Any], Any, str]:
    """The function compiled with torch's async TP pass, its first result and its code."""
    torch.compiler.reset()
    # Needed by the pass, though deprecated in all of torch 2.11 to 2.13.
    symm_mem.enable_symm_mem_for_group(group.group_name)
    # torch for CPU has no NCCL, without which the pass does nothing.
    nccl = mock.patch.object(dist, "is_nccl_available", return_value=True)
    with nccl, inductor_config.patch(_micro_pipeline_tp=True, force_disable_caches=True):
        compiled = torch.compile(function, fullgraph=True)
        result, code = run_and_get_code(compiled, *inputs)
    return compiled, result, "".join(code)


def compiled(world_size: int, shape: tuple[int, ...], weights: int, return_A: bool) -> list[str]:
    """A function with an all-gather and matmuls, compiled: agmm computes them."""
    group = op_work._prepare(world_size)
    if group is None:
        return []

    def function(x: torch.Tensor, Bs: list[torch.Tensor]) -> Any:
        A = all_gather(x, 0, group)
        return (A if return_A else None), [A @ B for B in Bs]

    x = op_work._random(shape, torch.float32, dist.get_rank(group))
    Bs = [op_work._random((shape[-1], 8 + i), torch.float32, 9 + i) for i in range(weights)]
    served = noted(PlainGather, "by_cpu")
    faults = []
    with async_tp.enable(), served as calls:
        again, found, code = compiled_by_pass(function, group, x, Bs)  # type: ignore[arg-type]
    wanted = function(x, Bs)
    if "fused_all_gather_matmul" not in code or "all_gather_into_tensor" in code:
        faults.append(f"not fused: {code}")
    if f"return_A={return_A}" not in code:
        faults.append("A is returned where it should not be, or the reverse")
    if calls.call_count != 1:
        faults.append(f"agmm served {calls.call_count} calls")
    if return_A and not torch.equal(found[0], wanted[0]):
        faults.append("A differs")
    for out, other in zip(found[1], wanted[1], strict=True):
        if not torch.allclose(out, other, atol=1e-5) or out.stride() != other.stride():
            faults.append(f"out differs, strides {out.stride()} and {other.stride()}")
    try:
        again(x, Bs)
        faults.append("agmm was disabled, but the compiled graph found a CPU kernel")
    except NotImplementedError:
        pass
    with async_tp.enable(), served as calls:
        again(x, Bs)
        if calls.call_count != 1:
            faults.append("the compiled graph did not use agmm once it was enabled again")
    return faults


def parallel_module(world_size: int) -> list[str]:
    """A module sharded by torch's own plan, with no change to it."""
    group = op_work._prepare(world_size)
    if group is None:
        return []
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8 * world_size, bias=False))
    A = op_work._random((4 * world_size, 16), torch.float32, 1)
    rank = dist.get_rank(group)
    with torch.no_grad():
        wanted = model(A).tensor_split(world_size, 1)[rank]
        mesh = DeviceMesh.from_group(group, "cpu")
        sharded = parallelize_module(model, mesh, {"0": ColwiseParallel(input_layouts=Shard(0))})
        served = noted(PlainGather, "by_cpu")
        with async_tp.enable(), served as calls:
            _, found, code = compiled_by_pass(sharded, group, A.tensor_split(world_size)[rank])
    faults = [] if "fused_all_gather_matmul" in code else [f"not fused: {code}"]
    if calls.call_count != 1:
        faults.append(f"agmm served {calls.call_count} calls")
    if not torch.allclose(found, wanted, atol=1e-5):
        faults.append("out differs")
    return faults


def scattered(
    world_size: int,
    shape: tuple[int, ...],
    scatter_dim: int,
    reduce_op: str,
    dtype: torch.dtype,
    layout: str,
) -> op_work.Result:
    """Faults of a product whose sum is scattered: `shape` is A's [..., K]. Against float64, and in
    shape and strides against torch's decomposition; all but the last scatter_dim by agmm."""
    group = op_work._prepare(world_size)
    if group is None:
        return None
    rank, size = dist.get_rank(group), list(shape)
    size[scatter_dim] *= world_size
    columns = 5 * world_size
    every = [
        (
            op_work._random(tuple(size), dtype, 10 + r),
            op_work._random((columns, size[-1]), dtype, 30 + r).t(),
        )
        for r in range(world_size)
    ]
    A, B = every[rank]
    if layout == "optimal":
        A = symm_mem.restride_A_for_fused_matmul_reduce_scatter(A, scatter_dim)
    elif layout == "strided":
        A = torch.stack([A, A], -1)[..., 0]
    with left_to_torch.enabled() as left:
        out = scatter(A, B, reduce_op, scatter_dim, group.group_name)
    is_last = scatter_dim == len(shape) - 1
    sums = torch.stack([a.double() @ b.double() for a, b in every]).sum(0)
    wanted = sums.tensor_split(world_size, scatter_dim)[rank]
    wanted = wanted / world_size if reduce_op == "avg" else wanted
    by_torch = symm_mem._fused_matmul_reduce_scatter_fallback(
        A.clone(),
        B,
        "sum",
        scatter_dim,
        group.group_name,
    )
    faults = []
    if bool(left) != is_last:
        faults.append(f"left to torch: {left}")
    if (out.shape, out.stride()) != (by_torch.shape, by_torch.stride()):
        faults.append(f"{out.shape} {out.stride()}, torch has {by_torch.shape} {by_torch.stride()}")
    if relative_error(out, wanted) > 4 * torch.finfo(dtype).eps:
        faults.append(f"error {relative_error(out, wanted)}")
    return [f"{shape} {scatter_dim=} {reduce_op} {layout}: {fault}" for fault in faults]


def compiled_scatter(world_size: int, shape: tuple[int, ...]) -> list[str]:
    """A matmul and a reduce-scatter, compiled: agmm computes them."""
    group = op_work._prepare(world_size)
    if group is None:
        return []

    def function(x: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = reduce_scatter(x @ B, "sum", 0, group)
        return out

    rank = dist.get_rank(group)
    x = op_work._random(shape, torch.float32, rank)
    B = op_work._random((shape[-1], 8), torch.float32, 9 + rank)
    served = noted(PlainScatter, "by_cpu")
    with async_tp.enable(), served as calls:
        _, found, code = compiled_by_pass(function, group, x, B)
    wanted = function(x, B)
    faults = []
    if "fused_matmul_reduce_scatter" not in code or "reduce_scatter_tensor" in code:
        faults.append(f"not fused: {code}")
    if calls.call_count != 1:
        faults.append(f"agmm served {calls.call_count} calls")
    if not torch.allclose(found, wanted, atol=1e-5) or found.stride() != wanted.stride():
        faults.append(f"out differs, strides {found.stride()} and {wanted.stride()}")
    return faults


def parallel_rows(world_size: int) -> list[str]:
    """A module sharded by torch's own plan for the second half of a layer."""
    group = op_work._prepare(world_size)
    if group is None:
        return []
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8 * world_size, 16, bias=False))
    A = op_work._random((4 * world_size, 8 * world_size), torch.float32, 1)
    rank = dist.get_rank(group)
    with torch.no_grad():
        wanted = model(A).tensor_split(world_size)[rank]
        mesh = DeviceMesh.from_group(group, "cpu")
        sharded = parallelize_module(model, mesh, {"0": RowwiseParallel(output_layouts=Shard(0))})
        served = noted(PlainScatter, "by_cpu")
        with async_tp.enable(), served as calls:
            _, found, code = compiled_by_pass(sharded, group, A.tensor_split(world_size, 1)[rank])
    faults = [] if "fused_matmul_reduce_scatter" in code else [f"not fused: {code}"]
    if calls.call_count != 1:
        faults.append(f"agmm served {calls.call_count} calls")
    if not torch.allclose(found, wanted, atol=1e-5):
        faults.append("out differs")
    return faults
