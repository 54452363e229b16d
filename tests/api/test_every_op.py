"""What all ops promise, by a table of them: gradients, results, FLOPs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import every_op
import every_op_work as work
import pytest
import torch

import agmm
from agmm.ops import quantize
from agmm.runtime import cuda_quantize
from agmm.runtime.scaling import Tile, scale_shape
from agmm.testing.ranks import RankPool


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


def test_the_table_has_every_op_with_every_operand() -> None:
    given: dict[str, set[str]] = {name: set() for name in every_op.names()}
    for call in every_op.calls(2):
        given[call.op] |= {name for name, value in call.operands.items() if value is not None}
    wanted = {name: set(every_op.tensors_of(every_op.op_named(name))) for name in given}
    assert given == wanted


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_or_a_refusal(pool: RankPool, world_size: int) -> None:
    check(pool.run(work.gradients, world_size), world_size)


def test_every_op_has_a_rule_for_gradients_on_every_device() -> None:
    """Else torch computes them without, and warns in the backward."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    of_all_devices = ("Autograd", "CompositeImplicitAutograd")
    without = [n for n in every_op.REGISTERED if not any(has(n, key) for key in of_all_devices)]
    assert without == []


@pytest.mark.parametrize("operand", ["A_shard", "B", "bias"])
@pytest.mark.parametrize("kind", quantize.KINDS)
def test_a_kernel_that_quantises_hides_no_gradient(
    group: str, monkeypatch: pytest.MonkeyPatch, kind: str, operand: str
) -> None:
    """Kernels hand on tensors that require none."""

    def quantised(x: torch.Tensor, tile: Tile, dtype: torch.dtype, **_: Any) -> Any:
        return torch.zeros_like(x, dtype=dtype), torch.ones(scale_shape(x.shape, tile))

    out = torch.ones(6, 48)
    monkeypatch.setattr(cuda_quantize, "quantised", quantised)
    monkeypatch.setattr(cuda_quantize, "amax_of", lambda x, tile: None)
    monkeypatch.setattr(quantize, "all_gather_scaled_matmul", lambda *_, **__: [out])
    given = {"A_shard": torch.ones(6, 144), "B": torch.ones(144, 48), "bias": torch.ones(48)}
    op: Any = agmm.all_gather_matmul
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        assert op(**given, quantize=kind) is out
        given[operand].requires_grad_()
        message = f"^{operand}: found requires_grad=True, wanted a call under torch.no_grad"
        with pytest.raises(agmm.InvalidArgument, match=message):
            op(**given, quantize=kind)
        with torch.no_grad():
            assert op(**given, quantize=kind) is out


def test_one_rank_alone_is_refused_before_it_communicates(pool: RankPool) -> None:
    results = pool.run(work.refused_before_the_scales_are_agreed)
    assert results == [["A_shard", "B"]] * len(results)
