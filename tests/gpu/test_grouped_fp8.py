"""Grouped matmuls in fp8, on one GPU: agmm's kernels, torch's product, and bfloat16 in their
place."""

from __future__ import annotations

import warnings
from typing import Any

import grouped_fp8_work as work
import pytest
import torch
from gpu_work import never_waits
from grouped_fp8_work import GATED, KINDS, PLAIN
from grouped_work import COUNTS, drawn, offsets_of

from agmm.ops import grouped_scaled_products
from agmm.runtime.epilogues import Epilogue

SIZES = ((8, 16), (72, 144), (264, 528), (1160, 1040))
"""N and K."""

needs_kernels = pytest.mark.skipif(not PLAIN, reason="found no such kernel in the build")
of_kernels = pytest.mark.parametrize("kernel", [*PLAIN, *GATED], ids=lambda kernel: kernel.name)
of_kinds = pytest.mark.parametrize("kind", KINDS)


def _weights(kernel: Any) -> int:
    return 2 if kernel in GATED else 1


@needs_kernels
@of_kernels
@of_kinds
def test_products(kernel: Any, kind: str) -> None:
    for n, k in SIZES:
        for label, counts in COUNTS.items():
            for room in (0, 77):
                given = work.operands(counts, n, k, kind, weights=_weights(kernel), room=room)
                for sm_count in (0, 6):
                    out = work.launched(kernel, given, sm_count=sm_count)
                    found = work.faults(out, given)
                    assert found == [], f"{label}, N={n}, K={k}, {sm_count} CTAs: {found[:3]}"


@needs_kernels
@of_kernels
@of_kinds
def test_waits_for_rows_that_come_late(kernel: Any, kind: str) -> None:
    assert work.faults_of_late_rows(kernel, kind, _weights(kernel)) == []


@needs_kernels
@of_kinds
def test_the_bits_of_a_row_are_its_own(kind: str) -> None:
    given = work.operands(drawn(12, 300), 1160, 1040, kind)
    wanted = work.launched(PLAIN[0], given)
    for kernel in PLAIN:
        for sm_count in (0, 2, 10, 64):
            out = work.launched(kernel, given, sm_count=sm_count)
            assert torch.equal(out, wanted), f"{kernel.name}, {sm_count} CTAs"


@of_kinds
@pytest.mark.parametrize("name", ["", "silu_mul", "relu2"])
def test_the_products_of_the_ops(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows an expert and with scales of blocks they are agmm's, else torch's, without a
    word of the host with the device, and close to the CPU's."""
    by_torch, product = [], torch._scaled_grouped_mm

    def counted(*args: Any, **settings: Any) -> torch.Tensor:
        by_torch.append(len(args[0]))
        return product(*args, **settings)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", counted)
    epilogue = Epilogue(name) if name else None
    count = 2 if name == "silu_mul" else 1
    for experts, most in ((8, 300), (24, 20)):
        given = work.operands(drawn(experts, most), 272, 528, kind, weights=count, room=5)
        rows, offsets = given.rows(), offsets_of(given.counts)
        products = grouped_scaled_products.products
        with warnings.catch_warnings():
            warnings.simplefilter("error" if PLAIN else "ignore")
            products(rows, given.weights, offsets, epilogue)  # loads kernels
            with never_waits():
                found = products(rows, given.weights, offsets, epilogue)
        is_left = kind == "rowwise" and (most == 300 or not PLAIN)
        assert len(by_torch) == (2 * count if is_left else 0)
        by_torch.clear()
        on_cpu = [
            one._replace(
                values=one.values.cpu(),
                scale=one.scale.cpu(),
                bias=None if one.bias is None else one.bias.cpu(),
            )
            for one in given.weights
        ]
        cpu_rows = rows._replace(values=rows.values.cpu(), scale=rows.scale.cpu())
        wanted = products(cpu_rows, on_cpu, offsets.cpu(), epilogue)
        for one, other in zip(found, wanted, strict=True):
            error = (one.cpu().double() - other.double()).norm() / other.double().norm()
            assert error < 2**-6


@of_kinds
def test_what_has_no_product_is_made_in_bfloat16(kind: str) -> None:
    """Row-major weights, which neither torch nor agmm's kernels take."""
    given = work.operands(drawn(4, 70), 72, 144, kind, room=3)
    (weight,) = given.weights
    row_major = weight._replace(values=weight.values.contiguous())
    given = given._replace(weights=[row_major])
    args = given.rows(), row_major, offsets_of(given.counts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grouped_scaled_products.scaled_product_on_gpu(*args)
        with never_waits():
            out = grouped_scaled_products.scaled_product_on_gpu(*args)
    m = sum(given.counts)
    assert bool((out[m:] == 0).all())
    exact = torch.cat(
        [
            rows.dequantised().double() @ row_major.of_expert(e).B.dequantised().double()
            + row_major.bias[e].double()
            for e, rows in enumerate(_by_expert(given))
            if row_major.bias is not None
        ]
    )
    assert (out[:m].double() - exact).norm() / exact.norm() < 2**-6


def _by_expert(given: work.Operands) -> list[Any]:
    rows, found, begin = given.rows(), [], 0
    for count in given.counts:
        found.append(rows.rows(slice(begin, begin + count)))
        begin += count
    return found
