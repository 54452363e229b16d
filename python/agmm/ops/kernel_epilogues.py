"""Whether a kernel on CUDA computes the epilogue of a call, and why not. Nothing here asks for a
plan, so that calls that name their kernel agree on no tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmm.planning import built_kernels
from agmm.planning.problems import ALL_GATHER_MATMUL, MAX_SIZE, KernelConfig
from agmm.runtime.cuda_calls import b_layout
from agmm.runtime.epilogues import Epilogue


def not_built(epilogue: Epilogue) -> str:
    """What is said of an epilogue that no kernel of the build has."""
    return f"activation: found {epilogue.activation!r}, wanted one that a kernel of this build has"


def not_of_fp8(epilogue: Epilogue) -> str:
    """What is said of an epilogue of fp8 operands, for which there is no kernel."""
    name = epilogue.activation
    return f"activation: found {name!r} of fp8 operands, wanted operands of 16 bits in a kernel"


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
        most = MAX_SIZE // len(Bs)
        if Bs[0].shape[1] > most:
            return f"B: found N={Bs[0].shape[1]}, wanted at most {most} in a kernel with {name!r}"
    form = str(Bs[0].dtype).removeprefix("torch.")
    for layout in layouts:
        kernels = built_kernels.kernels_of(ALL_GATHER_MATMUL, form, epilogue.kernel, layout)
        names = [kernel.kernel for kernel in kernels]
        if not names:
            return not_built(epilogue)
        if config is not None and config.kernel not in names:
            return (
                f"config: found {config.kernel} with activation {name!r}, wanted one of "
                f"{', '.join(names)}"
            )
    return None


def _layout(B: torch.Tensor) -> str:
    found = b_layout(B)
    is_column = B.stride(0) == 1 if found is None else found.column_major
    return "column" if is_column else "row"
