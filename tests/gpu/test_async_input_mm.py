"""`_async_input_mm` on one GPU."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import agmm
from agmm import _core
from agmm.ops import async_input_mm
from agmm.planning import call_plans, heuristics, legality
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig, Problem
from agmm.testing.reference import allowed_error, gathered_product, relative_error

KERNELS = list(kernels_of(ALL_GATHER_MATMUL, "bfloat16"))
SHAPES = [
    # M, N, K, chunks
    (8, 8, 8, 1),
    (8, 8, 8, 8),
    (128, 256, 64, 2),
    (100, 136, 72, 4),
    (384, 264, 520, 3),
    (1000, 520, 136, 5),
    (640, 2112, 328, 5),
    (70 * 8, 256, 128, 70),
    (1024, 3584, 512, 4),
    (4096, 384, 256, 4),
]


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def assert_close(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    label: str,
    bias: torch.Tensor | None = None,
) -> None:
    reference = gathered_product(a, b, bias)
    peer = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    allowed = allowed_error(relative_error(peer, reference))
    error = relative_error(out, reference)
    assert error <= allowed, f"{label}: error {error:.3g}, allowed {allowed:.3g}"


def poison_freed_memory(m: int, n: int) -> None:
    torch.full((m * n + 512,), torch.nan, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.kernel)
@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_kernel(kernel: KernelConfig, column_major: bool, dtype: torch.dtype) -> None:
    draw = random.Random(1)
    for m, n, k, chunks in SHAPES:
        a = randn(m, k, dtype=dtype)
        b = randn(n, k, dtype=dtype).t() if column_major else randn(k, n, dtype=dtype)
        signals = torch.ones(chunks, dtype=torch.int32, device="cuda").view(torch.uint32)
        raster = draw.choice(("along_m", "along_n"))
        name = f"{kernel.kernel}/swizzle{draw.choice((1, 2, 4, 8))}/{raster}"
        name += draw.choice(("", "/across"))
        few_ctas = draw.choice((0, 4))  # with which the largest tiles take more than a wave too
        poison_freed_memory(m, n)
        pivot = draw.randrange(chunks)
        out = async_input_mm.on_cuda(
            a, b, signals, pivot, config=KernelConfig.parse(name), sm_count=few_ctas
        )
        assert_close(out, a, b, f"{m}x{n}x{k} chunks {chunks} pivot {pivot} {name}")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.kernel)
@pytest.mark.parametrize("column_major", [True, False])
def test_bias_and_leading_dimension(kernel: KernelConfig, column_major: bool) -> None:
    for m, n, k in ((100, 136, 72), (333, 520, 328)):
        a, bias = randn(m, k, dtype=torch.bfloat16), randn(n, dtype=torch.bfloat16)
        rows, columns = (n, k) if column_major else (k, n)
        b = randn(rows, columns + 24, dtype=torch.bfloat16)[:, :columns]
        b = b.t() if column_major else b
        poison_freed_memory(m, n)
        out = async_input_mm.on_cuda(a, b, None, 0, bias=bias, config=kernel)
        reference = gathered_product(a, b, bias)
        allowed = allowed_error(relative_error(torch.addmm(bias, a, b), reference))
        assert relative_error(out, reference) <= allowed, f"{m}x{n}x{k}"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.kernel)
def test_last_rows(kernel: KernelConfig) -> None:
    """They are loaded by a descriptor of their own where they are no whole tile."""
    n, k = 2 * kernel.tile_n - 8, 11 * kernel.tile_k + 8  # more k tiles than stages
    b = randn(n, k, dtype=torch.bfloat16).t()
    for last in (1, 7, 8, 9, 31, 33, 64, 95, kernel.tile_m - 1):
        for tiles_before in (0, 2, 3):
            m = tiles_before * kernel.tile_m + last
            a = randn(m, k, dtype=torch.bfloat16)
            poison_freed_memory(m, n)
            out = async_input_mm.on_cuda(a, b, None, 0, config=kernel)
            assert_close(out[-last:], a[-last:], b, f"last {last} of {m} rows")
            assert_close(out, a, b, f"{m} rows")


def splitting(m: int, n: int, k: int) -> list[KernelConfig]:
    """The kernels with every number of splits of K that is legal for this problem."""
    problem = call_plans.problem_of((m, n, k), torch.bfloat16, torch.device("cuda", 0))
    return [
        p.kernel
        for kernel in KERNELS
        for p in heuristics.usual_plans(problem, kernel)
        if p.kernel is not None and p.kernel.splits > 1
    ]


splits_k = pytest.mark.skipif(
    not any(kernel.can_split for kernel in KERNELS), reason="no kernel of this build splits K"
)


@splits_k
@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_splits_of_k(column_major: bool, dtype: torch.dtype) -> None:
    for m, n, k, chunks in (
        (8, 8, 136, 2),
        (100, 136, 520, 4),
        (384, 264, 1032, 3),
        (256, 3584, 8192, 4),
    ):
        a = randn(m, k, dtype=dtype)
        b = randn(n, k, dtype=dtype).t()
        b = b if column_major else b.contiguous()
        bias = randn(n, dtype=dtype) if m != 256 else None
        signals = torch.ones(chunks, dtype=torch.int32, device="cuda").view(torch.uint32)
        configs = splitting(m, n, k)
        assert configs
        for config in configs:
            poison_freed_memory(m, n)
            outs = [
                async_input_mm.on_cuda(a, b, signals, 0, bias=bias, config=config)
                for _ in range(20)
            ]
            assert_close(outs[0], a, b, f"{m}x{n}x{k} {config.name}", bias)
            assert all(torch.equal(out, outs[0]) for out in outs), f"{config.name} does not repeat"


@splits_k
def test_illegal_splits() -> None:
    a, b = randn(256, 128, dtype=torch.bfloat16), randn(128, 264, dtype=torch.bfloat16)
    wide = next(kernel for kernel in KERNELS if kernel.can_split)
    narrow = next(kernel for kernel in KERNELS if not kernel.can_split)
    for config, words in (
        (replace(wide, splits=3), "3 splits of 2 k tiles"),
        (replace(wide, splits=-1), "-1 splits of 2 k tiles"),
        (replace(narrow, splits=2), "a kernel that can split K"),
    ):
        with pytest.raises(agmm.InvalidArgument, match=words):
            async_input_mm.on_cuda(a, b, None, 0, config=config)
    with pytest.raises(agmm.InvalidArgument, match="wanted one wave"):
        async_input_mm.on_cuda(a, b, None, 0, config=replace(wide, splits=2), sm_count=4)


@splits_k
def test_splits_of_k_on_a_stream_that_has_the_handle_of_a_destroyed_one() -> None:
    """A process of its own has few streams, so that the driver gives the handle again soon."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reused_handle.py"))],
        env={**os.environ, "AGMM_TIMEOUT_S": "30", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.removeprefix("skipped: ").strip())


