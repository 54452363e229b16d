"""The kernels of grouped matmuls, on one GPU."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from gpu_work import never_waits, poison_freed_memory
from grouped_work import (
    COUNTS,
    GATED,
    PLAIN,
    drawn,
    fault,
    faults_of_late_rows,
    is_built,
    offsets_of,
    operands,
    randn,
    skip_unless_built,
)

from agmm.ops import grouped_kernel, grouped_products
from agmm.runtime.epilogues import Epilogue

CALLS = int(os.environ.get("AGMM_STRESS_CALLS", "30"))
SIZES = ((8, 8), (72, 136), (264, 520), (1160, 1032))
"""N and K."""

pytestmark = pytest.mark.skipif(not PLAIN, reason="found no kernel of grouped matmuls in the build")

of_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
of_layouts = pytest.mark.parametrize("column_major", [True, False], ids=["column", "row"])
of_kernels = pytest.mark.parametrize("kernel", [*PLAIN, *GATED], ids=lambda kernel: kernel.name)


@of_kernels
@of_layouts
@of_dtypes
def test_products(kernel: Any, column_major: bool, dtype: torch.dtype) -> None:
    """Rows that there is only room for are NaN, and so is what results are written to."""
    epilogue = skip_unless_built(kernel, dtype, column_major=column_major)
    is_gate = epilogue == "gate"
    activation = Epilogue("silu_mul") if is_gate else None
    for n, k in SIZES:
        for label, counts in COUNTS.items():
            weights, biases = operands(counts, n, k, dtype, column_major=column_major, gate=is_gate)
            for room, added in ((0, False), (77, True)):
                capacity = max(1, sum(counts) + room)
                rows = randn(capacity, k, dtype=dtype)
                rows[sum(counts) :] = torch.nan
                given = biases if added else [None] * len(weights)
                for sm_count in (0, 6):
                    poison_freed_memory(2 * capacity * n)
                    out = grouped_kernel.run(
                        kernel,
                        *(rows, weights, given, offsets_of(counts), activation),
                        sm_count=sm_count,
                    )
                    assert out.shape == (capacity, n) and out.dtype == dtype
                    faults = fault(out, rows, weights, given, counts)
                    assert faults == [], f"{label}, N={n}, K={k}, {sm_count} CTAs: {faults[:3]}"


@of_kernels
def test_rows_of_one_expert_stay_among_themselves(kernel: Any) -> None:
    """A tile loads rows of the next expert, and a NaN there is not seen."""
    column_major = is_built(
        kernel, torch.bfloat16, "gate" if kernel in GATED else "bias", column_major=True
    )
    dtype = torch.bfloat16
    is_gate = skip_unless_built(kernel, dtype, column_major=column_major) == "gate"
    counts = drawn(9, 200)
    weights, biases = operands(counts, 264, 520, dtype, column_major=column_major, gate=is_gate)
    rows, offsets = randn(sum(counts), 520), offsets_of(counts)
    activation = Epilogue("silu_mul") if is_gate else None
    wanted = grouped_kernel.run(kernel, rows, weights, biases, offsets, activation)
    for expert in range(9):
        begin, end = offsets[expert : expert + 2].tolist()
        broken = rows.clone()
        broken[begin:end] = torch.nan
        out = grouped_kernel.run(kernel, broken, weights, biases, offsets, activation)
        assert out[begin:end].isnan().all()
        assert torch.equal(out[:begin], wanted[:begin]) and torch.equal(out[end:], wanted[end:])


@of_layouts
def test_the_bits_of_a_row_are_its_own(column_major: bool) -> None:
    """They depend neither on the tile, nor on the other rows, nor on how many CTAs there are."""
    dtype = torch.bfloat16 if column_major else torch.float16
    some = [one for one in PLAIN if is_built(one, dtype, "bias", column_major=column_major)]
    if not some:
        pytest.skip("the build has no such kernel")
    counts, (n, k) = drawn(12, 300), (1160, 1032)
    weights, biases = operands(counts, n, k, dtype, column_major=column_major, gate=False)
    rows, offsets = randn(sum(counts), k, dtype=dtype), offsets_of(counts)
    wanted = grouped_kernel.run(some[0], rows, weights, biases, offsets)
    for kernel in some:
        for sm_count in (0, 2, 10, 64):
            out = grouped_kernel.run(kernel, rows, weights, biases, offsets, sm_count=sm_count)
            assert torch.equal(out, wanted), f"{kernel.name}, {sm_count} CTAs"
    for expert in range(12):
        begin, end = offsets[expert : expert + 2].tolist()
        alone = [weights[0][expert : expert + 1]]
        out = grouped_kernel.run(
            some[0],
            *(rows[begin:end].clone(), alone, [biases[0][expert : expert + 1]]),
            offsets_of([end - begin]),
        )
        assert torch.equal(out, wanted[begin:end])


@of_kernels
def test_captured(kernel: Any) -> None:
    """One graph serves all numbers of rows, and calls repeat."""
    dtype = torch.bfloat16
    is_gate = skip_unless_built(kernel, dtype, column_major=True) == "gate"
    activation = Epilogue("silu_mul") if is_gate else None
    weights, biases = operands([0] * 16, 1160, 520, dtype, column_major=True, gate=is_gate)
    rows, offsets = randn(4800, 520), offsets_of([300] * 16)
    given = kernel, rows, weights, biases, offsets, activation
    grouped_kernel.run(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [grouped_kernel.run(*given) for _ in range(3)]
    for i in range(CALLS):
        counts = random.Random(i).choices(range(301), k=16)
        if i % 5 == 0:
            counts = [0] * 15 + [4800]
        offsets.copy_(offsets_of(counts))
        rows.normal_()
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(outs[0], out) for out in outs[1:])
        assert fault(outs[0], rows, weights, biases, counts) == []


@of_kernels
def test_waits_for_rows_that_come_late(kernel: Any) -> None:
    skip_unless_built(kernel, torch.bfloat16, column_major=True)
    assert faults_of_late_rows(kernel) == []


@of_kernels
def test_wrong_offsets_end(kernel: Any) -> None:
    """They write nothing beyond the result."""
    dtype = torch.bfloat16
    is_gate = skip_unless_built(kernel, dtype, column_major=True) == "gate"
    activation = Epilogue("silu_mul") if is_gate else None
    weights, biases = operands([0] * 4, 264, 136, dtype, column_major=True, gate=is_gate)
    rows = randn(500, 136)
    most = 2**31 - 1
    for wrong in ([0, most, -5, 7, 600], [400, 20, 900, 3, -1], [-9, -8, -7, -6, -5]):
        offsets = torch.tensor(wrong, dtype=torch.int32, device="cuda")
        out = grouped_kernel.run(kernel, rows, weights, biases, offsets, activation)
        torch.cuda.synchronize()
        assert out.shape == (500, 264)


@of_dtypes
@of_layouts
@pytest.mark.parametrize("name", ["", "silu_mul", "gelu_tanh_mul", "relu2"])
def test_the_products_of_the_ops(name: str, column_major: bool, dtype: torch.dtype) -> None:
    """They are the kernels', without a word of the host with the device, and equal the CPU's."""
    epilogue = Epilogue(name) if name else None
    is_gate = epilogue is not None and epilogue.is_gated
    for experts, most in ((8, 300), (24, 20)):
        counts = drawn(experts, most)
        weights, biases = operands(counts, 264, 520, dtype, column_major=column_major, gate=is_gate)
        rows, offsets = randn(sum(counts) + 5, 520, dtype=dtype), offsets_of(counts)
        assert grouped_kernel.config_of(rows, weights[:1]) is not None or len(PLAIN) < 3
        grouped_products.products(rows, weights, biases, offsets, epilogue)  # loads kernels
        with never_waits():
            found = grouped_products.products(rows, weights, biases, offsets, epilogue)
        wanted = grouped_products.products(
            rows.cpu(),
            [one.cpu() for one in weights],
            [bias.cpu() for bias in biases],
            offsets.cpu(),
            epilogue,
        )
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=2**-6, atol=2**-6)


def test_operands_that_it_does_not_take() -> None:
    config = PLAIN[0]
    dtype = torch.bfloat16
    skip_unless_built(config, dtype, column_major=True)
    right = randn(2, 64, 32).transpose(1, 2)  # [2, 32, 64]
    rows = randn(40, 32)
    assert grouped_kernel.config_of(rows, [right]) is not None
    for other_rows, other in (
        (rows.float(), right.float()),
        (rows[:, :28], right[:, :28]),
        (rows.t().contiguous().t(), right),
        (rows, right[..., :60]),
        (rows, right[:, :, ::2].transpose(1, 2).contiguous().transpose(1, 2)[..., :28]),
        (rows, right[:1].expand(2, -1, -1)),
        (randn(40, 36)[:, 4:], right),
    ):
        assert grouped_kernel.config_of(other_rows, [other]) is None
    many = [randn(513, 8, 8).transpose(1, 2)], [None], offsets_of([0] * 513)
    with pytest.raises(ValueError, match="513 experts, wanted 1 to 512"):
        grouped_kernel.run(config, randn(8, 8), *many)


@pytest.mark.parametrize("columns", [64, 60], ids=["grouped", "batched"])
def test_gradients_of_weights_in_float16(columns: int) -> None:
    """torch's grouped matmul takes them as pairs of bfloat16, or they are one batch."""
    counts = [7, 0, 300, 64]
    rows, douts = (randn(sum(counts) + 9, n, dtype=torch.float16) for n in (columns, 128))
    rows[sum(counts) :] = torch.nan
    offsets = offsets_of(counts)
    grouped_products.grad_of_weight_by_torch(rows, douts, offsets)  # loads kernels
    with never_waits():
        found = grouped_products.grad_of_weight_by_torch(rows, douts, offsets)
    wanted = torch.ops.agmm._grouped_grad_of_weight(rows.cpu(), douts.cpu(), offsets.cpu())
    torch.testing.assert_close(found.cpu(), wanted, rtol=2**-7, atol=2**-7)
