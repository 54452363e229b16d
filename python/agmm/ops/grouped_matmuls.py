"""``agmm.all_gather_grouped_matmul`` and ``agmm.grouped_matmul_reduce_scatter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.ops import grouped_autograd  # noqa: F401  # defines the ops
from agmm.ops.checks import check_listed, check_operand
from agmm.ops.grouped_checks import check_flags, check_not_gathered, check_stack, listed_biases
from agmm.ops.grouped_scales import asked_scales
from agmm.ops.operands import autocast
from agmm.ops.routing import Routing, route
from agmm.runtime import groups
from agmm.runtime.epilogues import GatedActivation, named


@overload
def all_gather_grouped_matmul(  # type: ignore[overload-overlap]
    x: torch.Tensor,
    weights: list[torch.Tensor] | tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor | Routing,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    num_experts: int | None = ...,
    capacity: int | None = ...,
    tokens_per_rank: Sequence[int] | None = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    activation: GatedActivation,
    return_gathered: Literal[False] = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
    scale_a: torch.Tensor | None = ...,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = ...,
    out_dtype: torch.dtype | None = ...,
    use_fast_accum: bool = ...,
    quantize: Literal["rowwise", "block"] | None = ...,
) -> tuple[torch.Tensor, Routing]: ...
@overload
def all_gather_grouped_matmul(  # type: ignore[overload-overlap]
    x: torch.Tensor,
    weights: list[torch.Tensor] | tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor | Routing,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    num_experts: int | None = ...,
    capacity: int | None = ...,
    tokens_per_rank: Sequence[int] | None = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    activation: GatedActivation,
    return_gathered: Literal[True],
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
    scale_a: torch.Tensor | None = ...,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = ...,
    out_dtype: torch.dtype | None = ...,
    use_fast_accum: bool = ...,
    quantize: Literal["rowwise", "block"] | None = ...,
) -> tuple[torch.Tensor, Routing, torch.Tensor]: ...
@overload
def all_gather_grouped_matmul(
    x: torch.Tensor,
    weights: torch.Tensor,
    topk_ids: torch.Tensor | Routing,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    num_experts: int | None = ...,
    capacity: int | None = ...,
    tokens_per_rank: Sequence[int] | None = ...,
    bias: torch.Tensor | None = ...,
    activation: str | None = ...,
    return_gathered: Literal[False] = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
    scale_a: torch.Tensor | None = ...,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = ...,
    out_dtype: torch.dtype | None = ...,
    use_fast_accum: bool = ...,
    quantize: Literal["rowwise", "block"] | None = ...,
) -> tuple[torch.Tensor, Routing]: ...
@overload
def all_gather_grouped_matmul(
    x: torch.Tensor,
    weights: torch.Tensor,
    topk_ids: torch.Tensor | Routing,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    num_experts: int | None = ...,
    capacity: int | None = ...,
    tokens_per_rank: Sequence[int] | None = ...,
    bias: torch.Tensor | None = ...,
    activation: str | None = ...,
    return_gathered: Literal[True],
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
    scale_a: torch.Tensor | None = ...,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = ...,
    out_dtype: torch.dtype | None = ...,
    use_fast_accum: bool = ...,
    quantize: Literal["rowwise", "block"] | None = ...,
) -> tuple[torch.Tensor, Routing, torch.Tensor]: ...
@overload
def all_gather_grouped_matmul(
    x: torch.Tensor,
    weights: list[torch.Tensor] | tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor | Routing,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    num_experts: int | None = ...,
    capacity: int | None = ...,
    tokens_per_rank: Sequence[int] | None = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    activation: str | None = ...,
    return_gathered: Literal[False] = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
    scale_a: torch.Tensor | None = ...,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = ...,
    out_dtype: torch.dtype | None = ...,
    use_fast_accum: bool = ...,
    quantize: Literal["rowwise", "block"] | None = ...,
) -> tuple[list[torch.Tensor], Routing]: ...
@overload
def all_gather_grouped_matmul(
    x: torch.Tensor,
    weights: list[torch.Tensor] | tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor | Routing,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    num_experts: int | None = ...,
    capacity: int | None = ...,
    tokens_per_rank: Sequence[int] | None = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    activation: str | None = ...,
    return_gathered: Literal[True],
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
    scale_a: torch.Tensor | None = ...,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = ...,
    out_dtype: torch.dtype | None = ...,
    use_fast_accum: bool = ...,
    quantize: Literal["rowwise", "block"] | None = ...,
) -> tuple[list[torch.Tensor], Routing, torch.Tensor]: ...
def all_gather_grouped_matmul(
    x: torch.Tensor,
    weights: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor | Routing,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    num_experts: int | None = None,
    capacity: int | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    activation: str | None = None,
    return_gathered: bool = False,
    strict: bool = False,
    save_gathered: bool = False,
    save_preactivation: bool = True,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: Literal["rowwise", "block"] | None = None,
) -> (
    tuple[torch.Tensor | list[torch.Tensor], Routing]
    | tuple[torch.Tensor | list[torch.Tensor], Routing, torch.Tensor]
):
    """The first half of a mixture of experts: all ranks' tokens, each times the matrices of its
    experts that this rank has. Collective.

    The result has a row for each token and each of its choices whose expert is on this rank, sorted
    by expert and inside an expert by token (`agmm.moe.Routing`). Every rank of the group calls with
    the same shapes, dtypes and settings, in the same order, as with any collective; what the
    tokens' experts are is free. Differentiable once, with respect to x, weights and bias; the
    backward of x is `grouped_matmul_reduce_scatter`. Under autocast x, weights and bias are cast as
    ``torch.nn.functional.linear`` casts them. ``torch.compile`` traces it.

    On CUDA each rank brings itself the tokens that its experts want, and on Hopper the matmul takes
    them as they come. Where the GPUs do not reach each other the group's backend gathers all
    tokens, with one warning.

    In fp8, x and the weights are multiplied with scales, which are those of rows and columns, or of
    blocks of 128; products are summed in float32 and rounded once. There is no backward
    (`agmm.nn.MoE` has one).

    Args:
        x: [T_local, K], this rank's tokens: bfloat16, float16, float32 or float64; or float8_e4m3fn
            or float8_e5m2 with scales, K a multiple of 16.
        weights: [experts of this rank, K, N], each matrix row-major or column-major (a transposed
            [experts, N, K]); or a list of such that share the gather.
        topk_ids: int32 or int64 [T_local, k], the experts of each token; ids below 0 are dropped.
            Or the `agmm.moe.Routing` that `agmm.moe.route` has made of them; then without
            ``num_experts``, ``capacity`` and ``tokens_per_rank``.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        num_experts: how many experts there are on all ranks; those of the weights times the world
            size when None. As many as in the weights where each rank has a slice of all experts.
        capacity: the rows of the result, the same on all ranks; when None room for all choices of
            all tokens. More rows than that on any rank are an error on all.
        tokens_per_rank: how many tokens each rank holds, the same on all ranks; None where all hold
            as many as this one.
        bias: [experts of this rank, N], added before the rounding; for a list of weights one each
            (or None).
        activation: as in `all_gather_matmul`: of each product with its bias, or a gated one of two
            weights, gate and up.
        return_gathered: also return the tokens of all ranks, in a tensor of their own.
        strict: raise `Unsupported` instead of taking the unfused path.
        save_gathered: keep the gathered tokens for the backward of the weights, instead of x, which
            takes 1 / world_size of the memory and is gathered again.
        save_preactivation: with an activation, keep the products with their biases for the
            backward; else the backward gathers and multiplies again.
        scale_a: float32, of x in fp8: [T_local, 1], one for each row, or [T_local, ⌈K/128⌉].
        scale_b: float32, of weights in fp8: [experts, 1, N], one for each column, or [experts,
            ⌈K/128⌉, ⌈N/128⌉]; for a list of weights one each.
        out_dtype: of y, where x is in fp8: bfloat16 (when None), float16 or float32.
        use_fast_accum: as in `all_gather_scaled_matmul`; where x is in fp8.
        quantize: quantise x and the weights to float8_e4m3fn for the forward, with dynamic scales
            as in `all_gather_matmul`. Gradients are made of the operands as they are.

    Returns:
        ``(y, routing)`` with y [capacity, N], zeros behind the last row; with ``return_gathered``
        ``(y, routing, gathered)``. For a list of weights y is a list, but for a gated activation.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    epilogue = named(activation)
    given: list[Any] = list(weights) if isinstance(weights, (list, tuple)) else [weights]
    check_listed("weights", given, " weight")
    biases = listed_biases(bias, len(given))
    for name, tensors in (("x", [x]), ("bias", biases)):
        for tensor in tensors:
            if tensor is not None or name != "bias":
                check_operand(name, tensor)
    for weight in given:
        check_stack("weights", weight)
    check_flags(return_gathered=return_gathered, strict=strict, save_gathered=save_gathered)
    check_flags(save_preactivation=save_preactivation, use_fast_accum=use_fast_accum)
    of_fp8 = (scale_a, scale_b), out_dtype, use_fast_accum, quantize
    scales = asked_scales(("x", x), len(given), *of_fp8)
    if scales is not None or quantize:
        check_not_gathered(return_gathered=return_gathered, save_gathered=save_gathered)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    if isinstance(topk_ids, Routing):
        for name, value in (
            ("num_experts", num_experts),
            ("capacity", capacity),
            ("tokens_per_rank", tokens_per_rank),
        ):
            if value is not None:
                raise InvalidArgument(f"{name}: found {value!r} with a Routing, wanted None")
        routing = topk_ids
    else:
        local = given[0].shape[0]
        routing = route(
            topk_ids,
            group,
            num_experts=local * world_size if num_experts is None else num_experts,
            num_local_experts=local,
            capacity=capacity,
            tokens_per_rank=tokens_per_rank,
            strict=strict,
        )
    is_list = isinstance(weights, (list, tuple)) and not (epilogue and epilogue.is_gated)
    of_routing = routing.tokens, routing.offsets, routing.positions
    ranks = group_name, world_size
    counts = list(routing.tokens_per_rank or ())
    if scales is not None:
        outs = torch.ops.agmm._all_gather_scaled_grouped_matmul.default(
            *(x, scales.a, given, scales.b, biases, *of_routing, *ranks),
            *(scales.out_dtype, use_fast_accum, counts, strict, activation or ""),
        )
        return outs if is_list else outs[0], routing
    x, *rest = autocast((x, *given, *biases), x.device)
    needs_grad = torch.is_grad_enabled()
    saves = save_gathered and needs_grad and any(weight.requires_grad for weight in given)
    gathered, outs = torch.ops.agmm._all_gather_grouped_matmul.default(
        x,
        cast("list[torch.Tensor]", rest[: len(given)]),
        rest[len(given) :],
        *of_routing,
        *(*ranks, counts),
        return_gathered or saves,
        strict,
        saves,
        activation or "",
        bool(
            epilogue
            and save_preactivation
            and needs_grad
            and any(t is not None and t.requires_grad for t in (x, *rest))
        ),
        quantize or "",
    )
    if epilogue is not None:
        outs = outs[: epilogue.results_of(len(given))]
    y = outs if is_list else outs[0]
    return (y, routing, gathered) if return_gathered else (y, routing)


