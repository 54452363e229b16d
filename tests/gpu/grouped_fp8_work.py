"""Operands and checks of the tests of grouped matmuls in fp8, on one GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import activation_work
import torch
from gpu_work import poison_freed_memory
from grouped_work import offsets_of, randn

from agmm.ops import grouped_kernel
from agmm.ops.grouped_scaled_products import ScaledWeight, described
from agmm.planning.kernel_table import GROUPED
from agmm.runtime import kernels
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.scaled import Scaled
from agmm.runtime.scaled_rows import RowBytes
from agmm.runtime.scaling import BY_NAME, scale_shape

E4M3 = torch.float8_e4m3fn
_BUILT = GROUPED, "float8_e4m3fn_float8_e4m3fn", "block"
PLAIN = kernels.built(*_BUILT)
GATED = kernels.built(*_BUILT, epilogue="gate")
KINDS = ("rowwise", "block")


class Operands(NamedTuple):
    """The operands of a call: rows as bytes, as they travel, and weights."""

    layout: RowBytes
    given: torch.Tensor
    weights: list[ScaledWeight]
    counts: Sequence[int]

    def rows(self) -> Scaled:
        return self.layout.unpack(self.given)


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") + 0.5


def weight(experts: int, n: int, k: int, kind: str, *, has_bias: bool) -> ScaledWeight:
    """Matrices with gaps of NaN between them and their lines."""
    held = torch.full((experts, n + 3, k + 32), 255, device="cuda", dtype=torch.uint8).view(E4M3)
    values = held[:, :n, :k]
    values.copy_(randn(experts, n, k) / k**0.5 * 8)
    scaling = BY_NAME[kind]
    scale = _scales(*scale_shape((experts, k, n), scaling.b))
    bias = randn(experts, n) if has_bias else None
    return ScaledWeight(values.mT, scale, bias, scaling, torch.bfloat16, False)


def operands(
    counts: Sequence[int], n: int, k: int, kind: str, *, weights: int = 1, room: int = 0
) -> Operands:
    """Rows that there is only room for are NaN, and so are their scales."""
    m = sum(counts)
    capacity = max(1, m + room)
    values = randn(capacity, k).to(E4M3)
    scale = _scales(*scale_shape((capacity, k), BY_NAME[kind].a))
    values[m:].view(torch.uint8).fill_(255)
    scale[m:] = torch.nan
    rows = Scaled(values, scale, BY_NAME[kind].a)
    layout = RowBytes.of(rows)
    made = [weight(len(counts), n, k, kind, has_bias=room > 0) for _ in range(weights)]
    return Operands(layout, layout.pack(rows), made, counts)


def launched(config: Any, given: Operands, **options: Any) -> torch.Tensor:
    """The result of the kernel."""
    rows, epilogue = given.rows(), Epilogue("silu_mul") if len(given.weights) == 2 else None
    call = described(rows, given.weights, epilogue)
    assert call is not None
    call = call._replace(arguments=(config, *call.arguments[1:]))
    call.out.fill_(torch.nan)
    scales = grouped_kernel.scales_of_rows(rows.scale)
    offsets = offsets_of(given.counts)
    return grouped_kernel.launch(call, rows.values, offsets, scales=scales, **options)


def faults(out: torch.Tensor, given: Operands) -> list[str]:
    """What is wrong with a result: an expert's rows differ from float64 by more than the roundings
    of the result and of the tensor cores, or a row behind the last expert's is not 0."""
    m = sum(given.counts)
    found = [] if bool((out[m:] == 0).all()) else ["a row behind the last is not 0"]
    rows = given.rows()
    ends = torch.tensor([0, *given.counts]).cumsum(0).tolist()
    for expert, (begin, end) in enumerate(pairwise(ends)):
        if begin == end:
            continue
        a = rows.rows(slice(begin, end)).dequantised().double()
        products, sums = [], []
        for one in given.weights:
            of_expert = one.of_expert(expert)
            b = of_expert.B.dequantised().double()
            bias = 0 if of_expert.bias is None else of_expert.bias.double()
            products.append(a @ b + bias)
            sums.append(a.abs() @ b.abs())
        wanted, allowed = products[0], 2**-11 * sums[0]
        if len(products) == 2:
            (wanted,) = activation_work.activated("silu_mul", products)
            allowed = 2**-11 * (1 + sums[0] + sums[1]) * (1 + wanted.abs())
        allowed = allowed + 2**-8 * wanted.abs() + 1e-6
        worst = ((out[begin:end].double() - wanted).abs() / allowed).max().item()
        if not worst <= 1:
            label = f"expert {expert} of {end - begin} rows"
            found.append(f"{label}: an element is wrong by {worst:.3g} times what is allowed")
    return found


def faults_of_late_rows(config: Any, kind: str, weights: int) -> list[str]:
    """What is wrong with results whose rows come while the kernel runs. Every row and its scales
    are NaN until just before it is counted."""
    sources, experts = 4, 6
    numbers = random.Random(3)
    sizes = [[numbers.choice([0, 1, 40, 150]) for _ in range(sources)] for _ in range(experts)]
    given = operands([sum(of_expert) for of_expert in sizes], 1160, 528, kind, weights=weights)
    source_of_row = torch.tensor(
        [source for of in sizes for source, size in enumerate(of) for _ in range(size)],
        device="cuda",
    )
    flat = torch.tensor([size for of_expert in sizes for size in of_expert])
    begins = (flat.cumsum(0) - flat).int().view(experts, sources).cuda()
    arriving = torch.tensor(sizes, dtype=torch.int32, device="cuda").t().contiguous()
    wanted = launched(config, given)
    late = given._replace(given=torch.empty_like(given.given))
    arrived, feeder = torch.zeros_like(arriving), torch.cuda.Stream()
    pieces = [(source_of_row == number).nonzero()[:, 0] for number in range(sources)]

    def feed(first: int) -> None:
        with torch.cuda.stream(feeder):
            for i in range(sources):
                number = (first + i) % sources
                torch.cuda._sleep(50_000)
                of_source = given.given.index_select(0, pieces[number])
                late.given.index_copy_(0, pieces[number], of_source)
                arrived[number].copy_(arriving[number])

    found = []
    for first in range(sources):
        feed(first)  # the first launch of a kernel waits for the device
        torch.cuda.synchronize()
        late.given.fill_(255)  # NaN in fp8 and, four of them, in float32
        arrived.zero_()
        poison_freed_memory(2 * sum(given.counts) * 1160)
        torch.cuda.synchronize()
        arrival = grouped_kernel.Arrival(arrived, begins, first, 0)
        out = launched(config, late, sm_count=64, arrival=arrival)
        feed(first)
        torch.cuda.synchronize()
        if not torch.equal(out, wanted):
            found.append(f"{config.name}: a result differs where source {first} comes first")
    return found
