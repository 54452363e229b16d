"""What the tests of `agmm.matmul_reduce_scatter` run inside the ranks of a pool."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import rank_work
import torch
import torch.distributed as dist
from scatter_work import in_order
from steps_taken import noted
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import agmm
from agmm.nn import ColumnParallelLinear, RowParallelLinear, SharedGatherParallel
from agmm.ops import pipeline, scatter_plan
from agmm.ops.plain_scatter import PlainScatter
from agmm.runtime.workspaces import cpu_workspace
from agmm.testing.reference import relative_error

matmul_reduce_scatter: Callable[..., torch.Tensor] = agmm.matmul_reduce_scatter


def _group(world_size: int) -> dist.ProcessGroup | None:
    torch.use_deterministic_algorithms(True)
    return rank_work.group_of(world_size)


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def products(
    world_size: int,
    shapes: list[tuple[int, int, int]],
    dtype: torch.dtype,
    *,
    leading: tuple[int, ...] = (),
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: bool = False,
    pairs: int | None = None,
) -> list[str] | None:
    """Faults found, in words. Shapes are (size of scatter_dim / world_size, N, K_local); each rank
    has its own K_local."""
    group = _group(world_size)
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    divisor = world_size if reduce_op == "avg" else 1
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    for seed, (size, n, k) in enumerate(shapes):
        rows = list(leading)
        rows.insert(scatter_dim, world_size * size)
        every = [
            [
                (
                    _random((*rows, k + r + i), dtype, 1000 * seed + 10 * r + i),
                    _random((k + r + i, n), dtype, 1000 * seed + 10 * r + i + 500),
                )
                for i in range(pairs or 1)
            ]
            for r in range(world_size)
        ]
        b = _random((n,), dtype, seed + 5) if bias else None
        As = [
            torch.stack([A, A], -1)[..., 0] if i % 2 else A
            for i, (A, _) in enumerate(every[rank], seed)
        ]
        Bs = [B if i % 2 else B.t().contiguous().t() for i, (_, B) in enumerate(every[rank], seed)]
        out = matmul_reduce_scatter(
            As if pairs else As[0],
            tuple(Bs) if pairs else Bs[0],
            group,
            scatter_dim=scatter_dim,
            reduce_op=reduce_op,
            bias=b,
            strict=True,
        )

        def part(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
            return (A @ B).chunk(world_size, scatter_dim)[rank]

        exact = torch.stack(
            [part(A.double(), B.double()) for of_rank in every for A, B in of_rank]
        ).sum(0)
        exact = exact / divisor + (0 if b is None else b.double())
        parts = [
            torch.stack([part(A.to(wide), B.to(wide)) for A, B in of_rank]).sum(0)
            for of_rank in every
        ]
        plain = in_order(parts, -1, dtype, divisor, b)
        error = relative_error(out, exact)
        # Parts that cancel leave few numbers little of their sum.
        cancelled = torch.stack(parts).double().abs().sum(0).norm() / exact.norm()
        allowed = relative_error(plain, exact)
        if exact.norm() > 0:
            allowed += 8 * torch.finfo(dtype).eps * max(1.0, float(cancelled))
        label = f"{(*rows, n, k)} {dtype} on rank {rank} of {world_size}"
        if not error <= allowed or out.dtype != dtype:
            faults.append(f"{label}: error {error}, allowed {allowed}, {out.dtype}")
        if not out.is_contiguous() or out._is_view():
            faults.append(f"{label}: strides {out.stride()}")
    return faults


def as_native(world_size: int, dtype: torch.dtype, reduce_op: str) -> list[str] | None:
    """The native op and a compiled call against the public function: the same bits."""
    group = _group(world_size)
    if group is None:
        return None
    rank, name = dist.get_rank(group), group.group_name
    A, B = _random((6 * world_size, 40), dtype, rank), _random((40, 17), dtype, 10 + rank)
    wanted = matmul_reduce_scatter(A, B, group, reduce_op=reduce_op, strict=True)
    torch.compiler.reset()
    op: Any = torch.ops.agmm._fused_matmul_reduce_scatter_native

    def listed(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        halves = [A[:, :20], A[:, 20:]], [B[:20], B[20:]]
        return matmul_reduce_scatter(*halves, group, reduce_op=reduce_op, strict=True)

    def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    found = {
        "native": op(A, B, reduce_op, name),
        "compiled": compiled(
            lambda A, B: matmul_reduce_scatter(A, B, group, reduce_op=reduce_op, strict=True)
        )(A, B),
        "compiled native": compiled(lambda A, B: op(A, B, reduce_op, name))(A, B),
    }
    faults = [f"{kind} differs" for kind, out in found.items() if not torch.equal(out, wanted)]
    if not torch.equal(compiled(listed)(A, B), listed(A, B)):
        faults.append("compiled list differs")
    torch.compiler.reset()
    return faults


class _Gathers(TorchDispatchMode):
    """The collective matmuls of a block: of each how many weights it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.agmm._all_gather_matmul.default:
            self.weights.append(len(args[1]))
        return func(*args, **(kwargs or {}))


