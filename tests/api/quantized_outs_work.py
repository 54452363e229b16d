"""Results in fp8 of ranks, which the next op multiplies."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import agmm
from agmm.ops.quantize import quantised
from agmm.runtime.scaling import ALL, BY_NAME, Tile
from agmm.testing.reference import relative_error

ROWS, K, N, OUT = 3, 48, 144, 64
"""The sizes of a shard [2, ROWS, K], of gate and up [K, N], and of down [N, OUT]. N is more than a
scale block and no multiple of one."""


def gate_and_down(kind: str, device: str = "cpu") -> list[str]:
    """Faults of gate and up with results in fp8, of 16 bits and of fp8, then down; and of gate
    alone."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    shard, gate, up, down = drawn(2, ROWS, K), drawn(N, K).t(), drawn(N, K).t(), drawn(OUT, N).t()
    by_kind = BY_NAME[kind]
    values_b, scale_b = quantised(down, by_kind.b)
    gather: Any = agmm.all_gather_matmul
    scaled: Any = agmm.all_gather_scaled_matmul
    rows, of_rows = quantised(shard.flatten(0, -2), (1, ALL))
    weights = [quantised(B, (ALL, 1)) for B in (gate, up)]
    fp8 = rows.view(shard.shape), [B for B, _ in weights]
    scales = of_rows.view(2, ROWS, 1), [scale for _, scale in weights]
    bias = drawn(N)
    faults = []
    of_both: dict[str, Any] = {"activation": "silu_mul", "bias": [bias, None]}
    of_one: dict[str, Any] = {"activation": "gelu", "bias": bias}
    given: dict[str, Any] = {"quantize_out": kind}
    if kind == "tensorwise":
        given["scale_out"] = torch.tensor(4.0, device=device)
    (values_a, (of_gate, _)), (scale_a, (scale_of_gate, _)) = fp8, scales
    for name, op, operands, settings in (
        ("16 bits", gather, (shard, [gate, up]), of_both),
        ("fp8", scaled, (*fp8, *scales), of_both),
        ("16 bits, one weight", gather, (shard, gate), of_one),
        ("fp8, one weight", scaled, (values_a, of_gate, scale_a, scale_of_gate), of_one),
    ):
        out = op(*operands, **settings)
        values, scale = op(*operands, **settings, **given)
        wanted, wanted_scale = _wanted(out, by_kind.a, given.get("scale_out"))
        if values.dtype != torch.float8_e4m3fn or values.shape != out.shape:
            faults.append(f"{name}: {values.dtype} {tuple(values.shape)}")
        elif not torch.equal(values.float().flatten(0, -2), wanted.float()):
            faults.append(f"{name}: values")
        if not torch.equal(scale.flatten(), wanted_scale.flatten()):
            faults.append(f"{name}: scales")
        found = agmm.scaled_matmul_reduce_scatter(values, values_b, scale, scale_b)
        exact = agmm.matmul_reduce_scatter(out.float(), down.float())
        if not relative_error(found, exact) < 0.08:  # e4m3 has three bits of a fraction
            faults.append(f"{name}: {relative_error(found, exact):.3g} behind down")
    pairs = gather(shard, [gate, up], **given)
    if len(pairs) != 2 or not torch.equal(
        pairs[1][0].float(), gather(shard, up, **given)[0].float()
    ):
        faults.append("two results")
    return faults


def _wanted(
    out: torch.Tensor, tile: Tile, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is None:
        return quantised(out.flatten(0, -2), tile)
    scaled = (out.float() / scale).clamp(-448, 448)
    return scaled.to(torch.float8_e4m3fn).flatten(0, -2), scale
