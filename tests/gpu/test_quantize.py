"""Dynamic quantisation by kernels, bit for bit against torch's ops."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from agmm import _core
from agmm.ops import quantize
from agmm.runtime import cuda_quantize
from agmm.runtime.scaling import ALL, BLOCK, Tile

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
TILES: dict[str, Tile] = {
    "rowwise": (1, ALL),
    "block": (1, BLOCK),
    "tensorwise": (ALL, ALL),
    "columns": (ALL, 1),
    "squares": (BLOCK, BLOCK),
}
SHAPES = [
    # a warp for a row; few and many registers; rows longer than what the registers hold
    *[(1, 16), (9, 512), (3, 528), (64, 4096), (257, 7168), (33, 8192), (5, 16384), (2, 40960)],
    *[(1000, 144), (4096, 272)],
]


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of different sizes, with zeros, and one of zeros only."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    x *= torch.randn(rows, 1, generator=generator, device="cuda").mul(3).exp()
    x[:, ::7] = 0
    x[rows // 2] *= 0 if rows > 1 else 1
    return x.to(dtype)


def amax_by_torch(x: torch.Tensor, tile: Tile) -> torch.Tensor | None:
    """None of blocks, which no kernel searches before they are quantised."""
    if BLOCK in tile:
        return None
    dims = [dim for dim, size in enumerate(tile) if size == ALL]
    return x.abs().amax(dims, keepdim=True)


def assert_same(
    x: torch.Tensor, tile: Tile, dtype: torch.dtype = FP8[0], *, power_of_2: bool = False
) -> None:
    found = cuda_quantize.quantised(x, tile, dtype, power_of_2=power_of_2)
    assert found is not None
    values, scale = found
    wanted, wanted_scale = quantize.quantised_by_torch(
        x, tile, dtype, amax_by_torch(x, tile), power_of_2
    )
    assert values.stride() == wanted.stride() and scale.shape == wanted_scale.shape
    assert scale.dtype == torch.float32 and values.dtype == dtype
    # Bits are compared: a NaN equals itself then.
    assert torch.equal(scale.view(torch.int32), wanted_scale.view(torch.int32))
    is_nan = wanted.float().isnan()  # whose sign may differ
    assert torch.equal(values.float().isnan(), is_nan)
    assert torch.equal(values.view(torch.uint8)[~is_nan], wanted.view(torch.uint8)[~is_nan])


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("to", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES.values(), ids=list(TILES))
def test_as_torch(tile: Tile, dtype: torch.dtype, to: torch.dtype, power_of_2: bool) -> None:
    for seed, shape in enumerate(SHAPES):
        assert_same(matrix(*shape, dtype, seed), tile, to, power_of_2=power_of_2)


@pytest.mark.parametrize(
    "tile", [(ALL, 1), (BLOCK, 1), (ALL, ALL), (1, ALL), (BLOCK, BLOCK)], ids=str
)
def test_a_column_major_matrix(tile: Tile) -> None:
    assert_same(matrix(272, 528, torch.bfloat16, 1).t(), tile)


@pytest.mark.parametrize("to", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", [(ALL, 1), (ALL, ALL)], ids=str)
def test_columns_and_their_transpose(tile: Tile, dtype: torch.dtype, to: torch.dtype) -> None:
    """Rows that fill no tile, no word and no multiple of 16; few and many columns."""
    for seed, (rows, columns) in enumerate([*SHAPES, (130, 80), (127, 64), (4111, 96), (513, 16)]):
        x = matrix(rows, columns, dtype, seed)
        x[rows // 3, 5] = torch.nan if seed % 2 else 1e30
        largest = amax_by_torch(x, tile)
        assert largest is not None
        for amax in (None, largest * 2):
            values, scale = quantize.quantised_columns(x, tile, to, amax=amax, power_of_2=True)
            known = largest if amax is None else amax
            wanted, wanted_scale = quantize.quantised_by_torch(x, tile, to, known, True)
            assert torch.equal(scale.view(torch.int32), wanted_scale.view(torch.int32))
            filled = -(-rows // 16) * 16
            assert values.shape == (columns, filled) and values.is_contiguous()
            assert values[:, rows:].view(torch.uint8).count_nonzero() == 0
            is_nan = wanted.float().isnan()
            found = values[:, :rows].t()
            assert torch.equal(found.float().isnan(), is_nan)
            bits, wanted_bits = found.contiguous().view(torch.uint8), wanted.view(torch.uint8)
            assert torch.equal(bits[~is_nan], wanted_bits[~is_nan])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amax_of_columns(dtype: torch.dtype) -> None:
    for seed, shape in enumerate([*SHAPES, (4111, 96)]):
        x = matrix(*shape, dtype, seed)
        x[0, 3] = torch.nan if seed % 2 else -torch.inf
        found = cuda_quantize.amax_of(x, (ALL, 1))
        assert found is not None and found.shape == (1, shape[1])
        torch.testing.assert_close(found, x.float().abs().amax(0, keepdim=True), equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 16), (130, 80), (4111, 96), (2048, 7168)], ids=str)
def test_the_transpose_of_bytes(shape: tuple[int, int]) -> None:
    values = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
    found = cuda_quantize.transposed(values.view(FP8[0]))
    assert found is not None and found.dtype == FP8[0]
    assert torch.equal(found.view(torch.uint8)[:, : shape[0]], values.t())
    assert found.view(torch.uint8)[:, shape[0] :].count_nonzero() == 0
    assert found.shape[1] == -(-shape[0] // 16) * 16
    assert cuda_quantize.transposed(values[:, :8].contiguous().view(FP8[0])) is None


@pytest.mark.parametrize("tile", TILES.values(), ids=list(TILES))
def test_extreme_numbers(tile: Tile) -> None:
    for number in (0.0, 1e-30, -3e38, torch.inf, -torch.inf, torch.nan, 448.0, 2.0**-126):
        x = matrix(16, 256, torch.float32, 3)
        x[5, 200] = number
        assert_same(x, tile)
        assert_same(torch.full((4, 256), number, device="cuda"), tile, power_of_2=True)


def test_scales_near_powers_of_two() -> None:
    """A step of float32 beside them, where a logarithm may round across."""
    powers = 2.0 ** torch.arange(-40, 40, device="cuda")
    for step in (-1, 0, 1):
        bits = (448 / powers).float().view(torch.int32) + step
        x = bits.view(torch.float32).unsqueeze(1).expand(-1, 16).contiguous()
        assert_same(x, (1, ALL), power_of_2=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_larger_amax(dtype: torch.dtype) -> None:
    """The amax is that of several matrices, one after the other as the ranks have them."""
    parts = [matrix(64, 272, dtype, seed) for seed in range(3)]
    amax = torch.cat(
        [of_part for part in parts if (of_part := cuda_quantize.amax_of(part)) is not None]
    )
    assert torch.equal(amax, torch.stack([part.abs().max().float() for part in parts]).view(3, 1))
    largest = amax.amax(0, keepdim=True)
    for part in (*parts, parts[0].t()):
        found = cuda_quantize.quantised(part, (ALL, ALL), FP8[0], amax=largest, power_of_2=False)
        assert found is not None
        wanted, scale = quantize.quantised_by_torch(part, (ALL, ALL), FP8[0], largest, False)
        assert torch.equal(found[1], scale)
        assert torch.equal(found[0].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(largest, amax.amax(0, keepdim=True)), "it is only read"


def test_what_has_no_kernel() -> None:
    x = matrix(16, 256, torch.bfloat16, 1)
    for given in (x[:, :8].contiguous(), x[:, 16:], x.flatten()[1 : 1 + 16 * 16].view(16, 16)):
        assert cuda_quantize.quantised(given, (1, ALL), FP8[0], power_of_2=False) is None
    assert cuda_quantize.quantised(x, (BLOCK, 1), FP8[0], power_of_2=False) is None
    assert cuda_quantize.quantised(x.double(), (1, ALL), FP8[0], power_of_2=False) is None
    assert cuda_quantize.amax_of(x.double()) is None
    of_rows = quantize.amax_of(x, (1, ALL))
    assert cuda_quantize.quantised(x, (1, ALL), FP8[0], amax=of_rows, power_of_2=False) is None
    for bad in ((0, 256), (4, 24)):
        with pytest.raises(ValueError, match="x: found"):
            _core.quantize(
                x.data_ptr(),
                _core.QuantizedFrom.bfloat16,
                _core.QuantizedTo.float8_e4m3fn,
                _core.ScaleOf.row,
                *bad,
                False,
                x.data_ptr(),
                0,
                x.data_ptr(),
                0,
                False,
                0,
            )
    with pytest.raises(ValueError, match="scale_of: found a row, a block or a square"):
        _core.find_amax(
            x.data_ptr(),
            _core.QuantizedFrom.bfloat16,
            _core.ScaleOf.row,
            *(16, 256, x.data_ptr(), 0),
        )
    with pytest.raises(ValueError, match="leading: found 8 for 16 rows"):
        _core.quantize(
            x.data_ptr(),
            _core.QuantizedFrom.bfloat16,
            _core.QuantizedTo.float8_e4m3fn,
            _core.ScaleOf.column,
            *(16, 256, False, x.data_ptr(), 8, x.data_ptr(), x.data_ptr(), False, 0),
        )


@pytest.mark.parametrize("tile", TILES.values(), ids=list(TILES))
def test_graph(tile: Tile) -> None:
    x = matrix(64, 512, torch.bfloat16, 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cuda_quantize.quantised(x, tile, FP8[0], power_of_2=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = cuda_quantize.quantised(x, tile, FP8[0], power_of_2=False)
    torch.cuda.synchronize()
    assert found is not None
    for seed in (2, 3):
        x.copy_(matrix(64, 512, torch.bfloat16, seed) / 2**seed)
        graph.replay()
        wanted, scale = quantize.quantised_by_torch(x, tile, FP8[0], amax_by_torch(x, tile), False)
        assert torch.equal(found[1], scale)
        assert torch.equal(found[0].view(torch.uint8), wanted.view(torch.uint8))


LOADED_BEFORE = """
import time
import torch
from agmm import _core
from agmm.runtime import cuda_activations, cuda_quantize
from agmm.runtime.scaling import ALL, BLOCK

