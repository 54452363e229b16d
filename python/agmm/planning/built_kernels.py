"""The kernels of this build, by op and format. This module needs no GPU and no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache

from agmm import _core
from agmm.planning import formats
from agmm.planning.problems import MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER, KernelConfig
from agmm.runtime import kernels


@cache
def kernels_of(
    op: str, name: str, epilogue: str = kernels.PLAIN, b_layout: str = ""
) -> tuple[KernelConfig, ...]:
    """The kernels of this build to choose from, in any order and raster, by op and name of a
    format. The kernels of a matmul + all-reduce send finished tiles too; its plan that scatters has
    a kernel of a matmul + reduce-scatter. Few kernels have another epilogue, and not all of them
    for both layouts of B."""
    of = formats.of(name)
    if of.kind == formats.BITS_16:
        dtype = "" if epilogue == kernels.PLAIN else of.operands
        found = kernels.built(op, dtype, epilogue=epilogue, b_layout=b_layout)
    elif of.kind == formats.FP8:
        found = kernels.built(op, of.operands, of.accumulation, epilogue=epilogue)
    else:
        return ()
    return tuple(map(KernelConfig.of, found))


@cache
def build() -> str:
    """What tells this build from others whose plans may be other ones: agmm's version, the number
    of its kernels, and a digest of them."""
    facts = sorted(
        f"{each.op} {each.kernel} {each.dtype} {each.accumulation} {each.epilogue} {each.b_layout}"
        for each in _core.kernel_facts()
    )
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    return f"{_core.__version__}/{len(facts)}/{digest}"


@cache
def has_fp8() -> bool:
    """Whether this build has any kernels for fp8 operands."""
    return any(facts.is_fp8 for facts in _core.kernel_facts())


def format_served(
    op: str,
    operands: str,
    accumulation: str,
    *,
    among: Callable[..., Sequence[KernelConfig]] | None = None,
    epilogue: str = kernels.PLAIN,
) -> str:
    """The name of the format by whose kernels fp8 operands are served. Where no kernel accumulates
    fast, slow ones serve, which are only more exact.

    Args:
        op: what `Problem.op` says. A matmul + all-reduce has the kernels of its scatter.
        operands: the name of a `_core.DType`.
        accumulation: the name of the `_core.Accumulation` that the scales want.
        among: other kernels than `kernels_of`, by op, format and epilogue.
        epilogue: that of the kernels.
    """
    among = among or kernels_of
    op = MATMUL_REDUCE_SCATTER if op == MATMUL_ALL_REDUCE else op
    name = formats.fp8_name(operands, accumulation)
    if accumulation == _core.Accumulation.fast.name and not among(op, name, epilogue):
        return formats.fp8_name(operands, _core.Accumulation.slow.name)
    return name
