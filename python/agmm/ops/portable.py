"""The portable path of ops on CUDA: which calls take it, and how they multiply their pieces.

CPU ranks have it by nature: their backend multiplies each chunk by the library as it comes, and
makes products for other ranks in ring order, the own one last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm import _core, _env
from agmm.ops.pipeline import LIBRARY, PORTABLE, OpCall, Route
from agmm.planning import call_plans
from agmm.planning.legality import PORTABLE_ROWS
from agmm.planning.problems import portable_pieces
from agmm.runtime import capabilities, cuda_hosts, groups, hosts, symmetric, workspaces
from agmm.runtime.calls import Call
from agmm.runtime.cuda_hosts import CudaHosts
from agmm.runtime.cuda_portable import PortableGather, PortableScatter
from agmm.runtime.hosts import CpuHosts
from agmm.runtime.rank_sums import Total
from agmm.runtime.results import moved, reshaped
from agmm.runtime.scaled import Scaled

Gathers = PortableGather | CudaHosts | CpuHosts
"""What gathers pieces beside products."""
Scatters = PortableScatter | CudaHosts | CpuHosts
"""What scatters products beside later ones."""


def gathers(group: dist.ProcessGroup, device: torch.device, call: Call) -> Gathers:
    """What gathers for a call of the group. Collective at first use.

    Raises:
        Unsupported: the ranks share no memory, and have no backend that takes their messages; all
            ranks raise.
    """
    return _between_hosts(group, device, call) or workspaces.portable_gathers(group, device)


def scatters(group: dist.ProcessGroup, device: torch.device, call: Call) -> Scatters:
    """What scatters for a call of the group. Collective and raises as `gathers`."""
    return _between_hosts(group, device, call) or workspaces.portable_scatters(group, device)


def _between_hosts(
    group: dist.ProcessGroup, device: torch.device, call: Call
) -> CudaHosts | CpuHosts | None:
    """What serves ranks that do not all share memory, or None."""
    if device.type == "cpu":
        return CpuHosts(group, call)
    return cuda_hosts.of(group, device) if cuda_hosts.why_apart(group, device) else None


def shares_no_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ranks of a group do not reach each other's memory, the same on all of them: they are
    on several hosts, or their GPUs have no peer access. Collective at first use."""
    if hosts.spans(group):
        return True
    if device.type != "cuda" or group.size() == 1:
        return False
    return cuda_hosts.why_apart(group, device) not in (None, cuda_hosts.CAPTURED)


def why_not(call: OpCall[Any]) -> str | None:
    """The reason why copies between the GPUs cannot serve a call that the library can multiply, or
    None. The same on all ranks, and collective at a group's first use."""
    size, device = call.group.size(), call.device
    if device.type != "cuda":
        return f"device: found {device}, wanted cuda or cpu"
    if size == 1:
        return "group: 1 rank, which has nothing to send"
    of_ranks, most = groups.of(call.group).hosts(), _core.MAX_COLLECTIVE_RANKS
    largest = max(map(of_ranks.count, of_ranks))
    if largest > most:
        return f"group: {largest} ranks on a host, the portable path wants at most {most}"
    return symmetric.why_group_unfused(call.group, device, capabilities.COLLECTIVES)


def route(call: OpCall[Any], why_not_op: str | None, *, lasts: bool) -> Route:
    """The route of a call on GPUs that was asked to take the portable path.

    Args:
        why_not_op: why the op itself has no such path for the call, or None.
        lasts: whether later calls of the same kind take the same route.
    """
    reason = why_not_op or why_not(call)
    return Route(LIBRARY, reason) if reason else Route(PORTABLE, lasts=lasts)


def instead(call: OpCall[Any]) -> Route | None:
    """The route of a call on GPUs of which one has no kernel for matmuls; None for others, and for
    those that go unfused."""
    if call.device.type != "cuda" or not _are_enough(call):
        return None
    reason = symmetric.why_group_unfused(call.group, call.device)
    if reason is None or why_not(call) is not None:
        return None
    if cuda_hosts.why_apart(call.group, call.device) is not None:
        return None  # messages have to be asked for, until a GPU has shown what they gain
    return Route(PORTABLE, reason, lasts=call.lasts_by_copies())


def by_messages(call: OpCall[Any]) -> Route | None:
    """The route of a call whose ranks share no memory, where AGMM_MESSAGES asks for messages; None
    for others. The same on all ranks, and collective at a group's first use."""
    if call.group.size() == 1 or not _are_enough(call):
        return None
    groups.of(call.group).hosts()  # which finds ranks that were asked otherwise
    if not _env.is_on(_env.MESSAGES):
        return None
    call_plans.agree(call.group, call.device)
    if not shares_no_memory(call.group, call.device):
        return None
    if call.device.type == "cpu":
        return Route(PORTABLE, lasts=False)
    return None if why_not(call) else Route(PORTABLE, lasts=call.lasts_by_copies())


def _are_enough(call: OpCall[Any]) -> bool:
    """Whether a call has the rows that it wants to take the portable path without being asked."""
    rows = call.rows_by_copies()
    return rows is not None and (rows >= PORTABLE_ROWS or call.strict)


