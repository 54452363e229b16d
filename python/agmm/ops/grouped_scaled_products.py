"""Products of fp8 rows that are grouped by expert, without an exchange: on the CPU expert by
expert, dequantised; on a GPU by agmm's kernel where an expert has few rows, else by
``torch._scaled_grouped_mm``, by agmm's kernel where torch has no such product, or in bfloat16 where
neither has. Nothing here looks at the device of a GPU, so a call can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agmm.errors import fall_back
from agmm.ops import grouped_kernel
from agmm.ops.grouped_products import experts_of_rows, product_on_gpu, segments
from agmm.planning import grouped_kernels
from agmm.runtime.cpu_scaled import Products
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.scaled import Scaled, Weight, sum_of
from agmm.runtime.scaling import Scaling

_ALIGNMENT = 16
"""The bytes at multiples of which ``torch._scaled_grouped_mm`` wants rows and columns to begin, and
the number of which it wants K and N to be multiples."""

_CAPABILITIES = (9, 0), (10, 0)
"""The GPUs for which torch has the product."""


class ScaledWeight(NamedTuple):
    """The fp8 matrices of a rank's experts, and what is done with their products."""

    values: torch.Tensor
    """[experts, K, N]."""
    scale: torch.Tensor
    """float32, in the shape `scaling.scale_shape` of the values."""
    bias: torch.Tensor | None
    """[experts, N], in bfloat16, float16 or float32."""
    scaling: Scaling
    out_dtype: torch.dtype
    fast_accum: bool

    def of_expert(self, expert: int) -> Weight:
        values = Scaled(self.values[expert], self.scale[expert], self.scaling.b)
        bias = None if self.bias is None else self.bias[expert]
        return Weight(values, bias, None, self.out_dtype, self.fast_accum)


def products(
    rows: Scaled,
    weights: Sequence[ScaledWeight],
    offsets: torch.Tensor,
    epilogue: Epilogue | None,
) -> list[torch.Tensor]:
    """The products of each expert's rows with its matrix of each weight, or what the epilogue makes
    of them; zeros behind the last expert's rows.

    Args:
        offsets: [experts + 1], as in `Routing`.
    """
    if rows.values.device.type != "cpu":
        return _on_gpu(rows, weights, offsets, epilogue)
    if epilogue is not None and epilogue.saves_products:
        return epilogue.composed(products(rows, weights, offsets, None))
    count = len(weights) if epilogue is None else epilogue.results_of(len(weights))
    outs = [
        rows.scale.new_zeros(len(rows.values), one.values.shape[2], dtype=one.out_dtype)
        for one in weights[:count]
    ]
    for expert, segment in segments(offsets):
        of_expert = Products(
            [weight.of_expert(expert) for weight in weights],
            segment.stop - segment.start,
            epilogue,
        )
        of_expert.multiply(rows.rows(segment).dequantised(), slice(None))
        for out, found_of in zip(outs, of_expert.outs, strict=True):
            out[segment] = found_of
    return outs


def wide_sums(rows: Scaled, weight: ScaledWeight, offsets: torch.Tensor) -> torch.Tensor:
    """The products of each expert's rows, with its bias, in float32; zeros behind the last expert's
    rows. On a GPU they are rounded to what the weight wants before."""
    if rows.values.device.type != "cpu":
        return scaled_product_on_gpu(rows, weight, offsets).to(torch.float32)
    total = rows.scale.new_zeros(len(rows.values), weight.values.shape[2])
    for expert, segment in segments(offsets):
        of_expert = weight.of_expert(expert)
        a, b = rows.rows(segment).dequantised(), of_expert.B.dequantised()
        total[segment] = sum_of(a, b, of_expert.bias)
    return total


# --- on a GPU ---


def described(
    rows: Scaled,
    weights: Sequence[ScaledWeight],
    epilogue: Epilogue | None,
    *,
    has_out: bool = True,
) -> grouped_kernel.Described | None:
    """The call of agmm's kernel for the products of fp8 rows, or of a gate with both; None where
    there is none. It scales the sums of each 128 of K, and writes bfloat16."""
    values = [weight.values for weight in weights]
    of_16_bits = torch.bfloat16
    if any(one.out_dtype != of_16_bits for one in weights):
        return None
    if any(one.bias is not None and one.bias.dtype != of_16_bits for one in weights):
        return None
    config = grouped_kernel.config_of(rows.values, values, epilogue)
    if config is None:
        return None
    return grouped_kernel.described(
        *(config, rows.values, values, [weight.bias for weight in weights], epilogue),
        has_out=has_out,
        scales=[_scales_of(weight) for weight in weights],
    )


def _scales_of(weight: ScaledWeight) -> tuple[int, int, int, int, int]:
    return grouped_kernel.scales_of_weight(weight.scale, max(1, weight.scaling.b[1]))


def matmuls(
    rows: Scaled, weights: Sequence[ScaledWeight], epilogue: Epilogue | None
) -> tuple[list[grouped_kernel.Described], bool] | None:
    """The calls of kernels that multiply the rows, as `grouped_products.Multiplied.matmuls` has
    them."""
    if epilogue is not None and epilogue.is_gated and not epilogue.saves_products:
        gated = described(rows, weights, epilogue)
        if gated is not None:
            return [gated], False
    found = [described(rows, [weight], None) for weight in weights]
    calls = [one for one in found if one is not None]
    return (calls, True) if len(calls) == len(found) else None