TILES = ((1, ALL), (1, BLOCK), (ALL, ALL), (ALL, 1), (BLOCK, BLOCK))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
torch.cuda._sleep(1)
found = [torch.ones(64, columns, device="cuda", dtype=dtype)
         for dtype in DTYPES for columns in (16, 2048, 8192, 40960)]
side = torch.cuda.Stream()
with torch.cuda.stream(side):  # memory of its own that needs no call of the driver's
    room = [torch.empty(size, device="cuda") for size in (64,) * 4 + (64 * 40960,) * 4]
    del room
_core.load_quantizers()
torch.cuda.synchronize()
end = torch.cuda.Event()
begin = time.perf_counter()
waited = []


def note(*call):
    # the first calls behind which the GPU is found to have finished, and when
    if end.query() and len(waited) < 2:
        waited.append((call, round(time.perf_counter() - begin, 2)))


torch.cuda._sleep(16_000_000_000)  # some eight seconds, which a busy host may need
end.record()
with torch.cuda.stream(side):
    for x in found:
        for to in (torch.float8_e4m3fn, torch.float8_e5m2):
            for tile in TILES:
                assert cuda_quantize.quantised(x, tile, to, power_of_2=False) is not None
                note("quantised", x.shape, x.dtype, to, tile)
            made = cuda_quantize.quantised_columns(x, to, power_of_2=False)
            assert made is not None and cuda_quantize.transposed(made[0]) is not None
            note("transposed", x.shape, x.dtype, to)
    for x in found:
        if x.dtype != torch.float32:
            for activation, products in (("silu", [x]), ("gelu_mul", [x, x])):
                assert cuda_activations.gradients(activation, x, products) is not None
                note(activation, x.shape, x.dtype)
            if x.shape[1] == 2048:
                for tile in TILES[:2]:
                    cast = cuda_activations.Cast(tile, torch.float8_e4m3fn, True)
                    made = cuda_activations.joint_gradients("silu_mul", x, [x, x], cast)
                    assert made is not None and made[1] is not None
                    note("silu_mul", x.shape, x.dtype, tile)
print(waited or "went on")
torch.cuda.synchronize()
"""


def test_kernels_that_are_loaded_wait_for_no_other() -> None:
    """Another group's call may hold the GPU, and wait for a rank that is about to quantise."""
    process = subprocess.run(
        [sys.executable, "-c", LOADED_BEFORE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "went on\n"
