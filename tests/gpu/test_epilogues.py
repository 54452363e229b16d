"""Activations that the matmul kernels compute: every function, dtype, layout of B and kernel, on
one GPU and between ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import pi
from typing import Any

import activation_work
import epilogue_work as work
import pytest
import quantized_outs_work
import torch
from at_hand import RANKS, needs_nccl, needs_two, world_sizes
from gpu_work import randn
from test_fused import check

from agmm.errors import InvalidArgument, forget_warnings
from agmm.ops import async_input_mm
from agmm.ops.kernel_epilogues import why_behind
from agmm.ops.quantize import KINDS
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import LocalShape
from agmm.runtime.epilogues import Epilogue
from agmm.testing.ranks import RankPool

NAMES = activation_work.ACTIVATIONS
GATED = activation_work.GATED
DTYPES = (torch.bfloat16, torch.float16)
SHAPES = [
    # M, N, K, chunks
    (1, 8, 8, 1),
    (8, 8, 64, 8),
    (37, 72, 200, 1),
    (129, 136, 520, 3),
    (333, 264, 328, 1),
    (1000, 1048, 136, 5),
    (2049, 392, 72, 1),
]
KERNELS = [
    (epilogue, layout, kernel)
    for epilogue in ("activation", "gate")
    for layout in ("column", "row")
    for kernel in kernels_of(ALL_GATHER_MATMUL, "bfloat16", epilogue, layout)
]
of_kernels = pytest.mark.parametrize(
    ("epilogue", "layout", "kernel"), KERNELS, ids=lambda given: getattr(given, "kernel", given)
)


def _names(epilogue: str) -> list[str]:
    return [name for name in NAMES if (name in GATED) == (epilogue == "gate")]


def _poison(nbytes: int) -> None:
    torch.full((nbytes + 1024,), 0xFF, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@of_kernels
def test_every_kernel(epilogue: str, layout: str, kernel: Any, dtype: torch.dtype) -> None:
    for seed, (m, n, k, chunks) in enumerate(SHAPES):
        a = randn((m, k), dtype, seed)
        signals = torch.ones(chunks, dtype=torch.int32, device="cuda").view(torch.uint32)
        for name in _names(epilogue):
            column_major = layout == "column"
            bs, biases = work.weights(name, n, k, dtype, column_major=column_major, seed=10 + seed)
            for with_bias in (biases, [None] * len(bs), biases[::-1]):
                _poison(2 * m * n)
                out = async_input_mm.activated_on_cuda(
                    a, bs, signals, seed % chunks, Epilogue(name), config=kernel, biases=with_bias
                )
                label = f"{name} {m}x{n}x{k} chunks {chunks}"
                assert work.fault(label, name, out, (a, bs, with_bias)) == []


@of_kernels
def test_leading_dimensions(epilogue: str, layout: str, kernel: Any) -> None:
    """Gate and up lie anywhere, with leading dimensions of their own."""
    (m, n, k), name = (333, 136, 328), _names(epilogue)[-1]
    a, bs = randn((m, k), torch.bfloat16, 1), []
    for i in range(2 if epilogue == "gate" else 1):
        rows, columns = (n, k) if layout == "column" else (k, n)
        weight = randn((rows, columns + 24 + 8 * i), torch.bfloat16, 2 + i)[:, :columns]
        bs.append(weight.t() if layout == "column" else weight)
    _poison(2 * m * n)
    out = async_input_mm.activated_on_cuda(a, bs, None, 0, Epilogue(name), config=kernel)
    # The sums are those of weights that are not made small, so the activations are far out.
    assert work.fault(name, name, out, (a, bs, [None] * len(bs))) == []


SPECIAL = (
    *(float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 1e4, -1e4, 3e38, -3e38),
    # Where exp(-x) passes 2^126 and 2^128, and where tails of gelu pass the smallest numbers.
    *(-87.0, -87.5, -88.0, -88.5, -89.0, -100.0, -104.0, -4.0, -5.0, -6.0, -9.0, -13.0, -14.0),
)


EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = activation_work.OF_ONE | {
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x * 0.5**0.5),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * (2 / pi) ** 0.5 * (x + 0.044715 * x**3)),
}
"""The functions in float64, without a difference that loses the tails."""


@pytest.mark.parametrize("layout", ["column", "row"])
@pytest.mark.parametrize("name", NAMES)
def test_special_numbers_are_those_of_torch(name: str, layout: str) -> None:
    """The numbers are biases of a product of 0, whose sign is not looked at: 0 + bias is bias, and
    -0 + 0 is 0."""
    count = 2 if name in GATED else 1
    numbers = torch.tensor(SPECIAL, device="cuda", dtype=torch.bfloat16)
    gate, up = (one.contiguous() for one in torch.cartesian_prod(numbers, numbers).unbind(1))
    n = len(gate) // 8 * 8
    biases = [gate[:n].contiguous(), up[:n].contiguous()][:count]
    a = torch.zeros(3, 64, device="cuda", dtype=torch.bfloat16)
    bs = [torch.zeros(n, 64, device="cuda", dtype=torch.bfloat16).t() for _ in range(count)]
    bs = [b if layout == "column" else b.contiguous() for b in bs]
    out = async_input_mm.activated_on_cuda(a, bs, None, 0, Epilogue(name), biases=biases)
    products = [torch.addmm(bias, a, b) for b, bias in zip(bs, biases, strict=True)]
    of_torch = activation_work.activated(name, [product.float() for product in products])[0]
    wide = [product.double() for product in products]
    function = name.removesuffix("_mul")
    wanted = EXACT[function](wide[0])
    # In the tails torch's float32 functions are 0 where the kernel's may still be a number, with
    # the few bits of a small one. What is left of it behind a gate is as many times larger as up.
    (by_torch,) = activation_work.activated(function, [products[0].float()])
    allowed = 2**-7 * wanted.abs() + 1e-42
    known = torch.ones_like(by_torch, dtype=torch.bool)
    if count == 2:
        known = ((wanted == 0) | (by_torch != 0)) | wide[1].isfinite()
        wanted, allowed = wanted * wide[1], allowed * wide[1].abs()
    assert torch.equal(out.isnan()[known], of_torch.isnan()[known])
    rounded = wanted.to(torch.bfloat16)
    there = known & ~out.isnan()
    assert torch.equal(out.isinf()[there], rounded.isinf()[there])
    finite = there & rounded.isfinite()
    error = (out.double() - rounded.double()).abs()
    assert (error <= allowed + 1e-40)[finite].all()
    has_sign = there & (rounded != 0) & (out != 0)
    is_zero = there & (wanted == 0) & (of_torch == 0)
    for where, signs in ((has_sign, rounded), (is_zero, of_torch)):
        assert torch.equal(out.signbit()[where], signs.signbit()[where])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_op_of_torch(name: str, dtype: torch.dtype) -> None:
    """Planned calls; the second one is found again."""
    a = randn((333, 520), dtype, 1)
    signals = torch.ones(3, dtype=torch.int32, device="cuda").view(torch.uint32)
    for column_major in (True, False):
        bs, _ = work.weights(name, 264, 520, dtype, column_major=column_major, seed=2)
        up = {"up": bs[1]} if len(bs) > 1 else {}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                _poison(2 * 333 * 264)
                out = torch.ops.agmm._async_input_mm(a, bs[0], signals, 1, activation=name, **up)
                assert work.fault(name, name, out, (a, bs, [None] * len(bs))) == []


def test_what_no_kernel_computes_is_right_and_says_why() -> None:
    forget_warnings()
    a = randn((40, 64), torch.bfloat16, 1)
    bs, _ = work.weights("silu_mul", 72, 64, torch.bfloat16, column_major=True, seed=2)
    bs[1] = bs[1].contiguous()
    signals = torch.ones(1, dtype=torch.int32, device="cuda").view(torch.uint32)
    with pytest.warns(UserWarning, match="B: found gate and up in two layouts, wanted one"):
        out = torch.ops.agmm._async_input_mm(a, bs[0], signals, 0, activation="silu_mul", up=bs[1])
    wanted = work.exact("silu_mul", a, bs, [None, None])
    torch.testing.assert_close(out.double(), wanted, rtol=2**-6, atol=2**-6)
    with pytest.raises(InvalidArgument, match="B: found gate and up in two layouts"):
        async_input_mm.activated_on_cuda(a, bs, None, 0, Epilogue("silu_mul"))
    assert why_behind(Epilogue("silu_mul"), [bs[0], bs[0]]) is None


WORLD_SIZES = world_sizes(1, 2, 4)


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gathered(gpu_pool: RankPool, world_size: int, return_A: bool) -> None:
    shapes = [
        LocalShape(1, 8, 8),
        LocalShape(37, 136, 264),
        LocalShape(130, 264, 520),
        LocalShape(701, 1032, 136),
    ]
    check(gpu_pool.run(work.activations, world_size, list(NAMES), shapes, return_A), world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_every_kernel_and_transport(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(work.every_way, world_size, ["gelu", "silu_mul"]), world_size)


@pytest.mark.parametrize("name", ["gelu_tanh", "silu_mul"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graphs_and_compiled_code(gpu_pool: RankPool, world_size: int, name: str) -> None:
    check(gpu_pool.run(work.captured_and_compiled, world_size, name), world_size)


@needs_two
@needs_nccl  # the sums that are compared with
@pytest.mark.parametrize("kind", KINDS)
def test_results_in_fp8(rank_pools: Callable[..., RankPool], kind: str) -> None:
    pool = rank_pools(min(4, RANKS), "cuda")
    for faults in pool.run(quantized_outs_work.gate_and_down, kind, "cuda"):
        assert faults == []
