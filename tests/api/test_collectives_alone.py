"""`agmm.collectives` in one process: what they take, refuse, and leave to torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from short_ids import short
from torch._subclasses.fake_tensor import FakeTensorMode

import agmm
from agmm import collectives
from agmm._core import CollectiveMethod, CollectiveOp
from agmm.collectives import paths, run
from agmm.collectives.run import Settings
from agmm.collectives.work import Work
from agmm.errors import forget_warnings
from agmm.ops import small_collectives
from agmm.planning.cost_model.collectives import Kind
from agmm.runtime import groups, symmetric
from agmm.runtime.group_gpus import GroupFacts

all_gather: Callable[..., Any] = collectives.all_gather
reduce_scatter: Callable[..., Any] = collectives.reduce_scatter
all_reduce: Callable[..., Any] = collectives.all_reduce
FUNCTIONS = (all_gather, reduce_scatter, all_reduce)


@pytest.fixture(autouse=True)
def nothing_warned() -> None:
    forget_warnings()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1,), (3, 4), (0, 2), (2, 0)], ids=str)
def test_alone(group: str, function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    mesh = dist.init_device_mesh("cpu", (1,))
    for given in (None, group, mesh, dist.group.WORLD):
        out = function(x, given, strict=True)
        assert torch.equal(out, x) and (out.data_ptr() != x.data_ptr() or not x.numel())
    work = function(x, async_op=True)
    assert isinstance(work, Work) and work.is_completed() and torch.equal(work.wait(), x)
    receiver = torch.empty_like(x)
    assert function(x, out=receiver) is receiver and torch.equal(receiver, x)


def test_a_number_is_gathered_and_summed(group: str) -> None:
    x = torch.tensor(3.0)
    assert all_gather(x).tolist() == [3]
    assert all_reduce(x, op="avg").item() == 3
    with pytest.raises(agmm.InvalidArgument, match="x: found 0 dimensions, wanted at least 1"):
        reduce_scatter(x)


def test_numbers_that_are_negated_or_conjugated_later(group: str) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    for tensor in (x.conj(), torch._neg_view(x.real), x.imag):
        for options in ({}, {"out": torch.empty_like(tensor).clone()}):
            assert torch.equal(all_gather(tensor, **options), tensor.clone())


def test_gradients_may_be_had_and_the_output_changed_in_place(group: str) -> None:
    for function in FUNCTIONS:
        for dim in (0, 1):
            x = torch.ones(2, 3, requires_grad=True)
            out = function(x, **({} if function is all_reduce else {"dim": dim}))
            out.mul_(2)
            out.sum().backward()
            assert x.grad is not None and torch.equal(x.grad, torch.full((2, 3), 2.0))
    with torch.no_grad():
        assert not all_reduce(x).requires_grad


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (all_gather, {"x": None}, "x: found None, wanted a tensor"),
        (all_gather, {"dim": 2}, "dim: found 2, wanted -2 to 1"),
        (all_gather, {"dim": 0.5}, "dim: found 0.5, wanted an int"),
        (reduce_scatter, {"dim": -3}, "dim: found -3, wanted -2 to 1"),
        (reduce_scatter, {"op": "max"}, "op: found 'max', wanted 'sum' or 'avg'"),
        (all_reduce, {"op": dist.ReduceOp.SUM}, "op: found <RedOpType.SUM"),
        (
            all_reduce,
            {"op": "avg", "x": torch.ones(2, dtype=torch.int32)},
            "op: found 'avg' of torch.int32, wanted 'sum', or a floating-point",
        ),
        (all_reduce, {"out": torch.ones(3)}, "out: found shape (3,), wanted (4, 6)"),
        (all_gather, {"out": torch.ones(4, 6).double()}, "out: found dtype torch.float64, wanted"),
        (all_gather, {"out": torch.ones(4, 6, device="meta")}, "out: found device meta, wanted"),
        (
            all_gather,
            {"out": torch.ones(4, 6, requires_grad=True)},
            "out: found one with requires_grad=True",
        ),
        (
            all_reduce,
            {"x": torch.ones(4, 6, requires_grad=True), "async_op": True},
            "x: found requires_grad=True with async_op or out",
        ),
        (all_reduce, {"async_op": 1}, "async_op: found 1, wanted True or False"),
        (all_reduce, {"strict": 1}, "strict: found 1, wanted True or False"),
        (all_reduce, {"x": torch.eye(3).to_sparse()}, "x: found layout torch.sparse_coo"),
        (all_reduce, {"group": "nobody"}, "group: found 'nobody', wanted the name"),
    ],
    ids=short,
)
def test_bad_input_is_named(
    group: str, function: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    given = {"x": torch.ones(4, 6), "group": group} | arguments
    with pytest.raises(agmm.InvalidArgument, match=f"^{re.escape(message)}"):
        function(given.pop("x"), given.pop("group"), **given)


def test_a_size_that_the_ranks_cannot_share_is_named(group: str) -> None:
    op = torch.ops.agmm._reduce_scatter
    with pytest.raises(agmm.InvalidArgument, match="x: found 4 in dimension 0, wanted a multiple"):
        op(torch.ones(4, 6, device="meta"), group, 3, "sum", 0)


def test_a_graph_of_another_world_size_is_refused(group: str) -> None:
    for op, settings in (
        ("all_gather", (0,)),
        ("reduce_scatter", ("sum", 0)),
        ("all_reduce", ("sum",)),
    ):
        with pytest.raises(agmm.InvalidArgument, match="world_size: found 2 in the call, wanted 1"):
            getattr(torch.ops.agmm, f"_{op}")(torch.ones(4), group, 2, *settings)


def test_gradients_of_complex_numbers_are_refused(group: str) -> None:
    x = torch.ones(4, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(agmm.InvalidArgument, match=r"x: found dtype torch\.complex64 where"):
        all_gather(x)


def test_fake_tensors(group: str) -> None:
    with FakeTensorMode():
        x = torch.empty(4, 6, device="cuda", dtype=torch.bfloat16)
        op = torch.ops.agmm
        for out, shape in (
            (op._all_gather(x, group, 3, 1), (4, 18)),
            (op._reduce_scatter(x, group, 2, "avg", 0), (2, 6)),
            (op._all_reduce(x.t(), group, 2, "sum"), (6, 4)),
        ):
            assert (out.shape, out.device.type, out.dtype) == (shape, "cuda", torch.bfloat16)
            assert out.is_contiguous()


# From torch 2.14 on opcheck clones the arguments and reads .grad of the clones, which warns; torch
# hides that in a way that comes too late where warnings are errors.
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not:UserWarning")
@pytest.mark.parametrize("shape", [(6,), (2, 3, 4)], ids=str)
def test_opcheck(group: str, fresh_compiler: None, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    for op, settings in (
        ("all_gather", (len(shape) - 1,)),
        ("reduce_scatter", ("avg", 0)),
        ("all_reduce", ("sum",)),
    ):
        arguments = x, group, 1, *settings, True
        torch.library.opcheck(getattr(torch.ops.agmm, f"_{op}").default, arguments)


# --- the path ---


def ranks(world_size: int) -> Any:
    """A group of so many."""
    return mock.Mock(size=lambda: world_size)


def test_path_of_cpu_tensors() -> None:
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert (
                paths.choose(kind, torch.ones(2, dtype=dtype), ranks(4)).by == paths.SHARED_MEMORY
            )
    ints = torch.ones(2, dtype=torch.int64)
    assert paths.choose("all_gather", ints, ranks(4)).by == paths.SHARED_MEMORY
    path = paths.choose("all_reduce", ints, ranks(4))
    assert (path.by, path.is_choice) == (paths.TORCH, False)
    with pytest.warns(UserWarning, match=r"agmm leaves all_reduce to torch: x: dtype=torch.int64"):
        paths.leave_to_torch("all_reduce", path, False)
    paths.leave_to_torch("all_reduce", path, False)  # a warning would be an error
    with pytest.raises(
        agmm.Unsupported, match=r"int64, .*; strict=True refuses torch's collective"
    ):
        paths.leave_to_torch("all_reduce", path, True)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "why_group_unfused", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def on_cuda(nbytes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(nbytes // dtype.itemsize, device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "nbytes", "world_size", "method"),
    [
        ("all_reduce", 8 << 10, 8, "one_shot"),
        ("all_reduce", 64 << 10, 8, "one_shot"),
        ("all_reduce", 256 << 10, 8, "two_shot"),
        ("all_reduce", 256 << 10, 4, "one_shot"),
        ("all_reduce", 1 << 20, 4, "two_shot"),
        ("all_reduce", 10 << 20, 8, "blocks"),
        ("all_gather", 2 << 10, 8, "one_shot"),
        ("all_gather", 1 << 20, 8, "blocks"),
        ("reduce_scatter", 64 << 10, 8, "one_shot"),
        ("reduce_scatter", 8 << 20, 2, "blocks"),
    ],
)
def test_path_of_cuda_tensors(
    hopper: None, kind: Any, nbytes: int, world_size: int, method: Any
) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        path = paths.choose(kind, on_cuda(nbytes, dtype), ranks(world_size))
        assert path == paths.Path(paths.SYMMETRIC_MEMORY, "", False, method)


def test_much_is_torchs_choice_unless_it_is_refused(hopper: None) -> None:
    kinds: list[tuple[Kind, int]]
    kinds = [("all_reduce", (16 << 20) + 2), ("all_gather", (16 << 18) + 2)]
    for kind, nbytes in kinds:
        path = paths.choose(kind, on_cuda(nbytes), ranks(4))
        assert path.by == paths.TORCH and path.is_choice
        paths.leave_to_torch(kind, path, False)  # a warning would be an error
        assert paths.choose(kind, on_cuda(nbytes), ranks(4), strict=True).method == "blocks"


@pytest.mark.parametrize(
    ("kind", "dtype", "world_size", "reason"),
    [
        ("all_reduce", torch.int32, 4, "x: dtype=torch.int32, agmm's kernels sum bfloat16, float1"),
        ("reduce_scatter", torch.float64, 4, "x: dtype=torch.float64, agmm's kernels sum"),
        ("all_gather", torch.int32, 9, "group: 9 ranks, agmm's kernels serve at most 8"),
    ],
)
def test_what_no_kernel_serves_is_said(
    hopper: None, kind: Any, dtype: torch.dtype, world_size: int, reason: str
) -> None:
    path = paths.choose(kind, on_cuda(64, dtype), ranks(world_size))
    assert path.by == paths.TORCH and not path.is_choice and path.reason.startswith(reason)
    assert paths.choose("all_gather", on_cuda(64, dtype), ranks(8)).by == paths.SYMMETRIC_MEMORY


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "why_group_unfused", lambda *_: "no Hopper")
    assert paths.choose("all_gather", on_cuda(64), ranks(2)) == (
        paths.TORCH,
        "no Hopper",
        False,
        None,
    )
    with FakeTensorMode():
        assert paths.choose("all_gather", torch.empty(2, device="xpu"), ranks(2)).by == paths.TORCH


class _Called:
    """Stands in the place of torch.distributed's collectives and notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.waited = 0

    def begin(self, name: str) -> Callable[..., Any]:
        def function(*args: Any, async_op: bool) -> Any:
            assert async_op
            self.calls.append((name, *args))
            return self

        return function

    def wait(self) -> None:
        self.waited += 1

    def is_completed(self) -> bool:
        return self.waited > 0


