"""Collectives by a kernel beside a matmul of few rows: where they are taken, without a GPU."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from steps_taken import planned
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import agmm
from agmm._core import CollectiveMethod, CollectiveOp
from agmm.errors import forget_warnings
from agmm.ops import (
    behind_gather,
    plain_all_reduce,
    plain_gather,
    scatter_plan,
    small_collectives,
)
from agmm.ops.pipeline import serve
from agmm.ops.plain_all_reduce import PlainAllReduce
from agmm.ops.plain_gather import PlainGather
from agmm.planning.plans import GATHERED, Plan
from agmm.planning.problems import KernelConfig
from agmm.planning.transports import SCATTER
from agmm.runtime import backends, collectives, cuda_calls, groups, identity, symmetric
from agmm.runtime.calls import Call
from agmm.runtime.group_gpus import GroupFacts

A, B = torch.randn(4, 8), torch.randn(8, 16)


@pytest.fixture(autouse=True)
def nothing_warned() -> None:
    forget_warnings()


# --- the gather before a matmul ---


@pytest.fixture
def gathers(group: str, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is gathered, of two ranks with the same shard."""
    taken: list[torch.Tensor] = []

    def gather(shard: torch.Tensor) -> torch.Tensor:
        taken.append(shard)
        return torch.cat([shard, shard])

    monkeypatch.setattr(small_collectives, "prepare_gather", lambda shard, group: gather)
    monkeypatch.setattr(PlainGather, "why_not_gathered", lambda _: None)
    return taken


def test_it_is_taken_where_it_is_asked_for(gathers: list[torch.Tensor]) -> None:
    whole, bias = torch.cat([A, A]), torch.randn(16)
    for _ in range(2):
        out = agmm.all_gather_matmul(A, B, config="gather", strict=True)
        assert torch.equal(out, whole @ B)
        found, outs = agmm.all_gather_matmul(
            A, [B, B], config="gather", return_A=True, bias=[None, bias]
        )
        assert torch.equal(found, whole) and torch.equal(outs[0], whole @ B)
        assert torch.equal(outs[1], torch.addmm(bias, whole, B))
    assert len(gathers) == 4
    deep = A.view(2, 2, 8)
    assert agmm.all_gather_matmul(deep, B, config="gather").shape == (4, 2, 16)


def test_it_is_taken_where_it_is_planned(gathers: list[torch.Tensor]) -> None:
    with planned(GATHERED, Plan("push")) as asked:
        for _ in range(3):
            assert agmm.all_gather_matmul(A, B).shape == (8, 16)
        assert len(gathers) == 3 and asked.call_count == 1  # the call is kept
        assert agmm.all_gather_matmul(A, B, strict=True).shape == (4, 16)  # fused, of one rank
        assert agmm.all_gather_matmul(A, B, config="unfused").shape == (4, 16)
    assert len(gathers) == 3


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that calls on a GPU would multiply by, for which torch's matmul stands in."""
    taken: list[Any] = []

    def ready(a: torch.Tensor, b: torch.Tensor, signals: None, pivot: int, kernel: Any) -> Any:
        assert a.shape[1] == 8 and signals is None
        taken.append(kernel.config)
        return lambda a, b, signals, bias: a @ b if bias is None else torch.addmm(bias, a, b)

    monkeypatch.setattr(cuda_calls, "ready_matmul", ready)
    monkeypatch.setattr(plain_gather, "plain_format", lambda *_: None)
    return taken


@pytest.mark.parametrize("is_asked", [True, False], ids=["asked for", "planned"])
def test_agmms_kernel_multiplies_behind_the_gather(
    gathers: list[torch.Tensor],
    multiplied: list[Any],
    is_asked: bool,
) -> None:
    """Each weight of a call with several has the fastest kernel by the model, unless one is named
    for all."""
    kernel = KernelConfig.parse("128x256x64_1x1_cooperative")
    other = KernelConfig.parse("64x128x64_1x1_pingpong")
    whole, bias = torch.cat([A, A]), B[0]
    config = f"{kernel.name}/gather" if is_asked else None
    instead = contextlib.nullcontext() if is_asked else planned(Plan("gather", kernel))
    with instead:
        for _ in range(2):
            assert torch.equal(agmm.all_gather_matmul(A, B, config=config), whole @ B)
        assert multiplied == [kernel.core]  # the call is kept
        by_model = mock.Mock(fused_plan=lambda problem: Plan("push", other))
        with mock.patch.object(behind_gather, "by_model", by_model):
            found, outs = agmm.all_gather_matmul(
                A, [B, B], config=config, return_A=True, bias=[None, bias]
            )
    assert torch.equal(found, whole) and torch.equal(outs[0], whole @ B)
    assert torch.equal(outs[1], torch.addmm(bias, whole, B))
    assert multiplied[1:] == [(kernel if is_asked else other).core] * 2 and len(gathers) == 3


