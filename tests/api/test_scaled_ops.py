"""The ops on fp8 operands in one process: bad input, fake tensors, fallbacks, the CUDA path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import scaled_work
import torch
import torch.distributed as dist
from short_ids import short
from torch._subclasses.fake_tensor import FakeTensorMode

import agmm
from agmm import InvalidArgument
from agmm._core import Accumulation
from agmm.cli import explain
from agmm.errors import forget_warnings
from agmm.integrations import async_tp, async_tp_kernels
from agmm.integrations.scaled_async_tp import ServedGather, ServedScatter
from agmm.ops import fp8_gather, fp8_operands, kept, quantize, scaled_products
from agmm.ops import gather as gather_flow
from agmm.ops.gather import GatherSettings
from agmm.ops.pipeline import GATHER, KERNEL, LIBRARY
from agmm.ops.scaled_checks import scaling_of
from agmm.planning import built_kernels, call_plans, formats
from agmm.planning.plans import GATHERED, UNFUSED, Plan
from agmm.planning.problems import KernelConfig, Problem
from agmm.runtime import cpu_scaled, cuda_gather, cuda_scaled, cuda_scatter, scaling
from agmm.runtime.scaled import Scaled, Weight
from agmm.runtime.scaling import ALL, BY_NAME, SCALINGS
from agmm.testing.reference import relative_error

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
gather: Callable[..., Any] = agmm.all_gather_scaled_matmul
scatter: Callable[..., Any] = agmm.scaled_matmul_reduce_scatter
reduce: Callable[..., Any] = agmm.scaled_matmul_all_reduce


@pytest.fixture(autouse=True)
def nothing_warned() -> Iterator[None]:
    forget_warnings()
    yield
    async_tp.disable()


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = E4M3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def scales(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "tensorwise": ((), ()),
    "rowwise": ((6, 1), (1, 48)),
    "block": ((6, 2), (2, 1)),
    "block 1x128": ((6, 2), (2, 48)),
}


def given(kind: str) -> dict[str, Any]:
    """6 × 144 times 144 × 48."""
    of_a, of_b = SHAPES[kind]
    return {
        "A": numbers(6, 144),
        "B": numbers(48, 144, seed=1).t(),
        "scale_a": scales(*of_a),
        "scale_b": scales(*of_b, seed=1),
    }


def test_each_kind_is_told_by_its_shapes() -> None:
    assert list(SHAPES) == [kind.name for kind in SCALINGS]
    for kind in SCALINGS:
        arguments = given(kind.name)
        found = scaling_of(*(arguments[n] for n in ("A", "scale_a", "B", "scale_b")))
        assert found is kind


@pytest.mark.parametrize("kind", SHAPES)
def test_result_is_rounded_once(group: str, kind: str) -> None:
    arguments, bias = given(kind), scales(48)
    A, B = arguments["A"].double(), arguments["B"].double()
    a, b = (arguments[name].double() for name in ("scale_a", "scale_b"))
    if "block" in kind:
        a = a[:, [0] * 128 + [1] * 16]
        b = b[[0] * 128 + [1] * 16]
    exact = (A * a) @ (B * b) + bias.double()
    for op in (gather, scatter, reduce):
        out = op(**_named(op, arguments), bias=bias, strict=True)
        differing = (out != exact.bfloat16()).float().mean().item()
        twice = ((exact - bias).bfloat16() + bias).bfloat16()
        assert differing < 0.02 < (twice != exact.bfloat16()).float().mean().item()


def _named(op: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    found = dict(arguments)
    if op is gather and "A" in found:
        found["A_shard"] = found.pop("A")
    return found


E5 = numbers(48, 144, dtype=E5M2).t()
BAD: list[tuple[dict[str, Any], str]] = [
    ({"A": None}, "A: found None, wanted a tensor"),
    ({"A": numbers(144)}, "A: found 1 dimensions, wanted at least 2"),
    (
        {"A": torch.ones(6, 144)},
        "A: found dtype torch.float32, wanted one of float8_e4m3fn, float8_e5m2",
    ),
    ({"B": torch.ones(144, 48).bfloat16()}, "B: found dtype torch.bfloat16, wanted one of"),
    ({"A": numbers(6, 144, dtype=E5M2), "B": E5}, "B: found dtype torch.float8_e5m2 as A, wanted"),
    ({"A": numbers(6, 24)}, "A: found K=24, wanted a multiple of 16"),
    ({"B": numbers(48, 160).t()}, "B: found K=160, wanted 144 as the columns of A"),
    ({"B": numbers(2, 144, 48)}, "B: found 3 dimensions, wanted 2"),
    ({"B": numbers(144, 48).to("meta")}, "B: found device meta, wanted cpu as A"),
    ({"scale_a": 1.0}, "scale_a: found float, wanted a tensor"),
    (
        {"scale_b": torch.ones((), dtype=torch.float64)},
        "scale_b: found dtype torch.float64, wanted",
    ),
    ({"scale_a": torch.ones(6, 1, device="meta")}, "scale_a: found device meta, wanted cpu as A"),
    (
        {"scale_a": torch.ones(6)},
        "scale_a: found shape (6,), wanted one number (tensorwise) or (6, 1) (rowwise) or (6, 2) (",
    ),
    ({"scale_a": torch.ones(6, 2).to_sparse()}, "scale_a: found layout torch.sparse_coo, wanted"),
    (
        {"scale_a": torch.ones(6, 1)},
        "scale_b: found shape (), wanted (1, 48) (rowwise), which goes with scale_a of shape (6,",
    ),
    ({"scale_a": torch.ones(6, 2)}, "scale_b: found shape (), wanted (2, 1) (block) or (2, 48)"),
    ({"bias": torch.ones(47)}, "bias: found shape (47,), wanted (48,) as B's columns"),
    ({"bias": torch.ones(48).double()}, "bias: found dtype torch.float64, wanted one of bfloat16"),
    ({"out_dtype": torch.float64}, "out_dtype: found torch.float64, wanted one of bfloat16"),
    ({"out_dtype": "bf16"}, "out_dtype: found bf16, wanted one of bfloat16"),
    (
        {"result_scale": torch.ones(())},
        "result_scale: found one with out_dtype torch.bfloat16, wanted None",
    ),
    (
        {"result_scale": torch.ones(2), "out_dtype": E4M3},
        "result_scale: found shape (2,), wanted one number",
    ),
    ({"use_fast_accum": 1}, "use_fast_accum: found 1, wanted True or False"),
    ({"strict": None}, "strict: found None, wanted True or False"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_named(group: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        scatter(**(given("tensorwise") | arguments))
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        reduce(**(given("tensorwise") | arguments))
    message = re.sub(r"^A:", "A_shard:", re.sub(r"as A\b", "as A_shard", message))
    message = message.replace("columns of A", "columns of A_shard")
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        gather(**_named(gather, given("tensorwise") | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gather_dim": 1}, "gather_dim: found 1, wanted 0 to 0: scales cover K"),
        ({"gather_dim": 0.0}, "gather_dim: found 0.0, wanted an int"),
        ({"return_A": 1}, "return_A: found 1, wanted True or False"),
        ({"B": []}, "B: found an empty list, wanted at least one weight"),
        ({"B": [E5, E5]}, "scale_b: found 1 for 2 weights, wanted one each"),
        ({"B": [E5, E5], "bias": torch.ones(48)}, "bias: found one for 2 weights, wanted a list"),
    ],
    ids=short,
)
def test_bad_input_of_a_gather(group: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        gather(**_named(gather, given("tensorwise") | arguments))


LISTS = "A", "B", "scale_a", "scale_b"


def several(**counts: int) -> dict[str, Any]:
    """Two products, with one scale for each operand; ``counts`` says where there are more or
    fewer."""
    operands = given("tensorwise")
    return {name: [operands[name]] * counts.get(name, 2) for name in LISTS}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scatter_dim": 2}, "scatter_dim: found 2, wanted -2 to 1"),
        ({"scatter_dim": "0"}, "scatter_dim: found '0', wanted an int"),
        ({"reduce_op": "max"}, "reduce_op: found 'max', wanted 'sum' or 'avg'"),
        ({"scatter_dim": 1, "bias": torch.ones(48)}, "bias: found one with scatter_dim=1, wanted"),
        ({"A": [E5.t()]}, "B: found Tensor, wanted a list as A"),
        ({"B": [E5]}, "B: found list, wanted a tensor as A"),
        ({"scale_a": (torch.ones(()),)}, "scale_a: found tuple, wanted a tensor as A"),
        ({name: [] for name in LISTS}, "A: found an empty list, wanted at least one"),
        (several(scale_b=1), "scale_b: found 1 for 2 of A, wanted one each"),
        (several(B=3), "B: found 3 for 2 of A, wanted one each"),
        (
            several() | {"A": [numbers(6, 144), numbers(5, 144)]},
            "A: found leading sizes (5,), wanted (6,) as the first of the list",
        ),
        (
            several() | {"B": [numbers(n, 144).t() for n in (48, 32)]},
            "B: found 32 columns, wanted 48 as the first of the list",
        ),
        (several() | {"A": [numbers(6, 144), torch.ones(6, 144)]}, "A: found dtype torch.float32"),
    ],
    ids=short,
)
def test_bad_input_of_a_scatter(group: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        scatter(**(given("tensorwise") | arguments))


def test_gradients_are_refused(group: str) -> None:
    bias = torch.ones(48, requires_grad=True)
    for op in (gather, scatter, reduce):
        with pytest.raises(agmm.InvalidArgument, match="bias: found requires_grad=True"):
            op(**_named(op, given("rowwise")), bias=bias)
        with torch.no_grad():
            assert not op(**_named(op, given("rowwise")), bias=bias).requires_grad


def test_a_graph_of_another_world_size_is_refused(group: str) -> None:
    a, b, sa, sb = given("rowwise").values()
    ops = torch.ops.agmm
    settings = torch.bfloat16, False
    with pytest.raises(agmm.InvalidArgument, match="world_size: found 2 in the call, wanted 1"):
        ops._all_gather_scaled_matmul(
            a, sa, [b], [sb], [None], [None], group, 2, 0, False, *settings
        )
    with pytest.raises(agmm.InvalidArgument, match="world_size: found 2 in the call, wanted 1"):
        ops._scaled_matmul_reduce_scatter(
            [a], [b], [sa], [sb], None, None, group, 2, 0, "sum", *settings
        )
    with pytest.raises(agmm.InvalidArgument, match="world_size: found 2 in the call, wanted 1"):
        ops._scaled_matmul_all_reduce(a, b, sa, sb, None, None, group, 2, *settings)


# opcheck of torch 2.14 and later: see test_matmul_all_reduce.
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not:UserWarning")
@pytest.mark.parametrize("kind", SHAPES)
def test_opcheck(group: str, fresh_compiler: None, kind: str) -> None:
    a, b, sa, sb = given(kind).values()
    ops = torch.ops.agmm
    # test_schema is left out, since it multiplies the arguments: torch has no product of two fp8
    # tensors.
    utils = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    settings = torch.float32, False
    for bias in (None, scales(48)):
        arguments = a, sa, [b, b], [sb, sb], [bias, None], [None, None], group, 1, 0
        torch.library.opcheck(
            ops._all_gather_scaled_matmul.default,
            (*arguments, False, torch.bfloat16, True),
            test_utils=utils,
        )
        torch.library.opcheck(
            ops._scaled_matmul_reduce_scatter.default,
            ([a, a], [b, b], [sa] * 2, [sb] * 2, bias, None, group, 1, 0, "avg", *settings),
            test_utils=utils,
        )
        torch.library.opcheck(
            ops._scaled_matmul_all_reduce.default,
            (a, b, sa, sb, bias, None, group, 1, *settings),
            test_utils=utils,
        )


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "block"])
def test_fake_tensors(group: str, kind: str, gather_dim: int) -> None:
    columns = {"tensorwise": 0, "rowwise": 1, "block": 2}[kind]
    of_a = (2, 3, columns) if columns else ()
    given_b = given(kind)["B"], given(kind)["scale_b"]
    A, scale_a = numbers(2, 3, 144), scales(*of_a)
    real = gather(
        A, given_b[0], scale_a, given_b[1], gather_dim=gather_dim, return_A=True, strict=True
    )
    with FakeTensorMode() as mode:
        B, scale_b = map(mode.from_tensor, given_b)
        fake = gather(
            mode.from_tensor(A),
            B,
            mode.from_tensor(scale_a),
            scale_b,
            gather_dim=gather_dim,
            return_A=True,
        )
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize("shape", [(0, 144, 48), (6, 144, 0), (6, 0, 48)], ids=str)
def test_empty_operands(group: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    A, B, bias = numbers(m, k), numbers(n, k).t(), scales(n)
    for of_a, of_b in (((), ()), ((m, 1), (1, n))):
        for op in (gather, scatter, reduce):
            out = op(A, B, scales(*of_a), scales(*of_b), bias=bias, strict=True)
            assert torch.equal(out, bias.bfloat16().expand(m, n))


def test_a_fake_sum_is_as_a_real_one(group: str) -> None:
    A, B, scale_a, scale_b = (given("rowwise")[name] for name in LISTS)
    real = reduce(A.view(2, 3, 144), B, scale_a.view(2, 3, 1), scale_b, out_dtype=E5M2, strict=True)
    with FakeTensorMode() as mode:
        rows, scale = mode.from_tensor(A).view(2, 3, 144), mode.from_tensor(scale_a).view(2, 3, 1)
        others = mode.from_tensor(B), scale, mode.from_tensor(scale_b)
        fake = reduce(rows, *others, out_dtype=E5M2)
    assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_the_last_dimension_is_scattered_unfused(group: str) -> None:
    reason = "scatter_dim: 1, the fused path wants another than the last"
    with pytest.warns(UserWarning, match=f"takes the unfused path: {reason}"):
        out = scatter(**given("block"), scatter_dim=1)
    assert torch.equal(out, scatter(**given("block"), strict=True))
    with pytest.raises(agmm.Unsupported, match=reason):
        scatter(**given("block"), scatter_dim=1, strict=True)


def test_several_products_are_one_sum(group: str) -> None:
    """The products differ in K, kind of scales and dtypes; sum and bias are rounded once."""
    first, second = given("rowwise"), given("block")
    second |= {"A": numbers(6, 160, seed=2, dtype=E5M2), "B": numbers(48, 160, seed=3).t()}
    operands = {name: [first[name], second[name]] for name in LISTS}
    bias = scales(48)
    spread = [0] * 128 + [1] * 32
    exact = (first["A"].double() * first["scale_a"]) @ (first["B"].double() * first["scale_b"])
    a, b = (second[name].double() for name in ("scale_a", "scale_b"))
    exact += (second["A"].double() * a[:, spread]) @ (second["B"].double() * b[spread])
    exact += bias
    out = scatter(**operands, bias=bias, strict=True)
    assert (out != exact.bfloat16()).float().mean().item() < 0.02
    tuples = {name: tuple(given) for name, given in operands.items()}
    assert torch.equal(scatter(**tuples, bias=bias, strict=True), out)
    one = {name: [first[name]] for name in LISTS}
    assert torch.equal(scatter(**one, bias=bias), scatter(**first, bias=bias))


def test_several_products_are_summed_in_float32_where_no_kernel_does(group: str) -> None:
    first, second = given("rowwise"), given("tensorwise")
    operands = {name: [first[name], second[name]] for name in LISTS}
    reason = "scatter_dim: 1, the fused path wants another than the last"
    with pytest.warns(UserWarning, match=f"takes the unfused path: {reason}"):
        out = scatter(**operands, scatter_dim=1)
    parts = [scatter(**one, out_dtype=torch.float32, strict=True) for one in (first, second)]
    assert torch.equal(out, (parts[0] + parts[1]).bfloat16())


# --- CUDA, whose path is the unfused one ---

NO_KERNEL = "fp8: found device cuda, wanted one that this build has fp8 kernels for"


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_operands, "why_no_kernel", lambda device: NO_KERNEL)


@pytest.mark.parametrize("tiles", [((1, 128), (ALL, 1)), ((1, ALL), (128, 128))])
def test_kernels_refuse_blocks_of_one_operand(
    tiles: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """The kind of the first weight says nothing of the others."""
    A, B = (Scaled(torch.empty(8, 128), torch.empty(1), tile) for tile in tiles)
    weight = Weight(B, None, None, torch.bfloat16, True)
    reason = cuda_scaled.why_illegal(A, weight)
    assert reason is not None and reason.startswith("scale_b: found tiles of")


@pytest.mark.parametrize(
    ("kind", "fast", "slow"),
    [
        ("tensorwise", Accumulation.fast, Accumulation.slow),
        ("rowwise", Accumulation.fast, Accumulation.slow),
        ("block", Accumulation.block, Accumulation.block),
        ("block 1x128", Accumulation.block_1x128, Accumulation.block_1x128),
    ],
)
def test_kernels_accumulate_as_the_scales_want(
    kind: str, fast: Accumulation, slow: Accumulation
) -> None:
    A, weight = product_of(kind, 32, 160, 144)
    assert cuda_scaled.accumulation_of(A, weight) == slow
    assert cuda_scaled.accumulation_of(A, weight._replace(fast_accum=True)) == fast
    assert cuda_scaled.why_illegal(A, weight) is None


def test_the_reason_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_kernels, "has_fp8", lambda: False)
    assert fp8_operands.why_no_kernel(torch.device("cuda:0")) == NO_KERNEL
    assert fp8_operands.why_no_kernel(torch.device("cpu")) is None


def test_unfused_path_is_warned_of_once_and_refused_if_strict(group: str, as_on_cuda: None) -> None:
    arguments = given("rowwise")
    wanted = arguments["A"].double() * arguments["scale_a"].double()
    wanted = wanted @ (arguments["B"].double() * arguments["scale_b"].double())
    with pytest.warns(UserWarning, match=f"takes the unfused path: {NO_KERNEL}") as caught:
        out = gather(**_named(gather, arguments))
    assert [warning.filename for warning in caught] == [__file__]
    assert relative_error(out, wanted) < 2**-8
    assert relative_error(scatter(**arguments), wanted) < 2**-8  # a warning would be an error
    for op in (gather, scatter, reduce):
        with pytest.raises(agmm.Unsupported, match=NO_KERNEL):
            op(**_named(op, arguments), strict=True)


def product_of(kind: str, rows: int, k: int, n: int) -> tuple[Scaled, Weight]:
    scale = scaling.BY_NAME[kind]
    of_a = scaling.scale_shape((rows, k), scale.a)
    of_b = scaling.scale_shape((k, n), scale.b)
    B = Scaled(numbers(n, k, seed=1).t(), scales(*of_b, seed=1), scale.b)
    A = Scaled(numbers(rows, k), scales(*of_a), scale.a)
    return A, Weight(B, None, None, torch.bfloat16, False)


@pytest.mark.parametrize(
    "kind", ["tensorwise", pytest.param("rowwise", marks=scaled_work.needs_rowwise)]
)
def test_scaled_mm_gets_what_it_wants(kind: str) -> None:
    """On the CPU torch has it for these kinds too."""
    A, weight = product_of(kind, 32, 144, 48)
    found = scaled_products.by_torch(A, weight, torch.empty(32, 48, dtype=torch.bfloat16))
    wanted = A.dequantised().double() @ weight.B.dequantised().double()
    assert relative_error(found, wanted) < 2**-8


@pytest.mark.parametrize(
    ("rows", "dtype", "launches"),
    [
        pytest.param(1, torch.bfloat16, 1, marks=scaled_work.needs_rowwise),
        pytest.param(16, torch.bfloat16, 1, marks=scaled_work.needs_rowwise),
        (1, torch.float32, 3),
        (320, torch.bfloat16, 3),
    ],
)
def test_scaled_mm_of_shards_with_scales_of_their_own(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, launches: int
) -> None:
    """Shards of few rows are multiplied by one launch, where torch has it."""
    A, weight = product_of("tensorwise", 3 * rows, 144, 48)
    weight = weight._replace(out_dtype=dtype)
    A = A._replace(scale=torch.tensor([[0.5], [3.0], [1.5]]), tile=(rows, scaling.ALL))
    by_torch = mock.Mock(side_effect=torch.ops.aten._scaled_mm.out)
    monkeypatch.setattr(torch.ops.aten._scaled_mm, "out", by_torch)
    found = scaled_products.by_torch(A, weight, torch.empty(3 * rows, 48, dtype=dtype))
    assert by_torch.call_count == launches
    each = A.scale.double().repeat_interleave(rows, 0)
    wanted = (A.values.double() * each) @ weight.B.dequantised().double()
    assert relative_error(found, wanted) < 2**-8


def test_a_sum_where_scaled_mm_writes_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products are rounded once, together; those that it refuses in float32 each."""
    pairs = []
    for k in (144, 272):
        A, weight = product_of("tensorwise", 32, k, 48)
        pairs.append((A._replace(values=A.values.as_subclass(_OnGpu)), weight))
    bias = torch.randn(48).bfloat16()
    pairs[0] = pairs[0][0], pairs[0][1]._replace(bias=bias)
    by_torch, made = scaled_products.by_torch, []
    refused: list[torch.dtype] = []

    def as_on_cuda(A: Scaled, weight: Weight, out: torch.Tensor) -> torch.Tensor:
        has_bias = weight.out_dtype == torch.float32 and weight.bias is not None
        if weight.out_dtype in refused or has_bias:
            raise RuntimeError("wanted bfloat16")
        made.append(weight.out_dtype)
        return by_torch(A, weight, out)

    monkeypatch.setattr(scaled_products, "by_torch", as_on_cuda)
    exact = sum(A.dequantised().double() @ weight.B.dequantised().double() for A, weight in pairs)
    wanted = (exact + bias.double()).bfloat16().as_subclass(torch.Tensor)
    differ = []
    for _ in range(2):
        found = scaled_products.sum_of(pairs).as_subclass(torch.Tensor)
        assert found.dtype == torch.bfloat16
        differ.append((found != wanted).float().mean().item())
        refused.append(torch.float32)
    assert made == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert differ[0] < 0.02 < differ[1] < 1


