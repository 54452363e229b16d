"""What the tests of the streaming kernel that sums over the ranks run: ranks of one process on one
GPU, and ranks of a pool."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import early_start_work
import torch
import torch.distributed as dist
from collectives_stand_in import METHODS, StandIn
from gpu_work import group_of, last_ranks

import agmm
from agmm import _core
from agmm.ops import async_input_mm, invariant
from agmm.ops.quantize import quantised
from agmm.planning.built_kernels import kernels_of
from agmm.planning.legality import legal_splits
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig, Problem
from agmm.runtime import cuda_calls
from agmm.runtime.scaling import BY_NAME

KERNELS = [
    kernel
    for kernel in kernels_of(ALL_GATHER_MATMUL, "bfloat16", b_layout="column")
    if kernel.is_streaming
]
SHAPES = ((1, 8, 8), (1, 264, 1032), (2, 72, 136), (7, 1000, 520), (33, 264, 328), (65, 136, 264))
"""Rows, columns and K: fewer rows than splits, the last tile of rows and of columns not whole."""


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def configs(n: int, k: int) -> list[KernelConfig]:
    """The build's kernels with the splits that calls have, and in one split."""
    found = []
    for kernel in KERNELS:
        splits = {1, *legal_splits(Problem(64, n, k), kernel)}
        found += [replace(kernel, splits=one) for one in sorted(splits)]
    return found


KINDS = ("sum", "norm", "scatter", "average")
"""What one kernel makes of the products: an all-reduce, one whose rows are normed too, or a
reduce-scatter."""
EPS = 1e-5
FP8 = torch.float8_e4m3fn


