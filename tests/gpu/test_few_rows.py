"""The streaming kernels, on one GPU."""

from __future__ import annotations

from dataclasses import replace

import epilogue_work as work
import packed_gpu_work
import pytest
import torch
from at_hand import world_sizes
from scaled_gpu_work import E4M3, by_torch, operands

import agmm
from agmm import _core
from agmm.ops import async_input_mm, async_input_scaled_mm
from agmm.planning import call_plans, legality
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig, Problem
from agmm.runtime import cuda_calls, cuda_lists, cuda_packed
from agmm.runtime.epilogues import Epilogue
from agmm.testing.ranks import RankPool
from agmm.testing.reference import allowed_error, gathered_product, relative_error

KERNELS = [kernel for kernel in kernels_of(ALL_GATHER_MATMUL, "bfloat16") if kernel.is_streaming]
WEIGHTS = [
    # N, K
    (8, 8),
    (72, 136),
    (264, 1032),
    (1000, 520),
    (2112, 328),
    (3584, 4096),
    (9000, 264),  # more tiles than multiprocessors
]
ROWS = (1, 2, 7, 8, 9, 16, 31, 33, 64, 65, 130)

pytestmark = pytest.mark.skipif(
    not KERNELS, reason="found no streaming kernel, wanted AGMM_KERNELS=default"
)

of_kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.kernel)
of_layouts = pytest.mark.parametrize("column_major", [True, False], ids=["column", "row"])
of_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def is_built(kernel: KernelConfig, dtype: torch.dtype, *, column_major: bool) -> bool:
    """Whether the build has the kernel for these operands; a small one has it for some."""
    name = str(dtype).removeprefix("torch.")
    layout = "column" if column_major else "row"
    return any(
        (facts.kernel, facts.dtype.name, facts.b_layout) == (kernel.kernel, name, layout)
        for facts in _core.kernel_facts()
    )


def skip_unless_built(kernel: KernelConfig, dtype: torch.dtype, *, column_major: bool) -> None:
    if not is_built(kernel, dtype, column_major=column_major):
        pytest.skip("the build has no such kernel")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def weight(n: int, k: int, dtype: torch.dtype, *, column_major: bool) -> torch.Tensor:
    """A weight with a leading dimension larger than its rows."""
    rows, columns = (n, k) if column_major else (k, n)
    held = randn(rows, columns + 24, dtype=dtype)[:, :columns]
    return held.t() if column_major else held


def usual(kernel: KernelConfig, n: int, k: int) -> KernelConfig:
    """The kernel with the splits that every call has; with one where these are no cluster."""
    legal = legality.legal_splits(Problem(64, n, k), kernel)
    return replace(kernel, splits=legal[0] if legal else 1)


def poison_freed_memory(m: int, n: int) -> None:
    torch.full((m * n + 512,), torch.nan, dtype=torch.bfloat16, device="cuda")


