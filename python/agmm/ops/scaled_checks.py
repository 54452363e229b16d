"""What no path can serve in a call on fp8 operands: found before another rank sees the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agmm.errors import InvalidArgument
from agmm.ops.checks import check_chunk_signals, check_matrix, check_operand
from agmm.runtime.scaled import FP8, ScaledProducts
from agmm.runtime.scaling import ALL, BY_NAME, K_MULTIPLE, SCALINGS, Scaling, Tile, scale_shape

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FP8)
BIAS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_dtype(name: str, tensor: torch.Tensor, wanted: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in wanted:
        one_of = "one of " if len(wanted) > 1 else ""
        raise InvalidArgument(
            f"{name}: found dtype {tensor.dtype}, wanted {one_of}{_names(wanted)}"
        )


def _check_device(name: str, tensor: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    if tensor.device != like.device:
        raise InvalidArgument(
            f"{name}: found device {tensor.device}, wanted {like.device} as {like_name}"
        )


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


def _check_product(
    A_name: str, A: torch.Tensor, scale_a: torch.Tensor, B: torch.Tensor, scale_b: torch.Tensor
) -> None:
    for name, tensor in ((A_name, A), ("B", B), ("scale_a", scale_a), ("scale_b", scale_b)):
        check_operand(name, tensor)
    if A.dim() < 2:
        raise InvalidArgument(f"{A_name}: found {A.dim()} dimensions, wanted at least 2")
    check_matrix("B", B)
    _check_dtype(A_name, A, FP8)
    _check_dtype("B", B, FP8)
    if A.dtype == B.dtype == torch.float8_e5m2:
        raise InvalidArgument(
            f"B: found dtype {B.dtype} as {A_name}, wanted {torch.float8_e4m3fn} for one of them: "
            "GPUs multiply no two of them"
        )
    _check_device("B", B, A_name, A)
    k = A.shape[-1]
    if k % K_MULTIPLE:
        raise InvalidArgument(f"{A_name}: found K={k}, wanted a multiple of {K_MULTIPLE}")
    if B.shape[0] != k:
        raise InvalidArgument(f"B: found K={B.shape[0]}, wanted {k} as the columns of {A_name}")
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        _check_dtype(name, scale, (torch.float32,))
        _check_device(name, scale, A_name, A)
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
        raise InvalidArgument(f"out_dtype: found {out_dtype}, wanted one of {_names(OUT_DTYPES)}")
    if bias is not None:
        check_operand("bias", bias)
        _check_dtype("bias", bias, BIAS_DTYPES)
        _check_device("bias", bias, A_name, A)
        if bias.shape != (columns,):
            raise InvalidArgument(
                f"bias: found shape {tuple(bias.shape)}, wanted ({columns},) as B's columns"
            )
    if result_scale is not None:
        check_operand("result_scale", result_scale)
        _check_dtype("result_scale", result_scale, (torch.float32,))
        _check_device("result_scale", result_scale, A_name, A)
        if result_scale.numel() != 1:
            raise InvalidArgument(
                f"result_scale: found shape {tuple(result_scale.shape)}, wanted one number"
            )
        if out_dtype not in FP8:
            raise InvalidArgument(
                f"result_scale: found one with out_dtype {out_dtype}, wanted None: only results "
                "in fp8 are scaled"
            )


def check_flag(name: str, flag: Any) -> None:
    if flag is not True and flag is not False:
        raise InvalidArgument(f"{name}: found {flag!r}, wanted True or False")


def check_no_backward(
    given: Sequence[tuple[str, torch.Tensor | None]], what: str = "the ops on fp8 operands"
) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in given:
        if tensor is not None and tensor.requires_grad:
            raise InvalidArgument(
                f"{name}: found requires_grad=True, wanted a call under torch.no_grad(): {what} "
                "have no backward"
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
    if not Bs:
        raise InvalidArgument("B: found an empty list, wanted at least one weight")
    for name, given in (
        ("scale_b", scale_bs),
        ("bias", biases),
        ("result_scale", result_scales),
        ("out_dtype", out_dtypes),
    ):
        if len(given) != len(Bs):
            raise InvalidArgument(
                f"{name}: found {len(given)} for {len(Bs)} weights, wanted one each"
            )
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
    if not -A.dim() <= scatter_dim < A.dim():
        raise InvalidArgument(
            f"scatter_dim: found {scatter_dim}, wanted {-A.dim()} to {A.dim() - 1}"
        )
    if reduce_op not in ("sum", "avg"):
        raise InvalidArgument(f"reduce_op: found {reduce_op!r}, wanted 'sum' or 'avg'")
    is_columns = scatter_dim % A.dim() == A.dim() - 1
    name, size = ("B", B.shape[1]) if is_columns else ("A", A.shape[scatter_dim])
    if size % world_size:
        what = "columns" if is_columns else f"in dimension {scatter_dim}"
        raise InvalidArgument(
            f"{name}: found {size} {what}, wanted a multiple of the world size {world_size}"
        )
    if given.bias is not None and is_columns:
        raise InvalidArgument(
            f"bias: found one with scatter_dim={scatter_dim}, wanted None: the result's columns "
            "are scattered"
        )


def check_scaled_sum(given: ScaledProducts) -> None:
    """Refuses products that cannot be computed and added up, or whose sum cannot be rounded as is
    asked."""
    if not given.As:
        raise InvalidArgument("A: found an empty list, wanted at least one")
    for name, found in (
        ("B", given.Bs),
        ("scale_a", given.scale_as),
        ("scale_b", given.scale_bs),
    ):
        if len(found) != len(given.As):
            raise InvalidArgument(
                f"{name}: found {len(found)} for {len(given.As)} of A, wanted one each"
            )
    first, weight = given.As[0], given.Bs[0]
    for A, B, scale_a, scale_b in zip(*given[:4], strict=True):
        _check_product("A", A, scale_a, B, scale_b)
        if A.shape[:-1] != first.shape[:-1]:
            raise InvalidArgument(
                f"A: found leading sizes {tuple(A.shape[:-1])}, wanted {tuple(first.shape[:-1])} "
                "as the first of the list"
            )
        _check_device("A", A, "the first of the list", first)
        if B.shape[1] != weight.shape[1]:
            raise InvalidArgument(
                f"B: found {B.shape[1]} columns, wanted {weight.shape[1]} as the first of the list"
            )
    _check_result("A", first, weight.shape[1], given.bias, given.result_scale, given.out_dtype)