def grouped_matmul_reduce_scatter(
    y: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    topk_weights: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    bias: torch.Tensor | None = None,
    strict: bool = False,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: Literal["rowwise", "block"] | None = None,
) -> torch.Tensor:
    """The second half of a mixture of experts: each row times its expert's matrix, and for each
    token the sum over its choices, on all ranks, weighted by the router. Collective.

    A choice that was dropped adds nothing; a token without any other has zeros. Sums are made in
    float32 (float64 for float64), choice by choice on a rank and then in the order of the ranks,
    and rounded once: the same call has the same bits every time. Differentiable once, with respect
    to y, weights, bias and topk_weights; the backward of y is `all_gather_grouped_matmul`. Under
    autocast y, weights and bias are cast as ``torch.nn.functional.linear`` casts them.
    ``torch.compile`` traces it.

    On CUDA products are rounded before they are weighted, and the rank that holds a token reads
    them from where the others have left them. Where the GPUs do not reach each other, and for
    float64, an all-to-all of the group's backend brings the sums, with one warning. fp8 is as for
    `all_gather_grouped_matmul`.

    Args:
        y: [capacity, K], rows in the order of the routing, as `all_gather_grouped_matmul` returns
            them. Rows behind the last one are not read.
        weights: [experts of this rank, K, N], each matrix row-major or column-major.
        routing: the `agmm.moe.Routing` of the rows.
        topk_weights: [T_local, k], the router's weights of this rank's tokens, of any
            floating-point dtype.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        bias: [experts of this rank, N], added to each row before it is weighted. Where every rank
            has a slice of all experts, the biases of the ranks are added up.
        strict: raise `Unsupported` instead of taking the unfused path.
        scale_a: float32, of y in fp8: [capacity, 1], one for each row, or [capacity, ⌈K/128⌉].
        scale_b: float32, of weights in fp8, as for `all_gather_grouped_matmul`.
        out_dtype: of the result, where y is in fp8: bfloat16 (when None), float16 or float32.
        use_fast_accum: as in `all_gather_scaled_matmul`; where y is in fp8.
        quantize: quantise y and the weights for the forward, as `all_gather_grouped_matmul` does.

    Returns:
        [T_local, N], of the dtype of y; of fp8 of ``out_dtype``.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    for name, tensor in (("y", y), ("weights", weights), ("topk_weights", topk_weights)):
        check_operand(name, tensor)
    if bias is not None:
        check_operand("bias", bias)
    given: Any = routing
    if not isinstance(given, Routing):
        found = type(given).__name__
        raise InvalidArgument(f"routing: found {found}, wanted an agmm.moe.Routing")
    check_flags(strict=strict, use_fast_accum=use_fast_accum)
    of_fp8 = (scale_a, scale_b), out_dtype, use_fast_accum, quantize
    scales = asked_scales(("y", y), 1, *of_fp8)
    group_name = groups.name_of(group)
    of_routing = routing.tokens, routing.offsets, routing.positions
    ranks = group_name, groups.world_size_of(group_name)
    counts = list(routing.tokens_per_rank or ())
    if scales is not None:
        return torch.ops.agmm._scaled_grouped_matmul_reduce_scatter.default(  # type: ignore[no-any-return]
            *(y, scales.a, weights, scales.b[0], bias, *of_routing, topk_weights, *ranks),
            *(scales.out_dtype, use_fast_accum, counts, strict),
        )
    y, weights, bias = autocast((y, weights, bias), y.device)
    out: torch.Tensor = torch.ops.agmm._grouped_matmul_reduce_scatter.default(
        [y],
        [weights],
        bias,
        *of_routing,
        topk_weights,
        *(*ranks, counts),
        -1,
        strict,
        quantize or "",
    )
    return out