@pytest.fixture
def of_four(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of 4 ranks, as rank 1 sees it, whose CUDA tensors are fake."""
    # Fake tensors have no addresses: each has one far from all others'.
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: id(self) << 40)
    known = mock.Mock(rank=1)
    known.lock = mock.MagicMock()
    monkeypatch.setattr(groups, "of", lambda group: known)
    monkeypatch.setattr(groups, "check_alive", lambda group: None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "nccl")
    group = mock.Mock()
    group.size.return_value = 4
    return group


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    found = mock.Mock()
    monkeypatch.setattr(small_collectives, "collectives_workspace", lambda group, device: found)
    monkeypatch.setattr(small_collectives, "group_facts", lambda group, device: GroupFacts(132))
    monkeypatch.setattr(small_collectives, "relays_of", lambda group, device: None)
    return found


def test_cuda_tensors_go_to_the_kernels(hopper: None, of_four: Any, workspace: mock.Mock) -> None:
    with FakeTensorMode():
        x = torch.empty(8, 3, device="cuda", dtype=torch.bfloat16)
        out = run.start("all_gather", x, of_four, None, Settings("sum", 0, strict=True))
        assert isinstance(out, torch.Tensor) and out.shape == (32, 3)
        (op, method, sent, target), options = workspace.call.call_args
        assert (op, method) == (CollectiveOp.all_gather, CollectiveMethod.one_shot)
        assert (sent.shape, target.shape, options) == ((24,), (96,), {"is_average": False})
        given = torch.empty(2, 3, device="cuda", dtype=torch.bfloat16)
        run.start("reduce_scatter", x, of_four, given, Settings("avg", 0, strict=True))
        (op, method, sent, target), options = workspace.call.call_args
        assert (op, method) == (CollectiveOp.reduce_scatter, CollectiveMethod.one_shot)
        assert (sent.shape, target.shape, options) == ((24,), (6,), {"is_average": True})
        large = torch.empty(1 << 19, device="cuda")
        run.start("all_reduce", large, of_four, large, Settings("sum", 0))
        op, method, sent, target = workspace.call.call_args.args
        assert (op, method) == (CollectiveOp.all_reduce, CollectiveMethod.blocks)


def test_links_that_may_tear_packets_carry_blocks(
    hopper: None, of_four: Any, workspace: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pcie = GroupFacts(132, peer_atomics=False)
    monkeypatch.setattr(small_collectives, "group_facts", lambda group, device: pcie)
    with FakeTensorMode():
        x = torch.empty(8, device="cuda")
        for is_async, call in ((False, workspace.call), (True, workspace.start)):
            run.start("all_reduce", x, of_four, None, Settings("sum", 0, is_async, strict=True))
            assert call.call_args.args[1] == CollectiveMethod.blocks


def test_a_call_in_the_background_is_awaited_once(
    hopper: None, of_four: Any, workspace: mock.Mock
) -> None:
    begun = workspace.start.return_value
    begun.is_done.return_value = False
    with FakeTensorMode():
        x = torch.empty(8, 3, device="cuda")
        work = run.start("all_reduce", x, of_four, None, Settings("avg", 0, True, True))
        assert isinstance(work, Work) and not work.is_completed() and not begun.wait.called
        assert work.wait() is work.wait() and work.is_completed()
    assert begun.wait.call_count == 1 and not workspace.call.called


def test_a_first_call_in_a_capture_is_left_to_torch(
    hopper: None, of_four: Any, workspace: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = _Called()
    for name in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, called.begin(name), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    workspace.is_ready = False
    with FakeTensorMode():
        x = torch.empty(8, device="cuda")

        def start(*, async_op: bool) -> None:
            run.start("all_gather", x, of_four, None, Settings("sum", 0, async_op))

        with pytest.warns(UserWarning, match="found none for collectives during CUDA graph"):
            start(async_op=False)
        start(async_op=True)
        assert len(called.calls) == 2 and not workspace.call.called
        workspace.is_ready = True
        start(async_op=False)
    assert len(called.calls) == 2 and workspace.call.call_count == 1


def test_low_contention_goes_by_copies_of_any_size(
    of_four: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go by copies on GPUs of any generation."""
    gathers, scatters = mock.Mock(), mock.Mock()
    monkeypatch.setattr(symmetric, "why_group_unfused", lambda *_: "no Hopper")
    monkeypatch.setattr(run, "gather_copies", lambda group, device: gathers)
    monkeypatch.setattr(run, "scatter_copies", lambda group, device: scatters)

    def start(kind: Kind, x: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        return run.start(kind, x, of_four, None, Settings(op, 0, async_op, True, True))

    with FakeTensorMode():
        for rows in (8, 1 << 24):
            x = torch.empty(rows, 3, device="cuda", dtype=torch.bfloat16)
            out = start("all_gather", x)
            assert isinstance(out, torch.Tensor) and out.shape == (4 * rows, 3)
            target, sent = gathers.all_gather.call_args.args
            assert (target.shape, sent.shape) == ((12 * rows,), (3 * rows,))
            start("reduce_scatter", x, "avg")
            (target, sent), options = scatters.reduce_scatter.call_args
            assert (target.shape, sent.shape) == ((3 * rows // 4,), (3 * rows,))
            assert options == {"average": True, "in_turn": True}
        work = start("all_gather", x, async_op=True)
        begun = gathers.start_all_gather.return_value
        assert isinstance(work, Work) and not begun.wait.called
        assert work.wait().shape == (4 * rows, 3) and begun.wait.call_count == 1
        start("reduce_scatter", x, async_op=True)
        assert scatters.start_reduce_scatter.call_args.kwargs == {"average": False}
        with pytest.raises(agmm.Unsupported, match="agmm's kernels sum"):
            start("reduce_scatter", x.double())
        gathers.all_gather.side_effect = agmm.Unsupported("group: found ranks on 2 hosts")
        with pytest.raises(agmm.Unsupported, match="found ranks on 2 hosts"):
            start("all_gather", x)


def test_low_contention_is_a_part_of_the_ops(group: str) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    for function in (all_gather, reduce_scatter):
        out = function(x, low_contention=True)
        assert torch.equal(out, x)
        out.sum().backward()
        assert torch.equal(function(x.detach(), out=torch.empty(4, 3), low_contention=True), x)
        with pytest.raises(agmm.InvalidArgument, match="low_contention: found 1, wanted True or"):
            function(x, low_contention=1)
    assert x.grad is not None and torch.equal(x.grad, torch.full((4, 3), 2.0))
    meta = torch.empty(4, 3, device="meta")
    assert torch.ops.agmm._all_gather(meta, group, 2, 0, False, True).shape == (8, 3)
    assert torch.ops.agmm._reduce_scatter(meta, group, 2, "sum", 0, False, True).shape == (2, 3)


def test_a_group_without_kernels_is_said_once(
    hopper: None, of_four: Any, workspace: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.call.side_effect = agmm.Unsupported("group: found ranks on 2 hosts, wanted one")
    called = _Called()
    monkeypatch.setattr(dist, "all_reduce", called.begin("all_reduce"))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "nccl")
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, _: self)  # nor is there a GPU to do it
    with FakeTensorMode():
        x = torch.empty(8, device="cuda")
        with pytest.warns(UserWarning, match="agmm leaves all_reduce to torch: group: found ranks"):
            run.start("all_reduce", x, of_four, None, Settings("sum", 0))
        run.start("all_reduce", x, of_four, None, Settings("sum", 0))
        assert [name for name, *_ in called.calls] == ["all_reduce"] * 2
        with pytest.raises(agmm.Unsupported, match="found ranks on 2 hosts"):
            run.start("all_reduce", x, of_four, None, Settings("sum", 0, strict=True))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:ucc"])
def test_cuda_tensors_go_to_the_backend(
    backend: str, of_four: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins of 4 ranks say which call has which sizes, and what is made of the result."""
    called = _Called()
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        monkeypatch.setattr(dist, name, called.begin(name), raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
    monkeypatch.setattr(paths, "MOST_BYTES", 0)
    monkeypatch.setattr(symmetric, "why_group_unfused", lambda *_: "no Hopper")
    changed: list[str] = []  # nor is there a GPU to do it

    def change(name: str) -> Callable[[torch.Tensor, Any], torch.Tensor]:
        def changes(tensor: torch.Tensor, _: Any) -> torch.Tensor:
            changed.append(name)
            return tensor

        return changes

    for name in ("copy_", "div_"):
        monkeypatch.setattr(torch.Tensor, name, change(name))
    group = of_four
    reduce_op = dist.ReduceOp.AVG if backend == "nccl" else dist.ReduceOp.SUM
    with FakeTensorMode():
        x = torch.empty(8, 3, device="cuda", dtype=torch.bfloat16)
        out = run.start("all_gather", x, group, None, Settings("sum", 0))
        assert isinstance(out, torch.Tensor) and out.shape == (32, 3)
        name, target, sent, of = called.calls.pop()
        assert (name, target.shape, sent.shape, of) == (
            "all_gather_single",
            (96,),
            (24,),
            group,
        )
        given = torch.empty(2, 3, device="cuda", dtype=torch.bfloat16)
        work = run.start("reduce_scatter", x, group, given, Settings("avg", 0, async_op=True))
        assert isinstance(work, Work) and called.waited == 1
        assert work.wait() is given and work.wait() is given and called.waited == 2
        name, target, sent, op, of = called.calls.pop()
        assert (name, target.shape, sent.shape) == ("reduce_scatter_single", (6,), (24,))
        assert op == reduce_op
        assert changed == ([] if backend == "nccl" else ["div_"])
        changed.clear()
        out = run.start("all_reduce", x, group, None, Settings("avg", 0))
        name, target, op, of = called.calls.pop()
        assert (name, target.shape, op) == ("all_reduce", (24,), reduce_op)
        assert changed == (["copy_"] if backend == "nccl" else ["copy_", "div_"])
        with pytest.raises(agmm.Unsupported):
            run.start("all_reduce", x, group, None, Settings("avg", 0, strict=True))
        assert called.calls == []
