"""The public scheduler with its default arguments, beside CUTLASS's own collectives, on a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import plain_gemm
import pytest
import torch

pytestmark = [
    pytest.mark.skipif(plain_gemm.why_not() is not None, reason=str(plain_gemm.why_not())),
    pytest.mark.timeout(600),  # it is compiled first
]

K, N = 512, 640
TILE = 128
SMS = 16  # the kernels that feed the matmul run beside it


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_gemm.build(tmp_path_factory.mktemp("plain_gemm"))


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, device="cuda").to(torch.bfloat16)


def start(
    library: Path,
    schedule: str,
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor,
    signals: torch.Tensor | None,
    tiles_per_chunk: int,
    pivot_tile: int,
) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    call = plain_gemm.function(library, schedule)
    words = 0 if signals is None else signals.data_ptr()
    shape = (A.shape[0], N, K)
    status = call(
        A.data_ptr(),
        B.data_ptr(),
        out.data_ptr(),
        *shape,
        words,
        tiles_per_chunk,
        pivot_tile,
        SMS,
        stream,
    )
    assert status == 0


@pytest.mark.parametrize("schedule", plain_gemm.SCHEDULES)
@pytest.mark.parametrize("rows", [128, 8 * TILE, 7 * TILE + 40])
def test_all_is_ready(library: Path, schedule: str, rows: int) -> None:
    A, B = integers(rows, K), integers(N, K).t()
    for signals in (None, torch.ones(8, dtype=torch.int32, device="cuda")):
        out = torch.full((rows, N), torch.nan, dtype=torch.bfloat16, device="cuda")
        start(library, schedule, A, B, out, signals, 1, 0)
        torch.testing.assert_close(out, A @ B, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", plain_gemm.SCHEDULES)
@pytest.mark.parametrize("tiles_per_chunk", [1, 2])
def test_chunks_come_while_it_runs(library: Path, schedule: str, tiles_per_chunk: int) -> None:
    """In any order, whichever tile is the first; rows are NaN before their signal."""
    tiles = 8
    chunks, rows = tiles // tiles_per_chunk, tiles_per_chunk * TILE
    source, B = integers(tiles * TILE, K), integers(N, K).t()
    wanted = source @ B
    A = torch.full_like(source, torch.nan)
    signals = torch.zeros(chunks, dtype=torch.int32, device="cuda")
    feeder = torch.cuda.Stream()

    def feed(order: list[int]) -> None:
        with torch.cuda.stream(feeder):
            for chunk in order:
                torch.cuda._sleep(200_000)
                part = slice(chunk * rows, (chunk + 1) * rows)
                A[part].copy_(source[part])
                signals[chunk : chunk + 1].fill_(1)

    # All kernels are loaded before: a first launch would wait for the matmul, which waits for it.
    # All chunks: how torch fills a word, and so by which kernel, depends on its address.
    feed(list(range(chunks)))
    start(library, schedule, source, B, torch.empty_like(wanted), None, 1, 0)
    for turn in range(4):
        torch.cuda.synchronize()
        A.fill_(torch.nan)
        signals.zero_()
        out = torch.full_like(wanted, torch.nan)
        torch.cuda.synchronize()
        start(library, schedule, A, B, out, signals, tiles_per_chunk, turn * 2 % tiles)
        order = list(range(chunks))
        random.Random(turn).shuffle(order)
        feed(order)
        torch.cuda.synchronize()
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
