"""Activations of all-gather + matmul: their errors, special numbers, refusals, gradients, what is
said of them, and which of them a kernel computes on CUDA."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import activation_work as work
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import agmm
from agmm.errors import InvalidArgument, Unsupported, forget_warnings
from agmm.ops import gather as gather_flow
from agmm.ops import kept, one_launch, quantized_gates, recordings
from agmm.ops.fp8_gather import Fp8Gather
from agmm.ops.fp8_operands import Fp8Weights, kernel_of
from agmm.ops.gather import GatherCall, Gathered, GatherSettings
from agmm.ops.kernel_epilogues import why_scaled_behind
from agmm.ops.pipeline import KERNEL, Route, serve
from agmm.ops.plain_gather import PlainGather
from agmm.ops.quantized_gates import QuantisingGather
from agmm.planning import built_kernels, call_plans, cost_model, tables
from agmm.planning.cost_model import default_kernels
from agmm.planning.planner import Planner
from agmm.planning.plans import Plan, Row
from agmm.planning.problems import KernelConfig, Problem
from agmm.planning.tables import Key
from agmm.planning.transports import FusedGather
from agmm.runtime.epilogues import Epilogue, named
from agmm.runtime.scaled import FP8, Scaled, Weight
from agmm.runtime.scaling import ALL, scale_shape

pytestmark = pytest.mark.usefixtures("group")

ops: Any = agmm
NAMES = work.ACTIVATIONS
FAST = "float8_e4m3fn_float8_e4m3fn fast"


def _operands(name: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Any, Any]:
    torch.manual_seed(0)
    A, biases = torch.randn(48, 64, dtype=dtype), [torch.randn(40, dtype=dtype), None]
    Bs = [torch.randn(64, 40, dtype=dtype) / 8 for _ in range(2)]
    return (A, Bs, biases) if name in work.GATED else (A, Bs[0], biases[0])


def _exact(name: str, A: torch.Tensor, B: Any, bias: Any, *, dtype: torch.dtype) -> torch.Tensor:
    """The result by torch's ops in that dtype."""
    Bs, biases = (B, bias) if isinstance(B, list) else ([B], [bias])
    products = [A.to(dtype) @ one.to(dtype) for one in Bs]
    for i, one in enumerate(biases):
        if one is not None:
            products[i] = products[i] + one.to(dtype)
    return work.activated(name, products)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_errors_are_no_larger_than_those_of_unfused_ops(name: str, dtype: torch.dtype) -> None:
    A, B, bias = _operands(name, dtype)
    exact = _exact(name, A, B, bias, dtype=torch.float64)
    unfused = _exact(name, A, B, bias, dtype=dtype)
    allowed = (unfused.double() - exact).norm() + 2**-22 * exact.norm()
    for config in (None, "unfused"):
        found = ops.all_gather_matmul(A, B, bias=bias, activation=name, config=config)
        assert found.dtype == dtype
        assert (found.double() - exact).norm() <= allowed
    if dtype == torch.float32:
        return
    one_rounding = torch.finfo(dtype).eps / 2 * exact.abs() + 2**-18
    strict = ops.all_gather_matmul(A, B, bias=bias, activation=name, strict=True)
    assert ((strict.double() - exact).abs() <= one_rounding).all()


@pytest.mark.parametrize("config", [None, "unfused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_special_numbers_are_those_of_torch(
    group: str, name: str, dtype: torch.dtype, config: str | None
) -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e4, -1e4])
    gate, up = torch.cartesian_prod(special, special).to(dtype).unbind(1)
    count = 2 if name in work.GATED else 1
    # The numbers come as biases of a product of 0, whose sign is the library's.
    A, B = -torch.ones(1, 1, dtype=dtype), torch.zeros(1, len(gate), dtype=dtype)
    op = torch.ops.agmm._all_gather_matmul
    given = A, [B] * count, [gate, up][:count], group, 1, 0, False, config or "", False
    _, (found, *products) = op(*given, activation=name, save_preactivation=True)
    torch.testing.assert_close(torch.stack([gate, up][:count]), torch.cat(products), equal_nan=True)
    _is_same(found, work.activated(name, [product.float() for product in products])[0].to(dtype))


