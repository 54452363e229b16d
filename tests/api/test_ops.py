"""The public API and the torch ops on the CPU, alone or in a world of one rank."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from steps_taken import noted, planned
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

import agmm
from agmm import InvalidArgument, Unsupported
from agmm.errors import forget_warnings
from agmm.nn import ColumnParallelLinear
from agmm.ops import async_input_mm, scatter_plan
from agmm.ops.gather import GatherSettings
from agmm.ops.plain_gather import PlainGather
from agmm.planning import call_plans
from agmm.planning.plans import Plan
from agmm.planning.problems import KernelConfig, Problem
from agmm.runtime import cuda_calls, groups, symmetric

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
MULTIPLE = "wanted a positive multiple of 8 (16-byte TMA alignment)"
CONFIG_NAME = "128x256x64_2x1_cooperative/swizzle4/along_m"

# What it returns depends on the values of its arguments, which its type does not say.
all_gather_matmul: Callable[..., Any] = agmm.all_gather_matmul


def whole_numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Small enough that every product is exact in every type and order of summation."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


@pytest.fixture(autouse=True)
def nothing_warned_yet() -> None:
    forget_warnings()


def refusal(call: Callable[[], object], kind: type[Exception] = InvalidArgument) -> str:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("chunks", "across"), [(1, False), (4, True)])
def test_a_weight_beyond_the_cache_is_read_across_the_chunks(
    monkeypatch: pytest.MonkeyPatch, chunks: int, across: bool
) -> None:
    kernel = KernelConfig.parse("128x256x64_2x1_cooperative/swizzle4/along_n")
    chosen = mock.Mock(fused_plan=lambda problem: Plan("push", kernel))
    monkeypatch.setattr(call_plans, "problem_of", lambda *sizes, **how: Problem(300, 28672, 8192))
    monkeypatch.setattr(call_plans, "planner", lambda *given: chosen)
    run = mock.Mock()
    monkeypatch.setattr(cuda_calls, "ready_matmul", run)
    signals = torch.ones(chunks, dtype=torch.uint32)
    a = torch.ones(8, 8).bfloat16()
    async_input_mm.on_cuda(a, a, signals, 0)
    *_, ready = run.call_args.args
    assert ready.config.across is across


# --- bad input: _async_input_mm ---

ASYNC_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"a": torch.ones(8)}, "a: found 1 dimensions, wanted 2"),
    ({"a": torch.ones(2, 4, 4)}, "a: found 3 dimensions, wanted 2"),
    ({"b": torch.ones(4)}, "b: found 1 dimensions, wanted 2"),
    ({"b": torch.ones(4, 3).double()}, "b: found dtype torch.float64, wanted torch.float32 as a"),
    ({"b": torch.ones(5, 3)}, "b: found K=5, wanted 4 as the columns of a"),
    (
        {"b": torch.ones(5, 4)},
        "b: found K=5, wanted 4 as the columns of a; did you mean b.t()?",
    ),
    (
        {"a": torch.ones(8, 4).long(), "b": torch.ones(4, 3).long()},
        f"a: found dtype torch.int64, wanted one of {', '.join(str(dtype) for dtype in FLOATS)}",
    ),
    ({"a": torch.ones(4, 8).t()}, "a: found strides (1, 8), wanted contiguous rows"),
    ({"a": torch.ones(8, 8)[:, :4]}, "a: found strides (8, 1), wanted contiguous rows"),
    (
        {"signals": torch.ones(2, dtype=torch.int32)},
        "a_chunk_signals: found dtype torch.int32, wanted torch.uint32",
    ),
    (
        {"signals": torch.ones(2)},
        "a_chunk_signals: found dtype torch.float32, wanted torch.uint32",
    ),
    (
        {"signals": torch.ones((), dtype=torch.uint32)},
        "a_chunk_signals: found 0 dimensions, wanted 1",
    ),
    (
        {"signals": torch.ones(2, 2, dtype=torch.uint32)},
        "a_chunk_signals: found 2 dimensions, wanted 1",
    ),
    (
        {"signals": torch.ones(3, dtype=torch.uint32)},
        "a_chunk_signals: found 3 signals, wanted a divisor of M=8",
    ),
    (
        {"signals": torch.ones(16, dtype=torch.uint32)},
        "a_chunk_signals: found 16 signals, wanted a divisor of M=8",
    ),
    (
        {"signals": torch.ones(0, dtype=torch.uint32)},
        "a_chunk_signals: found 0 signals, wanted a divisor of M=8",
    ),
    ({"pivot": -1}, "a_chunk_pivot: found -1, wanted 0 to 1"),
    ({"pivot": 2}, "a_chunk_pivot: found 2, wanted 0 to 1"),
]

DEVICE_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"b": torch.ones(4, 3, device="meta")}, "b: found device meta, wanted cpu as a"),
    (
        {"signals": torch.ones(2, dtype=torch.uint32, device="meta")},
        "a_chunk_signals: found device meta, wanted cpu as a",
    ),
]


def async_call(change: dict[str, Any]) -> tuple[Any, ...]:
    call: dict[str, Any] = {
        "a": torch.ones(8, 4),
        "b": torch.ones(4, 3),
        "signals": torch.ones(2, dtype=torch.uint32),
        "pivot": 0,
        **change,
    }
    return tuple(call.values())


@pytest.mark.parametrize(("change", "message"), ASYNC_FAULTS, ids=lambda value: str(value)[:40])
def test_async_input_mm_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    arguments = async_call(change)
    assert refusal(lambda: torch.ops.agmm._async_input_mm(*arguments)) == message


@pytest.mark.parametrize(("change", "message"), DEVICE_FAULTS, ids=["b", "signals"])
def test_async_input_mm_names_a_device_and_returns_no_unwritten_memory(
    change: dict[str, Any], message: str
) -> None:
    # One operand without data sends the call to the Meta kernel.
    arguments = async_call(change)
    assert refusal(lambda: torch.ops.agmm._async_input_mm(*arguments)) == message


# --- what the kernels cannot do ---

SIZES: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float32}, "{a}: found dtype float32, wanted bfloat16 or float16"),
    ({"k": 12}, f"{{a}}: found K=12, {MULTIPLE}"),
    ({"n": 12}, f"{{b}}: found N=12, {MULTIPLE}"),
]
LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"stride": (32, 2)}, "{b}: found strides (32, 2), wanted row-major or column-major"),
    ({"stride": (1, 20)}, "{b}: found leading dimension 20, wanted a multiple of 8"),
]
ANY_GROUP: Any = mock.Mock(**{"size.return_value": 4})
REASONS: list[tuple[Callable[[torch.Tensor, torch.Tensor], str | None], dict[str, str], Any]] = [
    (
        lambda A, B: PlainGather(A, [B], [None], ANY_GROUP, GatherSettings()).why_not_fused(),
        *({"a": "A_shard", "b": "B"}, SIZES + LAYOUTS),
    ),
    (lambda A, B: scatter_plan.why_not_native([A], [B], 0, ANY_GROUP), {"a": "A", "b": "B"}, SIZES),
    (
        lambda A, B: async_input_mm.why_no_kernel(A, B, torch.ones(2, dtype=torch.uint32)),
        *({"a": "a", "b": "b"}, SIZES + LAYOUTS),
    ),
]


@pytest.mark.parametrize(("why", "names", "cases"), REASONS, ids=["gather", "scatter", "async"])
def test_what_kernels_cannot_do_is_said_of_the_arguments_of_the_op(
    monkeypatch: pytest.MonkeyPatch,
    why: Callable[[torch.Tensor, torch.Tensor], str | None],
    names: dict[str, str],
    cases: list[tuple[dict[str, Any], str]],
) -> None:
    """In the form of all refusals: the argument, what was found and what is wanted."""
    monkeypatch.setattr(symmetric, "why_unfused", lambda device: None)
    monkeypatch.setattr(symmetric, "why_group_unfused", lambda group, device: None)
    for change, message in cases:
        k, n, dtype = (change.get(name, 16) for name in ("k", "n", "dtype"))
        dtype = torch.bfloat16 if dtype == 16 else dtype
        with FakeTensorMode():
            A = torch.empty(32, k, dtype=dtype, device="cuda")
            B = torch.empty_strided(
                (k, n), change.get("stride", (n, 1)), dtype=dtype, device="cuda"
            )
            assert why(A, B) == message.format(**names)


# --- bad input: all_gather_matmul ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A_shard": torch.ones(4)}, "A_shard: found 1 dimensions, wanted at least 2"),
        ({"A_shard": [[1.0]]}, "A_shard: found list, wanted a tensor"),
        ({"B": 3}, "B: found int, wanted a tensor"),
        ({"B": torch.ones(4)}, "B: found 1 dimensions, wanted 2"),
        ({"B": torch.ones(1, 4, 3)}, "B: found 3 dimensions, wanted 2"),
        ({"B": torch.ones(5, 3)}, "B: found K=5, wanted 4 as the columns of A_shard"),
        (
            {"B": [torch.ones(4, 3), torch.ones(3, 4)]},
            "B: found K=3, wanted 4 as the columns of A_shard; did you mean B.t()?",
        ),
        (
            {"B": torch.ones(4, 3).half()},
            "B: found dtype torch.float16, wanted torch.float32 as A_shard",
        ),
        (
            {"B": torch.ones(4, 3, device="meta")},
            "B: found device meta, wanted cpu as A_shard",
        ),
        ({"B": []}, "B: found an empty list, wanted at least one weight"),
        ({"B": ()}, "B: found an empty list, wanted at least one weight"),
        ({"gather_dim": 2}, "gather_dim: found 2, wanted -2 to 1"),
        ({"gather_dim": -3}, "gather_dim: found -3, wanted -2 to 1"),
        (
            {"B": torch.ones(5, 3), "gather_dim": 1},
            "B: found K=5, wanted 4 as the columns of the gathered A",
        ),
        (
            {"group": "nowhere"},
            "group: found 'nowhere', wanted the name of a process group of this process",
        ),
        ({"bias": torch.ones(4)}, "bias: found shape (4,), wanted (3,) as B's columns"),
        ({"bias": torch.ones(1, 3)}, "bias: found shape (1, 3), wanted (3,) as B's columns"),
        (
            {"bias": torch.ones(3).double()},
            "bias: found dtype torch.float64, wanted torch.float32 as A_shard",
        ),
        (
            {"bias": torch.ones(3, device="meta")},
            "bias: found device meta, wanted cpu as A_shard",
        ),
        (
            {"B": [torch.ones(4, 3)] * 2, "bias": [torch.ones(3)]},
            "bias: found 1 for 2 weights, wanted one each",
        ),
        ({"bias": [None, None]}, "bias: found 2 for 1 weights, wanted one each"),
        (
            {"B": [torch.ones(4, 3)] * 2, "bias": torch.ones(3)},
            "bias: found one for 2 weights, wanted a list of one each",
        ),
        (
            {"B": [torch.ones(4, 3), torch.ones(4, 2)], "bias": [None, torch.ones(3)]},
            "bias: found shape (3,), wanted (2,) as B's columns",
        ),
        (
            {"config": "fastest"},
            f"config: found 'fastest', wanted a name such as {CONFIG_NAME}",
        ),
        ({"A_shard": None}, "A_shard: found None, wanted a tensor"),
        ({"B": None}, "B: found None, wanted a tensor"),
        ({"B": [torch.ones(4, 3), None]}, "B: found None, wanted a tensor"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_all_gather_matmul_names_what_is_wrong(
    group: str, change: dict[str, Any], message: str
) -> None:
    arguments = {"A_shard": torch.ones(2, 4), "B": torch.ones(4, 3), **change}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the unfused path
        assert refusal(lambda: all_gather_matmul(**arguments)) == message


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    call = torch.ones(2, 4), torch.ones(4, 3)
    assert refusal(lambda: all_gather_matmul(*call)) == (
        "group: found None without a default process group, wanted a group or "
        "torch.distributed.init_process_group"
    )
    wanted = "group: found 'any', wanted the name of a process group of this process"
    assert refusal(lambda: all_gather_matmul(*call, "any")) == wanted
    native = torch.ops.agmm._fused_all_gather_matmul_native
    assert refusal(lambda: native(*call, "any")) == wanted


def test_a_destroyed_group_is_refused(group: str) -> None:
    other = dist.new_group([0])
    name = other.group_name
    call = torch.ones(2, 4), torch.ones(4, 3), name
    assert torch.equal(all_gather_matmul(*call), torch.full((2, 3), 4.0))
    dist.destroy_process_group(other)
    assert refusal(lambda: all_gather_matmul(*call)).startswith(f"group: found {name!r}, ")


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_destroyed_group_is_not_the_next_one_of_its_name(group: str, needs_grad: bool) -> None:
    """Neither in a call nor in the backward of an earlier one."""
    old: Any = dist.group.WORLD
    x = torch.ones(2, 4, requires_grad=needs_grad)
    calls: list[Callable[[Any], torch.Tensor]] = [
        lambda group: all_gather_matmul(x, torch.ones(4, 3), group),
        lambda group: agmm.matmul_reduce_scatter(x, torch.ones(4, 3), group),
        lambda group: agmm.matmul_all_reduce(x, torch.ones(4, 3), group),
        lambda group: agmm.collectives.all_gather(x, group),
        lambda group: agmm.collectives.reduce_scatter(x, group),
        lambda group: agmm.collectives.all_reduce(x, group),
    ]
    mesh = DeviceMesh.from_group(old, "cpu")
    outs = [call(old) for call in calls]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    new: Any = dist.group.WORLD
    assert new.group_name == group and new is not old
    wanted = (
        "group: found a destroyed one (torch.distributed.destroy_process_group), wanted one in use"
    )
    for call in calls:
        assert refusal(partial(call, old)) == wanted
        if hasattr(mesh, "_pg_registry"):  # else torch's meshes know their groups by name only
            assert refusal(partial(call, mesh)) == wanted
        assert call(new).shape == call(group).shape
    del outs[2]  # its backward communicates nothing
    for out in outs if needs_grad else []:
        assert refusal(out.sum().backward) == wanted


def test_a_destroyed_group_is_not_served_by_another_one_of_its_name() -> None:
    """The call is one that no earlier one was like."""
    groups_of_one: list[Any] = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        groups_of_one.append(dist.group.WORLD)
        if len(groups_of_one) == 1:
            dist.destroy_process_group()
    try:
        old, new = groups_of_one
        assert old.group_name == new.group_name
        A, B = torch.ones(16, 16), torch.ones(16, 16)
        F8, one = A.to(torch.float8_e4m3fn), torch.ones(1)
        grad = A.clone().requires_grad_()
        calls: list[Callable[[Any], Any]] = [
            lambda group: all_gather_matmul(A, B, group),
            lambda group: all_gather_matmul(grad, B, group),
            lambda group: all_gather_matmul(A, B, group, quantize="tensorwise"),
            lambda group: agmm.matmul_reduce_scatter(A, B, group),
            lambda group: agmm.matmul_all_reduce(A, B, group),
            lambda group: agmm.matmul_all_reduce_rms_norm(A, B, A, A[0], group=group),
            lambda group: agmm.all_gather_scaled_matmul(F8, F8, one, one, group),
            lambda group: agmm.scaled_matmul_reduce_scatter(F8, F8, one, one, group),
            lambda group: agmm.scaled_matmul_all_reduce(F8, F8, one, one, group),
            lambda group: agmm.collectives.all_gather(A, group),
            lambda group: agmm.collectives.reduce_scatter(A, group),
            lambda group: agmm.collectives.all_reduce(A, group),
            lambda group: agmm.collectives.all_reduce_rms_norm(A, A, A[0], group=group),
        ]
        for call in calls:
            assert refusal(partial(call, old)).startswith("group: found a destroyed one")
            call(new)
    finally:
        dist.destroy_process_group()


def test_a_limit_that_is_no_number_is_refused_by_one_rank_too(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dist.new_group([0])
    call = torch.ones(2, 4), torch.ones(4, 3), other
    monkeypatch.setenv("AGMM_TIMEOUT_S", "abc")
    wanted = "AGMM_TIMEOUT_S: found 'abc', wanted a number of seconds > 0"
    assert refusal(lambda: all_gather_matmul(*call)) == wanted
    monkeypatch.delenv("AGMM_TIMEOUT_S")
    assert torch.equal(all_gather_matmul(*call), torch.full((2, 3), 4.0))
    dist.destroy_process_group(other)


def test_native_op_names_what_is_wrong(group: str) -> None:
    native = torch.ops.agmm._fused_all_gather_matmul_native
    A, B = torch.ones(2, 4), torch.ones(4, 3)
    assert refusal(lambda: native(A, B.t(), group)) == (
        "B: found K=3, wanted 4 as the columns of A_shard; did you mean B.t()?"
    )
    assert refusal(lambda: native(A, B.half(), group)) == (
        "B: found dtype torch.float16, wanted torch.float32 as A_shard"
    )
    assert refusal(lambda: native(A, B.to("meta"), group)) == (
        "B: found device meta, wanted cpu as A_shard"
    )


def test_errors_are_of_one_family() -> None:
    assert issubclass(InvalidArgument, ValueError)
    assert issubclass(InvalidArgument, agmm.AgmmError)
    assert issubclass(Unsupported, agmm.AgmmError)
    assert not issubclass(Unsupported, ValueError)


# --- the fused path in a world of one ---


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 7), (64, 24, 40), (130, 8, 33)], ids=str)
def test_product(group: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    A, B = whole_numbers(m, k, dtype=dtype), whole_numbers(k, n, dtype=dtype, seed=1)
    bias = whole_numbers(n, dtype=dtype, seed=2)
    assert torch.equal(all_gather_matmul(A, B, strict=True), A @ B)
    assert torch.equal(all_gather_matmul(A, B, bias=bias, strict=True), A @ B + bias)
    column_major = B.t().contiguous().t()
    assert torch.equal(all_gather_matmul(A, column_major, strict=True), A @ B)


def test_double_precision_is_kept(group: str) -> None:
    tiny = 2.0**-40
    A = torch.tensor([[1.0, tiny]], dtype=torch.float64)
    B = torch.ones(2, 1, dtype=torch.float64)
    out = all_gather_matmul(A, B, strict=True)
    assert out.dtype == torch.float64 and out.item() == 1.0 + tiny


def test_group_by_object_by_name_and_by_default(group: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 2, seed=1)
    for given in (None, group, dist.group.WORLD):
        assert torch.equal(all_gather_matmul(A, B, given, strict=True), A @ B)


def test_list_of_weights(group: str) -> None:
    A = whole_numbers(6, 8)
    Bs = [whole_numbers(8, n, seed=n) for n in (1, 5, 16)]
    bias = whole_numbers(5, seed=9)
    biases = [None, bias, None]
    for weights in (Bs, tuple(Bs)):
        outs = all_gather_matmul(A, weights, strict=True)
        assert type(outs) is list and len(outs) == 3
        for out, B in zip(outs, Bs, strict=True):
            assert isinstance(out, torch.Tensor) and torch.equal(out, A @ B)
    gathered, outs = all_gather_matmul(A, Bs, bias=biases, return_A=True, strict=True)
    assert torch.equal(gathered, A)
    assert torch.equal(outs[1], A @ Bs[1] + bias)
    assert torch.equal(outs[2], A @ Bs[2])
    (only,) = all_gather_matmul(A, Bs[1:2], bias=bias, strict=True)
    assert torch.equal(only, A @ Bs[1] + bias)


def test_results_are_tensors_of_their_own(group: str) -> None:
    A, B = whole_numbers(6, 8), whole_numbers(8, 3, seed=1)
    wanted = A.clone()
    first = all_gather_matmul(A, B, return_A=True, strict=True)
    second = all_gather_matmul(A, B, return_A=True, strict=True)
    storages = {t.untyped_storage().data_ptr() for t in (A, B, *first, *second)}
    assert len(storages) == 6
    A.fill_(torch.nan)
    all_gather_matmul(A, B, strict=True)
    all_gather_matmul(A, B, strict=True)
    for gathered, out in (first, second):
        assert torch.equal(gathered, wanted) and torch.equal(out, wanted @ B)


@pytest.mark.parametrize("leading", [(3,), (2, 5), (1, 1, 2)])
def test_leading_dimensions(group: str, leading: tuple[int, ...]) -> None:
    A = whole_numbers(4, *leading, 6)
    B, bias = whole_numbers(6, 3, seed=1), whole_numbers(3, seed=2)
    gathered, out = all_gather_matmul(A, B, bias=bias, return_A=True, strict=True)
    assert out.shape == (4, *leading, 3)
    assert torch.equal(out, A @ B + bias) and torch.equal(gathered, A)
    (only,) = all_gather_matmul(A, [B], strict=True)
    assert torch.equal(only, A @ B)


def test_gather_dim_may_count_from_the_end(group: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3, seed=1)
    assert torch.equal(all_gather_matmul(A, B, gather_dim=-2, strict=True), A @ B)


def test_config_by_name_and_by_object(group: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3, seed=1)
    config = agmm.KernelConfig(128, 128, 64, 1, 1, "pingpong")
    for given in (config, config.name, config.kernel):
        assert torch.equal(all_gather_matmul(A, B, config=given, strict=True), A @ B)


def test_no_columns(group: str) -> None:
    assert all_gather_matmul(torch.ones(4, 6), torch.ones(6, 0), strict=True).shape == (4, 0)


def test_native_op(group: str) -> None:
    A, B = whole_numbers(10, 8), whole_numbers(8, 3, seed=1)
    gathered, out = torch.ops.agmm._fused_all_gather_matmul_native(A, B, group)
    assert torch.equal(gathered, A) and torch.equal(out, A @ B)
    assert gathered.data_ptr() != A.data_ptr()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("chunks", [1, 2, 4, 12])
def test_async_input_mm(dtype: torch.dtype, chunks: int) -> None:
    a, b = whole_numbers(12, 7, dtype=dtype), whole_numbers(7, 5, dtype=dtype, seed=1)
    every_other = torch.ones(2 * chunks, dtype=torch.uint32)[::2]
    for signals in (torch.ones(chunks, dtype=torch.uint32), every_other):
        for pivot in range(chunks):
            out = torch.ops.agmm._async_input_mm(a, b, signals, pivot)
            assert out.dtype == dtype and torch.equal(out, a @ b)
        assert signals.tolist() == [1] * chunks


# --- the unfused path ---

UNFUSED = [
    ("gather_dim", "gather_dim: 1, the fused path wants 0"),
    ("int", "A_shard: dtype=torch.int32, the CPU backend wants a floating-point type"),
    ("strides", "A_shard: strides (1, 4) are not contiguous"),
]


def unfused_call(kind: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3, seed=1)
    if kind == "gather_dim":
        return A, B, 1
    if kind == "int":
        return A.int(), B.int(), 0
    return A.t().contiguous().t(), B, 0


@pytest.mark.parametrize(("kind", "reason"), UNFUSED)
def test_unfused_path_is_right_and_warns_once(group: str, kind: str, reason: str) -> None:
    A, B, gather_dim = unfused_call(kind)
    bias = whole_numbers(3, dtype=A.dtype, seed=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            gathered, out = all_gather_matmul(A, B, gather_dim=gather_dim, bias=bias, return_A=True)
            assert out.dtype == A.dtype and torch.equal(out, A @ B + bias)
            assert torch.equal(gathered, A)
            assert gathered.data_ptr() != A.data_ptr()
    assert [str(warning.message) for warning in caught] == [
        f"agmm takes the unfused path: {reason}"
    ]
    assert caught[0].category is UserWarning


@pytest.mark.parametrize("strict", [False, True])
def test_without_elements_there_is_no_path_to_warn_of(group: str, strict: bool) -> None:
    A, B, bias = whole_numbers(4, 6), whole_numbers(6, 3, seed=1), whole_numbers(3, seed=2)
    for shard, weight in ((A[:0], B), (A[:, :0], B[:0])):
        gathered, out = all_gather_matmul(shard, weight, bias=bias, return_A=True, strict=strict)
        assert torch.equal(out, shard @ weight + bias) and torch.equal(gathered, shard)
    out = agmm.matmul_reduce_scatter(A[:0], B, bias=bias, strict=strict)
    assert torch.equal(out, A[:0] @ B) and out.shape == (0, 3)
    assert agmm.matmul_all_reduce(A, B[:, :0], strict=strict).shape == (4, 0)


@pytest.mark.parametrize(("kind", "reason"), UNFUSED)
def test_strict_refuses_the_unfused_path(group: str, kind: str, reason: str) -> None:
    A, B, gather_dim = unfused_call(kind)
    message = refusal(
        lambda: all_gather_matmul(A, B, gather_dim=gather_dim, strict=True), Unsupported
    )
    assert message == f"{reason}; strict=True refuses the unfused path"
    with pytest.warns(UserWarning, match="agmm takes the unfused path"):  # is told yet
        all_gather_matmul(A, B, gather_dim=gather_dim)


def test_every_reason_is_warned_of(group: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind, _ in UNFUSED * 2:
            A, B, gather_dim = unfused_call(kind)
            all_gather_matmul(A, B, gather_dim=gather_dim)
    assert [str(warning.message).split(": ", 1)[1] for warning in caught] == [
        reason for _, reason in UNFUSED
    ]


def test_unfused_path_of_three_dimensions(group: str) -> None:
    A, B = whole_numbers(2, 4, 6), whole_numbers(6, 3, seed=1)
    for gather_dim in (1, 2, -1, -2):
        with pytest.warns(UserWarning, match=f"^agmm takes .*: gather_dim: {gather_dim}, "):
            out = all_gather_matmul(A, B, gather_dim=gather_dim)
        assert torch.equal(out, A @ B)


def test_unfused_on_request_is_no_surprise(group: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3, seed=1)
    Bs = [B, whole_numbers(6, 1, seed=2)]
    # A warning would be an error here.
    assert torch.equal(all_gather_matmul(A, B, config="unfused"), A @ B)
    gathered, outs = all_gather_matmul(A, Bs, config="unfused", return_A=True)
    assert torch.equal(gathered, A)
    assert all(torch.equal(out, A @ b) for out, b in zip(outs, Bs, strict=True))
    message = refusal(lambda: all_gather_matmul(A, B, config="unfused", strict=True), Unsupported)
    assert message == "config: unfused was asked for; strict=True refuses the unfused path"


# --- torch.library and torch.compile ---


def test_opcheck_async_input_mm(fresh_compiler: None) -> None:
    for dtype in FLOATS:
        a, b = torch.randn(12, 7, dtype=dtype), torch.randn(7, 5, dtype=dtype)
        signals = torch.ones(3, dtype=torch.uint32)
        torch.library.opcheck(torch.ops.agmm._async_input_mm.default, (a, b, signals, 2))


def test_opcheck_native(group: str, fresh_compiler: None) -> None:
    op = torch.ops.agmm._fused_all_gather_matmul_native.default
    torch.library.opcheck(op, (torch.randn(6, 8), torch.randn(8, 3), group))
    torch.library.opcheck(op, (torch.randn(6, 2, 8), torch.randn(3, 8).t(), group))


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize(("gather_dim", "config"), [(0, ""), (1, "unfused"), (-1, "unfused")])
def test_opcheck_all_gather_matmul(
    group: str, fresh_compiler: None, return_A: bool, gather_dim: int, config: str
) -> None:
    Bs = [torch.randn(8, 3), torch.randn(5, 8).t()]
    biases = [None, torch.randn(5)]
    for A in (torch.randn(6, 8), torch.randn(2, 3, 8)):
        arguments = (A, Bs, biases, group, 1, gather_dim, return_A, config, not config)
        torch.library.opcheck(torch.ops.agmm._all_gather_matmul.default, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_the_function_and_the_ops(group: str, fresh_compiler: None, backend: str) -> None:
    signals = torch.ones(2, dtype=torch.uint32)

    def layer(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        out = all_gather_matmul(A, B, bias=bias)
        gathered, (first, second) = all_gather_matmul(
            A + 1, [B, B[:, :1]], group, return_A=True, bias=[None, bias[:1]], strict=True
        )
        product = torch.ops.agmm._async_input_mm(A, B, signals, 1)
        pair = torch.ops.agmm._fused_all_gather_matmul_native(A, B, group)
        return [out * 2, gathered, first, second, product - 1, *pair]

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for seed in range(2):
        A, B, bias = whole_numbers(6, 8, seed=seed), whole_numbers(8, 3, seed=3), torch.ones(3)
        wanted = [
            2 * (A @ B + 1),
            A + 1,
            (A + 1) @ B,
            (A + 1) @ B[:, :1] + 1,
            A @ B - 1,
            A,
            A @ B,
        ]
        found = compiled(A, B, bias)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


def test_compile_with_changing_rows(group: str, fresh_compiler: None) -> None:
    B = whole_numbers(8, 3)
    graphs = 0  # sizes that are equal in the first call are held equal, so none are

    def count(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(
        lambda A: all_gather_matmul(A, B), fullgraph=True, backend=count, dynamic=True
    )
    for rows in (7, 5, 9, 13):
        A = whole_numbers(rows, 8, seed=rows)
        assert torch.equal(compiled(A), A @ B)
    assert graphs == 1


def test_compile_a_module(group: str, fresh_compiler: None) -> None:
    linear = torch.nn.Linear(8, 3)

    @torch.no_grad()
    def layer(A: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = all_gather_matmul(A, linear.weight.t(), bias=linear.bias)
        return out

    A = torch.randn(4, 2, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(A), linear(A))


def test_meta_tensors_show_the_shapes(group: str) -> None:
    A, B = torch.ones(4, 2, 8, device="meta"), torch.ones(8, 3, device="meta")
    gathered, out = torch.ops.agmm._fused_all_gather_matmul_native(A, B, group)
    assert gathered.shape == (4, 2, 8) and out.shape == (4, 2, 3) and out.device.type == "meta"
    signals = torch.ones(2, dtype=torch.uint32, device="meta")
    assert torch.ops.agmm._async_input_mm(A[:, 0].contiguous(), B, signals, 0).shape == (4, 3)


def test_inference_mode(group: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3, seed=1)
    with torch.inference_mode():
        out = all_gather_matmul(A, B, strict=True)
        assert torch.equal(out, A @ B)


def test_async_input_mm_refuses_what_requires_grad() -> None:
    A, B = whole_numbers(4, 6).requires_grad_(), whole_numbers(6, 3, seed=1)
    ready = torch.ones(2, dtype=torch.uint32)
    with pytest.raises(InvalidArgument, match="requires_grad=True"):
        torch.ops.agmm._async_input_mm(A, B, ready, 0)
    with torch.no_grad():
        assert torch.equal(torch.ops.agmm._async_input_mm(A, B, ready, 0), A @ B)


@pytest.mark.parametrize("save_gathered", [False, True])
@pytest.mark.parametrize("return_A", [False, True])
def test_gradients(group: str, return_A: bool, save_gathered: bool) -> None:
    A, B = whole_numbers(4, 6).requires_grad_(), whole_numbers(3, 6, seed=1).requires_grad_()
    bias = whole_numbers(3, seed=2).requires_grad_()
    found = all_gather_matmul(
        A, B.t(), bias=bias, return_A=return_A, save_gathered=save_gathered, strict=True
    )
    gathered, out = found if return_A else (A, found)
    (out.sum() + 2 * gathered.sum()).backward()
    wanted = torch.autograd.grad((A @ B.t() + bias).sum() + 2 * A.sum(), (A, B, bias))
    for leaf, other in zip((A, B, bias), wanted, strict=True):
        assert leaf.grad is not None and leaf.grad.is_contiguous()
        assert torch.equal(leaf.grad, other)


def test_no_gradient_where_none_is_wanted(group: str) -> None:
    A, B = whole_numbers(4, 6).requires_grad_(), whole_numbers(6, 3, seed=1).requires_grad_()
    with torch.no_grad():
        assert not all_gather_matmul(A, B, save_gathered=True).requires_grad
    first, second = all_gather_matmul(A, [B, B[:, :1]])
    assert first.requires_grad and second.requires_grad
    gathered, _ = all_gather_matmul(A, B, return_A=True)
    gathered.sum().backward()
    assert B.grad is None and A.grad is not None and torch.equal(A.grad, torch.ones(4, 6))
    out = all_gather_matmul(A.detach(), B.detach(), bias=torch.ones(3, requires_grad=True))
    assert out.requires_grad


def test_backward_cannot_be_differentiated(group: str) -> None:
    A, B = whole_numbers(4, 6).requires_grad_(), whole_numbers(6, 3, seed=1).requires_grad_()
    for out in (all_gather_matmul(A, B), agmm.matmul_reduce_scatter(A, B)):
        (dA,) = torch.autograd.grad(out.square().sum(), A, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dA.sum().backward()


def test_gradients_of_complex_numbers_are_refused(group: str) -> None:
    A, B = torch.ones(4, 6, dtype=torch.complex64), torch.ones(6, 3, dtype=torch.complex64)
    A.requires_grad_()
    for name, call in (
        ("A_shard", lambda: all_gather_matmul(A, B, config="unfused")),
        ("A", lambda: agmm.matmul_reduce_scatter(A, B)),
    ):
        assert refusal(call) == (
            f"{name}: found dtype torch.complex64 where a gradient is wanted, wanted a real "
            "floating-point type"
        )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_autocast_is_that_of_linear(group: str, dtype: torch.dtype) -> None:
    A, weight = whole_numbers(4, 6, dtype=dtype), whole_numbers(3, 6, dtype=dtype, seed=1)
    bias = whole_numbers(3, dtype=dtype, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = torch.nn.functional.linear(A, weight, bias)
        out = all_gather_matmul(A, weight.t(), bias=bias, strict=True)
        scattered = agmm.matmul_reduce_scatter(A, weight.t(), bias=bias)
        with torch.autocast("cpu", enabled=False):
            plain = all_gather_matmul(A, weight.t(), bias=bias, strict=True)
    assert plain.dtype == dtype
    assert out.dtype == scattered.dtype == wanted.dtype
    assert torch.equal(out, wanted) and torch.equal(scattered, wanted)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (2, 3, 4), (0, 4), (3, 0)], ids=str)
def test_matmul_reduce_scatter(group: str, shape: tuple[int, ...], reduce_op: str) -> None:
    A, B = whole_numbers(*shape), whole_numbers(shape[-1], 3, seed=1)
    bias = whole_numbers(3, seed=2)
    for scatter_dim in range(-len(shape), len(shape)):
        unfused = scatter_dim % len(shape) == len(shape) - 1
        with warnings.catch_warnings():
            if unfused:
                warnings.filterwarnings("ignore", "agmm takes the unfused path")
            out = agmm.matmul_reduce_scatter(A, B, scatter_dim=scatter_dim, reduce_op=reduce_op)
        assert torch.equal(out, A @ B) and out.is_contiguous()
    if 0 not in shape[:-1]:
        out = agmm.matmul_reduce_scatter(A, B, group, bias=bias, strict=True)
        assert torch.equal(out, A @ B + bias)


UNFUSED_SCATTERS: list[tuple[torch.Tensor, int, str]] = [
    (torch.ones(4, 6), 1, "scatter_dim: 1, the fused path wants another than the last"),
    (torch.ones(4, 6).int(), 0, "A: dtype=torch.int32, the CPU backend wants a floating-point"),
]


@pytest.mark.parametrize(("A", "scatter_dim", "reason"), UNFUSED_SCATTERS)
def test_unfused_scatter_is_warned_of_once_and_refused_if_strict(
    group: str, A: torch.Tensor, scatter_dim: int, reason: str
) -> None:
    B = torch.ones(6, 3, dtype=A.dtype)
    with pytest.warns(UserWarning, match=re.escape(f"takes the unfused path: {reason}")) as caught:
        out = agmm.matmul_reduce_scatter(A, B, scatter_dim=scatter_dim)
    assert caught[0].filename == __file__
    assert torch.equal(out, A @ B)
    agmm.matmul_reduce_scatter(A, B, scatter_dim=scatter_dim)  # a warning would be an error
    with pytest.raises(agmm.Unsupported, match=re.escape(reason)):
        agmm.matmul_reduce_scatter(A, B, scatter_dim=scatter_dim, strict=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_several_products_and_a_bias_are_rounded_once(group: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    As = [torch.randn(64, k).to(dtype) for k in (96, 40)]
    Bs = [torch.randn(k, 48).to(dtype) for k in (96, 40)]
    bias = (10 * torch.randn(48)).to(dtype)
    products = [A.double() @ B.double() for A, B in zip(As, Bs, strict=True)]
    rounded = (sum(products) + bias.double()).to(dtype)
    twice = sum(product.to(dtype) for product in products) + bias
    out = agmm.matmul_reduce_scatter(As, Bs, bias=bias, strict=True)
    # Sums in float32 fall on the other side of a few roundings, where a second one changes many.
    differing = (out != rounded).float().mean().item()
    assert differing < 0.02 < (twice != rounded).float().mean().item()


def test_the_native_scatter(group: str) -> None:
    A, B = whole_numbers(4, 6).requires_grad_(), whole_numbers(6, 3, seed=1).requires_grad_()
    out = torch.ops.agmm._fused_matmul_reduce_scatter_native(A, B, "avg", group)
    assert torch.equal(out, A @ B)
    (2 * out.sum()).backward()
    assert A.grad is not None and torch.equal(A.grad, 2 * B.sum(1).expand(4, 6))
    assert B.grad is not None and torch.equal(B.grad, 2 * A.sum(0)[:, None].expand(6, 3))


def test_a_scatter_of_no_columns_of_A_has_gradients(group: str) -> None:
    A, B = torch.ones(4, 0, requires_grad=True), torch.ones(0, 3, requires_grad=True)
    bias = torch.ones(3, requires_grad=True)
    out = agmm.matmul_reduce_scatter(A, B, bias=bias)
    out.sum().backward()
    assert torch.equal(out, torch.ones(4, 3))
    assert A.grad is not None and A.grad.shape == (4, 0)
    assert B.grad is not None and B.grad.shape == (0, 3)
    assert bias.grad is not None and torch.equal(bias.grad, torch.full((3,), 4.0))


def test_bad_lists_of_a_scatter_are_named(group: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3)
    scatter: Callable[..., object] = agmm.matmul_reduce_scatter
    for call, message in (
        (lambda: scatter([A], B), "B: found a Tensor, wanted a list as A, both lists or neither"),
        (lambda: scatter(A, (B,)), "B: found a tuple, wanted a Tensor as A, both lists or neither"),
        (lambda: scatter([], []), "A: found an empty list, wanted at least one"),
        (lambda: scatter([A, A], [B]), "B: found 1 for 2 of A, wanted one each"),
        (
            lambda: scatter([A, A[:2]], [B, B]),
            "A: found leading sizes (2,), wanted (4,) as the first of the list",
        ),
        (
            lambda: scatter([A, A], [B, B[:, :2]]),
            "B: found 2 columns, wanted 3 as the first of the list",
        ),
        (
            lambda: scatter([A, A.double()], [B, B]),
            "A: found dtype torch.float64, wanted torch.float32 as the first of the list",
        ),
        (lambda: scatter([A, None], [B, B]), "A: found None, wanted a tensor"),
        (lambda: scatter(A, B, strict=1), "strict: found 1, wanted True or False"),
    ):
        assert refusal(call) == message


def test_matmul_reduce_scatter_by_the_op_of_torch(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = torch.ops.symm_mem.fused_matmul_reduce_scatter
    names = [argument.name for argument in op.default._schema.arguments]
    given: dict[str, Any] = {}
    lock: Any = groups.of(groups.group_of(group)).lock

    def fused(*arguments: Any) -> torch.Tensor:
        given.update(zip(names, arguments, strict=True), locked=lock._is_owned())
        return torch.matmul(*arguments[:2])

    monkeypatch.setattr(torch.ops.symm_mem, "fused_matmul_reduce_scatter", fused)
    monkeypatch.setattr(scatter_plan, "is_fused", lambda *_: True)
    monkeypatch.setattr(scatter_plan, "why_not_native", lambda *_: "as on a GPU")
    A, B, bias = whole_numbers(6, 4).t(), whole_numbers(6, 3, seed=1), whole_numbers(3, seed=2)
    out = agmm.matmul_reduce_scatter(A, B, reduce_op="avg", scatter_dim=-2, bias=bias)
    assert torch.equal(out, A @ B + bias)
    assert torch.equal(given.pop("A"), A) and torch.equal(given.pop("B"), B)
    assert given.pop("locked")  # threads of a process call in one group in turn
    assert given == {"reduce_op": "avg", "scatter_dim": 0, "group_name": group}


# From torch 2.14 on opcheck clones the arguments and reads .grad of the clones, which warns; torch
# hides that in a way that comes too late where warnings are errors.
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not:UserWarning")
@pytest.mark.parametrize("save_gathered", [False, True])
def test_opcheck_with_gradients(group: str, fresh_compiler: None, save_gathered: bool) -> None:
    A, B = torch.randn(6, 8, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    bias = torch.randn(3, requires_grad=True)
    arguments = A, [torch.randn(8, 2), B], [None, bias], group, 1, 0, True, "", True, save_gathered
    torch.library.opcheck(torch.ops.agmm._all_gather_matmul.default, arguments)
    for scatter_dim, reduce_op in ((0, "sum"), (-2, "avg")):
        torch.library.opcheck(
            torch.ops.agmm._matmul_reduce_scatter.default,
            ([A, A[:, :2]], [B, B[:2]], bias, group, 1, scatter_dim, reduce_op, True),
        )


def test_arguments_of_another_type(group: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3, seed=1)
    with pytest.raises(InvalidArgument, match="group: found 3, wanted a process group"):
        all_gather_matmul(A, B, 3)
    with pytest.raises(InvalidArgument, match="gather_dim: found '0', wanted an int"):
        all_gather_matmul(A, B, group, gather_dim="0")


# --- what a call does not depend on ---


def test_the_path_is_chosen_anew_whatever_was_called_before(group: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3, seed=1)
    native = torch.ops.agmm._fused_all_gather_matmul_native
    calls = (
        lambda: all_gather_matmul(A, B),
        lambda: all_gather_matmul(A, B, strict=True),
        lambda: all_gather_matmul(A, B, return_A=True),
        lambda: native(A, B, group),
    )
    fused, unfused = noted(PlainGather, "by_cpu"), noted(PlainGather, "by_library")
    with planned(Plan("unfused")), fused as by_cpu, unfused as by_library:
        for _ in range(2):
            for call, wanted in zip(calls, (by_library, by_cpu) * 2, strict=True):
                before = wanted.call_count
                call()
                assert wanted.call_count == before + 1
    assert by_cpu.call_count == by_library.call_count == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_product_and_bias_are_rounded_once_on_both_paths(group: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    A, B = torch.randn(64, 96).to(dtype), torch.randn(96, 48).to(dtype)
    bias = (10 * torch.randn(48)).to(dtype)
    exact = A.double() @ B.double() + bias.double()
    rounded = exact.to(dtype)
    twice = (A.double() @ B.double()).to(dtype) + bias
    outs = [all_gather_matmul(A, B, bias=bias, config=config) for config in (None, "unfused")]
    assert torch.equal(*outs)
    # Sums in float32 fall on the other side of a few roundings, where a second one changes many.
    differing = (outs[0] != rounded).float().mean().item()
    assert differing < 0.02 < (twice != rounded).float().mean().item()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_a_profiler_sees_the_op_by_name(group: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3, seed=1)
    all_gather_matmul(A, B)
    with torch.profiler.profile() as profile:
        all_gather_matmul(A, B)
    assert "agmm::_all_gather_matmul" in {event.key for event in profile.key_averages()}


def test_the_native_op_is_differentiable(group: str) -> None:
    A, B = whole_numbers(4, 6).requires_grad_(), whole_numbers(6, 3, seed=1).requires_grad_()
    gathered, out = torch.ops.agmm._fused_all_gather_matmul_native(A, B, group)
    (gathered.sum() + 2 * out.sum()).backward()
    assert A.grad is not None and torch.equal(A.grad, (1 + 2 * B.sum(1)).expand(4, 6))
    assert B.grad is not None and torch.equal(B.grad, 2 * A.sum(0)[:, None].expand(6, 3))


def test_a_mesh_is_a_group(group: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3, seed=1)
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert torch.equal(all_gather_matmul(A, B, mesh["tp"]), A @ B)
    assert torch.equal(agmm.matmul_reduce_scatter(A, B, mesh["tp"]), A @ B)
    agmm.reserve(mesh["tp"], 100)
    agmm.release(mesh["tp"])
    assert refusal(lambda: all_gather_matmul(A, B, mesh)) == (
        "group: found a DeviceMesh of 2 dimensions, wanted 1, e.g. mesh['tp']"
    )


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_a_graph_of_another_world_size_is_refused(group: str, op: str) -> None:
    A, B = whole_numbers(4, 6), whole_numbers(6, 3, seed=1)
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: torch.ops.agmm._all_gather_matmul(
            A, [B], [None], group, 2, 0, False, "", False
        ),
        "scatter": lambda: torch.ops.agmm._matmul_reduce_scatter(
            [A], [B], None, group, 2, 0, "sum"
        ),
    }
    assert refusal(calls[op]) == (
        f"world_size: found 2 in the call, wanted 1, the size of group {group!r}: a graph compiled "
        "for another number of ranks; compile it anew with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
    )


@pytest.mark.parametrize("out_features", [12, [6, 4, 2]], ids=str)
def test_an_output_of_a_layer_may_be_changed_in_place(group: str, out_features: Any) -> None:
    """One of several: they are views of one tensor."""
    layer = ColumnParallelLinear(6, out_features)
    grads = []
    for relu in (torch.relu_, torch.relu):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        outs = layer(x)
        parts = [outs] if isinstance(outs, torch.Tensor) else list(outs)
        parts[0] = relu(parts[0])
        torch.cat(parts, -1).sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_dynamo_leaves_kernels_alone_that_run_beside_its_graphs() -> None:
    a, b = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(16, 16).to(torch.float8_e4m3fn)
    lock, one, graphs = threading.Lock(), torch.ones(()), []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph

    @torch.compile(backend=keep)
    def beside_a_graph_break() -> torch.Tensor:
        with lock:
            torch._dynamo.graph_break()
            out: torch.Tensor = torch.ops.agmm._scaled_matmul(
                a, one, b.t(), one, torch.bfloat16, False
            )
            return out

    assert torch.equal(beside_a_graph_break(), torch.full((4, 16), 16.0, dtype=torch.bfloat16))
    assert graphs == []
