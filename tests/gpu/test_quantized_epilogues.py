"""Every kernel that quantises what it makes of its sums, on one GPU: beside the kernel of the same
tile that does not, and torch's quantisation behind that."""

from __future__ import annotations

from typing import Any, NamedTuple

import activation_work
import pytest
import scaled_epilogue_work as work
import torch
from gpu_work import randn

from agmm import _core
from agmm.ops.quantize import quantised_by_torch
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig
from agmm.runtime import cuda_scaled
from agmm.runtime.cuda_calls import Kernel, OutScales, Up, plain_format, ready_matmul
from agmm.runtime.scaling import BLOCK

SHAPES = [
    # M, N, K: few rows, half a tile and less, blocks that are cut, several tiles
    *[(1, 144, 272), (37, 128, 144), (129, 272, 528), (300, 1040, 384), (1000, 400, 1040)],
]


class Case(NamedTuple):
    """A kernel of the build that quantises."""

    epilogue: str
    dtype: str
    accumulation: str
    config: KernelConfig

    def __str__(self) -> str:
        return f"{self.epilogue}-{self.dtype}-{self.accumulation}-{self.config.kernel}"

    @property
    def names(self) -> list[str]:
        is_gated = self.epilogue.startswith("gate")
        names = activation_work.ACTIVATIONS
        return [name for name in names if (name in activation_work.GATED) == is_gated]


CASES = [
    Case(
        facts.epilogue, facts.dtype.name, facts.accumulation.name, KernelConfig.parse(facts.kernel)
    )
    for facts in _core.kernel_facts()
    if facts.op == ALL_GATHER_MATMUL and facts.epilogue.endswith("_fp8")
]
if not CASES:
    pytest.skip("no kernel of this build quantises: AGMM_KERNELS=all", allow_module_level=True)


def _differing(values: torch.Tensor, wanted: torch.Tensor) -> float:
    """The share of values that differ, each by a step of e4m3 at most."""
    found, other = values.float(), wanted.float()
    far = (found - other).abs() > other.abs() / 7 + 2**-9
    assert not far.any(), f"{int(far.sum())} of {far.numel()} values are far from torch's"
    return (found != other).float().mean().item()


def _check(label: str, plain: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """The values and scales are those of the result that is not quantised, but for what another
    order of roundings in float32 may change."""
    wanted, wanted_scale = quantised_by_torch(plain, (1, BLOCK), values.dtype, None, False)
    assert values.shape == plain.shape and scale.shape == wanted_scale.shape, label
    torch.testing.assert_close(scale, wanted_scale, rtol=2**-7, atol=0, msg=label)
    spread = scale.repeat_interleave(BLOCK, 1)[:, : plain.shape[1]]
    again = (plain.float() / spread).clamp(-448, 448).to(values.dtype)
    assert _differing(values, again) < 0.01, label
    assert _differing(values, wanted) < 0.05, label


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_that_quantises(case: Case) -> None:
    for seed, (m, n, k) in enumerate(SHAPES):
        count = 2 if case.epilogue.startswith("gate") else 1
        biases = [randn((n,), torch.bfloat16, seed), None][:count]
        scaled: dict[str, Any] = {}
        up = None
        if case.dtype.startswith("float8"):
            if case.dtype != "float8_e4m3fn_float8_e4m3fn":
                continue
            scaling = "block" if case.accumulation == "block" else "rowwise"
            given = work.weights(scaling, m, n, k, count, seed)
            A, weights = work.described(given, biases, case.accumulation == "fast")
            of_kernel = cuda_scaled.kernel_of(
                A,
                weights[0],
                case.config.core,
                _core.Accumulation.__members__[case.accumulation],
            )
            a, b = A.values, weights[0].B.values
            scaled = {"scale_a": A.scale, "scale_b": weights[0].B.scale}
            if count == 2:
                up = Up(weights[1].B.values, biases[1], weights[1].B.scale)
        else:
            dtype = getattr(torch, case.dtype)
            biases = [None if bias is None else bias.to(dtype) for bias in biases]
            a, b = randn((m, k), dtype, seed), randn((n, k), dtype, seed + 1).t() / k**0.5
            b = b.t().contiguous().t()
            of_kernel = Kernel(case.config.core, plain_format("a", a))
            if count == 2:
                up = Up(randn((n, k), dtype, seed + 2).t() / 16, biases[1], None)
                up = up._replace(B=up.B.t().contiguous().t())
        for name in case.names:
            label = f"{case} {name} {m}x{n}x{k}"
            given_up: Any = {"up": None if up is None else up.B}
            bias = {"bias": biases[0], "up": up, **scaled}
            plain = ready_matmul(*(a, b, None, 0, of_kernel._replace(activation=name)), **given_up)(
                a, b, None, **bias
            )
            quantising = of_kernel._replace(activation=name, quantize_out="block")
            ready = ready_matmul(a, b, None, 0, quantising, **given_up)
            scales = OutScales.of(a, (m, n), None)
            scales.written.fill_(torch.nan)
            values = ready(a, b, None, out_scales=scales, **bias)
            _check(label, plain, values, scales.written)
            one = torch.full((1, 1), 0.25, device="cuda")
            scales = OutScales.of(a, (m, n), one)
            values = ready(a, b, None, out_scales=scales, **bias)
            wanted = (plain.float() / 0.25).clamp(-448, 448).to(values.dtype)
            assert _differing(values, wanted) < 0.01, label
            torch.testing.assert_close(scales.written, one, rtol=1e-6, atol=0)
