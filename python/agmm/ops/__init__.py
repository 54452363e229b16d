"""The public functions, their torch ops and autograd. Importing it registers the ops."""

from agmm.ops import (
    all_gather_matmul,
    all_gather_scaled_matmul,
    async_input_mm,
    async_input_scaled_mm,
    flops,
    grouped_matmuls,
    invariant_matmul,
    matmul_all_reduce,
    matmul_all_reduce_rms_norm,
    matmul_reduce_scatter,
    scaled_matmul_all_reduce,
    scaled_matmul_reduce_scatter,
)

flops.register()

__all__ = [
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "async_input_mm",
    "async_input_scaled_mm",
    "flops",
    "grouped_matmuls",
    "invariant_matmul",
    "matmul_all_reduce",
    "matmul_all_reduce_rms_norm",
    "matmul_reduce_scatter",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]
