"""The kernel of gradients through activations: against float64, against torch's ops, and quantised
as agmm's quantisers do it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from agmm.ops import activation_gradients
from agmm.ops.quantize import quantised_by_torch
from agmm.runtime import cuda_activations
from agmm.runtime.cuda_activations import Cast
from agmm.runtime.epilogues import ACTIVATIONS, GATED, Epilogue
from agmm.runtime.scaling import ALL, BLOCK, Tile

DTYPES = (torch.bfloat16, torch.float16)
SHAPES = [
    # fewer vectors than threads; rows that a CTA ends in; leading dimensions; many rows
    *[(1, 8), (3, 40), (2, 5, 264), (37, 3584), (4099, 136), (129, 14336), (8192, 512)],
]
SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 100.0, -100.0, -88.5, 6e4, 3e-8)


def matrices(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """The gradient of a result, and products in which each activation bends."""
    generator = torch.Generator("cuda").manual_seed(shape[-1])
    return [
        torch.randn(shape, generator=generator, device="cuda").mul(3).to(dtype)
        for _ in range(count)
    ]


def of_one_or_two(activation: str) -> int:
    return 2 if activation in GATED else 1


def in_float64(
    activation: str, dout: torch.Tensor, products: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients by torch's own backward of the function."""
    wide = [one.double().requires_grad_() for one in products]
    (out,) = Epilogue(activation)(wide)
    return list(torch.autograd.grad(out, wide, dout.double()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_are_those_of_torch(activation: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        dout, *products = matrices(1 + of_one_or_two(activation), shape, dtype)
        found = cuda_activations.gradients(activation, dout, products)
        assert found is not None
        by_torch = Epilogue(activation).gradients([dout], products)
        for one, other, wanted in zip(
            found, by_torch, in_float64(activation, dout, products), strict=True
        ):
            assert other is not None and one.is_contiguous() and one.shape == shape
            size = wanted.norm().clamp(min=1e-30)
            errors = [((each.double() - wanted).norm() / size).item() for each in (one, other)]
            assert errors[0] <= 1.001 * errors[1] + 1e-7, (shape, errors)
            torch.testing.assert_close(one, other, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_infinities_and_zeros_are_those_of_torch(activation: str, dtype: torch.dtype) -> None:
    count = 1 + of_one_or_two(activation)
    rows = torch.tensor(list(product(SPECIAL, repeat=count)), device="cuda").to(dtype)
    dout, *products = (one.contiguous().view(-1, 8) for one in rows[: len(rows) // 8 * 8].unbind(1))
    found = cuda_activations.gradients(activation, dout, products)
    assert found is not None
    given = [dout, *products]
    if activation == "relu2":  # torch rounds twice the product, which may be no number of fp16
        given = [one.float() for one in given]
    wanted = Epilogue(activation).gradients(given[:1], given[1:])
    for one, exact in zip(found, wanted, strict=True):
        assert exact is not None
        other = exact.to(dtype)
        torch.testing.assert_close(one.isnan(), other.isnan())
        is_number = ~other.isnan()
        torch.testing.assert_close(one.isinf() & is_number, other.isinf() & is_number)
        torch.testing.assert_close(one.signbit() & is_number, other.signbit() & is_number)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_lie_apart(dtype: torch.dtype) -> None:
    """Products that lie beside each other, and a gradient that is cut out."""
    for shape in [(3, 40), (257, 3584), (4, 5, 264)]:
        dout, *products = matrices(3, shape, dtype)
        wanted = cuda_activations.gradients("silu_mul", dout, products)
        n = shape[-1]
        together = torch.cat([*products, dout], -1)
        gate, up, cut = together.split(n, -1)
        found = cuda_activations.gradients("silu_mul", cut, [gate, up])
        joint = cuda_activations.joint_gradients("silu_mul", cut, [gate, up], None)
        assert wanted is not None and found is not None and joint is not None
        whole, quantised = joint
        assert quantised is None and torch.equal(whole, torch.cat(wanted, -1))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("to", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("tile", [(1, ALL), (1, BLOCK)], ids=["rowwise", "block"])
def test_it_quantises_as_the_quantisers_do(tile: Tile, to: torch.dtype) -> None:
    """Rows of one, two and four vectors of a thread, of which CTAs have 256 or 512."""
    for dtype, power_of_2 in product(DTYPES, (False, True)):
        for rows, n in [(1, 128), (37, 2048), (513, 3584), (130, 7168), (19, 14336), (3000, 256)]:
            dout, gate, up = matrices(3, (rows, n), dtype)
            dout[rows // 2] = 0
            up[rows // 3, 5] = torch.nan
            cast = Cast(tile, to, power_of_2)
            found = cuda_activations.joint_gradients("silu_mul", dout, [gate, up], cast)
            plain = cuda_activations.gradients("silu_mul", dout, [gate, up])
            assert found is not None and plain is not None
            joint, in_fp8 = found
            assert in_fp8 is not None
            values, scale = in_fp8
            torch.testing.assert_close(joint, torch.cat(plain, -1), rtol=0, atol=0, equal_nan=True)
            wanted, wanted_scale = quantised_by_torch(joint, tile, to, None, power_of_2)
            assert torch.equal(scale.view(torch.int32), wanted_scale.view(torch.int32))
            is_nan = wanted.float().isnan()
            assert torch.equal(values.float().isnan(), is_nan)
            bits, wanted_bits = values.view(torch.uint8), wanted.view(torch.uint8)
            assert torch.equal(bits[~is_nan], wanted_bits[~is_nan])


def test_what_no_kernel_can_read_is_left_to_torch() -> None:
    dout, gate, up = matrices(3, (16, 64), torch.bfloat16)
    others = [
        [one.float() for one in (dout, gate, up)],
        [one[:, :60] for one in (dout, gate, up)],
        [dout[:1, :1].expand(16, 64), gate, up],
        [one.t() for one in (dout, gate, up)],
        [dout.half(), gate, up],
    ]
    for of_out, *products in others:
        assert cuda_activations.gradients("silu_mul", of_out, products) is None
        found = activation_gradients.gradients(Epilogue("silu_mul"), [of_out], products)
        wanted = Epilogue("silu_mul").gradients([of_out], products)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_graph_replays_it() -> None:
    dout, gate, up = matrices(3, (128, 512), torch.bfloat16)
    wanted = activation_gradients.gradients(Epilogue("silu_mul"), [dout], [gate, up])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = activation_gradients.gradients(Epilogue("silu_mul"), [dout], [gate, up])
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(captured, wanted, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
