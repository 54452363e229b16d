"""What the tests of `agmm.collectives` run inside the ranks of a pool."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import rank_work
import torch
import torch.distributed as dist
from autograd_work import _AllParts, _in_step, _leaf, _OwnPart
from rank_groups import fresh_group
from scatter_work import _FaultyCore

import agmm
from agmm.collectives import paths
from agmm.errors import forget_warnings
from agmm.runtime import cpu_collectives
from agmm.runtime.workspaces import cpu_workspace

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_DRAWN = 1_000_003
"""This many numbers are drawn and then repeated, since to draw 64 MB for each rank takes longer
than the calls. It is a prime, so that no band or piece has the numbers of another."""
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def group_of(world_size: int) -> dist.ProcessGroup | None:
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    return rank_work.group_of(world_size)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)
    )


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    alike = found.shape == wanted.shape and found.dtype == wanted.dtype
    return alike and torch.equal(bits(found), bits(wanted))


def inputs(
    kind: str, shape: tuple[int, ...], world_size: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    """The tensor of each rank. ``shape`` is that of a shard, so a sum that is scattered is larger
    along ``dim``."""
    sizes = list(shape)
    if kind == "reduce_scatter":
        sizes[dim] *= world_size
    found, count = [], math.prod(sizes)
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        drawn = (min(count, _DRAWN),)
        if dtype.is_floating_point:
            x = torch.randn(drawn, generator=generator, dtype=torch.float64).to(dtype)
        else:
            x = torch.randint(-9, 9, drawn, generator=generator).to(dtype)
        x = x.repeat(-(-count // _DRAWN))[:count] if count > _DRAWN else x
        found.append(x.view(sizes))
    return found


def wanted_of(kind: str, every: list[torch.Tensor], op: str, dim: int, rank: int) -> torch.Tensor:
    """The result by the definition: summed in the order of the ranks, in float32, and rounded
    once."""
    if kind == "all_gather":
        return torch.cat([x.reshape(1) if x.dim() == 0 else x for x in every], dim)
    total = every[0].to(_WIDE.get(every[0].dtype, every[0].dtype))
    for x in every[1:]:
        total = total + x
    total = total / len(every) if op == "avg" else total
    total = total.to(every[0].dtype)
    return total.chunk(len(every), dim)[rank] if kind == "reduce_scatter" else total


def call(kind: str, x: torch.Tensor, group: Any, op: str, dim: int, **options: Any) -> Any:
    if kind == "all_gather":
        return agmm.collectives.all_gather(x, group, dim=dim, **options)
    if kind == "reduce_scatter":
        return agmm.collectives.reduce_scatter(x, group, op=op, dim=dim, **options)
    return agmm.collectives.all_reduce(x, group, op=op, **options)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as every second number of some memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous, one number behind the begin of its memory."""
    memory = tensor.new_zeros(tensor.numel() + 1)
    memory[1:] = tensor.reshape(-1)
    return memory[1:].view(tensor.shape)


LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [torch.clone, strided, unaligned]


