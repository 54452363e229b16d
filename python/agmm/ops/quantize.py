"""Dynamic quantisation to fp8, by torchao's definition of the scales: what a value is divided by is
amax ÷ the largest number of the dtype, the quotient made in float64."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from agmm.errors import InvalidArgument
from agmm.ops import small_collectives
from agmm.ops.checks import check_matrix, check_no_backward, check_operand, check_rows
from agmm.ops.gather_scaled_op import gather
from agmm.ops.scaled_checks import BIAS_DTYPES
from agmm.runtime import collectives, cuda_quantize, groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.collectives import is_traced
from agmm.runtime.groups import group_of, name_of
from agmm.runtime.scaled import Scaled
from agmm.runtime.scaling import ALL, BY_NAME, K_MULTIPLE, Tile, scale_shape

KINDS = ("tensorwise", "rowwise", "block")

_LEAST_AMAX = 1e-12  # torchao's


def look_through(op: str, group_name: str, **tensors: torch.Tensor) -> None:
    """Look for NaNs in what is about to be quantised and sent in the op, where that was asked for
    and the tensors are not traced. One makes its tile's scale NaN, and so all numbers of the tile:
    later its place cannot be told."""
    if not nan_check.active:
        return
    for name, tensor in tensors.items():
        if not is_traced(tensor):
            rank = groups.of(group_of(group_name)).rank
            nan_check.look_through(op, name, tensor, rank)


def amax_of(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The largest absolute value of each tile of a matrix, float32; 0 where it is empty."""
    if x.numel() == 0:
        return x.new_zeros(scale_shape(x.shape, tile), dtype=torch.float32)
    if x.is_cuda and not is_traced(x):
        by_kernel = cuda_quantize.amax_of(x, tile)
        if by_kernel is not None:
            return by_kernel
    found = x.abs()
    for dim, size in enumerate(tile):
        if size == ALL:
            found = found.amax(dim, keepdim=True)
        elif size != 1:
            missing = -found.shape[dim] % size
            pad = (0, 0, 0, missing) if dim == 0 else (0, missing)
            found = torch.nn.functional.pad(found, pad)
            found = found.unflatten(dim, (-1, size)).amax(dim + 1)
    # All ranks have to agree on a dtype, whether a kernel can read their memory or not.
    return found.to(torch.float32)


