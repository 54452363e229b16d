"""What no path can serve in a call on fp8 operands: found before another rank sees the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agmm.errors import InvalidArgument
from agmm.ops.checks import (
    check_bias_shape,
    check_chunk_signals,
    check_columns,
    check_count,
    check_device,
    check_dtype,
    check_inner,
    check_leading,
    check_listed,
    check_matrix,
    check_operand,
    check_rows,
    check_scatter,
    names_of,
)
from agmm.runtime.scaled import FP8, ScaledProducts
from agmm.runtime.scaling import (
    ALL,
    BY_NAME,
    K_MULTIPLE,
    OF_EXPERTS,
    SCALINGS,
    Scaling,
    Tile,
    scale_shape,
)

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FP8)
BIAS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _is_one(tile: Tile) -> bool:
    return tile == (ALL, ALL)


def _fits(scale: torch.Tensor, shape: Sequence[int], tile: Tile) -> bool:
    if _is_one(tile):
        return bool(scale.numel() == 1)
    return tuple(scale.shape) == scale_shape(shape, tile)


def _wanted(shape: Sequence[int], scalings: Sequence[Scaling], operand: str) -> str:
    words = []
    for scaling in scalings:
        tile: Tile = getattr(scaling, operand)
        shape_of_it = "one number" if _is_one(tile) else f"{scale_shape(shape, tile)}"
        words.append(f"{shape_of_it} ({scaling.name})")
    return " or ".join(dict.fromkeys(words))


def scaling_of(
    A: torch.Tensor, scale_a: torch.Tensor, B: torch.Tensor, scale_b: torch.Tensor
) -> Scaling:
    """The kind of the scales, by their shapes.

    Raises:
        InvalidArgument: they are of no kind.
    """
    of_a = [s for s in SCALINGS if _fits(scale_a, A.shape, s.a)]
    if not of_a:
        raise InvalidArgument(
            f"scale_a: found shape {tuple(scale_a.shape)}, wanted {_wanted(A.shape, SCALINGS, 'a')}"
        )
    for scaling in of_a:
        if _fits(scale_b, B.shape, scaling.b):
            return scaling
    raise InvalidArgument(
        f"scale_b: found shape {tuple(scale_b.shape)}, wanted {_wanted(B.shape, of_a, 'b')}, "
        f"which goes with scale_a of shape {tuple(scale_a.shape)}"
    )


def scalings_of(
    A: torch.Tensor,
    scale_a: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    scale_bs: Sequence[torch.Tensor],
    known: str = "",
) -> list[Scaling]:
    """The kind of the scales of each weight, which `scaling_of` accepts: the one that is ``known``
    to whoever made them; else the first that fits all weights, since they share A, and a shape such
    as [1, 1] fits several; else each weight's own."""
    if known:
        return [BY_NAME[known]] * len(Bs)
    for scaling in SCALINGS:
        if _fits(scale_a, A.shape, scaling.a) and all(
            _fits(scale, B.shape, scaling.b) for B, scale in zip(Bs, scale_bs, strict=True)
        ):
            return [scaling] * len(Bs)
    return [scaling_of(A, scale_a, *one) for one in zip(Bs, scale_bs, strict=True)]


def scaling_of_experts(
    A: torch.Tensor,
    scale_a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scale_bs: Sequence[torch.Tensor],
) -> Scaling:
    """The kind of the scales of rows and of all weights of experts that multiply them, by their
    shapes.

    Raises:
        InvalidArgument: they are of no kind that experts may have.
    """
    of_a = [s for s in OF_EXPERTS if _fits(scale_a, A.shape, s.a)]
    if not of_a:
        wanted = _wanted(A.shape, OF_EXPERTS, "a")
        raise InvalidArgument(f"scale_a: found shape {tuple(scale_a.shape)}, wanted {wanted}")
    for scaling in of_a:
        if all(_fits(s, w.shape, scaling.b) for s, w in zip(scale_bs, weights, strict=True)):
            return scaling
    shapes = ", ".join(str(tuple(scale.shape)) for scale in scale_bs)
    raise InvalidArgument(
        f"scale_b: found shape {shapes}, wanted {_wanted(weights[0].shape, of_a, 'b')}, which goes "
        f"with scale_a of shape {tuple(scale_a.shape)}"
    )


def check_fp8(A_name: str, A: torch.Tensor, B_name: str, B: torch.Tensor) -> None:
    """Refuses operands [..., K] and [..., K, N] that are not in fp8, or that no path multiplies."""
    check_dtype(A_name, A, FP8)
    check_dtype(B_name, B, FP8)
    if A.dtype == B.dtype == torch.float8_e5m2:
        raise InvalidArgument(
            f"{B_name}: found dtype {B.dtype} as {A_name}, wanted {torch.float8_e4m3fn} for one of "
            "them: GPUs multiply no two of them"
        )
    check_device(B_name, B, A_name, A)
    k = A.shape[-1]
    if k % K_MULTIPLE:
        raise InvalidArgument(f"{A_name}: found K={k}, wanted a multiple of {K_MULTIPLE}")
    check_inner(B_name, B.shape[-2], k, A_name, B.shape[-1])