def gathered_once(world_size: int) -> tuple[int, int, float] | None:
    """How many collective matmuls the backward of three products makes, with how many weights
    together, and the largest error of the gradients."""
    group = _group(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    As = [_random((3 * world_size, k), torch.float64, rank + k).requires_grad_() for k in (2, 3, 4)]
    Bs = [_random((k, 5), torch.float64, 9 + rank + k).requires_grad_() for k in (2, 3, 4)]
    out = matmul_reduce_scatter(As, Bs, group, reduce_op="avg")
    dout = _random(tuple(out.shape), torch.float64, 50 + rank)
    with _Gathers() as gathers:
        grads = torch.autograd.grad(out, [*As, *Bs], dout)
    douts = [torch.empty_like(dout) for _ in range(world_size)]
    dist.all_gather(douts, dout, group=group)
    whole = torch.cat(douts) / world_size
    wanted = [whole @ B.detach().t() for B in Bs] + [A.detach().t() @ whole for A in As]
    errors = [relative_error(one, other) for one, other in zip(grads, wanted, strict=True)]
    return len(gathers.weights), sum(gathers.weights), max(errors)


def of_a_layer(world_size: int) -> list[str] | None:
    """The layers' scatters, forward and backward, are agmm's own: none goes to the backend."""
    group = _group(world_size)
    if group is None:
        return None
    column = ColumnParallelLinear(8, [4 * world_size, 2 * world_size], group=group)
    row = RowParallelLinear(4 * world_size, 8, group=group)
    x = torch.randn(3, 8, requires_grad=True)
    refuse = mock.patch.object(PlainScatter, "by_library", side_effect=AssertionError)
    native = noted(PlainScatter, "by_cpu")
    with refuse, native as served:
        first, second = column(x)
        (row(first).sum() + second.sum()).backward()
        shared = torch.nn.ModuleDict({name: torch.nn.Linear(8, 2 * world_size) for name in "ab"})
        shared.forward = lambda x: [linear(x) for linear in shared.values()]
        mesh = DeviceMesh.from_group(group, "cpu")
        parallelize_module(shared, mesh, {"": SharedGatherParallel("a", "b", sequence_dim=0)})
        sum(out.sum() for out in shared(x)).backward()
    products = [len(call.args[0].As) for call in served.call_args_list]
    return [] if products == [1, 1, 2] else [f"scatters by agmm of {products} products"]


def _products_of_shape(shape: tuple[int, ...], then: Callable[[], None]) -> Any:
    """Within it ``then`` is called after each product of that shape, or of its transpose."""
    product: Any = torch.Tensor.__matmul__

    def noted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = product(left, right)
        if found.shape in (shape, shape[::-1]):
            then()
        return found

    return mock.patch.object(torch.Tensor, "__matmul__", noted)


@contextlib.contextmanager
def _as_on_a_gpu(native: bool) -> Iterator[None]:
    """Where `native` is False: agmm's own scatter is refused, as it is where it has no kernel."""
    reason = None if native else "for the test"
    with (
        mock.patch.object(scatter_plan, "why_not_native", return_value=reason),
        mock.patch.object(pipeline, "fall_back"),
    ):
        yield


def beside_the_scatter(world_size: int, native: bool) -> tuple[str, float] | None:
    """What the backward of a gather does, in order, a letter each: sends a part, multiplies for the
    weight's gradient, awaits; and the largest error of the gradients."""
    group = _group(world_size)
    if group is None:
        return None
    rank, done = dist.get_rank(group), ""
    x = _random((3, 8), torch.float64, rank).requires_grad_()
    B = _random((8, 5), torch.float64, 9 + rank).requires_grad_()
    out = agmm.all_gather_matmul(x, B, group, save_gathered=True)
    workspace = cpu_workspace(group)
    core = workspace.core

    def noted(letter: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += letter
            return function(*args, **kwargs)

        return call

    functional: Any = torch.ops._c10d_functional
    noted_core = mock.Mock(wraps=core)
    noted_core.send, noted_core.wait_chunk = noted("s", core.send), noted("w", core.wait_chunk)
    begin = noted("s", functional.reduce_scatter_tensor)
    wait = noted("w", functional.wait_tensor)
    with (
        _as_on_a_gpu(native),
        _products_of_shape((8, 5), noted("m", lambda: None)),
        mock.patch.object(workspace, "core", noted_core if native else core),
        mock.patch.multiple(functional, reduce_scatter_tensor=begin, wait_tensor=wait),
    ):
        out.sum().backward()
    whole = torch.cat([_random((3, 8), torch.float64, r) for r in range(world_size)])
    B_sum = torch.stack([_random((8, 5), torch.float64, 9 + r) for r in range(world_size)])
    assert x.grad is not None and B.grad is not None
    error = max(
        relative_error(x.grad, B_sum.sum((0, 2)).expand(3, 8).clone()),
        relative_error(B.grad, whole.sum(0)[:, None].expand(8, 5).clone()),
    )
    return done, error


def failing_beside_the_scatter(native: bool) -> list[str]:
    """What a failed product for the weight's gradient leaves: its error, and ranks in step."""
    group = _group(rank_work.POOL_SIZE)
    assert group is not None
    x = torch.ones(2, 4, requires_grad=True)
    B = torch.ones(4, 3, requires_grad=True)
    said = []
    for effect in (MemoryError("no room for dB"), None):
        x.grad = None
        out = agmm.all_gather_matmul(x, B, group)
        with (
            _as_on_a_gpu(native),
            _products_of_shape((4, 3), mock.Mock(side_effect=effect)),
        ):
            try:
                out.sum().backward()
                said.append(str(x.grad.unique().tolist()) if x.grad is not None else "none")
            except MemoryError as error:
                said.append(str(error))
    return said