def feed(
    stream: torch.cuda.Stream,
    parts: list[tuple[int, int]],
    source: torch.Tensor,
    a: torch.Tensor,
    signals: torch.Tensor,
) -> None:
    """Brings these chunks of ``source`` into ``a``, one after the other, at random intervals."""
    rows, columns = a.shape[0] // signals.shape[0], -(-a.shape[1] // (8 * signals.shape[1])) * 8
    with torch.cuda.stream(stream):
        for i, j in parts:
            torch.cuda._sleep(random.randrange(1, 40_000))
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            torch.add(source[place], 0, out=a[place])  # a copy may wait for the device
            signals[i, j].fill_(1)


def fits_in_one_wave(kernel: KernelConfig, m: int, n: int, k: int, sm_count: int) -> bool:
    """Only tiles whose K is split have to."""
    problem = Problem(m, n, k, sm_count=sm_count)
    return kernel.splits in legality.legal_splits(problem, kernel)


@pytest.mark.parametrize(
    "kernel",
    [
        *KERNELS,
        *(replace(kernel, across=True) for kernel in KERNELS),
        *(replace(kernel, splits=2) for kernel in KERNELS if kernel.can_split),
    ],
    ids=lambda k: k.name,
)
@pytest.mark.parametrize("chunks_k", [1, 2])
def test_waits_for_chunks_that_come_late(kernel: KernelConfig, chunks_k: int) -> None:
    """Every chunk is NaN until just before its signal; chunks come in a random order."""
    draw = random.Random(2)
    # Few, so that there is more than a wave, which goes across the chunks whatever is asked for.
    sm_count = 48 if kernel.splits > 1 else 4
    for m, n, k, chunks in (
        (512, 512, 256, 4),
        (1000, 264, 136, 5),
        (96, 128, 128, 96),
        (128, 264, 136, 4),
    ):
        if not fits_in_one_wave(kernel, m, n, k, sm_count):
            continue
        source = randn(m, k, dtype=torch.bfloat16)
        a = torch.empty_like(source)
        b = randn(n, k, dtype=torch.bfloat16).t()
        signals = torch.zeros(chunks, chunks_k, dtype=torch.int32, device="cuda")
        parts = [(i, j) for i in range(chunks) for j in range(chunks_k)]
        draw.shuffle(parts)
        feeder = torch.cuda.Stream()
        # Kernels are loaded at their first launch, which waits for the device: not beside one that
        # spins. So the first time is for nothing.
        feed(feeder, parts, source, a, signals)
        torch.cuda.synchronize()
        a.fill_(torch.nan)
        signals.zero_()
        poison_freed_memory(m, n)
        torch.cuda.synchronize()
        out = async_input_mm.on_cuda(
            a,
            b,
            signals.view(torch.uint32),
            draw.randrange(chunks),
            config=kernel,
            sm_count=sm_count,
        )
        feed(feeder, parts, source, a, signals)
        torch.cuda.synchronize()
        assert_close(out, source, b, f"{m}x{n}x{k} {kernel.name}")


