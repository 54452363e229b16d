"""What the tests of FSDP2 run inside the ranks of a pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_groups import dp_tp_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from agmm.errors import InvalidArgument, Unsupported
from agmm.integrations import fsdp
from agmm.nn import ColumnParallelLinear, RowParallelLinear
from agmm.runtime import copies, workspaces

WIDTH = 24


@cache
def _alone() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))["one"]


class Block(torch.nn.Module):
    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=dtype)
        self.scale = torch.nn.Parameter(torch.ones(7, dtype=dtype))  # some ranks have less of it
        if mesh.size() == 1:
            self.up: torch.nn.Module = torch.nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
            self.down: torch.nn.Module = torch.nn.Linear(3 * WIDTH, WIDTH, dtype=dtype)
        else:
            self.up = ColumnParallelLinear(WIDTH, 3 * WIDTH, device_mesh=mesh, dtype=dtype)
            self.down = RowParallelLinear(3 * WIDTH, WIDTH, device_mesh=mesh, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale.mean()
        return out


def _model(
    mesh: DeviceMesh, dtype: torch.dtype, mixed: bool, reshard: bool, replicas: bool = False
) -> torch.nn.Module:
    """``replicas``: the mesh's first dimension is of replicas, the second of shards; no tp."""
    tp = _alone() if replicas else mesh["tp"]
    torch.manual_seed(17 + tp.get_local_rank())
    model = torch.nn.Sequential(*(Block(tp, dtype) for _ in range(3)))
    sharding = mesh if replicas else mesh["dp"]
    policy = MixedPrecisionPolicy()
    if mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mesh=sharding, mp_policy=policy, reshard_after_forward=reshard)
    return model