@pytest.mark.parametrize(
    ("kind", "n", "cuda", "is_for_library"),
    [
        ("rowwise", 48, None, True),
        ("rowwise", 40, "13.0", False),
        ("block", 48, "12.9", True),
        ("block 1x128", 48, "12.8", False),
        ("block", 48, None, False),
    ],
)
def test_no_plan_leaves_to_torch_what_it_does_not_multiply(
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    n: int,
    cuda: str | None,
    is_for_library: bool,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    A, weight = product_of(kind, 6, 144, n)
    one = fp8_operands.Fp8Weights(
        [weight.B.values], [weight.B.scale], [None], [None], [torch.bfloat16], [False]
    )
    assert dist.group.WORLD is not None
    call = fp8_gather.Fp8Gather(A.values, A.scale, one, dist.group.WORLD, GatherSettings())
    assert call.is_for_library()
    call.device = torch.device("cuda", 0)
    assert call.is_for_library() is is_for_library
    for why in ("why_not_fused", "why_not_gathered"):
        monkeypatch.setattr(call, why, lambda: None)
    monkeypatch.setattr(call, "problem", lambda weight: None)
    otherwise = LIBRARY if is_for_library else KERNEL
    for plan, by in ((UNFUSED, otherwise), (GATHERED, GATHER)):
        monkeypatch.setattr(call, "choose", lambda *_, plan=plan, **__: plan)
        assert call.route().by == by


@pytest.mark.parametrize("kind", ["rowwise", "block 1x128"])
@pytest.mark.parametrize("n", [2048, 2056])
@pytest.mark.parametrize("m", [64, 16384])
def test_explain_prints_the_plan_that_a_call_takes(
    group: str, monkeypatch: pytest.MonkeyPatch, m: int, n: int, kind: str
) -> None:
    k, gpu = 2048, "nvidia-h200"
    format_ = "block_1x128" if kind == "block 1x128" else "fast"
    named = formats.fp8_name("float8_e4m3fn_float8_e4m3fn", format_)
    problem = Problem(m, n, k, format=named, world_size=4, gpu=gpu)
    planner = explain.planner_for(gpu, 4)
    if not planner.kernels_of(problem.op, named):
        pytest.skip(f"neither this build nor the default one has a kernel of {named}")
    called = replace(problem, format="float8_e4m3fn")
    printed = explain.explain_any(called, kind).plan

    A, weight = product_of(kind, 6, k, n)
    one = fp8_operands.Fp8Weights(
        [weight.B.values], [weight.B.scale], [None], [None], [torch.bfloat16], [False]
    )
    assert dist.group.WORLD is not None
    call = fp8_gather.Fp8Gather(A.values, A.scale, one, dist.group.WORLD, GatherSettings())
    call.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(call, "problem", lambda weight: problem)
    for why in ("why_not_fused", "why_not_gathered"):
        monkeypatch.setattr(call, why, lambda: None)
    monkeypatch.setattr(gather_flow, "cuda_workspace", lambda group, device: None)
    monkeypatch.setattr(
        call,
        "ready_on_cuda",
        lambda workspace, kernels, transport: Plan(transport, kernels[0]).name,
    )
    with mock.patch.object(call_plans, "planner", return_value=planner):
        route = call.route()
        taken = {GATHER: GATHERED.name, LIBRARY: UNFUSED.name}.get(route.by)
        assert (taken or call.prepare(route)) == printed.partition(", NCCL")[0]
    if n % 16:
        assert route.by != LIBRARY


@pytest.mark.parametrize(("k", "blocks"), [(512, 4), (640, 5), (144, 2)])
def test_layouts_of_block_scales(k: int, blocks: int) -> None:
    """torch._scaled_mm checks these on CUDA: A's scales lie row beside row, those of B's blocks in
    rows of Bᵀ that begin at multiples of 16 bytes, those of 128 × 1 with B's columns side by
    side."""
    A, weight = product_of("block", 32, k, 272)
    of_a, of_b = map(scaled_products.as_torch_wants_it, (A, weight.B))
    assert torch.equal(of_a, A.scale) and of_a.stride() == (1, 32)
    assert torch.equal(of_b, weight.B.scale)
    assert of_b.t().stride() == (-(-blocks // 4) * 4, 1)
    _, weight = product_of("block 1x128", 32, k, 272)
    of_b = scaled_products.as_torch_wants_it(weight.B)
    assert torch.equal(of_b, weight.B.scale) and of_b.stride() == (272, 1)


class _OnGpu(torch.Tensor):
    """Memory of the CPU that says it is a GPU's."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_what_scaled_mm_refuses_is_dequantised_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    A, weight = product_of("block", 32, 144, 48)
    A = A._replace(values=A.values.as_subclass(_OnGpu))
    with pytest.warns(UserWarning, match=r"torch\._scaled_mm: .*; the product is made of operands"):
        found = scaled_products.product(A, weight)
    wanted = A.dequantised().double() @ weight.B.dequantised().double()
    assert relative_error(found.as_subclass(torch.Tensor), wanted) < 2**-8
    refuse = mock.Mock(side_effect=torch.OutOfMemoryError("full"))
    monkeypatch.setattr(scaled_products, "by_torch", refuse)
    A, weight = product_of("rowwise", 32, 144, 48)
    A = A._replace(values=A.values.as_subclass(_OnGpu))
    with pytest.raises(torch.OutOfMemoryError):
        scaled_products.product(A, weight)


# --- torch's ops over agmm ---


def torchs(kind: str, **changes: Any) -> tuple[Any, ...]:
    a, b, sa, sb = given(kind).values()
    arguments: dict[str, Any] = {
        "A": a,
        "Bs": [b],
        "A_scale": sa,
        "B_scales": [sb],
        "gather_dim": 0,
        "group": "0",
        "biases": [None],
        "result_scales": [None],
        "out_dtypes": [torch.bfloat16],
        "fast": [True],
    }
    return tuple((arguments | changes).values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gather_dim": 1}, "gather_dim: 1 with 2 dimensions, agmm gathers along any but the last"),
        ({"A_scale": torch.ones(6)}, "scale_a: found shape (6,), wanted one number"),
        ({"fast": []}, "use_fast_accum: 0 for 1 weights"),
        ({"out_dtypes": [torch.float64]}, "out_dtype: found torch.float64"),
    ],
    ids=short,
)
def test_what_is_left_to_torch_is_said_once(
    group: str, changes: dict[str, Any], reason: str
) -> None:
    arguments = torchs("rowwise", group=group, **changes)
    torch_kernel = mock.Mock(return_value="torch's")
    name = "fused_all_gather_scaled_matmul"
    kernel = async_tp_kernels.scaled_over(name, ServedGather)(torch_kernel)
    with pytest.warns(UserWarning, match=re.escape(f"leaves symm_mem.{name} to torch: {reason}")):
        assert kernel(*arguments) == "torch's"
    assert kernel(*arguments) == "torch's"  # a warning would be an error
    assert torch_kernel.call_args_list == [mock.call(*arguments)] * 2


def test_without_a_kernel_both_are_torchs(group: str, as_on_cuda: None) -> None:
    a, b, sa, sb = given("rowwise").values()
    calls = (
        ("fused_all_gather_scaled_matmul", ServedGather, torchs("rowwise", group=group)),
        (
            "fused_scaled_matmul_reduce_scatter",
            ServedScatter,
            (a, b, sa, sb, "sum", 0, 0, group, [6, 48]),
        ),
    )
    for name, call_type, arguments in calls:
        kernel = async_tp_kernels.scaled_over(name, call_type)(lambda *_: "torch's")
        with pytest.warns(UserWarning, match=f"leaves symm_mem.{name} to torch: {NO_KERNEL}"):
            assert kernel(*arguments) == "torch's"


@pytest.mark.parametrize("kind", SHAPES)
def test_torchs_ops_are_agmms(group: str, kind: str) -> None:
    arguments = given(kind)
    a, b, sa, sb = arguments.values()
    with async_tp.enable():
        A, (out,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(*torchs(kind, group=group))
        part = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            a, b, sa, sb, "sum", 0, 0, group, [6, 48], None, None, torch.float32
        )
    assert torch.equal(A.view(torch.uint8), a.view(torch.uint8))
    assert torch.equal(out, gather(**_named(gather, arguments), strict=True))
    assert torch.equal(part, scatter(**arguments, out_dtype=torch.float32, strict=True))


# --- operands that are quantised on the way ---


def _torchaos(x: torch.Tensor, kind: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao.float8's dynamic cast of a matrix, in its words: tensor_to_scale, then the product in
    float32, saturated."""
    amax = x.abs().max() if kind == "tensorwise" else x.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(E4M3).max / amax.double().clamp(min=1e-12)).float()
    return (x.float() * scale).clamp(-448, 448).to(E4M3), scale.reciprocal()


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scales_are_torchaos(kind: str, dtype: torch.dtype) -> None:
    of_a, of_b = scaling.BY_NAME[kind][1:]
    for tile, dim in ((of_a, 1), (of_b, 0)):
        for x in (scales(6, 48), torch.zeros(6, 48), 1e30 * scales(6, 48)):
            x = x.to(dtype)
            values, scale = quantize.quantised(x, tile)
            wanted, wanted_scale = _torchaos(x, kind, dim)
            assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
            assert torch.equal(scale.flatten(), wanted_scale.flatten())


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_scales_are_those_of_torchao_itself(kind: str) -> None:
    reason = "torchao is optional: pip install 'torchao>=0.18'"
    utils = pytest.importorskip("torchao.float8.float8_utils", reason=reason)
    config = pytest.importorskip("torchao.float8.config", reason=reason)
    granularity = {"tensorwise": "TENSORWISE", "rowwise": "AXISWISE"}[kind]
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    up = utils.tensor_to_scale(
        x,
        E4M3,
        scaling_granularity=config.ScalingGranularity[granularity],
        axiswise_dim=None if kind == "tensorwise" else 1,
    )
    values, scale = quantize.quantised(x, scaling.BY_NAME[kind].a)
    wanted = utils.to_fp8_saturated(x.float() * up, E4M3)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scale.flatten(), up.reciprocal().flatten())


@pytest.mark.parametrize("shape", [(6, 144), (3, 128), (130, 272)], ids=str)
def test_blocks_have_their_own_scales(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for tile in (scaling.BY_NAME["block"].a, scaling.BY_NAME["block"].b):
        values, scale = quantize.quantised(x, tile)
        assert tuple(scale.shape) == scaling.scale_shape(shape, tile)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                rows = slice(i * tile[0], (i + 1) * tile[0])
                columns = slice(j * tile[1], (j + 1) * tile[1])
                wanted, wanted_scale = _torchaos(x[rows, columns], "tensorwise", 0)
                assert torch.equal(values[rows, columns].float(), wanted.float())
                assert scale[i, j] == wanted_scale
        column_major, _ = quantize.quantised(x.t().contiguous().t(), tile)
        assert column_major.stride() == (1, shape[0]), "the layout that Hopper multiplies"


@pytest.mark.parametrize("kind", quantize.KINDS)
def test_compiled_scales_are_the_same(fresh_compiler: None, kind: str) -> None:
    compiled = torch.compile(quantize.quantised, dynamic=False)
    x = torch.randn((24, 144), generator=torch.Generator().manual_seed(0)).bfloat16()
    for tile in (scaling.BY_NAME[kind].a, scaling.BY_NAME[kind].b):
        for operand in (x, -x.t()):  # other values, for memory that is used again
            wanted = quantize.quantised(operand, tile)
            for one, other in zip(compiled(operand, tile), wanted, strict=True):
                assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("kind", quantize.KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantised_gather(group: str, kind: str, dtype: torch.dtype) -> None:
    A, bias = torch.randn(2, 3, 144).to(dtype), torch.randn(48).to(dtype)
    Bs = [torch.randn(48, 144).to(dtype).t(), torch.randn(144, 32).to(dtype)]
    op: Callable[..., Any] = agmm.all_gather_matmul
    outs = op(A, Bs, quantize=kind, bias=[bias, None], strict=True)
    assert torch.equal(op(A, Bs[1], quantize=kind, strict=True), outs[1])
    for out, wanted in zip(outs, (A @ Bs[0] + bias, A @ Bs[1]), strict=True):
        assert out.dtype == dtype and out.shape == wanted.shape
        assert 0.005 < relative_error(out, wanted) < 0.05  # e4m3 has three bits of a fraction


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"quantize": "columns"},
            "quantize: found 'columns', wanted one of 'tensorwise', 'rowwise'",
        ),
        (
            {"reduce_amax": True},
            "reduce_amax: found True with quantize='rowwise', wanted quantize='tensorwise'",
        ),
        (
            {"reduce_amax": True, "quantize": None},
            "reduce_amax: found True without quantize, wanted quantize='tensorwise'",
        ),
        ({"reduce_amax": 1}, "reduce_amax: found 1, wanted True or False"),
        ({"return_A": True}, "return_A: found True with quantize, wanted False"),
        ({"save_gathered": True}, "save_gathered: found True with quantize, wanted False"),
        ({"config": "unfused"}, "config: found 'unfused' with quantize, wanted None"),
        (
            {"A_shard": torch.ones(6, 144).double()},
            "A_shard: found dtype torch.float64 with quantize",
        ),
        ({"A_shard": torch.ones(6, 24)}, "A_shard: found K=24, wanted a multiple of 16"),
        ({"A_shard": torch.ones(144)}, "A_shard: found 1 dimensions, wanted at least 2"),
        ({"B": torch.ones(144)}, "B: found 1 dimensions, wanted 2"),
        (
            {"A_shard": torch.ones(6, 144, requires_grad=True)},
            "A_shard: found requires_grad=True, wanted a call under torch.no_grad()",
        ),
    ],
    ids=short,
)
def test_bad_input_of_a_quantised_gather(
    group: str, arguments: dict[str, Any], message: str
) -> None:
    op: Callable[..., Any] = agmm.all_gather_matmul
    given_here = {"A_shard": torch.ones(6, 144), "B": torch.ones(144, 48), "quantize": "rowwise"}
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        op(**(given_here | arguments))