def quantised(
    x: torch.Tensor,
    tile: Tile,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    amax: torch.Tensor | None = None,
    power_of_2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as fp8 values, in its layout, and the scales [...] to multiply them with.

    Args:
        amax: that of each tile; of ``x`` when None.
        power_of_2: round what values are multiplied with down to a power of two, as torchao's
            row-wise recipes do. A value then has the same digits whichever tile it is scaled in.
    """
    if x.numel() == 0:
        return x.to(dtype), x.new_ones(scale_shape(x.shape, tile), dtype=torch.float32)
    if x.is_cuda and not is_traced(x):
        found = cuda_quantize.quantised(x, tile, dtype, amax=amax, power_of_2=power_of_2)
        if found is not None:
            return found
    return quantised_by_torch(x, tile, dtype, amax, power_of_2)


def quantised_columns(
    x: torch.Tensor,
    tile: Tile,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    amax: torch.Tensor | None = None,
    power_of_2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantised` of x [M, features], with the values as `transposed` makes them."""
    if tile == (ALL, 1) and x.numel() and x.is_cuda and not is_traced(x):
        found = cuda_quantize.quantised_columns(x, dtype, amax=amax, power_of_2=power_of_2)
        if found is not None:
            return found
    values, scale = quantised(x, tile, dtype, amax=amax, power_of_2=power_of_2)
    return transposed(values), scale


def transposed(values: torch.Tensor) -> torch.Tensor:
    """fp8 [M, features] as [features, M] in memory of its own, M filled up with zeros to a multiple
    of 16, as fp8 products want what they sum over."""
    if values.numel() and values.is_cuda and not is_traced(values):
        by_kernel = cuda_quantize.transposed(values)
        if by_kernel is not None:
            return by_kernel
    m, features = values.shape
    missing = -m % K_MULTIPLE
    if not missing:
        return values.t().contiguous()
    found = values.new_zeros(features, m + missing)
    found[:, :m] = values.t()
    return found


def quantised_by_torch(
    x: torch.Tensor, tile: Tile, dtype: torch.dtype, amax: torch.Tensor | None, power_of_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `quantised` does, by torch's own ops: the bits that agmm's kernels have too."""
    largest = torch.finfo(dtype).max
    amax = (amax_of(x, tile) if amax is None else amax).to(torch.float64)
    up = (largest / amax.clamp(min=_LEAST_AMAX)).to(torch.float32)
    if power_of_2:
        up = up.log2().floor().exp2()
    scaled = x.to(torch.float32) * Scaled(x, up, tile).spread()
    return scaled.clamp(-largest, largest).to(dtype), up.reciprocal()


def _reduced_amax(rows: torch.Tensor, group_name: str, strict: bool) -> torch.Tensor:
    """The largest absolute value of the rows of all ranks, float32 [1, 1]: gathered from each,
    since agmm's kernels sum but have no maximum. Collective."""
    amax = amax_of(rows, (ALL, ALL))
    call = Call("all_gather_matmul", A_shard=rows, quantize="tensorwise", reduce_amax=True)
    if is_traced(rows):
        of_ranks = collectives.start_all_gather(amax, group_name, 0, call=call)()
    elif strict and not rows.is_cuda:
        world_size = group_of(group_name).size()
        of_ranks = torch.ops.agmm._all_gather.default(amax, group_name, world_size, 0, strict)
    else:
        of_ranks = small_collectives.all_gathered(amax, group_of(group_name), call, strict=strict)
    return of_ranks.amax(0, keepdim=True)


def _check(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    quantize: Any,
    reduce_amax: bool,
) -> None:
    if quantize not in KINDS:
        names = ", ".join(repr(kind) for kind in KINDS)
        raise InvalidArgument(f"quantize: found {quantize!r}, wanted one of {names} or None")
    if reduce_amax and quantize != "tensorwise":
        raise InvalidArgument(
            f"reduce_amax: found True with quantize={quantize!r}, wanted quantize='tensorwise'"
        )
    for name, tensor in (("A_shard", A_shard), *(("B", B) for B in Bs)):
        check_operand(name, tensor)
        if tensor.dtype not in BIAS_DTYPES:
            raise InvalidArgument(
                f"{name}: found dtype {tensor.dtype} with quantize={quantize!r}, wanted bfloat16, "
                "float16 or float32"
            )
    check_rows("A_shard", A_shard)
    for B in Bs:
        check_matrix("B", B)
    for bias in biases:
        if bias is not None:
            check_operand("bias", bias)
    # The check is made here, since what a kernel has quantised no longer says whether a gradient
    # was wanted.
    check_no_backward(
        [("A_shard", A_shard), *(("B", B) for B in Bs), *(("bias", bias) for bias in biases)],
        f"products with quantize={quantize!r}",
    )


def gather_quantised(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: Any,
    gather_dim: int,
    quantize: str,
    reduce_amax: bool,
    strict: bool,
    activation: str,
) -> list[torch.Tensor]:
    """``all_gather_matmul`` of operands that are quantised before the gather, in the dtype of
    A_shard."""
    _check(A_shard, Bs, biases, quantize, reduce_amax)
    look_through("all_gather_matmul", name_of(group), A_shard=A_shard)
    if not reduce_amax:
        return _gather(
            *(A_shard, Bs, biases, group, gather_dim, quantize), None, strict, activation
        )
    # A NaN of one rank makes the scale of all ranks one.
    is_looked_at = nan_check.active and not is_traced(A_shard)
    with nan_check.done() if is_looked_at else nullcontext():
        amax = _reduced_amax(A_shard.flatten(0, -2), name_of(group), strict)
        return _gather(
            *(A_shard, Bs, biases, group, gather_dim, quantize), amax, strict, activation
        )


def _gather(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: Any,
    gather_dim: int,
    quantize: str,
    amax: torch.Tensor | None,
    strict: bool,
    activation: str,
) -> list[torch.Tensor]:
    scaling = BY_NAME[quantize]
    rows = A_shard.flatten(0, -2)
    rows, scale_a = quantised(rows, scaling.a, amax=amax)
    if scaling.a[0] != ALL:
        scale_a = scale_a.view(*A_shard.shape[:-1], scale_a.shape[-1])
    weights = [quantised(B.t().contiguous().t(), scaling.b) for B in Bs]
    no_result_scales: list[torch.Tensor | None] = [None] * len(Bs)
    given = (
        rows.view(A_shard.shape),
        scale_a,
        [B for B, _ in weights],
        [scale for _, scale in weights],
        list(biases),
        no_result_scales,
    )
    settings = gather_dim, False, A_shard.dtype, False, strict, quantize, "", activation
    found = gather(given, group, *settings)
    return found.outs
