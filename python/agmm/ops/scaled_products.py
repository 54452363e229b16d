"""Products of fp8 operands on one device: by ``torch._scaled_mm`` on CUDA where it has the kind of
scales, else of dequantised operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agmm.errors import fall_back
from agmm.ops.checks import check_no_backward
from agmm.ops.library import library
from agmm.ops.scaled_checks import scaling_of
from agmm.planning.legality import why_not_scaled_mm
from agmm.runtime.scaled import Scaled, Weight, multiply
from agmm.runtime.scaling import ALL, BLOCK

_FEW_ROWS = 256
"""Shards of more rows are products of their own. A product of fewer takes as long as B is read for,
of which all shards together need one reading; the number is an estimate."""


_SCALE_ALIGNMENT = 16
"""The alignment in bytes of scales, without which cuBLASLt 13 refuses them."""


def why_not_by_torch(weight: Weight) -> str | None:
    """The reason why ``torch._scaled_mm`` is known to have no product with such a weight on CUDA,
    or None. It finds out by itself, after some work on the host, what is not known here."""
    n, is_by_block = weight.B.values.shape[1], weight.B.tile[0] == BLOCK
    why = why_not_scaled_mm(n, is_by_block=is_by_block, cuda=torch.version.cuda)
    if why is not None:
        return why
    if weight.B.tile == (ALL, 1) and weight.out_dtype.itemsize == 1:
        return f"scales of rows: found a result in {weight.out_dtype}, wanted bfloat16"
    return None


def product(A: Scaled, weight: Weight) -> torch.Tensor:
    """``A @ B`` [M, N], with all else that the weight wants.

    Args:
        A: [M, K]. A tile may have some of the rows: those of a shard with one scale.
    """
    out = A.values.new_empty(A.values.shape[0], weight.B.values.shape[1], dtype=weight.out_dtype)
    if out.numel() == 0:
        return out
    if out.is_cuda and A.values.shape[1]:
        why = why_not_by_torch(weight)
        try:
            if why is None:
                return by_torch(A, weight, out)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:  # checked before anything is launched
            why = str(error).partition("\n")[0]
        fall_back(
            f"torch._scaled_mm: {why}; the product is made of operands dequantised to float32, "
            "which is slow",
            strict=False,
        )
    return multiply(A.dequantised(), weight.B.dequantised(), weight, out)


def sum_of(products: Sequence[tuple[Scaled, Weight]]) -> torch.Tensor:
    """The sum of ``A @ B`` [M, N] for each pair, in the dtype that the weights want, which scale no
    result. Several products are added up in float32, and their sum is rounded once; a product for
    which ``torch._scaled_mm`` does not write float32 is rounded to that dtype before."""
    first, *others = products
    if not others:
        return product(*first)
    total = _in_float32(*first)
    for other in others:
        total.add_(_in_float32(*other))
    return total.to(first[1].out_dtype)


def _in_float32(A: Scaled, weight: Weight) -> torch.Tensor:
    """``A @ B`` [M, N] in float32, as exact as `sum_of` says."""
    exact = weight._replace(out_dtype=torch.float32)
    out = A.values.new_empty(len(A.values), weight.B.values.shape[1], dtype=torch.float32)
    if not A.values.is_cuda or A.values.numel() == 0 or out.numel() == 0:
        return product(A, exact)
    if weight.B.tile != (ALL, 1):  # torch has none in float32 with scales of rows
        try:
            by_torch(A, exact._replace(bias=None), out)  # it has none with a bias either
            return out if weight.bias is None else out.add_(weight.bias)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            pass
    return product(A, weight).to(torch.float32)


def by_torch(A: Scaled, weight: Weight, out: torch.Tensor) -> torch.Tensor:
    """Write ``A @ B`` to ``out`` by ``torch._scaled_mm``, which raises where it does not have such
    a product, and return ``out``."""
    B = weight.B
    products = [(A.values, as_torch_wants_it(A), out)]
    if B.tile == (ALL, ALL) and A.scale.numel() > 1:  # one scale for each shard
        rows = len(out) // len(A.scale)
        if rows <= _FEW_ROWS and _may_have_scales_of_rows(weight):
            products = [(A.values, A.scale.expand(-1, rows).reshape(-1, 1), out)]
            B = Scaled(B.values, B.scale.expand(1, out.shape[1]), (ALL, 1))
        else:
            apart = A.scale.new_empty(len(A.scale), _SCALE_ALIGNMENT // A.scale.itemsize)
            apart[:, :1] = A.scale
            products = [
                (A.values[begin : begin + rows], scales[:1], out[begin : begin + rows])
                for begin, scales in zip(range(0, len(out), rows), apart, strict=True)
            ]
    scale_b = as_torch_wants_it(B)
    for values, scale, rows_of_out in products:
        torch.ops.aten._scaled_mm.out(
            values,
            B.values,
            scale,
            scale_b,
            weight.bias,
            weight.result_scale,
            weight.out_dtype,
            weight.fast_accum,
            out=rows_of_out,
        )
    return out


def _may_have_scales_of_rows(weight: Weight) -> bool:
    """Whether ``torch._scaled_mm`` would take scales of rows and columns in place of single
    ones."""
    return (
        weight.out_dtype == torch.bfloat16
        and weight.B.values.dtype == torch.float8_e4m3fn
        and weight.result_scale is None
        and (weight.bias is None or weight.bias.dtype == torch.bfloat16)
    )


def as_torch_wants_it(operand: Scaled) -> torch.Tensor:
    """The scales in the layout that ``torch._scaled_mm`` takes them in, and where it does."""
    scale, tile = operand.scale, operand.tile
    if scale.data_ptr() % _SCALE_ALIGNMENT != 0:
        scale = scale.clone()
    if tile == (1, BLOCK):  # the rows of A side by side
        return scale.t().contiguous().t()
    if tile == (BLOCK, BLOCK):  # as of Bᵀ, whose rows of scales begin at multiples of 16 bytes
        blocks_of_k, blocks_of_n = scale.shape
        padded = scale.new_empty(blocks_of_n, -(-blocks_of_k // 4) * 4)
        return padded[:, :blocks_of_k].copy_(scale.t()).t()
    return scale.contiguous()


def _impl(
    A: torch.Tensor,
    scale_a: torch.Tensor,
    B: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    scaling = scaling_of(A, scale_a, B, scale_b)
    weight = Weight(Scaled(B, scale_b, scaling.b), None, None, out_dtype, use_fast_accum)
    return product(Scaled(A, scale_a, scaling.a), weight)


def _fake(
    A: torch.Tensor,
    scale_a: torch.Tensor,
    B: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    return A.new_empty(A.shape[0], B.shape[1], dtype=out_dtype)


def _autograd(*arguments: Any) -> Any:
    names = "A", "scale_a", "B", "scale_b"
    check_no_backward(list(zip(names, arguments, strict=False)))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.agmm._scaled_matmul.default(*arguments)


for _key in ("CPU", "CUDA"):
    library.impl("_scaled_matmul", _impl, _key)
library.impl("_scaled_matmul", _fake, "Meta")
library.impl("_scaled_matmul", _autograd, "Autograd")


def scaled_matmul(
    A: torch.Tensor,
    scale_a: torch.Tensor,
    B: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """``A @ B`` [M, N] of this rank's operands, with scales of any kind; an op that is traced as
    one."""
    found: torch.Tensor = torch.ops.agmm._scaled_matmul.default(
        A, scale_a, B, scale_b, out_dtype, use_fast_accum
    )
    return found