@of_kernels
@of_layouts
@of_dtypes
def test_products(kernel: KernelConfig, column_major: bool, dtype: torch.dtype) -> None:
    skip_unless_built(kernel, dtype, column_major=column_major)
    for n, k in WEIGHTS:
        b = weight(n, k, dtype, column_major=column_major)
        most = _core.MAX_STREAMING_CLUSTER // kernel.cluster_n
        splits = {1, usual(kernel, n, k).splits, min(most, -(-k // kernel.tile_k))}
        all_rows, bias = randn(max(ROWS), k, dtype=dtype), randn(n, dtype=dtype)
        for added in (None, bias):
            products = gathered_product(all_rows, b, added)
            for m in ROWS:
                a, reference = all_rows[:m].clone(), products[:m]
                peer = torch.mm(a, b) if added is None else torch.addmm(added, a, b)
                allowed = allowed_error(relative_error(peer, reference))
                for of_splits in splits:
                    config = replace(kernel, splits=of_splits)
                    poison_freed_memory(m, n)
                    out = async_input_mm.on_cuda(a, b, None, 0, bias=added, config=config)
                    error = relative_error(out, reference)
                    label = f"{m}x{n}x{k}, {of_splits} splits, bias {added is not None}"
                    assert error <= allowed, f"{label}: error {error:.3g}, allowed {allowed:.3g}"


@of_layouts
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_the_bits_of_a_row_are_its_own(n: int, k: int, column_major: bool) -> None:
    """They depend neither on the other rows nor on the tile, nor on when CTAs run."""
    dtype = torch.bfloat16 if column_major else torch.float16
    kernels = [one for one in KERNELS if is_built(one, dtype, column_major=column_major)]
    if not kernels:
        pytest.skip("the build has no such kernel")
    a, b = randn(130, k, dtype=dtype), weight(n, k, dtype, column_major=column_major)
    bias, wanted = randn(n, dtype=dtype), None
    for kernel in kernels:
        config = usual(kernel, n, k)
        if config.splits != usual(kernels[0], n, k).splits:
            continue  # such splits are no cluster of this kernel
        for m in ROWS:
            for begin in {0, 130 - m}:
                rows = a[begin : begin + m].clone()
                out = async_input_mm.on_cuda(rows, b, None, 0, bias=bias, config=config)
                if wanted is None:
                    wanted = torch.empty(130, n, device="cuda", dtype=dtype)
                    for row in range(130):
                        one = a[row : row + 1].clone()
                        wanted[row] = async_input_mm.on_cuda(
                            one, b, None, 0, bias=bias, config=config
                        )[0]
                label = f"{kernel.kernel}, rows {begin} to {begin + m}"
                assert torch.equal(out, wanted[begin : begin + m]), label


def _in_one_launch(
    a: torch.Tensor,
    bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    config: KernelConfig,
    sm_count: int,
) -> list[torch.Tensor]:
    kernels = [cuda_calls.Kernel(config.core, cuda_calls.plain_format("a", a))] * len(bs)
    assert cuda_lists.share_a_launch(bs, kernels)
    call = cuda_lists.ready_matmuls(a, bs, None, 0, kernels, sm_count=sm_count)
    return call(a, bs, None, biases)


@of_kernels
@of_layouts
def test_several_weights_in_one_launch(kernel: KernelConfig, column_major: bool) -> None:
    """Each product has the bits of a launch of its own with the same splits."""
    skip_unless_built(kernel, torch.bfloat16, column_major=column_major)
    for k, sizes in ((136, (72, 8)), (1032, (264, 72, 8, 520)), (4096, (4096, 1024, 1024))):
        bs = [weight(n, k, torch.bfloat16, column_major=column_major) for n in sizes]
        biases = [None, *(randn(n) for n in sizes[1:])]
        most = _core.MAX_STREAMING_CLUSTER // kernel.cluster_n
        for splits in {1, min(most, -(-k // kernel.tile_k))}:
            config = replace(kernel, splits=splits)
            for m in (1, 8, 33, 130):
                for sm_count in (0, 16):
                    a = randn(m, k)
                    poison_freed_memory(m, sum(sizes))
                    outs = _in_one_launch(a, bs, biases, config, sm_count)
                    for b, bias, out in zip(bs, biases, outs, strict=True):
                        one = async_input_mm.on_cuda(a, b, None, 0, bias=bias, config=config)
                        label = f"{m}x{b.shape[1]}x{k} {config.name} of {sizes}, {sm_count} CTAs"
                        assert torch.equal(out, one), label


@pytest.mark.parametrize("name", ["silu", "silu_mul", "gelu", "gelu_tanh_mul"])
@of_layouts
@of_dtypes
def test_activations(name: str, column_major: bool, dtype: torch.dtype) -> None:
    """`test_epilogues` has every kernel with one split of K."""
    epilogue = Epilogue(name)
    form, layout = str(dtype).removeprefix("torch."), "column" if column_major else "row"
    built = kernels_of(ALL_GATHER_MATMUL, form, epilogue.kernel, layout)
    kernels = [kernel for kernel in built if kernel.is_streaming]
    if not kernels:
        pytest.skip("the build has no such kernel")
    for n, k in ((264, 1032), (1000, 520), (3584, 4096)):
        bs, biases = work.weights(name, n, k, dtype, column_major=column_major, seed=n)
        a = randn(130, k, dtype=dtype)
        for splits in {2, _core.streaming_splits(len(bs) * n, k)}:
            wanted = None
            for kernel in kernels:
                config = replace(kernel, splits=splits)
                for m in (130, 65, 33, 8, 1):
                    rows = a[:m].clone()
                    poison_freed_memory(m, n)
                    out = async_input_mm.activated_on_cuda(
                        rows, bs, None, 0, epilogue, config=config, biases=biases
                    )
                    label = f"{name} {m}x{n}x{k} {config.name}"
                    assert work.fault(label, name, out, (rows, bs, biases)) == []
                    wanted = out if wanted is None else wanted
                    assert torch.equal(out, wanted[:m]), label


FP8 = [
    (accumulation, kernel)
    for accumulation in _core.Accumulation.__members__
    for kernel in kernels_of(ALL_GATHER_MATMUL, f"float8_e4m3fn_float8_e4m3fn {accumulation}")
    if kernel.is_streaming
]


@pytest.mark.parametrize("accumulation", list(_core.Accumulation.__members__))
def test_the_bits_of_a_row_of_fp8_are_its_own(accumulation: str) -> None:
    """They are with every tile, every kind of scales and all splits of K."""
    kernels = [kernel for name, kernel in FP8 if name == accumulation]
    if not kernels:
        pytest.skip("the build has no such kernel")
    scaling = {"block": "block", "block_1x128": "block 1x128"}.get(accumulation, "rowwise")
    fast_accum = accumulation == "fast"
    for n, k in ((264, 528), (1000, 1168), (3584, 4096)):
        given = operands(scaling, 130, n, k, (E4M3, E4M3), n)
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        for splits in {1, 3, _core.streaming_splits(n, k, 8)}:
            wanted = None
            for kernel in kernels:
                config = replace(kernel, splits=splits)
                for m in reversed(ROWS):
                    for begin in {0, 130 - m}:
                        rows = given.rows(slice(begin, begin + m))
                        poison_freed_memory(m, n)
                        out = async_input_scaled_mm.on_cuda(
                            rows, None, 0, bias=bias, fast_accum=fast_accum, config=config
                        )
                        if wanted is None:
                            wanted = out
                            reference = given.product(bias)
                            allowed = allowed_error(
                                relative_error(by_torch(given, fast_accum, bias), reference)
                            )
                            assert relative_error(out, reference) <= allowed, config.name
                        label = f"{config.name}, rows {begin} to {begin + m} of {n} x {k}"
                        assert torch.equal(out, wanted[begin : begin + m]), label


@of_kernels
def test_calls_repeat(kernel: KernelConfig) -> None:
    """They do with few CTAs too, which compute several tiles each."""
    skip_unless_built(kernel, torch.bfloat16, column_major=True)
    n, k = 1000, 1160
    a, b = randn(40, k), randn(n, k).t()
    for splits in range(1, _core.MAX_STREAMING_CLUSTER // kernel.cluster_n + 1):
        config = replace(kernel, splits=splits)
        first = async_input_mm.on_cuda(a, b, None, 0, config=config)
        for i in range(50):
            sm_count = (0, 8, 16, 40)[i % 4]
            again = async_input_mm.on_cuda(a, b, None, 0, config=config, sm_count=sm_count)
            assert torch.equal(first, again), f"{config.name}, {sm_count} CTAs"


@pytest.mark.parametrize("group_size", [0, 32, 64, 128, 256], ids="groups of {}".format)
def test_weights_of_4_bits(group_size: int) -> None:
    """Products are those of the values times their scales, rounded once, and a row's bits are its
    own. 0: a group is all of K."""
    for n, k in ((8, 8), (72, 136), (264, 1024), (1000, 768), (3584, 4096), (9000, 256)):
        size = group_size or k
        if k % size:
            continue
        values = torch.randint(-8, 8, (n, k), device="cuda")
        scales = (torch.rand(n, k // size, device="cuda") + 0.5).bfloat16()
        stored = (values + 8).to(torch.uint8)
        packed = agmm.Packed4BitWeight.pack(stored[:, ::2] | stored[:, 1::2] << 4, scales, size)
        sizes = cuda_packed.Sizes(k, n, size)
        b = (values * scales.double().repeat_interleave(size, 1)).t()
        all_rows, bias = randn(130, k), randn(n)
        for added in (None, bias):
            reference = all_rows.double() @ b
            reference = reference if added is None else reference + added.double()
            for splits in {1, min(3, -(-k // 128)), _core.streaming_splits(n, k, 4)}:
                wanted = None
                for m in (130, 65, 33, 32, 9, 1):
                    for sm_count in (0, 16):
                        poison_freed_memory(m, n)
                        rows = all_rows[:m].clone()
                        out = cuda_packed.product(
                            packed.packed, sizes, rows, added, splits=splits, sm_count=sm_count
                        )
                        label = f"{m}x{n}x{k}, {splits} splits, {sm_count} CTAs"
                        exact = reference[:m]
                        allowed = allowed_error(relative_error(exact.bfloat16(), exact))
                        assert relative_error(out, exact) <= allowed, label
                        wanted = out if wanted is None else wanted
                        assert torch.equal(out, wanted[:m]), label


@of_kernels
def test_captured(kernel: KernelConfig) -> None:
    skip_unless_built(kernel, torch.bfloat16, column_major=True)
    n, k = 2560, 1024
    a, b = randn(16, k), randn(n, k).t()
    config = usual(kernel, n, k)
    async_input_mm.on_cuda(a, b, None, 0, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [async_input_mm.on_cuda(a, b, None, 0, config=config) for _ in range(3)]
    for _ in range(3):
        a.normal_()
        wanted = async_input_mm.on_cuda(a, b, None, 0, config=config)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(out, wanted) for out in outs)


def feed(
    stream: torch.cuda.Stream, source: torch.Tensor, a: torch.Tensor, signals: torch.Tensor
) -> None:
    """Brings the chunks of ``source`` into ``a``, the last rows first."""
    chunks, chunks_k = signals.shape
    rows, columns = a.shape[0] // chunks, -(-a.shape[1] // (8 * chunks_k)) * 8
    with torch.cuda.stream(stream):
        for i in reversed(range(chunks)):
            for j in range(chunks_k):
                torch.cuda._sleep(20_000)
                place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                torch.add(source[place], 0, out=a[place])  # a copy may wait for the device
                signals[i, j].fill_(1)


@of_kernels
@pytest.mark.parametrize("chunks_k", [1, 2])
def test_waits_for_chunks_that_come_late(kernel: KernelConfig, chunks_k: int) -> None:
    """Every chunk is NaN until just before its signal, and B has long been on its way."""
    skip_unless_built(kernel, torch.bfloat16, column_major=True)
    for m, n, k, chunks in ((64, 4096, 2048, 4), (4, 1536, 4096, 4), (1, 264, 136, 1)):
        source, b = randn(m, k), randn(n, k).t()
        config = usual(kernel, n, k)
        a = torch.empty_like(source)
        signals = torch.zeros(chunks, chunks_k, dtype=torch.int32, device="cuda")
        wanted = async_input_mm.on_cuda(source, b, None, 0, config=config)
        feeder = torch.cuda.Stream()
        # The first launch of a kernel waits for the device: not beside one that spins.
        torch.cuda.synchronize()
        feed(feeder, source, a, signals)
        torch.cuda.synchronize()
        a.fill_(torch.nan)
        signals.zero_()
        poison_freed_memory(m, n)
        torch.cuda.synchronize()
        out = async_input_mm.on_cuda(a, b, signals.view(torch.uint32), 0, config=config)
        feed(feeder, source, a, signals)
        torch.cuda.synchronize()
        assert torch.equal(out, wanted), f"{m}x{n}x{k} {config.name}"


def test_the_plan_takes_one() -> None:
    """One row of a large weight is computed by a streaming kernel, whose result is the op's."""
    a, b = randn(1, 8192), randn(8192, 8192).t()
    problem = call_plans.problem_of((1, 8192, 8192), a.dtype, a.device, column_major=True)
    kernel = call_plans.planner(None, a.device).fused_plan(problem).kernel
    assert kernel is not None
    ready = torch.ones(1, dtype=torch.int32, device="cuda").view(torch.uint32)
    out = torch.ops.agmm._async_input_mm(a, b, ready, 0)
    assert torch.equal(out, async_input_mm.on_cuda(a, b, None, 0, config=kernel))
    assert kernel.is_streaming


def test_illegal_splits() -> None:
    kernel = KERNELS[0]
    dtype = torch.bfloat16
    skip_unless_built(kernel, dtype, column_major=True)
    a, b = randn(8, 4096), randn(264, 4096).t()
    with pytest.raises(agmm.InvalidArgument, match=r"9 splits .* whose CTAs are a cluster"):
        async_input_mm.on_cuda(a, b, None, 0, config=replace(kernel, splits=9))
    with pytest.raises(agmm.InvalidArgument, match="2 splits of 1 k tiles"):
        async_input_mm.on_cuda(
            a[:, :128].contiguous(), b[:128], None, 0, config=replace(kernel, splits=2)
        )


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("world_size", world_sizes(1, 2, 4))
def test_a_gather_for_weights_of_4_bits(
    gpu_pool: RankPool, world_size: int, is_captured: bool
) -> None:
    for rows in (1, 16, 100):
        found = gpu_pool.run(packed_gpu_work.gathered, world_size, rows, is_captured)
        assert sum(result is not None for result in found) == world_size
        assert [fault for result in found for fault in result or []] == []