def is_norm_of(normed: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether rows are the RMS norm of others, rounded once."""
    exact = total.double() * (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    return torch.allclose(normed.double(), exact * weight.double(), rtol=2**-7, atol=1e-6)


class Operands:
    """The operands of all ranks, and what their sum is by its definition."""

    def __init__(
        self,
        world_size: int,
        shape: tuple[int, int, int],
        config: KernelConfig,
        *,
        added: bool,
        kind: str = "sum",
    ) -> None:
        m, n, k = shape
        self.kind = kind
        self.is_scatter = kind in ("scatter", "average")
        m *= world_size if self.is_scatter else 1
        self.As = [randn(m, k) for _ in range(world_size)]
        self.Bs = [randn(n, k).t() for _ in range(world_size)]
        self.bias = randn(n) if added else None
        self.residual = randn(m, n) if added else None
        self.weight = randn(n) if kind == "norm" else None
        size = m // world_size if self.is_scatter else m, n
        self.outs = [torch.full(size, torch.nan).to(self.As[0]) for _ in range(world_size)]
        self.normed = [torch.full_like(out, torch.nan) for out in self.outs]
        self.wanted = self.sum_of(self.As, config)
        if self.weight is not None:
            total = self.wanted.float()
            scale = (total.square().mean(-1, keepdim=True) + EPS).rsqrt()
            self.near = (total * scale * self.weight.float()).bfloat16()
            self.quantized = {
                kind: [
                    (torch.zeros_like(one, dtype=FP8), randn(m, count, dtype=torch.float32))
                    for one in self.normed
                ]
                for kind, count in (("rowwise", 1), ("block", -(-n // 128)))
            }

    def sum_of(self, As: list[torch.Tensor], config: KernelConfig) -> torch.Tensor:
        """The sum by its definition, where the ranks have these rows."""
        products = [
            async_input_mm.on_cuda(A, B, None, 0, config=config)
            for A, B in zip(As, self.Bs, strict=True)
        ]
        total = products[0].float()
        for other in products[1:]:
            total = total + other.float()
        if self.kind == "average":
            total = total * (1.0 / len(As))
        for more in (self.bias, self.residual):
            total = total if more is None else total + more.float()
        return total.bfloat16()

    def enqueue(
        self,
        ranks: StandIn,
        rank: int,
        config: KernelConfig,
        method: _core.CollectiveMethod,
        quantize_out: str | None = None,
    ) -> None:
        A, B, residual = self.As[rank], self.Bs[rank], self.residual
        kernel = cuda_calls.Kernel(config.core, cuda_calls.plain_format("A", A))
        problem = cuda_calls.ready_matmul(A, B, None, 0, kernel).problem
        core, stream = ranks.cores[rank], ranks.streams[rank].cuda_stream
        if self.is_scatter and residual is not None:
            residual = residual.chunk(len(self.As))[rank]
        given = [A, B, self.bias, residual, self.outs[rank]]
        if self.is_scatter:
            is_average = self.kind == "average"
            core.streamed_reduce_scatter(problem, _addresses(given), is_average, stream)
            return
        normed, scales = None if self.weight is None else self.normed[rank], None
        if quantize_out is not None:
            normed, scales = self.quantized[quantize_out][rank]
        given += [self.weight, normed, scales]
        of_blocks = quantize_out == "block"
        core.streamed_all_reduce(method, problem, _addresses(given), stream, EPS, of_blocks)

    def wrong(self, rank: int) -> torch.Tensor:
        """How many elements of a rank's results are wrong. Sums are right to the bit, and norms
        are the same bits on all ranks."""
        wanted = self.wanted.chunk(len(self.As))[rank] if self.is_scatter else self.wanted
        found = (self.outs[rank] != wanted).sum()
        if self.weight is None:
            return found
        # An element of bf16 has 8 bits: the float32 in which it is computed may round to the next.
        near = torch.isclose(self.normed[rank], self.near, rtol=2**-7, atol=1e-6)
        return found + (~near).sum() + (self.normed[rank] != self.normed[0]).sum()

    def wrong_quantized(self, kind: str, rank: int) -> int:
        """How many values and scales differ from those of the norm, whose bits are the same in
        every call."""
        values, scales = self.quantized[kind][rank]
        wanted = quantised(self.normed[rank], BY_NAME[kind].a)
        different = values.view(torch.uint8) != wanted[0].view(torch.uint8)
        return int(different.sum() + (scales != wanted[1]).sum())


def _addresses(tensors: list[torch.Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def wrong_on_one_gpu(world_size: int, kinds: tuple[str, ...] = KINDS) -> list[str]:
    """Faults of calls of every kernel and kind, with and without what is added."""
    ranks, faults = StandIn(world_size), []
    for shape in SHAPES:
        for config in configs(*shape[1:]):
            for kind, added, method in product(kinds, (False, True), METHODS[:2]):
                operands = Operands(world_size, shape, config, added=added, kind=kind)
                torch.cuda.synchronize()
                for rank in range(world_size):
                    operands.enqueue(ranks, rank, config, method)
                torch.cuda.synchronize()
                wrong = [int(operands.wrong(rank)) for rank in range(world_size)]
                for scales in ("rowwise", "block") if kind == "norm" else ():
                    for rank in range(world_size):
                        operands.enqueue(ranks, rank, config, method, scales)
                    torch.cuda.synchronize()
                    wrong = [
                        count + operands.wrong_quantized(scales, rank)
                        for rank, count in enumerate(wrong)
                    ]
                faults += [
                    f"{kind} of {shape} by {config.name}, {method}, {added}, rank {rank}: {count}"
                    for rank, count in enumerate(wrong)
                    if count
                ]
    left = ranks.unclean_words()
    return [*faults, *([f"{left} words left behind"] if left else [])]


def wrong_by_late_ranks(
    world_size: int, calls: int, seed: int, kinds: tuple[str, ...] = KINDS
) -> list[str]:
    """Faults of calls in turn, before each of which some ranks are late, on one GPU."""
    ranks, draw = StandIn(world_size), random.Random(seed)
    shapes = [shape for shape in SHAPES if shape[0] < 8]
    sets = []
    for shape, kind in product(shapes, kinds):
        config = replace(KERNELS[0], splits=configs(*shape[1:])[0].splits)
        sets.append((Operands(world_size, shape, config, added=True, kind=kind), config))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(calls):
        (operands, config), method = draw.choice(sets), draw.choice(METHODS[:2])
        for rank, stream in enumerate(ranks.streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                operands.outs[rank].fill_(torch.nan)
                operands.normed[rank].fill_(torch.nan)
                if draw.random() < 0.3:
                    torch.cuda._sleep(draw.randrange(1, 200_000))
            operands.enqueue(ranks, rank, config, method)
        ranks.wait()
        for rank in range(world_size):
            wrong += operands.wrong(rank)
    found = int(wrong)
    return [f"{found} elements"] if found else []


def behind_a_late_kernel(captured: bool) -> None:
    """Raises AssertionError where a sum reads A before the kernel ahead, which lets it start at
    once and is late, has written it: in a process that has AGMM_EARLY_START=weights."""
    late_copy, ranks, shape = early_start_work.late_copier(), StandIn(2), (2, 264, 1032)
    config = configs(*shape[1:])[0]
    operands = Operands(2, shape, config, added=True)
    calls: list[Callable[[], Any]] = []
    sources = [A.clone() for A in operands.As]

    def call(rank: int) -> None:
        with torch.cuda.stream(ranks.streams[rank]):
            late_copy(operands.As[rank], sources[rank])
            operands.enqueue(ranks, rank, config, METHODS[0])

    for rank in range(2):
        call(rank)  # which loads the kernels
    torch.cuda.synchronize()
    for rank in range(2):
        if not captured:
            calls.append(partial(call, rank))
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            call(rank)
        calls.append(graph.replay)
    for _ in range(20):
        for source in sources:
            source.copy_(randn(*source.shape))
        wanted = operands.sum_of(sources, config)
        torch.cuda.synchronize()
        for rank, run in enumerate(calls):
            with torch.cuda.stream(ranks.streams[rank]):
                run()
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted) for out in operands.outs)


# --- ranks of a pool ---


def _of_ranks(
    world_size: int, shape: tuple[int, int, int], seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device="cuda").bfloat16()

    As = [numbers(m, k) for _ in range(world_size)]
    Bs = [numbers(n, k).t() for _ in range(world_size)]
    return As, Bs, numbers(n), numbers(m, n)


def _wanted(As: Any, Bs: Any, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The sum by its definition, of products that the call's kernel makes."""
    total: Any = None
    for A, B in zip(As, Bs, strict=True):
        kernel = invariant.kernel_of(A, B)
        part = async_input_mm.on_cuda(A, B, None, 0, config=kernel).float()
        total = part if total is None else total + part
    found: torch.Tensor = (total + bias.float() + residual.float()).bfloat16()
    return found


def values(world_size: int) -> list[str] | None:
    """Faults of eager, kept and captured calls, in turn with calls of collectives."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for m, n, k in ((1, 8192, 1024), (3, 264, 1032), (64, 8192, 896), (1, 16640, 512)):
        As, Bs, bias, residual = _of_ranks(world_size, (m, n, k), m + n)
        wanted = _wanted(As, Bs, bias, residual)
        A, B = As[rank].clone(), Bs[rank]

        def call(A: torch.Tensor = A, B: torch.Tensor = B, more: Any = (bias, residual)) -> Any:
            options: Any = {"config": "streamed", "strict": True}
            return agmm.matmul_all_reduce(A, B, group, bias=more[0], residual=more[1], **options)

        label = f"rank {rank}: {m} x {n} x {k}"
        for turn in range(3):
            agmm.collectives.all_reduce(A, group)
            if not torch.equal(call(), wanted):
                faults.append(f"{label}, call {turn}")
        torch.cuda.synchronize()
        dist.barrier(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            replayed = [call() for _ in range(3)]
        for factor in (1.0, 0.5):  # which changes no digit
            A.copy_(As[rank] * factor)
            scaled = _wanted([one * factor for one in As], Bs, bias, residual)
            graph.replay()
            faults += [
                f"{label}, replay at {factor}" for one in replayed if not torch.equal(one, scaled)
            ]
            if not torch.equal(call(), scaled):
                faults.append(f"{label}, between replays")
        normed, total = agmm.matmul_all_reduce_rms_norm(
            *(A, B, residual, bias.abs(), EPS, group), bias=bias, config="streamed", strict=True
        )
        if not torch.equal(total, scaled):
            faults.append(f"{label}: the sum that is normed")
        if not is_norm_of(normed, total, bias.abs()):
            faults.append(f"{label}: the norm")
        for kind in ("rowwise", "block"):
            found, _ = agmm.matmul_all_reduce_rms_norm(
                *(A, B, residual, bias.abs(), EPS, group),
                bias=bias,
                config="streamed",
                strict=True,
                quantize_out=kind,
            )
            pairs = zip(found, quantised(normed, BY_NAME[kind].a), strict=True)
            if not all(torch.equal(a.float(), b.float()) for a, b in pairs):
                faults.append(f"{label}: the norm in fp8, {kind}")
        del graph
    return faults


def stress(world_size: int, calls: int, seed: int) -> list[str] | None:
    """Faults of many calls of drawn shapes, in turn with collectives, by ranks that are late."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, draw = dist.get_rank(group), random.Random(seed)
    own = random.Random(100 * seed + rank)
    sets = []
    for shape in ((1, 2048, 512), (2, 264, 1032), (9, 1000, 520)):
        As, Bs, bias, residual = _of_ranks(world_size, shape, sum(shape) + seed)
        sets.append((As[rank], Bs[rank], bias, residual, _wanted(As, Bs, bias, residual)))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(calls):
        A, B, bias, residual, wanted = draw.choice(sets)
        if own.random() < 0.05:
            torch.cuda._sleep(own.randrange(1, 500_000))
        out = agmm.matmul_all_reduce(
            *(A, B, group), bias=bias, residual=residual, config="streamed", strict=True
        )
        wrong += (out != wanted).sum()
        if draw.random() < 0.2:
            agmm.collectives.all_reduce(A, group)
    found = int(wrong)
    return [f"rank {rank}: {found} elements of {calls} calls"] if found else []


def _call(rows: int) -> None:
    A = torch.ones(rows, 512, device="cuda", dtype=torch.bfloat16)
    B = torch.ones(1024, 512, device="cuda", dtype=torch.bfloat16).t()
    agmm.matmul_all_reduce(A, B, config="streamed", strict=True)
    torch.cuda.synchronize()


def missing() -> None:
    """Rank 1 stays away from the second call."""
    _call(4)
    if dist.get_rank() != 1:
        _call(4)
    time.sleep(30)


def different() -> None:
    """Rank 1 sums other rows in the second call."""
    _call(4)
    _call(4 + dist.get_rank() % 2)
    time.sleep(30)


def refused(world_size: int) -> list[str] | None:
    """Faults of calls that no such kernel serves: too many rows, and another dtype."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    faults = []
    for rows, dtype, said in (
        (4096, torch.bfloat16, "does not have room for the packets"),
        (4, torch.float32, "float32"),
    ):
        A, B = randn(rows, 64, dtype=dtype), randn(8192, 64, dtype=dtype).t()
        try:
            agmm.matmul_all_reduce(A, B, group, config="streamed", strict=True)
            faults.append(f"{rows} rows of {dtype} were served")
        except agmm.Unsupported as error:
            if said not in str(error):
                faults.append(str(error))
    return faults
