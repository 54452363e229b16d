"""What the tests of matmul + reduce-scatter in the CPU workspace run inside the ranks of a pool."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import rank_work
import torch
import torch.distributed as dist

from agmm.errors import AgmmError
from agmm.runtime import cpu, cpu_scatter, cpu_summands
from agmm.runtime.calls import Call
from agmm.runtime.cpu_scatter import plain_sum
from agmm.testing.reference import relative_error

CALL = Call("a scatter of the tests")
_SUM_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_Shape = tuple[int, int, int]  # rows per rank, N, K


def _random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def operands(
    shape: _Shape, rank: int, world_size: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [M, K] and B [K, N] of a rank."""
    m_local, n, k = shape
    own = 1000 * seed + 10 * rank
    return _random((world_size * m_local, k), dtype, own), _random((k, n), dtype, own + 1)


def in_order(
    parts: list[torch.Tensor], own: int, dtype: torch.dtype, divisor: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """The sum as it is defined: all parts rounded but the own one (-1: all), in the order of the
    ranks, then divided, then the bias, then rounded."""
    wide = _SUM_DTYPES.get(dtype, dtype)
    parts = [p if i == own else p.to(dtype).to(wide) for i, p in enumerate(parts)]
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    total = total / divisor
    return (total if bias is None else total + bias.to(wide)).to(dtype)


def products(
    world_size: int,
    shapes: list[_Shape],
    dtype: torch.dtype,
    *,
    chunks_per_shard: int = 1,
    reduce_op: str = "sum",
    bias: bool = False,
    pairs: int = 1,
) -> list[str] | None:
    """Faults found, in words; None in ranks that are not in the group."""
    workspace = rank_work.workspace_of(world_size, chunks_per_shard)
    if workspace is None:
        return None
    rank, faults = workspace.rank, []
    divisor = world_size if reduce_op == "avg" else 1
    wide = _SUM_DTYPES.get(dtype, dtype)
    for seed, shape in enumerate(shapes):
        every = [
            [operands(shape, r, world_size, dtype, 100 * seed + i) for i in range(pairs)]
            for r in range(world_size)
        ]
        b = _random(shape[1:2], dtype, seed + 5) if bias else None
        As = [A.t().contiguous().t() if i % 2 else A for i, (A, _) in enumerate(every[rank], seed)]
        Bs = [B if i % 2 else B.t().contiguous().t() for i, (_, B) in enumerate(every[rank], seed)]
        out = workspace.reduce_scatter(
            plain_sum(As, Bs, b), reduce_op, CALL, pieces=chunks_per_shard
        )
        own = slice(rank * shape[0], (rank + 1) * shape[0])

        def of_ranks(
            kind: torch.dtype, every: list[list[tuple[torch.Tensor, torch.Tensor]]], own: slice
        ) -> list[torch.Tensor]:
            return [
                torch.stack([A[own].to(kind) @ B.to(kind) for A, B in of_rank]).sum(0)
                for of_rank in every
            ]

        exact = torch.stack(of_ranks(torch.float64, every, own)).sum(0) / divisor
        exact = exact if b is None else exact + b.double()
        plain = in_order(of_ranks(wide, every, own), -1, dtype, divisor, b)
        # Where there are few numbers, the last rounding says more than those of the parts; and in
        # float32 and wider these are not rounded, and no sum is more exact than the other.
        few = out.numel() < 5000 or dtype == wide
        error, allowed = relative_error(out, exact), relative_error(plain, exact)
        allowed = max(allowed, 8 * torch.finfo(dtype).eps) if few else allowed
        if not error <= allowed or out.dtype != dtype:
            label = f"{shape} {dtype} on rank {rank} of {world_size}"
            faults.append(f"{label}: error {error}, allowed {allowed}, {out.dtype}")
    return faults


def bits(
    world_size: int, shape: _Shape, dtype: torch.dtype, reduce_op: str, bias: bool
) -> bool | None:
    """Whether a result has the very bits of its definition. For K = 1, whose products are exact in
    the sums' type, so that no library's order of summation matters."""
    workspace = rank_work.workspace_of(world_size, 2)
    if workspace is None:
        return None
    rank, wide = workspace.rank, _SUM_DTYPES[dtype]
    every = [operands(shape, r, world_size, dtype, 3) for r in range(world_size)]
    b = _random(shape[1:2], dtype, 5) if bias else None
    A, B = every[rank]
    out = workspace.reduce_scatter(plain_sum([A], [B], b), reduce_op, CALL, pieces=2)
    own = slice(rank * shape[0], (rank + 1) * shape[0])
    parts = [A[own].to(wide) @ B.to(wide) for A, B in every]
    divisor = world_size if reduce_op == "avg" else 1
    wanted = in_order(parts, rank, dtype, divisor, b)
    # The test would see it if the own part were rounded, or if the order were another.
    assert world_size == 1 or not torch.equal(wanted, in_order(parts, -1, dtype, divisor, b))
    return torch.equal(out, wanted)


def in_bands(world_size: int, rows: list[int]) -> list[tuple[bool, int]] | None:
    """On a fresh workspace, whether each sum is right, and the size of its slots after it."""
    group = rank_work.group_of(world_size)
    if group is None:
        return None
    torch.use_deterministic_algorithms(True)
    workspace = rank_work.PoisonedWorkspace.create(group, 0, chunks_per_shard=3)
    found = []
    for seed, m_local in enumerate(rows):
        generator = torch.Generator().manual_seed(seed)
        A = torch.randint(-8, 9, (world_size * m_local, 2), generator=generator).float()
        B = torch.randint(-8, 9, (2, 3), generator=generator).float()
        weight = 1.0 + workspace.rank
        out = workspace.reduce_scatter(plain_sum([A], [weight * B], None), "sum", CALL, pieces=3)
        weights = world_size * (world_size + 1) / 2
        own = A[workspace.rank * m_local : (workspace.rank + 1) * m_local]
        found.append((torch.equal(out, weights * (own @ B)), workspace.slot_bytes))
    workspace.close()
    return found


@cache  # they take longer than a call
def _of_a_step(
    rank: int, world_size: int, dtype: torch.dtype, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return operands((5, 9, 33), rank, world_size, dtype, kind)


def _step(
    workspace: cpu.CpuWorkspace,
    kind: int,
    dtype: torch.dtype,
    As: list[torch.Tensor],
    pieces: int,
) -> torch.Tensor:
    """A call of one of several kinds of data, each of which has the same in every call."""
    A, B = _of_a_step(workspace.rank, workspace.world_size, dtype, kind)
    As[0].copy_(A)
    op = "avg" if kind % 2 else "sum"
    out = workspace.reduce_scatter(plain_sum(As, [B], None), op, CALL, pieces=pieces)
    As[0].fill_(torch.nan)
    return out


def repeated(
    world_size: int, calls: int, chunks_per_shard: int, delay_us: int, dtype: torch.dtype
) -> list[str] | None:
    """Calls whose data changes in between, each rank late in turn, gathers among them."""
    workspace = rank_work.workspace_of(world_size, chunks_per_shard)
    if workspace is None:
        return None
    kinds = 5
    As = [torch.empty(5 * world_size, 33, dtype=dtype)]
    wanted = [_step(workspace, kind, dtype, As, chunks_per_shard) for kind in range(kinds)]
    draw, faults = random.Random(workspace.rank), []
    try:
        for step in range(calls):
            is_slow = workspace.rank == step * world_size // calls
            if step % 16 == 0:
                workspace.set_push_delay_us(delay_us if is_slow else 0)
            if is_slow and step % 4 == 0:
                time.sleep(draw.random() * delay_us * 1e-6)
            if step % 7 == 3:
                shard = torch.full((2, 3), float(step + workspace.rank))
                A, _ = workspace.all_gather_matmul(shard, [], [], return_A=True)
                ranks = torch.arange(float(world_size)).repeat_interleave(2)[:, None]
                if A is None or not torch.equal(A, (step + ranks).expand(-1, 3)):
                    faults.append(f"gather {step} on rank {workspace.rank} differs")
            kind = step % kinds
            out = _step(workspace, kind, dtype, As, chunks_per_shard)
            if not torch.equal(out.view(torch.uint8), wanted[kind].view(torch.uint8)):
                faults.append(f"call {step} on rank {workspace.rank} has other bits")
    finally:
        workspace.set_push_delay_us(0)
    return faults


def after(kind: str) -> tuple[str, str]:
    """What a call says that ends half-way on every rank, and what the next one says."""
    group = rank_work.group_of(rank_work.POOL_SIZE)
    assert group is not None
    workspace = cpu.CpuWorkspace.create(group, 4096)
    A, B = torch.ones(10, 2), torch.ones(2, 3)
    effects = {"interrupted": KeyboardInterrupt, "failed": RuntimeError("no such product")}
    errors = []
    for effect in (effects[kind], None):
        broken = mock.patch.object(cpu_summands.Summands, "product", side_effect=effect)
        try:
            with broken:
                workspace.reduce_scatter(plain_sum([A], [B], None), "sum", CALL)
        except (KeyboardInterrupt, RuntimeError) as error:
            errors.append(repr(error))
    workspace.close()
    return errors[0], errors[1]


def without_memory() -> tuple[str, list[float]]:
    """A call that cannot have its own memory, on every rank, and what a fresh workspace returns."""
    group = rank_work.group_of(rank_work.POOL_SIZE)
    assert group is not None
    A, B = torch.ones(10, 2), torch.ones(2, 1)
    workspace = cpu.CpuWorkspace.create(group, 4096)
    with mock.patch.object(cpu_scatter, "Summands", side_effect=MemoryError("none left")):
        try:
            workspace.reduce_scatter(plain_sum([A], [B], None), "sum", CALL)
            said = "no error"
        except MemoryError as error:
            said = str(error)
    try:
        workspace.reduce_scatter(plain_sum([A], [B], None), "sum", CALL)
    except AgmmError as error:
        said += f"; {error}"
    workspace.close()
    workspace = cpu.CpuWorkspace.create(group, 4096)
    out = workspace.reduce_scatter(plain_sum([A], [B], None), "sum", CALL)
    workspace.close()
    return said, out.view(-1).tolist()


def call_forever() -> None:
    """Calls without end in the default group, for a rank to be killed in the middle."""
    group = dist.group.WORLD
    assert group is not None
    workspace = cpu.CpuWorkspace.create(group, 4096)
    A, B = torch.ones(12, 64), torch.ones(64, 4)
    while True:
        workspace.reduce_scatter(plain_sum([A], [B], None), "sum", CALL)


def call_with_own(kind: str) -> None:
    """A good call, then one in which the two ranks differ."""
    group = dist.group.WORLD
    assert group is not None
    workspace = cpu.CpuWorkspace.create(group, 4096)
    is_other = dist.get_rank() == 1

    def scatter(rows: int = 4, n: int = 3, dtype: torch.dtype = torch.float32) -> None:
        A, B = torch.ones(rows, 2, dtype=dtype), torch.ones(2, n, dtype=dtype)
        op = "avg" if kind == "reduce_op" and is_other else "sum"
        workspace.reduce_scatter(plain_sum([A], [B], None), op, CALL)

    scatter()
    if kind == "rows":
        scatter(rows=6 if is_other else 4)
    elif kind == "large rows":
        scatter(rows=600_000 if is_other else 4)
    elif kind == "N":
        scatter(n=2 + is_other)
    elif kind == "dtype":
        scatter(dtype=torch.float64 if is_other else torch.float32)
    elif kind == "op" and is_other:
        workspace.all_gather_matmul(torch.ones(4, 2), [torch.ones(2, 3)], [None], return_A=False)
    else:
        scatter()


class _FaultyCore:
    """The core of a workspace with a deliberate fault of the protocol."""

    def __init__(self, core: Any, fault: str) -> None:
        object.__setattr__(self, "_core", core)
        object.__setattr__(self, "_fault", fault)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._core, name, value)

    def take_credits(self, slot: int) -> None:
        if self._fault != "no credit":
            self._core.take_credits(slot)

    def send(self, slot: int, owner: int, index: int, piece: int, nbytes: int, *rest: int) -> None:
        if self._fault == "signal before data":
            self._core.send(slot, owner, index, piece, 0, *rest)
        self._core.send(slot, owner, index, piece, nbytes, *rest)

    def wait_chunk(self, slot: int, chunk: int, tag: int) -> None:
        if self._fault != "own rows before the others' sums":
            self._core.wait_chunk(slot, chunk, tag)


def with_fault(fault: str, op: str, calls: int) -> int:
    """How many calls went wrong, all through one slot, which credits alone protect, with delays at
    random in every rank."""
    group = dist.group.WORLD
    assert group is not None
    torch.use_deterministic_algorithms(True)
    workspace = rank_work.PoisonedWorkspace.create(group, 1 << 16)
    rank, world_size, dtype = workspace.rank, workspace.world_size, torch.bfloat16

    def step(kind: int) -> torch.Tensor:
        A, B = operands((3, 9, 5), rank, world_size, dtype, kind)
        if op == "all_reduce":
            return workspace.matmul_all_reduce(A, B, None, CALL)
        return workspace.reduce_scatter(plain_sum([A], [B], None), "sum", CALL)

    wanted = [step(kind) for kind in range(4)]
    draw, wrong = random.Random(rank), 0
    workspace.core = _FaultyCore(workspace.core, fault)  # type: ignore[assignment]
    workspace.set_push_delay_us(300)
    with mock.patch.object(workspace, "take_slot", return_value=0):
        for call in range(calls):
            if draw.random() < 0.1:
                time.sleep(1e-3 * draw.random())
            wrong += not torch.equal(step(call % 4), wanted[call % 4])
    return wrong