def values(
    world_size: int,
    kind: str,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    ops: tuple[str, ...] = ("sum", "avg"),
) -> list[str] | None:
    """Faults found, in words: new results, given ones, in place, and in the background."""
    group = group_of(world_size)
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for seed, (shape, op) in enumerate(itertools.product(shapes, ops)):
        for dim in range(max(1, len(shape))) if kind != "all_reduce" else (0,):
            if kind == "reduce_scatter" and not shape:
                continue
            every = inputs(kind, shape, world_size, dim, dtype, seed)
            wanted = wanted_of(kind, every, op, dim, rank)
            x = LAYOUTS[seed % 3](every[rank])
            label = f"{kind} {op} {shape} {dtype} along {dim} on rank {rank} of {world_size}"

            outs: dict[str, torch.Tensor] = {}
            out = call(kind, x, group, op, dim, strict=True)
            outs["new"] = out
            if not out.is_contiguous() or out._is_view():
                faults.append(f"{label}: strides {out.stride()}")
            work = call(kind, x, group, op, dim, strict=True, async_op=True)
            for layout in LAYOUTS:
                given = layout(torch.full_like(wanted, 3))
                found = call(kind, x, group, op, dim, strict=True, out=given)
                outs[layout.__name__] = given
                if found is not given:
                    faults.append(f"{label}: {found} is not out")
            outs["begun before"] = work.wait()
            if not work.is_completed() or work.wait() is not work.wait():
                faults.append(f"{label}: a handle that has ended")
            if kind == "all_reduce":
                call(kind, x, group, op, dim, strict=True, out=x)
                outs["in place"] = x
            elif kind == "all_gather" and dim == 0:
                whole = torch.full_like(wanted, 3)
                part = whole.view(world_size, *shape)[rank]
                part.copy_(every[rank])
                call(kind, part, group, op, dim, strict=True, out=whole)
                outs["in place"] = whole
            elif dim == 0:
                whole = every[rank].clone()
                part = whole.view(world_size, -1)[rank].view(wanted.shape)
                call(kind, whole, group, op, dim, strict=True, out=part)
                outs["in place"] = part
            for what, out in outs.items():
                if not same(out, wanted):
                    faults.append(f"{label}: {what}: {out.shape} {out.dtype} differs")
            faults += _overlapping(kind, every[rank], group, op, dim, wanted, label)
    return faults


def _overlapping(
    kind: str, x: torch.Tensor, group: Any, op: str, dim: int, wanted: torch.Tensor, label: str
) -> list[str]:
    """A result that is written over what is sent, at another place."""
    memory = x.new_zeros(x.numel() + wanted.numel() + 1)
    at = min(x.numel(), 1)
    memory[at : at + x.numel()] = x.reshape(-1)
    given = memory[at : at + x.numel()].view(x.shape)
    out = memory[: wanted.numel()].view(wanted.shape)
    call(kind, given, group, op, dim, strict=True, out=out)
    return [] if same(out, wanted) else [f"{label}: over what is sent: differs"]


def of_bytes(
    world_size: int, kind: str, nbytes: int, dtype: torch.dtype, op: str
) -> tuple[bool, int] | None:
    """Whether a call of 1-D tensors is right, twice with the same bits; and the slots after it."""
    group = group_of(world_size)
    if group is None:
        return None
    rank, n = dist.get_rank(group), nbytes // dtype.itemsize
    if kind == "reduce_scatter":
        n //= world_size
    agmm.release(group)
    x = inputs(kind, (n,), world_size, 0, dtype)
    wanted = wanted_of(kind, x, op, 0, rank)
    own = x[rank]
    del x
    first = call(kind, own, group, op, 0, strict=True)
    again = call(kind, own, group, op, 0, strict=True, async_op=True).wait()
    slots = cpu_workspace(group).slot_bytes if world_size > 1 else 0
    return same(first, wanted) and same(again, wanted), slots


def both_ways(world_size: int, n: int) -> list[bool] | None:
    """Whether an all-reduce in one step has the bits of one in two."""
    group = group_of(world_size)
    if group is None:
        return None
    rank, found = dist.get_rank(group), []
    for dtype, op in itertools.product((torch.bfloat16, torch.float32), ("sum", "avg")):
        x = inputs("all_reduce", (n,), world_size, 0, dtype)[rank]
        outs = []
        for limit in (0, 1 << 20):
            with mock.patch.object(cpu_collectives, "ONE_STEP_BYTES", limit):
                outs.append(agmm.collectives.all_reduce(x, group, op=op, strict=True))
        found.append(same(*outs))
    return found


