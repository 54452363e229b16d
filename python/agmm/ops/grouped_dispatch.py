"""The exchanges of calls on grouped rows by agmm's own kernels on CUDA: gathers of what is small,
the dispatch of the rows that a rank's experts want, which the grouped matmul takes as they come,
and the sums of what the experts made of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import Unsupported
from agmm.ops import grouped_kernel, small_collectives
from agmm.runtime import capabilities, nan_check, symmetric
from agmm.runtime.cuda_calls import TMA_ALIGNMENT
from agmm.runtime.cuda_dispatch import Dispatched, RowsOfExperts
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.token_exchange import ByBackend
from agmm.runtime.workspaces import combine_workspace, dispatch_workspace


class ByKernels(ByBackend):
    """The exchange of GPUs that reach each other: small gathers by agmm's kernels, the rest by the
    group's backend."""

    def _gathered(self, shard: torch.Tensor) -> torch.Tensor:
        if small_collectives.why_not("all_gather", shard, self.group) is None:
            with suppress(Unsupported):  # nothing was begun, on no rank
                return small_collectives.gather(shard, self.group)
        return super()._gathered(shard)


def why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The reason why agmm's kernels exchange nothing for grouped rows in this group, or None; the
    same on all ranks. Collective at first use."""
    if group.size() > _core.MAX_COLLECTIVE_RANKS:
        return f"group: {group.size()} ranks, wanted at most {_core.MAX_COLLECTIVE_RANKS}"
    return symmetric.why_group_unfused(group, device, capabilities.COLLECTIVES)


def why_not_dispatched(
    row: tuple[int, int],
    counts: Sequence[int],
    positions: torch.Tensor,
    experts: int,
    capacity: int,
) -> str | None:
    """The reason why no dispatch brings rows of tokens, or None; the same on all ranks.

    Args:
        row: the columns and the bytes of a row.
    """
    columns, row_bytes = row
    if row_bytes % TMA_ALIGNMENT:
        return f"x: found rows of {row_bytes} bytes, wanted a multiple of {TMA_ALIGNMENT}"
    most = max(sum(counts), columns)
    return _why_not_moved(most, positions.shape[1], experts, capacity)


def why_not_combined(
    summed: Leaving, size: tuple[int, int], counts: Sequence[int], positions: torch.Tensor
) -> str | None:
    """The reason why no kernel adds up products, or None; the same on all ranks.

    Args:
        size: the rows and columns of a product.
    """
    (capacity, columns), dtype = size, summed.dtype
    row_bytes = columns * dtype.itemsize
    if dtype not in small_collectives.SUMMED:
        return f"y: found dtype {dtype}, wanted {', '.join(map(str, small_collectives.SUMMED))}"
    if len(summed.weights) > _core.MOST_COMBINED_PARTS:
        return (
            f"y: found {len(summed.weights)} products, wanted at most {_core.MOST_COMBINED_PARTS}"
        )
    if row_bytes % TMA_ALIGNMENT:
        return f"weights: found rows of {row_bytes} bytes, wanted a multiple of {TMA_ALIGNMENT}"
    most, experts = max(sum(counts), columns), summed.weights[0].shape[0]
    return _why_not_moved(most, positions.shape[1], experts, capacity)


def _why_not_moved(most: int, choices: int, experts: int, capacity: int) -> str | None:
    if not 1 <= choices <= _core.MOST_CHOICES:
        return f"topk_ids: found {choices} choices, wanted 1 to {_core.MOST_CHOICES}"
    if not 1 <= experts <= _core.MOST_EXPERTS:
        return f"weights: found {experts} experts, wanted 1 to {_core.MOST_EXPERTS}"
    if capacity < 1 or max(most, capacity) > _core.MAX_SIZE:
        return f"capacity: found {capacity}, wanted 1 to {_core.MAX_SIZE} rows, tokens and columns"
    return None


class Made(Protocol):
    """What is made of the rows that a dispatch brings, as `grouped_products.Multiplied`."""

    def products(self, rows: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]: ...
    def matmuls(self, rows: torch.Tensor) -> tuple[list[grouped_kernel.Described], bool] | None: ...

    @property
    def epilogue(self) -> Epilogue | None: ...


class Leaving(Protocol):
    """The products that leave a rank, as `grouped_products.Summed`."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def weights(self) -> Sequence[torch.Tensor]: ...
    def on_gpu(self, offsets: torch.Tensor) -> list[torch.Tensor]: ...
    def matmuls(self) -> list[grouped_kernel.OfRows] | None: ...


def dispatched(
    group: dist.ProcessGroup,
    counts: Sequence[int],
    x: torch.Tensor,
    wanted: RowsOfExperts,
    made: Made,
    *,
    gathers: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The tokens of all ranks, where ``gathers``, and what is made of those that this rank's
    experts want. Collective.

    Raises:
        Unsupported: the GPUs of the group do not reach each other; all ranks raise.
    """
    x = _aligned(x)
    wanted = RowsOfExperts(*(one.to(torch.int32).contiguous() for one in wanted))
    experts, capacity = wanted.offsets.shape[0] - 1, wanted.tokens.shape[0]
    room = Dispatched(
        x.new_empty(capacity, x.shape[1]),
        x.new_empty(sum(counts), x.shape[1]) if gathers else None,
        wanted.tokens.new_empty(2, len(counts) * experts),
    )
    plan = made.matmuls(room.rows)
    workspace = dispatch_workspace(group, x.device)
    if plan is None:
        workspace.dispatch(x, counts, wanted, room)
        return room.gathered, made.products(room.rows, wanted.offsets)
    calls, is_composed = plan
    workspace.dispatch(x, counts, wanted, room, [call.arguments for call in calls])
    outs = [call.out for call in calls]
    if is_composed and made.epilogue is not None:
        outs = made.epilogue.composed(outs)
    return room.gathered, outs


def combined(
    group: dist.ProcessGroup,
    counts: Sequence[int],
    summed: Leaving,
    wanted: RowsOfExperts,
    router: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the sums of the products of each of this rank's tokens on all ranks to ``out``
    [tokens of this rank, N], and return it. Collective.

    Args:
        router: [tokens of this rank, choices] or None for 1.

    Raises:
        Unsupported: the GPUs of the group do not reach each other; all ranks raise.
    """
    wanted = RowsOfExperts(*(one.to(torch.int32).contiguous() for one in wanted))
    factors = None if router is None else router.float().contiguous()
    workspace = combine_workspace(group, out.device)
    calls = None if nan_check.active else summed.matmuls()
    if calls is not None:
        matmuls = [(call.arguments, y.data_ptr(), y.stride(0), scales) for call, y, scales in calls]
        workspace.combine(out, counts, wanted, factors, (), matmuls)
        return out
    rows = summed.on_gpu(wanted.offsets)
    if nan_check.active:
        for one in rows:
            name = "grouped_matmul_reduce_scatter", "y @ weights"
            nan_check.look_through(*name, one, workspace.rank)
    workspace.combine(out, counts, wanted, factors, rows)
    return out


def _aligned(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % TMA_ALIGNMENT else x
