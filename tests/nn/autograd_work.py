"""What the tests of the backward run inside the ranks of a pool of five."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_work import group_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import agmm
from agmm.ops import autograd, pipeline, scatter_plan
from agmm.ops.plain_scatter import PlainScatter, scatter
from agmm.testing.reference import relative_error

_ROWS, _K, _N = 2, 3, 2


class _OwnPart(torch.autograd.Function):
    """This rank's entry of a tensor that all ranks hold whole; the gradient is whole again."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _stacked(grad, ctx.group), None


class _AllParts(torch.autograd.Function):
    """The tensors of all ranks, the same on all of them; each keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _stacked(part, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[dist.get_rank(ctx.group)], None


def _stacked(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty(part.shape, dtype=part.dtype) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.stack(parts)


def _leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def _in_step(fn: Callable[..., Any], inputs: list[torch.Tensor], *, is_linear: bool = True) -> bool:
    """`torch.autograd.gradcheck` along one random direction, the same on all ranks: a wrong entry
    shows in it as in a check entry by entry, of which each takes several calls. Every rank holds
    all inputs and all outputs, so that every rank perturbs the same numbers at the same time and
    sees what it does on all ranks. Differences of functions that are linear in each input are
    exact but for rounding."""
    eps, limit = (1e-3, 1e-9) if is_linear else (1e-6, 1e-6)
    check = torch.autograd.gradcheck
    return bool(check(fn, inputs, eps=eps, atol=limit, rtol=limit, fast_mode=True))


def gradcheck_all_gather_matmul(
    world_size: int,
    *,
    weights: int = 1,
    biases: tuple[bool, ...] = (),
    leading: tuple[int, ...] = (),
    gather_dim: int = 0,
    frozen: tuple[str, ...] = (),
    column_major: bool = False,
    **options: Any,
) -> bool | None:
    """Whether the gradients of the inputs that are not `frozen` are right."""
    group = group_of(world_size)
    if group is None:
        return None
    is_gated = str(options.get("activation")).endswith("_mul")
    names = ["A_shard"] + [f"B{i}" for i in range(weights)]
    names += [f"bias{i}" for i, has_bias in enumerate(biases) if has_bias]
    last = gather_dim % (2 + len(leading)) == 1 + len(leading)
    k = world_size * _K if last else _K  # of the gathered A
    shapes: dict[str, tuple[int, ...]] = {"A_shard": (_ROWS, *leading, _K)}
    for i in range(weights):
        n = _N if is_gated else _N + i
        shapes[f"B{i}"] = (n, k) if column_major else (k, n)
        shapes[f"bias{i}"] = (n,)
    inputs = [_leaf(world_size, *shapes[name], seed=i) for i, name in enumerate(names)]
    for name, whole in zip(names, inputs, strict=True):
        whole.requires_grad_(name not in frozen)

    def fn(*wholes: torch.Tensor) -> list[torch.Tensor]:
        own = {n: _OwnPart.apply(w, group) for n, w in zip(names, wholes, strict=True)}
        Bs = [own[f"B{i}"] for i in range(weights)]
        Bs = [B.t() if column_major else B for B in Bs]
        bias = [own.get(f"bias{i}") for i in range(weights)] if biases else None
        op: Callable[..., Any] = agmm.all_gather_matmul
        out = op(own["A_shard"], Bs, group, bias=bias, gather_dim=gather_dim, **options)
        A, outs = out if options.get("return_A") else (None, out)
        outs = [*([] if A is None else [A]), *([outs] if is_gated else outs)]
        return [_AllParts.apply(one, group) for one in outs]

    return _in_step(fn, inputs, is_linear="activation" not in options)


def gradcheck_matmul_reduce_scatter(
    world_size: int,
    *,
    scatter_dim: int = 0,
    bias: bool = False,
    leading: tuple[int, ...] = (),
    frozen: tuple[str, ...] = (),
    column_major: bool = False,
    reduce_op: str = "sum",
    pairs: int | None = None,
    residual: bool = False,
) -> bool | None:
    """Whether the gradients of one product, or of a list of pairs, are right."""
    group = group_of(world_size)
    if group is None:
        return None
    inputs = {}
    for i in range(pairs or 1):
        shape, k = [_ROWS, *leading, _K + i], _K + i
        last = scatter_dim % len(shape) == len(shape) - 1
        n = world_size * _N if last else _N
        if not last:
            shape[scatter_dim] *= world_size
        inputs[f"A{i}"] = _leaf(world_size, *shape, seed=1 + 10 * i)
        B_shape = (n, k) if column_major else (k, n)
        inputs[f"B{i}"] = _leaf(world_size, *B_shape, seed=2 + 10 * i)
    if bias:
        inputs["bias"] = _leaf(n, seed=3)
    if residual:
        part = [*shape[:-1], _N]
        part[scatter_dim] //= 1 if last else world_size
        inputs["residual"] = _leaf(world_size, *part, seed=4)
    for name, whole in inputs.items():
        whole.requires_grad_(name not in frozen)

    def fn(*wholes: torch.Tensor) -> torch.Tensor:
        given = dict(zip(inputs, wholes, strict=True))
        bias, added = given.pop("bias", None), given.pop("residual", None)
        own = [_OwnPart.apply(whole, group) for whole in given.values()]
        As, Bs = own[::2], [B.t() if column_major else B for B in own[1::2]]
        op: Callable[..., torch.Tensor] = agmm.matmul_reduce_scatter
        out = op(
            *((As, Bs) if pairs else (As[0], Bs[0])),
            group,
            scatter_dim=scatter_dim,
            bias=bias,
            residual=None if added is None else _OwnPart.apply(added, group),
            reduce_op=reduce_op,
        )
        whole: torch.Tensor = _AllParts.apply(out, group)
        return whole

    return _in_step(fn, list(inputs.values()))


def gradcheck_matmul_all_reduce(
    world_size: int,
    *,
    bias: bool = False,
    leading: tuple[int, ...] = (),
    frozen: tuple[str, ...] = (),
    column_major: bool = False,
    residual: bool = False,
) -> bool | None:
    """Whether the gradients are right where every rank has the whole output and one gradient of
    it."""
    group = group_of(world_size)
    if group is None:
        return None
    inputs = {
        "A": _leaf(world_size, _ROWS, *leading, _K, seed=1),
        "B": _leaf(world_size, *((_N, _K) if column_major else (_K, _N)), seed=2),
    }
    if bias:
        inputs["bias"] = _leaf(_N, seed=3)
    if residual:
        inputs["residual"] = _leaf(_ROWS, *leading, _N, seed=4)
    for name, whole in inputs.items():
        whole.requires_grad_(name not in frozen)

    def fn(A: torch.Tensor, B: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        A, B = _OwnPart.apply(A, group), _OwnPart.apply(B, group)
        B = B.t() if column_major else B
        added: dict[str, Any] = dict(zip(list(inputs)[2:], others, strict=True))
        return agmm.matmul_all_reduce(A, B, group, **added, strict=True)

    return _in_step(fn, list(inputs.values()))


def _block(group: dist.ProcessGroup, **options: Any) -> Callable[..., torch.Tensor]:
    """Two layers as a model has them: gather and multiply, multiply and scatter."""

    def block(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        h: Any = agmm.all_gather_matmul(x, w1.t(), group, **options)
        return agmm.matmul_reduce_scatter(h.relu(), w2.t(), group)

    return block


def _block_inputs(group: dist.ProcessGroup, dtype: torch.dtype) -> list[torch.Tensor]:
    rank = dist.get_rank(group)
    return [
        _leaf(3, 4, seed=rank, dtype=dtype),
        _leaf(5, 4, seed=10 + rank, dtype=dtype),
        _leaf(4, 5, seed=20 + rank, dtype=dtype),
    ]


def _gradients(
    fn: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    out = fn(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))


def block_variants(world_size: int) -> list[str] | None:
    """Faults of checkpointed, compiled and A-keeping runs of a block, against the plain one."""
    group = group_of(world_size)
    if group is None:
        return None
    block = _block(group)
    inputs = _block_inputs(group, torch.float64)
    wanted = _gradients(block, inputs)

    def checkpointed(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(block, *tensors, use_reentrant=False)
        return out

    torch.compiler.reset()
    variants = {
        "kept": _block(group, save_gathered=True),
        "checkpoint": checkpointed,
        "compiled": torch.compile(block, fullgraph=True, backend="aot_eager"),
        "compiled, kept": torch.compile(
            _block(group, save_gathered=True), fullgraph=True, backend="aot_eager"
        ),
        "compiled checkpoint": torch.compile(checkpointed, fullgraph=True, backend="aot_eager"),
    }
    faults = []
    for name, variant in variants.items():
        found = _gradients(variant, inputs)
        if not all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, wanted, strict=True)):
            faults.append(f"{name} on rank {dist.get_rank(group)} of {world_size}")
    torch.compiler.reset()
    return faults


def autocast_block(world_size: int) -> tuple[list[torch.dtype], float] | None:
    """The dtypes of out and the gradients under autocast, and the largest error."""
    group = group_of(world_size)
    if group is None:
        return None
    block = _block(group)
    inputs = _block_inputs(group, torch.float32)
    wanted = _gradients(block, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(*inputs)
    found = out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))
    errors = [relative_error(one, other.double()) for one, other in zip(found, wanted, strict=True)]
    return [one.dtype for one in found], max(errors)


def saved_bytes(world_size: int, save_gathered: bool) -> int | None:
    """Bytes that the forward keeps for the backward of the weight."""
    group = group_of(world_size)
    if group is None:
        return None
    x, w1, _ = _block_inputs(group, torch.float64)
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        agmm.all_gather_matmul(x.detach(), w1.t(), group, save_gathered=save_gathered)
    return kept


def bad_reduce_scatter(kind: str) -> str:
    group = group_of(3)
    if group is None:
        return ""
    A, B = torch.ones(6, 4), torch.ones(4, 3)
    calls: dict[str, dict[str, Any]] = {
        "rows": {"A": torch.ones(5, 4)},
        "columns": {"B": torch.ones(4, 2), "scatter_dim": -1},
        "K": {"B": torch.ones(5, 3)},
        "dtype": {"B": B.double()},
        "A dimensions": {"A": torch.ones(4)},
        "B dimensions": {"B": torch.ones(4)},
        "scatter_dim": {"scatter_dim": 2},
        "reduce_op": {"reduce_op": "max"},
        "bias": {"bias": torch.ones(4)},
        "bias columns": {"bias": torch.ones(3), "scatter_dim": 1},
        "type": {"A": [1.0], "B": [1.0]},
        "group": {"group": "no such group"},
    }
    try:
        agmm.matmul_reduce_scatter(**{"A": A, "B": B, "group": group, **calls[kind]})
    except agmm.InvalidArgument as e:
        return str(e)
    return "no error"


class _FullSize(TorchDispatchMode):
    """Counts the tensors of so many numbers that come to be, by their memory."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.seen: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() == (
                self.numel * tensor.element_size()
            ):
                self.seen[tensor.untyped_storage().data_ptr()] = tensor  # kept, so not used again
        return found


