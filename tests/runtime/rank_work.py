"""What the tests run inside the ranks of a pool, which has five where nothing else is said."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import agmm
from agmm import _core
from agmm.collectives.paths import choose
from agmm.errors import AgmmError
from agmm.ops import fp8_operands, scatter_plan, small_collectives
from agmm.ops.gather import GatherSettings
from agmm.ops.plain_gather import PlainGather
from agmm.planning import built_kernels, call_plans
from agmm.planning.shapes import LocalShape
from agmm.runtime import cpu, cpu_gather, links, workspaces
from agmm.runtime.groups import Group
from agmm.testing.reference import allowed_error, gathered_product, relative_error

POOL_SIZE = 5

_groups: dict[int, dist.ProcessGroup] = {}
_workspaces: dict[tuple[int, int], cpu.CpuWorkspace] = {}


class PoisonedWorkspace(cpu.CpuWorkspace):
    poison = True


def group_of(world_size: int) -> dist.ProcessGroup | None:
    """The group of the pool's last `world_size` ranks, None in the other ranks. Collective.

    The last ones, so that ranks in the group differ from the global ones.
    """
    first = dist.get_world_size() - world_size
    if world_size not in _groups:
        _groups[world_size] = dist.new_group(list(range(first, first + world_size)))
    member = dist.get_rank() >= first
    return _groups[world_size] if member else None


def workspace_of(world_size: int, chunks_per_shard: int = 1) -> cpu.CpuWorkspace | None:
    """A workspace that lives as long as the pool, so that tests find it in any state."""
    # Makes torch fill what torch.empty returns with NaN.
    torch.use_deterministic_algorithms(True)
    group = group_of(world_size)
    if group is None:
        return None
    key = world_size, chunks_per_shard
    if key not in _workspaces:
        _workspaces[key] = PoisonedWorkspace.create(group, 64, chunks_per_shard=chunks_per_shard)
    return _workspaces[key]


def shm_names_of_this_process() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"agmm-{os.getpid()}-*")]


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def products(
    world_size: int,
    shapes: list[LocalShape],
    dtype: torch.dtype,
    *,
    chunks_per_shard: int = 1,
    return_A: bool = False,
    weights: int = 1,
    bias: bool = False,
    seed: int = 0,
) -> list[str] | None:
    """Faults found, in words; None in ranks that are not in the group."""
    workspace = workspace_of(world_size, chunks_per_shard)
    if workspace is None:
        return None
    faults = []
    for shape in shapes:
        seed += 1
        rows = slice(workspace.rank * shape.M_local, (workspace.rank + 1) * shape.M_local)
        A = _random((world_size * shape.M_local, shape.K), dtype, seed)
        own_seed = 1000 * seed + workspace.rank  # B and even N differ between ranks
        N = shape.N + workspace.rank
        Bs = [_random((shape.K, N + i), dtype, own_seed + 10 * i) for i in range(weights)]
        Bs = [B.t().contiguous().t() if i % 2 else B for i, B in enumerate(Bs)]
        biases = [_random((B.shape[1],), dtype, own_seed + 5) if bias else None for B in Bs]
        shard = A[rows].clone()
        gathered, outs = workspace.all_gather_matmul(shard, Bs, list(biases), return_A=return_A)
        shard.fill_(torch.nan)
        label = f"{shape} {dtype} on rank {workspace.rank} of {world_size}"
        if (gathered is None) == return_A:
            faults.append(f"{label}: A is {gathered}")
        if gathered is not None and not torch.equal(gathered, A):
            faults.append(f"{label}: A differs")
        for B, b, out in zip(Bs, biases, outs, strict=True):
            reference = gathered_product(A, B, b)
            plain = A @ B if b is None else torch.addmm(b, A, B)
            error = relative_error(out, reference)
            allowed = allowed_error(relative_error(plain, reference))
            if not error <= allowed or out.dtype != dtype:
                faults.append(f"{label}: error {error}, allowed {allowed}, {out.dtype}")
    return faults


def _exact_step(
    workspace: cpu.CpuWorkspace, step: int, m_local: int, shard: torch.Tensor, return_A: bool
) -> str | None:
    """One call with small whole numbers, whose product is exact; the fault found or None."""
    world_size, k = workspace.world_size, shard.shape[1]
    generator = torch.Generator().manual_seed(step)
    A = torch.randint(-8, 9, (world_size * m_local, k), generator=generator).float()
    B = torch.randint(-8, 9, (k, 9), generator=generator).float()
    shard[:] = A[workspace.rank * m_local : (workspace.rank + 1) * m_local]
    gathered, (out,) = workspace.all_gather_matmul(shard, [B], [None], return_A=return_A)
    shard.fill_(torch.nan)
    if not torch.equal(out, A @ B):
        return f"call {step} on rank {workspace.rank}: out differs"
    if gathered is not None and not torch.equal(gathered, A):
        return f"call {step} on rank {workspace.rank}: A differs"
    return None


def delayed_calls(
    world_size: int, calls: int, chunks_per_shard: int, delay_us: int
) -> list[str] | None:
    """`calls` calls for each rank in turn whose pushes, and then whose matmuls, come late."""
    workspace = workspace_of(world_size, chunks_per_shard)
    if workspace is None:
        return None
    faults: list[str | None] = []
    shard = torch.empty(7, 33)
    draw = random.Random(workspace.rank)
    try:
        for slow in range(world_size):
            is_slow = workspace.rank == slow
            workspace.set_push_delay_us(delay_us if is_slow else 0)
            for step in range(calls):
                seed = slow * calls + step
                faults.append(_exact_step(workspace, seed, 7, shard, return_A=step % 3 == 0))
                if is_slow and step % 4 == 0:
                    time.sleep(draw.random() * delay_us * 1e-6)
    finally:
        workspace.set_push_delay_us(0)
    return [fault for fault in faults if fault is not None]


def two_groups_at_once(calls: int) -> list[str]:
    """Two groups with ranks in common, each driven by a thread of its own."""
    faults: list[str | None] = []

    def work(workspace: cpu.CpuWorkspace, m_local: int) -> None:
        shard = torch.empty(m_local, 21)
        try:
            for step in range(calls):
                faults.append(_exact_step(workspace, m_local + step, m_local, shard, False))
        except BaseException as e:
            faults.append(repr(e))

    pairs = [(workspace_of(5), 3), (workspace_of(3), 4)]
    threads = [
        threading.Thread(target=work, args=(workspace, m_local))
        for workspace, m_local in pairs
        if workspace is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [fault for fault in faults if fault is not None]


def mixed_sequence(world_size: int, seed: int, calls: int) -> tuple[list[str], list[int]] | None:
    """Random shapes, dtypes and options on one fresh workspace; faults and the slot sizes seen."""
    group = group_of(world_size)
    if group is None:
        return None
    torch.use_deterministic_algorithms(True)
    key = world_size, 1
    before = _workspaces.get(key)
    workspace = _workspaces[key] = PoisonedWorkspace.create(group, 16)
    draw = random.Random(seed)
    faults: list[str] = []
    sizes = [workspace.slot_bytes]
    try:
        for step in range(calls):
            shape = LocalShape(
                draw.randint(1, 4 + 2 * step), draw.randint(1, 40), draw.randint(1, 100)
            )
            faults += (
                products(
                    world_size,
                    [shape],
                    draw.choice([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
                    return_A=draw.random() < 0.5,
                    weights=draw.randint(1, 3),
                    bias=draw.random() < 0.5,
                    seed=100 * step,
                )
                or []
            )
            sizes.append(workspace.slot_bytes)
    finally:
        workspace.close()
        del _workspaces[key]
        if before is not None:
            _workspaces[key] = before
    return faults, sizes


def timeline_of_a_call(world_size: int, chunks_per_shard: int) -> list[dict[str, int]] | None:
    workspace = workspace_of(world_size, chunks_per_shard)
    if workspace is None:
        return None
    timeline: list[dict[str, int]] = []
    before_ns = time.monotonic_ns()
    workspace.all_gather_matmul(
        torch.ones(8, 16), [torch.ones(16, 16)], [None], return_A=False, timeline=timeline
    )
    after_ns = time.monotonic_ns()
    assert all(before_ns <= entry["start_ns"] <= entry["end_ns"] <= after_ns for entry in timeline)
    return [{"rank": workspace.rank, **entry} for entry in timeline]


def names_left_after_create() -> list[str]:
    group = group_of(POOL_SIZE)
    assert group is not None
    workspace = cpu.CpuWorkspace.create(group, 4096)
    left = shm_names_of_this_process()
    workspace.close()
    return left


def create_with_differing_sizes() -> int:
    group = group_of(POOL_SIZE)
    assert group is not None
    workspace = cpu.CpuWorkspace.create(group, 1000 + dist.get_rank())
    workspace.close()
    return workspace.slot_bytes


def _raise(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def create_where_one_fails(fails: int, step: str, error: Exception) -> tuple[str, list[str], bool]:
    """Rank `fails` fails in a step of making its workspace: the error of each rank, what is left in
    /dev/shm, and whether all can make one afterwards."""
    group = group_of(POOL_SIZE)
    assert group is not None
    place: object = _core if step == "CpuWorkspace" else _core.CpuWorkspace
    said = ""
    try:
        if dist.get_rank() == fails:
            with mock.patch.object(place, step, _raise(error)):
                cpu.CpuWorkspace.create(group, 4096)
        else:
            cpu.CpuWorkspace.create(group, 4096)
    except AgmmError as e:
        said = f"{type(e).__name__}: {e}"
    left = shm_names_of_this_process()
    cpu.CpuWorkspace.create(group, 4096).close()
    return said, left, shm_names_of_this_process() == []


def killed_while_growing(rank: int, topic: str) -> None:
    """A rank is killed when it is about to tell the others something of its larger slots."""
    agmm.reserve(None, 1 << 10)
    exchange = Group.exchange

    def killed(self: Group, said: str, value: str) -> list[str]:
        if dist.get_rank() == rank and said == topic:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(self, said, value)

    with mock.patch.object(Group, "exchange", killed):
        agmm.reserve(None, 32 << 20)


def plans_of_two_kinds_of_gpu(kinds: list[tuple[str, int]]) -> dict[str, object]:
    """What this rank, with a GPU of its own kind, plans by: problems and tables."""
    group, device = dist.group.WORLD, torch.device("cuda", 0)
    assert group is not None
    properties = mock.Mock(multi_processor_count=kinds[dist.get_rank()][1])
    properties.name = kinds[dist.get_rank()][0]
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(links, "uuid", return_value=f"GPU-{dist.get_rank()}"),
        mock.patch.object(links, "why_no_atomics", return_value=None),
    ):
        problems = [
            call_plans.problem_of(
                (64, 64, 64), torch.bfloat16, device, group=group, has_all_sms=all_sms
            )
            for all_sms in (False, True)
        ]
        scaled = call_plans.problem_of((64, 64, 64), "e4m3 fast", device, group=group)
        planner = call_plans.planner(group, device)
    tables = [table.name for table in planner.tables]
    return {"problems": [*problems, scaled], "tables": tables}


def reasons_of_a_group_with_one_hopper(other: tuple[int, int]) -> dict[str, str | None]:
    """Why no kernel serves a call on a GPU, by who is asked; rank 0 alone has a Hopper, the others
    GPUs of that compute capability. Each asks in a group of its own, whose first call it is."""
    own = (9, 0) if dist.get_rank() == 0 else other
    with FakeTensorMode():
        x = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda:0")
    asks: dict[str, Callable[[dist.ProcessGroup], str | None]] = {
        "gather": lambda group: PlainGather(
            x, [x], [None], group, GatherSettings()
        ).why_not_fused(),
        "scatter": lambda group: scatter_plan.why_not_native([x], [x], 0, group),
        "fp8": lambda group: fp8_operands.why_unfused(x.device, group),
        "reserve": lambda group: _refusal(lambda: agmm.reserve(group, 8, device="cuda:0")),
        "part of an op": lambda group: small_collectives.why_not("all_reduce", x, group),
        "collective": lambda group: choose("all_gather", x, group).reason or None,
        "reserve for collectives": lambda group: _refusal(
            lambda: agmm.reserve(group, 8, device="cuda:0", op="all_gather")
        ),
    }
    found = {}
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=own),
        mock.patch.object(_core, "cuda_built", True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(workspaces, "collectives_workspace"),
        mock.patch.object(built_kernels, "has_fp8", return_value=True),
    ):
        for name, ask in asks.items():
            group = dist.new_group([0, 1])
            assert isinstance(group, dist.ProcessGroup)
            found[name] = ask(group)
            assert ask(group) == found[name]
    return found


def _refusal(call: Callable[[], None]) -> str | None:
    try:
        call()
    except agmm.Unsupported as error:
        return str(error)
    return None


def use_after_close() -> str:
    group = group_of(POOL_SIZE)
    assert group is not None
    workspace = cpu.CpuWorkspace.create(group, 4096)
    workspace.close()
    workspace.close()
    try:
        workspace.all_gather_matmul(torch.ones(1, 1), [torch.ones(1, 1)], [None], return_A=False)
    except AgmmError as e:
        return str(e)
    return ""


def use_after_failed_product() -> tuple[str, list[float]]:
    """A multiplication that fails on every rank, and what the next call returns."""
    group = group_of(POOL_SIZE)
    assert group is not None
    workspace = cpu.CpuWorkspace.create(group, 4096)
    error = ""
    shard = torch.full((1, 2), float(dist.get_rank()))
    try:
        workspace.all_gather_matmul(shard, [torch.ones(3, 1)], [None], return_A=False)
    except RuntimeError as e:
        error = str(e)
    _, (out,) = workspace.all_gather_matmul(shard, [torch.ones(2, 1)], [None], return_A=False)
    workspace.close()
    return error, out.view(-1).tolist()


def use_after_interruption() -> tuple[str, str]:
    """A call that Ctrl-C ends half-way on every rank, and what the next call says."""
    group = group_of(POOL_SIZE)
    assert group is not None
    workspace = cpu.CpuWorkspace.create(group, 4096)
    shard, B = torch.ones(1, 2), torch.ones(2, 1)
    errors = []
    for effect in (KeyboardInterrupt, None):
        try:
            with mock.patch.object(cpu_gather, "multiply", side_effect=effect):
                workspace.all_gather_matmul(shard, [B], [None], return_A=False)
        except (KeyboardInterrupt, RuntimeError) as e:
            errors.append(repr(e))
    workspace.close()
    return errors[0], errors[1]


def call_forever() -> None:
    """Calls without end in the default group, for a rank to be killed in the middle."""
    group = dist.group.WORLD
    assert group is not None
    workspace = cpu.CpuWorkspace.create(group, 4096)
    shard, B = torch.ones(4, 64), torch.ones(64, 4)
    while True:
        workspace.all_gather_matmul(shard, [B], [None], return_A=False)


def call_with_own_shape(slot_bytes: int, rows: list[int], return_A: list[bool]) -> None:
    """A good call, then one for which each rank has its own idea of M_local and return_A."""
    group = dist.group.WORLD
    assert group is not None
    workspace = cpu.CpuWorkspace.create(group, slot_bytes)
    B = torch.ones(4, 2)
    workspace.all_gather_matmul(torch.ones(1, 4), [B], [None], return_A=False)
    rank = dist.get_rank()
    workspace.all_gather_matmul(torch.ones(rows[rank], 4), [B], [None], return_A=return_A[rank])


def own_rank() -> int:
    return dist.get_rank()


def environment_value(name: str) -> str | None:
    return os.environ.get(name)


def echo(value: torch.Tensor, *, factor: int) -> torch.Tensor:
    return value * factor + dist.get_rank()


def raise_in(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("a fault on purpose")


def exit_in(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os.write(2, b"last words\n")
        os._exit(code)
    time.sleep(60)


def sleep_in(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)
