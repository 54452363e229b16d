"""Activations that the fp8 kernels compute: every kernel and kind of scales, on one GPU and between
ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import activation_work
import pytest
import scaled_epilogue_work as work
import torch
from at_hand import world_sizes
from gpu_work import randn
from test_fused import check

from agmm import _core
from agmm.ops import async_input_scaled_mm
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig
from agmm.runtime.epilogues import Epilogue
from agmm.testing.ranks import RankPool

SHAPES = [
    # M, N, K, chunks
    (16, 16, 16, 1),
    (1, 144, 272, 1),
    (100, 136, 80, 4),
    (385, 272, 528, 5),
    (1000, 520, 1040, 5),
    (2049, 392, 144, 1),
]


class Kernel(NamedTuple):
    epilogue: str
    accumulation: str
    config: KernelConfig

    def __str__(self) -> str:
        return f"{self.epilogue}-{self.accumulation}-{self.config.kernel}"

    @property
    def scalings(self) -> tuple[str, ...]:
        return ("block",) if self.accumulation == "block" else ("rowwise", "tensorwise")

    @property
    def names(self) -> list[str]:
        names = activation_work.ACTIVATIONS
        return [name for name in names if (name in activation_work.GATED) == (self.is_gated)]

    @property
    def is_gated(self) -> bool:
        return self.epilogue == "gate"


KERNELS = [
    Kernel(fact.epilogue, fact.accumulation.name, KernelConfig.parse(fact.kernel))
    for fact in _core.kernel_facts()
    if fact.op == ALL_GATHER_MATMUL and fact.is_fp8 and fact.epilogue in ("activation", "gate")
]
if not KERNELS:
    pytest.skip("this build has no fp8 kernels: AGMM_KERNELS=default", allow_module_level=True)
every_kernel = pytest.mark.parametrize(
    ("kernel", "scaling"), [(k, s) for k in KERNELS for s in k.scalings], ids=str
)


@every_kernel
def test_every_kernel(kernel: Kernel, scaling: str) -> None:
    for seed, (m, n, k, chunks) in enumerate(SHAPES):
        if scaling == "block" and min(n, k) <= 128:
            continue  # whose scales are those of rows
        given = work.weights(scaling, m, n, k, 1 + kernel.is_gated, seed)
        signals = torch.ones(chunks, dtype=torch.int32, device="cuda").view(torch.uint32)
        biases = [randn((n,), torch.bfloat16, seed), None][: len(given)]
        for name in kernel.names:
            for with_bias in (biases, biases[::-1], [None] * len(given)):
                A, weights = work.described(given, with_bias, kernel.accumulation == "fast")
                torch.full((2 * m * n + 1024,), 0xFF, dtype=torch.uint8, device="cuda")
                out = async_input_scaled_mm.activated_on_cuda(
                    *(A, weights, signals, seed % chunks, Epilogue(name)),
                    config=kernel.config,
                )
                label = f"{name} {m}x{n}x{k} chunks {chunks}"
                fast = kernel.accumulation == "fast"
                assert work.fault(label, name, out, given, with_bias, fast) == []


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise", "block"])
def test_scales_of_up_may_lie_anyhow(scaling: str) -> None:
    """The scales of gate and up have strides of their own."""
    given = work.weights(scaling, 200, 272, 528, 2, 3)
    up = given[1]
    wide = up.scale_b.new_full((*up.scale_b.shape[:-1], 2 * (up.scale_b.shape or (1,))[-1]), 9.0)
    strided = wide[..., ::2] if up.scale_b.dim() else up.scale_b
    given = [given[0], up._replace(scale_b=strided.copy_(up.scale_b))]
    A, weights = work.described(given, [None, None], fast=True)
    out = async_input_scaled_mm.activated_on_cuda(A, weights, None, 0, Epilogue("silu_mul"))
    assert work.fault(scaling, "silu_mul", out, given, [None, None], True) == []


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("world_size", world_sizes())
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise", "block"])
def test_between_ranks(gpu_pool: RankPool, scaling: str, world_size: int, return_A: bool) -> None:
    check(gpu_pool.run(work.between_ranks, world_size, scaling, return_A), world_size)


@pytest.mark.parametrize("world_size", world_sizes())
def test_a_graph_has_the_bits_of_an_eager_call(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(work.captured, world_size), world_size)


def test_the_torch_op_takes_the_kernel() -> None:
    gate, up = work.weights("rowwise", 200, 272, 528, 2, 5)
    signals = torch.ones(1, dtype=torch.int32, device="cuda").view(torch.uint32)
    op: Callable[..., Any] = torch.ops.agmm._async_input_scaled_mm.default
    out = op(*gate, None, signals, 0, True, "silu_mul", up.B, up.scale_b, None)
    assert work.fault("op", "silu_mul", out, [gate, up], [None, None], True) == []
