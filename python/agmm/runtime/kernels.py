"""The kernels of this build, by what they are for. Knows no torch, so that plans may use it."""

from __future__ import annotations

from agmm import _core


def built(
    op: str, dtype: str = "", accumulation: str = "fast", *, timed: bool = False
) -> tuple[_core.KernelConfig, ...]:
    """Each shape of kernel once, in the order of the build.

    Args:
        op: what the kernels are for, as `_core.KernelFacts.op` names it.
        dtype: the name of a `_core.DType`; empty for all of 16 bits.
        accumulation: the name of a `_core.Accumulation`.
        timed: whether the kernels record when each tile waited and ran, which none does that a call
            may have.
    """
    found = {
        facts.kernel: facts.config
        for facts in _core.kernel_facts()
        if (facts.op, facts.accumulation.name, facts.timed) == (op, accumulation, timed)
        and (facts.dtype.name == dtype if dtype else not facts.is_fp8)
    }
    return tuple(found.values())