def check_scales(A_name: str, A: torch.Tensor, scales: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuses scales that are not float32 on the device of A."""
    for name, scale in scales:
        check_dtype(name, scale, (torch.float32,))
        check_device(name, scale, A_name, A)


def _check_product(
    A_name: str, A: torch.Tensor, scale_a: torch.Tensor, B: torch.Tensor, scale_b: torch.Tensor
) -> None:
    for name, tensor in ((A_name, A), ("B", B), ("scale_a", scale_a), ("scale_b", scale_b)):
        check_operand(name, tensor)
    check_rows(A_name, A)
    check_matrix("B", B)
    check_fp8(A_name, A, "B", B)
    check_scales(A_name, A, (("scale_a", scale_a), ("scale_b", scale_b)))
    scaling_of(A, scale_a, B, scale_b)


def _check_result(
    A_name: str,
    A: torch.Tensor,
    columns: int,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    out_dtype: Any,
) -> None:
    if out_dtype not in OUT_DTYPES:
        raise InvalidArgument(f"out_dtype: found {out_dtype}, wanted one of {names_of(OUT_DTYPES)}")
    if bias is not None:
        check_operand("bias", bias)
        check_dtype("bias", bias, BIAS_DTYPES)
        check_device("bias", bias, A_name, A)
        check_bias_shape(bias, columns)
    if result_scale is not None:
        check_operand("result_scale", result_scale)
        check_dtype("result_scale", result_scale, (torch.float32,))
        check_device("result_scale", result_scale, A_name, A)
        if result_scale.numel() != 1:
            raise InvalidArgument(
                f"result_scale: found shape {tuple(result_scale.shape)}, wanted one number"
            )
        if out_dtype not in FP8:
            raise InvalidArgument(
                f"result_scale: found one with out_dtype {out_dtype}, wanted None: only results "
                "in fp8 are scaled"
            )


def check_scaled_gather(
    A_shard: torch.Tensor,
    scale_a: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    scale_bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[torch.dtype],
    gather_dim: int,
) -> None:
    """Refuses all that is wrong in itself in a call of ``all_gather_scaled_matmul``."""
    check_listed("B", Bs, " weight")
    for name, given in (
        ("scale_b", scale_bs),
        ("bias", biases),
        ("result_scale", result_scales),
        ("out_dtype", out_dtypes),
    ):
        check_count(name, given, len(Bs), "weights")
    for B, scale_b, bias, result_scale, out_dtype in zip(
        Bs, scale_bs, biases, result_scales, out_dtypes, strict=True
    ):
        _check_product("A_shard", A_shard, scale_a, B, scale_b)
        _check_result("A_shard", A_shard, B.shape[1], bias, result_scale, out_dtype)
    if not -A_shard.dim() <= gather_dim < A_shard.dim() or gather_dim in (-1, A_shard.dim() - 1):
        raise InvalidArgument(
            f"gather_dim: found {gather_dim}, wanted 0 to {A_shard.dim() - 2}: scales cover K"
        )


def check_scaled_async_input(
    A: torch.Tensor,
    B: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    signals: torch.Tensor,
    pivot: int,
) -> None:
    """Refuses all that is wrong in itself in a call of ``_async_input_scaled_mm``."""
    check_matrix("A", A)
    _check_product("A", A, scale_a, B, scale_b)
    _check_result("A", A, B.shape[1], bias, None, torch.bfloat16)
    if A.shape[1] == 0:
        raise InvalidArgument("A: found K=0, wanted at least 16")
    check_chunk_signals("A", A, signals, pivot)


def check_scaled_scatter(
    given: ScaledProducts, world_size: int, scatter_dim: int, reduce_op: str
) -> None:
    """Refuses all that is wrong in itself in a call of ``scaled_matmul_reduce_scatter``."""
    check_scaled_sum(given)
    A, B = given.As[0], given.Bs[0]
    check_scatter(A, B, given.bias, world_size, scatter_dim, reduce_op)


def check_scaled_sum(given: ScaledProducts) -> None:
    """Refuses products that cannot be computed and added up, or whose sum cannot be rounded as is
    asked."""
    check_listed("A", given.As)
    for name, found in (
        ("B", given.Bs),
        ("scale_a", given.scale_as),
        ("scale_b", given.scale_bs),
    ):
        check_count(name, found, len(given.As), "of A")
    first, weight = given.As[0], given.Bs[0]
    for A, B, scale_a, scale_b in zip(*given[:4], strict=True):
        _check_product("A", A, scale_a, B, scale_b)
        check_leading(A, first)
        check_device("A", A, "the first of the list", first)
        check_columns(B, weight)
    _check_result("A", first, weight.shape[1], given.bias, given.result_scale, given.out_dtype)
