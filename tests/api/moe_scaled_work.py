"""Mixtures of experts on fp8 rows, on the ranks of a group, against an unfused model in float64 of
the dequantised operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from moe_work import (
    Case,
    Operands,
    absolute,
    differs,
    exact,
    exact_sums,
    magnitudes,
    moe,
    placed,
    routing_of,
    whole_of,
)
from rank_work import group_of

BLOCK = 128
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class Kind(NamedTuple):
    """How operands are quantised, and what is asked of the products."""

    scales: str = "rowwise"
    rows: torch.dtype = torch.float8_e4m3fn
    weights: torch.dtype = torch.float8_e4m3fn
    out: torch.dtype = torch.bfloat16
    fast_accum: bool = False


class Fp8(NamedTuple):
    """An operand and its scales."""

    values: torch.Tensor
    scale: torch.Tensor
    exact: torch.Tensor
    """What they stand for, in float64."""


def _tiled(x: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype) -> Fp8:
    """x [..., rows, columns] with a scale for each tile; 0 in it stands for all that there are."""
    of_matrix = list(zip(tile, x.shape[-2:], strict=True))
    sizes = [t or max(1, n) for t, n in of_matrix]
    cells = [-(-n // t) if t else 1 for t, n in of_matrix]
    scale = x.new_ones(*x.shape[:-2], *cells, dtype=torch.float32)
    values, wide = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=torch.float64)
    for i in range(cells[0]):
        for j in range(cells[1]):
            rows = slice(i * sizes[0], (i + 1) * sizes[0])
            at = (..., rows, slice(j * sizes[1], (j + 1) * sizes[1]))
            if x[at].numel() == 0:
                continue
            found = x[at].abs().amax((-2, -1), keepdim=True).float().clamp(min=1e-6)
            found = found / LARGEST[dtype]
            scale[..., i : i + 1, j : j + 1] = found
            values[at] = (x[at].float() / found).to(dtype)
            wide[at] = values[at].double() * found.double()
    return Fp8(values, scale, wide)


def quantised(x: torch.Tensor, kind: Kind) -> Fp8:
    """Rows."""
    return _tiled(x, (1, 0) if kind.scales == "rowwise" else (1, BLOCK), kind.rows)


def quantised_weight(x: torch.Tensor, kind: Kind) -> Fp8:
    """A weight [experts, K, N]."""
    return _tiled(x, (0, 1) if kind.scales == "rowwise" else (BLOCK, BLOCK), kind.weights)


class Rank(NamedTuple):
    """The operands of one rank in fp8, and those of the model."""

    x: Fp8
    up: list[Fp8]
    y: Fp8
    """Rows of the second half, which are not what the first one makes."""
    down: Fp8
    model: Operands


def ranks_of(case: Case, kind: Kind) -> list[Rank]:
    found = []
    generator = torch.Generator().manual_seed(case.seed + 1)
    for rank, given in enumerate(whole_of(case._replace(dtype=torch.float32))):
        x, down = quantised(given.x, kind), quantised_weight(given.down, kind)
        up = [quantised_weight(one, kind) for one in given.up]
        y = torch.randn(len(routing_of(case, rank)), case.inner, generator=generator)
        model = given._replace(x=x.exact, up=[one.exact for one in up], down=down.exact)
        biases = [None if bias is None else bias.bfloat16() for bias in given.up_bias]
        last = given.down_bias
        model = model._replace(up_bias=biases, down_bias=None if last is None else last.bfloat16())
        found.append(Rank(x, up, quantised(y, kind), down, model))
    return found


def _padded(y: Fp8, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """y and its scales with NaN behind them, which is not read."""
    found = []
    for part in (y.values, y.scale):
        whole = torch.full((rows, part.shape[1]), torch.nan)
        whole[: len(part)] = part.float()
        found.append(whole.to(part.dtype))
    return found[0], found[1]


def faults(
    world_size: int,
    cases: list[tuple[Case, Kind]],
    group: dist.ProcessGroup | None = None,
    *,
    strict: bool = True,
    device: str = "cpu",
) -> list[str] | None:
    """Faults, in words, of calls of both halves."""
    group = group or group_of(world_size)
    if group is None:
        return None
    rank, said = group.rank(), []
    for case, kind in cases:
        ranks = ranks_of(case, kind)
        models, ys = [one.model for one in ranks], [one.y.exact for one in ranks]
        first, _ = exact(case, models)
        whole = exact_sums(case, models, ys)
        positive = [absolute(one) for one in models]
        largest, _ = exact(magnitudes(case), positive)
        largest_out = exact_sums(case, positive, [y.abs() for y in ys])
        given = placed(ranks[rank], device)
        settings: dict[str, Any] = {"out_dtype": kind.out, "use_fast_accum": kind.fast_accum}
        settings["strict"] = strict

        def call(case: Case = case, given: Rank = given, settings: Any = settings) -> Any:
            even = len(set(case.tokens)) == 1
            y, routing = moe.all_gather_grouped_matmul(
                given.x.values,
                [one.values for one in given.up],
                given.model.ids,
                group,
                num_experts=case.all_experts if case.sliced else None,
                tokens_per_rank=None if even else list(case.tokens),
                bias=given.model.up_bias,
                activation=case.activation,
                scale_a=given.x.scale,
                scale_b=[one.scale for one in given.up],
                **settings,
            )
            rows, scale = _padded(placed(given.y, "cpu"), len(routing.tokens))
            out = moe.grouped_matmul_reduce_scatter(
                *(rows.to(device), given.down.values, routing, given.model.topk, group),
                bias=given.model.down_bias,
                scale_a=scale.to(device),
                scale_b=given.down.scale,
                **settings,
            )
            return placed([*(y if isinstance(y, list) else [y]), out], "cpu")

        *found, out = call()
        tokens, rows = list(case.tokens), len(routing_of(case, rank))
        fault = {"out": differs(out, whole.split(tokens)[rank], largest_out.split(tokens)[rank])}
        for i, (y, wanted) in enumerate(zip(found, first[rank], strict=True)):
            fault[f"y{i}"] = differs(y[:rows], wanted, largest[rank][i])
            if y[rows:].any():
                fault["behind"] = "found numbers behind the last row, wanted zeros"
        if {one.dtype for one in (*found, out)} != {kind.out}:
            fault["dtype"] = f"found other dtypes than {kind.out}"
        if not all(map(torch.equal, [*found, out], call())):
            fault["again"] = "found other bits in the second call"
        said += [f"{case} {kind} rank {rank}: {n}: {words}" for n, words in fault.items() if words]
    return said


def quantised_faults(world_size: int, cases: list[tuple[Case, str]]) -> list[str] | None:
    """Faults of calls that quantise their operands: results that are far from those of operands as
    they are, and gradients that are not theirs. Activations are None."""
    group = group_of(world_size)
    if group is None:
        return None
    rank, said = group.rank(), []
    for case, kind in cases:
        found: list[list[torch.Tensor]] = []
        for quantize in (None, kind):
            given = whole_of(case)[rank]
            leaves = [one.requires_grad_() for one in given.leaves().values()]
            generator = torch.Generator().manual_seed(rank)
            ys, routing = moe.all_gather_grouped_matmul(
                *(given.x, given.up, given.ids, group), bias=given.up_bias, quantize=quantize
            )
            y = torch.randn(ys[0].shape, generator=generator).requires_grad_()
            out = moe.grouped_matmul_reduce_scatter(
                *(y, given.down, routing, given.topk, group),
                bias=given.down_bias,
                quantize=quantize,
            )
            loss = sum((y * torch.randn(y.shape, generator=generator)).sum() for y in (*ys, out))
            grads = torch.autograd.grad(loss, [y, *leaves])
            found.append([out, *ys, *grads])
        count = 1 + len(found[0]) - len(leaves) - 2
        for i, (exact_one, one) in enumerate(zip(*found, strict=True)):
            error = (one - exact_one).norm() / exact_one.norm().clamp(min=1e-9)
            if i < count and not 1e-4 < error < 0.1:
                said.append(f"{case} {kind}: result {i}: found an error of {error:.3g}")
            if i >= count and not torch.equal(one, exact_one):
                said.append(f"{case} {kind}: gradient {i - count}: found other bits")
    return said
