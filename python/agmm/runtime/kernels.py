"""The kernels of this build, by what they are for. Knows no torch, so that plans may use it."""

from __future__ import annotations

from agmm import _core

PLAIN = "bias"
"""The epilogue of most kernels, which adds a bias or none, as `_core.KernelFacts.epilogue` names
it."""


def built(
    op: str,
    dtype: str = "",
    accumulation: str = "fast",
    *,
    timed: bool = False,
    epilogue: str = PLAIN,
    b_layout: str = "",
) -> tuple[_core.KernelConfig, ...]:
    """Each shape of kernel once, in the order of the build.

    Args:
        op: what the kernels are for, as `_core.KernelFacts.op` names it.
        dtype: the name of a `_core.DType`; empty for all of 16 bits.
        accumulation: the name of a `_core.Accumulation`.
        timed: whether the kernels record when each tile waited and ran, which none does that a call
            may have.
        epilogue: as `_core.KernelFacts.epilogue` names it.
        b_layout: a layout of B that they are for; empty for any.
    """
    found = {
        facts.kernel: facts.config
        for facts in _core.kernel_facts()
        if (facts.op, facts.accumulation.name, facts.timed) == (op, accumulation, timed)
        and facts.epilogue == epilogue
        and b_layout in ("", facts.b_layout)
        and (facts.dtype.name == dtype if dtype else not facts.is_fp8)
    }
    return tuple(found.values())
