"""Gated results in fp8 that the kernel itself quantises: calls of `agmm.all_gather_matmul` and
`agmm.all_gather_scaled_matmul` on CUDA with ``quantize_out``. All others are quantised behind the
product (`quantized_outs`), with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.ops import kept
from agmm.ops.checks import config_name
from agmm.ops.fp8_gather import Fp8Gather
from agmm.ops.fp8_operands import Fp8Weights
from agmm.ops.gather import GatherCall, Gathered, GatherSettings
from agmm.ops.pipeline import KERNEL, Ready, Route, serve
from agmm.ops.plain_gather import PlainGather
from agmm.ops.quantized_outs import quantised_outs
from agmm.runtime import groups
from agmm.runtime.epilogues import GATED, Epilogue

IN_KERNEL = ("block", "tensorwise")
"""The kinds of scales that a kernel can give a result: those that a tile knows. The largest value
of a row is known when all its tiles are, so row-wise results are quantised behind the product."""


class Asked(NamedTuple):
    """What a caller says of a gated result."""

    activation: str | None
    quantize_out: str | None
    scale_out: torch.Tensor | None
    config: Any
    strict: bool
    group: Any
    gather_dim: int
    fast_accum: bool = False


class _Quantising(GatherCall):
    """A call whose kernel quantises; on another route its result is not quantised yet."""

    scale_out: torch.Tensor | None

    def operands(self) -> tuple[Any, ...]:
        given = super().operands()  # type: ignore[safe-super]
        return (*(*given, None, ())[:5], self.scale_out)

    def prepare(self, route: Route) -> Ready:
        ready = super().prepare(route)
        if route.by == KERNEL:
            return ready
        return _Other(ready, len(super().operands()))  # type: ignore[safe-super]

    def finished(self, found: Any, route: Route) -> Gathered:
        A, scale, outs = found
        given = A, scale, outs[:1]
        done: Gathered = super().finished(given, route)  # type: ignore[safe-super]
        return Gathered(None, None, [*done.outs, *outs[1:]])


class _Other(NamedTuple):
    """Carries out a route that knows nothing of the scales of a result."""

    ready: Ready
    operands: int

    def __call__(self, *operands: Any) -> Any:
        return self.ready(*operands[: self.operands])


class QuantisingGather(_Quantising, PlainGather):
    """A gated product of operands without scales, whose kernel quantises."""


class QuantisingFp8Gather(_Quantising, Fp8Gather):
    """A gated product of fp8 operands, whose kernel quantises."""


def _by_kernel(asked: Asked, given: tuple[Any, ...], call_of: Callable[..., Any]) -> Any:
    """The result and its scales; None where the kernel does not quantise it. Collective.

    Args:
        given: the operands, as a kept call takes them.
        call_of: what makes the call, of a group and settings.
    """
    kind_of_out, config = str(asked.quantize_out), config_name(asked.config)
    settings = "quantized_gate", asked.activation, kind_of_out, config, asked.fast_accum
    kind = kept.kind_on_gpu(settings, asked.strict, *given, asked.scale_out)
    if kind is None:
        return None
    group = groups.resolved(asked.group)
    found = kept.call_kept(group, kind, *(*given, None, ())[:5], asked.scale_out)
    if found is None:
        epilogue = Epilogue(str(asked.activation), quantize_out=kind_of_out)
        of_gather = GatherSettings(config=config, strict=asked.strict, epilogue=epilogue)
        call = call_of(group, of_gather)
        call.scale_out = asked.scale_out
        call.check()
        if call.why_not_fused() is not None or call.why_behind is not None:
            return None
        found = serve(call, kind)
    outs = found[2]
    if len(outs) == 2:
        return outs[0], outs[1]
    return quantised_outs(outs[0], kind_of_out, asked.scale_out)


def is_for_kernel(asked: Asked, A_shard: Any, Bs: Any) -> bool:
    """Whether a kernel may quantise the result, as far as the arguments say."""
    is_gated = asked.activation in GATED and asked.quantize_out in IN_KERNEL
    is_pair = isinstance(Bs, (list, tuple)) and len(Bs) == 2 and asked.gather_dim == 0
    return is_gated and is_pair and getattr(A_shard, "is_cuda", False) is True


def gather(asked: Asked, A_shard: Any, Bs: Any, bias: Any) -> Any:
    """Return what `agmm.all_gather_matmul` does with a quantised result, or None where no kernel
    quantises it. Collective."""
    if not is_for_kernel(asked, A_shard, Bs):
        return None
    given = A_shard, list(Bs), list(bias) if isinstance(bias, (list, tuple)) else [None, None]

    def call_of(group: dist.ProcessGroup, settings: GatherSettings) -> GatherCall:
        return QuantisingGather(*given, group, settings)

    return _by_kernel(asked, given, call_of)


def scaled_gather(asked: Asked, operands: tuple[Any, ...], bias: Any) -> Any:
    """Return what `agmm.all_gather_scaled_matmul` does with a quantised bfloat16 result, or None
    where no kernel quantises it. Collective.

    Args:
        operands: A_shard, B, scale_a and scale_b.
    """
    A_shard, Bs, scale_a, scale_bs = operands
    if not is_for_kernel(asked, A_shard, Bs) or not isinstance(scale_bs, (list, tuple)):
        return None
    biases = list(bias) if isinstance(bias, (list, tuple)) else [None, None]
    given = A_shard, list(Bs), biases, scale_a, list(scale_bs)
    more: Any = [torch.bfloat16] * 2, [asked.fast_accum] * 2
    weights = Fp8Weights(given[1], given[4], biases, [None, None], *more)

    def call_of(group: dist.ProcessGroup, settings: GatherSettings) -> GatherCall:
        return QuantisingFp8Gather(A_shard, scale_a, weights, group, settings)

    return _by_kernel(asked, given, call_of)
