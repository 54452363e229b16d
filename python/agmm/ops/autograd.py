"""The backward of the two collective matmuls: each one's is made of the other.

With ``out = all_gather(A_shard) @ B``, summed over several weights:
``dA_shard = reduce_scatter(dout @ Bᵀ)`` and ``dB = Aᵀ @ dout``.
With ``out = reduce_scatter(A @ B)``: ``dA = all_gather(dout) @ Bᵀ`` and
``dB = Aᵀ @ all_gather(dout)``.
(Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from agmm.errors import InvalidArgument
from agmm.ops import scatter_plan
from agmm.runtime import collectives

_MaybeTensor = torch.Tensor | None


def _check_real(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise InvalidArgument(
            f"{name}: found dtype {tensor.dtype} where a gradient is wanted, wanted a real "
            "floating-point type"
        )


def _grad_of_weight(A: torch.Tensor, dout: torch.Tensor, column_major: bool) -> torch.Tensor:
    """``Aᵀ @ dout`` over all rows, in the layout of the weight, so that no copy is made later."""
    A2, dout2 = A.reshape(-1, A.shape[-1]), dout.reshape(-1, dout.shape[-1])
    return (dout2.t() @ A2).t() if column_major else A2.t() @ dout2


def _grad_of_bias(dout: torch.Tensor) -> torch.Tensor:
    return dout.reshape(-1, dout.shape[-1]).sum(0)


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
        group_name, _, gather_dim, return_A, _, _, *rest = settings
        save_gathered = bool(rest and rest[0])
        Bs, biases = Bs_and_biases[:weights], Bs_and_biases[weights:]
        op = torch.ops.agmm._all_gather_matmul.default
        with torch._C._AutoDispatchBelowAutograd():
            A, outs = op(A_shard, list(Bs), list(biases), *settings)
        needs = ctx.needs_input_grad
        ctx.needs_A, ctx.needs_B = needs[2], needs[3 : 3 + weights]
        ctx.needs_bias = needs[3 + weights :]
        ctx.group_name, ctx.gather_dim = group_name, gather_dim
        ctx.is_gathered = save_gathered and return_A
        ctx.column_major = [B is not None and _is_column_major(B) for B in Bs]
        kept = A if ctx.is_gathered else A_shard
        ctx.save_for_backward(
            kept if any(ctx.needs_B) else None, *(Bs if ctx.needs_A else (None,) * weights)
        )
        ctx.set_materialize_grads(False)
        if not return_A:
            ctx.mark_non_differentiable(A)
        return (A, *outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dA: _MaybeTensor, *douts: _MaybeTensor) -> tuple[Any, ...]:
        kept, *Bs = ctx.saved_tensors
        wanted_dBs = [
            need and dout is not None for need, dout in zip(ctx.needs_B, douts, strict=True)
        ]
        finish_gather = None
        if any(wanted_dBs) and not ctx.is_gathered:
            # Begun here, so that it runs beside the product of dA_shard.
            by_copies = ctx.needs_A and _is_gather_by_copies(
                kept, dA, douts, Bs, ctx.group_name, ctx.gather_dim
            )
            finish_gather = collectives.start_all_gather(
                kept, ctx.group_name, ctx.gather_dim, by_copies=by_copies
            )
        dA_shard = None
        if ctx.needs_A:
            dA_shard = _grad_of_shard(dA, douts, Bs, ctx.group_name, ctx.gather_dim)
        A = kept
        if finish_gather is not None:
            A, finish_gather = finish_gather(), None  # which may hold another copy
        dBs = [
            _grad_of_weight(A, dout, column_major) if wanted and dout is not None else None
            for wanted, dout, column_major in zip(wanted_dBs, douts, ctx.column_major, strict=True)
        ]
        dbiases = [
            _grad_of_bias(dout) if need and dout is not None else None
            for need, dout in zip(ctx.needs_bias, douts, strict=True)
        ]
        return None, None, dA_shard, *dBs, *dbiases


_Products = list[tuple[torch.Tensor, torch.Tensor]]


def _products_of_shard(douts: tuple[_MaybeTensor, ...], Bs: list[torch.Tensor]) -> _Products:
    return [(dout, B.t()) for dout, B in zip(douts, Bs, strict=True) if dout is not None]


def _is_worth_joining(
    dA: _MaybeTensor, products: _Products, group_name: str, gather_dim: int
) -> bool:
    """Whether the sum of several products is to be made one, ``[dout1|dout2] @ [B1; B2]``, so that
    the fused op scatters it.

    That copies the operands. By the cost model, on H200 with the shapes of Llama's layers, it costs
    less than the fused op saves while they have no more columns together than the result has, and
    more than that where they have twice as many.
    """
    if dA is not None or len(products) < 2 or collectives.is_traced(products[0][0]):
        return False
    dout, B = products[0]
    columns = sum(other.shape[-1] for other, _ in products)
    if columns > B.shape[1]:
        return False
    # Of the shapes of the operands, without their memory.
    joined = dout.new_empty(1).expand(*dout.shape[:-1], columns)
    weight = B.new_empty(1).expand(columns, B.shape[1])
    group = collectives.group_of(group_name)
    return scatter_plan.is_fused(joined, weight, gather_dim, group)


def _joined(products: _Products) -> _Products:
    douts, Bs = zip(*products, strict=True)
    return [(torch.cat(douts, dim=-1), torch.cat(Bs))]


def _is_scattered_by_op(dA: _MaybeTensor, products: _Products) -> bool:
    """Whether dA_shard is one product, which `matmul_reduce_scatter` computes."""
    return dA is None and len(products) == 1


def _is_gather_by_copies(
    shard: torch.Tensor,
    dA: _MaybeTensor,
    douts: tuple[_MaybeTensor, ...],
    Bs: list[torch.Tensor],
    group_name: str,
    gather_dim: int,
) -> bool:
    products = _products_of_shard(douts, Bs)
    if not products or collectives.is_traced(shard):
        return False
    group = collectives.group_of(group_name)
    fused = _is_worth_joining(dA, products, group_name, gather_dim) or (
        _is_scattered_by_op(dA, products) and scatter_plan.is_fused(*products[0], gather_dim, group)
    )
    # Judged by the largest of several products.
    largest = max(products, key=lambda product: product[0].numel())
    return scatter_plan.is_gather_by_copies(shard, *largest, group, is_scatter_fused=fused)


def _grad_of_shard(
    dA: _MaybeTensor,
    douts: tuple[_MaybeTensor, ...],
    Bs: list[torch.Tensor],
    group_name: str,
    gather_dim: int,
) -> _MaybeTensor:
    products = _products_of_shard(douts, Bs)
    if _is_worth_joining(dA, products, group_name, gather_dim):
        products = _joined(products)
    if _is_scattered_by_op(dA, products):
        op = torch.ops.agmm._matmul_reduce_scatter.default
        world_size = collectives.world_size_of(group_name)
        dA_shard: torch.Tensor = op(*products[0], None, group_name, world_size, gather_dim, "sum")
        return dA_shard
    partial = _sum_of_products(dA, products)
    if partial is None:
        return None
    return collectives.reduce_scatter(partial, group_name, gather_dim)


def _sum_of_products(dA: _MaybeTensor, products: _Products) -> _MaybeTensor:
    """``dA + dout @ B + ...`` in one tensor of that size, to which each matmul adds its own: in
    the precision of its accumulators, and without a tensor for each product and each sum."""
    total = dA
    for dout, B in products:
        if total is None:
            total = torch.matmul(dout, B)
            continue
        rows, rest = total.reshape(-1, total.shape[-1]), dout.reshape(-1, dout.shape[-1])
        if total is dA:  # which belongs to autograd
            total = torch.addmm(rows, rest, B).view(total.shape)
        else:
            rows.addmm_(rest, B)  # contiguous, so that the rows are a view of it
    return total


class MatmulReduceScatter(torch.autograd.Function):
    """``torch.ops.agmm._matmul_reduce_scatter`` with its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: _MaybeTensor,
        group_name: str,
        world_size: int,
        scatter_dim: int,
        reduce_op: str,
    ) -> torch.Tensor:
        _check_real("A", A)
        op = torch.ops.agmm._matmul_reduce_scatter.default
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = op(A, B, bias, group_name, world_size, scatter_dim, reduce_op)
        needs_A, needs_B = ctx.needs_input_grad[:2]
        ctx.save_for_backward(A if needs_B else None, B if needs_A else None)
        ctx.column_major = _is_column_major(B)
        ctx.group_name, ctx.world_size = group_name, world_size
        ctx.scatter_dim, ctx.reduce_op = scatter_dim, reduce_op
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        A, B = ctx.saved_tensors
        needs_A, needs_B, needs_bias = ctx.needs_input_grad[:3]
        # The gathered dout [M, ..., N]: of out's own rows, of all ranks.
        gathered: _MaybeTensor = None
        dA = dB = dbias = None
        if needs_A:
            dA, gathered = _gather_and_multiply(
                dout, B.t(), ctx.group_name, ctx.scatter_dim, needs_B or needs_bias
            )
        elif needs_B or needs_bias:
            gathered = collectives.start_all_gather(dout, ctx.group_name, ctx.scatter_dim)()
        if needs_B and gathered is not None:
            dB = _grad_of_weight(A, gathered, ctx.column_major)
        if needs_bias and gathered is not None:
            dbias = _grad_of_bias(gathered)
        if ctx.reduce_op == "avg":
            dA = None if dA is None else dA / ctx.world_size
            dB = None if dB is None else dB / ctx.world_size
        return dA, dB, dbias, None, None, None, None


def _gather_and_multiply(
    dout: torch.Tensor, B: torch.Tensor, group_name: str, dim: int, return_gathered: bool
) -> tuple[torch.Tensor, _MaybeTensor]:
    """``all_gather(dout) @ B`` and the gathered dout where it is wanted."""
    op = torch.ops.agmm._all_gather_matmul.default
    group = group_name, collectives.world_size_of(group_name)
    if dim % dout.dim() == dout.dim() - 1:  # the product sums over the gathered dimension
        gathered, (out,) = op(
            dout.contiguous(), [B], [None], *group, dim, return_gathered, "unfused", False
        )
        return out, gathered if return_gathered else None
    shard = dout.movedim(dim, 0).contiguous()  # the fused path gathers along dimension 0
    gathered, (out,) = op(shard, [B], [None], *group, 0, return_gathered, "", False)
    return out.movedim(0, dim), gathered.movedim(0, dim) if return_gathered else None