def full_size_tensors(world_size: int, *, return_A: bool, native: bool) -> tuple[int, float] | None:
    """How many tensors of the size of the gathered A the backward of three weights makes, and the
    error of the gradient of A_shard."""
    group = group_of(world_size)
    if group is None:
        return None
    rows, k = 4, 5
    agmm.reserve(group, 4096)  # so that the slots have another size
    A_shard = _leaf(rows, k, seed=dist.get_rank())
    Bs = [_leaf(k, n, seed=n).detach() for n in (2, 3, 6)]
    found = agmm.all_gather_matmul(A_shard, Bs, group, return_A=True)
    A, outs = found
    douts = [torch.full_like(out, i + 1.0) for i, out in enumerate(outs)]
    given = [*outs, A] if return_A else outs
    if return_A:
        douts.append(torch.full_like(A, 7.0))
    counter = _FullSize(world_size * rows * k)

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        with counter:
            return scatter(*arguments, **options)

    reason = None if native else "for the test"
    with (
        mock.patch.object(autograd, "scatter", counted),
        mock.patch.object(scatter_plan, "why_not_native", return_value=reason),
        mock.patch.object(pipeline, "fall_back"),
        counter if return_A else contextlib.nullcontext(),
    ):
        torch.autograd.backward(given, douts, inputs=[A_shard])
    wanted = torch.full((k,), 7.0 * world_size if return_A else 0.0, dtype=torch.float64)
    for i, B in enumerate(Bs):
        wanted += world_size * (i + 1.0) * B.sum(1)
    assert A_shard.grad is not None
    error = relative_error(A_shard.grad, wanted.expand(rows, k).clone())
    return len(counter.seen), error