def _train(model: torch.nn.Module, dtype: torch.dtype, steps: int) -> list[Any]:
    """The parameters of this rank after each step, and the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for step in range(steps):
        torch.manual_seed(1000 + step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(8, WIDTH, dtype=dtype)
        optimizer.zero_grad()
        loss = (model(x) - x.flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        locals_ = [p.detach().to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        found.append([loss.detach(), *locals_])
    return found


class SharedSlots:
    """Slots of CPU ranks, in files that all of them map."""

    def __init__(self, group: dist.ProcessGroup, count: int, slot_bytes: int) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ring: Sequence[int] = range(self.world_size)
        self._group = group
        word = [torch.initial_seed() if self.rank == 0 else 0, id(self)]
        dist.broadcast_object_list(word, group=group, group_src=0)
        paths = [
            Path(f"/dev/shm/agmm-test-{word[0]}-{word[1]}-{r}") for r in range(self.world_size)
        ]
        paths[self.rank].write_bytes(b"\x7f" * (count * slot_bytes))
        dist.barrier(group)
        self._slots = [
            torch.from_file(str(path), shared=True, size=count * slot_bytes, dtype=torch.uint8)
            for path in paths
        ]
        self._slots = [slots.view(count, slot_bytes) for slots in self._slots]
        dist.barrier(group)
        paths[self.rank].unlink()

    def of(self, rank: int) -> torch.Tensor:
        return self._slots[rank]

    def barrier(self) -> None:
        dist.barrier(self._group)


class StandIn:
    """The workspace of a group whose ranks are on CPUs."""

    calls = 0

    def __init__(self, group: dist.ProcessGroup, slot_bytes: int) -> None:
        self._gathers = SharedSlots(group, 2, slot_bytes)
        self._scatters = SharedSlots(group, dist.get_world_size(group), slot_bytes)
        self._turn = 0

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        StandIn.calls += 1
        self._turn = copies.all_gather(self._gathers, out, shard, self._turn)

    def reduce_scatter(self, out: torch.Tensor, parts: torch.Tensor, *, average: bool) -> None:
        StandIn.calls += 1
        copies.reduce_scatter(self._scatters, out, parts, average=average)


@contextmanager
def by_copies(slot_bytes: int) -> Iterator[None]:
    """What GPUs do, on CPU ranks: through slots of that size."""
    made: dict[Any, StandIn] = {}

    def workspace(group: dist.ProcessGroup, device: torch.device) -> StandIn:
        if group not in made:
            made[group] = StandIn(group, slot_bytes)
        return made[group]

    with ExitStack() as stack:
        for name in ("gather_copies", "scatter_copies"):
            stack.enter_context(mock.patch.object(workspaces, name, workspace))
        stack.enter_context(mock.patch.object(fsdp, "goes_by_copies", return_value=True))
        yield


def trains(
    dp: int,
    tp: int,
    dtype: torch.dtype,
    *,
    mixed: bool = False,
    reshard: bool = True,
    asyn: bool = False,
    replicas: bool = False,
    slot_bytes: int = 0,
) -> list[str]:
    """Faults found, in words: what training gives that is not what torch's collectives give."""
    mesh = dp_tp_mesh(dp, tp)
    wanted = _train(_model(mesh, dtype, mixed, reshard, replicas), dtype, 3)
    model = _model(mesh, dtype, mixed, reshard, replicas)
    fsdp.enable(model)
    if asyn:
        model._set_unshard_async_op(True)  # type: ignore[operator]
    StandIn.calls = 0
    met: list[str] = []
    meet = workspaces.meet

    def noted(group: dist.ProcessGroup, what: str, call: Any) -> None:
        met.append(what)
        meet(group, what, call)

    with warnings.catch_warnings(), mock.patch.object(workspaces, "meet", noted):
        warnings.simplefilter("error")
        if slot_bytes:
            with by_copies(slot_bytes):
                found = _train(model, dtype, 3)
        else:
            found = _train(model, dtype, 3)
    faults = []
    # Three blocks and three steps: gathers forward and backward, reduce-scatters.
    calls, least = (StandIn.calls, 18) if slot_bytes else (len(met), 18)
    if calls < least:
        faults.append(f"{calls} collectives went through agmm")
    for step, (a, b) in enumerate(zip(wanted, found, strict=True)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            # With two ranks there is one order of a sum.
            same = (
                torch.equal(x, y) if not slot_bytes or dp == 2 else torch.allclose(x, y, 1e-3, 1e-5)
            )
            if not same:
                faults.append(f"step {step}, tensor {i}: {(x - y).abs().max()} apart")
    return faults


def turned_off_and_on() -> list[str]:
    """What modules have after each of these."""
    mesh = dp_tp_mesh(dist.get_world_size(), 1)
    model = _model(mesh, torch.float32, False, True)

    def kinds() -> str:
        found = {
            (type(each._all_gather_comm).__name__, type(each._reduce_scatter_comm).__name__)
            for module in model.modules()
            if isinstance(module, FSDPModule)
            for each in fsdp.param_groups(module)
        }
        return " ".join(f"{a}/{b}" for a, b in sorted(found))

    seen = [kinds()]
    for turn in (fsdp.enable, fsdp.enable, fsdp.disable, fsdp.disable, fsdp.enable):
        turn(model)
        seen.append(kinds())
    return seen


def refusals() -> list[str]:
    """What `enable` and `disable` say."""
    mesh = dp_tp_mesh(dist.get_world_size(), 1)
    said = []

    def errors(call: Callable[[], object]) -> None:
        try:
            call()
            said.append("")
        except (InvalidArgument, Unsupported) as error:
            said.append(f"{type(error).__name__}: {error}")

    errors(lambda: fsdp.enable(torch.nn.Linear(2, 2)))
    errors(lambda: fsdp.disable(torch.nn.Linear(2, 2)))
    model = _model(mesh, torch.float32, False, True)
    inner: Any = model.get_submodule("2")
    inner.set_allocate_memory_from_process_group_for_comm(True)
    errors(lambda: fsdp.enable(model))
    first = fsdp.param_groups(model.get_submodule("0"))[0]  # type: ignore[arg-type]
    said.append(type(first._all_gather_comm).__name__)
    return said


def several_meshes() -> list[str]:
    """What `enable` says of a module that torch takes no custom collectives for."""
    mesh = dp_tp_mesh(dist.get_world_size(), 1)
    model = _model(mesh, torch.float32, False, True)
    param_groups = fsdp.param_groups
    odd = model.get_submodule("1")
    said = []

    def twice(module: Any) -> list[Any]:
        return param_groups(module) * (2 if module is odd else 1)

    def kinds() -> str:
        found = [param_groups(module)[0] for module in model.children()]  # type: ignore[arg-type]
        return " ".join(type(each._all_gather_comm).__name__ for each in found)

    with mock.patch.object(fsdp, "param_groups", twice):
        try:
            fsdp.enable(model, strict=True)
        except Unsupported as error:
            said += [str(error), kinds()]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            fsdp.enable(model)
        said += [*(str(warning.message) for warning in found), kinds()]
    return said


def fallbacks() -> list[str]:
    """Warnings and errors where copy engines cannot serve."""
    group = dist.group.WORLD
    assert group is not None
    size = dist.get_world_size()
    reason = "group: cuda:0 has no peer access to cuda:1"
    refuse = mock.Mock(side_effect=Unsupported(reason))
    out, shard = torch.zeros(2 * size), torch.full((2,), 1.0 + dist.get_rank())
    part, parts = torch.zeros(2), torch.arange(2.0 * size)
    said = []
    model = _model(dp_tp_mesh(size, 1), torch.float32, False, True)
    fsdp.enable(model)
    with (
        mock.patch.object(workspaces, "gather_copies", refuse),
        mock.patch.object(workspaces, "scatter_copies", refuse),
        mock.patch.object(fsdp, "goes_by_copies", return_value=True),
    ):
        gather, scatter = fsdp.AllGather(), fsdp.ReduceScatter()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            _train(model, torch.float32, 2)
            for _ in range(3):
                gather(out, shard, group)
                scatter(part, parts, group, dist.ReduceOp.SUM)
            made: Any = dist.ReduceOp.PREMUL_SUM  # which torch 2.11 does not let one call
            premul = made(0.5) if callable(made) else dist._make_nccl_premul_sum(0.5)
            with mock.patch.object(fsdp, "by_backend_reduce_scatter") as backend:
                scatter(part, parts, group, premul)
                scatter(part.long(), parts.long(), group, dist.ReduceOp.SUM)
            assert backend.call_count == 2
        said += [str(warning.message) for warning in found]
        for strict in (fsdp.AllGather(strict=True), fsdp.ReduceScatter(strict=True)):
            try:
                if isinstance(strict, fsdp.AllGather):
                    strict(out, shard, group)
                else:
                    strict(part, parts, group, dist.ReduceOp.SUM)
            except Unsupported as error:
                said.append(f"strict: {error}")
    assert torch.equal(out, torch.arange(1.0, size + 1).repeat_interleave(2))
    assert torch.equal(part, parts.view(size, 2)[dist.get_rank()] * size)
    return said
