"""The transports as values: their names, what they need and serve, and what the core is told."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from agmm import _core
from agmm.planning import formats
from agmm.planning.plans import UNFUSED, Plan
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    CPU,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    KernelConfig,
    Problem,
)
from agmm.planning.transport_names import Unknown, parse
from agmm.planning.transports import (
    ADDRESSABLE_PEERS,
    BACKEND,
    GATHER,
    LAGGED,
    MESSAGES,
    PULL,
    PUSH,
    SCATTER,
    STREAMED,
    TORCH,
    FusedGather,
    SmPush,
    Transport,
    copy_transports,
)

SM_PUSHES = (SmPush(16, 128), SmPush(8, 256, 1), SmPush(64, 96, 0, 4))
KNOWN: tuple[Transport, ...] = (
    *(PUSH, PULL, *SM_PUSHES, GATHER, BACKEND, TORCH, LAGGED, SCATTER),
    STREAMED,
)
KERNEL = KernelConfig.parse("128x128x64_1x1_pingpong/swizzle2/along_m")
FP8 = "float8_e4m3fn_float8_e4m3fn fast"
PROBLEM = Problem(4096, 3584, 8192, world_size=4)
OPS = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE)


def test_names_are_parsed_back() -> None:
    assert [one.name for one in KNOWN] == [
        *("push", "pull", "sm16x128", "sm8x256+1", "sm64x96h4"),
        *("gather", "unfused", "torch", "lagged", "scatter", "streamed"),
    ]
    for one in (*KNOWN, Unknown("teleport"), Unknown("")):
        assert parse(one.name) == one
        assert pickle.loads(pickle.dumps(one)) == one
    assert len({*KNOWN, *(parse(one.name) for one in KNOWN)}) == len(KNOWN)


@pytest.mark.parametrize(
    "name", ["sm", "sm0x128", "sm16", "sm16x128+0", "sm16x128+", "xsm16x128", "sm8x8h0", "Push", ""]
)
def test_other_names_are_of_no_transport_that_is_known(name: str) -> None:
    found = parse(name)
    assert found == Unknown(name)
    assert not any(found.serves(replace(PROBLEM, op=op)) for op in OPS)
    assert found.why_illegal(PROBLEM, KERNEL) == f"found transport {name}, wanted push"
    assert found.predicted_us(PROBLEM, KERNEL) is None


def test_a_plan_takes_a_transport_or_its_name() -> None:
    for one in KNOWN:
        plan = Plan(one, KERNEL)
        assert plan == Plan(one.name, KERNEL)
        assert hash(plan) == hash(Plan(one.name, KERNEL))
        assert plan.transport is one
        assert replace(plan, kernel=None) == Plan(one)
        assert plan.name == f"{one.name}, {KERNEL.name}"
    with pytest.raises(FrozenInstanceError):
        UNFUSED.transport = PUSH  # type: ignore[misc]


def test_only_the_groups_backend_needs_no_more_than_messages() -> None:
    assert {one for one in KNOWN if one.needs == MESSAGES} == {BACKEND}
    assert {one.needs for one in KNOWN} == {MESSAGES, ADDRESSABLE_PEERS}


def test_every_transport_is_one_of_fp8_or_has_a_reason_why_not() -> None:
    for one in KNOWN:
        assert formats.BITS_16 in one.kinds
        lacks_fp8 = bool(one.ops) and formats.FP8 not in one.kinds
        assert bool(one.why_not_fp8) == lacks_fp8, one.name
        assert bool(one.ops) == (one != BACKEND)
        assert set(one.ops) <= set(OPS)


def test_fp8_has_the_transports_that_carry_scales_in_the_core() -> None:
    folder = Path(__file__).parents[2] / "src/transport"
    carrying = {
        path.stem
        for path in folder.glob("*.cpp")
        if "carries_scales() const override { return true; }" in path.read_text()
    }
    assert carrying == {"copy_engine_push", "sm_push"}
    of_fp8 = replace(PROBLEM, format=FP8)
    served = [one for one in KNOWN if one.serves(of_fp8)]
    assert {one for one in served if not isinstance(one, SmPush)} == {PUSH, GATHER}
    assert {one for one in KNOWN if isinstance(one, SmPush)} <= set(served)


@pytest.mark.parametrize(
    ("transport", "reason"),
    [
        ("pull", "found transport pull, wanted push: it copies rows of A without their scales"),
    ],
)
def test_transports_that_carry_no_scales_are_refused_for_fp8(transport: str, reason: str) -> None:
    problem, found = replace(PROBLEM, format=FP8, return_A=True), parse(transport)
    assert str(found.why_illegal(problem, KERNEL)).startswith(reason)
    assert PUSH.why_illegal(problem, KERNEL) is None
    usual = replace(problem, format="bfloat16")
    assert "scales" not in (found.why_illegal(usual, KERNEL) or "")


def test_the_core_takes_every_transport_of_a_fused_gather() -> None:
    fused = [one for one in KNOWN if isinstance(one, FusedGather)]
    assert [one.core_arguments() for one in fused] == [
        (0, 0, 0, 0, 0),
        (1, 0, 0, 0, 0),
        (2, 16, 128, 0, 0),
        (2, 8, 256, 1, 0),
        (2, 64, 96, 0, 4),
    ]
    weight = _core.GatherWeight(64, (True, 64), _core.Format(_core.DType.bfloat16), KERNEL.core)
    for one in fused:
        _core.GatherProblem(8, 64, [weight], one.core_arguments())


def test_copies_are_those_that_can_return_A() -> None:
    assert copy_transports(PROBLEM) == (PUSH,)
    returning = replace(PROBLEM, return_A=True)
    assert copy_transports(returning, KERNEL) == (PUSH, PULL)
    in_rows = replace(returning, b_layout="row")
    wide = replace(KERNEL, tile_n=256, cluster_m=2, schedule="cooperative")
    assert "row" not in wide.stores_A
    assert copy_transports(in_rows, wide) == (PULL,)
    assert copy_transports(replace(in_rows, format=FP8), wide) == ()
    assert copy_transports(replace(in_rows, gpu=CPU), wide) == (PUSH,)
    assert copy_transports(replace(in_rows, format=FP8, world_size=1), wide) == (PUSH,)