def why_not_by_torch(rows: torch.Tensor, weight: ScaledWeight) -> str | None:
    """The reason why ``torch._scaled_grouped_mm`` has no product of the rows [rows, K], or None."""
    B, capability = weight.values, torch.cuda.get_device_capability(rows.device)
    if weight.scaling.name != "rowwise":
        return f"found scales of kind {weight.scaling.name}, wanted rowwise"
    if capability not in _CAPABILITIES:
        return f"found compute capability {capability[0]}.{capability[1]}, wanted 9.0 or 10.0"
    for name, tensor in (("x or y", rows), ("weights", B)):
        if tensor.dtype != torch.float8_e4m3fn:
            return f"found {name} in {tensor.dtype}, wanted torch.float8_e4m3fn"
        if tensor.data_ptr() % _ALIGNMENT:
            return f"found {name} at an address that is no multiple of {_ALIGNMENT}"
    _, k, n = B.shape
    if n % _ALIGNMENT or k % _ALIGNMENT or 0 in (k, n):
        return f"found K={k} and N={n}, wanted multiples of {_ALIGNMENT}"
    of_expert, by_k, by_n = B.stride()
    if by_k != 1 or by_n < k or by_n % _ALIGNMENT or of_expert % _ALIGNMENT:
        return (
            f"found weights with strides {tuple(B.stride())}, wanted column-major ones, "
            f"[experts, N, K] transposed, at multiples of {_ALIGNMENT}"
        )
    by_row, by_column = rows.stride()
    if by_column != 1 or by_row < k or by_row % _ALIGNMENT:
        return f"found rows with strides {tuple(rows.stride())}, wanted row-major ones"
    return None


def is_left_to_torch(rows: torch.Tensor, weight: ScaledWeight) -> bool:
    """Whether torch multiplies rows [rows, K] that are there, though agmm may have a kernel."""
    if grouped_kernels.are_few(len(rows), len(weight.values)):
        return False
    return why_not_by_torch(rows, weight) is None


def _on_gpu(
    rows: Scaled,
    weights: Sequence[ScaledWeight],
    offsets: torch.Tensor,
    epilogue: Epilogue | None,
) -> list[torch.Tensor]:
    """`products` on a GPU, by torch where all are left to it, then by agmm's kernel."""
    plan = None
    if not all(is_left_to_torch(rows.values, weight) for weight in weights):
        plan = matmuls(rows, weights, epilogue)
    if plan is None:
        found = [scaled_product_on_gpu(rows, weight, offsets) for weight in weights]
        return found if epilogue is None else epilogue.composed(found)
    calls, is_composed = plan
    scales = grouped_kernel.scales_of_rows(rows.scale)
    found = [grouped_kernel.launch(call, rows.values, offsets, scales=scales) for call in calls]
    return epilogue.composed(found) if epilogue is not None and is_composed else found


def scaled_product_on_gpu(
    rows: Scaled, weight: ScaledWeight, offsets: torch.Tensor
) -> torch.Tensor:
    """The products of each expert's rows with its matrix, with its bias; zeros behind the last
    expert's rows."""
    m, n = len(rows.values), weight.values.shape[2]
    if m * n * rows.values.shape[1] == 0:
        total = rows.scale.new_zeros(m, n)
    else:
        if not is_left_to_torch(rows.values, weight):
            call = described(rows, [weight], None)
            if call is not None:
                scales = grouped_kernel.scales_of_rows(rows.scale)
                return grouped_kernel.launch(call, rows.values, offsets, scales=scales)
        why = why_not_by_torch(rows.values, weight)
        if why is None:
            total = _by_torch(rows, weight, offsets)
        else:
            fall_back(
                f"torch._scaled_grouped_mm: {why}; the products of experts are made in bfloat16",
                strict=False,
            )
            total = _in_bfloat16(rows, weight, offsets)
    experts = experts_of_rows(m, offsets)
    if weight.bias is not None:
        total = total + weight.bias[experts]
    there = torch.arange(m, device=total.device) < offsets[-1]
    return torch.where(there[:, None], total, 0).to(weight.out_dtype)


def _by_torch(rows: Scaled, weight: ScaledWeight, offsets: torch.Tensor) -> torch.Tensor:
    return torch._scaled_grouped_mm(
        rows.values,
        weight.values,
        rows.scale.flatten().contiguous(),
        weight.scale[:, 0].contiguous(),
        offs=offsets[1:].to(torch.int32).contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=weight.fast_accum,
    )


def _in_bfloat16(rows: Scaled, weight: ScaledWeight, offsets: torch.Tensor) -> torch.Tensor:
    """The products without the biases. bfloat16 holds every number of fp8: with scales of rows and
    columns they are multiplied as they are, and their products scaled. Scales of blocks are
    multiplied with before, which rounds each operand once."""
    wide = torch.bfloat16
    if weight.scaling.name == "rowwise":
        found = product_on_gpu(rows.values.to(wide), weight.values.to(wide), None, offsets)
        of_columns = weight.scale[:, 0][experts_of_rows(len(found), offsets)]
        return found * rows.scale * of_columns
    A, B = rows.values, Scaled(weight.values, weight.scale, weight.scaling.b)
    a = rows.dequantised(torch.empty_like(A, dtype=wide))
    b = B.dequantised(torch.empty_like(B.values, dtype=wide))
    return product_on_gpu(a, b, None, offsets)
