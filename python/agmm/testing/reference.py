"""The reference that tests, tuner and benchmarks check against, and the error that they allow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

ERROR_FACTOR = 1.1
"""A result may have this many times the error of torch.mm on the same data."""

_ROUNDING_FLOOR = 1e-6  # a product that torch.mm has exactly may be rounded in float32


def gathered_product(
    A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`A @ B (+ bias)` in float64, free of TF32 and of any reduced-precision setting.

    A is the gathered `[..., K]`, B `[K, N]`, bias `[N]`, all on one device; returns `[..., N]`.
    """
    out = torch.matmul(A.to(torch.float64), B.to(torch.float64))
    return out if bias is None else out.add_(bias.to(torch.float64))


class ScatteredSum(NamedTuple):
    """What a rank should get of a matmul + reduce-scatter, in float64, and the relative error of
    its computation in the operands' own dtype: a `torch.mm` of each rank, added one by one."""

    rows: torch.Tensor
    error: float


def scattered_sum(
    operands_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    rank: int,
    world_size: int,
    *,
    parts: int | None = None,
) -> ScatteredSum:
    """The reference of `reduce_scatter(A @ B)`, without communication.

    `operands_of` takes a rank and returns its A `[M, K]` and B `[K, N]`. The rows are divided into
    `parts`, by default the world size, which divides M; `rows` are `[M / parts, N]`. Part 0 of one
    is the reference of `all_reduce(A @ B)`.
    """
    exact: torch.Tensor | None = None
    plain: torch.Tensor | None = None
    for source in range(world_size):
        A, B = operands_of(source)
        shard = A.chunk(world_size if parts is None else parts)[rank]
        product, rounded = gathered_product(shard, B), torch.mm(shard, B)
        exact = product if exact is None else exact.add_(product)
        plain = rounded if plain is None else plain.add_(rounded)
    assert exact is not None and plain is not None
    return ScatteredSum(exact, relative_error(plain, exact))


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """`‖out − reference‖ / ‖reference‖` (Frobenius norms), in float64.

    Infinite where `out` holds a NaN or an infinity, so that neither ever passes a comparison, and
    where the reference is zero and `out` is not. Raises ValueError where the shapes differ or
    `reference` is not finite.
    """
    if out.shape != reference.shape:
        raise ValueError(
            f"out: found shape {tuple(out.shape)}, wanted the reference's {tuple(reference.shape)}"
        )
    wanted = reference.to(torch.float64)
    norm = float(torch.linalg.vector_norm(wanted))
    if not math.isfinite(norm):
        raise ValueError("reference: found a NaN or an infinity, wanted finite values")
    difference = float(torch.linalg.vector_norm(out.to(torch.float64) - wanted))
    if not math.isfinite(difference):
        return math.inf
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / norm


def allowed_error(mm_error: float, factor: float = ERROR_FACTOR) -> float:
    """The largest relative error a result may have, from that of torch.mm on the same data.

    The small constant is there for float32 and wider, where torch.mm itself may be almost exact.
    """
    return factor * mm_error + _ROUNDING_FLOOR


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a floating-point tensor with NaN, so that a word left unwritten cannot pass a check."""
    return tensor.fill_(math.nan)
