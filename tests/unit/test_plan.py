"""Names of kernels, reasons against the fused path, and the choice of a kernel."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise, product

import pytest

from agmm import plan
from agmm.plan import KernelConfig, Problem

KERNELS = tuple(
    KernelConfig.parse(name)
    for name in (
        "128x256x64_2x1_cooperative",
        "128x256x64_1x1_cooperative",
        "128x192x64_2x1_cooperative",
        "256x128x64_2x1_cooperative",
        "128x128x64_1x1_pingpong",
        "128x128x64_2x1_pingpong",
        "128x160x64_1x1_pingpong",
    )
)


def random_problems(count: int) -> list[Problem]:
    draw = random.Random(5)
    return [
        Problem(
            m=world_size * draw.randint(1, 1200),
            n=8 * draw.randint(1, 700),
            k=8 * draw.randint(1, 1500),
            world_size=world_size,
            return_A=draw.random() < 0.5,
        )
        for world_size in (draw.choice((1, 2, 3, 4, 7, 8)) for _ in range(count))
    ]


# --- names ---


def test_name_and_parse_are_inverse() -> None:
    for tile, cluster, schedule, swizzle, raster, timed in product(
        ((128, 256, 64), (256, 128, 128), (64, 8, 16)),
        ((1, 1), (2, 1), (1, 2)),
        ("cooperative", "pingpong"),
        (1, 2, 4, 8),
        ("along_m", "along_n"),
        (False, True),
    ):
        config = KernelConfig(*tile, *cluster, schedule, swizzle, raster, timed)
        assert KernelConfig.parse(config.name) == config
        assert config.name == f"{config.kernel}/swizzle{swizzle}/{raster}"


def test_name_written_out() -> None:
    config = KernelConfig(128, 256, 64, 2, 1, "cooperative", 4, "along_n")
    assert config.name == "128x256x64_2x1_cooperative/swizzle4/along_n"
    assert replace(config, timed=True).kernel == "128x256x64_2x1_cooperative_timed"


def test_swizzle_and_raster_may_be_left_out() -> None:
    plain = KernelConfig(128, 128, 64, 1, 1, "pingpong", 1, "along_m")
    assert KernelConfig.parse("128x128x64_1x1_pingpong") == plain
    assert KernelConfig.parse("128x128x64_1x1_pingpong/swizzle8") == replace(plain, max_swizzle=8)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "unfused",
        "128x256x64",
        "128x256_2x1_cooperative",
        "128x256x64x1_2x1_cooperative",
        "128x256x64_2_cooperative",
        "128x256x64_2x1_stream-k",
        "128x256x64_2x1_cooperative_slow",
        "128x256x64_2x1_cooperative_timed_timed",
        "128x256xlarge_2x1_cooperative",
        "128x256x64_2x1_cooperative/swizzle3",
        "128x256x64_2x1_cooperative/swizzle16",
        "128x256x64_2x1_cooperative/swizzle",
        "128x256x64_2x1_cooperative/4",
        "128x256x64_2x1_cooperative/swizzle04",
        "128x256x64_2x1_cooperative/swizzle4/along_k",
        "128x256x64_2x1_cooperative/along_m",
        "128x256x64_2x1_cooperative/swizzle4/along_m/more",
        "128x256x64_2x1_cooperative/swizzle4/",
        " 128x256x64_2x1_cooperative",
        "0x256x64_2x1_cooperative",
        "-128x256x64_2x1_cooperative",
        "128x256x64_2x0_cooperative",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^config: found ") as caught:
        KernelConfig.parse(name)
    assert str(caught.value) == (
        f"config: found {name!r}, wanted a name such as 128x256x64_2x1_cooperative/swizzle4/along_m"
    )


def test_as_config() -> None:
    config = KERNELS[0]
    assert plan.as_config(None) is None
    assert plan.as_config(config) is config
    assert plan.as_config(config.name) == config
    with pytest.raises(ValueError, match=r"^config: found 'fast', wanted a name such as "):
        plan.as_config("fast")
    with pytest.raises(ValueError, match=r"^config: found '3', wanted a name such as "):
        plan.as_config(3)


def test_configs_and_problems_are_values() -> None:
    assert len({KernelConfig.parse(KERNELS[0].name), KERNELS[0]}) == 1
    assert len({Problem(1, 2, 3), Problem(1, 2, 3), Problem(1, 2, 4)}) == 2
    with pytest.raises(FrozenInstanceError):
        KERNELS[0].tile_m = 64  # type: ignore[misc]


def test_of_copies_every_field() -> None:
    timed = replace(KERNELS[1], timed=True)
    assert KernelConfig.of(timed) == timed
    changed = KernelConfig.of(timed, max_swizzle=4, raster="along_n")
    assert changed == replace(timed, max_swizzle=4, raster="along_n")


# --- why_unfused ---


@pytest.mark.parametrize("dtype", plan.FUSED_DTYPES)
def test_aligned_half_precision_is_fused(dtype: str) -> None:
    for n, k in product((8, 16, 1000, 28672), (8, 24, 4096)):
        assert plan.why_unfused(dtype, n, k) is None


@pytest.mark.parametrize(
    ("dtype", "n", "k", "reason"),
    [
        ("float32", 8, 8, "A_shard: dtype=float32, the fused path wants bfloat16 or float16"),
        ("int8", 8, 8, "A_shard: dtype=int8, the fused path wants bfloat16 or float16"),
        (
            "bfloat16",
            8,
            12,
            "A_shard: K=12 is not a positive multiple of 8 (16-byte TMA alignment)",
        ),
        ("bfloat16", 8, 0, "A_shard: K=0 is not a positive multiple of 8 (16-byte TMA alignment)"),
        ("float16", 1, 8, "B: N=1 is not a positive multiple of 8 (16-byte TMA alignment)"),
        ("float16", 0, 8, "B: N=0 is not a positive multiple of 8 (16-byte TMA alignment)"),
    ],
)
def test_reasons_against_the_fused_path(dtype: str, n: int, k: int, reason: str) -> None:
    assert plan.why_unfused(dtype, n, k) == reason


# --- the choice ---


def test_choice_is_legal_and_has_the_least_predicted_time() -> None:
    for problem in [*random_problems(60), Problem(1, 8, 8), Problem(7, 8, 8, world_size=7)]:
        chosen = plan.choose(problem, KERNELS)
        assert chosen.kernel in {kernel.kernel for kernel in KERNELS}
        assert chosen.max_swizzle in (1, 2, 4, 8) and chosen.raster in ("along_m", "along_n")
        assert KernelConfig.parse(chosen.name) == chosen
        least = min(plan.predict_us(problem, kernel) for kernel in KERNELS)
        assert plan.predict_us(problem, chosen) == least


def test_choice_is_deterministic() -> None:
    for problem in random_problems(40):
        first = plan.choose(problem, KERNELS)
        assert plan.choose(replace(problem), KERNELS) == first
        assert plan.choose_kernel(problem, list(KERNELS)) == first


def test_choice_looks_at_the_problem() -> None:
    assert len({plan.choose(problem, KERNELS).kernel for problem in random_problems(60)}) > 1


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.kernel)
def test_only_kernel_is_chosen(kernel: KernelConfig) -> None:
    assert plan.choose(Problem(4096, 1000, 512), (kernel,)).kernel == kernel.kernel


def test_no_kernels_to_choose_from() -> None:
    with pytest.raises(
        ValueError, match=r"^kernels: found none, wanted a build with CUDA kernels$"
    ):
        plan.choose_kernel(Problem(8, 8, 8), [])


# --- the cost model ---


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.kernel)
@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("return_A", [False, True])
def test_time_grows_with_rows(kernel: KernelConfig, world_size: int, return_A: bool) -> None:
    times = [
        plan.predict_us(
            Problem(world_size * rows, 1000, 4096, "bfloat16", world_size, return_A), kernel
        )
        for rows in (1, 5, 64, 129, 512, 1000, 2048, 8000)
    ]
    assert times[0] > 0
    assert all(before <= after for before, after in pairwise(times))
    assert times[0] < times[-1]


def test_time_grows_with_every_extent() -> None:
    base = Problem(4096, 4096, 4096, world_size=4)
    for kernel in KERNELS:
        time = plan.predict_us(base, kernel)
        for larger in (replace(base, m=16384), replace(base, n=16384), replace(base, k=16384)):
            assert plan.predict_us(larger, kernel) > time


def test_no_call_ends_before_its_last_chunk_has_come() -> None:
    for problem in random_problems(60):
        last = plan.arrival_us(problem, problem.world_size - 1)
        for kernel in KERNELS:
            assert plan.predict_us(problem, kernel) > last


def test_waiting_for_peers_costs_time() -> None:
    for problem in random_problems(60):
        for kernel in KERNELS:
            alone = plan.predict_us(replace(problem, world_size=1), kernel)
            assert plan.predict_us(problem, kernel) >= alone


def test_a_slow_link_dominates_a_small_product() -> None:
    # 8 ranks and 8 columns: next to nothing to compute, 64 MiB to receive.
    problem = Problem(4096, 8, 8192, world_size=8)
    last = plan.arrival_us(problem, 7)
    assert last < plan.predict_us(problem, KERNELS[4]) < 2 * last


def test_chunks_arrive_one_after_the_other() -> None:
    for problem in random_problems(60):
        arrivals = [plan.arrival_us(problem, p) for p in range(problem.world_size)]
        assert arrivals[0] == 0.0
        assert all(before < after for before, after in pairwise(arrivals))


def test_larger_shards_arrive_later() -> None:
    small, large = (Problem(m, 8, 512, world_size=4) for m in (64, 8192))
    for position in range(1, 4):
        assert plan.arrival_us(small, position) < plan.arrival_us(large, position)


def test_gathering_A_is_no_faster() -> None:
    for problem in random_problems(40):
        for position in range(1, problem.world_size):
            pushed = plan.arrival_us(replace(problem, return_A=False), position)
            assert plan.arrival_us(replace(problem, return_A=True), position) > pushed
