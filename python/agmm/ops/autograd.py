"""The backward of the collective matmuls. Those of the first two are made of each other.

With ``out = all_gather(A_shard) @ B``, summed over several weights:
``dA_shard = reduce_scatter(dout @ Bᵀ)`` and ``dB = Aᵀ @ dout``.
With ``out = reduce_scatter(A @ B)``, summed over several products:
``dA = all_gather(dout) @ Bᵀ`` and ``dB = Aᵀ @ all_gather(dout)``.
With ``out = all_reduce(A @ B)``, whose gradient is the same on all ranks:
``dA = dout @ Bᵀ`` and ``dB = Aᵀ @ dout``.
(Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from agmm.errors import InvalidArgument
from agmm.ops import scatter_plan
from agmm.ops.activation_gradients import gradients
from agmm.ops.operands import is_watched
from agmm.ops.plain_scatter import scatter
from agmm.ops.products import sum_of_products
from agmm.ops.scatter import Meanwhile, ScatterSettings
from agmm.runtime import collectives, groups
from agmm.runtime.epilogues import named

_MaybeTensor = torch.Tensor | None

GradOfWeight = Callable[[torch.Tensor, torch.Tensor, bool], _MaybeTensor]
"""What makes ``Aᵀ @ dout``, of a weight that is column-major or not; it may put it elsewhere."""


def _check_real(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise InvalidArgument(
            f"{name}: found dtype {tensor.dtype} where a gradient is wanted, wanted a real "
            "floating-point type"
        )


def _grad_of_weight(A: torch.Tensor, dout: torch.Tensor, column_major: bool) -> torch.Tensor:
    """``Aᵀ @ dout`` over all rows, in the layout of the weight, so that no copy is made later."""
    A2, dout2 = A.flatten(0, -2), dout.flatten(0, -2)
    return (dout2.t() @ A2).t() if column_major else A2.t() @ dout2


def _grad_of_bias(dout: torch.Tensor) -> torch.Tensor:
    return dout.flatten(0, -2).sum(0)


def _is_column_major(B: torch.Tensor) -> bool:
    return B.stride(0) == 1 and B.stride(1) != 1


class AllGatherMatmul(torch.autograd.Function):
    """``torch.ops.agmm._all_gather_matmul`` with its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: int,
        settings: tuple[Any, ...],
        A_shard: torch.Tensor,
        *Bs_and_biases: _MaybeTensor,
    ) -> tuple[torch.Tensor, ...]:
        _check_real("A_shard", A_shard)
        group_name, _, gather_dim, return_A, config, _, *rest = settings
        # Defaults of the op are not passed.
        last: list[Any] = [*rest, *_DEFAULTS[len(rest) :]]
        save_gathered, _, activation, saves_products = last
        Bs, biases = Bs_and_biases[:weights], Bs_and_biases[weights:]
        op = torch.ops.agmm._all_gather_matmul.default
        with torch._C._AutoDispatchBelowAutograd():
            A, outs = op(A_shard, list(Bs), list(biases), *settings)
        epilogue = ctx.epilogue = named(activation, saves_products=saves_products)
        products: list[torch.Tensor] = []
        if saves_products and epilogue is not None:
            products = outs[epilogue.results_of(weights) :]
        ctx.needs_A, *needs = ctx.needs_input_grad[-(1 + 2 * weights) :]
        ctx.needs_B, ctx.needs_bias = needs[:weights], needs[weights:]
        ctx.group_name, ctx.gather_dim = group_name, gather_dim
        ctx.is_gathered = save_gathered and return_A
        ctx.column_major = [B is not None and _is_column_major(B) for B in Bs]
        ctx.config = config
        saved = A if ctx.is_gathered else A_shard
        multiplies = epilogue is not None and not saves_products
        ctx.save_for_backward(
            saved if multiplies or any(ctx.needs_B) else None,
            *(Bs if multiplies or ctx.needs_A else (None,) * weights),
            *(biases if multiplies else products),
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*([] if return_A else [A]), *products)
        return (A, *outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dA: _MaybeTensor, *douts: _MaybeTensor) -> tuple[Any, ...]:
        return gather_gradients(ctx, dA, douts, _grad_of_weight)


