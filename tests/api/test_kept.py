"""Calls on CUDA that are made again without checks, without a GPU: which ones, and of what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import agmm
from agmm import collectives
from agmm.collectives.paths import SYMMETRIC_MEMORY, Path
from agmm.collectives.run import KeptCollective
from agmm.errors import InvalidArgument
from agmm.ops import (
    gather_scaled_op,
    kept,
    matmul_all_reduce,
    plain_all_reduce,
    plain_gather,
    plain_scatter,
    scaled_matmul_all_reduce,
    scaled_matmul_reduce_scatter,
    scatter_plan,
    small_collectives,
)
from agmm.ops.pipeline import KERNEL, Route, serve
from agmm.ops.plain_all_reduce import PlainAllReduce
from agmm.planning.problems import KernelConfig
from agmm.planning.transports import SCATTER
from agmm.runtime import nan_check

X = torch.randn(4, 8)
A, B = torch.randn(4, 8), torch.randn(8, 16)
RESULT = torch.ones(3)


class Calls(dict[Any, Any]):
    """One for each kind, whose result is `RESULT`; takes note of the kinds."""

    def __init__(self) -> None:
        self.kinds: list[Any] = []

    def get(self, kind: Any, default: Any = None) -> Any:
        self.kinds.append(kind)
        return lambda *_: RESULT


@pytest.fixture
def calls(group: str) -> Iterator[Calls]:
    """The calls of the default group, of one rank; all tensors are taken for a GPU's."""
    found = Calls()
    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(kept, "kept_calls", {dist.group.WORLD: found}),
    ):
        yield found


COLLECTIVES: list[Callable[..., Any]] = [
    collectives.all_reduce,
    collectives.all_gather,
    collectives.reduce_scatter,
]


@pytest.mark.parametrize("function", COLLECTIVES)
def test_a_kept_collective_serves_its_kind_alone(
    calls: Calls, function: Callable[..., Any]
) -> None:
    assert function(X) is RESULT and function(X.clone()) is RESULT
    assert calls.kinds[0] == calls.kinds[1] is not None
    function(X, strict=True)
    function(X, out=X.clone())
    function(X[:2])
    function(X.t())
    function(X.double())
    if function is not collectives.all_gather:
        function(X, op="avg")
    assert len(set(calls.kinds)) == len(calls.kinds) - 1


F8, ONE = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(1)
KEPT: dict[str, Callable[[Any], Any]] = {
    "all_gather_matmul": lambda group: agmm.all_gather_matmul(A, B, group),
    "several weights": lambda group: agmm.all_gather_matmul(A, [B, B], group),
    "matmul_reduce_scatter": lambda group: agmm.matmul_reduce_scatter(A, B, group),
    "matmul_all_reduce": lambda group: agmm.matmul_all_reduce(A, B, group),
    "all_gather_scaled_matmul": lambda group: agmm.all_gather_scaled_matmul(
        F8, F8, ONE, ONE, group
    ),
    "quantize": lambda group: agmm.all_gather_matmul(
        F8.float(), F8.float(), group, quantize="block"
    ),
    "scaled_matmul_reduce_scatter": lambda group: agmm.scaled_matmul_reduce_scatter(
        F8, F8, ONE, ONE, group
    ),
    "scaled_matmul_all_reduce": lambda group: agmm.scaled_matmul_all_reduce(
        F8, F8, ONE, ONE, group
    ),
    "all_gather": lambda group: collectives.all_gather(X, group),
    "reduce_scatter": lambda group: collectives.reduce_scatter(X, group),
    "all_reduce": lambda group: collectives.all_reduce(X, group),
}


SUMS = ("matmul_reduce_scatter", "matmul_all_reduce")
SCALED = (
    "all_gather_scaled_matmul",
    "scaled_matmul_reduce_scatter",
    "scaled_matmul_all_reduce",
)
SERVING = (
    gather_scaled_op,
    matmul_all_reduce,
    plain_scatter,
    plain_gather,
    scaled_matmul_all_reduce,
    scaled_matmul_reduce_scatter,
)
"""The modules that carry out what is not kept."""