Products = list[tuple[Scaled, Weight]]


@pytest.fixture
def products(group: str, monkeypatch: pytest.MonkeyPatch) -> Products:
    """What gathers multiply: the shard and each weight."""
    found: Products = []

    def note(workspace: Any, shard: Scaled, weights: list[Weight], *rest: Any, **how: Any) -> Any:
        found.extend((shard, weight) for weight in weights)
        return cpu_scaled.all_gather_scaled_matmul(workspace, shard, weights, *rest, **how)

    monkeypatch.setattr(fp8_gather, "all_gather_on_cpu", note)
    return found


@pytest.mark.parametrize("rows", [(1,), (1, 1), (6,), (2, 3)], ids=str)
@pytest.mark.parametrize("k", [16, 128, 144])
@pytest.mark.parametrize("kind", quantize.KINDS)
def test_operands_that_agmm_quantises_have_scales_of_the_kind_that_was_asked_for(
    products: Products, kind: str, rows: tuple[int, ...], k: int
) -> None:
    """However their shapes read: the scales of at most 128 × 128 numbers are [1, 1] in two kinds,
    and those of one row and one block in three."""
    wanted = BY_NAME[kind]
    op: Callable[..., Any] = agmm.all_gather_matmul
    A = torch.randn(*rows, k).bfloat16()
    for ns in ((128,), (16, 256), (256, 128, 16)):
        Bs = [torch.randn(k, n).bfloat16() for n in ns]
        outs = op(A, Bs, quantize=kind, strict=True)
        assert [out.shape for out in outs] == [(*rows, n) for n in ns]
        assert [(shard.tile, weight.B.tile) for shard, weight in products] == [
            (wanted.a, wanted.b)
        ] * len(ns)
        assert [cuda_scaled.why_illegal(*one) for one in products] == [None] * len(ns)
        products.clear()


