"""Calls that no path can serve, and what the group is like after them, in a pool of five."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import agmm

gather: Callable[..., Any] = agmm.all_gather_matmul
scatter: Callable[..., Any] = agmm.matmul_reduce_scatter
reduce: Callable[..., Any] = agmm.matmul_all_reduce


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def _dual(
    A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup, op: Callable[..., Any] = gather
) -> Any:
    with forward_ad.dual_level():
        return op(forward_ad.make_dual(A, A), B, group)


def _mesh_of_others(A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup) -> Any:
    others = [rank for rank in range(5) if rank != dist.get_rank()]
    return gather(A, B, DeviceMesh("cpu", others, _init_backend=False))


def _as_dtensor(tensor: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _with_limit(call: Callable[[], Any]) -> Any:
    with mock.patch.dict(os.environ, {"AGMM_TIMEOUT_S": "abc"}):
        return call()


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], Any]] = {
    "return_A": lambda A, B, group: gather(A, B, group, return_A="no"),
    "strict": lambda A, B, group: gather(A, B, group, strict="no"),
    "save_gathered": lambda A, B, group: gather(A, B, group, save_gathered=1),
    "config": lambda A, B, group: gather(A, B, group, config=7),
    "sparse A_shard": lambda A, B, group: gather(A.to_sparse(), B, group),
    "sparse B": lambda A, B, group: gather(A, B.to_sparse(), group),
    "compressed B": lambda A, B, group: gather(A, B.to_sparse_csr(), group),
    "sparse bias": lambda A, B, group: gather(A, B, group, bias=B[0].to_sparse()),
    "fp8": lambda A, B, group: gather(A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn), group),
    "dtensor": lambda A, B, group: gather(A, _as_dtensor(B), group),
    "vmap": lambda A, B, group: torch.vmap(lambda a: gather(a, B, group))(torch.stack([A, A])),
    "jvp": lambda A, B, group: torch.func.jvp(lambda a: gather(a, B, group), (A,), (A,)),
    "func.grad": lambda A, B, group: torch.func.grad(lambda a: gather(a, B, group).sum())(A),
    "dual": _dual,
    "another mesh": _mesh_of_others,
    "group of others": lambda A, B, group: gather(A, B, dist.GroupMember.NON_GROUP_MEMBER),
    "limit": lambda A, B, group: _with_limit(lambda: gather(A, B, group)),
    "limit, unfused": lambda A, B, group: _with_limit(
        lambda: gather(A, B, group, config="unfused")
    ),
    "scatter: limit": lambda A, B, group: _with_limit(lambda: scatter(A, B, group)),
    "scatter: sparse B": lambda A, B, group: scatter(A, B.to_sparse(), group),
    "scatter: reduce_op": lambda A, B, group: scatter(A, B, group, reduce_op=3),
    "scatter: scatter_dim": lambda A, B, group: scatter(A, B, group, scatter_dim="0"),
    "scatter: vmap": lambda A, B, group: torch.vmap(lambda a: scatter(a, B, group))(
        torch.stack([A, A])
    ),
    "scatter: fp8": lambda A, B, group: scatter(
        A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn), group
    ),
    "scatter: native": lambda A, B, group: torch.ops.agmm._fused_matmul_reduce_scatter_native(
        A, B.to_sparse(), "sum", group.group_name
    ),
    "native": lambda A, B, group: torch.ops.agmm._fused_all_gather_matmul_native(
        A, B.to_sparse(), group.group_name
    ),
    "reduce: sparse B": lambda A, B, group: reduce(A, B.to_sparse(), group),
    "reduce: sparse bias": lambda A, B, group: reduce(A, B, group, bias=B[0].to_sparse()),
    "reduce: strict": lambda A, B, group: reduce(A, B, group, strict="no"),
    "reduce: vmap": lambda A, B, group: torch.vmap(lambda a: reduce(a, B, group))(
        torch.stack([A, A])
    ),
    "reduce: dual": lambda A, B, group: _dual(A, B, group, reduce),
    "reduce: fp8": lambda A, B, group: reduce(
        A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn), group
    ),
}


def refused(kind: str) -> tuple[str, str, bool] | None:
    """The error's type and message, and whether the next call of the group is right."""
    group = group_of(3)
    if group is None:
        return None
    rank = dist.get_rank(group)
    A, B = _numbers(6, 4), _numbers(4, 3, seed=1)
    shard = A[2 * rank : 2 * rank + 2]
    try:
        CALLS[kind](A[:3] if kind.startswith("scatter") else shard, B, group)
        name, message = "none", ""
    except Exception as error:
        name, message = type(error).__name__, str(error)
    return name, message, torch.equal(gather(shard, B, group), A @ B)