class ReadyGather(NamedTuple):
    """An all-gather + matmul for any tensors of one kind."""

    workspace: Gathers
    pieces: int
    return_A: bool
    words: str

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor | None, None, list[torch.Tensor]]:
        """Gather A_shard [M_local, ..., K] and multiply it by each weight. Collective."""
        own = A_shard.reshape(-1, A_shard.shape[-1]).contiguous()
        front = (self.workspace.world_size * A_shard.shape[0], *A_shard.shape[1:-1])
        outs = [own.new_empty(self.workspace.world_size * len(own), B.shape[1]) for B in Bs]

        def multiply(rows: slice, a: torch.Tensor, _: Any) -> None:
            for B, bias, out in zip(Bs, biases, outs, strict=True):
                # The results go into given memory, since autocast leaves such calls alone.
                if bias is None:
                    torch.mm(a, B, out=out[rows])
                else:
                    torch.addmm(bias, a, B, out=out[rows])

        A, _ = _gathered(self, [own], multiply)
        outs = [reshaped(out, (*front, out.shape[1])) for out in outs]
        return reshaped(A, (*front, A.shape[-1])) if self.return_A else None, None, outs


class ReadyScaledGather(NamedTuple):
    """An all-gather + matmul of one shard with its scales."""

    workspace: Gathers
    pieces: int
    return_A: bool
    words: str
    columns: Sequence[tuple[int, torch.dtype]]
    """N and the dtype of each product."""
    products: Callable[[Scaled], list[torch.Tensor]]
    """Makes the products of some rows."""

    def __call__(self, shard: Scaled) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """A, its scales and the products, as matrices of rows. Collective."""
        values, m = shard.values, self.workspace.world_size * len(shard.values)
        outs = [values.new_empty(m, n, dtype=dtype) for n, dtype in self.columns]

        def multiply(rows: slice, a: torch.Tensor, scale: torch.Tensor) -> None:
            for out, product in zip(outs, self.products(Scaled(a, scale, shard.tile)), strict=True):
                out[rows] = product

        A, scales = _gathered(self, [values, shard.scale.contiguous()], multiply)
        return A, scales, outs


def _gathered(
    ready: ReadyGather | ReadyScaledGather,
    parts: list[torch.Tensor],
    multiply: Callable[[slice, torch.Tensor, Any], None],
) -> tuple[torch.Tensor, Any]:
    """The parts of all ranks, of which A's rows are multiplied as they come; None for scales that
    there are not. Own parts are there only where A is returned."""
    workspace, own = ready.workspace, parts[0]
    wholes = [part.new_empty(workspace.world_size, *part.shape) for part in parts]

    def consume(source: int, cut: slice, come: list[torch.Tensor]) -> None:
        first = source * len(own)
        multiply(slice(first + cut.start, first + cut.stop), come[0], (*come, None)[1])

    workspace.gather(
        *(parts, wholes, consume),
        pieces=ready.pieces,
        keeps_own=ready.return_A,
        words=ready.words,
    )
    A, scales = (*(whole.flatten(0, 1) for whole in wholes), None)[:2]
    assert A is not None
    return A, scales


class ReadyScatter(NamedTuple):
    """A matmul + reduce-scatter for any tensors of one kind."""

    workspace: Scatters
    dim: int
    divisor: int
    words: str

    def __call__(
        self,
        As: Sequence[torch.Tensor],
        Bs: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply, sum over the products and the ranks, and scatter along `dim`. Collective."""
        fronts = [A.movedim(self.dim, 0) for A in As]
        matrices = [A.reshape(-1, A.shape[-1]) for A in fronts]
        if residual is not None:
            residual = residual.movedim(self.dim, 0).reshape(-1, residual.shape[-1])
        rows = len(matrices[0]) // self.workspace.world_size
        out = matrices[0].new_empty(rows, Bs[0].shape[1])

        def product(owner: int, into: torch.Tensor) -> None:
            cut = slice(owner * rows, (owner + 1) * rows)
            for i, (A, B) in enumerate(zip(matrices, Bs, strict=True)):
                if i == 0:
                    torch.mm(A[cut], B, out=into)
                else:
                    torch.addmm(into, A[cut], B, out=into)

        total = Total(self.divisor, bias, residual)
        scattered(self.workspace, out, out.dtype, product, total, self.words)
        front = fronts[0].shape
        shape = front[0] // self.workspace.world_size, *front[1:-1], out.shape[1]
        return moved(reshaped(out, shape), 0, self.dim)


def scattered(
    workspace: Scatters,
    out: torch.Tensor,
    sent_dtype: torch.dtype,
    product: Callable[[int, torch.Tensor], None],
    total: Total,
    words: str,
) -> None:
    """Write this rank's rows of the sum over the ranks to ``out``. Collective.

    Args:
        sent_dtype: of the products.
        product: writes the product for a rank, the first argument, to the second.
    """
    like = out.new_empty(1, 1, dtype=sent_dtype).expand(out.shape)
    workspace.scatter(
        *(like, product, lambda come: total(come, out)),
        what=f", divided by {total.divisor}",
        words=words,
    )


def pieces_of(rows: int, asked: int) -> int:
    """The number of pieces of a shard of so many rows: as many as a plan says, if more than 1."""
    return min(rows, asked) if asked > 1 else portable_pieces(rows)
