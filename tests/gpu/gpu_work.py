"""What the work of the GPU tests inside the ranks shares: groups, data, and calls whose results are
compared exactly. Work of a rank that is not in the group returns None."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import agmm
from agmm import _core
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import LocalShape
from agmm.runtime.workspaces import (
    collectives_workspace,
    combine_workspace,
    cuda_workspace,
    dispatch_workspace,
    gather_copies,
    scatter_copies,
    scatter_workspace,
)
from agmm.testing.reference import allowed_error, gathered_product, relative_error

Faults = list[str] | None
_NAN_BYTE = 0xFF
SLOT_BYTES = 64 << 20
"""Large enough for every shape of the tests but the one that grows the workspace."""
ROWS_BYTES = 64 << 20
"""What no case of dispatched rows exceeds."""
PART_BYTES = 8 << 20
"""The bytes of what ranks send each other in a scatter."""
COPY_SLOT_BYTES = 4 << 20
"""The slots' bytes in the tests that send by copy engines."""
WAYS = {
    "planned": (False, ""),
    "planned-A": (True, ""),
    "push": (False, "push"),
    "push-A": (True, "push"),
    "pull": (True, "pull"),
    "sm": (False, "sm4x64"),
    "sm-A": (True, "sm16x128+1"),
    "sm-ctas": (False, "sm64x64h4"),
    "split": (False, "push"),
    "sm-split-A": (True, "sm8x64"),
}
"""Whether A is returned, and the transport; "" for the planned one, which depends on the shape."""
ALL_WAYS = tuple(WAYS)
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def config_of(way: str) -> str | None:
    """What to call with: a kernel that goes with every transport, or one that splits K; None: the
    planned one."""
    _, transport = WAYS[way]
    if not transport:
        return None
    kernels = kernels_of(ALL_GATHER_MATMUL, "bfloat16")
    if "split" in way:  # in a build without such a kernel it is the transport alone
        kernels = tuple(replace(k, splits=2) for k in kernels if k.can_split) or kernels
    return f"{kernels[0].name}/{transport}"


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of these global ranks; None in the other ranks. Collective over all ranks."""
    if not _groups:
        _make_groups()
    return _groups[ranks] if dist.get_rank() in ranks else None


def _make_groups() -> None:
    """Every group of the tests, and their workspaces, the larger ones first.

    torch's rendezvous needs ranks that have taken part in equally many before.
    """
    everyone = dist.get_world_size()
    for ranks in [last_ranks(size) for size in range(everyone, 0, -1)]:
        _groups[ranks] = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            cuda_workspace(_groups[ranks], device()).ensure(SLOT_BYTES)
            scatter_workspace(_groups[ranks], device()).ensure(PART_BYTES)
            gather_copies(_groups[ranks], device()).ensure(COPY_SLOT_BYTES)
            scatter_copies(_groups[ranks], device()).ensure(COPY_SLOT_BYTES)
            collectives_workspace(_groups[ranks], device()).ensure(1)
            if len(ranks) > 1:
                dispatch_workspace(_groups[ranks], device()).ensure(ROWS_BYTES)
                combine_workspace(_groups[ranks], device()).ensure(ROWS_BYTES)


def last_ranks(world_size: int) -> tuple[int, ...]:
    """The last ones, so that ranks in the group differ from the global ones."""
    everyone = dist.get_world_size()
    return tuple(range(everyone - world_size, everyone))


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def poison(group: dist.ProcessGroup) -> None:
    """Fill the gather buffers with NaN while no rank of the group is using them."""
    if dist.get_world_size(group) == 1:
        return
    buffers = cuda_workspace(group, device()).buffers
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    if buffers is not None:
        size = _core.CudaWorkspace.words_offset(buffers.core.slot_bytes, dist.get_world_size(group))
        buffers.memory[:size].fill_(_NAN_BYTE)
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device()).to(dtype)


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small whole numbers: sums of a few thousand products are exact in float32."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator, device=device()).to(torch.bfloat16)


def poison_freed_memory(nbytes: int) -> None:
    """Leave NaN in the allocator's free blocks, where the next outputs come from."""
    torch.full((nbytes // 2 + 512,), torch.nan, dtype=torch.bfloat16, device=device())


@contextmanager
def never_waits() -> Iterator[None]:
    """Raises RuntimeError where torch makes the host wait for the device. torch warns that it does
    not see all of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def fault(
    label: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None
) -> list[str]:
    reference = gathered_product(A, B, bias)
    plain = torch.mm(A, B) if bias is None else torch.addmm(bias, A, B)
    error = relative_error(out, reference)
    allowed = allowed_error(relative_error(plain, reference))
    return [] if error <= allowed else [f"{label}: error {error:.3g}, allowed {allowed:.3g}"]


class ExactCalls:
    """Calls whose data changes every time and whose results are compared on the GPU, exactly."""

    def __init__(self, group: dist.ProcessGroup, shape: LocalShape, seed: int = 0) -> None:
        self.group, self.shape = group, shape
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.B = integers((shape.N, shape.K), 1 + seed + self.rank).t()
        self.A = integers((self.world_size * shape.M_local, shape.K), seed)
        self.shard = self.A[self.rank * shape.M_local : (self.rank + 1) * shape.M_local].clone()
        self.wrong = torch.zeros((), dtype=torch.int64, device=device())

    def new_data(self) -> None:
        """Changes A alike on all ranks, with no communication."""
        self.A.copy_(self.A.roll(1, 0))
        self.A.mul_(-1)
        rows = self.shape.M_local
        self.shard.copy_(self.A[self.rank * rows : (self.rank + 1) * rows])

    def product(self, way: str) -> tuple[torch.Tensor | None, torch.Tensor]:
        op: Callable[..., Any] = agmm.all_gather_matmul
        return_A, _ = WAYS[way]
        config = config_of(way)
        found = op(self.shard, self.B, self.group, return_A=return_A, config=config, strict=True)
        return found if return_A else (None, found)

    def call(self, way: str) -> None:
        self.compare(*self.product(way))

    def compare(self, gathered: torch.Tensor | None, out: torch.Tensor) -> None:
        self.wrong += torch.ne(out, torch.mm(self.A, self.B)).sum()
        if gathered is not None:
            self.wrong += (gathered != self.A).sum()

    def faults(self, label: str) -> list[str]:
        torch.cuda.synchronize()
        wrong = int(self.wrong)
        return [] if wrong == 0 else [f"{label}: {wrong} wrong elements on rank {self.rank}"]


def small_call(group: dist.ProcessGroup, way: str, width: int = 512) -> None:
    ExactCalls(group, LocalShape(64, 64, width)).call(way)


def everyone() -> dist.ProcessGroup:
    group = group_of(tuple(range(dist.get_world_size())))
    assert group is not None
    return group


def wait_for_the_end() -> None:
    torch.cuda.synchronize()
    threading.Event().wait(60)
