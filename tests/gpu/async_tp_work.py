"""What the tests of torch's async TP over agmm run inside the ranks. All ranks are one group."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import gpu_work
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as symm_mem
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from agmm.integrations import async_tp
from agmm.ops.gather import GatherSettings
from agmm.ops.pipeline import KERNEL
from agmm.ops.plain_gather import PlainGather
from agmm.planning.shapes import LocalShape
from agmm.testing.reference import relative_error

op: Callable[..., Any] = torch.ops.symm_mem.fused_all_gather_matmul

# torch 2.13 renamed it and deprecates the old name.
all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor

Faults = list[str]


def everyone() -> dist.ProcessGroup:
    """The group of all ranks, with torch's symmetric memory."""
    group = dist.group.WORLD
    assert group is not None
    with warnings.catch_warnings():
        # Deprecated, but the compiler pass asks for it in all of torch 2.11 to 2.13.
        warnings.simplefilter("ignore", FutureWarning)
        symm_mem.enable_symm_mem_for_group(group.group_name)
    return group


@contextlib.contextmanager
def enabled() -> Iterator[list[torch.dtype]]:
    """agmm serves the op. The list grows by A_shard's dtype with every call left to torch."""
    left: list[torch.dtype] = []
    find = async_tp.torch_kernel

    def counting(op: str, key: str) -> Callable[..., Any]:
        kernel = find(op, key)

        def call(A_shard: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            left.append(A_shard.dtype)
            return kernel(A_shard, *args, **kwargs)

        return call

    async_tp.disable()
    with mock.patch.object(async_tp, "torch_kernel", counting), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with async_tp.enable():
            yield left


@contextlib.contextmanager
def garbage() -> Iterator[None]:
    """torch fills every new tensor with NaN."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


def shard_of(A: torch.Tensor, gather_dim: int, layout: str = "contiguous") -> torch.Tensor:
    part = A.tensor_split(dist.get_world_size(), gather_dim)[dist.get_rank()].contiguous()
    if layout == "optimal":
        part = symm_mem.restride_A_shard_for_fused_all_gather_matmul(part, gather_dim)
        assert part.movedim(gather_dim, 0).is_contiguous()
    return part


def as_torch(
    label: str, found: torch.Tensor | None, wanted: torch.Tensor | None, A: bool = False
) -> Faults:
    """Shape, strides and dtype as torch's decomposition; a gathered A equals it too."""
    if found is None or wanted is None:
        return [] if found is wanted else [f"{label}: one of the two is None"]
    faults = []
    for name in ("shape", "dtype"):
        if getattr(found, name) != getattr(wanted, name):
            faults.append(f"{label}: {name} {getattr(found, name)}, {getattr(wanted, name)}")
    if found.stride() != wanted.stride():
        faults.append(f"{label}: strides {found.stride()}, wanted {wanted.stride()}")
    if A and not faults and not torch.equal(found, wanted):
        faults.append(f"{label}: differs in {int((found != wanted).sum())} elements")
    return faults


def products(
    local: tuple[int, int, int], n: int, gather_dim: int, dtype: torch.dtype, return_A: bool
) -> Faults:
    """Three weights, garbage in all memory beforehand. agmm serves bf16 along all but the last."""
    group = everyone()
    shape = list(local)
    shape[gather_dim] *= group.size()
    A = gpu_work.randn(tuple(shape), dtype, 1)
    Bs = [gpu_work.randn((shape[-1], n), dtype, 2 + i) for i in range(3)]
    Bs[2] = Bs[2].t().contiguous().t()
    served = dtype == torch.bfloat16 and gather_dim < 2
    faults: Faults = []
    for layout in ("contiguous", "optimal"):
        label = f"{local} {n=} {gather_dim=} {dtype} {return_A=} {layout} rank {group.rank()}"
        shard = shard_of(A, gather_dim, layout)
        arguments = shard, Bs, gather_dim, group.group_name
        by_torch: Any = symm_mem._fused_all_gather_matmul_fallback(*arguments, return_A=return_A)
        if served:
            gpu_work.poison(group)
        for _ in range(2):
            with enabled() as left, garbage():
                found, outs = op(*arguments, return_A=return_A)
            torch.cuda.synchronize()
            if bool(left) == served:
                faults.append(f"{label}: left to torch {len(left)} times")
            faults += as_torch(f"{label} A", found, by_torch[0], A=True)
            for B, out, wanted in zip(Bs, outs, by_torch[1], strict=True):
                faults += as_torch(label, out, wanted)
                if served:
                    flat = out.reshape(-1, n), A.reshape(-1, shape[-1])
                    faults += gpu_work.fault(label, *flat, B, None)
                elif relative_error(out, wanted) > (1e-5 if dtype == torch.float32 else 0.02):
                    faults.append(f"{label}: out differs from torch's")
    return faults


def kernel_names(call: Callable[[], Any]) -> tuple[list[str], Any]:
    """The events that the profiler saw, and what the call returned."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        result = call()
        torch.cuda.synchronize()
    return [event.key for event in profiler.events() or []], result


def native(symmetric: bool, row_major: bool) -> Faults:
    """The case that torch gives to its own native op: agmm serves it, by its own scheduler."""
    group = everyone()
    n, k = 3584, 2048  # large enough for any plan to be fused
    rows = 4096 // group.size()
    shard = gpu_work.randn((rows, k), torch.bfloat16, group.rank())
    if symmetric:
        shard = symm_mem.empty(rows, k, dtype=torch.bfloat16, device=gpu_work.device()).copy_(shard)
    B = gpu_work.randn((k, n) if row_major else (n, k), torch.bfloat16, 9)
    B = B if row_major else B.t()
    arguments = shard, [B], 0, group.group_name
    by_torch: Any = symm_mem._fused_all_gather_matmul_fallback(*arguments)
    asked = mock.patch.dict(os.environ, {"TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP": "1"})
    with asked, enabled() as left:
        op(*arguments)
        names, (A, outs) = kernel_names(lambda: op(*arguments))
    faults = as_torch("A", A, by_torch[0], A=True) + as_torch("out", outs[0], by_torch[1][0])
    faults += gpu_work.fault("native", outs[0], by_torch[0], B, None)
    if left:
        faults.append("left to torch")
    if not any("PersistentAsyncInputScheduler" in name for name in names):
        faults.append(f"no kernel of the async-input scheduler among {sorted(set(names))}")
    op(*arguments)  # torch's own again
    names, _ = kernel_names(lambda: op(*arguments))
    if any("PersistentAsyncInputScheduler" in name for name in names):
        faults.append("agmm serves the op after the end of the block")
    return faults


def graph(replays: int, return_A: bool) -> Faults:
    """Calls along two dimensions in one CUDA graph, replayed on new data."""
    group = everyone()
    rows = 4096 // (2 * group.size()) * 2
    exact = gpu_work.ExactCalls(group, LocalShape(rows, 1024, 1024))
    front = exact.shard.view(2, -1, 1024)  # the rows of two batches, gathered along the second

    def call() -> tuple[Any, Any]:
        along_0 = op(exact.shard, [exact.B], 0, group.group_name, return_A=return_A)
        return along_0, op(front, [exact.B], 1, group.group_name, return_A=return_A)

    with enabled() as left:
        call()
        torch.cuda.synchronize()
        dist.barrier(device_ids=[gpu_work.device().index])
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            (A, outs), (A_front, outs_front) = call()
    faults = [f"left to torch: {left}"] if left else []
    for replay in range(replays):
        exact.new_data()
        for tensor in (A, A_front, outs[0], outs_front[0]):
            if tensor is not None:
                tensor.zero_()
        captured.replay()
        torch.cuda.synchronize()
        gathered = exact.A.view(group.size(), 2, -1, 1024).movedim(0, 1).reshape(2, -1, 1024)
        for label, found, wanted in (
            ("A", A, exact.A),
            ("out", outs[0], exact.A @ exact.B),
            ("A along 1", A_front, gathered),
            ("out along 1", outs_front[0], gathered @ exact.B),
        ):
            if found is not None and not torch.equal(found, wanted):
                faults.append(f"replay {replay} on rank {group.rank()}: {label} differs")
    return faults


def scaled(gather_dim: int, mode: str) -> Faults:
    """fp8 with scales: agmm's kernels against torch's op, which sums in the same precision."""
    group = everyone()
    batch, m, n, k = 2 * group.size(), 16 * group.size(), 16, 32
    leading = [batch, m]
    leading[gather_dim] //= group.size()
    fp8 = torch.float8_e4m3fn
    shard = gpu_work.randn((*leading, k), torch.float32, group.rank()).to(fp8)
    Bs = [gpu_work.randn((n, k), torch.float32, 7 + i).to(fp8).t() for i in range(3)]
    device = gpu_work.device()
    row = {"sharded": (*leading, 1), "replicated": (batch, m, 1), "tensor": ()}[mode]
    column = () if mode == "tensor" else (1, n)
    scales = [torch.full(column, 0.1, device=device) for _ in Bs]
    A_scale = torch.full(row, 0.1, device=device)
    dtypes = [torch.bfloat16] * 3
    some = [None] * 3
    arguments = (shard, Bs, A_scale, scales, gather_dim, group.group_name, some, some, dtypes)
    scaled_op: Callable[..., Any] = torch.ops.symm_mem.fused_all_gather_scaled_matmul
    before = scaled_op(*arguments, [False] * 3)
    with enabled() as left:
        during = scaled_op(*arguments, [False] * 3)
    faults = as_torch("A", during[0].view(torch.uint8), before[0].view(torch.uint8), A=True)
    for out, wanted in zip(during[1], before[1], strict=True):
        faults += as_torch("out", out, wanted)
        error = relative_error(out, wanted.double())
        if not error < 2**-7:  # each is rounded to bfloat16 once
            faults.append(f"out: error {error}")
    return faults + ([] if not left else [f"left to torch: {left}"])


def in_turns(calls: int) -> Faults:
    """agmm's calls and torch's own one after the other, with ranks that are late."""
    group = everyone()
    exact = gpu_work.ExactCalls(group, LocalShape(256, 384, 512))
    name = group.group_name
    wide = exact.B.float()
    wrong = torch.zeros((), dtype=torch.int64, device=gpu_work.device())
    with enabled() as left:
        for i in range(calls):
            exact.new_data()
            if i % group.size() == group.rank():
                torch.cuda._sleep(200_000)
            A, outs = op(exact.shard, [exact.B], 0, name, return_A=i % 2 == 0)
            wrong += torch.ne(outs[0], exact.A @ exact.B).sum()
            A, outs = op(exact.shard.float(), [wide], 0, name)
            wrong += torch.ne(A, exact.A.float()).sum()
            wrong += torch.ne(outs[0].bfloat16(), exact.A @ exact.B).sum()
    torch.cuda.synchronize()
    faults = [] if int(wrong) == 0 else [f"{int(wrong)} wrong elements on rank {group.rank()}"]
    return faults + ([] if left == [torch.float32] * calls else [f"left to torch: {left}"])


def _compile(
    function: Callable[..., Any], *inputs: torch.Tensor
) -> tuple[Callable[..., Any], Any, str]:
    """The function compiled with torch's async TP pass, its first result and its code."""
    torch.compiler.reset()
    with inductor_config.patch(_micro_pipeline_tp=True, force_disable_caches=True):
        compiled = torch.compile(function, fullgraph=True)
        result, code = run_and_get_code(compiled, *inputs)
    return compiled, result, "".join(code)


def compiled(dims: int, gather_dim: int, return_A: bool) -> Faults:
    """An all-gather and a matmul, compiled with torch's pass, against the same in eager mode."""
    group = everyone()
    world_size = group.size()
    shape = [2, 64, 128][3 - dims :]
    shard = gpu_work.randn(tuple(shape), torch.bfloat16, group.rank())
    k = shape[-1] * (group.size() if gather_dim == dims - 1 else 1)
    B = gpu_work.randn((k, 24), torch.bfloat16, 5)

    functional = torch.ops._c10d_functional
    name = group.group_name

    # What all_gather_tensor traces to; dynamo of torch 2.11 does not trace all of that itself.
    def function(x: torch.Tensor, b: torch.Tensor) -> Any:
        A = functional.wait_tensor(functional.all_gather_into_tensor(x, world_size, name))
        if gather_dim != 0:
            A = torch.cat(A.chunk(world_size), gather_dim)
        return (A if return_A else None), A @ b

    label = f"{dims=} {gather_dim=} {return_A=} rank {group.rank()}"
    A = all_gather(shard, gather_dim, group)
    with enabled() as left:
        again, _, code = _compile(function, shard, B)
        names, (found, out) = kernel_names(lambda: again(shard, B))
    faults = as_torch(label, out, function(shard, B)[1])
    if (found is not None) != return_A or (return_A and not torch.equal(found, A)):
        faults.append(f"{label}: A differs")
    faults += gpu_work.fault(label, out.reshape(-1, 24), A.reshape(-1, k), B, None)
    fused = "fused_all_gather_matmul" in code
    by_agmm = any("PersistentAsyncInputScheduler" in name for name in names)
    moved = shard.movedim(gather_dim, 0)
    call = PlainGather(moved.contiguous(), [B], [None], group, GatherSettings(return_A=return_A))
    planned = fused and call.route().by == KERNEL
    if left or by_agmm != planned:
        faults.append(f"{label}: fused {fused}, by agmm {by_agmm}, left to torch {len(left)}")
    if gather_dim == 0 and not (fused and "all_gather_into_tensor" not in code):
        faults.append(f"{label}: torch's pass did not fuse")
    if gather_dim == dims - 1 and fused:
        faults.append(f"{label}: torch's pass fused along the last dimension")
    return faults


def parallel_module(shard_dim: int) -> Faults:
    """A sequence-parallel MLP sharded by torch's own plan, with no change to it."""
    group = everyone()
    torch.manual_seed(0)
    width, hidden = 128, 64 * group.size()
    model = torch.nn.Sequential(
        torch.nn.Linear(width, hidden, bias=False),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, width, bias=False),
    ).to(gpu_work.device(), torch.bfloat16)
    shape = [2, 3, width]
    shape[shard_dim] = 32 * group.size()
    A = gpu_work.randn(tuple(shape), torch.bfloat16, 1)
    with torch.no_grad():
        wanted = shard_of(model(A), shard_dim)
        plan = {
            "0": ColwiseParallel(input_layouts=Shard(shard_dim)),
            "2": RowwiseParallel(output_layouts=Shard(shard_dim)),
        }
        mesh = DeviceMesh.from_group(group, "cuda")
        sharded = parallelize_module(model, mesh, plan)
        x = shard_of(A, shard_dim)
        with enabled() as left:
            again, _, code = _compile(sharded, x)
            names, found = kernel_names(lambda: again(x))
    faults = [f"left to torch: {left}"] if left else []
    fused = "fused_all_gather_matmul" in code
    by_agmm = any("PersistentAsyncInputScheduler" in name for name in names)
    if by_agmm != fused or (shard_dim == 0 and not fused):
        faults.append(f"{shard_dim=}: fused {fused}, by agmm {by_agmm}")
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=0.05, atol=0.02):
        faults.append(f"{shard_dim=}: differs by {float((found - wanted).abs().max())}")
    return faults
