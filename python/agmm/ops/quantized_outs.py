"""Results of a product in fp8, with the scales as the next op takes those of its A."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from agmm.errors import InvalidArgument
from agmm.ops.checks import check_no_backward, check_operand
from agmm.ops.quantize import KINDS, quantised
from agmm.ops.scaled_checks import BIAS_DTYPES
from agmm.runtime.results import reshaped
from agmm.runtime.scaling import ALL, BY_NAME

_FP8 = torch.float8_e4m3fn


def checked(
    quantize_out: Any,
    scale_out: Any,
    *,
    dtype: tuple[str, Any],
    others: dict[str, Any],
    operands: dict[str, Any] | None = None,
) -> Callable[[Any], Any]:
    """What makes of an op's results those in fp8 (`quantised_outs`). Refuses what no result can be
    quantised with, before anything is sent.

    Args:
        dtype: the argument that says the dtype of the result, and that dtype.
        others: arguments that a quantised result has no room for, with what was found.
        operands: what may require a gradient, by name, one or several.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
    """
    if quantize_out not in KINDS:
        names = ", ".join(repr(kind) for kind in KINDS)
        raise InvalidArgument(
            f"quantize_out: found {quantize_out!r}, wanted one of {names} or None"
        )
    beside = f"with quantize_out={quantize_out!r}"
    if quantize_out != "tensorwise":
        if scale_out is not None:
            raise InvalidArgument(f"scale_out: found one {beside}, wanted None")
    else:
        if scale_out is None:
            raise InvalidArgument(f"scale_out: found None {beside}, wanted one float32 number")
        check_operand("scale_out", scale_out)
        if scale_out.dtype != torch.float32 or scale_out.numel() != 1:
            raise InvalidArgument(
                f"scale_out: found {tuple(scale_out.shape)} {scale_out.dtype}, wanted one float32 "
                "number"
            )
    for name, given in others.items():
        if given:
            raise InvalidArgument(f"{name}: found {given!r} with quantize_out, wanted none")
    name, found = dtype
    if found not in BIAS_DTYPES:
        raise InvalidArgument(
            f"{name}: found dtype {found} {beside}, wanted bfloat16, float16 or float32"
        )
    tensors = [
        (name, one)
        for name, given in {**(operands or {}), "scale_out": scale_out}.items()
        for one in (given if isinstance(given, (list, tuple)) else (given,))
        if isinstance(one, torch.Tensor)
    ]
    check_no_backward(tensors, f"products {beside}")
    return lambda outs: quantised_outs(outs, quantize_out, scale_out)


def quantised_outs(found: Any, quantize_out: str, scale_out: torch.Tensor | None) -> Any:
    """Each result that an op has returned, as the fp8 values and the scales that
    `quantize.quantised` makes of it: one of each row, of each 128 columns of a row, or the given
    one.

    Args:
        found: a result, or a list of some.
        scale_out: that of all values, of a tensor-wise result.
    """
    if isinstance(found, list):
        return [quantised_outs(one, quantize_out, scale_out) for one in found]
    tile = BY_NAME[quantize_out].a
    amax = None
    if scale_out is not None:
        amax = scale_out.reshape(1, 1) * torch.finfo(_FP8).max
    values, scale = quantised(found.flatten(0, -2), tile, _FP8, amax=amax)
    if tile[0] != ALL:
        scale = reshaped(scale, (*found.shape[:-1], scale.shape[-1]))
    return reshaped(values, found.shape), scale
