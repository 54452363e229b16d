"""`_async_input_scaled_mm` on the CPU, and what it refuses anywhere."""

from __future__ import annotations

import re
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch

import agmm
from agmm import _core
from agmm.ops import async_input_scaled_mm, fp8_operands
from agmm.planning import call_plans
from agmm.planning.plans import Plan
from agmm.planning.problems import KernelConfig, Problem
from agmm.runtime import cuda_calls
from agmm.testing.reference import relative_error

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
op = torch.ops.agmm._async_input_scaled_mm


def call(**change: Any) -> dict[str, Any]:
    return {
        "A": torch.ones(8, 16).to(E4M3),
        "B": torch.ones(24, 16).to(E4M3).t(),
        "scale_a": torch.ones(8, 1),
        "scale_b": torch.ones(1, 24),
        "bias": None,
        "a_chunk_signals": torch.ones(2, dtype=torch.uint32),
        "a_chunk_pivot": 0,
        "use_fast_accum": True,
        **change,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A": torch.ones(16).to(E4M3)}, "A: found 1 dimensions, wanted 2"),
        ({"A": torch.ones(8, 16)}, "A: found dtype torch.float32, wanted one of float8_e4m3fn, "),
        (
            {"A": torch.ones(8, 16).to(E5M2), "B": torch.ones(24, 16).to(E5M2).t()},
            "B: found dtype torch.float8_e5m2 as A, wanted torch.float8_e4m3fn for one of them",
        ),
        (
            {"A": torch.ones(8, 24).to(E4M3), "B": torch.ones(24, 24).to(E4M3).t()},
            "A: found K=24, wanted a multiple of 16",
        ),
        ({"B": torch.ones(24, 32).to(E4M3).t()}, "B: found K=32, wanted 16 as the columns of A"),
        ({"scale_a": torch.ones(7, 1)}, "scale_a: found shape (7, 1), wanted one number "),
        ({"scale_a": torch.ones(8, 1).half()}, "scale_a: found dtype torch.float16, wanted flo"),
        ({"scale_b": torch.ones(24, 1)}, "scale_b: found shape (24, 1), wanted (1, 24) (rowwise)"),
        ({"bias": torch.ones(23)}, "bias: found shape (23,), wanted (24,) as B's columns"),
        ({"A": torch.ones(16, 8).to(E4M3).t()}, "A: found strides (1, 8), wanted contiguous rows"),
        (
            {"a_chunk_signals": torch.ones(2, dtype=torch.int32)},
            "a_chunk_signals: found dtype torch.int32, wanted torch.uint32",
        ),
        (
            {"a_chunk_signals": torch.ones(3, dtype=torch.uint32)},
            "a_chunk_signals: found 3 signals, wanted a divisor of M=8",
        ),
        ({"a_chunk_pivot": 2}, "a_chunk_pivot: found 2, wanted 0 to 1"),
        (
            {"A": torch.ones(8, 0).to(E4M3), "B": torch.ones(24, 0).to(E4M3).t()},
            "A: found K=0, wanted at least 16",
        ),
    ],
)
def test_bad_input_is_named_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}") as caught:
        op(*call(**change).values())
    assert "\n" not in str(caught.value)


def test_what_requires_grad_is_refused() -> None:
    with pytest.raises(agmm.InvalidArgument, match=r"^scale_a: found requires_grad=True"):
        op(*call(scale_a=torch.ones(8, 1, requires_grad=True)).values())


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "block"])
@pytest.mark.parametrize("pivot", [0, 3])
def test_each_chunk_is_computed_as_it_has_come_with_its_scales(kind: str, pivot: int) -> None:
    m, k, n, chunks = 12, 144, 24, 4
    rows = m // chunks
    wanted_A, B = torch.randn(m, k).to(E4M3), torch.randn(n, k).to(E4M3).t()
    shape_a, shape_b = {
        "tensorwise": ((1,), (1,)),
        "rowwise": ((m, 1), (1, n)),
        "block": ((m, 2), (2, 1)),
    }[kind]
    wanted_scale, scale_b = torch.rand(shape_a) + 0.5, torch.rand(shape_b) + 0.5
    bias = torch.randn(n)
    A = torch.full((m, k), torch.nan).to(E4M3)
    scale_a = wanted_scale.clone()
    if kind != "tensorwise":
        scale_a.fill_(torch.nan)
    signals = torch.zeros(chunks, dtype=torch.uint32)

    def deliver() -> None:
        for step in reversed(range(chunks)):
            chunk = (pivot + step) % chunks
            time.sleep(0.01)
            part = slice(chunk * rows, (chunk + 1) * rows)
            A.view(torch.uint8)[part] = wanted_A.view(torch.uint8)[part]
            if kind != "tensorwise":
                scale_a[part] = wanted_scale[part]
            signals[chunk] = 1

    sender = threading.Thread(target=deliver)
    sender.start()
    out = op(A, B, scale_a, scale_b, bias, signals, pivot, True)
    sender.join()
    assert out.dtype == torch.bfloat16
    spread = [
        scale.double()
        if kind != "block"
        else scale.double().repeat_interleave(128, dim)[(slice(None),) * dim + (slice(size),)]
        for scale, dim, size in ((wanted_scale, 1, k), (scale_b, 0, k))
    ]
    reference = (wanted_A.double() * spread[0]) @ (B.double() * spread[1]) + bias
    assert relative_error(out, reference) < 2**-8