def test_weights_that_share_a_gather_have_one_kind_of_scales(products: Products) -> None:
    """Where there is one that fits all of them."""
    A, of_a = numbers(1, 128), scales(1, 1)
    for ns in ((16, 256), (256, 16)):
        Bs = [numbers(n, 128, seed=1).t() for n in ns]
        of_bs = [scales(1, -(-n // 128), seed=1) for n in ns]
        outs = agmm.all_gather_scaled_matmul(A, Bs, of_a, of_bs, strict=True)
        kinds = {(shard.tile, weight.B.tile) for shard, weight in products}
        assert kinds == {(BY_NAME["block"].a, BY_NAME["block"].b)}
        assert [cuda_scaled.why_illegal(*one) for one in products] == [None, None]
        for B, of_b, out in zip(Bs, of_bs, outs, strict=True):
            columns = of_b.repeat_interleave(128, 1)[:, : B.shape[1]]
            assert torch.equal(out, ((A.float() * of_a) @ (B.float() * columns)).bfloat16())
        products.clear()


# --- calls that are kept ---


def called(op: Callable[..., Any], operands: dict[str, Any], **settings: Any) -> Any:
    return op(*(operands[name] for name in ("A", "B", "scale_a", "scale_b")), **settings)


@pytest.mark.parametrize("op", [gather, scatter, reduce])
def test_a_kept_call_serves_its_kind_alone(group: str, op: Callable[..., Any]) -> None:
    out, kinds = torch.ones(6, 48), []

    class Calls(dict[Any, Any]):
        def get(self, kind: Any, default: Any = None) -> Any:
            kinds.append(kind)
            return lambda *_: (None, None, [out]) if op is gather else out

    with mock.patch.object(kept, "kept_calls", {dist.group.WORLD: Calls()}):
        operands = given("rowwise")
        assert called(op, operands) is out
        assert called(op, given("rowwise")) is out  # other tensors
        assert kinds[0] == kinds[1] is not None
        for settings in (
            {"use_fast_accum": True},
            {"strict": True},
            {"out_dtype": torch.float16},
            {"bias": torch.ones(48)},
        ):
            called(op, operands, **settings)
        called(op, operands | {"scale_b": scales(48, 2)[:, :1].t()})
        called(op, given("tensorwise"))
        assert len(set(kinds)) == 7
        with torch.profiler.profile():  # which names ops
            called(op, operands)
        assert len(set(kinds)) == 7


def test_a_kept_call_that_cannot_be_made_any_more_is_forgotten(group: str) -> None:
    calls: dict[Any, Any] = {}

    def full(*_: Any) -> None:
        raise agmm.Unsupported("no memory")

    operands = given("rowwise")
    kind = kept.kind_of_call(
        (0, False, torch.bfloat16, False, False, "", "", ""),
        *(operands["A"], operands["scale_a"], [operands["B"]], [operands["scale_b"]]),
        *([None], [None]),
    )
    calls[kind] = full
    with mock.patch.object(kept, "kept_calls", {dist.group.WORLD: calls}):
        assert called(gather, operands).shape == (6, 48)
    assert calls == {}


@pytest.mark.parametrize("name", ["A", "B", "scale_a", "scale_b"])
def test_a_kept_call_serves_no_list_in_place_of_a_tensor(group: str, name: str) -> None:
    operands = given("rowwise")
    settings = 0, "sum", torch.bfloat16, False, False, ""
    lists = [[operand] for operand in called(lambda *rest: rest, operands)]
    kind = kept.kind_of_call(settings, *lists, None, None)
    calls = {kind: mock.Mock()}
    with mock.patch.object(kept, "kept_calls", {dist.group.WORLD: calls}):
        called(scatter, operands)
        calls[kind].assert_called_once()
        mixed = "B: found Tensor, wanted a list" if name == "A" else f"{name}: found list, wanted"
        with pytest.raises(InvalidArgument, match=f"^{mixed}"):
            called(scatter, operands | {name: [operands[name]]})
    calls[kind].assert_called_once()


class Workspace:
    """The workspace of a rank of four, whose core takes note of what it is given."""

    def __init__(self) -> None:
        self.lock, self.known, self.world_size = (
            mock.MagicMock(),
            mock.Mock(calls=0, captured_calls=0),
            4,
        )
        self.core = mock.Mock()
        self.captured, self.refused = False, mock.Mock()
        for name in ("all_gather_matmul", "matmul_reduce_scatter"):
            getattr(self.core, name).return_value = False
        self.device = torch.device("cpu")

    def enter(self, size: int) -> Any:
        self.size = size
        return mock.Mock(core=self.core)


CONFIG = KernelConfig.parse("128x128x128_1x1_pingpong").core


def weights(B: torch.Tensor, scale_b: torch.Tensor, *, fast_accum: bool) -> fp8_operands.Fp8Weights:
    return fp8_operands.Fp8Weights([B], [scale_b], [None], [None], [torch.bfloat16], [fast_accum])


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "block"])
def test_what_the_core_gets_of_a_gather(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_gather, "stream_of", mock.Mock(return_value=7))
    operands = given(kind)
    A, B, of_a, of_b = (operands[name] for name in ("A", "B", "scale_a", "scale_b"))
    A, of_a = A.view(2, 3, 144), of_a if of_a.numel() == 1 else of_a.view(2, 3, -1)
    tile, (weight,) = weights(B, of_b, fast_accum=True).described(A, of_a)
    shard = fp8_operands.rows_of(A, of_a, tile, 0)
    workspace = Workspace()
    accumulation = Accumulation.block if kind == "block" else Accumulation.fast
    kernel = cuda_scaled.kernel_of(shard, weight, CONFIG, accumulation)
    call = cuda_gather.ready_gather(
        workspace,  # type: ignore[arg-type]
        A,
        [B],
        [kernel],
        return_A=True,
    )
    whole, of_whole, (out,) = call(A, [B], [None], of_a, [of_b])
    columns = 2 if kind == "block" else 1
    assert out.shape == (8, 3, 48) and out.dtype == torch.bfloat16
    assert whole is not None and of_whole is not None
    assert whole.shape == (8, 3, 144) and whole.dtype == E4M3
    assert of_whole.shape == ((4, 1) if kind == "tensorwise" else (8, 3, columns))
    assert workspace.size == 24 * (144 + 4 * columns)
    problem, addresses, stream, tile_times = workspace.core.all_gather_matmul.call_args.args
    of_b_in_words = f"B [144, 48] column-major {accumulation.name} by {CONFIG}"
    of_a_in_words = f"A_shard [6, 144] e4m3 with {columns} scales for a row"
    assert repr(problem) == f"GatherProblem({of_a_in_words}, {of_b_in_words})"
    assert (stream, tile_times) == (7, 0)
    a, scale, to, scale_to, b, _, bias, out_at = addresses
    assert (a, to, b, bias) == (A.data_ptr(), whole.data_ptr(), B.data_ptr(), 0)
    assert out_at == out.data_ptr()
    if kind != "tensorwise":  # else as many as rows
        assert (scale, scale_to) == (of_a.data_ptr(), of_whole.data_ptr())


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("tensorwise", (False, 1, False, 1, 1)),
        ("rowwise", (True, 1, True, 48, 1)),
        ("block", (True, 2, False, 1, 1)),
        ("block 1x128", (True, 2, True, 48, 1)),
    ],
)
def test_what_the_core_is_told_of_scales(kind: str, wanted: tuple[Any, ...]) -> None:
    operands = given(kind)
    A, B, of_a, of_b = (operands[name] for name in ("A", "B", "scale_a", "scale_b"))
    tile, (weight,) = weights(B, of_b, fast_accum=True).described(A, of_a)
    shard = fp8_operands.rows_of(A, of_a, tile, 0)
    accumulation = cuda_scaled.accumulation_of(shard, weight)
    assert accumulation is not None
    scales = cuda_scaled.kernel_of(shard, weight, CONFIG, accumulation).format.scales
    assert scales is not None
    names = "a_per_row", "a_columns", "b_per_column", "b_k_stride", "b_n_stride"
    assert tuple(getattr(scales, name) for name in names) == wanted


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_what_the_core_gets_of_a_scatter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_scatter, "stream_of", mock.Mock(return_value=7))
    operands = given(kind)
    A, B, of_a, of_b = (operands[name] for name in ("A", "B", "scale_a", "scale_b"))
    A, of_a = torch.cat([A, A]).view(4, 3, 144), of_a if of_a.numel() == 1 else of_a.repeat(2, 1)
    tile, (weight,) = weights(B, of_b, fast_accum=False).described(A.view(12, 144), of_a)
    workspace = Workspace()
    operand = fp8_operands.rows_of(A.view(12, 144), of_a, tile, 0)
    kernel = cuda_scaled.kernel_of(operand, weight, CONFIG, Accumulation.slow)
    call = cuda_scatter.ready_scatter(
        workspace,  # type: ignore[arg-type]
        [A],
        [B],
        kernel,
        is_average=True,
    )
    out = call([A], [B], None, None, [of_a], [of_b])
    assert out.shape == (1, 3, 48) and out.dtype == torch.bfloat16
    problem, addresses, stream, tile_times = workspace.core.matmul_reduce_scatter.call_args.args
    words = f"A [12, 144] e4m3, B [144, 48] column-major, slow, avg, {CONFIG}"
    assert repr(problem) == f"ScatterProblem({words})"
    tensors = A, B, of_a, of_b
    assert addresses == [*(tensor.data_ptr() for tensor in tensors), 0, 0, out.data_ptr()]
    assert (stream, tile_times) == (7, 0)
    assert not workspace.captured
    workspace.core.matmul_reduce_scatter.side_effect = ValueError("A: found 1, wanted 2")
    workspace.refused = mock.Mock(return_value=InvalidArgument("refused"))
    with pytest.raises(InvalidArgument, match=r"^refused$"):
        call([A], [B], None, None, [of_a], [of_b])
    assert not workspace.captured
    workspace.core.matmul_reduce_scatter.side_effect = RuntimeError("CUDA")
    with pytest.raises(RuntimeError, match=r"^CUDA$"):
        call([A], [B], None, None, [of_a], [of_b])
    assert workspace.captured  # half of it may be in a graph
