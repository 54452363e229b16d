"""The fp8 kernels on one GPU, and all-gather + scaled matmul with several ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import scaled_gpu_work
import torch
from at_hand import RANKS, needs_two, world_sizes
from gpu_work import poison_freed_memory
from scaled_gpu_work import E4M3, E5M2, Operands, by_torch, operands, whole

import agmm
from agmm import _core
from agmm._core import Accumulation
from agmm.ops import async_input_scaled_mm, fp8_operands
from agmm.planning import call_plans, formats, tables
from agmm.planning.built_kernels import kernels_of
from agmm.planning.plans import Plan, Row
from agmm.planning.problems import ALL_GATHER_MATMUL, PLAIN, KernelConfig
from agmm.planning.shapes import LocalShape
from agmm.planning.tables import Key
from agmm.runtime import cuda_scaled
from agmm.runtime.scaling import BLOCK
from agmm.testing.ranks import RankError, RankPool
from agmm.testing.reference import allowed_error, relative_error

on_cuda: Callable[..., torch.Tensor] = async_input_scaled_mm.on_cuda


class Kernel(NamedTuple):
    dtypes: tuple[torch.dtype, torch.dtype]
    accumulation: Accumulation
    config: KernelConfig

    @property
    def fast_accum(self) -> bool:
        return self.accumulation == Accumulation.fast

    @property
    def scalings(self) -> tuple[str, ...]:
        return {
            Accumulation.block: ("block",),
            Accumulation.block_1x128: ("block 1x128",),
        }.get(self.accumulation, ("rowwise", "tensorwise"))

    @property
    def is_block_scaled(self) -> bool:
        return self.scalings[0].startswith("block")

    @property
    def across(self) -> Kernel:
        return self._replace(config=replace(self.config, across=True))

    def __str__(self) -> str:
        names = [str(dtype).rpartition("_")[2] for dtype in self.dtypes]
        splits = (f"split{self.config.splits}",) if self.config.splits > 1 else ()
        across = ("across",) if self.config.across else ()
        return "-".join((self.config.kernel, self.accumulation.name, *names, *splits, *across))


PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
KERNELS = [
    Kernel(pair, fact.accumulation, KernelConfig.parse(fact.kernel))
    for pair in PAIRS
    for fact in _core.kernel_facts()
    if fact.op == ALL_GATHER_MATMUL
    and fact.is_fp8
    and fact.epilogue == PLAIN
    and fact.dtype.name == "_".join(str(dtype).removeprefix("torch.") for dtype in pair)
]
if not KERNELS:
    pytest.skip("this build has no fp8 kernels: AGMM_KERNELS=default", allow_module_level=True)

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=str)
every_scaling = pytest.mark.parametrize(
    ("kernel", "scaling"), [(k, s) for k in KERNELS for s in k.scalings], ids=str
)
SCALINGS = tuple(
    scaling
    for scaling in ("rowwise", "tensorwise", "block", "block 1x128")
    if any(scaling in kernel.scalings for kernel in KERNELS)
)
SHAPES = [
    # M, N, K, chunks
    (16, 16, 16, 1),
    (8, 16, 16, 8),
    (1, 144, 272, 1),
    (128, 256, 128, 2),
    (100, 144, 80, 4),
    (385, 272, 528, 5),
    (1000, 528, 144, 5),
    (640, 2112, 1040, 5),
    (1024, 3584, 2048, 4),
    (4096, 384, 256, 4),
]
BLOCK_SHAPES = [shape for shape in SHAPES if shape[1] > BLOCK and shape[2] > BLOCK]
"""The shapes whose scales are of no other kind too."""


def shapes_of(kernel: Kernel) -> list[tuple[int, int, int, int]]:
    return BLOCK_SHAPES if kernel.is_block_scaled else SHAPES


def ready(chunks: int) -> torch.Tensor:
    return torch.ones(chunks, dtype=torch.int32, device="cuda").view(torch.uint32)


def assert_close(
    out: torch.Tensor,
    given: Operands,
    fast_accum: bool,
    label: str,
    bias: torch.Tensor | None = None,
) -> None:
    reference = given.product(bias)
    allowed = allowed_error(relative_error(by_torch(given, fast_accum, bias), reference))
    error = relative_error(out, reference)
    assert error <= allowed, f"{label}: error {error:.3g}, allowed {allowed:.3g}"


@every_scaling
def test_every_kernel(kernel: Kernel, scaling: str) -> None:
    draw = random.Random(1)
    for seed, (m, n, k, chunks) in enumerate(shapes_of(kernel)):
        given = operands(scaling, m, n, k, kernel.dtypes, seed)
        config = replace(
            kernel.config,
            raster=draw.choice(("along_m", "along_n")),
            max_swizzle=draw.choice((1, 2, 4, 8)),
        )
        pivot = draw.randrange(chunks)
        poison_freed_memory(m * n * 2)
        out = on_cuda(given, ready(chunks), pivot, fast_accum=kernel.fast_accum, config=config)
        label = f"{m}x{n}x{k} chunks {chunks} pivot {pivot} {config.name}"
        assert_close(out, given, kernel.fast_accum, label)


@every_kernel
def test_each_scale_is_that_of_its_row_and_column(kernel: Kernel) -> None:
    """Each is that of its block too, exactly."""
    for seed, (m, n, k, chunks) in enumerate(shapes_of(kernel)):
        given = whole(operands(kernel.scalings[0], m, n, k, kernel.dtypes, seed), seed)
        poison_freed_memory(m * n * 2)
        out = on_cuda(given, ready(chunks), 0, fast_accum=kernel.fast_accum, config=kernel.config)
        wanted = given.product().to(torch.bfloat16)
        wrong = (out != wanted).nonzero()
        assert len(wrong) == 0, f"{m}x{n}x{k}: {len(wrong)} wrong, first at {wrong[0].tolist()}"


@every_kernel
def test_last_rows_and_bias(kernel: Kernel) -> None:
    config = kernel.config
    n, k = 2 * config.tile_n - 16, 7 * config.tile_k + 16  # more k tiles than stages
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    for last in (1, 7, 9, 33, 64, config.tile_m - 1):
        for tiles_before in (0, 3):
            m = tiles_before * config.tile_m + last
            for scaling in kernel.scalings:
                given = operands(scaling, m, n, k, kernel.dtypes, last)
                poison_freed_memory(m * n * 2)
                out = on_cuda(
                    given, None, 0, bias=bias, fast_accum=kernel.fast_accum, config=config
                )
                assert_close(out, given, kernel.fast_accum, f"{m} rows {scaling}", bias)


def splitting(m: int, n: int, k: int, most_ctas: int) -> list[Kernel]:
    """The kernels that split K between a cluster, in every number of parts that fits."""
    return [
        kernel._replace(config=replace(kernel.config, splits=splits))
        for kernel in KERNELS
        if kernel.config.splits_in_cluster
        for splits in range(2, min(_core.MAX_CLUSTER_SPLITS, -(-k // kernel.config.tile_k)) + 1)
        if -(-m // kernel.config.tile_m) * -(-n // kernel.config.tile_n) * splits <= most_ctas
    ]


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise", "block"])
def test_splits_of_k(scaling: str) -> None:
    for m, n, k, chunks in ((8, 16, 272, 2), (100, 144, 1040, 4), (256, 528, 7168, 4)):
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if m != 100 else None
        kernels = [one for one in splitting(m, n, k, 100) if scaling in one.scalings]
        assert kernels
        for kernel in kernels:
            given = operands(scaling, m, n, k, kernel.dtypes, m)
            poison_freed_memory(m * n * 2)
            call = {"bias": bias, "fast_accum": kernel.fast_accum, "config": kernel.config}
            outs = [on_cuda(given, ready(chunks), 1, **call) for _ in range(10)]
            label = f"{m}x{n}x{k} {kernel.config.name}"
            assert_close(outs[0], given, kernel.fast_accum, label, bias)
            assert all(torch.equal(out, outs[0]) for out in outs), f"{kernel} does not repeat"


@every_kernel
def test_columns_that_torch_does_not_multiply(kernel: Kernel) -> None:
    """A multiple of 8 that is none of 16, and a strided B."""
    given = operands(kernel.scalings[0], 200, 264, 144, kernel.dtypes, 3)
    wide = torch.zeros(264, 288, device="cuda").to(kernel.dtypes[1])
    wide.view(torch.uint8)[:, 144:].copy_(given.B.t().view(torch.uint8))
    given = given._replace(B=wide[:, 144:].t())
    poison_freed_memory(200 * 264 * 2)
    out = on_cuda(given, None, 0, fast_accum=kernel.fast_accum, config=kernel.config)
    assert relative_error(out, given.product()) < 2**-7


def test_slow_accumulation_is_the_more_exact() -> None:
    """The numbers do not cancel, so that the sum outgrows what the tensor cores keep."""
    given = operands("tensorwise", 256, 256, 8192, (E4M3, E4M3), 0)
    given = given._replace(
        A=given.A.float().abs().to(E4M3), B=given.B.t().float().abs().to(E4M3).t()
    )
    reference = given.product()
    fast, slow = (
        relative_error(on_cuda(given, None, 0, fast_accum=fast), reference)
        for fast in (True, False)
    )
    by_cublas = relative_error(by_torch(given, False), reference)
    assert slow <= allowed_error(by_cublas)
    assert slow < fast


@pytest.mark.parametrize(
    ("kernel", "scaling"),
    [
        (k, s)
        for k in [*KERNELS, *(k.across for k in KERNELS), *splitting(96, 272, 256, 48)]
        for s in k.scalings
    ],
    ids=str,
)
def test_waits_for_chunks_and_scales_that_come_late(kernel: Kernel, scaling: str) -> None:
    """Every chunk and its scales are NaN until just before its signal, in a random order."""
    draw = random.Random(2)
    one_k_tile = (96, 128, 128, 96)
    is_split = kernel.config.splits > 1
    for m, n, k, chunks in (
        ((96, 272, 256, 96), (60, 272, 400, 3))
        if is_split
        else (
            (512, 512, 256, 4),
            (1000, 272, 144, 5),
            (96, 272, 1552, 96) if kernel.is_block_scaled else one_k_tile,
        )
    ):
        given = operands(scaling, m, n, k, kernel.dtypes, 1)
        A, scale_a = given.A.clone(), given.scale_a.clone()
        signals = torch.zeros(chunks, dtype=torch.int32, device="cuda")
        order = list(range(chunks))
        draw.shuffle(order)
        feeder = torch.cuda.Stream()

        def feed(
            order: list[int] = order,
            feeder: torch.cuda.Stream = feeder,
            given: Operands = given,
            A: torch.Tensor = A,
            scale_a: torch.Tensor = scale_a,
            signals: torch.Tensor = signals,
            rows: int = m // chunks,
        ) -> None:
            with torch.cuda.stream(feeder):
                for i in order:
                    torch.cuda._sleep(draw.randrange(1, 40_000))
                    part = slice(i * rows, (i + 1) * rows)
                    # A copy may wait for the device.
                    torch.add(given.A.view(torch.int8)[part], 0, out=A.view(torch.int8)[part])
                    if scale_a.numel() > 1:
                        torch.add(given.scale_a[part], 0, out=scale_a[part])
                    signals[i].fill_(1)

        feed()  # kernels are loaded at their first launch, which waits for the device
        torch.cuda.synchronize()
        A.view(torch.uint8).fill_(0x7F)  # NaN
        if scale_a.numel() > 1:
            scale_a.fill_(torch.nan)
        signals.zero_()
        poison_freed_memory(m * n * 2)
        torch.cuda.synchronize()
        late = given._replace(A=A, scale_a=scale_a)
        out = on_cuda(
            late,
            signals.view(torch.uint32),
            draw.randrange(chunks),
            fast_accum=kernel.fast_accum,
            config=kernel.config,
            # More than a wave, which would go across the chunks; of parts of K that is not legal.
            sm_count=48 if is_split else 4,
        )
        feed()
        torch.cuda.synchronize()
        assert_close(out, given, kernel.fast_accum, f"{m}x{n}x{k}")


def test_op() -> None:
    given = operands("rowwise", 256, 272, 128, (E4M3, E4M3), 0)
    bias = torch.randn(272, device="cuda", dtype=torch.bfloat16)
    op: Any = torch.ops.agmm._async_input_scaled_mm
    for fast_accum in (True, False):
        out = op(*given, bias, ready(4), 3, fast_accum)
        assert_close(out, given, fast_accum, "op", bias)
    for dtypes in PAIRS[1:]:  # with a kernel that accumulates slowly
        mixed = operands("rowwise", 256, 272, 128, dtypes, 0)
        assert_close(op(*mixed, None, ready(4), 0, True), mixed, False, str(dtypes))


def test_blocks_of_one_row_or_column_or_k_tile() -> None:
    """Their scales are of several kinds, which mean the same; kernels of any kind take them."""
    for scaling in SCALINGS[2:]:
        for m, n, k in ((1, 16, 16), (1, 144, 128), (200, 16, 64), (1, 16, 272), (300, 136, 112)):
            given = operands(scaling, m, n, k, (E4M3, E4M3), m + n + k)
            poison_freed_memory(m * n * 2)
            out = on_cuda(given, None, 0, fast_accum=False)
            assert relative_error(out, given.product()) < 2**-7, f"{scaling} {m}x{n}x{k}"


def test_strided_scales_of_blocks() -> None:
    """A weight [N, K] that was quantised in its own layout has such scales."""
    for scaling in SCALINGS[2:]:
        given = operands(scaling, 200, 400, 528, (E4M3, E4M3), 0)
        strided = given.scale_b.t().contiguous().t()
        of_a = given.scale_a.t().contiguous().t()  # as torch._scaled_mm takes them
        out = on_cuda((given.A, given.B, of_a, strided), None, 0)
        assert torch.equal(out, on_cuda(given, None, 0)), scaling


def test_bad_input() -> None:
    given = operands("rowwise", 64, 64, 64, (E4M3, E4M3), 0)
    op: Any = torch.ops.agmm._async_input_scaled_mm
    for change, words in (
        ({"scale_a": given.scale_a.cpu()}, ("scale_a: ", "cpu", "cuda")),
        ({"scale_b": given.scale_b.half()}, ("scale_b: ", "float16", "float32")),
        ({"B": given.B.contiguous()}, ("B: ", "strides", "column-major")),
        ({"B": given.B[:, :60], "scale_b": given.scale_b[:, :60]}, ("N=60", "multiple of 8")),
    ):
        with pytest.raises(agmm.InvalidArgument) as error:
            op(*given._replace(**change), None, ready(4), 0, True)
        message = str(error.value)
        assert "\n" not in message
        assert all(word in message for word in words), message
    with pytest.raises(agmm.InvalidArgument, match="a kernel of this build"):
        on_cuda(given, None, 0, config=KernelConfig(64, 64, 64, 1, 1, "pingpong"))
    torch.cuda.synchronize()


def test_the_chosen_kernel_is_built() -> None:
    for accumulation in (Accumulation.fast, Accumulation.slow, Accumulation.block):
        name = formats.fp8_name("float8_e4m3fn_float8_e4m3fn", accumulation.name)
        assert kernels_of(ALL_GATHER_MATMUL, name)
    assert fp8_operands.why_no_kernel(torch.device("cuda", 0)) is None


# --- several ranks ---

ALL = world_sizes(1, 2, 3, 4, 8)


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("world_size", world_sizes(2, 3, 4, 8))
def test_gather_before_the_matmul(
    gpu_pool: RankPool, world_size: int, scaling: str, return_A: bool
) -> None:
    """agmm's gather, then its matmul, of shards with few rows and with many."""
    shapes = [LocalShape(1, 144, 144), LocalShape(17, 528, 272), LocalShape(385, 528, 144)]
    arguments = shapes, scaling, (E4M3, E4M3), True, 2, return_A, "gather"
    check(gpu_pool.run(scaled_gpu_work.gathered, world_size, *arguments), world_size)


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("world_size", ALL)
def test_gather(gpu_pool: RankPool, world_size: int, scaling: str, return_A: bool) -> None:
    shapes = [
        LocalShape(1, 16, 16),
        LocalShape(17, 144, 80),
        LocalShape(100, 272, 528),
        LocalShape(256, 1024, 1040),
        LocalShape(385, 528, 144),
    ]
    cases = [((E4M3, E4M3), True, 1), ((E4M3, E4M3), False, 2)]
    if scaling.startswith("block"):
        shapes = [shape for shape in shapes if shape.N > BLOCK and shape.K > BLOCK]
        cases.append(((E4M3, E4M3), False, 3))
    else:
        cases.append(((E5M2, E4M3), False, 1))
    for dtypes, fast_accum, weights in cases:
        results = gpu_pool.run(
            scaled_gpu_work.gathered,
            world_size,
            shapes,
            scaling,
            dtypes,
            fast_accum,
            weights,
            return_A,
        )
        check(results, world_size)


