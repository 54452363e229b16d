"""`agmm.matmul_all_reduce` in one process: what it takes, refuses and warns of."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from short_ids import short
from torch._subclasses.fake_tensor import FakeTensorMode

import agmm
from agmm.errors import forget_warnings

all_reduce: Callable[..., torch.Tensor] = agmm.matmul_all_reduce


@pytest.fixture(autouse=True)
def nothing_warned() -> None:
    forget_warnings()


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (2, 3, 4), (0, 4), (3, 0), (2, 0, 4)], ids=str)
def test_product(group: str, shape: tuple[int, ...]) -> None:
    A, B, bias = whole(*shape), whole(shape[-1], 3, seed=1), whole(3, seed=2)
    for out, wanted in (
        (all_reduce(A, B, strict=True), A @ B),
        (all_reduce(A, B, group, bias=bias, strict=True), A @ B + bias),
    ):
        assert torch.equal(out, wanted) and out.is_contiguous() and not out._is_view()


def test_gradients_may_be_had_and_the_output_changed_in_place(group: str) -> None:
    A, B = whole(4, 6).requires_grad_(), whole(6, 3, seed=1).requires_grad_()
    bias = whole(3, seed=2).requires_grad_()
    out = all_reduce(A, B, bias=bias)
    out.mul_(2)
    out.sum().backward()
    assert A.grad is not None and torch.equal(A.grad, 2 * B.sum(1).expand(4, 6))
    assert B.grad is not None and torch.equal(B.grad, 2 * A.sum(0)[:, None].expand(6, 3))
    assert bias.grad is not None and torch.equal(bias.grad, torch.full((3,), 8.0))
    with torch.no_grad():
        assert not all_reduce(A, B).requires_grad
    (dA,) = torch.autograd.grad(all_reduce(A, B).square().sum(), A, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dA.sum().backward()


def test_product_and_bias_are_rounded_once(group: str) -> None:
    torch.manual_seed(0)
    A, B = torch.randn(64, 96).bfloat16(), torch.randn(96, 48).bfloat16()
    bias = (10 * torch.randn(48)).bfloat16()
    product = A.double() @ B.double()
    rounded, twice = (product + bias.double()).bfloat16(), product.bfloat16() + bias
    out = all_reduce(A, B, bias=bias, strict=True)
    differing = (out != rounded).float().mean().item()
    assert differing < 0.02 < (twice != rounded).float().mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_autocast_is_that_of_linear(group: str, dtype: torch.dtype) -> None:
    A, weight, bias = whole(4, 6).to(dtype), whole(3, 6, seed=1).to(dtype), whole(3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = torch.nn.functional.linear(A, weight, bias)
        out = all_reduce(A, weight.t(), bias=bias)
    assert out.dtype == wanted.dtype and torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"A": torch.ones(6)}, "A: found 1 dimensions, wanted at least 2"),
        ({"A": None}, "A: found None, wanted a tensor"),
        ({"B": torch.ones(6)}, "B: found 1 dimensions, wanted 2"),
        ({"B": torch.ones(5, 3)}, "B: found K=5, wanted 6 as the columns of A"),
        ({"B": torch.ones(6, 3).double()}, "B: found dtype torch.float64, wanted torch.float32"),
        ({"bias": torch.ones(4)}, "bias: found shape (4,), wanted (3,) as B's columns"),
        ({"bias": torch.ones(3).double()}, "bias: found dtype torch.float64"),
        ({"strict": 1}, "strict: found 1, wanted True or False"),
        ({"A": torch.ones(4, 6).to(torch.float8_e4m3fn)}, "A: found dtype torch.float8_e4m3fn"),
    ],
    ids=short,
)
def test_bad_input_is_named(group: str, arguments: dict[str, Any], message: str) -> None:
    given = {"A": torch.ones(4, 6), "B": torch.ones(6, 3)} | arguments
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        all_reduce(given.pop("A"), given.pop("B"), group, **given)


def test_unfused_path_is_warned_of_once_and_refused_if_strict(group: str) -> None:
    A, B = whole(4, 6).int(), whole(6, 3, seed=1).int()
    reason = "A: dtype=torch.int32, the CPU backend wants a floating-point type"
    with pytest.warns(UserWarning, match=f"takes the unfused path: {reason}") as caught:
        assert torch.equal(all_reduce(A, B), A @ B)
    assert caught[0].filename == __file__
    all_reduce(A, B)  # a warning would be an error
    with pytest.raises(agmm.Unsupported, match=reason):
        all_reduce(A, B, strict=True)


def test_gradients_of_complex_numbers_are_refused(group: str) -> None:
    A, B = torch.ones(4, 6, dtype=torch.complex64), torch.ones(6, 3, dtype=torch.complex64)
    with pytest.raises(agmm.InvalidArgument, match=r"A: found dtype torch\.complex64 where"):
        all_reduce(A.requires_grad_(), B)


def test_a_graph_of_another_world_size_is_refused(group: str) -> None:
    with pytest.raises(agmm.InvalidArgument, match="world_size: found 2 in the call, wanted 1"):
        torch.ops.agmm._matmul_all_reduce(torch.ones(4, 6), torch.ones(6, 3), None, group, 2)


def test_a_mesh_is_a_group(group: str) -> None:
    A, B = whole(4, 6), whole(6, 3, seed=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    assert torch.equal(all_reduce(A, B, mesh), A @ B)


def test_fake_tensors(group: str) -> None:
    with FakeTensorMode():
        out = all_reduce(torch.empty(4, 5, 6, device="cuda"), torch.empty(6, 3, device="cuda"))
    assert out.shape == (4, 5, 3) and out.device.type == "cuda"


# From torch 2.14 on opcheck clones the arguments and reads .grad of the clones, which warns; torch
# hides that in a way that comes too late where warnings are errors.
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not:UserWarning")
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)], ids=str)
def test_opcheck(group: str, fresh_compiler: None, shape: tuple[int, ...]) -> None:
    A, B = torch.randn(shape, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    for bias in (None, torch.randn(3, requires_grad=True)):
        arguments = A, B, bias, group, 1, True
        torch.library.opcheck(torch.ops.agmm._matmul_all_reduce.default, arguments)