def gather_gradients(
    ctx: Any, dA: _MaybeTensor, douts: tuple[_MaybeTensor, ...], grad_of_weight: GradOfWeight
) -> tuple[Any, ...]:
    """The backward of `AllGatherMatmul`."""
    saved, *rest = ctx.saved_tensors
    weights = len(ctx.needs_B)
    Bs, rest = rest[:weights], rest[weights:]
    is_gathered = ctx.is_gathered
    if ctx.epilogue is not None:
        saved, douts, is_gathered = _before_activation(ctx, douts, saved, Bs, rest)
    # The gradient of each weight's product, where that of the weight is wanted.
    of_weights = [dout if need else None for need, dout in zip(ctx.needs_B, douts, strict=True)]
    finish_gather = None
    if any(dout is not None for dout in of_weights) and not is_gathered:
        # The gather begins here, so that it runs beside the product of dA_shard.
        by_copies = ctx.needs_A and _is_gather_by_copies(
            saved, dA, douts, Bs, ctx.group_name, ctx.gather_dim
        )
        finish_gather = collectives.start_all_gather(
            saved, ctx.group_name, ctx.gather_dim, by_copies=by_copies
        )
    grads: list[_MaybeTensor] = []

    def other_gradients() -> None:
        nonlocal finish_gather
        A = saved
        if finish_gather is not None:
            A, finish_gather = finish_gather(), None  # which may hold another copy
        for dout, column_major in zip(of_weights, ctx.column_major, strict=True):
            grads.append(None if dout is None else grad_of_weight(A, dout, column_major))
        for need, dout in zip(ctx.needs_bias, douts, strict=True):
            grads.append(_grad_of_bias(dout) if need and dout is not None else None)

    dA_shard = None
    if ctx.needs_A:
        dA_shard = _grad_of_shard(dA, douts, Bs, ctx.group_name, ctx.gather_dim, other_gradients)
    else:
        other_gradients()
    return None, None, dA_shard, *grads


_DEFAULTS = (False, False, "", False)
"""The defaults of the last arguments of ``torch.ops.agmm._all_gather_matmul``."""


def _before_activation(
    ctx: Any,
    douts: tuple[_MaybeTensor, ...],
    saved: torch.Tensor,
    Bs: list[torch.Tensor],
    rest: list[Any],
) -> tuple[torch.Tensor, tuple[_MaybeTensor, ...], bool]:
    """What is saved of A, the gradients of the products with their biases for those of the results,
    and whether A is gathered. Where the products were not saved, they are computed again, which
    gathers A if that was not saved either.

    Args:
        rest: the products, or the biases.
    """
    products, is_gathered = rest, ctx.is_gathered
    douts = douts[: ctx.epilogue.results_of(len(Bs))]
    if all(dout is None for dout in douts):
        return saved, (None,) * len(Bs), is_gathered
    if not ctx.epilogue.saves_products:
        if is_gathered:
            products = [_product(saved, B, bias) for B, bias in zip(Bs, rest, strict=True)]
        else:
            group = ctx.group_name, groups.world_size_of(ctx.group_name)
            op = torch.ops.agmm._all_gather_matmul.default
            saved, products = op(saved, Bs, rest, *group, ctx.gather_dim, True, ctx.config, False)
            is_gathered = True
    return saved, tuple(gradients(ctx.epilogue, douts, products)), is_gathered


def _product(A: torch.Tensor, B: torch.Tensor, bias: _MaybeTensor) -> torch.Tensor:
    rows = A.flatten(0, -2)
    out = torch.mm(rows, B) if bias is None else torch.addmm(bias, rows, B)
    return out.view(*A.shape[:-1], B.shape[1])


def _operands_of_shard(
    douts: tuple[_MaybeTensor, ...], Bs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The operands of the products whose sum is dA_shard before it is scattered."""
    found = [(dout, B.t()) for dout, B in zip(douts, Bs, strict=True) if dout is not None]
    return [dout for dout, _ in found], [B for _, B in found]


def _is_gather_by_copies(
    shard: torch.Tensor,
    dA: _MaybeTensor,
    douts: tuple[_MaybeTensor, ...],
    Bs: list[torch.Tensor],
    group_name: str,
    gather_dim: int,
) -> bool:
    As, weights = _operands_of_shard(douts, Bs)
    if not As or collectives.is_traced(shard):
        return False
    group = groups.group_of(group_name)
    by_torch = dA is None and (
        scatter_plan.is_worth_joining(As, weights, gather_dim, group)
        or (len(As) == 1 and scatter_plan.is_fused(As[0], weights[0], gather_dim, group))
    )
    # The largest of several products decides.
    largest = max(zip(As, weights, strict=True), key=lambda product: product[0].numel())
    return scatter_plan.is_gather_by_copies(shard, *largest, group, is_scatter_by_torch=by_torch)


def _grad_of_shard(
    dA: _MaybeTensor,
    douts: tuple[_MaybeTensor, ...],
    Bs: list[torch.Tensor],
    group_name: str,
    gather_dim: int,
    meanwhile: Meanwhile,
) -> _MaybeTensor:
    """The scatter of dA_shard, and beside it ``meanwhile``, which is called once."""
    As, weights = _operands_of_shard(douts, Bs)
    # No fused path scatters the last dimension, as none gathered it: nobody is to be warned again.
    if dA is None and As and gather_dim % As[0].dim() != As[0].dim() - 1:
        world_size = groups.world_size_of(group_name)
        call = As, weights, None, group_name, world_size, gather_dim, "sum"
        dA_shard: torch.Tensor
        if not (is_watched() or collectives.is_traced(As[0])):
            group = groups.group_of_size(group_name, world_size)
            settings = ScatterSettings(gather_dim)
            return scatter(As, weights, None, group, settings, meanwhile)
        dA_shard = torch.ops.agmm._matmul_reduce_scatter.default(*call)
        meanwhile()
        return dA_shard
    partial = sum_of_products(dA, As, weights)
    if partial is None:
        meanwhile()
        return None
    return collectives.reduce_scatter(partial, group_name, gather_dim, meanwhile=meanwhile)


class MatmulReduceScatter(torch.autograd.Function):
    """``torch.ops.agmm._matmul_reduce_scatter`` with its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        pairs: int,
        settings: tuple[Any, ...],
        bias: _MaybeTensor,
        residual: _MaybeTensor,
        *As_and_Bs: torch.Tensor,
    ) -> torch.Tensor:
        As, Bs = As_and_Bs[:pairs], As_and_Bs[pairs:]
        _check_real("A", As[0])
        op = torch.ops.agmm._matmul_reduce_scatter.default
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = op(list(As), list(Bs), bias, *settings[:5], residual, *settings[5:])
        needs = ctx.needs_input_grad[-(2 + 2 * pairs) :]
        ctx.needs_bias, ctx.needs_residual, *needs = needs
        ctx.needs_A, ctx.needs_B = needs[:pairs], needs[pairs:]
        ctx.save_for_backward(
            *(A if need else None for A, need in zip(As, ctx.needs_B, strict=True)),
            *(B if need else None for B, need in zip(Bs, ctx.needs_A, strict=True)),
        )
        ctx.column_major = [_is_column_major(B) for B in Bs]
        ctx.group_name, ctx.world_size, ctx.scatter_dim, ctx.reduce_op, *_ = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        return scatter_gradients(ctx, dout, _grad_of_weight)