@pytest.mark.parametrize("transport", ["sm4x64", "sm4x72", "sm16x128+1", "sm64x64h4"])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("world_size", ALL[1:])
def test_gather_by_the_matmuls_warps(
    gpu_pool: RankPool, world_size: int, scaling: str, transport: str
) -> None:
    """They send scales with the first chunk: of parts of the rows, to the nearest peer first, and
    by CTAs of their own. K may be such that chunks are wider than asked for."""
    shapes = [
        LocalShape(1, 144, 144),
        LocalShape(17, 528, 272),
        LocalShape(200, 1024, 1680),
        LocalShape(385, 528, 1040),
    ]
    for fast_accum in (True, False):
        for return_A in (True, False):
            arguments = shapes, scaling, (E4M3, E4M3), fast_accum, 1, return_A, None, transport
            check(gpu_pool.run(scaled_gpu_work.gathered, world_size, *arguments), world_size)


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("world_size", ALL[1:])
def test_every_kernel_behind_a_gather(
    world_size: int, return_A: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each from tuned rows with an M of its own."""
    environment = {"AGMM_CACHE": "on", "AGMM_CACHE_DIR": str(tmp_path)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda", 0)
    gpu, _ = call_plans.device_facts(device)
    n, k = 272, 528
    cases: list[Any] = []
    rows: list[tuple[Key, Row]] = []
    for kernel in KERNELS:
        if return_A and "column" not in kernel.config.stores_A:
            continue
        configs = [kernel.config, replace(kernel.config, across=True)]
        if kernel.config.is_streaming:  # whose splits are given
            configs = [replace(kernel.config, splits=_core.streaming_splits(n, k, 8))]
        elif kernel.config.splits_in_cluster:
            configs.append(replace(kernel.config, splits=2))
        for config in configs:
            shape = LocalShape(33 + len(rows), n, k)
            dtypes = cuda_scaled.dtype_name(*kernel.dtypes)
            problem = call_plans.problem_of(
                (world_size * shape.M_local, n, k),
                formats.fp8_name(dtypes, kernel.accumulation.name),
                device,
                return_A=return_A,
            )
            problem = replace(problem, world_size=world_size)
            rows.append((Key.of(problem), Row(problem.m, Plan("push", config), 1.0)))
            cases += [
                (problem, config, shape, scaling, kernel.dtypes, kernel.fast_accum)
                for scaling in kernel.scalings
            ]
    tables.save(gpu, world_size, rows)
    with RankPool(world_size, "cuda", 300, environment) as pool:
        check(pool.run(scaled_gpu_work.gathered_as_tuned, world_size, cases), world_size)


@pytest.mark.parametrize("transport", [None, "sm8x64"])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("world_size", ALL[1:])
def test_calls_back_to_back(
    gpu_pool: RankPool, world_size: int, scaling: str, transport: str | None
) -> None:
    """Eager and replayed, mixed with calls in bfloat16 on the same slots; ranks are delayed."""
    arguments = world_size, scaling, 300, transport
    check(gpu_pool.run(scaled_gpu_work.back_to_back, *arguments), world_size)


SCATTERED = tuple(scaling for scaling in SCALINGS if scaling != "block 1x128")
SCATTER_SHAPES = [
    LocalShape(1, 8, 16),
    LocalShape(17, 40, 80),
    LocalShape(130, 520, 144),
    LocalShape(257, 1160, 272),
    LocalShape(2300, 136, 80),  # two bands with four ranks
]


@pytest.mark.parametrize("scaling", SCATTERED)
@pytest.mark.parametrize("world_size", ALL[1:])
def test_scatter(gpu_pool: RankPool, world_size: int, scaling: str) -> None:
    work: Any = scaled_gpu_work.scattered
    cases: list[dict[str, Any]] = [
        {},
        {"fast_accum": True, "bias": True, "reduce_op": "avg"},
        {"dtypes": (E5M2, E4M3), "fast_accum": True},
        {"leading": (3,), "bias": True},
        {"leading": (2,), "scatter_dim": 1},
    ]
    for case in cases:
        if scaling == "block" and "dtypes" in case:
            continue  # two e4m3 have kernels
        check(gpu_pool.run(work, world_size, SCATTER_SHAPES, scaling, **case), world_size)


@pytest.mark.parametrize("scaling", SCATTERED)
@pytest.mark.parametrize("world_size", ALL[1:])
def test_all_reduce(gpu_pool: RankPool, world_size: int, scaling: str) -> None:
    work: Any = scaled_gpu_work.summed
    for bias in (False, True):
        found = gpu_pool.run(work, world_size, SCATTER_SHAPES[1:], scaling, bias=bias)
        check(found, world_size)


@pytest.mark.parametrize("scaling", SCATTERED)
@pytest.mark.parametrize("world_size", ALL[1:])
def test_scatters_back_to_back(gpu_pool: RankPool, world_size: int, scaling: str) -> None:
    work: Any = scaled_gpu_work.scattered_back_to_back
    check(gpu_pool.run(work, world_size, scaling, 300), world_size)


OPS = [
    ("all_gather_scaled_matmul", "rowwise"),
    ("all_gather_scaled_matmul", "block"),
    ("scaled_matmul_reduce_scatter", "rowwise"),
    ("scaled_matmul_reduce_scatter", "block"),
]


@needs_two
@pytest.mark.parametrize(("op_name", "scaling"), OPS)
def test_a_missing_rank_ends_with_a_message(op_name: str, scaling: str) -> None:
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": "2"}) as pool:
        with pytest.raises(RankError) as failure:
            pool.run(scaled_gpu_work.one_rank_missing, op_name, scaling)
        stderr = "".join(pool.stderr(rank) for rank in range(pool.world_size))
    assert 124 in failure.value.exit_codes.values(), (failure.value, stderr)
    assert "from rank 1" in stderr, stderr


@needs_two
@pytest.mark.parametrize(("op_name", "scaling"), OPS)
def test_a_late_rank_is_awaited(op_name: str, scaling: str) -> None:
    work: Any = scaled_gpu_work.one_rank_late
    with RankPool(2, "cuda", 120, {"AGMM_TIMEOUT_S": "60"}) as pool:
        check(pool.run(work, op_name, scaling, 3.0), 2)
