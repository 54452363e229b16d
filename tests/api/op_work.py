"""What the tests of the public API run inside the ranks of a pool of five."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_work import group_of

import agmm
from agmm.errors import forget_warnings
from agmm.planning.shapes import LocalShape
from agmm.runtime import cpu, workspaces
from agmm.testing.reference import allowed_error, gathered_product, relative_error

Result = list[str] | None


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _prepare(world_size: int) -> dist.ProcessGroup | None:
    cpu.CpuWorkspace.poison = True
    torch.use_deterministic_algorithms(True)  # torch.empty fills with NaN
    return group_of(world_size)


def _fault(
    label: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None
) -> list[str]:
    reference = gathered_product(A, B, bias)
    plain = A @ B if bias is None else A @ B + bias
    error = relative_error(out, reference)
    allowed = allowed_error(relative_error(plain, reference))
    if error <= allowed and out.dtype == A.dtype:
        return []
    return [f"{label}: error {error}, allowed {allowed}, {out.dtype}"]


def public_products(
    world_size: int,
    shapes: list[LocalShape],
    dtype: torch.dtype,
    *,
    leading: int | None = None,
    return_A: bool = False,
    weights: int | None = None,
    bias: bool = False,
) -> Result:
    """Faults of `agmm.all_gather_matmul`, in words.

    `leading` is the size of a second dimension of A_shard, `weights` the length of a list of B.
    """
    group = _prepare(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    faults = []
    for seed, shape in enumerate(shapes):
        label = f"{shape} {dtype} on rank {rank} of {world_size}"
        inner = (shape.K,) if leading is None else (leading, shape.K)
        A = _random((world_size * shape.M_local, *inner), dtype, seed)
        shard = A[rank * shape.M_local : (rank + 1) * shape.M_local].clone()
        Bs = [
            _random((shape.N + i, shape.K), dtype, 100 * seed + 10 * rank + i + 1).t()
            for i in range(weights or 1)
        ]
        b = _random((shape.N,), dtype, seed + 7) if bias else None
        op: Callable[..., Any] = agmm.all_gather_matmul
        found = op(
            shard, Bs[0] if weights is None else Bs, group, return_A=return_A, bias=b, strict=True
        )
        shard.fill_(torch.nan)
        if return_A:
            gathered, found = found
            if not torch.equal(gathered, A):
                faults.append(f"{label}: A differs")
        outs = [found] if weights is None else found
        if len(outs) != len(Bs):
            faults.append(f"{label}: {len(outs)} products of {len(Bs)} weights")
        for B, out in zip(Bs, outs, strict=True):
            faults += _fault(label, out, A, B, b)
    return faults


def native_products(world_size: int, shapes: list[LocalShape]) -> Result:
    group = _prepare(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    faults = []
    for seed, shape in enumerate(shapes):
        label = f"{shape} on rank {rank} of {world_size}"
        A = _random((world_size * shape.M_local, shape.K), torch.bfloat16, seed)
        B = _random((shape.K, shape.N), torch.bfloat16, 50 + seed)
        shard = A[rank * shape.M_local : (rank + 1) * shape.M_local].clone()
        gathered, out = torch.ops.agmm._fused_all_gather_matmul_native(shard, B, group.group_name)
        if not torch.equal(gathered, A):
            faults.append(f"{label}: A differs")
        faults += _fault(label, out, A, B, None)
    return faults


def default_group_product() -> Result:
    """The group argument left out."""
    assert _prepare(5) is not None
    rank = dist.get_rank()
    A = _random((10, 8), torch.float32, 1)
    B = _random((8, 3), torch.float32, 2)
    out: Any = agmm.all_gather_matmul(A[2 * rank : 2 * rank + 2].clone(), B, strict=True)
    return _fault(f"rank {rank}", out, A, B, None)


def _exact_call(group: dist.ProcessGroup, step: int, m_local: int, k: int) -> list[str]:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(step)
    A = torch.randint(-8, 9, (world_size * m_local, k), generator=generator).float()
    B = torch.randint(-8, 9, (k, 9), generator=generator).float()
    shard = A[rank * m_local : (rank + 1) * m_local].clone()
    if step % 2:
        gathered, out = agmm.all_gather_matmul(shard, B, group, return_A=True, strict=True)
    else:
        gathered, out = A, agmm.all_gather_matmul(shard, B, group, strict=True)
    shard.fill_(torch.nan)
    good = torch.equal(out, A @ B) and torch.equal(gathered, A)
    return [] if good else [f"call {step} on rank {rank} of {world_size}: differs"]


def calls_with_late_ranks(world_size: int, calls: int) -> Result:
    """Changing data and shapes, each rank late in turn."""
    group = _prepare(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    draw = random.Random(rank)
    faults = []
    for step in range(calls):
        if step * world_size // calls == rank:
            time.sleep(draw.random() * 2e-3)
        faults += _exact_call(group, step, 1 + step % 13, 1 + step % 7)
    return faults


def groups_in_threads(calls: int) -> Result:
    """Two groups with ranks in common, called from two threads at once."""
    groups = [_prepare(5), _prepare(3)]
    faults: list[str] = []

    def work(group: dist.ProcessGroup, m_local: int) -> None:
        try:
            for step in range(calls):
                faults.extend(_exact_call(group, step, m_local, 21))
        except BaseException as e:
            faults.append(repr(e))

    threads = [
        threading.Thread(target=work, args=(group, m_local))
        for group, m_local in zip(groups, (3, 4), strict=True)
        if group is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults


def groups_in_turns(calls: int) -> Result:
    groups = [_prepare(world_size) for world_size in (5, 2, 4)]
    faults = []
    for step in range(calls):
        for m_local, group in enumerate(groups, start=1):
            if group is not None:
                faults += _exact_call(group, step, m_local + step % 3, 5)
    return faults


def call_with_own_rows(rows: list[int]) -> None:
    """Each rank has its own idea of M_local."""
    B = torch.ones(4, 2)
    agmm.all_gather_matmul(torch.ones(1, 4), B)
    agmm.all_gather_matmul(torch.ones(rows[dist.get_rank()], 4), B)


def call_until_killed() -> None:
    shard, B = torch.ones(4, 64), torch.ones(64, 4)
    while True:
        agmm.all_gather_matmul(shard, B)


def workspace_follows_its_group() -> tuple[bool, bool, bool]:
    """Whether it is made once, and open before and closed after its group's end."""
    group = dist.new_group(list(range(5)))
    agmm.all_gather_matmul(torch.ones(1, 2), torch.ones(2, 3), group)
    first = workspaces.cpu_workspace(group)
    agmm.all_gather_matmul(torch.ones(1000, 2), torch.ones(2, 3), group)
    same = first is workspaces.cpu_workspace(group)
    core = first.core
    open_before = core.slot_ptr(0) != 0
    dist.barrier(group)
    dist.destroy_process_group(group)
    del group, first
    gc.collect()
    try:
        core.slot_ptr(0)
    except RuntimeError:
        return same, open_before, True
    return same, open_before, False