def _is_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    found, wanted = found.flatten(), wanted.flatten()
    torch.testing.assert_close(found, wanted, equal_nan=True)
    there = ~wanted.isnan()
    assert torch.equal(found.signbit()[there], wanted.signbit()[there])


GIVEN = torch.ones(4, 8)
WEIGHT = torch.ones(8, 8)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"activation": "swish"}, "activation: found 'swish', wanted one of relu, relu2, gelu, "),
    ({"activation": 1}, "activation: found 1, wanted one of relu, "),
    (
        {"activation": "silu_mul"},
        "activation: found 'silu_mul' with B a list of 1, wanted two weights, gate and up",
    ),
    (
        {"activation": "gelu_mul", "B": [WEIGHT] * 3},
        "activation: found 'gelu_mul' with B a list",
    ),
    (
        {"activation": "silu_mul", "B": [WEIGHT, WEIGHT[:, :4]]},
        r"activation: found 'silu_mul' with weights \(8, 8\) and \(8, 4\), wanted gate and up of",
    ),
    (
        {"A_shard": GIVEN.int(), "B": WEIGHT.int(), "activation": "relu"},
        "activation: found 'relu' for dtype torch.int32, wanted a real floating-point type",
    ),
    ({"save_preactivation": 1}, "save_preactivation: found 1, wanted True or False"),
]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_refusals_name_the_argument(arguments: dict[str, Any], message: str, traced: bool) -> None:
    given = {"A_shard": GIVEN, "B": WEIGHT} | arguments
    if traced:  # the fake has the same checks
        given = {name: _on_meta(value) for name, value in given.items()}
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        ops.all_gather_matmul(**given)