def scatter_gradients(
    ctx: Any, dout: torch.Tensor, grad_of_weight: GradOfWeight
) -> tuple[Any, ...]:
    """The backward of `MatmulReduceScatter`."""
    pairs = len(ctx.column_major)
    saved = ctx.saved_tensors  # once: checkpoints give them out once
    As, Bs = saved[:pairs], saved[pairs:]
    # The gathered dout [M, ..., N]: of out's own rows, of all ranks.
    needs_gathered = any(ctx.needs_B) or ctx.needs_bias
    gathered: _MaybeTensor = None
    products: list[torch.Tensor] = []
    if any(ctx.needs_A):
        products, gathered = _gather_and_multiply(
            dout,
            [B.t() for B in Bs if B is not None],
            ctx.group_name,
            ctx.scatter_dim,
            needs_gathered,
        )
    elif needs_gathered:
        gathered = collectives.start_all_gather(dout, ctx.group_name, ctx.scatter_dim)()
    of_As = iter(products)
    grads = [next(of_As) if need else None for need in ctx.needs_A]
    grads += [
        grad_of_weight(A, gathered, column_major) if need and gathered is not None else None
        for A, need, column_major in zip(As, ctx.needs_B, ctx.column_major, strict=True)
    ]
    if ctx.reduce_op == "avg":
        grads = [None if grad is None else grad / ctx.world_size for grad in grads]
    dbias = _grad_of_bias(gathered) if ctx.needs_bias and gathered is not None else None
    return None, None, dbias, dout if ctx.needs_residual else None, *grads


def _gather_and_multiply(
    dout: torch.Tensor, Bs: list[torch.Tensor], group_name: str, dim: int, return_gathered: bool
) -> tuple[list[torch.Tensor], _MaybeTensor]:
    """``all_gather(dout) @ B`` for each weight and the gathered dout where it is wanted."""
    op = torch.ops.agmm._all_gather_matmul.default
    biases = [None] * len(Bs)
    group = group_name, groups.world_size_of(group_name)
    if dim % dout.dim() == dout.dim() - 1:  # the product sums over the gathered dimension
        gathered, outs = op(
            dout.contiguous(), Bs, biases, *group, dim, return_gathered, "unfused", False
        )
        return outs, gathered if return_gathered else None
    shard = dout.movedim(dim, 0).contiguous()  # the fused path gathers along dimension 0
    gathered, outs = op(shard, Bs, biases, *group, 0, return_gathered, "", False)
    outs = [out.movedim(0, dim) for out in outs]
    return outs, gathered.movedim(0, dim) if return_gathered else None


class MatmulAllReduce(torch.autograd.Function):
    """``torch.ops.agmm._matmul_all_reduce`` with its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: _MaybeTensor,
        residual: _MaybeTensor,
        *settings: Any,
    ) -> torch.Tensor:
        _check_real("A", A)
        op = torch.ops.agmm._matmul_all_reduce.default
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = op(A, B, bias, *settings[:3], residual, *settings[3:])
        needs_A, needs_B, *_ = ctx.needs_input_grad
        ctx.save_for_backward(A if needs_B else None, B if needs_A else None)
        ctx.column_major = _is_column_major(B)
        ctx.settings = len(settings)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        A, B = ctx.saved_tensors
        dA = None if B is None else dout @ B.t()
        dB = None if A is None else _grad_of_weight(A, dout, ctx.column_major)
        dbias = _grad_of_bias(dout) if ctx.needs_input_grad[2] else None
        dresidual = dout if ctx.needs_input_grad[3] else None
        return dA, dB, dbias, dresidual, *(None,) * ctx.settings