def test_opcheck() -> None:
    # The schema's test is left out: it multiplies all tensors, and torch multiplies no fp8.
    torch.library.opcheck(
        op.default,
        tuple(call(bias=torch.ones(24)).values()),
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


# --- what the kernels cannot do, found before the core is called ---


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """A core that takes CPU tensors for CUDA's."""
    core = mock.Mock(wraps=_core, async_input_mm=mock.Mock())
    monkeypatch.setattr(cuda_calls, "_core", core)
    monkeypatch.setattr(cuda_calls, "stream_of", mock.Mock(return_value=0))
    monkeypatch.setattr(cuda_calls, "is_on_current_gpu", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "device", mock.MagicMock())
    monkeypatch.setattr(fp8_operands, "why_no_kernel", lambda device: None)
    return core


CONFIG = KernelConfig(128, 128, 128, 1, 1, "pingpong")


def on_cuda(**change: Any) -> torch.Tensor:
    given = call(**change)
    return async_input_scaled_mm.on_cuda(
        (given["A"], given["B"], given["scale_a"], given["scale_b"]),
        given["a_chunk_signals"],
        given["a_chunk_pivot"],
        bias=given["bias"],
        fast_accum=given["use_fast_accum"],
        config=CONFIG,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"scale_a": torch.ones(8, 1), "scale_b": torch.ones(1, 1), "B": None},
            "B: found N=1, wanted a multiple of 8",
        ),
        ({"B": torch.ones(16, 24).to(E4M3)}, "B: found strides (24, 1), wanted column-major"),
        (
            {"B": torch.ones(24, 24).to(E4M3)[:, :16].t()},
            "B: found leading dimension 24, wanted a multiple of 16",
        ),
        ({"bias": torch.ones(24)}, "bias: found dtype torch.float32, wanted torch.bfloat16"),
        (
            {"scale_a": torch.ones(8, 2)[:, :1]},
            "scale_a: found strides (2, 1), wanted contiguous ones",
        ),
    ],
)
def test_what_the_kernels_cannot_do(core: mock.Mock, change: dict[str, Any], message: str) -> None:
    if change.get("B", 0) is None:
        change = {**change, "B": torch.ones(1, 16).to(E4M3).t()}
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        on_cuda(**change)
    core.async_input_mm.assert_not_called()


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_what_the_core_is_told(core: mock.Mock, kind: str) -> None:
    given = call(use_fast_accum=False, A=torch.ones(8, 16).to(E5M2))
    if kind == "tensorwise":
        given |= {"scale_a": torch.ones(()), "scale_b": torch.ones(())}
    out = on_cuda(**given)
    assert (out.dtype, out.shape) == (torch.bfloat16, (8, 24))
    problem, addresses, *_ = core.async_input_mm.call_args.args
    names = "A", "B", "scale_a", "scale_b"
    signals = given["a_chunk_signals"].data_ptr()
    of_operands = [given[name].data_ptr() for name in names]
    assert addresses == (*of_operands, 0, out.data_ptr(), signals)
    assert repr(problem).startswith("MatmulProblem(8x24x16 e5m2_e4m3 B col slow, chunks 2x1 from 0")
    size, b, told, config = core.MatmulProblem.call_args.args
    assert (size, b, config) == ((8, 24, 16), (True, 16), CONFIG.core)
    scales, is_rowwise = told.scales, kind == "rowwise"
    assert (scales.a_per_row, scales.b_per_column, scales.a_columns) == (is_rowwise, is_rowwise, 1)


@pytest.mark.parametrize(("chunks", "across"), [(1, False), (4, True)])
def test_a_weight_beyond_the_cache_is_read_across_the_chunks(
    core: mock.Mock, monkeypatch: pytest.MonkeyPatch, chunks: int, across: bool
) -> None:
    large = Problem(300, 28672, 16384, format="float8_e4m3fn_float8_e4m3fn fast")
    monkeypatch.setattr(fp8_operands, "problem_of", lambda *given, **more: large)
    chosen = mock.Mock(fused_plan=lambda problem: Plan("push", CONFIG))
    monkeypatch.setattr(call_plans, "planner", lambda *given: chosen)
    given = call(a_chunk_signals=torch.ones(chunks, dtype=torch.uint32))
    del given["bias"], given["use_fast_accum"]
    *product, signals, pivot = given.values()
    async_input_scaled_mm.on_cuda(product, signals, pivot)
    *_, config = core.MatmulProblem.call_args.args
    assert config.across is across


def test_scales_of_rows_are_read_where_they_lie(core: mock.Mock) -> None:
    """A copy would be made before they have come."""
    scales = torch.ones(9)[1:].view(8, 1)
    assert scales.data_ptr() % 8 == 4
    on_cuda(scale_a=scales)
    _, addresses, *_ = core.async_input_mm.call_args.args
    assert addresses[2] == scales.data_ptr()