def _on_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [_on_meta(one) for one in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"up": WEIGHT}, "up: found one with activation None, wanted a gated activation"),
        ({"up": WEIGHT, "activation": "silu"}, "up: found one with activation 'silu', wanted a"),
        ({"activation": "silu_mul"}, "activation: found 'silu_mul' with B a list of 1, wanted two"),
        ({"up": WEIGHT.double(), "activation": "silu_mul"}, "up: found dtype torch.float64"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_matmul_whose_rows_come_refuses_by_name(operands: dict[str, Any], message: str) -> None:
    signals = torch.ones(1, dtype=torch.int32).view(torch.uint32)
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        torch.ops.agmm._async_input_mm(GIVEN, WEIGHT, signals, 0, **operands)


def test_a_second_weight_has_its_scales() -> None:
    signals = torch.ones(1, dtype=torch.int32).view(torch.uint32)
    A, B = (torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(1)
    op = torch.ops.agmm._async_input_scaled_mm
    given = A, B.t(), one, one, None, signals, 0, False
    with pytest.raises(InvalidArgument, match=r"^scale_up: found None, wanted the scales"):
        op(*given, activation="silu_mul", up=B.t())
    with pytest.raises(InvalidArgument, match=r"^scale_up: found one without up, wanted"):
        op(*given, scale_up=one)


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_torch(name: str, save: bool) -> None:
    A, B, bias = _operands(name)
    leaves = [A, *(B if isinstance(B, list) else [B]), bias[0] if isinstance(bias, list) else bias]
    for leaf in leaves:
        leaf.requires_grad_()
    found = ops.all_gather_matmul(A, B, bias=bias, activation=name, save_preactivation=save)
    wanted = _exact(name, A, B, bias, dtype=torch.float32)
    dout = torch.randn_like(wanted)
    grads = torch.autograd.grad(found, leaves, dout)
    for one, other in zip(grads, torch.autograd.grad(wanted, leaves, dout), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_16_bits_are_as_exact_as_those_of_unfused_ops(name: str) -> None:
    A, B, bias = _operands(name, torch.bfloat16)
    Bs = B if isinstance(B, list) else [B]
    for leaf in (A, *Bs):
        leaf.requires_grad_()
    dout = torch.randn(48, 40)

    def grads(out: torch.Tensor) -> list[torch.Tensor]:
        return [grad.double() for grad in torch.autograd.grad(out, [A, *Bs], dout.to(out.dtype))]

    exact = grads(_exact(name, A, B, bias, dtype=torch.float64))
    unfused = grads(_exact(name, A, B, bias, dtype=torch.bfloat16))
    found = grads(ops.all_gather_matmul(A, B, bias=bias, activation=name))
    for one, other, wanted in zip(found, unfused, exact, strict=True):
        assert (one - wanted).norm() <= 1.05 * (other - wanted).norm()


@pytest.mark.parametrize("save", [True, False])
def test_the_caller_chooses_what_is_kept(save: bool) -> None:
    """The backward multiplies twice for each weight; where the products were not kept, it computes
    them once more."""
    A, Bs, biases = _operands("silu_mul")
    for leaf in (A, *Bs):
        leaf.requires_grad_()
    kept: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = ops.all_gather_matmul(
            A, Bs, bias=biases, activation="silu_mul", save_preactivation=save
        )
    assert kept.count(torch.Size([48, 40])) == (2 if save else 0)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    forward = 2 * 2 * 48 * 64 * 40
    assert counter.get_total_flops() == (2 if save else 3) * forward


def test_a_second_derivative_is_refused() -> None:
    A, B, _ = _operands("silu")
    A.requires_grad_()
    out = ops.all_gather_matmul(A, B, activation="silu")
    (grad,) = torch.autograd.grad(out.square().sum(), A, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("save", [pytest.param(True, marks=pytest.mark.slow), False])
def test_compiled_calls_and_their_backward_are_the_same(save: bool) -> None:
    A, Bs, biases = _operands("silu_mul")
    leaves = [A, *Bs]
    for leaf in leaves:
        leaf.requires_grad_()

    def call(A: torch.Tensor, Bs: list[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = ops.all_gather_matmul(
            A, Bs, bias=biases, activation="silu_mul", save_preactivation=save
        )
        return out

    eager = call(A, Bs)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(A, Bs)
    torch.testing.assert_close(compiled, eager)
    found = torch.autograd.grad(compiled.square().sum(), leaves)
    for one, other in zip(found, torch.autograd.grad(eager.square().sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(call, backend="aot_eager")(A, Bs), eager)


@pytest.mark.parametrize("name", ["relu2", "gelu_tanh_mul"])
def test_autocast_casts_operands_and_leaves_the_activation_alone(name: str) -> None:
    A, B, bias = _operands(name)
    A16, bias16 = A.bfloat16(), bias
    if isinstance(B, list):
        B16: Any = [one.bfloat16() for one in B]
        bias16 = [None if one is None else one.bfloat16() for one in bias]
    else:
        B16, bias16 = B.bfloat16(), bias.bfloat16()
    wanted = ops.all_gather_matmul(A16, B16, bias=bias16, activation=name)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.all_gather_matmul(A, B, bias=bias, activation=name)
        kept = ops.all_gather_matmul(A.requires_grad_(), B, bias=bias, activation=name)
        (grad,) = torch.autograd.grad(kept.float().sum(), A)
    assert torch.equal(found, wanted) and torch.equal(kept, wanted)
    assert grad.dtype == torch.float32 and grad.abs().sum() > 0


def test_activations_are_kinds_of_calls_of_their_own(tmp_path: Path) -> None:
    A, Bs, _ = _operands("silu_mul")
    with agmm.record(tmp_path / "calls.json"):
        for name in (None, "silu", "relu", "silu_mul"):
            for _ in range(2):
                ops.all_gather_matmul(A, Bs, activation=name)
    found = recordings.read(tmp_path / "calls.json")
    assert {(call.kind.activation, call.kind.n, call.count) for call in found} == {
        (name, (40, 40), 2) for name in (None, "silu", "relu", "silu_mul")
    }
    assert "all_gather_matmul + silu_mul" in str(agmm.status())
    text = (tmp_path / "calls.json").read_text()
    for name in ('"activation": null, ', '"residual": false, '):  # older versions wrote none
        text = text.replace(name, "")
    (tmp_path / "older.json").write_text(text)
    assert len(recordings.read(tmp_path / "older.json")) == 4
    (tmp_path / "wrong.json").write_text(text.replace('"silu"', '"swish"'))
    with pytest.raises(InvalidArgument, match="found activation 'swish'"):
        recordings.read(tmp_path / "wrong.json")


def test_messages_of_mismatches_name_the_activation() -> None:
    call = _call("silu_mul")
    assert str(call.words()).endswith(", gather_dim = 0, activation = 'silu_mul')")
    assert "activation" not in str(_call(None).words())


# --- CUDA, without a GPU ---


class _OnCuda(PlainGather):
    """A call of a kernel that computes products, and the activation where a kernel has it."""

    def route(self) -> Route:
        return Route(KERNEL)

    def problem(self, weight: int | None) -> Problem:
        return mock.Mock(format="bf16")

    def ready_on_cuda(self, workspace: Any, kernels: Any, transport: FusedGather) -> Any:
        assert len(kernels) == len(self.widths())
        epilogue = self.in_kernel or (lambda products: products)
        return lambda A, Bs, biases: (A, None, epilogue([functional.linear(A, B.t()) for B in Bs]))


def _call(
    name: str | None,
    kind: type[PlainGather] = PlainGather,
    *,
    config: str = "",
    Bs: list[torch.Tensor] | None = None,
    **options: Any,
) -> GatherCall:
    world = dist.group.WORLD
    assert world is not None
    A, B, _ = _operands("silu_mul")
    settings = GatherSettings(epilogue=named(name, **options), return_A=True, config=config)
    return kind(A, B if Bs is None else Bs, [None, None], world, settings)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings()
    monkeypatch.setattr(gather_flow, "cuda_workspace", lambda *_: None)
    monkeypatch.setattr(built_kernels, "kernels_of", lambda *_: ())
    planner = mock.Mock()
    planner.return_value.fused_plan.return_value.transport.why_illegal.return_value = None
    monkeypatch.setattr(call_plans, "planner", planner)
    monkeypatch.setattr(gather_flow, "FusedGather", object)
    monkeypatch.setattr(one_launch, "plan_of", lambda *_: None)


def _cuda_call(name: str | None, **options: Any) -> GatherCall:
    call = _call(name, _OnCuda, **options)
    call.device = torch.device("cuda", 0)
    return call


@pytest.mark.parametrize("name", NAMES)
def test_torch_computes_what_no_kernel_has_and_says_so(cuda: None, name: str) -> None:
    call = _cuda_call(name)
    A, Bs, _ = _operands("silu_mul")
    products = [A @ B for B in Bs]
    message = f"agmm computes a part behind the kernel: activation: found '{name}', wanted one that"
    with pytest.warns(UserWarning, match=message):
        found: Gathered = serve(call)
    torch.testing.assert_close(found.outs, work.activated(name, products))
    noted = [
        one
        for one in agmm.status().calls
        if one.by == "agmm's kernel, then torch's ops"
        and (one.op, one.activation) == (call.op, name)
    ]
    assert len(noted) == 1
    assert not noted[0].is_by_agmm and (noted[0].reason or "").startswith("activation: found")


def test_strict_refuses_what_no_kernel_has(cuda: None) -> None:
    call = _cuda_call("silu_mul")
    call.strict = True
    message = "^activation: found 'silu_mul', wanted one that a kernel of .* has; strict=True"
    with pytest.raises(Unsupported, match=message):
        serve(call)
    call = _cuda_call(None)
    call.strict = True
    assert len(serve(call).outs) == 2


_KERNEL = default_kernels(epilogue="gate", b_layout="row")[0]


@pytest.fixture
def kernels(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build has the kernels of a default one."""

    def kernels_of(op: str, form: str, *more: str) -> Any:
        return default_kernels(op, "bfloat16", *more)

    monkeypatch.setattr(built_kernels, "kernels_of", kernels_of)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_computes_what_it_has(kernels: None, name: str) -> None:
    A, Bs, _ = _operands("silu_mul")
    call = _cuda_call(name)
    call.strict = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found: Gathered = serve(call)
    torch.testing.assert_close(found.outs, work.activated(name, [A @ B for B in Bs]))
    with mock.patch.object(call_plans, "problem_of") as asked:
        PlainGather.problem(cast("PlainGather", call), 0)
    is_gated = name in work.GATED
    assert call.widths() == ([80] if is_gated else [40, 40])
    assert asked.call_args.args[0][1] == call.widths()[0]
    assert asked.call_args.kwargs["epilogue"] == ("gate" if is_gated else "activation")


_BY_COLUMN = torch.ones(40, 64).t()
BEHIND: list[tuple[str, dict[str, Any], str]] = [
    ("silu", {"saves_products": True}, "save_preactivation: found True with activation 'silu', "),
    ("silu_mul", {"Bs": [torch.ones(64, 40), _BY_COLUMN]}, "B: found gate and up in two layouts, "),
    (
        "gelu",
        {"config": "256x128x64_2x1_cooperative"},
        "config: found 256x128x64_2x1_cooperative with activation 'gelu', wanted one of 128x128x64",
    ),
    (
        "silu_mul",
        {"Bs": [torch.ones(64, 1).expand(64, 1 << 30)] * 2},
        "B: found N=1073741824, wanted at most 10737",
    ),
    ("relu", {"config": "gather"}, "config: found 'gather' with activation 'relu', wanted none"),
]


@pytest.mark.parametrize(("name", "options", "message"), BEHIND, ids=lambda x: str(x)[:30])
def test_what_no_kernel_can_compute_says_why(
    kernels: None, name: str, options: dict[str, Any], message: str
) -> None:
    """Nothing is asked of the planner: ranks that name their kernels agree on no tables."""
    call = _cuda_call(name, **options)
    route = Route(KERNEL)
    planner = call_plans.planner
    assert isinstance(planner, mock.Mock)
    assert (call.why_composed(route) or "").startswith(message)
    assert not planner.called
    call.strict = True
    with pytest.raises(Unsupported, match=f"^{re.escape(message)}.*; strict=True refuses what is"):
        serve(call)


_ROWWISE = ((1, ALL), (ALL, 1))
OF_FP8: list[tuple[str, dict[str, Any], str]] = [
    # name, how the weights differ from row-wise e4m3 of bf16 results, the reason or ""
    ("silu_mul", {}, ""),
    ("silu", {"fast": False}, ""),
    ("gelu_mul", {"kinds": ((ALL, ALL), (ALL, ALL))}, ""),
    ("gelu_tanh_mul", {"kinds": ((1, 128), (128, 128))}, ""),
    ("relu", {"config": KernelConfig.parse("128x128x128_1x1_pingpong")}, ""),
    (
        "silu_mul",
        {"kinds": ((1, 128), (128, 1))},
        "activation: found 'silu_mul', wanted one that a kernel of this build has",
    ),
    (
        "silu_mul",
        {"up": (ALL, ALL)},
        "scale_b: found (torch.float8_e4m3fn, (0, 1)) of gate and (torch.float8_e4m3fn, (0, 0)) of",
    ),
    (
        "relu2",
        {"out_dtype": torch.float32},
        "out_dtype: found torch.float32, wanted torch.bfloat16 in a kernel with activation 'relu2'",
    ),
    ("silu_mul", {"result_scale": torch.ones(1)}, "result_scale: found one, wanted None: the ker"),
    (
        "silu_mul",
        {"config": KernelConfig.parse("256x160x128_1x1_cooperative")},
        "config: found 256x160x128_1x1_cooperative with activation 'silu_mul', wanted one of 128x2",
    ),
]


@pytest.mark.parametrize(("name", "options", "reason"), OF_FP8, ids=lambda x: str(x)[:30])
def test_operands_of_fp8_have_kernels_or_say_why(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(built_kernels, "kernels_of", default_kernels)
    given = {"kinds": _ROWWISE, "fast": True, "out_dtype": torch.bfloat16, **options}
    of_a, of_b = given["kinds"]
    A, B = torch.ones(16, 256).to(FP8[0]), torch.ones(32, 256).to(FP8[0]).t()
    weights = [
        Weight(
            Scaled(B, torch.ones(scale_shape(B.shape, tile)), tile),
            *(None, given.get("result_scale"), given["out_dtype"], given["fast"]),
        )
        for tile in (of_b, given.get("up", of_b))[: 2 if name in work.GATED else 1]
    ]
    shard = Scaled(A, torch.ones(scale_shape(A.shape, of_a)), of_a)
    found = why_scaled_behind(Epilogue(name), shard, weights, given.get("config")) or ""
    assert found.startswith(reason) and bool(found) == bool(reason)


class _Fp8OnCuda(Fp8Gather):
    """A call of a kernel that has the activation, on tensors that are not there."""

    def route(self) -> Route:
        return Route(KERNEL)

    def ready_on_cuda(self, workspace: Any, kernels: Any, transport: FusedGather) -> Any:
        described = [
            kernel_of(self.shard, self.weights[i], self.problem(i), config, self.in_kernel)
            for i, config in enumerate(kernels)
        ]
        return lambda *operands: (None, None, described)

    def finished(self, found: Any, route: Route) -> Gathered:
        return Gathered(*found)


@pytest.mark.parametrize("name", ["silu", "silu_mul"])
def test_kernels_of_fp8_get_their_epilogue(
    cuda: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One kernel multiplies gate and up, and the planner is asked for the columns of both."""
    monkeypatch.setattr(built_kernels, "kernels_of", default_kernels)
    config = default_kernels("all_gather_matmul", FAST, named(name).kernel)[0]  # type: ignore[union-attr]
    call_plans.planner.return_value.fused_plan.return_value.kernel = config  # type: ignore[attr-defined]
    world = dist.group.WORLD
    assert world is not None
    count = 2 if name in work.GATED else 1
    A, B = torch.ones(16, 256).to(FP8[0]), torch.ones(32, 256).to(FP8[0]).t()
    scales = torch.ones(16, 1), [torch.ones(1, 32)] * count
    given = Fp8Weights(
        *([B] * count, scales[1], [None] * count, [None] * count, [torch.bfloat16] * count),
        [True] * count,
    )
    call = _Fp8OnCuda(A, scales[0], given, world, GatherSettings(epilogue=named(name)))
    call.device = torch.device("cuda", 0)
    monkeypatch.setattr(call_plans, "problem_of", _problem_without_gpu)
    ((kernel,),) = call.prepare(Route(KERNEL))()[2:]
    assert (kernel.activation, kernel.config) == (name, config.core)
    problem = call.problem(None)
    epilogue = "gate" if count == 2 else "activation"
    assert (problem.n, problem.epilogue, problem.format) == (32 * count, epilogue, FAST)


def _problem_without_gpu(shape: Any, operands: str, device: Any, **more: Any) -> Problem:
    return Problem(*shape, format=operands, epilogue=more["epilogue"])


def _with_fp8_results(op: str, form: str, epilogue: str = "bias", layout: str = "") -> Any:
    """The kernels of a build that has those of quantised results, for B by column alone."""
    is_there = epilogue == "gate_fp8" and layout == "column"
    return default_kernels(op, "bfloat16", "gate", layout) if is_there else ()


class _QuantisingOnCuda(QuantisingGather):
    """A call of a kernel whose result is fp8, with what a kernel would be given as its scales."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.device = torch.device("cuda", 0)

    def route(self) -> Route:
        return Route(KERNEL)

    def why_not_fused(self) -> str | None:
        return None

    def problem(self, weight: int | None) -> Problem:
        return mock.Mock(format="bf16")

    def ready_on_cuda(self, workspace: Any, kernels: Any, transport: FusedGather) -> Any:
        assert self.in_kernel is not None and self.in_kernel.kernel == "gate_fp8"
        return lambda A, Bs, biases, scale_a, scale_bs, scale_out: (None, None, [A, scale_out])


@pytest.mark.parametrize(
    ("kind", "columns", "by_column", "is_in_kernel"),
    [
        ("block", 48, True, True),
        ("tensorwise", 48, True, True),
        ("block", 40, True, False),  # whose rows of fp8 are no multiple of 16 bytes
        ("block", 48, False, False),  # for which there is no such kernel
    ],
)
def test_a_kernel_quantises_gated_results(
    kernels: None,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    columns: int,
    by_column: bool,
    is_in_kernel: bool,
) -> None:
    monkeypatch.setattr(built_kernels, "kernels_of", _with_fp8_results)
    monkeypatch.setattr(quantized_gates, "is_for_kernel", lambda *_: True)
    monkeypatch.setattr(quantized_gates, "QuantisingGather", _QuantisingOnCuda)
    monkeypatch.setattr(kept, "kind_on_gpu", lambda *given: ("quantised", kind, columns, by_column))
    weight = torch.ones(columns, 64).t()
    Bs = [weight if by_column else weight.contiguous()] * 2
    A, scale = torch.ones(8, 64), torch.ones(()) if kind == "tensorwise" else None
    asked = quantized_gates.Asked("silu_mul", kind, scale, None, True, None, 0)
    for _ in range(2):  # planned, and kept
        found = quantized_gates.gather(asked, A, Bs, None)
        assert found == (A, scale) if is_in_kernel else found is None


def test_calls_with_and_without_an_epilogue_have_plans_of_their_own() -> None:
    problem = Problem(4096, 7168, 8192, world_size=4)
    gate, activation = (replace(problem, epilogue=name) for name in ("gate", "activation"))
    planner = Planner(default_kernels)
    names = {
        problem_.epilogue: planner.fused_plan(problem_).kernel for problem_ in (gate, activation)
    }
    of_build = {kernel.kernel for kernel in default_kernels(epilogue="gate")}
    assert {kernel.kernel for kernel in names.values() if kernel is not None} <= of_build
    by_row = planner.fused_plan(replace(gate, b_layout="row")).kernel
    assert by_row is not None and by_row.kernel == _KERNEL.kernel
    timed = {plan.kernel.kernel for plan, _ in planner.alternatives(gate) if plan.kernel}
    assert timed == of_build
    assert Key.of(gate) != Key.of(problem) and len({gate, activation, problem}) == 3
    assert planner.plan(gate) != planner.plan(problem)
    behind_us = [
        cost_model.unfused_us(one) - cost_model.unfused_us(problem) for one in (gate, activation)
    ]
    assert 0 < behind_us[0] < behind_us[1]


def test_tables_keep_rows_of_an_epilogue_apart(tmp_path: Path) -> None:
    problem = Problem(4096, 7168, 8192, epilogue="gate")
    kernel = default_kernels(epilogue="gate")[0]
    rows = {Key.of(problem): {4096: Row(4096, Plan("push", kernel), 100.0)}}
    path = tmp_path / "table.json"
    path.write_text(tables.to_text(problem.gpu, 1, rows))
    table = tables.read(path)
    assert table.by_key == rows
    assert len(table.rows(problem)) == 1 and not table.rows(replace(problem, epilogue="bias"))