def joined_products(world_size: int, widths: list[int]) -> tuple[list[Any], int, float] | None:
    """Where torch's fused op is said to serve: for which shapes it is asked, how many products it
    computes in the end (0: not served), and the error of the gradient of A_shard."""
    group = group_of(world_size)
    if group is None:
        return None
    rows, k = 4, 8
    A_shard = _leaf(rows, k, seed=dist.get_rank())
    Bs = [_leaf(k, n, seed=n).detach() for n in widths]
    outs = agmm.all_gather_matmul(A_shard, Bs, group)
    asked: list[Any] = []

    def is_fused(A: torch.Tensor, B: torch.Tensor, dim: int, _: dist.ProcessGroup) -> bool:
        asked.append((tuple(A.shape), tuple(B.shape), dim))
        return True

    served = 0

    def by_torch(call: PlainScatter, *_: Any) -> torch.Tensor:
        nonlocal served
        served += 1
        assert len(call.As) == 1
        return call.by_library(call.words())

    with (
        mock.patch.object(scatter_plan, "is_fused", is_fused),
        mock.patch.object(scatter_plan, "why_not_native", return_value="as on a GPU"),
        mock.patch.object(PlainScatter, "by_torch", by_torch),
        mock.patch.object(pipeline, "fall_back"),
    ):
        torch.autograd.backward(outs, [out.detach() for out in outs])
    wanted = sum((out.detach() @ B.t() for out, B in zip(outs, Bs, strict=True)))
    assert isinstance(wanted, torch.Tensor) and A_shard.grad is not None
    dist.all_reduce(wanted, group=group)
    own = wanted.chunk(world_size)[dist.get_rank(group)]
    return asked, served, relative_error(A_shard.grad, own)
