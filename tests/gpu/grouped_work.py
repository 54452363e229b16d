"""Operands and checks of the tests of grouped matmuls, on one GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import activation_work
import pytest
import torch
from gpu_work import poison_freed_memory

from agmm import _core
from agmm.ops import grouped_kernel
from agmm.planning.kernel_table import GROUPED
from agmm.runtime import kernels
from agmm.runtime.epilogues import Epilogue

PLAIN = kernels.built(GROUPED)
GATED = kernels.built(GROUPED, epilogue="gate")


def drawn(experts: int, most: int) -> list[int]:
    numbers = random.Random(experts * most)
    return [numbers.randrange(1, most + 1) for _ in range(experts)]


COUNTS = {
    "one row": [1],
    "no rows": [0, 0],
    "one expert has all": [0, 0, 1300, 0, 0],
    "ends are empty": [0, 7, 0, 64, 0],
    "whole tiles": [256, 256, 256],
    "one row more": [257, 1, 129, 65],
    "few rows": drawn(64, 8),
    "up to 64 rows": drawn(32, 64),
    "up to 300 rows": drawn(16, 300),
}
"""How many rows each expert has."""


def is_built(kernel: Any, dtype: torch.dtype, epilogue: str, *, column_major: bool) -> bool:
    """Whether the build has the kernel for these operands; a small one has it for some."""
    wanted = kernel.name, str(dtype).removeprefix("torch."), "column" if column_major else "row"
    return any(
        (facts.kernel, facts.dtype.name, facts.b_layout) == wanted
        and (facts.op, facts.epilogue) == (GROUPED, epilogue)
        for facts in _core.kernel_facts()
    )


def skip_unless_built(kernel: Any, dtype: torch.dtype, *, column_major: bool) -> str:
    """The epilogue of the kernel, if it is built for the operands."""
    epilogue = "gate" if kernel in GATED else "bias"
    if not is_built(kernel, dtype, epilogue, column_major=column_major):
        pytest.skip("the build has no such kernel")
    return epilogue


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def weight(experts: int, n: int, k: int, dtype: torch.dtype, *, column_major: bool) -> torch.Tensor:
    """A weight [experts, K, N] whose matrices and lines have gaps of NaN between them."""
    lines, length = (n, k) if column_major else (k, n)
    held = torch.full((experts, lines + 3, length + 24), torch.nan, dtype=dtype, device="cuda")
    found = held[:, :lines, :length]
    found.copy_(randn(experts, lines, length, dtype=dtype) / k**0.5)
    return found.transpose(1, 2) if column_major else found


def offsets_of(counts: Sequence[int]) -> torch.Tensor:
    ends = torch.tensor([0, *counts]).cumsum(0)
    return ends.to(torch.int32).cuda()


def operands(
    counts: Sequence[int], n: int, k: int, dtype: torch.dtype, *, column_major: bool, gate: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights of a call, and a bias for each."""
    given = [
        weight(len(counts), n, k, dtype, column_major=column_major) for _ in range(1 + int(gate))
    ]
    return given, [randn(len(counts), n, dtype=dtype) for _ in given]


def fault(
    out: torch.Tensor,
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    counts: Sequence[int],
) -> list[str]:
    """What is wrong with a result: an expert's rows differ from float64 by more than roundings, or
    a row behind the last expert's is not 0."""
    found = [] if bool((out[sum(counts) :] == 0).all()) else ["a row behind the last is not 0"]
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    for expert, (begin, end) in enumerate(pairwise(ends)):
        if begin == end:
            continue
        a, wide = rows[begin:end].double(), [one[expert].double() for one in weights]
        products, sums = [a @ one for one in wide], [a.abs() @ one.abs() for one in wide]
        for i, bias in enumerate(biases):
            if bias is not None:
                products[i] = products[i] + bias[expert].double()
                sums[i] = sums[i] + bias[expert].double().abs()
        wanted = products[0]
        allowed = 2**-18 * sums[0]
        if len(weights) == 2:
            (wanted,) = activation_work.activated("silu_mul", products)
            allowed = 2**-18 * (1 + sums[0] + sums[1]) * (1 + wanted.abs())
        allowed = allowed + torch.finfo(out.dtype).eps / 2 * wanted.abs() + 1e-7
        worst = ((out[begin:end].double() - wanted).abs() / allowed).max().item()
        if not worst <= 1:
            label = f"expert {expert} of {end - begin} rows"
            found.append(f"{label}: an element is wrong by {worst:.3g} times what is allowed")
    return found


def faults_of_late_rows(kernel: Any) -> list[str]:
    """What is wrong with results whose rows come while the kernel runs. Every row is NaN until just
    before it is counted, and sources come in a ring. CTAs leave room for the kernels that bring
    rows."""
    dtype = torch.bfloat16
    is_gate = kernel in GATED
    activation = Epilogue("silu_mul") if is_gate else None
    sources, experts = 4, 6
    numbers = random.Random(3)
    sizes = [[numbers.choice([0, 1, 40, 150]) for _ in range(sources)] for _ in range(experts)]
    counts = [sum(of_expert) for of_expert in sizes]
    weights, biases = operands(counts, 1160, 520, dtype, column_major=True, gate=is_gate)
    source_of_row = torch.tensor(
        [
            source
            for of_expert in sizes
            for source, size in enumerate(of_expert)
            for _ in range(size)
        ],
        device="cuda",
    )
    flat = torch.tensor([size for of_expert in sizes for size in of_expert])
    begins = (flat.cumsum(0) - flat).int().view(experts, sources).cuda()
    arriving = torch.tensor(sizes, dtype=torch.int32, device="cuda").t().contiguous()
    source, offsets = randn(sum(counts), 520), offsets_of(counts)
    wanted = grouped_kernel.run(kernel, source, weights, biases, offsets, activation)
    rows, arrived = torch.empty_like(source), torch.zeros_like(arriving)
    feeder = torch.cuda.Stream()
    pieces = [(source_of_row == number).nonzero()[:, 0] for number in range(sources)]

    def feed(first: int) -> None:
        with torch.cuda.stream(feeder):
            for i in range(sources):
                number = (first + i) % sources
                torch.cuda._sleep(50_000)
                rows.index_copy_(0, pieces[number], source.index_select(0, pieces[number]))
                arrived[number].copy_(arriving[number])

    faults = []
    for first in range(sources):
        # The first launch of a kernel waits for the device: not beside one that spins.
        feed(first)
        torch.cuda.synchronize()
        rows.fill_(torch.nan)
        arrived.zero_()
        poison_freed_memory(2 * sum(counts) * 1160)
        torch.cuda.synchronize()
        out = grouped_kernel.run(
            kernel,
            *(rows, weights, biases, offsets, activation),
            sm_count=64,
            arrival=grouped_kernel.Arrival(arrived, begins, first, 0),
        )
        feed(first)
        torch.cuda.synchronize()
        if not torch.equal(out, wanted):
            faults.append(f"{kernel.name}: a result differs where source {first} comes first")
    return faults