@pytest.mark.parametrize("op", KEPT)
def test_no_kept_call_serves_a_destroyed_group(
    group: str, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Its memory may be gone, and its peers with it."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", op != "quantize")
    other = dist.new_group([0])
    call = mock.Mock(return_value=(None, None, [RESULT]))

    class Calls(dict[Any, Any]):
        def get(self, kind: Any, default: Any = None) -> Any:
            return call

    monkeypatch.setattr(kept, "kept_calls", {other: Calls()})
    KEPT[op](other)
    assert call.call_count == 1
    dist.destroy_process_group(other)
    with pytest.raises(InvalidArgument, match=r"^group: found a destroyed one"):
        KEPT[op](other)
    assert call.call_count == 1


class _Served(Exception):
    """What an op was about to carry out."""


@pytest.mark.parametrize("op", ["all_gather_matmul", "several weights", *SUMS, *SCALED])
def test_a_kept_call_gets_the_operands_of_the_first(
    group: str, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """A kept call has the signature of what `serve` calls."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    of_kept = mock.Mock(return_value=(None, None, [RESULT]))

    class Calls(dict[Any, Any]):
        call: Any = of_kept

        def get(self, kind: Any, default: Any = None) -> Any:
            return self.call

    monkeypatch.setattr(kept, "kept_calls", {dist.group.WORLD: Calls()})
    KEPT[op](dist.group.WORLD)

    def served(call: Any, *_: Any) -> Any:
        raise _Served(call.operands())

    for module in SERVING:
        monkeypatch.setattr(module, "serve", served)
    monkeypatch.setattr(Calls, "call", None)
    with pytest.raises(_Served) as found:
        KEPT[op](dist.group.WORLD)
    described = [_described(operand) for operand in found.value.args[0]]
    given = [_described(operand) for operand in of_kept.call_args.args]
    # What is left out at the end is None, or nothing.
    given += described[len(given) :] if not any(described[len(given) :]) else []
    assert given == described


def _described(operand: Any) -> Any:
    if isinstance(operand, (list, tuple)):
        return [_described(one) for one in operand]
    return None if operand is None else (operand.dtype, operand.numel())


def test_collectives_share_no_kind(calls: Calls) -> None:
    for function in COLLECTIVES:
        function(X)
    assert len(set(calls.kinds)) == 3


def test_what_is_never_served_by_a_kept_collective(calls: Calls) -> None:
    assert torch.equal(collectives.all_gather(X, dim=1), X)
    assert torch.equal(collectives.all_reduce(X, async_op=True).wait(), X)
    assert torch.equal(collectives.all_gather(X, low_contention=True), X)
    wants_grad = X.clone().requires_grad_()
    assert collectives.all_reduce(wants_grad).requires_grad
    with torch.autograd.profiler.profile():  # which names ops
        assert torch.equal(collectives.all_reduce(X), X)
    with pytest.raises(InvalidArgument, match="strict: found 1, wanted True or False"):
        collectives.all_reduce(X, strict=1)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="op: found"):
        collectives.all_reduce(X, op=["sum"])  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="out: found one with requires_grad=True"):
        collectives.all_reduce(X, out=wants_grad)
    assert calls.kinds == []


def test_a_kept_all_reduce_serves_its_kind_alone(calls: Calls) -> None:
    for _ in range(2):
        assert agmm.matmul_all_reduce(A, B.clone()) is RESULT
    assert calls.kinds[0] == calls.kinds[1] is not None
    agmm.matmul_all_reduce(A, B, strict=True)
    agmm.matmul_all_reduce(A, B, bias=torch.ones(16))
    agmm.matmul_all_reduce(A, B.t().contiguous().t())
    agmm.matmul_all_reduce(A[:2], B)
    assert len(set(calls.kinds)) == len(calls.kinds) - 1
    known = calls.kinds.copy()
    with mock.patch.object(torch, "is_autocast_enabled", return_value=True):  # casts operands
        agmm.matmul_all_reduce(A, B)
    assert agmm.matmul_all_reduce(A.clone().requires_grad_(), B).requires_grad
    assert calls.kinds == known


def test_nothing_is_kept_while_numbers_are_looked_at(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = dist.group.WORLD
    assert world is not None
    kept.keep(world, "kind", lambda: RESULT)
    assert kept.call_kept(world, "kind") is RESULT
    monkeypatch.setattr(nan_check, "active", True)
    kept.keep(world, "other", lambda: RESULT)
    assert kept.call_kept(world, "other") is None
    del kept.kept_calls[world]


@pytest.mark.parametrize(
    ("kind", "out", "is_served"),
    [
        ("all_reduce", None, True),
        ("all_reduce", "x", True),
        ("all_reduce", "apart", True),
        ("all_reduce", "across", False),
        ("all_reduce", "strided", False),
        ("all_gather", "x", True),  # of rank 0 of 1
    ],
)
def test_a_kept_collective_writes_where_it_may(
    group: str, monkeypatch: pytest.MonkeyPatch, kind: Any, out: str | None, is_served: bool
) -> None:
    call = mock.Mock(is_ready=True)
    monkeypatch.setattr(small_collectives, "prepare", lambda *_, **__: call)
    memory = torch.zeros(64)
    x = memory[:8]
    targets = {"x": x, "apart": memory[8:16], "across": memory[4:12], "strided": memory[16:32:2]}
    target = None if out is None else targets[out]
    world = dist.group.WORLD
    assert world is not None
    path = Path(SYMMETRIC_MEMORY, "", method="one_shot")
    served = KeptCollective(kind, path, x, world, "sum", [8])
    found = served(x, target)
    assert (found is not None) == is_served == call.called
    if is_served:
        assert found is target or (target is None and found is not None and found.shape == (8,))
        call.is_ready = False  # released
        assert served(x, target) is None and call.call_count == 1


def test_a_kept_all_reduce_returns_no_view(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = dist.group.WORLD
    assert world is not None
    kernel = KernelConfig.parse("128x128x64_1x1_pingpong")
    plan = scatter_plan.AllReducePlan(SCATTER, None, 132, kernel)
    monkeypatch.setattr(plain_all_reduce, "call_with", lambda *_, **__: _product)
    monkeypatch.setattr(small_collectives, "prepare_again", lambda *_, **__: None)
    A = torch.randn(2, 4, 8)
    call = PlainAllReduce(A, B, None, world, strict=False)
    call.device = torch.device("cuda", 0)
    ready = call.prepare(Route(KERNEL, plan=plan))
    for served in (ready, call.to_keep(ready, ready(A, B, None))):
        assert served is not None
        out = served(A, B, None)
        torch.testing.assert_close(out, A @ B)
        assert not out._is_view()


def _product(As: Any, Bs: Any, bias: Any, residual: Any) -> torch.Tensor:
    return torch.mm(As[0], Bs[0])


@pytest.mark.parametrize("why", ["no NVLink", "no memory", None])
def test_an_all_reduce_is_kept_where_agmms_kernel_served_it(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, why: str | None
) -> None:
    call = mock.Mock(is_ready=why != "no memory")

    def prepare(*_: Any) -> mock.Mock:
        if why == "no NVLink":
            raise agmm.Unsupported("group: all_reduce of 2097152 bytes without NVLink")
        return call

    monkeypatch.setattr(small_collectives, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(small_collectives, "prepare", prepare)
    monkeypatch.setattr(small_collectives, "all_reduced", lambda partial, *_: partial)
    keep = mock.Mock()
    monkeypatch.setattr(kept, "keep", keep)
    world = dist.group.WORLD
    assert world is not None
    made = PlainAllReduce(A, B, None, world, strict=False)
    made.device = torch.device("cuda", 0)
    assert torch.equal(serve(made, "kind"), A @ B)
    keep.assert_called_once()
    assert (keep.call_args.args[2] is not None) == (why is None)


def test_a_kept_all_reduce_wants_its_memory(group: str) -> None:
    world = dist.group.WORLD
    assert world is not None
    call = mock.Mock(is_ready=False)
    of_gpus = PlainAllReduce(A, B, None, world, strict=False)
    of_gpus.device = torch.device("cuda", 0)
    with mock.patch.object(small_collectives, "prepare_again", return_value=call):
        served = of_gpus.library_to_keep(A @ B)
    assert served is not None
    with pytest.raises(agmm.Unsupported):  # so that the call is looked at anew
        served(A, B, None)
    assert not call.called
    call.is_ready = True
    torch.testing.assert_close(served(A, B, torch.ones(16)), A @ B + 1)
    call.assert_called_once()
