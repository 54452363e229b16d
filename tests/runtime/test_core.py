"""`agmm._core`: kernel configs, and what a build without CUDA says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import agmm
from agmm import _core
from agmm.planning import problems
from agmm.runtime import kernels

without_cuda = pytest.mark.skipif(
    _core.cuda_built, reason="this build has CUDA, so its calls do not refuse"
)
PLAIN = _core.Format(_core.DType.bfloat16)
CONFIG = _core.KernelConfig(128, 128, 64, 1, 1, "pingpong")
REFUSAL = "^agmm: built without CUDA; wanted a build with AGMM_CUDA=ON and nvcc$"


def test_version_is_the_package_version() -> None:
    assert _core.__version__ == agmm.__version__


def test_config_keeps_its_fields() -> None:
    config = _core.KernelConfig(
        128, 256, 64, 2, 1, "cooperative", max_swizzle=4, raster="along_n", timed=True
    )
    assert (config.tile_m, config.tile_n, config.tile_k) == (128, 256, 64)
    assert (config.cluster_m, config.cluster_n) == (2, 1)
    assert (config.schedule, config.max_swizzle, config.raster) == ("cooperative", 4, "along_n")
    assert config.timed is True
    assert config.name == "128x256x64_2x1_cooperative_timed"
    assert repr(config) == "128x256x64_2x1_cooperative_timed_swizzle4_along_n"
    split = _core.KernelConfig(128, 256, 64, 2, 1, "cooperative", splits=3)
    assert split.splits == 3
    assert repr(split) == "128x256x64_2x1_cooperative_split3_swizzle1_along_m"


def test_config_defaults() -> None:
    config = _core.KernelConfig(
        tile_m=64, tile_n=32, tile_k=16, cluster_m=1, cluster_n=2, schedule="pingpong"
    )
    assert (config.max_swizzle, config.raster, config.timed) == (1, "along_m", False)
    assert config.name == "64x32x16_1x2_pingpong"
    assert (config.splits, config.can_split) == (1, False)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("schedule", ["cooperative", "pingpong"])
def test_core_and_plan_agree_on_names(schedule: str, timed: bool) -> None:
    core = _core.KernelConfig(128, 256, 64, 2, 1, schedule, timed, max_swizzle=8, raster="along_n")
    config = problems.KernelConfig.of(core, max_swizzle=core.max_swizzle, raster=core.raster)
    assert config.kernel == core.name
    assert problems.KernelConfig.parse(config.name) == config
    assert config.timed is timed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schedule": "streamk"},
            "schedule: found 'streamk', wanted cooperative, pingpong or streaming",
        ),
        (
            {"schedule": "Pingpong"},
            "schedule: found 'Pingpong', wanted cooperative, pingpong or streaming",
        ),
        ({"raster": "along_k"}, "raster: found 'along_k', wanted along_m or along_n"),
        ({"raster": ""}, "raster: found '', wanted along_m or along_n"),
    ],
)
def test_bad_names_are_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"schedule": "pingpong", "raster": "along_m", **change}
    with pytest.raises(ValueError, match=f"^{message}$"):
        _core.KernelConfig(128, 128, 64, 1, 1, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        (128, 128, 64, 1, 1),
        (128, 128, 64, 1, 1, 0),
        (128.5, 128, 64, 1, 1, "pingpong"),
        ("128", 128, 64, 1, 1, "pingpong"),
        (1 << 40, 128, 64, 1, 1, "pingpong"),
    ],
)
def test_bad_types_are_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        _core.KernelConfig(*fields)


def test_plans_have_the_cores_fields_and_defaults() -> None:
    usual = _core.KernelConfig(128, 128, 64, 1, 1, "pingpong")
    of_plans = {field.name: field.default for field in dataclasses.fields(problems.KernelConfig)}
    assert set(of_plans) == set(_core.KernelConfig.field_names())
    defaults = {name: value for name, value in of_plans.items() if value is not dataclasses.MISSING}
    assert defaults == {name: getattr(usual, name) for name in defaults}
    assert len(of_plans) - len(defaults) == 6  # tile, cluster and schedule


def test_configs_cannot_be_changed() -> None:
    config: Any = _core.KernelConfig(128, 128, 64, 1, 1, "pingpong")
    for field in (*_core.KernelConfig.field_names(), "name"):
        with pytest.raises(AttributeError):
            setattr(config, field, getattr(config, field))


def test_the_facts_of_kernels_are_the_callers_own_list() -> None:
    facts = _core.kernel_facts()
    assert type(facts) is list
    assert (len(facts) > 0) == _core.cuda_built
    assert all(type(fact.config) is _core.KernelConfig for fact in facts)
    facts.clear()
    assert (len(_core.kernel_facts()) > 0) == _core.cuda_built


@pytest.mark.parametrize("op", problems.OPS)
def test_each_kernel_of_an_op_is_built_once(op: str) -> None:
    found = kernels.built(op)
    assert len({kernel.name for kernel in found}) == len(found)
    assert (len(found) > 0) == _core.cuda_built
    assert not any(kernel.timed for kernel in found)
    assert all(kernel.timed for kernel in kernels.built(op, timed=True))


@pytest.mark.parametrize(
    ("name", "can_split", "in_cluster", "stores_A"),
    [
        ("128x224x64_2x1_cooperative", True, False, ("column",)),
        ("128x112x64_2x1_cooperative", True, False, ("column", "row")),
        ("128x256x64_2x1_cooperative", False, False, ("column",)),
        ("256x144x64_2x1_cooperative", False, False, ("column",)),
        ("256x128x64_2x1_cooperative", False, False, ("column", "row")),
        ("128x128x64_1x1_pingpong", False, False, ("column", "row")),
        ("128x160x64_1x1_pingpong", False, False, ("column", "row")),
        ("128x128x64_1x2_cooperative", False, False, ()),
        ("64x128x64_1x1_cooperative_swapped", True, True, ("column", "row")),
        ("64x128x64_1x2_cooperative_swapped", True, False, ()),
        ("64x128x64_2x1_cooperative_swapped", False, False, ("column", "row")),
        ("64x64x64_1x1_pingpong_swapped", False, False, ("column", "row")),
        ("64x64x128_1x1_pingpong_swapped", False, False, ()),
    ],
)
def test_what_a_kernel_can_do_is_known_without_building_it(
    name: str, can_split: bool, in_cluster: bool, stores_A: tuple[str, ...]
) -> None:
    config = problems.KernelConfig.parse(name)
    assert (config.can_split, config.splits_in_cluster) == (can_split, in_cluster)
    assert tuple(config.stores_A) == stores_A


def test_kernels_register_what_they_can_do() -> None:
    facts = _core.kernel_facts()
    names = "op", "kernel", "dtype", "b_layout", "accumulation", "epilogue", "architecture"
    assert len({tuple(getattr(f, name) for name in names) for f in facts}) == len(facts)
    assert all(fact.b_layout == "column" for fact in facts if fact.is_fp8)
    assert all(fact.fast_accum for fact in facts if not fact.is_fp8)
    for fact in facts:
        parsed = problems.KernelConfig.parse(fact.kernel)
        config = parsed.core
        assert (fact.config.name, fact.timed) == (fact.kernel, config.timed)
        stores_A = fact.op != "grouped_matmul" and fact.b_layout in config.stores_A
        assert fact.can_store_A == stores_A
        assert fact.architecture == "sm_90a"
        assert fact.epilogue in ("bias", "activation", "gate")
        if fact.op == problems.ALL_GATHER_MATMUL:
            scales_parts = parsed.is_streaming or "block" not in fact.accumulation.name
            can_split = config.can_split and scales_parts
            assert fact.can_split == can_split


@without_cuda
def test_matmul_refuses_without_cuda() -> None:
    problem = _core.MatmulProblem((128, 128, 64), (True, 64), PLAIN, CONFIG)
    with pytest.raises(RuntimeError, match=REFUSAL):
        _core.async_input_mm(problem, addresses=[0] * 7, stream=0)


@without_cuda
def test_workspace_refuses_without_cuda() -> None:
    with pytest.raises(RuntimeError, match=REFUSAL):
        _core.CudaWorkspace(rank=0, bases=[0, 0], slot_bytes=4096)


def test_matmul_refuses_the_name_of_a_config() -> None:
    arguments: list[Any] = [(128, 128, 64), (True, 64), PLAIN, "128x128x64_1x1_pingpong"]
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        _core.MatmulProblem(*arguments)


@pytest.mark.parametrize("addresses", [[], [0] * 6, [0] * 8], ids=len)
def test_matmul_refuses_another_number_of_addresses(addresses: list[int]) -> None:
    problem = _core.MatmulProblem((128, 128, 64), (True, 64), PLAIN, CONFIG)
    message = f"^addresses: found {len(addresses)}, wanted 7$"
    with pytest.raises(ValueError, match=message):
        _core.async_input_mm(problem, addresses, 0)


E4M3 = _core.DType.float8_e4m3fn_float8_e4m3fn
SLOW = _core.Accumulation.slow
ROW_SCALES = _core.ScaleLayout(a_per_row=True, b_per_column=True)
SCALED = _core.Format(E4M3, SLOW, ROW_SCALES)


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (E4M3, {}, "scales: found none, wanted their layout for e4m3"),
        (_core.DType.float16, {"scales": ROW_SCALES}, "scales: found some, wanted none for fp16"),
        (
            _core.DType.bfloat16,
            {"accumulation": SLOW},
            "accumulation: found slow, wanted fast for bf16",
        ),
    ],
)
def test_a_format_that_makes_no_sense(
    dtype: _core.DType, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        _core.Format(dtype, **options)


def test_a_spec_says_all_but_where_the_tensors_are() -> None:
    b, config = (True, 64), "128x128x64_1x1_pingpong_swizzle1_along_m"
    matmul = _core.MatmulProblem((128, 256, 64), b, SCALED, CONFIG, chunks=(4, 1, 2))
    words = f"128x256x64 e4m3 B col slow, chunks 4x1 from 2, {config}"
    assert repr(matmul) == f"MatmulProblem({words})"
    weights = [_core.GatherWeight(n, b, SCALED, CONFIG) for n in (256, 8)]
    of_b = [f"B [64, {n}] column-major slow by {config}" for n in (256, 8)]
    of_a = "A_shard [32, 64] e4m3 with 1 scales for a row"
    assert (
        repr(_core.GatherProblem(32, 64, weights)) == f"GatherProblem({', '.join([of_a, *of_b])})"
    )
    scatter = _core.ScatterProblem(32, 8, PLAIN, [(64, 64, 64)], CONFIG, is_average=True)
    words = f"A [32, 64] bf16, B [64, 8] column-major, avg, {config}"
    assert repr(scatter) == f"ScatterProblem({words})"


def test_weights_of_two_kinds_share_no_gather() -> None:
    weights = [_core.GatherWeight(8, (True, 64), kind, CONFIG) for kind in (PLAIN, SCALED)]
    with pytest.raises(ValueError, match=r"^B: found bf16 and e4m3, wanted one kind of elements$"):
        _core.GatherProblem(8, 64, weights)
