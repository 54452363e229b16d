"""Whether a kernel on CUDA computes the epilogue of a call, and why not. Nothing here asks for a
plan, so that calls that name their kernel agree on no tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from agmm import _core
from agmm.planning import built_kernels
from agmm.planning.problems import ALL_GATHER_MATMUL, MAX_SIZE, KernelConfig
from agmm.runtime import cuda_scaled
from agmm.runtime.cuda_calls import b_layout
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.scaled import Scaled, Weight


def not_built(epilogue: Epilogue) -> str:
    """What is said of an epilogue that no kernel of the build has."""
    return f"activation: found {epilogue.activation!r}, wanted one that a kernel of this build has"


def why_scaled_behind(
    epilogue: Epilogue, A: Scaled, weights: Sequence[Weight], config: KernelConfig | None = None
) -> str | None:
    """The reason why torch's ops have to compute an epilogue of fp8 operands, behind the kernel, or
    None. The same on all ranks that call with the same dtypes, layouts and kinds of scales.

    Args:
        weights: with the dtype of the result and its scale.
        config: the kernel that the call names.
    """
    name = epilogue.activation
    for weight in weights:
        reason = cuda_scaled.why_illegal(A, weight)
        if reason is not None:
            return f"{reason} in a kernel with activation {name!r}"
    first = weights[0]
    for weight in weights[1:]:
        kinds = [(one.B.values.dtype, one.B.tile) for one in (first, weight)]
        if kinds[0] != kinds[1]:
            return (
                f"scale_b: found {kinds[0]} of gate and {kinds[1]} of up, wanted one dtype and "
                f"kind of scales in a kernel with {name!r}"
            )
        reason = _too_wide(epilogue, [one.B.values for one in weights])
        if reason is not None:
            return reason
    accumulation = cuda_scaled.accumulation_of(A, first)
    assert accumulation is not None  # else it is illegal
    dtype = cuda_scaled.dtype_name(A.values.dtype, first.B.values.dtype)
    form = built_kernels.format_served(
        ALL_GATHER_MATMUL, dtype, accumulation.name, epilogue=epilogue.kernel
    )
    return _why_not_built(epilogue, form, "column", config)


def _too_wide(epilogue: Epilogue, Bs: Sequence[torch.Tensor]) -> str | None:
    """Why the columns of the weights of a gate are too many to be counted together, or as many as
    no row of fp8 can have, or None."""
    most, n = MAX_SIZE // len(Bs), Bs[0].shape[1]
    if epilogue.quantize_out and n % _core.FP8_ALIGNMENT:
        return f"B: found N={n}, wanted a multiple of {_core.FP8_ALIGNMENT} with quantize_out"
    if n <= most:
        return None
    return f"B: found N={n}, wanted at most {most} in a kernel with {epilogue.activation!r}"


def _why_not_built(
    epilogue: Epilogue, form: str, layout: str, config: KernelConfig | None
) -> str | None:
    """Why no kernel of the build has the epilogue, or the named one has not, or None."""
    kernels = built_kernels.kernels_of(ALL_GATHER_MATMUL, form, epilogue.kernel, layout)
    names = [kernel.kernel for kernel in kernels]
    if not names:
        return not_built(epilogue)
    if config is not None and config.kernel not in names:
        return (
            f"config: found {config.kernel} with activation {epilogue.activation!r}, wanted one of "
            f"{', '.join(names)}"
        )
    return None


def why_behind(
    epilogue: Epilogue, Bs: Sequence[torch.Tensor], config: KernelConfig | None = None
) -> str | None:
    """The reason why torch's ops have to compute an epilogue of operands without scales, behind the
    kernel, or None. The same on all ranks that call with the same dtypes and layouts.

    Args:
        Bs: the weights.
        config: the kernel that the call names.
    """
    name = epilogue.activation
    if epilogue.saves_products:
        return (
            f"save_preactivation: found True with activation {name!r}, wanted False: a kernel that "
            "computes an activation keeps no products"
        )
    layouts = dict.fromkeys(_layout(B) for B in Bs)
    if epilogue.is_gated:
        if len(layouts) > 1:
            return f"B: found gate and up in two layouts, wanted one in a kernel with {name!r}"
        reason = _too_wide(epilogue, Bs)
        if reason is not None:
            return reason
    form = str(Bs[0].dtype).removeprefix("torch.")
    reasons = (_why_not_built(epilogue, form, layout, config) for layout in layouts)
    return next((reason for reason in reasons if reason is not None), None)


def _layout(B: torch.Tensor) -> str:
    found = b_layout(B)
    is_column = B.stride(0) == 1 if found is None else found.column_major
    return "column" if is_column else "row"


class Composed(NamedTuple):
    """Computes calls of an all-gather + matmul by agmm's kernels, and the activation behind them by
    torch's ops."""

    call: Any
    behind: Any

    def __call__(self, *operands: Any) -> tuple[Any, Any, Any]:
        """Return the gathered A and its scales, which may be None, and the results."""
        A, scale, products = self.call(*operands)
        return A, scale, self.behind(products)