def unfused_products(kind: str) -> tuple[list[str], list[str], str]:
    """Faults, warnings of two calls, and the error under strict, where the fused path cannot go."""
    _prepare(5)
    forget_warnings()  # each reason is warned of once in a process
    rank = dist.get_rank()
    A = torch.randint(-8, 9, (10, 20), generator=torch.Generator().manual_seed(3)).double()
    B = torch.randint(-8, 9, (20, 3), generator=torch.Generator().manual_seed(4)).double()
    rows = slice(2 * rank, 2 * rank + 2)
    shard, gather_dim, config = A[rows].clone(), 0, None
    if kind == "gather_dim":
        shard, gather_dim = A[:, 4 * rank : 4 * rank + 4].clone(), 1
    elif kind == "strides":
        shard = A.t().contiguous().t()[rows]
    elif kind == "int":
        shard, A, B = shard.int(), A.int(), B.int()
    elif kind == "config":
        config = "unfused"
    error = ""
    try:
        agmm.all_gather_matmul(shard, B, gather_dim=gather_dim, config=config, strict=True)
    except agmm.Unsupported as e:
        error = str(e)
    faults = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            gathered, out = agmm.all_gather_matmul(
                shard, B, gather_dim=gather_dim, return_A=True, config=config
            )
            if not torch.equal(gathered, A) or not torch.equal(out, A @ B):
                faults.append(f"rank {rank}: differs")
    return faults, [str(warning.message) for warning in caught], error


def bad_call(kind: str) -> str:
    """What `agmm.all_gather_matmul` says to a call that no path can serve."""
    _prepare(5)
    good_shard, good_B = torch.ones(2, 4), torch.ones(4, 3)
    calls: dict[str, dict[str, Any]] = {
        "dtype": {"B": good_B.half()},
        "K": {"B": torch.ones(5, 3)},
        "device": {"B": good_B.to("meta")},
        "B dimensions": {"B": torch.ones(4)},
        "A dimensions": {"A_shard": torch.ones(4)},
        "no weights": {"B": []},
        "gather_dim": {"gather_dim": 2},
        "group": {"group": "no such group"},
        "bias shape": {"bias": torch.ones(4)},
        "bias dtype": {"bias": torch.ones(3).half()},
        "bias count": {"B": [good_B, good_B], "bias": [None]},
        "config": {"config": "no such config"},
    }
    arguments = {"A_shard": good_shard, "B": good_B, **calls[kind]}
    try:
        agmm.all_gather_matmul(**arguments)
    except agmm.InvalidArgument as e:
        return str(e)
    return "no error"


def wait_for_a_signal_that_never_comes() -> None:
    signals = torch.tensor([0, 1], dtype=torch.uint32)
    torch.ops.agmm._async_input_mm(torch.ones(8, 4), torch.ones(4, 4), signals, 1)