def unfused_reduce(*arguments: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: torch.Tensor = reduce(*arguments)
    return out


def lazy_operands() -> list[str] | None:
    """Faults where an operand is a view whose elements are to be negated or conjugated."""
    group = group_of(3)
    if group is None:
        return None
    rank = dist.get_rank(group)
    A, B, bias = _numbers(6, 4), _numbers(4, 3, seed=1), _numbers(3, seed=2)
    own = slice(2 * rank, 2 * rank + 2)
    negated = torch._neg_view
    faults = []
    found = {
        "A_shard": (gather(negated(A)[own], B, group), -A @ B),
        "B": (gather(A[own], negated(B), group), -A @ B),
        "bias": (gather(A[own], B, group, bias=negated(bias)), A @ B - bias),
        "native": (
            torch.ops.agmm._fused_all_gather_matmul_native(negated(A)[own], B, group.group_name)[1],
            -A @ B,
        ),
        "scatter": (scatter(negated(A), B, group), (-3 * A @ B)[own]),
        "scatter's bias": (
            scatter(A, B, group, bias=negated(bias)),
            (3 * A @ B - bias)[own],
        ),
        "reduce": (reduce(negated(A), negated(B), group, bias=negated(bias)), 3 * A @ B - bias),
    }
    A_complex, B_complex = torch.complex(A, A + 1), torch.complex(B, -B)
    found["conj"] = (gather(A_complex.conj()[own], B_complex, group), A_complex.conj() @ B_complex)
    found["conj reduced"] = (
        unfused_reduce(A_complex.conj(), B_complex, group),
        3 * (A_complex.conj() @ B_complex),
    )
    for name, (out, wanted) in found.items():
        if not torch.equal(out, wanted):
            faults.append(f"{name}: differs by {(out - wanted).abs().max().item()}")
    return faults


def in_place_on_outputs() -> list[str] | None:
    """Faults of gradients where what the ops return is changed in place."""
    group = group_of(3)
    if group is None:
        return None
    rank = dist.get_rank(group)
    faults = []
    for dims in (2, 3):
        A = _numbers(6, *(1,) * (dims - 2), 4)
        B, bias = _numbers(4, 3, seed=1), _numbers(3, seed=2)
        shard = A[2 * rank : 2 * rank + 2]

        def gathered(x: torch.Tensor, b: torch.Tensor, bias: torch.Tensor = bias) -> torch.Tensor:
            whole, (first, second) = gather(x, [b, b], group, bias=[None, bias], return_A=True)
            return whole.mul_(2).sum() + first.relu_().sum() + second.mul_(3).sum()  # type: ignore[no-any-return]

        def single(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return gather(x, b, group).relu_().sum()  # type: ignore[no-any-return]

        def unfused(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return gather(x, b, group, config="unfused").relu_().sum()  # type: ignore[no-any-return]

        def native(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            op = torch.ops.agmm._fused_all_gather_matmul_native
            return op(x, b, group.group_name)[1].relu_().sum()  # type: ignore[no-any-return]

        def plain(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (x @ b).relu().sum()

        def plain_gathered(
            x: torch.Tensor, b: torch.Tensor, bias: torch.Tensor = bias
        ) -> torch.Tensor:
            return 2 * x.sum() + (x @ b).relu().sum() + 3 * (x @ b + bias).sum()

        for function, like in (
            (gathered, plain_gathered),
            (single, plain),
            (unfused, plain),
            (native, plain),
        ):
            x, b = shard.clone().requires_grad_(), B.clone().requires_grad_()
            function(x, b).backward()
            whole, b_whole = A.clone().requires_grad_(), B.clone().requires_grad_()
            like(whole, b_whole).backward()
            # Every rank's loss is that of all rows: the gradient of a shard is the sum of three.
            wanted = 3 * whole.grad[2 * rank : 2 * rank + 2]  # type: ignore[index]
            if x.grad is None or not torch.equal(x.grad, wanted):
                faults.append(f"{function.__name__}, {dims} dimensions: A's gradient")
            if b.grad is None or not torch.equal(b.grad, b_whole.grad):  # type: ignore[arg-type]
                faults.append(f"{function.__name__}, {dims} dimensions: B's gradient")
        x, b = A.clone().requires_grad_(), B.clone().requires_grad_()
        scatter(x, b, group).relu_().sum().backward()
        whole = A.clone().requires_grad_()
        (3 * whole @ B).relu().sum().backward()
        if x.grad is None or not torch.equal(x.grad * 3, whole.grad):  # type: ignore[arg-type]
            faults.append(f"scatter, {dims} dimensions: A's gradient")
    return faults