def test_where_a_choice_cannot_be_the_call_is_fused_this_time(
    gathers: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainGather, "why_not_gathered", lambda _: "workspace: none")
    with planned(GATHERED), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(agmm.all_gather_matmul(A, B), A @ B)
    assert gathers == []
    monkeypatch.setattr(PlainGather, "why_not_gathered", lambda _: None)
    with planned(GATHERED):
        agmm.all_gather_matmul(A, B)
    assert len(gathers) == 1


def test_it_is_refused_on_the_cpu(group: str) -> None:
    reason = "config: gather was asked for on cpu, it wants cuda"
    with pytest.warns(UserWarning, match=f"takes the unfused path: {reason}"):
        assert torch.equal(agmm.all_gather_matmul(A, B, config="gather"), A @ B)
    with pytest.raises(agmm.Unsupported, match=reason):
        agmm.all_gather_matmul(A, B, config="gather", strict=True)


# --- where a kernel serves ---


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """The workspace of a group of 4 ranks."""
    found = mock.Mock(is_ready=False)
    monkeypatch.setattr(small_collectives, "collectives_workspace", lambda group, device: found)
    monkeypatch.setattr(small_collectives, "group_facts", lambda group, device: GroupFacts(132))
    monkeypatch.setattr(small_collectives, "relays_of", lambda group, device: None)
    monkeypatch.setattr(symmetric, "why_group_unfused", lambda *_: None)
    monkeypatch.setattr(collectives, "is_traced", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    return found


def on_cuda(numbers: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(numbers, device="cuda", dtype=dtype)


def test_what_no_kernel_serves(workspace: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    group, few = mock.Mock(), on_cuda(8)
    why_not = small_collectives.why_not
    assert why_not("all_reduce", few, group) is None
    assert "NCCL is taken" in str(why_not("all_reduce", on_cuda((8 << 20) + 1), group))
    assert why_not("all_gather", on_cuda(8 << 18), group) is None
    assert "NCCL is taken" in str(why_not("all_gather", on_cuda((8 << 18) + 1), group))
    assert "do not sum" in str(why_not("all_reduce", on_cuda(8, torch.float64), group))
    assert why_not("all_gather", on_cuda(8, torch.float64), group) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "found none for collectives" in str(why_not("all_reduce", few, group))
    workspace.is_ready = True
    assert why_not("all_reduce", few, group) is None
    monkeypatch.setattr(dist, "get_world_size", lambda group: 9)
    assert "9 ranks, NCCL is taken" in str(why_not("all_reduce", few, group))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(symmetric, "why_group_unfused", lambda *_: "no Hopper")
    assert why_not("all_reduce", few, group) == "no Hopper"


def test_what_the_links_allow(workspace: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links over relays and over PCIe allow less, by other methods."""
    group, x, out = mock.Mock(), on_cuda(64), on_cuda(64)

    def method() -> CollectiveMethod:
        small_collectives.call("all_reduce", "one_shot", x, out, group)
        found: CollectiveMethod = workspace.call.call_args.args[1]
        return found

    assert method() == CollectiveMethod.one_shot
    pcie = GroupFacts(132, peer_atomics=False)
    monkeypatch.setattr(small_collectives, "group_facts", lambda group, device: pcie)
    assert method() == CollectiveMethod.blocks
    assert not small_collectives.has_norm("one_shot", x, group)
    much = on_cuda(1 << 20)
    with pytest.raises(agmm.Unsupported, match="without NVLink"):
        small_collectives.call("all_reduce", "blocks", much, much, group)
    monkeypatch.setattr(small_collectives, "relays_of", lambda group, device: mock.Mock())
    assert method() == CollectiveMethod.relayed
    assert not small_collectives.has_norm("one_shot", x, group)
    for kind, sent in (("reduce_scatter", x), ("all_reduce", on_cuda(200_000))):
        with pytest.raises(agmm.Unsupported, match="some GPUs have no NVLink"):
            small_collectives.call(kind, "one_shot", sent, out, group)  # type: ignore[arg-type]


def test_a_small_product_is_summed_by_a_kernel(
    workspace: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_backend = mock.Mock()
    monkeypatch.setattr(collectives, "all_reduce", by_backend)
    group, call = mock.Mock(), Call("matmul_all_reduce")
    group.size.return_value = 4
    with FakeTensorMode():
        partial = torch.empty(64, 128, device="cuda", dtype=torch.bfloat16)
        assert small_collectives.all_reduced(partial, group, call) is partial
        arguments = workspace.call.call_args.args
        assert arguments == (
            CollectiveOp.all_reduce,
            CollectiveMethod.one_shot,
            partial,
            partial,
        )
        assert not by_backend.called
        workspace.call.side_effect = agmm.Unsupported("group: found ranks on 2 hosts")
        small_collectives.all_reduced(partial, group, call)
        assert by_backend.call_count == 1
        large = torch.empty(1 << 24, device="cuda", dtype=torch.bfloat16)
        small_collectives.all_reduced(large, group, call)
        assert by_backend.call_count == 2 and workspace.call.call_count == 2


def test_a_small_part_is_gathered_by_a_kernel(
    workspace: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_backend = mock.Mock()
    monkeypatch.setattr(collectives, "start_all_gather", by_backend)
    group, call = mock.Mock(), Call("matmul_all_reduce")
    with FakeTensorMode():
        part = torch.empty(16, 128, device="cuda", dtype=torch.bfloat16)
        assert small_collectives.all_gathered(part, group, call).shape == (64, 128)
        op, method, sent, out = workspace.call.call_args.args
        assert (op, method) == (CollectiveOp.all_gather, CollectiveMethod.one_shot)
        assert sent is part and out.shape == (64, 128) and not by_backend.called
        large = torch.empty(1 << 23, device="cuda", dtype=torch.bfloat16)
        small_collectives.all_gathered(large, group, call)
        assert by_backend.call_count == 1


def test_strict_gathers_a_part_of_any_size_by_a_kernel(
    workspace: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_backend = mock.Mock()
    monkeypatch.setattr(collectives, "start_all_gather", by_backend)
    group, call = mock.Mock(), Call("matmul_all_reduce")
    with FakeTensorMode():
        large = torch.empty(1 << 23, device="cuda", dtype=torch.bfloat16)
        found = small_collectives.all_gathered(large, group, call, strict=True)
        assert found.shape == (1 << 25,) and workspace.call.call_count == 1
        monkeypatch.setattr(symmetric, "why_group_unfused", lambda *_: "no Hopper")
        with pytest.raises(agmm.Unsupported, match="no Hopper"):
            small_collectives.all_gathered(large, group, call, strict=True)
        workspace.call.side_effect = agmm.Unsupported("group: found ranks on 2 hosts")
        monkeypatch.setattr(symmetric, "why_group_unfused", lambda *_: None)
        with pytest.raises(agmm.Unsupported, match="2 hosts"):
            small_collectives.all_gathered(large, group, call, strict=True)
    assert not by_backend.called


@pytest.mark.parametrize(("strict", "names"), [(True, ["ours"]), (False, ["backend"])])
def test_behind_a_scatter_strict_leaves_no_gather_to_the_backend(
    workspace: mock.Mock, monkeypatch: pytest.MonkeyPatch, strict: bool, names: list[str]
) -> None:
    """The rest of an all-reduce whose sums a kernel scatters, 32 MiB of them."""
    monkeypatch.setattr(scatter_plan, "why_not_native", lambda *_: None)
    kernel = KernelConfig.parse("128x128x64_1x1_pingpong")
    plan = scatter_plan.AllReducePlan(SCATTER, None, 132, kernel)
    monkeypatch.setattr(scatter_plan, "all_reduce_plan", lambda *_, **__: plan)
    called: list[str] = []

    def gathered(name: str) -> torch.Tensor:
        called.append(name)
        return torch.empty(4096, 1)

    summed = mock.Mock(side_effect=lambda As, *_: As[0].new_empty(1024, 4096))
    monkeypatch.setattr(plain_all_reduce, "call_with", lambda *_, **__: summed)
    monkeypatch.setattr(groups, "check_alive", lambda group: None)
    monkeypatch.setattr(groups, "of", lambda group: mock.MagicMock())
    group = mock.Mock(**{"size.return_value": 4})
    monkeypatch.setattr(
        small_collectives,
        "gather",
        lambda *_: gathered("ours"),
    )
    monkeypatch.setattr(
        collectives,
        "start_all_gather",
        lambda *_, **__: lambda: gathered("backend"),
    )
    with FakeTensorMode():
        A = torch.empty(4096, 8, device="cuda", dtype=torch.bfloat16)
        B = torch.empty(8, 4096, device="cuda", dtype=torch.bfloat16)
        assert len(serve(PlainAllReduce(A, B, None, group, strict))) == 4096
        assert called == names
        monkeypatch.setattr(symmetric, "why_group_unfused", lambda *_: "no Hopper")
        summed.reset_mock()
        if strict:
            with pytest.raises(agmm.Unsupported, match="no Hopper"):
                serve(PlainAllReduce(A, B, None, group, strict))
            assert not summed.called


# --- what is left to the group's backend ---


@pytest.mark.parametrize(
    ("config", "device", "refused"),
    [
        ("cuda:nccl", "cuda:1", None),
        ("cpu:gloo,cuda:nccl", "cuda:0", None),
        ("cpu:gloo,cuda:ucc", "cuda:0", None),
        ("cpu:fake,cuda:fake", "cuda:0", None),
        ("cpu:gloo,cuda:gloo", "cpu", None),
        ("cpu:gloo,cuda:gloo", "cuda:0", "gloo for tensors on cuda:0"),
        ("cpu:gloo", "cuda:3", "none for tensors on cuda:3"),
    ],
)
def test_a_backend_that_takes_no_gpus_tensors_is_named(
    monkeypatch: pytest.MonkeyPatch, config: str, device: str, refused: str | None
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group: Any = mock.Mock()
    if refused is None:
        backends.check_backend(group, torch.device(device))
        return
    with pytest.raises(agmm.InvalidArgument, match=f"^group: found backend {refused}, wanted"):
        backends.check_backend(group, torch.device(device))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_no_collective_of_gloo_is_begun_with_a_gpus_tensors(
    group: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever is left to the backend goes through these: unfused paths, backwards, layers."""
    begun = mock.Mock(side_effect=AssertionError("begun"))
    monkeypatch.setattr(collectives, "is_traced", lambda tensor: False)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        monkeypatch.setattr(torch.ops._c10d_functional, name, begun)
    with FakeTensorMode():
        x = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
        call = {
            "all_gather": lambda: collectives.start_all_gather(x, group, 0),
            "reduce_scatter": lambda: collectives.reduce_scatter(x, group, 0),
            "all_reduce": lambda: collectives.all_reduce(x, group),
        }[kind]
        with pytest.raises(agmm.InvalidArgument, match="group: found backend gloo for tensors on"):
            call()
    assert not begun.called


@pytest.mark.parametrize(
    ("placement", "size", "refused"),
    [(Shard(0), 2, True), (Partial(), 2, True), (Replicate(), 2, False), (Shard(0), 1, False)],
    ids=str,
)
def test_no_state_of_a_gpu_is_gathered_by_gloo(
    monkeypatch: pytest.MonkeyPatch, placement: Placement, size: int, refused: bool
) -> None:
    """State dicts and gradients are gathered by torch, whose collectives end the process there."""
    of_mesh: Any = mock.Mock(**{"size.return_value": size})
    monkeypatch.setattr(identity, "group_of_mesh", lambda mesh, dim: of_mesh)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
    state: Any = mock.Mock(placements=(placement,), device=torch.device("cuda:0"))
    if refused:
        with pytest.raises(agmm.InvalidArgument, match="group: found backend gloo for tensors on"):
            backends.whole_of(state)
    else:
        backends.whole_of(state)
    assert state.full_tensor.called != refused


def test_a_gather_without_memory_is_fused(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not left to the backend."""

    def refuse(*_: object) -> None:
        raise agmm.Unsupported("workspace: rank 0 could not get 1 bytes of GPU memory")

    monkeypatch.setattr(PlainGather, "why_not_gathered", lambda _: None)
    monkeypatch.setattr(small_collectives, "prepare_gather", refuse)
    unfused = mock.Mock(side_effect=AssertionError("by the backend"))
    monkeypatch.setattr(PlainGather, "by_library", unfused)
    A, B = torch.randn(4, 8), torch.randn(8, 3)
    with planned(GATHERED):
        torch.testing.assert_close(agmm.all_gather_matmul(A, B), A @ B)
    monkeypatch.undo()