def test_op_and_bias() -> None:
    a, b = randn(256, 128, dtype=torch.bfloat16), randn(128, 264, dtype=torch.bfloat16)
    signals = torch.ones(4, dtype=torch.int32, device="cuda").view(torch.uint32)
    assert_close(torch.ops.agmm._async_input_mm(a, b, signals, 3), a, b, "op")
    torch.library.opcheck(torch.ops.agmm._async_input_mm.default, (a, b, signals, 1))
    bias = randn(264, dtype=torch.bfloat16)
    out = async_input_mm.on_cuda(a, b, signals, 0, bias=bias)
    reference = gathered_product(a, b, bias)
    assert relative_error(out, reference) <= allowed_error(
        relative_error(torch.addmm(bias, a, b), reference)
    )


def test_strided_weight() -> None:
    a = randn(200, 128, dtype=torch.bfloat16)
    for b in (
        randn(128, 512, dtype=torch.bfloat16)[:, 64:328],
        randn(264, 256, dtype=torch.bfloat16)[:, 128:].t(),
    ):
        out = async_input_mm.on_cuda(a, b, None, 0)
        assert_close(out, a, b, f"strides {b.stride()}")


def test_bad_input() -> None:
    a, b = randn(64, 64, dtype=torch.bfloat16), randn(64, 64, dtype=torch.bfloat16)
    ready = torch.ones(4, dtype=torch.int32, device="cuda").view(torch.uint32)
    op = torch.ops.agmm._async_input_mm
    for arguments, words in (
        ((a.float(), b.float(), ready, 0), ("a: ", "float32", "bfloat16")),
        ((a, b.half(), ready, 0), ("b: ", "float16", "bfloat16")),
        ((a, b[:32], ready, 0), ("b: ", "K=32", "64")),
        ((a.t(), b, ready, 0), ("a: ", "strides", "contiguous")),
        ((a, b, ready.view(torch.int32), 0), ("a_chunk_signals: ", "int32", "uint32")),
        ((a, b, ready.cpu(), 0), ("a_chunk_signals: ", "cpu", "cuda")),
        ((a, b, ready[:3].clone(), 0), ("a_chunk_signals: ", "3", "M=64")),
        ((a, b, ready, 4), ("a_chunk_pivot: ", "4", "0 to 3")),
        ((a, b, ready, -1), ("a_chunk_pivot: ", "-1", "0 to 3")),
        ((a, b.cpu(), ready, 0), ("b: ", "cpu", "cuda")),
        ((a[:, :36].contiguous(), b[:36], ready, 0), ("K=36", "multiple of 8")),
        ((a, b[:, :36].contiguous(), ready, 0), ("N=36", "multiple of 8")),
        ((a, randn(128, 128, dtype=torch.bfloat16)[::2, ::2], ready, 0), ("b: ", "strides")),
    ):
        with pytest.raises(agmm.InvalidArgument) as error:
            op(*arguments)
        message = str(error.value)
        assert "\n" not in message
        assert all(word in message for word in words), message
    with pytest.raises(agmm.InvalidArgument, match="a kernel of this build"):
        async_input_mm.on_cuda(a, b, ready, 0, config=KernelConfig(64, 64, 64, 1, 1, "pingpong"))
    torch.cuda.synchronize()


LATE = """
import torch, agmm
a = torch.zeros(256, 64, device="cuda", dtype=torch.bfloat16)
signals = torch.tensor([1, 7], dtype=torch.int32, device="cuda").view(torch.uint32)
torch.ops.agmm._async_input_mm(a, a.t(), signals, 0)
torch.cuda.synchronize()
print("went on")
"""


def test_a_wait_ends() -> None:
    process = subprocess.run(
        [sys.executable, "-c", LATE],
        env={**os.environ, "AGMM_TIMEOUT_S": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 124, process
    assert "s for chunk 1: signal is 7" in process.stderr
    assert "went on" not in process.stdout


MEMCHECK = """
from dataclasses import replace
import torch
from agmm.planning.built_kernels import kernels_of
from agmm.ops import async_input_mm
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig
for kernel in kernels_of(ALL_GATHER_MATMUL, "bfloat16"):
    for m, n, k, chunks in ((8, 8, 8, 8), (200, 136, 72, 5), (384, 264, 136, 3)):
        a = torch.randn(m, k, device="cuda").bfloat16()
        b = torch.randn(n, k, device="cuda").bfloat16().t()
        signals = torch.ones(chunks, dtype=torch.int32, device="cuda").view(torch.uint32)
        for splits in (1, 2) if kernel.can_split and k > kernel.tile_k else (1,):
            config = replace(kernel, splits=splits)
            async_input_mm.on_cuda(a, b, signals, chunks - 1, config=config)
torch.cuda.synchronize()
print("kernels", len(kernels_of(ALL_GATHER_MATMUL, "bfloat16")))
"""


def test_memcheck() -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    process = subprocess.run(
        [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", MEMCHECK],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    assert f"kernels {len(KERNELS)}" in process.stdout
    assert "ERROR SUMMARY: 0 errors" in process.stdout


def test_kernels_are_built() -> None:
    assert _core.cuda_built
    assert KERNELS