def small_bands(world_size: int, nbytes: int) -> list[str] | None:
    """All of it again through slots of a few numbers: many bands, parts without any number."""
    if group_of(world_size) is None:
        return None
    faults = []
    shapes: list[tuple[int, ...]] = [(1,), (97,), (5, 3)]
    with mock.patch.multiple(cpu_collectives, BAND_BYTES=nbytes, ONE_STEP_BYTES=4, _LEAST_BYTES=4):
        for kind in KINDS:
            faults += values(world_size, kind, shapes, torch.bfloat16) or []
    return faults


def repeated(world_size: int, calls: int, delay_us: int, seed: int = 0) -> list[str] | None:
    """Calls of all kinds with new data, each rank late in turn, alone, in place, in the background,
    and among other ops; after each call what was sent and the slots are NaN."""
    group = group_of(world_size)
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    if world_size == 1:
        return []
    agmm.release(group)  # slots as large as another test's would take longer to fill than a call
    workspace = cpu_workspace(group)
    draw, alone = random.Random(seed), random.Random(rank)  # the same on all ranks, and not
    ranks = torch.arange(float(world_size))
    under_way: list[tuple[int, torch.Tensor, agmm.collectives.Work, torch.Tensor]] = []

    def end(count: int) -> None:
        while len(under_way) > count:
            at, x, work, wanted = under_way.pop(alone.randrange(len(under_way)))
            if not torch.equal(work.wait(), wanted):
                faults.append(f"call {at} in the background on rank {rank} differs")
            x.fill_(torch.nan)

    workspace.set_push_delay_us(delay_us // 10)
    with mock.patch.object(type(workspace), "poison", True):
        for at in range(calls):
            kind, n = draw.choice(KINDS), draw.choice((1, 1, 3, 3, 64, 64, 1001, 20_003))
            in_background, dtype = draw.random() < 0.3, draw.choice((torch.float32, torch.bfloat16))
            if rank == at * world_size // calls and alone.random() < 0.25:
                time.sleep(alone.random() * delay_us * 1e-6)
            base = float(at % 61)  # so that sums of whole numbers are exact
            x = torch.full((n * world_size if kind == "reduce_scatter" else n,), base + rank)
            total = base * world_size + float(sum(range(world_size)))
            wanted = torch.full((n,), total)
            if kind == "all_gather":
                wanted = (base + ranks).repeat_interleave(n)
            x, wanted = x.to(dtype), wanted.to(dtype)
            given = x if kind == "all_reduce" and draw.random() < 0.3 else None
            out = call(kind, x, group, "sum", 0, strict=True, async_op=in_background, out=given)
            if in_background:
                under_way.append((at, x, out, wanted))
                end(4)
                continue
            if not torch.equal(out, wanted):
                faults.append(f"{kind} {at} of {n} {dtype} on rank {rank} differs")
            x.fill_(torch.nan)
            if at % 97 == 3:
                product = agmm.all_gather_matmul(torch.full((2, 3), base), torch.eye(3), group)
                if not torch.equal(product, torch.full((2 * world_size, 3), base)):
                    faults.append(f"product {at} on rank {rank} differs")
        end(0)
    workspace.set_push_delay_us(0)
    return faults[:5]


def with_fault(fault: str, kind: str, calls: int) -> int:
    """How many calls went wrong with a deliberate fault of the protocol, all through one slot,
    which credits alone protect, with delays at random in every rank."""
    torch.use_deterministic_algorithms(True)
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    every = [inputs(kind, (9,), world_size, 0, torch.bfloat16, seed) for seed in range(4)]
    wanted = [wanted_of(kind, each, "sum", 0, rank) for each in every]
    call(kind, every[0][rank], group, "sum", 0, strict=True)
    workspace = cpu_workspace(group)
    if fault != "none":
        os.environ["AGMM_TIMEOUT_S"] = "2"  # from here on, as a busy machine is slow to start
    draw, wrong = random.Random(rank), 0
    workspace.core = _FaultyCore(workspace.core, fault)  # type: ignore[assignment]
    workspace.set_push_delay_us(300)
    with (
        mock.patch.object(workspace, "take_slot", return_value=0),
        mock.patch.object(type(workspace), "poison", True),
    ):
        for i in range(calls):
            if draw.random() < 0.1:
                time.sleep(1e-3 * draw.random())
            out = call(kind, every[i % 4][rank], group, "sum", 0, strict=True)
            wrong += not same(out, wanted[i % 4])
    return wrong


def progress_without_waiting() -> list[bool]:
    """Calls in the background end although nobody waits for them, each way round."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = fresh_group()
    x = torch.arange(50_000.0) + rank
    agmm.collectives.all_reduce(x, group)  # takes the memory
    work = agmm.collectives.all_reduce(x, group, async_op=True)
    deadline = time.monotonic() + 60
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    dist.barrier(group)
    done = work.is_completed()
    late = agmm.collectives.all_gather(x[:3], group, async_op=True)
    was_done = late.is_completed()
    if rank == 1:
        time.sleep(0.2)
        return [done, not was_done or late.is_completed()]
    return [done, late.wait().numel() == 3 * world_size]


def order_of_calls() -> list[float]:
    """A call that follows those in the background has its place behind them."""
    group = fresh_group()
    x = torch.ones(4)
    agmm.collectives.all_reduce(x, group)
    works = []
    for _ in range(5):
        works.append(agmm.collectives.all_reduce(x, group, out=x, async_op=True))
    agmm.collectives.all_reduce(x, group, out=x)
    assert all(work.is_completed() for work in works)
    return x.tolist()


def release_and_end() -> list[str]:
    """Memory that is given back behind calls in the background, and what a group's end leaves."""
    group = dist.new_group(list(range(dist.get_world_size())))
    x = torch.ones(50_000)
    agmm.collectives.all_reduce(x, group)
    works = [agmm.collectives.all_reduce(x, group, async_op=True) for _ in range(4)]
    agmm.release(group)
    assert all(work.is_completed() for work in works)
    agmm.reserve(group, 2 << 20)
    works = [agmm.collectives.all_gather(x, group, async_op=True)]
    faults = [] if works[0].wait().sum() == 50_000 * dist.get_world_size() else ["differs"]
    dist.barrier(group)
    dist.destroy_process_group(group)
    for options in ({}, {"async_op": True}):
        try:
            collectives: Any = agmm.collectives
            collectives.all_reduce(x, group, **options)
        except agmm.InvalidArgument as error:
            faults.append(str(error).partition(",")[0])
    return faults


def threads(count: int, calls: int) -> list[str]:
    group = fresh_group()
    world_size, faults = dist.get_world_size(), []
    x = torch.ones(100)

    def work() -> None:
        try:
            for i in range(calls):
                out = agmm.collectives.all_reduce(x, group, async_op=i % 2 == 0)
                out = out.wait() if isinstance(out, agmm.collectives.Work) else out
                if not torch.equal(out, x * world_size):
                    faults.append("differs")
        except BaseException as error:
            faults.append(repr(error))

    each = [threading.Thread(target=work) for _ in range(count)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    return faults


def gradients(world_size: int, kind: str, op: str, dim: int) -> bool | None:
    group = group_of(world_size)
    if group is None:
        return None
    (shape,) = {x.shape for x in inputs(kind, (2, 3), world_size, dim, torch.float64)}
    leaf = _leaf(world_size, *shape, seed=1)

    def fn(whole: torch.Tensor) -> list[torch.Tensor]:
        own = _OwnPart.apply(whole, group)
        return [_AllParts.apply(call(kind, own, group, op, dim, strict=True), group)]

    return _in_step(fn, [leaf])


def second_gradients(world_size: int) -> list[float] | None:
    """Second gradients of the sum over the ranks of the squares of each result, whose gradient is
    linear in x."""
    group = group_of(world_size)
    if group is None:
        return None
    found = []
    for kind in KINDS:
        x = torch.ones(world_size, dtype=torch.float64, requires_grad=True)
        out = call(kind, x, group, "sum", 0, strict=True)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        found.append(second[0].item())
    return found


def compiled(world_size: int) -> list[bool] | None:
    """Compiled calls of each kind, forward and backward, have the bits of eager ones; without a
    graph break. They share two graphs: one that has gradients, one that is given its results."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    xs = [inputs(kind, (4, 3), world_size, 1, torch.float32)[rank] for kind in KINDS]

    def function(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        both = zip(KINDS, xs, strict=True)
        return [call(kind, x * 2, group, "sum", 1, strict=True).relu() for kind, x in both]

    def given(xs: list[torch.Tensor], outs: list[torch.Tensor]) -> list[torch.Tensor]:
        works: list[agmm.collectives.Work] = [
            call(kind, x, group, "sum", 1, strict=True, out=out, async_op=True)
            for kind, x, out in zip(KINDS, xs, outs, strict=True)
        ]
        return [work.wait() + 1 for work in works]

    torch.compiler.reset()
    leaves = [x.clone().requires_grad_() for x in xs]
    outs = [torch.compile(function, fullgraph=True)(leaves), function(leaves)]
    grads = [torch.autograd.grad([out.square().sum() for out in each], leaves) for each in outs]
    receivers = [[torch.zeros_like(out) for out in outs[1]] for _ in range(2)]
    sums = [torch.compile(given, fullgraph=True)(xs, receivers[0]), given(xs, receivers[1])]
    torch.compiler.reset()
    pairs = (outs, grads, sums, receivers)
    return [same(*of_kind) for pair in pairs for of_kind in zip(*pair, strict=True)]


def by_torch(world_size: int) -> dict[str, Any] | None:
    """What torch does for types that agmm does not sum."""
    group = group_of(world_size)
    if group is None:
        return None
    rank, good, caught = dist.get_rank(group), [], []
    forget_warnings()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for kind, dtype in itertools.product(KINDS, (torch.int32, torch.int64)):
            every = inputs(kind, (5,), world_size, 0, dtype)
            wanted = wanted_of(kind, every, "sum", 0, rank)
            given = torch.zeros_like(wanted)
            good.append(same(call(kind, every[rank], group, "sum", 0), wanted))
            work = call(kind, every[rank], group, "sum", 0, async_op=True, out=given)
            good.append(work.wait() is given and same(given, wanted) and work.is_completed())
    caught = [str(warning.message) for warning in seen]
    try:
        agmm.collectives.all_reduce(torch.ones(2, dtype=torch.int32), group, strict=True)
    except agmm.Unsupported as error:
        caught.append(str(error))
    return {"good": all(good), "caught": caught}


def types_that_are_moved(world_size: int) -> list[str] | None:
    group = group_of(world_size)
    if group is None:
        return None
    faults = []
    rank = dist.get_rank(group)
    for dtype in (torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn, torch.uint8):
        for path in (paths.Path(paths.SHARED_MEMORY, ""), paths.Path(paths.TORCH, "a test", True)):
            every = [(torch.arange(5) + 7 * r).remainder(3).to(dtype) for r in range(world_size)]
            with mock.patch("agmm.collectives.run.choose", return_value=path):
                out = agmm.collectives.all_gather(every[rank], group)
            if not same(out, torch.cat(every)):
                faults.append(f"{dtype} by {path.by}")
    return faults


def torchs_with_all(world_size: int) -> list[str] | None:
    """Everything again by torch's collective."""
    if group_of(world_size) is None:
        return None
    path = paths.Path(paths.TORCH, "a test", is_choice=True)
    faults = []
    with (
        mock.patch("agmm.collectives.run.choose", return_value=path),
        mock.patch("agmm.collectives.run.leave_to_torch") as left,
    ):
        for kind in KINDS:
            # Whole numbers: gloo sums in an order of its own.
            faults += values(world_size, kind, [(6,), (2, 3), ()], torch.int64, ("sum",)) or []
        assert left.call_count > 0 or world_size == 1
    return faults


def differ(kind: str) -> None:
    """Three good calls, then one in which the two ranks differ."""
    rank = dist.get_rank()
    x = torch.ones(4, 2)
    collectives: Any = agmm.collectives
    collectives.all_reduce(x)
    collectives.all_reduce(torch.ones(1_000_000))  # so that all memory is there
    agmm.all_gather_matmul(x, torch.ones(2, 2))  # and the planner of the group
    if kind == "size":
        collectives.all_gather(torch.ones(4 + rank))
    elif kind == "shape":
        collectives.all_reduce(torch.ones(2 + rank, 3))
    elif kind == "dtype":
        collectives.all_reduce(x.to((torch.float32, torch.bfloat16)[rank]))
    elif kind == "op":
        collectives.reduce_scatter(x, op=("sum", "avg")[rank])
    elif kind == "dim":
        collectives.all_gather(x, dim=rank)
    elif kind == "kind" and rank == 0:
        collectives.all_reduce(x)
    elif kind == "kind":
        collectives.reduce_scatter(x)
    elif kind == "other op" and rank == 0:
        collectives.all_gather(x)
    elif kind == "other op":
        agmm.all_gather_matmul(x, torch.ones(2, 2))
    elif kind == "background":
        collectives.all_gather(torch.ones(4 + rank), async_op=True)
        collectives.all_gather(x, async_op=True)
        collectives.all_gather(x, async_op=True).wait()
    elif kind == "torch":
        collectives.all_reduce(torch.ones(4 + rank, dtype=torch.int32))


def one_is_late(kind: str, late_s: float) -> list[float]:
    """Rank 1 comes late."""
    x = torch.ones(4)
    agmm.collectives.all_reduce(x)
    if dist.get_rank() == 1:
        time.sleep(late_s)
    if kind == "background":
        return agmm.collectives.all_reduce(x, async_op=True).wait().tolist()
    if kind == "torch":
        return agmm.collectives.all_reduce(x.int()).tolist()
    return agmm.collectives.all_reduce(x).tolist()


def ends_with_work_under_way() -> tuple[int, str]:
    """A process that comes to its end while a call in the background waits for a rank which never
    comes."""
    script = (
        "import sys, time\n"
        "import torch, torch.distributed as dist\n"
        "import agmm\n"
        "rank = int(sys.argv[1])\n"
        "dist.init_process_group('gloo', init_method='file://' + sys.argv[2], rank=rank,"
        " world_size=2)\n"
        "agmm.collectives.all_reduce(torch.ones(4))\n"
        "if rank == 1:\n"
        "    agmm.collectives.all_reduce(torch.ones(4), async_op=True)\n"
        "    time.sleep(0.2)\n"
        "    print('at its end', flush=True)\n"
        "else:\n"
        "    time.sleep(30)\n"
    )
    path = f"/tmp/agmm-ends-{os.getpid()}-{time.monotonic_ns()}"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        out, _ = both[1].communicate(timeout=25)
        return both[1].returncode, out
    finally:
        for process in both:
            process.kill()
            process.communicate()
        if os.path.exists(path):
            os.unlink(path)


def with_little_room() -> dict[str, Any]:
    """A call for which rank 1 has no room for larger slots."""
    import resource

    forget_warnings()
    group = fresh_group()
    world_size = dist.get_world_size()
    good = [torch.equal(agmm.collectives.all_reduce(torch.ones(9), group), torch.ones(9) * 2)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    x = torch.ones(1_000_000)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for in_background in (False, True):
                out: Any = agmm.collectives.all_reduce(x, group, async_op=in_background)
                out = out.wait() if in_background else out
                good.append(torch.equal(out, x * world_size))
            out = agmm.collectives.all_reduce(x[:9], group, strict=True)
            good.append(torch.equal(out, x[:9] * world_size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return {"good": all(good), "caught": [str(warning.message) for warning in seen]}
