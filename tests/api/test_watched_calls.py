"""Calls that go past the dispatcher only where it need not see them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import agmm
from agmm import collectives

E4M3 = torch.float8_e4m3fn


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    one = torch.ones(())
    return x.to(E4M3), torch.ones(16, 16).to(E4M3).t(), one, one


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_reduce": collectives.all_reduce,
    "all_gather_matmul": lambda x: agmm.all_gather_matmul(x, x),
    "matmul_reduce_scatter": lambda x: agmm.matmul_reduce_scatter(x, x),
    "matmul_all_reduce": lambda x: agmm.matmul_all_reduce(x, x),
    "all_gather_scaled_matmul": lambda x: agmm.all_gather_scaled_matmul(*scaled(x)),
    "scaled_matmul_reduce_scatter": lambda x: agmm.scaled_matmul_reduce_scatter(*scaled(x)),
    "scaled_matmul_all_reduce": lambda x: agmm.scaled_matmul_all_reduce(*scaled(x)),
}


TRACED = [name for name in CALLS if name != "all_gather_matmul" and "scaled" not in name]
"""torch.jit has no lists of tensors that may be None, and refuses the others."""


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", TRACED)
def test_a_trace_has_the_op(group: str, name: str) -> None:
    x = torch.ones(16, 16)
    traced = torch.jit.trace(CALLS[name], x, check_trace=False)
    assert f"agmm::_{name}" in str(traced.graph)
    assert torch.equal(traced(2 * x), CALLS[name](2 * x))


@pytest.mark.parametrize("name", CALLS)
def test_zeros_that_have_no_memory(group: str, name: str) -> None:
    zeros = torch._efficientzerotensor(16, 16)
    assert torch.equal(CALLS[name](zeros), CALLS[name](torch.zeros(16, 16)))
