"""The scales that callers give with fp8 rows of experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from agmm.errors import InvalidArgument
from agmm.ops.checks import check_operand
from agmm.runtime.scaled import FP8


class Scales(NamedTuple):
    """What a caller gives with fp8 rows."""

    a: torch.Tensor
    b: list[torch.Tensor]
    out_dtype: torch.dtype


def asked_scales(
    rows: tuple[str, torch.Tensor],
    count: int,
    scales: tuple[Any, Any],
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
    quantize: str | None,
) -> Scales | None:
    """The scales of a call on fp8 rows; None where rows and arguments are of another one.

    Args:
        rows: the name of the argument that has rows, and it.
        count: the weights, for each of which there is a scale.
        scales: of the rows, and of the weights.

    Raises:
        InvalidArgument: the arguments are not all those of one kind of call.
    """
    (name, tensor), (scale_a, scale_b) = rows, scales
    if tensor.dtype not in FP8 and scale_a is None and scale_b is None:
        for argument, value in (("out_dtype", out_dtype), ("use_fast_accum", use_fast_accum)):
            if value not in (None, False):
                raise InvalidArgument(
                    f"{argument}: found {value} with {name} in {tensor.dtype}, wanted none: only "
                    "products of fp8 have one"
                )
        return None
    if quantize is not None:
        raise InvalidArgument(
            f"quantize: found {quantize!r} with {name} in {tensor.dtype} and scales, wanted None: "
            "the call quantises operands that are not in fp8"
        )
    given = list(scale_b) if isinstance(scale_b, (list, tuple)) else [scale_b]
    if not isinstance(scale_b, (list, tuple)) and count > 1 and scale_b is not None:
        raise InvalidArgument(f"scale_b: found one for {count} weights, wanted a list of one each")
    check_operand("scale_a", scale_a)
    for one in given:
        check_operand("scale_b", one)
    return Scales(scale_a, given, torch.bfloat16 if out_dtype is None else out_dtype)
