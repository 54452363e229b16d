"""The ways to compute a mixture of experts on fp8 operands with scales. They have the names of the
ways in 16 bits.

Tokens and weights are in fp8 before a call. What gate and up make of the tokens is bfloat16, and
every way quantises it by the same kernel before it is multiplied again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

import agmm
from agmm.bench.moe_presets import check_kind
from agmm.bench.moe_ways import Experts, Kind, MoEWorkload, make_problem, ways_of_kind
from agmm.errors import InvalidArgument
from agmm.ops.grouped_quantize import weight_in_fp8
from agmm.ops.grouped_scaled_products import ScaledWeight, products
from agmm.ops.quantize import quantised
from agmm.planning.shapes import MoEShape
from agmm.runtime.scaled import Scaled
from agmm.runtime.scaling import BY_NAME, K_MULTIPLE, Scaling
from agmm.testing.cases import Operands

DTYPE = torch.float8_e4m3fn
OUT_DTYPE = torch.bfloat16
"""The dtype of products and results, and of operands before they are quantised."""


class ScaledExperts(NamedTuple):
    """The operands that stand in fp8 for those of `Experts`."""

    shard: Scaled
    """This rank's tokens."""
    tokens: Scaled
    """All ranks' tokens."""
    gate: ScaledWeight
    up: ScaledWeight
    down: ScaledWeight


def check(dtype: torch.dtype, scaling: str | None, shapes: list[MoEShape]) -> None:
    """Raises InvalidArgument for fp8 operands that experts do not take."""
    if dtype is not DTYPE:
        raise InvalidArgument(f"dtype: found {dtype} with moe, wanted {DTYPE} of those in fp8")
    check_kind(scaling)
    for shape in shapes:
        if shape.hidden % K_MULTIPLE or shape.inner % K_MULTIPLE:
            raise InvalidArgument(
                f"shape: found {shape} with {dtype}, wanted hidden and inner features that are "
                f"multiples of {K_MULTIPLE}"
            )


def make_scaled_problem(
    shape: MoEShape, group: dist.ProcessGroup, device: torch.device, scaling: str, seed: int
) -> MoEWorkload:
    """The operands of this rank. Collective."""
    made, kind = make_problem(shape, group, device, OUT_DTYPE, seed), BY_NAME[scaling]
    given: Experts = made.experts
    given_rows = made.operands.A, made.operands.A_shard
    A, shard = (Scaled(*quantised(one, kind.a), kind.a) for one in given_rows)
    gate, up, down = (_weight(one, kind) for one in (given.gate, given.up, given.down))
    scales = ScaledExperts(shard, A, gate, up, down)
    operands = Operands(A_shard=shard.values, A=A.values, B=gate.values[0])
    none = torch.empty(0, device=device)
    experts = given._replace(gate=none, up=none, down=none)
    return replace(made, operands=operands, scales=scales, scaling=scaling, experts=experts)


def _weight(weight: torch.Tensor, kind: Scaling) -> ScaledWeight:
    values, scale = weight_in_fp8(weight, kind)
    return ScaledWeight(values, scale, None, kind, OUT_DTYPE, True)


def _bytes_and_scales(tokens: Scaled) -> list[torch.Tensor]:
    """What travels of fp8 rows: collectives and indexing take their bytes."""
    return [tokens.values.view(torch.uint8), tokens.scale]


def _product(rows: Scaled, weight: ScaledWeight, offsets: torch.Tensor) -> torch.Tensor:
    """torch's grouped matmul on GPUs for scales of rows, else what agmm multiplies rows with that
    are there."""
    if rows.values.is_cuda and weight.scaling.name == "rowwise":
        return torch._scaled_grouped_mm(
            *(rows.values, weight.values, rows.scale.flatten(), weight.scale[:, 0].contiguous()),
            offs=offsets[1:],
            out_dtype=OUT_DTYPE,
            use_fast_accum=True,
        )
    return products(rows, [weight], offsets, None)[0]


def _multiplied(p: MoEWorkload, rows: list[torch.Tensor], ends: torch.Tensor) -> torch.Tensor:
    scales: ScaledExperts = p.scales
    tile, offsets = scales.tokens.tile, functional.pad(ends, (1, 0))
    tokens = Scaled(rows[0].view(DTYPE), rows[1], tile)
    gate, up = (_product(tokens, weight, offsets) for weight in (scales.gate, scales.up))
    hidden = functional.silu(gate).mul_(up)
    return _product(Scaled(*quantised(hidden, tile), tile), scales.down, offsets)


def _fused(p: MoEWorkload, ids: Any, settings: dict[str, Any]) -> torch.Tensor:
    x, _, gate, up, down = p.scales
    y, routing = agmm.all_gather_grouped_matmul(
        x.values,
        [gate.values, up.values],
        ids,
        p.group,
        activation="silu_mul",
        scale_a=x.scale,
        scale_b=[gate.scale, up.scale],
        use_fast_accum=True,
        **settings,
    )
    values, scale = quantised(y, x.tile)
    return agmm.grouped_matmul_reduce_scatter(
        *(values, down.values, routing, p.experts.topk_weights, p.group),
        scale_a=scale,
        scale_b=down.scale,
        use_fast_accum=True,
    )


def _of_expert(
    p: MoEWorkload, expert: int, sources: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scales, wide = p.scales, torch.float64
    values, scale = (one[sources] for one in _bytes_and_scales(scales.tokens))
    tile = scales.tokens.tile
    rows = Scaled(values.view(DTYPE), scale, tile).dequantised().to(wide)
    gate, up, down = (
        one.of_expert(expert).B.dequantised().to(wide)
        for one in (scales.gate, scales.up, scales.down)
    )
    gate, up = rows @ gate, rows @ up
    hidden = functional.silu(gate.to(OUT_DTYPE)).mul_(up.to(OUT_DTYPE))
    again = Scaled(*quantised(hidden, tile), tile).dequantised().to(wide)
    return (functional.silu(gate) * up) @ down, (again @ down).to(OUT_DTYPE)


SCALED = Kind(
    lambda p: _bytes_and_scales(p.scales.shard),
    lambda p: _bytes_and_scales(p.scales.tokens),
    _multiplied,
    _fused,
    _of_expert,
)
"""Operands in fp8."""
SCALED_MOE_WAYS = ways_of_kind(SCALED)
"""The ways of `MOE` on fp8 operands by name."""
