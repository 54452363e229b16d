"""Named problems: the shapes that benchmarks report and the awkward ones that tests run."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from agmm.errors import InvalidArgument
from agmm.planning.shapes import LocalShape, Shape

BENCH_SHAPES = (
    Shape(1024, 3584, 8192),
    Shape(2048, 3584, 8192),
    Shape(4096, 3584, 8192),
    Shape(8192, 3584, 8192),
    Shape(16384, 3584, 8192),
    Shape(4096, 7168, 8192),
    Shape(8192, 8192, 4096),
)
"""What is reported for 4 GPUs."""

SCATTER_BENCH_SHAPES = tuple(
    Shape(m, 8192, k) for k in (2048, 7168) for m in (512, 1024, 2048, 4096, 8192, 16384)
)
"""The shapes for matmul + reduce-scatter."""

ALL_REDUCE_BENCH_SHAPES = tuple(
    Shape(m, 8192, k)
    for k in (2048, 4096, 7168)
    for m in (16, 64, 256, 512, 1024, 2048, 4096, 8192)
)
"""The shapes for matmul + all-reduce."""

CPU_BENCH_SHAPES = (
    Shape(256, 256, 512),
    Shape(512, 512, 1024),
    Shape(1024, 640, 1024),
)
"""What is reported for CPU processes, of either op: sizes that take milliseconds."""

UGLY_SHAPES = (
    LocalShape(1, 8, 8),
    LocalShape(1, 256, 512),
    LocalShape(3, 136, 72),
    LocalShape(100, 512, 256),
    LocalShape(127, 128, 64),
    LocalShape(128, 128, 8),
    LocalShape(129, 264, 520),
    LocalShape(255, 1000, 136),
    LocalShape(257, 1288, 1032),
    LocalShape(320, 2112, 7168),
    LocalShape(512, 2112, 7168),
    LocalShape(1000, 3584, 1024),
)
"""Rows that are no multiple of a tile, one row per rank, narrow and odd widths. N and K are
multiples of 8, so the fused CUDA kernels take all of them."""

CPU_UGLY_SHAPES = (
    LocalShape(1, 1, 1),
    LocalShape(1, 7, 5),
    LocalShape(3, 17, 129),
    LocalShape(33, 5, 64),
    LocalShape(100, 63, 31),
    LocalShape(129, 264, 72),
)
"""Any M, N and K, small enough for CPU ranks."""


def random_local_shapes(
    count: int, seed: int, *, max_m_local: int = 600, max_n: int = 2112, max_k: int = 2048
) -> list[LocalShape]:
    """`count` random problems whose N and K are multiples of 8; the same ones for the same seed."""
    draw = random.Random(seed)
    return [
        LocalShape(
            draw.randint(1, max_m_local),
            8 * draw.randint(1, max_n // 8),
            8 * draw.randint(1, max_k // 8),
        )
        for _ in range(count)
    ]


@dataclass
class Operands:
    """A problem's tensors on one rank: A_shard `[M_local, K]`, A `[M, K]`, B `[K, N]`. Of a matmul
    + reduce-scatter A_shard is A, this rank's columns of it, and K is theirs."""

    A_shard: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor


def make_operands(
    shape: Shape,
    rank: int,
    world_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
) -> Operands:
    """Random normal operands: the same A on every rank, so that no gather is needed to check.

    B differs from rank to rank and is column-major, as the transpose of an `[N, K]` weight.
    Raises InvalidArgument where the ranks cannot have equally many rows.
    """
    _check_rows(shape, world_size)
    device = torch.device(device)
    A = _random_normal((shape.M, shape.K), 2 * seed, dtype, device)
    weight = _random_normal((shape.N, shape.K), 2 * (seed + rank) + 1, dtype, device)
    M_local = shape.M // world_size
    return Operands(A[rank * M_local : (rank + 1) * M_local].clone(), A, weight.t())


def make_scatter_operands(
    shape: Shape,
    rank: int,
    world_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    divided: bool = True,
) -> Operands:
    """Random normal operands of a matmul + reduce-scatter: another A and B on every rank, which
    each rank can make too, so that nothing need be sent to check. B is column-major. Those of a
    matmul + all-reduce, whose rows are not divided, are the same.

    Raises InvalidArgument where the ranks cannot have equally many rows and should.
    """
    if divided:
        _check_rows(shape, world_size)
    device = torch.device(device)
    A = _random_normal((shape.M, shape.K), 2 * (seed + rank), dtype, device)
    weight = _random_normal((shape.N, shape.K), 2 * (seed + rank) + 1, dtype, device)
    return Operands(A, A, weight.t())


def _check_rows(shape: Shape, world_size: int) -> None:
    if shape.M % world_size:
        raise InvalidArgument(
            f"M: found {shape.M}, wanted a multiple of the world size, {world_size}"
        )


def _random_normal(
    size: tuple[int, int], seed: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float32, device=device).to(dtype)


def uneven_blocks(weight: torch.Tensor) -> torch.Tensor:
    """The weight with blocks of 128 x 128 of several sizes, whose scales cannot be confused."""
    rows, columns = (torch.arange(size, device=weight.device) // 128 for size in weight.shape)
    powers = (3 * rows[:, None] + 5 * columns) % 7 - 3
    return weight * torch.exp2(powers.to(weight.dtype))
